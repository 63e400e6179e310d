//! Nodes' statements about themselves and about others' work: signed by the node's key, checked by
//! each reader.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fiec_schemas::NodeId;
use fiec_schemas::trust::{NodeIdentity, Proof, SignedProof, SignedVerdict, Verdict};
use nkeys::{KeyPair, KeyPairType};
use serde::Serialize;

/// A node's key, which signs its statements.
pub struct NodeKey(KeyPair);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NodeKey").field(&self.public()).finish()
    }
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl NodeKey {
    /// A new random key, which is lost with the value.
    pub fn random() -> Self {
        Self(KeyPair::new_user())
    }

    /// Reads the key in this file, or creates it. Only its owner may read it (mode 0600).
    ///
    /// # Errors
    /// When the file cannot be read or created, holds no key, or is readable by others.
    pub fn in_file(path: &Path) -> io::Result<Self> {
        match std::fs::File::open(path) {
            Ok(mut file) => {
                let mode = file.metadata()?.permissions().mode();
                if mode & 0o077 != 0 {
                    return Err(io::Error::other(format!(
                        "{} has mode {:o} and may be read by others: `chmod 600` it, or remove it \
                         for a new key",
                        path.display(),
                        mode & 0o777
                    )));
                }
                let mut seed = String::new();
                file.read_to_string(&mut seed)?;
                let key = KeyPair::from_seed(seed.trim()).map_err(|error| {
                    io::Error::other(format!(
                        "{} holds no key ({error}): remove it for a new one",
                        path.display()
                    ))
                })?;
                Ok(Self(key))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self::random().keep(path)?;
                // Another process of the node was first: use its key.
                Self::in_file(path)
            }
            Err(error) => Err(error),
        }
    }

    /// Writes the key atomically, unless one exists.
    fn keep(&self, path: &Path) -> io::Result<()> {
        let made = path.with_extension(format!("{}.new", std::process::id()));
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&made)?;
        file.write_all(self.0.seed().map_err(other)?.as_bytes())?;
        file.sync_all()?;
        let linked = std::fs::hard_link(&made, path);
        std::fs::remove_file(&made)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// The public key.
    pub fn public(&self) -> String {
        self.0.public_key()
    }

    /// Signs a proof.
    ///
    /// # Errors
    /// When it cannot be written as JSON, or the key has no private part.
    pub fn sign(&self, proof: &Proof) -> io::Result<SignedProof> {
        let (statement, sig) = self.signature(proof)?;
        Ok(SignedProof {
            v: 1,
            key: self.public(),
            sig,
            statement,
        })
    }

    /// Signs a verdict.
    ///
    /// # Errors
    /// When it cannot be written as JSON, or the key has no private part.
    pub fn sign_verdict(&self, verdict: &Verdict) -> io::Result<SignedVerdict> {
        let (statement, sig) = self.signature(verdict)?;
        Ok(SignedVerdict {
            v: 1,
            key: self.public(),
            sig,
            statement,
        })
    }

    /// A statement as JSON, and its signature in Base64.
    fn signature(&self, statement: &impl Serialize) -> io::Result<(String, String)> {
        let statement = serde_json::to_string(statement)?;
        let sig = self.0.sign(statement.as_bytes()).map_err(other)?;
        Ok((statement, BASE64.encode(sig)))
    }
}

/// Checks that this is a node's public key.
///
/// # Errors
/// The reason why it is none.
pub fn check_key(text: &str) -> Result<(), String> {
    match KeyPair::from_public_key(text) {
        Ok(key) if key.key_pair_type() == KeyPairType::User => Ok(()),
        Ok(_) => Err(format!("{text:?} is no node's key (those begin with U)")),
        Err(error) => Err(format!("{text:?} is no public key: {error}")),
    }
}

fn is_signed(statement: &str, key: &str, sig: &str) -> bool {
    let (Ok(key), Ok(sig)) = (KeyPair::from_public_key(key), BASE64.decode(sig)) else {
        return false;
    };
    key.key_pair_type() == KeyPairType::User && key.verify(statement.as_bytes(), &sig).is_ok()
}

/// The reason why a proof does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// It has no known form.
    #[error("its proof cannot be read: {0}")]
    Unreadable(String),
    /// The node's claim has no key.
    #[error("its claim names no key: its worker is of a version without proofs")]
    NoIdentity,
    /// Another key than the claim's signed it.
    #[error("its proof is signed by another key than the one of its claim")]
    OtherKey,
    /// The signature is wrong.
    #[error("the signature of its proof is wrong")]
    Signature,
    /// It is for another environment.
    #[error("its proof is of another environment (binary, instruction set, driver or library)")]
    Environment,
    /// It is for another suite.
    #[error("its proof is of suite {found}, this policy service asks for {expected}")]
    Suite {
        /// The proof's suite.
        found: u32,
        /// The required suite.
        expected: u32,
    },
}

/// Checks that the node with this identity signed the proof, for its present environment and this
/// version of the suite. The caller checks the proof's time and lifetime.
///
/// # Errors
/// The first rule that it breaks.
pub fn check(
    signed: &SignedProof,
    identity: Option<&NodeIdentity>,
    suite: u32,
) -> Result<Proof, ProofError> {
    if signed.v != 1 {
        return Err(ProofError::Unreadable(format!("version {}", signed.v)));
    }
    let proof: Proof = serde_json::from_str(&signed.statement)
        .map_err(|error| ProofError::Unreadable(error.to_string()))?;
    let identity = identity.ok_or(ProofError::NoIdentity)?;
    if identity.key != signed.key {
        return Err(ProofError::OtherKey);
    }
    if !is_signed(&signed.statement, &signed.key, &signed.sig) {
        return Err(ProofError::Signature);
    }
    if proof.environment != identity.environment {
        return Err(ProofError::Environment);
    }
    if proof.suite != suite {
        return Err(ProofError::Suite {
            found: proof.suite,
            expected: suite,
        });
    }
    Ok(proof)
}

/// The reason why a verdict does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerdictError {
    /// It has no known form.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    /// No node of that name has a key.
    #[error("the claim of {0} names no key")]
    NoIdentity(NodeId),
    /// The key of the node's claim did not sign it.
    #[error("the verdict is not signed with the key in the claim of node {0}")]
    Signature(NodeId),
}

/// Checks that a verdict was signed with the key in its node's claim, which `identity` returns. The
/// caller checks that the node was asked.
///
/// # Errors
/// The first rule that it breaks.
pub fn check_verdict(
    signed: &SignedVerdict,
    identity: impl FnOnce(&NodeId) -> Option<NodeIdentity>,
) -> Result<Verdict, VerdictError> {
    if signed.v != 1 {
        return Err(VerdictError::Unreadable(format!("version {}", signed.v)));
    }
    let verdict: Verdict = serde_json::from_str(&signed.statement)
        .map_err(|error| VerdictError::Unreadable(error.to_string()))?;
    let Some(identity) = identity(&verdict.node) else {
        return Err(VerdictError::NoIdentity(verdict.node));
    };
    if identity.key != signed.key || !is_signed(&signed.statement, &signed.key, &signed.sig) {
        return Err(VerdictError::Signature(verdict.node));
    }
    Ok(verdict)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_schemas::{Digest, InstanceId, Timestamp};

    fn proof() -> Proof {
        Proof {
            v: 1,
            node: NodeId::new("n1").unwrap(),
            instance: InstanceId::random(),
            suite: 1,
            environment: Digest::of(b"here"),
            at: Timestamp::from_micros(1),
            expires_at: Timestamp::from_micros(2),
            unproved: vec![],
            results: Vec::new(),
        }
    }

    #[test]
    fn only_the_nodes_own_statement_about_its_present_environment_counts() {
        let (key, thief) = (NodeKey::random(), NodeKey::random());
        let identity = NodeIdentity {
            key: key.public(),
            environment: Digest::of(b"here"),
        };
        let signed = key.sign(&proof()).unwrap();
        assert!(check(&signed, Some(&identity), 1).is_ok());
        assert_eq!(check(&signed, None, 1), Err(ProofError::NoIdentity));
        let other = check(&thief.sign(&proof()).unwrap(), Some(&identity), 1);
        assert_eq!(other, Err(ProofError::OtherKey));
        let mut forged = thief.sign(&proof()).unwrap();
        forged.key = key.public();
        assert_eq!(
            check(&forged, Some(&identity), 1),
            Err(ProofError::Signature)
        );
        let mut changed = signed.clone();
        changed.statement = changed.statement.replace("n1", "n2");
        assert_eq!(
            check(&changed, Some(&identity), 1),
            Err(ProofError::Signature)
        );
        let suite = check(&signed, Some(&identity), 2);
        assert!(matches!(suite, Err(ProofError::Suite { .. })), "{suite:?}");
        let moved = NodeIdentity {
            environment: Digest::of(b"there"),
            ..identity
        };
        assert_eq!(
            check(&signed, Some(&moved), 1),
            Err(ProofError::Environment)
        );
    }

    #[test]
    fn a_verdict_counts_from_the_node_that_it_names_alone() {
        let (key, thief) = (NodeKey::random(), NodeKey::random());
        let identity = |node: &NodeId| {
            (node.as_str() == "n1").then(|| NodeIdentity {
                key: key.public(),
                environment: Digest::of(b"here"),
            })
        };
        let verdict = Verdict {
            v: 1,
            question: 7,
            node: NodeId::new("n1").unwrap(),
            instance: InstanceId::random(),
            execution: fiec_schemas::ExecutionId(uuid::Uuid::nil()),
            finding: None,
            error: Some("no".into()),
            gone: false,
        };
        let signed = key.sign_verdict(&verdict).unwrap();
        assert_eq!(check_verdict(&signed, identity), Ok(verdict.clone()));
        let wrong = Err(VerdictError::Signature(verdict.node.clone()));
        let stolen = thief.sign_verdict(&verdict).unwrap();
        assert_eq!(check_verdict(&stolen, identity), wrong);
        let forged = SignedVerdict {
            key: key.public(),
            ..stolen
        };
        assert_eq!(check_verdict(&forged, identity), wrong);
        let changed = SignedVerdict {
            statement: signed.statement.replace(":7", ":8"),
            ..signed.clone()
        };
        assert_eq!(check_verdict(&changed, identity), wrong);
        let unknown = check_verdict(&signed, |_| None);
        assert_eq!(unknown, Err(VerdictError::NoIdentity(verdict.node)));
        let newer = SignedVerdict { v: 2, ..signed };
        assert!(matches!(
            check_verdict(&newer, identity),
            Err(VerdictError::Unreadable(_))
        ));
    }

    #[test]
    fn a_key_stays_in_its_file_which_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.key");
        let made = NodeKey::in_file(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(NodeKey::in_file(&path).unwrap().public(), made.public());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let open = NodeKey::in_file(&path).unwrap_err().to_string();
        assert!(open.contains("chmod 600"), "{open}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "nonsense").unwrap();
        let wrong = NodeKey::in_file(&path).unwrap_err().to_string();
        assert!(wrong.contains("holds no key"), "{wrong}");
    }
}
