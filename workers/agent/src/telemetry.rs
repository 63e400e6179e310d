//! H(t) of this node: a slow heartbeat, and a vector at once on a change.
//!
//! Memory changes fastest. If the kernel reports crossings ([`fiec_probes::trigger`]), its report
//! wakes this task. Otherwise memory is read as often as it could be filled. The other signals are
//! read twice a second. A vector leaves
//!
//! * at the heartbeat;
//! * when a value has changed by more than its signal's declared step since the last vector, at
//!   most every [`CHANGE_GAP`];
//! * when a value has crossed a threshold in force since the last vector, at most every
//!   [`CROSSING_GAP`]. So no node sends more than a hundred vectors a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_probes::{Sampler, changed};
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{
    HardwareVector, Reading, Sequence, Signal, Threshold, Thresholds, Timestamp, subjects,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::park;
use crate::shared::Shared;

/// Least time between vectors for changes.
const CHANGE_GAP: Duration = Duration::from_millis(50);
/// Least time between vectors for crossings.
const CROSSING_GAP: Duration = Duration::from_millis(10);
/// Resolution of timers.
const TICK: Duration = Duration::from_millis(1);
/// Interval of reading all signals.
const ALL_SIGNALS: Duration = Duration::from_millis(500);

/// The reason to send a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    /// Nothing.
    None,
    /// A value has changed by more than its step.
    Change,
    /// A value has crossed a threshold.
    Crossing,
}

impl News {
    /// The least time since the last vector.
    fn gap(self) -> Option<Duration> {
        match self {
            News::None => None,
            News::Change => Some(CHANGE_GAP),
            News::Crossing => Some(CROSSING_GAP),
        }
    }
}

/// Whether a value has crossed one of a threshold's limits.
fn crossed(before: f64, now: f64, threshold: &Threshold) -> bool {
    [threshold.high, threshold.low]
        .iter()
        .any(|limit| (before >= *limit) != (now >= *limit))
}

/// Compares these readings with the published ones. `memory` has every threshold of M in force: the
/// node's own and those of executions.
fn news(
    published: &[Reading],
    current: &[Reading],
    node: &Thresholds,
    memory: &[Threshold],
) -> News {
    let value_of = |c: &Reading| {
        published
            .iter()
            .find(|p| p.signal == c.signal && p.device == c.device)
            .and_then(|p| p.value)
    };
    for reading in current.iter().filter(|r| !r.is_part()) {
        let (Some(before), Some(now)) = (value_of(reading), reading.value) else {
            continue;
        };
        let own = node.get(&reading.signal).into_iter();
        let brought = memory.iter().filter(|_| reading.signal == Signal::Memory);
        if own.chain(brought).any(|t| crossed(before, now, t)) {
            return News::Crossing;
        }
    }
    if changed(published, current) {
        News::Change
    } else {
        News::None
    }
}

/// Compares memory alone with the published reading, as [`news`] does.
fn memory_news(published: &[Reading], now: &Reading, memory: &[Threshold]) -> News {
    let before = published
        .iter()
        .find(|r| r.signal == Signal::Memory && r.device.is_none())
        .and_then(|r| r.value);
    match (before, now.value) {
        (Some(before), Some(now)) if memory.iter().any(|t| crossed(before, now, t)) => {
            News::Crossing
        }
        (Some(before), Some(now)) if (now - before).abs() > Signal::Memory.step() => News::Change,
        _ => News::None,
    }
}

/// Publishes until `stop`, and once more at the end. The probes' threads notify `woken`.
pub async fn publish(
    shared: Arc<Shared>,
    mut sampler: Sampler,
    woken: Arc<Notify>,
    stop: CancellationToken,
) {
    let heartbeat = shared.options.heartbeat;
    let mut published: Vec<Reading> = Vec::new();
    let mut count = 0;
    let mut sent: Option<Instant> = None;
    // When the next heartbeat is due.
    let mut beat = Instant::now();
    let mut looked_at_all: Option<Instant> = None;
    let mut pause = Duration::ZERO;
    loop {
        let mut asked = false;
        let mut leaving = false;
        let mut event = false;
        tokio::select! {
            () = stop.cancelled() => leaving = true,
            () = shared.news.notified() => asked = true,
            () = woken.notified() => {
                event = true;
                shared.metrics.pressure_events.inc();
            }
            () = tokio::time::sleep(pause) => {}
        }
        let memory = shared.memory_thresholds();
        let since_sent = sent.map(|at| at.elapsed());
        let on_beat = Instant::now() + TICK / 2 >= beat;
        let due = asked || leaving || on_beat;
        let all = due || event || looked_at_all.is_none_or(|at| at.elapsed() >= ALL_SIGNALS);
        let now = shared.broker.now();
        let mut readings = None;
        let mut told = match sampler.fast(now) {
            Some(fast) if !all => memory_news(&published, &fast, &memory),
            _ => News::None,
        };
        if all || told > News::None {
            let sample = sampler.sample(now);
            shared.note_pressure(&sample, &shared.options.thresholds);
            park::relieve(&shared, &sample);
            told = told.max(news(
                &published,
                &sample,
                &shared.options.thresholds,
                &memory,
            ));
            looked_at_all = Some(Instant::now());
            let stall = shared.options.thresholds.get(&Signal::MemoryStall);
            sampler.arm(&memory, stall.copied());
            readings = Some(sample);
        }
        pause = sampler.next_look(&memory);
        let may_leave = match (told.gap(), since_sent) {
            _ if due => true,
            (None, _) => false,
            (Some(gap), Some(since)) if since < gap => {
                // It leaves as soon as its gap is over.
                pause = pause.min(gap - since);
                false
            }
            (Some(_), _) => true,
        };
        let (true, Some(readings)) = (may_leave, readings) else {
            let to_beat = beat.saturating_duration_since(Instant::now());
            pause = pause.min(to_beat).max(TICK);
            continue;
        };
        count += 1;
        send(&shared, count, now, &readings, leaving).await;
        published = readings;
        let at = Instant::now();
        sent = Some(at);
        // On the beat, unless another vector came between or the beat was missed.
        beat = match beat + heartbeat {
            next if on_beat && next > at => next,
            _ => at + heartbeat,
        };
        pause = pause.min(beat.saturating_duration_since(at)).max(TICK);
        if leaving {
            return;
        }
    }
}

/// Sends a vector of these readings, and updates the metrics with them.
async fn send(shared: &Shared, count: u64, now: Timestamp, readings: &[Reading], leaving: bool) {
    let vector = HardwareVector {
        v: 1,
        node: shared.node().clone(),
        instance: shared.instance,
        count,
        at: now,
        clock: shared.broker.clock().reading(),
        readings: readings.to_vec(),
        draining: shared.is_draining() || leaving,
        slots: shared.slots(),
        running_count: shared.running(),
        queued_count: u32::try_from(shared.queued()).unwrap_or(u32::MAX),
        running: shared.progress(),
        arriving: shared.fetches.list(),
        stuck: shared.pool.stuck(),
    };
    let body = match serde_json::to_vec(&vector) {
        Ok(body) => body,
        Err(error) => {
            tracing::error!(%error, "a hardware vector cannot be written");
            return;
        }
    };
    shared.outlook.note(vector.clone());
    let bytes = body.len() as u64;
    let client = &shared.broker.client;
    match client
        .publish(subjects::telemetry(shared.node()), body.into())
        .await
    {
        Ok(()) => {
            shared.metrics.vectors.inc();
            shared.metrics.vector_bytes.inc_by(bytes);
        }
        Err(error) => tracing::debug!(%error, "cannot publish telemetry"),
    }
    shared
        .metrics
        .lost_slots
        .set(shared.pool.lost_slots().into());
    shared.metrics.running.set(shared.running().into());
    let oldest = i64::try_from(shared.oldest_uncommitted().as_secs());
    shared
        .metrics
        .uncommitted_seconds
        .set(oldest.unwrap_or(i64::MAX));
    shared.metrics.queued.set(shared.queued() as i64);
    let held = i64::try_from(shared.fetches.bytes());
    let gauge = &shared.metrics.fetched_bytes_held;
    gauge.set(held.unwrap_or(i64::MAX));
    shared.metrics.hardware.set(vector.readings);
}

/// Messages that the recorder is behind: by its own report, or by the sequence that this node has
/// seen since. A recorder that hangs reports nothing.
pub fn behind(word: &RecorderCheckpoint, newest: Sequence) -> u64 {
    word.lag.max(newest.saturating_sub(word.seq))
}

/// Least interval of routine commits, in ms, when the recorder is this many messages behind.
pub fn stretch_for(lag: u64) -> u32 {
    match lag {
        0..20_000 => 0,
        20_000..100_000 => 5_000,
        100_000..500_000 => 20_000,
        _ => 60_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const T: Threshold = Threshold {
        high: 0.9,
        low: 0.7,
        dwell_ms: 0,
    };

    #[test]
    fn a_crossing_counts_in_both_directions_and_at_both_limits() {
        assert!(crossed(0.89, 0.9, &T) && crossed(0.9, 0.89, &T) && crossed(0.7, 0.69, &T));
        assert!(!crossed(0.75, 0.89, &T));
    }

    fn reading(signal: Signal, device: Option<&str>, value: f64) -> Reading {
        Reading {
            signal,
            device: device.map(str::to_owned),
            value: Some(value),
            raw: Some(value),
            limit: None,
            unit: "ratio".into(),
            source: "test".into(),
            at: Timestamp::from_micros(1),
            missing: None,
            envelope: None,
        }
    }

    #[test]
    fn a_crossing_is_told_before_a_change_and_a_small_change_not_at_all() {
        let node = BTreeMap::from([(Signal::Memory, T), (Signal::Thermal, T)]);
        let m = |v| [reading(Signal::Memory, None, v)];
        let told = |was: &[Reading], is: &[Reading]| news(was, is, &node, &[T]);
        assert_eq!(told(&m(0.5), &m(0.51)), News::None);
        assert_eq!(told(&m(0.5), &m(0.53)), News::Change);
        assert_eq!(told(&m(0.899), &m(0.901)), News::Crossing);
        assert_eq!(memory_news(&m(0.5), &m(0.51)[0], &[T]), News::None);
        assert_eq!(memory_news(&m(0.5), &m(0.53)[0], &[T]), News::Change);
        assert_eq!(memory_news(&m(0.899), &m(0.901)[0], &[T]), News::Crossing);
        // A threshold of an execution counts as well, for memory alone.
        let brought = Threshold {
            high: 0.505,
            low: 0.1,
            ..T
        };
        assert_eq!(
            news(&m(0.5), &m(0.51), &node, &[T, brought]),
            News::Crossing
        );
        let t = |v| [reading(Signal::Thermal, Some("GPU-1"), v)];
        assert_eq!(news(&t(0.5), &t(0.51), &node, &[brought]), News::None);
        assert_eq!(told(&t(0.899), &t(0.901)), News::Crossing);
        let part = |v| [reading(Signal::Memory, Some("numa:1"), v)];
        assert_eq!(told(&part(0.1), &part(0.99)), News::None);
    }
}
