//! Messages that programs emit: stored before the commit that carries them, published after it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_broker::outbox::{self, Emit};
use fiec_broker::{BrokerError, Tip, leader};
use fiec_kit::frames;
use fiec_schemas::event::{Outbox, Requested};
use fiec_schemas::ids::check_emit_name;
use fiec_schemas::{Event, ExecutionState, Fault, Phase, RequestKind, Sequence};
use tokio::time::Instant;

use crate::giving_back::Given;
use crate::message::Message;
use crate::pending_order::PendingOrder;
use crate::replies::NotTaken;
use crate::runner::Runner;
use crate::shared::Shared;

/// Pause between two attempts while the broker does not accept them.
const PAUSE: Duration = Duration::from_secs(1);
/// After this time no further attempt to publish owed messages begins. It is shorter than the time
/// after which the policy service binds an execution elsewhere that does not start.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(5);
/// After this time no further attempt to store messages begins. It is longer than the election of a
/// leader: a program that is given back computes again what it did since its last commit.
const STORED_WITHIN: Duration = Duration::from_secs(10);
/// Longest attempt. It may look for a chunk until no leader can be cut off any more.
const ATTEMPT: Duration = leader::CUT_OFF.saturating_add(Duration::from_secs(5));
/// The limits of one commit: those of a capsule, twice, because as much may have waited.
const COUNT_LIMIT: usize = 2 * frames::EMITS_LIMIT;
const BYTES_LIMIT: usize = 2 * frames::EMIT_BYTES_LIMIT;

fn read(emit: frames::Emit) -> Result<Emit, String> {
    check_emit_name(&emit.name).map_err(|error| error.to_string())?;
    let bytes = STANDARD.decode(&emit.data);
    Ok(Emit {
        bytes: bytes
            .map_err(|error| format!("emit {}: its data is no base64: {error}", emit.name))?
            .into(),
        name: emit.name,
        boundary: emit.boundary,
        index: emit.index,
    })
}

impl Runner {
    /// Adds a program's messages to the ledger message that will name them. Returns false if they are
    /// more than is allowed: the execution has then failed.
    pub(crate) async fn emit(&mut self, message: &mut Message, emits: Vec<frames::Emit>) -> bool {
        // Messages up to the last commit were emitted already: the capsule was computed again.
        let through = self.tip.state.outbox.map_or(0, |outbox| outbox.through);
        let read: Result<Vec<Emit>, String> = emits
            .into_iter()
            .filter(|emit| emit.boundary > through)
            .map(read)
            .collect();
        let emits = read.and_then(|emits| {
            let bytes: usize = emits.iter().map(|e| e.bytes.len()).sum();
            if emits.len() > COUNT_LIMIT || bytes > BYTES_LIMIT {
                return Err(format!(
                    "emit: {} messages of {bytes} bytes in one commit; {COUNT_LIMIT} of \
                     {BYTES_LIMIT} bytes are the most",
                    emits.len()
                ));
            }
            Ok(emits)
        });
        match emits {
            Ok(emits) => {
                message.unstored = emits;
                true
            }
            Err(reason) => {
                self.child = None;
                self.wait = None;
                self.failed(Fault::WrongAnswer, reason, String::new()).await;
                false
            }
        }
    }

    /// Begins to store the messages that the next ledger message will name. Returns false if it names
    /// none.
    pub(crate) fn store_emits(&mut self) -> bool {
        let Some(next) = self.staged.front_mut().filter(|m| !m.unstored.is_empty()) else {
            return false;
        };
        let emits = std::mem::take(&mut next.unstored);
        let work = Box::pin(store(self.shared.clone(), self.tip.state.clone(), emits));
        let next = Next::Append;
        self.settling = Some(Settling { work, next });
        true
    }

    /// Begins to publish messages that the holder before has not published.
    pub(crate) fn settle_outbox(&mut self, next: Next) {
        let work = Box::pin(settle(self.shared.clone(), self.tip.state.clone()));
        self.settling = Some(Settling { work, next });
    }

    /// Goes on when the messages are published or stored. If they cannot be, gives the binding back:
    /// its slot is free, and another node may reach the stream.
    pub(crate) async fn outbox_settled(&mut self, settled: Result<Done, NotSettled>) {
        let next = self.settling.take().map(|settling| settling.next);
        match settled {
            Ok(Done::Stored(outbox, emits)) => {
                if let Some(message) = self.staged.front_mut() {
                    message.carry(outbox, emits);
                }
            }
            Ok(Done::Published(superseded)) => {
                self.shared
                    .supersede_chunks(superseded.into_iter().collect());
                if matches!(next, Some(Next::Launch)) && !self.finish_requested() {
                    self.launch(None).await;
                }
            }
            Err(error) => self.give_back(&error).await,
        }
    }

    /// Gives the binding back at the last commit. Reports of a program that computes already are
    /// dropped, and made again from there.
    async fn give_back(&mut self, error: &NotSettled) {
        self.drop_staged(Vec::new(), &NotTaken::Leaving).await;
        self.child = None;
        self.wait = None;
        self.silence = None;
        // The recorder publishes the messages of an ended execution.
        if self.finish_requested() {
            return;
        }
        // What would have said that it started is dropped.
        let given = match self.is_started() {
            true => Given::Started,
            false => Given::Unstarted,
        };
        let events = self.given_back(given, Some(Fault::Broker), error.to_string());
        self.finish(events);
    }

    /// Whether the ledger says that it is started.
    fn is_started(&self) -> bool {
        matches!(self.tip.state.phase, Phase::Started(_))
    }

    /// Ends as was requested of a worker that died before it could do it. Returns false if nothing
    /// was requested.
    pub(crate) fn finish_requested(&mut self) -> bool {
        let Some(Requested { what, who, .. }) = self.tip.state.requested().cloned() else {
            return false;
        };
        self.finish(match what {
            RequestKind::Cancel => vec![Event::Cancelled { who }],
            RequestKind::Pause if self.is_started() => {
                let pause = PendingOrder::Pause { who };
                pause.events(self.epoch, self.shared.broker.now()).0
            }
            RequestKind::Pause => vec![Event::Paused { who }],
        });
        true
    }
}

/// The storing of emitted messages, or the publishing of those that the holder before owed.
pub(crate) struct Settling {
    pub(crate) work: Pin<Box<dyn Future<Output = Result<Done, NotSettled>> + Send>>,
    next: Next,
}

/// Result of storing or publishing emitted messages.
pub(crate) enum Done {
    /// They are published. The sequence of the chunk that is not needed any more.
    Published(Option<Sequence>),
    /// They are stored, for the next ledger message.
    Stored(Outbox, Vec<Emit>),
}

/// The step of the runner after that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The program is started.
    Launch,
    /// The program computes already: its messages are appended.
    Append,
}

/// Emitted messages that were not published or stored in time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSettled {
    /// Those of the last commit.
    #[error("messages that it emitted earlier cannot be published: {0}")]
    Published(String),
    /// Those of the next commit.
    #[error("messages that it emitted cannot be stored: {0}")]
    Stored(String),
}

/// Publishes an execution's owed messages.
async fn settle(shared: Arc<Shared>, state: Arc<ExecutionState>) -> Result<Done, NotSettled> {
    let (broker, owed) = (&shared.broker, &*state);
    let published = insist(&shared, &state, PUBLISHED_WITHIN, || async move {
        match outbox::settle(broker, owed).await {
            Err(error) if is_damage(&error) => Ok(None),
            settled => settled,
        }
    });
    let published = published.await.map_err(NotSettled::Published)?;
    Ok(Done::Published(published))
}

/// Stores the messages of the next commit.
async fn store(
    shared: Arc<Shared>,
    state: Arc<ExecutionState>,
    emits: Vec<Emit>,
) -> Result<Done, NotSettled> {
    let stored = insist(&shared, &state, STORED_WITHIN, || {
        outbox::store(&shared.broker, &state.tenant, state.execution, &emits)
    });
    let stored = stored.await.map_err(NotSettled::Stored)?;
    Ok(Done::Stored(stored, emits))
}

/// Repeats an action until it succeeds, or has failed for this time while the broker answered: what
/// it needs is then not there. Without any answer the binding could not be given back either.
async fn insist<T, F: Future<Output = Result<T, BrokerError>>>(
    shared: &Shared,
    state: &ExecutionState,
    within: Duration,
    mut action: impl FnMut() -> F,
) -> Result<T, String> {
    let mut since = Instant::now();
    loop {
        let error = match tokio::time::timeout(ATTEMPT, action()).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) if is_damage(&error) => return Err(error.to_string()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", ATTEMPT.as_secs()),
        };
        tracing::warn!(error, "the emitted messages cannot be stored or published");
        let ledger = shared.ledger.last(&state.tenant, state.execution);
        if !matches!(tokio::time::timeout(ATTEMPT, ledger).await, Ok(Ok(_))) {
            since = Instant::now();
        }
        if since.elapsed() + PAUSE > within {
            return Err(error);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether the messages are damaged, so that a retry cannot help. Logs it.
fn is_damage(error: &BrokerError) -> bool {
    let damaged = matches!(
        error,
        BrokerError::Malformed { .. } | BrokerError::Digest { .. }
    );
    if damaged {
        tracing::error!(%error, "the emitted messages are damaged and were not published");
    }
    damaged
}

/// Retries until the action succeeds. Returns none if the agent halts.
async fn attempt<T, F: Future<Output = Result<T, BrokerError>>>(
    shared: &Shared,
    mut action: impl FnMut() -> F,
) -> Option<T> {
    loop {
        let done = tokio::select! {
            biased;
            () = shared.halt.cancelled() => return None,
            done = action() => done,
        };
        match done {
            Ok(done) => return Some(done),
            Err(error) if is_damage(&error) => return None,
            Err(error) => tracing::warn!(%error, "trying again"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Publishes the messages of a stored commit, with retries.
pub(crate) async fn publish(shared: &Shared, tip: &Tip, emits: &[Emit]) {
    if emits.is_empty() {
        return;
    }
    let state = &tip.state;
    let published = attempt(shared, || {
        outbox::publish(&shared.broker, &state.tenant, state.execution, emits)
    });
    if published.await.is_some() {
        shared.metrics.emitted.inc_by(emits.len() as u64);
        shared.supersede_chunks(state.outbox.iter().map(|outbox| outbox.seq).collect());
    }
}
