//! What nodes prove of themselves, what they lost, and what is computed twice.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::{Output, StatePlace};
use crate::hardware::NodeDescriptor;
use crate::ids::{BoundaryIndex, Digest, ExecutionId, InstanceId, NodeId, Timestamp};
use crate::submission::{Contract, FieldError};

/// Version of the suite of canaries that proofs must be of.
pub const SUITE: u32 = 1;

/// Who a node is and on what it computes; part of its descriptor, and what a proof must agree with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeIdentity {
    /// The node's public key: an `nkeys` user key (ed25519), as text.
    pub key: String,
    /// Digest over the binary, the instruction set, drivers and libraries: another one calls for
    /// another proof.
    pub environment: Digest,
}

/// What a node's canaries have shown: the value of its proof key in `FIEC_NODES`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignedProof {
    /// Version of this message: 1.
    pub v: u8,
    /// A [`Proof`] as JSON, exactly the bytes that were signed.
    pub statement: String,
    /// The key that signed it.
    pub key: String,
    /// Its ed25519 signature in Base64.
    pub sig: String,
}

/// What a node states.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Proof {
    /// Version of this message: 1.
    pub v: u8,
    /// The node.
    pub node: NodeId,
    /// Which life of its agent.
    pub instance: InstanceId,
    /// Version of the suite of canaries.
    pub suite: u32,
    /// On what it was computed, as in [`NodeIdentity::environment`].
    pub environment: Digest,
    /// When it was computed.
    pub at: Timestamp,
    /// Until when it counts.
    pub expires_at: Timestamp,
    /// One result for each contract and each substrate that computed.
    pub results: Vec<Proved>,
    /// Substrates that computed nothing: that is no word about their bits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unproved: Vec<Unproved>,
}

impl Proof {
    /// A statement by which every place of a node keeps every contract, for nodes that are played.
    pub fn passing(d: &NodeDescriptor, suite: u32, at: Timestamp, expires_at: Timestamp) -> Self {
        let contracts = [Contract::Bitwise, Contract::Bounded];
        let results = d.substrates.iter().flat_map(|substrate| {
            contracts.map(|contract| Proved {
                substrate: substrate.id.clone(),
                contract,
                passed: true,
                detail: String::new(),
                cases: 0,
                ran_on: "cpu".to_owned(),
                digest: Digest::of(b""),
            })
        });
        let environment = d.identity.as_ref().map(|i| i.environment);
        Self {
            v: 1,
            node: d.node.clone(),
            instance: d.instance,
            suite,
            environment: environment.unwrap_or(Digest::of(b"")),
            at,
            expires_at,
            results: results.collect(),
            unproved: Vec::new(),
        }
    }
}

/// A substrate on which the canaries could not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unproved {
    /// Which substrate of the node.
    pub substrate: String,
    /// Why, one sentence.
    pub reason: String,
}

/// A result of the canaries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Proved {
    /// On which substrate of the node.
    pub substrate: String,
    /// For which contract.
    pub contract: Contract,
    /// True where every case kept it.
    pub passed: bool,
    /// What broke it, one sentence; empty where it was kept.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Cases that were computed.
    pub cases: u32,
    /// What computed them: `cpu`, or the device with what the host computed in its stead.
    pub ran_on: String,
    /// Digest over the names and digests of all cases.
    pub digest: Digest,
}

/// Contracts that a node has lost: the value of its quarantine key in `FIEC_NODES`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quarantine {
    /// The contracts, each once for a place.
    #[serde(default)]
    pub entries: Vec<Quarantined>,
    /// Who released the node last, with when; proofs from before do not count again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<Released>,
}

/// A contract that a node has lost until somebody releases it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quarantined {
    /// The contract.
    pub contract: Contract,
    /// On which of its devices; absent: on all of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// Why, in one sentence.
    pub reason: String,
    /// Who found it: `policy/<id>`.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

/// The last release of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Released {
    /// By whom.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

impl Quarantine {
    /// The entry of this contract for exactly this device, or for all of the node.
    pub fn of(&self, contract: Contract, substrate: Option<&str>) -> Option<&Quarantined> {
        let mut entries = self.entries.iter();
        entries.find(|e| e.contract == contract && e.substrate.as_deref() == substrate)
    }

    /// The entry that takes this contract away from a substrate.
    pub fn at(&self, contract: Contract, substrate: &str) -> Option<&Quarantined> {
        let device = || self.of(contract, Some(substrate));
        self.of(contract, None).or_else(device)
    }
}

/// Which part of an execution is computed once more elsewhere, and compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// None of it.
    None,
    /// All of it; outputs and the completion are visible only afterwards.
    All,
    /// This share of its committed boundaries, in [0, 1], drawn by their digests. Outputs are
    /// visible as they are committed: those of a node that is found out later were visible.
    Share(f64),
}

impl Verify {
    /// Checks that a share is one.
    ///
    /// # Errors
    /// The field and the rule.
    pub fn check(self, contract: Contract) -> Result<(), FieldError> {
        if let Verify::Share(share) = self
            && !(0.0..=1.0).contains(&share)
        {
            let rule = format!("must be at least 0 and at most 1, but is {share}");
            return Err(FieldError::new("verify.share", rule));
        }
        if self != Verify::None && contract != Contract::Bitwise {
            return Err(FieldError::new(
                "verify",
                format!(
                    "two computations are compared by their digests, which needs the contract \
                     bitwise; this one is {}",
                    contract.as_str()
                ),
            ));
        }
        Ok(())
    }
}

/// A part of an execution to be computed once more: from a boundary to a later one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Segment {
    /// From where; none: from the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<StatePlace>,
    /// To which boundary; none: to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<BoundaryIndex>,
    /// σ of that boundary is to be kept in `FIEC_STATE` where its digest is this one, so that the
    /// execution can go on from there whatever its ledger still holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Digest>,
}

/// What a node states that computed a segment; said in a [`SignedVerdict`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Verdict {
    /// Version of this message: 1.
    pub v: u8,
    /// Which question it answers.
    pub question: u64,
    /// Who computed.
    pub node: NodeId,
    /// Which life of its agent.
    pub instance: InstanceId,
    /// Of which execution.
    pub execution: ExecutionId,
    /// What was found; absent where it could not be computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finding: Option<Finding>,
    /// Why there is no finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// It cannot be compared from where the segment begins: that state is not stored any more.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gone: bool,
}

/// A verdict as its node signed it: a message on `fiec.verdict`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignedVerdict {
    /// Version of this message: 1.
    pub v: u8,
    /// A [`Verdict`] as JSON, exactly the bytes that were signed.
    pub statement: String,
    /// The key that signed it.
    pub key: String,
    /// Its ed25519 signature in Base64.
    pub sig: String,
}

/// How far an execution is verified that is verified as a whole: an object beside the σ that was
/// kept of that boundary, so that whoever has it verified next goes on from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifiedUpTo {
    /// Version of this object: 1.
    pub v: u8,
    /// The last verified boundary.
    pub good: StatePlace,
    /// Who computed it once more.
    pub by: Vec<NodeId>,
    /// In how many parts.
    pub segments: u32,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The end of a segment, as somebody computed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// Capsules completed there.
    pub index: BoundaryIndex,
    /// Digest of σ, or of the result where it is the end ([`digest_of_result`]).
    pub digest: Digest,
    /// Outputs made on the way by name, the last of each.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, Digest>,
}

impl Finding {
    /// Notes outputs; a later one of a name takes the place of an earlier.
    pub fn made(&mut self, outputs: &[Output]) {
        for output in outputs {
            self.outputs.insert(output.name.clone(), output.digest);
        }
    }
}

/// Digest of a completed execution's result.
pub fn digest_of_result(result: &Value) -> Digest {
    Digest::of(result.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verify_reads_as_it_is_written_and_its_rules_name_their_field() {
        for (text, verify) in [
            (r#""none""#, Verify::None),
            (r#""all""#, Verify::All),
            (r#"{"share":0.05}"#, Verify::Share(0.05)),
        ] {
            assert_eq!(serde_json::from_str::<Verify>(text).unwrap(), verify);
            assert_eq!(serde_json::to_string(&verify).unwrap(), text);
        }
        let share = Verify::Share(1.5).check(Contract::Bitwise).unwrap_err();
        assert_eq!(share.field, "verify.share");
        assert!(Verify::Share(f64::NAN).check(Contract::Bitwise).is_err());
        let contract = Verify::All.check(Contract::Bounded).unwrap_err();
        assert!(contract.reason.contains("bitwise"), "{contract:?}");
        assert!(Verify::None.check(Contract::Statistical).is_ok());
    }
}
