//! The automata of one node under one set of thresholds.

use fiec_schemas::{HardwareVector, Signal, Threshold, Thresholds};

use crate::lifecycle::cluster::hysteresis::{Automaton, State};
use crate::lifecycle::cluster::places::Judged;
use crate::time::Millis;

/// State of a place without a reading.
const UNMEASURED: State = State::Unknown {
    was_unviable: false,
};

/// One automaton with its place and threshold.
#[derive(Debug, Clone)]
pub struct Watched {
    /// Its signal.
    pub signal: Signal,
    /// Its device. None for the host.
    pub device: Option<Box<str>>,
    /// The threshold in force.
    pub threshold: Threshold,
    /// The automaton.
    pub automaton: Automaton,
}

/// All automata of one node under one set of thresholds.
#[derive(Debug, Clone)]
pub struct Watch {
    thresholds: Thresholds,
    watched: Vec<Watched>,
    /// Time of the last observation, and whether it had a vector.
    observed: Millis,
    fed: bool,
    /// No state changes before this moment if the readings stay the same.
    settled_until: Millis,
    /// The host's highest reading relative to its threshold.
    host_pressure: f64,
    worst: State,
    presses: bool,
}

impl Watch {
    /// A watch without observations.
    pub fn new(thresholds: Thresholds, now: Millis) -> Self {
        let watched = thresholds
            .iter()
            .map(|(signal, threshold)| Watched {
                signal: *signal,
                device: None,
                threshold: *threshold,
                automaton: Automaton::new(),
            })
            .collect();
        Self {
            thresholds,
            watched,
            observed: now,
            fed: false,
            settled_until: Millis(u64::MAX),
            host_pressure: 0.0,
            worst: UNMEASURED,
            presses: false,
        }
    }

    /// Takes over the history of another watch of the same node, judged under this watch's
    /// thresholds. So a change of thresholds forgets neither a pressure nor a recovery that it does
    /// not affect.
    pub fn inherit(&mut self, other: &Self, now: Millis) {
        for before in &other.watched {
            let Some(threshold) = self.thresholds.get(&before.signal).copied() else {
                continue;
            };
            let mut present = before.clone();
            present.hold(other.observed);
            let automaton = present
                .automaton
                .rejudged(&before.threshold, &threshold, now);
            let same = |w: &&mut Watched| w.signal == before.signal && w.device == before.device;
            match self.watched.iter_mut().find(same) {
                Some(watched) => watched.automaton = automaton,
                None => self.watched.push(Watched {
                    threshold,
                    automaton,
                    ..present
                }),
            }
        }
        self.settle();
        // Signals that the other watch lacks were not observed yet.
        self.settled_until = Millis(0);
    }

    /// All automata with their places and thresholds.
    pub fn watched(&self) -> &[Watched] {
        &self.watched
    }

    /// The thresholds in force.
    pub fn thresholds(&self) -> &Thresholds {
        &self.thresholds
    }

    /// Repeats the last readings, with `fed` if their vector is still fresh. Returns false if they
    /// must be [observed](Watch::observe) because time changes a state.
    pub fn holds(&mut self, now: Millis, fed: bool) -> bool {
        let holds = self.fed == fed && now < self.settled_until;
        if holds {
            self.observed = now;
        }
        holds
    }

    /// Processes a fresh vector, or `None` if it is stale. Returns true if the node's state
    /// changed.
    pub fn observe(&mut self, now: Millis, vector: Option<&HardwareVector>) -> bool {
        for watched in &mut self.watched {
            watched.hold(self.observed);
        }
        (self.observed, self.fed) = (now, vector.is_some());
        if let Some(vector) = vector {
            let devices = vector.readings.iter();
            for reading in devices.filter(|r| r.device.is_some() && !r.is_part()) {
                let known = |w: &Watched| {
                    w.signal == reading.signal && w.device.as_deref() == reading.device.as_deref()
                };
                if let Some(threshold) = self.thresholds.get(&reading.signal)
                    && !self.watched.iter().any(known)
                {
                    self.watched.push(Watched {
                        signal: reading.signal,
                        device: reading.device.as_deref().map(Into::into),
                        threshold: *threshold,
                        automaton: Automaton::new(),
                    });
                }
            }
        }
        let mut changed = false;
        for watched in &mut self.watched {
            let value = vector.and_then(|vector| {
                vector
                    .readings
                    .iter()
                    .find(|r| {
                        r.signal == watched.signal
                            && r.device.as_deref() == watched.device.as_deref()
                    })
                    .and_then(|r| r.value)
            });
            let before = watched.automaton.state().badness();
            watched.automaton.observe(now, value, &watched.threshold);
            changed |= watched.automaton.state().badness() != before;
        }
        self.settle();
        changed
    }

    /// Recomputes the summary of all automata.
    fn settle(&mut self) {
        self.host_pressure = self.pressure_where(|w| w.device.is_none());
        self.worst = self.worst_where(|_| true);
        let presses = |w: &Watched| w.automaton.pressing_since().is_some();
        self.presses = self.watched.iter().any(presses);
        let ends = self.watched.iter().filter_map(Watched::dwells_until);
        self.settled_until = ends.min().unwrap_or(Millis(u64::MAX));
    }

    /// The automata for a place: the node's own, its device's, or both.
    pub fn of_place<'a>(&'a self, place: Judged<'a>) -> impl Iterator<Item = &'a Watched> {
        self.watched
            .iter()
            .filter(move |w| place.counts(w.signal, w.device.as_deref()))
    }

    /// True if any signal of the host or a device presses.
    pub fn presses(&self) -> bool {
        self.presses
    }

    /// The worst automaton that keeps new executions from this place, if any.
    pub fn obstacle<'a>(&'a self, place: Judged<'a>) -> Option<&'a Watched> {
        self.of_place(place)
            .filter(|w| !w.automaton.admits())
            .max_by_key(|w| w.automaton.state().badness())
    }

    /// The signal that has pressed on an execution here for the dwell. The dwell counts from the
    /// start of the pressure or the arrival of the execution, whichever is later.
    pub fn pressing<'a>(
        &'a self,
        place: Judged<'a>,
        now: Millis,
        arrived: Millis,
        floor_ms: u64,
    ) -> Option<&'a Watched> {
        self.of_place(place)
            .filter(|w| {
                let residency = u64::from(w.threshold.dwell_ms).max(floor_ms);
                w.automaton.pressing_since().is_some_and(|since| {
                    now.since(since) >= u64::from(w.threshold.dwell_ms)
                        && now.since(since.max(arrived)) >= residency
                })
            })
            .min_by_key(|w| w.automaton.pressing_since())
    }

    /// The automaton that keeps an execution away that left at `left` because of pressure. Among
    /// several, the last one to recover.
    pub fn unrecovered<'a>(&'a self, place: Judged<'a>, left: Millis) -> Option<&'a Watched> {
        self.of_place(place)
            .filter(|w| w.automaton.value().is_some() || !w.automaton.admits())
            .filter(|w| {
                let mut present = (*w).clone();
                present.hold(self.observed);
                let dwell_ms = u64::from(w.threshold.dwell_ms);
                !present.automaton.admits_return(left, dwell_ms)
            })
            .max_by_key(|w| {
                let dwell_ms = u64::from(w.threshold.dwell_ms);
                w.automaton
                    .recovers_at(dwell_ms)
                    .unwrap_or(Millis(u64::MAX))
            })
    }

    /// The highest reading of a place relative to its threshold; 0 without readings.
    pub fn pressure(&self, place: Judged<'_>) -> f64 {
        let host = if place.host { self.host_pressure } else { 0.0 };
        match place.device {
            None => host,
            Some(_) => {
                let of =
                    |w: &Watched| w.device.is_some() && place.counts(w.signal, w.device.as_deref());
                host.max(self.pressure_where(of))
            }
        }
    }

    fn pressure_where(&self, of: impl Fn(&Watched) -> bool) -> f64 {
        self.watched
            .iter()
            .filter(|w| of(w))
            .filter_map(|w| w.automaton.value().map(|v| v / w.threshold.high))
            .fold(0.0, f64::max)
    }

    /// The worst state of all places; unknown without readings.
    pub fn worst(&self) -> State {
        self.worst
    }

    /// The worst state of a place.
    pub fn worst_of(&self, place: Judged<'_>) -> State {
        self.worst_where(|w| place.counts(w.signal, w.device.as_deref()))
    }

    fn worst_where(&self, of: impl Fn(&Watched) -> bool) -> State {
        let measured = self
            .watched
            .iter()
            .filter(|w| of(w))
            .filter(|w| w.automaton.value().is_some() || !w.automaton.admits());
        measured
            .map(|w| w.automaton.state())
            .max_by_key(|s| s.badness())
            .unwrap_or(UNMEASURED)
    }

    /// One sentence for each signal that makes a place unviable.
    pub fn complaints_of(&self, place: Judged<'_>, now: Millis) -> Vec<String> {
        self.of_place(place)
            .filter(|w| !w.automaton.admits())
            .map(|w| w.in_words(now))
            .collect()
    }

    /// One sentence for each signal that is not viable.
    pub fn complaints(&self, now: Millis) -> Vec<String> {
        self.watched
            .iter()
            .filter(|w| !w.automaton.admits())
            .map(|w| w.in_words(now))
            .collect()
    }
}

impl Watched {
    /// Extends the last reading to this moment.
    fn hold(&mut self, until: Millis) {
        let value = self.automaton.value();
        self.automaton.observe(until, value, &self.threshold);
    }

    /// Time of the next state change under a constant reading, if any.
    fn dwells_until(&self) -> Option<Millis> {
        match self.automaton.state() {
            State::Suspect { since } | State::Recovering { since, .. } => {
                Some(since.plus(u64::from(self.threshold.dwell_ms)))
            }
            State::Unknown { .. } | State::Viable | State::Unviable { .. } => None,
        }
    }

    /// For people: why an execution that left because of pressure may not return, and until when.
    pub fn unrecovered_in_words(&self, now: Millis) -> String {
        let place = self.device.as_deref().map(|d| format!(" of {d}"));
        let place = place.unwrap_or_default();
        let value = self.automaton.value().map_or_else(
            || "not measured".to_owned(),
            |v| format!("{:.1} %", v * 100.0),
        );
        let Threshold { low, dwell_ms, .. } = self.threshold;
        let low = format!("low {:.1} %", low * 100.0);
        let until = match self.automaton.recovers_at(u64::from(dwell_ms)) {
            Some(at) => format!(
                "it may return in {} ms if that stays below low",
                at.since(now)
            ),
            None => format!("it may return {dwell_ms} ms after that falls below low"),
        };
        format!(
            "it was left because of pressure, and {}{place} has not recovered for the dwell since: \
             {value} ({low}, dwell {dwell_ms} ms); {until}",
            self.signal
        )
    }

    /// One sentence for people.
    pub fn in_words(&self, now: Millis) -> String {
        let place = self
            .device
            .as_deref()
            .map(|d| format!(" of {d}"))
            .unwrap_or_default();
        let value = self.automaton.value().map_or_else(
            || "not measured".to_owned(),
            |v| format!("{:.1} %", v * 100.0),
        );
        let Threshold {
            high,
            low,
            dwell_ms,
        } = self.threshold;
        let limits = format!(
            "high {:.1} %, low {:.1} %, dwell {dwell_ms} ms",
            high * 100.0,
            low * 100.0
        );
        let age = match self.automaton.state() {
            State::Suspect { since } | State::Unviable { since } => {
                format!(", pressing for {} ms", now.since(since))
            }
            State::Recovering { since, .. } => format!(", below low for {} ms", now.since(since)),
            _ => String::new(),
        };
        let state = self.automaton.state().kind();
        format!("{}{place} is {state}: {value} ({limits}{age})", self.signal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn vector(memory: f64, stall: f64) -> HardwareVector {
        let reading = |signal: &str, value: f64| {
            json!({"signal": signal, "value": value, "unit": "ratio", "source": "test",
                "at": "2026-01-01T00:00:00.000000Z"})
        };
        serde_json::from_value(json!({
            "v": 1, "node": "n", "instance": "00000000-0000-0000-0000-000000000001", "count": 1,
            "at": "2026-01-01T00:00:00.000000Z", "slots": 1, "running_count": 0,
            "queued_count": 0,
            "readings": [reading("memory", memory), reading("memory_stall", stall)],
        }))
        .unwrap()
    }

    fn thresholds() -> Thresholds {
        let threshold = |high, low, dwell_ms| Threshold {
            high,
            low,
            dwell_ms,
        };
        Thresholds::from([
            (Signal::Memory, threshold(0.9, 0.7, 1_000)),
            (Signal::MemoryStall, threshold(0.5, 0.3, 0)),
        ])
    }

    #[test]
    fn the_signal_that_keeps_an_execution_away_is_named_with_the_time_of_its_return() {
        let mut watch = Watch::new(thresholds(), Millis(0));
        let observe = |watch: &mut Watch, at: u64, memory: f64| {
            watch.observe(Millis(at), Some(&vector(memory, 0.1)));
            let unrecovered = watch.unrecovered(Judged::HOST, Millis(400));
            unrecovered.map(|w| w.unrecovered_in_words(Millis(at)))
        };
        // A new watch between low and high: there was no pressure.
        assert_eq!(observe(&mut watch, 100, 0.8), None);
        assert!(observe(&mut watch, 300, 0.95).is_some());
        let words = observe(&mut watch, 500, 0.8).unwrap();
        assert!(words.contains("memory has not recovered"), "{words}");
        assert!(
            words.contains("80.0 % (low 70.0 %, dwell 1000 ms); it may return 1000 ms after"),
            "{words}"
        );
        observe(&mut watch, 600, 0.6);
        let words = observe(&mut watch, 900, 0.6).unwrap();
        assert!(words.contains("it may return in 700 ms"), "{words}");
        assert_eq!(observe(&mut watch, 1_600, 0.6), None);
    }

    proptest! {
        /// Observing rarely while readings hold gives the same states as observing all the time.
        #[test]
        fn readings_that_hold_are_as_good_as_observed(
            steps in prop::collection::vec(
                (1u64..700, prop::option::weighted(0.4, (0u8..5, 0u8..3))),
                1..60,
            ),
        ) {
            let mut now = Millis(100_000);
            let mut all_the_time = Watch::new(thresholds(), now);
            let mut at_times = all_the_time.clone();
            let mut told = None;
            for (ms, news) in steps {
                now = now.plus(ms);
                if let Some((memory, stall)) = news {
                    let memory = [None, Some(0.5), Some(0.6), Some(0.8), Some(0.95)][usize::from(memory)];
                    told = memory.map(|m| vector(m, [0.1, 0.4, 0.6][usize::from(stall)]));
                }
                let before = all_the_time.observe(now, told.as_ref());
                let held = news.is_none() && at_times.holds(now, told.is_some());
                let changed = !held && at_times.observe(now, told.as_ref());
                prop_assert_eq!(before, changed);
                let of = |w: &Watch| {
                    let states: Vec<_> = w.watched.iter().map(|w| w.automaton.state()).collect();
                    let back = [0, 500, 1_500, 3_000].map(|ago| {
                        w.unrecovered(Judged::HOST, Millis(now.0 - ago)).is_none()
                    });
                    (states, w.worst(), w.presses(), w.pressure(Judged::HOST), back)
                };
                prop_assert_eq!(of(&all_the_time), of(&at_times));
            }
        }
    }
}
