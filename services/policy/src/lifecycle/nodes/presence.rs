//! The silence of nodes: when one is asked, when it counts as lost, and when it is back.

use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{InstanceId, NodeId};

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::view::LedgerView;

/// Interval between two comparisons of a node's executions with its current instance, in ms.
const ANOTHER_LIFE_MS: u64 = 500;

impl Lifecycle {
    /// Looks after a node on a tick. Returns true if its executions must be reviewed.
    pub(crate) fn look_after_node(&mut self, ix: NodeIx) -> bool {
        let now = self.now;
        if self.watch_node(ix, false) {
            self.cluster.changed.places = true;
        }
        if self.cluster.node(ix).descriptor.is_some() {
            self.say_viability(ix);
        }
        let node = self.cluster.node_quietly(ix);
        if node.starts.pass(now.mono, &self.config) {
            self.cluster.changed.places = true;
            self.cluster.changed(ix);
        }
        let limit = self.config.liveness_ms;
        let node = self.cluster.node_quietly(ix);
        let silent = now.mono.since(node.heard) > limit;
        let of_interest = node.descriptor.is_some() || !node.assigned.is_empty();
        match node.presence {
            Presence::Up if silent && of_interest && self.connected => {
                node.presence = Presence::Probing { since: now.mono };
                self.out.push(Action::Probe {
                    node: node.id.clone(),
                });
                self.cluster.changed(ix);
            }
            // A probe without any answer, not even a failure: ask again.
            Presence::Probing { since } if now.mono.since(since) > limit && self.connected => {
                node.presence = Presence::Probing { since: now.mono };
                self.out.push(Action::Probe {
                    node: node.id.clone(),
                });
            }
            _ => {}
        }
        let node = self.cluster.node(ix);
        if node.assigned.is_empty() || !self.connected {
            return false;
        }
        self.ask_for_holdings(ix);
        let node = self.cluster.node(ix);
        let another_life = now.mono.since(node.reviewed) >= ANOTHER_LIFE_MS
            && node.confirmed.is_some_and(|(confirmed, since)| {
                now.mono.since(since) < 10 * limit && node.life == Some(confirmed)
            });
        let lost = matches!(node.presence, Presence::Lost { .. });
        let review = lost || another_life || node.is_draining() || self.presses(ix);
        if review {
            self.cluster.node_quietly(ix).reviewed = now.mono;
        }
        review
    }

    /// Notes the result of a probe. Returns the node if its executions must be reviewed.
    pub(crate) fn note_probe(
        &mut self,
        name: &NodeId,
        answered: Option<InstanceId>,
    ) -> Option<NodeIx> {
        let now = self.now;
        let ix = self.cluster.find(name)?;
        let limit = self.config.liveness_ms;
        let node = self.cluster.node_mut(ix);
        match answered {
            Some(instance) => {
                node.heard = node.heard.max(now.mono);
                let was = std::mem::replace(&mut node.presence, Presence::Up);
                if node.confirmed.is_none_or(|(c, _)| c != instance) {
                    node.confirmed = Some((instance, now.mono));
                }
                self.cluster.changed.places = true;
                if matches!(was, Presence::Lost { .. }) {
                    self.record(
                        ix,
                        NodeEventKind::Returned,
                        "it answers again".to_owned(),
                        None,
                    );
                }
            }
            None => {
                let Presence::Probing { .. } = node.presence else {
                    return None;
                };
                let silent_ms = now.mono.since(node.heard);
                // A new instance is probed at once, and may not listen yet. Silence must last.
                if silent_ms <= limit && node.descriptor.is_some() {
                    node.presence = Presence::Up;
                    return None;
                }
                if !self.connected {
                    node.presence = Presence::Up;
                    return None;
                }
                node.presence = Presence::Lost { since: now.mono };
                let detail = format!("silent for {silent_ms} ms, and a probe was not answered");
                if node.descriptor.is_some() {
                    self.record(ix, NodeEventKind::Lost, detail, None);
                }
            }
        }
        Some(ix)
    }

    /// Silence before this moment does not count.
    pub(crate) fn start_clocks_anew(&mut self) {
        let now = self.now.mono;
        for ix in self.cluster.keys() {
            let node = self.cluster.node_mut(ix);
            node.heard = node.heard.max(now);
            if matches!(node.presence, Presence::Probing { .. }) {
                node.presence = Presence::Up;
            }
        }
    }

    /// A lost node whose worker writes again is up. Otherwise executions that it has started since
    /// would be taken from it until its next vector arrives.
    pub(crate) fn writes_again(&mut self, view: &LedgerView<'_>) {
        let Some(ix) = view
            .worker()
            .and_then(|name| self.cluster.find(&name.parse().ok()?))
        else {
            return;
        };
        if self.loaded && matches!(self.cluster.node(ix).presence, Presence::Lost { .. }) {
            self.cluster.node_mut(ix).presence = Presence::Up;
            self.cluster.changed.places = true;
            let detail = "its worker writes again".to_owned();
            self.record(ix, NodeEventKind::Returned, detail, None);
        }
    }
}
