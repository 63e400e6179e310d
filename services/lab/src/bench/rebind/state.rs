//! The large σ of `bench rebind`: 24 MB of which one per cent changes with every capsule, in one
//! place, as an insertion, or in 60 places; and 1 GB of which one per cent changes in one place. The
//! figures are the share of σ that a commit stores and a handover sends, and how long both take. The
//! floor moves the whole σ. With 1 GB also: how much memory it takes, and `torch.save`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use fiec_broker::{Broker, ConnectOptions, chunks, store};
use fiec_schemas::messages::{ExecutionVerb, HANDOVER_HEADER};
use fiec_schemas::{Event, ExecutionId, StatePlace, subjects};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use super::super::figures::{median, quantile};
use super::super::follow::{Follow, Moved, millis};
use super::super::{Lab, cluster, cpu, request, submit, tenant};
use super::file;

/// A size of σ.
struct Size {
    words: &'static str,
    bytes: u64,
    /// Computation in one capsule, in microseconds. It is longer than a commit takes, so that no
    /// commit waits for the one before.
    work_us: u64,
    /// Samples of each figure.
    commits: usize,
    moves: usize,
    floors: usize,
}

impl Size {
    /// Bytes that change: one per cent.
    const fn changed(&self) -> u64 {
        self.bytes / 100
    }
}

const SMALL: Size = Size {
    words: "24 MB",
    bytes: 24_000_000,
    work_us: 200_000,
    commits: 20,
    moves: 15,
    floors: 10,
};
const LARGE: Size = Size {
    words: "1 GB",
    bytes: 1_000_000_000,
    work_us: 4_000_000,
    commits: 5,
    moves: 5,
    floors: 3,
};
/// Longest time of one step.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of one message of a floor.
const PART: usize = 512 * 1024;
/// Messages of a floor that may be unacknowledged.
const UNACKNOWLEDGED: usize = 4;

/// Measures each case:
///
/// * `moved_percent` of a commit: the share of σ that is stored, with the list of all chunks (half a
///   per cent). Floor: the share that changed.
/// * `moved_percent` of a handover: the share of σ that is sent, with the new part of that list.
///   Floor: the share that changed.
/// * `commit_p50_ms`: end of a capsule until the broker has stored its commit. Floor: the whole σ
///   stored in the same stream.
/// * `gap_p50_ms` of a move. Floor: the whole σ sent from one connection to another, without the
///   time of a program that encodes and decodes it.
/// * `resident_mb`: the most that a worker, and a program, ever had in memory. Floor: one σ.
///
/// # Errors
/// When something could not be started or measured.
pub(super) async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let changed = SMALL.changed();
    let cases = [
        ("in one place", json!({"bytes": changed})),
        ("inserted", json!({"bytes": changed, "insert": true})),
        ("in 60 places", json!({"bytes": changed, "places": 60})),
    ];
    measure(lab, &SMALL, &cases).await?;
    file::run(lab, LARGE.words, LARGE.bytes).await?;
    let cases = [("in one place", json!({"bytes": LARGE.changed()}))];
    measure(lab, &LARGE, &cases).await
}

async fn measure(
    lab: &mut Lab<'_>,
    size: &'static Size,
    cases: &[(&str, Value)],
) -> anyhow::Result<()> {
    // The bench orders the moves. A busy machine must not cause others.
    let calm = ["--threshold", "latency=1:0.9:60000"];
    let cluster = cluster(lab, 2, &calm, false).await?;
    let broker = &cluster.broker;
    lab.steps_message(&format!("{}: the floor: the whole σ", size.words));
    let (mut stored, mut sent) = (Vec::new(), Vec::new());
    let other = ConnectOptions::new(cluster.servers.nats_url(), "fiec bench");
    let other = Broker::connect(other).await?;
    for _ in 0..lab.samples(size.floors).max(3) {
        stored.push(store_whole(broker, size).await?);
        sent.push(send_whole(broker, &other, size).await?);
    }
    // Else it would look for this server for ever.
    other.client.drain().await?;
    let (stored, sent) = (median(&mut stored), median(&mut sent));
    for (number, (words, change)) in cases.iter().enumerate() {
        let case = format!("{}, 1 % {words}", size.words);
        let submission = json!({
            "program": "synthetic@1",
            "params": {"capsules": 1_000_000_000u64, "state_bytes": size.bytes,
                "work_us": size.work_us, "change": change},
            "commit": {"every": 1},
        });
        let mut run = Run::start(broker, size, &format!("state-{number}"), submission).await?;
        lab.steps_message(&format!("{case}: commits"));
        let mut commits = run
            .commits(broker, lab.samples(size.commits).max(3))
            .await?;
        lab.steps_message(&format!("{case}: moves"));
        let mut moves = run.moves(broker, lab.samples(size.moves).max(3)).await?;
        let mut add = |what: &str, metric, unit, value, floor| {
            let case = format!("{case}, {what}");
            lab.figures.add("state", &case, metric, unit, value, floor);
        };
        let percent = median(&mut commits.percent);
        add("commit", "moved_percent", "%", percent, Some(1.0));
        let took = median(&mut commits.millis);
        add("commit", "commit_p50_ms", "ms", took, Some(stored));
        let percent = median(&mut moves.percent);
        add("handover", "moved_percent", "%", percent, Some(1.0));
        let gap = quantile(&mut moves.millis, 0.5);
        add("handover", "gap_p50_ms", "ms", gap, Some(sent));
        let workers: Vec<u32> = cluster.workers.iter().map(|w| w.pid()).collect();
        let programs = workers.iter().flat_map(|pid| cpu::descendants(*pid));
        for (who, pids) in [("program", programs.collect()), ("worker", workers.clone())] {
            let peak = pids.into_iter().map(cpu::peak).max().unwrap_or(0);
            let floor = size.bytes as f64 / 1e6;
            add(who, "resident_mb", "MB", peak as f64 / 1e6, Some(floor));
        }
        request(broker, ExecutionVerb::Cancel, run.execution).await?;
    }
    cluster.stop().await;
    Ok(())
}

/// Shares of σ and times.
#[derive(Default)]
struct Samples {
    percent: Vec<f64>,
    millis: Vec<f64>,
}

/// An execution under measurement.
struct Run {
    size: &'static Size,
    execution: ExecutionId,
    follow: Follow,
    /// The last commit that was read; none right after a move.
    last: Option<StatePlace>,
    at: Moved,
}

impl Run {
    async fn start(
        broker: &Broker,
        size: &'static Size,
        id: &str,
        submission: serde_json::Value,
    ) -> anyhow::Result<Self> {
        let mut follow = Follow::open(broker).await?;
        let execution = submit(broker, id, submission).await?;
        let at = follow.started(execution, 1, PATIENCE).await?;
        let mut run = Self {
            size,
            execution,
            follow,
            last: None,
            at,
        };
        // The first commits store the whole σ, and each waits for the one before.
        run.commits(broker, 2).await?;
        Ok(run)
    }

    /// Measures commits that are one capsule after the commit before.
    async fn commits(&mut self, broker: &Broker, count: usize) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        while samples.percent.len() < count {
            let (message, stored_at) = self.follow.next_of(self.execution, PATIENCE).await?;
            let committed = message.events.iter().find_map(|event| match event {
                Event::Boundary(boundary) => Some(boundary.computed_at),
                _ => None,
            });
            let place = message.state.boundary.clone();
            let (Some(computed_at), Some(place)) = (committed, place) else {
                continue;
            };
            let before = self.last.replace(place.clone());
            if before.is_none_or(|before| before.index + 1 != place.index) {
                continue;
            }
            let manifest = store::manifest(broker, &place).await?;
            let bytes = manifest.stored + manifest.encode().len() as u64;
            samples
                .percent
                .push(100.0 * bytes as f64 / place.bytes as f64);
            samples.millis.push(millis(computed_at, stored_at));
        }
        Ok(samples)
    }

    /// Moves it to the other node and back.
    async fn moves(&mut self, broker: &Broker, count: usize) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        let nodes = subjects::handover(&fiec_schemas::NodeId::new("x")?).replace(".x", ".*");
        let mut parts = broker.client.subscribe(nodes).await?;
        for _ in 0..count {
            // It must have committed on the node that it leaves.
            self.commits(broker, 1).await?;
            request(broker, ExecutionVerb::Yield, self.execution).await?;
            let epoch = self.at.epoch + 1;
            let moved = self.follow.started(self.execution, epoch, PATIENCE).await?;
            let yielded = moved.yielded_from(&self.at.node)?;
            samples.millis.push(millis(yielded, moved.since));
            (self.at, self.last) = (moved, None);
            let mut bytes = 0;
            // The node before sent everything before the start on this one.
            while let Ok(Some(part)) =
                tokio::time::timeout(Duration::from_millis(50), parts.next()).await
            {
                let ours = part.headers.as_ref().and_then(|h| h.get(HANDOVER_HEADER));
                bytes += ours.map_or(0, |_| part.payload.len());
            }
            samples
                .percent
                .push(100.0 * bytes as f64 / self.size.bytes as f64);
        }
        Ok(samples)
    }
}

fn whole(size: &Size) -> Vec<Bytes> {
    let (part, bytes) = (Bytes::from(vec![7; PART]), size.bytes as usize);
    let mut parts = vec![part.clone(); bytes / PART];
    parts.push(part.slice(..bytes % PART));
    parts
}

/// Milliseconds to store as many bytes as σ has in the stream of chunks.
async fn store_whole(broker: &Broker, size: &Size) -> anyhow::Result<f64> {
    let execution = ExecutionId(uuid::Uuid::now_v7());
    let (parts, tenant) = (whole(size), tenant()?);
    let began = Instant::now();
    let (mut in_flight, mut stored) = (VecDeque::new(), Vec::new());
    for part in parts {
        if in_flight.len() >= UNACKNOWLEDGED
            && let Some(ack) = in_flight.pop_front()
        {
            stored.push(sequence(ack).await?);
        }
        in_flight.push_back(chunks::send(broker, &tenant, execution, part).await?);
    }
    for ack in in_flight {
        stored.push(sequence(ack).await?);
    }
    let took = began.elapsed().as_secs_f64() * 1e3;
    chunks::drop_chunks(broker, &stored).await?;
    Ok(took)
}

async fn sequence(ack: async_nats::jetstream::context::PublishAckFuture) -> anyhow::Result<u64> {
    Ok(ack.await.context("a raw publish failed")?.sequence)
}

/// Milliseconds to send as many bytes as σ has from one connection to another.
async fn send_whole(from: &Broker, to: &Broker, size: &Size) -> anyhow::Result<f64> {
    let subject = from.client.new_inbox();
    let mut coming = to.client.subscribe(subject.clone()).await?;
    // No subscriber answers, but the server reads the subscription before it reports that.
    let _ = to.client.request(to.client.new_inbox(), Bytes::new()).await;
    let parts = whole(size);
    let began = Instant::now();
    let mut left = parts.len();
    for part in parts {
        from.client.publish(subject.clone(), part).await?;
    }
    while left > 0 {
        tokio::time::timeout(PATIENCE, coming.next())
            .await
            .with_context(|| format!("nothing came for {PATIENCE:?}"))?
            .context("the connection is closed")?;
        left -= 1;
    }
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
