//! Streams and buckets as data (`broker-config/streams/*.json`, readable by
//! `nats stream add --config`), applied idempotently.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, pull};
use async_nats::jetstream::{kv, object_store, stream};
use fiec_schemas::subjects;

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

/// Settings that differ between installations.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    /// Copies of each stream: 1, or 3 and 5 in a cluster.
    pub replicas: usize,
    /// Shards of nodes; about 500 nodes each.
    pub shards: u16,
    /// First sequence of the ledger stream, for a stream that is created again after a loss.
    pub ledger_first_sequence: Option<u64>,
    /// First sequence of the stream of facts, likewise.
    pub record_first_sequence: Option<u64>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            replicas: 1,
            shards: 1,
            ledger_first_sequence: None,
            record_first_sequence: None,
        }
    }
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
            num_replicas: profile.replicas,
            ..config
        };
        if name == "FIEC_CAPSULE" {
            for shard in 0..profile.shards {
                configs.push(stream::Config {
                    name: subjects::capsule_stream(shard),
                    subjects: vec![subjects::capsule_shard(shard)],
                    ..config.clone()
                });
            }
        } else if name == subjects::LEDGER_STREAM {
            configs.push(stream::Config {
                first_sequence: profile.ledger_first_sequence,
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

/// Creates or updates every stream, bucket and shared consumer.
///
/// # Errors
/// When the broker refuses one.
pub async fn apply(broker: &Broker, profile: &Profile) -> Result<(), BrokerError> {
    // The ledger stream comes last: after a loss of the store, policy services and recorders wait
    // for it, and then need all the others.
    let (ledger, others): (Vec<_>, Vec<_>) = streams(profile)?
        .into_iter()
        .partition(|config| config.name == subjects::LEDGER_STREAM);
    for config in others {
        apply_stream(broker, config).await?;
    }
    for (bucket, description, history) in [
        (
            subjects::NODES_BUCKET,
            "Node descriptors and operators' flags",
            4,
        ),
        (
            subjects::PROGRAMS_BUCKET,
            "Programs that were pushed, by name and version",
            1,
        ),
        (
            subjects::QUOTA_BUCKET,
            "What tenants may use at once, by tenant",
            8,
        ),
    ] {
        broker
            .js
            .create_or_update_key_value(kv::Config {
                bucket: bucket.to_owned(),
                description: description.to_owned(),
                history,
                num_replicas: profile.replicas,
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
        if broker.js.get_object_store(bucket).await.is_err() {
            broker
                .js
                .create_object_store(object_store::Config {
                    bucket: bucket.to_owned(),
                    description: Some(description.to_owned()),
                    num_replicas: profile.replicas,
                    ..Default::default()
                })
                .await
                .map_err(BrokerError::operation(format!(
                    "create object store {bucket}"
                )))?;
        }
        keep_for_ever(broker, &format!("OBJ_{bucket}")).await?;
    }
    broker
        .js
        .create_consumer_on_stream(
            pull::Config {
                durable_name: Some(subjects::SUBMIT_CONSUMER.to_owned()),
                ack_policy: AckPolicy::Explicit,
                // Messages that a policy service fetched before it died come again after this. A
                // second delivery is harmless, since ids derive from the message's place.
                ack_wait: Duration::from_secs(8),
                max_ack_pending: 20_000,
                deliver_policy: DeliverPolicy::All,
                ..Default::default()
            },
            subjects::SUBMIT_STREAM,
        )
        .await
        .map_err(BrokerError::operation("create the submission consumer"))?;
    for shard in 0..profile.shards {
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
    if broker.js.get_stream(&name).await.is_ok() {
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

/// Removes the limit of age from a stream of an earlier version.
async fn keep_for_ever(broker: &Broker, name: &str) -> Result<(), BrokerError> {
    let what = format!("update stream {name}");
    let stream = broker.js.get_stream(name).await;
    let stream = stream.map_err(BrokerError::operation(what.clone()))?;
    let config = &stream.cached_info().config;
    if config.max_age.is_zero() {
        return Ok(());
    }
    let config = stream::Config {
        max_age: Duration::ZERO,
        ..config.clone()
    };
    let updated = broker.js.update_stream(&config).await;
    updated.map(drop).map_err(BrokerError::operation(what))
}

/// Opens the durable consumer of the policy services on `FIEC_SUBMIT`.
///
/// # Errors
/// When it does not exist: [`apply`] creates it.
pub async fn submit_consumer(broker: &Broker) -> Result<Consumer<pull::Config>, BrokerError> {
    broker
        .js
        .get_consumer_from_stream(subjects::SUBMIT_CONSUMER, subjects::SUBMIT_STREAM)
        .await
        .map_err(BrokerError::operation("open the submission consumer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_committed_stream_reads_and_keeps_the_design() {
        let configs = streams(&Profile {
            replicas: 3,
            shards: 2,
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
}
