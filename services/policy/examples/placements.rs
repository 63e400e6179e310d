//! How fast the policy places: `cargo run --release -p fiec-policy --example placements`.
//! Clusters of 100, 1,000 and 10,000 nodes of four slots, half filled one submission after the
//! other; prints placements a second of this thread's own time and the slowest per cent, by what is asked for.
#![allow(clippy::unwrap_used, reason = "it ends where it cannot measure")]

use std::time::Duration;

use fiec_policy::{Action, Config, Input, Millis, Now, Policy};
use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{
    Digest, ExecutionId, InstanceId, NodeDescriptor, Submission, Tenant, Timestamp,
};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use uuid::Uuid;

/// At most so many placements are measured in one case.
const MOST: u128 = 5_000;

fn now(ms: u64) -> Now {
    Now {
        mono: Millis(ms),
        wall: Timestamp::from_micros(1_700_000_000_000_000 + i64::try_from(ms).unwrap() * 1_000),
    }
}

/// This thread's time on a processor: others on this machine do not count.
fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    let nanos = u32::try_from(spent.tv_nsec).unwrap();
    Duration::new(spent.tv_sec.unsigned_abs(), nanos)
}

fn descriptor(i: u128) -> Value {
    let gpu = |n: u32| {
        json!({"id": format!("GPU-{i:08x}-{n}"), "kind": "gpu", "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 80u64 << 30,
            "device": {"compute_capability": "9.0", "multiprocessors": 132}})
    };
    json!({
        "v": 1, "node": format!("n{i:05}"), "instance": Uuid::from_u128(i + 1), "host": "h",
        "pid": 1, "version": "0", "started_at": "2026-01-01T00:00:00.000000Z", "shard": 0,
        "slots": 4, "cpus": 8, "isa": "x86_64+avx2+fma", "memory_limit_bytes": 64u64 << 30,
        "memory_limit_source": "declared",
        "substrates": [{"id": "host", "kind": "cpu", "name": "cpu"}, gpu(0), gpu(1)],
        "programs": ["synthetic@1"], "labels": {"rack": (i % 16).to_string()},
        "thresholds": fiec_schemas::hardware::default_thresholds(),
        "identity": {"key": "U", "environment": Digest::of(b"played")},
    })
}

fn vector(i: u128) -> Value {
    json!({
        "v": 1, "node": format!("n{i:05}"), "instance": Uuid::from_u128(i + 1), "count": 1,
        "at": "2026-01-01T00:00:00.000000Z", "slots": 4, "running_count": 0, "queued_count": 0,
        "readings": [{"signal": "memory", "value": 0.2 + 0.5 * (i % 7) as f64 / 7.0,
            "raw": 1e10, "limit": 6.4e10, "unit": "bytes", "source": "bench",
            "at": "2026-01-01T00:00:00.000000Z"}],
    })
}

fn cluster(nodes: u128) -> Policy {
    let mut policy = Policy::new(Config::default(), InstanceId(Uuid::from_u128(1)));
    let mut out = Vec::new();
    for i in 0..nodes {
        let d: NodeDescriptor = serde_json::from_value(descriptor(i)).unwrap();
        let proof = Proof::passing(
            &d,
            1,
            now(0).wall,
            Timestamp::from_micros(4_000_000_000_000_000),
        );
        let node = d.node.clone();
        policy.step(now(1_000), Input::Descriptor(Box::new(d)), &mut out);
        let signed = SignedProof {
            v: 1,
            statement: String::new(),
            key: String::new(),
            sig: String::new(),
        };
        let proof = Input::Proof {
            node: &node,
            signed: &signed,
            judged: Ok(proof),
        };
        policy.step(now(1_000), proof, &mut out);
        let v = serde_json::from_value(vector(i)).unwrap();
        policy.step(now(1_000), Input::Vector(v, 0), &mut out);
    }
    policy.step(now(1_000), Input::Loaded, &mut out);
    policy
}

fn main() {
    let cases = [
        ("anything", json!({})),
        (
            "memory and label",
            json!({"requires": {"memory_bytes": 1u64 << 30, "labels": {"rack": "3"}}}),
        ),
        (
            "device",
            json!({"requires": {"device": {"kind": "NVIDIA H*", "compute_capability": "8.0"}}}),
        ),
        (
            "prefers",
            json!({"prefers": {"memory_bytes": 128u64 << 30, "cores": 16}}),
        ),
    ];
    for nodes in [100, 1_000, 10_000] {
        for (name, ask) in &cases {
            let mut line = ask.clone();
            line["program"] = "synthetic@1".into();
            match Submission::parse(line.to_string().as_bytes()) {
                Ok(spec) => measure(nodes, name, &spec),
                Err(error) => println!("{nodes:>6} nodes  {name:<18} not measured: {error}"),
            }
        }
    }
}

fn measure(nodes: u128, name: &str, spec: &Submission) {
    let mut policy = cluster(nodes);
    let tenant = Tenant::new("bench").unwrap();
    let room = if name == "memory and label" {
        nodes / 16
    } else {
        nodes
    };
    let mut took = Vec::new();
    let mut placed = 0;
    for n in 0..MOST.min(2 * room.max(1)) {
        let mut out = Vec::new();
        let input = Input::Submission {
            execution: ExecutionId(Uuid::from_u128(1_000_000 + n)),
            tenant: &tenant,
            spec,
            submitted_at: Timestamp::from_micros(1_700_000_000_000_000),
            may_hold: false,
        };
        let began = cpu();
        policy.step(now(1_500), input, &mut out);
        took.push(cpu() - began);
        let bound = |a: &Action| matches!(a, Action::Append { events, .. } if events.len() == 2);
        placed += u32::from(out.iter().any(bound));
    }
    took.sort_unstable();
    let all: Duration = took.iter().sum();
    println!(
        "{nodes:>6} nodes  {name:<18} {:>9.0} placements/s  p50 {:>9.1?}  p99 {:>9.1?}  ({placed} placed)",
        f64::from(placed) / all.as_secs_f64(),
        took[took.len() / 2],
        took[took.len() * 99 / 100],
    );
}
