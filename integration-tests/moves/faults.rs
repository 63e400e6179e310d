//! Whose fault it was: a failure costs an attempt only where it is the program's own, and all that
//! tell of it say whose it was.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use fiec_lab::cluster::Cluster;
use fiec_schemas::messages::{ApiReply, Why};
use fiec_schemas::{Candidate, Event, Fault};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::stage::{Lab, args, proc, slots, until, workers_with_history};

/// Counts to three, one a capsule.
const COUNTS: &str = r#"
count=0
if [ -f "$FIEC_STATE_DIR/count" ]; then read -r count < "$FIEC_STATE_DIR/count"; fi
count=$((count + 1))
echo "$count" > "$FIEC_STATE_DIR/count"
if [ "$count" -lt 3 ]; then exit 85; fi
"#;

#[tokio::test]
async fn a_node_without_the_interpreter_fails_none_of_twenty() {
    const COUNT: usize = 20;
    let mut options = workers_with_history(1);
    options.worker_args = slots(2);
    options
        .worker_args
        .extend(args(&["--allow-program", "counts@*"]));
    let mut lab = Lab::start(options).await;
    // The first node has no such interpreter, and the third gets it later.
    let path = std::env::var("PATH").unwrap();
    let [bin, later] = ["bin", "later"].map(|name| lab.path(name));
    for folder in [&bin, &later] {
        std::fs::create_dir_all(folder).unwrap();
        let path = format!("{}:{path}", folder.display());
        lab.start_worker_in(&[("PATH".to_owned(), path)]).unwrap();
    }
    let interpreter = |folder: &Path| symlink("/bin/sh", folder.join("sh-of-this-test")).unwrap();
    interpreter(&bin);
    lab.ready().await.unwrap();
    let (lacks, learns) = (Cluster::node(1), Cluster::node(3));

    let folder = lab.path("counts");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["sh-of-this-test", "counts.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let script = folder.join("counts.sh");
    std::fs::write(&script, COUNTS).unwrap();
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "counts@1", &folder])
        .await
        .expect(0);
    let line = json!({"id": "c", "program": "counts@1", "array": {"count": COUNT}, "retries": 0});
    lab.publish_text(&line.to_string()).await;
    for n in 0..COUNT {
        let last = lab
            .journal
            .ended(lab.id(&format!("c-{n}")), "completed")
            .await;
        assert_eq!(last.message.state.totals.crashes, 0);
    }
    lab.recorded(COUNT).await;
    // Somebody was bound to the first node, and it said what it lacks.
    let charged = format!(
        "SELECT count(*) FROM execution_faults WHERE owner = 'node' AND fault = 'cannot_start' \
         AND node = '{lacks}' AND detail LIKE '%cannot start sh-of-this-test%PATH has it%'"
    );
    assert!(lab.count(charged).await > 0);
    let others = "SELECT count(*) FROM execution_faults WHERE owner <> 'node' OR node IS NULL";
    assert_eq!(lab.count(others).await, 0);
    // Both are set aside, so they did not eat the queue.
    let faults = lab.count("SELECT count(*) FROM execution_faults").await;
    assert!(faults < COUNT as i64, "{faults}");
    for node in [&lacks, &learns] {
        let status = lab.status_of(node).await.unwrap();
        let aside = &status.set_aside[0];
        assert_eq!(aside.program.as_deref(), Some("counts@1"), "{aside:?}");
        assert!(
            aside.reason.contains("cannot start sh-of-this-test"),
            "{aside:?}"
        );
    }
    let listed = lab.fiec(&["nodes"]).await.expect(0).stdout;
    assert!(
        listed.contains(&format!("{lacks}: set aside for counts@1: ")),
        "{listed}"
    );

    // What only such a node may take waits, and says for what. When its time comes it is tried.
    let line = json!({"id": "only", "program": "counts@1", "retries": 0,
        "requires": {"nodes": [&learns]}});
    let id = lab.publish_json(&line).await;
    until("it waits for its node", async || {
        let ran = lab.fiec(&["why", "only", "--json"]).await;
        let why = serde_json::from_str::<ApiReply>(&ran.stdout).ok()?.why?;
        let against =
            |c: &Candidate| c.node == learns && c.rejected[0].contains("cannot start counts@1");
        let helps = format!("sh-of-this-test where the worker on {learns} runs");
        (why.candidates.iter().any(against) && why.would_help.contains(&helps)).then_some(())
    })
    .await;
    interpreter(&later);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(last.message.state.totals.crashes, 0);
    let told = |what| {
        format!("SELECT count(*) FROM node_events WHERE node = '{learns}' AND what = '{what}'")
    };
    until("its return is recorded", async || {
        (lab.count(told("starts_again")).await == 1).then_some(())
    })
    .await;
    assert_eq!(lab.count(told("cannot_start")).await, 1);
    let status = lab.status_of(&learns).await.unwrap();
    assert!(status.set_aside.is_empty(), "{status:?}");
    lab.stop().await;
}

#[tokio::test]
async fn a_failure_is_told_with_whose_fault_it_was() {
    let lab = Lab::start(workers_with_history(1)).await;
    let submission = json!({"id": "crashes", "program": "synthetic@1", "retries": 1,
        "params": {"capsules": 5, "crash_at": 3}});
    let id = lab.publish_json(&submission).await;
    lab.journal.ended(id, "failed").await;
    let after = json!({"id": "needs", "program": "synthetic@1", "after": [{"id": "crashes"}]});
    let needs = lab.publish_json(&after).await;
    lab.journal.ended(needs, "failed").await;

    let why = async |id: &str| -> Why {
        let ran = lab.fiec(&["why", id, "--json"]).await.expect(0);
        let reply: ApiReply = serde_json::from_str(&ran.stdout).unwrap();
        reply.why.unwrap()
    };
    let said = why("crashes").await.summary;
    assert!(
        said.contains("crashed 2 times") && said.contains("the fault is its program's"),
        "{said}"
    );
    let said = why("needs").await;
    assert!(
        said.summary.contains("that follows from its submission"),
        "{said:?}"
    );
    assert!(
        said.would_help[0].contains(&format!("fiec why {id}")),
        "{said:?}"
    );
    let status = lab.fiec(&["status", "crashes"]).await.expect(0).stdout;
    assert!(
        status.contains("2 crashes of the program (2 since the last commit), 0 faults of nodes"),
        "{status}"
    );
    lab.recorded(2).await;
    let rows = lab
        .sql(
            "SELECT client_id, event, owner, fault FROM execution_faults \
             ORDER BY client_id, at, event",
        )
        .await;
    let words = |row: &Vec<Option<String>>| {
        let words: Vec<_> = row
            .iter()
            .map(|word| word.as_deref().unwrap_or("-"))
            .collect();
        words.join(" ")
    };
    let found: Vec<String> = rows.rows.iter().map(words).collect();
    assert_eq!(
        found,
        [
            "crashes crashed program exited",
            "crashes crashed program exited",
            "needs failed submission dependency",
        ]
    );
    lab.stop().await;
}

/// Takes twice the memory of its worker's group.
const GROWS: &str = "#!/usr/bin/env python3\ndata = bytearray(b'x') * (600 << 20)\n";

#[tokio::test]
async fn a_kill_for_memory_is_named_with_its_limit_and_a_kill_by_hand_is_not() {
    const LIMIT: u64 = 300 << 20;
    let mut options = workers_with_history(1);
    options.worker_args = slots(2);
    let allowed = ["--allow-program", "grows@*", "--memory-limit", "300MiB"];
    options.worker_args.extend(args(&allowed));
    let mut lab = Lab::start(options).await;
    let node = Cluster::node(1);
    let source = lab.status_of(&node).await.unwrap();
    let source = source.descriptor.memory_limit_source;
    if !source.starts_with("cgroup") {
        println!("SKIPPED: no control group can be made here, the limit is {source}");
        return lab.stop().await;
    }
    let folder = lab.path("grows");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["./grows.py"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let script = folder.join("grows.py");
    std::fs::write(&script, GROWS).unwrap();
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "grows@1", &folder])
        .await
        .expect(0);

    let line = json!({"id": "grows", "program": "grows@1", "retries": 0});
    let id = lab.publish_json(&line).await;
    let last = lab.journal.ended(id, "failed").await;
    let failed = last.message.events.iter().find_map(|event| match event {
        Event::Failed { reason, fault, .. } => Some((reason.clone(), fault.as_deref().cloned())),
        _ => None,
    });
    let (reason, fault) = failed.unwrap();
    let Some(Fault::OutOfMemory {
        limit_bytes: LIMIT,
        peak_bytes: Some(peak),
    }) = fault
    else {
        panic!("{fault:?}: {reason}")
    };
    assert!(peak > LIMIT / 100 * 98, "{peak}");
    let words = "killed by the kernel, out of memory (limit 300 MiB, peak 300 MiB)";
    assert!(reason.contains(words), "{reason}");
    let ran = lab.fiec(&["why", "grows"]).await.expect(0);
    assert!(ran.stdout.contains("a node with more memory"), "{ran:?}");

    let params = json!({"capsules": 100_000, "rest_us": 20_000});
    let line = json!({"id": "killed", "program": "synthetic@1", "params": params, "retries": 0,
        "commit": {"every": 1}});
    let id = lab.publish_json(&line).await;
    lab.journal.computing(id, 2).await;
    for pid in proc::descendants(lab.worker(&node).pid()) {
        let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
        let _ = kill_process(pid, Signal::KILL);
    }
    let last = lab.journal.ended(id, "failed").await;
    let by_hand = |event: &Event| {
        matches!(event, Event::Failed { fault: Some(fault), .. }
            if **fault == Fault::Signalled { signal: 9 })
    };
    assert!(last.message.events.iter().any(by_hand), "{last:?}");
    lab.stop().await;
}

/// Kills its worker at its second capsule: the parent of the process that runs it is the worker's
/// child.
const POISON: &str = r#"
if [ -f "$FIEC_STATE_DIR/begun" ]; then
    read -r _ _ _ parent _ < "/proc/$PPID/stat"
    kill -9 "$parent"
    sleep 60
fi
echo > "$FIEC_STATE_DIR/begun"
exit 85
"#;

#[tokio::test]
async fn a_program_that_kills_its_worker_is_held_and_others_go_on() {
    let mut options = workers_with_history(3);
    options.worker_args = slots(2);
    options
        .worker_args
        .extend(args(&["--allow-program", "poison@*"]));
    let mut lab = Lab::start(options).await;
    let folder = lab.path("poison");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["sh", "poison.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    std::fs::write(folder.join("poison.sh"), POISON).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "poison@1", &folder])
        .await
        .expect(0);
    let params = json!({"capsules": 400, "rest_us": 100_000});
    let mut others = Vec::new();
    for n in 0..3 {
        let line = json!({"id": format!("o{n}"), "program": "synthetic@1", "params": params,
            "commit": {"every": 1}});
        others.push(lab.publish_json(&line).await);
    }
    let line = json!({"id": "p", "program": "poison@1", "commit": {"every": 1}});
    let id = lab.publish_json(&line).await;

    // Somebody starts each worker again that ends.
    let mut deaths = 0;
    let held = loop {
        let last = lab.journal.of(id).last().cloned();
        if let Some(last) = last.filter(|last| last.phase() == "held") {
            break last;
        }
        for number in 1..=3 {
            if lab.worker(&Cluster::node(number)).ended().is_some() {
                deaths += 1;
                // A worker that ends before it has said that it had started does not count.
                assert!(deaths <= 6, "it went on after six workers");
                lab.restart_worker(number).unwrap();
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(deaths >= 3);
    let totals = held.message.state.totals;
    // The first may have ended before its commit, and counts as well.
    assert!((3..=deaths).contains(&totals.node_faults), "{totals:?}");
    assert_eq!(totals.crashes, 0);
    let why = lab.fiec(&["why", "p"]).await.expect(0).stdout;
    assert!(
        why.contains("3 workers have ended while they computed it"),
        "{why}"
    );
    for node in &held.message.state.deaths {
        assert!(why.contains(node.as_str()), "{why}");
    }
    // The others commit on, and were not charged.
    for other in others {
        let reached = lab
            .journal
            .of(other)
            .last()
            .unwrap()
            .message
            .state
            .boundary_index();
        lab.journal
            .find(other, "it commits on", |line| {
                (line.message.state.boundary_index() > reached).then_some(())
            })
            .await;
        let state = lab.journal.of(other).last().unwrap().message.state.clone();
        assert_eq!(state.totals.crashes, 0);
    }
    let ended = ["cancel", "p", "o0", "o1", "o2"];
    lab.fiec(&ended).await.expect(0);
    lab.stop().await;
}
