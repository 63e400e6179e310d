//! The service against a real nats-server, with a worker played by the test.

use std::time::Duration;

use crate::stage::{Stage, tenant, until};
use fiec_broker::{Draft, Ledger};
use fiec_policy_service::Options;
use fiec_schemas::duty::{Actor, START_MS, Task};
use fiec_schemas::messages::{ApiReply, RefusalCode, SubmitReply};
use fiec_schemas::{ClientId, Event, ExecutionId, Phase, Timestamp};
use serde_json::json;

#[tokio::test]
async fn a_submission_is_bound_in_one_message_and_its_capsule_sent() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    let entry = stage.last("a").await;
    assert_eq!(entry.message.state.ordinal, 1);
    assert!(matches!(
        entry.message.events[..],
        [Event::Submitted, Event::Bound { epoch: 1, .. }]
    ));
    let capsule = stage.capsule("n1").await;
    assert_eq!(capsule.bindings.len(), 1);
    assert_eq!(
        (capsule.bindings[0].seq, capsule.bindings[0].digest),
        (entry.seq, entry.digest)
    );
    until(|| async { stage.submissions_left().await == 0 }).await;
}

#[tokio::test]
async fn a_batch_keeps_its_line_numbers_and_bad_lines_are_recorded() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage.publish("{\"id\":\"a\",\"program\":\"synthetic@1\"}\n{\"program\":7}\n\n{\"id\":\"b\",\"program\":\"synthetic@1\"}\n").await;
    let (a, b) = (
        stage.last("a").await.message.state,
        stage.last("b").await.message.state,
    );
    assert_eq!(a.batch.unwrap().id, b.batch.unwrap().id);
    assert_eq!((a.batch.unwrap().line, b.batch.unwrap().line), (1, 4));
    until(|| async { stage.submissions_left().await == 0 }).await;
    let record = stage.record("fiec.record.rejection.lab").await;
    assert_eq!(record["error"]["line"], 2);
    assert_eq!(record["error"]["field"], "program");
}

#[tokio::test]
async fn a_byte_order_mark_before_a_submission_is_ignored() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage
        .publish("\u{feff}{\"id\":\"a\",\"program\":\"synthetic@1\"}")
        .await;
    assert_eq!(stage.last("a").await.message.state.ordinal, 1);
    until(|| async { stage.submissions_left().await == 0 }).await;
}

#[tokio::test]
async fn the_same_id_with_the_same_body_is_one_execution_and_with_another_a_rejection() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    let first = stage.last("a").await.seq;
    stage
        .publish(r#"{"program":"synthetic@1", "id":"a"}"#)
        .await;
    stage
        .publish(r#"{"id":"a","program":"synthetic@1","params":{"capsules":2}}"#)
        .await;
    let record = stage.record("fiec.record.rejection.lab").await;
    assert_eq!(record["error"]["field"], "id");
    assert!(
        record["error"]["reason"]
            .as_str()
            .unwrap()
            .contains("another body"),
        "{record}"
    );
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert_eq!(stage.last("a").await.seq, first);
}

#[tokio::test]
async fn two_racing_services_make_exactly_one_binding() {
    let stage = Stage::with_nodes(&["n1", "n2"]).await;
    let mut services = vec![stage.service().await];
    // Pending, because no node has the program. Then both services see a node with free slots.
    let lines: Vec<String> = (0..4)
        .map(|i| format!(r#"{{"id":"r{i}","program":"cg@1","params":{{"matrix":{{"poisson2d":{{"n":8}}}}}}}}"#))
        .collect();
    stage.publish(&lines.join("\n")).await;
    assert!(matches!(
        stage.last("r3").await.message.state.phase,
        Phase::Pending { .. }
    ));
    services.push(stage.service().await);
    stage.add_node("n3", &["cg@1"], 8).await;
    for i in 0..4 {
        let id = format!("r{i}");
        until(|| async { matches!(stage.last(&id).await.message.state.phase, Phase::Bound(_)) })
            .await;
    }
    // Nothing more may happen, so there is no condition to wait for. This is longer than the grace
    // after which the other replica acts.
    tokio::time::sleep(Duration::from_millis(800)).await;
    for i in 0..4 {
        let state = stage.last(&format!("r{i}")).await.message.state;
        assert_eq!((state.epoch, state.ordinal), (1, 2), "{state:?}");
    }
}

#[tokio::test]
async fn a_restarted_service_takes_over_what_is_live() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    stage.last("a").await;
    service.stop().await;
    let _next = stage.service().await;
    let reply: ApiReply = stage.ask("fiec.api.why.lab", &json!({"id":"a"})).await;
    let why = reply.why.unwrap();
    assert!(why.summary.contains("bound to n1"));
    let next = why.next.unwrap();
    assert_eq!((next.who, next.what), (Actor::Worker, Task::Start));
    let bound_at = stage.last("a").await.message.state.moved_at.unwrap();
    assert_eq!(next.by, Some(bound_at.plus_ms(START_MS)));
    assert!(next.in_words().starts_with("worker n1 must start it, by "));
}

#[tokio::test]
async fn the_service_survives_a_restart_of_the_broker() {
    let mut stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    stage.last("a").await;
    stage.restart_broker().await;
    until(|| async {
        stage
            .try_publish(r#"{"id":"b","program":"synthetic@1"}"#)
            .await
    })
    .await;
    assert!(stage.last("b").await.seq > 0);
    stage.finish("b", "n1").await;
    until(|| async {
        let reply: ApiReply = stage.ask("fiec.api.nodes", &json!({})).await;
        reply.nodes.first().is_some_and(|n| n.bound == 1)
    })
    .await;
}

#[tokio::test]
async fn a_request_is_answered_line_by_line_with_the_ids_that_come_to_be() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    let body = "{\"program\":\"synthetic@1\"}\nnot json\n{\"id\":\"a\",\"program\":\"synthetic@1\"}\n{\"id\":\"a\",\"program\":\"synthetic@1\",\"retries\":1}\n";
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", body).await;
    assert_eq!(reply.error, None);
    let accepted: Vec<_> = reply.accepted.iter().map(|a| a.line).collect();
    let errors: Vec<_> = reply
        .errors
        .iter()
        .map(|e| (e.line, e.field.as_str()))
        .collect();
    assert_eq!(accepted, [1, 3]);
    assert_eq!(errors, [(2, ""), (4, "id")]);
    assert_eq!(
        reply.accepted[1].id,
        ExecutionId::from_client(&tenant(), &ClientId::new("a").unwrap())
    );
    for line in &reply.accepted {
        let entry = stage.last_of(line.id).await;
        assert_eq!(entry.message.state.batch.map(|b| b.id), reply.batch);
    }
    let again: SubmitReply = stage
        .ask_raw(
            "fiec.api.submit.lab",
            r#"{"id":"a","program":"synthetic@1"}"#,
        )
        .await;
    assert!(again.accepted[0].existing);
    let status: ApiReply = stage.ask("fiec.api.status.lab", &json!({"id":"a"})).await;
    assert!(status.state.is_some());
}

#[tokio::test]
async fn operators_cancel_pause_resume_and_cordon() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let _service = stage.service().await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    stage.last("a").await;
    let ask = |verb: &str| {
        (
            format!("fiec.api.{verb}.lab"),
            json!({"id":"a","who":"ann"}),
        )
    };
    for (verb, phase) in [
        ("pause", "paused"),
        ("resume", "pending"),
        ("cancel", "cancelled"),
    ] {
        let (subject, request) = ask(verb);
        let reply: ApiReply = stage.ask(&subject, &request).await;
        assert_eq!(
            reply.state.map(|s| s.phase.as_str()),
            Some(phase),
            "{verb}: {:?}",
            reply.error
        );
        if verb == "resume" {
            until(|| async {
                matches!(stage.last("a").await.message.state.phase, Phase::Bound(_))
            })
            .await;
        }
    }
    let causes = stage.causes("a").await;
    assert!(
        causes.contains(&"resumed"),
        "a resumption is no first placement: {causes:?}"
    );
    let (subject, request) = ask("cancel");
    let reply: ApiReply = stage.ask(&subject, &request).await;
    assert_eq!(reply.refusal, Some(RefusalCode::Ended), "{:?}", reply.error);
    let reply: ApiReply = stage
        .ask("fiec.api.node.cordon", &json!({"node":"n1","who":"ann"}))
        .await;
    assert_eq!(reply.error, None);
    stage.publish(r#"{"id":"b","program":"synthetic@1"}"#).await;
    stage.last("b").await;
    let why: ApiReply = stage.ask("fiec.api.why.lab", &json!({"id":"b"})).await;
    assert!(why.why.unwrap().candidates[0].rejected[0].contains("cordoned by ann"));
    let reply: ApiReply = stage
        .ask("fiec.api.node.drain", &json!({"node":"nowhere"}))
        .await;
    assert_eq!(reply.refusal, Some(RefusalCode::UnknownNode));
    assert!(reply.error.unwrap().contains("there are: n1"));
}

#[tokio::test]
async fn a_change_of_the_service_itself_that_it_gave_up_and_that_is_stored_later_is_followed() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let options = Options::default();
    let author = fiec_schemas::author::of_policy(options.id);
    let _service = stage.service_with(options).await;
    stage.publish(r#"{"id":"a","program":"synthetic@1"}"#).await;
    stage.last("a").await;
    let request = json!({"id":"a","who":"ann"});
    let reply: ApiReply = stage.ask("fiec.api.pause.lab", &request).await;
    assert_eq!(reply.error, None);
    // As the message of a resumption whose acknowledgement was lost.
    let (paused, at) = (stage.last("a").await, Timestamp::now());
    let resumed = vec![Event::Resumed { who: "ann".into() }];
    let draft = Draft::new(&paused.into(), resumed, &author, at).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(draft, bytes::Bytes::new()).await.unwrap();
    let last = async || stage.last("a").await.message.state.phase.clone();
    until(async || matches!(last().await, Phase::Bound(_))).await;
}

#[tokio::test]
async fn a_large_submission_lies_in_the_data_store_and_is_placed() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let labels: std::collections::BTreeMap<String, String> = (0..30)
        .map(|i| (format!("label-{i}"), "x".repeat(100)))
        .collect();
    stage
        .publish(&json!({"id":"big","program":"synthetic@1","labels":labels}).to_string())
        .await;
    let entry = stage.last("big").await;
    assert!(entry.message.state.spec.is_none());
    assert!(matches!(entry.message.state.phase, Phase::Bound(_)));
    let stored =
        fiec_broker::store::get_data(&stage.broker, entry.message.state.submission, 0).await;
    assert!(stored.unwrap().len() > 3_000);
    service.stop().await;
}

#[tokio::test]
async fn the_micro_service_lists_its_endpoints() {
    let stage = Stage::with_nodes(&[]).await;
    let _service = stage.service().await;
    let info: serde_json::Value = stage.ask("$SRV.INFO.fiec", &json!({})).await;
    let names: Vec<_> = info["endpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["name"].as_str().unwrap().to_owned())
        .collect();
    for name in [
        "submit", "status", "cancel", "pause", "resume", "yield", "why", "nodes", "cordon",
        "uncordon", "drain", "envelope",
    ] {
        assert!(names.contains(&name.to_owned()), "{names:?}");
    }
}
