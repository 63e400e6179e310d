//! A stranger's way in: the real `nats` command publishes a JSONL file, lists the micro service and
//! asks it; nothing of FIEC is needed on that machine.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::stage::{
    Lab, Ran, audit, digest_of, run, slots, undisturbed, until, workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::messages::SubmitReply;
use serde_json::{Value, json};

/// The `nats` command, from PATH or from where Go puts what it builds.
fn nats_command() -> Option<PathBuf> {
    let in_path = std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect::<Vec<_>>())
        .unwrap_or_default();
    let go = std::process::Command::new("go")
        .args(["env", "GOPATH"])
        .output()
        .ok()
        .map(|out| PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()).join("bin"));
    in_path
        .into_iter()
        .chain(go)
        .map(|folder| folder.join("nats"))
        .find(|file| file.is_file())
}

/// The command, or a word past the test harness's capture on why nothing is tested.
fn nats_or_skip(test: &str) -> Option<PathBuf> {
    let found = nats_command();
    if found.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED {test}: the `nats` command is neither in PATH nor in Go's bin folder \
             (.ci/run installs it where Go is present)"
        );
    }
    found
}

async fn nats(command: &Path, lab: &Lab, list: &[&str], stdin: Option<&Path>) -> Ran {
    let mut nats = tokio::process::Command::new(command);
    nats.args(["--server", &lab.servers.nats_url()])
        .args(list)
        // No context or answer file of the user's own takes part.
        .env("XDG_CONFIG_HOME", lab.path("no-config"))
        .env("HOME", lab.path("no-home"))
        .stdin(match stdin {
            Some(file) => Stdio::from(std::fs::File::open(file).unwrap()),
            None => Stdio::null(),
        });
    run(nats).await
}

fn options() -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(2),
        ..workers_with_history(2)
    }
}

/// A batch of lines with what each must give, in the order of the file.
fn batch() -> Vec<Value> {
    let mut lines: Vec<Value> = (0..12)
        .map(|n| {
            json!({"id": format!("steps-{n}"), "batch": "sweep", "program": "synthetic@1",
                "params": {"capsules": 5 + n, "state_bytes": 256}, "labels": {"n": n.to_string()}})
        })
        .collect();
    lines.push(json!({"id": "poisson", "batch": "sweep", "program": "cg@1",
        "params": {"matrix": {"poisson2d": {"n": 40}}, "load_cases": 2}}));
    lines.push(
        json!({"id": "braces", "batch": "sweep", "program": "synthetic@1",
        "params": {"capsules": 2}, "labels": {"template": "{{ID}} stays as it is"}}),
    );
    lines
}

#[tokio::test]
async fn a_batch_published_by_the_nats_command_completes_and_is_in_postgresql() {
    let name = "a_batch_published_by_the_nats_command_completes_and_is_in_postgresql";
    let Some(command) = nats_or_skip(name) else {
        return;
    };
    let lab = Lab::start(options()).await;
    let good = batch();
    let mut text: Vec<String> = good.iter().map(Value::to_string).collect();
    text.insert(
        3,
        r#"{"id":"bad","program":"synthetic@1","params":{"capsules":"many"}}"#.to_owned(),
    );
    let file = lab.file("batch.jsonl", text.join("\n") + "\n");
    let publish = [
        "pub",
        "-J",
        "--send-on=newline",
        "--force-stdin",
        "--no-templates",
        "fiec.submit.lab",
    ];
    nats(&command, &lab, &publish, Some(&file)).await.expect(0);

    for line in &good {
        let id = lab.id(line["id"].as_str().unwrap());
        let last = lab.journal.ended(id, "completed").await;
        let expected = undisturbed(line["program"].as_str().unwrap(), &line["params"]).await;
        assert_eq!(digest_of(&last), expected, "{line}");
        audit(&lab.journal.of(id));
    }
    lab.recorded(good.len()).await;
    let summary = lab
        .sql("SELECT client_id, phase, program, batch::text, labels::text FROM execution_summary")
        .await;
    assert_eq!(
        summary.rows.len(),
        good.len(),
        "nothing is there but the good lines"
    );
    let batches: std::collections::BTreeSet<_> = (0..summary.rows.len())
        .map(|row| summary.get(row, "batch"))
        .collect();
    assert_eq!(batches.len(), 1, "one batch by its name");
    assert!(batches.iter().all(Option::is_some));
    let named = lab.sql("SELECT name, tenant FROM batches").await;
    assert_eq!(
        (named.get(0, "name"), named.get(0, "tenant")),
        (Some("sweep"), Some("lab"))
    );
    let labels = lab
        .sql("SELECT labels::text FROM execution_summary WHERE client_id = 'braces'")
        .await;
    assert!(
        labels.get(0, "labels").unwrap().contains("{{ID}}"),
        "{labels:?}"
    );

    let rejected = until("the refused line is in PostgreSQL", async || {
        let rows = lab
            .sql("SELECT tenant, field, reason, excerpt FROM rejections")
            .await;
        (!rows.rows.is_empty()).then_some(rows)
    })
    .await;
    assert_eq!(rejected.rows.len(), 1);
    assert_eq!(rejected.get(0, "field"), Some("params.capsules"));
    assert!(rejected.get(0, "excerpt").unwrap().contains("\"bad\""));

    // Published once more, the same file changes nothing.
    nats(&command, &lab, &publish, Some(&file)).await.expect(0);
    until("the lines are refused or recognized", async || {
        (lab.count("SELECT count(*) FROM rejections").await == 2).then_some(())
    })
    .await;
    assert_eq!(lab.journal.by_execution().len(), good.len());
    assert_eq!(lab.journal.ended_count("completed"), good.len());
    lab.end().await;
}

#[tokio::test]
async fn the_micro_service_is_listed_and_answers_the_nats_command_line_by_line() {
    let name = "the_micro_service_is_listed_and_answers_the_nats_command_line_by_line";
    let Some(command) = nats_or_skip(name) else {
        return;
    };
    let lab = Lab::start(options()).await;

    let info = nats(&command, &lab, &["micro", "info", "fiec"], None)
        .await
        .expect(0);
    let verbs = [
        "submit", "status", "cancel", "pause", "resume", "yield", "why", "nodes",
    ];
    for verb in verbs {
        let subject = format!("fiec.api.{verb}");
        assert!(
            info.stdout.contains(&subject),
            "{subject} in\n{}",
            info.stdout
        );
    }
    for verb in ["cordon", "uncordon", "drain"] {
        let subject = format!("fiec.api.node.{verb}");
        assert!(
            info.stdout.contains(&subject),
            "{subject} in\n{}",
            info.stdout
        );
    }

    let lines = [
        r#"{"id":"one","program":"synthetic@1","params":{"capsules":3}}"#,
        r#"{"id":"two","program":"synthetic@1","colour":"red"}"#,
        "",
        r#"{"program":"synthetic@1"}"#,
        "{broken",
    ];
    let file = lab.file("request.jsonl", lines.join("\n"));
    let ask = [
        "request",
        "fiec.api.submit.lab",
        "--force-stdin",
        "--no-templates",
        "--raw",
    ];
    let answer = nats(&command, &lab, &ask, Some(&file)).await.expect(0);
    let reply: SubmitReply = serde_json::from_str(answer.stdout.trim()).unwrap();
    assert_eq!(reply.error, None);
    let accepted: Vec<_> = reply.accepted.iter().map(|a| a.line).collect();
    assert_eq!(accepted, [1, 4]);
    assert_eq!(reply.accepted[0].id, lab.id("one"));
    let client_id = reply.accepted[0].client_id.as_ref();
    assert_eq!(client_id.map(|id| id.as_str()), Some("one"));
    let errors: Vec<_> = reply
        .errors
        .iter()
        .map(|e| (e.line, e.field.as_str()))
        .collect();
    assert_eq!(errors, [(2, "colour"), (5, "")]);
    for accepted in &reply.accepted {
        lab.journal.ended(accepted.id, "completed").await;
    }
    // A refusal is an error also for those who read no JSON.
    let stats = nats(&command, &lab, &["micro", "stats", "fiec", "--json"], None);
    let stats: Value = serde_json::from_str(&stats.await.expect(0).stdout).unwrap();
    let stats = stats.to_string();
    assert!(stats.contains("400:2 of 4 lines refused"), "{stats}");
    assert!(
        info.stdout.contains("execution-request.json"),
        "{}",
        info.stdout
    );

    let body = lab.file("status.json", r#"{"id":"one"}"#);
    let ask = [
        "request",
        "fiec.api.status.lab",
        "--force-stdin",
        "--no-templates",
        "--raw",
    ];
    let answer = nats(&command, &lab, &ask, Some(&body)).await.expect(0);
    let reply: Value = serde_json::from_str(answer.stdout.trim()).unwrap();
    assert_eq!(reply["state"]["phase"]["is"], "completed", "{reply}");
    lab.end().await;
}
