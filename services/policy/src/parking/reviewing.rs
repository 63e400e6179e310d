//! Reviews parked executions: they resume in place if it is viable and has room, or elsewhere.

use fiec_schemas::{Cause, ExecutionId};

use super::Parking;
use super::preempted::review_preempted;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::{NodeIx, Order, Presence, Wanted};
use crate::lifecycle::placement::{Ask, Leaving};

/// Interval between two reviews of parked executions, in ms.
const LOOK_MS: u64 = 250;

impl Parking {
    /// Resumes parked executions: in place if the node is viable and has a slot, or elsewhere.
    pub fn review(&mut self, life: &mut Lifecycle, may_wait: impl Fn(ExecutionId) -> bool) {
        let now = life.now;
        if life.cluster().parked() == 0 || now.mono.since(self.looked) < LOOK_MS {
            return;
        }
        self.looked = now.mono;
        for ix in life.cluster().keys() {
            let node = life.cluster().node(ix);
            if node.parked == 0 || node.presence != Presence::Up {
                continue;
            }
            let parked = node.assigned.iter().copied();
            let parked = parked.filter(|id| {
                let e = life.cluster().execution(*id);
                e.is_some_and(|e| e.parked().is_some() && !e.is_appending() && e.order().is_none())
            });
            // Longest wait first.
            let mut parked: Vec<_> = parked.collect();
            parked.sort_by_key(|id| {
                let since = life.cluster().execution(*id).and_then(|e| e.parked());
                (since.map(|p| p.at), *id)
            });
            for id in parked {
                review_one(life, id, ix, &may_wait);
            }
        }
    }
}

fn review_one(
    life: &mut Lifecycle,
    id: ExecutionId,
    ix: NodeIx,
    may_wait: &impl Fn(ExecutionId) -> bool,
) {
    let now = life.now;
    let Some(e) = life.cluster().execution(id) else {
        return;
    };
    let node = life.cluster().node(ix);
    if e.was_told(now.mono) || !node.is_fresh(now.mono, &life.config) {
        return;
    }
    if e.is_preempted() {
        return review_preempted(life, id, ix, may_wait);
    }
    let profile = life.cluster().profiles.get(e.profile);
    let judged = node.judged(profile, e.device());
    let presses = node
        .watch(e.profile)
        .and_then(|w| w.obstacle(judged))
        .is_some();
    let why = e.extra.as_ref().and_then(|x| x.why_parked.clone());
    let keeps_device = e.takes() == e.claim;
    let claim = if keeps_device { Claim::Host } else { e.claim };
    let room = node.held() < node.slots() && has_device(life, ix, claim);
    let alone = node.held() == 0;
    if life.must_go(id, ix, true).is_some() {
        // `review_holds` handles executions that must leave.
        return;
    }
    let stays = match &why {
        // Its request fits here once other executions have left.
        Some(Cause::Asked { .. }) => alone && would_fit(life, id, ix),
        _ => room,
    };
    if presses || !stays {
        return move_parked(life, id, ix, why);
    }
    if life.is_outranked(id) || life.defers(id, life.config.order_grace_ms) {
        return;
    }
    let cause = match why {
        Some(Cause::Unviable { .. } | Cause::Pressure { .. }) => "its place is viable again",
        Some(Cause::Asked { .. }) => "what it asked for may be free where it is",
        _ => "there is a slot where it is",
    };
    let order = Order {
        to: Some(ix),
        claim,
        ..Order::new(
            Wanted::Unpark,
            Cause::Unviable {
                reason: cause.to_owned(),
            },
        )
    };
    life.give_order(id, order, None);
}

/// True if a node has what an execution asks for, not counting the execution itself.
fn would_fit(life: &mut Lifecycle, id: ExecutionId, ix: NodeIx) -> bool {
    let Some(e) = life.cluster().execution(id) else {
        return false;
    };
    let ask = Ask {
        only: Some(ix),
        counted: Some((ix, e.takes())),
        avoid: Vec::new(),
        ..Ask::of(e)
    };
    life.choose(&ask).is_some()
}

fn has_device(life: &Lifecycle, ix: NodeIx, claim: Claim) -> bool {
    let Claim::Device { device, budget } = claim else {
        return true;
    };
    let device_of = life.cluster().node(ix).devices.get(device);
    device_of.is_some_and(|d| d.refuses(device, budget, None, |has| has).is_none())
}

/// Resumes a parked execution on another node with a free slot; σ is committed.
fn move_parked(life: &mut Lifecycle, id: ExecutionId, ix: NodeIx, why: Option<Cause>) {
    if life.is_outranked(id) {
        return;
    }
    let Some(e) = life.cluster().execution(id) else {
        return;
    };
    let ask = Ask {
        // If another execution has its device, another device of the same node is as good as
        // another node.
        leaving: Some(match e.device() {
            None => Leaving::Node(ix),
            device => Leaving::Place(ix, device),
        }),
        free_slot: true,
        ..Ask::of(e)
    };
    let choice = life.choose(&ask);
    let Some(choice) = choice else { return };
    if life.defers(id, life.config.order_grace_ms) {
        return;
    }
    let cause = match why {
        Some(cause @ (Cause::Unviable { .. } | Cause::Asked { .. })) => cause,
        _ => Cause::Balance,
    };
    life.order_yield_to(id, choice, cause, None);
}
