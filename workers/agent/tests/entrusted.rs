//! First bindings that are left to their node, which appends them with what it has to say.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Running, World, bound, poll, result};
use async_nats::HeaderMap;
use bytes::Bytes;
use fiec_broker::{Draft, Tip};
use fiec_kit::run_local;
use fiec_schemas::messages::{ControlRequest, HANDOVER_HEADER, Handover};
use fiec_schemas::{
    Candidate, Cause, Decision, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage,
    Submission, Timestamp, subjects,
};
use serde_json::{Value, json};

/// A first message that binds to `to`, not yet appended.
fn draft(world: &World, params: &Value, to: &Running) -> (Tip, Draft) {
    let line = json!({ "program": "synthetic@1", "params": params }).to_string();
    draft_of(world, &line, to)
}

fn draft_of(world: &World, line: &str, to: &Running) -> (Tip, Draft) {
    let spec = Arc::new(Submission::parse(line.as_bytes()).unwrap());
    let id = ExecutionId(uuid::Uuid::now_v7());
    let state = ExecutionState::unborn(world.tenant.clone(), id, spec, None, Timestamp::now());
    let tip = Tip {
        seq: 0,
        digest: None,
        state: state.into(),
        seen_in: 0,
    };
    let events = first_events(to);
    let draft = Draft::new(&tip, events, "policy/test", Timestamp::now()).unwrap();
    (tip, draft)
}

fn first_events(to: &Running) -> Vec<Event> {
    let mut bound = bound(1, &to.destination(), Cause::Initial);
    if let Event::Bound { decision, .. } = &mut bound {
        *decision = Some(Decision {
            candidates: Vec::new(),
            omitted: 0,
            entrusted: None,
        });
    }
    vec![Event::Submitted, bound]
}

/// Leaves these bindings to the node, which has heard of them when it answers.
async fn tell(world: &World, to: &Running, drafts: &[&Draft]) {
    let lines: Vec<&str> = drafts.iter().map(|d| d.header.as_str()).collect();
    let word = Handover::Entrusted {
        bindings: u32::try_from(lines.len()).unwrap(),
    };
    let mut headers = HeaderMap::new();
    headers.insert(HANDOVER_HEADER, serde_json::to_string(&word).unwrap());
    let client = &world.broker.client;
    let subject = subjects::handover(&to.node);
    client
        .request_with_headers(subject, headers, lines.join("\n").into())
        .await
        .unwrap();
}

/// The ledger's messages, each as the names of its events.
async fn messages(world: &World, id: ExecutionId) -> Vec<Vec<String>> {
    let name = |event: &Event| json!(event)["type"].as_str().unwrap().to_owned();
    let names = |m: &LedgerMessage| m.events.iter().map(name).collect();
    world.messages(id).await.iter().map(names).collect()
}

/// A node whose `started` waits for company longer than a busy machine takes to compute nothing.
async fn patient(world: &World) -> Running {
    let mut options = world.options("n1");
    options.started_alone_after = Duration::from_millis(300);
    world.agent_with(options).await
}

async fn with_one_slot(world: &World) -> Running {
    let mut options = world.options("n1");
    options.slots = 1;
    options.started_alone_after = Duration::from_millis(300);
    world.agent_with(options).await
}

/// Has the node compute something for two seconds, and waits until it does.
async fn keep_busy(world: &World, agent: &Running) {
    let long =
        json!({ "program": "synthetic@1", "params": { "capsules": 200, "rest_us": 10_000 } });
    let long = world.submit(&long.to_string(), agent).await;
    world.wait_phase(long, "started").await;
}

/// Waits until the node has a place for this one, and has computed it.
async fn can_compute(world: &World, agent: &Running) {
    let next = json!({ "program": "synthetic@1", "params": { "capsules": 1 } });
    let next = world.submit(&next.to_string(), agent).await;
    world.wait_phase(next, "completed").await;
}

const FIRST: [&str; 2] = ["submitted", "bound"];

#[tokio::test]
async fn what_ends_soon_is_one_message_with_its_binding() {
    let world = World::start().await;
    let agent = patient(&world).await;
    can_compute(&world, &agent).await;
    let params = json!({ "capsules": 0 });
    let all: Vec<_> = (0..40).map(|_| draft(&world, &params, &agent).1).collect();
    tell(&world, &agent, &all.iter().collect::<Vec<_>>()).await;
    for draft in &all {
        let id = draft.state.execution;
        let last = world.wait_phase(id, "completed").await;
        assert_eq!((last.state.ordinal, last.state.epoch), (1, 1));
        assert_eq!(
            result(&last),
            run_local("synthetic@1", &params).unwrap().result
        );
        // What was asked for, who decided, and when, stand where the ledger begins.
        assert_eq!(last.state.spec, draft.state.spec);
        assert_eq!(last.state.moved_at, Some(draft.state.at));
        assert!(last.state.author.starts_with("worker/n1/"));
        let Event::Bound { decision, .. } = &last.events[1] else {
            panic!("{:?}", last.events);
        };
        let entrusted = decision.clone().unwrap().entrusted.unwrap();
        assert_eq!(
            (&*entrusted.by, entrusted.at),
            ("policy/test", draft.state.at)
        );
        assert_eq!(
            messages(&world, id).await,
            [["submitted", "bound", "started", "completed"]]
        );
    }
    agent.leave().await;
}

#[tokio::test]
async fn what_takes_longer_begins_its_ledger_when_it_has_started() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    let params = json!({ "capsules": 300, "rest_us": 10_000 });
    let (_, draft) = draft(&world, &params, &agent);
    let id = draft.state.execution;
    tell(&world, &agent, &[&draft]).await;
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(
        result(&last),
        run_local("synthetic@1", &params).unwrap().result
    );
    let all = messages(&world, id).await;
    assert_eq!(all[0], ["submitted", "bound", "started"]);
    assert!(all.len() > 1);
    agent.leave().await;
}

#[tokio::test]
async fn a_binding_that_was_appended_after_all_is_followed() {
    let world = World::start().await;
    let agent = patient(&world).await;
    can_compute(&world, &agent).await;
    // Without a capsule message: the node learns of it when it loses its race.
    let params = json!({ "capsules": 0 });
    let (_, draft) = draft(&world, &params, &agent);
    let id = draft.state.execution;
    world
        .ledger
        .append(draft.clone(), Bytes::new())
        .await
        .unwrap();
    tell(&world, &agent, &[&draft]).await;
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(last.state.prev, Some(draft.digest));
    assert_eq!(
        messages(&world, id).await,
        [FIRST, ["started", "completed"]]
    );
    agent.leave().await;
}

#[tokio::test]
async fn a_binding_that_is_confirmed_while_it_waits_is_followed() {
    let world = World::start().await;
    let agent = with_one_slot(&world).await;
    keep_busy(&world, &agent).await;
    let (_, draft) = draft(&world, &json!({ "capsules": 0 }), &agent);
    let id = draft.state.execution;
    tell(&world, &agent, &[&draft]).await;
    let tip = world.ledger.append(draft, Bytes::new()).await.unwrap();
    world.dispatch(&[tip], &agent.node).await;
    world.wait_phase(id, "completed").await;
    assert_eq!(
        messages(&world, id).await,
        [FIRST, ["started", "completed"]]
    );
    // The capsule message was that binding's, and is done with.
    poll("the capsule to be acknowledged", async || {
        (world.capsules_left().await == 0).then_some(())
    })
    .await;
    agent.leave().await;
}

#[tokio::test]
async fn a_binding_of_hours_ago_is_followed_and_never_appended() {
    let world = World::start().await;
    let agent = patient(&world).await;
    can_compute(&world, &agent).await;
    let long_ago = Timestamp::from_micros(Timestamp::now().micros() - 2 * 3_600 * 1_000_000);
    let of_long_ago = || {
        let (tip, _) = draft(&world, &json!({ "capsules": 0 }), &agent);
        Draft::new(&tip, first_events(&agent), "policy/test", long_ago).unwrap()
    };
    let (stored, deleted) = (of_long_ago(), of_long_ago());
    let sent = world.ledger.append(stored.clone(), Bytes::new());
    sent.await.unwrap();
    tell(&world, &agent, &[&stored, &deleted]).await;
    let id = stored.state.execution;
    world.wait_phase(id, "completed").await;
    assert_eq!(
        messages(&world, id).await,
        [FIRST, ["started", "completed"]]
    );
    // The other one was looked up before this one has its slot back.
    agent.leave().await;
    let id = deleted.state.execution;
    let found = world.ledger.last(&world.tenant, id).await.unwrap();
    assert!(found.is_none(), "{found:?}");
}

#[tokio::test]
async fn a_binding_whose_execution_moves_at_once_begins_its_ledger_before_the_move() {
    let world = World::start().await;
    // Nothing but the move has it say anything.
    let mut options = world.options("n1");
    options.started_alone_after = Duration::from_secs(600);
    let (from, to) = (world.agent_with(options).await, world.agent("n2").await);
    let params = json!({ "capsules": 300, "rest_us": 10_000 });
    let line = json!({ "program": "synthetic@1", "params": params,
        "commit": { "every_ms": 600_000 } });
    let (_, draft) = draft_of(&world, &line.to_string(), &from);
    let id = draft.state.execution;
    tell(&world, &from, &[&draft]).await;
    poll("it computes", async || {
        let reply = world.control(&from.node, &ControlRequest::Ping).await?;
        let progress = reply.running.iter().find(|p| p.execution == id)?;
        (progress.boundary > 0).then_some(())
    })
    .await;
    let order = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Operator {
            who: "test".to_owned(),
        },
        to: Some(to.destination()),
        decision: None,
    };
    let reply = world.control(&from.node, &order).await.unwrap();
    assert_eq!(reply.error, None);
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(
        result(&last),
        run_local("synthetic@1", &params).unwrap().result
    );
    let all = messages(&world, id).await;
    assert_eq!(all[0], ["submitted", "bound", "started"]);
    assert_eq!(all[1], ["boundary", "yielded", "bound"]);
    assert_eq!((last.state.epoch, last.state.totals.rebindings), (2, 1));
    from.leave().await;
    to.leave().await;
}

#[tokio::test]
async fn a_ledger_that_is_somebody_elses_is_left_alone() {
    let world = World::start().await;
    let agent = with_one_slot(&world).await;
    let (tip, told) = draft(&world, &json!({ "capsules": 1 }), &agent);
    let id = tip.state.execution;
    // Another service has bound it to another life of a node.
    let mut elsewhere = agent.destination();
    elsewhere.instance = InstanceId::random();
    let events = vec![Event::Submitted, bound(1, &elsewhere, Cause::Initial)];
    world.append(&tip, events).await;
    tell(&world, &agent, &[&told]).await;
    // The only slot is free again, and nothing was appended.
    can_compute(&world, &agent).await;
    assert_eq!(messages(&world, id).await, [FIRST]);
    agent.leave().await;
}

#[tokio::test]
async fn another_binding_of_the_same_epoch_wins_over_what_was_left_to_the_node() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    let params = json!({ "capsules": 30, "rest_us": 10_000 });
    let (tip, told) = draft(&world, &params, &agent);
    let id = tip.state.execution;
    // Another service's append comes first: the same epoch, another message.
    let tip = world.append(&tip, first_events(&agent)).await;
    assert_ne!(tip.digest, Some(told.digest));
    tell(&world, &agent, &[&told]).await;
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

#[tokio::test]
async fn a_first_binding_with_the_longest_decision_is_appended_with_what_was_done() {
    let world = World::start().await;
    let agent = world.agent("n1").await;
    can_compute(&world, &agent).await;
    let (tip, _) = draft(&world, &json!({ "capsules": 0 }), &agent);
    let mut events = first_events(&agent);
    let Some(Event::Bound {
        decision: Some(decision),
        ..
    }) = events.last_mut()
    else {
        panic!("{events:?}");
    };
    let candidate = Candidate {
        node: agent.node.clone(),
        substrate: Some("\u{1}".repeat(1_000)),
        score: None,
        rejected: vec!["\u{1}".repeat(1_000); 20],
    };
    decision.candidates = vec![candidate; 40];
    let draft = Draft::new(&tip, events, "policy/test", Timestamp::now()).unwrap();
    let id = draft.state.execution;
    tell(&world, &agent, &[&draft]).await;
    world.wait_phase(id, "completed").await;
    let all = ["submitted", "bound", "started", "completed"];
    assert_eq!(messages(&world, id).await, [all]);
    agent.leave().await;
}

#[tokio::test]
async fn a_node_that_leaves_appends_nothing_that_was_left_to_it() {
    let world = World::start().await;
    let agent = with_one_slot(&world).await;
    keep_busy(&world, &agent).await;
    let (_, draft) = draft(&world, &json!({ "capsules": 0 }), &agent);
    let id = draft.state.execution;
    tell(&world, &agent, &[&draft]).await;
    agent.leave().await;
    assert!(
        world
            .ledger
            .last(&world.tenant, id)
            .await
            .unwrap()
            .is_none()
    );
}
