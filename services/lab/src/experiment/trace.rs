//! The observations of an execution and of the nodes during an experiment, from the ledger and the
//! hardware vectors, on a separate connection.

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

/// Interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(10);

/// A committed boundary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    /// End of the capsule before it, by the program's clock.
    pub at: Timestamp,
    /// Completed capsules.
    pub index: u64,
    /// Size of σ, in bytes.
    pub bytes: u64,
}

/// A stay on one node.
#[derive(Debug, Clone)]
pub(super) struct Stay {
    pub node: NodeId,
    pub epoch: u64,
    pub cause: Cause,
    /// Start of its first capsule there. None before it.
    pub since: Option<Timestamp>,
    /// End of its last capsule there.
    pub until: Option<Timestamp>,
    /// Size of the σ that it started with, in bytes.
    pub state_bytes: u64,
}

/// The end of an execution.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub at: Timestamp,
    pub capsules: u64,
    /// The program's result.
    pub result: Value,
}

/// One execution.
#[derive(Debug, Clone, Default)]
pub(super) struct Trace {
    pub points: Vec<Point>,
    pub stays: Vec<Stay>,
    pub end: Option<End>,
    /// The reason why it can no longer complete.
    pub failed: Option<String>,
    /// Every execution id in its messages; there must be only one.
    pub identities: Vec<ExecutionId>,
}

/// A move from one node to another.
#[derive(Debug, Clone)]
pub(super) struct Move {
    pub at: Timestamp,
    pub from: NodeId,
    pub to: NodeId,
    pub cause: Cause,
    /// Size of the moved σ, in bytes.
    pub state_bytes: u64,
    /// Time from the last capsule's end there to the first one's start here, in ms.
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
                Event::Failed { reason, stderr, .. } => {
                    self.failed = Some(format!("{reason}\n{stderr}"));
                }
                Event::Crashed { exit, stderr, .. } => {
                    self.failed = Some(format!("its program crashed: {exit}\n{stderr}"));
                }
                _ => {}
            }
        }
    }

    /// `yielded` may precede the `bound` of the same message, so the last stay that computed ends.
    fn leave(&mut self, until: Timestamp) {
        let open = |s: &&mut Stay| s.since.is_some() && s.until.is_none();
        if let Some(stay) = self.stays.iter_mut().rev().find(open) {
            stay.until = Some(until);
        }
    }

    /// Start of its first capsule.
    pub fn start(&self) -> Option<Timestamp> {
        self.stays.iter().find_map(|s| s.since)
    }

    /// Seconds since the start of its first capsule.
    pub fn seconds(&self, at: Timestamp) -> f64 {
        let start = self.start().unwrap_or(at);
        (at.micros() - start.micros()) as f64 / 1e6
    }

    /// Its stays with their times, for messages.
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

    /// The node on which it computes or last computed.
    pub fn node(&self) -> Option<&NodeId> {
        let mut stays = self.stays.iter().rev();
        stays.find(|s| s.since.is_some()).map(|s| &s.node)
    }

    /// Its moves between nodes on which it computed.
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

    /// True if no boundary follows a later one, and all messages have one execution id.
    pub fn is_monotonic(&self) -> bool {
        // The point of the end may repeat the last boundary.
        self.points.is_sorted_by(|a, b| a.index <= b.index) && self.identities.len() == 1
    }

    /// Completed capsules at a moment, interpolated between commits.
    pub fn capsules_at(&self, seconds: f64) -> f64 {
        let points = self.curve();
        interpolate(points.iter().copied(), seconds)
    }

    /// Seconds after the start until this many capsules were completed.
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

/// Linear interpolation of y at x through points with growing x. Beyond the ends, their values
/// hold.
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

/// A reading of the memory of a node or its device, or of the device's power.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub at: Timestamp,
    pub node: NodeId,
    pub signal: Signal,
    pub device: Option<String>,
    pub value: f64,
    /// Memory in use in bytes, or power in mW.
    pub raw: f64,
    /// The offered amount.
    pub cap: f64,
}

impl Sample {
    /// True if it is this signal's, of the node's device or of the node itself.
    pub fn is(&self, signal: Signal, node: &str, device: bool) -> bool {
        self.signal == signal && self.node.as_str() == node && self.device.is_some() == device
    }
}

#[derive(Default)]
struct Seen {
    traces: BTreeMap<ExecutionId, Trace>,
    samples: Vec<Sample>,
}

/// Collects observations until it is dropped.
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
    /// Starts observing; no later event is missed. `own`: the device of each node. Readings of
    /// other devices are dropped, because a driver reports all devices of the machine.
    pub async fn open(broker: &Broker, own: BTreeMap<NodeId, String>) -> anyhow::Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut follow = Follow::open(broker).await?;
        let mut vectors = broker.client.subscribe("fiec.telemetry.*").await?;
        broker.client.flush().await?;
        let ledger = Arc::clone(&seen);
        let ledgers = tokio::spawn(async move {
            // It ends with the feed; each waiting caller has its own deadline.
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

    /// The observations of an execution so far.
    pub fn trace(&self, execution: ExecutionId) -> Trace {
        let seen = lock(&self.seen);
        seen.traces.get(&execution).cloned().unwrap_or_default()
    }

    /// The readings within a span of time.
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

    /// Waits until `found` returns a value for the execution.
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

/// The cause in a word or two: the signal that pressed, or another cause.
pub(super) fn cause_name(cause: &Cause) -> String {
    match cause {
        Cause::Pressure { evidence } => format!("pressure: {}", evidence.signal),
        other => other.as_str().to_owned(),
    }
}
