//! Executions that are parked here: they wait at their last committed boundary, with their process
//! alive.
//!
//! ```text
//! park ─▶ place reserved ─▶ child: park ─▶ boundary + parked in one message ─▶ slot free
//!                                            keep=host: the device is free once the child has
//!                                            moved what it has there to the host's memory
//! unpark ─▶ a slot, the device again ─▶ unparked in the ledger, child: unpark ─▶ the next capsule
//! ```
//!
//! A parked execution is started, and this worker is still its only writer. A yield, a pause or a
//! cancel ends its run at this boundary, since σ is committed. If its process dies it stays parked,
//! and continues from σ.
//!
//! The number of parked executions is bounded. While the node's memory is beyond its threshold no
//! execution is parked, and parked executions yield, one at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec_kit::frames::{Order, Park, Report};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, Event, ExecutionId, Reading, Signal, Timestamp};
use tokio::time::Instant;

use crate::attempts::device_budget;
use crate::child_process::Child;
use crate::devices::Lease;
use crate::message::{After, Message};
use crate::pending_order::PendingOrder;
use crate::replies::{NotTaken, Reply};
use crate::runner::{Runner, Wait};
use crate::shared::{self, Shared};

/// After one parked execution was ordered to yield for memory, the next one stays for this long.
const RELIEF_WITHIN: Duration = Duration::from_secs(2);

/// Executions that are parked on this node, or about to be.
#[derive(Debug)]
pub struct Parks {
    most: usize,
    /// Oldest first.
    all: Mutex<Vec<ExecutionId>>,
    /// The node's memory is beyond its threshold.
    presses: AtomicBool,
    relieved: Mutex<Option<Instant>>,
}

impl Parks {
    /// At most this many.
    pub fn new(most: u32) -> Self {
        Self {
            most: most as usize,
            all: Mutex::default(),
            presses: AtomicBool::new(false),
            relieved: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ExecutionId>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of parked executions.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Reserves a place for one more, or returns why there is none.
    fn enter(self: &Arc<Self>, execution: ExecutionId) -> Result<Place, NotTaken> {
        if self.presses.load(Ordering::Acquire) {
            return Err(NotTaken::MemoryPresses);
        }
        let mut all = self.lock();
        if all.len() >= self.most {
            return Err(NotTaken::ManyParked {
                parked: all.len(),
                most: self.most,
            });
        }
        all.push(execution);
        drop(all);
        Ok(Place {
            parks: Arc::clone(self),
            execution,
        })
    }
}

/// A place among the parked executions, until it is dropped.
#[derive(Debug)]
struct Place {
    parks: Arc<Parks>,
    execution: ExecutionId,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.parks.lock().retain(|id| *id != self.execution);
    }
}

/// A parked execution, or one that will be parked at its next boundary.
#[derive(Debug)]
pub(crate) struct Parked {
    _place: Place,
    keep: Keep,
    /// End of its last capsule. None while it has not reached the boundary.
    at: Option<Timestamp>,
    /// The lease of its device, while it has data there.
    lease: Option<Lease>,
}

/// Checks the node's memory. Beyond the threshold the execution that was parked first yields.
pub(crate) fn relieve(shared: &Shared, readings: &[Reading]) {
    let threshold = shared.options.thresholds.get(&Signal::Memory);
    let memory = readings
        .iter()
        .find(|r| r.signal == Signal::Memory && r.device.is_none());
    let (Some(threshold), Some(value)) = (threshold, memory.and_then(|r| r.value)) else {
        return;
    };
    let parks = &shared.parks;
    let presses = value >= threshold.high;
    parks.presses.store(presses, Ordering::Release);
    let Some(first) = parks.lock().first().copied().filter(|_| presses) else {
        return;
    };
    let relieved = &mut *parks
        .relieved
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if relieved.is_some_and(|at| at.elapsed() < RELIEF_WITHIN) {
        return;
    }
    let cause = Cause::Unviable {
        reason: format!(
            "the execution was parked, and memory was {:.1} % (limit {:.1} %)",
            value * 100.0,
            threshold.high * 100.0
        ),
    };
    if let Some(live) = shared.live().get(&first)
        && live.order_yield(first, cause)
    {
        *relieved = Some(Instant::now());
    }
}

impl Runner {
    /// Whether it waits at a boundary.
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.as_ref().is_some_and(|p| p.at.is_some())
    }

    /// Its present grant.
    pub(crate) fn granted(&self) -> Grant {
        let binding = self.tip.state.phase.binding();
        let now = self.grant.as_ref().or(self.given.as_ref()).cloned();
        now.unwrap_or_else(|| self.shared.grant(binding.map(|b| b.substrate.as_str())))
    }

    /// Orders a park at the next boundary, or answers why not.
    pub(crate) async fn park(&mut self, cause: Cause, keep: Keep, reply: Reply) {
        let shared = self.shared.clone();
        let place = match self.may_park() {
            Ok(place) => place,
            Err(not_taken) => return shared.answer(reply, Err(not_taken)).await,
        };
        self.parked = Some(Parked {
            _place: place,
            keep,
            at: None,
            lease: None,
        });
        let mut grant = self.granted();
        let aside = keep == Keep::Host && grant.device.take().is_some();
        if aside {
            grant.substrate = Some(HOST.to_owned());
        }
        let order = Order::Park(Park {
            cause: Some(cause.in_words()),
            grant: aside.then_some(grant),
        });
        self.pending = Some(PendingOrder::Park { cause, keep });
        self.order(order).await;
        shared.answer(reply, Ok(())).await;
    }

    fn may_park(&self) -> Result<Place, NotTaken> {
        if self.parked.is_some() {
            return Err(NotTaken::Parked);
        }
        if self.ended || self.pending.is_some() || self.cancelling.is_some() {
            return Err(NotTaken::Leaving);
        }
        if self.shared.is_draining() {
            return Err(NotTaken::Draining);
        }
        if self.child.is_none() {
            return Err(NotTaken::BetweenAttempts);
        }
        if !self.parks {
            return Err(NotTaken::CannotPark);
        }
        self.shared.parks.enter(self.tip.state.execution)
    }

    /// Handles the boundary at which the child parks.
    pub(crate) fn stands(&mut self, message: &mut Message, computed_until: Timestamp) {
        if self.cancelling.is_some() {
            // Its end follows.
            return;
        }
        let Some(PendingOrder::Park { .. }) = &self.pending else {
            // Another order has replaced it.
            return;
        };
        let (Some(PendingOrder::Park { cause, keep }), Some(parked)) =
            (self.pending.take(), &mut self.parked)
        else {
            return;
        };
        message.events.push(Event::Parked {
            cause,
            keep,
            computed_until,
        });
        parked.at = Some(computed_until);
        if let Some(slot) = &mut self.slot {
            parked.lease = slot.device.take();
        }
        if let Some(computed) = &mut self.computed {
            computed.stop();
        }
        self.computes_uncommitted(false);
        self.slot = None;
        self.wait = None;
        self.silence = None;
        self.shared.metrics.parked.inc();
        tracing::info!(keep = keep.as_str(), "parked at boundary");
    }

    /// The child has moved its device data to the host, or had none: release the device.
    pub(crate) fn set_aside(&mut self) {
        if let Some(parked) = &mut self.parked
            && parked.at.is_some()
            && parked.keep == Keep::Host
        {
            parked.lease = None;
        }
    }

    /// Continues a parked execution, or answers why not.
    pub(crate) async fn unpark(&mut self, reason: String, reply: Reply) {
        let shared = self.shared.clone();
        let Some(parked) = &self.parked else {
            return shared.answer(reply, Err(NotTaken::NotParked)).await;
        };
        if parked.at.is_none() {
            // Its child may wait at that boundary already, with its report in flight.
            return shared.answer(reply, Err(NotTaken::NotYetParked)).await;
        }
        if let Err(not_taken) = self.take_place().await {
            return shared.answer(reply, Err(not_taken)).await;
        }
        let grant = match self.grant_asked() {
            Ok(grant) => grant,
            Err(reason) => {
                // It stays parked, and keeps its resources.
                let device = self.slot.as_mut().and_then(|slot| slot.device.take());
                self.slot = None;
                if let Some(parked) = &mut self.parked {
                    parked.lease = device.filter(|_| parked.keep == Keep::Device);
                }
                let not_taken = NotTaken::NotGranted(reason);
                return shared.answer(reply, Err(not_taken)).await;
            }
        };
        self.parked = None;
        if let Some(computed) = &mut self.computed {
            computed.go_on(Instant::now());
        }
        self.computes_uncommitted(true);
        let computing_since = self.shared.broker.now();
        tracing::info!(reason, "a parked execution continues in its process");
        let mut events = vec![Event::Unparked {
            reason,
            computing_since,
        }];
        events.extend(grant);
        self.stage(Message {
            after: vec![After::Answer(reply)],
            ..Message::of(events)
        })
        .await;
        if self.child.is_some() {
            self.expect_boundary();
            let grant = Some(self.granted());
            self.order(Order::Unpark { grant }).await;
        } else {
            // Continues from its last commit, once earlier messages are settled.
            self.wait = Some((Wait::Retry, Instant::now()));
        }
    }

    /// Takes a slot, and the device that it had.
    async fn take_place(&mut self) -> Result<(), NotTaken> {
        let shared = self.shared.clone();
        if self.ended || self.pending.is_some() || self.cancelling.is_some() {
            return Err(NotTaken::Leaving);
        }
        if shared.is_draining() {
            return Err(NotTaken::Draining);
        }
        let Some(mut slot) = shared::spare_slot(&shared) else {
            return Err(NotTaken::NoSlot {
                running: shared.running(),
                slots: shared.slots(),
                queued: shared.queued(),
            });
        };
        let binding = self.tip.state.phase.binding();
        let place = binding.map_or(HOST, |b| b.substrate.as_str()).to_owned();
        let held = self.parked.as_mut().and_then(|p| p.lease.take());
        slot.device = match held {
            Some(lease) => Some(lease),
            None => {
                // A reserve may have grown its part beyond its submission.
                let has = self.granted().device.and_then(|d| d.memory_bytes);
                let own = device_budget(&self.tip.state, &self.spec);
                let budget = own.map(|own| has.map_or(own, |has| has.max(own)));
                let lease = shared.devices.lease(&place, budget, Duration::ZERO);
                lease.await.map_err(NotTaken::NotGranted)?
            }
        };
        self.slot = Some(slot);
        Ok(())
    }

    /// Handles the end of a parked execution's process: the execution stays, and continues from σ.
    pub(crate) async fn died_parked(&mut self, child: Child) {
        let logs = child.logs.clone();
        let exit = child.autopsy().await;
        self.printed = logs.printed();
        tracing::warn!(%exit, "the process of a parked execution is gone");
        if self.cancelling.is_some() || self.pending.is_some() {
            return self.ended_here();
        }
        self.set_free();
    }

    /// Handles the end of a parked execution's run, on order or because it could not wait.
    pub(crate) async fn ended_parked(&mut self, report: &Report) {
        if let Some(child) = self.child.take()
            && !child.spent
        {
            self.shared.pool.give(child);
        }
        if let Report::Failed { reason, .. } = report {
            tracing::warn!(
                reason,
                "a parked program failed; its execution continues from its σ"
            );
        }
        if self.cancelling.is_some() || self.pending.is_some() {
            return self.ended_here();
        }
        self.set_free();
    }

    /// Appends the events that were due at its end.
    fn ended_here(&mut self) {
        self.wait = None;
        match self.cancelling.take() {
            Some(who) => self.finish(vec![Event::Cancelled { who }]),
            None => self.append_pending(),
        }
    }

    /// Without its process it has no data on a device.
    fn set_free(&mut self) {
        if let Some(parked) = &mut self.parked {
            parked.lease = None;
        }
    }

    /// Ends the run of a parked execution. σ is committed, and its next node fetches it.
    pub(crate) async fn end_parked_run(&mut self) {
        if self.child.is_some() {
            self.order(Order::Cancel).await;
            let grace = self.shared.options.cancel_grace;
            self.wait = Some((Wait::Kill, Instant::now() + grace));
        } else {
            self.append_pending();
        }
    }

    /// Appends the events of the pending order, once the run of a parked execution has ended.
    pub(crate) fn append_pending(&mut self) {
        let since = self.parked.take().and_then(|p| p.at);
        if let Some(pending) = self.pending.take() {
            let (events, _) = pending.events(
                self.epoch,
                since.unwrap_or_else(|| self.shared.broker.now()),
            );
            self.finish(events);
            self.wait = None;
        }
    }
}
