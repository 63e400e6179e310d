//! Places that are reserved, so that other executions must leave them free.

use std::collections::{BTreeMap, BTreeSet};

use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::DeviceIx;

/// A node and a device, or no device for the host.
pub type Place = (NodeIx, Option<DeviceIx>);

/// The reserved resources of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Keeps {
    /// Most members that could run there at once.
    slots: u32,
    /// The devices that members could use.
    devices: BTreeSet<DeviceIx>,
}

/// The places that are reserved for a gang: on each possible node the devices that members could
/// use, and as many slots as they could fill. Further slots are of no use to the gang.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptPlaces(BTreeMap<NodeIx, Keeps>);

impl KeptPlaces {
    /// Reserves further slots of a node.
    pub fn keep_slots(&mut self, node: NodeIx, slots: u32) {
        let keeps = self.0.entry(node).or_default();
        keeps.slots = keeps.slots.saturating_add(slots);
    }

    /// Reserves a device of a node.
    pub fn keep_device(&mut self, node: NodeIx, device: DeviceIx) {
        self.0.entry(node).or_default().devices.insert(device);
    }

    /// True for a place that other executions must leave free. `free`: free slots of the node
    /// before another execution takes one.
    pub fn keeps(&self, (node, at): Place, free: u32) -> bool {
        self.0.get(&node).is_some_and(|keeps| {
            let wanted = at.is_some_and(|device| keeps.devices.contains(&device));
            wanted || free <= keeps.slots
        })
    }

    /// True if the other one includes all reserved places of this one.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.iter().all(|(node, keeps)| {
            let kept = other.0.get(node);
            kept.is_some_and(|kept| {
                keeps.slots <= kept.slots && keeps.devices.is_subset(&kept.devices)
            })
        })
    }
}
