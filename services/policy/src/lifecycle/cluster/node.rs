//! One node, as it is known.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fiec_schemas::messages::Viability;
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Timestamp,
};

use super::capacity::Speed;
use super::places::{DeviceIx, Devices, Judged};
use super::profile::{Profile, ProfileIx};
use super::starts::Starts;
use super::trust::Trust;
use super::watch::Watch;
use crate::config::Config;
use crate::time::Millis;

slotmap::new_key_type! {
    /// Key of a node. One of a forgotten node is never another node's: it names
    /// [nobody](Cluster::node).
    pub struct NodeIx;
}

#[cfg(test)]
impl NodeIx {
    /// A key for tests without a cluster: each number has its own.
    pub(crate) fn made_up(number: u32) -> Self {
        slotmap::KeyData::from_ffi(1 << 32 | u64::from(number + 1)).into()
    }
}

/// Presence of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Heard within the liveness time, or not yet in doubt.
    Up,
    /// Silent, with a probe in flight.
    Probing {
        /// Start of the probe.
        since: Millis,
    },
    /// Silent, and a probe failed.
    Lost {
        /// Time at which it was found lost.
        since: Millis,
    },
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub id: NodeId,
    /// Its descriptor. None for a node that only ledgers name, or that left. [`Node::describe`]
    /// changes it.
    pub descriptor: Option<Arc<NodeDescriptor>>,
    /// The instance of the descriptor.
    pub life: Option<InstanceId>,
    /// Flags set by operators.
    pub flags: NodeFlags,
    /// The contracts that it has proved and lost.
    pub trust: Trust,
    /// The last vector. [`Node::hear`] changes it.
    pub vector: Option<Arc<HardwareVector>>,
    /// True if the last vector says that the node drains.
    pub drains: bool,
    /// Time of the last vector.
    pub vector_at: Millis,
    /// Time of its last sign of life.
    pub heard: Millis,
    /// Its presence.
    pub presence: Presence,
    /// The last instance heard, and when it was first heard.
    pub confirmed: Option<(InstanceId, Millis)>,
    /// Watch under its own thresholds.
    pub base: Option<Watch>,
    /// Watches under the thresholds of submissions.
    pub overrides: BTreeMap<ProfileIx, Watch>,
    /// Its devices, and their use.
    pub devices: Devices,
    /// Executions bound to it or started on it, including appends in flight.
    pub assigned: BTreeSet<ExecutionId>,
    /// Number of those that have run for longer than the horizon.
    pub long: u32,
    /// Number of those that are started and not parked.
    pub started: u32,
    /// Number of those that are parked, which use no slot.
    pub parked: u32,
    /// Orders to yield or unpark that name it as their destination.
    pub expected: u32,
    /// Its measured speed.
    pub speed: Speed,
    /// The programs that it cannot start.
    pub starts: Starts,
    /// Time of the last check for executions of an earlier instance.
    pub reviewed: Millis,
    /// Time of the last question for its holdings.
    pub holdings_asked: Millis,
    /// Time of the next question.
    pub holdings_due: Millis,
    /// The viability recorded last.
    pub recorded_viability: Option<Viability>,
}

impl Default for Node {
    /// A node that nobody has heard of.
    fn default() -> Self {
        Self::new(NodeId::from_host_name("a-forgotten-node"), Millis(0))
    }
}

impl Node {
    /// A node of which only the name is known.
    pub fn new(id: NodeId, now: Millis) -> Self {
        Self {
            id,
            descriptor: None,
            life: None,
            flags: NodeFlags::default(),
            trust: Trust::default(),
            vector: None,
            drains: false,
            vector_at: Millis(0),
            heard: now,
            presence: Presence::Up,
            confirmed: None,
            base: None,
            overrides: BTreeMap::new(),
            devices: Devices::default(),
            assigned: BTreeSet::new(),
            long: 0,
            started: 0,
            parked: 0,
            expected: 0,
            speed: Speed::default(),
            starts: Starts::default(),
            reviewed: Millis(0),
            holdings_asked: Millis(0),
            holdings_due: Millis(0),
            recorded_viability: None,
        }
    }

    /// True if executions are bound to it, or on their way to it.
    pub fn is_used(&self) -> bool {
        !self.assigned.is_empty() || self.expected > 0
    }

    /// Sets or removes its descriptor.
    pub fn describe(&mut self, descriptor: Option<Arc<NodeDescriptor>>) {
        self.life = descriptor.as_ref().map(|d| d.instance);
        let substrates = descriptor.as_ref().map(|d| &*d.substrates);
        self.devices.describe(substrates.unwrap_or_default());
        self.descriptor = descriptor;
    }

    /// Sets or removes its vector, and returns the previous one.
    pub fn hear(&mut self, vector: Option<Arc<HardwareVector>>) -> Option<Arc<HardwareVector>> {
        self.drains = vector.as_ref().is_some_and(|v| v.draining);
        std::mem::replace(&mut self.vector, vector)
    }

    /// Number of executions that it runs at once: by its descriptor, or fewer while processes that do
    /// not end take slots, as its vector says.
    pub fn slots(&self) -> u32 {
        let slots = self.descriptor.as_ref().map_or(0, |d| d.slots);
        let left = self.vector.as_ref().map_or(slots, |v| v.slots);
        slots.min(left)
    }

    /// Share of its memory for one slot, in bytes: what a worker grants by default.
    pub fn share_bytes(&self) -> u64 {
        let limit = self.descriptor.as_ref().map_or(0, |d| d.memory_limit_bytes);
        let slots = self.descriptor.as_ref().map_or(0, |d| d.slots);
        limit / u64::from(slots.max(1))
    }

    /// Number of executions that count against its capacity.
    pub fn held(&self) -> u32 {
        u32::try_from(self.assigned.len())
            .unwrap_or(u32::MAX)
            .saturating_sub(self.parked)
            .saturating_add(self.expected)
    }

    /// Number of executions that it may hold now.
    pub fn limit(&self, now: Millis, config: &Config) -> u32 {
        let slots = self.slots();
        slots.saturating_add(self.speed.ahead(now, slots, self.long, config))
    }

    /// True if its last vector is recent enough to count.
    pub fn is_fresh(&self, now: Millis, config: &Config) -> bool {
        self.vector.is_some() && now.since(self.vector_at) <= config.liveness_ms
    }

    /// True if an operator or the node itself wants it empty.
    pub fn is_draining(&self) -> bool {
        self.flags.draining
            || self.flags.revoked_at.is_some() && self.revoked_at().is_some()
            || self.drains
    }

    /// Time at which its current instance disappears, if announced.
    pub fn revoked_at(&self) -> Option<Timestamp> {
        self.flags.revocation_of(self.life?)
    }

    /// The watch that applies to executions of this profile.
    pub fn watch(&self, profile: ProfileIx) -> Option<&Watch> {
        self.overrides.get(&profile).or(self.base.as_ref())
    }

    /// The readings that apply to an execution at this place.
    pub fn judged(&self, profile: Option<&Profile>, device: Option<DeviceIx>) -> Judged<'_> {
        let device = device.and_then(|ix| self.devices.get(ix));
        Judged::of(profile, device)
    }
}
