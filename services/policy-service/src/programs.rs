//! Programs that may be submitted: built-in and pushed ones. The service follows the bucket of
//! programs into a table. A program that the table lacks is looked up before a submission is
//! refused, so a program is usable as soon as it is pushed. The table also knows which programs run
//! in containers, because not every worker can start these.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store};
use fiec_broker::{Broker, BrokerError, registry};
use fiec_schemas::FieldError;
use fiec_schemas::package::{ProgramName, ProgramRecord, is_built_in, unregistered, unusable};
use futures_util::StreamExt;
use tokio::sync::OnceCell;
use tokio::sync::mpsc::Sender;

use crate::events::News;

/// Time limit of a look-up.
const LOOK_UP: Duration = Duration::from_secs(5);

/// The programs that may be submitted. Cheap to clone.
#[derive(Clone)]
pub struct Programs {
    broker: Broker,
    bucket: Arc<OnceCell<Store>>,
    /// Keys in the bucket of programs. True if the program runs in a container.
    known: Arc<RwLock<HashMap<String, bool>>>,
}

impl Programs {
    /// Knows only the built-in programs until [`Programs::follow`] runs.
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
        !known.is_empty() && known.contains_key(&program.replacen('@', ".", 1))
    }

    /// True for a program that is known to run in a container.
    pub fn in_container(&self, program: &str) -> bool {
        if is_built_in(program) {
            return false;
        }
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        !known.is_empty() && known.get(&program.replacen('@', ".", 1)) == Some(&true)
    }

    /// Looks up a program that the table lacks. Returns why it cannot be submitted, or none if it
    /// can.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub async fn look_up(&self, program: &str) -> Result<Option<FieldError>, BrokerError> {
        if self.has(program) {
            return Ok(None);
        }
        let Ok(name) = program.parse::<ProgramName>() else {
            return Ok(Some(unregistered(program)));
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
        let Some(record) = found else {
            return Ok(Some(unregistered(program)));
        };
        if let Err(error) = record.manifest.check() {
            return Ok(Some(unusable(program, &error)));
        }
        self.change(name.key(), Some(record.manifest.image.is_some()));
        Ok(None)
    }

    /// Sets a program and whether it runs in a container. `None` removes it.
    fn change(&self, key: String, there: Option<bool>) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match there {
            Some(container) => known.insert(key, container),
            None => known.remove(&key),
        };
    }

    /// Keeps the table current until the watch ends. Reports programs that run in containers.
    ///
    /// # Errors
    /// If the bucket cannot be watched.
    pub async fn follow(&self, news: &Sender<News>) -> Result<(), BrokerError> {
        const WHAT: &str = "watch the programs";
        let bucket = registry::bucket(&self.broker).await?;
        // The watch begins with the last entry of each key, deletions included.
        let mut entries = bucket
            .watch_with_history(">")
            .await
            .map_err(BrokerError::operation(WHAT))?;
        while let Some(entry) = entries.next().await {
            let entry = entry.map_err(BrokerError::operation(WHAT))?;
            tracing::debug!(key = entry.key, operation = ?entry.operation, "programs");
            if entry.operation != Operation::Put {
                self.change(entry.key, None);
                continue;
            }
            // An unreadable record still counts as registered. Workers report what is wrong with
            // it.
            let record: Option<ProgramRecord> = serde_json::from_slice(&entry.value).ok();
            if record.as_ref().is_some_and(|r| r.manifest.check().is_err()) {
                self.change(entry.key, None);
                continue;
            }
            let contained = record.filter(|r| r.manifest.image.is_some());
            self.change(entry.key, Some(contained.is_some()));
            if let Some(record) = contained
                && news.send(News::Container(record.program)).await.is_err()
            {
                return Ok(());
            }
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
    use fiec_schemas::{Digest, subjects};

    async fn push(broker: &Broker, program: &str) {
        push_as(broker, program, br#"{"entry":["x"],"protocol":"frames"}"#).await;
    }

    async fn push_as(broker: &Broker, program: &str, manifest: &[u8]) {
        let manifest: Manifest = serde_json::from_slice(manifest).unwrap();
        let record = ProgramRecord {
            program: program.to_owned(),
            manifest,
            artifact: Digest::of(b""),
            bytes: 0,
            pushed_at: broker.now(),
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
        let (told, mut news) = tokio::sync::mpsc::channel(8);
        let follow = |programs: Programs| {
            let told = told.clone();
            tokio::spawn(async move { programs.follow(&told).await })
        };
        let watch = follow(programs.clone());
        until("what was there is known", || programs.has("early@1")).await;
        push(&broker, "late@1.2").await;
        until("what comes is known", || programs.has("late@1.2")).await;
        assert!(!programs.in_container("late@1.2") && !programs.in_container("cg@1"));
        let boxed = br#"{"entry":["x"],"protocol":"json_lines","image":"image.tar"}"#;
        push_as(&broker, "boxed@1", boxed).await;
        until("a container is known", || programs.in_container("boxed@1")).await;
        let said = news.recv().await;
        assert!(
            matches!(&said, Some(News::Container(p)) if p == "boxed@1"),
            "{said:?}"
        );

        watch.abort();
        let _ = watch.await;
        push(&broker, "unseen@1").await;
        let bucket = broker.js.get_key_value(subjects::PROGRAMS_BUCKET).await;
        bucket.unwrap().delete("early.1").await.unwrap();
        assert!(!programs.has("unseen@1"));
        let found = programs.look_up("unseen@1").await.unwrap();
        assert_eq!(found, None);
        let found = programs.look_up("nobody@1").await.unwrap().unwrap();
        assert!(found.reason.contains("does not exist"), "{found}");
        let watch = follow(programs.clone());
        until("what is gone is forgotten", || !programs.has("early@1")).await;
        assert!(programs.has("unseen@1") && programs.has("late@1.2"));

        // Pushed by another client, which has not checked its manifest.
        let broken = br#"{"entry":["/bin/sh"],"protocol":"frames"}"#;
        push_as(&broker, "broken@1", broken).await;
        push(&broker, "last@1").await;
        until("what follows it is known", || programs.has("last@1")).await;
        assert!(!programs.has("broken@1"));
        let found = programs.look_up("broken@1").await.unwrap().unwrap();
        assert!(
            found.reason.contains("entry: \"/bin/sh\" must stay inside"),
            "{found}"
        );
        watch.abort();
    }
}
