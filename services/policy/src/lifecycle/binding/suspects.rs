//! Programs under which workers end: one that kills its worker, or takes all the memory of the
//! machine, would go from node to node and take the others along.
//!
//! A ledger counts the workers that ended while they computed an execution, from one commit to the
//! next. An execution that is one short of the limit is a suspect. Suspects are kept apart, so that
//! the next death tells which one it was: the others commit, and are none any more. At the limit the
//! execution is held. It is not failed: the machines may have been taken away from outside.

use fiec_schemas::{Cause, Event, ExecutionId, Fault};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, NodeIx, Stage};
use crate::time::Now;

fn deaths(e: &Execution) -> usize {
    e.extra.as_ref().map_or(0, |extra| extra.deaths.len())
}

impl Lifecycle {
    /// Notes whether an execution is a suspect, from what its ledger says.
    pub(crate) fn note_suspect(&mut self, id: ExecutionId) {
        let deaths = self.cluster.execution(id).map_or(0, deaths);
        self.suspect_after(id, deaths);
    }

    /// Forgets an execution that has ended.
    pub(crate) fn forget_suspect(&mut self, id: ExecutionId) {
        self.suspects.remove(&id);
    }

    fn suspect_after(&mut self, id: ExecutionId, deaths: usize) {
        let limit = self.config.deadly_workers as usize;
        if limit > 1 && deaths + 1 >= limit {
            self.suspects.insert(id);
        } else {
            self.suspects.remove(&id);
        }
    }

    /// The nodes where other suspects are, for a suspect. Those that are lost there are no more.
    pub(crate) fn apart_from(&self, now: Now, id: ExecutionId) -> Vec<NodeIx> {
        if !self.suspects.contains(&id) {
            return Vec::new();
        }
        let others = self.suspects.iter().filter(|other| **other != id);
        let others = others.filter(|other| self.loss(now, **other).is_none());
        let node = |other: &ExecutionId| self.cluster.execution(*other)?.stage.node();
        others.filter_map(node).collect()
    }

    /// Holds an execution instead of binding it again if too many workers have ended while they
    /// computed it. Returns true if it does.
    pub(crate) fn hold_if_deadly(&mut self, id: ExecutionId, cause: &Cause) -> bool {
        let limit = self.config.deadly_workers as usize;
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        // The ledger does not tell of this one yet.
        let dies_now = match (e.stage, cause) {
            (Stage::Started(node, _), Cause::Lost { .. }) => Some(node),
            _ => None,
        };
        let count = deaths(e) + usize::from(dies_now.is_some());
        if limit == 0 || count < limit {
            // Those that died along are bound again in this very step.
            self.suspect_after(id, count);
            return false;
        }
        if self.defers(id, self.config.grace_ms) {
            return true;
        }
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let is_part = e.is_part;
        let known = e.extra.iter().flat_map(|extra| &extra.deaths);
        let mut nodes: Vec<String> = known.map(ToString::to_string).collect();
        nodes.extend(dies_now.map(|ix| self.cluster.node(ix).id.to_string()));
        let reason = format!(
            "{count} workers have ended while they computed it, without a commit between: {}",
            nodes.join(", ")
        );
        let fault = Some(Box::new(Fault::WorkerDied));
        let stderr = String::new();
        // A part of a range has no life of its own.
        let event = match is_part {
            true => Event::Failed {
                reason,
                stderr,
                fault,
            },
            false => Event::Held {
                reason,
                stderr,
                fault,
            },
        };
        self.end_with(id, event);
        true
    }
}
