//! The automata of one node under one set of thresholds.

use fiec_schemas::{HardwareVector, Signal, Threshold, Thresholds};

use crate::hysteresis::{Automaton, State};
use crate::places::Judged;
use crate::time::Millis;

/// One automaton with the place and the threshold it judges.
#[derive(Debug, Clone)]
pub struct Watched {
    /// Which signal.
    pub signal: Signal,
    /// Which device; none for the node itself.
    pub device: Option<Box<str>>,
    /// The threshold in force.
    pub threshold: Threshold,
    /// Where it stands.
    pub automaton: Automaton,
}

/// All automata of one node under one set of thresholds.
#[derive(Debug, Clone)]
pub struct Watch {
    thresholds: Thresholds,
    watched: Vec<Watched>,
    /// The highest reading of the host against its threshold.
    host_pressure: f64,
}

impl Watch {
    /// Nothing seen yet.
    pub fn new(thresholds: Thresholds, now: Millis) -> Self {
        let watched = thresholds
            .iter()
            .map(|(signal, threshold)| Watched {
                signal: *signal,
                device: None,
                threshold: *threshold,
                automaton: Automaton::new(now),
            })
            .collect();
        Self {
            thresholds,
            watched,
            host_pressure: 0.0,
        }
    }

    /// The thresholds in force.
    pub fn thresholds(&self) -> &Thresholds {
        &self.thresholds
    }

    /// Takes a fresh vector, or `None` where it is stale; true when the node's word changed.
    pub fn observe(&mut self, now: Millis, vector: Option<&HardwareVector>) -> bool {
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
                        automaton: Automaton::new(now),
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
        self.host_pressure = self.pressure_where(|w| w.device.is_none());
        changed
    }

    /// The automata that judge this place: the node's own and its device's, or one of the two.
    pub fn of_place<'a>(&'a self, place: Judged<'a>) -> impl Iterator<Item = &'a Watched> {
        self.watched
            .iter()
            .filter(move |w| place.counts(w.device.as_deref()))
    }

    /// True where anything presses, on the host or on any device.
    pub fn presses(&self) -> bool {
        self.watched
            .iter()
            .any(|w| w.automaton.pressing_since().is_some())
    }

    /// The automaton that keeps new work away from this place, if one does.
    pub fn obstacle<'a>(&'a self, place: Judged<'a>) -> Option<&'a Watched> {
        self.of_place(place)
            .filter(|w| !w.automaton.admits())
            .max_by_key(|w| w.automaton.state().badness())
    }

    /// The signal that has pressed on an execution here for the dwell, counted from the later of
    /// the pressure's start and the execution's arrival.
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

    /// True when what left at `left` because of pressure may come back.
    pub fn admits_return(&self, place: Judged<'_>, left: Millis) -> bool {
        self.of_place(place)
            .filter(|w| w.automaton.value().is_some() || !w.automaton.admits())
            .all(|w| {
                w.automaton
                    .admits_return(left, u64::from(w.threshold.dwell_ms))
            })
    }

    /// The highest reading of a place against its threshold, 0 where nothing is measured.
    pub fn pressure(&self, place: Judged<'_>) -> f64 {
        let host = if place.host { self.host_pressure } else { 0.0 };
        match place.device {
            None => host,
            Some(device) => host.max(self.pressure_where(|w| w.device.as_deref() == Some(device))),
        }
    }

    fn pressure_where(&self, of: impl Fn(&Watched) -> bool) -> f64 {
        self.watched
            .iter()
            .filter(|w| of(w))
            .filter_map(|w| w.automaton.value().map(|v| v / w.threshold.high))
            .fold(0.0, f64::max)
    }

    /// The worst state of all places, and unknown where nothing at all is measured.
    pub fn worst(&self) -> State {
        self.worst_where(|_| true)
    }

    /// The worst state of a place.
    pub fn worst_of(&self, place: Judged<'_>) -> State {
        self.worst_where(|w| place.counts(w.device.as_deref()))
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
            .unwrap_or(State::Unknown {
                was_unviable: false,
            })
    }

    /// Each signal of a place that is not viable, as a sentence.
    pub fn complaints_of(&self, place: Judged<'_>, now: Millis) -> Vec<String> {
        self.of_place(place)
            .filter(|w| !w.automaton.admits())
            .map(|w| w.in_words(now))
            .collect()
    }

    /// Each signal that is not viable, as a sentence.
    pub fn complaints(&self, now: Millis) -> Vec<String> {
        self.watched
            .iter()
            .filter(|w| !w.automaton.admits())
            .map(|w| w.in_words(now))
            .collect()
    }
}

impl Watched {
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
        let state = self.automaton.state().as_str();
        format!("{}{place} is {state}: {value} ({limits}{age})", self.signal)
    }
}
