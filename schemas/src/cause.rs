//! Why an execution was bound or yielded, and who was considered.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::{Reading, Signal, Threshold};
use crate::ids::{ExecutionId, NodeId, Timestamp};
use crate::scheduling::Rule;
use crate::tagged::tagged;

tagged! { "kind", "Cause", CauseKind,
    /// Why an execution was bound or yielded.
    #[derive(Debug, Clone, PartialEq, JsonSchema)]
    pub enum Cause {
        /// Its first binding.
        Initial,
        /// A signal pressed beyond its threshold for longer than its dwell.
        Pressure {
            /// What was seen.
            evidence: Box<Evidence>,
        },
        /// Somebody asked for it.
        Operator {
            /// Who.
            who: String,
        },
        /// Its node is leaving.
        Drain {
            /// Who asked: an operator, or `sigterm`.
            who: String,
        },
        /// Its node fell silent.
        Lost {
            /// For how long, in milliseconds, when that was decided.
            silent_ms: u64,
        },
        /// Its node did not take it, or not in time.
        NotTaken {
            /// Why.
            reason: String,
        },
        /// Its ledger says that its node computes it, but the node does not hold it.
        Orphaned {
            /// In words.
            reason: String,
        },
        /// It was resumed after a pause.
        Resumed,
        /// It waited in a node's queue while another had room.
        Balance,
        /// A node that computed it has lost the contract.
        Corrupt {
            /// Which node, where it is known.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            node: Option<NodeId>,
            /// Why.
            reason: String,
        },
        /// It gives way to another execution.
        Preempted {
            /// By which rule.
            rule: Rule,
            /// To which one, where it is one.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            by: Option<ExecutionId>,
            /// In words, with what the choice of this one costs.
            reason: String,
        },
        /// Another device is the better one for it.
        Reallocated {
            /// True for a larger one, false for a smaller one that is sufficient.
            upgrade: bool,
            /// In words.
            reason: String,
        },
        /// Its program asked for more than its place has.
        Asked {
            /// In words.
            reason: String,
        },
        /// Its node has said when it will be gone.
        Revoked {
            /// Who said so.
            who: String,
            /// When it will be gone.
            at: Timestamp,
        },
        /// Its place is not viable, and no other is: it waits.
        Unviable {
            /// In words.
            reason: String,
        },
        /// What it has kept of its range is done; the rest is with its parts, for the last of
        /// which it waits.
        Parts,
        /// A part of it has failed or was cancelled: it stops, and fails.
        PartFailed {
            /// Which part.
            part: ExecutionId,
            /// In words.
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
                "{} on {} was {:.1} % (limit {:.1} % for {} ms) since {}",
                e.signal,
                e.node,
                e.value * 100.0,
                e.threshold.high * 100.0,
                e.threshold.dwell_ms,
                e.since
            ),
            Cause::Operator { who } => format!("asked for by {who}"),
            Cause::Drain { who } => format!("node is draining, asked for by {who}"),
            Cause::Lost { silent_ms } => format!("node was silent for {silent_ms} ms"),
            Cause::NotTaken { reason } => format!("node did not take it: {reason}"),
            Cause::Orphaned { reason } => format!("nobody held it: {reason}"),
            Cause::Resumed => "resumed after a pause".to_owned(),
            Cause::Balance => "another node had a free slot".to_owned(),
            Cause::Corrupt { node, reason } => format!(
                "{} computed wrong bits: {reason}",
                node.as_ref().map_or("a node", |n| n.as_str())
            ),
            Cause::Preempted { rule, reason, .. } => {
                format!("gave way to another ({}): {reason}", rule.as_str())
            }
            Cause::Reallocated { upgrade, reason } => {
                let to = if *upgrade { "larger" } else { "smaller" };
                format!("moved to a {to} device: {reason}")
            }
            Cause::Asked { reason } => format!("the program asked for more: {reason}"),
            Cause::Revoked { who, at } => format!("node will be gone at {at}, said {who}"),
            Cause::Unviable { reason } => format!("no place is viable: {reason}"),
            Cause::Parts => "its own range is done; the rest is with its parts".to_owned(),
            Cause::PartFailed { reason, .. } => format!("it cannot complete: {reason}"),
        }
    }
}

/// The pressure that made a node unviable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evidence {
    /// Where.
    pub node: NodeId,
    /// Which signal.
    pub signal: Signal,
    /// Which device of the node, if it was one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its value in [0, 1] at the decision.
    pub value: f64,
    /// The threshold in force.
    pub threshold: Threshold,
    /// Since when it was at or above `high`.
    pub since: Timestamp,
    /// The hardware vector at the decision (readings that were measured, [`crate::limits::EVIDENCE_LIMIT`] at most).
    pub vector: Vec<Reading>,
}

/// A choice of a node, with everybody who was considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Decision {
    /// Who was considered, the chosen one first ([`crate::limits::CANDIDATES_LIMIT`] at most).
    pub candidates: Vec<Candidate>,
    /// Candidates beyond those listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u32,
    /// Whose choice it was and when, where the node itself appended the binding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrusted: Option<Entrusted>,
}

/// A first binding that its node was entrusted with: the policy service made it, the node appends
/// it together with what it has to say itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Entrusted {
    /// The policy service, as an author: `policy/<id>`.
    pub by: String,
    /// When it chose, by its clock: from then on the execution is bound.
    pub at: Timestamp,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// A node that was considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Which device of it, where a device was considered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub substrate: Option<String>,
    /// Its score where it was acceptable; higher is better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Why it was rejected, each reason a sentence; empty where it was acceptable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<String>,
}
