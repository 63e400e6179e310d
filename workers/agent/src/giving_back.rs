//! Bindings that this node gives back: another node may do what this one cannot. Nothing is charged
//! to the program.

use fiec_schemas::{Cause, Event, Fault};

use crate::attempts::cut;
use crate::pending_order::PendingOrder;
use crate::runner::Runner;

/// What the ledger says of an execution when its binding is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// It has not started under this binding.
    Unstarted,
    /// It has, or an earlier message that is on its way says so.
    Started,
}

impl Runner {
    /// Gives the binding back, because of a fault that is not the program's. The execution goes on
    /// elsewhere from the last commit that this runner has made, stored yet or not.
    pub(crate) fn go_elsewhere(&mut self, fault: Fault, words: String) {
        self.child = None;
        self.wait = None;
        self.silence = None;
        if let Some(who) = self.cancelling.take() {
            return self.finish(vec![Event::Cancelled { who }]);
        }
        self.forget_park();
        let given = match self.started {
            true => Given::Started,
            false => Given::Unstarted,
        };
        let pending = self.pending.take();
        if given == Given::Started
            && let Some(moving @ PendingOrder::Yield { to: Some(_), .. }) = pending
        {
            // The last commit satisfies the order.
            let (events, _) = moving.events(self.epoch, self.shared.broker.now());
            return self.finish(events);
        }
        let mut events = self.given_back(given, Some(fault), words);
        if let Some(PendingOrder::Pause { who }) = pending {
            events.push(Event::Paused { who });
        }
        self.finish(events);
    }

    /// The events that give the binding back. `fault`: none if this node is not at fault, for
    /// example if it is full.
    pub(crate) fn given_back(
        &self,
        given: Given,
        fault: Option<Fault>,
        reason: String,
    ) -> Vec<Event> {
        let shared = &self.shared;
        let fault = fault.map(Box::new);
        let reason = cut(reason);
        tracing::warn!(
            reason,
            "the execution is returned; it continues elsewhere from its last commit"
        );
        vec![match given {
            Given::Unstarted => {
                shared.metrics.refused.inc();
                Event::Refused {
                    reason,
                    offer: shared.slots().saturating_sub(shared.running()),
                    fault,
                }
            }
            Given::Started => Event::Yielded {
                cause: Cause::NotTaken { reason, fault },
                computed_until: shared.broker.now(),
            },
        }]
    }

    /// Gives back a binding that has not started.
    pub(crate) fn refuse(&mut self, fault: Option<Fault>, reason: String) {
        let events = self.given_back(Given::Unstarted, fault, reason);
        self.finish(events);
    }
}
