//! Processes that programs start: forked children end by SIGTERM, daemons with their run.

use std::path::{Path, PathBuf};

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, ExecutionId, NodeId};
use serde_json::{Value, json};

use crate::common::{Running, World, children, poll};

/// Speaks frames by itself. Starts a daemon if it is asked to, and does what its parameters say.
const PROGRAM: &str = "import os, signal, sys, time
from raw_frames import hear, say, sock

def note(path, pid):
    with open(path + '.new', 'w') as file:
        file.write(str(pid))
    os.rename(path + '.new', path)

def daemon(path, holds):
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    if not holds:
        sock.close()
        for fd in range(3):
            os.close(fd)
    note(path, os.getpid())
    time.sleep(600)
    os._exit(0)

AT = '2026-01-01T00:00:00Z'

def run(params):
    if 'daemon' in params:
        daemon(params['daemon'], params.get('holds', False))
        while not os.path.exists(params['daemon']):
            time.sleep(0.005)
    for n in range(params.get('orphans', 0)):
        # The child of a child that has ended.
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.05)
            os._exit(0)
        os.wait()
    if params.get('terminates'):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        until = time.monotonic() + 30
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os._exit(4)
            time.sleep(0.005)
    then = params['then']
    if then == 'crash':
        os._exit(3)
    say({'is': 'began', 'at': AT, 'parks': False})
    if 'ready' in params:
        note(params['ready'], os.getpid())
    while then == 'wait':
        order = hear()
        if order['is'] == 'cancel':
            return say({'is': 'cancelled'})
        if order['is'] == 'yield':
            return say({'is': 'boundary', 'index': 1, 'bytes': 0, 'compute_us': 1,
                          'computed_at': AT, 'reason': 'yield'})
    say({'is': 'completed', 'capsules': 1, 'computing_since': AT, 'computed_until': AT,
           'result': {'pid': os.getpid()}})

say({'is': 'ready'})
while True:
    order = hear()
    if order['is'] == 'run':
        run(order['params'])
";

fn line(params: &Value) -> String {
    json!({ "program": "x@1", "params": params, "retries": 0 }).to_string()
}

async fn stage() -> (World, Running) {
    let world = World::start().await;
    let mut options = world.options("n1");
    options.allow_programs = vec!["*".to_owned()];
    let agent = world.agent_with(options).await;
    world.with_raw_frames(PROGRAM, &json!({})).await;
    (world, agent)
}

fn noted(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.parse().ok()
}

fn state_of(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = stat.rsplit_once(") ")?.1;
    rest.split(' ').next().map(str::to_owned)
}

async fn is_gone(pid: u32, what: &str) {
    poll(what, async || state_of(pid).is_none().then_some(())).await;
}

#[tokio::test]
async fn a_program_ends_its_forked_child_by_sigterm() {
    let (world, agent) = stage().await;
    let params = json!({ "terminates": true, "then": "complete" });
    let id = world.submit(&line(&params), &agent).await;
    world.wait_phase(id, "completed").await;
    agent.leave().await;
}

#[tokio::test]
async fn a_daemon_of_a_program_ends_with_its_run() {
    let (world, agent) = stage().await;
    for (case, then, phase) in [
        ("completed", "complete", "completed"),
        ("crashed", "crash", "failed"),
        ("cancelled", "wait", "cancelled"),
        ("moved", "wait", "pending"),
    ] {
        for holds in [false, true] {
            let path = world.folder.path().join(format!("{case}-{holds}"));
            let params = json!({ "daemon": path, "holds": holds, "then": then });
            let id = world.submit(&line(&params), &agent).await;
            let pid = poll("the daemon", async || noted(&path)).await;
            order(&world, case, id, &agent.node).await;
            world.wait_phase(id, phase).await;
            is_gone(pid, &format!("the daemon to end: {case}, {holds}")).await;
        }
    }
    agent.leave().await;
}

async fn order(world: &World, case: &str, execution: ExecutionId, node: &NodeId) {
    let request = match case {
        "cancelled" => ControlRequest::Cancel {
            execution,
            who: "a test".to_owned(),
        },
        "moved" => ControlRequest::Yield {
            execution,
            epoch: 1,
            cause: Cause::Balance,
            to: None,
            decision: None,
        },
        _ => return,
    };
    world.control(node, &request).await.unwrap();
}

#[tokio::test]
async fn a_process_that_left_another_behind_serves_no_second_run() {
    let (world, agent) = stage().await;
    let mut pids = Vec::new();
    for daemon in [None, None, Some("ghost"), None] {
        let mut params = json!({ "then": "complete" });
        if let Some(name) = daemon {
            params["daemon"] = json!(world.folder.path().join(name));
        }
        let id = world.submit(&line(&params), &agent).await;
        let last = world.wait_phase(id, "completed").await;
        pids.push(crate::common::result(&last)["pid"].as_u64().unwrap());
    }
    // Warm, but for the one after the ghost's.
    assert_eq!(pids[0], pids[1]);
    assert_eq!(pids[1], pids[2]);
    assert_ne!(pids[2], pids[3]);
    agent.leave().await;
}

#[tokio::test]
async fn orphans_of_a_running_program_leave_no_zombie() {
    let (world, agent) = stage().await;
    let ready: PathBuf = world.folder.path().join("ready");
    let params = json!({ "then": "wait", "orphans": 40, "ready": ready });
    let id = world.submit(&line(&params), &agent).await;
    let program = poll("the program to wait", async || noted(&ready)).await;
    let stat = std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap();
    let keeper = stat.rsplit_once(") ").unwrap().1;
    let keeper: u32 = keeper.split(' ').nth(1).unwrap().parse().unwrap();
    assert_ne!(keeper, std::process::id(), "it has a keeper");
    poll("the orphans to end and be reaped", async || {
        let tasks = std::fs::read_dir(format!("/proc/{keeper}/task")).unwrap();
        let children = tasks
            .flatten()
            .map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
        let children: Vec<String> = children
            .flat_map(|text| {
                text.split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect();
        (children == [program.to_string()]).then_some(())
    })
    .await;
    order(&world, "cancelled", id, &agent.node).await;
    world.wait_phase(id, "cancelled").await;
    agent.leave().await;
}

#[tokio::test]
async fn a_daemon_ends_when_its_worker_is_killed() {
    let world = World::start().await;
    world.with_raw_frames(PROGRAM, &json!({})).await;
    let options = world.options("p1");
    let mut process = crate::agent::as_a_process(&world, &options);
    let node = NodeId::new("p1").unwrap();
    let descriptor = poll("the agent", async || world.descriptor(&node).await).await;
    let to = fiec_schemas::messages::Destination {
        node: node.clone(),
        instance: descriptor.instance,
        substrate: "host".into(),
    };
    let path = world.folder.path().join("daemon");
    let params = json!({ "daemon": path, "holds": true, "then": "wait" });
    let tip = world.bind(&line(&params), &to).await;
    let id = tip.state.execution;
    world.dispatch(&[tip], &node).await;
    world.wait_phase(id, "started").await;
    let daemon = poll("the daemon", async || noted(&path)).await;
    let program = children(&options);
    assert!(!program.is_empty());
    process.kill().unwrap();
    process.wait().unwrap();
    is_gone(daemon, "the daemon to end").await;
    for pid in program {
        is_gone(pid.unsigned_abs(), "the program to end").await;
    }
}
