//! Preempted executions without another place: what a park keeps, and how they go on.
//!
//! [`crate::parking::pause`] chooses what a park keeps: the option with the lowest measured cost. The
//! expected length of the pause is the remaining time of the preempting execution, and one time
//! slice at least.
//!
//! A preempted execution waits in the queue like all others, by priority, tenant share and age.
//! Shorter executions pass it for a bounded time only ([`crate::lifecycle::queue::order`]). When its turn
//! comes and a slot is free, it resumes in its place. Others are preempted for it by the same rules.
//! It moves to another node once it has waited longer than the move costs.
//!
//! If keeping memory has come to cost more than a new start from σ, the execution gives it up and
//! waits as pending. It returns no later than it would have returned from its park.

use fiec_schemas::{Cause, ExecutionId};

use super::deciding::{memory_presses, pause_of};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::binding::orders::GivesWay;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::{Execution, NodeIx, Order, Stage, Wanted};
use crate::lifecycle::placement::{Ask, Leaving};
use crate::lifecycle::queue::regret;
use crate::parking::pause::{self, Kept};
use crate::time::Now;
use crate::time::seconds;

/// A parked execution is queued again for this long after its wait has exceeded the cost of a move,
/// in ms.
const RIPE_MS: f64 = 1_000.0;

/// Time since it was parked, in ms.
fn waited_ms(now: Now, e: &Execution) -> u64 {
    e.parked()
        .map_or(0, |p| now.mono.since(now.moment_of(p.at)))
}

/// Orders a park if the pause keeps memory, otherwise a yield without a destination.
pub(crate) fn park_for(life: &mut Lifecycle, gives: GivesWay, cause: Cause) {
    let kept = kept_of(life, gives);
    let Cause::Preempted { rule, by, reason } = cause else {
        return life.order_yield(gives.id, cause);
    };
    let reason = match &kept {
        Some(kept) => format!("{reason}; {}", kept.in_words()),
        None => reason,
    };
    let cause = Cause::Preempted { rule, by, reason };
    let Some(keep) = kept.and_then(|kept| kept.keep) else {
        return life.order_yield(gives.id, cause);
    };
    let order = Order::new(Wanted::Park(keep), cause);
    life.give_order(gives.id, order, None);
}

/// What its pause would keep. None if the execution cannot park.
fn kept_of(life: &Lifecycle, gives: GivesWay) -> Option<Kept> {
    if memory_presses(life, gives.node) {
        return None;
    }
    let expected_ms = gives.rest_ms.max(life.config.slice_ms);
    let mut pause = pause_of(life, gives.id, expected_ms)?;
    let to = life.cluster().execution(gives.to)?;
    let profile = to.profile;
    // The preempting execution needs host memory beside it.
    let comes = memory_at(life, profile, gives.node);
    if let Some(room) = &mut pause.host {
        room.free_bytes = room.free_bytes.saturating_sub(comes);
    }
    // It may need the device as well.
    let ask = Ask {
        counted: Some((gives.node, Claim::Host)),
        ..Ask::of(to)
    };
    if !life.would_do(&ask, gives.node) {
        pause.device = None;
    }
    Some(pause::choose(&pause))
}

/// Bytes of a node's memory that an execution counts for: its request, or else the node's share
/// of a slot, which a worker grants.
fn memory_at(
    life: &Lifecycle,
    profile: crate::lifecycle::cluster::profile::ProfileIx,
    node: NodeIx,
) -> u64 {
    let profile = life.cluster().profiles.get(profile);
    let asked = profile.and_then(|p| p.requires.memory_bytes.max(p.requires.free_memory_bytes));
    asked.unwrap_or_else(|| life.cluster().node(node).share_bytes())
}

/// Resumes a preempted execution whose turn has come: where it is parked, or elsewhere.
pub(crate) fn resume(life: &mut Lifecycle, id: ExecutionId) -> Placed {
    let now = life.now;
    let Some(e) = life.cluster().execution(id) else {
        return Placed::Moot;
    };
    let (Stage::Started(ix, _), true) = (e.stage, e.is_preempted()) else {
        return Placed::Moot;
    };
    if e.order().is_some() {
        return Placed::Moot;
    }
    if e.was_told(now.mono) || life.must_go(id, ix, true).is_some() {
        // Executions that must leave are handled by `review_holds`.
        return Placed::Deferred;
    }
    let kept = life.kept_from(id);
    if life.goes_on_here(id, None, &kept) {
        if life.defers(id, life.config.order_grace_ms) {
            return Placed::Deferred;
        }
        let Some(e) = life.cluster().execution(id) else {
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
        life.give_order(id, order, None);
        return Placed::Yes;
    }
    let Some(e) = life.cluster().execution(id) else {
        return Placed::Moot;
    };
    if as_f64(waited_ms(now, e)) < move_of(life, e, id) {
        return Placed::NoRoom;
    }
    let ask = Ask {
        leaving: Some(Leaving::Place(ix, e.device())),
        free_slot: true,
        kept,
        ..Ask::of(e)
    };
    let Some(choice) = life.choose(&ask) else {
        return Placed::NoRoom;
    };
    if life.defers(id, life.config.order_grace_ms) {
        return Placed::Deferred;
    }
    life.order_yield_to(id, choice, Cause::Balance, None);
    Placed::Yes
}

/// Cost of one move, in ms.
fn move_of(life: &Lifecycle, e: &Execution, id: ExecutionId) -> f64 {
    regret::move_ms(e, life.rhythm(id), life.take_up())
}

/// Reviews one parked, preempted execution.
pub(super) fn review_preempted(
    life: &mut Lifecycle,
    id: ExecutionId,
    ix: NodeIx,
    may_wait: &impl Fn(ExecutionId) -> bool,
) {
    let now = life.now;
    let Some(e) = life.cluster().execution(id) else {
        return;
    };
    if life.must_go(id, ix, true).is_some() {
        return;
    }
    let waited = waited_ms(now, e);
    let cost = move_of(life, e, id);
    let (profile, deferred) = (e.profile, e.extra.as_ref().and_then(|x| x.deferred));
    if give_up(life, id, waited) {
        return;
    }
    let fits = life.fits_back(id, None);
    let ripe = as_f64(waited) >= cost && as_f64(waited) < cost + RIPE_MS;
    let again = !life.waiting().contains(id) || fits || ripe || deferred.is_some();
    if again && may_wait(id) {
        life.queue_up(id);
    }
    // The execution may fit here although its profile is blocked: on its own device, or in a
    // slot of a node that accepts no new executions.
    let blocked = life.is_blocked(profile);
    if fits && blocked && !life.is_outranked(id) && resume(life, id) == Placed::Yes {
        life.stop_waiting(id);
    }
}

/// Gives up what the park keeps if that costs more than a new start. Returns true if it did.
fn give_up(life: &mut Lifecycle, id: ExecutionId, waited: u64) -> bool {
    // A pause is expected to last as long again as it has lasted.
    let expected_ms = waited.max(life.config.slice_ms);
    let Some(pause) = pause_of(life, id, expected_ms) else {
        return false;
    };
    let kept = pause::choose(&pause);
    if kept.keep.is_some() || life.defers(id, life.config.order_grace_ms) {
        return false;
    }
    let why = life.cluster().execution(id).and_then(|e| e.extra.as_ref());
    let Some(Cause::Preempted { rule, .. }) = why.and_then(|x| x.why_parked.as_ref()) else {
        return false;
    };
    let cause = Cause::Preempted {
        rule: *rule,
        by: None,
        reason: format!(
            "it has been preempted for {}: {}",
            seconds(as_f64(waited)),
            kept.in_words()
        ),
    };
    life.order_yield(id, cause);
    life.stop_waiting(id);
    true
}

#[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
fn as_f64(ms: u64) -> f64 {
    ms as f64
}
