//! σ too large for a ledger message: the object store holds the last one while its execution
//! lives, and nothing of one that has ended.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::{Running, World, bound, poll, result};
use fiec_kit::run_local;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId, subjects};
use futures_util::TryStreamExt as _;
use serde_json::json;

const LARGE: u64 = 1_000_000;

fn steps(capsules: u64) -> serde_json::Value {
    json!({ "capsules": capsules, "work_us": 2_000, "state_bytes": LARGE })
}

fn line(capsules: u64, every: u64) -> String {
    json!({ "program": "synthetic@1", "params": steps(capsules), "commit": { "every": every } })
        .to_string()
}

/// The names of all that the bucket of large states holds.
async fn stored(world: &World) -> Vec<String> {
    let bucket = subjects::STATE_BUCKET;
    let store = world.broker.js.get_object_store(bucket).await.unwrap();
    let list = store.list().await.unwrap();
    let all: Vec<_> = list.try_collect().await.unwrap();
    all.into_iter().map(|object| object.name).collect()
}

async fn stored_of(world: &World, id: ExecutionId) -> Vec<String> {
    let mut names = stored(world).await;
    names.retain(|name| name.starts_with(&id.to_string()));
    names
}

async fn agent(world: &World, name: &str, superseded_after: Duration) -> Running {
    let mut options = world.options(name);
    options.superseded_after = superseded_after;
    world.agent_with(options).await
}

async fn pause(world: &World, id: ExecutionId, agent: &Running) {
    let request = ControlRequest::Pause {
        execution: id,
        who: "ann".to_owned(),
    };
    let reply = world.control(&agent.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    world.wait_phase(id, "paused").await;
}

#[tokio::test]
async fn a_superseded_large_state_is_dropped_and_the_last_one_is_kept_while_it_lives() {
    let world = World::start().await;
    let soon = Duration::from_millis(100);
    let (a, b) = (
        agent(&world, "a", soon).await,
        agent(&world, "b", soon).await,
    );
    let id = world.submit(&line(400, 5), &a).await;
    let first = world
        .wait(id, "a commit", |m| m.state.boundary.is_some())
        .await;
    let first = format!("{id}.{}", first.state.boundary.unwrap().digest);
    poll("the first state to be dropped, under way", async || {
        let gone = !stored(&world).await.contains(&first);
        let live = world.last(id).await.message.state.phase.as_str() == "started";
        assert!(live || gone, "it ended with its first state still stored");
        (gone && live).then_some(())
    })
    .await;
    let place = world.last(id).await.message.state.boundary.unwrap();
    assert_eq!((place.seq, place.bytes), (None, LARGE), "states are large");

    // Paused, it lives on, and needs its last state.
    pause(&world, id, &a).await;
    let paused = world.last(id).await;
    let place = paused.message.state.boundary.clone().unwrap();
    let last = format!("{id}.{}", place.digest);
    poll("only the last state to be left", async || {
        (stored_of(&world, id).await == [last.clone()]).then_some(())
    })
    .await;
    // Another one lives and dies here meanwhile: all of its states are dropped, long after the
    // last state of the paused one could have been.
    let other = world.submit(&line(30, 5), &a).await;
    let done = world.wait_phase(other, "completed").await;
    assert_eq!(done.state.totals.commits, 5);
    poll("the other one's states to be dropped", async || {
        stored_of(&world, other).await.is_empty().then_some(())
    })
    .await;
    assert_eq!(stored(&world).await, [last]);
    let state = world.ledger.state(id, &place).await.unwrap();
    assert_eq!(state.len() as u64, LARGE);

    // It goes on elsewhere from what was kept, and in the end nothing is left.
    let who = "ann".to_owned();
    let events = vec![
        Event::Resumed { who },
        bound(2, &b.destination(), Cause::Initial),
    ];
    let tip = world.append(&paused.into(), events).await;
    world.dispatch(&[tip], &b.node).await;
    let ended = world.wait_phase(id, "completed").await;
    let whole = run_local("synthetic@1", &steps(400)).unwrap();
    assert_eq!(result(&ended), whole.result);
    assert!(ended.state.totals.commits > 10, "{:?}", ended.state.totals);
    poll("nothing to be left", async || {
        stored(&world).await.is_empty().then_some(())
    })
    .await;
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_worker_that_leaves_drops_what_was_superseded_and_keeps_what_is_needed() {
    let world = World::start().await;
    // Nothing falls due before it leaves.
    let late = Duration::from_secs(3_600);
    let a = agent(&world, "a", late).await;
    let ended = world.submit(&line(20, 5), &a).await;
    let done = world.wait_phase(ended, "completed").await;
    let commits = usize::try_from(done.state.totals.commits).unwrap();
    assert_eq!(stored_of(&world, ended).await.len(), commits);
    let id = world.submit(&line(100_000, 5), &a).await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 3)
        .await;
    a.leave().await;
    let last = world.last(id).await.message;
    let yielded = |e: &Event| matches!(e, Event::Yielded { .. });
    assert!(last.events.iter().any(yielded), "{:?}", last.events);
    let place = last.state.boundary.unwrap();
    assert_eq!(stored(&world).await, [format!("{id}.{}", place.digest)]);
    world.ledger.state(id, &place).await.unwrap();
}
