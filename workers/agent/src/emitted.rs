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
use fiec_schemas::event::Requested;
use fiec_schemas::{Event, ExecutionState, RequestKind, Sequence};
use tokio::time::Instant;

use crate::cache::NotCached;
use crate::message::Message;
use crate::replies::NotTaken;
use crate::runner::Runner;
use crate::shared::Shared;

/// Pause between two attempts while the broker does not accept them.
const PAUSE: Duration = Duration::from_secs(1);
/// After this time no further attempt to publish owed messages begins. It is shorter than the time
/// after which the policy service binds an execution elsewhere that does not start.
const RETRIED_FOR: Duration = Duration::from_secs(5);
/// Longest attempt. It may look for a chunk until no leader can be cut off any more.
const ATTEMPT: Duration = leader::CUT_OFF.saturating_add(Duration::from_secs(5));
/// The limits of one commit: those of a capsule, twice, because as much may have waited.
const COUNT_LIMIT: usize = 2 * frames::EMITS_LIMIT;
const BYTES_LIMIT: usize = 2 * frames::EMIT_BYTES_LIMIT;

fn read(emit: frames::Emit) -> Result<Emit, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if emit.name.is_empty() || emit.name.len() > 64 || !emit.name.chars().all(fits) {
        return Err(format!(
            "emit: the name {:?} must have 1 to 64 letters, digits, '_' or '-'",
            emit.name
        ));
    }
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
    /// Stores a program's messages before the ledger message that names them. Returns false if that
    /// failed: the execution has then failed, or the agent halts.
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
        let emits = match emits {
            Ok(emits) if emits.is_empty() => return true,
            Ok(emits) => emits,
            Err(reason) => {
                self.child = None;
                self.wait = None;
                self.failed(reason, String::new()).await;
                return false;
            }
        };
        let (shared, state) = (self.shared.clone(), &self.tip.state);
        let stored = attempt(&shared, || {
            outbox::store(&shared.broker, &state.tenant, state.execution, &emits)
        });
        let Some(outbox) = stored.await else {
            return false;
        };
        message.events.push(Event::Emitted { outbox });
        message.emits = emits;
        true
    }

    /// Begins to publish messages that the holder before has not published.
    pub(crate) fn settle_outbox(&mut self, next: Next) {
        let work = Box::pin(settle(self.shared.clone(), self.tip.state.clone()));
        self.settling = Some(Settling { work, next });
    }

    /// Goes on when the messages are published. If they cannot be, gives the binding back: its slot
    /// is free, and another node may reach the stream.
    pub(crate) async fn outbox_settled(&mut self, settled: Result<Option<Sequence>, NotSettled>) {
        let next = self.settling.take().map(|settling| settling.next);
        match settled {
            Ok(superseded) => {
                self.shared
                    .supersede_chunks(superseded.into_iter().collect());
                if matches!(next, Some(Next::Launch)) && !self.finish_requested() {
                    self.launch(None).await;
                }
            }
            Err(error) => {
                // Reports of a program that computes already are dropped. They are made again from
                // the last commit.
                self.drop_staged(Vec::new(), &NotTaken::Leaving).await;
                self.child = None;
                self.wait = None;
                self.silence = None;
                // The recorder publishes the messages of an ended execution.
                if !self.finish_requested() {
                    self.refuse(&NotCached(error.to_string()));
                }
            }
        }
    }

    /// Ends as was requested of a worker that died before it could do it. Returns false if nothing
    /// was requested.
    pub(crate) fn finish_requested(&mut self) -> bool {
        let Some(Requested { what, who, .. }) = self.tip.state.requested.clone() else {
            return false;
        };
        self.finish(vec![match what {
            RequestKind::Cancel => Event::Cancelled { who },
            RequestKind::Pause => Event::Paused { who },
        }]);
        true
    }
}

/// The publishing of messages that the holder before owed.
pub(crate) struct Settling {
    /// Ends with the sequence of the chunk that is not needed any more.
    pub(crate) work: Pin<Box<dyn Future<Output = Result<Option<Sequence>, NotSettled>> + Send>>,
    next: Next,
}

/// What follows the publishing of owed messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The program is started.
    Launch,
    /// The program computes already: its messages are appended.
    Append,
}

/// Owed messages that were not published in time.
#[derive(Debug, thiserror::Error)]
#[error("messages that it emitted earlier cannot be published: {0}")]
pub(crate) struct NotSettled(String);

/// Publishes an execution's owed messages, with retries for [`RETRIED_FOR`].
async fn settle(
    shared: Arc<Shared>,
    state: ExecutionState,
) -> Result<Option<Sequence>, NotSettled> {
    let until = Instant::now() + RETRIED_FOR;
    loop {
        let settled = outbox::settle(&shared.broker, &state);
        let error = match tokio::time::timeout(ATTEMPT, settled).await {
            Ok(Ok(superseded)) => return Ok(superseded),
            Ok(Err(error)) if is_damage(&error) => return Ok(None),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", ATTEMPT.as_secs()),
        };
        tracing::warn!(error, "cannot publish what was emitted");
        if Instant::now() + PAUSE > until {
            return Err(NotSettled(error));
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
        tracing::error!(%error, "what was emitted is damaged, and was not published");
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
