//! What a program emits is published once, after the commit that carries it, whatever happens in
//! between.

use std::time::Duration;

use crate::common::{Running, World, bound, poll};
use fiec_broker::Tip;
use fiec_broker::ledger::Entry;
use fiec_broker::outbox::PLACE_HEADER;
use fiec_broker::topology::{self, Profile};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::Grant;
use fiec_schemas::{Cause, Event, ExecutionId, LedgerMessage, subjects};
use serde_json::json;

fn line(capsules: u64, every: u64, more: serde_json::Value) -> String {
    let mut params = json!({ "capsules": capsules, "rest_us": 500, "emit_every": 1 });
    params
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!({ "program": "synthetic@1", "params": params, "commit": { "every": every } }).to_string()
}

/// Everything that was published: the place where it was emitted, and what it says.
async fn published(world: &World, id: ExecutionId) -> Vec<(String, u64)> {
    let js = &world.broker.js;
    let mut stream = js.get_stream(subjects::OUTBOX_STREAM).await.unwrap();
    let last = stream.info().await.unwrap().state.last_sequence;
    let mut found = Vec::new();
    for seq in 1..=last {
        let message = stream.direct_get(seq).await.unwrap();
        if message.subject.as_str() == subjects::outbox(&world.tenant, id, "tick") {
            let place = message.headers.get(PLACE_HEADER).unwrap().to_string();
            let text = std::str::from_utf8(&message.payload).unwrap();
            found.push((place, text.parse().unwrap()));
        }
    }
    found
}

fn ticks(count: u64) -> Vec<(String, u64)> {
    (1..=count).map(|n| (format!("{n}.0"), n)).collect()
}

/// The chunks that an execution still has.
async fn chunks(world: &World, id: ExecutionId) -> u64 {
    let js = &world.broker.js;
    let stream = js.get_stream(subjects::CHUNK_STREAM).await.unwrap();
    let last = stream
        .get_last_raw_message_by_subject(&subjects::chunk(&world.tenant, id))
        .await;
    u64::from(last.is_ok())
}

/// From here on commits can be stored, and what they carry cannot be published.
async fn withhold(world: &World) {
    withhold_stream(world, subjects::OUTBOX_STREAM).await;
}

/// From here on nothing can be stored in a stream.
async fn withhold_stream(world: &World, name: &str) {
    let js = &world.broker.js;
    let stream = js.get_stream(name).await.unwrap();
    js.update_stream(async_nats::jetstream::stream::Config {
        subjects: vec!["elsewhere.*".to_owned()],
        ..stream.cached_info().config.clone()
    })
    .await
    .unwrap();
}

/// From here on it can be published again.
async fn mend(world: &World) {
    topology::apply(&world.broker, &Profile::default())
        .await
        .unwrap();
}

/// The last message of an execution whose worker waits for the outbox.
async fn owing(world: &World, id: ExecutionId) -> Entry {
    poll("the ledger to stand still", async || {
        let seq = world.last(id).await.seq;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Some(world.last(id).await).filter(|last| last.seq == seq)
    })
    .await
}

/// Somebody else has the node's name: this worker ends on the spot, whatever it is doing.
async fn fence(world: &World, agent: Running) {
    let mut other = world.descriptor(&agent.node).await.unwrap();
    other.instance = fiec_schemas::InstanceId::random();
    let nodes = world.broker.js.get_key_value(subjects::NODES_BUCKET);
    let value = serde_json::to_vec(&other).unwrap();
    let key = subjects::node_key(&agent.node);
    nodes.await.unwrap().put(key, value.into()).await.unwrap();
    let ended = tokio::time::timeout(crate::common::PATIENCE, agent.task).await;
    assert!(ended.unwrap().unwrap().is_err(), "it was fenced");
}

/// Binds an execution to a node after this message, and sends its capsule.
async fn bind_after(world: &World, last: Entry, to: &Running) -> Tip {
    let (tip, lost) = (Tip::from(last), Cause::Lost { silent_ms: 5_000 });
    let event = bound(tip.state.epoch + 1, &to.destination(), lost);
    let tip = world.append(&tip, vec![event]).await;
    world.dispatch(std::slice::from_ref(&tip), &to.node).await;
    tip
}

/// The reason for which the last message gives a binding back.
fn refusal(message: &LedgerMessage) -> Option<&str> {
    message.events.iter().find_map(|event| match event {
        Event::Refused { reason, .. } => Some(reason.as_str()),
        _ => None,
    })
}

async fn agent(world: &World, name: &str) -> Running {
    let mut options = world.options(name);
    options.superseded_after = Duration::from_millis(50);
    world.agent_with(options).await
}

#[tokio::test]
async fn emitted_messages_are_published_once_each_in_their_order_and_end_with_the_execution() {
    let world = World::start().await;
    let (a, b) = (agent(&world, "a").await, agent(&world, "b").await);
    let id = world
        .submit(&line(400, 7, json!({ "rest_us": 8_000 })), &a)
        .await;
    world
        .wait(id, "a commit", |m| m.state.outbox.is_some())
        .await;
    let request = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Operator {
            who: "ann".to_owned(),
        },
        to: Some(b.destination()),
        decision: None,
    };
    assert_eq!(world.control(&a.node, &request).await.unwrap().error, None);
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(done.state.epoch, 2);
    // The last ones are published before the message that ends it.
    assert_eq!(published(&world, id).await, ticks(400));
    let outbox = done.state.outbox.unwrap();
    assert_eq!(outbox.through, 400, "the last capsule emits, too");
    poll("what was published to be dropped", async || {
        (chunks(&world, id).await == 0).then_some(())
    })
    .await;
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_capsule_that_is_computed_again_emits_nothing_twice() {
    let world = World::start().await;
    let a = agent(&world, "a").await;
    let more = json!({ "crash_at": 47, "crash_attempts": 1 });
    let id = world.submit(&line(60, 10, more), &a).await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(done.state.totals.crashes, 1);
    assert_eq!(published(&world, id).await, ticks(60));
    a.leave().await;
}

#[tokio::test]
async fn so_much_that_it_does_not_fit_one_commit_is_committed_sooner() {
    let world = World::start().await;
    let a = agent(&world, "a").await;
    let id = world.submit(&line(1_000, 1_000_000, json!({})), &a).await;
    let done = world.wait_phase(id, "completed").await;
    assert!(done.state.totals.commits >= 7, "{:?}", done.state.totals);
    assert_eq!(published(&world, id).await, ticks(1_000));
    a.leave().await;
}

#[tokio::test]
async fn what_a_worker_that_died_between_commit_and_publishing_owes_the_next_one_publishes() {
    let world = World::start().await;
    let a = agent(&world, "a").await;
    let id = world
        .submit(&line(2_000, 5, json!({ "rest_us": 2_500 })), &a)
        .await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits > 3)
        .await;
    let before = published(&world, id).await;
    withhold(&world).await;
    let stuck = owing(&world, id).await;
    let owed = stuck.message.state.outbox.unwrap();
    let emitted = |e: &Event| matches!(e, Event::Emitted { .. });
    assert!(stuck.message.events.iter().any(emitted));
    let there = published(&world, id).await;
    assert!(there.len() >= before.len() && (there.len() as u64) < owed.through);
    fence(&world, a).await;
    let next = agent(&world, "b").await;
    assert_eq!(published(&world, id).await, there);
    mend(&world).await;
    bind_after(&world, stuck, &next).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(published(&world, id).await, ticks(2_000));
    next.leave().await;
}

#[tokio::test]
async fn a_binding_whose_owed_messages_cannot_be_published_is_given_back_with_its_slot() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 2;
    let a = world.agent_with(options).await;
    let owes = line(400, 5, json!({ "rest_us": 2_500 }));
    let (id, cancelled) = (world.submit(&owes, &a).await, world.submit(&owes, &a).await);
    for id in [id, cancelled] {
        let some = |m: &LedgerMessage| m.state.totals.commits > 3;
        world.wait(id, "some commits", some).await;
    }
    withhold(&world).await;
    let (stuck, other) = (owing(&world, id).await, owing(&world, cancelled).await);
    fence(&world, a).await;

    let b = agent(&world, "b").await;
    bind_after(&world, stuck, &b).await;
    let refused = world
        .wait(id, "the binding to be given back", |m| refusal(m).is_some())
        .await;
    let reason = refusal(&refused).unwrap();
    assert!(reason.contains("cannot be published"), "{reason}");
    assert_eq!(
        (refused.state.totals.crashes, refused.state.phase.as_str()),
        (0, "pending")
    );

    // The policy service cancels an execution that has not started. Its slot becomes free, too.
    let tip = bind_after(&world, other, &b).await;
    let who = "ann".to_owned();
    world.append(&tip, vec![Event::Cancelled { who }]).await;
    let silent = world
        .submit(&line(3, 1, json!({ "emit_every": 0 })), &b)
        .await;
    world.wait_phase(silent, "completed").await;
    assert_eq!(
        world.last(cancelled).await.message.state.phase.as_str(),
        "cancelled"
    );

    mend(&world).await;
    bind_after(&world, world.last(id).await, &b).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(published(&world, id).await, ticks(400));
    b.leave().await;
}

#[tokio::test]
async fn a_program_that_computes_ahead_of_messages_that_cannot_be_published_gives_its_slot_back() {
    let world = World::start().await;
    let (a, b) = (agent(&world, "a").await, agent(&world, "b").await);
    let id = world
        .submit(&line(4_000, 1_000_000, json!({ "rest_us": 2_500 })), &a)
        .await;
    world.wait_phase(id, "started").await;
    withhold(&world).await;
    let request = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Operator {
            who: "ann".to_owned(),
        },
        to: Some(b.destination()),
        decision: None,
    };
    assert_eq!(world.control(&a.node, &request).await.unwrap().error, None);
    let refused = world
        .wait(id, "the binding to be given back", |m| refusal(m).is_some())
        .await;
    assert_eq!((refused.state.epoch, refused.state.totals.crashes), (2, 0));
    let silent = world
        .submit(&line(3, 1, json!({ "emit_every": 0 })), &b)
        .await;
    world.wait_phase(silent, "completed").await;

    mend(&world).await;
    bind_after(&world, world.last(id).await, &b).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(published(&world, id).await, ticks(4_000));
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_program_whose_messages_cannot_be_stored_hears_orders_and_is_given_back_with_its_slot() {
    let world = World::start().await;
    let a = agent(&world, "a").await;
    let id = world
        .submit(&line(2_000, 5, json!({ "rest_us": 2_500 })), &a)
        .await;
    let some = |m: &LedgerMessage| m.state.totals.commits > 3;
    world.wait(id, "some commits", some).await;
    withhold_stream(&world, subjects::CHUNK_STREAM).await;
    let stuck = owing(&world, id).await.message.state;
    assert_eq!(stuck.phase.as_str(), "started");
    // It has that grant already, and says so although it can append nothing.
    let same = ControlRequest::Reconfigure {
        execution: id,
        epoch: stuck.epoch,
        grant: Grant::default(),
        who: "ann".to_owned(),
    };
    let answer = world.control(&a.node, &same).await.unwrap();
    assert!(answer.error.unwrap().contains("already"));

    let cause = |m: &LedgerMessage| match m.events.last() {
        Some(Event::Yielded { cause, .. }) => Some(cause.in_words()),
        _ => None,
    };
    let back = world
        .wait(id, "the binding to be given back", |m| cause(m).is_some())
        .await;
    let reason = cause(&back).unwrap();
    assert!(reason.contains("cannot be stored"), "{reason}");
    assert_eq!(back.state.boundary_index(), stuck.boundary_index());
    assert_eq!(back.state.totals.crashes, 0);
    let silent = world
        .submit(&line(3, 1, json!({ "emit_every": 0 })), &a)
        .await;
    world.wait_phase(silent, "completed").await;

    mend(&world).await;
    bind_after(&world, world.last(id).await, &a).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(published(&world, id).await, ticks(2_000));
    a.leave().await;
}
