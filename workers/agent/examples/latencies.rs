//! Figures of the agent alone, each beside its floor: a chain of commits, moves, and no-op work.
//!
//! `cargo run --release -p fiec-agent --example latencies [chain|moves|noop]...`

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fiec_agent::{Agent, Options};
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, Draft, Ledger, Tip};
use fiec_dev_servers::{DevServers, NoProgress, Options as ServerOptions};
use fiec_schemas::messages::{CapsuleBinding, CapsuleMessage, ControlRequest, Destination};
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, ExecutionState, LedgerMessage,
    NodeDescriptor, NodeId, Submission, Tenant, Timestamp, subjects,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

struct Bench {
    broker: Broker,
    ledger: Ledger,
    tenant: Tenant,
}

/// An agent in a process of its own, as in life.
fn agent_process(url: &str, node: &str, slots: u32) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut options = Options::new(NodeId::new(node).unwrap());
        let me = std::env::current_exe().unwrap();
        options.child_command = vec![me.display().to_string(), "child".to_owned()];
        options.run_dir =
            std::env::temp_dir().join(format!("fiec-latencies-{}", std::process::id()));
        (options.cgroup, options.devices, options.slots) = (false, false, slots);
        let run_dir = options.run_dir.clone();
        let broker = Broker::connect(ConnectOptions::new(url, node))
            .await
            .unwrap();
        let stop = CancellationToken::new();
        let token = stop.clone();
        std::thread::spawn(move || {
            // The end of stdin is the end of the bench.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            token.cancel();
        });
        Agent::run(options, broker, stop).await.unwrap();
        let _ = std::fs::remove_dir_all(run_dir);
    });
}

fn start(url: &str, node: &str, slots: u32) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["agent", url, node, &slots.to_string()])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

impl Bench {
    async fn destination(&self, node: &str) -> Destination {
        let node = NodeId::new(node).unwrap();
        let store = self
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .unwrap();
        for _ in 0..2_000 {
            if let Some(value) = store.get(subjects::node_key(&node)).await.unwrap() {
                let d: NodeDescriptor = serde_json::from_slice(&value).unwrap();
                let ping = serde_json::to_vec(&ControlRequest::Ping).unwrap();
                if self
                    .broker
                    .client
                    .request(subjects::control(&node), ping.into())
                    .await
                    .is_ok()
                {
                    return Destination {
                        node,
                        instance: d.instance,
                        substrate: "host".to_owned(),
                    };
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("no agent {node}")
    }

    fn draft(&self, submission: &Arc<Submission>, to: &Destination) -> Draft {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let now = Timestamp::now();
        let state = ExecutionState::unborn(self.tenant.clone(), id, submission.clone(), None, now);
        let bound = Event::Bound {
            epoch: 1,
            node: to.node.clone(),
            instance: to.instance,
            substrate: to.substrate.clone(),
            cause: Cause::Initial,
            decision: None,
        };
        Draft::new(
            &Tip {
                seq: 0,
                digest: None,
                state,
                seen_in: 0,
            },
            vec![Event::Submitted, bound],
            "policy/bench",
            now,
        )
        .unwrap()
    }

    async fn bind(&self, submission: &str, to: &Destination) -> Tip {
        let submission = Arc::new(Submission::parse(submission.as_bytes()).unwrap());
        let sent = self
            .ledger
            .send(self.draft(&submission, to), Bytes::new())
            .await
            .unwrap();
        self.ledger.settle(sent).await.unwrap()
    }

    async fn dispatch(&self, tips: &[Tip], node: &NodeId) {
        let binding = |t: &Tip| CapsuleBinding {
            seq: t.seq,
            digest: t.digest.unwrap(),
            state: t.state.clone(),
        };
        let message = CapsuleMessage {
            v: 1,
            bindings: tips.iter().map(binding).collect(),
            server: Some(self.broker.server()),
        };
        let body = serde_json::to_vec(&message).unwrap();
        self.broker
            .js
            .publish(subjects::capsule(0, node), body.into())
            .await
            .unwrap()
            .await
            .unwrap();
    }

    async fn wait(&self, id: ExecutionId, is: impl Fn(&LedgerMessage) -> bool) -> LedgerMessage {
        for _ in 0..60_000 {
            let last = self.ledger.last(&self.tenant, id).await.unwrap().unwrap();
            if is(&last.message) {
                return last.message;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("waited in vain for {id}")
    }

    /// Serial appends of the same messages by one connection, nothing else being done.
    async fn raw_chain(&self, to: &Destination, seconds: f64) -> f64 {
        let tip = self.bind(r#"{"program":"synthetic@1"}"#, to).await;
        let body = Bytes::from(vec![7u8; 32 * 1024]);
        let mut tip = {
            let events = vec![Event::Started {
                epoch: 1,
                computing_since: Timestamp::now(),
            }];
            let draft = Draft::new(&tip, events, "worker/raw", Timestamp::now()).unwrap();
            self.ledger
                .settle(self.ledger.send(draft, Bytes::new()).await.unwrap())
                .await
                .unwrap()
        };
        let (digest, start, mut count) = (Digest::of(&body), Instant::now(), 0u64);
        while start.elapsed().as_secs_f64() < seconds {
            count += 1;
            let event = Event::Boundary(BoundaryEvent {
                index: count,
                digest,
                bytes: body.len() as u64,
                computed_at: Timestamp::now(),
                compute_us: 1,
                of: None,
                note: None,
                outputs: Vec::new(),
                energy: None,
            });
            let draft = Draft::new(&tip, vec![event], "worker/raw", Timestamp::now()).unwrap();
            tip = self
                .ledger
                .settle(self.ledger.send(draft, body.clone()).await.unwrap())
                .await
                .unwrap();
        }
        count as f64 / start.elapsed().as_secs_f64()
    }

    async fn chain(&self, to: &Destination, capsules: u64) -> f64 {
        let line = json!({
            "program": "synthetic@1",
            "params": { "capsules": capsules, "state_bytes": 32 * 1024 },
            "commit": { "every": 1 },
        });
        let tip = self.bind(&line.to_string(), to).await;
        self.dispatch(std::slice::from_ref(&tip), &to.node).await;
        let first = self
            .wait(tip.state.execution, |m| m.state.boundary_index() > 0)
            .await
            .state;
        let last = self
            .wait(tip.state.execution, |m| m.state.phase.is_terminal())
            .await
            .state;
        (capsules - first.boundary_index()) as f64
            / ((last.at.micros() - first.at.micros()) as f64 / 1e6)
    }

    async fn moves(
        &self,
        places: &[Destination; 2],
        count: u64,
        state_bytes: u64,
        work_us: u64,
    ) -> Vec<f64> {
        let line = json!({
            "program": "synthetic@1",
            "params": { "capsules": 100_000_000u64, "state_bytes": state_bytes, "work_us": work_us },
        });
        let tip = self.bind(&line.to_string(), &places[0]).await;
        let id = tip.state.execution;
        self.dispatch(std::slice::from_ref(&tip), &places[0].node)
            .await;
        let (mut gaps, mut until) = (Vec::new(), None);
        for epoch in 1..=count + 1 {
            let started = self
                .wait(id, |m| {
                    m.state.epoch == epoch && m.state.phase.as_str() == "started"
                })
                .await;
            let since = started.events.iter().find_map(|e| match e {
                Event::Started {
                    computing_since, ..
                } => Some(*computing_since),
                _ => None,
            });
            if let (Some(since), Some(until)) = (since, until) {
                let until: Timestamp = until;
                gaps.push((since.micros() - until.micros()) as f64 / 1e3);
            }
            let (from, to) = (
                &places[(epoch as usize + 1) % 2],
                &places[epoch as usize % 2],
            );
            let prepare = ControlRequest::Prepare {
                execution: id,
                tenant: self.tenant.clone(),
                program: "synthetic@1".to_owned(),
                state_bytes,
                substrate: None,
            };
            let prepare = serde_json::to_vec(&prepare).unwrap();
            self.broker
                .client
                .request(subjects::control(&to.node), prepare.into())
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
            let order = ControlRequest::Yield {
                execution: id,
                epoch,
                cause: Cause::Operator {
                    who: "bench".to_owned(),
                },
                to: Some(to.clone()),
                decision: None,
            };
            let order = serde_json::to_vec(&order).unwrap();
            self.broker
                .client
                .request(subjects::control(&from.node), order.into())
                .await
                .unwrap();
            until = None;
            for _ in 0..5_000 {
                let seq = self.ledger.last(&self.tenant, id).await.unwrap().unwrap();
                let mut entry = seq;
                // The destination may have appended already: the handover is the message before.
                for _ in 0..4 {
                    until = entry.message.events.iter().find_map(|e| match e {
                        Event::Yielded { computed_until, .. }
                            if entry.message.state.epoch == epoch + 1 =>
                        {
                            Some(*computed_until)
                        }
                        _ => None,
                    });
                    if until.is_some() || entry.seq <= 1 || entry.message.state.epoch <= epoch {
                        break;
                    }
                    entry = self.ledger.by_sequence(entry.seq - 1).await.unwrap();
                }
                if until.is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let cancel = ControlRequest::Cancel {
            execution: id,
            who: "bench".to_owned(),
        };
        let node = &places[((count + 1) % 2) as usize].node;
        let cancel = serde_json::to_vec(&cancel).unwrap();
        self.broker
            .client
            .request(subjects::control(node), cancel.into())
            .await
            .unwrap();
        gaps.sort_by(f64::total_cmp);
        gaps
    }

    async fn noop(&self, to: &Destination, count: usize) -> f64 {
        let submission = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
        let mut tips = Vec::new();
        for _ in 0..count.div_ceil(1_000) {
            let mut sent = Vec::new();
            for _ in 0..1_000 {
                sent.push(
                    self.ledger
                        .send(self.draft(&submission, to), Bytes::new())
                        .await
                        .unwrap(),
                );
            }
            for sent in sent {
                tips.push(self.ledger.settle(sent).await.unwrap());
            }
        }
        let start = Timestamp::now();
        for tips in tips.chunks(50) {
            self.dispatch(tips, &to.node).await;
        }
        // The worker's own stamps: looking at them afterwards costs the run nothing.
        let mut end = start;
        for tip in tips.iter().rev() {
            let done = self
                .wait(tip.state.execution, |m| {
                    m.state.phase.as_str() == "completed"
                })
                .await;
            end = end.max(done.state.at);
        }
        tips.len() as f64 / ((end.micros() - start.micros()) as f64 / 1e6)
    }
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q) as usize]
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("child") => return fiec_kit::child_main(),
        Some("agent") => agent_process(&arguments[1], &arguments[2], arguments[3].parse().unwrap()),
        _ => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(bench(&arguments));
        }
    }
    std::process::ExitCode::SUCCESS
}

async fn bench(wanted: &[String]) {
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let options = ServerOptions {
        want_postgres: false,
        ..ServerOptions::default()
    };
    let servers = DevServers::start(options, &NoProgress).await.unwrap();
    let broker = Broker::connect(ConnectOptions::new(servers.nats_url(), "bench"))
        .await
        .unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();
    let bench = Bench {
        ledger: Ledger::new(&broker),
        broker,
        tenant: Tenant::new("bench").unwrap(),
    };
    let mut agents = vec![
        start(&servers.nats_url(), "a", 2),
        start(&servers.nats_url(), "b", 2),
    ];
    let places = [bench.destination("a").await, bench.destination("b").await];
    if wants("chain") {
        for _ in 0..3 {
            let raw = bench.raw_chain(&places[0], 2.0).await;
            let ours = bench.chain(&places[0], 8_000).await;
            println!(
                "chain: raw {raw:.0}/s, ours {ours:.0}/s, ratio {:.2}",
                ours / raw
            );
        }
    }
    if wants("moves") {
        for (name, count, bytes, work) in
            [("72 KiB", 200, 72 << 10, 200), ("24 MB", 10, 24 << 20, 200)]
        {
            let gaps = bench.moves(&places, count, bytes, work).await;
            println!(
                "moves, {name}: {} gaps, p50 {:.2} ms, p99 {:.2} ms, longest {:.2} ms",
                gaps.len(),
                quantile(&gaps, 0.5),
                quantile(&gaps, 0.99),
                quantile(&gaps, 1.0)
            );
        }
    }
    if wants("noop") {
        bench.noop(&places[0], 1_000).await;
        println!(
            "noop: {:.0} executions/s (one agent, two slots, no policy or recorder)",
            bench.noop(&places[0], 10_000).await
        );
    }
    for agent in &mut agents {
        drop(agent.stdin.take());
        agent.wait().unwrap();
    }
}
