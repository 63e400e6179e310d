//! The number of copies of each stream and bucket in a cluster of servers.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{
    CreateStreamError, CreateStreamErrorKind, GetStreamErrorKind,
};
use async_nats::jetstream::stream::Info;
use futures_util::TryStreamExt;

use crate::{Broker, BrokerError};

/// How long a stream may be without a leader.
const ELECTED_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// How long a cluster may have too few servers at hand for the copies of a stream: one that has just
/// started counts only once its reports have come.
const PLACED_WITHIN: Duration = Duration::from_secs(10);

/// Repeats an attempt to make or change streams while the cluster has too few servers at hand.
pub(crate) async fn placed<T, F>(attempt: impl Fn() -> F) -> Result<T, BrokerError>
where
    F: Future<Output = Result<T, BrokerError>>,
{
    placed_within(PLACED_WITHIN, attempt).await
}

async fn placed_within<T, F>(limit: Duration, attempt: impl Fn() -> F) -> Result<T, BrokerError>
where
    F: Future<Output = Result<T, BrokerError>>,
{
    let began = Instant::now();
    loop {
        match attempt().await {
            Err(error) if lacks_servers(&error) && began.elapsed() < limit => {
                tracing::info!(%error, "waiting for the cluster's servers");
                tokio::time::sleep(PAUSE).await;
            }
            done => return done,
        }
    }
}

fn lacks_servers(error: &BrokerError) -> bool {
    let first: &(dyn Error + 'static) = error;
    let chain = std::iter::successors(Some(first), |error| (*error).source());
    let mut kinds = chain.filter_map(|e| Some(e.downcast_ref::<CreateStreamError>()?.kind()));
    kinds.any(|kind| match kind {
        CreateStreamErrorKind::JetStream(why) => {
            let short = [
                ErrorCode::CLUSTER_NO_PEERS,
                ErrorCode::CLUSTER_NOT_AVAILABLE,
            ];
            short.contains(&why.error_code())
        }
        _ => false,
    })
}

/// The copies of FIEC's streams, by name. A bucket is a stream too: `KV_…` or `OBJ_…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copies(BTreeMap<String, usize>);

fn is_ours(stream: &str) -> bool {
    let name = stream.strip_prefix("KV_").unwrap_or(stream);
    let name = name.strip_prefix("OBJ_").unwrap_or(name);
    name.starts_with("FIEC_")
}

/// Reads FIEC's streams, by name. A stream without a leader is awaited: a list of all streams would
/// leave it out.
///
/// # Errors
/// When the broker does not answer, or a stream has no leader for long.
pub async fn read_streams(broker: &Broker) -> Result<BTreeMap<String, Info>, BrokerError> {
    let names = broker.js.stream_names().try_collect();
    let names: Vec<String> = names
        .await
        .map_err(BrokerError::operation("list the streams"))?;
    let mut streams = BTreeMap::new();
    for name in names.into_iter().filter(|name| is_ours(name)) {
        if let Some(info) = look_at(broker, &name).await? {
            streams.insert(name, info);
        }
    }
    Ok(streams)
}

/// What a stream is and holds; none if there is no such stream. One without a leader is awaited.
async fn look_at(broker: &Broker, stream: &str) -> Result<Option<Info>, BrokerError> {
    let began = Instant::now();
    loop {
        let error = match broker.js.get_stream(stream).await {
            Ok(found) => return Ok(Some(found.cached_info().clone())),
            Err(error) => error,
        };
        match error.kind() {
            GetStreamErrorKind::JetStream(why)
                if why.error_code() == ErrorCode::STREAM_NOT_FOUND =>
            {
                return Ok(None);
            }
            _ if began.elapsed() < ELECTED_WITHIN => tokio::time::sleep(PAUSE).await,
            _ => {
                let what = format!("look at stream {stream}");
                return Err(BrokerError::operation(what)(error));
            }
        }
    }
}

impl Copies {
    /// The copies of these streams.
    pub fn of(streams: &BTreeMap<String, Info>) -> Self {
        let copies = streams.iter();
        let copies = copies.map(|(name, info)| (name.clone(), info.config.num_replicas));
        Self(copies.collect())
    }

    /// The copies that a stream should have: as `asked`, else as it has. A new stream gets as many
    /// as the stream that has the most, and the first ones get one.
    pub fn wanted(&self, stream: &str, asked: Option<usize>) -> usize {
        let has = self.0.get(stream).or_else(|| self.0.values().max());
        asked.or(has.copied()).unwrap_or(1)
    }

    /// Checks that no stream has more copies than `asked`.
    ///
    /// # Errors
    /// [`BrokerError::FewerCopies`] with the first stream that has more.
    pub fn none_above(&self, asked: usize) -> Result<(), BrokerError> {
        match self.0.iter().find(|(_, has)| **has > asked) {
            None => Ok(()),
            Some((stream, has)) => Err(BrokerError::FewerCopies {
                stream: stream.clone(),
                has: *has,
                asked,
            }),
        }
    }

    /// The streams by their number of copies, for people. None if all have the same.
    pub fn mixture(&self) -> Option<String> {
        let mut by_count: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for (stream, copies) in &self.0 {
            by_count.entry(*copies).or_default().push(stream);
        }
        let words = by_count
            .iter()
            .map(|(copies, streams)| format!("{copies}: {}", streams.join(", ")));
        (by_count.len() > 1).then(|| words.collect::<Vec<_>>().join("; "))
    }

    /// The one number of copies, if all streams have the same.
    pub fn common(&self) -> Option<usize> {
        let first = self.0.values().next().copied()?;
        self.0
            .values()
            .all(|copies| *copies == first)
            .then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use async_nats::jetstream::context::{CreateKeyValueError, CreateKeyValueErrorKind};
    use serde_json::json;

    use super::*;

    fn copies(of: &[(&str, usize)]) -> Copies {
        Copies(of.iter().map(|(s, n)| ((*s).to_owned(), *n)).collect())
    }

    #[test]
    fn a_stream_keeps_its_copies_and_a_new_one_gets_as_many_as_another_has() {
        let found = copies(&[("FIEC_LEDGER", 3), ("KV_FIEC_NODES", 1)]);
        assert_eq!(found.wanted("KV_FIEC_NODES", None), 1);
        assert_eq!(found.wanted("FIEC_CHUNK", None), 3);
        assert_eq!(found.wanted("FIEC_CHUNK", Some(1)), 1);
        assert_eq!(Copies::default().wanted("FIEC_CHUNK", None), 1);
    }

    #[test]
    fn a_mixture_names_every_stream() {
        let found = copies(&[("FIEC_LEDGER", 1), ("FIEC_LOG", 1), ("OBJ_FIEC_DATA", 3)]);
        let words = "1: FIEC_LEDGER, FIEC_LOG; 3: OBJ_FIEC_DATA";
        assert_eq!(found.mixture().as_deref(), Some(words));
        assert_eq!(found.common(), None);
        let same = copies(&[("FIEC_LEDGER", 3), ("FIEC_LOG", 3)]);
        assert_eq!((same.mixture(), same.common()), (None, Some(3)));
    }

    fn refused(code: u64) -> BrokerError {
        let why = json!({"code": 400, "err_code": code, "description": "no suitable peers"});
        let why = serde_json::from_value(why).unwrap();
        let stream = CreateStreamError::new(CreateStreamErrorKind::JetStream(why));
        let kind = CreateKeyValueErrorKind::JetStream;
        let bucket = CreateKeyValueError::with_source(kind, stream);
        BrokerError::operation("create bucket FIEC_PROGRAMS")(bucket)
    }

    /// How often it was tried to make something that is refused with `code` at first.
    async fn tries(code: u64, refusals: u32, limit: Duration) -> (u32, bool) {
        let tried = &Cell::new(0);
        let attempt = || async move {
            tried.set(tried.get() + 1);
            let is_made = tried.get() > refusals;
            is_made.then_some(()).ok_or_else(|| refused(code))
        };
        let placed = placed_within(limit, attempt).await;
        (tried.get(), placed.is_ok())
    }

    #[tokio::test]
    async fn a_cluster_whose_servers_have_just_started_is_awaited_and_nothing_else_is() {
        assert_eq!(tries(10_005, 2, PLACED_WITHIN).await, (3, true));
        assert_eq!(tries(10_005, 9, Duration::ZERO).await, (1, false));
        let name_in_use = 10_058;
        assert_eq!(tries(name_in_use, 2, PLACED_WITHIN).await, (1, false));
    }
}
