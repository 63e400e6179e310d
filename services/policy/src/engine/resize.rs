//! Moves running executions between devices at boundaries, to use the devices better.
//!
//! *Downgrade*: an execution waits for a device that another one holds. The holder can use a
//! smaller free device that would not do for the waiting one.
//!
//! *Upgrade*: an execution keeps its device busy ([`Config::device_bound`]). A device with more of
//! what it prefers has been idle for [`Config::upgrade_dwell_ms`], and no execution waits for a
//! device.
//!
//! Both require that the execution has been on its device for [`Config::reallocate_residency_ms`],
//! and for [`residency_ms`], which follows from the cost of a move. So it moves at most T /
//! residency + 1 times in a time T.
//!
//! A round is bounded: the first 8 waiting profiles, and 256 executions on devices.
//!
//! [`Config::device_bound`]: crate::Config::device_bound
//! [`Config::upgrade_dwell_ms`]: crate::Config::upgrade_dwell_ms
//! [`Config::reallocate_residency_ms`]: crate::Config::reallocate_residency_ms

use std::collections::BTreeSet;

use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, ExecutionId, Signal};

use super::Policy;
use crate::cluster::{NodeIx, Presence};
use crate::placement::{Ask, Choice, Leaving};
use crate::places::{Claim, DeviceIx};
use crate::profile::ProfileIx;
use crate::share::regret::{move_ms, residency_ms};

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

/// An execution on a device that could move.
struct Holder {
    id: ExecutionId,
    node: NodeIx,
    device: DeviceIx,
    claim: Claim,
    profile: ProfileIx,
}

impl Policy {
    /// Looks for better places for executions on devices.
    pub(super) fn reallocate(&mut self) {
        let now = self.life.now;
        if !self.life.config.reallocate || now.mono.since(self.realloc.reviewed) < REVIEW_MS {
            return;
        }
        self.realloc.reviewed = now.mono;
        let any = self.note_idle();
        if !any {
            return;
        }
        self.realloc
            .freed_for
            .retain(|_, at| now.mono.since(*at) < FREED_WITHIN_MS);
        let waits: Vec<_> = self
            .life
            .waiting
            .profiles()
            .filter(|ix| self.wants_device(*ix))
            .take(PROFILES)
            .collect();
        if waits.is_empty() {
            self.realloc.freed_for.clear();
            return self.upgrade();
        }
        // Another execution already yields for these.
        let asking = self.share.asking.keys();
        let served: BTreeSet<_> = asking
            .chain(self.share.promised.keys())
            .filter_map(|id| self.life.cluster.execution(*id).map(|e| e.profile))
            .collect();
        for profile in waits {
            if !self.realloc.freed_for.contains_key(&profile) && !served.contains(&profile) {
                self.downgrade_for(profile);
            }
        }
    }

    fn wants_device(&self, ix: ProfileIx) -> bool {
        let profile = self.life.cluster.profiles.get(ix);
        profile.is_some_and(|p| p.requires.device.is_some())
    }

    /// Notes the idle devices. Returns true if there are devices at all.
    fn note_idle(&mut self) -> bool {
        let now = self.life.now;
        let mut any = false;
        let mut idle = BTreeSet::new();
        for (ix, node) in self.life.cluster.nodes() {
            for device in node.devices.places(crate::places::Wants::Device).flatten() {
                let Some(found) = node.devices.get(device) else {
                    continue;
                };
                any |= found.facts.is_some();
                if found.facts.is_some() && found.is_free() {
                    idle.insert((ix, device));
                }
            }
        }
        self.realloc.idle.retain(|at, _| idle.contains(at));
        for at in idle {
            self.realloc.idle.entry(at).or_insert(now.mono);
        }
        any
    }

    /// Executions on devices that may move now.
    fn holders(&self, upgrade: bool) -> Vec<Holder> {
        let nodes = self.life.cluster.nodes();
        let up = nodes.filter(|(_, n)| {
            n.presence == Presence::Up && !n.devices.is_empty() && !n.is_draining()
        });
        let all = up.flat_map(|(ix, node)| node.holds.iter().map(move |id| (ix, *id)));
        all.filter_map(|(ix, id)| self.holder(ix, id, upgrade))
            .take(HOLDERS)
            .collect()
    }

    fn holder(&self, node: NodeIx, id: ExecutionId, upgrade: bool) -> Option<Holder> {
        let now = self.life.now;
        let e = self.life.cluster.execution(id)?;
        let device = e.device()?;
        let profile = self.life.cluster.profiles.get(e.profile)?;
        let may = profile.reallocation;
        let told = e.was_told(now.mono);
        let willing = if upgrade { may.upgrade } else { may.downgrade };
        if !willing || !e.computes() || e.is_appending() || e.order().is_some() || told {
            return None;
        }
        let rhythm = self.share.rhythms.get(&id);
        let moves = move_ms(e, rhythm, &self.share.take_up);
        let residency = residency_ms(&self.life.config, moves);
        let residency = residency.max(self.life.config.reallocate_residency_ms);
        (now.mono.since(e.arrived.max(e.since)) >= residency && self.life.is_mine(id)).then_some(
            Holder {
                id,
                node,
                device,
                claim: e.claim,
                profile: e.profile,
            },
        )
    }

    /// The best other free device for an execution.
    fn elsewhere(&mut self, holder: &Holder) -> Option<(Choice, DeviceIx)> {
        let _now = self.life.now;
        let e = self.life.cluster.execution(holder.id)?;
        let ask = Ask {
            free_slot: true,
            ..Ask::of(e)
        }
        .leaves(Some(Leaving::Place(holder.node, Some(holder.device))));
        let choice = self.life.choose(&ask)?;
        let device = choice.device?;
        Some((choice, device))
    }

    fn downgrade_for(&mut self, waits: ProfileIx) {
        let now = self.life.now;
        let plain = Ask::new(waits);
        let placed = self.life.choose(&plain);
        if placed.is_some() {
            // The execution is bound in its turn.
            return;
        }
        for holder in self.holders(false) {
            let ask = Ask {
                only: Some(holder.node),
                counted: Some((holder.node, holder.claim)),
                ..Ask::new(waits)
            };
            let would = self.life.choose(&ask);
            if would.and_then(|choice| choice.device) != Some(holder.device) {
                continue;
            }
            let Some((choice, to)) = self.elsewhere(&holder) else {
                continue;
            };
            let reason = format!(
                "something waits for {}, and {} suffices for this one",
                self.device_in_words(holder.node, holder.device),
                self.device_in_words(choice.node, to),
            );
            let cause = Cause::Reallocated {
                upgrade: false,
                reason,
            };
            self.realloc.freed_for.insert(waits, now.mono);
            return self.life.order_yield_to(holder.id, choice, cause, None);
        }
    }

    /// Moves the first execution that gains. The others are reviewed after that move.
    fn upgrade(&mut self) {
        let now = self.life.now;
        let dwell = self.life.config.upgrade_dwell_ms;
        let idle = self.realloc.idle.values();
        if idle
            .filter(|since| now.mono.since(**since) >= dwell)
            .count()
            == 0
        {
            return;
        }
        for holder in self.holders(true) {
            let busy = self.busy(&holder);
            let prefers = self.life.cluster.profiles.get(holder.profile);
            let prefers = prefers.is_some_and(|p| p.prefers.device.is_some());
            let Some(busy) = busy.filter(|b| prefers && *b >= self.life.config.device_bound) else {
                continue;
            };
            let Some((choice, to)) = self.elsewhere(&holder) else {
                continue;
            };
            let since = self.realloc.idle.get(&(choice.node, to));
            if since.is_none_or(|since| now.mono.since(*since) < dwell) {
                continue;
            }
            let met = |place| self.life.preference(holder.profile, place);
            let (Some(here), Some(there)) = (
                met((holder.node, Some(holder.device))),
                met((choice.node, Some(to))),
            ) else {
                continue;
            };
            if there < here + GAIN {
                continue;
            }
            let reason = format!(
                "{} was {:.0} % busy, and {} has idled for {:.0} s and has more of what it prefers",
                self.device_in_words(holder.node, holder.device),
                busy * 100.0,
                self.device_in_words(choice.node, to),
                since.map_or(0.0, |since| seconds(now.mono.since(*since))),
            );
            let cause = Cause::Reallocated {
                upgrade: true,
                reason,
            };
            return self.life.order_yield_to(holder.id, choice, cause, None);
        }
    }

    /// Utilisation of its device in the last vector.
    fn busy(&self, holder: &Holder) -> Option<f64> {
        let node = self.life.cluster.node(holder.node);
        let id = node.devices.id_of(Some(holder.device));
        let readings = &node.vector.as_ref()?.readings;
        let of = |r: &&fiec_schemas::Reading| {
            r.signal == Signal::Contention && r.device.as_deref() == Some(id)
        };
        readings.iter().find(of)?.value
    }

    fn device_in_words(&self, ix: NodeIx, device: DeviceIx) -> String {
        let node = self.life.cluster.node(ix);
        let name = node
            .devices
            .get(device)
            .and_then(|d| Some(d.facts.as_ref()?.name.as_str()))
            .unwrap_or(HOST);
        format!("{name} of {}", node.id)
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1_000.0
}
