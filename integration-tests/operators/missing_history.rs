//! What `fiec history` and `fiec report` say of a history that is not whole.

use crate::stage;
use crate::stage::{Lab, PATIENCE, until, workers_with_history};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The field `missing` of the summary that `fiec history ID --json` prints first.
async fn missing(lab: &Lab, id: &str) -> Value {
    let ran = lab.fiec(&["history", id, "--json"]).await.expect(0);
    ran.json_lines()[0]["missing"].clone()
}

#[tokio::test]
async fn history_and_report_say_what_is_missing() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let short = lab
        .publish("done", "synthetic@1", &json!({"capsules": 3}))
        .await;
    lab.journal.ended(short, "completed").await;
    // `fiec history` waits a second for a recorder; one that has just started may need longer.
    lab.recorded(1).await;
    let whole = lab.fiec(&["history", "done"]).await.expect(0);
    assert!(!whole.stdout.contains("Missing"), "{whole:?}");
    assert_eq!(
        missing(&lab, "done").await["ledger"]["compared"],
        "complete"
    );
    let listed = lab.fiec(&["history"]).await.expect(0);
    assert_eq!(listed.stderr, "", "{listed:?}");

    // The recorder stops in the middle.
    let body = json!({"id": "live", "program": "synthetic@1", "commit": {"every": 1},
        "params": {"capsules": 100_000, "rest_us": 20_000}});
    let id = lab.publish_json(&body).await;
    until("some of it is recorded", async || {
        let query = format!("SELECT count(*) FROM boundaries WHERE execution = '{id}'");
        (lab.count(query).await > 3).then_some(())
    })
    .await;
    lab.recorder.as_ref().unwrap().signal(Signal::STOP).unwrap();
    let reached = lab.journal.of(id).len();
    until("the ledger goes on", async || {
        (lab.journal.of(id).len() > reached + 20).then_some(())
    })
    .await;
    let behind = missing(&lab, "live").await["ledger"].clone();
    assert_eq!(behind["compared"], "behind");
    let (recorded, ledger) = (&behind["recorded"], &behind["ledger"]);
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{behind}"));
    let messages = number(&behind["messages"]);
    assert!(messages >= 20, "{behind}");
    assert_eq!(
        number(&ledger["message"]) - number(&recorded["message"]),
        messages
    );
    assert!(number(&ledger["boundary"]) > number(&recorded["boundary"]));
    let told = lab.fiec(&["history", "live"]).await.expect(0);
    let ends = format!("the history ends at boundary {};", recorded["boundary"]);
    for words in [
        &*ends,
        "the ledger is at boundary",
        "is behind by",
        "it wrote last",
    ] {
        assert!(told.stdout.contains(words), "{words}: {told:?}");
    }
    let page = lab.path("report.html");
    let file = page.display().to_string();
    let told = lab.fiec(&["report", "live", "-o", &file]).await.expect(0);
    assert!(told.stderr.contains(&ends), "{told:?}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("What is missing") && page.contains(&ends));
    let listed = lab.fiec(&["history"]).await.expect(0);
    assert!(
        listed.stderr.contains("ledger messages behind"),
        "{listed:?}"
    );

    // One that is not recorded at all.
    let late = lab
        .publish("late", "synthetic@1", &json!({"capsules": 1}))
        .await;
    lab.journal.find(late, "it is there", |_| Some(())).await;
    let told = lab.fiec(&["history", "late"]).await.expect(1);
    assert!(
        told.stderr.contains("the history has nothing of it yet"),
        "{told:?}"
    );

    lab.recorder.as_ref().unwrap().signal(Signal::CONT).unwrap();
    lab.fiec(&["cancel", "live"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.journal.ended(late, "completed").await;
    lab.recorded(3).await;
    until("all is recorded", async || {
        let compared = missing(&lab, "live").await["ledger"]["compared"].clone();
        (compared == "complete").then_some(())
    })
    .await;

    lab.conclude().await;

    // What the recorder found missing earlier.
    for found in [
        format!("INSERT INTO ledger_gaps VALUES ('{id}', 7, 9, 12, 'dropped', now())"),
        "INSERT INTO record_gaps SELECT 5, 8, min(submitted_at), now() FROM executions".to_owned(),
        format!("INSERT INTO lost_rows VALUES ('{id}', 'boundaries', '{{}}', now())"),
    ] {
        lab.sql(found).await;
    }
    let told = lab.fiec(&["history", "live"]).await.expect(0);
    for words in [
        "\nMissing\n",
        "messages 7 to 9 are missing: dropped",
        "4 records of nodes, refusals and quotas",
        "1 of boundaries",
    ] {
        assert!(told.stdout.contains(words), "{words}: {told:?}");
    }
    let all = missing(&lab, "live").await;
    assert_eq!(all["ledger_gaps"][0]["last"], 9, "{all}");
    assert_eq!(all["record_gaps"][0]["records"], 4, "{all}");
    assert_eq!(all["lost_rows"][0]["table"], "boundaries", "{all}");
    assert_eq!(missing(&lab, "done").await["ledger_gaps"], json!([]));

    // Without the broker the history is still shown, and said not to be compared.
    let alone = ["history", "live", "--nats", "nats://127.0.0.1:1"];
    let told = lab.fiec(&alone).await.expect(0);
    let words = "the history could not be compared with the ledger: cannot connect to NATS";
    assert!(told.stdout.contains(words), "{told:?}");
    assert!(told.stdout.contains("Placements"), "{told:?}");

    nobody_answers(lab).await;
}

/// PostgreSQL is away: one sentence with what to do, and the exit code of a server that is.
async fn nobody_answers(mut lab: Lab) {
    let page = lab.path("none.html").display().to_string();
    let commands = [
        lab.command(&["history", "live"]),
        lab.command(&["history"]),
        lab.command(&["report", "live", "-o", &page]),
    ];
    let mut postgres = lab.servers.postgres.take().unwrap();
    postgres.stop(PATIENCE).await;
    for command in commands {
        let told = stage::run(command).await.expect(4);
        let words = "which has the history, does not answer: start it, or correct --database";
        assert!(told.stderr.contains(words), "{told:?}");
        assert!(!told.stderr.contains("os error"), "{told:?}");
        assert_eq!(told.stderr.lines().count(), 1, "{told:?}");
    }
    lab.servers.postgres = Some(postgres);
    lab.end().await;
}
