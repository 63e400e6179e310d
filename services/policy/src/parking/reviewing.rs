//! Executions without a viable place, parked executions, and executions that ask for more.
//!
//! Hysteresis bounds the moves: an execution stops only for pressure that lasted its dwell time. It
//! resumes when the pressure has been gone for as long, or when another place admits it.


use fiec_schemas::scheduling::WhenUnviable;
use fiec_schemas::{Cause, EventKind, ExecutionId, Signal};

use crate::engine::Policy;
use crate::engine::bind::Placed;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::{Execution, NodeIx, Order, Presence, Stage, Wanted};
use crate::lifecycle::placement::{Ask, Leaving};
use crate::parking::pause::{Pause, Room};
use crate::parking::unviable::{self, Answer, Pressure};
use crate::time::Now;
use crate::view::LedgerView;

/// Interval between two reviews of parked executions, in ms.
const LOOK_MS: u64 = 250;
/// Expected length of a pause for memory that others use, in ms.
const ASKED_MS: u64 = 60_000;
/// The author of a program's own request in the ledger.
const PROGRAM: &str = "program";

impl Policy {
    /// Reads from a message whether the execution is parked, and whether it asks for more.
    pub(crate) fn note_parking(&mut self, view: &LedgerView<'_>) {
        let id = view.state.execution;
        let asked = view
            .event(EventKind::Adjusted)
            .is_some_and(|a| a.who.as_deref() == Some(PROGRAM));
        self.life.set_parked(view);
        if self.life.note_park(view, asked) {
            return;
        }
        let by = view.event(EventKind::Parked).and_then(|p| p.cause());
        if let Some(Cause::Preempted { by, .. }) = by {
            self.wait(id);
            if let Some(by) = by {
                self.gave_way(by);
            }
        }
    }

    /// Handles an execution whose place is not viable, or lacks what it asks for, when no other
    /// node can take it.
    pub(crate) fn nowhere(&mut self, id: ExecutionId, cause: &Cause) -> Placed {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
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
        let wanted = self.life.cluster().profiles.get(e.profile);
        let wanted = wanted.map_or(WhenUnviable::Cheapest, |p| p.when_unviable);
        let at_risk_ms = self.since_commit_ms(id);
        // A pause is expected to last as long again as it has lasted.
        let lasted = e
            .parked()
            .map_or(0, |p| now.mono.since(now.moment_of(p.at)));
        let pause = self.pause_of(id, ASKED_MS.max(lasted));
        let weighed = unviable::weigh(wanted, pressure.as_ref(), pause.as_ref(), at_risk_ms);
        let full = e.stage.node().is_some_and(|ix| self.memory_presses(ix));
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
        if pressure.is_none() && self.life.defers(id, self.life.config.order_grace_ms) {
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
        self.life.give_order(id, Order::new(wants, cause), None);
        Placed::Yes
    }

    /// Time since an execution's last commit, in ms.
    fn since_commit_ms(&self, id: ExecutionId) -> u64 {
        let now = self.life.now;
        let committed = self.life.rhythms.get(&id).and_then(|r| r.last);
        let since = self
            .life
            .cluster()
            .execution(id)
            .map_or(now.mono, |e| e.since);
        now.mono
            .since(committed.map_or(since, |(_, at)| at.max(since)))
    }

    /// An execution's memory, and how much of it its node could keep during a pause. None if the
    /// node does not park or the execution cannot.
    pub(crate) fn pause_of(&self, id: ExecutionId, expected_ms: u64) -> Option<Pause> {
        let now = self.life.now;
        let e = self.life.cluster().execution(id)?;
        let node = self.life.cluster().node(e.stage.node()?);
        let descriptor = node.descriptor.as_ref()?;
        let cannot = e.extra.as_ref().and_then(|x| x.cannot_park);
        // An execution that is already parked there keeps its memory.
        let others = node.parked.saturating_sub(u32::from(e.parked().is_some()));
        if others >= descriptor.parks || cannot.is_some_and(|until| now.mono < until) {
            return None;
        }
        let profile = self.life.cluster().profiles.get(e.profile)?;
        let device = e.device().and_then(|ix| node.devices.get(ix));
        let facts = device.and_then(|d| d.facts.as_ref());
        let memory = facts.and_then(|f| f.memory_bytes).unwrap_or(0);
        let wants = profile.requires.device.as_ref();
        let wants = wants.and_then(|d| d.share_bytes.or(d.memory_bytes));
        let device_bytes = device.map_or(0, |_| wants.unwrap_or(memory).min(memory).max(1));
        let limit = descriptor.memory_limit_bytes;
        let used = node.vector.as_ref().and_then(|v| {
            let host =
                |r: &&fiec_schemas::Reading| r.signal == Signal::Memory && r.device.is_none();
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
            resume_ms: self.life.take_up.resume_ms(e.state_bytes),
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

    /// Moves an execution to a node with more if its program has asked for more.
    pub(crate) fn look_at_wish(&mut self, id: ExecutionId) -> bool {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let asks = e.extra.as_ref().is_some_and(|x| x.asks);
        let (true, Stage::Started(ix, _), false) = (asks, e.stage, e.is_appending()) else {
            return false;
        };
        if e.order().is_some() {
            return false;
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
        let node = &self.life.cluster().node(ix).id;
        let cause = Cause::Asked {
            reason: format!("{}, and {node} has not granted that", words.join(" and ")),
        };
        let placed = self.yield_elsewhere(id, ix, cause);
        if matches!(placed, Placed::NoRoom | Placed::Moot) {
            let again = now.mono.plus(self.life.config.order_retry_ms);
            self.life.set_due(id, again);
        }
        true
    }

    /// If memory presses, only parked executions leave, as long as that may help.
    pub(crate) fn parked_first(&self, ix: NodeIx, ids: &mut Vec<ExecutionId>) {
        let node = self.life.cluster().node(ix);
        if node.parked == 0 || node.is_draining() || node.presence != Presence::Up {
            return;
        }
        let memory = self.memory_presses(ix);
        let stands = |id: &ExecutionId| {
            let e = self.life.cluster().execution(*id);
            e.is_some_and(|e| e.parked().is_some() && e.order().is_none())
        };
        if memory && ids.iter().any(stands) {
            ids.retain(stands);
        }
    }

    /// True if a node's memory is beyond its threshold.
    pub(crate) fn memory_presses(&self, ix: NodeIx) -> bool {
        let watch = self.life.cluster().node(ix).base.as_ref();
        let watched = watch.map_or(&[][..], |w| w.watched());
        watched.iter().any(|w| {
            let memory = w.signal == Signal::Memory && w.device.is_none();
            memory && w.automaton.pressing_since().is_some()
        })
    }

    /// For people: how long it has been parked, what it keeps, and why. None if it is not parked.
    pub(crate) fn parked_in_words(&self, now: Now, e: &Execution) -> Option<String> {
        let parked = e.parked()?;
        let waited = now.mono.since(now.moment_of(parked.at));
        let why = e.extra.as_ref().and_then(|x| x.why_parked.as_ref());
        let why = why.map_or_else(String::new, |cause| format!(" ({})", cause.in_words()));
        Some(format!(
            "for {waited} ms, keeping its {}{why}",
            parked.keep.as_str()
        ))
    }

    /// Resumes parked executions: in place if the node is viable and has a slot, or elsewhere.
    pub(crate) fn look_at_parked(&mut self) {
        let now = self.life.now;
        if now.mono.since(self.realloc.looked) < LOOK_MS {
            return;
        }
        self.realloc.looked = now.mono;
        for ix in self.life.cluster().keys() {
            let node = self.life.cluster().node(ix);
            if node.parked == 0 || node.presence != Presence::Up {
                continue;
            }
            let parked = node.holds.iter().copied();
            let parked = parked.filter(|id| {
                let e = self.life.cluster().execution(*id);
                e.is_some_and(|e| e.parked().is_some() && !e.is_appending() && e.order().is_none())
            });
            // Longest wait first.
            let mut parked: Vec<_> = parked.collect();
            parked.sort_by_key(|id| {
                let since = self.life.cluster().execution(*id).and_then(|e| e.parked());
                (since.map(|p| p.at), *id)
            });
            for id in parked {
                self.look_at_one_parked(id, ix);
            }
        }
    }

    fn look_at_one_parked(&mut self, id: ExecutionId, ix: NodeIx) {
        let now = self.life.now;
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        let node = self.life.cluster().node(ix);
        if e.was_told(now.mono) || !node.is_fresh(now.mono, &self.life.config) {
            return;
        }
        if e.is_aside() {
            return self.look_at_aside(id, ix);
        }
        let profile = self.life.cluster().profiles.get(e.profile);
        let judged = node.judged(profile, e.device());
        let presses = node
            .watch(e.profile)
            .and_then(|w| w.obstacle(judged))
            .is_some();
        let why = e.extra.as_ref().and_then(|x| x.why_parked.clone());
        let keeps_device = e.takes() == e.claim;
        let claim = if keeps_device { Claim::Host } else { e.claim };
        let room = node.held() < node.slots() && self.has_device(ix, claim);
        let alone = node.held() == 0;
        if self.life.must_go(id, ix, true).is_some() {
            // `review_holds` handles executions that must leave.
            return;
        }
        let stays = match &why {
            // Its request fits here once other executions have left.
            Some(Cause::Asked { .. }) => alone && self.would_fit(id, ix),
            _ => room,
        };
        if presses || !stays {
            return self.move_parked(id, ix, why);
        }
        if self.life.is_outranked(id) || self.life.defers(id, self.life.config.order_grace_ms) {
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
        self.life.give_order(id, order, None);
    }

    /// True if a node has what an execution asks for, not counting the execution itself.
    fn would_fit(&mut self, id: ExecutionId, ix: NodeIx) -> bool {
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let ask = Ask {
            only: Some(ix),
            counted: Some((ix, e.takes())),
            avoid: Vec::new(),
            ..Ask::of(e)
        };
        self.life.choose(&ask).is_some()
    }

    fn has_device(&self, ix: NodeIx, claim: Claim) -> bool {
        let Claim::Device { device, budget } = claim else {
            return true;
        };
        let device_of = self.life.cluster().node(ix).devices.get(device);
        device_of.is_some_and(|d| d.refuses(device, budget, None, |has| has).is_none())
    }

    /// Resumes a parked execution on another node with a free slot; σ is committed.
    fn move_parked(&mut self, id: ExecutionId, ix: NodeIx, why: Option<Cause>) {
        if self.life.is_outranked(id) {
            return;
        }
        let Some(e) = self.life.cluster().execution(id) else {
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
        let choice = self.life.choose(&ask);
        let Some(choice) = choice else { return };
        if self.life.defers(id, self.life.config.order_grace_ms) {
            return;
        }
        let cause = match why {
            Some(cause @ (Cause::Unviable { .. } | Cause::Asked { .. })) => cause,
            _ => Cause::Balance,
        };
        self.life.order_yield_to(id, choice, cause, None);
    }
}
