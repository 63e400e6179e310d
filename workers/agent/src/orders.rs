//! What a runner does with orders, and when a moment comes that it waited for.

use std::time::Duration;

use fiec_kit::frames::{Order, Yield};
use fiec_schemas::package::Grant;
use fiec_schemas::{Event, Timestamp};
use tokio::time::Instant;

use crate::ahead;
use crate::job::Control;
use crate::message::{After, Intent, Message};
use crate::runner::{LONG_AFTER, Runner, Wait};

impl Runner {
    pub(crate) async fn control(&mut self, control: Control) {
        match control {
            Control::Yield { cause, to } => {
                self.intent = Some(Intent::Yield { cause, to });
                self.stop().await;
            }
            Control::Pause { who, reply } => {
                self.request("pause", who.clone(), reply).await;
                self.intent = Some(Intent::Pause { who });
                self.stop().await;
            }
            Control::Reconfigure { grant, who, reply } => {
                self.reconfigure(&grant, who, reply).await;
            }
            Control::Adjust { who, change, reply } => {
                let change = *change;
                self.stage(Message {
                    after: reply.map(After::Answer).into_iter().collect(),
                    ..Message::of(vec![Event::Adjusted { who, change }])
                })
                .await;
            }
            Control::Cancel { who, reply } => {
                self.request("cancel", who.clone(), reply).await;
                if self.child.is_none() {
                    // Between two attempts.
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

    /// Records another grant, gives it to the program, and answers then; or says why not.
    async fn reconfigure(
        &mut self,
        change: &Grant,
        who: String,
        reply: Option<async_nats::Subject>,
    ) {
        let binding = self.tip.state.phase.binding();
        let now = match &self.grant {
            Some(grant) => grant.clone(),
            None => self.shared.grant(binding.map(|b| b.substrate.as_str())),
        };
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

    async fn stop(&mut self) {
        if self.child.is_some() {
            let wanted = Yield {
                cause: self.intent.as_ref().map(Intent::in_words),
                ..Yield::default()
            };
            self.order(Order::Yield(wanted)).await;
        } else if let Some(intent) = self.intent.take() {
            // Between two attempts it stands at its last commit already; σ goes by the store.
            let (events, _) = intent.events(self.epoch, Timestamp::now());
            self.finish(events);
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
