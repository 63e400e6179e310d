//! Compares ledgers with what nodes hold.
//!
//! A ledger in phase `started` names a node that must take the next step. If that node lives
//! without the execution, no process would ever act. Causes are a lost append, a broker that lost
//! its last messages, or a defect. So each node is asked for everything that it holds. An execution
//! that two answers lack is bound again.
//!
//! A wrong verdict costs only a recomputation since the last commit: the new binding is a
//! compare-and-set on the judged message, and fences the old holder.

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::execution::Missing;
use crate::lifecycle::cluster::{NodeIx, Presence, Stage};
use crate::lifecycle::gate::Gate;
use fiec_schemas::messages::Holding;
use fiec_schemas::{ExecutionId, InstanceId, NodeId};

impl Lifecycle {
    /// Asks a node what it holds, if executions have started there and the last question is old
    /// enough.
    pub(crate) fn ask_for_holdings(&mut self, ix: NodeIx) {
        let now = self.now;
        let interval = self.config.holdings_ms;
        let node = self.cluster.node_quietly(ix);
        let started = node.started.saturating_add(node.parked);
        if started == 0 || node.presence != Presence::Up || now.mono < node.holdings_due {
            return;
        }
        node.holdings_asked = now.mono;
        node.holdings_due = now.mono.plus(interval);
        self.out.push(Action::AskHoldings {
            node: node.id.clone(),
        });
    }

    /// A node said that it does not hold an execution: ask it for all holdings at once.
    pub(crate) fn suspect(&mut self, ix: NodeIx) {
        self.ask_again_within(ix, 0);
    }

    /// Asks a node for its holdings within this time.
    pub(crate) fn ask_again_within(&mut self, ix: NodeIx, ms: u64) {
        let due = self.now.mono.plus(ms);
        let node = self.cluster.node_quietly(ix);
        node.holdings_due = node.holdings_due.min(due);
    }

    /// The executions that have started on a node, and are missing in its answer twice.
    pub(crate) fn orphans_of(
        &mut self,
        ix: NodeIx,
        instance: InstanceId,
        held: &[Holding],
    ) -> Vec<ExecutionId> {
        let node = self.cluster.node(ix);
        let asked = node.holdings_asked;
        let confirm_ms = self.config.holdings_confirm_ms;
        let mut orphans = Vec::new();
        for id in node.assigned.clone() {
            let Some(e) = self.cluster.execution_mut(id) else {
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
            self.ask_again_within(ix, confirm_ms);
        }
        orphans
    }
}

impl Lifecycle {
    /// Compares the executions that have started on a node with the node's answer.
    pub(crate) fn reconcile(
        &mut self,
        gate: &mut impl Gate,
        name: &NodeId,
        instance: InstanceId,
        held: &[Holding],
    ) {
        let Some(ix) = self.cluster.find(name) else {
            return;
        };
        let orphans = self.orphans_of(ix, instance, held);
        for id in orphans {
            self.bind_orphan(gate, id, ix);
        }
    }

    /// Binds an execution again that its node does not hold.
    pub(crate) fn bind_orphan(&mut self, gate: &mut impl Gate, id: ExecutionId, ix: NodeIx) {
        let now = self.now;
        let Some(cause) = self.loss(now, id) else {
            return;
        };
        if self.rebind(gate, id, cause, Some(ix)) == Placed::NoRoom {
            self.wait(gate, id);
        }
    }
}
