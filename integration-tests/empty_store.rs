//! A broker that comes back with an empty store: `fiec setup` makes the streams anew, workers say what
//! they hold, `fiec repair` begins the other ledgers anew from PostgreSQL.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeMap;

use fiec_schemas::ExecutionId;
use serde_json::json;
use support::{Journal, Lab, digest_of, undisturbed_synthetic, until, workers_with_history};

/// Waits until PostgreSQL has a paused execution, its submission and its last σ.
async fn recorded_paused(lab: &Lab, id: ExecutionId) {
    until("PostgreSQL has the paused one and its σ", async || {
        let kept = format!(
            "SELECT count(*) FROM executions e JOIN boundary_state s ON s.execution = e.id \
             WHERE e.id = '{id}' AND e.phase = 'paused' AND s.index = e.boundary_index AND s.state IS NOT NULL \
             AND e.spec IS NOT NULL AND e.program = 'synthetic@1' AND e.client_id IS NOT NULL"
        );
        (lab.count(kept).await == 1).then_some(())
    })
    .await;
}

/// Starts the broker again without its store, and sets it up.
async fn lose_the_store(lab: &mut Lab) {
    lab.servers.nats.kill().await;
    let store = lab.servers.nats.data_dir().join("jetstream");
    std::fs::remove_dir_all(&store).unwrap();
    lab.servers.nats.restart().await.unwrap();
    lab.fiec(&["setup"]).await.expect(0);
}

#[tokio::test]
async fn everything_goes_on_after_the_store_was_lost_from_workers_and_from_postgresql() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = json!({"capsules": 2_000, "work_us": 3_000, "state_bytes": 1_024});
    let body = |id: &str| json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every_ms": 200}});
    let labelled = |id: &str, labels: BTreeMap<String, String>| {
        let mut body = body(id);
        body["labels"] = json!(labels);
        body
    };
    let many = (0..30).map(|i| (format!("l{i}"), "x".repeat(100)));
    let mut all = vec![lab.publish_json(&body("small")).await];
    lab.journal.computing(all[0], 2).await;
    lab.fiec(&["pause", "small"]).await.expect(0);
    // Its submission does not fit its ledger messages, and the broker loses it.
    all.push(lab.publish_json(&labelled("large", many.collect())).await);
    lab.journal.computing(all[1], 2).await;
    lab.fiec(&["pause", "large"]).await.expect(0);
    // PostgreSQL has an earlier σ of it than its last one.
    all.push(lab.publish_json(&body("late")).await);
    let late = all[2];
    let copy =
        format!("CREATE TABLE early AS SELECT * FROM boundary_state WHERE execution = '{late}'");
    until("PostgreSQL has a σ of it", async || {
        let some = format!("SELECT count(*) FROM boundary_state WHERE execution = '{late}'");
        (lab.count(some).await == 1).then_some(())
    })
    .await;
    lab.execute(&copy).await;
    until("it has gone on from there", async || {
        let on = "SELECT count(*) FROM boundaries b JOIN early e USING (execution) WHERE b.index > e.index";
        (lab.count(on).await > 1).then_some(())
    })
    .await;
    lab.fiec(&["pause", "late"]).await.expect(0);
    // PostgreSQL has its submission in another form.
    let nul = [("x".to_owned(), "a\0b".to_owned())].into();
    let changed = lab.publish_json(&labelled("changed", nul)).await;
    lab.journal.computing(changed, 2).await;
    lab.fiec(&["pause", "changed"]).await.expect(0);
    for id in all.iter().chain([&changed]) {
        recorded_paused(&lab, *id).await;
    }
    // As if the recorder had not come to copy the last one.
    lab.execute("DELETE FROM boundary_state s USING early e WHERE s.execution = e.execution")
        .await;
    lab.execute("INSERT INTO boundary_state SELECT * FROM early")
        .await;
    let held = lab.publish_json(&body("held")).await;
    lab.journal.computing(held, 2).await;
    let before = lab
        .count("SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'")
        .await;

    lose_the_store(&mut lab).await;
    until("the worker has said what it holds", async || {
        let status = lab.fiec(&["status", "held"]).await;
        (status.code == 0).then_some(())
    })
    .await;
    let said = lab.fiec(&["repair"]).await.expect(1).stdout;
    assert!(said.contains("began 3 ledgers anew"), "{said}");
    let refused = format!("{changed}: cannot be repaired: PostgreSQL does not have its submission");
    assert!(said.contains(&refused), "{said}");
    let again = lab.fiec(&["repair"]).await.expect(1).stdout;
    assert!(again.contains("began 0 ledgers anew"), "{again}");
    // Another execution in the place of the one that is lost.
    let changed = lab.publish_json(&body("changed")).await;
    for id in ["small", "large", "late"] {
        lab.fiec(&["resume", id]).await.expect(0);
    }

    let journal = Journal::open(&lab.broker);
    let digest = undisturbed_synthetic(&params).await;
    for id in [held, changed] {
        assert_eq!(digest_of(&journal.ended(id, "completed").await), digest);
    }
    for id in &all {
        let ended = journal.ended(*id, "completed").await;
        assert_eq!(digest_of(&ended), digest);
        assert!(ended.state().epoch > 1);
    }
    let lowest = journal.all().iter().map(|line| line.seq).min().unwrap();
    assert!(
        i64::try_from(lowest).unwrap() > before,
        "a sequence was given out twice: {lowest} again, {before} before"
    );
    lab.recorded(5).await;
    let back = format!(
        "SELECT count(*) FROM boundaries WHERE execution = '{late}' AND withdrawn_at IS NOT NULL"
    );
    assert!(lab.count(back).await > 0);
    let twice = "SELECT count(*) - count(DISTINCT (execution, index)) FROM boundaries \
                 WHERE withdrawn_at IS NULL";
    assert_eq!(lab.count(twice).await, 0);
    lab.none_ended().unwrap();
    lab.stop().await;
}
