//! A broker that lost the last messages that it had acknowledged, as after a power loss: whoever holds
//! the binding says them again, and what nobody holds is computed again from what is left.

use crate::stage;
use crate::stage::{
    Exempt, Lab, args, digest_of, undisturbed_synthetic, until, workers, workers_with_history,
};
use fiec_broker::Ledger;
use fiec_lab::chaos::store::{cut_tail, length, put_back, saved};
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_schemas::{Event, ExecutionId, LedgerMessage, subjects};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

/// Of the end of the ledger stream, in bytes: some five messages.
const TAIL: u64 = 8 * 1024;
/// So much has the ends of two executions in it.
const TWO_ENDS: u64 = 2 * TAIL;

fn params(capsules: u32) -> Value {
    json!({"capsules": capsules, "rest_us": 2_000, "state_bytes": 1_024})
}

async fn submit(lab: &Lab, name: &str, params: &Value) -> ExecutionId {
    let body = json!({"id": name, "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 100}});
    lab.publish_json(&body).await
}

async fn last(lab: &Lab, id: ExecutionId) -> Option<LedgerMessage> {
    let ledger = Ledger::new(&lab.broker);
    Some(ledger.last(&lab.tenant, id).await.ok()??.message)
}

async fn last_sequence(lab: &Lab) -> u64 {
    let stream = lab.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    stream.unwrap().cached_info().state.last_sequence
}

/// The broker dies and loses the end of the ledger stream. Answers with what is left of these ledgers:
/// workers and policy services stand still until that was read, or they would have mended it before.
async fn lose_the_tail<const N: usize>(
    lab: &mut Lab,
    bytes: u64,
    ids: [ExecutionId; N],
) -> [Option<LedgerMessage>; N] {
    lab.exempt(Exempt::LostMessages);
    lab.servers.nats.kill().await;
    signal_all(lab, Signal::STOP);
    cut_tail(&lab.servers.nats, subjects::LEDGER_STREAM, bytes).unwrap();
    lab.servers.nats.restart().await.unwrap();
    let ledger = Ledger::new(&lab.broker);
    let mut left = ids.map(|_| None);
    for (left, id) in left.iter_mut().zip(ids) {
        *left = until("its ledger can be read", async || {
            let last = ledger.last(&lab.tenant, id).await.ok()?;
            Some(last.map(|entry| entry.message))
        })
        .await;
    }
    signal_all(lab, Signal::CONT);
    left
}

/// To each worker and policy service that has not ended.
fn signal_all(lab: &mut Lab, signal: Signal) {
    let cluster: &mut Cluster = lab;
    for process in cluster.workers.iter_mut().chain(&mut cluster.policies) {
        if process.ended().is_none() {
            process.signal(signal).unwrap();
        }
    }
}

fn its_end_is_lost(left: &[Option<LedgerMessage>]) {
    for message in left.iter().flatten() {
        let phase = message.state.phase.as_str();
        assert_ne!(phase, "completed", "its end was not lost");
    }
}

async fn completed(lab: &Lab, id: ExecutionId) {
    until("it has completed", async || {
        let last = last(lab, id).await?;
        (last.state.phase.as_str() == "completed").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_worker_says_again_what_the_broker_lost_and_computes_nothing_twice() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = params(3_000);
    let id = submit(&lab, "steps", &params).await;
    lab.journal.computing(id, 10).await;
    lose_the_tail(&mut lab, TAIL, []).await;
    let journal = stage::Journal::open(&lab.broker);
    completed(&lab, id).await;
    let ended = journal.ended(id, "completed").await;
    assert_eq!(digest_of(&ended), undisturbed_synthetic(&params).await);
    assert_eq!(ended.state().epoch, 1, "nobody else computed it");
    let healed = |event: &Event| matches!(event, Event::Healed { lost, .. } if *lost > 0);
    let lines = journal.of(id);
    let events = || lines.iter().flat_map(|line| &line.message.events);
    assert_eq!(
        events().filter(|e| healed(e)).count(),
        1,
        "{}",
        journal.in_words(80)
    );
    lab.recorded(1).await;
    let healed = format!(
        "SELECT count(*) FROM execution_events WHERE execution = '{id}' AND kind = 'healed'"
    );
    assert_eq!(lab.count(healed).await, 1);
    one_history(&lab, id).await;
    lab.none_ended().unwrap();
    lab.stop().await;
}

/// PostgreSQL has one history of an execution: each boundary once, as many as were committed.
async fn one_history(lab: &Lab, id: ExecutionId) {
    let twice =
        format!("SELECT count(*) - count(DISTINCT index) FROM boundaries WHERE execution = '{id}'");
    assert_eq!(lab.count(twice).await, 0, "boundaries stand twice");
    let missing = format!(
        "SELECT e.commits - count(b.*) - coalesce((SELECT sum(g.last_missing - g.first_missing + 1) \
         FROM ledger_gaps g WHERE g.execution = e.id), 0)::bigint FROM executions e \
         LEFT JOIN boundaries b ON b.execution = e.id WHERE e.id = '{id}' GROUP BY e.id"
    );
    assert!(
        lab.count(missing).await <= 0,
        "boundaries are missing without a word"
    );
    let open = format!(
        "SELECT count(*) FROM placements WHERE execution = '{id}' AND \
         (node IS NULL OR ended_at IS NULL)"
    );
    assert_eq!(
        lab.count(open).await,
        0,
        "a placement has no node or no end"
    );
}

#[tokio::test]
async fn what_nobody_holds_any_more_is_computed_again_from_what_is_left() {
    let mut lab = Lab::start(workers(2)).await;
    let params = params(3_000);
    let id = submit(&lab, "steps", &params).await;
    lab.journal.computing(id, 10).await;
    let node = last(&lab, id)
        .await
        .unwrap()
        .state
        .phase
        .binding()
        .unwrap()
        .node
        .clone();
    lab.worker(&node).kill();
    lose_the_tail(&mut lab, TAIL, []).await;
    completed(&lab, id).await;
    let journal = stage::Journal::open(&lab.broker);
    let ended = journal.ended(id, "completed").await;
    assert_eq!(digest_of(&ended), undisturbed_synthetic(&params).await);
    lab.end().await;
}

/// Its σ lies in chunks. Newer commits had superseded those of the boundary that is left.
#[tokio::test]
async fn a_large_state_that_newer_commits_superseded_is_there_when_the_broker_has_lost_those() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = json!({"capsules": 6_000, "rest_us": 5_000, "state_bytes": 3_000_000});
    // All its commits fit into the 64 messages that a ledger keeps.
    let body = json!({"id": "large", "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 500}});
    let id = lab.publish_json(&body).await;
    let node = lab.journal.computing(id, 1).await;
    let kept = length(&lab.servers.nats, subjects::LEDGER_STREAM).unwrap();
    let boundary = |left: Option<LedgerMessage>| left.unwrap().state.boundary_index();
    let early = boundary(last(&lab, id).await);
    // So much the development profile's sync interval can lose, and less than the worker keeps.
    tokio::time::sleep(Duration::from_secs(20)).await;
    lab.worker(&node).kill();
    let late = boundary(last(&lab, id).await);
    let lost = length(&lab.servers.nats, subjects::LEDGER_STREAM).unwrap() - kept;
    let [left] = lose_the_tail(&mut lab, lost, [id]).await;
    let left = boundary(left);
    assert!(
        left <= early && early < late,
        "{left} is left of {late}, {early} was early"
    );
    let ended = until("it has ended", async || {
        let last = last(&lab, id).await?;
        last.state.phase.is_terminal().then_some(last)
    })
    .await;
    assert_eq!(
        ended.state.phase.as_str(),
        "completed",
        "{:?}",
        ended.events
    );
    let ended = stage::Journal::open(&lab.broker)
        .ended(id, "completed")
        .await;
    assert_eq!(digest_of(&ended), undisturbed_synthetic(&params).await);
    lab.end().await;
}

/// Also one that fits into the very first message of its ledger.
#[tokio::test]
async fn a_worker_says_again_the_ends_that_the_broker_lost() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let (steps, small) = (params(1_500), params(1));
    let id = submit(&lab, "steps", &steps).await;
    let end = lab.journal.ended(id, "completed").await;
    let tiny = submit(&lab, "tiny", &small).await;
    let tiny_end = lab.journal.ended(tiny, "completed").await;
    lab.recorded(2).await;
    let left = lose_the_tail(&mut lab, TWO_ENDS, [id, tiny]).await;
    its_end_is_lost(&left);
    for (id, before) in [(id, end), (tiny, tiny_end)] {
        completed(&lab, id).await;
        let after = last(&lab, id).await.unwrap();
        assert_eq!(after.state.epoch, 1, "somebody computed it again");
        let stands = |message: &LedgerMessage| {
            let ends = message.events.iter();
            ends.filter(|event| matches!(event, Event::Completed { .. }))
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(stands(&after), stands(&before.message));
    }
    lab.recorded(2).await;
    one_history(&lab, id).await;
    lab.none_ended().unwrap();
    lab.stop().await;
}

#[tokio::test]
async fn what_ended_on_a_worker_that_has_gone_is_computed_again_with_the_same_bits() {
    let mut lab = Lab::start(workers_with_history(2)).await;
    let params = params(300);
    let id = submit(&lab, "short", &params).await;
    let node = lab.journal.computing(id, 0).await;
    lab.journal.ended(id, "completed").await;
    lab.recorded(1).await;
    lab.worker(&node).kill();
    let before = last_sequence(&lab).await;
    // The recorder looks once every lost sequence was given out again.
    let signal = |lab: &Lab, signal| lab.recorder.as_ref().unwrap().signal(signal).unwrap();
    signal(&lab, Signal::STOP);
    let left = lose_the_tail(&mut lab, TAIL, [id]).await;
    its_end_is_lost(&left);
    completed(&lab, id).await;
    let ended = stage::Journal::open(&lab.broker)
        .ended(id, "completed")
        .await;
    assert_eq!(digest_of(&ended), undisturbed_synthetic(&params).await);
    let more = submit(&lab, "more", &params).await;
    completed(&lab, more).await;
    assert!(
        last_sequence(&lab).await > before,
        "the stream is shorter than it was"
    );
    signal(&lab, Signal::CONT);
    let ordinal = ended.state().ordinal;
    let again = format!(
        "SELECT count(*) FROM executions WHERE id = '{id}' AND finished_at IS NOT NULL \
         AND ordinal = {ordinal} AND epoch = {}",
        ended.state().epoch
    );
    until("PostgreSQL has its second end", async || {
        (lab.count(again.clone()).await == 1).then_some(())
    })
    .await;
    let lost = format!("SELECT count(*) FROM lost_rows WHERE execution = '{id}'");
    assert!(lab.count(lost).await > 0, "what was lost is not marked");
    one_history(&lab, id).await;
    lab.end().await;
}

/// Their consumers, which the broker keeps, have got messages whose sequences are given out again.
#[tokio::test]
async fn submissions_and_capsules_arrive_after_their_streams_have_lost_their_end() {
    // Bindings that are left to their nodes are no capsule messages.
    let mut lab = Lab::start(ClusterOptions {
        policy_args: args(&["--entrust-ms", "0"]),
        ..workers(1)
    })
    .await;
    let short = params(3);
    let several = async |lab: &Lab, part: &str, count: usize| {
        for number in 0..count {
            let id = submit(lab, &format!("{part}-{number}"), &short).await;
            completed(lab, id).await;
        }
    };
    let streams = [
        subjects::SUBMIT_STREAM.to_owned(),
        subjects::capsule_stream(0),
    ];
    several(&lab, "kept", 5).await;
    lab.servers.nats.kill().await;
    let before = streams
        .each_ref()
        .map(|stream| saved(&lab.servers.nats, stream).unwrap());
    lab.servers.nats.restart().await.unwrap();
    several(&lab, "lost", 20).await;
    let last = async |lab: &Lab, stream: &str| {
        fiec_broker::feed::bounds_of(&lab.broker, stream)
            .await
            .unwrap()
            .1
    };
    let mut lasts = Vec::new();
    for stream in &streams {
        lasts.push(last(&lab, stream).await);
    }
    lab.servers.nats.kill().await;
    for (stream, copy) in streams.iter().zip(&before) {
        put_back(&lab.servers.nats, stream, copy).unwrap();
    }
    lab.servers.nats.restart().await.unwrap();
    for (stream, before) in streams.iter().zip(lasts) {
        let after = last(&lab, stream).await;
        assert!(after < before, "{stream}: {after} is not before {before}");
    }
    several(&lab, "after", 5).await;
    lab.none_ended().unwrap();
    lab.stop().await;
}
