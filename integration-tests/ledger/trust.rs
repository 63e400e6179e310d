//! Nodes that corrupt: found out by canaries when they join, and by re-verification when they
//! begin to corrupt later. No wrong result reaches an output at any time.

use crate::stage;
use crate::stage::{Lab, Line, args, audit, digest_of, until, workers, workers_with_history};
use fiec_schemas::{Event, ExecutionId, NodeId, Phase, Started, subjects};
use serde_json::{Value, json};

const FLIPS: &str = "FIEC_TEST_BIT_FLIPS";

/// Some seconds of computation in capsules of some milliseconds, whose outcome every bit of the
/// state decides.
fn solve() -> Value {
    json!({"matrix": {"poisson2d": {"n": 48}}, "load_cases": 900, "iterations_per_capsule": 20})
}

fn last(lab: &Lab, id: ExecutionId) -> Option<Line> {
    lab.journal.of(id).into_iter().next_back()
}

async fn standing(lab: &Lab, node: &NodeId) -> Option<(String, String)> {
    standing_at(lab, node, "host").await
}

async fn standing_at(lab: &Lab, node: &NodeId, place: &str) -> Option<(String, String)> {
    let ran = lab.fiec(&["--json", "nodes"]).await;
    let all = ran.json_lines();
    let node = all
        .iter()
        .find(|n| n["descriptor"]["node"] == node.as_str())?;
    let bitwise = node["contracts"]
        .as_array()?
        .iter()
        .find(|c| c["contract"] == "bitwise" && c["substrate"] == place)?;
    let word = |name: &str| bitwise[name].as_str().unwrap_or_default().to_owned();
    Some((word("standing"), word("detail")))
}

async fn quarantined(lab: &Lab, node: &NodeId) -> String {
    until("the node is quarantined", async || {
        let (standing, detail) = standing(lab, node).await?;
        (standing == "quarantined").then_some(detail)
    })
    .await
}

#[tokio::test]
async fn a_node_that_starts_to_corrupt_is_found_out_and_no_wrong_output_is_ever_seen() {
    let mut options = workers_with_history(2);
    // A node under pressure is not asked to compute a part once more; on a busy machine the third
    // one often is for longer than is waited for it, and proofs decide.
    for signal in ["memory_stall", "latency", "power", "thermal"] {
        let calm = format!("{signal}=1:0.99:100");
        options.worker_args.extend(args(&["--threshold", &calm]));
    }
    let mut lab = Lab::start(options).await;
    let begin = lab.path("begin-to-corrupt");
    let flips = format!("file:{}", begin.display());
    let bad = lab.start_worker_in(&[(FLIPS.into(), flips)]).unwrap();
    lab.ready().await.unwrap();

    let submission = |id: &str, verify: Value, requires: Value| {
        json!({"id": id, "program": "cg@1", "params": solve(), "commit": {"every_ms": 100},
            "verify": verify, "requires": requires})
    };
    let id = lab
        .publish_json(&submission("guarded", json!("all"), json!({})))
        .await;
    let first = lab.journal.computing(id, 1).await;
    if first != bad {
        until("it is moved to the node that will corrupt", async || {
            let ran = lab.fiec(&["yield", "guarded", "--to", bad.as_str()]).await;
            (ran.code == 0).then_some(())
        })
        .await;
    }
    until("it computes there", async || {
        let now = last(&lab, id)?;
        let here = matches!(&now.state().phase, Phase::Started(Started { binding: b, .. }) if b.node == bad);
        (here && now.state().boundary.is_some()).then_some(())
    })
    .await;
    std::fs::write(&begin, "").unwrap();

    // Whatever happens from here on: nothing is listed before the end.
    let back = until(
        "it goes back to a boundary that is known to be good",
        async || {
            let listed = lab.fiec(&["output", "guarded"]).await;
            assert_ne!(
                listed.code, 0,
                "outputs are not visible yet: {}",
                listed.stdout
            );
            lab.journal.of(id).iter().find_map(|line| {
                line.message.events.iter().find_map(|event| match event {
                    Event::SteppedBack { cause, .. } => Some((line.state().clone(), cause.clone())),
                    _ => None,
                })
            })
        },
    )
    .await;
    assert_eq!(back.1.as_str(), "corrupt", "{:?}", back.1);
    let reason = quarantined(&lab, &bad).await;
    // Two others have found the same: no proof of its own was needed.
    assert!(
        reason.contains("differ from those of") && reason.contains(" and "),
        "{reason}"
    );

    let ended = until("it ends", async || {
        let now = last(&lab, id)?;
        if !now.state().phase.is_terminal() {
            let listed = lab.fiec(&["output", "guarded"]).await;
            // It may have ended meanwhile.
            let still = last(&lab, id)?;
            assert!(
                listed.code != 0 || still.state().phase.is_terminal(),
                "{}",
                listed.stdout
            );
            return None;
        }
        Some(now)
    })
    .await;
    assert_eq!(
        ended.state().phase,
        Phase::Completed,
        "{:?}",
        ended.message.events
    );
    assert!(ended.state().totals.steps_back >= 1);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    assert!(
        ledger
            .iter()
            .any(|l| l.state().phase.as_str() == "verifying")
    );
    let after = ledger
        .iter()
        .skip_while(|l| l.state().totals.steps_back == 0);
    for line in after {
        assert!(
            line.state().phase.binding().is_none_or(|b| b.node != bad),
            "{line:?}"
        );
    }

    // The same computation on the others alone, without any of this.
    let plain = submission("plain", json!("none"), json!({"exclude": [bad]}));
    let plain = lab.publish_json(&plain).await;
    let undisturbed = lab.journal.ended(plain, "completed").await;
    assert_eq!(digest_of(&ended), digest_of(&undisturbed));
    let outputs = async |id: &str| {
        let listed = lab
            .fiec(&["--json", "output", id])
            .await
            .expect(0)
            .json_lines();
        listed[0]["digest"].as_str().unwrap().to_owned()
    };
    assert_eq!(outputs("guarded").await, outputs("plain").await);

    // And all of it can be read in SQL.
    let withdrawn = format!(
        "SELECT count(*) AS n FROM boundaries WHERE execution = '{id}' AND withdrawn_at IS NOT NULL"
    );
    until(
        "the history shows what was withdrawn, and who was wrong",
        async || {
            let n = lab.sql(&withdrawn).await.get(0, "n")?.parse::<u32>().ok()?;
            let wrong = lab
                .sql("SELECT node, detail FROM verifications WHERE outcome = 'node_corrupt'")
                .await;
            let trust = lab
                .sql("SELECT standing FROM node_trust WHERE contract = 'bitwise' ORDER BY node")
                .await;
            (n > 0
                && wrong.get(0, "node") == Some(bad.as_str())
                && trust.get(2, "standing") == Some("quarantined"))
            .then_some(())
        },
    )
    .await;
    lab.end().await;
}

#[tokio::test]
async fn a_node_whose_canaries_fail_gets_no_bitwise_work_until_it_passes_them() {
    let mut lab = Lab::start(workers(1)).await;
    let wrong = lab.path("wrong");
    std::fs::write(&wrong, "").unwrap();
    let flips = format!("file:{}", wrong.display());
    let bad = lab.start_worker_in(&[(FLIPS.into(), flips)]).unwrap();
    lab.ready().await.unwrap();
    let reason = quarantined(&lab, &bad).await;
    assert!(reason.contains("canary gemm-511"), "{reason}");

    let id = lab
        .publish_json(&json!({"id": "only-there", "program": "synthetic@1",
            "requires": {"nodes": [bad]}}))
        .await;
    let why = until("why tells of the quarantine", async || {
        let ran = lab.fiec(&["why", "only-there"]).await;
        ran.stdout.contains("quarantined").then_some(ran.stdout)
    })
    .await;
    assert!(why.contains("canary gemm-511"), "{why}");
    assert_eq!(last(&lab, id).unwrap().state().phase, Phase::PENDING);

    // Released while it still corrupts: its canaries find it out again.
    lab.fiec(&["node", "release", bad.as_str()]).await.expect(0);
    quarantined(&lab, &bad).await;
    std::fs::remove_file(&wrong).unwrap();
    lab.fiec(&["node", "release", bad.as_str()]).await.expect(0);
    until("it has proved itself", async || {
        let (standing, _) = standing(&lab, &bad).await?;
        (standing == "proved").then_some(())
    })
    .await;
    lab.journal.ended(id, "completed").await;
    let again = lab.fiec(&["node", "release", bad.as_str()]).await.expect(1);
    assert!(again.stderr.contains("not quarantined"), "{}", again.stderr);
    lab.end().await;
}

#[tokio::test]
async fn a_device_that_computes_wrongly_is_lost_alone_and_one_that_cannot_be_had_proves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("devices.json");
    let device = |id: &str, more: Value| {
        let mut device = json!({"id": id, "kind": "gpu", "name": "Simulated",
            "memory_bytes": 1u64 << 30, "used_bytes": 1u64 << 20,
            "device": {"compute_capability": "9.0", "multiprocessors": 8}});
        for (key, value) in more.as_object().unwrap() {
            device[key] = value.clone();
        }
        device
    };
    let devices = json!([
        device("GPU-right", json!({})),
        device("GPU-wrong", json!({"wrong_bits": true})),
        device("GPU-gone", json!({"cannot_open": "it fell off the bus"})),
    ]);
    std::fs::write(&file, devices.to_string()).unwrap();
    let mut options = workers_with_history(1);
    options.worker_args = args(&["--device-file", file.to_str().unwrap()]);
    let lab = Lab::start(options).await;
    let node: NodeId = until("the node is known", async || {
        let all = lab.fiec(&["--json", "nodes"]).await.json_lines();
        all.first()?["descriptor"]["node"].as_str()?.parse().ok()
    })
    .await;
    let at = async |place: &str, wanted: &str| {
        until(&format!("{place} is {wanted}"), async || {
            let (standing, detail) = standing_at(&lab, &node, place).await?;
            // At first the devices wait for their turn.
            let settled = standing == wanted && !detail.contains("they run there next");
            settled.then_some(detail)
        })
        .await
    };
    let reason = at("GPU-wrong", "quarantined").await;
    assert!(
        reason.contains("on GPU-wrong") && reason.contains("canary gemm-511"),
        "{reason}"
    );
    let reason = at("GPU-gone", "unproved").await;
    assert!(reason.contains("it fell off the bus"), "{reason}");
    at("GPU-right", "proved").await;
    at("host", "proved").await;

    // Real work computes on the device that has proved itself, and nowhere else.
    let factor = json!({"id": "there", "program": "lu@1", "requires": {"device": {}},
        "params": {"matrix": {"random": {"n": 90}}, "block": 24}});
    let id = lab.publish_json(&factor).await;
    let there = lab.journal.ended(id, "completed").await;
    let ledger = lab.journal.of(id);
    let mut bound = ledger.iter().filter_map(|l| l.state().phase.binding());
    assert!(bound.all(|b| b.substrate == "GPU-right"));
    let mut plain = factor.clone();
    plain["id"] = json!("plain");
    plain.as_object_mut().unwrap().remove("requires");
    let plain = lab.publish_json(&plain).await;
    let plain = lab.journal.ended(plain, "completed").await;
    assert_eq!(digest_of(&there), digest_of(&plain));

    // And all of it can be read in SQL, with what the host computed in a device's stead.
    until("the history shows it", async || {
        let trust = lab
            .sql(
                "SELECT substrate, standing, ran_on FROM node_trust WHERE contract = 'bitwise' \
                 ORDER BY substrate",
            )
            .await;
        let said = |n: usize| Some((trust.get(n, "substrate")?, trust.get(n, "standing")?));
        let right = trust.get(1, "ran_on")?;
        (trust.rows.len() == 4
            && said(0)? == ("GPU-gone", "unproved")
            && said(1)? == ("GPU-right", "proved")
            && right.contains("on the host: panels of lu-panel-ties")
            && said(2)? == ("GPU-wrong", "quarantined")
            && said(3)? == ("host", "proved"))
            .then_some(())
    })
    .await;
    lab.stop().await;
}

#[tokio::test]
async fn a_share_is_compared_beside_the_work_and_costs_nothing_where_nobody_asked() {
    let lab = Lab::start(workers(2)).await;
    let mut verdicts = lab.broker.client.subscribe("fiec.verdict").await.unwrap();
    lab.broker.client.flush().await.unwrap();
    let id = lab
        .publish_json(
            &json!({"id": "shared", "program": "synthetic@1", "verify": {"share": 1.0},
            "params": {"capsules": 1_000, "rest_us": 5_000, "state_bytes": 4_096},
            "commit": {"every": 20}}),
        )
        .await;
    let agreed = until("another node has computed a part once more", async || {
        use futures_util::StreamExt as _;
        let message = verdicts.next().await?;
        let signed: Value = serde_json::from_slice(&message.payload).ok()?;
        let verdict: Value = serde_json::from_str(signed["statement"].as_str()?).ok()?;
        verdict.get("finding").cloned()
    })
    .await;
    let index = agreed["index"].as_u64().unwrap();
    let ledger = lab.journal.of(id);
    let claimed = ledger.iter().find_map(|line| {
        line.message.events.iter().find_map(|event| match event {
            Event::Boundary(b) if b.index == index => Some(b.digest),
            _ => None,
        })
    });
    assert_eq!(agreed["digest"], claimed.unwrap().to_string());
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(last.state().totals.steps_back, 0);
    let header = serde_json::to_string(&last.message).unwrap();
    assert!(
        !header.contains("guarded") && !header.contains("steps_back"),
        "{header}"
    );
    lab.end().await;
}

#[tokio::test]
async fn a_state_of_megabytes_is_verified_from_what_was_kept_though_its_chunks_are_replaced() {
    let lab = Lab::start(workers(2)).await;
    const STATE: u64 = 3_000_000;
    let params = json!({"capsules": 60, "rest_us": 100_000, "state_bytes": STATE,
        "change": {"bytes": STATE / 10, "places": 20}});
    let id = lab
        .publish_json(
            &json!({"id": "large", "program": "synthetic@1", "verify": "all", "params": params,
                "commit": {"every": 5}}),
        )
        .await;
    let ended = lab.journal.ended(id, "completed").await;
    let verified = ended.message.events.iter().find_map(|event| match event {
        Event::Verified { by, segments } => Some((by.clone(), *segments)),
        _ => None,
    });
    let (by, segments) = verified.unwrap();
    assert!(segments >= 2, "{segments} parts");
    assert_eq!(by.len(), 1);
    assert_eq!(ended.state().totals.steps_back, 0);
    audit(&lab.journal.of(id));
    let whole = stage::undisturbed("synthetic@1", &params).await;
    assert_eq!(digest_of(&ended), whole);
    // Nothing that was kept for it stays behind.
    until("no state is left", async || {
        let bucket = subjects::STATE_BUCKET;
        let states = lab.broker.js.get_object_store(bucket).await.unwrap();
        let mut all = states.list().await.ok()?;
        futures_util::StreamExt::next(&mut all)
            .await
            .is_none()
            .then_some(())
    })
    .await;
    lab.end().await;
}
