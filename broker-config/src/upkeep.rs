//! Checks that the broker has every stream, stores messages and keeps as many copies of one stream as
//! of another. Creates lost streams in memory again, without a person: a restart deletes them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::stream::{Config, StorageType};
use fiec_schemas::subjects;
use futures_util::TryStreamExt;

use crate::copies::{self, Copies};
use crate::topology::{Profile, shards_of, streams};
use crate::{Broker, BrokerError, limits};

const EVERY: Duration = Duration::from_secs(2);
/// Time limit of a round.
const WITHIN: Duration = Duration::from_secs(5);
/// Pause between two looks at the copies and the contents. Each asks the leaders of all streams, which
/// takes long while some have none.
const STREAMS_EVERY: Duration = Duration::from_secs(20);
/// Time limit of such a look.
const STREAMS_WITHIN: Duration = Duration::from_secs(15);
/// Bytes of a probe: more than a full disk can absorb.
const PROBE_BYTES: usize = 4_096;

/// The last findings. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Upkeep {
    found: Arc<Mutex<Found>>,
}

#[derive(Debug, Default)]
struct Found {
    missing: Option<String>,
    refused: Option<String>,
    /// Streams that are full.
    full: Option<String>,
    /// The ledger stream is full.
    full_ledger: Option<String>,
    /// Streams differ in their copies.
    mixed: Option<String>,
    /// The ledger stream has all messages since its first one.
    has_all_ledgers: bool,
}

impl Upkeep {
    /// Fails with the broker's problem and its remedy.
    ///
    /// # Errors
    /// When a stream is missing or full, the broker does not store, or streams differ in their copies.
    pub fn check(&self) -> Result<(), String> {
        let found = self.found();
        let troubles = [&found.missing, &found.refused, &found.full, &found.mixed];
        let troubles = troubles.into_iter().flatten();
        let words: Vec<&str> = troubles.map(String::as_str).collect();
        if words.is_empty() {
            Ok(())
        } else {
            Err(words.join("; "))
        }
    }

    /// Fails if the broker has no room for new executions, with the remedy. The last room of the
    /// ledgers is left to executions that run.
    ///
    /// # Errors
    /// When the last probe was refused or not acknowledged, or the ledger stream is full.
    pub fn stores(&self) -> Result<(), String> {
        let found = self.found();
        let trouble = found.refused.as_ref().or(found.full_ledger.as_ref());
        trouble.cloned().map_or(Ok(()), Err)
    }

    /// Whether the ledger stream is full. Then submissions wait, so that executions that run have the
    /// last room.
    pub fn is_ledger_full(&self) -> bool {
        self.found().full_ledger.is_some()
    }

    /// True if the ledger stream may have dropped whole ledgers, by age or by a purge: its first
    /// message is not its first one ever, or that is not known yet.
    pub fn may_have_dropped_ledgers(&self) -> bool {
        !self.found().has_all_ledgers
    }

    /// Checks every two seconds, and looks at the copies and contents of streams more seldom, forever.
    /// `who` names the kind of service. The probes of one kind replace each other.
    pub async fn keep(self, broker: Broker, who: &'static str) {
        tokio::join!(self.look(&broker, who), self.look_at_streams(&broker));
    }

    async fn look(&self, broker: &Broker, who: &'static str) {
        loop {
            let mut has_all_ledgers = false;
            let missing = within(complete(broker, &mut has_all_ledgers)).await;
            let refused = within(probe(broker, who)).await;
            self.note(|found| {
                found.missing = missing;
                found.refused = refused;
                found.has_all_ledgers = has_all_ledgers;
            });
            tokio::time::sleep(EVERY).await;
        }
    }

    /// No answer leaves the last finding: a broker that does not answer is found by [`Self::look`].
    async fn look_at_streams(&self, broker: &Broker) {
        loop {
            let read = copies::read_streams(broker);
            if let Ok(Ok(streams)) = tokio::time::timeout(STREAMS_WITHIN, read).await {
                let mixed = Copies::of(&streams).mixture().map(|mixture| {
                    format!(
                        "streams have different numbers of copies ({mixture}): give all the same with \
                         `fiec setup --replicas`"
                    )
                });
                let full = limits::full(streams.values());
                let full_ledger = limits::full(streams.get(subjects::LEDGER_STREAM).into_iter());
                self.note(|found| {
                    found.mixed = mixed;
                    found.full = full;
                    found.full_ledger = full_ledger;
                });
            }
            tokio::time::sleep(STREAMS_EVERY).await;
        }
    }

    /// Changes the findings. Logs the state if it is another one.
    fn note(&self, change: impl FnOnce(&mut Found)) {
        let before = self.check();
        change(&mut self.found());
        match self.check() {
            now if now == before => {}
            Err(trouble) => tracing::error!(trouble, "the broker is not well"),
            Ok(()) => tracing::info!("the broker is well again"),
        }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        // The text is complete even if a holder panicked.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn within(look: impl Future<Output = Result<(), String>>) -> Option<String> {
    match tokio::time::timeout(WITHIN, look).await {
        Ok(Ok(())) => None,
        Ok(Err(trouble)) => Some(trouble),
        Err(_) => Some(format!(
            "the broker does not answer within {} s: see that nats-server runs and its disk is not full",
            WITHIN.as_secs()
        )),
    }
}

/// Whether a missing stream may be created again: its content need not survive.
fn is_replaceable(config: &Config) -> bool {
    config.storage == StorageType::Memory || config.name == subjects::PROBE_STREAM
}

/// Creates missing replaceable streams, and names the other missing ones. Sets `has_all_ledgers` if
/// the first sequence of the ledger stream has never moved.
async fn complete(broker: &Broker, has_all_ledgers: &mut bool) -> Result<(), String> {
    let words = |error: BrokerError| error.to_string();
    let names = broker.js.stream_names().try_collect();
    let names: BTreeSet<String> = names
        .await
        .map_err(BrokerError::operation("list the streams"))
        .map_err(words)?;
    let ledger = match names.contains(subjects::LEDGER_STREAM) {
        false => None,
        true => {
            let ledger = broker.js.get_stream(subjects::LEDGER_STREAM).await;
            let ledger = ledger
                .map_err(BrokerError::operation("look at the ledger stream"))
                .map_err(words)?;
            *has_all_ledgers = ledger.cached_info().state.first_sequence <= 1;
            Some(ledger.cached_info().config.clone())
        }
    };
    let profile = Profile {
        shards: Some(shards_of(&names, ledger.as_ref())),
        store_bytes: ledger.as_ref().and_then(limits::shared_bytes),
        ..Profile::default()
    };
    let mut missing = Vec::new();
    for config in streams(&profile).map_err(words)? {
        if names.contains(&config.name) {
            continue;
        }
        let Some(ledger) = ledger.as_ref().filter(|_| is_replaceable(&config)) else {
            missing.push(config.name);
            continue;
        };
        let name = config.name.clone();
        let config = Config {
            num_replicas: ledger.num_replicas,
            ..config
        };
        broker
            .js
            .create_stream(config)
            .await
            .map_err(BrokerError::operation(format!("make stream {name} again")))
            .map_err(words)?;
        tracing::warn!(stream = name, "the stream was missing and was made again");
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the broker has no {}: restore its store, or run `fiec setup` to create it",
        missing.join(", ")
    ))
}

async fn probe(broker: &Broker, who: &str) -> Result<(), String> {
    let refused = |error: &dyn std::fmt::Display| {
        format!("the broker stores nothing ({error}): free its disk, or raise its storage limit")
    };
    let body = vec![0; PROBE_BYTES];
    let sent = broker.js.publish(subjects::probe(who), body.into()).await;
    let ack = sent.map_err(|error| refused(&error))?;
    ack.await.map_err(|error| refused(&error))?;
    Ok(())
}
