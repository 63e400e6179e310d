//! `bench state`: a σ of 24 MB of which one per cent changes with every capsule, in one place, as an
//! insertion, and spread: which share of it is stored with a commit and sent with a handover, and
//! how long both take, against moving the whole of it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use fiec::client;
use fiec_broker::feed::{self, FeedItem};
use fiec_broker::{Broker, BrokerError, ConnectOptions, chunks, store};
use fiec_schemas::messages::{ExecutionVerb, HANDOVER_HEADER};
use fiec_schemas::{Event, ExecutionId, Phase, StatePlace, Timestamp, subjects};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use serde_json::json;

use super::figures::{median, quantile};
use super::{Lab, cluster, submit, tenant};

/// Bytes of σ.
const STATE: u64 = 24_000_000;
/// Bytes that change: one per cent.
const CHANGED: u64 = STATE / 100;
/// Computation in one capsule, in microseconds: more than a commit takes, so that none waits for
/// the one before it.
const WORK_US: u64 = 200_000;
/// How long one step may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of one message of a floor, and how many may be unacknowledged.
const PART: usize = 512 * 1024;
const UNACKNOWLEDGED: usize = 4;

/// Runs the bench. `moved_percent` of σ, floor = what changed: stored with a commit, with the list of
/// all chunks (half a per cent), and sent with a handover, with what of that list is new.
/// `commit_p50_ms`, end of a capsule to the broker having its commit, floor = the whole σ stored in
/// the same stream. `gap_p50_ms` of a move, floor = the whole σ from one connection to another,
/// which no program has made or taken up.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    // Moves are asked for here; a machine that is busy beside this is no reason against one.
    let calm = ["--threshold", "latency=1:0.9:60000"];
    let cluster = cluster(lab, 2, &calm, false).await?;
    let broker = &cluster.broker;
    let rounds = lab.samples(10).max(3);
    lab.steps_message("state: the whole σ, without us");
    let (mut stored, mut sent) = (Vec::new(), Vec::new());
    let other = ConnectOptions::new(cluster.servers.nats_url(), "fiec bench");
    let other = Broker::connect(other).await?;
    for _ in 0..rounds {
        stored.push(store_whole(broker).await?);
        sent.push(send_whole(broker, &other).await?);
    }
    let (stored, sent) = (median(&mut stored), median(&mut sent));
    let cases = [
        ("in one place", json!({"bytes": CHANGED})),
        ("inserted", json!({"bytes": CHANGED, "insert": true})),
        ("in 60 places", json!({"bytes": CHANGED, "places": 60})),
    ];
    for (number, (words, change)) in cases.into_iter().enumerate() {
        let case = format!("24 MB, 1 % {words}");
        let submission = json!({
            "program": "synthetic@1",
            "params": {"capsules": 1_000_000_000u64, "state_bytes": STATE, "work_us": WORK_US,
                "change": change},
            "commit": {"every": 1},
        });
        let mut run = Run::start(broker, &format!("state-{number}"), submission).await?;
        lab.steps_message(&format!("{case}: commits"));
        let mut commits = run.commits(broker, lab.samples(20).max(4)).await?;
        lab.steps_message(&format!("{case}: moves"));
        let mut moves = run.moves(broker, lab.samples(15).max(4)).await?;
        run.end(broker).await?;
        let mut add = |what: &str, metric, unit, value, floor| {
            let case = format!("{case}, {what}");
            lab.figures
                .add("state", &case, metric, unit, value, Some(floor));
        };
        let percent = median(&mut commits.percent);
        add("commit", "moved_percent", "%", percent, 1.0);
        let took = median(&mut commits.millis);
        add("commit", "commit_p50_ms", "ms", took, stored);
        let percent = median(&mut moves.percent);
        add("handover", "moved_percent", "%", percent, 1.0);
        let gap = quantile(&mut moves.millis, 0.5);
        add("handover", "gap_p50_ms", "ms", gap, sent);
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
    execution: ExecutionId,
    feed: BoxStream<'static, Result<FeedItem, BrokerError>>,
    /// The last commit that was seen.
    last: Option<StatePlace>,
    node: String,
    epoch: u64,
}

/// What one ledger message said.
struct Said {
    events: Vec<Event>,
    phase: Phase,
    place: Option<StatePlace>,
    stored_at: Timestamp,
}

fn millis(from: Timestamp, to: Timestamp) -> f64 {
    (to.micros() - from.micros()) as f64 / 1e3
}

impl Run {
    async fn start(
        broker: &Broker,
        id: &str,
        submission: serde_json::Value,
    ) -> anyhow::Result<Self> {
        let feed = feed::live(broker).await?;
        let execution = submit(broker, id, submission).await?;
        let mut run = Self {
            execution,
            feed,
            last: None,
            node: String::new(),
            epoch: 0,
        };
        run.started(1).await?;
        // The first commits store all of it, and wait for each other.
        run.commits(broker, 2).await?;
        Ok(run)
    }

    async fn next(&mut self) -> anyhow::Result<Said> {
        loop {
            let item = tokio::time::timeout(PATIENCE, self.feed.next())
                .await
                .with_context(|| format!("nothing happened for {PATIENCE:?}"))?
                .context("the ledger feed ended")?;
            let item = match item {
                Ok(item) if item.execution == self.execution => item,
                Ok(_) => continue,
                Err(error) => {
                    tracing::debug!(%error, "ledger feed");
                    continue;
                }
            };
            let message = item.message()?;
            ensure!(
                !message.state.phase.is_terminal(),
                "it ended: {:?}",
                message.events
            );
            return Ok(Said {
                phase: message.state.phase,
                place: message.state.boundary,
                stored_at: item.stored_at,
                events: message.events,
            });
        }
    }

    /// Until it is started under this epoch: when its first capsule began, and when the last one
    /// before had ended.
    async fn started(&mut self, epoch: u64) -> anyhow::Result<(Timestamp, Option<Timestamp>)> {
        let mut yielded = None;
        loop {
            let said = self.next().await?;
            if let Some(place) = said.place.clone() {
                self.last = Some(place);
            }
            for event in &said.events {
                match event {
                    Event::Yielded { computed_until, .. } => yielded = Some(*computed_until),
                    Event::Started {
                        epoch: at,
                        computing_since,
                    } if *at >= epoch => {
                        let binding = said.phase.binding().context("started without a node")?;
                        let node = binding.node.to_string();
                        ensure!(node != self.node, "it was bound to {node} again");
                        (self.node, self.epoch) = (node, *at);
                        return Ok((*computing_since, yielded));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Commits that are one capsule behind the one before.
    async fn commits(&mut self, broker: &Broker, count: usize) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        while samples.percent.len() < count {
            let said = self.next().await?;
            let committed = said.events.iter().find_map(|event| match event {
                Event::Boundary(boundary) => Some(boundary.computed_at),
                _ => None,
            });
            let (Some(computed_at), Some(place)) = (committed, said.place) else {
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
            samples.millis.push(millis(computed_at, said.stored_at));
        }
        Ok(samples)
    }

    /// Moves it to the other node and back.
    async fn moves(&mut self, broker: &Broker, count: usize) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        let nodes = subjects::handover(&fiec_schemas::NodeId::new("x")?).replace(".x", ".*");
        let mut parts = broker.client.subscribe(nodes).await?;
        for _ in 0..count {
            // A move of a computation that has committed on the node where it is.
            self.commits(broker, 1).await?;
            let id = self.execution.to_string();
            let reply =
                client::execution(broker, ExecutionVerb::Yield, &tenant()?, &id, None).await?;
            ensure!(
                reply.error.is_none(),
                "the move was refused: {:?}",
                reply.error
            );
            let (since, yielded) = self.started(self.epoch + 1).await?;
            let yielded = yielded.context("a move without the end of computing before it")?;
            samples.millis.push(millis(yielded, since));
            let mut bytes = 0;
            // All that it has sent was sent before it was started elsewhere.
            while let Ok(Some(part)) =
                tokio::time::timeout(Duration::from_millis(50), parts.next()).await
            {
                let ours = part.headers.as_ref().and_then(|h| h.get(HANDOVER_HEADER));
                bytes += ours.map_or(0, |_| part.payload.len());
            }
            samples.percent.push(100.0 * bytes as f64 / STATE as f64);
        }
        Ok(samples)
    }

    async fn end(self, broker: &Broker) -> anyhow::Result<()> {
        let id = self.execution.to_string();
        let reply = client::execution(broker, ExecutionVerb::Cancel, &tenant()?, &id, None).await?;
        ensure!(
            reply.error.is_none(),
            "the cancel was refused: {:?}",
            reply.error
        );
        Ok(())
    }
}

fn whole() -> Vec<Bytes> {
    let part = Bytes::from(vec![7; PART]);
    let mut parts = vec![part; STATE as usize / PART];
    parts.push(Bytes::from(vec![7; STATE as usize % PART]));
    parts
}

/// Milliseconds to store so many bytes in the stream of chunks.
async fn store_whole(broker: &Broker) -> anyhow::Result<f64> {
    let execution = ExecutionId(uuid::Uuid::now_v7());
    let (parts, tenant) = (whole(), tenant()?);
    let began = Instant::now();
    let (mut under_way, mut stored) = (VecDeque::new(), Vec::new());
    for part in parts {
        if under_way.len() >= UNACKNOWLEDGED
            && let Some(ack) = under_way.pop_front()
        {
            stored.push(sequence(ack).await?);
        }
        under_way.push_back(chunks::send(broker, &tenant, execution, part).await?);
    }
    for ack in under_way {
        stored.push(sequence(ack).await?);
    }
    let took = began.elapsed().as_secs_f64() * 1e3;
    chunks::drop_chunks(broker, &stored).await?;
    Ok(took)
}

async fn sequence(ack: async_nats::jetstream::context::PublishAckFuture) -> anyhow::Result<u64> {
    Ok(ack.await.context("a raw publish failed")?.sequence)
}

/// Milliseconds for so many bytes from one connection to another.
async fn send_whole(from: &Broker, to: &Broker) -> anyhow::Result<f64> {
    let subject = from.client.new_inbox();
    let mut coming = to.client.subscribe(subject.clone()).await?;
    // Nobody answers that, but the server has read the subscription before it says so.
    let _ = to.client.request(to.client.new_inbox(), Bytes::new()).await;
    let parts = whole();
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
