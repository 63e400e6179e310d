//! Limits of bytes. Each stream and bucket on the disk gets a share of a number of bytes, so that one
//! that is full leaves the others their room. The server reserves each limit in its store, and
//! refuses streams whose limits are more together than it has.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{CreateStreamError, CreateStreamErrorKind};
use async_nats::jetstream::stream::{Config, DiscardPolicy, Info, StorageType};
use fiec_schemas::subjects;

use crate::{Broker, BrokerError};

/// Shares in thousandths. Together they are the whole. The streams in memory have fixed limits.
const SHARES: [(&str, u64); 14] = [
    ("FIEC_LEDGER", 260),
    ("FIEC_CHUNK", 200),
    ("OBJ_FIEC_DATA", 200),
    ("OBJ_FIEC_STATE", 100),
    ("FIEC_SUBMIT", 50),
    ("FIEC_OUTBOX", 50),
    ("FIEC_LOG", 50),
    (CAPSULES, 30),
    ("FIEC_RECORD", 25),
    ("KV_FIEC_NODES", 10),
    ("KV_FIEC_PROGRAMS", 10),
    ("KV_FIEC_QUOTA", 5),
    ("FIEC_RESERVED", 5),
    ("FIEC_PROBE", 5),
];

/// Streams of all shards of nodes. They divide their share.
const CAPSULES: &str = "FIEC_CAPSULE_";

/// Metadata of the ledger stream: the number of bytes that the shares are of.
pub(crate) const STORE_BYTES: &str = "fiec.store_bytes";

/// Least number of bytes to share: the smallest streams still hold some messages.
const LEAST: u64 = 4 << 20;
/// First attempt to find the room of a store, in bytes.
const MOST: u64 = 64 << 40;
/// The stream that finds the room of a store. It exists for a moment.
const ROOM_STREAM: &str = "FIEC_ROOM";
/// Attempts to make it while another setup has one, and the pause after each.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);
/// A stream counts as full from this part of its limit, in percent: a large message may not fit any
/// more, and the rest is left to what runs.
const FULL_PERCENT: u64 = 90;

/// Returns the limit of a stream in bytes, if `store` bytes are shared. `declared` is the limit of
/// its configuration: it gets no more than that, and a stream without a share gets that.
pub(crate) fn limit(stream: &str, declared: i64, store: u64, shards: u16) -> i64 {
    let name = match stream.starts_with(CAPSULES) {
        true => CAPSULES,
        false => stream,
    };
    let Some((_, thousandths)) = SHARES.iter().find(|(of, _)| *of == name) else {
        return declared;
    };
    let among = match name {
        CAPSULES => u64::from(shards.max(1)),
        _ => 1,
    };
    let share = store / 1_000 * thousandths / among;
    let share = i64::try_from(share).unwrap_or(i64::MAX);
    match declared {
        ..=0 => share,
        most => share.min(most),
    }
}

/// The number of bytes that are shared, from the ledger stream's configuration. None if an earlier
/// version made it.
pub fn shared_bytes(ledger: &Config) -> Option<u64> {
    ledger.metadata.get(STORE_BYTES)?.parse().ok()
}

/// Decides how many bytes are shared: `asked`, else as many as before, else half of what the server
/// accepts. Its default limit is a part of the disk's free space at its start. So a store that is full
/// to half of it still fits after a restart.
///
/// # Errors
/// When it is too little, or the broker does not answer.
pub(crate) async fn bytes_to_share(
    broker: &Broker,
    asked: Option<u64>,
    streams: &BTreeMap<String, Info>,
    replicas: usize,
) -> Result<u64, BrokerError> {
    let ledger = streams.get(subjects::LEDGER_STREAM);
    let before = ledger.and_then(|ledger| shared_bytes(&ledger.config));
    let bytes = match asked.or(before) {
        Some(bytes) => bytes,
        None => {
            let configs = streams.values().map(|info| &info.config);
            let on_disk = configs.filter(|config| config.storage == StorageType::File);
            let reserved: i64 = on_disk.map(|config| config.max_bytes.max(0)).sum();
            let room = room(broker, replicas).await?;
            (room + u64::try_from(reserved).unwrap_or(0)) / 2
        }
    };
    match bytes {
        LEAST.. => Ok(bytes),
        _ => Err(BrokerError::SmallStore {
            bytes,
            least: LEAST,
        }),
    }
}

/// The bytes that a new stream may reserve, to a quarter. No client may ask the server for its limit,
/// so streams are tried.
async fn room(broker: &Broker, replicas: usize) -> Result<u64, BrokerError> {
    // A setup that was killed may have left it.
    let _ = broker.js.delete_stream(ROOM_STREAM).await;
    // A cluster refuses a large stream with the code of missing servers. So servers are known to be
    // there first.
    if !has_room(broker, 1, replicas).await? {
        return Ok(0);
    }
    let mut bytes = MOST;
    let mut tries = 0;
    while bytes > LEAST {
        let refused = match has_room(broker, bytes, replicas).await {
            Ok(has) => !has,
            Err(error) if refused_with(&error, &[ErrorCode::CLUSTER_NO_PEERS]) => {
                // Or a server was away for a moment: then it refuses one byte, too.
                match has_room(broker, 1, replicas).await {
                    Ok(_) => true,
                    Err(_) if tries < TRIES => {
                        tries += 1;
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        match refused {
            true => bytes = bytes / 4 * 3,
            false => return Ok(bytes),
        }
    }
    Ok(bytes)
}

async fn has_room(broker: &Broker, bytes: u64, replicas: usize) -> Result<bool, BrokerError> {
    let config = Config {
        name: ROOM_STREAM.to_owned(),
        subjects: vec!["fiec.room".to_owned()],
        max_bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        storage: StorageType::File,
        num_replicas: replicas,
        ..Config::default()
    };
    let mut tries = 0;
    loop {
        let made = broker.js.create_stream(&config).await;
        let error = match made.map_err(BrokerError::operation("look for the room of the store")) {
            Ok(_) => {
                // Another setup may have removed it, or the next one does.
                let _ = broker.js.delete_stream(ROOM_STREAM).await;
                return Ok(true);
            }
            Err(error) => error,
        };
        if refused_with(&error, &ROOM_CODES) {
            return Ok(false);
        }
        // Another setup looks at the same time.
        tries += 1;
        if tries > TRIES || !refused_with(&error, &[ErrorCode::STREAM_NAME_EXIST]) {
            return Err(error);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Codes of a server or account that cannot reserve the limit of a stream.
pub(crate) const ROOM_CODES: [ErrorCode; 2] = [
    ErrorCode::STORAGE_RESOURCES_EXCEEDED,
    ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED,
];

pub(crate) fn refused_with(error: &BrokerError, codes: &[ErrorCode]) -> bool {
    let first: &(dyn Error + 'static) = error;
    let chain = std::iter::successors(Some(first), |error| (*error).source());
    let mut kinds = chain.filter_map(|e| Some(e.downcast_ref::<CreateStreamError>()?.kind()));
    kinds.any(|kind| match kind {
        CreateStreamErrorKind::JetStream(why) => codes.contains(&why.error_code()),
        _ => false,
    })
}

/// Raises a stream's limit to what it holds, so that nothing is lost. Says so.
pub(crate) fn hold_contents(config: &mut Config, info: Option<&Info>) -> Option<String> {
    let held = i64::try_from(info?.state.bytes).unwrap_or(i64::MAX);
    if config.max_bytes <= 0 || held <= config.max_bytes {
        return None;
    }
    let share = std::mem::replace(
        &mut config.max_bytes,
        match config.discard {
            DiscardPolicy::Old => held,
            // Otherwise it would be full at once.
            DiscardPolicy::New => held.saturating_add(held / 4),
        },
    );
    Some(format!(
        "{} holds {}, more than its share of {}: its limit is {}",
        config.name,
        words(held),
        words(share),
        words(config.max_bytes)
    ))
}

/// Names the streams that are full and refuse new messages, with the remedy.
pub(crate) fn full<'a>(streams: impl Iterator<Item = &'a Info>) -> Option<String> {
    let full = streams.filter(|info| {
        let limit = u64::try_from(info.config.max_bytes).unwrap_or(0);
        limit > 0
            && info.config.discard == DiscardPolicy::New
            && info.state.bytes.saturating_mul(100) >= limit.saturating_mul(FULL_PERCENT)
    });
    let full: Vec<String> = full
        .map(|info| {
            let (name, limit) = (&info.config.name, words(info.config.max_bytes));
            let held = words(i64::try_from(info.state.bytes).unwrap_or(i64::MAX));
            format!("{name} ({held} of {limit})")
        })
        .collect();
    (!full.is_empty()).then(|| {
        format!(
            "streams are full: {}; give them more with `fiec setup --store-bytes`",
            full.join(", ")
        )
    })
}

/// A number of bytes, for people.
pub fn words(bytes: i64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        0x10_0000.. => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.1} KiB", bytes as f64 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_are_the_whole_and_no_stream_gets_more_than_it_declares() {
        assert_eq!(SHARES.iter().map(|(_, share)| share).sum::<u64>(), 1_000);
        assert_eq!(limit("FIEC_SUBMIT", -1, 1_000_000, 1), 50_000);
        assert_eq!(limit("FIEC_LOG", 9_000, 1_000_000, 1), 9_000);
        assert_eq!(limit("FIEC_CAPSULE_1", -1, 1_000_000, 3), 10_000);
        assert_eq!(limit("FIEC_TELEMETRY", 7, 1_000_000, 1), 7);
    }
}
