//! The body of a post: how an execution ended, as JSON.

use clap::ValueEnum;
use fiec_schemas::{Event, LedgerMessage, Ordinal, PhaseKind};
use serde::Serialize;
use serde_json::Value;

/// Ends that can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum End {
    /// It has its result.
    Completed,
    /// It cannot complete.
    Failed,
    /// It has failed, and waits for a retry.
    Held,
    /// Somebody cancelled it.
    Cancelled,
}

/// All ends, in the order in which they are listed.
pub const ALL: [End; 4] = [End::Completed, End::Failed, End::Held, End::Cancelled];

impl End {
    const fn kind(self) -> &'static str {
        match self {
            Self::Completed => "execution.completed",
            Self::Failed => "execution.failed",
            Self::Held => "execution.held",
            Self::Cancelled => "execution.cancelled",
        }
    }
}

/// The body of a post.
#[derive(Debug, Serialize)]
pub struct Notice {
    #[serde(rename = "type")]
    kind: &'static str,
    timestamp: String,
    data: Data,
    #[serde(skip)]
    ordinal: Ordinal,
}

#[derive(Debug, Serialize)]
struct Data {
    execution: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    tenant: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<String>,
    phase: PhaseKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Whose fault it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault_of: Option<&'static str>,
    /// Absent: none, or more than 4 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
}

impl Notice {
    /// The notice of a ledger message that ends an execution, if it is one of these ends.
    pub fn of(message: &LedgerMessage, wanted: &[End]) -> Option<Self> {
        let (end, reason, fault, result) =
            message.events.iter().rev().find_map(|event| match event {
                Event::Completed { result, .. } => {
                    let result = (!result.is_null()).then(|| result.clone());
                    Some((End::Completed, None, None, result))
                }
                Event::Failed { reason, fault, .. } => {
                    Some((End::Failed, Some(reason.clone()), fault.as_deref(), None))
                }
                Event::Held { reason, fault, .. } => {
                    Some((End::Held, Some(reason.clone()), fault.as_deref(), None))
                }
                Event::Cancelled { who } => {
                    Some((End::Cancelled, Some(format!("by {who}")), None, None))
                }
                _ => None,
            })?;
        if !wanted.contains(&end) {
            return None;
        }
        let state = &message.state;
        Some(Self {
            kind: end.kind(),
            timestamp: state.at.to_string(),
            ordinal: state.ordinal,
            data: Data {
                execution: state.execution.to_string(),
                id: state.client_id.as_ref().map(ToString::to_string),
                tenant: state.tenant.to_string(),
                batch: state.batch.as_ref().map(|batch| batch.id.to_string()),
                program: state.spec.as_ref().map(|spec| spec.program.clone()),
                phase: state.phase.kind(),
                reason,
                fault_of: fault.map(|fault| fault.kind().owner().as_str()),
                result,
            },
        })
    }

    /// Its name, the same when it is posted again.
    pub fn id(&self) -> String {
        format!("{}-{}", self.data.execution, self.ordinal)
    }
}
