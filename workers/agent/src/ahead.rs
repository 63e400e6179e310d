//! Runs that a child is given ahead, before its present run has ended. So neither the child nor the
//! agent waits between two short executions.
//!
//! Only a child whose last run was short is given runs ahead: executions of its program and tenant
//! that have no state yet. If a run turns out to be long, the runs behind it are withdrawn and go
//! back to the front of the queue. The child may still start them, so it is ended after its present
//! run. Its work on them does not count, since nobody appends it.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use fiec_kit::frames::{self, Order};
use fiec_schemas::Timestamp;
use fiec_schemas::substrate::HOST;

use crate::attempts::order_to_run;
use crate::capsules;
use crate::child_process::{Child, Key};
use crate::job::{Job, Start};
use crate::shared::{self, Shared};

/// Most runs ahead of a child.
const DEPTH: usize = 8;
/// Most bytes of orders sent ahead: far less than a socket takes without a reader.
const BYTES: usize = 32 * 1024;
/// A run of at most this many microseconds is short.
const SHORT_US: i64 = 1_000;

/// The jobs whose runs a child was given ahead, in order. If dropped, they return to the queue.
#[derive(Default)]
pub struct Ahead {
    jobs: VecDeque<Job>,
    home: Weak<Shared>,
}

impl Ahead {
    /// Takes the next job. The child starts it by itself.
    pub fn next(&mut self) -> Option<Job> {
        self.jobs.pop_front()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade().filter(|_| !self.jobs.is_empty()) else {
            return;
        };
        let jobs = std::mem::take(&mut self.jobs);
        home.metrics.taken_back.inc_by(jobs.len() as u64);
        if home.is_draining() {
            for job in jobs {
                tokio::spawn(capsules::refuse(home.clone(), job, "the node is draining"));
            }
        } else if !home.halt.is_cancelled() {
            shared::give_back(&home, jobs);
        }
    }
}

/// Whether a run of this duration was short.
pub fn was_short(since: Timestamp, until: Timestamp) -> bool {
    until.micros() - since.micros() <= SHORT_US
}

/// Gives a child whose last run was short further runs, if matching jobs wait.
pub async fn give(shared: &Arc<Shared>, child: &mut Child, key: &Key) {
    // A package's own process may not support queued runs.
    if !child.quick
        || child.package.is_some()
        || child.logs.has_printed()
        || child.ahead.jobs.len() > DEPTH / 2
    {
        return;
    }
    let mut orders = Vec::new();
    let mut jobs = shared.take_alike(DEPTH - child.ahead.jobs.len(), |job| {
        let (Start::Bound(tip) | Start::Entrusted(tip, _)) = &job.start else {
            return false;
        };
        let state = &tip.state;
        let Some(spec) = &state.spec else {
            return false;
        };
        if spec.program != key.0
            || state.tenant != key.1
            || state.boundary.is_some()
            || state.requested().is_some()
            || state.outbox.is_some()
            // A device needs a lease of its runner.
            || state.phase.binding().is_some_and(|b| b.substrate != HOST)
        {
            return false;
        }
        let run = order_to_run(shared, state, spec, None);
        match frames::head(&Order::Run(Box::new(run)), 0) {
            Ok(frame) if orders.len() + frame.len() <= BYTES => {
                orders.extend_from_slice(&frame);
                true
            }
            _ => false,
        }
    });
    if jobs.is_empty() {
        return;
    }
    shared.metrics.given_ahead.inc_by(jobs.len() as u64);
    child.ahead.home = Arc::downgrade(shared);
    child.ahead.jobs.append(&mut jobs);
    if child.link.send_frames(&orders).await.is_err() {
        // The child is gone, and its reader will report that. The jobs need not wait for it.
        withdraw(child);
    }
}

/// Withdraws the runs ahead of a child. The child may start them in vain, so it serves no execution
/// after its present run.
pub fn withdraw(child: &mut Child) {
    if !child.ahead.is_empty() {
        child.spent = true;
        drop(std::mem::take(&mut child.ahead));
    }
}
