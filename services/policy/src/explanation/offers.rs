//! The offers of nodes, for programs that ask at a boundary.
//!
//! A node is offered if the placement filters accept it for an execution without requirements. So
//! it is present, has a fresh vector, accepts new executions, and is viable under its own
//! thresholds. An offer is no promise: another execution may take it first.

use fiec_schemas::hardware::{HardwareVector, Signal};
use fiec_schemas::surroundings::{DeviceOffer, OFFERS_LIMIT, Offer, Offers};

use crate::config::Config;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Judged;
use crate::lifecycle::cluster::{Node, Presence};
use crate::lifecycle::placement::free_bytes;
use crate::time::Now;

/// The current offers, [`OFFERS_LIMIT`] at most.
pub(crate) fn offers(life: &Lifecycle, now: Now) -> Offers {
    let nodes = life.cluster().nodes();
    let mut all: Vec<&Node> = nodes
        .map(|(_, node)| node)
        .filter(|node| is_offered(node, now, &life.config))
        .collect();
    // The sort is stable: equal nodes stay ordered by name.
    all.sort_by_key(|node| std::cmp::Reverse(free_slots(node)));
    let left_off = all.len().saturating_sub(OFFERS_LIMIT);
    all.truncate(OFFERS_LIMIT);
    Offers {
        at: now.wall,
        nodes: all.into_iter().filter_map(offer).collect(),
        left_off: u32::try_from(left_off).unwrap_or(u32::MAX),
    }
}

fn is_offered(node: &Node, now: Now, config: &Config) -> bool {
    node.descriptor.is_some()
        && node.presence == Presence::Up
        && node.is_fresh(now.mono, config)
        && !node.flags.cordoned
        && !node.is_draining()
        && viable(node, Judged::HOST)
}

fn viable(node: &Node, place: Judged<'_>) -> bool {
    let base = node.base.as_ref();
    base.is_none_or(|watch| watch.obstacle(place).is_none())
}

fn free_slots(node: &Node) -> u32 {
    node.slots().saturating_sub(node.held())
}

fn free_memory(vector: Option<&HardwareVector>, device: Option<&str>) -> Option<u64> {
    let mut readings = vector?.readings.iter();
    let of = |r: &&_| is_memory_of(r, device);
    free_bytes(readings.find(of)?)
}

fn is_memory_of(reading: &fiec_schemas::Reading, device: Option<&str>) -> bool {
    reading.signal == Signal::Memory && reading.device.as_deref() == device
}

fn offer(node: &Node) -> Option<Offer> {
    let descriptor = node.descriptor.as_ref()?;
    let vector = node.vector.as_deref();
    let devices = node.devices.iter().filter_map(|device| {
        let facts = device.facts.as_ref()?;
        let place = Judged {
            device: Some(&device.id),
            whole: device.whole(),
            host: false,
        };
        Some(DeviceOffer {
            id: facts.id.clone(),
            name: facts.name.clone(),
            memory_bytes: facts.memory_bytes,
            free_memory_bytes: free_memory(vector, Some(&device.id)),
            free: device.is_free() && viable(node, place),
        })
    });
    Some(Offer {
        node: node.id.clone(),
        free_slots: free_slots(node),
        slots: node.slots(),
        cores: descriptor.cpus,
        free_memory_bytes: free_memory(vector, None),
        devices: devices.collect(),
    })
}
