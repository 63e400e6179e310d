//! The score of a place that passed the filters.
//!
//! `score = room + met − ½ pressure − ¼ excess`
//!
//! * `room`: with a free slot 3 plus the free share of the slots. On a shared device it is the
//!   smaller of that share and the unbudgeted share of its memory. Without a free slot it is the
//!   free share of the queue, at most 1.
//! * `met`: the mean of min(1, has / preferred) over the submission's preferences. Labels, kind,
//!   compute capability, contract, instruction sets, kernel and driver count 1 or 0. Latency counts
//!   preferred / has. Without preferences it is 0.
//! * `pressure`: the highest reading of the place relative to its threshold, at most 1.
//! * `excess`: for an exclusive device, the share of its memory beyond the largest amount in the
//!   submission. It keeps large devices free for executions that need them.
//!
//! So a free slot outweighs everything else, and preferences outweigh pressure.

use fiec_schemas::machine::{Machine, MachineRequirement};
use fiec_schemas::package::matches;
use fiec_schemas::submission::{DevicePreference, Preferences};

use super::filters::{View, free_memory, offered_memory};
use crate::lifecycle::cluster::profile::Profile;

pub(super) fn score(v: &View<'_, '_>) -> f64 {
    let (slots, held) = (v.node.slots(), v.node.held());
    let room = if held < slots {
        let free = f64::from(slots - held) / f64::from(slots.max(1));
        let device = v.device().map_or(1.0, |d| d.free_share());
        3.0 + free.min(device)
    } else {
        let limit = v.node.limit(v.now.mono, v.config).max(1);
        f64::from(limit.saturating_sub(held)) / f64::from(limit)
    };
    let judged = v.judged();
    let watch = v.node.base.as_ref();
    let pressure = watch.map_or(0.0, |w| w.pressure(judged).min(1.0));
    let met = if v.prefers { met(v) } else { 0.0 };
    room + met - 0.5 * pressure - 0.25 * excess(v)
}

pub(super) fn met(v: &View<'_, '_>) -> f64 {
    let Some(descriptor) = &v.node.descriptor else {
        return 0.0;
    };
    let Preferences {
        memory_bytes,
        free_memory_bytes,
        cores,
        bandwidth_bytes_s,
        machine,
        contract,
        labels,
        device,
    } = &v.profile.prefers;
    let mut mean = Mean::default();
    if memory_bytes.is_some() {
        let has = descriptor.memory_limit_bytes;
        mean.number(*memory_bytes, Some(offered_memory(v.node, None, has)));
    }
    if free_memory_bytes.is_some() {
        mean.number(*free_memory_bytes, free_memory(v.node, None));
    }
    mean.number(cores.map(u64::from), Some(u64::from(descriptor.cpus)));
    if bandwidth_bytes_s.is_some() {
        mean.number(*bandwidth_bytes_s, descriptor.profile.bandwidth_bytes_s());
    }
    if let Some(wanted) = machine {
        machine_met(Machine::of(descriptor), wanted, &mut mean);
    }
    if let Some(contract) = contract {
        mean.word(descriptor.profile.contracts.contains(contract));
    }
    for (key, value) in labels {
        mean.word(descriptor.labels.get(key) == Some(value));
    }
    if let Some(preferred) = device {
        device_met(v, preferred, &mut mean);
    }
    mean.value()
}

fn machine_met(has: Machine<'_>, wanted: &MachineRequirement, mean: &mut Mean) {
    for word in &wanted.isa {
        mean.word(has.has_isa(word));
    }
    if let Some(kernel) = wanted.kernel {
        mean.word(has.kernel().is_some_and(|k| k.is_at_least(kernel)));
    }
    if let Some(driver) = wanted.driver {
        mean.word(has.driver().is_some_and(|d| d.is_at_least(driver)));
    }
    if let Some(wanted) = wanted.memory_latency_ns {
        match has.memory_latency_ns() {
            // A lower latency is better.
            Some(has) => mean.number(Some(has), Some(wanted)),
            None => mean.word(false),
        }
    }
    mean.number(wanted.far_memory_bytes, Some(has.far_memory_bytes()));
}

fn device_met(v: &View<'_, '_>, preferred: &DevicePreference, mean: &mut Mean) {
    let DevicePreference {
        kind,
        compute_capability,
        multiprocessors,
        memory_bytes,
        copy_bytes_s,
    } = preferred;
    let facts = v.device().and_then(|d| d.facts.as_ref());
    let known = facts.and_then(|f| f.device.as_ref());
    // If a device is preferred but not required, its presence counts.
    if v.profile.requires.device.is_none() {
        mean.word(facts.is_some());
    }
    if let Some(pattern) = kind {
        mean.word(facts.is_some_and(|f| matches(pattern, &f.name)));
    }
    if let Some(wanted) = compute_capability {
        let has = known.and_then(|d| d.compute_capability);
        mean.word(has.is_some_and(|has| has >= *wanted));
    }
    let units = known.and_then(|d| d.multiprocessors);
    mean.number(multiprocessors.map(u64::from), units.map(u64::from));
    if memory_bytes.is_some() {
        let has = facts.and_then(|f| Some(offered_memory(v.node, Some(&f.id), f.memory_bytes?)));
        mean.number(*memory_bytes, has);
    }
    mean.number(*copy_bytes_s, known.and_then(|d| d.copy_bytes_s()));
}

#[expect(clippy::cast_precision_loss, reason = "shares of bytes")]
fn excess(v: &View<'_, '_>) -> f64 {
    let Some(facts) = v.device().and_then(|d| d.facts.as_ref()) else {
        return 0.0;
    };
    let (Some(wanted), Some(has)) = (wanted_of_device(v.profile), facts.memory_bytes) else {
        return 0.0;
    };
    (1.0 - wanted as f64 / has.max(1) as f64).max(0.0)
}

/// The largest amount of device memory in the profile. None for a shared device.
fn wanted_of_device(profile: &Profile) -> Option<u64> {
    let requires = profile.requires.device.as_ref();
    if requires.is_some_and(|d| d.share_bytes.is_some()) {
        return None;
    }
    let preferred = profile.prefers.device.as_ref();
    let required = requires.and_then(|d| d.memory_bytes.max(d.free_memory_bytes));
    required.max(preferred.and_then(|d| d.memory_bytes))
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    #[expect(clippy::cast_precision_loss, reason = "shares of bytes and counts")]
    fn number(&mut self, wanted: Option<u64>, has: Option<u64>) {
        if let Some(wanted) = wanted {
            let share = has.unwrap_or(0) as f64 / wanted.max(1) as f64;
            self.sum += share.min(1.0);
            self.count += 1;
        }
    }

    fn word(&mut self, holds: bool) {
        self.sum += f64::from(u8::from(holds));
        self.count += 1;
    }

    fn value(&self) -> f64 {
        self.sum / f64::from(self.count.max(1))
    }
}
