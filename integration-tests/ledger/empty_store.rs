//! A broker that comes back with an empty store: `fiec setup` makes the streams anew, workers say what
//! they hold, `fiec repair` begins the other ledgers anew from PostgreSQL.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::stage;
use crate::stage::{
    Exempt, Journal, Lab, args, digest_of, undisturbed_synthetic, until, workers_with_history,
};
use bytes::Bytes;
use fiec_broker::{Draft, Ledger, Tip};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Digest, Event, ExecutionId, NodeId, Phase, RequestKind};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Each test of a product computes on all processors.
static ONE: Mutex<()> = Mutex::const_new(());

/// The product's undisturbed digest.
static REFERENCE: LazyLock<String> = LazyLock::new(|| {
    let outcome = fiec_kit::run_local("gemm@1", &product()).unwrap();
    outcome.result["digest"].as_str().unwrap().to_owned()
});

/// Long enough to be split, and to be paused after that: some ten seconds for one processor.
fn product() -> Value {
    let random = |seed: u64| json!({"random": {"n": 6_144, "seed": seed}});
    json!({"a": random(1), "b": random(2), "tile": 512, "threads": 1})
}

/// Waits until PostgreSQL has a paused execution, its submission and its last σ.
async fn recorded_paused(lab: &Lab, id: ExecutionId) {
    until("PostgreSQL has the paused one and its σ", async || {
        let kept = format!(
            "SELECT count(*) FROM executions e JOIN boundary_state s ON s.execution = e.id \
             WHERE e.id = '{id}' AND e.phase = 'paused' AND s.index = e.boundary_index AND s.state IS NOT NULL \
             AND e.spec IS NOT NULL AND e.program IS NOT NULL"
        );
        (lab.count(kept).await == 1).then_some(())
    })
    .await;
}

/// Replaces all workers: those that had yielded an execution would say its last message again.
async fn replace_workers(lab: &mut Lab) {
    for number in 1..=lab.workers.len() {
        let node = NodeId::new(format!("n{number}")).unwrap();
        let instance = async |lab: &Lab| {
            let status = lab.status_of(&node).await.ok()?;
            Some(status.descriptor.instance)
        };
        let before = instance(lab).await;
        lab.workers[number - 1].kill();
        lab.restart_worker(number).unwrap();
        until("the new worker is there", async || {
            let now = instance(lab).await;
            (now.is_some() && now != before).then_some(())
        })
        .await;
    }
}

/// Starts the broker again without its store, and sets it up.
async fn lose_the_store(lab: &mut Lab) {
    lab.exempt(Exempt::LostMessages);
    lab.servers.nats.kill().await;
    let store = lab.servers.nats.data_dir().join("jetstream");
    std::fs::remove_dir_all(&store).unwrap();
    lab.servers.nats.restart().await.unwrap();
    lab.fiec(&["setup"]).await.expect(0);
}

#[tokio::test]
async fn everything_goes_on_after_the_store_was_lost_from_workers_and_from_postgresql() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = json!({"capsules": 2_000, "rest_us": 3_000, "state_bytes": 1_024});
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
    replace_workers(&mut lab).await;
    let held = lab.publish_json(&body("held")).await;
    // Two seconds: its worker reads what stands before the binding once it is a second old.
    lab.journal.computing(held, 10).await;
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

/// The part that an execution has split off.
async fn part_of(journal: &Journal, id: ExecutionId) -> ExecutionId {
    journal
        .find(id, "it is split", |line| {
            let mut parts = line.state().parts().iter();
            parts.next().map(|part| part.id)
        })
        .await
}

/// Pauses an execution. A request may come between two of its phases: then it is made again.
async fn pause(lab: &Lab, id: ExecutionId) {
    until("it is paused", async || {
        lab.fiec(&["pause", &id.to_string()]).await;
        let ledger = lab.journal.of(id);
        let is_paused = ledger.last().is_some_and(|line| line.phase() == "paused");
        is_paused.then_some(())
    })
    .await;
}

/// When a whole loses its ledger.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// It has tiles left.
    Computing,
    /// It has done what it kept, and waits for its part.
    AtItsEnd,
    /// The same as the first, but PostgreSQL has a σ from before its split alone.
    Behind,
}

/// Loses the store while a whole and its part are paused, begins the whole anew and has it complete.
/// Gives the whole, the part that it had, and the words of `fiec repair`.
async fn a_whole_goes_on(when: When) -> (Lab, ExecutionId, ExecutionId, String) {
    let _alone = ONE.lock().await;
    // On a busy machine other signals would keep a node from being a place for one more.
    let mut worker_args = args(&["--slots", "1"]);
    for signal in ["memory_stall", "latency", "power", "thermal"] {
        worker_args.extend(["--threshold".to_owned(), format!("{signal}=1:0.99:100")]);
    }
    let mut lab = Lab::start(ClusterOptions {
        worker_args,
        ..workers_with_history(2)
    })
    .await;
    let params = product();
    let whole = lab
        .publish_json(
            &json!({"id": "whole", "program": "gemm@1", "params": params,
            "spread": {"up_to": 2}, "commit": {"every_ms": 200}}),
        )
        .await;
    let part = part_of(&lab.journal, whole).await;
    lab.journal.computing(part, 1).await;
    // The part first: it must not end before its holder is paused.
    pause(&lab, part).await;
    if when == When::AtItsEnd {
        let waits = |line: &stage::Line| {
            let spread = line.state().spread.as_ref();
            spread.filter(|spread| spread.waits).map(drop)
        };
        let what = "it waits for its part";
        lab.journal.find(whole, what, waits).await;
    }
    pause(&lab, whole).await;
    for id in [whole, part] {
        recorded_paused(&lab, id).await;
    }
    if when == When::Behind {
        let whole_range = |line: &stage::Line| {
            let place = line.state().boundary.clone()?;
            line.state().parts().is_empty().then_some((line.seq, place))
        };
        let early = lab.journal.find(whole, "its first σ", whole_range);
        let (seq, place) = early.await;
        let body = Ledger::new(&lab.broker)
            .by_sequence(seq)
            .await
            .unwrap()
            .body;
        assert_eq!(Digest::of(&body), place.digest);
        let hex: String = body.iter().map(|byte| format!("{byte:02x}")).collect();
        lab.execute(&format!(
            "UPDATE boundary_state SET index = {}, digest = decode('{}', 'hex'), bytes = {}, \
             state = decode('{hex}', 'hex') WHERE execution = '{whole}'",
            place.index, place.digest, place.bytes
        ))
        .await;
    }

    replace_workers(&mut lab).await;
    lose_the_store(&mut lab).await;
    let said = lab.fiec(&["repair"]).await.expect(0).stdout;
    let ended = format!("{part}: is cancelled: {whole}, of which it is a part, does without it");
    assert!(said.contains(&ended), "{said}");
    let again = lab.fiec(&["repair"]).await.expect(0).stdout;
    assert!(again.contains("began 0 ledgers anew"), "{again}");
    lab.fiec(&["resume", "whole"]).await.expect(0);
    let journal = Journal::open(&lab.broker);
    let ended = journal.ended(whole, "completed").await;
    assert_eq!(digest_of(&ended), *REFERENCE);
    for (id, ledger) in journal.by_execution() {
        let last = ledger.last().unwrap().state();
        assert!(last.phase.is_terminal(), "{id} lives: {last:?}");
        assert_eq!(matches!(last.phase, Phase::Cancelled), id == part, "{id}");
    }

    until("PostgreSQL has the end of all", async || {
        let live = "SELECT count(*) FROM executions WHERE finished_at IS NULL";
        (lab.count(live).await == 0).then_some(())
    })
    .await;
    let twice = "SELECT count(*) - count(DISTINCT (execution, index)) FROM boundaries \
                 WHERE withdrawn_at IS NULL";
    assert_eq!(lab.count(twice).await, 0);
    let tiles = format!(
        "SELECT count(*) - count(DISTINCT name) FROM whole_outputs WHERE whole = '{whole}'"
    );
    assert_eq!(lab.count(tiles).await, 0, "each tile counts once");
    let dropped = format!(
        "SELECT count(*) FROM spread_parts WHERE part = '{part}' AND phase = 'cancelled' \
         AND dropped_at IS NOT NULL AND merged_at IS NULL"
    );
    assert_eq!(lab.count(dropped).await, 1);
    lab.none_ended().unwrap();
    (lab, whole, part, said)
}

#[tokio::test]
async fn a_whole_goes_on_with_what_it_kept_and_a_new_part_does_what_its_part_had() {
    a_new_part_does_it(When::Computing).await;
}

#[tokio::test]
async fn a_whole_that_waits_for_its_part_takes_a_new_one_back() {
    a_new_part_does_it(When::AtItsEnd).await;
}

async fn a_new_part_does_it(when: When) {
    let (lab, whole, part, said) = a_whole_goes_on(when).await;
    assert!(said.contains("1 parts of its range begin anew"), "{said}");
    let journal = Journal::open(&lab.broker);
    let new = part_of(&journal, whole).await;
    let first = journal.of(whole).swap_remove(0);
    let waits = first.state().spread.as_ref().unwrap().waits;
    // Before it was paused it may have come to its end as well.
    assert!(waits || when == When::Computing, "{first:?}");
    assert_ne!(new, part);
    journal.ended(new, "completed").await;
    journal
        .find(whole, "it took the new part back", |line| {
            let merged = Event::Merged { part: new };
            line.message.events.contains(&merged).then_some(())
        })
        .await;
    let merged =
        format!("SELECT count(*) FROM spread_parts WHERE part = '{new}' AND merged_at IS NOT NULL");
    assert_eq!(lab.count(merged).await, 1);
    lab.stop().await;
}

#[tokio::test]
async fn a_whole_whose_state_is_older_than_its_last_split_does_its_whole_range_again() {
    let (lab, whole, _, said) = a_whole_goes_on(When::Behind).await;
    assert!(said.contains(&format!("{whole}: begins anew")), "{said}");
    let kept = format!(
        "SELECT count(*) FROM boundaries WHERE execution = '{whole}' AND ordinal < \
        (SELECT min(ordinal) FROM execution_events WHERE execution = '{whole}' AND kind = 'healed') \
        AND withdrawn_at IS NULL"
    );
    assert_eq!(lab.count(kept).await, 0);
    lab.stop().await;
}

#[tokio::test]
async fn a_repaired_ledger_keeps_the_cancel_that_its_worker_had_confirmed() {
    // The policy service must not take the silent worker for lost before the store is.
    let options = ClusterOptions {
        policy_args: args(&["--liveness-ms", "60000"]),
        ..workers_with_history(1)
    };
    let mut lab = Lab::start(options).await;
    let params = json!({"capsules": 2, "rest_us": 300_000_000});
    let submission = json!({"id": "long", "program": "synthetic@1", "params": params});
    let id = lab.publish_json(&submission).await;
    let what = "it computes";
    let node = lab.journal.find(id, what, |line| line.started_on()).await;
    // The worker has confirmed the cancel, and stops before it can end the program.
    lab.worker(&node).signal(Signal::STOP).unwrap();
    let bound = lab.journal.of(id).last().cloned().unwrap();
    let requested = Event::Requested {
        who: "ann".to_owned(),
        what: RequestKind::Cancel,
    };
    let tip = Tip {
        seq: bound.seq,
        digest: Some(bound.digest),
        state: bound.state().clone().into(),
        seen_in: 0,
    };
    let author = bound.state().author.clone();
    let draft = Draft::new(&tip, vec![requested], &author, lab.broker.now()).unwrap();
    let ledger = Ledger::new(&lab.broker);
    ledger.append(draft, Bytes::new()).await.unwrap();
    let query =
        "SELECT count(*) FROM executions WHERE requested = 'cancel' AND requested_by = 'ann'";
    until("the request is recorded", async || {
        (lab.count(query).await == 1).then_some(())
    })
    .await;
    lab.worker(&node).kill();
    lose_the_store(&mut lab).await;
    lab.fiec(&["repair"]).await.expect(0);
    let journal = Journal::open(&lab.broker);
    journal.ended(id, "cancelled").await;
    lab.end().await;
}
