//! Why an execution was bound or yielded, and which candidates were considered.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::hardware::{Reading, Signal, Threshold};
use crate::ids::{ExecutionId, NodeId, Timestamp};
use crate::scheduling::Rule;
use crate::tagged::tagged;

tagged! { "kind", CauseKind,
    /// Why an execution was bound or yielded.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Cause {
        /// Its first binding.
        Initial,
        /// A signal exceeded its threshold for longer than its dwell.
        Pressure {
            /// The evidence for the decision.
            evidence: Box<Evidence>,
        },
        /// A person or program asked for it.
        Operator {
            /// The person or program that asked.
            who: String,
        },
        /// Its node is leaving.
        Drain {
            /// Who asked: an operator, or `sigterm`.
            who: String,
        },
        /// Its node fell silent.
        Lost {
            /// Duration of the silence at the decision, in ms.
            silent_ms: u64,
        },
        /// Its node did not start it in time, or refused it.
        NotTaken {
            /// The reason.
            reason: String,
            /// What stopped it. Absent if it is nobody's fault, and in the binding after a refusal,
            /// which has it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            fault: Option<Box<Fault>>,
        },
        /// Its ledger says that its node computes it, but the node does not hold it.
        Orphaned {
            /// Details in words.
            reason: String,
        },
        /// It was resumed after a pause.
        Resumed,
        /// It waited in a node's queue while another node had a free slot.
        Balance,
        /// A node that computed it has lost the contract.
        Corrupt {
            /// The node, if it is known.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            node: Option<NodeId>,
            /// The reason.
            reason: String,
        },
        /// Another execution preempts it.
        Preempted {
            /// The rule.
            rule: Rule,
            /// The other execution, if it is one.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            by: Option<ExecutionId>,
            /// Details in words, with the cost of preempting this one.
            reason: String,
        },
        /// Another device suits it better.
        Reallocated {
            /// True for a larger device, false for a smaller sufficient one.
            upgrade: bool,
            /// Details in words.
            reason: String,
        },
        /// Its program asked for more than its place has.
        Asked {
            /// Details in words.
            reason: String,
        },
        /// Its node will go away at a known time.
        Revoked {
            /// Who announced it.
            who: String,
            /// When the node goes away.
            at: Timestamp,
        },
        /// Its place is not viable and no other place is, so it waits.
        Unviable {
            /// Details in words.
            reason: String,
        },
        /// It has done the part of its range that it kept. Now it waits for the last of its parts.
        Parts,
        /// One of its parts failed or was cancelled, so it stops and fails.
        PartFailed {
            /// The part.
            part: ExecutionId,
            /// Details in words.
            reason: String,
        },
    }
}

impl Cause {
    /// The name in SQL and metrics.
    pub const fn as_str(&self) -> &'static str {
        self.kind().as_str()
    }

    /// One sentence for people.
    pub fn in_words(&self) -> String {
        match self {
            Cause::Initial => "first placement".to_owned(),
            Cause::Pressure { evidence: e } => format!(
                "{}{} on {} was {:.1} % (limit {:.1} % for {} ms) since {}",
                e.signal,
                e.device
                    .as_ref()
                    .map_or_else(String::new, |d| format!(" of {d}")),
                e.node,
                e.value * 100.0,
                e.threshold.high * 100.0,
                e.threshold.dwell_ms,
                e.since
            ),
            Cause::Operator { who } => format!("requested by {who}"),
            Cause::Drain { who } => format!("node is draining, requested by {who}"),
            Cause::Lost { silent_ms } => format!("node was silent for {silent_ms} ms"),
            Cause::NotTaken { reason, .. } => format!("node did not start it: {reason}"),
            Cause::Orphaned { reason } => format!("no node held it: {reason}"),
            Cause::Resumed => "resumed, after a pause or a retry".to_owned(),
            Cause::Balance => "another node had a free slot".to_owned(),
            Cause::Corrupt { node, reason } => format!(
                "{} computed wrong bits: {reason}",
                node.as_ref().map_or("a node", |n| n.as_str())
            ),
            Cause::Preempted { rule, reason, .. } => {
                format!("preempted ({}): {reason}", rule.as_str())
            }
            Cause::Reallocated { upgrade, reason } => {
                let to = if *upgrade { "larger" } else { "smaller" };
                format!("moved to a {to} device: {reason}")
            }
            Cause::Asked { reason } => format!("the program asked for more: {reason}"),
            Cause::Revoked { who, at } => format!("node ends at {at}, announced by {who}"),
            Cause::Unviable { reason } => format!("no place is viable: {reason}"),
            Cause::Parts => "its own range is done; its parts compute the rest".to_owned(),
            Cause::PartFailed { reason, .. } => format!("it cannot complete: {reason}"),
        }
    }
}

/// The pressure that made a node unviable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evidence {
    /// The node.
    pub node: NodeId,
    /// The signal.
    pub signal: Signal,
    /// The device, if the signal is a device's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its value in [0, 1] at the decision.
    pub value: f64,
    /// The threshold in force.
    pub threshold: Threshold,
    /// Time since which it was at or above `high`.
    pub since: Timestamp,
    /// The hardware vector at the decision: measured readings, [`crate::limits::EVIDENCE_LIMIT`] at
    /// most.
    pub vector: Vec<Reading>,
}

/// A choice of a node, with the candidates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Decision {
    /// The candidates, the chosen one first ([`crate::limits::CANDIDATES_LIMIT`] at most).
    pub candidates: Vec<Candidate>,
    /// Candidates beyond those listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u32,
    /// Who chose and when, if the node itself appended the binding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrusted: Option<Entrusted>,
}

/// An entrusted first binding: the policy service chooses, and the node appends it together with
/// its own events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Entrusted {
    /// The policy service, as an author: `policy/<id>`.
    pub by: String,
    /// When it chose, by its clock. The execution is bound from then on.
    pub at: Timestamp,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// A node that was considered as a destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// The device, if a device was considered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// Its score, if it was acceptable. Higher is better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Why it was rejected, each reason a sentence. Empty if it was acceptable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_of_a_device_names_the_device() {
        let evidence = |device: Option<&str>| Evidence {
            node: NodeId::new("n1").unwrap(),
            signal: Signal::Memory,
            device: device.map(str::to_owned),
            value: 0.97,
            threshold: Threshold {
                high: 0.9,
                low: 0.7,
                dwell_ms: 500,
            },
            since: Timestamp::from_micros(0),
            vector: Vec::new(),
        };
        let words = |device| {
            let evidence = Box::new(evidence(device));
            Cause::Pressure { evidence }.in_words()
        };
        let whole = words(Some("GPU-1"));
        assert!(
            whole.starts_with("memory of GPU-1 on n1 was 97.0 %"),
            "{whole}"
        );
        let whole = words(None);
        assert!(whole.starts_with("memory on n1 was 97.0 %"), "{whole}");
    }
}
