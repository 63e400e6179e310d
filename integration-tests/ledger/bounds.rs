//! No submission raises a policy service above 500 MB, and a policy service that was stopped begins
//! nothing that another one has completed meanwhile.

use std::collections::HashMap;
use std::time::Duration;

use fiec_lab::cluster::ClusterOptions;

use crate::stage::{Lab, slots, until, workers};
use fiec_broker::registry;
use fiec_schemas::package::{Manifest, ProgramRecord};
use fiec_schemas::{Digest, Timestamp, subjects};
use futures_util::StreamExt as _;
use rustix::process::Signal;

/// What a policy service may take at most, in kB.
const MOST: u64 = 500_000;

/// The most memory that a process has had, in kB.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kb = peak.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    kb.unwrap_or(0)
}

async fn left(lab: &Lab) -> u64 {
    let stream = lab.broker.js.get_stream(subjects::SUBMIT_STREAM).await;
    stream.unwrap().cached_info().state.messages
}

/// Waits until all that was submitted has been taken in or refused; the service stays small.
async fn taken_in(lab: &Lab, what: &str) {
    let pid = lab.policies[0].pid();
    until(what, async || {
        let peak = peak(pid);
        assert!(peak > 0 && peak < MOST, "{what}: {peak} kB");
        (left(lab).await == 0).then_some(())
    })
    .await;
    println!("{what}: at most {} kB", peak(pid));
}

async fn publish(lab: &Lab, body: String) {
    let subject = subjects::submit(&lab.tenant);
    let sent = lab.broker.js.publish(subject, body.into()).await;
    sent.unwrap().await.unwrap();
}

#[tokio::test]
async fn no_submission_raises_a_policy_service_above_500_mb() {
    let lab = Lab::start(workers(1)).await;
    // A program whose parameters nobody checks, and that no node has.
    let record = ProgramRecord {
        program: "any@1".to_owned(),
        manifest: Manifest::parse(br#"{"entry":["x"],"protocol":"frames"}"#).unwrap(),
        artifact: Digest::of(b""),
        bytes: 0,
        pushed_at: Timestamp::now(),
        pushed_by: "test".to_owned(),
    };
    let name = "any@1".parse().unwrap();
    registry::register(&lab.broker, &name, &record)
        .await
        .unwrap();
    let array = |bytes: usize, count: u32| {
        let blob = "x".repeat(bytes);
        format!(
            r#"{{"program":"any@1","params":{{"x":"{blob}","n":"{{index}}"}},"array":{{"count":{count}}}}}"#
        )
    };

    publish(&lab, array(20 << 10, 10_000)).await;
    taken_in(&lab, "20 KiB × 10,000").await;
    publish(&lab, array(500_000, 10_000)).await;
    taken_in(&lab, "500 KB × 10,000").await;
    // Just below what is refused, of values that take a hundred times their text.
    let small = vec![r#"{"":0}"#; 70_000].join(",");
    let line = |count: u32| {
        format!(r#"{{"program":"any@1","params":{{"x":[{small}]}},"array":{{"count":{count}}}}}"#)
    };
    publish(&lab, line(4)).await;
    taken_in(&lab, "many small values × 4").await;
    for _ in 0..12 {
        let alone = line(1).replace(r#","array":{"count":1}"#, "");
        publish(&lab, [alone.clone(), alone].join("\n")).await;
    }
    taken_in(&lab, "24 lines of many small values").await;
    let requests = (0..40).map(|_| {
        let body = line(10_000).into();
        let subject = format!("fiec.api.submit.{}", lab.tenant);
        lab.broker.client.request(subject, body)
    });
    let answers = futures_util::future::join_all(requests).await;
    let answered = answers.iter().filter(|answer| answer.is_ok()).count();
    assert!(answered > 0, "nobody answered");
    taken_in(&lab, "40 requests of many small values").await;

    // It is at work.
    let params = serde_json::json!({"capsules": 2});
    let id = lab.publish("after-all", "synthetic@1", &params).await;
    lab.journal
        .find(id, "it completes", |line| {
            (line.phase() == "completed").then_some(())
        })
        .await;
    lab.stop().await;
}

#[tokio::test]
async fn a_policy_service_that_was_stopped_begins_nothing_that_has_completed_meanwhile() {
    let lab = Lab::start(ClusterOptions {
        policies: 2,
        worker_args: slots(2),
        ..workers(1)
    })
    .await;
    let mut words = lab
        .broker
        .client
        .subscribe("fiec.handover.*")
        .await
        .unwrap();
    lab.broker.client.flush().await.unwrap();
    // Both have asked for submissions; what the stopped one is given comes again.
    let stream = lab
        .broker
        .js
        .get_stream(subjects::SUBMIT_STREAM)
        .await
        .unwrap();
    until("both have asked", async || {
        let mut consumers = stream.consumers();
        let info = consumers.next().await?.ok()?;
        (info.num_waiting >= 2).then_some(())
    })
    .await;
    lab.policies[0].signal(Signal::STOP).unwrap();
    const COUNT: usize = 40;
    for _ in 0..COUNT {
        publish(
            &lab,
            r#"{"program":"synthetic@1","params":{"capsules":1}}"#.to_owned(),
        )
        .await;
    }
    until("all have completed by the other", async || {
        (lab.journal.ended_count("completed") >= COUNT && left(&lab).await == 0).then_some(())
    })
    .await;
    lab.policies[0].signal(Signal::CONT).unwrap();
    // It has read what it was given while it was stopped once it answers.
    until("the stopped one takes in submissions again", async || {
        publish(
            &lab,
            r#"{"program":"synthetic@1","params":{"capsules":1}}"#.to_owned(),
        )
        .await;
        let metrics = peak(lab.policies[0].pid());
        let mut consumers = stream.consumers();
        let info = consumers.next().await?.ok()?;
        (metrics > 0 && info.num_waiting >= 2 && left(&lab).await == 0).then_some(())
    })
    .await;
    let mut begun: HashMap<String, usize> = HashMap::new();
    while let Ok(Some(word)) = tokio::time::timeout(Duration::from_secs(3), words.next()).await {
        for line in String::from_utf8_lossy(&word.payload).lines() {
            let message: serde_json::Value = serde_json::from_str(line).unwrap();
            let id = message["state"]["execution"].as_str().unwrap_or_default();
            *begun.entry(id.to_owned()).or_default() += 1;
        }
    }
    let twice: Vec<_> = begun.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty(), "begun more than once: {twice:?}");
    lab.stop().await;
}
