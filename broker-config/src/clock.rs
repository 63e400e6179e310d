//! This machine's clock against the broker's.
//!
//! Every time in a ledger is to speak of one clock, or a duration between two nodes is off by what
//! their clocks differ. That clock is the broker's, which stamps all that it stores. Its time comes
//! with the answer to a request: it lies between the sending and the coming of the answer, so half
//! of a round trip bounds the error. Between two measurements the monotonic clock goes on, so a step
//! of this machine's clock changes nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::response::Response;
use fiec_schemas::{ClockReading, Timestamp, subjects};
use serde::Deserialize;

use crate::{Broker, BrokerError};

/// Pause between two measurements.
const EVERY: Duration = Duration::from_secs(10);
/// Pause before another measurement after one that failed, or before the second.
const SOON: Duration = Duration::from_secs(1);
/// A measurement may take this long.
const WITHIN: Duration = Duration::from_secs(2);
/// Two machines' monotonic clocks drift apart by at most this much: µs in each second.
const DRIFT_US: u64 = 50;

/// What is known of the broker's clock. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct BrokerClock {
    measured: Arc<Mutex<Option<Measured>>>,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The broker's time at `at`.
    broker: Timestamp,
    at: Instant,
    /// Bound of its error at `at`, in µs.
    within_us: u64,
}

impl Measured {
    fn within_at(&self, now: Instant) -> u64 {
        let age = now.saturating_duration_since(self.at);
        let drift = age.as_secs().saturating_add(1).saturating_mul(DRIFT_US);
        self.within_us.saturating_add(drift)
    }

    fn broker_at(&self, now: Instant) -> Timestamp {
        let age = micros(now.saturating_duration_since(self.at));
        Timestamp::from_micros(self.broker.micros().saturating_add(age))
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl BrokerClock {
    /// The time now, by the broker's clock. It is this machine's time where the two agree as far as
    /// can be measured, or nothing was measured yet.
    pub fn now(&self) -> Timestamp {
        self.stamp(Timestamp::now())
    }

    /// A recent time by this machine's clock, as the broker's clock had it.
    pub fn stamp(&self, local: Timestamp) -> Timestamp {
        self.stamp_at(local, Timestamp::now(), Instant::now())
    }

    fn stamp_at(&self, local: Timestamp, wall: Timestamp, now: Instant) -> Timestamp {
        let off = self
            .reading_at(wall, now)
            .filter(|reading| reading.is_off());
        let ahead_us = off.map_or(0, |reading| reading.ahead_us);
        Timestamp::from_micros(local.micros().saturating_sub(ahead_us))
    }

    /// How far this machine's clock is ahead of the broker's; none before the first measurement.
    pub fn reading(&self) -> Option<ClockReading> {
        self.reading_at(Timestamp::now(), Instant::now())
    }

    fn reading_at(&self, wall: Timestamp, now: Instant) -> Option<ClockReading> {
        let measured = (*self.lock())?;
        let broker = measured.broker_at(now);
        Some(ClockReading {
            ahead_us: wall.micros().saturating_sub(broker.micros()),
            within_us: measured.within_at(now),
        })
    }

    /// Takes a measurement: the broker's time lies somewhere between asking and answer. One that
    /// says less than an earlier one still does is passed over.
    fn learn(&self, asked: Instant, broker: Timestamp, answered: Instant) {
        let half = answered.saturating_duration_since(asked) / 2;
        let measured = Measured {
            broker: Timestamp::from_micros(broker.micros().saturating_add(micros(half))),
            at: answered,
            within_us: u64::try_from(half.as_micros()).unwrap_or(u64::MAX),
        };
        let mut known = self.lock();
        let is_better = known.is_none_or(|before| {
            let expected = before.broker_at(answered).micros();
            let bound = before.within_at(answered);
            let apart = expected.abs_diff(measured.broker.micros());
            // Apart by more than the errors: the broker's clock was set, or another server leads.
            measured.within_us <= bound || apart > bound.saturating_add(measured.within_us)
        });
        if is_better {
            *known = Some(measured);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Measured>> {
        // The value is whole even where a holder panicked.
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the server says of a stream; the rest of it is not needed here.
#[derive(Debug, Deserialize)]
struct StreamTime {
    ts: Timestamp,
}

impl Broker {
    /// What is known of the broker's clock.
    pub fn clock(&self) -> &BrokerClock {
        &self.clock
    }

    /// The time now by the broker's clock, as far as it was measured.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Asks for the time of the server that stamps the ledger.
    ///
    /// # Errors
    /// When it does not answer within two seconds, or has no ledger stream.
    pub async fn measure_clock(&self) -> Result<(), BrokerError> {
        const WHAT: &str = "ask for the broker's time";
        let asked = Instant::now();
        let subject = format!("STREAM.INFO.{}", subjects::LEDGER_STREAM);
        let request = self.js.request::<_, _, Response<StreamTime>>(subject, &());
        let answer = tokio::time::timeout(WITHIN, request).await;
        let answered = Instant::now();
        let answer = answer.map_err(BrokerError::operation(WHAT))?;
        match answer.map_err(BrokerError::operation(WHAT))? {
            Response::Ok(said) => {
                self.clock.learn(asked, said.ts, answered);
                Ok(())
            }
            Response::Err { error } => Err(BrokerError::operation(WHAT)(error)),
        }
    }

    /// Measures the broker's clock every ten seconds, for ever, and warns when this machine's is
    /// off.
    pub async fn keep_clock(self) {
        let (mut rounds, mut was_off) = (0u32, false);
        loop {
            let measured = self.measure_clock().await;
            let failed = measured.is_err();
            if let Err(error) = measured {
                tracing::debug!(%error, "the broker's clock was not measured");
            }
            let reading = self.clock.reading();
            let is_far = reading.is_some_and(|reading| reading.is_far());
            if let Some(reading) = reading.filter(|_| is_far && !was_off) {
                tracing::warn!(
                    ahead_ms = reading.ahead_us / 1_000,
                    "this machine's clock differs from the broker's; times are recorded by the \
                     broker's: set this machine's clock (NTP)"
                );
            }
            was_off = is_far;
            rounds = rounds.saturating_add(1);
            let pause = if failed || rounds < 3 { SOON } else { EVERY };
            tokio::time::sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(micros)
    }

    #[test]
    fn a_clock_that_agrees_is_believed_and_one_that_does_not_is_set_right() {
        let (clock, begin) = (BrokerClock::default(), Instant::now());
        assert!(clock.reading().is_none());
        assert_eq!(clock.stamp_at(at(5), at(7), begin), at(5));
        // A round trip of 2 ms; the broker said 100 s in its middle.
        let answered = begin + Duration::from_millis(2);
        clock.learn(begin, at(100 * SECOND), answered);
        let broker = 100 * SECOND + 1_000;
        for agrees in [broker - 900, broker, broker + 1_000] {
            assert_eq!(clock.stamp_at(at(agrees), at(agrees), answered), at(agrees));
        }
        for ahead in [-3_600 * SECOND, -20_000, 20_000, 3_600 * SECOND] {
            let wall = at(broker + ahead);
            assert_eq!(clock.stamp_at(wall, wall, answered), at(broker));
            // What this machine saw three milliseconds ago.
            let seen = at(broker + ahead - 3_000);
            assert_eq!(clock.stamp_at(seen, wall, answered), at(broker - 3_000));
        }
    }

    #[test]
    fn a_step_between_two_measurements_changes_nothing() {
        let (clock, begin) = (BrokerClock::default(), Instant::now());
        clock.learn(begin, at(0), begin);
        let later = begin + Duration::from_secs(5);
        let stepped = at(5 * SECOND + 3_600 * SECOND);
        assert_eq!(clock.stamp_at(stepped, stepped, later), at(5 * SECOND));
        let reading = clock.reading_at(stepped, later).unwrap();
        assert_eq!(reading.ahead_us, 3_600 * SECOND);
        assert!(reading.is_far());
    }

    #[test]
    fn a_slow_answer_counts_only_if_the_brokers_clock_was_set() {
        let (clock, begin) = (BrokerClock::default(), Instant::now());
        clock.learn(begin, at(0), begin + Duration::from_millis(1));
        let asked = begin + Duration::from_secs(1);
        let answered = asked + Duration::from_secs(1);
        clock.learn(asked, at(SECOND + 10_000), answered);
        let before = clock.reading_at(at(2 * SECOND), answered).unwrap();
        assert!(before.within_us < 1_000, "{before:?}");
        clock.learn(asked, at(500 * SECOND), answered);
        let after = clock.reading_at(at(500 * SECOND), answered).unwrap();
        assert_eq!(after.ahead_us, -500_000);
    }
}
