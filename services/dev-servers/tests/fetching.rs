//! The fetch itself, into an empty cache.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use fiec_dev_servers::{Error, NoProgress, Origin, Progress, Sources, locate_nats_in};

#[derive(Default)]
struct Steps(Mutex<Vec<String>>);

impl Progress for Steps {
    fn step(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
    fn done(&self, _: &str) {}
}

#[tokio::test]
async fn concurrent_callers_fetch_once_and_leave_nothing_half_done() {
    let cache = tempfile::tempdir().unwrap();
    let sources = Sources {
        cache: Some(cache.path().to_owned()),
        ..Sources::fetched_only()
    };
    // A killed fetch leaves this folder.
    std::fs::create_dir(cache.path().join(".fetch-nats-server-2.15.1-dead")).unwrap();
    let steps = Steps::default();
    let (a, b) = tokio::join!(
        locate_nats_in(&sources, &steps),
        locate_nats_in(&sources, &steps)
    );
    let mut origins = [a.unwrap().origin, b.unwrap().origin];
    origins.sort_by_key(|o| *o == Origin::Cache);
    assert_eq!(origins, [Origin::Fetched, Origin::Cache]);
    let steps = steps.0.into_inner().unwrap();
    let fetches = steps.iter().filter(|s| s.starts_with("fetching")).count();
    assert_eq!(fetches, 1, "{steps:?}");
    let mut left: Vec<_> = std::fs::read_dir(cache.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, [".nats-server-2.15.1.lock", "nats-server-2.15.1"]);
}

#[tokio::test]
async fn without_permission_to_fetch_the_error_says_what_to_set() {
    let cache = tempfile::tempdir().unwrap();
    let sources = Sources {
        cache: Some(cache.path().to_owned()),
        fetch: false,
        ..Sources::fetched_only()
    };
    let e = locate_nats_in(&sources, &NoProgress).await.unwrap_err();
    assert!(matches!(e, Error::NotInstalled { .. }), "{e:?}");
    assert!(e.to_string().contains("FIEC_NATS_SERVER"), "{e}");
}
