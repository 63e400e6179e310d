//! Back-pressure of the history: which messages of one execution the recorder has not recorded yet,
//! and how far that keeps its commits by time apart.
//!
//! The ledger stream keeps the last 64 messages of an execution. A message that drops out before
//! the recorder has read it is lost to the history. So an execution with 24 unrecorded messages
//! commits at most twice a second, and the interval doubles with each two further messages. It never
//! exceeds the worker's `--longest-commit-interval-seconds`: σ never waits for the history. With
//! the default of a minute the 64 messages last for about half an hour. After that the oldest ones
//! drop out, and the recorder names the gap in `ledger_gaps`.
//!
//! Only messages whose sequence this worker knows count. `commit: every k` never waits. A worker
//! that never heard a recorder holds nothing back, nor does one whose recorder is silent for
//! [`WORD_HOLDS_FOR`].

use std::collections::VecDeque;
use std::time::Duration;

use fiec_broker::Tip;
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{Sequence, subjects};

use crate::telemetry;

/// Unrecorded messages that slow nothing down.
const FREE: usize = DEPTH * 3 / 8;
const DEPTH: usize = subjects::LEDGER_DEPTH as usize;
/// Interval of commits with 24 unrecorded messages, in ms.
const SHORTEST_MS: f64 = 500.0;
/// A recorder's last word counts for this long. By then an outage has used up the 64 messages of
/// every execution that commits by time, so that rarer commits save nothing more. A recorder that
/// was taken away for good slows nothing down after that.
pub(crate) const WORD_HOLDS_FOR: Duration = Duration::from_secs(3_600);

/// What all runners are told of the ledger stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct LedgerStream {
    /// How far it is recorded.
    pub recorded: Recorded,
    /// Messages up to this sequence will soon drop out of it.
    pub aged: Sequence,
}

/// The recorder's last checkpoint, as it concerns commits by time. The default is that of a worker
/// that heard no recorder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Least interval in ms, by how far the recorder is behind with all executions.
    interval_ms: u32,
    /// Longest interval that an execution's own unrecorded messages lead to, in ms.
    longest_ms: u32,
    /// Last sequence of the ledger stream in PostgreSQL. None if no recorder was heard.
    seq: Option<Sequence>,
}

impl Recorded {
    /// Reads a word that came `age` ago. `newest` is the last sequence of the ledger stream that
    /// this worker has seen; `longest` is the longest interval of routine commits.
    pub(crate) fn of(
        word: &RecorderCheckpoint,
        age: Duration,
        newest: Sequence,
        longest: Duration,
    ) -> Self {
        if age > WORD_HOLDS_FOR {
            return Self::default();
        }
        let longest_ms = u32::try_from(longest.as_millis()).unwrap_or(u32::MAX);
        let behind = telemetry::behind(word, newest);
        Self {
            interval_ms: telemetry::stretch_for(behind).min(longest_ms),
            longest_ms,
            seq: Some(word.seq),
        }
    }

    /// Least interval of commits by time for all executions, in ms.
    pub(crate) fn interval_ms(&self) -> u32 {
        self.interval_ms
    }
}

/// Messages of one execution that the recorder has not recorded, as far as is known here.
#[derive(Debug)]
pub(crate) struct Unrecorded {
    /// Their sequences, ascending.
    seqs: VecDeque<Sequence>,
}

impl Unrecorded {
    /// Counts the tip, if it is known to be stored. Messages before it do not count: how many of
    /// them are recorded is not known here.
    pub fn new(tip: &Tip) -> Self {
        let mut known = Self {
            seqs: VecDeque::new(),
        };
        known.appended(tip.seq);
        known
    }

    /// Notes a message that is stored under this sequence. Sequence 0 stands for a message that is
    /// not known to be stored. A broker that lost messages gives their sequences out again: the
    /// new message replaces them.
    pub fn appended(&mut self, seq: Sequence) {
        if seq == 0 {
            return;
        }
        while self.seqs.back().is_some_and(|last| *last >= seq) {
            self.seqs.pop_back();
        }
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
        let own = interval_of(self.seqs.len()).min(recorded.longest_ms);
        recorded.interval_ms.max(own)
    }
}

fn interval_of(unrecorded: usize) -> u32 {
    match unrecorded {
        ..FREE => 0,
        // Saturates; 64 messages stay far below that.
        _ => (SHORTEST_MS * ((unrecorded - FREE) as f64 / 2.0).exp2()) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Timestamp;

    const LONGEST: Duration = Duration::from_secs(60);

    fn word(seq: Sequence, lag: u64) -> RecorderCheckpoint {
        RecorderCheckpoint {
            seq,
            lag,
            at: Timestamp::default(),
        }
    }

    fn recorded(seq: Sequence) -> Recorded {
        Recorded::of(&word(seq, 0), Duration::ZERO, seq, LONGEST)
    }

    fn appended(seqs: impl IntoIterator<Item = Sequence>) -> Unrecorded {
        let mut own = Unrecorded {
            seqs: VecDeque::new(),
        };
        seqs.into_iter().for_each(|seq| own.appended(seq));
        own
    }

    #[test]
    fn without_a_recorder_commits_go_on_at_the_longest_interval() {
        let mut passed = Duration::ZERO;
        for unrecorded in 0..DEPTH {
            let own = &mut appended(1..=unrecorded as u64);
            passed += Duration::from_millis(own.interval_ms(recorded(0)).into());
        }
        // What the page says: the stream's 64 messages last for half an hour.
        let minutes = passed.as_secs() / 60;
        assert!((25..35).contains(&minutes), "{passed:?}");
        for many in [DEPTH, 1_000] {
            let own = &mut appended(1..=many as u64);
            assert_eq!(own.interval_ms(recorded(0)), 60_000);
        }
    }

    #[test]
    fn the_lag_of_all_executions_stretches_commits_to_the_longest_interval_at_most() {
        let far_behind = |longest| Recorded::of(&word(1, 1 << 40), Duration::ZERO, 1, longest);
        assert_eq!(far_behind(LONGEST).interval_ms(), 60_000);
        assert_eq!(far_behind(Duration::from_secs(2)).interval_ms(), 2_000);
    }

    #[test]
    fn commits_are_as_often_as_before_once_the_recorder_has_caught_up() {
        let mut own = appended(101..=200);
        assert_eq!(own.interval_ms(Recorded::default()), 0);
        assert_eq!(own.interval_ms(recorded(100)), 60_000);
        assert_eq!(own.interval_ms(recorded(200 - FREE as u64)), 500);
        assert_eq!(own.interval_ms(recorded(200)), 0);
    }

    #[test]
    fn only_messages_with_a_known_sequence_count_and_each_of_them_once() {
        let mut own = appended([0, 7, 7, 0]);
        assert_eq!(own.seqs, [7]);
        own.interval_ms(recorded(6));
        assert_eq!(own.seqs, [7]);
        own.interval_ms(recorded(7));
        assert!(own.seqs.is_empty());
        assert_eq!(appended([5, 8, 9, 8]).seqs, [5, 8]);
    }

    #[test]
    fn a_recorder_that_was_taken_away_slows_nothing_down_for_ever() {
        let mut own = appended(1..=64);
        let after = |age| Recorded::of(&word(0, 0), age, 1 << 40, LONGEST);
        assert_eq!(own.interval_ms(after(WORD_HOLDS_FOR)), 60_000);
        let later = WORD_HOLDS_FOR + Duration::from_secs(1);
        assert_eq!(own.interval_ms(after(later)), 0);
    }
}
