//! What operators change about live executions, each kept with who asked; `fiec why` and the same
//! answers from SQL.

use crate::stage::{Lab, audit, digest_of, undisturbed_synthetic, until, workers_with_history};
use fiec_schemas::messages::{ApiReply, Why};
use fiec_schemas::{Event, ExecutionId, NodeId, Signal};
use serde_json::{Value, json};

async fn why(lab: &Lab, id: &str) -> Why {
    let ran = lab.fiec(&["why", id, "--json"]).await.expect(0);
    let reply: ApiReply = serde_json::from_str(&ran.stdout).unwrap();
    reply.why.unwrap()
}

/// The row that SQL's `why` gives, as JSON; null where it is not recorded yet.
async fn why_in_sql(lab: &Lab, id: ExecutionId) -> Value {
    let rows = lab
        .sql(format!("SELECT to_jsonb(w)::text FROM why('{id}') w"))
        .await;
    let row = rows.rows.first().and_then(|row| row[0].as_deref());
    row.map_or(Value::Null, |row| serde_json::from_str(row).unwrap())
}

/// Waits until SQL says what `fiec why` says of one that is placed.
async fn placed_alike(lab: &Lab, name: &str) {
    let id = lab.id(name);
    until("SQL has its binding", async || {
        let told = why(lab, name).await;
        let row = why_in_sql(lab, id).await;
        let place = told.place.as_ref()?;
        (row["epoch"] == json!(place.epoch) && row["phase"] == "started").then_some(())
    })
    .await;
    let told = why(lab, name).await;
    let row = why_in_sql(lab, id).await;
    let (place, cause) = (told.place.unwrap(), told.cause.unwrap());
    assert_eq!(row["phase"], json!(told.phase));
    assert_eq!(row["node"], json!(place.node));
    assert_eq!(row["substrate"], json!(place.substrate));
    assert_eq!(row["from_node"], json!(place.from));
    assert_eq!(row["cause"], json!(cause.as_str()));
    assert_eq!(row["cause_in_words"], json!(cause.in_words()));
    let decision = told.decision.unwrap();
    assert_eq!(row["candidates"], json!(decision.candidates));
    assert_eq!(row["omitted"], json!(decision.omitted));
}

async fn computes_on(lab: &Lab, id: ExecutionId, epoch: u64) -> NodeId {
    lab.journal
        .find(id, "it computes there", move |line| {
            line.started_on().filter(|_| line.state().epoch == epoch)
        })
        .await
}

#[tokio::test]
async fn what_is_pinned_excluded_moved_and_changed_obeys_and_is_kept_with_who_asked() {
    let mut lab = Lab::start(workers_with_history(3)).await;
    let params = json!({"capsules": 5_000, "rest_us": 5_000, "state_bytes": 1_024});
    let id = lab
        .publish_json(
            &json!({"id": "job", "program": "synthetic@1", "params": params,
            "commit": {"every": 20}}),
        )
        .await;
    let first = lab.journal.computing(id, 1).await;
    placed_alike(&lab, "job").await;
    let names = ["n1", "n2", "n3"].map(|n| n.parse::<NodeId>().unwrap());
    let mut others = names.iter().filter(|n| **n != first);
    let (second, third) = (others.next().unwrap(), others.next().unwrap());

    let said = lab.fiec(&["pin", "job", second.as_str()]).await.expect(0);
    let promise = format!("it moves from {first} to {second} at its next boundary");
    assert!(said.stdout.contains(&promise), "{said:?}");
    assert_eq!(computes_on(&lab, id, 2).await, *second);
    placed_alike(&lab, "job").await;
    let nothing = lab.fiec(&["pin", "job", "n9"]).await.expect(0);
    assert!(
        nothing.stdout.contains("no node satisfies that now"),
        "{nothing:?}"
    );
    assert!(
        nothing.stdout.contains("n9: there is no such node"),
        "{nothing:?}"
    );
    lab.fiec(&["unpin", "job"]).await.expect(0);

    let exclude = ["exclude", "job", second.as_str(), first.as_str()];
    lab.fiec(&exclude).await.expect(0);
    assert_eq!(computes_on(&lab, id, 3).await, *third);
    let refused = lab
        .fiec(&["move", "job", "--to", first.as_str()])
        .await
        .expect(1);
    assert!(refused.stderr.contains("has excluded it"), "{refused:?}");
    lab.fiec(&["unpin", "job"]).await.expect(0);
    lab.fiec(&["move", "job", "--to", first.as_str()])
        .await
        .expect(0);
    assert_eq!(computes_on(&lab, id, 4).await, first);
    placed_alike(&lab, "job").await;

    let change = [
        "--priority",
        "10",
        "--threshold",
        "memory=0.99,0.98,60000",
        "--deadline",
        "2h",
    ];
    let adjust = [&["adjust", "job"][..], &change].concat();
    lab.fiec(&adjust).await.expect(0);
    let told = until("the policy service has heard of it", async || {
        let told = why(&lab, "job").await;
        let own = |t: &fiec_schemas::messages::InForce| t.own && t.signal == Signal::Memory;
        told.thresholds.iter().find(|t| own(t)).cloned()
    })
    .await;
    assert_eq!(
        (told.threshold.high, told.threshold.dwell_ms),
        (0.99, 60_000)
    );
    let bad = lab
        .fiec(&["adjust", "job", "--priority", "101"])
        .await
        .expect(2);
    assert!(bad.stderr.contains("-100"), "{bad:?}");
    let bad = lab.fiec(&["adjust", "job"]).await.expect(2);
    assert!(bad.stderr.contains("--priority"), "{bad:?}");

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let adjusted = ledger.iter().flat_map(|line| &line.message.events);
    let adjusted: Vec<_> = adjusted
        .filter_map(|e| match e {
            Event::Adjusted { who, .. } => Some(who),
            _ => None,
        })
        .collect();
    assert_eq!(adjusted.len(), 6);
    assert!(adjusted.iter().all(|who| who.contains('@')), "{adjusted:?}");

    lab.fiec(&["cordon", "n2"]).await.expect(0);
    lab.fiec(&["node", "revoke", "n3", "--in", "1h"])
        .await
        .expect(0);
    lab.fiec(&["uncordon", "n2"]).await.expect(0);
    lab.fiec(&["undrain", "n3"]).await.expect(0);
    let quota = ["quota", "set", "lab", "--running", "9"];
    lab.fiec(&quota).await.expect(0);
    lab.recorded(1).await;
    let query = "SELECT what, count(*)::text, bool_and(who LIKE '%@%')::text \
                 FROM operator_actions GROUP BY what ORDER BY what";
    let expected = [
        ["adjusted", "6", "true"],
        ["cordoned", "1", "true"],
        ["moved", "3", "true"],
        ["quota", "1", "true"],
        ["revoked", "1", "true"],
        ["uncordoned", "2", "true"],
    ];
    until("every action is in SQL with who asked", async || {
        let found = lab.sql(query).await.rows;
        let found: Vec<Vec<_>> = found
            .iter()
            .map(|row| row.iter().map(|c| c.as_deref().unwrap_or("")).collect())
            .collect();
        (found == expected).then_some(())
    })
    .await;
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn why_something_waits_is_the_same_in_sql() {
    let lab = Lab::start(workers_with_history(2)).await;
    lab.fiec(&["cordon", "n1"]).await.expect(0);
    let waits = json!({"id": "waits", "program": "synthetic@1", "requires": {"nodes": ["n1"]}});
    let id = lab.publish_json(&waits).await;
    let row = until("why it waits is in SQL", async || {
        let row = why_in_sql(&lab, id).await;
        (row["phase"] == "pending" && row["candidates"].is_array()).then_some(row)
    })
    .await;
    let told = why(&lab, "waits").await;
    assert_eq!(row["phase"], json!(told.phase));
    assert_eq!(row["candidates"], json!(told.candidates));
    assert_eq!(row["would_help"], json!(told.would_help));
    assert!(
        told.would_help.iter().any(|h| h.contains("uncordon n1")),
        "{told:?}"
    );
    let reasons = row["candidates"][0]["rejected"][0].as_str().unwrap();
    assert!(reasons.contains("it was cordoned by"), "{row}");
    let summary = row["summary"].as_str().unwrap();
    assert!(summary.contains("no node can take it now"), "{summary}");
    let pending = lab
        .sql("SELECT rejected, would_help FROM why_pending WHERE client_id = 'waits'")
        .await;
    let words = pending.rows[0][0].as_deref().unwrap();
    assert!(words.contains("n2: rejected, it must be on "), "{words}");

    // A change of what waits is judged at once, and recorded.
    lab.fiec(&["pin", "waits", "n2"]).await.expect(0);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(last.message.state.author.split('/').nth(1), Some("n2"));
    audit(&lab.journal.of(id));
    lab.end().await;
}
