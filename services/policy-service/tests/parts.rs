//! Requests about an execution whose range is shared, and their effect on its parts, with workers
//! played by the test.
use std::sync::Arc;

use crate::stage::{Stage, tenant, until};
use fiec_broker::{Draft, Ledger};
use fiec_schemas::messages::{ApiReply, BatchReply, ControlRequest};
use fiec_schemas::programs::TileRange;
use fiec_schemas::scheduling::{Adjustment, Deadline};
use fiec_schemas::spread::part_id;
use fiec_schemas::{
    BoundaryEvent, Cause, ClientId, Digest, Event, ExecutionId, ExecutionState, Phase, RequestKind,
    Timestamp,
};
use serde_json::json;

fn whole() -> ExecutionId {
    ExecutionId::from_client(&tenant(), &ClientId::new("w").unwrap())
}

async fn state(stage: &Stage, id: ExecutionId) -> Arc<ExecutionState> {
    stage.last_of(id).await.message.state
}

async fn comes_to_be(stage: &Stage, id: ExecutionId, phase: &str) {
    until(|| async { state(stage, id).await.phase.as_str() == phase }).await;
}

/// Appends as the worker that holds the execution.
async fn played(stage: &Stage, id: ExecutionId, events: impl FnOnce(u64) -> Vec<Event>) {
    let entry = stage.last_of(id).await;
    let state = &entry.message.state;
    let binding = state.phase.binding().unwrap();
    let author = format!("worker/{}/{}", binding.node, binding.instance);
    let events = events(state.epoch);
    let draft = Draft::new(&entry.into(), events, &author, Timestamp::now()).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(draft, bytes::Bytes::new()).await.unwrap();
}

fn started(epoch: u64) -> Event {
    Event::Started {
        epoch,
        computing_since: Timestamp::now(),
    }
}

/// The execution starts, and splits off these tiles at its first boundary.
fn shares(of: ExecutionId, from: u64, to: u64) -> (ExecutionId, impl Fn(u64) -> Vec<Event>) {
    let part = part_id(of, 0, TileRange { from, to });
    let events = move |epoch| {
        let boundary = Event::Boundary(BoundaryEvent {
            index: 1,
            digest: Digest::of(b"x"),
            bytes: 1,
            computed_at: Timestamp::now(),
            compute_us: 1_000,
            of: Some(128),
            note: None,
            outputs: vec![],
            energy: None,
        });
        let nth = 0;
        let split = Event::Split {
            part,
            nth,
            from,
            to,
        };
        vec![started(epoch), boundary, split]
    };
    (part, events)
}

fn asked(what: RequestKind) -> Event {
    Event::Requested {
        who: "ann".into(),
        what,
    }
}

/// A node, and an execution on it whose 256 tiles may be shared.
async fn stage_with_a_whole() -> Stage {
    let stage = Stage::with_nodes(&[]).await;
    stage.add_node("n1", &["gemm@1"], 4).await;
    stage
}

async fn submit(stage: &Stage, up_to: u32) {
    let matrix = |seed: u32| json!({"random": {"n": 4096, "seed": seed}});
    let tiles = json!({"from": 0, "to": 256});
    let line = json!({"id": "w", "program": "gemm@1", "batch": "night", "spread": {"up_to": up_to},
        "params": {"a": matrix(1), "b": matrix(2), "tile": 256, "tiles": tiles}});
    stage.publish(&line.to_string()).await;
    comes_to_be(stage, whole(), "bound").await;
}

#[tokio::test]
async fn a_batch_that_goes_on_does_so_with_parts_of_its_executions_that_alone_are_paused() {
    let stage = stage_with_a_whole().await;
    let _service = stage.service().await;
    submit(&stage, 2).await;
    let (part, splits) = shares(whole(), 128, 256);
    played(&stage, whole(), splits).await;
    comes_to_be(&stage, part, "bound").await;
    let request = json!({"id": part.to_string(), "who": "ann"});
    let reply: ApiReply = stage.ask("fiec.api.pause.lab", &request).await;
    assert_eq!(reply.error, None);
    assert_eq!(state(&stage, part).await.phase.as_str(), "paused");
    let resume = || async {
        let request = json!({"batch": "night", "who": "bob"});
        let subject = "fiec.api.batch.resume.lab";
        let reply: BatchReply = stage.ask(subject, &request).await;
        assert_eq!((reply.error.as_deref(), reply.failed), (None, 0));
        (reply.done, reply.left, reply.unconcerned)
    };
    assert_eq!(resume().await, (1, 0, 0));
    comes_to_be(&stage, part, "bound").await;
    assert_eq!(resume().await, (0, 0, 1), "nothing is paused any more");
    // A part with an order to pause is left for the next request.
    let pauses = |epoch| vec![started(epoch), asked(RequestKind::Pause)];
    played(&stage, part, pauses).await;
    assert_eq!(resume().await, (0, 1, 0));
}

/// The adjustments that a node was asked for, with their executions.
fn adjustments(heard: &[String]) -> Vec<(ExecutionId, Adjustment)> {
    let requests = heard.iter().map(|text| serde_json::from_str(text).unwrap());
    let changes = requests.filter_map(|request| match request {
        ControlRequest::Adjust {
            execution,
            who,
            change,
        } => {
            assert_eq!(who, "ann");
            Some((execution, change))
        }
        _ => None,
    });
    changes.collect()
}

#[tokio::test]
async fn what_is_changed_reaches_parts_and_theirs_where_they_are_and_is_due_at_the_same_moment() {
    let stage = stage_with_a_whole().await;
    let _service = stage.service().await;
    submit(&stage, 3).await;
    let (part, splits) = shares(whole(), 128, 256);
    played(&stage, whole(), splits).await;
    comes_to_be(&stage, part, "bound").await;
    let (its_part, splits) = shares(part, 192, 256);
    played(&stage, part, splits).await;
    comes_to_be(&stage, its_part, "bound").await;

    let heard = stage.hears_control("n1").await;
    let within = Deadline {
        within_s: Some(3_600),
        ..Deadline::default()
    };
    let change = Adjustment {
        priority: Some(7),
        deadline: Some(within),
        nodes: Some(vec!["n1".parse().unwrap()]),
        ..Adjustment::default()
    };
    let due = within.moment(state(&stage, whole()).await.submitted_at);
    let of_parts = Adjustment {
        deadline: Some(Deadline {
            at: Some(due),
            ..Deadline::default()
        }),
        ..change.clone()
    };
    let adjust = || async {
        let request = json!({"id": "w", "who": "ann", "change": change});
        let reply: ApiReply = stage.ask("fiec.api.adjust.lab", &request).await;
        assert_eq!(reply.error, None);
        reply.message
    };
    let said = adjust().await;
    assert!(said.starts_with("w is changed"), "{said}");
    assert!(said.ends_with("so it is with 2 of its parts"), "{said}");
    // The workers change the running executions, and the service the other one.
    until(|| async { adjustments(&heard.lock().unwrap()).len() == 2 }).await;
    let told = adjustments(&heard.lock().unwrap());
    assert_eq!(told, [(whole(), change.clone()), (part, of_parts.clone())]);
    let changed = stage.last_of(its_part).await;
    let expected = Event::Adjusted {
        who: "ann".into(),
        change: of_parts.clone(),
    };
    assert_eq!(changed.message.events, std::slice::from_ref(&expected));

    // If the adjustment is in force already, nothing is appended again.
    played(&stage, part, |_| vec![expected]).await;
    let said = adjust().await;
    assert!(!said.contains("of its parts"), "{said}");
    assert_eq!(stage.last_of(its_part).await.seq, changed.seq);
}

#[tokio::test]
async fn a_part_that_runs_where_its_whole_may_not_any_more_is_moved() {
    let stage = stage_with_a_whole().await;
    stage.add_node("n2", &["gemm@1"], 4).await;
    let _service = stage.service().await;
    submit(&stage, 2).await;
    let (part, splits) = shares(whole(), 128, 256);
    played(&stage, whole(), splits).await;
    comes_to_be(&stage, part, "bound").await;
    played(&stage, part, |epoch| vec![started(epoch)]).await;
    let there = state(&stage, part)
        .await
        .phase
        .binding()
        .unwrap()
        .node
        .clone();
    let other = if there.as_str() == "n1" { "n2" } else { "n1" };
    let heard = stage.hears_control(there.as_str()).await;
    let change = json!({"nodes": [other]});
    let request = json!({"id": "w", "who": "ann", "change": change});
    let reply: ApiReply = stage.ask("fiec.api.adjust.lab", &request).await;
    assert_eq!(reply.error, None);
    let told = || adjustments(&heard.lock().unwrap());
    until(|| async { told().iter().any(|(id, _)| *id == part) }).await;
    let (_, change) = told().into_iter().find(|(id, _)| *id == part).unwrap();
    let who = "ann".to_owned();
    let adjusted = Event::Adjusted { who, change };
    played(&stage, part, |_| vec![adjusted]).await;
    let leaves = |text: &String| match serde_json::from_str(text).unwrap() {
        ControlRequest::Yield { execution, to, .. } => {
            execution == part && to.is_some_and(|to| to.node.as_str() == other)
        }
        _ => false,
    };
    until(|| async { heard.lock().unwrap().iter().any(leaves) }).await;
}

#[tokio::test]
async fn a_part_that_is_made_after_a_change_begins_with_it() {
    let stage = stage_with_a_whole().await;
    let _service = stage.service().await;
    submit(&stage, 2).await;
    let (part, splits) = shares(whole(), 128, 256);
    // No part is made for an execution with an order to pause.
    let pauses = |epoch| [splits(epoch), vec![asked(RequestKind::Pause)]].concat();
    played(&stage, whole(), pauses).await;
    let who = "ann".to_owned();
    let yielded = Event::Yielded {
        cause: Cause::Operator { who: who.clone() },
        computed_until: Timestamp::now(),
    };
    let paused = vec![yielded, Event::Paused { who }];
    played(&stage, whole(), |_| paused).await;
    let change = json!({"priority": 7, "deadline": {"within_s": 3600}});
    let request = json!({"id": "w", "who": "ann", "change": change});
    let reply: ApiReply = stage.ask("fiec.api.adjust.lab", &request).await;
    assert_eq!(reply.error, None);
    assert!(!reply.message.contains("of its parts"), "{}", reply.message);
    let request = json!({"id": "w", "who": "ann"});
    let reply: ApiReply = stage.ask("fiec.api.resume.lab", &request).await;
    assert_eq!(reply.error, None);
    let born = state(&stage, part).await.adjusted.clone().unwrap();
    assert_eq!(born.priority, Some(7));
    let submitted_at = state(&stage, whole()).await.submitted_at;
    let due = Timestamp::from_micros(submitted_at.micros() + 3_600_000_000);
    assert_eq!(born.deadline.unwrap().at, Some(due));
    assert!(matches!(
        state(&stage, whole()).await.phase,
        Phase::Pending { .. } | Phase::Bound(_)
    ));
}
