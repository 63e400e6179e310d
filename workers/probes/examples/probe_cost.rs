//! What telemetry costs here: `cargo run --release -p fiec-probes --example probe_cost`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Instant;

use fiec_probes::{MemoryLimit, NodeCgroup, Sampler, SamplerConfig};
use fiec_schemas::ids::Timestamp;

fn measure(what: &str, mut call: impl FnMut(Timestamp)) {
    const TIMES: usize = 2000;
    // 50 ms of the caller's time go by between calls, as at 20 Hz.
    let mut costs: Vec<f64> = (0..TIMES as i64)
        .map(|i| {
            let now = Timestamp::from_micros(1_000_000_000 + i * 50_000);
            let began = Instant::now();
            call(now);
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    costs.sort_by(f64::total_cmp);
    let mean = costs.iter().sum::<f64>() / TIMES as f64;
    let at = |share: f64| costs[(share * (TIMES - 1) as f64) as usize];
    println!(
        "{what:<34} mean {mean:7.1} us  p50 {:7.1}  p99 {:7.1}  at 20 Hz {:.3} % of a core",
        at(0.5),
        at(0.99),
        mean * 20.0 / 1e4
    );
}

fn main() {
    let of = |memory| {
        Sampler::new(SamplerConfig {
            memory,
            ..SamplerConfig::default()
        })
    };
    let mut host = of(MemoryLimit::Host);
    measure("fast(), host", |now| drop(host.fast(now)));
    let root_pid = std::process::id();
    let mut declared = of(MemoryLimit::Declared {
        bytes: 1 << 30,
        root_pid,
    });
    measure("fast(), declared, 1 process", |now| {
        drop(declared.fast(now))
    });
    let mut children: Vec<_> = (0..8)
        .map(|_| {
            std::process::Command::new("sleep")
                .arg("60")
                .spawn()
                .unwrap()
        })
        .collect();
    let mut declared = of(MemoryLimit::Declared {
        bytes: 1 << 30,
        root_pid,
    });
    measure("fast(), declared, 9 processes", |now| {
        drop(declared.fast(now))
    });
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    match NodeCgroup::create(&"probe-cost".parse().unwrap(), 256 << 20) {
        Ok(group) => {
            group.enter().unwrap();
            let held = vec![1u8; 128 << 20];
            let mut own = of(group.limit());
            measure("fast(), own cgroup half full", |now| drop(own.fast(now)));
            drop(held);
        }
        Err(e) => println!("fast(), own cgroup: not measured: {e}"),
    }
    measure("sample(), host", |now| drop(host.sample(now)));
}
