//! Proofs of nodes, and the contracts that they have lost.

use std::sync::Arc;

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::substrate::HOST;
use fiec_schemas::trust::{Proof, Quarantine, Quarantined};
use fiec_schemas::{Contract, NodeId};

use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;

impl Lifecycle {
    /// True if this replica acts for a node.
    pub(crate) fn speaks_for(&self, name: &NodeId) -> bool {
        self.replicas.prefers_self(name.as_str().as_bytes())
    }

    /// Takes contracts away that a node's own canaries have broken: from a device, or from the
    /// whole node if its host failed, because programs on devices use the host as well.
    pub(crate) fn take_broken(&mut self, ix: NodeIx) {
        let node = self.cluster.node(ix);
        if !self.loaded || !self.speaks_for(&node.id) {
            return;
        }
        self.out
            .extend(node.trust.broken().into_iter().map(|r| Action::Quarantine {
                node: node.id.clone(),
                contract: r.contract,
                substrate: (r.substrate != HOST).then(|| r.substrate.clone()),
                reason: r.detail.clone(),
            }));
    }

    /// Notes the content of a node's proof, or why it does not count. Returns the node if that is new.
    pub(crate) fn set_proof(
        &mut self,
        name: &NodeId,
        proof: Option<Arc<Proof>>,
        refused: Option<String>,
    ) -> Option<NodeIx> {
        let ix = self.cluster.intern(self.now.mono, name);
        let trust = &mut self.cluster.node_mut(ix).trust;
        if trust.proof == proof && trust.refused == refused {
            return None;
        }
        (trust.proof, trust.refused) = (proof, refused);
        self.cluster.changed.places = true;
        Some(ix)
    }

    /// Notes the contracts that a node has lost. Returns the node if its executions must be reviewed.
    pub(crate) fn set_quarantine(
        &mut self,
        name: &NodeId,
        quarantine: Quarantine,
    ) -> Option<NodeIx> {
        // The key of a forgotten node was deleted.
        if quarantine == Quarantine::default() && self.cluster.find(name).is_none() {
            return None;
        }
        let ix = self.cluster.intern(self.now.mono, name);
        self.cluster.node_mut(ix).trust.quarantine = quarantine;
        self.cluster.changed.places = true;
        self.loaded.then_some(ix)
    }

    /// Takes the bitwise contract away from a node with a refuted result.
    pub(crate) fn set_convicted(&mut self, ix: NodeIx, reason: String) {
        let contract = Contract::Bitwise;
        let node = self.cluster.node_mut(ix);
        if node.trust.quarantine.of(contract, None).is_some() {
            return;
        }
        node.trust.quarantine.entries.push(Quarantined {
            contract,
            substrate: None,
            reason: reason.clone(),
            who: "policy".to_owned(),
            at: self.now.wall,
        });
        self.out.push(Action::Quarantine {
            node: node.id.clone(),
            contract,
            substrate: None,
            reason,
        });
    }

    /// Asks a node to run its canaries: if one fails, it was the node.
    pub(crate) fn ask_for_proof(&mut self, ix: NodeIx) {
        self.out.push(Action::Control {
            node: self.cluster.node(ix).id.clone(),
            request: ControlRequest::Prove,
            ticket: None,
        });
    }
}
