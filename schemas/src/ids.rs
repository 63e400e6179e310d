//! Typed names, identifiers, digests and times. Every value that crosses a process has a type here,
//! so that a node's name cannot be passed as a tenant's.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

pub use crate::time::Timestamp;

/// Why a name, an identifier or a digest was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text does not match `[A-Za-z0-9_-]{1,64}`.
    #[error(
        "{kind} {text:?} must be 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-' \
         (a dot would split a NATS subject)"
    )]
    Name {
        /// Kind of the name.
        kind: &'static str,
        /// The offending text, cut to a readable length.
        text: String,
    },
    /// The text does not match `[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}`.
    #[error(
        "{kind} {text:?} must be 1 to 128 characters of A-Z, a-z, 0-9, '_', '-' and '.', the first \
         of them no dot"
    )]
    OwnName {
        /// Kind of the name.
        kind: &'static str,
        /// The offending text, cut to a readable length.
        text: String,
    },
    /// The text is not a name of a curve.
    #[error(
        "progress: the name {text:?} must be 1 to 64 letters, digits and characters of _ - . / : @ % +"
    )]
    Series {
        /// The offending text, cut to a readable length.
        text: String,
    },
    /// The text is not a UUID.
    #[error("{kind} {text:?} is not a UUID")]
    Uuid {
        /// Kind of the identifier.
        kind: &'static str,
        /// The offending text.
        text: String,
    },
    /// The text is not a digest.
    #[error("digest {text:?} must be 64 lower-case hexadecimal digits (BLAKE3-256)")]
    Digest {
        /// The offending text.
        text: String,
    },
    /// The text is not a time.
    #[error("time {text:?} must be RFC 3339, for example 2026-05-01T12:00:00.000001Z")]
    Time {
        /// The offending text.
        text: String,
    },
}

pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

/// True for `[A-Za-z0-9_-]{1,64}`.
pub fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

/// True for `[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}`: a client's own name, which is never a part of a
/// subject.
pub fn is_own_name(text: &str) -> bool {
    (1..=128).contains(&text.len())
        && !text.starts_with('.')
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
}

/// Checks the name of an emitted message. It is the last part of a subject.
///
/// # Errors
/// [`IdError::Name`] when it is not `[A-Za-z0-9_-]{1,64}`.
pub fn check_emit_name(name: &str) -> Result<(), IdError> {
    if is_name(name) {
        return Ok(());
    }
    Err(IdError::Name {
        kind: "emit: name",
        text: shorten(name),
    })
}

/// Parses a value from a borrowed string: a ledger message has dozens of them.
pub(crate) struct Parsed<T> {
    expected: &'static str,
    value: std::marker::PhantomData<T>,
}

impl<T> Parsed<T> {
    pub(crate) fn new(expected: &'static str) -> Self {
        Self {
            expected,
            value: std::marker::PhantomData,
        }
    }
}

impl<T: FromStr<Err = IdError>> de::Visitor<'_> for Parsed<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $is:path, $error:ident, $pattern:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(std::sync::Arc<str>);

        impl $name {
            #[doc = concat!("Checks the text against `", $pattern, "`.")]
            ///
            /// # Errors
            #[doc = concat!("[`IdError::", stringify!($error), "`] when the text is anything else.")]
            pub fn new(text: impl AsRef<str>) -> Result<Self, IdError> {
                let text = text.as_ref();
                if $is(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(IdError::$error { kind: $kind, text: shorten(text) })
                }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Parsed::new("a text"))
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": concat!("^", $pattern, "$") })
            }
        }
    };
    ($(#[$doc:meta])* $name:ident, $kind:literal, subject) => {
        name_type!($(#[$doc])* $name, $kind, is_name, Name, "[A-Za-z0-9_-]{1,64}");
    };
    ($(#[$doc:meta])* $name:ident, $kind:literal, own) => {
        name_type!(
            $(#[$doc])* $name, $kind, is_own_name, OwnName, "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
        );
    };
}

name_type!(
    /// The owner of an execution; a part of its ledger's subject.
    Tenant, "tenant", subject
);
name_type!(
    /// A worker agent's name; unique in a cluster, held by one instance at a time.
    NodeId, "node", subject
);
name_type!(
    /// An id that a client gave its submission.
    ClientId, "id", own
);
name_type!(
    /// A client's name of a batch.
    BatchName, "batch", own
);

impl NodeId {
    /// Maps a host name to a node id. Every invalid character becomes `-`.
    pub fn from_host_name(host: &str) -> Self {
        let mapped: String = host
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || c == '_' {
                    c
                } else {
                    '-'
                }
            })
            .take(64)
            .collect();
        let text = if mapped.is_empty() { "node" } else { &mapped };
        Self(text.into())
    }
}

macro_rules! uuid_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
        )]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Uuid::parse_str(text)
                    .map(Self)
                    .map_err(|_| IdError::Uuid { kind: $kind, text: shorten(text) })
            }
        }
    };
}

uuid_type!(
    /// Identifies one execution: a UUIDv7 from the place of its submission, or a UUIDv8 from a
    /// client's id.
    ExecutionId, "execution"
);
uuid_type!(
    /// Identifies one batch of submissions.
    BatchId, "batch"
);
uuid_type!(
    /// One life of a worker agent's process (UUIDv7). Each start makes a new one.
    InstanceId, "instance"
);

impl ExecutionId {
    /// The id of an execution that its client named. Everybody who computes it gets the same
    /// execution for the same (tenant, id). UUIDv8 of BLAKE3 over `tenant/id`.
    pub fn from_client(tenant: &Tenant, client: &ClientId) -> Self {
        Self(uuid_v8(&["execution", tenant.as_str(), client.as_str()]))
    }

    /// The id of an execution without a client's id: a UUIDv7. Its time is the broker's time stamp
    /// of the submission. Its other bits derive from the message's sequence and the line, so that a
    /// redelivered message gives the same ids.
    pub fn from_submission(tenant: &Tenant, stamp: Timestamp, sequence: u64, line: u32) -> Self {
        Self(uuid_v7(
            &["execution", tenant.as_str()],
            stamp,
            sequence,
            line,
        ))
    }

    /// The id of an element of an array, without a client's id.
    pub fn from_element(
        tenant: &Tenant,
        stamp: Timestamp,
        sequence: u64,
        line: u32,
        index: u32,
    ) -> Self {
        let element = format!("element-{index}");
        let parts = ["execution", tenant.as_str(), &element];
        Self(uuid_v7(&parts, stamp, sequence, line))
    }
}

impl BatchId {
    /// The batch with a client's name.
    pub fn from_client(tenant: &Tenant, name: &BatchName) -> Self {
        Self(uuid_v8(&["batch", tenant.as_str(), name.as_str()]))
    }

    /// The batch with this UUID or this client's name. `None` if the text is neither.
    pub fn named(tenant: &Tenant, text: &str) -> Option<Self> {
        if let Ok(id) = text.parse() {
            return Some(id);
        }
        let name = BatchName::new(text).ok()?;
        Some(Self::from_client(tenant, &name))
    }

    /// The batch of one submission message with several lines.
    pub fn from_submission(tenant: &Tenant, stamp: Timestamp, sequence: u64) -> Self {
        Self(uuid_v7(&["batch", tenant.as_str()], stamp, sequence, 0))
    }
}

impl InstanceId {
    /// A new instance id, for an agent that starts.
    pub fn random() -> Self {
        Self(Uuid::now_v7())
    }
}

fn hash_parts(parts: &[&str]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        // Names have no '/', so two parts never become ambiguous.
        hasher.update(part.as_bytes());
        hasher.update(b"/");
    }
    hasher
}

fn uuid_v8(parts: &[&str]) -> Uuid {
    let mut bytes = [0u8; 16];
    hash_parts(parts).finalize_xof().fill(&mut bytes);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

fn uuid_v7(parts: &[&str], stamp: Timestamp, sequence: u64, line: u32) -> Uuid {
    let mut hasher = hash_parts(parts);
    hasher.update(&sequence.to_le_bytes());
    hasher.update(&line.to_le_bytes());
    hasher.update(&stamp.micros().to_le_bytes());
    let mut bytes = [0u8; 10];
    hasher.finalize_xof().fill(&mut bytes);
    let millis = u64::try_from(stamp.micros() / 1_000).unwrap_or(0);
    uuid::Builder::from_unix_timestamp_millis(millis, &bytes).into_uuid()
}

/// A BLAKE3-256 digest over exact bytes (f64 as little-endian), written as lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The first twelve digits, for people.
    pub fn short(&self) -> String {
        self.to_string().chars().take(12).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let lower = !text.bytes().any(|b| b.is_ascii_uppercase());
        blake3::Hash::from_hex(text)
            .ok()
            .filter(|_| lower)
            .map(|hash| Self(*hash.as_bytes()))
            .ok_or_else(|| IdError::Digest {
                text: shorten(text),
            })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Parsed::new("a digest"))
    }
}

impl JsonSchema for Digest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Digest".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string", "pattern": "^[0-9a-f]{64}$", "description": "BLAKE3-256, lower-case hex"
        })
    }
}

/// Number of bindings of an execution, 0 before the first. It is the fencing token that people see.
pub type Epoch = u64;
/// The index of a boundary: the number of capsules completed before it.
pub type BoundaryIndex = u64;
/// Position of a message in its execution's ledger, from 1 without gaps.
pub type Ordinal = u64;
/// A sequence of a JetStream stream. In a message, 0 means "this message", because a writer does
/// not know the sequence that the broker will assign.
pub type Sequence = u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_dot_is_refused_with_the_rule() {
        let error = Tenant::new("a.b").unwrap_err().to_string();
        assert!(error.contains("dot would split"), "{error}");
        assert!(NodeId::new("").is_err());
        assert!(NodeId::new("x".repeat(65)).is_err());
    }

    #[test]
    fn a_clients_own_name_may_be_longer_and_have_dots() {
        assert!(ClientId::new("mProject_2mass-atlas-990322h.0110057_ID0000004").is_ok());
        assert!(BatchName::new("montage-2mass-0.5d").is_ok());
        assert!(ClientId::new("x".repeat(128)).is_ok());
        for wrong in [
            "",
            ".",
            "..",
            ".a",
            "a b",
            "a*",
            "a/b",
            "a\n",
            &"x".repeat(129),
        ] {
            let error = ClientId::new(wrong).unwrap_err().to_string();
            assert!(error.contains("1 to 128 characters"), "{error}");
        }
    }

    #[test]
    fn a_host_name_becomes_a_node_id() {
        assert_eq!(
            NodeId::from_host_name("gpu01.lab.example").as_str(),
            "gpu01-lab-example"
        );
        assert_eq!(NodeId::from_host_name("").as_str(), "node");
    }

    #[test]
    fn ids_from_the_same_place_are_the_same() {
        let tenant = Tenant::new("lab").unwrap();
        let stamp = Timestamp::from_micros(1_700_000_000_123_456);
        let a = ExecutionId::from_submission(&tenant, stamp, 7, 1);
        assert_eq!(a, ExecutionId::from_submission(&tenant, stamp, 7, 1));
        assert_ne!(a, ExecutionId::from_submission(&tenant, stamp, 7, 2));
        assert_eq!(a.0.get_version_num(), 7);
        let client = ClientId::new("job-1").unwrap();
        assert_eq!(
            ExecutionId::from_client(&tenant, &client)
                .0
                .get_version_num(),
            8
        );
    }

    #[test]
    fn a_digest_is_lower_case_hex() {
        let digest = Digest::of(b"abc");
        assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        assert!(digest.to_string().to_uppercase().parse::<Digest>().is_err());
    }
}
