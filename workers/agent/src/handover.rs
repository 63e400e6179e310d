//! Handovers: σ travels to a prepared destination with the append that binds the execution there,
//! before its durable copy. The destination computes at once. Its work counts only after that
//! append is confirmed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use bytes::{Bytes, BytesMut};
use fiec_broker::{AppendError, Draft, Entry, Tip, store};
use fiec_schemas::messages::{Destination, HANDOVER_HEADER, Handover};
use fiec_schemas::{Digest, Epoch, ExecutionId, LedgerMessage, StatePlace, subjects};
use futures_util::StreamExt;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::entrusted_bindings;
use crate::job::{Job, Live, Sigma, Start, Stored};
use crate::large::{self, Cut, Known};
use crate::runner::Flight;
use crate::shared::{Shared, enqueue, start_now};

const PART_BYTES: usize = 512 * 1024;
/// Most handovers that arrive at once, and their bytes in all.
const ASSEMBLIES: usize = 64;
const ASSEMBLY_BYTES: u64 = 1 << 30;
const STALE_AFTER: Duration = Duration::from_secs(10);
/// Time limit for the confirmation of a handover. Then the ledger is read.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(10);

async fn publish(shared: &Shared, to: &Destination, handover: &Handover, body: Bytes) {
    let Ok(text) = serde_json::to_string(handover) else {
        return;
    };
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, text);
    let subject = subjects::handover(&to.node);
    let client = &shared.broker.client;
    let sent = match handover {
        // A few bytes that are answered at once: they measure the round trip to that node.
        Handover::Confirmed { .. } => {
            let reply = shared.round_trips.ask(&to.node);
            client
                .publish_with_reply_and_headers(subject, reply, headers, body)
                .await
        }
        _ => client.publish_with_headers(subject, headers, body).await,
    };
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot send σ ahead; the durable capsule will do");
    }
}

/// Sends σ in parts, with the message that binds it to `to`. Of a large σ only chunks that the
/// commit `before` does not have are sent. The returned receiver resolves once the broker has
/// passed it on.
pub(crate) async fn send(
    shared: &Shared,
    to: &Destination,
    draft: &Draft,
    (state, cut): (&Bytes, &Cut),
    known: &Known,
    before: Option<&StatePlace>,
) -> Option<oneshot::Receiver<()>> {
    let place = draft.state.boundary.as_ref()?;
    let began = Instant::now();
    let delta = if store::is_large(place) {
        match large::delta(shared, (state, cut), known, before).await {
            Ok(delta) => Some(delta),
            Err(error) => {
                tracing::warn!(%error, "cannot send σ ahead; the durable capsule will do");
                return None;
            }
        }
    } else {
        None
    };
    let state = delta.as_ref().unwrap_or(state);
    tracing::debug!(took = ?began.elapsed(), bytes = state.len(), "σ is ready to be sent ahead");
    shared.metrics.handover_bytes.inc_by(state.len() as u64);
    let parts = state.len().div_ceil(PART_BYTES).max(1);
    for part in 0..parts {
        let body = state.slice(part * PART_BYTES..state.len().min((part + 1) * PART_BYTES));
        let head = Handover::Part {
            execution: draft.state.execution,
            epoch: draft.state.epoch,
            part: part as u32,
            parts: parts as u32,
            digest: place.digest,
            bytes: place.bytes,
            ledger: (part == 0).then(|| draft.header.clone()),
            delta: delta.as_ref().map(|delta| delta.len() as u64),
        };
        publish(shared, to, &head, body).await;
    }
    shared.round_trips.turn(&shared.broker.client).await
}

/// Confirms to the destination that the append that binds the execution there is stored.
pub async fn confirm(shared: &Shared, to: &Destination, epoch: Epoch, tip: &Tip) {
    publish(
        shared,
        to,
        &Handover::Confirmed {
            execution: tip.state.execution,
            epoch,
            seq: tip.seq,
            bound: tip.digest,
            server: Some(shared.broker.server()),
        },
        Bytes::new(),
    )
    .await;
}

/// Notifies the destination that the append failed.
pub async fn abandon(shared: &Shared, to: &Destination, execution: ExecutionId, epoch: Epoch) {
    publish(
        shared,
        to,
        &Handover::Abandoned { execution, epoch },
        Bytes::new(),
    )
    .await;
}

/// Waits until the append that binds it here is confirmed. `tip` is the tip that the append makes.
pub fn confirmation(
    shared: Arc<Shared>,
    mut tip: Tip,
    confirmed: oneshot::Receiver<Stored>,
) -> Flight {
    Box::pin(async move {
        if let Ok(Ok(stored)) = tokio::time::timeout(CONFIRMED_WITHIN, confirmed).await {
            stored.complete(&mut tip);
            return Ok(tip);
        }
        // Abandoned, or no message: the ledger says whether it was appended after all.
        let (tenant, execution) = (&tip.state.tenant, tip.state.execution);
        let known = |last: &Entry| last.message.state.ordinal >= tip.state.ordinal;
        match shared.ledger.last_known(tenant, execution, known).await {
            Ok(Some(last)) if Some(last.digest) == tip.digest => Ok(last.into()),
            _ => Err(AppendError::Conflict),
        }
    })
}

struct Assembly {
    /// The pieces of σ by their number; none for a piece that has not arrived.
    parts: Vec<Option<Bytes>>,
    /// σ's digest, checked when the last piece is there.
    digest: Digest,
    /// Size of the whole.
    bytes: u64,
    /// Bytes that are sent of it, unless the whole is sent.
    delta: Option<u64>,
    /// The ledger message that binds it here. It comes with one of the pieces.
    ledger: Option<String>,
    /// Arrival of the first piece. An assembly that stays incomplete is dropped.
    since: Instant,
}

type Assemblies = HashMap<(ExecutionId, Epoch), Assembly>;

/// Receives handovers until `stop`.
pub async fn receive(
    shared: Arc<Shared>,
    mut messages: async_nats::Subscriber,
    stop: CancellationToken,
) {
    let mut assemblies = Assemblies::new();
    loop {
        let message = tokio::select! {
            () = stop.cancelled() => return,
            message = messages.next() => message,
        };
        let Some(message) = message else { return };
        if let Some(reply) = message.reply.clone()
            && let Err(error) = shared.broker.client.publish(reply, Bytes::new()).await
        {
            tracing::debug!(%error, "a round trip was not answered");
        }
        let head = message
            .headers
            .as_ref()
            .and_then(|h| h.get(HANDOVER_HEADER));
        match head.map(|h| serde_json::from_str::<Handover>(h.as_str())) {
            Some(Ok(handover)) => take(&shared, &mut assemblies, handover, message.payload),
            _ => tracing::warn!("malformed handover message was dropped"),
        }
    }
}

fn take(shared: &Arc<Shared>, assemblies: &mut Assemblies, handover: Handover, body: Bytes) {
    match handover {
        Handover::Part {
            execution,
            epoch,
            part,
            parts,
            digest,
            bytes,
            ledger,
            delta,
        } => {
            let key = (execution, epoch);
            assemblies.retain(|_, a| a.since.elapsed() < STALE_AFTER);
            if !assemblies.contains_key(&key) {
                let held: u64 = assemblies
                    .values()
                    .map(|a| a.delta.unwrap_or(a.bytes))
                    .sum();
                let coming = delta.unwrap_or(bytes);
                let fits = parts > 0
                    && u64::from(parts) == coming.div_ceil(PART_BYTES as u64).max(1)
                    && assemblies.len() < ASSEMBLIES
                    && held
                        .checked_add(coming)
                        .is_some_and(|all| all <= ASSEMBLY_BYTES);
                if !fits || shared.is_draining() {
                    return;
                }
                let assembly = Assembly {
                    parts: vec![None; parts as usize],
                    digest,
                    bytes,
                    delta,
                    ledger: None,
                    since: Instant::now(),
                };
                assemblies.insert(key, assembly);
            }
            let Some(assembly) = assemblies.get_mut(&key) else {
                return;
            };
            if ledger.is_some() {
                assembly.ledger = ledger;
            }
            if let Some(place) = assembly.parts.get_mut(part as usize) {
                *place = Some(body);
            }
            if assembly.parts.iter().all(Option::is_some)
                && let Some(assembly) = assemblies.remove(&key)
                && let Some((ledger, moved)) = assembly.whole()
            {
                speculate(shared, execution, epoch, &ledger, moved);
            }
        }
        Handover::Entrusted { .. } => entrusted_bindings::queue_bindings(shared, &body),
        Handover::Confirmed {
            execution,
            epoch,
            seq,
            bound,
            server,
        } => {
            let seen_in = shared.seen_in(server.as_deref());
            let mut live = shared.live();
            if let Some(known) = live.get_mut(&execution)
                && known.epoch == epoch
                && let Some(confirm) = known.confirm.take()
                // The appended message differs from the one that came with σ. The runner sees the
                // closed channel and reads the ledger.
                && bound.is_none_or(|bound| bound == known.bound)
            {
                known.seq = seq;
                let _ = confirm.send(Stored { seq, seen_in });
            }
        }
        Handover::Abandoned { execution, epoch } => {
            assemblies.remove(&(execution, epoch));
            let mut live = shared.live();
            if let Some(known) = live.get_mut(&execution)
                && known.epoch == epoch
            {
                // Its runner sees the closed channel.
                known.confirm = None;
            }
        }
    }
}

impl Assembly {
    /// Returns the message that binds it here, and σ. Returns none if that message never came.
    fn whole(self) -> Option<(String, Moved)> {
        let Self {
            mut parts,
            digest,
            bytes,
            delta,
            ledger,
            ..
        } = self;
        let sigma = match &mut parts[..] {
            [Some(only)] => std::mem::take(only),
            parts => {
                let mut whole =
                    BytesMut::with_capacity(parts.iter().flatten().map(Bytes::len).sum());
                parts
                    .iter()
                    .flatten()
                    .for_each(|part| whole.extend_from_slice(part));
                whole.freeze()
            }
        };
        let sigma = match delta {
            Some(_) => Sigma::Delta(sigma),
            None => Sigma::Whole(sigma),
        };
        let moved = Moved {
            sigma,
            digest,
            bytes,
        };
        Some((ledger?, moved))
    }
}

/// The received σ, with its sender's statements about it.
struct Moved {
    sigma: Sigma,
    digest: Digest,
    bytes: u64,
}

impl Moved {
    /// Whether it is the σ of this boundary. A σ in chunks is checked when it is assembled.
    fn is(&self, place: &StatePlace) -> bool {
        place.digest == self.digest
            && place.bytes == self.bytes
            && match &self.sigma {
                Sigma::Whole(sigma) => Digest::of(sigma) == self.digest,
                Sigma::Delta(_) => store::is_large(place),
            }
    }
}

/// Starts to compute at once. The ledger decides whether the work counts.
fn speculate(shared: &Arc<Shared>, execution: ExecutionId, epoch: Epoch, text: &str, moved: Moved) {
    let message = match LedgerMessage::decode(text, 0) {
        Ok(message) => message,
        Err(error) => {
            tracing::warn!(%execution, epoch, %error, "handover with a message that cannot be read");
            return;
        }
    };
    let state = message.state;
    let mine = shared.is_bound_here(&state);
    let fits = state.boundary.as_ref().is_some_and(|b| moved.is(b));
    if !mine || !fits || state.execution != execution || state.epoch != epoch {
        tracing::warn!(%execution, epoch, node = %shared.node(), "handover does not fit its message; dropped");
        return;
    }
    let bound = Digest::of(text.as_bytes());
    let mut live = shared.live();
    // A drain orders the executions that live here by then, and comes only once.
    let known = live.get(&execution).map(|known| known.epoch);
    if shared.is_draining() || known.is_some_and(|known| known >= epoch) {
        return;
    }
    let (confirm, confirmed) = oneshot::channel();
    let (entry, control) = Live::new(&state, (0, bound), Some(confirm));
    let progress = entry.progress.clone();
    live.insert(execution, entry);
    drop(live);
    shared.metrics.handovers_in.inc();
    let start = Start::Speculative {
        state,
        sigma: moved.sigma,
        confirmed,
        digest: bound,
    };
    let job = Job {
        start,
        ack: None,
        control,
        progress,
    };
    if shared.running() < shared.slots() {
        start_now(shared, job)
    } else {
        enqueue(shared, job)
    }
}
