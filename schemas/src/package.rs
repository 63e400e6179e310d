//! Programs that are not built in: the manifest of a package, its registration, and the grant of a
//! running program.

use std::fmt;
use std::io::Read;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{Digest, Timestamp};
use crate::programs;
use crate::submission::FieldError;

/// File name of a manifest in a package's folder.
pub const MANIFEST_FILE: &str = "fiec.json";
/// Longest manifest, in bytes.
pub const MANIFEST_LIMIT: u64 = 256 * 1024;
/// Most files in a package.
pub const FILES_LIMIT: usize = 100_000;
/// Most folders in a package.
pub const FOLDERS_LIMIT: usize = 100_000;
/// Largest artifact that may be pushed, in bytes.
pub const ARTIFACT_LIMIT: u64 = 4 << 30;
/// Longest `image` of a manifest, in bytes.
const IMAGE_LIMIT: usize = 512;

/// Protocol between a program and FIEC. All have the same meaning; see `workers/CONTRACT.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// A JSON head and a raw body over an open socket. The kits use it.
    Frames,
    /// JSON lines over the Unix socket named by `FIEC_SOCKET`.
    JsonLines,
    /// One process for each capsule, with its state in the folder named by `FIEC_STATE_DIR`.
    StateDir,
}

/// What happens if no boundary is reached within `boundary_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnSilence {
    /// The execution fails with this cause.
    #[default]
    Fail,
    /// The worker logs a warning, and the execution continues.
    Wait,
}

/// Limits that a program declares for itself. An execution beyond a limit fails, and the reason
/// names the limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Largest σ in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
    /// Longest time between two boundaries, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary_ms: Option<u64>,
    /// What happens after `boundary_ms`.
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
    /// The command: program and arguments, run in the package's folder. A first word with a `/` is
    /// a path in that folder. Otherwise it is looked up in the node's PATH.
    pub entry: Vec<String>,
    /// Protocol of the program.
    pub protocol: Protocol,
    /// Outputs that the program may make: names, or patterns with `*`. Empty: it makes none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<String>,
    /// Limits of the program.
    #[serde(default, skip_serializing_if = "Limits::is_empty")]
    pub limits: Limits,
    /// Runs the entry in this container image. It is `name@sha256:<64 hex digits>`, `sha256:<64 hex
    /// digits>` (an image id of the node's engine), or the path of an image archive in the package
    /// (`….tar`). A tag is refused, because it may name another image on another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// True if the container may use the network.
    #[serde(default, skip_serializing_if = "is_default")]
    pub network: bool,
}

impl Limits {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Manifest {
    /// Reads, parses and checks a manifest of at most [`MANIFEST_LIMIT`] bytes.
    ///
    /// # Errors
    /// It cannot be read, is longer, or breaks a rule.
    pub fn read(from: impl Read) -> Result<Self, FieldError> {
        let unread = |reason: String| FieldError::new("", reason);
        let mut text = Vec::new();
        from.take(MANIFEST_LIMIT + 1)
            .read_to_end(&mut text)
            .map_err(|error| unread(error.to_string()))?;
        if text.len() as u64 > MANIFEST_LIMIT {
            return Err(unread(format!("it has more than {MANIFEST_LIMIT} bytes")));
        }
        Self::parse(&text)
    }

    /// Parses and checks a manifest.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn parse(text: &[u8]) -> Result<Self, FieldError> {
        let mut reader = serde_json::Deserializer::from_slice(text);
        let manifest: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            // For a missing field or invalid JSON, the path is no name of a field.
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

    /// Checks the rules that types cannot express.
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

    /// True if the manifest declares an output of this name.
    pub fn declares(&self, output: &str) -> bool {
        self.outputs.iter().any(|pattern| matches(pattern, output))
    }
}

/// The image of a container. Its text never begins with `-`, so an engine never reads it as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image<'a> {
    /// An image by its digest or id, which means the same image on every node.
    Reference(&'a str),
    /// An image archive: a path in the package's folder.
    Archive(&'a str),
}

impl<'a> Image<'a> {
    /// Parses the `image` of a manifest.
    ///
    /// # Errors
    /// If it is neither a reference with a digest nor a plain path in the package.
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

/// True if `text` matches `pattern`, in which `*` stands for any characters.
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

/// A program's name and version, as `name@version`. Each has at most 64 characters of
/// `[A-Za-z0-9_-]`. The version may also have inner dots.
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

    /// The version after the `@`.
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

/// True if the program is part of FIEC.
pub fn is_built_in(program: &str) -> bool {
    programs::BUILT_IN.contains(&program)
}

/// The error for a program that is neither built in nor registered, with what to do.
pub fn unregistered(program: &str) -> FieldError {
    FieldError::new(
        "program",
        format!(
            "{program:?} does not exist: it is neither built in ({}) nor pushed; `fiec program \
             push {program} PATH` registers it, `fiec program list` lists the registered programs",
            programs::BUILT_IN.join(", ")
        ),
    )
}

/// The error for a program whose manifest breaks a rule, with what to do.
pub fn unusable(program: &str, broken: &FieldError) -> FieldError {
    FieldError::new(
        "program",
        format!(
            "{program:?} cannot run: its manifest breaks a rule: {broken}; push it mended, as \
             another version"
        ),
    )
}

/// A registered package. A version never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramRecord {
    /// `name@version`.
    pub program: String,
    /// The package's manifest.
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

/// Resources that a program may use on its node. A program adapts to them without changing its
/// bits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Grant {
    /// The substrate on the node, e.g. `cpu0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// Threads that may compute at once. Absent: the program chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Processors that it may run on. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpus: Vec<u32>,
    /// Memory in bytes. Absent: not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// A device, if one was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceGrant>,
}

impl Grant {
    /// This grant with the resources of `change` replaced.
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
    fn a_manifest_is_read_up_to_its_limit() {
        let mut text = br#"{"entry":["./run.sh"],"protocol":"state_dir"}"#.to_vec();
        text.resize(MANIFEST_LIMIT as usize, b' ');
        assert!(Manifest::read(&text[..]).is_ok());
        // No more than the limit is taken from what never ends.
        let endless = text[..].chain(std::io::repeat(b' '));
        let refused = Manifest::read(endless).unwrap_err();
        assert!(refused.reason.contains("262144 bytes"), "{refused}");
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
