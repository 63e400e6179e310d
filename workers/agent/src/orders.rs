//! How a runner carries out orders, and the actions of its timer.

use std::time::Duration;

use fiec_kit::frames::{Order, Yield};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{Cause, Event, RequestKind, Signal};
use tokio::time::Instant;

use crate::ahead;
use crate::job::{Request, RunnerOrder};
use crate::message::{After, Message};
use crate::pending_order::PendingOrder;
use crate::replies::{NotTaken, Reply};
use crate::runner::{LONG_AFTER, Runner, Wait};

impl Runner {
    pub(crate) async fn obey(&mut self, order: RunnerOrder) {
        match order {
            RunnerOrder::Recheck => self.recheck = true,
            RunnerOrder::Request(request) => self.obey_request(*request).await,
        }
    }

    async fn obey_request(&mut self, Request { request, reply }: Request) {
        match request {
            ControlRequest::Yield {
                cause,
                to,
                decision,
                ..
            } => {
                // A pause takes precedence: the execution must not run on any node.
                if !matches!(
                    self.pending,
                    Some(PendingOrder::Pause { .. } | PendingOrder::End { .. })
                ) {
                    self.pending = Some(PendingOrder::Yield {
                        cause,
                        to,
                        decision,
                    });
                    self.obey_pending().await;
                }
            }
            ControlRequest::GiveUp { cause, .. } => self.give_up(cause).await,
            ControlRequest::Pause { who, .. } => {
                self.request(RequestKind::Pause, who.clone(), reply).await;
                self.pending = Some(PendingOrder::Pause { who });
                self.obey_pending().await;
            }
            ControlRequest::Park { cause, keep, .. } => self.park(cause, keep, reply).await,
            ControlRequest::Unpark { reason, .. } => self.unpark(reason, reply).await,
            ControlRequest::Split { .. } => self.split(reply).await,
            ControlRequest::Reconfigure { grant, who, .. } => {
                self.reconfigure(&grant, who, reply).await;
            }
            ControlRequest::Adjust { who, change, .. } => self.adjust(who, change, reply).await,
            ControlRequest::Cancel { who, .. } => self.cancel(who, reply).await,
            // The node itself handles these. See `ControlRequest::runner`.
            ControlRequest::Ping
            | ControlRequest::Holdings { .. }
            | ControlRequest::Prepare { .. }
            | ControlRequest::Prove
            | ControlRequest::Verify { .. } => {}
        }
    }

    /// Records a change of the submission, then answers.
    async fn adjust(&mut self, who: String, change: Adjustment, reply: Reply) {
        if let Some(threshold) = change.viability.get(&Signal::Memory) {
            // From now on a crossing of this threshold is published at once.
            let mut live = self.shared.live();
            if let Some(live) = live.get_mut(&self.tip.state.execution) {
                live.memory = Some(*threshold);
            }
        }
        self.stage(Message {
            after: vec![After::Answer(reply)],
            ..Message::of(vec![Event::Adjusted { who, change }])
        })
        .await;
    }

    /// Records the author of a cancel, and ends the program.
    async fn cancel(&mut self, who: String, reply: Reply) {
        self.request(RequestKind::Cancel, who.clone(), reply).await;
        if self.child.is_none() {
            // Between two attempts, or parked without a process.
            self.finish(vec![Event::Cancelled { who }]);
            self.wait = None;
            return;
        }
        self.cancelling = Some(who);
        self.order(Order::Cancel).await;
        let grace = self.shared.options.cancel_grace;
        self.wait = Some((Wait::Kill, Instant::now() + grace));
    }

    /// Ends the child at once. Its reports are appended first. Its work since the last report does
    /// not count.
    async fn give_up(&mut self, cause: Cause) {
        if self.ended {
            return;
        }
        tracing::warn!(
            cause = cause.as_str(),
            boundary = self.tip.state.boundary_index(),
            "the execution is ended before its next boundary; it continues elsewhere from its last \
             commit"
        );
        self.end_child().await;
        self.wait = None;
        self.silence = None;
        let mut events = vec![Event::Yielded {
            cause,
            computed_until: self.shared.broker.now(),
        }];
        if let Some(PendingOrder::Pause { who }) = self.pending.take() {
            // The pause was confirmed, so it holds on every node.
            events.push(Event::Paused { who });
        }
        self.stage(Message::of(events)).await;
        self.ended = true;
        self.slot = None;
    }

    /// Records another grant, sends it to the program, then answers. Or answers why not.
    async fn reconfigure(&mut self, change: &Grant, who: String, reply: Reply) {
        let is_leaving = matches!(
            self.pending,
            Some(PendingOrder::Yield { .. } | PendingOrder::Pause { .. })
        );
        if is_leaving || self.ended || self.cancelling.is_some() {
            // A grant ends with its binding: this one would never be used.
            return self.shared.answer(reply, Err(NotTaken::Leaving)).await;
        }
        let now = self.granted();
        let grant = now.changed_by(change);
        let refusal = match self.shared.refuses(&grant) {
            None if grant == now => Some(NotTaken::SameGrant),
            refusal => refusal.map(NotTaken::NotGranted),
        };
        if let Some(not_taken) = refusal {
            return self.shared.answer(reply, Err(not_taken)).await;
        }
        let event = Event::Reconfigured {
            who,
            grant: grant.clone(),
        };
        self.grant = Some(grant.clone());
        let execution = self.tip.state.execution;
        self.shared.grants.note(execution, &grant);
        if let Some(child) = &mut self.child {
            child.confine(&grant.cpus);
        }
        self.stage(Message {
            after: vec![After::Answer(reply)],
            ..Message::of(vec![event])
        })
        .await;
        // A child that is started later, after a crash, receives it with its run.
        self.order(Order::Reconfigure { grant }).await;
    }

    /// Records a request before it is carried out, then answers.
    async fn request(&mut self, what: RequestKind, who: String, reply: Reply) {
        let event = Event::Requested { who, what };
        self.stage(Message {
            after: vec![After::Answer(reply)],
            ..Message::of(vec![event])
        })
        .await;
    }

    /// Orders the child to yield, so that the next boundary carries out the pending order. Without
    /// a child the order is carried out at once.
    pub(crate) async fn obey_pending(&mut self) {
        if self.is_parked() {
            return self.end_parked_run().await;
        }
        self.parked = None;
        if self.child.is_some() {
            let order = Yield {
                cause: self.pending.as_ref().map(PendingOrder::in_words),
                ..Yield::default()
            };
            self.order(Order::Yield(order)).await;
        } else if let Some(pending) = self.pending.take() {
            // Between two attempts the last commit satisfies the order. The next node fetches σ
            // from the store.
            let (events, _) = pending.events(self.epoch, self.shared.broker.now());
            self.stage(Message::of(events)).await;
            self.ended = true;
            self.slot = None;
            self.wait = None;
        }
    }

    pub(crate) async fn deadline(&mut self) {
        match self.wait.take() {
            Some((Wait::Started, _)) => {
                self.stage(Message::default()).await;
                if self.child.as_ref().is_some_and(|c| !c.ahead.is_empty()) {
                    self.wait = Some((Wait::Long, Instant::now() + LONG_AFTER));
                }
            }
            Some((Wait::Long, _)) => {
                if let Some(child) = &mut self.child {
                    ahead::withdraw(child);
                }
            }
            Some((Wait::Kill, _)) => {
                tracing::warn!("no boundary within the grace; killed");
                self.end_child().await;
                if let Some(who) = self.cancelling.take() {
                    self.stage(Message::of(vec![Event::Cancelled { who }]))
                        .await;
                } else if let Some(PendingOrder::End { event }) = self.pending.take() {
                    self.stage(Message::of(vec![*event])).await;
                } else if self.is_parked() {
                    self.append_pending();
                }
                self.ended = true;
                self.slot = None;
            }
            Some((Wait::Retry, _)) if self.flight.is_some() || !self.staged.is_empty() => {
                // It starts from the last commit: earlier messages must be settled first.
                self.wait = Some((Wait::Retry, Instant::now() + Duration::from_millis(5)));
            }
            Some((Wait::Retry, _)) => self.launch(None).await,
            None => {}
        }
    }
}
