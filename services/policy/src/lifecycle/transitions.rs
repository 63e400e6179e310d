//! The changes of an execution. Nobody else writes to one.

use fiec_schemas::scheduling::Parked;
use fiec_schemas::{Event, ExecutionId, Sequence, Tenant};

use super::Lifecycle;
use crate::Action;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{NodeIx, Stage, Wanted};
use crate::time::Millis;
use crate::view::LedgerView;

/// Time for which an execution whose holder does not park it is not asked again, in ms.
const CANNOT_PARK_MS: u64 = 60_000;

/// A change of an execution's stage by an append of this service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    /// Sequence of the stored message.
    pub seq: Sequence,
    /// The epoch after it.
    pub epoch: u64,
    /// The stage after it.
    pub stage: Stage,
    /// True if it was in another stage before.
    pub moved: bool,
}

impl Lifecycle {
    /// Appends events to the ledger of an execution. Returns false if it is not known.
    pub(crate) fn append(&mut self, id: ExecutionId, events: Vec<Event>) -> bool {
        let Some(e) = self.cluster.execution_mut(id) else {
            return false;
        };
        e.begin_append();
        self.out.push(Action::Append {
            execution: id,
            tenant: e.tenant.clone(),
            expected: e.seq,
            events,
            ticket: None,
        });
        true
    }

    /// Begins an append that its caller describes otherwise. Returns the tenant.
    pub(crate) fn begin_append(&mut self, id: ExecutionId) -> Option<Tenant> {
        let e = self.cluster.execution_mut(id)?;
        e.begin_append();
        Some(e.tenant.clone())
    }

    /// An append of this service is stored.
    pub(crate) fn settle(&mut self, id: ExecutionId, settled: Settled) {
        let now = self.now.mono;
        let Settled {
            seq,
            epoch,
            stage,
            moved,
        } = settled;
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        // A later message that leaves it pending does not begin its wait anew.
        let waits_on = stage == Stage::Pending && !moved && e.seq > 0;
        e.seq = seq;
        e.epoch = epoch;
        e.end_append();
        if !waits_on {
            e.since = now;
        }
        let rests = matches!(stage, Stage::Paused | Stage::Held);
        if let Some(extra) = e.extra.as_mut().filter(|_| rests) {
            extra.request = None;
        }
    }

    /// A binding of this service is stored. `moved`: it was not known yet.
    pub(crate) fn settle_binding(&mut self, id: ExecutionId, moved: bool) {
        let now = self.now.mono;
        if let Some(e) = self.cluster.execution_mut(id) {
            // The arrival of a binding chosen here stays the moment of the choice: the node's
            // instance of that moment may be gone.
            if moved {
                e.arrived = now;
            }
            if let Some(extra) = &mut e.extra {
                (extra.cause, extra.note, extra.resent, extra.deferred) = (None, None, 0, None);
            }
        }
    }

    /// A binding was chosen now.
    pub(crate) fn note_choice(&mut self, id: ExecutionId) {
        let now = self.now.mono;
        if let Some(e) = self.cluster.execution_mut(id) {
            e.arrived = now;
            if let Some(extra) = &mut e.extra {
                extra.missing = None;
            }
        }
    }

    /// Its wait for this append begins now.
    pub(crate) fn wait_anew(&mut self, id: ExecutionId) {
        let now = self.now.mono;
        if let Some(e) = self.cluster.execution_mut(id) {
            e.since = now;
        }
    }

    /// A note for people, until it is bound.
    pub(crate) fn note(&mut self, id: ExecutionId, words: String) {
        if let Some(e) = self.cluster.execution_mut(id) {
            e.extra().note = Some(words);
        }
    }

    /// Avoids a node for an execution until this moment, with a note for people.
    pub(crate) fn avoid(&mut self, id: ExecutionId, ix: NodeIx, until: Millis, words: String) {
        if let Some(e) = self.cluster.execution_mut(id) {
            let extra = e.extra();
            extra.avoid_until(ix, until);
            extra.note = Some(words);
        }
    }

    /// Its capsule was sent again, for this time.
    pub(crate) fn note_resent(&mut self, id: ExecutionId, times: u8) {
        if let Some(e) = self.cluster.execution_mut(id) {
            e.extra().resent = times;
        }
    }

    /// Sets the profile of an execution. Returns its stage, and true if an append is in flight.
    pub(crate) fn set_profile(
        &mut self,
        id: ExecutionId,
        profile: ProfileIx,
    ) -> Option<(Stage, bool)> {
        let e = self.cluster.execution_mut(id)?;
        e.profile = profile;
        Some((e.stage, e.is_appending()))
    }

    /// Notes who changed an execution.
    pub(crate) fn note_change(&mut self, id: ExecutionId, who: Option<&str>) {
        if let Some(e) = self.cluster.execution_mut(id) {
            e.extra().changed_by = who.map(Into::into);
        }
    }

    /// Notes that the holder does not park it.
    pub(crate) fn cannot_park(&mut self, id: ExecutionId) {
        let until = self.now.mono.plus(CANNOT_PARK_MS);
        if let Some(e) = self.cluster.execution_mut(id) {
            e.extra().cannot_park = Some(until);
        }
    }

    /// Notes whether an execution is parked, and why.
    pub(crate) fn set_parked(&mut self, view: &LedgerView<'_>) {
        let id = view.state.execution;
        let before: Option<Parked> = self.cluster.execution(id).and_then(|e| e.parked());
        if before != view.state.parked {
            self.cluster.set_parked(id, view.state.parked);
            self.cluster.changed.places = true;
        }
    }

    /// Notes a park, its end, or that the program asks for more (`asks`). Returns true if nothing of
    /// that happened.
    pub(crate) fn note_park(&mut self, view: &LedgerView<'_>, asks: bool) -> bool {
        use fiec_schemas::EventKind;
        let (id, now) = (view.state.execution, self.now.mono);
        let parked = view.event(EventKind::Parked);
        let unparked = view.event(EventKind::Unparked);
        let Some(e) = self.cluster.execution_mut(id) else {
            return true;
        };
        let started = matches!(e.stage, Stage::Started(..));
        if let Some(extra) = e.extra.as_mut().filter(|_| !started) {
            // Its new place has what it asked for.
            extra.asks = false;
            extra.why_parked = None;
        }
        if parked.is_none() && unparked.is_none() && !asks {
            return true;
        }
        if let Some(event) = parked {
            e.extra().why_parked = event.cause();
        }
        if unparked.is_some() {
            e.since = now;
            let extra = e.extra();
            (extra.why_parked, extra.asks) = (None, false);
        }
        let asks = asks && started;
        if asks {
            e.extra().asks = true;
        }
        let done = match e.order().map(|o| o.wants) {
            Some(Wanted::Park(_)) => parked.is_some(),
            Some(Wanted::Unpark) => unparked.is_some(),
            _ => false,
        };
        if done {
            self.cluster.clear_order(id);
        }
        if asks {
            self.cluster.set_due(id, now);
        }
        false
    }
}
