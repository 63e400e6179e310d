//! An agent whose broker comes back without something, or whose recorder stays away.

use std::time::Duration;

use crate::common::{World, poll};
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{Event, Timestamp, subjects};
use futures_util::StreamExt as _;
use serde_json::json;

#[tokio::test]
async fn bindings_arrive_after_a_broker_came_back_without_the_nodes_consumer() {
    let mut world = World::start().await;
    let agent = world.agent("n1").await;
    let nats = &mut world.servers.nats;
    nats.kill().await;
    let stream = subjects::capsule_stream(0);
    let consumers = nats
        .data_dir()
        .join("jetstream/$G/streams")
        .join(&stream)
        .join("obs");
    std::fs::remove_dir_all(consumers).unwrap();
    nats.restart().await.unwrap();
    poll("the agent to have made its consumer again", async || {
        let stream = world.broker.js.get_stream(&stream).await.ok()?;
        stream.consumer_names().next().await?.ok()
    })
    .await;
    let line = json!({ "program": "synthetic@1", "params": { "capsules": 2 } }).to_string();
    let id = world.submit(&line, &agent).await;
    world.wait_phase(id, "completed").await;
}

#[tokio::test]
async fn commits_go_on_at_the_longest_interval_while_the_recorder_is_away() {
    const LONGEST: Duration = Duration::from_millis(100);
    let world = World::start().await;
    let mut options = world.options("n1");
    options.longest_commit_interval = LONGEST;
    let agent = world.agent_with(options).await;
    let params = json!({ "capsules": 1_000_000, "rest_us": 1_000, "state_bytes": 8 });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every_ms": 10 } });
    let id = world.submit(&line.to_string(), &agent).await;
    let running = world.wait_phase(id, "started").await;
    // The recorder's only word: it has the binding and nothing that follows.
    let word = RecorderCheckpoint {
        seq: world.last(id).await.seq,
        lag: 0,
        at: Timestamp::now(),
    };
    let word = serde_json::to_vec(&word).unwrap();
    let subject = subjects::RECORDER_CHECKPOINT;
    let sent = world.broker.client.publish(subject, word.into()).await;
    sent.unwrap();
    // More than the ledger stream keeps.
    let enough = running.state.totals.commits + subjects::LEDGER_DEPTH + 20;
    world
        .wait(id, "commits beyond those that the stream keeps", |m| {
            m.state.totals.commits >= enough
        })
        .await;
    let messages = world.messages(id).await;
    let at = |message: &fiec_schemas::LedgerMessage| {
        message.events.iter().find_map(|event| match event {
            Event::Boundary(boundary) => Some(boundary.computed_at.micros()),
            _ => None,
        })
    };
    let all: Vec<_> = messages.iter().filter_map(at).collect();
    // Half of the exact time: each stamp depends on the measured offset of a clock. By its own
    // policy the execution would take a tenth of it.
    let last = &all[all.len() - 10..];
    let took = Duration::from_micros((last[9] - last[0]).try_into().unwrap());
    assert!(took >= LONGEST * 9 / 2, "{took:?}");
    agent.leave().await;
}
