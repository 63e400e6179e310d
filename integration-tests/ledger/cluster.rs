//! Three brokers with three copies of each stream. Every process is connected to a server of its
//! own at first; a server lags, freezes, dies, or takes the majority with it.

use std::time::Duration;

use fiec_lab::cluster::ClusterOptions;
use fiec_lab::process::Lag;
use fiec_schemas::subjects;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::sleep;

use crate::stage::{Lab, PATIENCE, run, slots, until, workers_with_history};

/// Longer than the time in which a server that hears nobody stops leading (10 s).
const FROZEN: Duration = Duration::from_secs(12);

fn three_of_everything() -> ClusterOptions {
    ClusterOptions {
        brokers: 3,
        policies: 2,
        worker_args: slots(2),
        ..workers_with_history(3)
    }
}

/// The number of the server, from 0, that leads the stream of ledgers.
async fn leader(lab: &Lab) -> usize {
    until("the ledgers have a leader", async || {
        let stream = lab.broker.js.get_stream(subjects::LEDGER_STREAM).await;
        let name = stream.ok()?.cached_info().cluster.clone()?.leader?;
        name.trim_start_matches('s')
            .parse::<usize>()
            .ok()?
            .checked_sub(1)
    })
    .await
}

fn pid_of(lab: &Lab, server: usize) -> u32 {
    lab.servers.brokers().nth(server).unwrap().pid()
}

async fn restart(lab: &mut Lab, server: usize) {
    let server = lab.servers.broker_mut(server).unwrap();
    server.restart().await.unwrap();
}

/// Submits arrays of short executions that commit at each boundary. Returns their number.
async fn submit(lab: &Lab, arrays: usize, of: usize) -> usize {
    for array in 0..arrays {
        let line = json!({"program": "synthetic@1", "array": {"count": of},
            "params": {"capsules": 3, "rest_us": 20_000}, "commit": {"every": 1}});
        let file = lab.file(&format!("array-{array}.jsonl"), line.to_string());
        until("the submission is taken", async || {
            let ran = run(lab.command(&["submit", file.to_str().unwrap()])).await;
            (ran.code == 0).then_some(())
        })
        .await;
    }
    arrays * of
}

/// Waits until this many executions have ended, whatever the figures of a moment may say.
pub async fn all_end(lab: &Lab, count: usize) {
    let query = format!(
        "SELECT count(*) FROM executions WHERE tenant = '{}' AND phase = 'completed'",
        lab.tenant
    );
    let begun = tokio::time::Instant::now();
    let mut done = 0;
    while begun.elapsed() < 3 * PATIENCE {
        done = usize::try_from(lab.count(query.clone()).await).unwrap();
        if done == count {
            return;
        }
        sleep(Duration::from_millis(200)).await;
    }
    panic!(
        "{done} of {count} executions are completed after {:?}",
        3 * PATIENCE
    );
}

#[tokio::test]
async fn a_server_that_lags_behind_costs_no_message_and_leaves_no_execution_behind() {
    let mut lab = Lab::start(three_of_everything()).await;
    // A policy service and a worker are connected to it.
    let lags = if leader(&lab).await == 1 { 0 } else { 1 };
    let lag = Lag::of(pid_of(&lab, lags)).unwrap();
    let count = submit(&lab, 3, 100).await;
    all_end(&lab, count).await;
    drop(lag);
    for process in &lab.workers {
        let said = process.tail(usize::MAX);
        let removed = "removing the message that it stored there";
        assert!(!said.contains(removed), "{} says so", process.name);
    }
    assert_eq!(lab.count("SELECT count(*) FROM lost_rows").await, 0);
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_batch_is_paused_resumed_and_cancelled_whole_while_a_server_does_not_answer() {
    const COUNT: usize = 120;
    let lab = Lab::start(three_of_everything()).await;
    // No node has the label.
    let line = json!({"id": "rests", "batch": "rests", "program": "synthetic@1",
        "array": {"count": COUNT}, "requires": {"labels": {"no": "where"}},
        "params": {"capsules": 3}});
    lab.publish_text(&line.to_string()).await;
    let count =
        |phase: &str| format!("SELECT count(*) FROM execution_summary WHERE phase = '{phase}'");
    let reach = async |phase: &'static str| {
        until("the batch is so as a whole", async || {
            let found = lab.count(count(phase)).await;
            (usize::try_from(found).ok()? == COUNT).then_some(())
        })
        .await;
    };
    reach("pending").await;
    // It keeps its connections, and a third of what any copy may answer is asked of it.
    let follower = (leader(&lab).await + 1) % 3;
    let lag = Lag::of(pid_of(&lab, follower)).unwrap();
    for (verb, phase) in [
        ("pause", "paused"),
        ("resume", "pending"),
        ("pause", "paused"),
        ("cancel", "cancelled"),
    ] {
        let ran = run(lab.command(&["batch", verb, "rests", "--json"])).await;
        let said: serde_json::Value = serde_json::from_str(&ran.expect(0).stdout).unwrap();
        assert_eq!(said["done"], COUNT, "{verb}: {said}");
        reach(phase).await;
    }
    drop(lag);
    lab.end().await;
}

#[tokio::test]
async fn executions_go_on_while_the_leader_is_killed_frozen_and_started_again() {
    let mut lab = Lab::start(three_of_everything()).await;
    let count = submit(&lab, 2, 60).await;
    let killed = leader(&lab).await;
    lab.servers.broker_mut(killed).unwrap().kill().await;
    until("another server leads", async || {
        (leader(&lab).await != killed).then_some(())
    })
    .await;
    let more = submit(&lab, 1, 60).await;
    restart(&mut lab, killed).await;

    // It thinks that it leads when it comes back, and what it has in its buffers is old.
    let frozen = leader(&lab).await;
    let pid = Pid::from_raw(pid_of(&lab, frozen).try_into().unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    sleep(FROZEN).await;
    kill_process(pid, Signal::CONT).unwrap();
    all_end(&lab, count + more).await;
    assert_eq!(lab.count("SELECT count(*) FROM lost_rows").await, 0);
    lab.end().await;
}

#[tokio::test]
async fn a_rolling_restart_of_all_servers_loses_nothing() {
    let mut lab = Lab::start(three_of_everything()).await;
    let mut count = 0;
    for server in 0..3 {
        count += submit(&lab, 1, 60).await;
        restart(&mut lab, server).await;
        leader(&lab).await;
    }
    all_end(&lab, count).await;
    assert_eq!(lab.count("SELECT count(*) FROM lost_rows").await, 0);
    lab.end().await;
}

#[tokio::test]
async fn everything_waits_while_two_of_three_servers_are_away_and_goes_on_after() {
    let mut lab = Lab::start(three_of_everything()).await;
    let count = submit(&lab, 2, 60).await;
    for server in 0..2 {
        lab.servers.broker_mut(server).unwrap().kill().await;
    }
    // Without a majority nothing can be stored: the time is what this test is about.
    sleep(FROZEN).await;
    for server in 0..2 {
        restart(&mut lab, server).await;
    }
    let more = submit(&lab, 1, 30).await;
    all_end(&lab, count + more).await;
    assert_eq!(lab.count("SELECT count(*) FROM lost_rows").await, 0);
    lab.end().await;
}
