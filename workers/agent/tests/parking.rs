//! Executions that wait at a boundary with their process alive, and programs that ask for more: by
//! a real worker and real children.

use crate::common::{Running, World, poll, result, undisturbed};
use fiec_schemas::envelope::NodeEnvelopes;
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::scheduling::Keep;
use fiec_schemas::{Cause, Event, ExecutionId, LedgerMessage, NodeId, Phase, subjects};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

impl World {
    async fn ask(&self, agent: &Running, request: ControlRequest) -> Option<String> {
        self.control(&agent.node, &request).await.unwrap().error
    }

    async fn park(&self, agent: &Running, execution: ExecutionId, keep: Keep) -> Option<String> {
        let cause = Cause::Unviable {
            reason: "a test".to_owned(),
        };
        let request = ControlRequest::Park {
            execution,
            epoch: 1,
            cause,
            keep,
        };
        self.ask(agent, request).await
    }

    pub async fn parked(&self, agent: &Running, id: ExecutionId, keep: Keep) -> LedgerMessage {
        assert_eq!(self.park(agent, id, keep).await, None);
        let message = self
            .wait(id, "it to be parked", |m| m.state.parked().is_some())
            .await;
        assert_eq!(message.state.parked().unwrap().keep, keep);
        message
    }

    pub async fn unpark(&self, agent: &Running, execution: ExecutionId) -> Option<String> {
        let request = ControlRequest::Unpark {
            execution,
            epoch: 1,
            reason: "a test".to_owned(),
        };
        self.ask(agent, request).await
    }

    async fn started_on(&self, line: Value, agent: &Running, substrate: &str) -> ExecutionId {
        let to = Destination {
            substrate: substrate.to_owned(),
            ..agent.destination()
        };
        let tip = self.bind(&line.to_string(), &to).await;
        let id = tip.state.execution;
        self.dispatch(&[tip], &agent.node).await;
        self.wait_phase(id, "started").await;
        id
    }

    async fn with_device(&self, name: &str, slots: u32) -> Running {
        let file = self.folder.path().join("devices.json");
        let devices = json!([{"id": "GPU-0", "kind": "gpu", "name": "Simulated",
            "memory_bytes": 8 * GIB, "used_bytes": GIB,
            "device": {"compute_capability": "9.0", "multiprocessors": 8}}]);
        std::fs::write(&file, devices.to_string()).unwrap();
        let mut options = self.options(name);
        options.slots = slots;
        options.device_file = Some(file);
        options.profile_cache = Some(self.folder.path().join("machines"));
        self.agent_with(options).await
    }
}

fn long() -> Value {
    json!({"program": "synthetic@1", "params": {"capsules": 1_000_000, "rest_us": 1_000}})
}

fn quick() -> Value {
    json!({"program": "synthetic@1", "params": {"capsules": 3, "rest_us": 1_000}})
}

fn on_device(mut line: Value) -> Value {
    line["requires"] = json!({"device": {}});
    line
}

#[tokio::test]
async fn a_parked_execution_frees_its_slot_and_goes_on_where_it_is_with_the_same_bits() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let params = json!({"capsules": 600, "rest_us": 8_000, "state_bytes": 4_000});
    let line = json!({"program": "synthetic@1", "params": params, "commit": {"every": 50}});
    let id = world.started_on(line, &a, "host").await;
    let at = world
        .parked(&a, id, Keep::Host)
        .await
        .state
        .boundary_index();
    // The only slot is free for another one, and while that computes this one waits.
    let other = world.started_on(long(), &a, "host").await;
    let refused = world.unpark(&a, id).await.unwrap();
    assert!(refused.contains("1 of 1 compute"), "{refused}");
    assert_eq!(world.last(id).await.message.state.boundary_index(), at);
    let cancel = ControlRequest::Cancel {
        execution: other,
        who: "test".to_owned(),
    };
    assert_eq!(world.ask(&a, cancel).await, None);
    world.wait_phase(other, "cancelled").await;
    poll("it to go on", async || {
        world.unpark(&a, id).await.is_none().then_some(())
    })
    .await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(result(&done), undisturbed(&params));
    assert_eq!((done.state.epoch, done.state.totals.crashes), (1, 0));
    let events = world.events(id).await;
    let count = |is: fn(&&Event) -> bool| events.iter().filter(is).count();
    let started = count(|e| matches!(e, Event::Started { .. }));
    let parked = count(|e| matches!(e, Event::Parked { .. }));
    let unparked = count(|e| matches!(e, Event::Unparked { .. }));
    assert_eq!((started, parked, unparked), (1, 1, 1));
    a.leave().await;
}

#[tokio::test]
async fn a_parked_execution_keeps_its_device_or_frees_it() {
    let world = World::start().await;
    let a = world.with_device("a", 2).await;
    let id = world.started_on(on_device(long()), &a, "GPU-0").await;
    let asks_for_it = async || {
        let to = Destination {
            substrate: "GPU-0".to_owned(),
            ..a.destination()
        };
        let tip = world.bind(&on_device(quick()).to_string(), &to).await;
        let other = tip.state.execution;
        world.dispatch(&[tip], &a.node).await;
        let settled =
            |m: &LedgerMessage| m.state.phase == Phase::PENDING || m.state.phase.is_terminal();
        let message = world.wait(other, "completed or refused", settled).await;
        message.state.phase.as_str().to_owned()
    };
    world.parked(&a, id, Keep::Device).await;
    assert_eq!(asks_for_it().await, "pending", "the device is kept");
    assert_eq!(world.unpark(&a, id).await, None);
    world.parked(&a, id, Keep::Host).await;
    assert_eq!(asks_for_it().await, "completed", "the device is free");
    // It takes its device again, and refuses to go on while another has that.
    let holder = world.started_on(on_device(long()), &a, "GPU-0").await;
    let refused = world.unpark(&a, id).await.unwrap();
    assert!(refused.contains("GPU-0 is taken"), "{refused}");
    let cancel = ControlRequest::Cancel {
        execution: holder,
        who: "test".to_owned(),
    };
    assert_eq!(world.ask(&a, cancel).await, None);
    world.wait_phase(holder, "cancelled").await;
    poll("the device", async || {
        world.unpark(&a, id).await.is_none().then_some(())
    })
    .await;
    let before = world.last(id).await.message.state.boundary_index();
    world
        .wait(id, "progress", |m| m.state.boundary_index() > before)
        .await;
    a.leave().await;
}

#[tokio::test]
async fn a_parked_execution_yields_pauses_and_is_cancelled_where_it_stands() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 4;
    let a = world.agent_with(options).await;
    let b = world.agent("b").await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        let id = world.started_on(long(), &a, "host").await;
        world.parked(&a, id, Keep::Host).await;
        ids.push(id);
    }
    let at: Vec<u64> = {
        let mut at = Vec::new();
        for id in &ids {
            at.push(world.last(*id).await.message.state.boundary_index());
        }
        at
    };
    let who = "test".to_owned();
    let orders = [
        ControlRequest::Yield {
            execution: ids[0],
            epoch: 1,
            cause: Cause::Balance,
            to: Some(b.destination()),
            decision: None,
        },
        ControlRequest::Yield {
            execution: ids[1],
            epoch: 1,
            cause: Cause::Balance,
            to: None,
            decision: None,
        },
        ControlRequest::Pause {
            execution: ids[2],
            who: who.clone(),
        },
        ControlRequest::Cancel {
            execution: ids[3],
            who,
        },
    ];
    for (n, order) in orders.into_iter().enumerate() {
        assert_eq!(world.ask(&a, order).await, None, "{n}");
    }
    for (n, phase) in ["bound", "pending", "paused", "cancelled"]
        .into_iter()
        .enumerate()
    {
        let left = |m: &LedgerMessage| m.state.phase.as_str() != "started" || m.state.epoch > 1;
        let message = world.wait(ids[n], phase, left).await;
        assert_eq!(message.state.phase.as_str(), phase);
        assert_eq!(
            message.state.boundary_index(),
            at[n],
            "nothing was computed"
        );
        assert_eq!(message.state.parked(), None);
    }
    // The destination takes it up from σ in the ledger.
    let tip = world.last(ids[0]).await.into();
    world.dispatch(&[tip], &b.node).await;
    world
        .wait(ids[0], "progress elsewhere", |m| {
            m.state.boundary_index() > at[0]
        })
        .await;
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_drain_takes_what_is_parked_along_and_a_new_run_begins_from_its_commit() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let id = world.started_on(long(), &a, "host").await;
    let at = world
        .parked(&a, id, Keep::Host)
        .await
        .state
        .boundary_index();
    a.leave().await;
    let message = world.last(id).await.message;
    assert_eq!(message.state.phase, Phase::PENDING, "{message:?}");
    assert_eq!(message.state.boundary_index(), at);
}

#[tokio::test]
async fn only_so_many_are_parked_and_none_while_memory_presses() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 3;
    options.parked = Some(1);
    options.memory_limit = Some(64 * GIB);
    let a = world.agent_with(options).await;
    let first = world.started_on(long(), &a, "host").await;
    let second = world.started_on(long(), &a, "host").await;
    world.parked(&a, first, Keep::Host).await;
    let refused = world.park(&a, second, Keep::Host).await.unwrap();
    assert!(
        refused.contains("1 executions are parked on this node"),
        "{refused}"
    );
    // With next to nothing offered of it, memory is above its threshold.
    squeeze(&world, &a.node).await;
    let message = world.wait_phase(first, "pending").await;
    let cause = message.events.iter().find_map(|e| match e {
        Event::Yielded { cause, .. } => Some(cause.in_words()),
        _ => None,
    });
    assert!(
        cause
            .unwrap()
            .contains("the execution was parked, and memory")
    );
    let refused = world.park(&a, second, Keep::Host).await.unwrap();
    assert!(refused.contains("above its threshold"), "{refused}");
    let state = world.last(second).await.message.state;
    assert_eq!(state.phase.as_str(), "started", "what computes goes on");
    a.leave().await;
}

async fn squeeze(world: &World, node: &NodeId) {
    let envelopes: NodeEnvelopes = serde_json::from_value(json!({
        "v": 1, "who": "test", "at": "2026-01-01T00:00:00.000000Z",
        "envelopes": [{"signal": "memory", "shape": {"constant": {"cap": "1B"}}}],
    }))
    .unwrap();
    let bucket = world
        .broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .unwrap();
    let body = serde_json::to_vec(&envelopes).unwrap();
    let key = subjects::envelopes_key(node);
    bucket.put(key, body.into()).await.unwrap();
}

#[tokio::test]
async fn a_program_gets_what_nobody_else_was_granted_and_else_its_ledger_says_what_it_needs() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 2;
    options.memory_limit = Some(64 * GIB);
    let a = world.agent_with(options).await;
    let asks = |bytes: u64| {
        json!({"program": "synthetic@1", "commit": {"every": 5},
            "params": {"capsules": 1_000_000, "rest_us": 1_000,
                "reserve": {"at": 3, "memory_bytes": bytes}}})
    };
    // Alone it may have nearly all.
    let first = world.started_on(asks(48 * GIB), &a, "host").await;
    let reconfigured = |m: &LedgerMessage| {
        m.events
            .iter()
            .any(|e| matches!(e, Event::Reconfigured { .. }))
    };
    let message = world.wait(first, "a grant", |m| m.state.boundary_index() > 5);
    message.await;
    let granted = world.events(first).await.into_iter().find_map(|e| match e {
        Event::Reconfigured { who, grant } => Some((who, grant.memory_bytes)),
        _ => None,
    });
    assert_eq!(granted, Some(("program".to_owned(), Some(48 * GIB))));
    // What is left is granted to the next one, and it cannot have more.
    let second = world.started_on(asks(17 * GIB), &a, "host").await;
    let message = world
        .wait(second, "its wish in the ledger", |m| {
            m.state.adjusted.is_some()
        })
        .await;
    let adjusted = message.state.adjusted.clone().unwrap();
    assert_eq!(adjusted.memory_bytes, Some(17 * GIB));
    assert!(!reconfigured(&message));
    let note = async || {
        let reply = world.control(&a.node, &ControlRequest::Ping).await?;
        let running = reply.running.into_iter();
        running
            .filter(|r| r.execution == second)
            .find_map(|r| r.note)
    };
    let told = poll("what it was told", note).await;
    assert_eq!(told, "reserve: moves");
    // Parked, it goes on where it is once the other one has left, with what it asked for.
    world.parked(&a, second, Keep::Host).await;
    let refused = world.unpark(&a, second).await.unwrap();
    assert!(
        refused.contains("bytes of memory; the node offers"),
        "{refused}"
    );
    let cancel = ControlRequest::Cancel {
        execution: first,
        who: "test".to_owned(),
    };
    assert_eq!(world.ask(&a, cancel).await, None);
    world.wait_phase(first, "cancelled").await;
    poll("it to go on", async || {
        world.unpark(&a, second).await.is_none().then_some(())
    })
    .await;
    let told = poll("the grant", async || {
        note().await.filter(|n| n == "reserve: granted")
    });
    told.await;
    a.leave().await;
}
