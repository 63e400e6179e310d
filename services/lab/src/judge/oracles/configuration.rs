//! Streams and shared consumers are as they were set up.

use async_nats::jetstream::stream::Config;
use fiec_broker::topology::{Profile, streams, submit_consumer};
use fiec_broker::{Broker, limits};
use fiec_schemas::subjects;

use crate::judge::checker::{Rule, Violation};

/// What the broker has: each stream that must be there, or nothing in its place.
pub type Present = Vec<(Config, Option<Config>)>;

/// Reads the configurations of a stage, which has one shard.
pub async fn observe(broker: &Broker, copies: usize) -> Result<Vec<Violation>, String> {
    let mut present = Present::new();
    let ledger = broker.js.get_stream(subjects::LEDGER_STREAM).await.ok();
    let ledger = ledger.map(|ledger| ledger.cached_info().config.clone());
    let profile = Profile {
        replicas: Some(copies),
        store_bytes: ledger.as_ref().and_then(limits::shared_bytes),
        ..Profile::default()
    };
    for wanted in streams(&profile).map_err(|e| e.to_string())? {
        let has = broker.js.get_stream(&wanted.name).await.ok();
        present.push((
            wanted,
            has.map(|stream| stream.cached_info().config.clone()),
        ));
    }
    let mut found = judge(&present);
    if let Err(error) = submit_consumer(broker).await {
        let what = format!("{} has no consumer: {error}", subjects::SUBMIT_STREAM);
        found.push(Violation::new(Rule::Configuration, "", what));
    }
    Ok(found)
}

/// Compares what was set up with what is there.
pub fn judge(present: &Present) -> Vec<Violation> {
    let mut found = Vec::new();
    for (wanted, has) in present {
        let mut say = |what: String| {
            let what = format!("{} {what}", wanted.name);
            found.push(Violation::new(Rule::Configuration, "", what));
        };
        let Some(has) = has else {
            say("is not there".to_owned());
            continue;
        };
        let pairs = [
            (
                "replicas",
                has.num_replicas.to_string(),
                wanted.num_replicas.to_string(),
            ),
            (
                "age",
                format!("{:?}", has.max_age),
                format!("{:?}", wanted.max_age),
            ),
            (
                "storage",
                format!("{:?}", has.storage),
                format!("{:?}", wanted.storage),
            ),
            (
                "retention",
                format!("{:?}", has.retention),
                format!("{:?}", wanted.retention),
            ),
            (
                "discard",
                format!("{:?}", has.discard),
                format!("{:?}", wanted.discard),
            ),
            (
                "messages per subject",
                limit(has.max_messages_per_subject),
                limit(wanted.max_messages_per_subject),
            ),
            (
                "messages",
                limit(has.max_messages),
                limit(wanted.max_messages),
            ),
            ("bytes", limit(has.max_bytes), limit(wanted.max_bytes)),
        ];
        for (name, has, wanted) in pairs {
            if has != wanted {
                say(format!("has {name} {has}, and was set up with {wanted}"));
            }
        }
    }
    found
}

/// Servers say -1 where a file says 0: no limit.
fn limit(number: i64) -> String {
    if number <= 0 {
        "none".to_owned()
    } else {
        number.to_string()
    }
}
