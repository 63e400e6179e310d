//! Proofs of nodes, contracts that they lost, and repeated computation of parts.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::event::{Output, StatePlace};
use crate::hardware::NodeDescriptor;
use crate::ids::{BoundaryIndex, Digest, ExecutionId, InstanceId, NodeId, Timestamp};
use crate::submission::{Contract, FieldError};

/// Version of the suite of canaries that a proof must have.
pub const SUITE: u32 = 1;

/// Identity and environment of a node. It is part of the descriptor, and a proof must agree with
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeIdentity {
    /// The node's public key: an `nkeys` user key (ed25519), as text.
    pub key: String,
    /// Digest over the binary, the instruction set, drivers and libraries. If it changes, a new
    /// proof is needed.
    pub environment: Digest,
}

/// Signed result of a node's canaries: the value of its proof key in `FIEC_NODES`.
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

/// A node's statement about its canaries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Proof {
    /// Version of this message: 1.
    pub v: u8,
    /// The node.
    pub node: NodeId,
    /// The life of its agent.
    pub instance: InstanceId,
    /// Version of the suite of canaries.
    pub suite: u32,
    /// The environment of the computation, as in [`NodeIdentity::environment`].
    pub environment: Digest,
    /// When it was computed.
    pub at: Timestamp,
    /// End of its validity.
    pub expires_at: Timestamp,
    /// One result for each contract and each substrate that computed.
    pub results: Vec<Proved>,
    /// Substrates on which the canaries did not run. This says nothing about their bits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unproved: Vec<Unproved>,
}

impl Proof {
    /// A statement that every substrate of a node keeps every contract, for simulated nodes.
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
    /// The substrate.
    pub substrate: String,
    /// The reason in one sentence.
    pub reason: String,
}

/// Result of the canaries for one contract on one substrate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Proved {
    /// The substrate.
    pub substrate: String,
    /// The contract.
    pub contract: Contract,
    /// True if every case kept the contract.
    pub passed: bool,
    /// The violation in one sentence. Empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Cases that were computed.
    pub cases: u32,
    /// The processor of the cases: `cpu`, or the device, with the parts that the host computed
    /// instead.
    pub ran_on: String,
    /// Digest over the names and digests of all cases.
    pub digest: Digest,
}

/// Contracts that a node has lost: the value of its quarantine key in `FIEC_NODES`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quarantine {
    /// The lost contracts, each once for a substrate or the node.
    #[serde(default)]
    pub entries: Vec<Quarantined>,
    /// The last release. Proofs from before it do not count again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<Released>,
}

/// A contract that a node has lost until it is released.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quarantined {
    /// The contract.
    pub contract: Contract,
    /// The device. Absent: the whole node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// The reason in one sentence.
    pub reason: String,
    /// Who found the violation: `policy/<id>`.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

/// The last release of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Released {
    /// Who released it.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

impl Quarantine {
    /// The entry of this contract for exactly this device, or for the whole node.
    pub fn of(&self, contract: Contract, substrate: Option<&str>) -> Option<&Quarantined> {
        let mut entries = self.entries.iter();
        entries.find(|e| e.contract == contract && e.substrate.as_deref() == substrate)
    }

    /// The entry by which a substrate has lost this contract.
    pub fn at(&self, contract: Contract, substrate: &str) -> Option<&Quarantined> {
        let device = || self.of(contract, Some(substrate));
        self.of(contract, None).or_else(device)
    }
}

/// The part of an execution that another node computes again and compares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// No part.
    None,
    /// All of it. Outputs and completion are visible only afterwards.
    All,
    /// This share of its committed boundaries, in [0, 1], drawn by their digests. Outputs are
    /// visible when they are committed, so outputs of a node that is found corrupt later were
    /// visible.
    Share(f64),
}

impl Verify {
    /// Checks that a share is valid.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
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

/// A part of an execution to compute again: from one boundary to a later one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Segment {
    /// First boundary. Absent: the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<StatePlace>,
    /// Last boundary. Absent: the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<BoundaryIndex>,
    /// Digest of σ at the last boundary. If σ has it, σ is kept in `FIEC_STATE`, so that the
    /// execution can continue from there whatever its ledger still holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Digest>,
}

/// A node's statement on a segment that it computed. A [`SignedVerdict`] contains it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Verdict {
    /// Version of this message: 1.
    pub v: u8,
    /// Number of the question.
    pub question: u64,
    /// The node that computed.
    pub node: NodeId,
    /// The life of its agent.
    pub instance: InstanceId,
    /// The execution.
    pub execution: ExecutionId,
    /// The finding. Absent if the segment could not be computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finding: Option<Finding>,
    /// Why there is no finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// True if the segment's first state is no longer stored, so nothing can be compared.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gone: bool,
}

/// A signed verdict: a message on `fiec.verdict`.
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

/// How far an execution is verified that is verified as a whole. It is stored beside the kept σ of
/// that boundary, so that the next policy service continues from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifiedUpTo {
    /// Version of this object: 1.
    pub v: u8,
    /// The last verified boundary.
    pub good: StatePlace,
    /// The nodes that computed it again.
    pub by: Vec<NodeId>,
    /// Number of segments.
    pub segments: u32,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The end of a segment, as one node computed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// Capsules completed there.
    pub index: BoundaryIndex,
    /// Digest of σ. At the end of the execution: digest of the result ([`digest_of_result`]).
    pub digest: Digest,
    /// The last output of each name in the segment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, Digest>,
}

impl Finding {
    /// Adds outputs. A later output replaces an earlier one of the same name.
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
