//! Joules from counters to PostgreSQL, with counters that start again, disappear and come back; and
//! envelopes that move an execution away and let it come back with equal bits.

use std::io::{Seek as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::stage;
use crate::stage::{
    Lab, args, audit, digest_of, number_of, undisturbed_synthetic, until, workers,
    workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Cause, Event, NodeId, Signal};
use serde_json::{Value, json};

/// The counter starts again after this many microjoules: at its power, three times a second.
const RANGE: u64 = 3_000_000;
/// Added every few milliseconds, by the clock: 10 W.
const WATTS: f64 = 10.0;

/// A tree of sysfs with one processor package, whose counter rises until this is dropped.
struct Powercap {
    dir: tempfile::TempDir,
    used: Arc<AtomicU64>,
    gone: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Powercap {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let zone = dir.path().join("class/powercap/intel-rapl:0");
        std::fs::create_dir_all(&zone).unwrap();
        std::fs::write(zone.join("name"), "package-0\n").unwrap();
        std::fs::write(zone.join("max_energy_range_uj"), format!("{RANGE}\n")).unwrap();
        std::fs::write(zone.join("energy_uj"), "0000000\n").unwrap();
        let used = Arc::new(AtomicU64::new(0));
        let (gone, stop) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let thread = std::thread::spawn({
            let (used, gone, stop) = (Arc::clone(&used), Arc::clone(&gone), Arc::clone(&stop));
            move || count(&zone.join("energy_uj"), &used, &gone, &stop)
        });
        Self {
            dir,
            used,
            gone,
            stop,
            thread: Some(thread),
        }
    }
}

fn count(file: &Path, used: &AtomicU64, gone: &AtomicBool, stop: &AtomicBool) {
    let began = std::time::Instant::now();
    let mut file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let uj = (began.elapsed().as_secs_f64() * WATTS * 1e6) as u64;
        used.store(uj, Ordering::Relaxed);
        // As long as before, in one write: whoever reads sees one or the other.
        let text = match gone.load(Ordering::Relaxed) {
            true => "no data\n".to_owned(),
            false => format!("{:07}\n", uj % (RANGE + 1)),
        };
        file.rewind().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for Powercap {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The host's energy of each interval that an event ends, none where it was not measured.
fn intervals(lines: &[stage::Line]) -> Vec<Option<u64>> {
    let energy = |event: &Event| match event {
        Event::Boundary(boundary) => Some(boundary.energy),
        Event::Completed { energy, .. } => Some(*energy),
        _ => None,
    };
    let all = lines.iter().flat_map(|line| &line.message.events);
    all.filter_map(energy)
        .map(|energy| {
            assert!(energy.is_none_or(|e| e.device_uj.is_none()), "no device");
            energy.and_then(|e| e.host_uj)
        })
        .collect()
}

#[tokio::test]
async fn joules_of_intervals_bindings_and_executions_are_in_the_history_and_gaps_are_absent() {
    let machine = Powercap::start();
    let sysfs = machine.dir.path().display().to_string();
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "1", "--sysfs", &sysfs]),
        ..workers_with_history(2)
    })
    .await;
    let params = json!({"capsules": 2_000, "rest_us": 5_000, "state_bytes": 256});
    let before = machine.used.load(Ordering::Relaxed);
    let id = lab
        .publish_json(
            &json!({"id": "joules", "program": "synthetic@1", "params": params,
            "commit": {"every": 8}}),
        )
        .await;
    let first = lab.journal.computing(id, 12).await;
    machine.gone.store(true, Ordering::Relaxed);
    until("an interval is not measured", async || {
        intervals(&lab.journal.of(id)).contains(&None).then_some(())
    })
    .await;
    machine.gone.store(false, Ordering::Relaxed);
    until("intervals are measured again", async || {
        let all = intervals(&lab.journal.of(id));
        all.last().copied().flatten().map(drop)
    })
    .await;
    lab.fiec(&["yield", "joules"]).await.expect(0);
    let last = lab.journal.ended(id, "completed").await;
    let after = machine.used.load(Ordering::Relaxed);
    let lines = lab.journal.of(id);
    audit(&lines);

    let all = intervals(&lines);
    let sum: u64 = all.iter().flatten().sum();
    let measured = all.iter().flatten().count();
    let totals = last.state().totals;
    let host = totals.energy.unwrap().host.unwrap();
    assert_eq!((host.uj, host.intervals), (sum, measured as u64));
    assert_eq!(totals.energy.unwrap().device, None);
    assert_eq!(all.len() as u64, totals.commits + 1);
    assert!(measured < all.len(), "the gap is absent, not zero");
    let used = after - before;
    assert!(
        sum <= used && sum >= used / 3,
        "{sum} of {used} microjoules in {measured} of {} intervals",
        all.len()
    );

    lab.recorded(1).await;
    let one = async |query: &str| lab.count(query.replace('?', &id.to_string())).await;
    let sum = i64::try_from(sum).unwrap();
    let tail = i64::try_from(all.last().unwrap().unwrap_or(0)).unwrap();
    assert_eq!(
        one("SELECT host_uj FROM executions WHERE id = '?'").await,
        sum
    );
    assert_eq!(
        one("SELECT sum(host_uj)::bigint FROM placements WHERE execution = '?'").await,
        sum
    );
    assert_eq!(
        one("SELECT sum(host_uj)::bigint FROM boundaries WHERE execution = '?'").await,
        sum - tail
    );
    assert_eq!(
        one("SELECT count(*) FROM boundaries WHERE execution = '?' AND host_uj IS NULL").await,
        (all[..all.len() - 1].iter().filter(|i| i.is_none()).count()) as i64
    );
    assert_eq!(
        one("SELECT count(*) FROM execution_summary WHERE execution = '?' AND device_joules IS NULL \
             AND host_joules > 0 AND energy_coverage > 0 AND energy_coverage < 1").await,
        1
    );
    assert_eq!(
        one("SELECT count(*) FROM placement_timeline WHERE execution = '?' AND host_joules > 0")
            .await,
        2
    );
    let nodes = lab
        .sql("SELECT node, host_joules::text, measured::text, device_joules::text FROM energy_by_node ORDER BY node")
        .await;
    assert_eq!(nodes.rows.len(), 2, "{nodes:?}");
    assert!(nodes.rows.iter().all(|row| row[3].is_none()), "{nodes:?}");
    assert!(
        nodes
            .rows
            .iter()
            .any(|row| row[0].as_deref() == Some(first.as_str()))
    );

    let status = lab.fiec(&["status", "joules", "--json"]).await.expect(0);
    assert_eq!(
        status.json_lines()[0]["state"]["totals"]["energy"]["host"]["uj"],
        sum
    );
    let words = lab.fiec(&["status", "joules"]).await.expect(0).stdout;
    assert!(words.contains("J of hosts"), "{words}");
    let history = lab.fiec(&["history", "joules", "--json"]).await.expect(0);
    assert!(!history.json_lines()[0]["host_joules"].is_null());
    let page = lab.path("report.html");
    let page = page.to_str().unwrap();
    lab.fiec(&["report", "joules", "-o", page]).await.expect(0);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("J of hosts") && html.contains("J of the host"));
    lab.stop().await;
}

#[tokio::test]
async fn where_nothing_is_measured_no_message_has_a_word_of_energy() {
    let nothing = tempfile::tempdir().unwrap();
    let sysfs = nothing.path().display().to_string();
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "1", "--sysfs", &sysfs]),
        ..workers(1)
    })
    .await;
    let id = lab
        .publish_json(&json!({"id": "dark", "program": "synthetic@1",
            "params": {"capsules": 20, "state_bytes": 64}, "commit": {"every": 5}}))
        .await;
    lab.journal.ended(id, "completed").await;
    let lines = lab.journal.of(id);
    assert!(lines.len() > 2);
    for line in lines {
        let text = serde_json::to_string(&line.message).unwrap();
        assert!(!text.contains("energy"), "{text}");
    }
    lab.stop().await;
}

const LIMIT: &str = "128MiB";

fn swinging(history: bool) -> ClusterOptions {
    let mut list = args(&["--slots", "1", "--no-cgroup", "--memory-limit", LIMIT]);
    list.extend(args(&["--threshold", "memory=0.85:0.6:300"]));
    // A node that was left is returned to once no signal that is judged there has pressed for its
    // dwell: the others' would make a test of half a minute.
    for signal in ["memory_stall", "latency", "power", "thermal"] {
        list.extend(["--threshold".to_owned(), format!("{signal}=1:0.99:100")]);
    }
    ClusterOptions {
        worker_args: list,
        history,
        ..workers(2)
    }
}

/// The host's memory reading that the policy service knows.
async fn memory(lab: &Lab, node: &NodeId) -> Option<fiec_schemas::Reading> {
    let vector = lab.status_of(node).await.ok()?.vector?;
    vector.host(Signal::Memory).cloned()
}

#[tokio::test]
async fn a_sinusoid_moves_an_execution_away_and_lets_it_come_back_with_equal_bits() {
    let lab = Lab::start(swinging(true)).await;
    let (n1, n2): (NodeId, NodeId) = ("n1".parse().unwrap(), "n2".parse().unwrap());
    // Opposite phases: each offers everything when the other offers next to nothing.
    for (node, phase) in [(&n1, "phase=90deg"), (&n2, "phase=270deg")] {
        let shape = format!("amplitude=48%,mean=52%,period=360s,{phase}");
        lab.fiec(&[
            "node",
            "envelope",
            node.as_str(),
            "--signal",
            "memory",
            "--sinusoid",
            &shape,
            "--speed",
            "60",
        ])
        .await
        .expect(0);
    }
    let params = json!({"capsules": 100_000, "rest_us": 4_000, "state_bytes": 4_096});
    let id = lab
        .publish_json(
            &json!({"id": "swing", "program": "synthetic@1", "params": params,
            "commit": {"every": 20}}),
        )
        .await;
    let home = lab.journal.computing(id, 1).await;
    let pressed = |line: &stage::Line| {
        line.message.events.iter().any(|event| {
            matches!(
                event,
                Event::Bound {
                    cause: Cause::Pressure { .. },
                    ..
                }
            )
        })
    };
    let away = lab
        .journal
        .find(id, "the envelope moves it away", |line| {
            pressed(line).then(|| line.clone())
        })
        .await;
    let binding = away.state().phase.binding().unwrap();
    assert_ne!(binding.node, home);
    let evidence = away.message.events.iter().find_map(|event| match event {
        Event::Bound {
            cause: Cause::Pressure { evidence },
            ..
        } => Some(evidence.clone()),
        _ => None,
    });
    let evidence = evidence.unwrap();
    let seen = evidence
        .vector
        .iter()
        .find(|r| r.signal == Signal::Memory && r.device.is_none());
    let seen = seen.unwrap();
    let envelope = seen
        .envelope
        .as_ref()
        .expect("the ledger says which envelope");
    let limit = seen.limit.unwrap();
    assert_eq!(limit, f64::from(128 << 20));
    assert!(
        envelope.cap < limit && seen.raw.unwrap() / limit < 0.85,
        "{seen:?}"
    );
    assert!(
        envelope.source.contains("sinusoid of 48% in 360 s"),
        "{seen:?}"
    );
    lab.journal
        .find(id, "it comes back", |line| {
            (line.state().ordinal > away.state().ordinal && line.started_on()? == home)
                .then_some(())
        })
        .await;

    // The rest is not worth waiting for: the bits are those of as many capsules without any move.
    for node in [&n1, &n2] {
        lab.fiec(&["node", "envelope", node.as_str(), "--clear"])
            .await
            .expect(0);
    }
    lab.fiec(&["pause", "swing"]).await.expect(0);
    let paused = lab
        .journal
        .find(id, "it is paused", |line| {
            (line.phase() == "paused").then(|| line.clone())
        })
        .await;
    let place = paused.state().boundary.clone().unwrap();
    let undisturbed = lab
        .publish_json(&json!({"id": "still", "program": "synthetic@1",
            "params": {"capsules": place.index, "rest_us": 0, "state_bytes": 4_096},
            "commit": {"every": place.index}}))
        .await;
    let params = json!({"capsules": place.index, "state_bytes": 4_096});
    let last = lab.journal.ended(undisturbed, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!(place.digest.to_string(), digest_of(&last));
    audit(&lab.journal.of(id));

    lab.fiec(&["cancel", "swing"]).await.expect(0);
    lab.recorded(2).await;
    until("the history knows who set and cleared them", async || {
        let words = "SELECT count(*) FROM node_events WHERE what = 'envelopes'";
        (lab.count(words).await == 4).then_some(())
    })
    .await;
    let rows = lab
        .sql("SELECT detail FROM node_events WHERE what = 'envelopes' ORDER BY seq")
        .await;
    let first = rows.rows[0][0].as_deref().unwrap();
    assert!(
        first.contains("set memory: sinusoid of 48% in 360 s"),
        "{first}"
    );
    assert_eq!(lab.count("SELECT count(*) FROM node_envelopes").await, 0);
    lab.stop().await;
}

#[tokio::test]
async fn a_cap_holds_values_outlives_its_worker_is_shown_and_is_taken_away() {
    let mut lab = Lab::start(swinging(false)).await;
    let n1: NodeId = "n1".parse().unwrap();
    lab.fiec(&[
        "node", "envelope", "n1", "--signal", "memory", "--cap", "64MiB",
    ])
    .await
    .expect(0);
    let half = f64::from(64 << 20);
    let held = async |lab: &Lab| {
        until("the vector is held against the cap", async || {
            let reading = memory(lab, &n1).await?;
            let cap = reading.envelope.as_ref()?.cap;
            let expected = (reading.raw? / half).clamp(0.0, 1.0);
            assert!((reading.value? - expected).abs() < 1e-9, "{reading:?}");
            (cap == half).then_some(())
        })
        .await;
    };
    held(&lab).await;
    let asked = lab
        .fiec(&["--json", "node", "envelope", "n1"])
        .await
        .expect(0);
    let set = &asked.json_lines()[0]["envelopes"];
    assert_eq!(set["envelopes"][0]["shape"]["constant"]["cap"], "64MiB");
    assert_ne!(set["who"], Value::Null);
    let shown = lab
        .fiec(&["node", "envelope", "n1", "--show"])
        .await
        .expect(0)
        .stdout;
    assert!(
        shown.contains("memory: cap of 64MiB") && shown.contains("offers 50.0 %"),
        "{shown}"
    );

    lab.worker(&n1).kill();
    let old = lab.status_of(&n1).await.unwrap().descriptor.instance;
    lab.restart_worker(number_of(&n1)).unwrap();
    until("another worker has the name", async || {
        let status = lab.status_of(&n1).await.ok()?;
        let vector = status.vector.filter(|v| v.instance != old)?;
        let reading = vector.host(Signal::Memory)?;
        assert!(
            reading.envelope.is_some(),
            "its first vector knows: {vector:?}"
        );
        Some(())
    })
    .await;

    let schedule = [
        "node",
        "envelope",
        "n1",
        "--signal",
        "memory",
        "--cap",
        "40%",
        "--days",
        "mon-sun",
        "--zone",
        "Europe/Berlin",
    ];
    let shown = lab.fiec(&schedule).await.expect(0).stdout;
    assert!(
        shown.contains("in Europe/Berlin") && shown.contains("offers 40.0 %"),
        "{shown}"
    );
    assert!(shown.contains('▄') && shown.contains("7 days"), "{shown}");
    lab.fiec(&["node", "envelope", "n1", "--clear"])
        .await
        .expect(0);
    until("it offers everything again", async || {
        let reading = memory(&lab, &n1).await?;
        reading.envelope.is_none().then_some(())
    })
    .await;

    for (bad, words) in [
        (
            vec!["n9", "--signal", "memory", "--cap", "4%"],
            "no node n9",
        ),
        (
            vec!["n1", "--clear", "--signal", "power"],
            "no such envelope",
        ),
    ] {
        let all = [&["node", "envelope"], bad.as_slice()].concat();
        let ran = lab.fiec(&all).await.expect(1);
        assert!(ran.stderr.contains(words), "{ran:?}");
    }
    let bad = lab.file(
        "bad.json",
        r#"{"n1": [{"signal": "memory", "shape": {"sinusoid": {"amplitude": "8GB", "period_s": 0}}}]}"#,
    );
    let ran = lab
        .fiec(&["node", "envelope", "--file", bad.to_str().unwrap()])
        .await
        .expect(2);
    assert!(
        ran.stderr
            .contains("n1: envelopes[0].shape.sinusoid.period_s: must be"),
        "{ran:?}"
    );
    // What did not pass the command line's own check is answered by the service with the same words.
    let request = json!({"node": "n1", "change": {"op": "set", "envelopes":
        [{"signal": "thermal", "shape": {"constant": {"cap": "4%"}}}]}});
    let reply = lab
        .broker
        .client
        .request("fiec.api.node.envelope", request.to_string().into())
        .await
        .unwrap();
    let reply: Value = serde_json::from_slice(&reply.payload).unwrap();
    let error = reply["error"].as_str().unwrap();
    assert!(
        error.starts_with("envelopes[0].signal: must be memory"),
        "{error}"
    );
    lab.stop().await;
}
