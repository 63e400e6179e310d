//! Ranges that are shared: parts are split off, computed elsewhere, given back and taken back, by
//! real workers and real children. The test is the policy service.

use std::sync::Arc;

use crate::common::{Running, World, bound, children, kill, result};
use fiec_broker::Tip;
use fiec_kit::run_local;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::programs::GEMM;
use fiec_schemas::spread::Part;
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, ExecutionState, LedgerMessage, Phase,
    Submission, Timestamp,
};
use serde_json::{Value, json};

/// 64 tiles, each of some tens of milliseconds.
fn product() -> Value {
    json!({
        "a": {"random": {"rows": 256, "cols": 20_000, "seed": 1}},
        "b": {"random": {"rows": 20_000, "cols": 256, "seed": 2}},
        "tile": 32,
    })
}

fn line() -> Value {
    json!({"program": GEMM, "params": product(), "commit": {"every": 3}, "spread": {"up_to": 3}})
}

impl World {
    async fn order_split(&self, id: ExecutionId, agent: &Running) -> Option<String> {
        let epoch = self.last(id).await.message.state.epoch;
        let request = ControlRequest::Split {
            execution: id,
            epoch,
        };
        self.control(&agent.node, &request).await.unwrap().error
    }

    /// Has it split, and makes the part.
    async fn split(&self, id: ExecutionId, agent: &Running) -> (Part, Tip) {
        assert_eq!(self.order_split(id, agent).await, None);
        let message = self
            .wait(id, "its part", |m| !m.state.parts().is_empty())
            .await;
        let holder = &message.state;
        let part = *holder.parts().last().unwrap();
        let spec = holder.spec.as_ref().unwrap();
        let spec = Arc::new(spec.part(part.range(), holder.submitted_at));
        let state = ExecutionState::unborn_part(holder, &part, spec, Timestamp::now());
        let tip = Tip {
            seq: 0,
            digest: None,
            state: state.into(),
            seen_in: 0,
        };
        (part, self.append(&tip, vec![Event::Submitted]).await)
    }

    async fn bind_again(&self, id: ExecutionId, agent: &Running) {
        let tip: Tip = self.last(id).await.into();
        let event = bound(tip.state.epoch + 1, &agent.destination(), Cause::Balance);
        let tip = self.append(&tip, vec![event]).await;
        self.dispatch(&[tip], &agent.node).await;
    }

    async fn waits(&self, id: ExecutionId) -> LedgerMessage {
        let waits = |m: &LedgerMessage| {
            let spread = m.state.spread.as_ref().unwrap();
            m.state.phase == Phase::PENDING && spread.waits
        };
        self.wait(id, "it to wait for its parts", waits).await
    }
}

fn names(message: &LedgerMessage) -> Vec<&'static str> {
    let name = |event: &Event| match event {
        Event::Started { .. } => "started",
        Event::Boundary(_) => "boundary",
        Event::Merged { .. } => "merged",
        Event::Yielded {
            cause: Cause::Parts,
            ..
        } => "yielded to its parts",
        Event::Completed { .. } => "completed",
        Event::Failed { .. } => "failed",
        _ => "other",
    };
    message.events.iter().map(name).collect()
}

#[tokio::test]
async fn a_range_that_is_split_twice_over_two_workers_ends_in_the_undisturbed_result() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 2;
    let a = world.agent_with(options).await;
    let b = world.agent("b").await;
    let whole = run_local(GEMM, &product()).unwrap();

    let id = world.started(&line(), &a).await;
    let (part, tip) = world.split(id, &a).await;
    assert_eq!(part.to, 64);
    world.bind_again(part.id, &b).await;
    assert_eq!(tip.state.part_of(), Some(id));
    world.wait_phase(part.id, "started").await;
    // A part of the part, on the first worker again.
    let (inner, _) = world.split(part.id, &b).await;
    assert!(part.from < inner.from && inner.to == 64);
    world.bind_again(inner.id, &a).await;

    let message = world.waits(id).await;
    assert_eq!(names(&message).last(), Some(&"yielded to its parts"));
    assert!(names(&message).contains(&"boundary"), "{message:?}");
    world.waits(part.id).await;
    let message = world.wait_phase(inner.id, "completed").await;
    let place = message.state.boundary.as_ref().unwrap();
    assert_eq!(
        place.ordinal, message.state.ordinal,
        "σ in its last message"
    );

    // Each is taken back by its holder, wherever that goes on.
    world.bind_again(part.id, &a).await;
    let message = world.wait_phase(part.id, "completed").await;
    assert!(
        names(&message).ends_with(&["boundary", "merged", "completed"]),
        "{message:?}"
    );
    assert_eq!(
        result(&message)["tiles"],
        json!({"from": part.from, "to": 64})
    );
    world.bind_again(id, &b).await;
    let message = world.wait_phase(id, "completed").await;
    assert!(
        names(&message).ends_with(&["boundary", "merged", "completed"]),
        "{message:?}"
    );
    assert_eq!(result(&message), whole.result);
    // Every tile was made once, by one of the three.
    let mut made = Vec::new();
    for id in [id, part.id, inner.id] {
        for event in world.events(id).await {
            let outputs = match event {
                Event::Boundary(boundary) => boundary.outputs,
                Event::Completed { outputs, .. } => outputs,
                _ => continue,
            };
            made.extend(outputs.into_iter().map(|o| (o.name, o.digest)));
        }
    }
    let mut expected: Vec<_> = whole
        .outputs
        .iter()
        .map(|o| (o.name.clone(), o.digest()))
        .collect();
    made.sort();
    expected.sort();
    assert_eq!(made, expected);
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn what_a_part_has_not_done_when_it_is_returned_is_done_by_its_holder() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let b = world.agent("b").await;
    let whole = run_local(GEMM, &product()).unwrap();
    for begins in [false, true] {
        let id = world.started(&line(), &a).await;
        let (part, _) = world.split(id, &a).await;
        if begins {
            world.bind_again(part.id, &b).await;
            world
                .wait(part.id, "progress", |m| m.state.boundary.is_some())
                .await;
            let order = ControlRequest::Yield {
                execution: part.id,
                epoch: 1,
                cause: Cause::Balance,
                to: None,
                decision: None,
            };
            let reply = world.control(&b.node, &order).await.unwrap();
            assert_eq!(reply.error, None);
            world.wait_phase(part.id, "pending").await;
        }
        world.waits(id).await;
        let tip = world.last(part.id).await.into();
        world.append(&tip, vec![Event::Returned { to: id }]).await;
        world.bind_again(id, &b).await;
        let message = world.wait_phase(id, "completed").await;
        assert_eq!(result(&message), whole.result, "begins: {begins}");
        let merged = |event: &Event| *event == Event::Merged { part: part.id };
        assert_eq!(world.events(id).await.into_iter().filter(merged).count(), 1);
        assert_eq!(message.state.totals.crashes, 0);
    }
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn killed_children_of_a_holder_and_its_part_go_on_from_their_last_commits() {
    let world = World::start().await;
    let (of_a, of_b) = (world.options("a"), world.options("b"));
    let a = world.agent_with(of_a.clone()).await;
    let b = world.agent_with(of_b.clone()).await;
    let whole = run_local(GEMM, &product()).unwrap();
    let id = world.started(&line(), &a).await;
    let (part, _) = world.split(id, &a).await;
    children(&of_a).into_iter().for_each(kill);
    world.bind_again(part.id, &b).await;
    world
        .wait(part.id, "progress", |m| m.state.boundary.is_some())
        .await;
    children(&of_b).into_iter().for_each(kill);
    let holder = world.waits(id).await.state;
    assert_eq!(holder.totals.crashes, 1);
    assert_eq!(holder.parts(), [part], "it was split once");
    let message = world.wait_phase(part.id, "completed").await;
    assert_eq!(message.state.totals.crashes, 1);
    world.bind_again(id, &b).await;
    let message = world.wait_phase(id, "completed").await;
    assert_eq!(result(&message), whole.result);
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_holder_that_is_bound_too_soon_waits_on_and_fails_when_its_part_has() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let id = world.started(&line(), &a).await;
    let (part, tip) = world.split(id, &a).await;
    world.waits(id).await;
    world.bind_again(id, &a).await;
    let again = |m: &LedgerMessage| m.state.epoch == 2 && m.state.phase == Phase::PENDING;
    let message = world.wait(id, "it to wait on", again).await;
    assert_eq!(names(&message).last(), Some(&"yielded to its parts"));
    assert!(!names(&message).contains(&"boundary"), "{message:?}");
    assert!(message.state.spread.as_ref().unwrap().waits);
    let who = "test".to_owned();
    world.append(&tip, vec![Event::Cancelled { who }]).await;
    world.bind_again(id, &a).await;
    let message = world.wait_phase(id, "failed").await;
    let Some(Event::Failed { reason, .. }) = message.events.last() else {
        panic!("{message:?}")
    };
    let part = part.id.to_string();
    assert!(
        reason.contains(&part) && reason.contains("cancelled"),
        "{reason}"
    );
    a.leave().await;
}

/// Three tiles, each of a second or so.
fn long_tiles() -> Value {
    json!({
        "a": {"random": {"rows": 1_536, "cols": 12_000, "seed": 1}},
        "b": {"random": {"rows": 12_000, "cols": 512, "seed": 2}},
        "tile": 512,
    })
}

#[tokio::test]
async fn a_cancel_or_a_pause_in_the_last_capsule_of_a_holder_holds_once_its_range_is_done() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.cancel_grace = std::time::Duration::from_secs(30);
    let a = world.agent_with(options).await;
    let whole = run_local(GEMM, &long_tiles()).unwrap();
    let line = json!({"program": GEMM, "params": long_tiles(), "spread": {"up_to": 2}});
    let who = || "test".to_owned();

    // A test that was stopped meanwhile finds that capsule at its end, and tries another.
    let caught = async |request: &dyn Fn(ExecutionId) -> ControlRequest| loop {
        let id = world.started(&line, &a).await;
        let (part, _) = world.split(id, &a).await;
        assert_eq!(part.from, 2, "its last capsule is under way");
        match world.control(&a.node, &request(id)).await.unwrap().error {
            None => return (id, part),
            Some(reason) => assert_eq!(reason, "the execution is leaving"),
        }
    };
    let cancel = |execution| ControlRequest::Cancel {
        execution,
        who: who(),
    };
    let (id, _) = caught(&cancel).await;
    let message = world.wait_phase(id, "cancelled").await;
    assert!(
        names(&message).ends_with(&["boundary", "other"]),
        "at its end: {message:?}"
    );

    let pause = |execution| ControlRequest::Pause {
        execution,
        who: who(),
    };
    let (id, part) = caught(&pause).await;
    let message = world.wait_phase(id, "paused").await;
    assert!(
        names(&message).ends_with(&["boundary", "yielded to its parts", "other"]),
        "{message:?}"
    );
    assert_eq!(message.state.requested(), None);
    assert!(message.state.spread.as_ref().unwrap().waits);
    // Nothing of it is lost.
    world.bind_again(part.id, &a).await;
    world.wait_phase(part.id, "completed").await;
    let tip = world.last(id).await.into();
    world
        .append(&tip, vec![Event::Resumed { who: who() }])
        .await;
    world.bind_again(id, &a).await;
    let message = world.wait_phase(id, "completed").await;
    assert_eq!(result(&message), whole.result);
    a.leave().await;
}

#[tokio::test]
async fn a_part_whose_state_is_too_large_to_be_taken_back_is_computed_by_its_holder() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let whole = run_local(GEMM, &product()).unwrap();
    let id = world.started(&line(), &a).await;
    let (part, tip) = world.split(id, &a).await;
    let now = Timestamp::now();
    let boundary = BoundaryEvent {
        index: 7,
        digest: Digest::of(b"nobody reads it"),
        bytes: INLINE_STATE_LIMIT as u64 + 1,
        computed_at: now,
        compute_us: 1,
        of: None,
        note: None,
        outputs: Vec::new(),
        energy: None,
    };
    let events = vec![
        bound(1, &a.destination(), Cause::Initial),
        Event::Started {
            epoch: 1,
            computing_since: now,
        },
        Event::Boundary(boundary),
        Event::Yielded {
            cause: Cause::Balance,
            computed_until: now,
        },
        Event::Returned { to: id },
    ];
    world.append(&tip, events).await;
    world.waits(id).await;
    world.bind_again(id, &a).await;
    let message = world.wait_phase(id, "completed").await;
    assert_eq!(result(&message), whole.result);
    let merged = |event: &Event| *event == Event::Merged { part: part.id };
    assert_eq!(world.events(id).await.into_iter().filter(merged).count(), 1);
    a.leave().await;
}

#[tokio::test]
async fn an_order_to_split_is_refused_where_the_range_is_not_to_be_shared() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let line =
        json!({"program": "synthetic@1", "params": {"capsules": 1_000_000, "rest_us": 1_000}});
    let id = world.started(&line, &a).await;
    let refused = world.order_split(id, &a).await.unwrap();
    assert!(refused.contains("does not allow to share"), "{refused}");
    let spread = Submission::parse(br#"{"program":"synthetic@1","spread":{"up_to":2}}"#);
    assert_eq!(spread.unwrap_err().field, "spread");
    a.leave().await;
}
