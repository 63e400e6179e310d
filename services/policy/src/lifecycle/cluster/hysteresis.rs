//! The automaton of one signal at one place under one threshold.
//!
//! ```text
//!              < high                ≥ high
//!   unknown ──────────▶ viable ────────────────▶ suspect(since)
//!      │  ≥ high          ▲  ▲ ◀──── < high ─────────┘ │
//!      └──▶ suspect       │                            │ ≥ high for the dwell
//!                         │ < low for the dwell        ▼
//!                         └── recovering(since) ◀── unviable(since)
//!                                   └──── ≥ low ──────▶┘        < low: recovering
//!   any ── no fresh reading ──▶ unknown(was unviable?)
//!   unknown(was unviable): ≥ low ▶ unviable, < low ▶ recovering with a full dwell before it
//! ```
//!
//! * A suspect becomes viable at the first reading below `high`: the band between `low` and `high`
//!   is no pressure. Once unviable, that band is no relief either. Only readings below `low` count,
//!   and one reading at or above `low` restarts the recovery.
//! * `since` of suspect and unviable is the start of the pressure.
//! * A stale, missing or non-numeric reading makes the place unknown, never recovered.
//! * A reading holds until the next one. The caller feeds it again as time passes.

use fiec_schemas::Threshold;
use fiec_schemas::messages::Viability;

use crate::time::Millis;

/// State of an automaton.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// No fresh reading.
    Unknown {
        /// True if it was unviable or recovering before. Then only a full recovery makes it viable.
        was_unviable: bool,
    },
    /// Below the threshold.
    Viable,
    /// At or above `high`, not yet for the dwell.
    Suspect {
        /// Start of the pressure.
        since: Millis,
    },
    /// At or above `high` for the dwell, and not recovered.
    Unviable {
        /// Start of the pressure.
        since: Millis,
    },
    /// Below `low`, not yet for the dwell.
    Recovering {
        /// Start of the readings below `low`.
        since: Millis,
        /// Start of the pressure.
        pressed: Millis,
    },
}

impl State {
    /// The state without its times, as messages have it.
    pub fn kind(self) -> Viability {
        match self {
            State::Unknown { .. } => Viability::Unknown,
            State::Viable => Viability::Viable,
            State::Suspect { .. } => Viability::Suspect,
            State::Unviable { .. } => Viability::Unviable,
            State::Recovering { .. } => Viability::Recovering,
        }
    }

    /// Rank by which the worst of several states is chosen.
    pub fn badness(self) -> u8 {
        match self {
            State::Viable => 0,
            State::Unknown {
                was_unviable: false,
            } => 1,
            State::Suspect { .. } => 2,
            State::Recovering { .. } => 3,
            State::Unknown { was_unviable: true } => 4,
            State::Unviable { .. } => 5,
        }
    }
}

/// One signal at one place under one threshold.
#[derive(Debug, Clone, PartialEq)]
pub struct Automaton {
    state: State,
    value: Option<f64>,
    below_low_since: Option<Millis>,
    last_pressed: Option<Millis>,
    last_calm: Option<Millis>,
}

impl Default for Automaton {
    fn default() -> Self {
        Self::new()
    }
}

impl Automaton {
    /// A new automaton: unknown.
    pub fn new() -> Self {
        Self {
            state: State::Unknown {
                was_unviable: false,
            },
            value: None,
            below_low_since: None,
            last_pressed: None,
            last_calm: None,
        }
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The last fresh reading.
    pub fn value(&self) -> Option<f64> {
        self.value
    }

    /// Time since which all readings have been below `low`.
    pub fn below_low_since(&self) -> Option<Millis> {
        self.below_low_since
    }

    /// Start of the pressure if the place is suspect or unviable.
    pub fn pressing_since(&self) -> Option<Millis> {
        match self.state {
            State::Suspect { since } | State::Unviable { since } => Some(since),
            _ => None,
        }
    }

    /// True if a new execution may start here.
    pub fn admits(&self) -> bool {
        matches!(
            self.state,
            State::Viable
                | State::Unknown {
                    was_unviable: false
                }
        )
    }

    /// True if an execution that left at `left` because of pressure may return. One of three must
    /// hold. The signal has since been below `low` for the dwell. Or it had not pressed for twice
    /// the dwell before `left`. Or it is viable and has never pressed under this watch.
    pub fn admits_return(&self, left: Millis, dwell_ms: u64) -> bool {
        let recovered = self.last_calm.is_some_and(|calm| calm > left);
        let innocent = match self.last_pressed {
            Some(pressed) => pressed.plus(2 * dwell_ms) < left,
            None => matches!(self.state, State::Viable),
        };
        recovered || innocent
    }

    /// Time of the recovery if the readings stay below `low`. None above `low`.
    pub fn recovers_at(&self, dwell_ms: u64) -> Option<Millis> {
        Some(self.below_low_since?.plus(dwell_ms))
    }

    /// Judges the same readings under another threshold, at once. Facts that could not have been
    /// observed under the new threshold are dropped.
    ///
    /// * The same threshold: nothing changes.
    /// * At or above the new `high`: it presses. The old start of the pressure counts if the new
    ///   `high` is not above the old one, else the pressure starts now.
    /// * Below a relaxed `high`: viable, since no reading is known to have reached it.
    /// * Below a `high` that is not relaxed: unviable stays unviable. A recovery goes on if the new
    ///   `low` is not below the old one.
    #[must_use]
    pub fn rejudged(&self, old: &Threshold, new: &Threshold, now: Millis) -> Self {
        if old == new {
            return self.clone();
        }
        let mut next = self.clone();
        let Some(value) = self.value else {
            return next;
        };
        let relaxed = new.high > old.high;
        if new.low < old.low {
            next.below_low_since = None;
        }
        next.last_calm = self
            .last_calm
            .filter(|_| new.low >= old.low && new.dwell_ms <= old.dwell_ms);
        next.state = match self.state {
            State::Suspect { since } | State::Unviable { since } if value >= new.high => {
                let since = if relaxed { now } else { since };
                State::Suspect { since }
            }
            _ if value >= new.high => State::Suspect { since: now },
            _ if relaxed => State::Viable,
            State::Suspect { .. } => State::Viable,
            State::Recovering { pressed, .. } if new.low < old.low => {
                State::Unviable { since: pressed }
            }
            same => same,
        };
        // The dwell of the new threshold applies at once.
        next.observe(now, Some(value), new);
        next
    }

    /// Processes a fresh reading, or `None` if there is none.
    pub fn observe(&mut self, now: Millis, value: Option<f64>, threshold: &Threshold) {
        let dwell = u64::from(threshold.dwell_ms);
        let Some(value) = value.filter(|v| v.is_finite()) else {
            let was_unviable = matches!(
                self.state,
                State::Unviable { .. }
                    | State::Recovering { .. }
                    | State::Unknown { was_unviable: true }
            );
            self.state = State::Unknown { was_unviable };
            self.value = None;
            self.below_low_since = None;
            return;
        };
        self.value = Some(value);
        let high = value >= threshold.high;
        let low = value < threshold.low;
        if high {
            self.last_pressed = Some(now);
        }
        self.below_low_since = if low {
            self.below_low_since.or(Some(now))
        } else {
            None
        };
        if self
            .below_low_since
            .is_some_and(|since| now.since(since) >= dwell)
        {
            self.last_calm = Some(now);
        }
        self.state = match self.state {
            State::Unknown {
                was_unviable: false,
            }
            | State::Viable
                if high =>
            {
                State::Suspect { since: now }
            }
            State::Unknown {
                was_unviable: false,
            }
            | State::Viable => State::Viable,
            State::Suspect { .. } if !high => State::Viable,
            State::Unknown { was_unviable: true } if low => State::Recovering {
                since: now,
                pressed: now,
            },
            State::Unknown { was_unviable: true } => State::Unviable { since: now },
            State::Unviable { since } if low => State::Recovering {
                since: now,
                pressed: since,
            },
            State::Recovering { pressed, .. } if !low => State::Unviable { since: pressed },
            same => same,
        };
        self.state = match self.state {
            State::Suspect { since } if now.since(since) >= dwell => State::Unviable { since },
            State::Recovering { since, .. } if now.since(since) >= dwell => State::Viable,
            same => same,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const T: Threshold = Threshold {
        high: 0.9,
        low: 0.7,
        dwell_ms: 1_000,
    };

    fn run(readings: &[(u64, Option<f64>)]) -> Automaton {
        let mut automaton = Automaton::new();
        for (at, value) in readings {
            automaton.observe(Millis(*at), *value, &T);
        }
        automaton
    }

    #[test]
    fn another_threshold_forgets_neither_a_pressure_nor_a_recovery_and_invents_none() {
        let pressed = run(&[(0, Some(0.95)), (600, Some(0.95))]);
        let at = Millis(600);
        let judged = |of: &Automaton, new: Threshold| of.rejudged(&T, &new, at).state();
        let since = State::Suspect { since: Millis(0) };
        assert_eq!(judged(&pressed, Threshold { high: 0.8, ..T }), since);
        let shorter = Threshold { dwell_ms: 500, ..T };
        let unviable = State::Unviable { since: Millis(0) };
        assert_eq!(judged(&pressed, shorter), unviable, "at once");
        let higher = Threshold { high: 0.94, ..T };
        assert_eq!(judged(&pressed, higher), State::Suspect { since: at });
        assert_eq!(
            judged(&pressed, Threshold { high: 0.99, ..T }),
            State::Viable
        );
        let calm = run(&[(0, Some(0.8)), (600, Some(0.8))]);
        let tighter = Threshold { high: 0.75, ..T };
        assert_eq!(judged(&calm, tighter), State::Suspect { since: at });
        let recovering = run(&[(0, Some(0.95)), (1_000, Some(0.95)), (1_100, Some(0.6))]);
        let at = Millis(1_600);
        let dwell = Threshold {
            dwell_ms: 2_000,
            ..T
        };
        let state = recovering.rejudged(&T, &dwell, at).state();
        assert_eq!(state, recovering.state(), "it goes on");
        let lower = Threshold { low: 0.5, ..T };
        let state = recovering.rejudged(&T, &lower, at).state();
        assert_eq!(state, State::Unviable { since: Millis(0) });
    }

    #[test]
    fn a_fresh_automaton_is_unknown_and_its_first_calm_sample_makes_it_viable() {
        assert_eq!(
            run(&[]).state(),
            State::Unknown {
                was_unviable: false
            }
        );
        assert_eq!(run(&[(5, Some(0.8))]).state(), State::Viable);
        assert_eq!(
            run(&[(5, Some(0.9))]).state(),
            State::Suspect { since: Millis(5) }
        );
    }

    #[test]
    fn pressure_must_last_for_the_dwell() {
        assert_eq!(
            run(&[(0, Some(0.95)), (999, Some(0.95))]).state(),
            State::Suspect { since: Millis(0) }
        );
        assert_eq!(
            run(&[(0, Some(0.95)), (1000, Some(0.95))]).state(),
            State::Unviable { since: Millis(0) }
        );
        assert_eq!(
            run(&[(0, Some(0.95)), (500, Some(0.89)), (1000, Some(0.95))]).state(),
            State::Suspect {
                since: Millis(1000)
            }
        );
    }

    #[test]
    fn the_band_between_low_and_high_is_no_relief_once_unviable() {
        let unviable = [(0, Some(0.95)), (1000, Some(0.95))];
        let mut a = run(&unviable);
        a.observe(Millis(5_000), Some(0.8), &T);
        assert_eq!(a.state(), State::Unviable { since: Millis(0) });
        a.observe(Millis(6_000), Some(0.6), &T);
        a.observe(Millis(6_900), Some(0.7), &T);
        assert_eq!(
            a.state(),
            State::Unviable { since: Millis(0) },
            "the recovery starts anew"
        );
        a.observe(Millis(7_000), Some(0.6), &T);
        a.observe(Millis(8_000), Some(0.6), &T);
        assert_eq!(a.state(), State::Viable);
    }

    #[test]
    fn unknown_is_never_recovered() {
        let mut a = run(&[
            (0, Some(0.95)),
            (1000, Some(0.95)),
            (1100, Some(0.1)),
            (1900, None),
        ]);
        assert_eq!(a.state(), State::Unknown { was_unviable: true });
        a.observe(Millis(2_500), Some(0.1), &T);
        assert!(!a.admits(), "the full dwell is needed again");
        a.observe(Millis(3_500), Some(0.1), &T);
        assert_eq!(a.state(), State::Viable);
        assert_eq!(
            run(&[(0, Some(f64::NAN))]).state(),
            State::Unknown {
                was_unviable: false
            }
        );
    }

    #[test]
    fn a_signal_that_never_pressed_is_no_reason_to_stay_away_from_a_young_node() {
        // Between low and high, and watched for less than a dwell.
        let a = run(&[(0, Some(0.8)), (500, Some(0.8))]);
        assert!(a.admits_return(Millis(400), 1_000));
        // Suspect: it presses.
        let a = run(&[(0, Some(0.8)), (500, Some(0.95))]);
        assert!(!a.admits_return(Millis(400), 1_000));
        // After a first pressure, only a recovery counts.
        let a = run(&[(0, Some(0.95)), (500, Some(0.8))]);
        assert_eq!(a.state(), State::Viable);
        assert!(!a.admits_return(Millis(400), 1_000));
    }

    #[test]
    fn a_return_needs_calm_after_the_departure() {
        let mut a = run(&[(0, Some(0.5)), (3000, Some(0.95)), (4000, Some(0.95))]);
        assert!(!a.admits_return(Millis(4_000), 1_000));
        a.observe(Millis(5_000), Some(0.5), &T);
        assert!(!a.admits_return(Millis(4_000), 1_000));
        a.observe(Millis(6_000), Some(0.5), &T);
        assert!(a.admits_return(Millis(4_000), 1_000));
    }

    proptest! {
        #[test]
        fn unviable_is_entered_only_after_a_dwell_at_high_and_left_only_after_one_below_low(
            readings in prop::collection::vec((1u64..400, prop::option::weighted(0.9, 0.0f64..1.2)), 1..200)
        ) {
            let mut automaton = Automaton::new();
            let (mut now, mut high_since, mut low_since) = (0, None, None);
            for (gap, value) in readings {
                now += gap;
                let before = automaton.state();
                automaton.observe(Millis(now), value, &T);
                let is_high = value.is_some_and(|v| v >= T.high);
                let is_low = value.is_some_and(|v| v < T.low);
                high_since = if is_high { high_since.or(Some(now)) } else { None };
                low_since = if is_low { low_since.or(Some(now)) } else { None };
                let fell = matches!(before, State::Suspect { .. } | State::Viable | State::Unknown { was_unviable: false });
                if fell && matches!(automaton.state(), State::Unviable { .. }) {
                    prop_assert!(high_since.is_some_and(|s| now - s >= 1_000));
                }
                let sick = matches!(before, State::Unviable { .. } | State::Recovering { .. } | State::Unknown { was_unviable: true });
                if sick && automaton.admits() {
                    prop_assert!(low_since.is_some_and(|s| now - s >= 1_000));
                }
                prop_assert_eq!(automaton.below_low_since(), low_since.map(Millis));
            }
        }

        #[test]
        fn departures_for_pressure_are_bounded_by_the_dwell(
            readings in prop::collection::vec((1u64..400, 0.0f64..1.2), 1..400)
        ) {
            // One execution among two places; it leaves when the dwell has passed since the later
            // of the pressure's start and its own arrival.
            let mut places = [Automaton::new(), Automaton::new()];
            let (mut now, mut here, mut arrived, mut moves) = (0, 0usize, 0, 0u64);
            for (i, (gap, value)) in readings.iter().enumerate() {
                now += gap;
                places[i % 2].observe(Millis(now), Some(*value), &T);
                let pressed = places[here].pressing_since().is_some_and(|s| now - s.0.max(arrived) >= 1_000);
                if pressed && places[1 - here].admits() {
                    here = 1 - here;
                    arrived = now;
                    moves += 1;
                }
            }
            prop_assert!(moves <= now.div_ceil(1_000) + 1, "{moves} moves in {now} ms");
        }
    }
}
