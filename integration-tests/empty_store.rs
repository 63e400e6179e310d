//! A broker that comes back with an empty store: `fiec setup` makes the streams anew, workers say what
//! they hold, `fiec repair` begins the other ledgers anew from PostgreSQL.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use serde_json::json;
use support::{Journal, Lab, digest_of, undisturbed_synthetic, until, workers_with_history};

#[tokio::test]
async fn everything_goes_on_after_the_store_was_lost_from_workers_and_from_postgresql() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = json!({"capsules": 2_000, "work_us": 3_000, "state_bytes": 1_024});
    let body = |id: &str| json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every_ms": 200}});
    let (held, paused) = (
        lab.publish_json(&body("held")).await,
        lab.publish_json(&body("paused")).await,
    );
    lab.journal.computing(held, 2).await;
    lab.journal.computing(paused, 2).await;
    lab.fiec(&["pause", "paused"]).await.expect(0);
    until("PostgreSQL has the paused one and its σ", async || {
        let kept = format!(
            "SELECT count(*) FROM executions e JOIN boundary_state s ON s.execution = e.id \
             WHERE e.id = '{paused}' AND e.phase = 'paused' AND s.index = e.boundary_index \
             AND s.state IS NOT NULL"
        );
        (lab.count(kept).await == 1).then_some(())
    })
    .await;
    let before = lab
        .count("SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'")
        .await;

    lab.servers.nats.kill().await;
    let store = lab.servers.nats.data_dir().join("jetstream");
    std::fs::remove_dir_all(&store).unwrap();
    lab.servers.nats.restart().await.unwrap();
    lab.fiec(&["setup"]).await.expect(0);
    until("the worker has said what it holds", async || {
        let status = lab.fiec(&["status", "held"]).await;
        (status.code == 0).then_some(())
    })
    .await;
    let said = lab.fiec(&["repair"]).await.expect(0).stdout;
    assert!(said.contains("began 1 ledgers anew"), "{said}");
    let again = lab.fiec(&["repair"]).await.expect(0).stdout;
    assert!(again.contains("began 0 ledgers anew"), "{again}");
    lab.fiec(&["resume", "paused"]).await.expect(0);

    let journal = Journal::open(&lab.broker);
    let digest = undisturbed_synthetic(&params).await;
    for (id, moved) in [(held, false), (paused, true)] {
        let ended = journal.ended(id, "completed").await;
        assert_eq!(digest_of(&ended), digest);
        assert_eq!(ended.state().epoch > 1, moved);
    }
    let lowest = journal.all().iter().map(|line| line.seq).min().unwrap();
    assert!(
        i64::try_from(lowest).unwrap() > before,
        "a sequence was given out twice: {lowest} again, {before} before"
    );
    lab.recorded(2).await;
    let twice = "SELECT count(*) - count(DISTINCT (execution, index)) FROM boundaries";
    assert_eq!(lab.count(twice).await, 0);
    lab.none_ended().unwrap();
    lab.stop().await;
}
