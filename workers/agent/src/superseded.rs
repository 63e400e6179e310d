//! Chunks of a large σ that a newer commit has superseded. They stay in the broker for a while:
//! readers may be fetching them, and a broker that loses the end of a ledger goes back to an earlier
//! commit, which names them. While more than half of the stream is used they stay for a fifteenth of
//! that time: large states that change as a whole would fill it, and stand still.
//!
//! A list is forgotten without a removal in two cases: the queue is full, or the broker has begun a
//! new life, in which a sequence may belong to another execution. The recorder's collector removes
//! these chunks.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fiec_schemas::Sequence;

/// How long they stay. The server's development profile syncs its files every two minutes.
pub const KEPT: Duration = Duration::from_secs(150);
/// The part of that time for which they stay while the stream is crowded: 10 s.
pub const CROWDED_PART: u32 = 15;
/// Most lists, one a commit: over 100 commits a second.
const LISTS: usize = 16_384;
/// Most sequences of all lists together: 8 MiB.
const SEQUENCES: usize = 1 << 20;

/// The superseded chunks of a worker, oldest first.
#[derive(Debug, Default)]
pub struct SupersededChunks(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    lists: VecDeque<List>,
    sequences: usize,
}

#[derive(Debug)]
struct List {
    since: Instant,
    /// The server process in which the sequences are valid.
    server: String,
    sequences: Vec<Sequence>,
}

impl SupersededChunks {
    /// Notes chunks with sequences of this server process.
    pub fn note(&self, server: String, sequences: Vec<Sequence>) {
        if sequences.is_empty() || sequences.len() > SEQUENCES {
            return;
        }
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.sequences += sequences.len();
        queue.lists.push_back(List {
            since: Instant::now(),
            server,
            sequences,
        });
        while queue.lists.len() > LISTS || queue.sequences > SEQUENCES {
            queue.pop();
        }
    }

    /// Whether there is a list that has waited for this long.
    pub fn any_due(&self, after: Duration) -> bool {
        let queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = queue.lists.front();
        oldest.is_some_and(|list| list.since.elapsed() >= after)
    }

    /// Takes the oldest list of this server process, if it has waited for this long.
    pub fn take_due(&self, server: &str, after: Duration) -> Option<Vec<Sequence>> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while queue
            .lists
            .front()
            .is_some_and(|list| list.server != server)
        {
            queue.pop();
        }
        let oldest = queue.lists.front()?;
        let is_due = oldest.since.elapsed() >= after;
        is_due.then(|| queue.pop()).flatten()
    }
}

impl Queue {
    fn pop(&mut self) -> Option<Vec<Sequence>> {
        let list = self.lists.pop_front()?;
        self.sequences -= list.sequences.len();
        Some(list.sequences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn note(chunks: &SupersededChunks, server: &str, sequences: Vec<Sequence>) {
        chunks.note(server.to_owned(), sequences);
    }

    #[test]
    fn chunks_are_due_after_a_while_oldest_first() {
        let chunks = SupersededChunks::default();
        note(&chunks, "s", vec![1, 2]);
        note(&chunks, "s", vec![3]);
        assert_eq!(chunks.take_due("s", KEPT), None);
        assert_eq!(chunks.take_due("s", NOW), Some(vec![1, 2]));
        assert_eq!(chunks.take_due("s", NOW), Some(vec![3]));
        assert_eq!(chunks.take_due("s", NOW), None);
    }

    #[test]
    fn chunks_of_an_earlier_life_of_the_broker_are_forgotten() {
        let chunks = SupersededChunks::default();
        note(&chunks, "before", vec![1]);
        note(&chunks, "now", vec![1]);
        assert_eq!(chunks.take_due("now", NOW), Some(vec![1]));
        assert_eq!(chunks.take_due("now", NOW), None);
    }

    #[test]
    fn the_oldest_are_forgotten_over_the_limits() {
        let chunks = SupersededChunks::default();
        (0..=LISTS as u64).for_each(|n| note(&chunks, "s", vec![n]));
        assert_eq!(chunks.take_due("s", NOW), Some(vec![1]));
        note(&chunks, "s", vec![0; SEQUENCES]);
        assert_eq!(chunks.take_due("s", NOW), Some(vec![0; SEQUENCES]));
        assert_eq!(chunks.take_due("s", NOW), None);
        note(&chunks, "s", vec![0; SEQUENCES + 1]);
        assert_eq!(chunks.take_due("s", NOW), None);
        assert_eq!(chunks.0.lock().unwrap().sequences, 0);
    }
}
