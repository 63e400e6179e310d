//! Decides for an execution without a viable place whether it goes on, parks, or leaves its node.

use fiec_schemas::scheduling::WhenUnviable;
use fiec_schemas::{Cause, ExecutionId, Signal};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::bind::Placed;
use crate::lifecycle::cluster::{NodeIx, Order, Presence, Stage, Wanted};
use crate::parking::pause::{Pause, Room};
use crate::parking::unviable::{self, Answer, Pressure};

/// Expected length of a pause for memory that others use, in ms.
const ASKED_MS: u64 = 60_000;

/// Handles an execution whose place is not viable, or lacks what it asks for, when no other
/// node can take it.
pub(crate) fn without_place(life: &mut Lifecycle, id: ExecutionId, cause: &Cause) -> Placed {
    let now = life.now;
    let Some(e) = life.cluster().execution(id) else {
        return Placed::Moot;
    };
    let pressure = match cause {
        Cause::Pressure { evidence } => {
            let lasted = now.wall.millis() - evidence.since.millis();
            Some(Pressure::of(evidence, u64::try_from(lasted).unwrap_or(0)))
        }
        Cause::Asked { .. } => None,
        _ => return Placed::NoRoom,
    };
    let wanted = life.cluster().profiles.get(e.profile);
    let wanted = wanted.map_or(WhenUnviable::Cheapest, |p| p.when_unviable);
    let at_risk_ms = since_commit_ms(life, id);
    // A pause is expected to last as long again as it has lasted.
    let lasted = e
        .parked()
        .map_or(0, |p| now.mono.since(now.moment_of(p.at)));
    let pause = pause_of(life, id, ASKED_MS.max(lasted));
    let weighed = unviable::weigh(wanted, pressure.as_ref(), pause.as_ref(), at_risk_ms);
    let full = e.stage.node().is_some_and(|ix| memory_presses(life, ix));
    let answer = match (e.parked(), weighed.answer) {
        // The parked execution itself holds memory that presses.
        (Some(_), _) if full => Answer::Suspend,
        (Some(_), Answer::Suspend) => Answer::Suspend,
        (Some(_), _) => return Placed::NoRoom,
        (None, answer) => answer,
    };
    let wants = match answer {
        Answer::GoOn => return Placed::NoRoom,
        Answer::Wait(keep) => Wanted::Park(keep),
        Answer::Suspend => Wanted::Yield,
    };
    if pressure.is_none() && life.defers(id, life.config.order_grace_ms) {
        return Placed::Deferred;
    }
    let cause = match cause {
        Cause::Asked { reason } => Cause::Asked {
            reason: format!("{reason}; no other place has it ({})", weighed.reason),
        },
        cause => Cause::Unviable {
            reason: format!(
                "{}, and no other place can take it ({})",
                cause.in_words(),
                weighed.reason
            ),
        },
    };
    life.give_order(id, Order::new(wants, cause), None);
    Placed::Yes
}

/// Time since an execution's last commit, in ms.
fn since_commit_ms(life: &Lifecycle, id: ExecutionId) -> u64 {
    let now = life.now;
    let committed = life.rhythm(id).and_then(|r| r.last);
    let since = life.cluster().execution(id).map_or(now.mono, |e| e.since);
    now.mono
        .since(committed.map_or(since, |(_, at)| at.max(since)))
}

/// An execution's memory, and how much of it its node could keep during a pause. None if the
/// node does not park or the execution cannot.
pub(super) fn pause_of(life: &Lifecycle, id: ExecutionId, expected_ms: u64) -> Option<Pause> {
    let now = life.now;
    let e = life.cluster().execution(id)?;
    let node = life.cluster().node(e.stage.node()?);
    let descriptor = node.descriptor.as_ref()?;
    let cannot = e.extra.as_ref().and_then(|x| x.cannot_park);
    // An execution that is already parked there keeps its memory.
    let others = node.parked.saturating_sub(u32::from(e.parked().is_some()));
    if others >= descriptor.parks || cannot.is_some_and(|until| now.mono < until) {
        return None;
    }
    let profile = life.cluster().profiles.get(e.profile)?;
    let device = e.device().and_then(|ix| node.devices.get(ix));
    let facts = device.and_then(|d| d.facts.as_ref());
    let memory = facts.and_then(|f| f.memory_bytes).unwrap_or(0);
    let wants = profile.requires.device.as_ref();
    let wants = wants.and_then(|d| d.share_bytes.or(d.memory_bytes));
    let device_bytes = device.map_or(0, |_| wants.unwrap_or(memory).min(memory).max(1));
    let limit = descriptor.memory_limit_bytes;
    let used = node.vector.as_ref().and_then(|v| {
        let host = |r: &&fiec_schemas::Reading| r.signal == Signal::Memory && r.device.is_none();
        v.readings.iter().find(host)?.value
    });
    let share = node.share_bytes();
    let host_bytes = profile.requires.memory_bytes.unwrap_or(share).min(share);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of bytes"
    )]
    let free = (limit as f64 * (1.0 - used.unwrap_or(0.0)).clamp(0.0, 1.0)) as u64;
    let copies = facts.and_then(|f| f.device.as_ref()?.copy_bytes_s());
    Some(Pause {
        expected_ms,
        device_bytes,
        host_bytes,
        resume_ms: life.take_up().resume_ms(e.state_bytes),
        copy_bytes_s: copies,
        device: device.map(|_| Room {
            total_bytes: memory,
            // Its own memory counts as free for it.
            free_bytes: device_bytes,
        }),
        host: Some(Room {
            total_bytes: limit,
            // The used memory includes its own process.
            free_bytes: free.saturating_add(host_bytes),
        }),
    })
}

/// Why an execution should leave its node if its program has asked for more than that has granted.
pub(crate) fn wish(life: &Lifecycle, id: ExecutionId) -> Option<(NodeIx, Cause)> {
    let e = life.cluster().execution(id)?;
    let asks = e.extra.as_ref().is_some_and(|x| x.asks);
    let (true, Stage::Started(ix, _), false) = (asks, e.stage, e.is_appending()) else {
        return None;
    };
    if e.order().is_some() {
        return None;
    }
    let change = e.extra.as_ref().and_then(|x| x.adjusted.as_deref());
    let wish = |what: &str, bytes: Option<u64>| bytes.map(|b| format!("{b} bytes of {what}"));
    let words: Vec<_> = change
        .into_iter()
        .flat_map(|c| {
            [
                wish("memory", c.memory_bytes),
                wish("device memory", c.device_memory_bytes),
            ]
        })
        .flatten()
        .collect();
    let node = &life.cluster().node(ix).id;
    let cause = Cause::Asked {
        reason: format!("{}, and {node} has not granted that", words.join(" and ")),
    };
    Some((ix, cause))
}

/// If memory presses, only parked executions leave, as long as that may help.
pub(crate) fn parked_first(life: &Lifecycle, ix: NodeIx, ids: &mut Vec<ExecutionId>) {
    let node = life.cluster().node(ix);
    if node.parked == 0 || node.is_draining() || node.presence != Presence::Up {
        return;
    }
    let memory = memory_presses(life, ix);
    let stands = |id: &ExecutionId| {
        let e = life.cluster().execution(*id);
        e.is_some_and(|e| e.parked().is_some() && e.order().is_none())
    };
    if memory && ids.iter().any(stands) {
        ids.retain(stands);
    }
}

/// True if a node's memory is beyond its threshold.
pub(super) fn memory_presses(life: &Lifecycle, ix: NodeIx) -> bool {
    let watch = life.cluster().node(ix).base.as_ref();
    let watched = watch.map_or(&[][..], |w| w.watched());
    watched.iter().any(|w| {
        let memory = w.signal == Signal::Memory && w.device.is_none();
        memory && w.automaton.pressing_since().is_some()
    })
}
