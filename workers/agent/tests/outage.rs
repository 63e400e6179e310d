//! An agent whose broker comes back without something.

use crate::common::{World, poll};
use fiec_schemas::subjects;
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
