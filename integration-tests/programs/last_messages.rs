//! The last message of an execution always fits: large results, failures with long and strange
//! words, and what stands in SQL afterwards.

use std::os::unix::fs::PermissionsExt;

use crate::stage::{Lab, Line, args, audit, until, workers, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::limits::{RESULT_LIMIT, STDERR_LIMIT, text_len};
use fiec_schemas::{Event, Phase};
use serde_json::{Value, json};

/// Returns a text of a given length in bytes, or fails with as many control bytes.
const SAYS: &str = r#"#!/usr/bin/env python3
import json, os, sys
with open(os.environ["FIEC_PARAMS"]) as file:
    params = json.load(file)
if "control" in params:
    sys.stderr.write("\x01" * params["control"])
    sys.exit(3)
with open(os.environ["FIEC_RESULT"], "w") as file:
    json.dump("x" * params["bytes"], file)
"#;

/// Ends at a time that no ledger message can say.
const STRANGE: &str = r#"#!/usr/bin/env python3
import json, os, socket, struct, sys

agent = socket.socket(fileno=int(os.environ["FIEC_SOCKET_FD"]))

def take(n):
    data = b""
    while len(data) < n:
        more = agent.recv(n - len(data))
        if not more:
            sys.exit(0)
        data += more
    return data

def say(head):
    text = json.dumps(head).encode()
    agent.sendall(struct.pack("<IQ", len(text), 0) + text)

say({"is": "ready"})
while True:
    head, body = struct.unpack("<IQ", take(12))
    order = json.loads(take(head))
    take(body)
    if order["is"] == "prepare":
        say({"is": "prepared"})
    elif order["is"] == "run":
        say({"is": "completed", "result": 1, "capsules": 1,
             "computing_since": "2026-01-01T00:00:00Z",
             "computed_until": "-000044-03-15T00:00:00Z"})
"#;

fn package(lab: &Lab, name: &str, protocol: &str, script: &str) -> String {
    let folder = lab.path(name);
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["./program.py"], "protocol": protocol});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let program = folder.join("program.py");
    std::fs::write(&program, script).unwrap();
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(program, executable).unwrap();
    folder.display().to_string()
}

fn allowing(mut options: ClusterOptions, pattern: &str) -> ClusterOptions {
    let allow = args(&["--allow-program", pattern]);
    options.worker_args.extend(allow);
    options
}

fn failure(line: &Line) -> (String, String) {
    let found = line.message.events.iter().find_map(|event| match event {
        Event::Failed { reason, stderr, .. } => Some((reason.clone(), stderr.clone())),
        _ => None,
    });
    found.unwrap()
}

#[tokio::test]
async fn a_completion_that_cannot_be_written_fails_the_execution() {
    let lab = Lab::start(allowing(workers(1), "strange@*")).await;
    let path = package(&lab, "strange", "frames", STRANGE);
    lab.fiec(&["program", "push", "strange@1", &path])
        .await
        .expect(0);
    let id = lab.publish("s", "strange@1", &json!({})).await;
    let (reason, _) = failure(&lab.journal.ended(id, "failed").await);
    assert!(
        reason.contains("could not record it") && reason.contains("four digits"),
        "{reason}"
    );
    lab.stop().await;
}

#[tokio::test]
async fn a_result_of_any_allowed_size_completes_and_a_failure_of_any_words_fails() {
    let lab = Lab::start(allowing(workers_with_history(1), "says@*")).await;
    let path = package(&lab, "says", "state_dir", SAYS);
    lab.fiec(&["program", "push", "says@1", &path])
        .await
        .expect(0);

    let sizes = [("small", 100), ("medium", 20_000), ("large", 250 * 1024)];
    for (name, bytes) in sizes {
        lab.publish(name, "says@1", &json!({"bytes": bytes})).await;
    }
    let over = json!({"id": "over", "program": "says@1", "params": {"bytes": RESULT_LIMIT}});
    lab.publish_json(&over).await;
    let control = json!({"id": "control", "program": "says@1", "params": {"control": 4096},
        "retries": 1});
    lab.publish_json(&control).await;

    for (name, bytes) in sizes {
        let id = lab.id(name);
        lab.journal.ended(id, "completed").await;
        audit(&lab.journal.of(id));
        let text = Value::String("x".repeat(bytes)).to_string();
        let said = lab.fiec(&["status", name]).await.expect(0).stdout;
        assert!(said.contains(&text), "{name}: {said:.2000}");
    }
    let failed = lab.journal.ended(lab.id("over"), "failed").await;
    let (reason, _) = failure(&failed);
    assert!(reason.contains("over 262144 bytes"), "{reason}");

    let id = lab.id("control");
    let failed = lab.journal.ended(id, "failed").await;
    assert!(matches!(failed.state().phase, Phase::Failed));
    let (_, stderr) = failure(&failed);
    assert!(stderr.ends_with('\u{1}'), "{stderr:?}");
    assert!(text_len(&stderr) <= STDERR_LIMIT, "{}", text_len(&stderr));

    lab.recorded(5).await;
    until("no result is left to be copied", async || {
        (lab.count("SELECT count(*) FROM results_to_copy").await == 0).then_some(())
    })
    .await;
    for (name, bytes) in sizes {
        let query = format!(
            "SELECT length(result #>> '{{}}') FROM executions WHERE id = '{}'",
            lab.id(name)
        );
        assert_eq!(lab.count(query).await, i64::try_from(bytes).unwrap());
    }
    lab.stop().await;
}
