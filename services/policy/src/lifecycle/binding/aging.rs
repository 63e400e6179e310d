//! Keeps the ledgers of executions that nobody computes. The stream drops messages by their age, so
//! what an execution needs is appended again before that: its state, and σ in the message's body.
//!
//! A started execution is left out: its holder is the only author of its ledger.

use fiec_schemas::Sequence;

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage};

/// True if the execution needs a message at or before this sequence.
fn needs_any_of(e: &Execution, up_to: Sequence) -> bool {
    let idle = matches!(
        e.stage,
        Stage::Pending | Stage::Paused | Stage::Held | Stage::Verifying
    );
    let ages = |seq| seq > 0 && seq <= up_to;
    idle && e.in_flight.is_none() && (ages(e.seq) || ages(e.state_seq))
}

impl Lifecycle {
    /// Messages up to this sequence will soon drop out of the stream. What live executions need of
    /// them is appended again, `burst` executions at a time.
    pub(crate) fn keep_aged(&mut self, up_to: Sequence) {
        if !self.loaded || !self.connected {
            return;
        }
        let aged = self.cluster.those_that(|e| needs_any_of(e, up_to));
        let mine: Vec<_> = aged.into_iter().filter(|id| self.is_mine(*id)).collect();
        for id in mine.into_iter().take(self.config.burst) {
            let Some(e) = self.cluster.execution_mut(id) else {
                continue;
            };
            e.begin_append();
            self.out.push(Action::Keep {
                execution: id,
                tenant: e.tenant.clone(),
                expected: e.seq,
            });
        }
    }
}
