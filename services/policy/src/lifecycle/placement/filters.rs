//! The filters: each checks one place of one node and returns the reason against it.

use fiec_schemas::Contract;
use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::package::matches;
use fiec_schemas::submission::DeviceRequirement;
use fiec_schemas::substrate::{Confinement, HOST};

use super::reason::Reason;
use super::{Ask, Leaving};
use crate::config::Config;
use crate::lifecycle::cluster::hysteresis::State;
use crate::lifecycle::cluster::places::{Claim, Device, DeviceIx, Judged};
use crate::lifecycle::cluster::profile::Profile;
use crate::lifecycle::cluster::trust::Standing;
use crate::lifecycle::cluster::watch::Watched;
use crate::lifecycle::cluster::{Node, NodeIx, Presence};
use crate::time::Now;

/// One place of one node under one question.
pub(super) struct View<'a, 'b> {
    pub node: &'a Node,
    pub ix: NodeIx,
    /// Its device, or its host if none.
    pub at: Option<DeviceIx>,
    pub profile: &'a Profile,
    pub prefers: bool,
    pub config: &'b Config,
    pub now: Now,
    pub ask: &'b Ask,
}

impl<'a> View<'a, '_> {
    pub(super) fn device(&self) -> Option<&'a Device> {
        self.node.devices.get(self.at?)
    }

    pub(super) fn judged(&self) -> Judged<'a> {
        let device = self.device();
        Judged::of(Some(self.profile), device)
    }

    /// Executions that count on the node, without the one that asks.
    fn others(&self) -> u32 {
        let own = u32::from(self.ask.counted.is_some_and(|(ix, _)| ix == self.ix));
        self.node.held().saturating_sub(own)
    }
}

type Filter = for<'a> fn(&View<'a, '_>) -> Option<Reason<'a>>;

/// The filters in the order in which people read them. They run lazily, so that the first reason
/// costs little.
const FILTERS: [Filter; 11] = [
    wanted,
    present,
    operators,
    program,
    starts,
    requirements,
    device,
    contract,
    viable,
    capacity,
    device_capacity,
];

/// All reasons against a place.
pub(super) fn reasons<'a, 'b>(view: &View<'a, 'b>) -> impl Iterator<Item = Reason<'a>> {
    FILTERS.iter().filter_map(move |filter| filter(view))
}

fn wanted<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let left = match v.ask.leaving {
        None => false,
        Some(Leaving::Node(ix)) => ix == v.ix,
        Some(Leaving::Place(ix, at)) => ix == v.ix && at == v.at,
    };
    if left {
        return Some(Reason::Leaving);
    }
    if v.ask.only.is_some_and(|only| only != v.ix) {
        return Some(Reason::NotWanted);
    }
    if v.ask.apart.contains(&v.ix) {
        return Some(Reason::Suspect);
    }
    if let Some(kept) = &v.ask.kept
        && kept.keeps((v.ix, v.at), v.node.slots().saturating_sub(v.others()))
    {
        return Some(Reason::Kept);
    }
    let mut avoided = v.ask.avoid.iter();
    let refused = avoided.any(|a| a.node == v.ix && v.now.mono < a.until);
    refused.then_some(Reason::Refused)
}

fn present<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let (node, now) = (v.node, v.now.mono);
    if node.descriptor.is_none() {
        return Some(Reason::Unknown);
    }
    match node.presence {
        Presence::Up => {}
        Presence::Probing { .. } | Presence::Lost { .. } => {
            return Some(Reason::Lost {
                silent_ms: now.since(node.heard),
            });
        }
    }
    if node.vector.is_none() {
        return Some(Reason::NoVector);
    }
    let age_ms = now.since(node.vector_at);
    (age_ms > v.config.liveness_ms).then_some(Reason::Stale { age_ms })
}

fn operators<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    if let Some(at) = v.node.revoked_at() {
        Some(Reason::Revoked { at })
    } else if v.node.is_draining() {
        Some(Reason::Draining)
    } else {
        v.node.flags.cordoned.then_some(Reason::Cordoned)
    }
}

fn program<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let (offered, wanted) = (&v.node.descriptor.as_ref()?.programs, &v.profile.program);
    let takes = |pattern: &String| pattern == "*" || matches(pattern, wanted);
    let offers = offered.iter().any(takes);
    if !offers {
        return Some(Reason::Program { wanted, offered });
    }
    // A worker that does not state its confinement is tried, and refuses if it must.
    let confinement = &v.node.descriptor.as_ref()?.profile.confinement;
    let starts = confinement.is_empty() || confinement.contains(&Confinement::Containers);
    (v.profile.container && !starts).then_some(Reason::NoContainers { wanted })
}

fn starts<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let program = &v.profile.program;
    let against = v.node.starts.against(program)?;
    Some(Reason::CannotStart { program, against })
}

/// Bytes of memory that a reading leaves free under the current limit or envelope.
pub(crate) fn free_bytes(reading: &Reading) -> Option<u64> {
    let (value, raw) = (reading.value?, reading.raw?);
    let whole = if value > 0.0 {
        raw / value
    } else {
        reading.limit?
    };
    let free = if value >= 1.0 { 0.0 } else { whole - raw };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float casts saturate"
    )]
    Some(free as u64)
}

/// Free bytes of memory on the host or a device, from its node's last vector.
pub(super) fn free_memory(node: &Node, device: Option<&str>) -> Option<u64> {
    let of = |r: &&Reading| r.signal == Signal::Memory && r.device.as_deref() == device;
    free_bytes(node.vector.as_ref()?.readings.iter().find(of)?)
}

/// Bytes of memory that the host or a device offers: all that it has, or the envelope's cap in its
/// node's last vector.
pub(crate) fn offered_memory(node: &Node, device: Option<&str>, has: u64) -> u64 {
    let of = |r: &&Reading| r.signal == Signal::Memory && r.device.as_deref() == device;
    let readings = node.vector.as_ref().map(|v| v.readings.iter());
    let envelope = readings.and_then(|mut r| r.find(of)?.envelope.as_ref());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float casts saturate"
    )]
    envelope.map_or(has, |e| has.min(e.cap as u64))
}

fn requirements<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let descriptor = v.node.descriptor.as_ref()?;
    let requires = &v.profile.requires;
    if !requires.nodes.is_empty() && !requires.nodes.contains(&v.node.id) {
        return Some(Reason::NotNamed(&requires.nodes));
    }
    if requires.exclude.contains(&v.node.id) {
        return Some(Reason::Excluded);
    }
    if let Some(needs) = requires.memory_bytes
        && descriptor.memory_limit_bytes < needs
    {
        return Some(Reason::Memory {
            has: descriptor.memory_limit_bytes,
            needs,
        });
    }
    if let Some(needs) = requires.memory_bytes {
        let has = descriptor.memory_limit_bytes;
        let offered = offered_memory(v.node, None, has);
        if offered < needs {
            return Some(Reason::Offered {
                offered,
                has,
                needs,
                device: false,
            });
        }
    }
    if let Some(needs) = requires.cores
        && descriptor.cpus < needs
    {
        return Some(Reason::Cores {
            has: descriptor.cpus,
            needs,
        });
    }
    if let Some(needs) = requires.bandwidth_bytes_s {
        let has = descriptor.profile.bandwidth_bytes_s();
        if has.is_none_or(|has| has < needs) {
            return Some(Reason::Bandwidth { has, needs });
        }
    }
    let machine = requires.machine.as_ref();
    if let Some(unmet) = machine.and_then(|m| m.unmet(descriptor)) {
        return Some(Reason::Machine(unmet));
    }
    let mut labels = requires.labels.iter();
    let label = labels.find(|(key, value)| descriptor.labels.get(*key) != Some(value));
    if let Some((key, value)) = label {
        return Some(Reason::Label { key, value });
    }
    let needs = requires.free_memory_bytes?;
    let free = free_memory(v.node, None);
    free.is_none_or(|free| free < needs)
        .then_some(Reason::FreeMemory {
            free,
            needs,
            device: false,
        })
}

fn device<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let Some(device) = v.device() else {
        return v
            .profile
            .requires
            .device
            .is_some()
            .then_some(Reason::NoDevice);
    };
    let Some(facts) = &device.facts else {
        return Some(Reason::DeviceGone);
    };
    let DeviceRequirement {
        kind,
        compute_capability,
        multiprocessors,
        memory_bytes,
        free_memory_bytes,
        copy_bytes_s,
        share_bytes: _,
        viable_by: _,
    } = v.profile.requires.device.as_ref()?;
    if let Some(pattern) = kind
        && !matches(pattern, &facts.name)
    {
        let name = &facts.name;
        return Some(Reason::DeviceKind { name, pattern });
    }
    let known = facts.device.as_ref();
    if let Some(needs) = *compute_capability {
        let has = known.and_then(|d| d.compute_capability);
        if has.is_none_or(|has| has < needs) {
            return Some(Reason::DeviceCapability { has, needs });
        }
    }
    if let Some(needs) = *multiprocessors {
        let has = known.and_then(|d| d.multiprocessors);
        if has.is_none_or(|has| has < needs) {
            return Some(Reason::DeviceUnits { has, needs });
        }
    }
    if let Some(needs) = *memory_bytes
        && facts.memory_bytes.is_none_or(|has| has < needs)
    {
        let has = facts.memory_bytes;
        return Some(Reason::DeviceMemory { has, needs });
    }
    if let (Some(needs), Some(has)) = (*memory_bytes, facts.memory_bytes) {
        let offered = offered_memory(v.node, Some(&device.id), has);
        if offered < needs {
            return Some(Reason::Offered {
                offered,
                has,
                needs,
                device: true,
            });
        }
    }
    if let Some(needs) = *copy_bytes_s {
        let has = known.and_then(|d| d.copy_bytes_s());
        if has.is_none_or(|has| has < needs) {
            return Some(Reason::DeviceCopies { has, needs });
        }
    }
    let needs = (*free_memory_bytes)?;
    let free = free_memory(v.node, Some(&device.id));
    free.is_none_or(|free| free < needs)
        .then_some(Reason::FreeMemory {
            free,
            needs,
            device: true,
        })
}

/// A contract requires a proof on the substrate. Every place that ever held the execution passed
/// this filter, so both sides of a move have proved it.
fn contract<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let wanted = v.profile.contract;
    // A node with another key than the pinned one gets no work.
    if let Some(reason) = &v.node.trust.stranger {
        let standing = Standing::Stranger(reason);
        return Some(Reason::Contract { wanted, standing });
    }
    if wanted != Contract::Statistical {
        let descriptor = v.node.descriptor.as_ref()?;
        let place = v.device().map_or(HOST, |d| &*d.id);
        let trust = &v.node.trust;
        let standing = trust.standing(descriptor, wanted, place, v.now.wall);
        if !standing.is_good() {
            return Some(Reason::Contract { wanted, standing });
        }
    }
    let facts = v.device()?.facts.as_ref()?;
    let offered = &facts.device.as_ref()?.contracts;
    let wanted = v.profile.contract;
    (!offered.is_empty() && !offered.contains(&wanted)).then_some(Reason::DeviceContract { wanted })
}

fn viable<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let watch = v.node.watch(v.ask.profile)?;
    let judged = v.judged();
    // This is the worst automaton: if it is suspect, none is worse.
    let tolerated =
        |w: &Watched| v.ask.takes_suspects && matches!(w.automaton.state(), State::Suspect { .. });
    if let Some(watched) = watch.obstacle(judged).filter(|w| !tolerated(w)) {
        return Some(Reason::Pressing(watched));
    }
    if !v.profile.viability.is_empty() {
        let unknown = |s: State| matches!(s, State::Unknown { .. });
        let unmeasured = watch.of_place(judged).find(|w| {
            v.profile.viability.contains_key(&w.signal)
                && unknown(w.automaton.state())
                // A reading of the device makes one of its host unnecessary.
                && !watch.of_place(judged).any(|other| {
                    other.signal == w.signal && !unknown(other.automaton.state())
                })
        });
        if let Some(watched) = unmeasured {
            return Some(Reason::Unmeasured(watched));
        }
    }
    let left = v.ask.left.iter().find(|(ix, _)| *ix == v.ix)?;
    watch
        .unrecovered(judged, v.now.moment_of(left.1))
        .map(Reason::Left)
}

fn capacity<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    // Without its descriptor nobody knows its slots, and what it lacks is to join.
    v.node.descriptor.as_ref()?;
    let held = v.others();
    // A device has no queue: every execution on it computes.
    let limit = if v.ask.free_slot || v.at.is_some() {
        v.node.slots()
    } else {
        v.node.limit(v.now.mono, v.config)
    };
    (held >= limit).then_some(Reason::Full { held, limit })
}

fn device_capacity<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let Claim::Device { device, budget } = Claim::of(Some(v.profile), v.at) else {
        return None;
    };
    let own = v.ask.counted.filter(|(ix, _)| *ix == v.ix);
    let own = own.map(|(_, claim)| claim);
    let place = v.device()?;
    let offered = |has| offered_memory(v.node, Some(&place.id), has);
    let refused = place.refuses(device, budget, own, offered);
    refused.map(Reason::DeviceFull)
}
