//! Removes chunks that the last message of their ledger does not name: of a live execution those
//! that its last commit does not name, of an ended one all. One that failed or was cancelled may be
//! retried, and counts as live for some days. A worker drops them itself. These were
//! left behind by a worker that was killed before that, or by an append that failed.
//!
//! A commit takes its chunks from the commit before, or stores them after that one. So a chunk that
//! is older than the last commit, and that the last commit does not name, is never named again. While
//! nobody holds the execution, no commit is in flight, and this holds for younger chunks too. The
//! only exception is a broker that loses the end of a ledger: an earlier commit is then the last
//! one. Therefore a chunk must be unnamed at two looks, with a grace between them.
//!
//! The ledgers know all of this. So these sweeps do not wait for the tables, as those of
//! [`crate::collect`] do. A chunk whose ledger is gone is left to those.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fiec_broker::chunk_list;
use fiec_broker::chunks::{self, Manifest};
use fiec_broker::{Broker, BrokerError, Ledger, collect, outbox, store};
use fiec_schemas::{ExecutionId, Phase, Sequence, Tenant, Timestamp, subjects};

use crate::collect::Collection;
use crate::error::Result;
use crate::tasks::{Shared, pause};

/// Time between two sweeps, in graces.
const SWEEPS: u32 = 4;

/// The chunks that an execution may still need.
enum Needed {
    /// Those that the last commit of a live execution names. Chunks that are younger than this time
    /// may be of a commit in flight.
    Named(HashSet<Sequence>, Timestamp),
    /// None: it ended then, and is not retried any more.
    None(Timestamp),
}

/// Chunks that nothing names, by execution.
#[derive(Debug, Default)]
struct Unnamed(HashMap<(Tenant, ExecutionId), Vec<Sequence>>);

/// Returns what an execution needs. None if that is not known: it has no ledger, its σ is not in
/// chunks, or the list cannot be read.
async fn needed(
    broker: &Broker,
    tenant: &Tenant,
    id: ExecutionId,
    kept: Duration,
) -> Result<Option<Needed>> {
    let ledger = Ledger::new(broker);
    let Some(last) = ledger.last(tenant, id).await? else {
        return Ok(None);
    };
    let state = last.message.state;
    if state.phase.is_terminal() {
        // Emitted messages lie in a chunk until they are published.
        outbox::settle(broker, &state).await?;
        let kept = i64::try_from(kept.as_millis()).unwrap_or(i64::MAX);
        let is_kept = broker.now().millis() < state.at.millis().saturating_add(kept);
        if !state.phase.kind().can_be_retried() || !is_kept {
            return Ok(Some(Needed::None(state.at)));
        }
    }
    let is_idle = matches!(
        state.phase,
        Phase::Pending { .. }
            | Phase::Paused { .. }
            | Phase::Held { .. }
            | Phase::Verifying { .. }
            | Phase::Failed
            | Phase::Cancelled
    );
    let place = state
        .boundary
        .as_ref()
        .filter(|place| store::is_large(place));
    let Some((place, seq)) = place.and_then(|place| Some((place.digest, place.seq?))) else {
        return Ok(None);
    };
    let commit = match ledger.by_sequence(seq).await {
        Ok(commit) => commit,
        Err(BrokerError::Missing { .. } | BrokerError::Malformed { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let of = &commit.message.state;
    let is_it = of.execution == id && of.boundary.as_ref().is_some_and(|b| b.digest == place);
    let manifest = Manifest::decode(&commit.body).ok().filter(|_| is_it);
    Ok(manifest.map(|manifest| {
        let named = manifest.chunks.iter().map(|chunk| chunk.seq).collect();
        // While nobody holds the execution, no commit is in flight.
        Needed::Named(named, if is_idle { broker.now() } else { of.at })
    }))
}

/// Sweeps until the recorder stops, one each [`SWEEPS`] graces. A sweep that fails is
/// tried again.
pub(crate) async fn run(broker: Broker, shared: Shared, options: Collection) {
    let (grace, kept, dry) = (options.chunk_grace, options.keep_failed, options.dry_run);
    while !shared.stop.is_cancelled() {
        pause(&shared.stop, SWEEPS * grace).await;
        let swept = async {
            let holders = collect::chunk_holders(&broker).await?;
            let unnamed = Unnamed::look(&broker, &holders, (grace, kept)).await?;
            if unnamed.0.is_empty() {
                return Ok(0);
            }
            pause(&shared.stop, grace).await;
            unnamed.remove(&broker, kept, dry).await
        };
        let swept: Result<u64> = tokio::select! {
            swept = swept => swept,
            () = shared.stop.cancelled() => return,
        };
        match swept {
            Ok(0) => {}
            Ok(chunks) => {
                if !dry {
                    shared.metrics.collected.inc_by(chunks);
                }
                tracing::info!(chunks, dry, "removed chunks that no ledger names");
            }
            Err(error) => {
                tracing::warn!(%error, "a sweep of chunks ended early; it is tried again")
            }
        }
    }
}

impl Unnamed {
    /// Looks for chunks that were stored more than `grace` before the last commit, and that it does
    /// not name, and for all chunks of executions that ended more than `grace` ago.
    async fn look(
        broker: &Broker,
        holders: &[(ExecutionId, String)],
        (grace, kept): (Duration, Duration),
    ) -> Result<Self> {
        let mut unnamed = Self::default();
        let grace = i64::try_from(grace.as_millis()).unwrap_or(i64::MAX);
        for (id, subject) in holders {
            let tenant = subject.split('.').nth(2).map(Tenant::new);
            let Some(Ok(tenant)) = tenant else { continue };
            let Some(needed) = needed(broker, &tenant, *id, kept).await? else {
                continue;
            };
            let now = broker.now().millis();
            let stored = chunk_list::stored(broker, &subjects::chunk(&tenant, *id)).await?;
            let is_unnamed = |chunk: &chunk_list::StoredChunk| match &needed {
                Needed::None(ended) => ended.millis() < now.saturating_sub(grace),
                // Without a digest it may hold emitted messages.
                Needed::Named(named, at) => {
                    chunk.digest.is_some()
                        && chunk.stored_at.millis() < at.millis().saturating_sub(grace)
                        && !named.contains(&chunk.seq)
                }
            };
            let sequences = stored.iter().filter(|c| is_unnamed(c)).map(|c| c.seq);
            let sequences: Vec<Sequence> = sequences.collect();
            if !sequences.is_empty() {
                unnamed.0.insert((tenant, *id), sequences);
            }
        }
        Ok(unnamed)
    }

    /// Removes those that are still unnamed. Returns their number.
    async fn remove(self, broker: &Broker, kept: Duration, dry: bool) -> Result<u64> {
        let mut removed = 0;
        for ((tenant, id), mut sequences) in self.0 {
            match needed(broker, &tenant, id, kept).await? {
                Some(Needed::Named(named, _)) => sequences.retain(|seq| !named.contains(seq)),
                Some(Needed::None(_)) => {}
                None => continue,
            }
            if !dry {
                chunks::drop_chunks(broker, &sequences).await?;
            }
            let chunks = sequences.len();
            tracing::debug!(execution = %id, chunks, dry, "chunks that no ledger names");
            removed += chunks as u64;
        }
        Ok(removed)
    }
}
