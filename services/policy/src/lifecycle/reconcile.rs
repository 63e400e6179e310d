//! What nodes hold, against what ledgers say of them.

use crate::lifecycle::cluster::{NodeIx, Presence};

use super::Lifecycle;
use crate::Action;

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
}
