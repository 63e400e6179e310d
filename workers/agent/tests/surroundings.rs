//! Programs that look around at a boundary and ask their node for another grant: by a real worker
//! and a real child.

use crate::common::{Running, World, poll, result};
use fiec_kit::run_local;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::Grant;
use fiec_schemas::surroundings::{Offer, Offers, OffersReply};
use fiec_schemas::{Event, ExecutionId, NodeId, Timestamp, subjects};
use futures_util::StreamExt;
use serde_json::{Value, json};

impl World {
    /// What the program was told, once it is that.
    async fn told(&self, agent: &Running, words: &str) {
        poll(words, async || {
            let reply = self.control(&agent.node, &ControlRequest::Ping).await?;
            let note = reply.running.into_iter().find_map(|r| r.note)?;
            note.contains(words).then_some(())
        })
        .await;
    }

    async fn grants(&self, id: ExecutionId) -> Vec<(String, Grant)> {
        let events = self.events(id).await.into_iter();
        let grants = events.filter_map(|event| match event {
            Event::Reconfigured { who, grant } => Some((who, grant)),
            _ => None,
        });
        grants.collect()
    }
}

fn asks(capsules: u64, threads: u32) -> Value {
    json!({"program": "synthetic@1", "commit": {"every": 20}, "params":
        {"capsules": capsules, "rest_us": 2_000, "ask": {"every": 10, "threads": threads}}})
}

#[tokio::test]
async fn a_program_is_told_of_its_node_and_of_others_where_somebody_knows() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let id = world.started(&asks(1_000_000, 1), &a).await;
    // Nobody knows of others: that is not nothing.
    world.told(&a, "vector: a; offers: unknown").await;
    // Somebody does. Of its own node the vector tells.
    let client = world.broker.client.clone();
    let mut requests = client.subscribe(subjects::OFFERS).await.unwrap();
    let offer = |node: &str, free_slots| Offer {
        node: NodeId::new(node).unwrap(),
        free_slots,
        slots: 4,
        cores: 8,
        free_memory_bytes: None,
        devices: Vec::new(),
    };
    let reply = OffersReply {
        offers: Some(Offers {
            at: Timestamp::now(),
            nodes: vec![offer("b", 3), offer("c", 2), offer("a", 1)],
            left_off: 0,
        }),
        ..OffersReply::default()
    };
    let body = serde_json::to_vec(&reply).unwrap();
    let answering = tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let to = request.reply.unwrap();
            client.publish(to, body.clone().into()).await.unwrap();
        }
    });
    world.told(&a, "vector: a; offers: 5 slots").await;
    answering.abort();
    // One who does not answer is waited for no longer than a moment.
    let silent = world
        .broker
        .client
        .subscribe(subjects::OFFERS)
        .await
        .unwrap();
    world.told(&a, "vector: a; offers: unknown").await;
    drop(silent);
    let cancel = ControlRequest::Cancel {
        execution: id,
        who: "test".to_owned(),
    };
    world.control(&a.node, &cancel).await.unwrap();
    world.wait_phase(id, "cancelled").await;
    a.leave().await;
}

#[tokio::test]
async fn a_program_gets_fewer_threads_and_not_more_than_there_are_with_the_same_bits() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.threads = Some(2);
    let a = world.agent_with(options).await;
    let whole = run_local("synthetic@1", &json!({"capsules": 60})).unwrap();
    let less = world.submit(&asks(60, 1).to_string(), &a).await;
    let done = world.wait_phase(less, "completed").await;
    let grants = world.grants(less).await;
    assert_eq!(grants.len(), 1, "asked for again and again, granted once");
    assert_eq!(grants[0].0, "program");
    assert_eq!(grants[0].1.threads, Some(1));
    assert_eq!(result(&done), whole.result);
    let much = world.started(&asks(1_000_000, 100_000), &a).await;
    world.told(&a, "100000 threads: refused").await;
    assert_eq!(world.grants(much).await, []);
    a.leave().await;
}
