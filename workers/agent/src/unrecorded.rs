//! Back-pressure of the history: which messages of one execution the recorder has not recorded yet,
//! and how far that keeps its commits by time apart.
//!
//! The ledger stream keeps the last 64 messages of an execution. A message that drops out before
//! the recorder has read it is lost to the history. So an execution with 24 unrecorded
//! messages commits at most twice a second. The interval doubles with every second further one.
//! From 48 on it commits by time only after the recorder has caught up. This lasts for more
//! than an hour; the rest of the 64 is for moves and for the end. `commit: every k` never waits. A
//! worker that never heard a recorder holds nothing back.

use std::collections::VecDeque;

use fiec_broker::Tip;
use fiec_schemas::{Sequence, subjects};

/// Unrecorded messages that slow nothing down.
const FREE: usize = DEPTH * 3 / 8;
/// Unrecorded messages from which commits by time wait for the recorder.
const MOST: usize = DEPTH * 3 / 4;
const DEPTH: usize = subjects::LEDGER_DEPTH as usize;
/// Interval of commits with 24 unrecorded messages, in ms.
const SHORTEST_MS: f64 = 500.0;
/// An interval, in ms, that stands for: not before the recorder has caught up.
const NEVER_MS: u32 = u32::MAX;

/// The recorder's last checkpoint, as it concerns commits by time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Least interval in ms, by how far the recorder is behind with all executions.
    pub interval_ms: u32,
    /// Last sequence of the ledger stream in PostgreSQL. None if no recorder was heard.
    pub seq: Option<Sequence>,
}

/// Messages of one execution that the recorder has not recorded, as far as is known here.
#[derive(Debug)]
pub(crate) struct Unrecorded {
    /// Their sequences, ascending. Messages before this runner count with the last one's sequence.
    seqs: VecDeque<Sequence>,
}

impl Unrecorded {
    /// All messages up to this one count until the recorder has recorded the last of them.
    pub fn new(tip: &Tip) -> Self {
        let earlier = usize::try_from(tip.state.ordinal).unwrap_or(MOST).min(MOST);
        Self {
            seqs: std::iter::repeat_n(tip.seq, earlier).collect(),
        }
    }

    /// Notes an appended message.
    pub fn appended(&mut self, seq: Sequence) {
        self.seqs.push_back(seq);
        if self.seqs.len() > DEPTH {
            self.seqs.pop_front();
        }
    }

    /// Least interval of commits by time, in ms, after this checkpoint.
    pub fn interval_ms(&mut self, recorded: Recorded) -> u32 {
        let Some(seq) = recorded.seq else {
            return recorded.interval_ms;
        };
        while self.seqs.front().is_some_and(|own| *own <= seq) {
            self.seqs.pop_front();
        }
        recorded.interval_ms.max(interval_of(self.seqs.len()))
    }
}

fn interval_of(unrecorded: usize) -> u32 {
    match unrecorded {
        ..FREE => 0,
        MOST.. => NEVER_MS,
        // Saturates, and is far below the limit.
        _ => (SHORTEST_MS * ((unrecorded - FREE) as f64 / 2.0).exp2()) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_hour_without_a_recorder_brings_no_message_beyond_what_the_stream_keeps() {
        let mut passed = Duration::ZERO;
        for unrecorded in 0..MOST {
            passed += Duration::from_millis(interval_of(unrecorded).into());
        }
        assert!(passed > Duration::from_secs(3_600), "{passed:?}");
        assert_eq!(interval_of(MOST), NEVER_MS);
        const { assert!(MOST + 16 <= DEPTH, "room for moves and the end") };
    }

    #[test]
    fn commits_are_as_often_as_before_once_the_recorder_has_caught_up() {
        let word = |seq| Recorded {
            interval_ms: 0,
            seq: Some(seq),
        };
        let mut own = Unrecorded {
            seqs: VecDeque::new(),
        };
        for seq in 101..=200 {
            own.appended(seq);
        }
        assert_eq!(own.interval_ms(Recorded::default()), 0);
        assert_eq!(own.interval_ms(word(100)), NEVER_MS);
        assert_eq!(own.interval_ms(word(200 - FREE as u64)), 500);
        assert_eq!(own.interval_ms(word(200)), 0);
    }
}
