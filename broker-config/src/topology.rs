//! Streams and buckets as data (`broker-config/streams/*.json`, readable by
//! `nats stream add --config`), applied idempotently.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, pull};
use async_nats::jetstream::{kv, object_store, stream};
use fiec_schemas::subjects;
use futures_util::TryStreamExt;

use crate::copies::{self, Copies};
use crate::nodes::MARKS_KEPT;
use crate::{Broker, BrokerError, capsules};

const STREAMS: [(&str, &str); 10] = [
    ("FIEC_SUBMIT", include_str!("../streams/FIEC_SUBMIT.json")),
    ("FIEC_LEDGER", include_str!("../streams/FIEC_LEDGER.json")),
    ("FIEC_CAPSULE", include_str!("../streams/FIEC_CAPSULE.json")),
    ("FIEC_RECORD", include_str!("../streams/FIEC_RECORD.json")),
    (
        "FIEC_TELEMETRY",
        include_str!("../streams/FIEC_TELEMETRY.json"),
    ),
    ("FIEC_LOG", include_str!("../streams/FIEC_LOG.json")),
    ("FIEC_CHUNK", include_str!("../streams/FIEC_CHUNK.json")),
    ("FIEC_OUTBOX", include_str!("../streams/FIEC_OUTBOX.json")),
    (
        "FIEC_RESERVED",
        include_str!("../streams/FIEC_RESERVED.json"),
    ),
    ("FIEC_PROBE", include_str!("../streams/FIEC_PROBE.json")),
];

/// Metadata of the ledger stream: the number of shards that `fiec setup` made.
const SHARDS: &str = "fiec.shards";
const CAPSULE_STREAMS: &str = "FIEC_CAPSULE_";

/// Settings that differ between installations.
#[derive(Debug, Clone, Copy, Default)]
pub struct Profile {
    /// Copies of each stream: 1, or 3 and 5 in a cluster. None: as many as it has; a new one gets
    /// as many as the others.
    pub replicas: Option<usize>,
    /// `replicas` may be fewer than a stream has.
    pub allow_fewer_replicas: bool,
    /// Shards of nodes; about 500 nodes each. None: as many as there are.
    pub shards: Option<u16>,
    /// First sequence of the ledger stream, for a stream that is created again after a loss.
    pub ledger_first_sequence: Option<u64>,
    /// First sequence of the stream of facts, likewise.
    pub record_first_sequence: Option<u64>,
}

/// The stream configurations of a profile.
///
/// # Errors
/// When a committed configuration cannot be read; a test prevents that.
pub fn streams(profile: &Profile) -> Result<Vec<stream::Config>, BrokerError> {
    let mut configs = Vec::new();
    for (name, text) in STREAMS {
        let config: stream::Config =
            serde_json::from_str(text).map_err(|error| BrokerError::Malformed {
                what: format!("broker-config/streams/{name}.json"),
                reason: error.to_string(),
            })?;
        let config = stream::Config {
            num_replicas: profile.replicas.unwrap_or(1),
            ..config
        };
        let shards = profile.shards.unwrap_or(1);
        if name == "FIEC_CAPSULE" {
            for shard in 0..shards {
                configs.push(stream::Config {
                    name: subjects::capsule_stream(shard),
                    subjects: vec![subjects::capsule_shard(shard)],
                    ..config.clone()
                });
            }
        } else if name == subjects::LEDGER_STREAM {
            configs.push(stream::Config {
                first_sequence: profile.ledger_first_sequence,
                metadata: HashMap::from([(SHARDS.to_owned(), shards.to_string())]),
                ..config
            });
        } else if name == subjects::RECORD_STREAM {
            configs.push(stream::Config {
                first_sequence: profile.record_first_sequence,
                ..config
            });
        } else {
            configs.push(config);
        }
    }
    Ok(configs)
}

/// The number of shards in use: as many as the ledger stream says, or as there are streams of them.
/// A lost stream is therefore missed, whichever it is.
///
/// # Errors
/// When the broker does not answer.
pub async fn shards(broker: &Broker) -> Result<u16, BrokerError> {
    let names = broker.js.stream_names().try_collect();
    let names: BTreeSet<String> = names
        .await
        .map_err(BrokerError::operation("list the streams"))?;
    let ledger = match names.contains(subjects::LEDGER_STREAM) {
        false => None,
        true => {
            let ledger = broker.js.get_stream(subjects::LEDGER_STREAM).await;
            let ledger = ledger.map_err(BrokerError::operation("look at the ledger stream"))?;
            Some(ledger.cached_info().config.clone())
        }
    };
    Ok(shards_of(&names, ledger.as_ref()))
}

/// As [`shards`], from the names of all streams and the ledger stream's configuration.
pub(crate) fn shards_of(names: &BTreeSet<String>, ledger: Option<&stream::Config>) -> u16 {
    let said = ledger.and_then(|config| config.metadata.get(SHARDS)?.parse().ok());
    let shard = |name: &String| name.strip_prefix(CAPSULE_STREAMS)?.parse::<u16>().ok();
    let there = names.iter().filter_map(shard).max();
    let there = there.map(|last| last.saturating_add(1));
    said.max(there).unwrap_or(1).max(1)
}

/// Creates or updates every stream, bucket and shared consumer. Servers of a cluster that have just
/// started are awaited.
///
/// # Errors
/// When the broker refuses one. [`BrokerError::FewerCopies`], before anything is changed, if a
/// stream would lose copies and the profile does not allow it.
pub async fn apply(broker: &Broker, profile: &Profile) -> Result<(), BrokerError> {
    copies::placed(|| apply_once(broker, profile)).await
}

async fn apply_once(broker: &Broker, profile: &Profile) -> Result<(), BrokerError> {
    let copies = Copies::read(broker).await?;
    if let Some(asked) = profile.replicas.filter(|_| !profile.allow_fewer_replicas) {
        copies.none_above(asked)?;
    }
    let wanted = |stream: &str| copies.wanted(stream, profile.replicas);
    let shards = match profile.shards {
        Some(shards) => shards,
        None => shards(broker).await?,
    };
    let profile = &Profile {
        shards: Some(shards),
        ..*profile
    };
    // The ledger stream comes last: after a loss of the store, policy services and recorders wait
    // for it, and then need all the others.
    let (ledger, others): (Vec<_>, Vec<_>) = streams(profile)?
        .into_iter()
        .map(|config| stream::Config {
            num_replicas: wanted(&config.name),
            ..config
        })
        .partition(|config| config.name == subjects::LEDGER_STREAM);
    for config in others {
        apply_stream(broker, config).await?;
    }
    for (bucket, description, history, limit_markers) in [
        (
            subjects::NODES_BUCKET,
            "Node descriptors and operators' flags",
            4,
            Some(MARKS_KEPT),
        ),
        (
            subjects::PROGRAMS_BUCKET,
            "Programs that were pushed, by name and version",
            1,
            None,
        ),
        (
            subjects::QUOTA_BUCKET,
            "What tenants may use at once, by tenant",
            8,
            None,
        ),
    ] {
        broker
            .js
            .create_or_update_key_value(kv::Config {
                bucket: bucket.to_owned(),
                description: description.to_owned(),
                history,
                limit_markers,
                num_replicas: wanted(&format!("KV_{bucket}")),
                ..Default::default()
            })
            .await
            .map_err(BrokerError::operation(format!("create bucket {bucket}")))?;
    }
    // No limit of age: the recorder collects objects without references.
    for (bucket, description) in [
        (
            subjects::STATE_BUCKET,
            "Verified states, whole, by execution and digest",
        ),
        (subjects::DATA_BUCKET, "Inputs and outputs by digest"),
    ] {
        let stream = format!("OBJ_{bucket}");
        let num_replicas = wanted(&stream);
        if copies::configuration(broker, &stream).await?.is_none() {
            broker
                .js
                .create_object_store(object_store::Config {
                    bucket: bucket.to_owned(),
                    description: Some(description.to_owned()),
                    num_replicas,
                    ..Default::default()
                })
                .await
                .map_err(BrokerError::operation(format!(
                    "create object store {bucket}"
                )))?;
        }
        keep_for_ever(broker, &stream, num_replicas).await?;
    }
    make_submit_consumer(broker).await?;
    for shard in 0..shards {
        capsules::limit_consumers(broker, shard).await?;
    }
    for config in ledger {
        apply_stream(broker, config).await?;
    }
    Ok(())
}

async fn apply_stream(broker: &Broker, config: stream::Config) -> Result<(), BrokerError> {
    let name = config.name.clone();
    // The first sequence is set at creation and cannot be changed.
    if copies::configuration(broker, &name).await?.is_some() {
        let config = stream::Config {
            first_sequence: None,
            ..config
        };
        let updated = broker.js.update_stream(&config).await;
        updated
            .map(drop)
            .map_err(BrokerError::operation(format!("update stream {name}")))
    } else {
        let created = broker.js.create_stream(config).await;
        created
            .map(drop)
            .map_err(BrokerError::operation(format!("create stream {name}")))
    }
}

/// Sets the copies of an object store's stream. Removes the limit of age of an earlier version.
async fn keep_for_ever(
    broker: &Broker,
    name: &str,
    num_replicas: usize,
) -> Result<(), BrokerError> {
    let what = format!("update stream {name}");
    let found = copies::configuration(broker, name).await?;
    let config = found.ok_or_else(|| BrokerError::Missing {
        what: format!("stream {name}"),
        hint: String::new(),
    })?;
    if config.max_age.is_zero() && config.num_replicas == num_replicas {
        return Ok(());
    }
    let config = stream::Config {
        max_age: Duration::ZERO,
        num_replicas,
        ..config
    };
    let updated = broker.js.update_stream(&config).await;
    updated.map(drop).map_err(BrokerError::operation(what))
}

async fn make_submit_consumer(broker: &Broker) -> Result<Consumer<pull::Config>, BrokerError> {
    let config = pull::Config {
        durable_name: Some(subjects::SUBMIT_CONSUMER.to_owned()),
        ack_policy: AckPolicy::Explicit,
        // Messages that a policy service fetched before it died come again after this. A second
        // delivery is harmless, since ids derive from the message's place.
        ack_wait: Duration::from_secs(8),
        max_ack_pending: 20_000,
        deliver_policy: DeliverPolicy::All,
        ..Default::default()
    };
    broker
        .js
        .create_consumer_on_stream(config, subjects::SUBMIT_STREAM)
        .await
        .map_err(BrokerError::operation("create the submission consumer"))
}

/// Opens the durable consumer of the policy services on `FIEC_SUBMIT`. Creates it if somebody
/// deleted it, so that submissions do not wait for a person.
///
/// # Errors
/// When the broker refuses both.
pub async fn submit_consumer(broker: &Broker) -> Result<Consumer<pull::Config>, BrokerError> {
    let (consumer, stream) = (subjects::SUBMIT_CONSUMER, subjects::SUBMIT_STREAM);
    let opened = broker.js.get_consumer_from_stream(consumer, stream).await;
    match opened {
        Ok(consumer) => Ok(consumer),
        Err(error) => {
            let made = make_submit_consumer(broker).await?;
            tracing::warn!(%error, "the submission consumer was missing and was made again");
            Ok(made)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_committed_stream_reads_and_keeps_the_design() {
        let configs = streams(&Profile {
            replicas: Some(3),
            shards: Some(2),
            ..Profile::default()
        })
        .unwrap();
        assert_eq!(configs.len(), 11);
        assert!(configs.iter().all(|c| c.num_replicas == 3));
        let ledger = configs
            .iter()
            .find(|c| c.name == subjects::LEDGER_STREAM)
            .unwrap();
        assert_eq!(ledger.max_messages_per_subject, 64);
        let chunks = configs.iter().find(|c| c.name == subjects::CHUNK_STREAM);
        let age = chunks.map(|c| c.max_age);
        assert_eq!(age, Some(Duration::ZERO), "a pause may last for any time");
        assert!(ledger.allow_direct && ledger.republish.is_none() && !ledger.allow_rollup);
        assert!(configs.iter().any(|c| c.subjects == ["fiec.capsule.1.*"]));
    }

    #[test]
    fn a_lost_last_shard_is_known_from_the_ledger_stream() {
        let names: BTreeSet<String> = ["FIEC_LEDGER", "FIEC_CAPSULE_0"].map(str::to_owned).into();
        let profile = Profile {
            shards: Some(3),
            ..Profile::default()
        };
        let configs = streams(&profile).unwrap();
        let ledger = configs.iter().find(|c| c.name == subjects::LEDGER_STREAM);
        assert_eq!(shards_of(&names, ledger), 3);
        assert_eq!(shards_of(&names, None), 1);
        // A store of an earlier version does not say it.
        let names: BTreeSet<String> = ["FIEC_CAPSULE_1"].map(str::to_owned).into();
        assert_eq!(shards_of(&names, None), 2);
        assert_eq!(shards_of(&BTreeSet::new(), None), 1);
    }
}
