//! Executions that compute as long as their submission allows.

use std::time::Duration;

use crate::common::World;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::{Event, Fault};
use serde_json::{Value, json};

/// Some milliseconds for each capsule, without an end.
fn endless(more: &Value) -> Value {
    let mut line = json!({"program": "synthetic@1", "commit": {"every_ms": 200},
                          "params": {"capsules": 100_000_000, "rest_us": 2_000}});
    line.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    line
}

fn fault(event: &Event) -> Option<&Fault> {
    match event {
        Event::Failed { fault, .. } | Event::Held { fault, .. } => fault.as_deref(),
        _ => None,
    }
}

#[tokio::test]
async fn an_execution_that_has_computed_its_limit_ends_at_a_boundary_or_is_held_there() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    for (on_failure, phase) in [("fail", "failed"), ("hold", "held")] {
        let line = endless(&json!({"limit": {"computed_s": 1}, "on_failure": on_failure}));
        let id = world.submit(&line.to_string(), &agent).await;
        let last = world.wait_phase(id, phase).await;
        let events = &last.events;
        assert_eq!(
            fault(&events[events.len() - 1]),
            Some(&Fault::ComputedLimit)
        );
        assert!(
            matches!(events[events.len() - 2], Event::Boundary(_)),
            "nothing is lost: {events:?}"
        );
        let computed = Duration::from_micros(last.state.totals.compute_us);
        assert!(computed > Duration::from_millis(500), "{computed:?}");
    }
    agent.leave().await;
}

#[tokio::test]
async fn time_in_which_it_is_parked_does_not_count() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    let line = endless(&json!({"limit": {"computed_s": 2}}));
    let id = world.started(&line, &agent).await;
    world.parked(&agent, id, Keep::Host).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let state = world.last(id).await.message.state;
    assert!(state.parked().is_some(), "{state:?}");
    assert_eq!(world.unpark(&agent, id).await, None);
    let last = world.wait_phase(id, "failed").await;
    let events = &last.events;
    assert_eq!(
        fault(&events[events.len() - 1]),
        Some(&Fault::ComputedLimit)
    );
    agent.leave().await;
}

#[tokio::test]
async fn a_program_that_reaches_no_boundary_after_its_limit_is_ended() {
    let world = World::start().await;
    let mut options = world.options("n1");
    options.cancel_grace = Duration::from_millis(100);
    let agent = world.agent_with(options).await;
    let line = json!({"program": "synthetic@1", "limit": {"computed_s": 1},
                      "params": {"capsules": 1, "rest_us": 600_000_000}});
    let id = world.submit(&line.to_string(), &agent).await;
    let last = world.wait_phase(id, "failed").await;
    assert_eq!(
        fault(last.events.last().unwrap()),
        Some(&Fault::ComputedLimit)
    );
    let short = json!({"program": "synthetic@1", "params": {"capsules": 1}});
    let next = world.submit(&short.to_string(), &agent).await;
    world.wait_phase(next, "completed").await;
    agent.leave().await;
}
