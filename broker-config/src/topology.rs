//! Streams and buckets as data (`broker-config/streams/*.json`, readable by
//! `nats stream add --config`), applied idempotently.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, pull};
use async_nats::jetstream::context::{CreateStreamError, CreateStreamErrorKind};
use async_nats::jetstream::stream;
use fiec_schemas::subjects;
use futures_util::TryStreamExt;
use serde_json::{Map, Value, json};

use crate::copies::{self, Copies};
use crate::nodes::MARKS_KEPT;
use crate::{Broker, BrokerError, capsules, limits};

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
/// Pause before a stream is made again.
const AGAIN: Duration = Duration::from_millis(300);

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
    /// Bytes that streams and buckets share: see [`limits`]. None: as many as before; at first half of
    /// what the server accepts.
    pub store_bytes: Option<u64>,
    /// First sequence of the ledger stream, for a stream that is created again after a loss.
    pub ledger_first_sequence: Option<u64>,
    /// First sequence of the stream of facts, likewise.
    pub record_first_sequence: Option<u64>,
}

/// What [`apply`] set.
#[derive(Debug, Clone, Default)]
pub struct Applied {
    /// Bytes that streams and buckets share.
    pub store_bytes: u64,
    /// Streams that hold more than their share, in sentences.
    pub notes: Vec<String>,
}

/// The stream configurations of a profile. Without its `store_bytes` they have no shares.
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
        let config = limited(config, profile);
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
                metadata: metadata(shards, profile.store_bytes),
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

/// Gives a stream its share of the store.
fn limited(mut config: stream::Config, profile: &Profile) -> stream::Config {
    if let Some(store) = profile.store_bytes {
        let shards = profile.shards.unwrap_or(1);
        config.max_bytes = limits::limit(&config.name, config.max_bytes, store, shards);
    }
    config
}

/// Metadata of the ledger stream.
fn metadata(shards: u16, store_bytes: Option<u64>) -> HashMap<String, String> {
    let bytes = store_bytes.map(|bytes| (limits::STORE_BYTES.to_owned(), bytes.to_string()));
    let shards = (SHARDS.to_owned(), shards.to_string());
    bytes.into_iter().chain([shards]).collect()
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
pub async fn apply(broker: &Broker, profile: &Profile) -> Result<Applied, BrokerError> {
    copies::placed(|| apply_once(broker, profile)).await
}

async fn apply_once(broker: &Broker, profile: &Profile) -> Result<Applied, BrokerError> {
    let present = copies::read_streams(broker).await?;
    let copies = Copies::of(&present);
    if let Some(asked) = profile.replicas.filter(|_| !profile.allow_fewer_replicas) {
        copies.none_above(asked)?;
    }
    let wanted = |stream: &str| copies.wanted(stream, profile.replicas);
    let shards = match profile.shards {
        Some(shards) => shards,
        None => shards(broker).await?,
    };
    let replicas = wanted(subjects::LEDGER_STREAM);
    let asked = profile.store_bytes;
    let store_bytes = limits::bytes_to_share(broker, asked, &present, replicas).await?;
    let profile = &Profile {
        shards: Some(shards),
        store_bytes: Some(store_bytes),
        ..*profile
    };
    let mut notes = Vec::new();
    let configs = streams(profile)?.into_iter().chain(buckets(profile));
    let configs = configs.map(|config| {
        let mut config = stream::Config {
            num_replicas: wanted(&config.name),
            ..config
        };
        let has = present.get(&config.name);
        notes.extend(limits::hold_contents(&mut config, has));
        config
    });
    // The ledger stream comes last: after a loss of the store, policy services and recorders wait
    // for it, and then need all the others.
    let (ledger, others): (Vec<_>, Vec<_>) =
        configs.partition(|config| config.name == subjects::LEDGER_STREAM);
    for config in others {
        apply_stream(broker, config, &present).await?;
    }
    make_submit_consumer(broker).await?;
    for shard in 0..shards {
        capsules::limit_consumers(broker, shard).await?;
    }
    for config in ledger {
        apply_stream(broker, config, &present).await?;
    }
    Ok(Applied { store_bytes, notes })
}

/// The streams of key-value buckets and object stores, as the client library makes them.
fn buckets(profile: &Profile) -> Vec<stream::Config> {
    let common = stream::Config {
        discard: stream::DiscardPolicy::New,
        allow_rollup: true,
        allow_direct: true,
        ..Default::default()
    };
    let key_value =
        |bucket: &str, description: &str, history, marks: Option<Duration>| stream::Config {
            name: format!("KV_{bucket}"),
            description: Some(description.to_owned()),
            subjects: vec![format!("$KV.{bucket}.>")],
            max_messages_per_subject: history,
            deny_delete: true,
            allow_message_ttl: marks.is_some(),
            subject_delete_marker_ttl: marks,
            ..common.clone()
        };
    // No limit of age: the recorder collects objects without references.
    let objects = |bucket: &str, description: &str| stream::Config {
        name: format!("OBJ_{bucket}"),
        description: Some(description.to_owned()),
        subjects: vec![format!("$O.{bucket}.C.>"), format!("$O.{bucket}.M.>")],
        ..common.clone()
    };
    let nodes = "Node descriptors and operators' flags";
    let programs = "Programs that were pushed, by name and version";
    let quotas = "What tenants may use at once, by tenant";
    let states = "Verified states, whole, by execution and digest";
    let made = [
        key_value(subjects::NODES_BUCKET, nodes, 4, Some(MARKS_KEPT)),
        key_value(subjects::PROGRAMS_BUCKET, programs, 1, None),
        key_value(subjects::QUOTA_BUCKET, quotas, 8, None),
        objects(subjects::STATE_BUCKET, states),
        objects(subjects::DATA_BUCKET, "Inputs and outputs by digest"),
    ];
    let limited = made.into_iter().map(|config| limited(config, profile));
    limited.collect()
}

/// Makes a stream, or updates one that differs. A server whose store has become smaller than the
/// limits refuses each update, and goes on with the streams as they are.
async fn apply_stream(
    broker: &Broker,
    config: stream::Config,
    present: &BTreeMap<String, stream::Info>,
) -> Result<(), BrokerError> {
    let name = config.name.clone();
    let limit = config.max_bytes;
    let explain = |error| match limits::refused_with(&error, &limits::ROOM_CODES) {
        true => BrokerError::NoRoom {
            stream: name.clone(),
            limit: limits::words(limit),
        },
        false => error,
    };
    let Some(has) = present.get(&name).map(|info| &info.config) else {
        return create(broker, config)
            .await
            .map_err(BrokerError::operation(format!("create stream {name}")))
            .map_err(explain);
    };
    // The first sequence is set at creation and cannot be changed. The server chooses a window.
    let config = stream::Config {
        first_sequence: has.first_sequence,
        duplicate_window: match config.duplicate_window {
            Duration::ZERO => has.duplicate_window,
            said => said,
        },
        ..config
    };
    if settings(&config)? == settings(has)? {
        return Ok(());
    }
    let updated = broker.js.update_stream(&config).await;
    updated
        .map(drop)
        .map_err(BrokerError::operation(format!("update stream {name}")))
        .map_err(explain)
}

/// Makes a stream. Servers that have just started may answer late, or not make its folder at once:
/// making it again is the same request.
async fn create(broker: &Broker, config: stream::Config) -> Result<(), CreateStreamError> {
    let mut attempts = 3;
    loop {
        let made = broker.js.create_stream(config.clone()).await;
        attempts -= 1;
        match made {
            Err(error) if attempts > 0 && may_pass(&error) => {
                tracing::warn!(stream = config.name, %error, "a stream was not created; trying again");
                tokio::time::sleep(AGAIN).await;
            }
            made => return made.map(drop),
        }
    }
}

/// True for an error that may pass: no answer, or a server that could not begin to store.
fn may_pass(error: &CreateStreamError) -> bool {
    match error.kind() {
        CreateStreamErrorKind::TimedOut => true,
        CreateStreamErrorKind::JetStream(error) => error.error_code() == ErrorCode::STREAM_CREATE,
        _ => false,
    }
}

/// The settings of a stream without those that are as if they were not said, and without the server's
/// own metadata.
fn settings(config: &stream::Config) -> Result<Map<String, Value>, BrokerError> {
    let mut config = config.clone();
    config
        .metadata
        .retain(|name, _| !name.starts_with("_nats."));
    let read = serde_json::to_value(&config).map_err(|error| BrokerError::Malformed {
        what: format!("the configuration of {}", config.name),
        reason: error.to_string(),
    })?;
    let all = read.as_object().cloned().unwrap_or_default();
    let unsaid = [
        json!(null),
        json!(false),
        json!(0),
        json!(-1),
        json!({}),
        json!("none"),
    ];
    let said = all.into_iter().filter(|(_, value)| !unsaid.contains(value));
    Ok(said.collect())
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
