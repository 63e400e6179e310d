//! Submissions, and the answers to them.

use fiec_schemas::{Event, ExecutionId, Submission, Tenant, Timestamp};
use serde::Serialize;

use crate::Action;

/// A submission whose execution is not known yet.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct NewExecution<'a> {
    /// Its id.
    pub execution: ExecutionId,
    /// Its owner.
    pub tenant: &'a Tenant,
    /// Its submission.
    pub spec: &'a Submission,
    /// Time of the submission, by the broker's clock.
    pub submitted_at: Timestamp,
}

impl NewExecution<'_> {
    /// The append that begins its ledger with these events.
    pub fn append(&self, events: Vec<Event>) -> Action {
        Action::Append {
            execution: self.execution,
            tenant: self.tenant.clone(),
            expected: 0,
            events,
            ticket: None,
        }
    }
}

/// The policy's answer to a submission.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Submitted {
    /// Append these events as the first message of the ledger: `submitted`, and `bound` if a slot
    /// is free.
    Append(Vec<Event>),
    /// Every suitable node is full, and the policy stores nothing. Submit it again when an
    /// execution has completed.
    Hold,
}
