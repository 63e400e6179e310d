//! A product whose tiles are shared out over three nodes: it grows, shrinks where a node presses or
//! a part may go nowhere else, and outlives a worker and the policy service, with the digest of an
//! undisturbed run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::time::Duration;

use crate::stage;
use crate::stage::{
    Lab, Line, PATIENCE, args, audit, digest_of, until, workers, workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Event, ExecutionId, ExecutionState, NodeId, Phase, Started};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

const TILES: i64 = 256;

/// Each of these wants the machine to itself.
static ONE: Mutex<()> = Mutex::const_new(());

/// The undisturbed run, once for all tests of this file and beside them.
static REFERENCE: LazyLock<String> = LazyLock::new(|| {
    let outcome = fiec_kit::run_local("gemm@1", &params()).unwrap();
    outcome.result["digest"].as_str().unwrap().to_owned()
});

/// Some tens of seconds of work for one processor, in 256 tiles.
fn params() -> Value {
    let random = |seed: u64| json!({"random": {"n": 8_192, "seed": seed}});
    json!({"a": random(1), "b": random(2), "tile": 512, "threads": 1})
}

fn submission(id: &str, up_to: u32) -> Value {
    json!({"id": id, "program": "gemm@1", "params": params(), "spread": {"up_to": up_to},
        "when_unviable": "suspend", "commit": {"every_ms": 300}})
}

fn options(base: ClusterOptions) -> ClusterOptions {
    let mut worker_args = args(&["--slots", "1", "--threshold", "memory=0.9:0.7:500"]);
    // On a busy machine other signals would keep nodes from being places for one more.
    for signal in ["memory_stall", "latency", "power", "thermal"] {
        worker_args.extend(["--threshold".to_owned(), format!("{signal}=1:0.99:100")]);
    }
    ClusterOptions {
        worker_args,
        ..base
    }
}

/// The last state of each execution.
fn states(lab: &Lab) -> BTreeMap<ExecutionId, ExecutionState> {
    let ledgers = lab.journal.by_execution().into_iter();
    let last = |ledger: Vec<Line>| ledger.last().unwrap().state().clone();
    ledgers.map(|(id, ledger)| (id, last(ledger))).collect()
}

/// Waits until an execution has ended so, as long as anything of its tree is committed meanwhile.
async fn ended(lab: &Lab, id: ExecutionId, phase: &str) -> Line {
    let (mut seen, mut moved) = (0, Instant::now());
    loop {
        let lines = lab.journal.all();
        let end = |line: &&Line| line.state().execution == id && line.state().phase.is_terminal();
        if let Some(line) = lines.iter().find(end) {
            assert_eq!(line.phase(), phase, "{:?}", line.message.events);
            return line.clone();
        }
        if lines.len() > seen {
            (seen, moved) = (lines.len(), Instant::now());
        }
        assert!(moved.elapsed() < PATIENCE, "{id} does not get on");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Who computes, and where.
fn computing(lab: &Lab) -> BTreeMap<ExecutionId, NodeId> {
    let states = states(lab).into_iter();
    let started = states.filter_map(|(id, state)| match state.phase {
        Phase::Started(Started { binding, .. }) => Some((id, binding.node)),
        _ => None,
    });
    started.collect()
}

/// Waits until so many compute, each on a node of its own.
async fn spread_over(lab: &Lab, count: usize) -> BTreeMap<ExecutionId, NodeId> {
    until(&format!("{count} nodes compute it"), async || {
        let all = computing(lab);
        let nodes: BTreeSet<_> = all.values().collect();
        (nodes.len() == count).then(|| all.clone())
    })
    .await
}

fn has(lab: &Lab, id: ExecutionId, what: impl Fn(&Event) -> bool) -> bool {
    let ledger = lab.journal.of(id);
    let mut events = ledger.iter().flat_map(|line| &line.message.events);
    events.any(what)
}

async fn squeeze(lab: &Lab, node: &NodeId) {
    let change = ["--signal", "memory", "--cap", "1MiB"];
    let squeeze = [&["node", "envelope", node.as_str()], &change[..]].concat();
    lab.fiec(&squeeze).await.expect(0);
}

async fn release(lab: &Lab, node: &NodeId) {
    let release = ["node", "envelope", node.as_str(), "--clear"];
    lab.fiec(&release).await.expect(0);
}

fn audit_all(lab: &Lab) {
    for ledger in lab.journal.by_execution().values() {
        audit(ledger);
    }
}

#[tokio::test]
async fn a_product_grows_over_three_nodes_and_does_what_a_part_without_a_place_has_left() {
    let _alone = ONE.lock().await;
    let lab = Lab::start(options(workers_with_history(3))).await;
    let reference = tokio::task::spawn_blocking(|| REFERENCE.clone());
    let id = lab.publish_json(&submission("w", 3)).await;
    let all = spread_over(&lab, 3).await;
    let status = lab.fiec(&["status", "w", "--json"]).await.expect(0);
    let status = &status.json_lines()[0];
    assert!(
        status["parts"].as_array().is_some_and(|p| !p.is_empty()),
        "{status}"
    );
    let why = lab.fiec(&["why", "w"]).await.expect(0).stdout;
    assert!(why.contains("of up to 3 compute"), "{why}");

    // One that has no parts of its own may only be where it is, and that is not viable any more.
    let known = states(&lab);
    let leaf = |id: &&ExecutionId| known[*id].part_of().is_some() && known[*id].parts().is_empty();
    let part = *all.keys().find(leaf).unwrap();
    let holder = known[&part].part_of().unwrap();
    let there = all[&part].clone();
    let pin = ["pin", &part.to_string(), there.as_str()];
    lab.fiec(&pin).await.expect(0);
    squeeze(&lab, &there).await;
    lab.journal
        .find(part, "the part has left the node that presses", |line| {
            (line.phase() == "pending" && line.state().epoch > 0).then_some(())
        })
        .await;
    // At its own end its holder waits for it, and does the rest itself.
    let line = ended(&lab, part, "returned").await;
    assert_eq!(line.state().part_of(), Some(holder));
    release(&lab, &there).await;
    let last = ended(&lab, id, "completed").await;
    assert_eq!(digest_of(&last), reference.await.unwrap());
    assert!(has(
        &lab,
        holder,
        |e| matches!(e, Event::Merged { part: p } if *p == part)
    ));
    assert!(lab.journal.ended_count("failed") == 0);
    audit_all(&lab);

    let ended = states(&lab).len();
    lab.recorded(ended).await;
    let parts = format!(
        "SELECT count(*) FROM spread_parts WHERE whole = '{id}' AND merged_at IS NOT NULL \
         AND phase IN ('completed', 'returned')"
    );
    assert_eq!(lab.count(parts).await, i64::try_from(ended - 1).unwrap());
    let made = format!(
        "SELECT count(*) FROM (SELECT DISTINCT name, digest FROM whole_outputs WHERE whole = '{id}') o"
    );
    assert_eq!(lab.count(made).await, TILES);
    let own = format!("SELECT count(DISTINCT made_by) FROM whole_outputs WHERE whole = '{id}'");
    assert!(lab.count(own).await >= 3);
    let listed = lab.fiec(&["output", "w", "--json"]).await.expect(0);
    assert_eq!(i64::try_from(listed.json_lines().len()).unwrap(), TILES);
    let said = lab.fiec(&["history", "w"]).await.expect(0).stdout;
    assert!(
        said.contains("Parts") && said.contains("returned"),
        "{said}"
    );
    let page = lab.path("report.html").display().to_string();
    lab.fiec(&["report", "w", "-o", &page]).await.expect(0);
    lab.stop().await;
}

#[tokio::test]
async fn a_killed_worker_and_a_replaced_policy_service_change_no_bit_of_what_is_spread() {
    let _alone = ONE.lock().await;
    let mut lab = Lab::start(options(workers(3))).await;
    let reference = tokio::task::spawn_blocking(|| REFERENCE.clone());
    let id = lab.publish_json(&submission("k", 3)).await;
    let part = lab
        .journal
        .find(id, "it is split", |line| {
            let mut events = line.message.events.iter();
            events.find_map(|e| match e {
                Event::Split { part, .. } => Some(*part),
                _ => None,
            })
        })
        .await;
    // Whoever takes over finds the part, or makes it.
    lab.policies
        .iter_mut()
        .for_each(fiec_lab::process::Process::kill);
    lab.policies.clear();
    lab.start_policy().unwrap();
    let node = lab.journal.computing(part, 1).await;
    lab.worker(&node).kill();
    lab.restart_worker(stage::number_of(&node)).unwrap();
    let last = ended(&lab, id, "completed").await;
    assert_eq!(digest_of(&last), reference.await.unwrap());
    assert!(has(&lab, id, |e| matches!(e, Event::Merged { .. })));
    for (id, state) in states(&lab) {
        assert!(state.phase.is_terminal(), "{id} lives: {state:?}");
    }
    assert_eq!(lab.journal.ended_count("failed"), 0);
    audit_all(&lab);
    lab.stop().await;
}

#[tokio::test]
async fn what_is_asked_of_a_holder_reaches_its_parts() {
    let _alone = ONE.lock().await;
    let lab = Lab::start(options(workers(2))).await;
    let id = lab.publish_json(&submission("c", 2)).await;
    let all = spread_over(&lab, 2).await;
    let part = *all.keys().find(|other| **other != id).unwrap();
    let said = lab.fiec(&["pause", "c"]).await.expect(0).stdout;
    assert!(said.contains("1 of its parts"), "{said}");
    for id in [id, part] {
        lab.journal
            .find(id, "it is paused", |line| {
                (line.phase() == "paused").then_some(())
            })
            .await;
    }
    lab.fiec(&["resume", "c"]).await.expect(0);
    spread_over(&lab, 2).await;
    let change = ["adjust", "c", "--priority", "7", "--deadline", "2h"];
    let said = lab.fiec(&change).await.expect(0).stdout;
    assert!(said.contains("so it is with 1 of its parts"), "{said}");
    let mut due = Vec::new();
    for id in [id, part] {
        let of_it = |line: &Line| {
            let change = line.state().adjusted.as_deref()?;
            let due = change.deadline?.moment(line.state().submitted_at);
            (change.priority == Some(7)).then_some(due)
        };
        due.push(lab.journal.find(id, "it is changed", of_it).await);
    }
    assert_eq!(due[0], due[1], "a part is due with its holder");
    lab.fiec(&["cancel", "c"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.journal.ended(part, "cancelled").await;
    let who = |id| {
        let ledger = lab.journal.of(id);
        ledger
            .last()
            .unwrap()
            .message
            .events
            .iter()
            .find_map(|e| match e {
                Event::Cancelled { who } => Some(who.clone()),
                _ => None,
            })
    };
    assert_eq!(who(id), who(part), "it says who asked");
    audit_all(&lab);
    lab.stop().await;
}
