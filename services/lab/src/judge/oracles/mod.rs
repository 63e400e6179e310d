//! The oracles: at the end of every integration test they ask whether every promise still holds for
//! the living system. The checker of histories ([`super::checker`]) asks the same of what the test
//! has left behind.
//!
//! Each oracle is a pure function of an observation, so that `ledger/forged_observations.rs` can
//! show it a forgery. A promise may be open for a moment: an oracle finds a violation only if every
//! observation within its bound shows it.
//!
//! | file | promise |
//! |---|---|
//! | `agreement.rs` | Each policy service believes what the ledgers say. |
//! | `liveness.rs` | A pending execution that a free viable node could take is bound. |
//! | `answers.rs` | A confirmed request is done, and what was said to be over stays over. |
//! | `recovery.rs` | The age of the last commit of a computing execution is bounded. |
//! | `leaks.rs` | No reservation, chunk, consumer or submission is left behind. |
//! | `objects.rs` | Each object is referred to, or not yet due for its removal. |
//! | `outbox.rs` | The stream holds a prefix of the emitted messages, each once. |
//! | `configuration.rs` | Streams and consumers are as they were set up. |
//! | `health.rs` | While a promise is broken, some health is red or some duty overdue. |

pub mod agreement;
pub mod answers;
pub mod configuration;
pub mod health;
pub mod leaks;
pub mod ledgers;
pub mod liveness;
pub mod objects;
pub mod outbox;
pub mod recovery;

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_broker::Broker;
use tokio::time::{Instant, sleep};

use self::answers::Answers;
use crate::judge::checker::Violation;
use crate::judge::journal::Journal;

/// Pause between two observations.
const PAUSE: Duration = Duration::from_millis(250);
/// Longest time until an oracle is content, in multiples of its bound.
const ROUNDS: u32 = 3;

/// Inputs of the oracles beside the broker.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    pub broker: &'a Broker,
    pub journal: &'a Journal,
    /// Policy services that run and must answer.
    pub policies: usize,
    pub answers: &'a Answers,
    /// Bound of the oracles.
    pub patience: Duration,
    /// Most age of a commit by time ([`recovery::bound`]).
    pub recovery: Duration,
    /// Copies of each stream.
    pub copies: usize,
    /// How long workers keep chunks that a newer commit has replaced.
    pub superseded: Duration,
    /// The collection of objects, if there is history.
    pub collection: Option<objects::Collection<'a>>,
}

/// Observes until nothing is wrong. Gives what every observation within the bound has shown.
pub async fn settle(scene: Scene<'_>) -> Vec<Violation> {
    let begun = Instant::now();
    let mut since: BTreeMap<String, Instant> = BTreeMap::new();
    loop {
        let found = observe(&scene).await;
        if found.is_empty() {
            return found;
        }
        let now = Instant::now();
        let present: BTreeMap<String, Violation> =
            found.into_iter().map(|v| (v.to_string(), v)).collect();
        since.retain(|words, _| present.contains_key(words));
        for words in present.keys() {
            since.entry(words.clone()).or_insert(now);
        }
        let lasting = |words: &String| {
            since
                .get(words)
                .is_some_and(|at| now.duration_since(*at) >= scene.patience)
        };
        let over = now.duration_since(begun) >= scene.patience * ROUNDS;
        if over || present.keys().any(lasting) {
            let kept = present.into_iter().filter(|(words, _)| lasting(words));
            return kept.map(|(_, violation)| violation).collect();
        }
        sleep(PAUSE).await;
    }
}

/// One observation of everything.
async fn observe(scene: &Scene<'_>) -> Vec<Violation> {
    let mut found = Vec::new();
    let before = match ledgers::last_of_each(scene.broker).await {
        Ok(before) => before,
        Err(why) => return vec![Violation::unobserved(why)],
    };
    let mut add = |result: Result<Vec<Violation>, String>| match result {
        Ok(violations) => found.extend(violations),
        Err(why) => found.push(Violation::unobserved(why)),
    };
    add(agreement::observe(scene.broker, scene.policies, &before).await);
    if scene.policies > 0 {
        add(liveness::observe(scene.broker, &before).await);
        add(recovery::observe(scene.broker, scene.recovery, |_| true).await);
        add(leaks::observe(scene.broker, &before, scene.superseded).await);
        if let Some(collection) = scene.collection {
            add(objects::observe(scene.broker, collection).await);
        }
    }
    add(outbox::observe(scene.broker, scene.journal).await);
    add(configuration::observe(scene.broker, scene.copies).await);
    add(Ok(answers::judge(&scene.answers.all(), &before)));
    found
}
