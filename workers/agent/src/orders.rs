//! What a runner does with orders, and when a moment comes that it waited for.

use std::time::Duration;

use fiec_kit::frames::{Order, Yield};
use fiec_schemas::package::Grant;
use fiec_schemas::{Cause, Event, Signal};
use tokio::time::Instant;

use crate::ahead;
use crate::job::{Control, LEAVING};
use crate::message::{After, Intent, Message};
use crate::runner::{LONG_AFTER, Runner, Wait};

impl Runner {
    pub(crate) async fn control(&mut self, control: Control) {
        match control {
            Control::Yield { cause, to } => {
                // Whoever paused it wants it nowhere.
                if !matches!(self.intent, Some(Intent::Pause { .. })) {
                    self.intent = Some(Intent::Yield { cause, to });
                    self.stop().await;
                }
            }
            Control::GiveUp { cause } => self.drop_now(cause).await,
            Control::Pause { who, reply } => {
                self.request("pause", who.clone(), reply).await;
                self.intent = Some(Intent::Pause { who });
                self.stop().await;
            }
            Control::Park { cause, keep, reply } => self.park(cause, keep, reply).await,
            Control::Unpark { reason, reply } => self.unpark(reason, reply).await,
            Control::Recheck => self.recheck = true,
            Control::Split { reply } => self.split(reply).await,
            Control::Reconfigure { grant, who, reply } => {
                self.reconfigure(&grant, who, reply).await;
            }
            Control::Adjust { who, change, reply } => {
                let change = *change;
                if let Some(threshold) = change.viability.get(&Signal::Memory) {
                    // From now on a crossing of this one is told at once.
                    let mut live = self.shared.live();
                    if let Some(live) = live.get_mut(&self.tip.state.execution) {
                        live.memory = Some(*threshold);
                    }
                }
                self.stage(Message {
                    after: reply.map(After::Answer).into_iter().collect(),
                    ..Message::of(vec![Event::Adjusted { who, change }])
                })
                .await;
            }
            Control::Cancel { who, reply } => {
                self.request("cancel", who.clone(), reply).await;
                if self.child.is_none() {
                    // Between two attempts, or parked without a process.
                    self.finish(vec![Event::Cancelled { who }]);
                    self.wait = None;
                    return;
                }
                self.cancelling = Some(who);
                self.order(Order::Cancel).await;
                self.wait = Some((
                    Wait::Kill,
                    Instant::now() + self.shared.options.cancel_grace,
                ));
            }
        }
    }

    /// Ends the child wherever it stands. What it has reported is appended before; what it computed
    /// since then counts for nothing.
    async fn drop_now(&mut self, cause: Cause) {
        if self.ended {
            return;
        }
        tracing::warn!(
            cause = cause.as_str(),
            boundary = self.tip.state.boundary_index(),
            "given up before the next boundary; it goes on elsewhere from its last commit"
        );
        self.child = None;
        self.wait = None;
        self.silence = None;
        let mut events = vec![Event::Yielded {
            cause,
            computed_until: self.shared.broker.now(),
        }];
        if let Some(Intent::Pause { who }) = self.intent.take() {
            // That was promised, and holds wherever it is.
            events.push(Event::Paused { who });
        }
        self.stage(Message::of(events)).await;
        self.ended = true;
        self.slot = None;
    }

    /// Records another grant, gives it to the program, and answers then; or says why not.
    async fn reconfigure(
        &mut self,
        change: &Grant,
        who: String,
        reply: Option<async_nats::Subject>,
    ) {
        let intent = &self.intent;
        let leaves = matches!(intent, Some(Intent::Yield { .. } | Intent::Pause { .. }));
        if leaves || self.ended || self.cancelling.is_some() {
            // A grant ends with the binding: this one would never be used.
            return self.shared.answer_moving(reply, LEAVING).await;
        }
        let now = self.granted();
        let grant = now.changed_by(change);
        let refusal = match self.shared.refuses(&grant) {
            None if grant == now => Some("it has that already".to_owned()),
            refusal => refusal,
        };
        if refusal.is_some() {
            return self.shared.answer(reply, refusal).await;
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
            after: reply.map(After::Answer).into_iter().collect(),
            ..Message::of(vec![event])
        })
        .await;
        // A child that is started later, after a crash, is given it with its run.
        self.order(Order::Reconfigure { grant }).await;
    }

    /// Records what was asked before it is done, and answers then.
    async fn request(&mut self, what: &str, who: String, reply: Option<async_nats::Subject>) {
        let event = Event::Requested {
            who,
            what: what.to_owned(),
        };
        let after = reply.map(After::Answer).into_iter().collect();
        self.stage(Message {
            after,
            ..Message::of(vec![event])
        })
        .await;
    }

    /// Has it stop as its intent says.
    pub(crate) async fn stop(&mut self) {
        if self.is_parked() {
            return self.leave_parked().await;
        }
        self.parked = None;
        if self.child.is_some() {
            let wanted = Yield {
                cause: self.intent.as_ref().map(Intent::in_words),
                ..Yield::default()
            };
            self.order(Order::Yield(wanted)).await;
        } else if let Some(intent) = self.intent.take() {
            // Between two attempts it stands at its last commit already; σ goes by the store.
            let (events, _) = intent.events(self.epoch, self.shared.broker.now());
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
                self.child = None;
                if let Some(who) = self.cancelling.take() {
                    self.stage(Message::of(vec![Event::Cancelled { who }]))
                        .await;
                } else if self.is_parked() {
                    self.left();
                }
                self.ended = true;
                self.slot = None;
            }
            Some((Wait::Retry, _)) if self.flight.is_some() || !self.staged.is_empty() => {
                // From the last commit: what was sent before the crash must be settled first.
                self.wait = Some((Wait::Retry, Instant::now() + Duration::from_millis(5)));
            }
            Some((Wait::Retry, _)) => self.launch(None).await,
            None => {}
        }
    }
}
