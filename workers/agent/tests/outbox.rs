//! What a program emits is published once, after the commit that carries it, whatever happens in
//! between.

use std::time::Duration;

use crate::common::{Running, World, bound, poll};
use fiec_broker::outbox::PLACE_HEADER;
use fiec_broker::topology::{self, Profile};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId, subjects};
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
    let more = json!({ "crash_at": 47, "crash_marker": "crashed" });
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
    // From here on commits can be stored, and what they carry cannot be published.
    let js = &world.broker.js;
    let before = published(&world, id).await;
    js.update_stream(async_nats::jetstream::stream::Config {
        subjects: vec!["elsewhere.*".to_owned()],
        ..js.get_stream(subjects::OUTBOX_STREAM)
            .await
            .unwrap()
            .cached_info()
            .config
            .clone()
    })
    .await
    .unwrap();
    let stuck = poll("the ledger to stand still", async || {
        let seq = world.last(id).await.seq;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Some(world.last(id).await).filter(|last| last.seq == seq)
    })
    .await;
    let owed = stuck.message.state.outbox.unwrap();
    let emitted = |e: &Event| matches!(e, Event::Emitted { .. });
    assert!(stuck.message.events.iter().any(emitted));
    let there = published(&world, id).await;
    assert!(there.len() >= before.len() && (there.len() as u64) < owed.through);
    // Somebody else has the node's name: this worker ends on the spot, whatever it is doing.
    let mut other = world.descriptor(&a.node).await.unwrap();
    other.instance = fiec_schemas::InstanceId::random();
    let nodes = js.get_key_value(subjects::NODES_BUCKET).await.unwrap();
    let value = serde_json::to_vec(&other).unwrap();
    nodes
        .put(subjects::node_key(&a.node), value.into())
        .await
        .unwrap();
    let ended = tokio::time::timeout(crate::common::PATIENCE, a.task).await;
    assert!(ended.unwrap().unwrap().is_err(), "it was fenced");
    let next = agent(&world, "b").await;
    assert_eq!(published(&world, id).await, there);
    topology::apply(&world.broker, &Profile::default())
        .await
        .unwrap();
    let lost = Cause::Lost { silent_ms: 5_000 };
    let tip = world
        .append(&stuck.into(), vec![bound(2, &next.destination(), lost)])
        .await;
    world.dispatch(&[tip], &next.node).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(published(&world, id).await, ticks(2_000));
    next.leave().await;
}
