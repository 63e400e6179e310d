//! A state that the broker has lost: restored from the recorder's copy, or the end of its execution.

use std::time::Duration;

use crate::common::{Running, World, bound, result, undisturbed};
use bytes::Bytes;
use fiec_broker::ledger::Entry;
use fiec_broker::store;
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::{Cause, Digest, Event, ExecutionId, StatePlace, subjects};
use futures_util::StreamExt as _;
use serde_json::json;

fn steps(capsules: u64) -> serde_json::Value {
    json!({ "capsules": capsules, "rest_us": 2_000, "state_bytes": 1_000_000 })
}

fn line(capsules: u64, every: u64) -> String {
    json!({ "program": "synthetic@1", "params": steps(capsules), "commit": { "every": every } })
        .to_string()
}

/// A paused execution with a large state, of which the stream of chunks has lost everything, and
/// its last state.
async fn with_lost_chunks(world: &World) -> (ExecutionId, Entry, Bytes) {
    let (id, paused, states) = with_lost_states(world).await;
    let (_, state) = states.into_iter().next_back().unwrap();
    (id, paused, state)
}

/// As [`with_lost_chunks`], with the states of all its boundaries.
async fn with_lost_states(world: &World) -> (ExecutionId, Entry, Vec<(StatePlace, Bytes)>) {
    let a = world.agent_that_keeps("a", Duration::from_secs(600)).await;
    let id = world.submit(&line(1_500, 5), &a).await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 3)
        .await;
    world.pause(id, &a).await;
    let paused = world.last(id).await;
    let mut states = Vec::new();
    for message in world.messages(id).await {
        let commits = |event: &Event| matches!(event, Event::Boundary(_));
        if let Some(place) = message
            .state
            .boundary
            .clone()
            .filter(|_| message.events.iter().any(commits))
        {
            let state = world.ledger.state(id, &place).await.unwrap();
            states.push((place, state));
        }
    }
    a.leave().await;
    let stream = world.broker.js.get_stream(subjects::CHUNK_STREAM).await;
    stream.unwrap().purge().await.unwrap();
    (id, paused, states)
}

/// The answer of a recorder whose copy, if it has one, is of this boundary.
fn no_copy(earlier: Option<StatePlace>) -> RestoreReply {
    RestoreReply {
        error: Some("PostgreSQL has no copy of it".to_owned()),
        earlier,
    }
}

/// Plays the recorder: each request is answered by this.
async fn recorder(world: &World, reply: RestoreReply) -> async_nats::Subscriber {
    let client = world.broker.client.clone();
    let subject = subjects::RECORDER_RESTORE;
    let mut requests = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    let heard = client.subscribe("heard").await.unwrap();
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let body = serde_json::to_vec(&reply).unwrap();
            let to = request.reply.unwrap();
            client.publish(to, body.into()).await.unwrap();
            client.publish("heard", request.payload).await.unwrap();
        }
    });
    heard
}

async fn resume(world: &World, paused: Entry, to: &Running) {
    let who = "ann".to_owned();
    let events = vec![
        Event::Resumed { who },
        bound(2, &to.destination(), Cause::Initial),
    ];
    let tip = world.append(&paused.into(), events).await;
    world.dispatch(&[tip], &to.node).await;
}

#[tokio::test]
async fn an_execution_whose_state_is_nowhere_fails_with_the_reason() {
    let world = World::start().await;
    let (id, paused, _) = with_lost_chunks(&world).await;
    let _recorder = recorder(&world, no_copy(None)).await;
    let b = world.agent_that_keeps("b", Duration::from_secs(600)).await;
    resume(&world, paused, &b).await;
    let failed = world.wait_phase(id, "failed").await;
    let reason = failed.events.iter().find_map(|e| match e {
        Event::Failed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    let reason = reason.unwrap();
    assert!(reason.contains("cannot be had any more"), "{reason}");
    assert!(reason.contains("PostgreSQL has no copy of it"), "{reason}");
    // Its slot is free.
    let other = world.submit(&line(10, 5), &b).await;
    world.wait_phase(other, "completed").await;
    b.leave().await;
}

#[tokio::test]
async fn an_execution_goes_back_to_the_earlier_state_that_the_recorder_has() {
    let world = World::start().await;
    let (id, paused, states) = with_lost_states(&world).await;
    let (place, state) = &states[1];
    store::keep_state(&world.broker, id, place.digest, state)
        .await
        .unwrap();
    let earlier = StatePlace {
        seq: None,
        ..place.clone()
    };
    let _recorder = recorder(&world, no_copy(Some(earlier.clone()))).await;
    let b = world.agent_that_keeps("b", Duration::from_secs(600)).await;
    resume(&world, paused, &b).await;
    let back = world
        .wait(id, "a step back or an end", |m| {
            m.state.totals.steps_back == 1 || m.state.phase.is_terminal()
        })
        .await;
    assert_eq!(back.state.phase.as_str(), "pending", "{:?}", back.events);
    assert_eq!(back.state.boundary, Some(earlier));
    let events = vec![bound(3, &b.destination(), Cause::Initial)];
    let tip = world.append(&world.last(id).await.into(), events).await;
    world.dispatch(&[tip], &b.node).await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(result(&done), undisturbed(&steps(1_500)));
    b.leave().await;
}

/// The outputs of the commits before it would be missing.
#[tokio::test]
async fn an_execution_does_not_go_forward_to_a_state_that_its_ledger_does_not_have() {
    let world = World::start().await;
    let (id, paused, states) = with_lost_states(&world).await;
    let (place, _) = states.last().unwrap();
    let later = StatePlace {
        index: place.index + 5,
        digest: Digest::of(b"later"),
        seq: None,
        ..place.clone()
    };
    let _recorder = recorder(&world, no_copy(Some(later))).await;
    let b = world.agent_that_keeps("b", Duration::from_secs(600)).await;
    resume(&world, paused, &b).await;
    let failed = world.wait_phase(id, "failed").await;
    assert_eq!(failed.state.totals.steps_back, 0);
    b.leave().await;
}

#[tokio::test]
async fn a_state_that_the_recorder_restores_goes_on_with_the_same_bits() {
    let world = World::start().await;
    let (id, paused, state) = with_lost_chunks(&world).await;
    let place = paused.message.state.boundary.clone().unwrap();
    // The answer may come before the copy is there: the worker tries again.
    let mut heard = recorder(&world, RestoreReply::default()).await;
    let b = world.agent_that_keeps("b", Duration::from_secs(600)).await;
    resume(&world, paused, &b).await;
    let request = tokio::time::timeout(crate::common::PATIENCE, heard.next()).await;
    let request: RestoreRequest =
        serde_json::from_slice(&request.unwrap().unwrap().payload).unwrap();
    assert_eq!((request.execution, request.digest), (id, place.digest));
    store::keep_state(&world.broker, id, place.digest, &state)
        .await
        .unwrap();
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(result(&done), undisturbed(&steps(1_500)));
    b.leave().await;
}
