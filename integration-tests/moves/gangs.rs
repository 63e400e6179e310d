//! A gang on a cluster that is always full: places are kept for it while short work keeps coming,
//! and it begins together; also where the policy service that has reserved for it is killed
//! meanwhile.

use std::cell::Cell;
use std::time::Duration;

use crate::stage;
use crate::stage::{
    Lab, PATIENCE, args, audit, digest_of, proc, slots, undisturbed_synthetic, until,
    workers_with_history,
};
use fiec::client;
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::messages::{ExecutionVerb, PolicyPresence};
use fiec_schemas::quota::Reservations;
use fiec_schemas::{Event, ExecutionId, InstanceId, Timestamp, subjects};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

/// Two nodes of two slots; the gang wants them all.
const SIZE: usize = 4;
/// Short executions that wait, at least, while the stream flows.
const WAITING: usize = 8;

/// Nobody gives way to anybody: what is kept is all that helps.
async fn full_cluster() -> Lab {
    Lab::start(ClusterOptions {
        worker_args: slots(2),
        policy_args: args(&[
            "--gang-keep-ms",
            "1000",
            "--no-preemption",
            "--no-slicing",
            "--verify-share",
            "0",
        ]),
        ..workers_with_history(2)
    })
    .await
}

/// So many capsules of 10 ms.
fn capsules(count: u64) -> Value {
    json!({"capsules": count, "rest_us": 10_000, "state_bytes": 512})
}

fn body(id: &str, count: u64) -> Value {
    json!({"id": id, "program": "synthetic@1", "params": capsules(count)})
}

/// Short executions that never cease to come.
struct Stream<'a> {
    lab: &'a Lab,
    sent: Cell<usize>,
    over: Cell<bool>,
}

impl<'a> Stream<'a> {
    fn new(lab: &'a Lab) -> Self {
        let (sent, over) = (Cell::new(0), Cell::new(false));
        Self { lab, sent, over }
    }

    fn name(number: usize) -> String {
        format!("s-{number}")
    }

    /// Publishes them until it is told that it is over, so that some always wait.
    async fn flow(&self) {
        while !self.over.get() {
            let ended = self.lab.journal.ended_count("completed");
            while self.sent.get() < ended + SIZE + WAITING {
                let number = self.sent.get();
                let count = 20 + 7 * (number as u64 % 4);
                let name = Self::name(number);
                self.lab.publish_json(&body(&name, count)).await;
                self.sent.set(number + 1);
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// What `fiec why` says in one sentence; none where the execution is not known yet.
async fn why(lab: &Lab, name: &str) -> Option<String> {
    let reply = client::me(&lab.broker)
        .execution(ExecutionVerb::Why, &lab.tenant, name, None)
        .await;
    Some(reply.ok()?.why?.summary)
}

fn members(lab: &Lab) -> Vec<ExecutionId> {
    (0..SIZE).map(|n| lab.id(&format!("g-{n}"))).collect()
}

/// With one long execution and a stream of short ones: publishes the gang, and waits until places
/// are kept for it, and it and who waits behind it are told so. Since when.
async fn kept(lab: &Lab, stream: &Stream<'_>) -> Timestamp {
    until("short work flows", async || {
        (lab.journal.ended_count("completed") > SIZE).then_some(())
    })
    .await;
    let gang = json!({"id": "g", "program": "synthetic@1", "params": capsules(100),
        "array": {"count": SIZE}, "gang": {"name": "g", "size": SIZE}});
    lab.publish_json(&gang).await;
    until("places are kept for it", async || {
        let own = why(lab, "g-0").await?;
        let newest = Stream::name(stream.sent.get().checked_sub(1)?);
        let other = why(lab, &newest).await?;
        let told = own.contains("free slots are reserved for it")
            && other.contains("are reserved for the gang g of 4");
        told.then(Timestamp::now)
    })
    .await
}

/// Waits until nothing but this one has had a place for a second, in which every policy service
/// looks twice at who goes first.
async fn free_places(lab: &Lab, but: ExecutionId) {
    let mut since = Instant::now();
    until("what became free stays free", async || {
        let holds = |ledger: &Vec<stage::Line>| {
            let last = ledger.last().map(stage::Line::state);
            last.is_some_and(|s| s.execution != but && s.phase.binding().is_some())
        };
        if lab.journal.by_execution().values().any(holds) {
            since = Instant::now();
        }
        (since.elapsed() >= Duration::from_secs(1)).then_some(())
    })
    .await;
}

/// Waits until all members are done, and checks that they began together, with the right bits.
async fn began_together(lab: &Lab) {
    let digest = undisturbed_synthetic(&capsules(100)).await;
    let (mut bound, mut started) = (Vec::new(), Vec::new());
    for id in members(lab) {
        let end = lab.journal.ended(id, "completed").await;
        assert_eq!(digest_of(&end), digest);
        for line in lab.journal.of(id) {
            for event in &line.message.events {
                match event {
                    Event::Bound { .. } => bound.push(line.seq),
                    Event::Started { .. } => started.push(line.seq),
                    _ => {}
                }
            }
        }
    }
    assert_eq!((bound.len(), started.len()), (SIZE, SIZE), "once each");
    // The broker's order is the order in which it became true.
    assert!(
        bound.iter().max() < started.iter().min(),
        "bound by {bound:?}, started by {started:?}"
    );
}

/// The same by the placements in PostgreSQL, once everything is there; nothing else is left.
async fn told_in_sql(lab: &Lab, executions: usize) {
    lab.recorded(executions).await;
    let in_part = "SELECT count(*) FROM placement_timeline a
         JOIN executions m ON m.client_id ~ '^g-' AND m.id <> a.execution
         WHERE a.client_id ~ '^g-' AND a.started_at IS NOT NULL AND NOT EXISTS (
           SELECT FROM placements b WHERE b.execution = m.id AND b.bound_at <= a.started_at
            AND (b.ended_at IS NULL OR b.ended_at > a.started_at OR b.end_reason = 'completed'))";
    assert_eq!(lab.count(in_part).await, 0, "no member was there alone");
    let all = "SELECT count(*) FROM placement_timeline \
               WHERE client_id ~ '^g-' AND started_at IS NOT NULL AND end_reason = 'completed'";
    assert_eq!(lab.count(all).await, i64::try_from(SIZE).unwrap());
    for ledger in lab.journal.by_execution().values() {
        audit(ledger);
    }
}

/// How many short executions were submitted after the gang and bound before it, from then on.
async fn overtook(lab: &Lab, from: Option<Timestamp>) -> i64 {
    let from = from.map_or_else(|| "-infinity".to_owned(), |at| at.to_string());
    lab.count(format!(
        "SELECT count(*) FROM placement_timeline p JOIN executions e ON e.id = p.execution
         WHERE p.client_id ~ '^s-' AND p.bound_at > '{from}'
          AND e.submitted_at > (SELECT max(submitted_at) FROM executions WHERE client_id ~ '^g-')
          AND p.bound_at < (SELECT min(bound_at) FROM placement_timeline WHERE client_id ~ '^g-')"
    ))
    .await
}

#[tokio::test]
async fn a_gang_has_places_kept_on_a_full_cluster_and_begins_together() {
    let mut lab = full_cluster().await;
    let long = lab.publish_json(&body("long", 1_000_000)).await;
    lab.journal.computing(long, 0).await;
    let stream = Stream::new(&lab);
    let scene = async {
        let since = kept(&lab, &stream).await;
        free_places(&lab, long).await;
        let why = lab.fiec(&["why", "g-0"]).await.expect(0).stdout;
        assert!(
            why.contains("free slots are reserved for it") && why.contains("room for 3"),
            "{why}"
        );
        let told = "SELECT count(*) FROM waiting_verdicts \
                    WHERE summary LIKE '%are reserved for the gang g of 4%'";
        until("SQL says so as well", async || {
            (lab.count(told).await > 0).then_some(())
        })
        .await;
        // The last place becomes free.
        lab.fiec(&["cancel", "long"]).await.expect(0);
        began_together(&lab).await;
        stream.over.set(true);
        since
    };
    let ((), since) = tokio::join!(stream.flow(), scene);
    // What had waited behind it has its turn.
    let short = stream.sent.get();
    until("the short ones are done", async || {
        (lab.journal.ended_count("completed") == short + SIZE).then_some(())
    })
    .await;
    told_in_sql(&lab, short + SIZE + 1).await;
    assert_eq!(overtook(&lab, Some(since)).await, 0, "since it was told");
    // Three slots in the second and a half until it is seen that it has waited, each for 200 ms at
    // least; and what nodes are given ahead.
    let before = overtook(&lab, None).await;
    assert!(before <= 120, "{before} went ahead of it");
    lab.none_ended().unwrap();
    lab.stop().await;
}

/// The policy service that speaks next, of those that are not known.
async fn speaks(heard: &mut async_nats::Subscriber, known: Option<InstanceId>) -> InstanceId {
    let next = async {
        while let Some(message) = heard.next().await {
            let presence: PolicyPresence = serde_json::from_slice(&message.payload).unwrap();
            if Some(presence.id) != known {
                return presence.id;
            }
        }
        panic!("the subscription ended");
    };
    timeout(PATIENCE, next).await.unwrap()
}

/// Which policy service has reserved for an execution.
async fn reserved_by(lab: &Lab, id: ExecutionId) -> InstanceId {
    let stream = lab.broker.js.get_stream_no_info(subjects::QUOTA_STREAM);
    let stream = stream.await.unwrap();
    let subject = subjects::quota(&lab.tenant);
    let message = stream.direct_get_last_for_subject(subject).await.unwrap();
    let table: Reservations = serde_json::from_slice(&message.payload).unwrap();
    let mut entries = table.entries.iter();
    entries.find(|entry| entry.execution == id).unwrap().by
}

#[tokio::test]
async fn a_gang_begins_together_though_the_policy_service_that_reserved_for_it_is_killed() {
    let mut lab = full_cluster().await;
    let presence = lab.broker.client.subscribe(subjects::POLICY_PRESENCE);
    let mut presence = presence.await.unwrap();
    let first = speaks(&mut presence, None).await;
    lab.start_policy().unwrap();
    let second = speaks(&mut presence, Some(first)).await;
    let long = lab.publish_json(&body("long", 1_000_000)).await;
    lab.journal.computing(long, 0).await;
    let stream = Stream::new(&lab);
    let scene = async {
        kept(&lab, &stream).await;
        // Both keep what is free.
        free_places(&lab, long).await;
        let owner = reserved_by(&lab, lab.id("g-0")).await;
        for id in members(&lab) {
            assert_eq!(reserved_by(&lab, id).await, owner, "one for all of it");
        }
        let (killed, other) = match owner == first {
            true => (0, second),
            false => (1, first),
        };
        proc::kill(lab.policies[killed].pid());
        until("the other one ends the long one", async || {
            let ran = lab.fiec(&["cancel", "long"]).await;
            let ended = lab.journal.of(long).last()?.state().phase.is_terminal();
            (ran.code == 0 || ended).then_some(())
        })
        .await;
        began_together(&lab).await;
        let author = format!("policy/{other}");
        for id in members(&lab) {
            let ledger = lab.journal.of(id);
            let bound = |line: &&stage::Line| line.phase() == "bound";
            let bound = ledger.iter().find(bound).unwrap();
            assert_eq!(bound.state().author, author, "by the one that lives");
        }
        stream.over.set(true);
        killed
    };
    let ((), killed) = tokio::join!(stream.flow(), scene);
    let short = stream.sent.get();
    until("the short ones are done", async || {
        (lab.journal.ended_count("completed") == short + SIZE).then_some(())
    })
    .await;
    told_in_sql(&lab, short + SIZE + 1).await;
    lab.policies.remove(killed);
    lab.none_ended().unwrap();
    lab.stop().await;
}

#[tokio::test]
async fn gangs_that_need_the_whole_cluster_follow_one_another_without_a_pause() {
    const GANGS: usize = 20;
    const EACH: usize = 6;
    let lab = Lab::start(ClusterOptions {
        worker_args: slots(2),
        policy_args: args(&["--verify-share", "0"]),
        ..workers_with_history(3)
    })
    .await;
    let mut text = String::new();
    for gang in 0..GANGS {
        let line = json!({
            "id": format!("g{gang}"), "program": "synthetic@1", "params": capsules(10),
            "array": {"count": EACH}, "gang": {"name": format!("g{gang}"), "size": EACH},
        });
        text += &format!("{line}\n");
    }
    let file = lab.file("gangs.jsonl", text);
    let submit = ["submit", file.to_str().unwrap(), "--wait"];
    lab.fiec(&submit).await.expect(0);
    lab.recorded(GANGS * EACH).await;
    let pauses = "WITH gangs AS (SELECT split_part(client_id, '-', 1) AS gang,
                    min(first_started_at) AS begun, max(finished_at) AS ended
                    FROM executions GROUP BY 1),
                  pauses AS (SELECT begun - lag(ended) OVER (ORDER BY begun) AS pause FROM gangs)
                  SELECT (1000 * extract(epoch FROM
                    percentile_cont(0.5) WITHIN GROUP (ORDER BY pause)))::bigint FROM pauses";
    let median = lab.count(pauses).await;
    println!("{median} ms between the end of a gang and the start of the next");
    // 28 on an idle machine, 900 if a gang waits for the next look at the queue.
    assert!(median < 400, "{median} ms");
    lab.stop().await;
}
