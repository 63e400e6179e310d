//! Notices a reader that reads nothing although messages wait for it.

use std::time::{Duration, Instant};

use fiec_schemas::Sequence;

/// A reader that stands still for so long while messages wait is not well. Several times what a
/// reader needs to open its feed anew.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where a reader was when it last moved.
#[derive(Debug)]
pub(crate) struct Standstill {
    stream: &'static str,
    at: Sequence,
    since: Instant,
}

impl Standstill {
    /// A reader of this stream.
    pub fn new(stream: &'static str, now: Instant) -> Self {
        let (at, since) = (0, now);
        Self { stream, at, since }
    }

    /// Says what is wrong with a reader that has read up to `read` of a stream with these first and
    /// last sequences.
    pub fn check(
        &mut self,
        read: Sequence,
        (first, last): (Sequence, Sequence),
        now: Instant,
    ) -> Option<String> {
        // A stream whose last messages are gone gives nothing to read.
        let waits = last > read && last >= first;
        if !waits || read != self.at {
            (self.at, self.since) = (read, now);
            return None;
        }
        let still = now.saturating_duration_since(self.since);
        (still >= PATIENCE).then(|| {
            format!(
                "nothing of {} was read for {} s, from sequence {} on, though it ends at {last}: \
                 see that PostgreSQL and nats-server answer, or restart the recorder",
                self.stream,
                still.as_secs(),
                read + 1
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
        let mut still = Standstill::new("FIEC_LEDGER", began);
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
