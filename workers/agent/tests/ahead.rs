//! Short executions are given to a child ahead; none is lost or held up by what comes between.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use crate::common::{Running, World, poll};
use fiec_schemas::ExecutionId;
use fiec_schemas::messages::ControlRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SHORT: &str = r#"{"program":"synthetic@1","params":{"capsules":0}}"#;

struct Node {
    agent: Running,
    http: SocketAddr,
}

async fn node(world: &World, slots: u32) -> Node {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let http = free.local_addr().unwrap();
    drop(free);
    let mut options = world.options("n1");
    options.slots = slots;
    options.http = Some(http);
    let agent = world.agent_with(options).await;
    Node { agent, http }
}

impl Node {
    async fn metric(&self, name: &str) -> u64 {
        let mut socket = tokio::net::TcpStream::connect(self.http).await.unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        socket.write_all(request).await.unwrap();
        let mut text = String::new();
        socket.read_to_string(&mut text).await.unwrap();
        let line = text.lines().find(|l| l.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Has children that have just been quick, and then these executions all at once.
    async fn flood(&self, world: &World, lines: &[&str]) -> Vec<ExecutionId> {
        for _ in 0..3 {
            let id = world.submit(SHORT, &self.agent).await;
            world.wait_phase(id, "completed").await;
        }
        let mut tips = Vec::new();
        for line in lines {
            tips.push(world.bind(line, &self.agent.destination()).await);
        }
        world.dispatch(&tips, &self.agent.node).await;
        tips.iter().map(|t| t.state.execution).collect()
    }
}

/// Sequences of the last messages once all of them are over, and how often each crashed.
async fn ends(world: &World, ids: &[ExecutionId], phase: &str) -> Vec<u64> {
    let mut ends = Vec::new();
    for id in ids {
        world.wait_phase(*id, phase).await;
        let last = world.last(*id).await;
        if phase == "completed" {
            assert_eq!(last.message.state.totals.crashes, 0, "{id}");
        }
        ends.push(last.seq);
    }
    ends
}

#[tokio::test]
async fn a_flood_of_short_executions_is_given_ahead_and_each_completes_once() {
    let world = World::start().await;
    let node = node(&world, 2).await;
    let ids = node.flood(&world, &[SHORT; 200]).await;
    ends(&world, &ids, "completed").await;
    for id in &ids {
        let events = world.events(*id).await;
        let completed = events
            .iter()
            .filter(|e| matches!(e, fiec_schemas::Event::Completed { .. }));
        assert_eq!(completed.count(), 1);
    }
    assert!(node.metric("fiec_worker_given_ahead_total").await > 0);
    assert_eq!(node.metric("fiec_worker_completed_total").await, 203);
    node.agent.leave().await;
}

#[tokio::test]
async fn what_waits_behind_a_run_that_turns_out_long_goes_to_another_slot() {
    let world = World::start().await;
    let node = node(&world, 2).await;
    let long = r#"{"program":"synthetic@1","params":{"capsules":1,"rest_us":10000000}}"#;
    let mut lines = vec![SHORT; 60];
    lines[20] = long;
    let mut ids = node.flood(&world, &lines).await;
    let long = ids.remove(20);
    let short = ends(&world, &ids, "completed").await;
    // Three seconds are far more than all others take together.
    let long = ends(&world, &[long], "completed").await;
    assert!(short.iter().all(|seq| *seq < long[0]), "held up");
    node.agent.leave().await;
}

#[tokio::test]
async fn a_child_that_dies_takes_none_of_those_with_it_that_it_had_ahead() {
    let world = World::start().await;
    let node = node(&world, 1).await;
    let deadly = r#"{"program":"synthetic@1","params":{"capsules":1,"crash_at":0},"retries":0}"#;
    let mut lines = vec![SHORT; 60];
    lines[10] = deadly;
    lines[30] = deadly;
    let mut ids = node.flood(&world, &lines).await;
    let dead = [ids.remove(30), ids.remove(10)];
    ends(&world, &ids, "completed").await;
    ends(&world, &dead, "failed").await;
    let back = poll("the metrics", async || {
        Some(node.metric("fiec_worker_taken_back_total").await)
    })
    .await;
    assert!(back > 0, "nothing was ahead when the child died");
    node.agent.leave().await;
}

#[tokio::test]
async fn a_cancel_ends_the_one_that_is_meant_and_none_that_was_given_ahead() {
    let world = World::start().await;
    let node = node(&world, 1).await;
    let slow = r#"{"program":"synthetic@1","params":{"capsules":100000,"rest_us":2000}}"#;
    for _ in 0..3 {
        let mut lines = vec![SHORT; 40];
        lines[15] = slow;
        let mut ids = node.flood(&world, &lines).await;
        let slow = ids.remove(15);
        world.wait_phase(slow, "started").await;
        let who = "test".to_owned();
        let cancel = ControlRequest::Cancel {
            execution: slow,
            who,
        };
        let reply = world.control(&node.agent.node, &cancel).await.unwrap();
        assert_eq!(reply.error, None);
        ends(&world, &[slow], "cancelled").await;
        ends(&world, &ids, "completed").await;
    }
    node.agent.leave().await;
}
