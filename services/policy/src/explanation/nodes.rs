//! What people read about nodes.

use std::collections::BTreeSet;

use fiec_schemas::messages::{ContractStanding, NodeStatus, Viability};
use fiec_schemas::{Contract, NodeDescriptor, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Judged;
use crate::lifecycle::cluster::{Node, Presence};
use crate::time::Now;

/// Every joined node, ordered by name.
pub(crate) fn node_statuses(life: &Lifecycle, now: Now) -> Vec<NodeStatus> {
    life.cluster()
        .nodes()
        .filter_map(|(_, node)| {
            let descriptor = node.descriptor.as_ref()?;
            let base = node.base.as_ref();
            let fresh = node.is_fresh(now.mono, &life.config);
            let viability = match node.presence {
                Presence::Lost { .. } => Viability::Lost,
                _ if !fresh => Viability::Unknown,
                _ => base.map_or(Viability::Unknown, |b| b.worst_of(Judged::HOST).kind()),
            };
            Some(NodeStatus {
                descriptor: (**descriptor).clone(),
                flags: node.flags.clone(),
                viability,
                pressing: base.map(|b| b.complaints(now.mono)).unwrap_or_default(),
                set_aside: node.starts.set_aside(now.mono),
                vector: node.vector.as_deref().cloned(),
                silent_ms: Some(now.mono.since(node.heard)),
                bound: u32::try_from(node.assigned.len()).unwrap_or(u32::MAX),
                contracts: standings(node, descriptor, now),
            })
        })
        .collect()
}

/// The joined nodes that count as lost.
pub(crate) fn lost_nodes(life: &Lifecycle) -> BTreeSet<NodeId> {
    let nodes = life.cluster().nodes();
    nodes
        .filter(|(_, node)| matches!(node.presence, Presence::Lost { .. }))
        .map(|(_, node)| node.id.clone())
        .collect()
}

/// A node's standing with each contract on each substrate.
fn standings(node: &Node, d: &NodeDescriptor, now: Now) -> Vec<ContractStanding> {
    let mut all = Vec::new();
    for substrate in &d.substrates {
        for contract in [Contract::Bitwise, Contract::Bounded] {
            let standing = node.trust.standing(d, contract, &substrate.id, now.wall);
            all.push(ContractStanding {
                contract,
                substrate: substrate.id.clone(),
                standing: standing.kind(),
                detail: standing.in_words(contract),
            });
        }
    }
    all
}
