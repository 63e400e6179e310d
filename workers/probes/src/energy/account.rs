//! The charges of one counter. Pure: the caller passes times and increases.
//!
//! The charge of a runner between two moments is the difference of a running integral, V = ∫ dE /
//! max(n, 1). n is the mean number of runners between two readings of the counter. If no runner was
//! active, nobody is charged. So a reading, a start and an end of a runner each have constant cost.
//! A moment counts as the last reading before it: the rest of a runner's end is charged to the next
//! runner.

/// Microjoules of one counter, shared among its runners.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// V in microjoules.
    charged: f64,
    /// Changes whenever the counter could not be followed. An interval that spans a change is
    /// unknown.
    unbroken: u64,
    runners: u32,
    /// ∫ runners dt since the last reading, in microseconds, and its upper end.
    busy: f64,
    busy_until: i64,
    /// Time of the last reading. None while the counter cannot be read.
    read: Option<i64>,
    /// Energy that was used without a runner.
    #[cfg(test)]
    idle: f64,
}

/// The start of a runner's interval.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    charged: f64,
    unbroken: u64,
}

impl Account {
    fn pass(&mut self, now: i64) {
        self.busy += f64::from(self.runners) * (now - self.busy_until).max(0) as f64;
        self.busy_until = now;
    }

    /// Time of the last reading.
    pub(super) fn last_read(&self) -> Option<i64> {
        self.read
    }

    /// Adds a runner.
    pub(super) fn join(&mut self, now: i64) {
        self.pass(now);
        self.runners += 1;
    }

    /// Removes a runner.
    pub(super) fn leave(&mut self, now: i64) {
        self.pass(now);
        self.runners = self.runners.saturating_sub(1);
    }

    /// Notes the counter's increase since the last reading, or none if it is unknown.
    pub(super) fn advance(&mut self, now: i64, increase: Option<u64>) {
        self.pass(now);
        let busy = std::mem::take(&mut self.busy);
        let since = self.read.replace(now);
        match (since, increase) {
            (Some(since), Some(increase)) => {
                let runners = if now > since {
                    busy / (now - since) as f64
                } else {
                    // Two readings in one microsecond.
                    f64::from(self.runners)
                };
                if runners > 0.0 {
                    self.charged += increase as f64 / runners.max(1.0);
                }
                #[cfg(test)]
                if runners == 0.0 {
                    self.idle += increase as f64;
                }
            }
            _ => self.unbroken += 1,
        }
    }

    /// Notes that the counter cannot be read now.
    pub(super) fn lose(&mut self, now: i64) {
        self.pass(now);
        self.busy = 0.0;
        self.unbroken += 1;
        self.read = None;
    }

    /// Starts an interval.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            charged: self.charged,
            unbroken: self.unbroken,
        }
    }

    /// Returns the microjoules since the mark. None if the counter was lost meanwhile, or is lost
    /// now.
    pub(super) fn since(&self, mark: Mark) -> Option<f64> {
        (self.read.is_some() && mark.unbroken == self.unbroken)
            .then_some(self.charged - mark.charged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_that_run_share_in_equal_parts_and_rest_is_charged_to_nobody() {
        let mut account = Account::default();
        account.advance(0, None);
        account.advance(1_000, Some(50));
        account.join(1_000);
        let first = account.mark();
        account.advance(2_000, Some(100));
        account.join(2_000);
        let second = account.mark();
        account.advance(3_000, Some(60));
        account.leave(3_000);
        assert_eq!(account.since(first), Some(130.0));
        assert_eq!(account.since(second), Some(30.0));
        account.leave(3_000);
        account.advance(9_000, Some(7));
        assert_eq!(account.idle, 57.0);
    }

    #[test]
    fn what_is_read_twice_in_one_moment_is_charged_to_those_that_run_then() {
        let mut account = Account::default();
        account.advance(0, None);
        account.join(5);
        let mark = account.mark();
        account.advance(5, Some(0));
        account.advance(5, Some(8));
        assert_eq!(account.since(mark), Some(8.0));
    }

    #[test]
    fn what_spans_a_loss_is_not_known_and_what_comes_after_it_is() {
        let mut account = Account::default();
        account.advance(0, None);
        account.join(0);
        let mark = account.mark();
        account.lose(1_000);
        assert_eq!(account.since(mark), None);
        assert_eq!(account.since(account.mark()), None, "not followed now");
        account.advance(2_000, None);
        assert_eq!(account.since(mark), None);
        let mark = account.mark();
        account.advance(3_000, Some(9));
        assert_eq!(account.since(mark), Some(9.0));
    }

    proptest! {
        #[test]
        fn nothing_is_charged_twice_and_nothing_is_lost(
            steps in proptest::collection::vec((0u32..3, 1i64..5_000, 0u64..10_000), 1..200),
        ) {
            let (mut account, mut now, mut total, mut charged) = (Account::default(), 0, 0, 0.0);
            account.advance(0, None);
            let mut running: Vec<Mark> = Vec::new();
            for (what, passed, increase) in steps {
                now += passed;
                // As in a meter: the counter is read at every start and end.
                account.advance(now, Some(increase));
                total += increase;
                match what {
                    0 => { account.join(now); running.push(account.mark()); }
                    1 => if let Some(mark) = running.pop() {
                        charged += account.since(mark).unwrap();
                        account.leave(now);
                    }
                    _ => {}
                }
            }
            for mark in running {
                charged += account.since(mark).unwrap();
            }
            prop_assert!((charged + account.idle - total as f64).abs() < 1e-3 + 1e-9 * total as f64);
        }
    }
}
