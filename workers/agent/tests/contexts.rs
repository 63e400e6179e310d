//! Contexts of devices made ahead, found by the execution that comes, and given back: with a real
//! broker and real children. The devices are simulated and write down what happens to their
//! contexts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Running, World, poll};
use fiec_agent::Options;
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::{Cause, ExecutionId};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;
const DEVICE: &str = "GPU-0";

/// A node with one device.
struct Node {
    agent: Running,
    file: PathBuf,
    log: PathBuf,
}

/// What happened to a context, and in which process.
type Line = (String, u32);

fn write_devices(file: &Path, log: &Path, used: u64) {
    let device = json!([{"id": DEVICE, "kind": "gpu", "name": "Simulated", "memory_bytes": GIB,
        "device": {"compute_capability": "9.0", "multiprocessors": 8},
        "used_bytes": used, "contexts": log, "context_ms": 20}]);
    // Whole at once: the node reads it when it likes.
    let new = file.with_extension("new");
    std::fs::write(&new, device.to_string()).unwrap();
    std::fs::rename(&new, file).unwrap();
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

impl Node {
    async fn start(world: &World, name: &str, change: impl FnOnce(&mut Options)) -> Self {
        let file = world.folder.path().join(format!("{name}.json"));
        let log = world.folder.path().join(format!("{name}.contexts"));
        write_devices(&file, &log, 0);
        let mut options = world.options(name);
        options.slots = 2;
        options.device_file = Some(file.clone());
        options.profile_cache = Some(world.folder.path().join("machines"));
        options.superseded_after = Duration::from_millis(50);
        change(&mut options);
        let agent = world.agent_with(options).await;
        Self { agent, file, log }
    }

    fn lines(&self) -> Vec<Line> {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let line = |line: &str| {
            let mut words = line.split(' ');
            let word = words.next().unwrap().to_owned();
            assert_eq!(words.next(), Some(DEVICE));
            (word, words.next().unwrap().parse().unwrap())
        };
        text.lines().map(line).collect()
    }

    /// The words of one process.
    fn words(&self, pid: u32) -> Vec<String> {
        let own = self.lines().into_iter().filter(|(_, by)| *by == pid);
        own.map(|(word, _)| word).collect()
    }

    /// The processes that hold a context which nobody uses.
    fn waiting(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.lines().iter().map(|(_, pid)| *pid).collect();
        all.sort_unstable();
        all.dedup();
        all.retain(|pid| self.words(*pid).last().unwrap() == "kept" && is_alive(*pid));
        all
    }

    /// Waits until the canaries have had the device and their process is gone.
    async fn is_proved(&self) {
        poll("the canaries to be through", async || {
            let lines = self.lines();
            (!lines.is_empty() && lines.iter().all(|(_, pid)| !is_alive(*pid))).then_some(())
        })
        .await;
    }

    async fn prepare(&self, world: &World, id: ExecutionId) -> u32 {
        let request = ControlRequest::Prepare {
            execution: id,
            tenant: world.tenant.clone(),
            program: "cg@1".to_owned(),
            state_bytes: 0,
            substrate: Some(DEVICE.to_owned()),
        };
        let reply = world.control(&self.agent.node, &request).await.unwrap();
        assert_eq!(reply.error, None);
        poll("a context to wait", async || {
            self.waiting().first().copied()
        })
        .await
    }

    fn destination(&self) -> Destination {
        Destination {
            substrate: DEVICE.to_owned(),
            ..self.agent.destination()
        }
    }

    /// Has one computed on the device, until it is in this phase.
    async fn submit(&self, world: &World, line: &Value, phase: &str) -> ExecutionId {
        let tip = world.bind(&line.to_string(), &self.destination()).await;
        let id = tip.state.execution;
        world.dispatch(&[tip], &self.agent.node).await;
        world.wait_phase(id, phase).await;
        id
    }
}

fn solve(load_cases: u64) -> Value {
    json!({"program": "cg@1", "requires": {"device": {}}, "commit": {"every_ms": 20},
        "params": {"matrix": {"poisson2d": {"n": 24}}, "load_cases": load_cases,
            "iterations_per_capsule": 5}})
}

async fn cancel(world: &World, id: ExecutionId, node: &Node) {
    let request = ControlRequest::Cancel {
        execution: id,
        who: "test".into(),
    };
    let reply = world.control(&node.agent.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    world.wait_phase(id, "cancelled").await;
}

#[tokio::test]
async fn a_move_onto_a_prepared_device_finds_its_context_made_and_the_one_that_was_left_is_gone() {
    let world = World::start().await;
    let a = Node::start(&world, "a", |_| {}).await;
    let b = Node::start(&world, "b", |_| {}).await;
    a.is_proved().await;
    b.is_proved().await;
    let id = a.submit(&world, &solve(1_000_000), "started").await;
    let commits = async |at_least| {
        world
            .wait(id, "commits", |m| m.state.totals.commits >= at_least)
            .await
    };
    commits(2).await;
    let (_, source) = a.lines().last().unwrap().clone();
    let prepared = b.prepare(&world, id).await;
    assert_eq!(b.words(prepared), ["made", "kept"]);
    let order = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Operator { who: "test".into() },
        to: Some(b.destination()),
        decision: None,
    };
    let reply = world.control(&a.agent.node, &order).await.unwrap();
    assert_eq!(reply.error, None);
    let there =
        |m: &fiec_schemas::LedgerMessage| m.state.epoch == 2 && m.state.phase.as_str() == "started";
    world.wait(id, "the move", there).await;
    poll("the prepared context to be taken", async || {
        (b.words(prepared) == ["made", "kept", "taken"]).then_some(())
    })
    .await;
    assert_eq!(b.waiting(), [] as [u32; 0]);
    // Where it was, the child waits for others, without its context.
    poll("the context that was left to be gone", async || {
        (a.words(source) == ["made", "gone"]).then_some(())
    })
    .await;
    assert!(is_alive(source));
    cancel(&world, id, &b).await;
    poll("the context to be gone", async || {
        (b.words(prepared).last().unwrap() == "gone").then_some(())
    })
    .await;
    a.agent.leave().await;
    b.agent.leave().await;
}

#[tokio::test]
async fn what_has_completed_leaves_its_context_to_the_next_and_an_idle_one_is_given_back() {
    let world = World::start().await;
    let patient = Node::start(&world, "a", |_| {}).await;
    patient.is_proved().await;
    patient.submit(&world, &solve(2), "completed").await;
    let pid = poll("its context to wait", async || {
        patient.waiting().first().copied()
    })
    .await;
    patient.submit(&world, &solve(3), "completed").await;
    assert_eq!(patient.words(pid), ["made", "kept", "taken", "kept"]);
    patient.agent.leave().await;

    let soon = |options: &mut Options| options.context_idle = Duration::from_secs(2);
    let hasty = Node::start(&world, "b", soon).await;
    hasty.is_proved().await;
    let id = hasty.submit(&world, &solve(2), "completed").await;
    // Nobody comes for it, nor for one that was made ahead.
    poll("its context to be given back", async || {
        hasty.waiting().is_empty().then_some(())
    })
    .await;
    let prepared = hasty.prepare(&world, id).await;
    poll("the one that was made ahead to be given back", async || {
        (!is_alive(prepared)).then_some(())
    })
    .await;
    hasty.agent.leave().await;
}

#[tokio::test]
async fn contexts_that_stand_ready_are_no_more_than_wished_and_go_when_their_device_presses() {
    let world = World::start().await;
    let node = Node::start(&world, "a", |options| {
        options.warm_contexts = 2;
        options.heartbeat = Duration::from_millis(50);
        // As old as they may be.
        options.context_idle = Duration::ZERO;
        options.devices = true;
    })
    .await;
    let ready = async |count: usize| {
        poll("as many to wait as were wished", async || {
            Some(node.waiting()).filter(|waiting| waiting.len() == count)
        })
        .await
    };
    // The canaries take one of them, and end with it.
    poll("the canaries to be through", async || {
        let lines = node.lines();
        lines.iter().any(|(_, pid)| !is_alive(*pid)).then_some(())
    })
    .await;
    let waiting = ready(2).await;
    // Whoever has the device to himself takes one of them, and the other's memory.
    let id = node.submit(&world, &solve(1_000_000), "started").await;
    let taken = poll("one of them to be taken", async || {
        let mut waited = waiting.iter().copied();
        waited.find(|pid| node.words(*pid).last().unwrap() == "taken")
    })
    .await;
    poll("the others to go", async || {
        waiting
            .iter()
            .all(|pid| *pid == taken || !is_alive(*pid))
            .then_some(())
    })
    .await;
    // One that was being made at that moment goes too.
    ready(0).await;
    cancel(&world, id, &node).await;
    let waiting = ready(2).await;
    write_devices(&node.file, &node.log, GIB * 99 / 100);
    poll("all to go", async || {
        waiting.iter().all(|pid| !is_alive(*pid)).then_some(())
    })
    .await;
    ready(0).await;
    write_devices(&node.file, &node.log, 0);
    ready(2).await;
    node.agent.leave().await;
}
