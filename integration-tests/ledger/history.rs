//! PostgreSQL as a projection: however often the recorder or the database dies, the tables hold
//! what the ledger holds, once. How people read it is in `reading_history.rs`.

use crate::stage::{Lab, Line, audit, slots, until, workers_with_history};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::Event;
use serde_json::json;

fn options() -> ClusterOptions {
    ClusterOptions {
        worker_args: slots(4),
        ..workers_with_history(2)
    }
}

/// What a table must hold, sorted: rows of text, derived from the ledger by `rows`.
fn expected(ledgers: &[Line], rows: impl Fn(&Line, &Event) -> Option<Vec<String>>) -> Vec<String> {
    let mut out: Vec<String> = ledgers
        .iter()
        .flat_map(|line| {
            line.message
                .events
                .iter()
                .filter_map(|event| rows(line, event))
        })
        .map(|row| row.join(" "))
        .collect();
    out.sort();
    out
}

async fn found(lab: &Lab, query: &str) -> Vec<String> {
    let rows = lab.sql(query).await;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let mut out: Vec<String> = rows
        .rows
        .iter()
        .map(|row| row.iter().map(text).collect::<Vec<_>>().join(" "))
        .collect();
    out.sort();
    out
}

/// Every table against the ledger: a row lost, doubled or changed shows as a difference.
async fn the_tables_hold_what_the_ledger_holds(lab: &Lab) {
    let lines = lab.journal.all();
    let last = lines.last().unwrap().seq;
    until(
        "the recorder's checkpoint is the ledger's last message",
        async || {
            let query = "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'";
            (lab.count(query).await == i64::try_from(last).unwrap()).then_some(())
        },
    )
    .await;
    let id = |line: &Line| line.state().execution.to_string();

    let boundaries = expected(&lines, |line, event| match event {
        Event::Boundary(b) => Some(vec![
            id(line),
            b.index.to_string(),
            b.digest.to_string(),
            line.seq.to_string(),
        ]),
        _ => None,
    });
    let query = "SELECT execution, index, encode(digest, 'hex'), seq FROM boundaries";
    assert_eq!(found(lab, query).await, boundaries);

    let placements = expected(&lines, |line, event| match event {
        Event::Bound {
            epoch, node, cause, ..
        } => Some(vec![
            id(line),
            epoch.to_string(),
            node.to_string(),
            cause.as_str().to_owned(),
        ]),
        _ => None,
    });
    assert_eq!(
        found(lab, "SELECT execution, epoch, node, cause FROM placements").await,
        placements
    );

    let rebindings = expected(&lines, |line, event| match event {
        Event::Bound {
            epoch, node, cause, ..
        } if *epoch > 1 => Some(vec![
            id(line),
            epoch.to_string(),
            node.to_string(),
            cause.as_str().to_owned(),
        ]),
        _ => None,
    });
    let query = "SELECT execution, epoch, to_node, cause FROM rebindings";
    assert_eq!(found(lab, query).await, rebindings);

    let decisions = expected(&lines, |line, event| match event {
        Event::Bound {
            epoch,
            node,
            decision: Some(_),
            ..
        } => Some(vec![id(line), epoch.to_string(), node.to_string()]),
        _ => None,
    });
    assert_eq!(
        found(lab, "SELECT execution, epoch, chosen FROM decisions").await,
        decisions
    );

    let mut executions: Vec<String> = lab
        .journal
        .by_execution()
        .values()
        .map(|ledger| {
            audit(ledger);
            let last = ledger.last().unwrap();
            let (state, totals) = (last.state(), &last.state().totals);
            let digest = state
                .boundary
                .as_ref()
                .map_or(String::new(), |b| b.digest.to_string());
            format!(
                "{} {} {} {} {} {} {} {} {} {digest}",
                id(last),
                last.phase(),
                state.epoch,
                state.boundary_index(),
                totals.commits,
                totals.rebindings,
                totals.crashes,
                state.ordinal,
                last.seq
            )
        })
        .collect();
    executions.sort();
    let query = "SELECT id, phase, epoch, boundary_index, commits, rebindings, crashes, ordinal, \
                 seq, encode(state_digest, 'hex') FROM executions";
    assert_eq!(found(lab, query).await, executions);
    assert_eq!(lab.count("SELECT count(*) FROM ledger_gaps").await, 0);
}

async fn flood(lab: &Lab, name: &str, messages: usize) {
    for message in 0..messages {
        let lines: Vec<String> = (0..10)
            .map(|line| {
                json!({"id": format!("{name}-{message}-{line}"), "program": "synthetic@1",
                    "params": {"capsules": 4, "rest_us": 300, "state_bytes": 64},
                    "commit": {"every": 1}})
                .to_string()
            })
            .collect();
        lab.publish_text(&lines.join("\n")).await;
    }
}

#[tokio::test]
async fn a_recorder_killed_in_a_flood_loses_and_doubles_nothing() {
    let mut lab = Lab::start(options()).await;
    for round in ["first", "second"] {
        let before = lab.count("SELECT count(*) FROM executions").await;
        flood(&lab, round, 20).await;
        until("the recorder is in the middle of the flood", async || {
            (lab.count("SELECT count(*) FROM executions").await > before + 20).then_some(())
        })
        .await;
        lab.recorder.as_mut().unwrap().kill();
        flood(&lab, &format!("{round}-unwatched"), 5).await;
        lab.start_recorder().unwrap();
    }
    until("all has completed", async || {
        (lab.journal.ended_count("completed") == 500).then_some(())
    })
    .await;
    lab.recorded(500).await;
    the_tables_hold_what_the_ledger_holds(&lab).await;
    // The history of σ too: the last committed state of what has ended need not be kept, but what
    // is kept is what its digest says.
    let bad = "SELECT count(*) FROM boundary_state s JOIN executions e ON e.id = s.execution \
               WHERE s.state IS NOT NULL AND octet_length(s.state) <> s.bytes";
    assert_eq!(lab.count(bad).await, 0);
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn executions_go_on_while_postgresql_is_down_and_the_recorder_catches_up() {
    let mut lab = Lab::start(options()).await;
    let params = json!({"capsules": 1_000, "rest_us": 2_000, "state_bytes": 1_024});
    let long = lab
        .publish_json(
            &json!({"id": "long", "program": "synthetic@1", "params": params,
            "commit": {"every": 25}}),
        )
        .await;
    lab.journal.computing(long, 2).await;
    until("the running execution is in PostgreSQL", async || {
        (lab.count("SELECT count(*) FROM boundaries").await >= 2).then_some(())
    })
    .await;

    lab.servers.postgres.as_mut().unwrap().kill().await;
    flood(&lab, "without", 5).await;
    until("the flood has completed without PostgreSQL", async || {
        (lab.journal.ended_count("completed") >= 50).then_some(())
    })
    .await;
    lab.journal.ended(long, "completed").await;
    lab.none_ended().unwrap();

    lab.servers
        .postgres
        .as_mut()
        .unwrap()
        .restart()
        .await
        .unwrap();
    lab.recorded(51).await;
    the_tables_hold_what_the_ledger_holds(&lab).await;
    lab.none_ended().unwrap();
    lab.end().await;
}
