//! What was seen of an execution and of the nodes during an experiment, from the ledger and from
//! the hardware vectors, on a connection of the experiment's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fiec_broker::Broker;
use fiec_schemas::{
    Cause, Event, ExecutionId, HardwareVector, LedgerMessage, NodeId, Signal, Timestamp,
};
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::bench::follow::Follow;

/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// A committed boundary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    /// When the capsule before it ended, by the program's clock.
    pub at: Timestamp,
    /// Capsules completed.
    pub index: u64,
    /// Bytes of σ.
    pub bytes: u64,
}

/// A time on one node.
#[derive(Debug, Clone)]
pub(super) struct Stay {
    pub node: NodeId,
    pub epoch: u64,
    pub cause: Cause,
    /// When its first capsule there began; none while it has not.
    pub since: Option<Timestamp>,
    /// When its last capsule there ended.
    pub until: Option<Timestamp>,
    /// Bytes of the σ that it began with.
    pub state_bytes: u64,
}

/// How an execution ended.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub at: Timestamp,
    pub capsules: u64,
    /// The program's own words.
    pub result: Value,
}

/// One execution.
#[derive(Debug, Clone, Default)]
pub(super) struct Trace {
    pub points: Vec<Point>,
    pub stays: Vec<Stay>,
    pub end: Option<End>,
    /// Why it will never complete.
    pub failed: Option<String>,
    /// Every execution id that its messages named; an identity that holds has one.
    pub identities: Vec<ExecutionId>,
}

/// A move from one node to another.
#[derive(Debug, Clone)]
pub(super) struct Move {
    pub at: Timestamp,
    pub from: NodeId,
    pub to: NodeId,
    pub cause: Cause,
    /// Bytes of σ that moved.
    pub state_bytes: u64,
    /// End of the last capsule there to begin of the first one here, in milliseconds.
    pub gap_ms: Option<f64>,
}

impl Trace {
    fn add(&mut self, execution: ExecutionId, message: &LedgerMessage) {
        if !self.identities.contains(&execution) {
            self.identities.push(execution);
        }
        let bytes = message.state.boundary.as_ref().map_or(0, |b| b.bytes);
        for event in &message.events {
            match event {
                Event::Bound {
                    node, epoch, cause, ..
                } => self.stays.push(Stay {
                    node: node.clone(),
                    epoch: *epoch,
                    cause: cause.clone(),
                    since: None,
                    until: None,
                    state_bytes: bytes,
                }),
                Event::Started {
                    computing_since, ..
                } => {
                    if let Some(stay) = self.stays.last_mut() {
                        stay.since = Some(*computing_since);
                    }
                }
                Event::Boundary(boundary) => self.points.push(Point {
                    at: boundary.computed_at,
                    index: boundary.index,
                    bytes: boundary.bytes,
                }),
                Event::Yielded { computed_until, .. } => self.leave(*computed_until),
                Event::Completed {
                    result,
                    computed_until,
                    capsules,
                    ..
                } => {
                    self.leave(*computed_until);
                    self.points.push(Point {
                        at: *computed_until,
                        index: *capsules,
                        bytes: 0,
                    });
                    self.end = Some(End {
                        at: *computed_until,
                        capsules: *capsules,
                        result: result.clone(),
                    });
                }
                Event::Failed { reason, stderr } => {
                    self.failed = Some(format!("{reason}\n{stderr}"));
                }
                Event::Crashed { exit, stderr, .. } => {
                    self.failed = Some(format!("its program crashed: {exit}\n{stderr}"));
                }
                _ => {}
            }
        }
    }

    /// `yielded` may stand before the `bound` of the same message: the last stay that computed ends.
    fn leave(&mut self, until: Timestamp) {
        let open = |s: &&mut Stay| s.since.is_some() && s.until.is_none();
        if let Some(stay) = self.stays.iter_mut().rev().find(open) {
            stay.until = Some(until);
        }
    }

    /// When its first capsule began.
    pub fn start(&self) -> Option<Timestamp> {
        self.stays.iter().find_map(|s| s.since)
    }

    /// Seconds since its first capsule began.
    pub fn seconds(&self, at: Timestamp) -> f64 {
        let start = self.start().unwrap_or(at);
        (at.micros() - start.micros()) as f64 / 1e6
    }

    /// Where it was and when, for messages.
    fn story(&self) -> String {
        let stays = self.stays.iter().filter_map(|s| {
            let until = s.until.map(|u| format!("{:.2}", self.seconds(u)));
            let (node, since) = (&s.node, self.seconds(s.since?));
            Some(format!(
                "{node} {since:.2} to {} s",
                until.unwrap_or_default()
            ))
        });
        format!("it was on {}", stays.collect::<Vec<_>>().join(", "))
    }

    /// Where it computes, or did last.
    pub fn node(&self) -> Option<&NodeId> {
        let mut stays = self.stays.iter().rev();
        stays.find(|s| s.since.is_some()).map(|s| &s.node)
    }

    /// Its moves, those only on which it computed on both sides.
    pub fn moves(&self) -> Vec<Move> {
        let stays: Vec<&Stay> = self.stays.iter().filter(|s| s.since.is_some()).collect();
        let pairs = stays.windows(2).filter_map(|pair| {
            let [before, after] = pair else { return None };
            let at = after.since?;
            let ms = |until: Timestamp| (at.micros() - until.micros()) as f64 / 1e3;
            Some(Move {
                at,
                from: before.node.clone(),
                to: after.node.clone(),
                cause: after.cause.clone(),
                state_bytes: after.state_bytes,
                gap_ms: before.until.map(ms),
            })
        });
        pairs.collect()
    }

    /// True where no boundary came after a later one, and one identity did it all.
    pub fn is_monotonic(&self) -> bool {
        // The point of the end may repeat the last boundary.
        self.points.is_sorted_by(|a, b| a.index <= b.index) && self.identities.len() == 1
    }

    /// Capsules done at a moment, in parts of one between two commits.
    pub fn capsules_at(&self, seconds: f64) -> f64 {
        let points = self.curve();
        interpolate(points.iter().copied(), seconds)
    }

    /// Seconds after the start at which so many capsules were done.
    pub fn seconds_at(&self, capsules: f64) -> f64 {
        let points = self.curve();
        interpolate(points.iter().map(|(s, c)| (*c, *s)), capsules)
    }

    /// Seconds and capsules, from the start on.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let points = self.points.iter();
        let points = points.map(|p| (self.seconds(p.at), p.index as f64));
        std::iter::once((0.0, 0.0)).chain(points).collect()
    }
}

/// y at x on the line through points whose x grow; the ends hold beyond it.
pub(super) fn interpolate(points: impl Iterator<Item = (f64, f64)>, x: f64) -> f64 {
    let mut before: Option<(f64, f64)> = None;
    for (px, py) in points {
        if px >= x {
            return match before {
                Some((bx, by)) if px > bx => by + (py - by) * (x - bx) / (px - bx),
                _ => py,
            };
        }
        before = Some((px, py));
    }
    before.map_or(0.0, |(_, y)| y)
}

/// A reading of the memory of a node or of its device, or of the device's power.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub at: Timestamp,
    pub node: NodeId,
    pub signal: Signal,
    pub device: Option<String>,
    pub value: f64,
    /// In use, in bytes; drawn, in mW.
    pub raw: f64,
    /// What is offered of it.
    pub cap: f64,
}

impl Sample {
    /// Whether it is this signal's, of the node's device or of the node itself.
    pub fn is(&self, signal: Signal, node: &str, device: bool) -> bool {
        self.signal == signal && self.node.as_str() == node && self.device.is_some() == device
    }
}

#[derive(Default)]
struct Seen {
    traces: BTreeMap<ExecutionId, Trace>,
    samples: Vec<Sample>,
}

/// Collects until it is dropped.
pub(super) struct Observer {
    seen: Arc<Mutex<Seen>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Observer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Observer {
    /// From now on nothing is missed. `own`: the device of each node, of whose others nothing is
    /// kept: a driver tells of all that the machine has.
    pub async fn open(broker: &Broker, own: BTreeMap<NodeId, String>) -> anyhow::Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut follow = Follow::open(broker).await?;
        let mut vectors = broker.client.subscribe("fiec.telemetry.*").await?;
        broker.client.flush().await?;
        let ledger = Arc::clone(&seen);
        let ledgers = tokio::spawn(async move {
            // Ends with the feed; whoever waits has a deadline of their own.
            while let Ok((id, message)) = follow.next(Duration::from_secs(3_600)).await {
                lock(&ledger)
                    .traces
                    .entry(id)
                    .or_default()
                    .add(id, &message);
            }
        });
        let readings = Arc::clone(&seen);
        let telemetry = tokio::spawn(async move {
            while let Some(message) = vectors.next().await {
                if let Ok(vector) = serde_json::from_slice::<HardwareVector>(&message.payload) {
                    let own = own.get(&vector.node).map(String::as_str);
                    lock(&readings).samples.extend(samples(&vector, own));
                }
            }
        });
        Ok(Self {
            seen,
            tasks: vec![ledgers, telemetry],
        })
    }

    /// What was seen of an execution so far.
    pub fn trace(&self, execution: ExecutionId) -> Trace {
        let seen = lock(&self.seen);
        seen.traces.get(&execution).cloned().unwrap_or_default()
    }

    /// Readings of a span of time.
    pub fn samples(&self, from: Timestamp, to: Timestamp) -> Vec<Sample> {
        let seen = lock(&self.seen);
        let within = |s: &&Sample| s.at >= from && s.at <= to;
        seen.samples.iter().filter(within).cloned().collect()
    }

    /// The newest reading of a node's memory, or of its device's.
    pub fn newest(&self, node: &NodeId, device: bool) -> Option<f64> {
        let seen = lock(&self.seen);
        let of = |s: &&Sample| s.is(Signal::Memory, node.as_str(), device);
        seen.samples.iter().rev().find(of).map(|s| s.value)
    }

    /// Waits until `found` answers for the execution.
    pub async fn until<T>(
        &self,
        what: &str,
        execution: ExecutionId,
        patience: Duration,
        found: impl Fn(&Trace) -> Option<T>,
    ) -> anyhow::Result<T> {
        let wait = async {
            loop {
                let trace = self.trace(execution);
                if let Some(found) = found(&trace) {
                    return anyhow::Ok(found);
                }
                if let Some(why) = &trace.failed {
                    bail!("the execution failed: {why}");
                }
                if trace.end.is_some() {
                    bail!("the execution ended before {what}; {}", trace.story());
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let waited = tokio::time::timeout(patience, wait).await;
        waited.with_context(|| format!("waited {patience:?} in vain until {what}"))?
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

fn samples<'a>(
    vector: &'a HardwareVector,
    own: Option<&'a str>,
) -> impl Iterator<Item = Sample> + 'a {
    let is_own = move |device: Option<&str>| device.is_none() || own.is_none() || device == own;
    let wanted = move |r: &&fiec_schemas::Reading| match r.signal {
        Signal::Memory => !r.is_part() && is_own(r.device.as_deref()),
        Signal::Power => r.device.is_some() && !r.is_part() && is_own(r.device.as_deref()),
        _ => false,
    };
    vector.readings.iter().filter(wanted).filter_map(move |r| {
        Some(Sample {
            at: vector.at,
            node: vector.node.clone(),
            signal: r.signal,
            device: r.device.clone(),
            value: r.value?,
            raw: r.raw?,
            cap: r.envelope.as_ref().map(|e| e.cap).or(r.limit)?,
        })
    })
}

/// The cause in one word or two: what pressed, or what else it was.
pub(super) fn cause_name(cause: &Cause) -> String {
    match cause {
        Cause::Pressure { evidence } => format!("pressure: {}", evidence.signal),
        other => other.as_str().to_owned(),
    }
}
