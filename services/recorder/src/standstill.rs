//! Notices that messages wait in a stream and none is read, or that read messages are not written.

use std::time::{Duration, Instant};

use fiec_schemas::Sequence;

/// After this time without progress, while messages wait, the recorder's health is red. A reader
/// opens its feed anew in much less.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sequence at which reading or writing last moved.
#[derive(Debug)]
pub(crate) struct Standstill {
    /// A stream and the work on it: `FIEC_LEDGER was read`.
    what: &'static str,
    at: Sequence,
    since: Instant,
}

impl Standstill {
    /// `what`: a stream and the work on it, such as `FIEC_LEDGER was read`.
    pub fn new(what: &'static str, now: Instant) -> Self {
        let (at, since) = (0, now);
        Self { what, at, since }
    }

    /// Returns the trouble, if the work stands still at `done` while the stream has messages between
    /// these first and last sequences.
    pub fn check(
        &mut self,
        done: Sequence,
        (first, last): (Sequence, Sequence),
        now: Instant,
    ) -> Option<String> {
        // A stream whose last messages were deleted gives nothing to read.
        let waits = last > done && last >= first;
        if !waits || done != self.at {
            (self.at, self.since) = (done, now);
            return None;
        }
        let still = now.saturating_duration_since(self.since);
        (still >= PATIENCE).then(|| {
            format!(
                "nothing of {} for {} s, from sequence {} on, though messages up to {last} wait: \
                 check that PostgreSQL and nats-server answer and that no session locks the tables \
                 (pg_stat_activity), or restart the recorder",
                self.what,
                still.as_secs(),
                done + 1
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_reads_nothing_while_messages_wait_is_not_well() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut still = Standstill::new("FIEC_LEDGER was read", began);
        assert_eq!(still.check(5, (1, 5), at(0)), None);
        assert_eq!(still.check(5, (1, 5), at(99)), None);
        assert_eq!(still.check(5, (1, 9), at(100)), None);
        assert_eq!(still.check(5, (1, 9), at(105)), None);
        let words = still.check(5, (1, 9), at(111)).unwrap();
        assert!(
            words.contains("FIEC_LEDGER was read for 12 s, from sequence 6"),
            "{words}"
        );
        assert_eq!(still.check(6, (1, 9), at(112)), None);
        assert_eq!(still.check(9, (1, 9), at(200)), None);
        // Everything that was not read has expired.
        assert_eq!(still.check(9, (21, 20), at(300)), None);
    }
}
