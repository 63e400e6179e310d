//! Arrays, dependencies, atomic messages, quotas and gangs through a real broker, with nodes played
//! by the test.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::stage::{Stage, tenant, until};
use async_nats::HeaderMap;
use fiec_broker::{Broker, Draft, Ledger, Tip};
use fiec_policy_service::Options;
use fiec_schemas::messages::{BatchReply, SubmitReply};
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{
    ClientId, Event, ExecutionId, ExecutionState, InstanceId, Phase, PhaseKind, Submission,
    Timestamp, subjects,
};
use futures_util::StreamExt as _;

fn id(client: &str) -> ExecutionId {
    ExecutionId::from_client(&tenant(), &ClientId::new(client).unwrap())
}

async fn phase(stage: &Stage, client: &str) -> String {
    let entry = stage.last(client).await;
    entry.message.state.phase.as_str().to_owned()
}

async fn exists(stage: &Stage, client: &str) -> bool {
    let ledger = Ledger::new(&stage.broker);
    ledger.last(&tenant(), id(client)).await.unwrap().is_some()
}

/// Sends an atomic message.
async fn publish_atomic(broker: &Broker, body: &str) {
    let mut headers = HeaderMap::new();
    headers.insert(ATOMIC_HEADER, "true");
    let subject = subjects::submit(&tenant());
    let ack = broker
        .js
        .publish_with_headers(subject, headers, body.to_owned().into());
    ack.await.unwrap().await.unwrap();
}

#[tokio::test]
async fn an_array_becomes_so_many_executions_by_request_and_by_message_and_once_only() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let line =
        r#"{"id":"part","program":"synthetic@1","array":{"count":3},"labels":{"n":"{index}"}}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    let expected: Vec<_> = (0..3).map(|n| id(&format!("part-{n}"))).collect();
    assert_eq!(reply.accepted[0].elements, expected, "{reply:?}");
    assert_eq!(reply.accepted[0].line, 1);
    for n in 0..3 {
        let state = stage.last(&format!("part-{n}")).await.message.state;
        assert_eq!(state.spec.as_ref().unwrap().labels["n"], n.to_string());
        assert_eq!(
            state.batch.unwrap().id,
            reply.batch.unwrap(),
            "they are a batch"
        );
    }
    // The same line again, as a message: the same executions.
    stage.publish(line).await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    let again: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    assert!(again.accepted[0].existing, "{again:?}");
    // Without a client's id, ids derive from the message's place.
    let line = r#"{"program":"synthetic@1","array":{"count":4}}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    let ids: BTreeSet<_> = reply.accepted[0].elements.iter().copied().collect();
    assert_eq!(ids.len(), 4);
    for id in ids {
        stage.last_of(id).await;
    }
    let few = r#"{"program":"synthetic@1","array":{"count":4}}"#;
    let many = r#"{"id":"many","program":"synthetic@1","array":{"count":100000}}"#;
    let reply: SubmitReply = stage
        .ask_raw("fiec.api.submit.lab", &format!("{few}\n{many}"))
        .await;
    assert_eq!(
        (reply.errors[0].line, &*reply.errors[0].field),
        (2, "array.count")
    );
    service.stop().await;
}

#[tokio::test]
async fn a_large_array_is_answered_with_its_count_and_has_an_id_from_which_the_others_follow() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let nameless = r#"{"program":"synthetic@1","array":{"count":10001}}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", nameless).await;
    assert_eq!(reply.errors[0].field, "id", "{reply:?}");
    let line = r#"{"id":"large","program":"synthetic@1","array":{"count":10001}}"#;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    let accepted = &reply.accepted[0];
    assert_eq!((accepted.count, accepted.existing), (Some(10_001), false));
    assert!(accepted.elements.is_empty());
    assert_eq!(accepted.id, id("large-0"));
    until(|| async { exists(&stage, "large-10000").await }).await;
    // All of them are looked up together.
    let again: SubmitReply = stage.ask_raw("fiec.api.submit.lab", line).await;
    assert!(again.accepted[0].existing, "{again:?}");
    let other = line.replace("count\":10001", "count\":10002");
    let more: SubmitReply = stage.ask_raw("fiec.api.submit.lab", &other).await;
    assert!(!more.accepted[0].existing, "{more:?}");
    let labelled = line.replace(r#""id""#, r#""labels":{"x":"y"},"id""#);
    let refused: SubmitReply = stage.ask_raw("fiec.api.submit.lab", &labelled).await;
    assert_eq!(refused.errors[0].field, "id", "{refused:?}");
    service.stop().await;
}

#[tokio::test]
async fn lines_that_wait_for_each_other_are_placed_in_their_order_and_circles_are_refused() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    stage
        .publish(
            r#"{"id":"last","program":"synthetic@1","after":[{"id":"first"}]}
{"id":"first","program":"synthetic@1"}
{"id":"x","program":"synthetic@1","after":[{"id":"y"}]}
{"id":"y","program":"synthetic@1","after":[{"id":"x"}]}"#,
        )
        .await;
    until(|| async { phase(&stage, "first").await == "bound" }).await;
    assert_eq!(phase(&stage, "last").await, "pending");
    let record = stage.record("fiec.record.rejection.lab").await;
    let reason = record["error"]["reason"].as_str().unwrap();
    assert!(
        reason.contains("in a circle: x (line 3) → y (line 4) → x (line 3)"),
        "{reason}"
    );
    assert!(!exists(&stage, "x").await);
    let why: serde_json::Value = stage
        .ask("fiec.api.why.lab", &serde_json::json!({"id": "last"}))
        .await;
    let summary = why["why"]["summary"].as_str().unwrap();
    assert!(
        summary.contains("it waits for first to complete (it is bound)"),
        "{summary}"
    );
    stage.finish("first", "n1").await;
    until(|| async { phase(&stage, "last").await == "bound" }).await;
    // By request, the error names line and field. A line may depend on existing executions.
    let reply: SubmitReply = stage
        .ask_raw(
            "fiec.api.submit.lab",
            r#"{"id":"good","program":"synthetic@1","after":[{"id":"first"},{"id":"last","on":"any"}]}
{"id":"bad","program":"synthetic@1","after":[{"id":"first"},{"id":"nobody"}]}
{"id":"behind","program":"synthetic@1","after":[{"id":"bad"}]}"#,
        )
        .await;
    assert_eq!(reply.accepted.len(), 1, "{reply:?}");
    let errors: Vec<_> = reply
        .errors
        .iter()
        .map(|e| (e.line, e.field.as_str()))
        .collect();
    assert_eq!(errors, [(2, "after[1].id"), (3, "after[0].id")]);
    service.stop().await;
}

#[tokio::test]
async fn what_is_waited_for_may_be_submitted_a_moment_later() {
    let stage = Stage::with_nodes(&["n1"]).await;
    // The service looks in the ledgers, and then in the queue of submissions.
    let looks = format!("$JS.API.STREAM.MSG.GET.{}", subjects::SUBMIT_STREAM);
    let mut looks = stage.broker.client.subscribe(looks).await.unwrap();
    let service = stage.service().await;
    stage
        .publish(r#"{"id":"second","program":"synthetic@1","after":[{"id":"first"}]}"#)
        .await;
    // It has reached the last message, and asks for one after it.
    let found_none = async {
        while let Some(look) = looks.next().await {
            let look: serde_json::Value = serde_json::from_slice(&look.payload).unwrap();
            if look["seq"].as_u64() == Some(2) {
                return;
            }
        }
    };
    let found_none = tokio::time::timeout(Duration::from_secs(10), found_none);
    found_none
        .await
        .expect("nobody looks for what is waited for");
    assert!(!exists(&stage, "second").await);
    stage
        .publish(r#"{"id":"first","program":"synthetic@1"}"#)
        .await;
    until(|| async { exists(&stage, "second").await }).await;
    service.stop().await;
}

#[tokio::test]
async fn a_message_is_taken_as_a_whole_or_not_at_all_where_it_asks_for_that() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    stage
        .publish(r#"{"id":"there","program":"synthetic@1"}"#)
        .await;
    until(|| async { exists(&stage, "there").await }).await;
    publish_atomic(
        &stage.broker,
        r#"{"id":"a","program":"synthetic@1"}
{"id":"there","program":"synthetic@1","retries":9}
{"id":"c","program":"synthetic@1"}"#,
    )
    .await;
    until(|| async { stage.submissions_left().await == 0 }).await;
    assert!(!exists(&stage, "a").await && !exists(&stage, "c").await);
    let record = stage.record("fiec.record.rejection.lab").await;
    let reason = record["error"]["reason"].as_str().unwrap();
    assert!(
        reason.contains("the whole message is refused because of line 2: id"),
        "{reason}"
    );
    // The same by request.
    let mut headers = HeaderMap::new();
    headers.insert(ATOMIC_HEADER, "true");
    let body = "{\"id\":\"a\",\"program\":\"synthetic@1\"}\n{\"program\":\"nobody@1\"}";
    let client = &stage.broker.client;
    let reply = client
        .request_with_headers("fiec.api.submit.lab", headers, body.into())
        .await
        .unwrap();
    let reply: SubmitReply = serde_json::from_slice(&reply.payload).unwrap();
    assert!(reply.accepted.is_empty(), "{reply:?}");
    assert_eq!(reply.errors.len(), 2);
    assert!(!exists(&stage, "a").await);
    // A valid message is accepted.
    publish_atomic(
        &stage.broker,
        "{\"id\":\"a\",\"program\":\"synthetic@1\"}\n{\"id\":\"b\",\"program\":\"synthetic@1\"}",
    )
    .await;
    until(|| async { exists(&stage, "a").await && exists(&stage, "b").await }).await;
    service.stop().await;
}

#[tokio::test]
async fn a_whole_that_was_begun_by_a_service_that_died_is_completed_when_it_comes_again() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let lines = ["one", "two", "three"]
        .map(|id| format!(r#"{{"id":"{id}","program":"synthetic@1"}}"#))
        .join("\n");
    publish_atomic(&stage.broker, &lines).await;
    let stream = stage
        .broker
        .js
        .get_stream(subjects::SUBMIT_STREAM)
        .await
        .unwrap();
    let stored = stream.get_raw_message(1).await.unwrap();
    let micros = i64::try_from(stored.time.unix_timestamp_nanos() / 1_000).unwrap();
    // The service that accepted the first line was killed before the second.
    let spec = Submission::parse(lines.lines().next().unwrap().as_bytes()).unwrap();
    let stamp = Timestamp::from_micros(micros);
    let state = ExecutionState::unborn(tenant(), id("one"), Arc::new(spec), None, stamp);
    let tip = Tip {
        seq: 0,
        digest: None,
        state: state.into(),
        seen_in: 0,
    };
    let first = Draft::new(&tip, vec![Event::Submitted], "policy/dead", stamp).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(first, bytes::Bytes::new()).await.unwrap();
    let service = stage.service().await;
    for name in ["one", "two", "three"] {
        until(|| async { exists(&stage, name).await }).await;
    }
    until(|| async { stage.submissions_left().await == 0 }).await;
    service.stop().await;
}

#[tokio::test]
async fn a_batch_of_thousands_is_cancelled_in_bounded_answers_and_dependents_do_not_fail() {
    const COUNT: u32 = 2_000;
    let stage = Stage::with_nodes(&[]).await;
    let service = stage.service().await;
    let line = format!(
        r#"{{"id":"b","batch":"b","program":"synthetic@1","array":{{"count":{}}}}}"#,
        COUNT - 1
    );
    let last = r#"{"id":"end","batch":"b","program":"synthetic@1","after":[{"id":"b-0"}]}"#;
    stage.publish(&format!("{line}\n{last}")).await;
    let began = std::time::Instant::now();
    while stage.submissions_left().await > 0 {
        assert!(began.elapsed() < Duration::from_secs(120));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eprintln!("{COUNT} taken in within {:?}", began.elapsed());
    let page = async |verb: &str, within_ms: u64, cursor: Option<String>| {
        let request = serde_json::json!(
            {"batch": "b", "who": "ann", "within_ms": within_ms, "cursor": cursor}
        );
        let mut body = async_nats::Request::new();
        body = body
            .payload(request.to_string().into())
            .timeout(Some(Duration::from_secs(30)));
        let subject = format!("fiec.api.batch.{verb}.lab");
        let reply = stage
            .broker
            .client
            .send_request(subject, body)
            .await
            .unwrap();
        serde_json::from_slice::<BatchReply>(&reply.payload).unwrap()
    };
    // Collects all answers that one request needs.
    let ask = async |verb: &str, within_ms: u64| {
        let (began, mut answers, mut cursor) = (std::time::Instant::now(), 0, None);
        loop {
            let mut reply = page(verb, within_ms, cursor).await;
            (answers, cursor) = (answers + 1, reply.cursor.take());
            assert_eq!(
                (reply.error.as_deref(), reply.failed),
                (None, 0),
                "{reply:?}"
            );
            if cursor.is_none() {
                return (answers, reply);
            }
            assert!(
                answers < 500 && began.elapsed() < Duration::from_secs(120),
                "no end after {answers} answers: {reply:?}"
            );
        }
    };
    // Two milliseconds are too short to read all ledgers. The cursor of each answer leads to the
    // rest.
    let (answers, status) = ask("status", 2).await;
    eprintln!("read in {answers} answers");
    assert!(answers > 1, "one answer took longer than it was to");
    assert_eq!(
        status.phases.get(&PhaseKind::Pending),
        Some(&COUNT),
        "{status:?}"
    );
    let began = std::time::Instant::now();
    while ask("cancel", 1_000).await.1.left > 0 {
        assert!(began.elapsed() < Duration::from_secs(120));
    }
    eprintln!("cancelled within {:?}", began.elapsed());
    let (_, status) = ask("status", 1_000).await;
    assert_eq!(
        status.phases.get(&PhaseKind::Cancelled),
        Some(&COUNT),
        "{status:?}"
    );
    service.stop().await;
}

fn quota(running: u32) -> Quota {
    Quota {
        v: 1,
        running: Some(running),
        devices: None,
        memory_bytes: None,
        waiting: None,
        weight: None,
        who: "ann".into(),
        at: Timestamp::now(),
    }
}

async fn set_quota(stage: &Stage, quota: &Quota) {
    let bucket = stage
        .broker
        .js
        .get_key_value(subjects::QUOTA_BUCKET)
        .await
        .unwrap();
    let value = serde_json::to_vec(quota).unwrap();
    bucket.put("lab", value.into()).await.unwrap();
}

async fn reserved(stage: &Stage) -> usize {
    let stream = stage
        .broker
        .js
        .get_stream(subjects::QUOTA_STREAM)
        .await
        .unwrap();
    match stream
        .get_last_raw_message_by_subject("fiec.quota.lab")
        .await
    {
        Ok(message) => {
            let table: Reservations = serde_json::from_slice(&message.payload).unwrap();
            table.entries.len()
        }
        Err(_) => 0,
    }
}

/// The phases of the executions `e-0`, `e-1`, ….
async fn bound_of(stage: &Stage, count: usize) -> Vec<String> {
    let ledger = Ledger::new(&stage.broker);
    let mut bound = Vec::new();
    for n in 0..count {
        let name = format!("e-{n}");
        let last = ledger.last(&tenant(), id(&name)).await.unwrap();
        let phase = last.map(|entry| entry.message.state.phase.clone());
        if matches!(phase, Some(Phase::Bound(_))) {
            bound.push(name);
        }
    }
    bound
}

#[tokio::test]
async fn two_policy_services_never_exceed_a_quota_and_run_everything_in_turn() {
    const LIMIT: usize = 3;
    let stage = Stage::with_nodes(&["n1", "n2"]).await;
    set_quota(&stage, &quota(3)).await;
    let service = |n| {
        let id = InstanceId(uuid::Uuid::from_u128(n));
        Options {
            id,
            ..Options::default()
        }
    };
    let one = stage.service_with(service(1)).await;
    let two = stage.service_with(service(2)).await;
    stage
        .publish(r#"{"id":"e","program":"synthetic@1","array":{"count":12}}"#)
        .await;
    let mut completed = 0;
    let began = std::time::Instant::now();
    let mut one = Some(one);
    while completed < 12 {
        let bound = bound_of(&stage, 12).await;
        assert!(bound.len() <= LIMIT, "{bound:?}");
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{completed} of 12 have run"
        );
        if let Some(name) = bound.first() {
            let entry = stage.last(name).await;
            if let Some(binding) = entry.message.state.phase.binding() {
                stage.finish(name, binding.node.as_str()).await;
                completed += 1;
            }
        } else {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // One service ends in the middle. The other one takes over its reservations.
        if completed == 5
            && let Some(one) = one.take()
        {
            one.stop().await;
        }
    }
    until(|| async { reserved(&stage).await == 0 }).await;
    two.stop().await;
}

#[tokio::test]
async fn the_capsules_of_a_gang_go_out_once_all_its_members_are_bound() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let member = |n: u32| {
        format!(r#"{{"id":"g-{n}","program":"synthetic@1","gang":{{"name":"g","size":3}}}}"#)
    };
    stage.publish(&member(1)).await;
    stage.publish(&member(2)).await;
    until(|| async { exists(&stage, "g-1").await && exists(&stage, "g-2").await }).await;
    let why: serde_json::Value = stage
        .ask("fiec.api.why.lab", &serde_json::json!({"id": "g-1"}))
        .await;
    let summary = why["why"]["summary"].as_str().unwrap();
    assert!(
        summary.contains("of which 2 of 3 members are there"),
        "{summary}"
    );
    stage.publish(&member(3)).await;
    let mut told = BTreeSet::new();
    while told.len() < 3 {
        for binding in stage.capsule("n1").await.bindings {
            told.insert(binding.state.execution);
            // When any capsule is sent, all members are bound.
            for n in 1..=3 {
                assert_eq!(phase(&stage, &format!("g-{n}")).await, "bound");
            }
        }
    }
    service.stop().await;
}

#[tokio::test]
async fn what_waits_for_one_that_was_cancelled_fails_after_a_restart_too() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    stage
        .publish("{\"id\":\"first\",\"program\":\"synthetic@1\"}\n{\"id\":\"second\",\"program\":\"synthetic@1\",\"after\":[{\"id\":\"first\"}]}")
        .await;
    until(|| async { exists(&stage, "second").await }).await;
    service.stop().await;
    // No service runs when it ends.
    let entry = stage.last("first").await;
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    let draft = Draft::new(&entry.into(), cancelled, "policy/x", Timestamp::now());
    let ledger = Ledger::new(&stage.broker);
    ledger
        .append(draft.unwrap(), bytes::Bytes::new())
        .await
        .unwrap();
    let service = stage.service().await;
    until(|| async { phase(&stage, "second").await == "failed" }).await;
    let events = stage.last("second").await.message.events;
    let Some(Event::Failed { reason, .. }) = events.first() else {
        panic!("{events:?}")
    };
    assert_eq!(reason, "it waits for first, which was cancelled");
    service.stop().await;
}
