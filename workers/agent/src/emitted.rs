//! Messages that programs emit: stored before the commit that carries them, published after it.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_broker::outbox::{self, Emit};
use fiec_broker::{BrokerError, Tip};
use fiec_kit::frames;
use fiec_schemas::Event;

use crate::message::Message;
use crate::runner::Runner;
use crate::shared::Shared;

/// Pause between two attempts while the broker does not accept them.
const PAUSE: Duration = Duration::from_secs(1);
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

    /// Publishes messages that the holder before has not published.
    pub(crate) async fn settle_outbox(&mut self) {
        let (shared, state) = (self.shared.clone(), &self.tip.state);
        let settled = attempt(&shared, || outbox::settle(&shared.broker, state));
        if let Some(Some(seq)) = settled.await {
            shared.supersede_chunks(vec![seq]);
        }
    }
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
            Err(error @ (BrokerError::Malformed { .. } | BrokerError::Digest { .. })) => {
                tracing::error!(%error, "what was emitted is damaged, and was not published");
                return None;
            }
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
