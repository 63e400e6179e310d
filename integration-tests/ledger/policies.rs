//! Several policy services and no leader: a flood is bound once, whoever dies, and whoever starts
//! takes over what lives.

use std::collections::BTreeSet;

use crate::stage;
use crate::stage::{
    Exempt, Lab, audit, digest_of, slots, undisturbed_synthetic, until, workers,
    workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Event, subjects};
use serde_json::json;

const MESSAGES: usize = 40;
const LINES: usize = 15;

#[tokio::test]
async fn three_policies_bind_each_submission_of_a_flood_once_though_one_is_killed() {
    let mut lab = Lab::start(ClusterOptions {
        policies: 3,
        workers: 3,
        worker_args: slots(4),
        ..workers(0)
    })
    .await;
    let expected: BTreeSet<_> = (0..MESSAGES * LINES)
        .map(|n| lab.id(&format!("f{n}")))
        .collect();
    for message in 0..MESSAGES {
        let lines: Vec<String> = (0..LINES)
            .map(|line| {
                let id = format!("f{}", message * LINES + line);
                json!({"id": id, "program": "synthetic@1", "params": {"capsules": 3, "rest_us": 500}})
                    .to_string()
            })
            .collect();
        lab.publish_text(&lines.join("\n")).await;
        if message == MESSAGES / 2 {
            until("the flood is being worked on", async || {
                (lab.journal.ended_count("completed") > 0).then_some(())
            })
            .await;
            lab.policies[1].kill();
        }
    }
    let all = MESSAGES * LINES;
    until("the whole flood has completed", async || {
        (lab.journal.ended_count("completed") >= all).then_some(())
    })
    .await;

    let ledgers = lab.journal.by_execution();
    let found: BTreeSet<_> = ledgers.keys().copied().collect();
    assert_eq!(found, expected, "a ledger for each submission and no other");
    let digest = undisturbed_synthetic(&json!({"capsules": 3, "state_bytes": 0})).await;
    for ledger in ledgers.values() {
        // Epochs grow by one and each is started once, by its holder: never two live bindings.
        audit(ledger);
        let events = || ledger.iter().flat_map(|line| &line.message.events);
        let started = events()
            .filter(|e| matches!(e, Event::Started { .. }))
            .count();
        assert_eq!(started, 1, "no node was lost, so nothing ran twice");
        assert_eq!(digest_of(ledger.last().unwrap()), digest);
    }
    lab.policies.remove(1);
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn executions_outlive_all_policies_and_fresh_ones_take_them_over() {
    let mut lab = Lab::start(ClusterOptions {
        policies: 2,
        ..workers(2)
    })
    .await;
    let params = json!({"capsules": 3_000, "rest_us": 5_000, "state_bytes": 2_048});
    let body = |id: &str| json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every": 20}});
    let running = [
        lab.publish_json(&body("r1")).await,
        lab.publish_json(&body("r2")).await,
    ];
    for id in running {
        lab.journal.computing(id, 1).await;
    }
    // One more than there are slots: it waits, and nobody will be there to place it.
    let short = json!({"id": "waits", "program": "synthetic@1", "params": {"capsules": 4}});
    let file = lab.file("waits.json", short.to_string());
    lab.fiec(&["submit", &file.display().to_string()])
        .await
        .expect(0);
    let waits = lab.id("waits");
    lab.journal
        .find(waits, "it waits in its ledger", |line| {
            (line.phase() == "pending").then_some(())
        })
        .await;
    let place = |lab: &Lab, id| {
        let ledger = lab.journal.of(id);
        let state = ledger.last().unwrap().state().clone();
        (state.epoch, state.boundary_index())
    };
    let stayed = place(&lab, running[1]).0;

    lab.policies
        .iter_mut()
        .for_each(fiec_lab::process::Process::kill);
    lab.policies.clear();
    let ran = lab.fiec(&["nodes"]).await.expect(4);
    assert!(
        ran.stderr.contains("fiec policy"),
        "it says what to do: {ran:?}"
    );
    for id in running {
        let before = place(&lab, id).1;
        let what = "it commits though no policy service is there";
        lab.journal
            .find(id, what, |line| {
                (line.state().boundary_index() >= before + 60).then_some(())
            })
            .await;
    }

    lab.start_policy().unwrap();
    lab.start_policy().unwrap();
    lab.ready().await.unwrap();
    // The fresh ones command what they did not start.
    let moved = running[0];
    let from = lab.journal.computing(moved, 1).await;
    lab.fiec(&["pause", "r1"]).await.expect(0);
    let what = "it is paused";
    lab.journal
        .find(moved, what, |line| (line.phase() == "paused").then_some(()))
        .await;
    lab.fiec(&["resume", "r1"]).await.expect(0);

    lab.journal.ended(waits, "completed").await;
    let digest = undisturbed_synthetic(&params).await;
    for id in running {
        let last = lab.journal.ended(id, "completed").await;
        assert_eq!(digest_of(&last), digest, "first on {from}");
        audit(&lab.journal.of(id));
    }
    assert_eq!(place(&lab, running[1]).0, stayed, "nothing else moved");
    audit(&lab.journal.of(waits));
    lab.none_ended().unwrap();
    lab.end().await;
}

/// Puts messages that are none behind all ledgers.
async fn garbage(lab: &Lab) {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert(subjects::EVENT_HEADER, "{\"v\":1");
    let js = &lab.broker.js;
    let spoiled = subjects::ledger(&lab.tenant, lab.id("ghost"));
    let sent = js.publish_with_headers(spoiled, headers, "".into());
    sent.await.unwrap().await.unwrap();
    for subject in [
        subjects::ledger(&lab.tenant, lab.id("headless")),
        "fiec.ledger.lab.nobody".to_owned(),
    ] {
        let sent = js.publish(subject, "noise".into());
        sent.await.unwrap().await.unwrap();
    }
}

#[tokio::test]
async fn a_fresh_one_takes_over_though_garbage_is_the_last_of_all_ledgers() {
    let mut lab = Lab::start(workers(1)).await;
    lab.exempt(Exempt::Garbage);
    // It commits nothing that would come behind the garbage.
    let params = json!({"capsules": 500, "rest_us": 5_000, "state_bytes": 512});
    let body = json!({"id": "good", "program": "synthetic@1", "params": params,
        "commit": {"every": 1_000_000}});
    let id = lab.publish_json(&body).await;
    lab.journal.computing(id, 0).await;
    let replace = async |lab: &mut Lab| {
        lab.policies
            .iter_mut()
            .for_each(fiec_lab::process::Process::kill);
        lab.policies.clear();
        garbage(lab).await;
        lab.start_policy().unwrap();
    };
    replace(&mut lab).await;
    // What ends while it loads ends for it too: the only slot is free.
    until("it has ended", async || {
        garbage(&lab).await;
        let ledger = lab.journal.of(id);
        ledger.last()?.state().phase.is_terminal().then_some(())
    })
    .await;
    let end = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&end), undisturbed_synthetic(&params).await);
    let short = json!({"capsules": 2});
    let next = lab.publish("next", "synthetic@1", &short).await;
    lab.journal.ended(next, "completed").await;

    // Nothing lives whose next message could say that all was told.
    replace(&mut lab).await;
    lab.ready().await.unwrap();
    let last = lab.publish("last", "synthetic@1", &short).await;
    lab.journal.ended(last, "completed").await;
    lab.none_ended().unwrap();
    lab.stop().await;
}

#[tokio::test]
async fn a_verification_goes_on_where_it_was_when_all_policies_are_replaced() {
    let mut lab = Lab::start(workers_with_history(3)).await;
    let params = json!({"matrix": {"poisson2d": {"n": 48}}, "load_cases": 900,
        "iterations_per_capsule": 20});
    let guarded = json!({"id": "guarded", "program": "cg@1", "params": params,
        "commit": {"every_ms": 100}, "verify": "all"});
    let id = lab.publish_json(&guarded).await;
    let number = |rows: &fiec::sql::Rows, column: &str| {
        rows.get(0, column).and_then(|n| n.parse::<i64>().ok())
    };
    // The last part but one: what was stored with it is stored when a later one is told.
    let agreed = format!(
        "SELECT to_boundary, seq FROM verifications WHERE execution = '{id}' \
         AND outcome = 'agreed' ORDER BY seq DESC OFFSET 1 LIMIT 1"
    );
    let good = until("two parts of it are verified", async || {
        number(&lab.sql(&agreed).await, "to_boundary")
    })
    .await;
    lab.policies
        .iter_mut()
        .for_each(fiec_lab::process::Process::kill);
    lab.policies.clear();
    let told = "SELECT coalesce(max(seq), 0) AS seq FROM verifications";
    let told = number(&lab.sql(told).await, "seq").unwrap();
    lab.start_policy().unwrap();
    lab.ready().await.unwrap();

    let ended = lab.journal.ended(id, "completed").await;
    audit(&lab.journal.of(id));
    let segments = ended.message.events.iter().find_map(|event| match event {
        Event::Verified { segments, .. } => Some(i64::from(*segments)),
        _ => None,
    });
    let since = format!(
        "SELECT min(from_boundary) AS first, count(*) AS parts FROM verifications \
         WHERE execution = '{id}' AND outcome = 'agreed'"
    );
    let all = until("every part is in the history", async || {
        let parts = number(&lab.sql(&since).await, "parts")?;
        (Some(parts) >= segments).then_some(parts)
    })
    .await;
    let since = format!("{since} AND seq > {told}");
    let since = lab.sql(&since).await;
    let (first, parts) = (number(&since, "first"), number(&since, "parts"));
    assert!(
        first >= Some(good) && good > 0,
        "from {first:?}, not {good}"
    );
    // What was verified before the change counts; a part that was under way then may not.
    assert!(parts < Some(all), "{parts:?} of {all} parts after it");
    assert!(
        segments > parts,
        "{segments:?} parts, {parts:?} of them after it"
    );
    lab.stop().await;
}

#[tokio::test]
async fn work_goes_only_to_nodes_whose_keys_an_operator_has_pinned() {
    let mut lab = Lab::start(workers(2)).await;
    let keys = lab.fiec(&["nodes", "--keys"]).await.expect(0).stdout;
    let key = |node: &str| {
        let line = keys.lines().find_map(|l| l.strip_prefix(node));
        line.unwrap().trim_start_matches(" = ").to_owned()
    };
    // As if somebody had taken the name of n2.
    let pinned = lab.file("keys", format!("n1 = {}\nn2 = {}\n", key("n1"), key("n1")));
    lab.policies
        .iter_mut()
        .for_each(fiec_lab::process::Process::kill);
    lab.policies.clear();
    let pinned = pinned.display().to_string();
    let mut policy = lab.command(&["policy", "--node-keys", &pinned]);
    let _policy = policy.kill_on_drop(true).spawn().unwrap();
    lab.ready().await.unwrap();

    let there = json!({"id": "there", "program": "synthetic@1", "contract": "statistical",
        "requires": {"nodes": ["n2"]}});
    let there = lab.publish_json(&there).await;
    let any = lab
        .publish_json(&json!({"id": "any", "program": "synthetic@1"}))
        .await;
    lab.journal.ended(any, "completed").await;
    let bound = |line: &stage::Line| line.state().phase.binding().map(|b| b.node.clone());
    let nodes: Vec<_> = lab.journal.of(any).iter().filter_map(bound).collect();
    assert!(nodes.iter().all(|n| n.as_str() == "n1"), "{nodes:?}");
    let why = until("why says whose key it is not", async || {
        let ran = lab.fiec(&["why", "there"]).await;
        ran.stdout
            .contains("is pinned for this node")
            .then_some(ran.stdout)
    })
    .await;
    assert!(why.contains(&key("n2")), "{why}");
    assert_eq!(lab.journal.of(there).last().unwrap().phase(), "pending");

    let wrong = lab.file("wrong", "n1 = nonsense\n").display().to_string();
    let refused = lab.fiec(&["policy", "--node-keys", &wrong]).await;
    assert_ne!(refused.code, 0);
    assert!(
        refused.stderr.contains("line 1") && refused.stderr.contains("nonsense"),
        "{refused:?}"
    );
    lab.stop().await;
}
