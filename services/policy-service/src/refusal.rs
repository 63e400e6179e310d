//! Why the service refused a request. Handlers decide by the variants. Only this file makes the
//! code for programs and the text for people from them.

use std::fmt;
use std::time::Duration;

use fiec_broker::{AppendError, BrokerError};
use fiec_policy::{UnknownNode, YieldRefusal};
use fiec_schemas::messages::{ExecutionVerb, RefusalCode, Untaken};
use fiec_schemas::named::UnknownName;
use fiec_schemas::{
    BoundaryIndex, ExecutionId, FieldError, IdError, NodeId, PhaseKind, Tenant, Timestamp,
    TransitionError,
};

/// Advice for a core that stays busy.
const SHOULD_IT_LAST: &str = "if this lasts, check its log and /metrics, and start another policy \
                              service or restart this one; running executions continue";

/// Boundaries that a refusal names.
const NAMED: usize = 12;

/// Reason of a refusal. `name` is the execution as the asker calls it.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The request is not valid JSON of its form.
    #[error("the request cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// The subject's tenant is invalid.
    #[error("{0}")]
    BadTenant(#[from] IdError),
    /// The subject's verb is unknown.
    #[error("there is no such request about a batch: {0}")]
    UnknownVerb(#[from] UnknownName),
    /// A field of the request breaks a rule.
    #[error("{0}")]
    Invalid(#[from] FieldError),
    /// The ledger does not allow the change.
    #[error("{0}")]
    Forbidden(#[from] TransitionError),
    /// No ledger has this name.
    #[error(
        "tenant {tenant} has no execution {id}; an execution that ended long ago is in PostgreSQL \
         only (`fiec history`)"
    )]
    UnknownExecution {
        /// The tenant of the request.
        tenant: Tenant,
        /// The requested id.
        id: String,
    },
    /// Its ledger no longer exists.
    #[error("the ledger of {name} is gone")]
    LedgerGone {
        /// The execution.
        name: String,
    },
    /// The core has not read its ledger.
    #[error("{name} is not known yet; try again")]
    NotReadYet {
        /// The execution.
        name: String,
    },
    /// No ledger of the tenant belongs to this batch.
    #[error("{}", unknown_batch(.tenant, .batch, *.untaken))]
    UnknownBatch {
        /// The tenant of the request.
        tenant: Tenant,
        /// The requested group, for people.
        batch: String,
        /// Queued submissions that may belong to it.
        untaken: Option<Untaken>,
    },
    /// The submission of the execution is still queued.
    #[error("{id} is submitted and not taken in yet; try again")]
    Queued {
        /// The requested id.
        id: String,
    },
    /// The request waits for submissions that are still queued.
    #[error("{}", not_taken_in(.tenant, *.untaken))]
    NotTakenIn {
        /// Their tenant.
        tenant: Tenant,
        /// The queued submissions.
        untaken: Untaken,
    },
    /// Too many submissions are queued to read all of them.
    #[error(
        "the prerequisites may be among the queued submissions of tenant {tenant}: {seen} of them \
         were checked, and there are more; try again"
    )]
    TooManyQueued {
        /// Their tenant.
        tenant: Tenant,
        /// Number of submissions that were read.
        seen: u64,
    },
    /// No node of this name has joined.
    #[error("{0}")]
    UnknownNode(UnknownNode),
    /// The node has all its contracts.
    #[error("{0} is not quarantined")]
    NotQuarantined(NodeId),
    /// The execution has ended.
    #[error("{name} is already {phase}; {}", after_the_end(.name, *.phase))]
    Ended {
        /// The execution.
        name: String,
        /// Its final phase.
        phase: PhaseKind,
    },
    /// A request to pause it came while it was paused.
    #[error("{name} was paused by {who} already")]
    AlreadyPaused {
        /// The execution.
        name: String,
        /// Who paused it.
        who: String,
    },
    /// A request to resume it came while it was not paused.
    #[error("{name} is not paused, it is {phase}")]
    NotPaused {
        /// The execution.
        name: String,
        /// Its phase.
        phase: PhaseKind,
    },
    /// A request to resume it came before its order to pause took effect.
    #[error(
        "{name} has not come to the boundary at which it pauses; it can be resumed once it has \
         paused"
    )]
    Pausing {
        /// The execution.
        name: String,
    },
    /// Its node is about to start it, or to release it.
    #[error("{name} is moving ({node}: {reason}); try again once it runs")]
    Moving {
        /// The execution.
        name: String,
        /// Its node.
        node: NodeId,
        /// The node's reason.
        reason: String,
    },
    /// It ran before, and is not running at this moment.
    #[error("{name} is {phase}; try again once it runs")]
    BetweenNodes {
        /// The execution.
        name: String,
        /// Its phase.
        phase: PhaseKind,
    },
    /// A request to pause it came while it was held.
    #[error("{name} has failed and is held; run `fiec retry {name}` to restart it")]
    IsHeld {
        /// The execution.
        name: String,
    },
    /// It cannot start again.
    #[error("{name} cannot be retried: {why}")]
    CannotRetry {
        /// The execution.
        name: String,
        /// Why.
        why: CannotRetry,
    },
    /// It does not run.
    #[error("{name} is {phase}; only a running execution can be reconfigured")]
    NotRunning {
        /// The execution.
        name: String,
        /// Its phase.
        phase: PhaseKind,
    },
    /// Its node refused.
    #[error("{node} did not take it: {reason}")]
    NodeRefused {
        /// The node.
        node: NodeId,
        /// The node's reason.
        reason: String,
    },
    /// Its node did not answer.
    #[error(
        "{name} runs on {node}, which does not answer ({reason}); should the node be lost, the \
         execution is bound anew within seconds, and the request can be made again"
    )]
    NodeSilent {
        /// The execution.
        name: String,
        /// The node.
        node: NodeId,
        /// Why there is no answer.
        reason: String,
    },
    /// The policy refuses to move it.
    #[error("{0}")]
    Yield(#[from] YieldRefusal),
    /// Its node refused the order to move it.
    #[error("its node did not take the order: {0}")]
    OrderRefused(String),
    /// It is about to start at its node, or to leave it.
    #[error("its node did not take the order yet: {0}; try again")]
    OrderTooEarly(String),
    /// Its node did not answer the order to move it.
    #[error("its node did not answer; the order is given again while it lives")]
    OrderUnanswered,
    /// A part of it has no ledger yet.
    #[error("its part {0} is being made; ask once more when `fiec status {0}` knows it")]
    Unborn(ExecutionId),
    /// The request succeeded for some of its parts only.
    #[error("{verb} reached {reached} of its parts; {refusal}")]
    InPart {
        /// The verb of the request.
        verb: ExecutionVerb,
        /// Parts for which it succeeded.
        reached: usize,
        /// Why it failed for one part.
        refusal: Box<Refusal>,
    },
    /// Other writers were first at each attempt.
    #[error("{name} changes faster than this request can be applied; try again")]
    Overtaken {
        /// The execution.
        name: String,
    },
    /// Other writers changed the same setting at each attempt.
    #[error("cannot write {what}: others keep writing it; try again")]
    Contended {
        /// The setting.
        what: String,
    },
    /// Requests use all the memory reserved for them.
    #[error(
        "the policy service has no memory left for this request; nothing was changed, try again"
    )]
    Busy,
    /// Submissions use all the memory reserved for reading.
    #[error(
        "the policy service had no memory left for this submission within {} s; nothing was \
         submitted, try again",
        .within.as_secs()
    )]
    TooMuchToRead {
        /// How long the request waited.
        within: Duration,
    },
    /// The core's channel stayed full.
    #[error(
        "the policy service's queue was full for {} ms; nothing was changed, try again in a \
         moment; {SHOULD_IT_LAST}",
        .within.as_millis()
    )]
    NoRoom {
        /// How long the request waited.
        within: Duration,
    },
    /// The core did not answer.
    #[error(
        "the policy service did not answer within {} ms; the request may still take effect, so \
         check `fiec status` before you retry; {SHOULD_IT_LAST}",
        .within.as_millis()
    )]
    Unanswered {
        /// How long the request waited.
        within: Duration,
    },
    /// The ledgers are being read at the start.
    #[error("the policy service is still taking over the ledgers; try again")]
    Loading,
    /// The service stops, and has changed nothing.
    #[error(
        "the policy service is stopping, and nothing was changed; try again, another one answers"
    )]
    Ending,
    /// The service stopped before it answered.
    #[error(
        "the policy service stopped before it answered; the request may still take effect, so \
         check `fiec status` before you retry"
    )]
    EndedUnanswered,
    /// An operation of the broker failed.
    #[error("{0}")]
    Broker(String),
}

/// Why an execution cannot start again.
#[derive(Debug, Clone, PartialEq)]
pub enum CannotRetry {
    /// It is in another phase.
    Phase(PhaseKind),
    /// It is a part of a range, or has parts.
    Spread,
    /// Its submission is not stored any more.
    NoSubmission,
    /// It was to fail after its deadline, and would at once.
    Late(Timestamp),
    /// σ of this boundary is not stored any more.
    NoState(BoundaryIndex, Vec<BoundaryIndex>),
}

impl fmt::Display for CannotRetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase) => write!(
                f,
                "it is {phase}; only a failed, held or cancelled execution can be retried"
            ),
            Self::Spread => f.write_str(
                "it shared its range with other executions that ended with it; submit it under \
                 another id",
            ),
            Self::NoSubmission => f.write_str(
                "its submission is no longer stored, or it ended under an earlier version; submit \
                 it under another id",
            ),
            Self::Late(deadline) => write!(
                f,
                "its deadline {deadline} has passed, and it is to fail then; give it another one \
                 (`fiec retry --deadline`)"
            ),
            Self::NoState(at, stored) => {
                write!(f, "the state of boundary {at} is not stored")?;
                let mut named: Vec<String> = stored.iter().map(ToString::to_string).collect();
                if let Some(more) = named.len().checked_sub(NAMED).filter(|more| *more > 0) {
                    named.truncate(NAMED);
                    named.push(format!("{more} earlier ones"));
                }
                named.push("0, the beginning".to_owned());
                write!(f, "; `--from-boundary` can go back to {}", named.join(", "))
            }
        }
    }
}

impl Refusal {
    /// A field of the request breaks a rule.
    pub fn invalid(field: &str, rule: impl Into<String>) -> Self {
        Self::Invalid(FieldError::new(field, rule))
    }

    /// The broker could not do `what`.
    pub fn broker(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Broker(format!("cannot {what}: {error}"))
    }

    /// The code of this refusal, for programs.
    pub fn code(&self) -> RefusalCode {
        use RefusalCode as Code;
        match self {
            Self::Unreadable(_) | Self::BadTenant(_) | Self::UnknownVerb(_) => Code::Unreadable,
            Self::Invalid(_) | Self::Forbidden(_) => Code::Invalid,
            Self::UnknownExecution { .. } | Self::LedgerGone { .. } => Code::UnknownExecution,
            Self::UnknownBatch { untaken: None, .. } => Code::UnknownBatch,
            Self::UnknownBatch { .. }
            | Self::Queued { .. }
            | Self::NotTakenIn { .. }
            | Self::TooManyQueued { .. } => Code::NotTakenIn,
            Self::UnknownNode(_) => Code::UnknownNode,
            Self::NotQuarantined(_) | Self::AlreadyPaused { .. } => Code::AlreadySo,
            Self::Ended { .. } => Code::Ended,
            Self::NotPaused { .. } => Code::NotPaused,
            Self::IsHeld { .. } => Code::AlreadySo,
            Self::CannotRetry { .. } => Code::CannotRetry,
            Self::Pausing { .. } => Code::Pausing,
            Self::Moving { .. }
            | Self::BetweenNodes { .. }
            | Self::OrderTooEarly(_)
            | Self::Unborn(_) => Code::Moving,
            Self::NotRunning { .. } => Code::NotRunning,
            Self::NodeRefused { .. } | Self::OrderRefused(_) => Code::NodeRefused,
            Self::NodeSilent { .. } | Self::OrderUnanswered => Code::NodeSilent,
            Self::Yield(refusal) => match refusal {
                YieldRefusal::NotLive => Code::Ended,
                YieldRefusal::Busy => Code::Moving,
                YieldRefusal::Pending
                | YieldRefusal::Paused
                | YieldRefusal::HasFailed
                | YieldRefusal::Verifying
                | YieldRefusal::Held(_) => Code::NotRunning,
                YieldRefusal::UnknownNode(_) => Code::UnknownNode,
                YieldRefusal::AlreadyThere(_) => Code::AlreadySo,
                YieldRefusal::Rejected { .. }
                | YieldRefusal::NoOther
                | YieldRefusal::NoPlace(_) => Code::NoPlace,
            },
            Self::InPart { refusal, .. } => refusal.code(),
            Self::Overtaken { .. } | Self::Contended { .. } => Code::Overtaken,
            Self::Busy | Self::TooMuchToRead { .. } | Self::NoRoom { .. } => Code::Busy,
            Self::Unanswered { .. } | Self::EndedUnanswered => Code::Unanswered,
            Self::Loading | Self::NotReadYet { .. } => Code::Loading,
            Self::Ending => Code::Ending,
            Self::Broker(_) => Code::Broker,
        }
    }

    /// True if there is nothing left to do: the execution has ended, or is in the requested state.
    pub fn is_moot(&self) -> bool {
        let code = self.code();
        matches!(
            code,
            RefusalCode::Ended | RefusalCode::AlreadySo | RefusalCode::NotPaused
        )
    }

    /// True if the same request can succeed in a moment.
    pub fn is_pausing(&self) -> bool {
        self.code() == RefusalCode::Pausing
    }
}

impl From<BrokerError> for Refusal {
    fn from(error: BrokerError) -> Self {
        Self::Broker(error.to_string())
    }
}

impl From<AppendError> for Refusal {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Transition(error) => Self::Forbidden(error),
            error => Self::Broker(error.to_string()),
        }
    }
}

/// What to do about an execution that has ended.
fn after_the_end(name: &str, phase: PhaseKind) -> String {
    match phase.can_be_retried() {
        true => format!("`fiec retry {name}` starts it again from its last commit"),
        false => format!("`fiec history {name}` shows its decisions"),
    }
}

fn not_taken_in(tenant: &Tenant, untaken: Untaken) -> String {
    let messages = untaken.messages;
    format!("{messages} submission messages of tenant {tenant} have not been taken in; try again")
}

fn unknown_batch(tenant: &Tenant, batch: &str, untaken: Option<Untaken>) -> String {
    match untaken {
        Some(untaken) => format!(
            "no execution of {batch} is known, and {}",
            not_taken_in(tenant, untaken)
        ),
        None => format!(
            "tenant {tenant} has no execution of {batch}; a batch that ended long ago is in \
             PostgreSQL only (the view batch_summary)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reached_some_parts_only_has_the_code_of_the_reason() {
        let in_part = |refusal| Refusal::InPart {
            verb: ExecutionVerb::Resume,
            reached: 2,
            refusal: Box::new(refusal),
        };
        let name = || "solve".to_owned();
        let pausing = in_part(Refusal::Pausing { name: name() });
        assert!(pausing.is_pausing() && !pausing.is_moot());
        let phase = PhaseKind::Completed;
        let ended = in_part(Refusal::Ended {
            name: name(),
            phase,
        });
        assert!(ended.is_moot() && !ended.is_pausing());
        assert_eq!(
            ended.to_string(),
            "resume reached 2 of its parts; solve is already completed; `fiec history solve` shows \
             its decisions"
        );
    }
}
