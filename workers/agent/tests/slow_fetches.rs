//! Fetches of large states over a slow link: nothing that has arrived crosses the link again.

use std::collections::HashMap;
use std::time::Duration;

use crate::common::{Running, World, bound, poll, result, undisturbed};
use crate::slow_link::SlowLink;
use fiec_broker::chunks::{self, Manifest, Piece};
use fiec_broker::{Broker, ConnectOptions};
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::{Cause, Digest, Event, ExecutionId, LedgerMessage};
use serde_json::{Value, json};

const STATE_BYTES: u64 = 24_000_000;
/// The state takes 8 s.
const BYTES_PER_SECOND: u32 = 3_000_000;

/// It runs for 9 s after its first commit, so that it is still there when it shall move.
fn params() -> Value {
    json!({"capsules": 400, "rest_us": 30_000, "state_bytes": STATE_BYTES})
}

/// A node that holds an execution with a large state, and another one behind a slow link.
struct Stage {
    world: World,
    holder: Running,
    far: Running,
    link: SlowLink,
    id: ExecutionId,
}

impl Stage {
    async fn new() -> Self {
        let world = World::start().await;
        let holder = world.agent_that_keeps("a", Duration::from_secs(60)).await;
        let (link, url) = SlowLink::instead_of(&world.servers.nats_url(), BYTES_PER_SECOND);
        let mut options = world.options("b");
        options.slots = 2;
        let far = world.agent_at(options, url).await;
        let line = json!({"program": "synthetic@1", "params": params(), "commit": {"every": 100}});
        let id = world.submit(&line.to_string(), &holder).await;
        let committed = |m: &LedgerMessage| m.state.boundary.is_some();
        world.wait(id, "a commit", committed).await;
        Self {
            world,
            holder,
            far,
            link,
            id,
        }
    }

    /// Binds the execution to the far node.
    async fn bind(&self, mut events: Vec<Event>, cause: Cause) {
        let tip = self.world.last(self.id).await;
        let epoch = tip.message.state.epoch + 1;
        events.push(bound(epoch, &self.far.destination(), cause));
        let tip = self.world.append(&tip.into(), events).await;
        self.world.dispatch(&[tip], &self.far.node).await;
    }

    async fn paused_and_bound(&self) {
        self.world.pause(self.id, &self.holder).await;
        let who = "ann".to_owned();
        self.bind(vec![Event::Resumed { who }], Cause::Initial)
            .await;
    }

    async fn has_passed(&self, bytes: u64) {
        poll("bytes to cross the link", async || {
            (self.link.passed() >= bytes).then_some(())
        })
        .await;
    }

    /// It completes with equal bits, and its state has crossed the link once.
    async fn ends_after_one_fetch(self) {
        let ended = self.world.wait_phase(self.id, "completed").await;
        assert_eq!(result(&ended), undisturbed(&params()));
        let passed = self.link.passed();
        assert!(passed > STATE_BYTES, "{passed} bytes crossed the link");
        assert!(
            passed < STATE_BYTES * 3 / 2,
            "{passed} bytes crossed the link for a state of {STATE_BYTES}"
        );
        self.holder.leave().await;
        self.far.leave().await;
    }
}

#[tokio::test]
async fn a_fetch_goes_on_after_its_connection_was_cut() {
    let stage = Stage::new().await;
    stage.paused_and_bound().await;
    stage.has_passed(STATE_BYTES * 3 / 4).await;
    stage.link.cut();
    stage.ends_after_one_fetch().await;
}

#[tokio::test]
async fn a_binding_that_overtakes_another_on_its_node_takes_what_that_has_fetched() {
    let stage = Stage::new().await;
    stage.paused_and_bound().await;
    stage.has_passed(STATE_BYTES / 2).await;
    let reason = "it was not started in time".to_owned();
    let fault = None;
    let cause = Cause::NotTaken { reason, fault };
    stage.bind(Vec::new(), cause).await;
    stage.ends_after_one_fetch().await;
}

#[tokio::test]
async fn a_state_that_is_handed_over_waits_for_the_fetch_that_was_begun_for_it() {
    let stage = Stage::new().await;
    let (world, id) = (&stage.world, stage.id);
    let request = ControlRequest::Prepare {
        execution: id,
        tenant: world.tenant.clone(),
        program: "synthetic@1".to_owned(),
        state_bytes: STATE_BYTES,
        substrate: None,
    };
    world.control(&stage.far.node, &request).await.unwrap();
    stage.has_passed(STATE_BYTES / 20).await;
    let to: Destination = stage.far.destination();
    let request = ControlRequest::Yield {
        execution: id,
        epoch: world.last(id).await.message.state.epoch,
        cause: Cause::Balance,
        to: Some(to),
        decision: None,
    };
    let reply = world.control(&stage.holder.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    stage.ends_after_one_fetch().await;
}

#[tokio::test]
async fn a_chunk_that_waits_behind_others_is_awaited_while_they_arrive() {
    const CHUNK: usize = 768 << 10;
    let world = World::start().await;
    let (tenant, id) = (&world.tenant, ExecutionId(uuid::Uuid::now_v7()));
    let (mut pieces, mut places) = (Vec::new(), HashMap::new());
    for at in 0..20 {
        let bytes = vec![at as u8; CHUNK];
        let digest = Digest::of(&bytes);
        let range = at * CHUNK..(at + 1) * CHUNK;
        pieces.push(Piece { digest, range });
        let sent = chunks::send_piece(&world.broker, tenant, id, digest, bytes.into());
        places.insert(digest, sent.await.unwrap().await.unwrap().sequence);
    }
    let mut manifest = Manifest::of(&pieces, None, chunks::hour_now()).unwrap();
    manifest.stored_at(&places);
    // All of it takes 15 s, three times as long as an answer may take.
    let (_link, url) = SlowLink::instead_of(&world.servers.nats_url(), 1 << 20);
    let far = Broker::connect(ConnectOptions::new(url, "far"))
        .await
        .unwrap();
    let state = chunks::assemble(&far, &manifest).await.unwrap();
    assert_eq!(state.len(), 20 * CHUNK);
    assert!(
        state
            .chunks(CHUNK)
            .zip(0..)
            .all(|(piece, at)| piece == vec![at; CHUNK])
    );
}
