//! Preempted executions without another place: what a park keeps, and how they go on.
//!
//! [`crate::parking::pause`] chooses what a park keeps: the option with the lowest measured cost. The
//! expected length of the pause is the remaining time of the preempting execution, and one time
//! slice at least.
//!
//! A preempted execution waits in the queue like all others, by priority, tenant share and age.
//! Shorter executions pass it for a bounded time only ([`crate::lifecycle::order`]). When its turn
//! comes and a slot is free, it resumes in its place. Others are preempted for it by the same rules.
//! It moves to another node once it has waited longer than the move costs.
//!
//! If keeping memory has come to cost more than a new start from σ, the execution gives it up and
//! waits as pending. It returns no later than it would have returned from its park.

use std::sync::Arc;

use fiec_schemas::{Cause, ExecutionId};

use crate::engine::Policy;
use crate::engine::bind::Placed;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::{Execution, NodeIx, Order, Presence, Stage, Wanted};
use crate::lifecycle::placement::kept::KeptPlaces;
use crate::lifecycle::placement::{Ask, Leaving};
use crate::lifecycle::regret;
use crate::parking::pause::{self, Kept};
use crate::time::Now;
use crate::time::seconds;

/// A parked execution is queued again for this long after its wait has exceeded the cost of a move,
/// in ms.
const RIPE_MS: f64 = 1_000.0;

/// An execution that is preempted, and for which one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GivesWay {
    /// The preempted execution.
    pub id: ExecutionId,
    /// The node that holds it.
    pub node: NodeIx,
    /// The execution that takes its place.
    pub to: ExecutionId,
    /// Expected remaining time of `to`, in ms.
    pub rest_ms: u64,
}

/// Time since it was parked, in ms.
fn waited_ms(now: Now, e: &Execution) -> u64 {
    e.parked()
        .map_or(0, |p| now.mono.since(now.moment_of(p.at)))
}

impl Policy {
    /// Orders a park if the pause keeps memory, otherwise a yield without a destination.
    pub(crate) fn set_aside(&mut self, gives: GivesWay, cause: Cause) {
        let kept = self.kept_of(gives);
        let Cause::Preempted { rule, by, reason } = cause else {
            return self.life.order_yield(gives.id, cause);
        };
        let reason = match &kept {
            Some(kept) => format!("{reason}; {}", kept.in_words()),
            None => reason,
        };
        let cause = Cause::Preempted { rule, by, reason };
        let Some(keep) = kept.and_then(|kept| kept.keep) else {
            return self.life.order_yield(gives.id, cause);
        };
        let order = Order::new(Wanted::Park(keep), cause);
        self.life.give_order(gives.id, order, None);
    }

    /// What its pause would keep. None if the execution cannot park.
    fn kept_of(&self, gives: GivesWay) -> Option<Kept> {
        if self.memory_presses(gives.node) {
            return None;
        }
        let expected_ms = gives.rest_ms.max(self.life.config.slice_ms);
        let mut pause = self.pause_of(gives.id, expected_ms)?;
        let to = self.life.cluster().execution(gives.to)?;
        let profile = to.profile;
        // The preempting execution needs host memory beside it.
        let comes = self.memory_at(profile, gives.node);
        if let Some(room) = &mut pause.host {
            room.free_bytes = room.free_bytes.saturating_sub(comes);
        }
        // It may need the device as well.
        let ask = Ask {
            counted: Some((gives.node, Claim::Host)),
            ..Ask::of(to)
        };
        if !self.life.would_do(&ask, gives.node) {
            pause.device = None;
        }
        Some(pause::choose(&pause))
    }

    /// Bytes of a node's memory that an execution counts for: its request, or else the node's share
    /// of a slot, which a worker grants.
    pub(crate) fn memory_at(
        &self,
        profile: crate::lifecycle::cluster::profile::ProfileIx,
        node: NodeIx,
    ) -> u64 {
        let profile = self.life.cluster().profiles.get(profile);
        let asked = profile.and_then(|p| p.requires.memory_bytes.max(p.requires.free_memory_bytes));
        asked.unwrap_or_else(|| self.life.cluster().node(node).share_bytes())
    }

    /// True if the execution can go on where it is parked. `gone`: as if this claim were free.
    pub(crate) fn fits_back(&self, id: ExecutionId, gone: Option<Claim>) -> bool {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        let node = self.life.cluster().node(ix);
        if node.presence != Presence::Up || !node.is_fresh(now.mono, &self.life.config) {
            return false;
        }
        let judged = node.judged(self.life.cluster().profiles.get(e.profile), e.device());
        let watch = node.watch(e.profile);
        let presses = watch.and_then(|w| w.obstacle(judged)).is_some();
        let held = node.held().saturating_sub(u32::from(gone.is_some()));
        let device = match e.claim {
            Claim::Device { device, budget } if e.takes() != e.claim => {
                let place = node.devices.get(device);
                place.is_some_and(|d| {
                    d.facts.is_some() && d.refuses(device, budget, gone, |has| has).is_none()
                })
            }
            _ => true,
        };
        !presses && held < node.slots() && device
    }

    /// Like [`Policy::fits_back`], and also respects the places that are reserved for a gang.
    pub(crate) fn goes_on_here(
        &self,
        id: ExecutionId,
        gone: Option<Claim>,
        kept: &Option<Arc<KeptPlaces>>,
    ) -> bool {
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        let node = self.life.cluster().node(ix);
        let free = (node.slots() + u32::from(gone.is_some())).saturating_sub(node.held());
        // The execution's own reserved device needs no place.
        let wants = e.device().filter(|_| e.takes() != e.claim);
        let keeps = kept.as_ref().is_some_and(|k| k.keeps((ix, wants), free));
        !keeps && self.fits_back(id, gone)
    }

    /// Resumes a preempted execution whose turn has come: where it is parked, or elsewhere.
    pub(crate) fn resume_aside(&mut self, id: ExecutionId) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        let (Stage::Started(ix, _), true) = (e.stage, e.is_aside()) else {
            return Placed::Moot;
        };
        if e.order().is_some() {
            return Placed::Moot;
        }
        if e.was_told(now.mono) || self.life.must_go(id, ix, true).is_some() {
            // Executions that must leave are handled by `review_holds`.
            return Placed::Deferred;
        }
        let kept = self.life.kept_from(id);
        if self.goes_on_here(id, None, &kept) {
            if self.life.defers(id, self.life.config.order_grace_ms) {
                return Placed::Deferred;
            }
            let Some(e) = self.life.cluster().execution(id) else {
                return Placed::Moot;
            };
            let claim = if e.takes() == e.claim {
                Claim::Host
            } else {
                e.claim
            };
            let reason = format!(
                "there is a slot where it is, after {}",
                seconds(as_f64(waited_ms(now, e)))
            );
            let order = Order {
                to: Some(ix),
                claim,
                ..Order::new(Wanted::Unpark, Cause::Unviable { reason })
            };
            self.life.give_order(id, order, None);
            return Placed::Yes;
        }
        let Some(e) = self.life.cluster().execution(id) else {
            return Placed::Moot;
        };
        if as_f64(waited_ms(now, e)) < self.move_of(e, id) {
            return Placed::NoRoom;
        }
        let ask = Ask {
            leaving: Some(Leaving::Place(ix, e.device())),
            free_slot: true,
            kept,
            ..Ask::of(e)
        };
        let Some(choice) = self.life.choose(&ask) else {
            return Placed::NoRoom;
        };
        if self.life.defers(id, self.life.config.order_grace_ms) {
            return Placed::Deferred;
        }
        self.life.order_yield_to(id, choice, Cause::Balance, None);
        Placed::Yes
    }

    /// Cost of one move, in ms.
    fn move_of(&self, e: &Execution, id: ExecutionId) -> f64 {
        regret::move_ms(e, self.life.rhythms.get(&id), &self.life.take_up)
    }

    /// Reviews one parked, preempted execution.
    pub(crate) fn look_at_aside(&mut self, id: ExecutionId, ix: NodeIx) {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if self.life.must_go(id, ix, true).is_some() {
            return;
        }
        let waited = waited_ms(now, e);
        let cost = self.move_of(e, id);
        let (profile, deferred) = (e.profile, e.extra.as_ref().and_then(|x| x.deferred));
        if self.give_up_aside(id, waited) {
            return;
        }
        let fits = self.fits_back(id, None);
        let ripe = as_f64(waited) >= cost && as_f64(waited) < cost + RIPE_MS;
        if !self.life.waiting.contains(id) || fits || ripe || deferred.is_some() {
            self.wait(id);
        }
        // The execution may fit here although its profile is blocked: on its own device, or in a
        // slot of a node that accepts no new executions.
        let blocked = self.life.sweep.blocked.contains(&profile);
        if fits && blocked && !self.life.is_outranked(id) && self.resume_aside(id) == Placed::Yes {
            self.life.stop_waiting(id);
        }
    }

    /// Gives up what the park keeps if that costs more than a new start. Returns true if it did.
    fn give_up_aside(&mut self, id: ExecutionId, waited: u64) -> bool {
        // A pause is expected to last as long again as it has lasted.
        let expected_ms = waited.max(self.life.config.slice_ms);
        let Some(pause) = self.pause_of(id, expected_ms) else {
            return false;
        };
        let kept = pause::choose(&pause);
        if kept.keep.is_some() || self.life.defers(id, self.life.config.order_grace_ms) {
            return false;
        }
        let why = self
            .life
            .cluster()
            .execution(id)
            .and_then(|e| e.extra.as_ref());
        let Some(Cause::Preempted { rule, .. }) = why.and_then(|x| x.why_parked.as_ref()) else {
            return false;
        };
        let cause = Cause::Preempted {
            rule: *rule,
            by: None,
            reason: format!(
                "it has stood aside for {}: {}",
                seconds(as_f64(waited)),
                kept.in_words()
            ),
        };
        self.life.order_yield(id, cause);
        self.life.stop_waiting(id);
        true
    }
}

#[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
fn as_f64(ms: u64) -> f64 {
    ms as f64
}
