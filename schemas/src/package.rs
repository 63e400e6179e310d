//! Programs that are not built in: what a package says of itself, how it is registered, and what
//! a program is granted where it runs.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{Digest, Timestamp};
use crate::programs;
use crate::submission::FieldError;

/// File name of a manifest in a package's folder.
pub const MANIFEST_FILE: &str = "fiec.json";
/// Largest artifact in bytes that may be pushed.
pub const ARTIFACT_LIMIT: u64 = 4 << 30;
/// Longest `image` of a manifest, in bytes.
const IMAGE_LIMIT: usize = 512;

/// How a program and FIEC talk. The meaning is the same for all; see `workers/CONTRACT.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// A JSON head and a raw body over a socket that is open already; what the kits speak.
    Frames,
    /// One JSON object a line over the Unix socket named by `FIEC_SOCKET`.
    JsonLines,
    /// One process a capsule, its state in the folder named by `FIEC_STATE_DIR`.
    StateDir,
}

/// What happens when no boundary is reached within `boundary_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnSilence {
    /// The execution fails, with that cause.
    #[default]
    Fail,
    /// A warning is logged, and it goes on.
    Wait,
}

/// Bounds that a program declares for itself; what goes beyond them ends the execution as failed,
/// with the bound named.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Largest σ in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
    /// Longest time between two boundaries, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary_ms: Option<u64>,
    /// What happens beyond `boundary_ms`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_silence: OnSilence,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A package's `fiec.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The command: program and arguments. A first word with a `/` is a path in the package's
    /// folder; one without is looked up in the PATH of the node. It runs in that folder.
    pub entry: Vec<String>,
    /// How it talks.
    pub protocol: Protocol,
    /// The outputs it may make: names, or patterns with `*`. None: it makes none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<String>,
    /// Its bounds.
    #[serde(default, skip_serializing_if = "Limits::is_empty")]
    pub limits: Limits,
    /// Run the entry in this container image: `name@sha256:<64 hex digits>`, `sha256:<64 hex
    /// digits>` (an image id of the node's engine), or the path of an image archive in the package
    /// (`….tar`). A tag is refused: it may name another image on another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Whether a container may use the network.
    #[serde(default, skip_serializing_if = "is_default")]
    pub network: bool,
}

impl Limits {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Manifest {
    /// Reads and checks a manifest.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn parse(text: &[u8]) -> Result<Self, FieldError> {
        let mut reader = serde_json::Deserializer::from_slice(text);
        let manifest: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            // What a missing field or broken JSON has for a path is no name of a field.
            let path = error.path().to_string();
            let field = if matches!(path.as_str(), "." | "?") {
                String::new()
            } else {
                path
            };
            FieldError::new(field, error.inner().to_string())
        })?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks the rules that types cannot say.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        let Some(program) = self.entry.first() else {
            return Err(FieldError::new("entry", "must name a command"));
        };
        if program.is_empty() || self.entry.iter().any(|word| word.contains('\0')) {
            return Err(FieldError::new(
                "entry",
                "must not be empty or contain a NUL",
            ));
        }
        if program.contains('/') && (program.starts_with('/') || climbs(program)) {
            return Err(FieldError::new(
                "entry",
                format!(
                    "{program:?} must stay inside the package's folder; a command without / is \
                     looked up in the node's PATH"
                ),
            ));
        }
        if self.limits.boundary_ms == Some(0) || self.limits.state_bytes == Some(0) {
            return Err(FieldError::new("limits", "must be above 0"));
        }
        if let Some(name) = self
            .outputs
            .iter()
            .find(|name| name.is_empty() || name.starts_with('/') || climbs(name))
        {
            return Err(FieldError::new(
                "outputs",
                format!("{name:?} is no name or pattern of an output"),
            ));
        }
        if program.starts_with('-') {
            return Err(FieldError::new(
                "entry",
                format!("{program:?} must name a command: a command does not begin with \"-\""),
            ));
        }
        if let Some(image) = &self.image {
            Image::parse(image)?;
        }
        if self.image.is_some() && self.protocol == Protocol::Frames {
            return Err(FieldError::new(
                "protocol",
                "a container speaks json_lines or state_dir: no open socket passes its border",
            ));
        }
        Ok(())
    }

    /// Whether an output of this name was declared.
    pub fn declares(&self, output: &str) -> bool {
        self.outputs.iter().any(|pattern| matches(pattern, output))
    }
}

/// The image of a container. Its text never begins with `-`, so no engine reads it as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image<'a> {
    /// An image by its digest or id, which names the same image on every node.
    Reference(&'a str),
    /// An image archive: a path in the package's folder.
    Archive(&'a str),
}

impl<'a> Image<'a> {
    /// Reads the `image` of a manifest.
    ///
    /// # Errors
    /// When it is neither a reference with a digest nor a plain path in the package.
    pub fn parse(text: &'a str) -> Result<Self, FieldError> {
        let path = text.strip_prefix("./").unwrap_or(text);
        let is_short = text.len() <= IMAGE_LIMIT;
        if is_short && path.ends_with(".tar") && path.split('/').all(is_plain_part) {
            return Ok(Self::Archive(path));
        }
        let (name, digest) = text.split_once('@').unwrap_or(("", text));
        let is_digest = digest.strip_prefix("sha256:").is_some_and(|hex| {
            hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        });
        let is_name = name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'/' | b':' | b'-'))
            && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        if is_short && is_digest && (is_name || !text.contains('@')) {
            return Ok(Self::Reference(text));
        }
        Err(FieldError::new(
            "image",
            format!(
                "{text:?} is no image: give name@sha256:<64 hex digits>, sha256:<64 hex digits> \
                 (an image id), or the path of an archive in the package, as in \"image.tar\""
            ),
        ))
    }
}

fn is_plain_part(part: &str) -> bool {
    part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && part
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn climbs(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// Whether `text` is what `pattern` says, where `*` stands for any characters.
pub fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut left) = text.strip_prefix(first) else {
        return false;
    };
    let mut rest = rest;
    while let Some((part, next)) = rest.split_once('*') {
        let Some(at) = left.find(part) else {
            return false;
        };
        left = &left[at + part.len()..];
        rest = next;
    }
    left.ends_with(rest)
}

/// A program's name and version, as `name@version`: each of `[A-Za-z0-9_-]`, the version also
/// with inner dots, 64 characters at most.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProgramName {
    name: String,
    version: String,
}

impl ProgramName {
    /// The name before the `@`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version behind it.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Its key in the bucket of programs.
    pub fn key(&self) -> String {
        format!("{}.{}", self.name, self.version)
    }
}

impl fmt::Display for ProgramName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.version)
    }
}

impl std::str::FromStr for ProgramName {
    type Err = FieldError;

    fn from_str(text: &str) -> Result<Self, FieldError> {
        let rule = || {
            FieldError::new(
                "program",
                format!(
                    "{text:?} is no name@version: name of A-Z a-z 0-9 _ -, version also with \
                     dots between, 64 characters each at most"
                ),
            )
        };
        let (name, version) = text.split_once('@').ok_or_else(rule)?;
        let plain = |part: &str| {
            !part.is_empty()
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        };
        if name.len() > 64 || version.len() > 64 || !plain(name) || !version.split('.').all(plain) {
            return Err(rule());
        }
        Ok(Self {
            name: name.to_owned(),
            version: version.to_owned(),
        })
    }
}

/// Whether a program comes with FIEC.
pub fn is_built_in(program: &str) -> bool {
    programs::BUILT_IN.contains(&program)
}

/// What is said of a program that is neither built in nor registered, and what to do.
pub fn unregistered(program: &str) -> FieldError {
    FieldError::new(
        "program",
        format!(
            "{program:?} does not exist: it is not built in ({}), and nobody has pushed it; \
             `fiec program push {program} PATH` registers it, `fiec program list` shows what is there",
            programs::BUILT_IN.join(", ")
        ),
    )
}

/// A registered package. A version never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramRecord {
    /// `name@version`.
    pub program: String,
    /// What the package says of itself.
    pub manifest: Manifest,
    /// The artifact, a tar, in the object store of data.
    pub artifact: Digest,
    /// Its size.
    pub bytes: u64,
    /// When it was pushed.
    pub pushed_at: Timestamp,
    /// Who pushed it.
    pub pushed_by: String,
}

/// What a program may use where it runs. It adapts to it without changing its bits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Grant {
    /// The place on the node, e.g. `cpu0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// Threads that may compute at once; none: the program's own choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The processors it may run on; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpus: Vec<u32>,
    /// Memory in bytes; none: not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// A device, if one was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceGrant>,
}

impl Grant {
    /// This grant with what `change` names in its place.
    #[must_use]
    pub fn changed_by(&self, change: &Self) -> Self {
        Self {
            substrate: self.substrate.clone(),
            threads: change.threads.or(self.threads),
            cpus: match change.cpus.is_empty() {
                true => self.cpus.clone(),
                false => change.cpus.clone(),
            },
            memory_bytes: change.memory_bytes.or(self.memory_bytes),
            device: change.device.clone().or_else(|| self.device.clone()),
        }
    }
}

/// A granted device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceGrant {
    /// UUID of the GPU or MIG slice.
    pub uuid: String,
    /// Device memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_what_it_says_and_nothing_else() {
        for (pattern, text, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "abc", true),
            ("*.npy", "x.npy", true),
            ("*.npy", "x.npyz", false),
            ("t-*-*.bin", "t-1-2.bin", true),
            ("t-*-*.bin", "t-1.bin", false),
            ("a*a", "a", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_manifest_that_breaks_a_rule_names_the_field() {
        let field = |text: &str| Manifest::parse(text.as_bytes()).unwrap_err().field;
        assert_eq!(field(r#"{"entry":[],"protocol":"frames"}"#), "entry");
        assert_eq!(field(r#"{"entry":["../x"],"protocol":"frames"}"#), "entry");
        assert_eq!(
            field(r#"{"entry":["/bin/sh"],"protocol":"frames"}"#),
            "entry"
        );
        assert_eq!(
            field(r#"{"entry":["x"],"protocol":"frames","image":"a.tar"}"#),
            "protocol"
        );
        assert_eq!(
            field(r#"{"entry":["x"],"protocol":"state_dir","limits":{"boundary_ms":0}}"#),
            "limits"
        );
        let good =
            Manifest::parse(br#"{"entry":["./run.sh"],"protocol":"state_dir","outputs":["r*"]}"#)
                .unwrap();
        assert!(good.declares("result") && !good.declares("x"));
    }

    #[test]
    fn an_image_is_a_digest_or_a_plain_path_and_never_a_flag() {
        let hex = "ab".repeat(32);
        let digests = [
            format!("sha256:{hex}"),
            format!("r.example:5000/a_b/c.d:1@sha256:{hex}"),
        ];
        for text in &digests {
            assert_eq!(Image::parse(text).unwrap(), Image::Reference(text));
        }
        for (text, path) in [("./a/image-1.tar", "a/image-1.tar"), ("x.tar", "x.tar")] {
            assert_eq!(Image::parse(text).unwrap(), Image::Archive(path));
        }
        let long = format!("{}@sha256:{hex}", "a".repeat(600));
        let flag = format!("--name=x@sha256:{hex}");
        for text in [
            "",
            "--volume=/:/host",
            "-v/:/host.tar",
            &flag,
            "python:3",
            "/abs.tar",
            "../x.tar",
            "a/../../x.tar",
            "a//x.tar",
            ".tar",
            "a b.tar",
            "sha256:12",
            &long,
        ] {
            assert_eq!(Image::parse(text).unwrap_err().field, "image", "{text}");
            let manifest = serde_json::json!({
                "entry": ["sh"], "protocol": "state_dir", "image": text });
            let refused = Manifest::parse(manifest.to_string().as_bytes()).unwrap_err();
            assert_eq!(refused.field, "image", "{text}");
        }
        let refused = Manifest::parse(br#"{"entry":["--privileged"],"protocol":"state_dir"}"#);
        assert_eq!(refused.unwrap_err().field, "entry");
    }

    #[test]
    fn a_program_name_survives_its_text_and_bad_ones_do_not_pass() {
        let name: ProgramName = "train@1.2.0".parse().unwrap();
        assert_eq!(
            (name.key().as_str(), name.to_string().as_str()),
            ("train.1.2.0", "train@1.2.0")
        );
        for bad in ["train", "@1", "a@", "a@1..2", "a b@1", "a@.1", "a.b@1"] {
            assert!(bad.parse::<ProgramName>().is_err(), "{bad}");
        }
    }
}
