//! What programs print, as people read it: bytes that are no text, a follower that was stopped, and a
//! program that prints without an end.

use std::time::{Duration, Instant};

use crate::stage;
use crate::stage::{Lab, until, workers};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::messages::{LogLine, LogStream};
use fiec_schemas::{ExecutionId, NodeId, Timestamp, subjects};
use futures_util::TryStreamExt as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

/// A cluster whose one node runs every package.
async fn lab(slots: u32) -> Lab {
    Lab::start(ClusterOptions {
        worker_args: [stage::slots(slots), stage::args(&["--allow-program", "*"])].concat(),
        ..workers(1)
    })
    .await
}

/// Runs a shell script by `state_dir`.
async fn script(lab: &Lab, id: &str, script: &str) -> ExecutionId {
    let folder = lab.path(id);
    std::fs::create_dir(&folder).unwrap();
    let manifest = json!({"entry": ["sh", "./run.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    std::fs::write(folder.join("run.sh"), script).unwrap();
    let program = format!("{id}@1");
    let path = folder.display().to_string();
    lab.fiec(&["program", "push", &program, &path])
        .await
        .expect(0);
    lab.publish(id, &program, &json!({})).await
}

#[tokio::test]
async fn bytes_that_are_no_text_come_back() {
    let lab = lab(1).await;
    let id = script(&lab, "bytes", "printf 'a\\200\\377\\0\\033[31m\\nend'\n").await;
    lab.journal.ended(id, "completed").await;
    let raw = lab
        .command(&["logs", "bytes", "--raw"])
        .output()
        .await
        .unwrap();
    assert_eq!(raw.stdout, b"a\x80\xff\0\x1b[31m\nend", "{raw:?}");
    assert!(raw.status.success() && raw.stderr.is_empty(), "{raw:?}");
    let human = lab.fiec(&["logs", "bytes"]).await.expect(0).stdout;
    assert!(
        human.contains(": a\\x80\\xff\\u0000\\u001b[31m\n") && human.ends_with(": end\n"),
        "{human:?}"
    );
    let json = lab.fiec(&["logs", "bytes", "--json"]).await.expect(0);
    assert_eq!(json.json_lines()[0]["bytes"], "YYD/ABtbMzFt");
    lab.end().await;
}

/// Publishes lines of an execution as its worker does, by number.
async fn print(lab: &Lab, id: ExecutionId, lines: std::ops::Range<u64>) {
    let subject = subjects::log(&lab.tenant, id);
    for number in lines {
        let text = format!("line {number:05}");
        let line = LogLine {
            at: Timestamp::now(),
            node: NodeId::new("n1").unwrap(),
            epoch: 1,
            stream: LogStream::Stdout,
            boundary: 0,
            offset: Some(number * (text.len() as u64 + 1)),
            line: text,
            part: false,
            bytes: None,
            dropped: None,
        };
        let body = serde_json::to_vec(&line).unwrap();
        let client = &lab.broker.client;
        client.publish(subject.clone(), body.into()).await.unwrap();
    }
    lab.broker.client.flush().await.unwrap();
}

/// Deletes the readers of the log stream, as the broker does if they are silent for a minute.
async fn forget_readers(lab: &Lab) {
    let stream = lab
        .broker
        .js
        .get_stream(subjects::LOG_STREAM)
        .await
        .unwrap();
    let names: Vec<String> = stream.consumer_names().try_collect().await.unwrap();
    assert!(!names.is_empty(), "the follower has a consumer");
    for name in names {
        stream.delete_consumer(&name).await.unwrap();
    }
}

#[tokio::test]
async fn a_stopped_follower_catches_up_or_says_what_it_missed() {
    const BEFORE: u64 = 10;
    const MEANWHILE: u64 = 12_000;
    const BYTES: u64 = "line 00000\n".len() as u64;
    let mut lab = lab(1).await;
    let long = json!({"capsules": 1_000_000, "rest_us": 1_000, "state_bytes": 64});
    let id = lab.publish("long", "synthetic@1", &long).await;
    lab.journal.computing(id, 1).await;
    print(&lab, id, 0..BEFORE).await;
    let mut follower = lab.command(&["logs", "long", "-f"]).spawn().unwrap();
    let pid = Pid::from_raw(follower.id().unwrap().try_into().unwrap()).unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut shown = Vec::new();
    while shown.len() < BEFORE as usize {
        let line = tokio::time::timeout(stage::PATIENCE, lines.next_line()).await;
        shown.push(line.unwrap().unwrap().expect("a line before the stop"));
    }
    kill_process(pid, Signal::STOP).unwrap();
    print(&lab, id, BEFORE..BEFORE + MEANWHILE).await;
    until("the stream has the lines", async || {
        let stream = lab.broker.js.get_stream(subjects::LOG_STREAM).await.ok()?;
        let info = stream.get_info().await.ok()?;
        (info.state.last_sequence == BEFORE + MEANWHILE).then_some(())
    })
    .await;
    forget_readers(&lab).await;
    kill_process(pid, Signal::CONT).unwrap();
    let reader = tokio::spawn(async move {
        while let Some(line) = lines.next_line().await.unwrap() {
            shown.push(line);
        }
        shown
    });
    // And a broker that goes away and comes back.
    lab.servers.nats.restart().await.unwrap();
    let all = BEFORE + MEANWHILE + BEFORE;
    until("the stream takes lines again", async || {
        let stream = lab.broker.js.get_stream(subjects::LOG_STREAM).await.ok()?;
        stream.get_info().await.ok()
    })
    .await;
    print(&lab, id, BEFORE + MEANWHILE..all).await;
    until("the execution is cancelled", async || {
        (lab.fiec(&["cancel", "long"]).await.code == 0).then_some(())
    })
    .await;
    lab.journal.ended(id, "cancelled").await;
    let ended = tokio::time::timeout(stage::PATIENCE, follower.wait_with_output()).await;
    let ended = ended
        .expect("the follower ends with the execution")
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let shown = reader.await.unwrap();
    let is_line = |line: &&String| line.contains(" stdout: line ");
    let count = shown.iter().filter(is_line).count() as u64;
    let missing: u64 = shown.iter().filter_map(|line| missing(line)).sum();
    assert_eq!(
        count * BYTES + missing,
        all * BYTES,
        "{count} lines, {missing} bytes are missing"
    );
    assert!(missing > 0, "the stream keeps fewer lines");
    let last = format!("line {:05}", all - 1);
    assert!(shown.last().unwrap().ends_with(&last), "{:?}", shown.last());
    lab.end().await;
}

/// The number in "(N bytes are missing)".
fn missing(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(" stdout: (")?;
    rest.strip_suffix(" bytes are missing)")?.parse().ok()
}

/// Of a process's memory, what is its own now, in bytes.
fn resident(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib * 1024
}

#[tokio::test]
async fn a_gigabyte_of_output_slows_no_neighbour() {
    const FLOOD: u64 = 1_000_000_000;
    /// Longest time between two commits of the neighbour, on a machine whose cores are all busy.
    const PAUSE: Duration = Duration::from_secs(3);
    let mut lab = lab(2).await;
    let steady = json!({"capsules": 1_000_000, "rest_us": 10_000, "state_bytes": 64});
    let line = json!({"id": "steady", "program": "synthetic@1", "params": steady,
        "commit": {"every": 1}});
    let steady = lab.publish_json(&line).await;
    lab.journal.computing(steady, 5).await;
    let worker = lab.worker(&NodeId::new("n1").unwrap()).pid();
    let before = resident(worker);
    let words = format!("yes \"$(printf '%099d' 0)\" | head -c {FLOOD}\necho; echo end\n");
    let flood = script(&lab, "flood", &words).await;
    lab.journal.computing(flood, 0).await;
    let (mut last, mut since) = (0, Instant::now());
    let (mut longest, mut most) = (Duration::ZERO, 0);
    let end = Instant::now() + stage::PATIENCE * 4;
    loop {
        assert!(Instant::now() < end, "the flood does not end");
        let reply = lab.fiec(&["status", "steady", "--json"]).await.expect(0);
        let reply: Value = serde_json::from_str(&reply.stdout).unwrap();
        let index = reply["state"]["boundary"]["index"].as_u64().unwrap();
        if index > last {
            (last, since) = (index, Instant::now());
        }
        longest = longest.max(since.elapsed());
        most = most.max(resident(worker));
        let flood = lab.fiec(&["status", "flood", "--json"]).await.expect(0);
        let flood: Value = serde_json::from_str(&flood.stdout).unwrap();
        if flood["state"]["phase"].to_string().contains("completed") {
            break;
        }
    }
    assert!(longest < PAUSE, "no commit for {longest:?}");
    let grown = most.saturating_sub(before);
    assert!(grown < 20 << 20, "the worker has grown by {grown} bytes");
    // The follower counts the bytes that it does not show.
    let raw = lab.command(&["logs", "flood", "--raw"]).output().await;
    let raw = raw.unwrap();
    let notices = String::from_utf8(raw.stderr).unwrap();
    let missing: u64 = notices.lines().filter_map(told).sum();
    assert_eq!(
        raw.stdout.len() as u64 + missing,
        FLOOD + "\nend\n".len() as u64,
        "{notices}"
    );
    assert!(raw.stdout.ends_with(b"\nend\n"));
    lab.fiec(&["cancel", "steady"]).await.expect(0);
    lab.journal.ended(steady, "cancelled").await;
    lab.end().await;
}

/// The bytes that a notice counts.
fn told(notice: &str) -> Option<u64> {
    let (before, _) = notice.split_once(" bytes ")?;
    before.rsplit([' ', '(']).next()?.parse().ok()
}
