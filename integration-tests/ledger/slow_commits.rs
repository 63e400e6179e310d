//! What a worker does when its commits are slow to count: it parks at a boundary while the broker
//! does not take them, and makes fewer of them while the recorder is far behind. The bits stay.

use std::sync::Arc;
use std::time::Duration;

use crate::stage;
use crate::stage::{
    Lab, Line, args, audit, digest_of, proc, undisturbed_synthetic, until, workers,
    workers_with_history,
};
use fiec_broker::{Draft, Ledger, Tip};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{
    BoundaryEvent, Event, ExecutionId, ExecutionState, Submission, Tenant, Timestamp, subjects,
};
use futures_util::StreamExt as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::{Instant, sleep_until};

/// Without a commit for so long a worker parks, in the first test.
const LEASE: Duration = Duration::from_millis(500);
/// How long the broker stays silent after that.
const SILENCE: Duration = Duration::from_secs(3);
/// Ledger messages of lag from which a worker stretches its commits.
const LAG: u64 = 20_000;
/// How far apart they are then.
const STRETCHED: Duration = Duration::from_secs(5);

fn boundaries(ledger: &[Line]) -> Vec<&BoundaryEvent> {
    let events = ledger.iter().flat_map(|line| &line.message.events);
    events
        .filter_map(|event| match event {
            Event::Boundary(boundary) => Some(boundary),
            _ => None,
        })
        .collect()
}

fn between(earlier: &BoundaryEvent, later: &BoundaryEvent) -> Duration {
    let micros = later.computed_at.micros() - earlier.computed_at.micros();
    Duration::from_micros(micros.try_into().unwrap())
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

/// Stopped until this goes, however the test ends: a stopped process cannot be asked to end.
struct Stopped(u32);

impl Stopped {
    fn now(pid: u32) -> Self {
        signal(pid, Signal::STOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

#[tokio::test]
async fn a_worker_that_cannot_commit_within_its_lease_parks_and_goes_on_with_the_same_bits() {
    let lease = LEASE.as_secs_f64().to_string();
    let mut lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "1", "--lease-seconds", &lease]),
        ..workers(2)
    })
    .await;
    // A capsule takes a millisecond at least, so that capsules tell the time of computing.
    // Its processor time shows whether it computes.
    let params = json!({"capsules": 4_000, "work_us": 1_000, "state_bytes": 1_024});
    let body = json!({"id": "parks", "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 100}});
    let id = lab.publish_json(&body).await;
    let node = lab.journal.computing(id, 3).await;
    let children = proc::descendants(lab.worker(&node).pid());
    assert!(!children.is_empty());

    let stopped = Stopped::now(lab.servers.nats.pid());
    let mut seen = (proc::cpu(&children), Instant::now());
    until("its program rests", async || {
        let now = proc::cpu(&children);
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        (seen.1.elapsed() > Duration::from_millis(400)).then_some(())
    })
    .await;
    // That it stays so while nothing can be committed is what this test is about.
    sleep_until(Instant::now() + SILENCE).await;
    assert_eq!(proc::cpu(&children), seen.0, "it rests until it can commit");
    drop(stopped);

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!((last.state().epoch, last.state().totals.crashes), (1, 0));
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let all = boundaries(&ledger);
    let across = all.windows(2).max_by_key(|w| between(w[0], w[1])).unwrap();
    assert!(between(across[0], across[1]) > SILENCE, "{across:?}");
    // Over the silence it computed for its lease, and no longer.
    let capsules = across[1].index - across[0].index;
    let lease = u64::try_from(LEASE.as_millis()).unwrap();
    assert!(capsules <= lease + 50, "{capsules} capsules: {across:?}");
    assert!(
        all.last().unwrap().index > across[1].index,
        "and then as before"
    );
    lab.none_ended().unwrap();
    lab.end().await;
}

/// Appends so many ledgers of one message that nobody has to do anything about.
async fn fill_the_ledger(lab: &Lab, messages: u64) {
    let tenant = Tenant::new("others").unwrap();
    let spec = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
    let ledger = Ledger::new(&lab.broker);
    let mut sent = Vec::new();
    for number in 0..messages {
        let (id, now) = (ExecutionId(uuid::Uuid::now_v7()), Timestamp::now());
        let state = ExecutionState::unborn(tenant.clone(), id, Arc::clone(&spec), None, now);
        let tip = Tip {
            seq: 0,
            digest: None,
            state: state.into(),
            seen_in: 0,
        };
        let who = "test".to_owned();
        let events = vec![Event::Submitted, Event::Cancelled { who }];
        let draft = Draft::new(&tip, events, "policy/test", now).unwrap();
        sent.push(ledger.send(draft, bytes::Bytes::new()).await.unwrap());
        if sent.len() >= 1_000 || number + 1 == messages {
            for one in sent.drain(..) {
                ledger.settle(one).await.unwrap();
            }
        }
    }
}

/// Waits for so many commits in a row whose distances are as wished; gives the last one's index.
async fn commits(lab: &Lab, id: ExecutionId, many: usize, is: impl Fn(Duration) -> bool) -> u64 {
    let from = lab.journal.of(id).len() - 1;
    until(
        &format!("{many} commits in a row are so far apart"),
        async || {
            let ledger = lab.journal.of(id);
            let all = boundaries(&ledger[from..]);
            let mut windows = all.windows(many + 1);
            let found = windows.find(|w| w.windows(2).all(|pair| is(between(pair[0], pair[1]))))?;
            Some(found.last()?.index)
        },
    )
    .await
}

#[tokio::test]
async fn commits_are_stretched_while_the_recorder_hangs_and_then_as_often_as_before() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let params = json!({"capsules": 1_000_000, "rest_us": 1_000, "state_bytes": 1_024});
    // The stream keeps 64 messages of it, half a minute's worth: the flood below takes less.
    let body = json!({"id": "stretched", "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 500}});
    let id = lab.publish_json(&body).await;
    let node = lab.journal.computing(id, 1).await;
    let routine = |apart: Duration| apart < Duration::from_secs(2);
    commits(&lab, id, 3, routine).await;

    // A worker that never heard of a recorder has nothing to be considerate of.
    let subject = subjects::RECORDER_CHECKPOINT;
    let mut words = lab.broker.client.subscribe(subject).await.unwrap();
    let heard = tokio::time::timeout(stage::PATIENCE, words.next()).await;
    assert!(heard.unwrap().is_some());
    let recorder = lab.recorder.as_ref().unwrap().pid();
    let stopped = Stopped::now(recorder);
    fill_the_ledger(&lab, LAG + 100).await;
    let stretched = |apart: Duration| apart >= STRETCHED;
    commits(&lab, id, 1, stretched).await;
    let agent = lab.worker(&node).pid();
    let (busy, since) = (proc::cpu(&[agent]), Instant::now());
    commits(&lab, id, 1, stretched).await;
    let share = (proc::cpu(&[agent]) - busy).as_secs_f64() / since.elapsed().as_secs_f64();
    assert!(share < 0.25, "the agent itself took {share:.2} of a core");

    drop(stopped);
    let index = commits(&lab, id, 3, routine).await;
    assert!(index > 0);
    lab.fiec(&["cancel", "stretched"]).await.expect(0);
    let last = lab.journal.ended(id, "cancelled").await;
    let ledger = lab.journal.of(id);
    audit(&ledger);
    // History has all of them once the recorder has caught up.
    let query = format!("SELECT count(*) FROM boundaries WHERE execution = '{id}'");
    let expected = i64::try_from(last.state().totals.commits).unwrap();
    until("history to have every commit", async || {
        (lab.count(query.clone()).await == expected).then_some(())
    })
    .await;
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn commits_by_time_get_rarer_before_a_boundary_would_leave_the_history() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let params = json!({"capsules": 1_000_000, "rest_us": 1_000, "state_bytes": 1_024});
    let body = json!({"id": "held", "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 20}});
    let id = lab.publish_json(&body).await;
    lab.journal.computing(id, 1).await;
    let subject = subjects::RECORDER_CHECKPOINT;
    let mut words = lab.broker.client.subscribe(subject).await.unwrap();
    let heard = tokio::time::timeout(stage::PATIENCE, words.next()).await;
    assert!(heard.unwrap().is_some());

    // With its memory, in which a recorder keeps what it has read ahead.
    lab.servers.postgres.as_mut().unwrap().kill().await;
    lab.recorder.as_mut().unwrap().kill();
    let index = || {
        let ledger = lab.journal.of(id);
        boundaries(&ledger).last().map_or(0, |last| last.index)
    };
    let before = index();
    // Without back-pressure, three times what the stream keeps is committed meanwhile: a capsule
    // takes a millisecond at least.
    until(
        "4,000 capsules are computed without a history",
        async || (index() > before + 4_000).then_some(()),
    )
    .await;
    let postgres = lab.servers.postgres.as_mut().unwrap();
    postgres.restart().await.unwrap();
    lab.start_recorder().unwrap();
    let from = lab.journal.of(id).len();
    until("commits are as often as before", async || {
        (lab.journal.of(id).len() > from + 100).then_some(())
    })
    .await;
    lab.fiec(&["cancel", "held"]).await.expect(0);
    let last = lab.journal.ended(id, "cancelled").await;
    let expected = i64::try_from(last.state().totals.commits).unwrap();
    let query = format!("SELECT count(*) FROM boundaries WHERE execution = '{id}'");
    until("history to have every commit", async || {
        (lab.count(query.clone()).await == expected).then_some(())
    })
    .await;
    assert_eq!(lab.count("SELECT count(*) FROM ledger_gaps").await, 0);
    lab.end().await;
}
