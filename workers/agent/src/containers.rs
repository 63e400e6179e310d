//! What the operator of a node allows the containers of programs: the network, and images that are not
//! in their package.

use std::convert::Infallible;
use std::str::FromStr;

use fiec_schemas::package::{Image, Manifest};

/// The rules of a node. By default a container has no network, and its image is in the package.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Containers {
    /// A manifest may ask for the network.
    pub network: bool,
    /// Where images may come from.
    pub images: Vec<ImagePrefix>,
}

/// The beginning of an image's name, by whole parts, such as `registry.example/team`. `sha256:` stands
/// for images that the node has, by their id; `*` for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePrefix(String);

impl FromStr for ImagePrefix {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.trim_end_matches('/').to_owned()))
    }
}

impl ImagePrefix {
    fn covers(&self, reference: &str) -> bool {
        if self.0 == "*" {
            return true;
        }
        let Some((name, _)) = reference.split_once('@') else {
            return self.0 == "sha256:";
        };
        let Some(rest) = name.strip_prefix(&self.0) else {
            return false;
        };
        // The whole name, with a tag or without, or further parts of it.
        !self.0.is_empty()
            && (rest.is_empty()
                || rest.starts_with('/')
                || rest.starts_with(':') && !rest.contains('/'))
    }
}

impl Containers {
    /// Returns why a program with this manifest cannot run here, for people.
    pub fn refuse(&self, manifest: &Manifest) -> Option<String> {
        let image = manifest.image.as_deref()?;
        if manifest.network && !self.network {
            return Some(
                "its container asks for the network, which this node does not allow (`fiec worker \
                 --allow-network`)"
                    .to_owned(),
            );
        }
        let Ok(Image::Reference(reference)) = Image::parse(image) else {
            return None;
        };
        if self.images.iter().any(|prefix| prefix.covers(reference)) {
            return None;
        }
        let prefix = match reference.split_once('@') {
            Some((name, _)) => name,
            None => "sha256:",
        };
        Some(format!(
            "this node does not allow its image {reference} (`fiec worker --allow-image {prefix}`)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_allowed_by_whole_parts_of_its_name() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let covers = |prefix: &str, name: &str| {
            let prefix: ImagePrefix = prefix.parse().unwrap();
            prefix.covers(&format!("{name}@{digest}"))
        };
        for (prefix, name, is_covered) in [
            ("registry.example/team", "registry.example/team/sum", true),
            ("registry.example/team/", "registry.example/team/sum", true),
            ("registry.example/team", "registry.example/team:1", true),
            (
                "registry.example/team",
                "registry.example/team-2/sum",
                false,
            ),
            ("registry.example", "registry.example.evil/sum", false),
            ("registry.example", "registry.example:5000/sum", false),
            ("registry.example:5000", "registry.example:5000/sum", true),
            ("sum", "sum", true),
            ("", "sum", false),
            ("sha256:", "sum", false),
            ("*", "sum", true),
        ] {
            assert_eq!(covers(prefix, name), is_covered, "{prefix} {name}");
        }
        let id: ImagePrefix = "sha256:".parse().unwrap();
        assert!(id.covers(&digest));
        let named: ImagePrefix = "registry.example".parse().unwrap();
        assert!(!named.covers(&digest));
    }

    #[test]
    fn a_refusal_names_the_option() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let manifest = |image: &str, network: bool| {
            let text = serde_json::json!({"entry": ["./x"], "protocol": "state_dir",
                "image": image, "network": network});
            Manifest::parse(text.to_string().as_bytes()).unwrap()
        };
        let none = Containers::default();
        let named = format!("registry.example/sum@{digest}");
        let refused = |rules: &Containers, image: &str, network| {
            rules.refuse(&manifest(image, network)).unwrap_or_default()
        };
        assert_eq!(refused(&none, "image.tar", false), "");
        assert!(refused(&none, "image.tar", true).contains("--allow-network"));
        assert!(refused(&none, &named, false).contains("--allow-image registry.example/sum"));
        assert!(refused(&none, &digest, false).contains("--allow-image sha256:"));
        let all = Containers {
            network: true,
            images: vec!["*".parse().unwrap()],
        };
        for image in ["image.tar", &named, &digest] {
            assert_eq!(refused(&all, image, true), "");
        }
    }
}
