//! Moves running executions between devices at boundaries, to use the devices better.
//!
//! *Downgrade*: an execution waits for a device that another one holds. The holder can use a
//! smaller free device that would not do for the waiting one.
//!
//! *Upgrade*: an execution keeps its device busy ([`ReallocationSettings::device_bound`]). A device with more of
//! what it prefers has been idle for [`ReallocationSettings::upgrade_dwell_ms`], and no execution waits for a
//! device.
//!
//! Both require that the execution has been on its device for [`ReallocationSettings::residency_ms`],
//! and for [`residency_ms`], which follows from the cost of a move. So it moves at most T /
//! residency + 1 times in a time T.
//!
//! A round is bounded: the first 8 waiting profiles, and 256 executions on devices. Given up: with
//! more, a better move may be found a round later.
//!
//! It keeps since when each device is idle, and for which profiles it has ordered somebody away. It
//! reads the cluster, and changes it by orders to yield.
//!
//! [`ReallocationSettings::device_bound`]: crate::ReallocationSettings::device_bound
//! [`ReallocationSettings::upgrade_dwell_ms`]: crate::ReallocationSettings::upgrade_dwell_ms
//! [`ReallocationSettings::residency_ms`]: crate::ReallocationSettings::residency_ms

mod idle;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, ExecutionId, Signal};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::{Claim, DeviceIx};
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::lifecycle::placement::{Ask, Choice, Leaving};
use crate::lifecycle::queue::regret::residency_ms;
use crate::time::Millis;
use idle::Idle;

pub use settings::ReallocationSettings;

/// Interval between two reviews of devices, in ms.
const REVIEW_MS: u64 = 1_000;
/// Most waiting profiles in one review.
const PROFILES: usize = 8;
/// Most executions on devices in one review.
const HOLDERS: usize = 256;
/// A larger device must have this share more of what the execution prefers.
const GAIN: f64 = 0.1;
/// A device that was to be freed for another execution is free after this time, or never, in ms.
const FREED_WITHIN_MS: u64 = 60_000;

/// The state of reallocation.
#[derive(Debug, Default)]
pub(crate) struct Reallocation {
    idle: Idle,
    /// Profiles for which an execution was ordered off its device, and when.
    freed_for: BTreeMap<ProfileIx, Millis>,
    /// Time of the last review.
    reviewed: Millis,
}

/// An execution on a device that could move.
struct Holder {
    id: ExecutionId,
    node: NodeIx,
    device: DeviceIx,
    claim: Claim,
    profile: ProfileIx,
}

impl Reallocation {
    /// Looks for better places for executions on devices. `served`: the profiles of those for which
    /// another execution already yields.
    pub fn review(
        &mut self,
        life: &mut Lifecycle,
        served: impl FnOnce(&Lifecycle) -> BTreeSet<ProfileIx>,
    ) {
        let now = life.now;
        if !life.config.reallocation.enabled || now.mono.since(self.reviewed) < REVIEW_MS {
            return;
        }
        self.reviewed = now.mono;
        if !self.idle.note(life) {
            return;
        }
        self.freed_for
            .retain(|_, at| now.mono.since(*at) < FREED_WITHIN_MS);
        let waits: Vec<_> = life
            .waiting()
            .profiles()
            .filter(|ix| wants_device(life, *ix))
            .take(PROFILES)
            .collect();
        if waits.is_empty() {
            self.freed_for.clear();
            return self.upgrade(life);
        }
        let served = served(life);
        for profile in waits {
            if !self.freed_for.contains_key(&profile) && !served.contains(&profile) {
                self.downgrade_for(life, profile);
            }
        }
    }

    fn downgrade_for(&mut self, life: &mut Lifecycle, waits: ProfileIx) {
        if life.choose(&Ask::new(waits)).is_some() {
            // The execution is bound in its turn.
            return;
        }
        for holder in holders(life, false) {
            let ask = Ask {
                only: Some(holder.node),
                counted: Some((holder.node, holder.claim)),
                ..Ask::new(waits)
            };
            let would = life.choose(&ask).and_then(|choice| choice.device);
            if would != Some(holder.device) {
                continue;
            }
            let Some((choice, to)) = elsewhere(life, &holder) else {
                continue;
            };
            let reason = format!(
                "something waits for {}, and {} suffices for this one",
                device_in_words(life, holder.node, holder.device),
                device_in_words(life, choice.node, to),
            );
            let cause = Cause::Reallocated {
                upgrade: false,
                reason,
            };
            self.freed_for.insert(waits, life.now.mono);
            return life.order_yield_to(holder.id, choice, cause, None);
        }
    }

    /// Moves the first execution that gains. The others are reviewed after that move.
    fn upgrade(&self, life: &mut Lifecycle) {
        let (now, dwell) = (life.now.mono, life.config.reallocation.upgrade_dwell_ms);
        if !self.idle.any_for(now, dwell) {
            return;
        }
        for holder in holders(life, true) {
            let prefers = life.cluster().profiles.get(holder.profile);
            let prefers = prefers.is_some_and(|p| p.prefers.device.is_some());
            let busy = busy(life, &holder);
            let Some(busy) =
                busy.filter(|b| prefers && *b >= life.config.reallocation.device_bound)
            else {
                continue;
            };
            let Some((choice, to)) = elsewhere(life, &holder) else {
                continue;
            };
            let Some(idle_ms) = self.idle.ms(now, (choice.node, to)) else {
                continue;
            };
            if idle_ms < dwell {
                continue;
            }
            let (Some(here), Some(there)) = (
                life.preference(holder.profile, (holder.node, Some(holder.device))),
                life.preference(holder.profile, (choice.node, Some(to))),
            ) else {
                continue;
            };
            if there < here + GAIN {
                continue;
            }
            let reason = format!(
                "{} was {:.0} % busy, and {} has idled for {:.0} s and has more of what it prefers",
                device_in_words(life, holder.node, holder.device),
                busy * 100.0,
                device_in_words(life, choice.node, to),
                seconds(idle_ms),
            );
            let cause = Cause::Reallocated {
                upgrade: true,
                reason,
            };
            return life.order_yield_to(holder.id, choice, cause, None);
        }
    }
}

fn wants_device(life: &Lifecycle, ix: ProfileIx) -> bool {
    let profile = life.cluster().profiles.get(ix);
    profile.is_some_and(|p| p.requires.device.is_some())
}

/// Executions on devices that may move now.
fn holders(life: &Lifecycle, upgrade: bool) -> Vec<Holder> {
    let nodes = life.cluster().nodes();
    let up = nodes
        .filter(|(_, n)| n.presence == Presence::Up && !n.devices.is_empty() && !n.is_draining());
    let all = up.flat_map(|(ix, node)| node.assigned.iter().map(move |id| (ix, *id)));
    all.filter_map(|(ix, id)| holder(life, ix, id, upgrade))
        .take(HOLDERS)
        .collect()
}

fn holder(life: &Lifecycle, node: NodeIx, id: ExecutionId, upgrade: bool) -> Option<Holder> {
    let now = life.now.mono;
    let e = life.cluster().execution(id)?;
    let device = e.device()?;
    let may = life.cluster().profiles.get(e.profile)?.reallocation;
    let willing = if upgrade { may.upgrade } else { may.downgrade };
    let told = e.was_told(now);
    if !willing || !e.computes() || e.is_appending() || e.order().is_some() || told {
        return None;
    }
    let residency = residency_ms(&life.config, life.move_ms(id, e));
    let residency = residency.max(life.config.reallocation.residency_ms);
    let stays = now.since(e.arrived.max(e.since)) < residency;
    (!stays && life.is_mine(id)).then_some(Holder {
        id,
        node,
        device,
        claim: e.claim,
        profile: e.profile,
    })
}

/// The best other free device for an execution.
fn elsewhere(life: &mut Lifecycle, holder: &Holder) -> Option<(Choice, DeviceIx)> {
    let e = life.cluster().execution(holder.id)?;
    let ask = Ask {
        free_slot: true,
        ..Ask::of(e)
    };
    let here = Leaving::Place(holder.node, Some(holder.device));
    let choice = life.choose(&ask.leaves(Some(here)))?;
    let device = choice.device?;
    Some((choice, device))
}

/// Utilisation of its device in the last vector.
fn busy(life: &Lifecycle, holder: &Holder) -> Option<f64> {
    let node = life.cluster().node(holder.node);
    let id = node.devices.id_of(Some(holder.device));
    let readings = &node.vector.as_ref()?.readings;
    let of = |r: &&fiec_schemas::Reading| {
        r.signal == Signal::Contention && r.device.as_deref() == Some(id)
    };
    readings.iter().find(of)?.value
}

fn device_in_words(life: &Lifecycle, ix: NodeIx, device: DeviceIx) -> String {
    let node = life.cluster().node(ix);
    let name = node
        .devices
        .get(device)
        .and_then(|d| Some(d.facts.as_ref()?.name.as_str()))
        .unwrap_or(HOST);
    format!("{name} of {}", node.id)
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1_000.0
}
