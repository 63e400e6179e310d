//! The appends of one execution: one in flight, the next one ready.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, BrokerError, Draft, Tip, store};
use fiec_schemas::{Digest, Event, Fault, TransitionError};
use futures_util::future::join_all;

use crate::ended::End;
use crate::entrusted_bindings::EntrustedBinding;
use crate::healing::Ground;
use crate::large;
use crate::message::{After, Message, ahead_of};
use crate::replies::NotTaken;
use crate::runner::{Runner, Wait};
use crate::shared::Shared;
use crate::uploads::Hurry;
use crate::{emitted, handover};

/// Outputs of one commit that are stored concurrently.
const OUTPUTS_AT_ONCE: usize = 8;
/// Most time that an append waits until the broker has passed on the handover before it.
const TURN: Duration = Duration::from_millis(2);

impl Runner {
    /// Appends a message to the staged ones, with `started` if it is the first.
    pub(crate) async fn stage(&mut self, mut message: Message) {
        if !self.started {
            self.started = true;
            let computing_since = self.since.unwrap_or_else(|| self.shared.broker.now());
            message.events.insert(
                0,
                Event::Started {
                    epoch: self.epoch,
                    computing_since,
                },
            );
            if matches!(self.wait, Some((Wait::Started, _))) {
                self.wait = None;
            }
        }
        self.staged.push_back(message);
        self.prepare_next().await;
    }

    /// Builds the draft of the message after the one in flight, if that is possible before the
    /// acknowledgement.
    pub(crate) async fn prepare_next(&mut self) {
        let Some(next) = self.staged.front_mut() else {
            return;
        };
        if self.flight.is_none() || next.draft.is_some() {
            return;
        }
        next.build_ahead(
            self.ahead.as_ref(),
            &self.shared.author,
            self.shared.broker.now(),
        );
        // σ leaves before the append in flight is stored: its destination waits for the
        // confirmation.
        if let (Some(to), Some(draft)) = (&next.handover, &next.draft) {
            let before = self.tip.state.boundary.as_ref();
            let state = (&next.state, &next.cut);
            let sent = handover::send(&self.shared, to, draft, state, &self.known, before);
            next.turn = Box::pin(sent).await;
        }
    }

    /// Stages the last message of this execution here.
    pub(crate) fn finish(&mut self, events: Vec<Event>) {
        self.ended = true;
        self.slot = None;
        self.staged.push_back(Message::of(events));
    }

    /// Sends the next message if none is in flight.
    pub(crate) async fn flush(&mut self) {
        if self.flight.is_some() || self.settling.is_some() {
            return;
        }
        let is_too_old = |b: &EntrustedBinding| b.is_too_old(self.shared.broker.now());
        // Before there is a message to append, its age does not matter.
        if !self.staged.is_empty() && self.entrusted.as_ref().is_some_and(is_too_old) {
            // Only the policy service can have appended it: read the ledger.
            self.entrusted = None;
            self.recheck = true;
        }
        if self.entrusted.is_none() && std::mem::take(&mut self.recheck) {
            self.flight = Some(self.restored());
            return;
        }
        if self.store_emits() {
            return;
        }
        let Some(mut message) = self.staged.pop_front() else {
            return;
        };
        if self.entrusted.is_some() && message.handover.is_some() {
            // The destination gets σ with the exact bytes of the message that binds it there. A
            // ledger's first message may have to be built again, so the entrusted binding and
            // `started` are appended first, in a message of their own.
            let rest = message.events.split_off(1.min(message.events.len()));
            let started = std::mem::replace(&mut message.events, rest);
            self.staged.push_front(message);
            message = Message::of(started);
        }
        let draft = match message.draft.take() {
            Some(mut draft) => {
                draft.expected = self.tip.seq;
                draft.seen_in = self.tip.seen_in;
                draft
            }
            None => {
                let events = std::mem::take(&mut message.events);
                let draft = match events.is_empty() {
                    true => {
                        let now = self.shared.broker.now();
                        Draft::keeping(&self.tip, &self.shared.author, now)
                    }
                    false => self.draft(events),
                };
                match draft {
                    Ok(draft) => {
                        if let Some(to) = &message.handover {
                            let before = self.tip.state.boundary.as_ref();
                            let state = (&message.state, &message.cut);
                            let sent = handover::send(
                                &self.shared,
                                to,
                                &draft,
                                state,
                                &self.known,
                                before,
                            );
                            message.turn = Box::pin(sent).await;
                        }
                        draft
                    }
                    Err(error) => {
                        Box::pin(self.impossible(&error, message.after)).await;
                        return Box::pin(self.flush()).await;
                    }
                }
            }
        };
        self.ahead = ahead_of(&draft);
        self.crashes = draft.state.crashes_since_commit;
        self.after = std::mem::take(&mut message.after);
        if message.state.is_empty() && draft.carries_state() {
            message.state = self.last.clone().unwrap_or_default();
        }
        let ground = self.ground();
        let is_last = self.ended && self.staged.is_empty() && message.handover.is_none();
        if is_last
            && !message.is_large()
            && message.emits.is_empty()
            && let Some(end) = End::new(&ground, &draft, &message.state, &message.outputs)
        {
            self.after.push(After::Keep(Arc::new(end)));
        }
        let shared = self.shared.clone();
        if !message.is_large() && message.outputs.is_empty() && message.emits.is_empty() {
            if let Some(turn) = message.turn.take() {
                // Otherwise the broker would store this append before it passes on the handover
                // that it has already read. The destination waits for the handover; nobody waits
                // for the append.
                self.flight = Some(Box::pin(async move {
                    let _until_settled = message.priority;
                    let _ = tokio::time::timeout(TURN, turn).await;
                    append_or_follow(&shared, draft, ground, message.state).await
                }));
                return;
            }
            // Sent now, before the acknowledgement is polled for the first time.
            if let Ok(sent) = shared
                .ledger
                .send(draft.clone(), message.state.clone())
                .await
            {
                self.flight = Some(Box::pin(async move {
                    let _until_settled = message.priority;
                    match shared.ledger.settle(sent).await {
                        Err(AppendError::Broker(error)) => {
                            tracing::warn!(%error, "append failed; trying again");
                            let state = message.state;
                            Box::pin(append_or_follow(&shared, draft, ground, state)).await
                        }
                        Err(AppendError::Conflict) => {
                            let body = async { Ok(message.state) };
                            Box::pin(ground.append_again(&shared, &draft, body)).await
                        }
                        settled => settled,
                    }
                }));
                return;
            }
        }
        let known = self.known.clone();
        let commit = message.digest.filter(|_| message.is_large()).map(|digest| {
            let state = &draft.state;
            large::Commit {
                tenant: state.tenant.clone(),
                execution: state.execution,
                index: state.boundary_index(),
                digest,
                state: message.state.clone(),
                cut: message.cut.clone(),
                before: self.tip.state.boundary.clone(),
                urgent: message.priority.is_some(),
            }
        });
        self.flight = Some(Box::pin(async move {
            let hurry = (message.priority.is_none()).then_some(&known.hurry);
            put_outputs(&shared, &message.outputs, hurry).await;
            let Some(commit) = commit else {
                let state = message.state.clone();
                let tip = match append(&shared, draft.clone(), state.clone()).await {
                    Err(AppendError::Conflict) => {
                        let again = async {
                            put_outputs(&shared, &message.outputs, None).await;
                            Ok(state)
                        };
                        Box::pin(ground.append_again(&shared, &draft, again)).await?
                    }
                    settled => settled?,
                };
                emitted::publish(&shared, &tip, &message.emits).await;
                return Ok(tip);
            };
            let ready = commit.store(&shared, &known).await?;
            let (tip, ready) = match append(&shared, draft.clone(), ready.body()).await {
                Err(AppendError::Conflict) => {
                    // The tip's chunks are checked before this commit stores its own again.
                    ready.abandoned(&known);
                    let mut stored = None;
                    let again = async {
                        put_outputs(&shared, &message.outputs, None).await;
                        let ready = commit.store(&shared, &known).await?;
                        let body = ready.body();
                        stored = Some(ready);
                        Ok(body)
                    };
                    (
                        Box::pin(ground.append_again(&shared, &draft, again)).await?,
                        stored,
                    )
                }
                settled => (settled?, Some(ready)),
            };
            if let Some(ready) = ready {
                ready.committed(&shared, &known);
            }
            emitted::publish(&shared, &tip, &message.emits).await;
            if commit.urgent {
                // In case the execution comes back.
                tokio::spawn(async move {
                    large::keep(&shared, commit.execution, commit.state).await;
                });
            }
            Ok(tip)
        }));
    }

    /// Handles a message that the rules forbid or that is too large. A retry cannot help: the
    /// execution fails with the reason, in a message that always fits. `after` has the actions that
    /// were to follow the message.
    async fn impossible(&mut self, error: &AppendError, after: Vec<After>) {
        tracing::error!(%error, "a ledger message could not be made");
        // A program may say a boundary twice, or out of order. All else is made here.
        let fault = match error {
            AppendError::Transition(
                TransitionError::Progress { .. } | TransitionError::Spread { .. },
            ) => Fault::WrongAnswer,
            _ => Fault::WorkerPanicked,
        };
        let not_recorded = NotTaken::NotRecorded(error.to_string());
        let reason = not_recorded.to_string();
        self.child = None;
        self.wait = None;
        self.ended = true;
        self.slot = None;
        self.drop_staged(after, &not_recorded).await;
        // If that is impossible, too, no remedy is left.
        if !std::mem::replace(&mut self.gave_up, true) {
            self.staged.push_back(Message::of(vec![Event::Failed {
                reason,
                stderr: String::new(),
                fault: Some(Box::new(fault)),
            }]));
        }
    }

    /// Drops all staged messages, and answers those who wait for them.
    pub(crate) async fn drop_staged(&mut self, after: Vec<After>, reason: &NotTaken) {
        let waiting = std::mem::take(&mut self.staged);
        for after in after
            .into_iter()
            .chain(waiting.into_iter().flat_map(|m| m.after))
        {
            match after {
                After::Answer(to) => self.shared.answer(to, Err(reason.clone())).await,
                After::Confirm(to) => {
                    let execution = self.tip.state.execution;
                    handover::abandon(&self.shared, &to, execution, self.epoch + 1).await;
                }
                After::Commit { .. } | After::Begin(_) | After::Keep(_) => {}
            }
        }
    }
}

/// Stores outputs, several at once. With `hurry` they wait for rebindings, until the execution
/// leaves.
async fn put_outputs(shared: &Shared, outputs: &[(Digest, Bytes)], hurry: Option<&Hurry>) {
    for some in outputs.chunks(OUTPUTS_AT_ONCE) {
        if let Some(hurry) = hurry {
            shared.uploads.turn(hurry).await;
        }
        join_all(some.iter().map(|(digest, bytes)| async move {
            // The execution may fetch it in a later capsule.
            tokio::join!(
                until_done(|| store::put_data(&shared.broker, *digest, bytes)),
                shared.data.keep(*digest, bytes)
            )
        }))
        .await;
    }
}

/// Appends. If another message is there already, appends after that, as [`Ground::append_again`]
/// permits.
async fn append_or_follow(
    shared: &Shared,
    draft: Draft,
    ground: Box<Ground>,
    body: Bytes,
) -> Result<Tip, AppendError> {
    match append(shared, draft.clone(), body.clone()).await {
        Err(AppendError::Conflict) => {
            let body = async { Ok(body) };
            ground.append_again(shared, &draft, body).await
        }
        settled => settled,
    }
}

/// Appends, with retries until the outcome is known.
pub(crate) async fn append(shared: &Shared, draft: Draft, body: Bytes) -> Result<Tip, AppendError> {
    loop {
        let error = match shared.ledger.send(draft.clone(), body.clone()).await {
            Ok(sent) => match shared.ledger.settle(sent).await {
                Err(AppendError::Broker(error)) => error,
                settled => return settled,
            },
            Err(AppendError::Broker(error)) => error,
            Err(error) => return Err(error),
        };
        tracing::warn!(%error, "append failed; trying again");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

pub(crate) async fn until_done<F: Future<Output = Result<(), BrokerError>>>(
    mut attempt: impl FnMut() -> F,
) {
    while let Err(error) = attempt().await {
        tracing::warn!(%error, "cannot store; trying again");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
