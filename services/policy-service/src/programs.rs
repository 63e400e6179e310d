//! Which programs may be submitted: those that are built in, and those that were pushed. The
//! bucket of programs is followed into a set, and what is not in the set is looked up before it is
//! refused, so that a program counts from the moment of its push.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store};
use fiec_broker::{Broker, BrokerError, registry};
use fiec_schemas::package::{ProgramName, is_built_in};
use futures_util::StreamExt;
use tokio::sync::OnceCell;

/// How long a look-up may take.
const LOOK_UP: Duration = Duration::from_secs(5);

/// The programs that may be submitted; cheap to clone.
#[derive(Clone)]
pub struct Programs {
    broker: Broker,
    bucket: Arc<OnceCell<Store>>,
    /// Keys in the bucket of programs.
    known: Arc<RwLock<HashSet<String>>>,
}

impl Programs {
    /// Knows the built-in ones only, until [`Programs::follow`] runs.
    pub fn new(broker: &Broker) -> Self {
        Self {
            broker: broker.clone(),
            bucket: Arc::default(),
            known: Arc::default(),
        }
    }

    /// True for a program that is built in, or known to be registered.
    pub fn has(&self, program: &str) -> bool {
        if is_built_in(program) {
            return true;
        }
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        !known.is_empty() && known.contains(&program.replacen('@', ".", 1))
    }

    /// Whether a program that is not known is registered after all.
    ///
    /// # Errors
    /// When the broker does not say.
    pub async fn look_up(&self, program: &str) -> Result<bool, BrokerError> {
        if self.has(program) {
            return Ok(true);
        }
        let Ok(name) = program.parse::<ProgramName>() else {
            return Ok(false);
        };
        let look = async {
            let bucket = self
                .bucket
                .get_or_try_init(|| registry::bucket(&self.broker))
                .await?;
            registry::find_in(bucket, &name).await
        };
        let found =
            tokio::time::timeout(LOOK_UP, look)
                .await
                .map_err(BrokerError::operation(format!(
                    "look {program} up within {LOOK_UP:?}"
                )))??;
        if found.is_some() {
            self.change(name.key(), true);
        }
        Ok(found.is_some())
    }

    fn change(&self, key: String, there: bool) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if there {
            known.insert(key);
        } else {
            known.remove(&key);
        }
    }

    /// Keeps the set current until the watch ends.
    ///
    /// # Errors
    /// When the bucket cannot be watched.
    pub async fn follow(&self) -> Result<(), BrokerError> {
        const WHAT: &str = "watch the programs";
        let bucket = registry::bucket(&self.broker).await?;
        // Opened before the list is read, so that nothing falls between the two.
        let mut entries = bucket
            .watch_all()
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let keys: Vec<_> = bucket
            .keys()
            .await
            .map_err(BrokerError::operation(WHAT))?
            .collect()
            .await;
        let mut there = HashSet::new();
        for key in keys {
            there.insert(key.map_err(BrokerError::operation(WHAT))?);
        }
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = there;
        while let Some(entry) = entries.next().await {
            let entry = entry.map_err(BrokerError::operation(WHAT))?;
            tracing::debug!(key = entry.key, operation = ?entry.operation, "programs");
            self.change(entry.key, entry.operation == Operation::Put);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_broker::{ConnectOptions, topology};
    use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
    use fiec_schemas::package::{Manifest, ProgramRecord};
    use fiec_schemas::{Digest, Timestamp, subjects};

    async fn push(broker: &Broker, program: &str) {
        let manifest = br#"{"entry":["x"],"protocol":"frames"}"#;
        let record = ProgramRecord {
            program: program.to_owned(),
            manifest: Manifest::parse(manifest).unwrap(),
            artifact: Digest::of(b""),
            bytes: 0,
            pushed_at: Timestamp::now(),
            pushed_by: "test".to_owned(),
        };
        let name = program.parse().unwrap();
        registry::register(broker, &name, &record).await.unwrap();
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(found.is_ok(), "waited in vain until {what}");
    }

    #[tokio::test]
    async fn the_set_follows_the_bucket_and_a_watch_that_died_is_made_up_for() {
        let dir = tempfile::tempdir().unwrap();
        let binary = locate_nats(&NoProgress).await.unwrap();
        let options = NatsOptions::new(binary, dir.path().join("nats"));
        let server = NatsServer::start(options).await.unwrap();
        let connect = ConnectOptions::new(server.client_url(), "test");
        let broker = Broker::connect(connect).await.unwrap();
        topology::apply(&broker, &topology::Profile::default())
            .await
            .unwrap();
        push(&broker, "early@1").await;
        let programs = Programs::new(&broker);
        assert!(programs.has("cg@1") && !programs.has("early@1"));
        let follow = |programs: Programs| tokio::spawn(async move { programs.follow().await });
        let watch = follow(programs.clone());
        until("what was there is known", || programs.has("early@1")).await;
        push(&broker, "late@1.2").await;
        until("what comes is known", || programs.has("late@1.2")).await;

        watch.abort();
        let _ = watch.await;
        push(&broker, "unseen@1").await;
        let bucket = broker.js.get_key_value(subjects::PROGRAMS_BUCKET).await;
        bucket.unwrap().delete("early.1").await.unwrap();
        assert!(!programs.has("unseen@1"));
        assert!(programs.look_up("unseen@1").await.unwrap());
        assert!(!programs.look_up("nobody@1").await.unwrap());
        let watch = follow(programs.clone());
        until("what is gone is forgotten", || !programs.has("early@1")).await;
        assert!(programs.has("unseen@1") && programs.has("late@1.2"));
        watch.abort();
    }
}
