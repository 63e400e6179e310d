//! Hardware vectors, thinned out: one row a node every few seconds, or when a signal moved.

use std::collections::HashMap;
use std::time::Duration;

use fiec_broker::{Broker, BrokerClock, BrokerError};
use fiec_schemas::{HardwareVector, NodeId, Signal, Timestamp};
use futures_util::StreamExt;
use sqlx::PgPool;

use crate::copy::json_without_nul;
use crate::error::Result;
use crate::ledger::{Shared, pause, trouble};
use crate::metrics::Part;
use crate::rows::{day_of, json, line};
use crate::time::PgTime;
use crate::write::ensure_day;

/// Nodes that are remembered.
const NODES_LIMIT: usize = 10_000;
/// Rows that wait for PostgreSQL.
const ROWS_LIMIT: usize = 20_000;
/// A node's clock further off than this is not believed.
const CLOCK_LIMIT_MICROS: i64 = 3_600_000_000;

/// Values by signal, each the worst of the node and its devices.
type Worst = [Option<f32>; Signal::ALL.len()];

/// Decides which vectors are worth a row.
#[derive(Debug)]
pub struct Thinner {
    every_micros: i64,
    step: f64,
    last: HashMap<NodeId, (Timestamp, Worst, bool)>,
}

/// What became of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is to be recorded.
    Keep,
    /// Nothing new.
    Skip,
    /// There is no room to remember another node.
    Full,
}

impl Thinner {
    /// A row every so often, and whenever a signal moves by more than `step`.
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

/// Values are in [0, 1]; what anybody says beyond that would make PostgreSQL refuse the row.
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
/// Never for what passes: it is logged and tried again.
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
                let Ok(mut vector) = serde_json::from_slice::<HardwareVector>(&message.payload)
                else {
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

async fn insert(pool: &PgPool, vectors: &[HardwareVector]) -> sqlx::Result<()> {
    let mut connection = pool.acquire().await?;
    let mut days: Vec<i32> = vectors.iter().map(|v| day_of(v.at)).collect();
    days.sort_unstable();
    days.dedup();
    for day in days {
        ensure_day(&mut connection, day).await?;
    }
    let worst: Vec<Worst> = vectors.iter().map(worst).collect();
    let mut insert = sqlx::query(
        "INSERT INTO hardware_vectors (node, at, instance, draining, slots, running, queued, \
         readings, memory, memory_stall, power, thermal, latency, contention, fabric, errors) \
         SELECT node, at, instance, draining, slots, running, queued, readings::jsonb, memory, \
         memory_stall, power, thermal, latency, contention, fabric, errors \
         FROM UNNEST($1::text[], $2::timestamptz[], $3::uuid[], $4::boolean[], $5::integer[], \
         $6::integer[], $7::integer[], $8::text[], $9::float4[], $10::float4[], $11::float4[], \
         $12::float4[], $13::float4[], $14::float4[], $15::float4[], $16::float4[]) \
         AS u(node, at, instance, draining, slots, running, queued, readings, memory, \
         memory_stall, power, thermal, latency, contention, fabric, errors) \
         ON CONFLICT DO NOTHING",
    )
    .bind(
        vectors
            .iter()
            .map(|v| v.node.as_str().to_owned())
            .collect::<Vec<_>>(),
    )
    .bind(vectors.iter().map(|v| PgTime(v.at)).collect::<Vec<_>>())
    .bind(vectors.iter().map(|v| v.instance.0).collect::<Vec<_>>())
    .bind(vectors.iter().map(|v| v.draining).collect::<Vec<_>>())
    .bind(vectors.iter().map(|v| line(v.slots)).collect::<Vec<_>>())
    .bind(
        vectors
            .iter()
            .map(|v| line(v.running_count))
            .collect::<Vec<_>>(),
    )
    .bind(
        vectors
            .iter()
            .map(|v| line(v.queued_count))
            .collect::<Vec<_>>(),
    )
    .bind(
        vectors
            .iter()
            .map(|v| json_without_nul(&json(&v.readings)).into_owned())
            .collect::<Vec<_>>(),
    );
    for signal in 0..Signal::ALL.len() {
        insert = insert.bind(worst.iter().map(|w| w[signal]).collect::<Vec<_>>());
    }
    insert.execute(&mut *connection).await?;
    // The last vector of each node says what it is doing.
    let mut last: HashMap<&NodeId, &HardwareVector> = HashMap::new();
    vectors.iter().for_each(|v| {
        last.insert(&v.node, v);
    });
    let mut last: Vec<&HardwareVector> = last.into_values().collect();
    // Always in the same order, so that two recorders cannot wait for each other.
    last.sort_unstable_by(|a, b| a.node.cmp(&b.node));
    sqlx::query(
        "INSERT INTO nodes AS n (node, instance, last_seen_at, draining, slots, running, queued, \
         clock_ahead_us, clock_within_us) \
         SELECT * FROM UNNEST($1::text[], $2::uuid[], $3::timestamptz[], $4::boolean[], \
         $5::integer[], $6::integer[], $7::integer[], $8::bigint[], $9::bigint[]) \
         ON CONFLICT (node) DO UPDATE SET last_seen_at = excluded.last_seen_at, \
         draining = excluded.draining, slots = excluded.slots, running = excluded.running, \
         queued = excluded.queued, clock_ahead_us = excluded.clock_ahead_us, \
         clock_within_us = excluded.clock_within_us \
         WHERE n.last_seen_at IS NULL OR n.last_seen_at < excluded.last_seen_at",
    )
    .bind(
        last.iter()
            .map(|v| v.node.as_str().to_owned())
            .collect::<Vec<_>>(),
    )
    .bind(last.iter().map(|v| v.instance.0).collect::<Vec<_>>())
    .bind(last.iter().map(|v| PgTime(v.at)).collect::<Vec<_>>())
    .bind(last.iter().map(|v| v.draining).collect::<Vec<_>>())
    .bind(last.iter().map(|v| line(v.slots)).collect::<Vec<_>>())
    .bind(
        last.iter()
            .map(|v| line(v.running_count))
            .collect::<Vec<_>>(),
    )
    .bind(
        last.iter()
            .map(|v| line(v.queued_count))
            .collect::<Vec<_>>(),
    )
    .bind(
        last.iter()
            .map(|v| Some(v.clock?.ahead_us))
            .collect::<Vec<_>>(),
    )
    .bind(
        last.iter()
            .map(|v| i64::try_from(v.clock?.within_us).ok())
            .collect::<Vec<_>>(),
    )
    .execute(&mut *connection)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::{InstanceId, Reading};

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
