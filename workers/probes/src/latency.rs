//! L: round trips to the broker and to other nodes, measured by the owner of the connection.
//!
//! The node's own reading uses the round trips to the broker. Round trips to other nodes, from
//! handovers, are parts `peer:<node>` with the same formula, each with its own base.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::reading::Make;

/// Most samples that are kept, both unread ones and those of the window.
const MOST: usize = 256;
/// Most other nodes with readings. The node whose sample is oldest is dropped.
const PEERS: usize = 16;
/// Factor of the window for other nodes, because handovers are rare.
const PEER_WINDOWS: i64 = 20;

/// The parameters of L.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyConfig {
    /// RTT_base in microseconds; without one, the shortest round trip seen since the start.
    pub base_us: Option<f64>,
    /// RTT_ref in microseconds: this much above the base gives L = 0.63, thrice 0.95.
    pub ref_us: f64,
    /// Window of a round trip in milliseconds.
    pub window_ms: u32,
    /// The source, such as `broker ping`.
    pub source: String,
}

impl Default for LatencyConfig {
    fn default() -> Self {
        Self {
            base_us: None,
            ref_us: 10_000.0,
            window_ms: 30_000,
            source: "broker ping".into(),
        }
    }
}

/// Records round trips. Cheap to clone and to call from any thread.
#[derive(Debug, Clone, Default)]
pub struct LatencyRecorder(Arc<Mutex<VecDeque<Sample>>>);

/// Microseconds to another node, or to the broker.
#[derive(Debug)]
struct Sample {
    peer: Option<String>,
    us: f64,
}

impl LatencyRecorder {
    /// Records a round trip to the broker in microseconds.
    pub fn record(&self, us: f64) {
        self.push(None, us);
    }

    /// Records a round trip to another node in microseconds.
    pub fn record_peer(&self, node: &str, us: f64) {
        self.push(Some(node.to_owned()), us);
    }

    fn push(&self, peer: Option<String>, us: f64) {
        if us.is_finite() && us >= 0.0 {
            let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.len() == MOST {
                pending.pop_front();
            }
            pending.push_back(Sample { peer, us });
        }
    }
}

/// Round trips to one peer.
struct Way {
    window: VecDeque<(Timestamp, f64)>,
    lowest: f64,
}

impl Way {
    fn new() -> Self {
        Self {
            window: VecDeque::new(),
            lowest: f64::INFINITY,
        }
    }

    fn add(&mut self, now: Timestamp, us: f64) {
        self.lowest = self.lowest.min(us);
        if self.window.len() == MOST {
            self.window.pop_front();
        }
        self.window.push_back((now, us));
    }

    /// Returns the 95th percentile of the samples younger than `window_ms`. It is rounded down,
    /// because the highest of a few samples proves nothing. None without samples.
    fn p95(&mut self, now: Timestamp, window_ms: i64) -> Option<f64> {
        let oldest = now.micros() - window_ms * 1000;
        self.window.retain(|(at, _)| at.micros() >= oldest);
        let mut sorted: Vec<f64> = self.window.iter().map(|(_, us)| *us).collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get(last * 95 / 100).copied()
    }
}

/// 1 − exp(−max(0, RTT_p95 − RTT_base) / RTT_ref) over the round trips of the window.
pub struct LatencyProbe {
    config: LatencyConfig,
    recorder: LatencyRecorder,
    broker: Way,
    peers: BTreeMap<String, Way>,
}

impl LatencyProbe {
    /// A probe without samples.
    pub fn new(config: LatencyConfig) -> Self {
        Self {
            config,
            recorder: LatencyRecorder::default(),
            broker: Way::new(),
            peers: BTreeMap::new(),
        }
    }

    /// Returns the recorder of round trips.
    pub fn recorder(&self) -> LatencyRecorder {
        self.recorder.clone()
    }

    /// Records one round trip in microseconds.
    pub fn record(&self, us: f64) {
        self.recorder.record(us);
    }
}

impl Probe for LatencyProbe {
    fn name(&self) -> &'static str {
        "latency"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        // A sample gets the time of the read that finds it: no clock is read here.
        let pending: Vec<_> = self
            .recorder
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain(..)
            .collect();
        for Sample { peer, us } in pending {
            let way = match peer {
                None => &mut self.broker,
                Some(node) => self.peers.entry(node).or_insert_with(Way::new),
            };
            way.add(now, us);
        }
        while self.peers.len() > PEERS {
            let last = |way: &Way| way.window.back().map(|(at, _)| *at);
            let oldest = self.peers.iter().min_by_key(|(_, way)| last(way));
            let Some(name) = oldest.map(|(name, _)| name.clone()) else {
                break;
            };
            self.peers.remove(&name);
        }
        let window = i64::from(self.config.window_ms);
        let reference = self.config.ref_us;
        let held = |p95: f64, base: f64| 1.0 - (-(p95 - base).max(0.0) / reference).exp();
        let here = Make {
            signal: Signal::Latency,
            device: None,
            unit: "us",
            source: &self.config.source,
            at: now,
        };
        out.push(match self.broker.p95(now, window) {
            Some(p95) => {
                let base = self.config.base_us.unwrap_or(self.broker.lowest);
                here.value(held(p95, base), p95, None)
            }
            None => here.missing(format!("no round trip within {window} ms")),
        });
        for (node, way) in &mut self.peers {
            // Without recent samples there is nothing to report.
            let Some(p95) = way.p95(now, window * PEER_WINDOWS) else {
                continue;
            };
            let place = format!("peer:{node}");
            let there = Make {
                signal: Signal::Latency,
                device: Some(&place),
                unit: "us",
                source: "handover confirmations",
                at: now,
            };
            out.push(there.value(held(p95, way.lowest), p95, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(ms * 1000)
    }

    fn value(probe: &mut LatencyProbe, ms: i64) -> Reading {
        let mut out = Vec::new();
        probe.read(at(ms), &mut out);
        out.remove(0)
    }

    #[test]
    fn the_ninety_fifth_percentile_is_held_against_base_and_reference() {
        let mut probe = LatencyProbe::new(LatencyConfig {
            base_us: Some(100.0),
            ref_us: 1000.0,
            ..Default::default()
        });
        (0..95).for_each(|_| probe.record(1100.0));
        (0..5).for_each(|_| probe.record(1e9));
        let r = value(&mut probe, 0);
        assert_eq!(r.raw, Some(1100.0));
        assert!((r.value.unwrap() - (1.0 - (-1.0f64).exp())).abs() < 1e-12);
    }

    #[test]
    fn one_slow_round_trip_among_few_is_no_sign() {
        let mut probe = LatencyProbe::new(LatencyConfig::default());
        probe.record(100_000.0);
        probe.record(100.0);
        assert_eq!(value(&mut probe, 0).value, Some(0.0));
        probe.record(100_000.0);
        assert!(value(&mut probe, 1).value.unwrap() > 0.95);
    }

    #[test]
    fn other_nodes_are_parts_with_bases_of_their_own_and_bounded() {
        let mut probe = LatencyProbe::new(LatencyConfig::default());
        let recorder = probe.recorder();
        recorder.record(100.0);
        recorder.record_peer("n2", 300.0);
        recorder.record_peer("n2", 10_300.0);
        recorder.record_peer("n2", 10_300.0);
        let mut out = Vec::new();
        probe.read(at(0), &mut out);
        crate::conformance::check_all(&out).unwrap();
        assert_eq!((out[0].device.as_deref(), out[0].value), (None, Some(0.0)));
        assert_eq!(out[1].device.as_deref(), Some("peer:n2"));
        assert!(out[1].is_part());
        assert!((out[1].value.unwrap() - (1.0 - (-1.0f64).exp())).abs() < 1e-12);
        assert_eq!(out[1].raw, Some(10_300.0));
        for n in 0..2 * PEERS {
            recorder.record_peer(&format!("m{n}"), 1.0);
        }
        out.clear();
        probe.read(at(1), &mut out);
        assert_eq!(out.len(), 1 + PEERS);
        out.clear();
        probe.read(at(30_000 * PEER_WINDOWS + 2), &mut out);
        assert_eq!(out.len(), 1, "{out:?}");
    }

    #[test]
    fn steady_round_trips_are_no_latency_and_samples_age_out_after_the_window() {
        let mut probe = LatencyProbe::new(LatencyConfig::default());
        assert!(value(&mut probe, 0).missing.is_some());
        probe.record(f64::NAN);
        probe.record(250.0);
        assert_eq!(value(&mut probe, 0).value, Some(0.0));
        assert_eq!(value(&mut probe, 30_000).value, Some(0.0));
        assert!(value(&mut probe, 30_001).missing.is_some());
    }
}
