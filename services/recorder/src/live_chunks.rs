//! Removes chunks of a live execution that its last commit does not name. A worker drops the chunks
//! that a commit supersedes; these were left behind by a worker that was killed before that, or by
//! an append that failed.
//!
//! A commit takes its chunks from the commit before, or stores them after that one. So a chunk that
//! is older than the last commit, and that the last commit does not name, is never named again. The
//! only exception is a broker that loses the end of a ledger: an earlier commit is then the last
//! one. Therefore a chunk must be unnamed at two looks, with a grace between them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fiec_broker::chunk_list;
use fiec_broker::chunks::{self, Manifest};
use fiec_broker::{Broker, BrokerError, Ledger, store};
use fiec_schemas::{ExecutionId, Sequence, Tenant, Timestamp, subjects};

use crate::error::Result;

/// The chunks that the last commit of a live execution names.
struct Named {
    sequences: HashSet<Sequence>,
    /// When the commit was made. Its chunks may be younger.
    at: Timestamp,
}

/// Unnamed chunks of live executions.
#[derive(Debug, Default)]
pub(crate) struct Unnamed(HashMap<(Tenant, ExecutionId), Vec<Sequence>>);

/// Returns the chunks that the last commit names. None if that is not known: the execution has
/// ended, its σ is not in chunks, or its list cannot be read.
async fn named(broker: &Broker, tenant: &Tenant, id: ExecutionId) -> Result<Option<Named>> {
    let ledger = Ledger::new(broker);
    let Some(last) = ledger.last(tenant, id).await? else {
        return Ok(None);
    };
    let state = last.message.state;
    let place = state.boundary.filter(|_| !state.phase.is_terminal());
    let Some((place, seq)) = place
        .filter(store::is_large)
        .and_then(|place| Some((place.digest, place.seq?)))
    else {
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
    Ok(manifest.map(|manifest| Named {
        sequences: manifest.chunks.iter().map(|chunk| chunk.seq).collect(),
        at: of.at,
    }))
}

impl Unnamed {
    /// Looks for chunks that were stored more than `grace` before the last commit, and that it does
    /// not name. `holders` are the executions that have chunks, with their subjects.
    pub(crate) async fn look(
        broker: &Broker,
        holders: impl Iterator<Item = (ExecutionId, &str)>,
        grace: Duration,
    ) -> Result<Self> {
        let mut unnamed = Self::default();
        let grace = i64::try_from(grace.as_millis()).unwrap_or(i64::MAX);
        for (id, subject) in holders {
            let tenant = subject.split('.').nth(2).map(Tenant::new);
            let Some(Ok(tenant)) = tenant else { continue };
            let Some(named) = named(broker, &tenant, id).await? else {
                continue;
            };
            let before = named.at.millis().saturating_sub(grace);
            let stored = chunk_list::stored(broker, &subjects::chunk(&tenant, id)).await?;
            let stored = stored.into_iter().filter(|chunk| {
                chunk.digest.is_some()
                    && chunk.stored_at.millis() < before
                    && !named.sequences.contains(&chunk.seq)
            });
            let sequences: Vec<Sequence> = stored.map(|chunk| chunk.seq).collect();
            if !sequences.is_empty() {
                unnamed.0.insert((tenant, id), sequences);
            }
        }
        Ok(unnamed)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes those that are still unnamed. Returns their number.
    pub(crate) async fn remove(self, broker: &Broker, dry: bool) -> Result<u64> {
        let mut removed = 0;
        for ((tenant, id), mut sequences) in self.0 {
            let Some(named) = named(broker, &tenant, id).await? else {
                continue;
            };
            sequences.retain(|seq| !named.sequences.contains(seq));
            if !dry {
                chunks::drop_chunks(broker, &sequences).await?;
            }
            let chunks = sequences.len();
            tracing::debug!(execution = %id, chunks, dry, "collected chunks that no commit names");
            removed += chunks as u64;
        }
        Ok(removed)
    }
}
