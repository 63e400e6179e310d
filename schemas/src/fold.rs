//! The state of an execution is a pure fold over its ledger. Every writer computes the next state
//! here, so that no message can say what the rules forbid.
//!
//! ```text
//!             submitted                bound                started
//!   (nothing) ─────────▶ pending ─────────────▶ bound ─────────────────▶ started ──▶ completed
//!                        ▲  ▲ ▲    refused        │ bound (not taken,      │  │ ▲     failed
//!                        │  │ └──────────────────┘        balance, lost)  │  │ └─ boundary,
//!                        │  └───────────── yielded ───────────────────────┘  │    crashed, requested
//!                        └─ resumed ── paused ◀── paused ── (any live) ◀──────┘
//!   verify all: started ── computed ──▶ verifying ── verified+completed ──▶ completed
//!   stepped_back: from every live phase to pending (a paused one stays paused), at an earlier
//!   boundary; only there progress goes back.
//!   A request that is not done goes along from started to pending, bound and verifying, and ends
//!   with a pause, a hold or an end.
//!   started ── parked ──▶ started, waiting ── unparked ──▶ started; every way out of started ends it.
//!   adjusted: in every live phase.
//!   boundary+split, boundary+merged: started; while parts are open nothing completes.
//!   pending ── returned ──▶ returned (a part without parts of its own).
//!   healed: in every live phase, after the broker lost messages; changes nothing.
//!   held: from pending, bound and started, in place of failed if the submission wishes.
//!   retried: from held, failed and cancelled to pending, with the last committed boundary.
//!   cancelled: from every live phase.   bound over started: only when the node is lost or
//!   does not hold it.
//! ```

use std::sync::Arc;

use crate::chain::Link;
use crate::energy::EnergyTotals;
use crate::event::{
    BatchPlace, Binding, Bound, Cause, Event, ExecutionState, Left, Phase, Requested, Started,
    StatePlace, Totals,
};
use crate::fault::{Fault, FaultKind, Owner};
use crate::ids::{BoundaryIndex, Digest, ExecutionId, Sequence, Tenant, Timestamp};
use crate::limits::INLINE_SUBMISSION_LIMIT;
use crate::programs::TileRange;
use crate::scheduling::Parked;
use crate::spread::Spreading;
use crate::submission::Submission;
use crate::trust::Verify;

/// Number of nodes left under pressure that are remembered.
const LEFT_LIMIT: usize = 8;

/// Number of deaths that are remembered.
const DEATHS_LIMIT: usize = 8;

/// An event that the state does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransitionError {
    /// The phase does not allow the event.
    #[error("an execution that is {phase} cannot become {event}")]
    Phase {
        /// The phase before.
        phase: &'static str,
        /// The event.
        event: &'static str,
    },
    /// The event has the wrong epoch.
    #[error("epoch {found} where {expected} was expected")]
    Epoch {
        /// Epoch in the event.
        found: u64,
        /// Epoch that the state requires.
        expected: u64,
    },
    /// The target of a step back is ahead of the last boundary.
    #[error("a step back to boundary {found}, beyond the last committed one ({last})")]
    Forward {
        /// Boundary in the event.
        found: u64,
        /// The last committed boundary.
        last: u64,
    },
    /// A rule of shared ranges is broken.
    #[error("{rule}")]
    Spread {
        /// The rule, and what was found.
        rule: String,
    },
    /// The boundary is not ahead of the last one.
    #[error("boundary {found} after boundary {last}: progress must grow")]
    Progress {
        /// Boundary in the event.
        found: u64,
        /// The last committed boundary.
        last: u64,
    },
}

impl ExecutionState {
    /// The state before any message. Only `submitted` can follow.
    pub fn unborn(
        tenant: Tenant,
        execution: ExecutionId,
        submission: Arc<Submission>,
        batch: Option<BatchPlace>,
        submitted_at: Timestamp,
    ) -> Self {
        let canonical = submission.to_json();
        Self {
            execution,
            tenant,
            ordinal: 0,
            prev: None,
            author: String::new(),
            at: submitted_at,
            submission: Digest::of(&canonical),
            client_id: submission.id.clone(),
            contract: submission.contract,
            guarded: submission.verify == Some(Verify::All),
            spread: Spreading::of(&submission).map(Box::new),
            spec: (canonical.len() <= INLINE_SUBMISSION_LIMIT).then_some(submission),
            batch,
            submitted_at,
            phase: Phase::PENDING,
            epoch: 0,
            boundary: None,
            moved_at: None,
            left: Vec::new(),
            adjusted: None,
            outbox: None,
            crashes_since_commit: 0,
            lost_unstarted: false,
            deaths: Vec::new(),
            limited_from_us: 0,
            totals: Totals::default(),
        }
    }

    /// The state after a message with these events. `author` writes it at `at`, after the message
    /// whose header has the digest `prev` (`None` for the first message).
    ///
    /// # Errors
    /// The first event that the state before it does not allow.
    pub fn after(
        &self,
        events: &[Event],
        author: &str,
        at: Timestamp,
        prev: Option<Digest>,
    ) -> Result<Self, TransitionError> {
        let mut next = self.clone();
        next.ordinal += 1;
        next.prev = prev;
        next.go_on(events, author, at)?;
        self.only_merges_while_it_waits(events)?;
        Ok(next)
    }

    /// The state if this state's message also had these events, written by `author` at `at`. A node
    /// appends an entrusted binding together with its own events in this way.
    ///
    /// # Errors
    /// The first event that the state before it does not allow.
    pub fn with_more(
        &self,
        events: &[Event],
        author: &str,
        at: Timestamp,
    ) -> Result<Self, TransitionError> {
        let mut next = self.clone();
        next.go_on(events, author, at)?;
        self.only_merges_while_it_waits(events)?;
        Ok(next)
    }

    fn go_on(
        &mut self,
        events: &[Event],
        author: &str,
        at: Timestamp,
    ) -> Result<(), TransitionError> {
        let next = self;
        next.author.clear();
        next.author.push_str(author);
        next.at = at;
        for event in events {
            next.apply(event, at)?;
        }
        let is_verified = events.iter().any(|e| matches!(e, Event::Verified { .. }));
        if is_verified && !matches!(next.phase, Phase::Completed) {
            return Err(next.refuse("verified without an end in the same message"));
        }
        if next.phase.is_terminal() {
            // A reader of this message alone must learn the submission, and so must a retry.
            if !next.phase.kind().can_be_retried() {
                if next.ordinal > 1 {
                    next.spec = None;
                }
                next.adjusted = None;
            }
            next.left.clear();
        }
        Ok(())
    }

    fn apply(&mut self, event: &Event, at: Timestamp) -> Result<(), TransitionError> {
        self.crashes_since_commit = event.crashes_after(self.crashes_since_commit);
        let fault = event.fault(&self.phase);
        self.note_death(event, fault);
        match fault.map(FaultKind::owner) {
            Some(Owner::Node) => self.totals.node_faults += 1,
            Some(Owner::Infrastructure) => self.totals.infrastructure_faults += 1,
            // Crashes of the program are counted as such. Nothing is tried again after a fault of
            // the submission.
            Some(Owner::Program | Owner::Submission) | None => {}
        }
        match event {
            Event::Submitted => {
                if self.ordinal != 1 {
                    return Err(self.refuse("submitted"));
                }
            }
            Event::Bound {
                epoch,
                node,
                instance,
                substrate,
                cause,
                decision,
            } => {
                let entrusted = decision.as_ref().and_then(|d| d.entrusted.as_ref());
                let at = entrusted.map_or(at, |e| e.at);
                let allowed = match &self.phase {
                    Phase::Pending { .. } | Phase::Bound(_) => true,
                    Phase::Started(_) => {
                        matches!(cause, Cause::Lost { .. } | Cause::Orphaned { .. })
                    }
                    _ => false,
                };
                if !allowed {
                    return Err(self.refuse("bound"));
                }
                self.expect_epoch(*epoch, self.epoch + 1)?;
                if self.epoch > 0 {
                    self.totals.rebindings += 1;
                }
                if let Cause::Pressure { evidence } = cause {
                    self.totals.pressure += 1;
                    self.remember_left(evidence.node.clone(), at);
                }
                let is_lost = matches!(cause, Cause::Lost { .. });
                self.lost_unstarted |= is_lost && matches!(self.phase, Phase::Bound(_));
                self.epoch = *epoch;
                self.moved_at = Some(at);
                self.phase = Phase::Bound(Bound {
                    requested: self.phase.take_requested(),
                    binding: Binding {
                        node: node.clone(),
                        instance: *instance,
                        substrate: substrate.clone(),
                        seq: 0,
                        at,
                    },
                });
            }
            Event::Started { epoch, .. } => {
                let Phase::Bound(bound) = &self.phase else {
                    return Err(self.refuse("started"));
                };
                self.expect_epoch(*epoch, self.epoch)?;
                self.phase = Phase::Started(Started {
                    binding: bound.binding.clone(),
                    requested: bound.requested.clone(),
                    parked: None,
                });
                self.lost_unstarted = false;
            }
            Event::Boundary(boundary) => {
                self.must_compute("boundary")?;
                let last = self.boundary_index();
                if boundary.index <= last && self.boundary.is_some() {
                    return Err(TransitionError::Progress {
                        found: boundary.index,
                        last,
                    });
                }
                self.boundary = Some(StatePlace {
                    index: boundary.index,
                    digest: boundary.digest,
                    bytes: boundary.bytes,
                    seq: Some(0),
                    ordinal: self.ordinal,
                });
                self.totals.commits += 1;
                self.totals.state_bytes += boundary.bytes;
                self.totals.compute_us += boundary.compute_us;
                EnergyTotals::add(&mut self.totals.energy, boundary.energy);
            }
            Event::Noted { .. } => {
                self.must_be_started("noted")?;
            }
            Event::Emitted { outbox } => {
                self.must_be_started("emitted")?;
                self.outbox = Some(*outbox);
            }
            Event::Yielded { cause, .. } => {
                let node = self.must_be_started("yielded")?.binding.node.clone();
                if matches!(cause, Cause::Pressure { .. }) {
                    self.remember_left(node, at);
                }
                if matches!(cause, Cause::Parts) {
                    self.spreading("yielded to its parts")?.wait()?;
                }
                self.wait_for_binding();
            }
            Event::Split {
                part,
                nth,
                from,
                to,
            } => {
                self.must_compute("split")?;
                let (own, at) = (self.execution, self.new_boundary("split")?);
                let range = TileRange {
                    from: *from,
                    to: *to,
                };
                self.spreading("split")?.split(own, *part, *nth, range)?;
                self.spreading("split")?.since = at;
            }
            Event::Merged { part } => {
                self.must_compute("merged")?;
                let at = self.new_boundary("merged")?;
                self.spreading("merged")?.merge(*part)?;
                self.spreading("merged")?.since = at;
            }
            Event::Returned { to } => {
                if !matches!(self.phase, Phase::Pending { .. }) {
                    return Err(self.refuse("returned"));
                }
                self.spreading("returned")?.give_back(*to)?;
                self.phase = Phase::Returned;
            }
            Event::Refused { .. } => {
                if !matches!(self.phase, Phase::Bound(_)) {
                    return Err(self.refuse("refused"));
                }
                self.wait_for_binding();
            }
            Event::Paused { who } => {
                let (Phase::Pending { .. }
                | Phase::Bound(_)
                | Phase::Paused { .. }
                | Phase::Verifying { .. }) = self.phase
                else {
                    return Err(self.refuse("paused"));
                };
                self.phase = Phase::Paused { who: who.clone() };
            }
            Event::Resumed { .. } => {
                if !matches!(self.phase, Phase::Paused { .. }) {
                    return Err(self.refuse("resumed"));
                }
                self.phase = Phase::PENDING;
            }
            Event::Requested { who, what } => {
                self.must_be_started("requested")?.requested = Some(Requested {
                    what: *what,
                    who: who.clone(),
                    at: Some(at),
                });
            }
            Event::Reconfigured { .. } => {
                self.must_be_started("reconfigured")?;
            }
            Event::Adjusted { change, .. } => {
                if self.phase.is_terminal() {
                    return Err(self.refuse("adjusted"));
                }
                self.adjusted.get_or_insert_default().merge(change);
            }
            Event::Parked { keep, .. } => {
                self.must_compute("parked")?.parked = Some(Parked { keep: *keep, at });
            }
            Event::Unparked { .. } => {
                if self.must_be_started("unparked")?.parked.take().is_none() {
                    return Err(self.refuse("unparked"));
                }
            }
            Event::Crashed { .. } => {
                self.must_be_started("crashed")?;
                self.totals.crashes += 1;
            }
            Event::Computed { energy, .. } => {
                let (true, Phase::Started(started)) = (self.guarded, &self.phase) else {
                    return Err(self.refuse("computed"));
                };
                let node = started.binding.node.clone();
                EnergyTotals::add(&mut self.totals.energy, *energy);
                let requested = self.phase.take_requested();
                self.phase = Phase::Verifying { node, requested };
            }
            Event::Verified { .. } => {
                if !matches!(self.phase, Phase::Verifying { .. }) {
                    return Err(self.refuse("verified"));
                }
                self.guarded = false;
            }
            Event::SteppedBack { to, .. } => {
                if self.phase.is_terminal() {
                    return Err(self.refuse("stepped back"));
                }
                let (last, found) = (self.boundary_index(), to.as_ref().map_or(0, |p| p.index));
                if found > last {
                    return Err(TransitionError::Forward { found, last });
                }
                if let Some(spread) = &mut self.spread {
                    spread.step_back(found, last)?;
                }
                let ordinal = self.ordinal;
                self.boundary = to.clone().map(|mut place| {
                    if place.seq == Some(0) {
                        place.ordinal = ordinal;
                    }
                    place
                });
                self.totals.steps_back += 1;
                // A pause and a hold stay, and so does an open request.
                if !matches!(self.phase, Phase::Paused { .. } | Phase::Held { .. }) {
                    self.wait_for_binding();
                }
            }
            Event::Completed {
                energy, capsules, ..
            } => {
                if let Some(spread) = &self.spread {
                    spread.may_complete()?;
                    if spread.part_of.is_some() {
                        let at = self.new_boundary("completed")?;
                        if at != *capsules {
                            return Err(TransitionError::Spread {
                                rule: format!(
                                    "a part of {capsules} capsules completes with their σ, not \
                                     with that of boundary {at}"
                                ),
                            });
                        }
                    }
                }
                if self.guarded {
                    return Err(self.refuse("completed unverified"));
                }
                if !matches!(self.phase, Phase::Verifying { .. }) {
                    self.must_be_started("completed")?;
                }
                EnergyTotals::add(&mut self.totals.energy, *energy);
                self.phase = Phase::Completed;
            }
            Event::Healed { .. } => {
                if self.phase.is_terminal() {
                    return Err(self.refuse("healed"));
                }
            }
            Event::Failed { .. } => {
                if self.phase.is_terminal() {
                    return Err(self.refuse("failed"));
                }
                self.phase = Phase::Failed;
            }
            Event::Held { reason, fault, .. } => {
                let (Phase::Pending { .. } | Phase::Bound(_) | Phase::Started(_)) = self.phase
                else {
                    return Err(self.refuse("held"));
                };
                self.phase = Phase::Held {
                    fault: fault.as_deref().map(Fault::kind),
                    reason: reason.clone(),
                };
            }
            Event::Retried { .. } => {
                if !self.phase.kind().can_be_retried() {
                    return Err(self.refuse("retried"));
                }
                self.phase = Phase::PENDING;
                self.limited_from_us = self.totals.compute_us;
            }
            Event::Cancelled { .. } => {
                if self.phase.is_terminal() {
                    return Err(self.refuse("cancelled"));
                }
                self.phase = Phase::Cancelled;
            }
        }
        Ok(())
    }

    /// Computing time that counts against the submission's limit, up to the last commit, in µs.
    pub fn limited_us(&self) -> u64 {
        self.totals.compute_us.saturating_sub(self.limited_from_us)
    }

    /// Marks that this state's message carries σ again in its body. The message that carried it
    /// before may then drop out of the stream.
    pub fn carry_state_again(&mut self) {
        let ordinal = self.ordinal;
        if let Some(place) = &mut self.boundary
            && place.seq.is_some()
        {
            place.seq = Some(0);
            place.ordinal = ordinal;
        }
    }

    /// The state of a `healed` message. The broker lost all messages after `last`. The new message
    /// follows `last` and restores this state. `over` is the digest of the message that made this
    /// state. If the message with σ or with the binding was lost too, the new message replaces it
    /// with sequence 0.
    ///
    /// # Errors
    /// If there is no binding.
    pub fn healed(
        &self,
        last: Option<&Link>,
        over: Digest,
        author: &str,
        at: Timestamp,
    ) -> Result<(Event, Self), TransitionError> {
        let kept = last.map_or(0, |last| last.ordinal);
        let event = Event::Healed {
            kept,
            lost: self.ordinal.saturating_sub(kept),
            over,
        };
        let prev = last.map(|last| last.digest);
        let mut next = self.after(std::slice::from_ref(&event), author, at, prev)?;
        let is_lost = |seq: Sequence| last.is_none_or(|last| seq > last.seq);
        if let Some(binding) = next.phase.binding_mut().filter(|b| is_lost(b.seq)) {
            binding.seq = 0;
        }
        if next
            .boundary
            .as_ref()
            .and_then(|place| place.seq)
            .is_some_and(is_lost)
        {
            next.carry_state_again();
        }
        Ok((event, next))
    }

    /// The boundary that the same message has committed before this event.
    fn new_boundary(&self, event: &'static str) -> Result<BoundaryIndex, TransitionError> {
        let made = self.boundary.as_ref();
        made.filter(|place| place.ordinal == self.ordinal)
            .map(|place| place.index)
            .ok_or_else(|| TransitionError::Spread {
                rule: format!("{event} stands in the message of its boundary, behind it"),
            })
    }

    fn spreading(&mut self, event: &'static str) -> Result<&mut Spreading, TransitionError> {
        let refused = self.refuse(event);
        self.spread.as_deref_mut().ok_or(refused)
    }

    /// An execution that waits for its parts has nothing left to compute, so its next boundary is a
    /// merge.
    fn only_merges_while_it_waits(&self, events: &[Event]) -> Result<(), TransitionError> {
        let waits = self.spread.as_ref().is_some_and(|spread| spread.waits);
        let back = |e: &Event| matches!(e, Event::Merged { .. } | Event::SteppedBack { .. });
        let computed = |e: &Event| matches!(e, Event::Boundary(_));
        if waits && events.iter().any(computed) && !events.iter().any(back) {
            return Err(TransitionError::Spread {
                rule: "an execution that waits for its parts must merge the last of them first"
                    .to_owned(),
            });
        }
        Ok(())
    }

    fn note_death(&mut self, event: &Event, fault: Option<FaultKind>) {
        if let Event::Boundary(_) | Event::Retried { .. } = event {
            self.deaths.clear();
        }
        // A hold tells what was noted before.
        let is_new = !matches!(event, Event::Held { .. } | Event::Failed { .. });
        if is_new
            && fault.is_some_and(FaultKind::is_death)
            && let Some(binding) = self.phase.binding()
        {
            if self.deaths.len() >= DEATHS_LIMIT {
                self.deaths.remove(0);
            }
            self.deaths.push(binding.node.clone());
        }
    }

    fn remember_left(&mut self, node: crate::ids::NodeId, at: Timestamp) {
        self.left.retain(|left| left.node != node);
        if self.left.len() >= LEFT_LIMIT {
            self.left.remove(0);
        }
        self.left.push(Left { node, at });
    }

    /// It is pending now. An open request comes along.
    fn wait_for_binding(&mut self) {
        let requested = self.phase.take_requested();
        self.phase = Phase::Pending { requested };
    }

    fn must_be_started(&mut self, event: &'static str) -> Result<&mut Started, TransitionError> {
        let refused = self.refuse(event);
        match &mut self.phase {
            Phase::Started(started) => Ok(started),
            _ => Err(refused),
        }
    }

    /// Checks that the execution is started and not parked.
    fn must_compute(&mut self, event: &'static str) -> Result<&mut Started, TransitionError> {
        let refused = self.refuse(event);
        let started = self.must_be_started(event)?;
        match started.parked {
            None => Ok(started),
            Some(_) => Err(refused),
        }
    }

    fn refuse(&self, event: &'static str) -> TransitionError {
        TransitionError::Phase {
            phase: match self.parked() {
                Some(_) => "parked",
                None => self.phase.as_str(),
            },
            event,
        }
    }

    fn expect_epoch(&self, found: u64, expected: u64) -> Result<(), TransitionError> {
        if found == expected {
            Ok(())
        } else {
            Err(TransitionError::Epoch { found, expected })
        }
    }
}
