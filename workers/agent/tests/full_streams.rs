//! An execution whose worker finds a stream of the broker full stands still, and goes on when the
//! stream has room.

use std::time::Duration;

use crate::common::{World, poll};
use async_nats::jetstream::stream::Config;
use fiec_broker::topology::{self, Profile};
use fiec_schemas::{Phase, subjects};
use serde_json::json;

/// Runs an execution with states of this size, and takes a stream's room from it meanwhile.
async fn stands_still_and_goes_on(stream: &str, state_bytes: u64) {
    let world = World::start().await;
    let agent = world.agent("a").await;
    let params = json!({ "capsules": 200, "rest_us": 5_000, "state_bytes": state_bytes });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 5 } });
    let id = world.submit(&line.to_string(), &agent).await;
    world
        .wait(id, "a commit", |m| m.state.totals.commits > 0)
        .await;
    let js = &world.broker.js;
    let found = js.get_stream(stream).await.unwrap();
    let full = Config {
        max_bytes: 100,
        ..found.cached_info().config.clone()
    };
    let kept = found.cached_info().state.messages;
    js.update_stream(full).await.unwrap();
    let stuck = poll("the ledger to stand still", async || {
        let seq = world.last(id).await.seq;
        // Otherwise a commit comes every 25 ms.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        Some(world.last(id).await).filter(|last| last.seq == seq)
    })
    .await;
    assert!(matches!(stuck.message.state.phase, Phase::Started(_)));
    let now = js.get_stream(stream).await.unwrap();
    assert!(now.cached_info().state.messages >= kept, "it dropped some");

    topology::apply(&world.broker, &Profile::default())
        .await
        .unwrap();
    let done = world.wait_phase(id, "completed").await;
    let totals = &done.state.totals;
    let charged = (
        totals.crashes,
        totals.node_faults,
        totals.infrastructure_faults,
    );
    assert_eq!((done.state.epoch, charged), (1, (0, 0, 0)));
    agent.leave().await;
}

#[tokio::test]
async fn a_full_ledger_stream_stops_an_execution_and_charges_it_nothing() {
    stands_still_and_goes_on(subjects::LEDGER_STREAM, 1_000).await;
}

#[tokio::test]
async fn a_full_stream_of_chunks_stops_an_execution_and_charges_it_nothing() {
    stands_still_and_goes_on(subjects::CHUNK_STREAM, 1_000_000).await;
}

#[tokio::test]
async fn a_state_that_changes_as_a_whole_does_not_fill_the_stream_with_what_is_superseded() {
    let world = World::start().await;
    let mut options = world.options("a");
    // Longer than the test waits; a fifteenth of it is 4 s.
    options.superseded_after = Duration::from_secs(60);
    let agent = world.agent_with(options).await;
    const STATE: u64 = 2_000_000;
    let js = &world.broker.js;
    let found = js.get_stream(subjects::CHUNK_STREAM).await.unwrap();
    let small = Config {
        max_bytes: 5 * STATE as i64,
        ..found.cached_info().config.clone()
    };
    js.update_stream(small).await.unwrap();
    let params = json!({
        "capsules": 10, "rest_us": 100_000, "state_bytes": STATE,
        "change": { "bytes": STATE - 24 },
    });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 1 } });
    let id = world.submit(&line.to_string(), &agent).await;
    let done = world.wait_phase(id, "completed").await;
    assert!(
        done.state.totals.state_bytes >= 8 * STATE,
        "it committed too little to fill it"
    );
    agent.leave().await;
}
