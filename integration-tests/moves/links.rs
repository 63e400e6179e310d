//! Workers on hosts of their own, which are network namespaces behind links with delay and loss:
//! both show up in L, and an execution that cares leaves a host that has become far away, while one
//! that does not care stays.
//!
//! The kernel's `netem` is missing from many kernels; the links are carried by a process of the
//! tests, packet by packet, see `link.py`.

use std::io::Write as _;
use std::time::Duration;

use super::link::{Door, Link};
use crate::stage::{Lab, Line, args, audit, digest_of, undisturbed_synthetic, until, workers};
use fiec_lab::cluster::ClusterOptions;
use fiec_lab::process::Process;
use fiec_schemas::{Cause, Event, Evidence, NodeId, Reading, Signal};
use serde_json::{Value, json};

/// L of a round trip 69 ms above the base: more than what a busy machine adds.
const HIGH: f64 = 0.999;
const LOW: f64 = 0.50;

/// A worker on a host of its own.
struct Far {
    node: NodeId,
    link: Link,
    _worker: Process,
    _door: Door,
}

impl Far {
    fn start(lab: &Lab, name: &str, link: Link) -> Self {
        let url = lab.servers.nats_url();
        let (login, near) = url.split_once('@').unwrap();
        let port = near.rsplit(':').next().unwrap().parse().unwrap();
        let door = link.door(port);
        let url = format!("{login}@{}", door.address);
        // The node itself is not to count as far: an execution says whether it cares.
        let words = args(&["worker", "--node", name, "--slots", "2", "--threshold"]);
        let run = lab.data_dir().join("run").display().to_string();
        let more = [
            "latency=1.0:0.5:600000",
            "--threshold",
            "memory_stall=1.0:0.5:600000",
            // Nor is what was sent again to count.
            "--threshold",
            "fabric=1.0:0.5:600000",
            // So often is the way to the broker measured, too.
            "--heartbeat-ms",
            "200",
            "--run-dir",
            &run,
        ];
        let log = lab.data_dir().join("logs").join(format!("{name}.log"));
        Self {
            node: name.parse().unwrap(),
            _worker: link.start(name, &[words, args(&more)].concat(), url, log),
            link,
            _door: door,
        }
    }
}

/// A link, or a word on stderr that this test was skipped, and why.
fn link(seed: u64) -> Option<Link> {
    match Link::new(seed) {
        Ok(link) => Some(link),
        Err(reason) => {
            // Past the capture of a test's output: nobody shall take a skip for a pass.
            let text = format!("SKIPPED: a test of links between hosts: {reason}\n");
            std::io::stderr().write_all(text.as_bytes()).unwrap();
            None
        }
    }
}

/// L of a node as a policy service knows it, once it has been measured.
async fn latency(lab: &Lab, node: &NodeId) -> Reading {
    until(&format!("L of {node} is measured"), async || {
        let vector = lab.status_of(node).await.ok()?.vector?;
        let reading = vector.host(Signal::Latency)?;
        reading.value.is_some().then(|| reading.clone())
    })
    .await
}

fn moved(line: &Line) -> Option<(NodeId, Evidence)> {
    line.message.events.iter().find_map(|event| match event {
        Event::Bound {
            node,
            cause: Cause::Pressure { evidence },
            ..
        } => Some((node.clone(), (**evidence).clone())),
        _ => None,
    })
}

fn submission(id: &str, capsules: u64, viability: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "viability": viability,
        "params": {"capsules": capsules, "state_bytes": 2000, "rest_us": 10_000},
        "commit": {"every_ms": 200}})
}

/// A link that gets this delay and loss shows it: L's round trip reaches `shown` microseconds. It
/// moves what is sensitive to it, and nothing else.
async fn a_worse_link_moves_what_cares(seed: u64, delay: Duration, loss: f64, shown: f64) {
    println!("seed {seed}");
    let (Some(first), Some(second)) = (link(seed), link(seed + 1)) else {
        return;
    };
    assert_ne!(first.inside(), second.inside());
    let lab = Lab::start(ClusterOptions {
        // Where a fifth of all packets is lost, the kernel may pause for longer than silence is
        // suffered otherwise: it doubles its pause with each packet that it sends in vain.
        policy_args: args(&["--liveness-ms", "60000"]),
        ..workers(0)
    })
    .await;
    let mut near = Far::start(&lab, "host-a", first);
    assert!(latency(&lab, &near.node).await.value.unwrap() < HIGH);
    let cares = json!({"latency": {"high": HIGH, "low": LOW, "dwell_ms": 700}});
    let sensitive = submission("sensitive", 2_000, &cares);
    let id = lab.publish_json(&sensitive).await;
    let other = lab
        .publish_json(&submission("robust", 60_000, &json!({})))
        .await;
    for id in [id, other] {
        assert_eq!(lab.journal.computing(id, 2).await, near.node);
    }
    let elsewhere = Far::start(&lab, "host-b", second);
    assert!(latency(&lab, &elsewhere.node).await.value.unwrap() < HIGH);

    near.link.set(delay, loss);
    let what = "it is bound elsewhere because of the link";
    let (to, evidence) = lab.journal.find(id, what, moved).await;
    assert_eq!(to, elsewhere.node);
    assert_eq!(evidence.node, near.node);
    assert_eq!(evidence.signal, Signal::Latency);
    assert!(evidence.value >= HIGH, "{evidence:?}");
    let host = |r: &&Reading| r.signal == Signal::Latency && r.device.is_none();
    let reading = evidence.vector.iter().find(host).unwrap();
    assert_eq!(reading.unit, "us");
    until(&format!("L shows {shown} us"), async || {
        let raw = latency(&lab, &near.node).await.raw?;
        (raw >= shown).then_some(())
    })
    .await;

    // The kernel's own word on the connection says the same.
    until(
        "F shows what was sent again, and the round trip is a part of L",
        async || {
            let vector = lab.status_of(&near.node).await.ok()?.vector?;
            let again = vector.host(Signal::Fabric)?.raw?;
            let part = |r: &&Reading| r.device.as_deref() == Some("peer:@broker");
            let rtt = vector.readings.iter().find(part)?.raw?;
            let there_and_back = 2.0 * delay.as_secs_f64() * 1e6;
            (again >= loss / 4.0 && rtt >= 0.9 * there_and_back).then_some(())
        },
    )
    .await;

    let last = lab.journal.ended(id, "completed").await;
    let expected = undisturbed_synthetic(&sensitive["params"]).await;
    assert_eq!(digest_of(&last), expected);
    assert_eq!(last.state().totals.pressure, 1);
    audit(&lab.journal.of(id));
    // What did not care has stayed, and goes on over the same link.
    let so_far = lab.journal.of(other);
    let commits = so_far.last().unwrap().state().totals.commits;
    assert_eq!(lab.journal.computing(other, commits + 1).await, near.node);
    assert!(
        lab.journal
            .of(other)
            .iter()
            .all(|line| moved(line).is_none())
    );
    // Over a link that is whole again: the kernel may still pause before it sends what was lost.
    near.link.set(Duration::ZERO, 0.0);
    until("the cancel is taken", async || {
        let taken = lab.fiec(&["cancel", "robust"]).await.code == 0;
        (taken || lab.journal.of(other).last()?.phase() == "cancelled").then_some(())
    })
    .await;
    lab.journal.ended(other, "cancelled").await;
    lab.stop().await;
}

#[tokio::test]
async fn delay_on_a_link_shows_in_l_and_moves_only_what_cares() {
    // There and back.
    let (delay, shown) = (Duration::from_millis(150), 300_000.0);
    a_worse_link_moves_what_cares(11, delay, 0.0, shown).await;
}

#[tokio::test]
async fn loss_on_a_link_shows_in_l_and_moves_only_what_cares() {
    // No packet is delayed: what takes so long was sent again, after the kernel had waited.
    let (delay, shown) = (Duration::ZERO, 69_000.0);
    a_worse_link_moves_what_cares(21, delay, 0.2, shown).await;
}
