//! A first binding that its node is told of while the broker still stores it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::Arc;

use async_nats::HeaderMap;
use bytes::Bytes;
use common::{Running, World, bound, poll, result};
use fiec_broker::{Draft, Tip};
use fiec_kit::run_local;
use fiec_schemas::messages::{HANDOVER_HEADER, Handover};
use fiec_schemas::{Cause, Event, ExecutionId, ExecutionState, Submission, Timestamp, subjects};
use serde_json::{Value, json};

/// A first message that binds to `to`, not yet appended.
fn draft(world: &World, params: &Value, to: &Running) -> (Tip, Draft) {
    let line = json!({ "program": "synthetic@1", "params": params }).to_string();
    let spec = Arc::new(Submission::parse(line.as_bytes()).unwrap());
    let id = ExecutionId(uuid::Uuid::now_v7());
    let state = ExecutionState::unborn(world.tenant.clone(), id, spec, None, Timestamp::now());
    let tip = Tip {
        seq: 0,
        digest: None,
        state,
    };
    let events = vec![
        Event::Submitted,
        bound(1, &to.destination(), Cause::Initial),
    ];
    let draft = Draft::new(&tip, events, "policy/test", Timestamp::now()).unwrap();
    (tip, draft)
}

async fn tell(world: &World, to: &Running, (word, body): (Handover, Bytes)) {
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, serde_json::to_string(&word).unwrap());
    let client = &world.broker.client;
    let subject = subjects::handover(&to.node);
    client
        .publish_with_headers(subject, headers, body)
        .await
        .unwrap();
    client.flush().await.unwrap();
}

fn word(draft: &Draft) -> (Handover, Bytes) {
    let word = Handover::Ahead {
        execution: draft.state.execution,
        epoch: draft.state.epoch,
    };
    (word, draft.header.clone().into())
}

async fn running(world: &World, agent: &Running, execution: ExecutionId) -> Option<u64> {
    let found = async {
        let mut vectors = world
            .broker
            .client
            .subscribe(subjects::telemetry(&agent.node))
            .await
            .unwrap();
        let message = futures_util::StreamExt::next(&mut vectors).await?;
        let vector: fiec_schemas::HardwareVector =
            serde_json::from_slice(&message.payload).unwrap();
        let of = vector.running.iter().find(|r| r.execution == execution);
        Some(of.map(|r| r.boundary))
    };
    tokio::time::timeout(common::PATIENCE, found)
        .await
        .unwrap()
        .unwrap()
}

#[tokio::test]
async fn what_was_told_ahead_is_computed_and_counts_once_its_capsule_has_come() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    let params = json!({ "capsules": 100, "work_us": 10_000 });
    let (tip, draft) = draft(&world, &params, &agent);
    let id = tip.state.execution;
    tell(&world, &agent, word(&draft)).await;
    // It computes although its ledger does not exist.
    poll("it to be computed", async || {
        running(&world, &agent, id).await.filter(|at| *at > 0)
    })
    .await;
    assert!(
        world
            .ledger
            .last(&world.tenant, id)
            .await
            .unwrap()
            .is_none()
    );

    let sent = world.ledger.send(draft, Bytes::new()).await.unwrap();
    let tip = world.ledger.settle(sent).await.unwrap();
    world.dispatch(&[tip], &agent.node).await;
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(last.state.epoch, 1);
    assert_eq!(
        result(&last),
        run_local("synthetic@1", &params).unwrap().result
    );
    agent.leave().await;
}

#[tokio::test]
async fn what_was_told_ahead_and_taken_back_leaves_nothing_behind() {
    let world = World::start().await;
    let mut options = world.options("n1");
    options.slots = 1;
    let agent = world.agent_with(options).await;
    let (tip, draft) = draft(
        &world,
        &json!({ "capsules": 100, "work_us": 10_000 }),
        &agent,
    );
    let id = tip.state.execution;
    tell(&world, &agent, word(&draft)).await;
    poll("it to be computed", async || {
        running(&world, &agent, id).await
    })
    .await;
    let abandoned = Handover::Abandoned {
        execution: id,
        epoch: 1,
    };
    tell(&world, &agent, (abandoned, Bytes::new())).await;
    // The node's only slot is free again at once, and nothing of the other was ever appended.
    let next = json!({ "program": "synthetic@1", "params": { "capsules": 1 } });
    let next = world.submit(&next.to_string(), &agent).await;
    world.wait_phase(next, "completed").await;
    assert!(
        world
            .ledger
            .last(&world.tenant, id)
            .await
            .unwrap()
            .is_none()
    );
    agent.leave().await;
}

#[tokio::test]
async fn another_binding_of_the_same_epoch_wins_over_what_was_told_ahead() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    let params = json!({ "capsules": 100, "work_us": 10_000 });
    let (tip, told) = draft(&world, &params, &agent);
    let id = tip.state.execution;
    tell(&world, &agent, word(&told)).await;
    poll("it to be computed", async || {
        running(&world, &agent, id).await
    })
    .await;
    // Another service's append came first: the same epoch, another message.
    let events = vec![
        Event::Submitted,
        bound(1, &agent.destination(), Cause::Initial),
    ];
    let tip = world.append(&tip, events).await;
    assert_ne!(tip.digest, Some(told.digest));
    world.dispatch(&[tip], &agent.node).await;
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(
        result(&last),
        run_local("synthetic@1", &params).unwrap().result
    );
    let completed = |e: &&Event| matches!(e, Event::Completed { .. });
    assert_eq!(world.events(id).await.iter().filter(completed).count(), 1);
    agent.leave().await;
}
