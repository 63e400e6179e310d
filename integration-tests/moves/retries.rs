//! What failed, is held or was cancelled starts again from its last commit, with one history.

use fiec_broker::chunk_list;
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::messages::{ApiReply, Why};
use fiec_schemas::{Event, ExecutionId, PhaseKind, subjects};
use serde_json::{Value, json};

use crate::stage::{
    Lab, Line, args, audit, digest_of, slots, undisturbed_synthetic, until, workers_with_history,
};

/// Crashes once after its boundary 4.
///
/// To be submitted with commits: a child that ends before it has said anything is replaced once.
fn params() -> Value {
    json!({"capsules": 8, "state_bytes": 4_096, "crash_at": 4, "crash_attempts": 1})
}

/// The same without a failure.
fn undisturbed() -> Value {
    json!({"capsules": 8, "state_bytes": 4_096})
}

async fn comes_to_be(lab: &Lab, id: ExecutionId, phase: &'static str) {
    let what = format!("{id} is {phase}");
    lab.journal
        .find(id, &what, |line| (line.phase() == phase).then_some(()))
        .await;
}

/// The message with which an execution has completed, whatever it was before.
async fn completes(lab: &Lab, id: ExecutionId) -> Line {
    let what = format!("{id} completes");
    lab.journal
        .find(id, &what, |line| {
            (line.phase() == "completed").then(|| line.clone())
        })
        .await
}

fn two_slots() -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(2),
        ..workers_with_history(1)
    }
}

async fn row(lab: &Lab, id: ExecutionId) -> Vec<Option<String>> {
    let rows = lab
        .sql(&format!(
            "SELECT phase, failure, fault, fault_owner, finished_at IS NULL FROM executions \
             WHERE id = '{id}'"
        ))
        .await;
    rows.rows.into_iter().next().unwrap_or_default()
}

fn word(text: &str) -> Option<String> {
    Some(text.to_owned())
}

#[tokio::test]
async fn a_held_execution_goes_on_from_its_last_commit_with_the_bits_of_an_undisturbed_run() {
    let lab = Lab::start(workers_with_history(1)).await;
    let line = json!({"id": "h", "program": "synthetic@1", "retries": 0, "on_failure": "hold",
        "commit": {"every": 1}, "params": params()});
    let id = lab.publish_json(&line).await;
    let after = json!({"id": "waits", "program": "synthetic@1", "after": [{"id": "h"}]});
    let waits = lab.publish_json(&after).await;
    comes_to_be(&lab, id, "held").await;

    // It is an outcome, it says what happened and what to do, and what waits for it waits on.
    let waited = lab.fiec(&["wait", "h"]).await.expect(1);
    assert!(
        waited.stderr.contains("held: ") && waited.stderr.contains("fiec retry"),
        "{waited:?}"
    );
    let ran = lab.fiec(&["why", "h", "--json"]).await.expect(0);
    let why: Why = serde_json::from_str::<ApiReply>(&ran.stdout)
        .unwrap()
        .why
        .unwrap();
    assert_eq!(why.phase, PhaseKind::Held);
    assert!(
        why.summary.contains("the fault is its program's"),
        "{why:?}"
    );
    assert!(
        why.would_help
            .iter()
            .any(|help| help.contains("fiec retry h")),
        "{why:?}"
    );
    let status = lab.fiec(&["status", "h"]).await.expect(0).stdout;
    assert!(
        status.contains("held") && status.contains("boundary 4"),
        "{status}"
    );
    for verb in ["pause", "resume", "yield"] {
        lab.fiec(&[verb, "h"]).await.expect(1);
    }
    until("its row says that it is held", async || {
        let row = row(&lab, id).await;
        let said = row.first()? == &word("held") && row[2] == word("exited") && row[4] == word("t");
        said.then_some(())
    })
    .await;

    // It may be changed before it goes on.
    lab.fiec(&["adjust", "h", "--priority", "7"])
        .await
        .expect(0);
    lab.fiec(&["retry", "h"]).await.expect(0);
    let last = completes(&lab, id).await;
    completes(&lab, waits).await;
    assert_eq!(
        digest_of(&last),
        undisturbed_synthetic(&undisturbed()).await
    );
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let indices: Vec<u64> = ledger
        .iter()
        .flat_map(|line| &line.message.events)
        .filter_map(|event| match event {
            Event::Boundary(boundary) => Some(boundary.index),
            _ => None,
        })
        .collect();
    assert_eq!(
        indices,
        (1..8).collect::<Vec<_>>(),
        "nothing is computed twice"
    );
    until("its row says no more that it has failed", async || {
        let said = row(&lab, id).await == [word("completed"), None, None, None, word("f")];
        said.then_some(())
    })
    .await;
    let kinds = lab
        .count(format!(
            "SELECT count(*) FROM execution_events WHERE execution = '{id}' \
             AND (kind = 'held' OR kind = 'retried' AND who IS NOT NULL)"
        ))
        .await;
    assert_eq!(kinds, 2);
    let refused = lab.fiec(&["retry", "h"]).await.expect(1).stderr;
    assert!(
        refused.contains("it is completed; only a failed, held or cancelled"),
        "{refused}"
    );
    lab.end().await;
}

#[tokio::test]
async fn a_failed_and_a_cancelled_execution_start_again_from_their_last_commit() {
    let lab = Lab::start(workers_with_history(1)).await;
    let line = json!({"id": "f", "program": "synthetic@1", "retries": 0, "commit": {"every": 1},
        "params": params()});
    let failed = lab.publish_json(&line).await;
    // Its state is large: it lies in chunks.
    let large =
        json!({"capsules": 6, "state_bytes": 3_000_000, "crash_at": 4, "crash_attempts": 1});
    let submission = json!({"id": "l", "program": "synthetic@1", "retries": 0,
        "commit": {"every": 1}, "params": large});
    let of_large = lab.publish_json(&submission).await;
    let line = json!({"id": "c", "program": "synthetic@1", "commit": {"every": 20},
        "params": {"capsules": 200, "work_us": 20_000}});
    let cancelled = lab.publish_json(&line).await;
    lab.journal.computing(cancelled, 2).await;
    lab.fiec(&["cancel", "c"]).await.expect(0);
    lab.journal.ended(failed, "failed").await;
    lab.journal.ended(of_large, "failed").await;
    let stopped = lab.journal.ended(cancelled, "cancelled").await;
    let committed = stopped.message.state.boundary_index();
    let subject = subjects::chunk(&lab.tenant, of_large);
    assert!(
        !chunk_list::stored(&lab.broker, &subject)
            .await
            .unwrap()
            .is_empty()
    );

    // The same line again says which command to use.
    let again = lab.file("again.jsonl", submission.to_string());
    let said = lab
        .fiec(&["submit", &again.display().to_string()])
        .await
        .expect(0)
        .stdout;
    assert!(
        said.contains("is failed: `fiec retry l` starts it again"),
        "{said}"
    );
    let said = lab.fiec(&["resume", "c"]).await.expect(1).stderr;
    let words = "c is already cancelled; `fiec retry c` starts it again from its last commit";
    assert!(said.contains(words), "{said}");

    until("the crash is in the history", async || {
        let told = lab.fiec(&["history", "f"]).await.expect(0).stdout;
        (told.contains("Faults") && told.contains("program")).then_some(())
    })
    .await;
    lab.fiec(&["retry", "f", "l", "c"]).await.expect(0);
    let last = completes(&lab, failed).await;
    assert_eq!(
        digest_of(&last),
        undisturbed_synthetic(&undisturbed()).await
    );
    let last = completes(&lab, of_large).await;
    let whole = json!({"capsules": 6, "state_bytes": 3_000_000});
    assert_eq!(digest_of(&last), undisturbed_synthetic(&whole).await);
    completes(&lab, cancelled).await;
    let ledger = lab.journal.of(cancelled);
    audit(&ledger);
    let first_after = ledger
        .iter()
        .skip_while(|line| line.phase() != "cancelled")
        .flat_map(|line| &line.message.events)
        .find_map(|event| match event {
            Event::Boundary(boundary) => Some(boundary.index),
            _ => None,
        });
    assert_eq!(first_after, Some(committed + 20));
    // One row, one history.
    lab.recorded(3).await;
    assert_eq!(
        row(&lab, failed).await,
        [word("completed"), None, None, None, word("f")]
    );
    lab.end().await;
}

#[tokio::test]
async fn the_failed_of_a_batch_start_again_and_their_dependents_wait_for_them() {
    let lab = Lab::start(two_slots()).await;
    let fails = params();
    // A chain of four of which the second fails, and one that is cancelled.
    let lines = [
        json!({"id": "a", "batch": "b", "program": "synthetic@1"}),
        json!({"id": "b", "batch": "b", "program": "synthetic@1", "retries": 0, "params": fails,
            "commit": {"every": 1}, "after": [{"id": "a"}]}),
        json!({"id": "c", "batch": "b", "program": "synthetic@1", "after": [{"id": "b"}]}),
        json!({"id": "d", "batch": "b", "program": "synthetic@1", "after": [{"id": "c"}]}),
        json!({"id": "e", "batch": "b", "program": "synthetic@1",
            "params": {"capsules": 2, "rest_us": 300_000_000}}),
        json!({"id": "x", "program": "synthetic@1", "after": [{"id": "d"}]}),
    ];
    let mut ids = Vec::new();
    for line in &lines {
        ids.push(lab.publish_json(line).await);
    }
    for id in &ids[1..4] {
        lab.journal.ended(*id, "failed").await;
    }
    lab.journal.ended(ids[5], "failed").await;
    lab.journal
        .find(ids[4], "it computes", |line| line.started_on())
        .await;
    lab.fiec(&["cancel", "e"]).await.expect(0);
    lab.journal.ended(ids[4], "cancelled").await;

    let ran = lab
        .fiec(&["retry", "--batch", "b", "--failed", "--json"])
        .await
        .expect(0);
    assert_eq!(ran.json_lines()[0]["done"], 3, "{ran:?}");
    for id in &ids[1..4] {
        completes(&lab, *id).await;
    }
    // What is not of the batch stays as it is, and what was cancelled.
    assert_eq!(lab.journal.of(ids[4]).last().unwrap().phase(), "cancelled");
    let ran = lab.fiec(&["retry", "x"]).await.expect(0);
    assert!(
        ran.stdout
            .contains("continues as soon as a node is free for it"),
        "{ran:?}"
    );
    completes(&lab, ids[5]).await;
    lab.end().await;
}

#[tokio::test]
async fn the_retry_of_one_takes_along_what_waited_for_it() {
    let lab = Lab::start(two_slots()).await;
    let fails = params();
    let lines = [
        json!({"id": "a", "program": "synthetic@1", "retries": 0, "params": fails,
            "commit": {"every": 1}}),
        json!({"id": "b", "program": "synthetic@1", "after": [{"id": "a"}]}),
        json!({"id": "c", "program": "synthetic@1", "after": [{"id": "b"}]}),
    ];
    let mut ids = Vec::new();
    for line in &lines {
        ids.push(lab.publish_json(line).await);
    }
    for id in &ids {
        lab.journal.ended(*id, "failed").await;
    }
    let ran = lab.fiec(&["retry", "a"]).await.expect(0);
    assert!(ran.stdout.contains("so do 2 that waited for it"), "{ran:?}");
    for id in &ids {
        completes(&lab, *id).await;
    }
    lab.end().await;
}

#[tokio::test]
async fn an_unreadable_state_is_left_behind_by_going_back() {
    let mut options: ClusterOptions = workers_with_history(1);
    options.worker_args = slots(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "unread@*"]));
    let lab = Lab::start(options).await;
    let folder = lab.path("unread");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["sh", "unread.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    // The first run writes at boundary 3 what it cannot read. A marker stands for the repair.
    let marker = lab.path("repaired");
    let script = format!(
        "count=0\nif [ -f \"$FIEC_STATE_DIR/count\" ]; then read -r count < \"$FIEC_STATE_DIR/count\"; fi\n\
         if [ \"$count\" = bad ]; then echo 'cannot read its state' >&2; exit 65; fi\n\
         count=$((count + 1))\n\
         if [ \"$count\" = 3 ] && [ ! -f '{0}' ]; then count=bad; fi\n\
         echo \"$count\" > \"$FIEC_STATE_DIR/count\"\n\
         if [ \"$count\" = bad ] || [ \"$count\" -lt 5 ]; then exit 85; fi\n",
        marker.display()
    );
    std::fs::write(folder.join("unread.sh"), script).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "unread@1", &folder])
        .await
        .expect(0);
    let line = json!({"id": "u", "program": "unread@1", "retries": 0, "commit": {"every": 1}});
    let id = lab.publish_json(&line).await;
    lab.journal.ended(id, "failed").await;
    std::fs::write(&marker, "").unwrap();

    // The last commit is the bad one.
    lab.fiec(&["retry", "u"]).await.expect(0);
    until("it fails once more", async || {
        let all = lab.journal.of(id);
        let failures = all.iter().filter(|line| line.phase() == "failed").count();
        (failures == 2).then_some(())
    })
    .await;
    let refused = lab
        .fiec(&["retry", "u", "--from-boundary", "9"])
        .await
        .expect(1)
        .stderr;
    assert!(
        refused.contains("can go back to 3, 2, 1, 0, the beginning"),
        "{refused}"
    );
    lab.fiec(&["retry", "u", "--from-boundary", "2"])
        .await
        .expect(0);
    let last = completes(&lab, id).await;
    assert_eq!(last.message.state.totals.steps_back, 1);
    audit(&lab.journal.of(id));
    until("the boundary is withdrawn in the history", async || {
        let query = format!(
            "SELECT count(*) FROM boundaries WHERE execution = '{id}' AND index = 3 \
             AND withdrawn_at IS NOT NULL"
        );
        (lab.count(query).await == 1).then_some(())
    })
    .await;
    lab.end().await;
}

/// Reaches boundaries, and answers a cancel with a failure.
const STUBBORN: &str = r#"import json, os, socket, time
conn = socket.socket(socket.AF_UNIX)
conn.connect(os.environ["FIEC_SOCKET"])
lines = conn.makefile("rw", encoding="utf-8", newline="\n")
def say(**line):
    lines.write(json.dumps(line) + "\n")
    lines.flush()
json.loads(lines.readline())
while True:
    time.sleep(0.05)
    say(**{"is": "boundary"})
    while True:
        heard = json.loads(lines.readline())
        if heard["is"] == "state":
            say(**{"is": "state", "state": "AA=="})
        elif heard["is"] == "go":
            break
        else:
            say(**{"is": "failed", "reason": "no", "permanent": True})
            raise SystemExit(0)
"#;

#[tokio::test]
async fn a_program_that_fails_when_it_is_cancelled_is_cancelled_and_not_held() {
    let mut options: ClusterOptions = workers_with_history(1);
    options.worker_args = slots(1);
    let allowed = args(&["--allow-program", "stubborn@*"]);
    options.worker_args.extend(allowed);
    let lab = Lab::start(options).await;
    let folder = lab.path("stubborn");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["python3", "-B", "main.py"], "protocol": "json_lines"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    std::fs::write(folder.join("main.py"), STUBBORN).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "stubborn@1", &folder])
        .await
        .expect(0);
    let line = json!({"id": "s", "program": "stubborn@1", "on_failure": "hold",
        "commit": {"every": 1}});
    let id = lab.publish_json(&line).await;
    lab.journal.computing(id, 2).await;
    lab.fiec(&["cancel", "s"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.end().await;
}

#[tokio::test]
async fn a_retry_goes_on_with_more_memory_or_another_deadline() {
    let lab = Lab::start(two_slots()).await;
    // It always crashes at its second boundary.
    let params = json!({"capsules": 4, "crash_at": 2});
    let line = json!({"id": "small", "program": "synthetic@1", "retries": 0,
        "commit": {"every": 1}, "params": params});
    let id = lab.publish_json(&line).await;
    comes_to_be(&lab, id, "failed").await;
    // No node has so much: the requirement counts.
    let ran = lab.fiec(&["retry", "small", "--memory", "900TiB"]).await;
    ran.expect(0);
    comes_to_be(&lab, id, "pending").await;
    let why = lab.fiec(&["why", "small"]).await.expect(0).stdout;
    assert!(why.contains("memory"), "{why}");
    lab.fiec(&["cancel", "small"]).await.expect(0);
    comes_to_be(&lab, id, "cancelled").await;

    let late = json!({"id": "late", "program": "synthetic@1",
        "params": {"capsules": 400, "rest_us": 10_000}, "commit": {"every": 1},
        "deadline": {"within_s": 1, "on_miss": "fail"}});
    let late = lab.publish_json(&late).await;
    comes_to_be(&lab, late, "failed").await;
    let refused = lab.fiec(&["retry", "late"]).await.expect(1);
    assert!(refused.stderr.contains("--deadline"), "{refused:?}");
    let again = ["retry", "late", "--deadline", "1h", "--fail-late"];
    lab.fiec(&again).await.expect(0);
    completes(&lab, late).await;
    lab.end().await;
}
