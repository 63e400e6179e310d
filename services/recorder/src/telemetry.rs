//! Hardware vectors, thinned out: a row of each node every few seconds, or when a signal moved.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use fiec_broker::{Broker, BrokerClock, BrokerError};
use fiec_schemas::{HardwareVector, InstanceId, NodeId, Reading, Signal, Timestamp};
use futures_util::StreamExt;
use sqlx::PgPool;
use sqlx::types::Json;

use crate::error::Result;
use crate::metrics::Part;
use crate::records::nodes;
use crate::rows::day_of;
use crate::table::{table, write_all};
use crate::tasks::{Shared, pause, trouble};
use crate::write::ensure_day;

/// Most nodes that are remembered.
const NODES_LIMIT: usize = 10_000;
/// Most rows that wait for PostgreSQL.
const ROWS_LIMIT: usize = 20_000;
/// A vector whose time is further off gets the broker's time.
const CLOCK_LIMIT_MICROS: i64 = 3_600_000_000;

/// A value for each signal: the worst of the node and its devices.
type Worst = [Option<f32>; Signal::ALL.len()];

/// Decides which vectors become rows.
#[derive(Debug)]
pub struct Thinner {
    every_micros: i64,
    step: f64,
    last: HashMap<NodeId, (Timestamp, Worst, bool)>,
}

/// The decision on a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It becomes a row.
    Keep,
    /// Nothing new.
    Skip,
    /// [`NODES_LIMIT`] is reached.
    Full,
}

impl Thinner {
    /// A row every `every`, and whenever a signal moves by more than `step`.
    pub fn new(every: Duration, step: f64) -> Self {
        let every_micros = i64::try_from(every.as_micros()).unwrap_or(i64::MAX);
        Self {
            every_micros,
            step,
            last: HashMap::new(),
        }
    }

    /// Judges one vector, received at `now`.
    pub fn judge(&mut self, vector: &HardwareVector, now: Timestamp) -> Verdict {
        let worst = worst(vector);
        if let Some((at, values, draining)) = self.last.get(&vector.node) {
            let moved = values.iter().zip(&worst).any(|(a, b)| match (a, b) {
                (Some(a), Some(b)) => f64::from(a - b).abs() > self.step,
                (a, b) => a.is_some() != b.is_some(),
            });
            let due = now.micros() - at.micros() >= self.every_micros;
            if !(moved || due || *draining != vector.draining) {
                return Verdict::Skip;
            }
        } else if self.last.len() >= NODES_LIMIT {
            // Nodes that fell silent make room.
            let old = now.micros() - 60_000_000;
            self.last.retain(|_, (at, _, _)| at.micros() > old);
            if self.last.len() >= NODES_LIMIT {
                return Verdict::Full;
            }
        }
        self.last
            .insert(vector.node.clone(), (now, worst, vector.draining));
        Verdict::Keep
    }
}

/// Values are in [0, 1]. PostgreSQL would refuse a row with a value beyond single precision.
fn worst(vector: &HardwareVector) -> Worst {
    Signal::ALL.map(|signal| {
        let readings = vector.readings.iter();
        let values = readings
            .filter(|r| r.signal == signal && !r.is_part())
            .filter_map(|r| r.value);
        values.reduce(f64::max).map(|w| w.clamp(0.0, 1.0) as f32)
    })
}

/// Records vectors until the recorder stops.
///
/// # Errors
/// None: a failure is logged, and the task tries again.
pub(crate) async fn follow(
    broker: Broker,
    shared: Shared,
    every: Duration,
    step: f64,
) -> Result<()> {
    while !shared.stop.is_cancelled() {
        let subscribed = broker.client.subscribe("fiec.telemetry.*").await;
        match subscribed.map_err(BrokerError::operation("listen to telemetry")) {
            Ok(vectors) => listen((vectors, broker.clock()), &shared, every, step).await,
            Err(error) => trouble(&shared, Part::Telemetry, &error),
        }
        pause(&shared.stop, Duration::from_secs(1)).await;
    }
    Ok(())
}

async fn listen(
    (mut vectors, clock): (async_nats::Subscriber, &BrokerClock),
    shared: &Shared,
    every: Duration,
    step: f64,
) {
    let metrics = &shared.metrics;
    let mut thinner = Thinner::new(every, step);
    let mut rows: Vec<HardwareVector> = Vec::new();
    let mut flush = tokio::time::interval(Duration::from_secs(1));
    flush.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shared.stop.cancelled() => break,
            message = vectors.next() => {
                let Some(message) = message else { break };
                let vector = HardwareVector::read(&message.subject, &message.payload);
                let Ok(mut vector) = vector else {
                    metrics.unreadable.inc();
                    continue;
                };
                let now = clock.now();
                if (vector.at.micros().saturating_sub(now.micros())).abs() > CLOCK_LIMIT_MICROS {
                    vector.at = now;
                    metrics.vectors_restamped.inc();
                }
                match thinner.judge(&vector, now) {
                    Verdict::Keep if rows.len() < ROWS_LIMIT => rows.push(vector),
                    Verdict::Keep | Verdict::Full => { metrics.vectors_dropped.inc(); }
                    Verdict::Skip => {}
                }
            }
            _ = flush.tick(), if !rows.is_empty() => {
                match insert(&shared.pool, &rows).await {
                    Ok(()) => {
                        metrics.vectors.inc_by(rows.len() as u64);
                        shared.health.well(Part::Telemetry);
                        rows.clear();
                    }
                    Err(error) => trouble(shared, Part::Telemetry, &error),
                }
            }
        }
    }
    if !rows.is_empty() {
        let last = tokio::time::timeout(Duration::from_secs(1), insert(&shared.pool, &rows)).await;
        tracing::debug!(
            written = matches!(last, Ok(Ok(()))),
            "last hardware vectors"
        );
    }
}

table! {
    /// A row of `hardware_vectors`.
    struct VectorRow in "hardware_vectors" {
        /// Which node.
        node: NodeId,
        /// When it was made.
        at: Timestamp,
        /// Which life of the node's agent.
        instance: InstanceId,
        /// The worst value of the signal, of the node and its devices, in [0, 1]; and so on for the
        /// others.
        memory: Option<f32>,
        /// `memory_stall`.
        memory_stall: Option<f32>,
        /// `power`.
        power: Option<f32>,
        /// `thermal`.
        thermal: Option<f32>,
        /// `latency`.
        latency: Option<f32>,
        /// `contention`.
        contention: Option<f32>,
        /// `fabric`.
        fabric: Option<f32>,
        /// `errors`.
        errors: Option<f32>,
        /// True if the node is to be left.
        draining: bool,
        /// Executions that it runs at once.
        slots: u32,
        /// Executions that it runs.
        running: u32,
        /// Executions that wait there.
        queued: u32,
        /// All readings.
        readings: Json<Vec<Reading>>,
    }
}

impl VectorRow {
    fn new(vector: &HardwareVector) -> Self {
        let [
            memory,
            memory_stall,
            power,
            thermal,
            latency,
            contention,
            fabric,
            errors,
        ] = worst(vector);
        Self {
            node: vector.node.clone(),
            at: vector.at,
            instance: vector.instance,
            memory,
            memory_stall,
            power,
            thermal,
            latency,
            contention,
            fabric,
            errors,
            draining: vector.draining,
            slots: vector.slots,
            running: vector.running_count,
            queued: vector.queued_count,
            readings: Json(vector.readings.clone()),
        }
    }
}

async fn insert(pool: &PgPool, vectors: &[HardwareVector]) -> sqlx::Result<()> {
    let mut connection = pool.acquire().await?;
    let days: BTreeSet<i32> = vectors.iter().map(|v| day_of(v.at)).collect();
    for day in days {
        ensure_day(&mut connection, day).await?;
    }
    let rows: Vec<VectorRow> = vectors.iter().map(VectorRow::new).collect();
    write_all(&mut connection, &rows).await?;
    nodes::set_loads(&mut connection, vectors.iter()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(node: &str, memory: Option<f64>) -> HardwareVector {
        HardwareVector {
            v: 1,
            node: node.parse().unwrap(),
            instance: InstanceId::random(),
            count: 1,
            at: Timestamp::from_micros(0),
            clock: None,
            readings: vec![Reading {
                signal: Signal::Memory,
                device: None,
                value: memory,
                raw: None,
                limit: None,
                unit: "bytes".into(),
                source: "test".into(),
                at: Timestamp::from_micros(0),
                missing: None,
                envelope: None,
            }],
            draining: false,
            slots: 1,
            running_count: 0,
            queued_count: 0,
            running: Vec::new(),
            arriving: Vec::new(),
            stuck: Vec::new(),
        }
    }

    fn seconds(n: i64) -> Timestamp {
        Timestamp::from_micros(n * 1_000_000)
    }

    #[test]
    fn a_steady_node_gets_one_row_every_five_seconds() {
        let mut thinner = Thinner::new(Duration::from_secs(5), 0.05);
        let kept = (0..20)
            .filter(|n| thinner.judge(&vector("a", Some(0.5)), seconds(*n)) == Verdict::Keep)
            .count();
        assert_eq!(kept, 4);
    }

    #[test]
    fn a_move_or_a_lost_measurement_is_recorded_at_once() {
        let mut thinner = Thinner::new(Duration::from_secs(5), 0.05);
        let mut judge = |value| thinner.judge(&vector("a", value), seconds(1));
        assert_eq!(judge(Some(0.50)), Verdict::Keep);
        assert_eq!(judge(Some(0.54)), Verdict::Skip);
        assert_eq!(judge(Some(0.56)), Verdict::Keep);
        assert_eq!(judge(None), Verdict::Keep);
        assert_eq!(judge(None), Verdict::Skip);
    }

    #[test]
    fn nodes_are_bounded_and_silent_ones_make_room() {
        let mut thinner = Thinner::new(Duration::from_secs(5), 0.05);
        for n in 0..NODES_LIMIT {
            assert_eq!(
                thinner.judge(&vector(&format!("n{n}"), None), seconds(0)),
                Verdict::Keep
            );
        }
        assert_eq!(
            thinner.judge(&vector("late", None), seconds(1)),
            Verdict::Full
        );
        assert_eq!(
            thinner.judge(&vector("late", None), seconds(100)),
            Verdict::Keep
        );
    }
}
