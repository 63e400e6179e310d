//! This machine's clock compared with the broker's.
//!
//! All times in a ledger must come from one clock. Otherwise a duration between two nodes is wrong
//! by the difference of their clocks. That clock is the broker's, which stamps all stored messages.
//! The answer to a request carries its time. This time lies between the request and the answer, so
//! half a round trip bounds the error. Between two measurements the clock since boot counts, also
//! while the machine sleeps. So a step of this machine's clock changes nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::response::Response;
use fiec_schemas::{ClockReading, Timestamp, subjects};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;

use crate::{Broker, BrokerError};

/// Pause between two measurements.
const EVERY: Duration = Duration::from_secs(10);
/// Pause after a failed measurement, and before the second one.
const SOON: Duration = Duration::from_secs(1);
/// Time limit of a measurement.
const WITHIN: Duration = Duration::from_secs(2);
/// Largest drift between two machines' clocks since boot, in µs per second.
const DRIFT_US: u64 = 100;

/// The measured clock of the broker. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct BrokerClock {
    measured: Arc<Mutex<Option<Measured>>>,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The broker's time at `up`.
    broker: Timestamp,
    /// Time since this machine's boot.
    up: Duration,
    /// Bound of its error at `up`, in µs.
    within_us: u64,
}

impl Measured {
    fn within_at(&self, up: Duration) -> u64 {
        let age = up.saturating_sub(self.up);
        let drift = age.as_secs().saturating_add(1).saturating_mul(DRIFT_US);
        self.within_us.saturating_add(drift)
    }

    fn broker_at(&self, up: Duration) -> Timestamp {
        let age = micros(up.saturating_sub(self.up));
        Timestamp::from_micros(self.broker.micros().saturating_add(age))
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Time since this machine's boot.
fn up() -> Duration {
    let up = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(up.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(up.tv_nsec).unwrap_or(0))
}

/// Both clocks of this machine at one moment.
#[derive(Debug, Clone, Copy)]
struct Moment {
    wall: Timestamp,
    up: Duration,
    /// Time between the two readings: this thread may have waited for a processor.
    apart: Duration,
}

impl Moment {
    fn now() -> Self {
        let before = up();
        let wall = Timestamp::now();
        let up = up();
        Self {
            wall,
            up,
            apart: up.saturating_sub(before),
        }
    }
}

impl BrokerClock {
    /// The present time by the broker's clock. It is this machine's time if the two agree within
    /// the measurement's error, or before the first measurement.
    pub fn now(&self) -> Timestamp {
        // If this thread waits for a processor between the two readings, the clocks seem to differ.
        // The result is then the broker's time at the second one, which is as good.
        let (wall, up) = (Timestamp::now(), up());
        let apart = Duration::ZERO;
        self.stamp_at(wall, Moment { wall, up, apart })
    }

    /// Converts a recent time of this machine's clock to the broker's clock.
    pub fn stamp(&self, local: Timestamp) -> Timestamp {
        self.stamp_at(local, Moment::now())
    }

    /// Time since the broker stored something at `stored`.
    pub(crate) fn age(&self, stored: time::OffsetDateTime) -> Duration {
        let stored = stored.unix_timestamp_nanos() / 1_000;
        let age = i128::from(self.now().micros()).saturating_sub(stored);
        Duration::from_micros(u64::try_from(age.max(0)).unwrap_or(u64::MAX))
    }

    fn stamp_at(&self, local: Timestamp, now: Moment) -> Timestamp {
        let off = self.reading_at(now).filter(|reading| reading.is_off());
        let ahead_us = off.map_or(0, |reading| reading.ahead_us);
        Timestamp::from_micros(local.micros().saturating_sub(ahead_us))
    }

    /// How far this machine's clock is ahead of the broker's. None before the first measurement.
    pub fn reading(&self) -> Option<ClockReading> {
        self.reading_at(Moment::now())
    }

    fn reading_at(&self, now: Moment) -> Option<ClockReading> {
        let measured = (*self.lock())?;
        let broker = measured.broker_at(now.up);
        let apart_us = u64::try_from(now.apart.as_micros()).unwrap_or(u64::MAX);
        Some(ClockReading {
            ahead_us: now.wall.micros().saturating_sub(broker.micros()),
            within_us: measured.within_at(now.up).saturating_add(apart_us),
        })
    }

    /// Takes a measurement: the broker's time lies between request and answer. A measurement with a
    /// larger error than the present one has is skipped.
    fn learn(&self, asked: Duration, broker: Timestamp, answered: Duration) {
        let half = answered.saturating_sub(asked) / 2;
        let measured = Measured {
            broker: Timestamp::from_micros(broker.micros().saturating_add(micros(half))),
            up: answered,
            within_us: u64::try_from(half.as_micros()).unwrap_or(u64::MAX),
        };
        let mut known = self.lock();
        let is_better = known.is_none_or(|before| {
            let expected = before.broker_at(answered).micros();
            let bound = before.within_at(answered);
            let apart = expected.abs_diff(measured.broker.micros());
            // A difference beyond both errors: the broker's clock was set, or another server leads.
            measured.within_us <= bound || apart > bound.saturating_add(measured.within_us)
        });
        if is_better {
            *known = Some(measured);
        }
    }

    /// As if a measurement had found this machine's clock ahead by this much.
    #[cfg(test)]
    pub(crate) fn set_ahead_for_test(&self, by: Duration) {
        let now = Moment::now();
        let broker = now.wall.micros().saturating_sub(micros(by));
        self.learn(now.up, Timestamp::from_micros(broker), now.up);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Measured>> {
        // The value is complete even if a holder panicked.
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server's answer about a stream, without the unused fields.
#[derive(Debug, Deserialize)]
struct StreamTime {
    ts: Timestamp,
}

impl Broker {
    /// The measured clock of the broker.
    pub fn clock(&self) -> &BrokerClock {
        &self.clock
    }

    /// The present time by the broker's clock, as far as it was measured.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Measures the broker's clock if that was not done before.
    ///
    /// # Errors
    /// As [`Broker::measure_clock`].
    pub(crate) async fn ensure_clock(&self) -> Result<(), BrokerError> {
        match self.clock.reading() {
            Some(_) => Ok(()),
            None => self.measure_clock().await,
        }
    }

    /// Requests the time of the server that stamps the ledger.
    ///
    /// # Errors
    /// When it does not answer within two seconds, or has no ledger stream.
    pub async fn measure_clock(&self) -> Result<(), BrokerError> {
        const WHAT: &str = "ask for the broker's time";
        let asked = up();
        let subject = format!("STREAM.INFO.{}", subjects::LEDGER_STREAM);
        let request = self.js.request::<_, _, Response<StreamTime>>(subject, &());
        let answer = tokio::time::timeout(WITHIN, request).await;
        let answered = up();
        let answer = answer.map_err(BrokerError::operation(WHAT))?;
        match answer.map_err(BrokerError::operation(WHAT))? {
            Response::Ok(said) => {
                self.clock.learn(asked, said.ts, answered);
                Ok(())
            }
            Response::Err { error } => Err(BrokerError::operation(WHAT)(error)),
        }
    }

    /// Measures the broker's clock every ten seconds, forever, and warns when this machine's clock
    /// is off.
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
    const BEGIN: Duration = Duration::from_secs(1_000);

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(micros)
    }

    fn moment(wall: i64, up: Duration) -> Moment {
        Moment {
            wall: at(wall),
            up,
            apart: Duration::ZERO,
        }
    }

    #[test]
    fn a_clock_that_agrees_is_believed_and_one_that_does_not_is_set_right() {
        let clock = BrokerClock::default();
        assert!(clock.reading().is_none());
        assert_eq!(clock.stamp_at(at(5), moment(7, BEGIN)), at(5));
        // A round trip of 2 ms; the broker said 100 s in its middle.
        let answered = BEGIN + Duration::from_millis(2);
        clock.learn(BEGIN, at(100 * SECOND), answered);
        let broker = 100 * SECOND + 1_000;
        for agrees in [broker - 900, broker, broker + 1_000] {
            let stamped = clock.stamp_at(at(agrees), moment(agrees, answered));
            assert_eq!(stamped, at(agrees));
        }
        for ahead in [-3_600 * SECOND, -20_000, 20_000, 3_600 * SECOND] {
            let now = moment(broker + ahead, answered);
            assert_eq!(clock.stamp_at(now.wall, now), at(broker));
            // A time that this machine saw three milliseconds ago.
            let seen = at(broker + ahead - 3_000);
            assert_eq!(clock.stamp_at(seen, now), at(broker - 3_000));
        }
        // A thread that waited between its two readings gives no information about the clocks.
        let late = Moment {
            apart: Duration::from_millis(20),
            ..moment(broker - 20_000, answered)
        };
        assert_eq!(clock.stamp_at(late.wall, late), late.wall);
    }

    #[test]
    fn a_step_between_two_measurements_changes_nothing() {
        let clock = BrokerClock::default();
        clock.learn(BEGIN, at(0), BEGIN);
        let later = BEGIN + Duration::from_secs(5);
        let stepped = moment(5 * SECOND + 3_600 * SECOND, later);
        assert_eq!(clock.stamp_at(stepped.wall, stepped), at(5 * SECOND));
        let reading = clock.reading_at(stepped).unwrap();
        assert_eq!(reading.ahead_us, 3_600 * SECOND);
        assert!(reading.is_far());
    }

    #[test]
    fn a_slow_answer_counts_only_if_the_brokers_clock_was_set() {
        let clock = BrokerClock::default();
        clock.learn(BEGIN, at(0), BEGIN + Duration::from_millis(1));
        let asked = BEGIN + Duration::from_secs(1);
        let answered = asked + Duration::from_secs(1);
        clock.learn(asked, at(SECOND + 10_000), answered);
        let before = clock.reading_at(moment(2 * SECOND, answered)).unwrap();
        assert!(before.within_us < 1_000, "{before:?}");
        clock.learn(asked, at(500 * SECOND), answered);
        let after = clock.reading_at(moment(500 * SECOND, answered)).unwrap();
        assert_eq!(after.ahead_us, -500_000);
    }
}
