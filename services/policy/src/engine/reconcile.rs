//! Compares ledgers with what nodes hold.
//!
//! A ledger in phase `started` names a node that must take the next step. If that node lives
//! without the execution, no process would ever act. Causes are a lost append, a broker that lost
//! its last messages, or a defect. So each node is asked for everything that it holds. An execution
//! that two answers lack is bound again.
//!
//! A wrong verdict costs only a recomputation since the last commit: the new binding is a
//! compare-and-set on the judged message, and fences the old holder.

use fiec_schemas::messages::Holding;
use fiec_schemas::{ExecutionId, InstanceId, NodeId};

use super::Policy;
use super::bind::Placed;
use crate::lifecycle::cluster::execution::Missing;
use crate::lifecycle::cluster::{NodeIx, Stage};

impl Policy {
    /// Compares the executions that have started on a node with the node's answer.
    pub(super) fn reconcile(&mut self, name: &NodeId, instance: InstanceId, held: &[Holding]) {
        let _now = self.life.now;
        let Some(ix) = self.life.cluster.find(name) else {
            return;
        };
        let node = self.life.cluster.node(ix);
        let asked = node.holdings_asked;
        let confirm_ms = self.life.config.holdings_confirm_ms;
        let mut orphans = Vec::new();
        for id in node.holds.clone() {
            let Some(e) = self.life.cluster.execution_mut(id) else {
                continue;
            };
            // The answer need not contain executions that started after the question.
            let judged =
                e.stage == Stage::Started(ix, instance) && !e.is_appending() && e.since <= asked;
            if !judged {
                continue;
            }
            let found = held.binary_search_by_key(&id, |holding| holding.execution);
            let found = found.ok().and_then(|at| held.get(at));
            if found.is_some_and(|holding| holding.epoch == e.epoch) {
                if let Some(extra) = &mut e.extra {
                    extra.missing = None;
                }
                continue;
            }
            match e.missing() {
                None => e.extra().missing = Some(Missing::Since(asked)),
                Some(Missing::Since(since)) if asked.since(since) >= confirm_ms => {
                    e.extra().missing = Some(Missing::Orphaned);
                    orphans.push(id);
                    continue;
                }
                Some(Missing::Since(_) | Missing::Orphaned) => {}
            }
            self.life.ask_again_within(ix, confirm_ms);
        }
        for id in orphans {
            self.bind_orphan(id, ix);
        }
    }

    /// Binds an execution again that its node does not hold.
    pub(super) fn bind_orphan(&mut self, id: ExecutionId, ix: NodeIx) {
        let now = self.life.now;
        let Some(cause) = self.life.loss(now, id) else {
            return;
        };
        if self.rebind(id, cause, Some(ix)) == Placed::NoRoom {
            self.wait(id);
        }
    }
}
