//! Compares what ledgers say with what nodes hold. A ledger that says `started` names a node that
//! must do the next step. If that node lives and does not hold the execution, nobody would ever
//! act: a message that could not be written, a broker that lost its last messages, a defect. The
//! node is asked for everything that it holds; what two answers lack is bound anew.
//!
//! A wrong verdict costs a recomputation since the last commit and nothing else: the new binding is
//! a compare-and-set on the message that was judged, and fences the old holder.

use fiec_schemas::messages::Holding;
use fiec_schemas::{ExecutionId, InstanceId, NodeId};

use super::bind::Placed;
use super::{Action, Policy};
use crate::cluster::{NodeIx, Presence, Stage};
use crate::execution::Missing;
use crate::time::Now;

impl Policy {
    /// Asks a node what it holds, if something is started there and it was not asked for a while.
    pub(super) fn ask_for_holdings(&mut self, now: Now, ix: NodeIx, out: &mut Vec<Action>) {
        let interval = self.config.holdings_ms;
        let node = self.cluster.node_quietly(ix);
        let started = node.started.saturating_add(node.parked);
        if started == 0 || node.presence != Presence::Up || now.mono < node.holdings_due {
            return;
        }
        node.holdings_asked = now.mono;
        node.holdings_due = now.mono.plus(interval);
        out.push(Action::AskHoldings(node.id.clone()));
    }

    /// A node has said that it does not hold an execution: it is asked at once for all.
    pub(super) fn suspect(&mut self, now: Now, ix: NodeIx) {
        let node = self.cluster.node_quietly(ix);
        node.holdings_due = node.holdings_due.min(now.mono);
    }

    /// Judges what is started on a node by what it says that it holds.
    pub(super) fn reconcile(
        &mut self,
        now: Now,
        name: &NodeId,
        instance: InstanceId,
        held: &[Holding],
        out: &mut Vec<Action>,
    ) {
        let Some(ix) = self.cluster.find(name) else {
            return;
        };
        let node = self.cluster.node(ix);
        let asked = node.holdings_asked;
        let confirm_ms = self.config.holdings_confirm_ms;
        let mut orphans = Vec::new();
        for id in node.holds.clone() {
            let Some(e) = self.cluster.execution_mut(id) else {
                continue;
            };
            // What has started since the question was asked the answer need not know.
            let judged = e.stage == Stage::Started(ix, instance) && !e.busy && e.since <= asked;
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
            let node = self.cluster.node_quietly(ix);
            node.holdings_due = node.holdings_due.min(now.mono.plus(confirm_ms));
        }
        for id in orphans {
            self.bind_orphan(now, id, ix, out);
        }
    }

    /// Binds anew what its node does not hold.
    pub(super) fn bind_orphan(
        &mut self,
        now: Now,
        id: ExecutionId,
        ix: NodeIx,
        out: &mut Vec<Action>,
    ) {
        let Some(cause) = self.loss(now, id) else {
            return;
        };
        if self.rebind(now, id, cause, Some(ix), out) == Placed::NoRoom {
            self.wait(id);
        }
    }
}
