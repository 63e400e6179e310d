//! What `fiec nodes` says against what this machine's own tools say at the same moment, and how
//! soon a node tells that a threshold was crossed.

use std::io::Write as _;
use std::process::Command;
use std::time::Duration;

use crate::stage;
use crate::stage::{Lab, args, until, workers};
use fiec_schemas::messages::{NodeStatus, Viability};
use fiec_schemas::{HardwareVector, Phase, Reading, Signal, Started, Timestamp, subjects};
use futures_util::StreamExt as _;
use serde_json::json;

/// Past the harness's capture, so that what is not compared is seen.
fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {what}");
}

/// What a tool of this machine prints; none where it is not installed.
fn tool(command: &[&str]) -> Option<String> {
    let output = Command::new(command[0]).args(&command[1..]).output();
    match output {
        Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
        Ok(output) => panic!("{command:?} failed: {output:?}"),
        Err(_) => {
            skipped(&format!("{} is not on this machine", command[0]));
            None
        }
    }
}

/// (total, available) in bytes, as `free` prints them.
fn free() -> Option<(f64, f64)> {
    let text = tool(&["free", "-b"])?;
    let head: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    let line = text.lines().find_map(|l| l.strip_prefix("Mem:")).unwrap();
    let row: Vec<f64> = line
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    let column = |name: &str| row[head.iter().position(|h| *h == name).unwrap()];
    Some((column("total"), column("available")))
}

/// avg10 of the lines `some` and `full` of a pressure file, as `cat` prints it.
fn pressure(of: &str) -> Option<(f64, f64)> {
    let path = format!("/proc/pressure/{of}");
    if !std::path::Path::new(&path).exists() {
        skipped(&format!("this kernel has no {path}"));
        return None;
    }
    let text = tool(&["cat", &path])?;
    let avg10 = |kind: &str| {
        let line = text.lines().find(|l| l.starts_with(kind))?;
        let word = line.split(' ').find_map(|w| w.strip_prefix("avg10="))?;
        word.parse().ok()
    };
    Some((avg10("some").unwrap(), avg10("full").unwrap_or(0.0)))
}

/// UUID, then used and reserved MiB together, °C and W of every device; what the tool does not tell
/// (`[N/A]`) is no number.
fn nvidia_smi() -> Vec<(String, f64, f64, f64)> {
    let query = "--query-gpu=uuid,memory.used,memory.reserved,temperature.gpu,power.draw";
    let text = tool(&["nvidia-smi", query, "--format=csv,noheader,nounits"]);
    let text = text.unwrap_or_default();
    let device = |line: &str| {
        let words: Vec<&str> = line.split(',').map(str::trim).collect();
        let number = |i: usize| words[i].parse::<f64>().unwrap_or(f64::NAN);
        (
            words[0].to_owned(),
            number(1) + number(2),
            number(3),
            number(4),
        )
    };
    text.lines().map(device).collect()
}

async fn nodes(lab: &Lab) -> NodeStatus {
    let ran = lab.fiec(&["nodes", "--json"]).await.expect(0);
    serde_json::from_str(ran.stdout.trim()).unwrap()
}

fn find<'a>(vector: &'a HardwareVector, signal: Signal, place: Option<&str>) -> &'a Reading {
    vector
        .readings
        .iter()
        .find(|r| r.signal == signal && r.device.as_deref() == place)
        .unwrap_or_else(|| panic!("no {signal} of {place:?} in {vector:?}"))
}

/// `is` lies between what was said before and after, give or take what moves meanwhile.
fn between(what: &str, is: f64, before: f64, after: f64, slack: f64) {
    let (low, high) = (before.min(after) - slack, before.max(after) + slack);
    assert!(
        (low..=high).contains(&is),
        "{what}: fiec says {is}, the machine's own tool {before} before and {after} after it"
    );
}

#[tokio::test]
async fn nodes_agrees_with_the_machines_own_tools_at_the_same_moment() {
    let lab = Lab::start(workers(1)).await;
    // A stall or load that was there when the vector was made may be gone when the tool is asked:
    // the kernel renews its averages every two seconds.
    let (free_before, stall_before) = (free(), pressure("memory"));
    let (cpu_before, smi_before) = (pressure("cpu"), nvidia_smi());
    let started = Timestamp::now();
    // A vector that was made after the tools were asked.
    let vector = until("a vector is newer than the tools' word", async || {
        let measured =
            |v: &HardwareVector| v.host(Signal::Latency).is_some_and(|r| r.value.is_some());
        let vector = nodes(&lab).await.vector;
        vector.filter(|v| v.at > started && measured(v))
    })
    .await;
    let (free_after, stall_after) = (free(), pressure("memory"));
    let (cpu_after, smi_after) = (pressure("cpu"), nvidia_smi());

    if let (Some((total, before)), Some((_, after))) = (free_before, free_after) {
        let own = find(&vector, Signal::Memory, None);
        // A node inside a limited cgroup tells of the whole machine beside it.
        let machine = if own.source == "/proc/meminfo" {
            own
        } else {
            find(&vector, Signal::Memory, Some("machine"))
        };
        assert_eq!(machine.limit, Some(total), "{machine:?}");
        let used = machine.raw.unwrap();
        between(
            "bytes in use",
            used,
            total - before,
            total - after,
            0.02 * total,
        );
        println!("free: {before:.0} of {total:.0} bytes available; fiec: {used:.0} in use");
    }
    if let (Some(before), Some(after)) = (stall_before, stall_after) {
        let stall = find(&vector, Signal::MemoryStall, None);
        let raw = stall.raw.unwrap();
        if stall.source.ends_with("full") {
            between("memory stall, full", raw, before.1, after.1, 10.0);
        } else {
            between("memory stall, some", raw, before.0, after.0, 10.0);
        }
    }
    if let (Some(before), Some(after)) = (cpu_before, cpu_after) {
        let raw = find(&vector, Signal::Contention, None).raw.unwrap();
        between("processor stall", raw, before.0, after.0, 40.0);
    }
    for (uuid, before, celsius, watts) in &smi_before {
        let (_, after, ..) = smi_after.iter().find(|d| d.0 == *uuid).unwrap();
        for (what, signal, unit, (before, after), slack) in [
            (
                "device MiB in use",
                Signal::Memory,
                f64::from(1 << 20),
                (*before, *after),
                64.0,
            ),
            (
                "device °C",
                Signal::Thermal,
                1.0,
                (*celsius, *celsius),
                10.0,
            ),
            ("device W", Signal::Power, 1e3, (*watts, *watts), 100.0),
        ] {
            let reading = find(&vector, signal, Some(uuid));
            match reading.raw {
                Some(raw) if !before.is_nan() => between(what, raw / unit, before, after, slack),
                // What one of them tells, the other one tells as well.
                raw => assert!(raw.is_none() && before.is_nan(), "{what}: {reading:?}"),
            }
        }
        println!("nvidia-smi: {uuid} agrees");
    }
    // MIG slices have UUIDs of their own, which `nvidia-smi` does not query.
    let whole = |r: &&Reading| r.device.as_deref().is_some_and(|d| d.starts_with("GPU-"));
    let devices = vector.readings.iter().filter(whole);
    assert_eq!(
        devices.filter(|r| r.signal == Signal::Memory).count(),
        smi_before.len(),
        "{vector:?}"
    );

    // What this machine cannot measure is there, without a value, and people see it.
    let shown = lab.fiec(&["nodes", "--signals"]).await.expect(0).stdout;
    for reading in vector.readings.iter().filter(|r| r.value.is_none()) {
        assert!(
            reading.raw.is_none() && reading.missing.is_some(),
            "{reading:?}"
        );
        let row = |l: &&str| l.contains(reading.signal.as_str()) && l.contains("missing");
        assert!(shown.lines().any(|l| row(&l)), "{reading:?} in\n{shown}");
    }
    for signal in Signal::ALL.into_iter().filter(|s| {
        // Only devices have links and report errors.
        !matches!(s, Signal::Fabric | Signal::Errors)
    }) {
        find(&vector, signal, None);
    }
    lab.stop().await;
}

#[tokio::test]
async fn a_move_shows_how_far_the_other_node_is() {
    let lab = Lab::start(workers(2)).await;
    let params = json!({"capsules": 1_000_000_000u64, "rest_us": 200});
    let id = lab.publish("mover", "synthetic@1", &params).await;
    let node_of = async |epoch: u64| {
        let what = format!("it computes under epoch {epoch}");
        lab.journal
            .find(id, &what, |line| match &line.state().phase {
                Phase::Started(Started { binding: b, .. }) if line.state().epoch == epoch => {
                    Some(b.node.clone())
                }
                _ => None,
            })
            .await
    };
    let from = node_of(1).await;
    lab.fiec(&["yield", "mover"]).await.expect(0);
    let to = node_of(2).await;
    let place = format!("peer:{to}");
    let reading = until("the node that gave it up tells of the other", async || {
        let vector = lab.status_of(&from).await.ok()?.vector?;
        let found = vector
            .readings
            .into_iter()
            .find(|r| r.device.as_ref() == Some(&place));
        found.filter(|r| r.value.is_some())
    })
    .await;
    assert_eq!(
        (reading.signal, reading.unit.as_str()),
        (Signal::Latency, "us")
    );
    let us = reading.raw.unwrap();
    assert!(us > 0.0 && us < 2e6, "{reading:?}");
    // It informs; it does not judge the node.
    assert_eq!(
        lab.status_of(&from).await.unwrap().viability,
        Viability::Viable
    );
    lab.fiec(&["cancel", "mover"]).await.expect(0);
    lab.stop().await;
}

#[tokio::test]
async fn a_crossing_is_told_at_once_however_slow_the_heartbeat() {
    const HIGH: f64 = 0.6;
    let mut options = workers(1);
    let words = [
        "--memory-limit",
        "512MiB",
        "--threshold",
        "memory=0.6:0.4:0",
    ];
    options.worker_args = args(&words);
    // So seldom that no vector of the heartbeat can be the one that tells.
    options
        .worker_args
        .extend(args(&["--heartbeat-ms", "60000"]));
    let lab = Lab::start(options).await;
    let status = nodes(&lab).await;
    let node = status.descriptor.node.clone();
    let mut vectors = lab
        .broker
        .client
        .subscribe(subjects::telemetry(&node))
        .await
        .unwrap();
    lab.broker.client.flush().await.unwrap();
    let log = lab.path("pressure.log");
    let high = HIGH.to_string();
    let options = ["--share", "0.68", "--say-share", &high];
    let mut hog = lab.press_with(&node, &options, log.clone()).await;
    let arrived = tokio::time::timeout(stage::PATIENCE, async {
        loop {
            let message = vectors.next().await.unwrap();
            let at = Timestamp::now();
            let vector: HardwareVector = serde_json::from_slice(&message.payload).unwrap();
            let memory = vector.host(Signal::Memory).and_then(|r| r.value);
            if memory.is_some_and(|v| v >= HIGH) {
                return at;
            }
        }
    })
    .await
    .expect("no vector told of the crossing");
    let crossed: i64 = until("the process says when it crossed", async || {
        let text = std::fs::read_to_string(&log).unwrap();
        let said = text.lines().find_map(|l| l.strip_prefix("crossed "))?;
        said.parse().ok()
    })
    .await;
    let ms = (arrived.micros() - crossed) as f64 / 1e3;
    println!(
        "{}: {ms:.1} ms from the crossing to the vector",
        status.descriptor.memory_limit_source
    );
    // `fiec bench telemetry` has the distribution; here only that no sampler's period is in it.
    assert!(ms < 10_000.0, "{ms} ms: the heartbeat is a minute");
    assert!(hog.stop(Duration::from_secs(5)).await);
    lab.stop().await;
}
