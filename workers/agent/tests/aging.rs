//! Executions that compute for longer than the ledger stream keeps messages.

use std::time::Duration;

use crate::common::{World, poll};
use fiec_broker::store;
use fiec_schemas::subjects;
use serde_json::json;

/// Age at which the stream drops messages. A third of it is the margin of a busy machine.
const AGE: Duration = Duration::from_secs(6);

#[tokio::test]
async fn a_capsule_that_lasts_longer_than_the_stream_keeps_messages_goes_on_with_its_state() {
    let world = World::start().await;
    let stream = world.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    let mut config = stream.unwrap().cached_info().config.clone();
    (config.max_age, config.duplicate_window) = (AGE, AGE);
    world.broker.js.update_stream(config).await.unwrap();
    let mut options = world.options("n1");
    options.slots = 2;
    let agent = world.agent_with(options).await;

    // The second σ is too large for a message: the body is then the list of its chunks.
    let mut all = Vec::new();
    for bytes in [8, 2 << 20] {
        let params = json!({ "capsules": 2, "rest_us": 16_000_000, "state_bytes": bytes });
        let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 1 } });
        all.push(world.started(&line, &agent).await);
    }
    for id in &all {
        world
            .wait(*id, "a commit", |m| m.state.boundary.is_some())
            .await;
    }
    let from = world.last(all[0]).await.message.state.at.micros();
    let age = i64::try_from(AGE.as_micros()).unwrap();
    poll("twice the age to pass", async || {
        (world.broker.now().micros() > from + 2 * age).then_some(())
    })
    .await;
    for id in &all {
        let last = world.ledger.last(&world.tenant, *id).await.unwrap();
        let last = last.unwrap_or_else(|| panic!("the ledger of {id} has dropped out"));
        let state = &last.message.state;
        assert_eq!(
            (state.phase.as_str(), state.boundary_index()),
            ("started", 1)
        );
        let place = state.boundary.as_ref().unwrap();
        // Another worker could go on from here.
        let carried = world.ledger.by_sequence(place.seq.unwrap()).await.unwrap();
        assert!(!carried.body.is_empty());
        if !store::is_large(place) {
            world.ledger.state(*id, place).await.unwrap();
        }
        // It is kept when it has to be, not at each look.
        assert!(state.ordinal < 10, "{last:?}");
    }
    for id in all {
        world.wait_phase(id, "completed").await;
    }
    agent.leave().await;
}
