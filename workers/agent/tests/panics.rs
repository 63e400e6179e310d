//! A panic in a runner is a crash like others: recorded, counted against the retries, and the slot
//! is free.

use crate::common::{Running, World, bound, poll, result, undisturbed};
use fiec_broker::Tip;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId};
use serde_json::json;

fn synthetic(capsules: u64, retries: u32) -> String {
    let params = json!({ "capsules": capsules, "rest_us": 1_000, "state_bytes": 100 });
    json!({ "program": "synthetic@1", "params": params, "commit": { "every": 1 },
        "retries": retries })
    .to_string()
}

async fn panicky(world: &World) -> Running {
    let mut options = world.options("a");
    options.panics_at = Some(5);
    world.agent_with(options).await
}

async fn is_forgotten(world: &World, agent: &Running, id: ExecutionId) {
    poll("the execution to be forgotten", async || {
        let ping = world.control(&agent.node, &ControlRequest::Ping).await?;
        let here = ping.running.iter().any(|r| r.execution == id);
        (!here).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_panic_in_a_runner_is_a_crash_after_which_the_execution_goes_on_elsewhere() {
    let world = World::start().await;
    let (first, second) = (panicky(&world).await, world.agent("b").await);
    let submission = synthetic(10, 3);
    let id = world.submit(&submission, &first).await;
    let last = world.wait_phase(id, "pending").await;
    assert_eq!(last.state.totals.crashes, 1);
    let crash = last.events.iter().find_map(|event| match event {
        Event::Crashed { exit, .. } => Some(exit.clone()),
        _ => None,
    });
    assert!(crash.unwrap().contains("a test wants a panic here"));
    is_forgotten(&world, &first, id).await;

    // The only slot is free.
    let other = world.submit(&synthetic(2, 0), &first).await;
    world.wait_phase(other, "completed").await;

    let cause = Cause::Operator {
        who: "test".to_owned(),
    };
    let tip = Tip::from(world.last(id).await);
    let tip = world
        .append(&tip, vec![bound(2, &second.destination(), cause)])
        .await;
    world.dispatch(&[tip], &second.node).await;
    let last = world.wait_phase(id, "completed").await;
    let params = json!({ "capsules": 10, "rest_us": 1_000, "state_bytes": 100 });
    assert_eq!(result(&last), undisturbed(&params));
    first.leave().await;
    second.leave().await;
}

#[tokio::test]
async fn a_panic_beyond_the_retries_fails_the_execution() {
    let world = World::start().await;
    let agent = panicky(&world).await;
    let id = world.submit(&synthetic(10, 0), &agent).await;
    let last = world.wait_phase(id, "failed").await;
    let reason = last.events.iter().find_map(|event| match event {
        Event::Failed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    let reason = reason.unwrap();
    assert!(
        reason.contains("runner panicked") && reason.contains("retries: 0"),
        "{reason}"
    );
    is_forgotten(&world, &agent, id).await;
    agent.leave().await;
}
