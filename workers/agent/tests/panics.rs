//! A panic in a runner is the node's fault: the binding is given back, no attempt is spent, and the slot
//! is free.

use crate::common::{Running, World, bound, poll, result, undisturbed};
use fiec_broker::Tip;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId, Fault};
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
async fn a_panic_in_a_runner_costs_no_attempt_and_the_execution_goes_on_elsewhere() {
    let world = World::start().await;
    let (first, second) = (panicky(&world).await, world.agent("b").await);
    let submission = synthetic(10, 0);
    let id = world.submit(&submission, &first).await;
    let last = world.wait_phase(id, "pending").await;
    let totals = last.state.totals;
    assert_eq!((totals.crashes, totals.node_faults), (0, 1));
    assert_eq!(last.state.deaths.len(), 1);
    let told = last.events.iter().find_map(|event| match event {
        Event::Yielded {
            cause: Cause::NotTaken { reason, fault },
            ..
        } => Some((reason.clone(), fault.as_deref().cloned())),
        _ => None,
    });
    let (reason, fault) = told.unwrap();
    assert!(reason.contains("a test wants a panic here"), "{reason}");
    assert_eq!(fault, Some(Fault::WorkerPanicked));
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
