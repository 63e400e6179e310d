//! Other people's text on a reader's terminal; passwords in messages; whose ledgers a watch
//! is sent.

use std::collections::BTreeSet;
use std::process::Stdio;

use crate::stage;
use crate::stage::{BINARY, Lab, Ran, run, until, workers, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use futures_util::TryStreamExt as _;
use serde_json::json;

/// Renames the window, clears the screen (C1, as UTF-8), turns the text around.
const EVIL: &str = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}";

#[track_caller]
fn is_safe(ran: &Ran) {
    for text in [&ran.stdout, &ran.stderr] {
        let bad = |c: char| (c.is_control() && !"\n\t".contains(c)) || c == '\u{202e}';
        assert!(!text.contains(bad), "{text:?}");
    }
}

#[tokio::test]
async fn no_text_of_others_commands_the_terminal() {
    let options = ClusterOptions {
        worker_args: [stage::slots(1), stage::args(&["--allow-program", "*"])].concat(),
        ..workers_with_history(1)
    };
    let lab = Lab::start(options).await;
    let folder = lab.path("evil");
    std::fs::create_dir(&folder).unwrap();
    let manifest = json!({"entry": ["sh", "./run.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let script = format!(
        "printf '%s\\n' 'prints {EVIL}'\nif [ $FIEC_BOUNDARY = 0 ]; then\n  \
         echo '1 2 note {EVIL}' > \"$FIEC_STATE_DIR/progress\"\n  exit 85\nfi\n\
         echo 'fails {EVIL}' >&2\nexit 65\n"
    );
    std::fs::write(folder.join("run.sh"), script).unwrap();
    let path = folder.display().to_string();
    lab.fiec(&["program", "push", "evil@1", &path])
        .await
        .expect(0);
    let line =
        json!({"id": "e", "program": "evil@1", "labels": {"l": EVIL}, "commit": {"every": 1}});
    let file = lab
        .file("evil.jsonl", line.to_string())
        .display()
        .to_string();
    let waited = lab.fiec(&["submit", &file, "--wait"]).await.expect(1);
    assert!(
        waited
            .stderr
            .contains("fails \\u001b]0;owned\\u0007\\u009b2J\\u202e")
    );
    is_safe(&waited);
    // Names are what their owners say.
    let mut pause = lab.command(&["cordon", "n1"]);
    pause.env("USER", EVIL);
    is_safe(&run(pause).await);
    lab.recorded(1).await;
    let mut found = 0;
    for words in [
        &["logs", "e"][..],
        &["status", "e"],
        &["watch", "e"],
        &["why", "e"],
        &["history", "e"],
        &["nodes"],
        &["logs", "e", "--json"],
        &["status", "e", "--json"],
        &["history", "e", "--json"],
    ] {
        let ran = lab.fiec(words).await;
        is_safe(&ran);
        found += usize::from(ran.stdout.contains("\\u001b]0;owned"));
        if words.contains(&"--json") {
            ran.json_lines();
        }
    }
    assert!(found >= 5, "only {found} of the commands show it at all");
    lab.end().await;
}

#[tokio::test]
async fn no_message_and_no_help_shows_a_password() {
    let nats = "nats://u:s3cret@127.0.0.1:1";
    let database = "postgres://u:s3cret@127.0.0.1:1/x";
    for words in [
        &["--help"][..],
        &["worker", "--help"],
        &["nodes"],
        &["doctor"],
        &["setup"],
        &["worker"],
        &["recorder"],
        &["history", "x"],
    ] {
        let mut command = tokio::process::Command::new(BINARY);
        command.args(words).stdin(Stdio::null());
        command
            .env("FIEC_NATS_URL", nats)
            .env("FIEC_DATABASE_URL", database);
        let ran = run(command).await;
        let said = format!("{}{}", ran.stdout, ran.stderr);
        assert!(
            !said.is_empty() && !said.contains("s3cret"),
            "{words:?}: {said}"
        );
    }
}

/// Each consumer of the ledger stream: its name, and the subjects that it is sent.
async fn consumers(lab: &Lab) -> BTreeSet<(String, Vec<String>)> {
    let stream = lab.broker.js.get_stream("FIEC_LEDGER").await.unwrap();
    let all: Vec<_> = stream.consumers().try_collect().await.unwrap();
    let subjects = |config: async_nats::jetstream::consumer::Config| {
        let mut all = config.filter_subjects;
        all.extend(Some(config.filter_subject).filter(|s| !s.is_empty()));
        all
    };
    all.into_iter()
        .map(|info| (info.name, subjects(info.config)))
        .collect()
}

#[tokio::test]
async fn a_watch_is_sent_the_ledgers_that_it_shows_and_no_others() {
    let lab = Lab::start(workers(1)).await;
    let long = json!({"capsules": 100_000, "rest_us": 1_000, "state_bytes": 64});
    let id = lab.publish("long", "synthetic@1", &long).await;
    lab.journal.computing(id, 1).await;
    for (words, expected) in [
        (
            &["watch", "long"][..],
            format!("fiec.ledger.{}.{id}", lab.tenant),
        ),
        (&["watch"], format!("fiec.ledger.{}.*", lab.tenant)),
    ] {
        let before = consumers(&lab).await;
        let mut watch = lab.command(words);
        let mut watch = watch
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        until("the watch has its own consumer", async || {
            let now = consumers(&lab).await;
            let new: Vec<_> = now.difference(&before).collect();
            assert!(
                new.iter().all(|(_, sent)| *sent == [expected.clone()]),
                "{new:?}"
            );
            (!new.is_empty()).then_some(())
        })
        .await;
        watch.kill().await.unwrap();
    }
    lab.fiec(&["cancel", "long"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.end().await;
}
