//! The virtual clock: the next event in order of time, and of planning for equal times.
//!
//! Events of the next seconds lie in slots of a quarter of a millisecond, each unordered until the
//! clock reaches it. Later events lie in a heap. Most events are vectors in flight and the next
//! look at a node; planning one costs one push.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Length of a slot in microseconds, as a power of two.
const SLOT_BITS: u32 = 8;
/// Number of slots, a power of two: about four seconds.
const SLOTS: u64 = 16_384;

/// An event at a moment in microseconds.
#[derive(Debug)]
struct Planned<T> {
    at: u64,
    number: u64,
    what: T,
}

impl<T> PartialEq for Planned<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl<T> Eq for Planned<T> {}
impl<T> PartialOrd for Planned<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Planned<T> {
    // The heap returns the greatest entry first, so the order is reversed.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// All planned events.
#[derive(Debug)]
pub struct Queue<T> {
    /// The current slot, and its remaining events.
    slot: u64,
    present: BinaryHeap<Planned<T>>,
    /// The next slots as a ring, with one bit for each that is not empty.
    soon: Vec<Vec<Planned<T>>>,
    filled: Vec<u64>,
    /// The events after those slots.
    later: BinaryHeap<Planned<T>>,
    number: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            slot: 0,
            present: BinaryHeap::new(),
            soon: (0..SLOTS).map(|_| Vec::new()).collect(),
            filled: vec![0; (SLOTS / 64) as usize],
            later: BinaryHeap::new(),
            number: 0,
        }
    }
}

impl<T> Queue<T> {
    /// Plans an event. An event at `u64::MAX` never happens and is dropped.
    pub fn plan(&mut self, at: u64, what: T) {
        if at == u64::MAX {
            return;
        }
        self.number += 1;
        let number = self.number;
        let planned = Planned { at, number, what };
        let slot = at >> SLOT_BITS;
        if slot <= self.slot {
            self.present.push(planned);
        } else if slot - self.slot < SLOTS {
            let place = slot % SLOTS;
            self.filled[(place / 64) as usize] |= 1 << (place % 64);
            self.soon[place as usize].push(planned);
        } else {
            self.later.push(planned);
        }
    }

    /// The next event and its time.
    pub fn pop(&mut self) -> Option<(u64, T)> {
        if self.present.is_empty() {
            self.advance();
        }
        self.present.pop().map(|p| (p.at, p.what))
    }

    /// Advances the clock to the next slot with an event.
    fn advance(&mut self) {
        let later = self.later.peek().map(|p| p.at >> SLOT_BITS);
        let Some(next) = self.next_filled().into_iter().chain(later).min() else {
            return;
        };
        self.slot = next;
        let place = next % SLOTS;
        self.filled[(place / 64) as usize] &= !(1 << (place % 64));
        // Reuse the empty vector's memory for this slot.
        let empty = std::mem::take(&mut self.present).into_vec();
        let come = std::mem::replace(&mut self.soon[place as usize], empty);
        self.present = BinaryHeap::from(come);
        while self.later.peek().is_some_and(|p| p.at >> SLOT_BITS <= next)
            && let Some(planned) = self.later.pop()
        {
            self.present.push(planned);
        }
    }

    /// The first non-empty slot after the current one.
    fn next_filled(&self) -> Option<u64> {
        let words = self.filled.len() as u64;
        let first = (self.slot + 1) % SLOTS;
        // The first word is read twice: its upper bits first, its lower bits last.
        (0..=words).find_map(|n| {
            let word = (first / 64 + n) % words;
            let mut bits = self.filled[word as usize];
            if n == 0 {
                bits &= u64::MAX << (first % 64);
            }
            let place = word * 64 + u64::from(bits.trailing_zeros());
            let ahead = (place + SLOTS - self.slot % SLOTS) % SLOTS;
            (bits != 0).then_some(self.slot + ahead)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{Draw, Purpose};

    #[test]
    fn what_is_planned_comes_in_order_of_time_and_then_of_planning() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (2, "b"), (u64::MAX, "never")] {
            queue.plan(at, name);
        }
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, [(1, "a"), (2, "b"), (5, "c"), (5, "d")]);
    }

    #[test]
    fn what_is_planned_on_the_way_comes_in_order_too_however_far_ahead() {
        let mut draw = Draw::new(3, Purpose::Scenario);
        let mut queue = Queue::default();
        let mut planned = std::collections::BTreeSet::new();
        let (mut now, mut number) = (0, 0u64);
        for _ in 0..200_000 {
            if draw.chance(0.5) {
                // Up to about twelve days ahead, mostly near.
                let most = 1 << (1 + draw.below(40));
                let at = now + draw.below(most);
                number += 1;
                queue.plan(at, number);
                planned.insert((at, number));
            } else {
                let next = planned.pop_first();
                assert_eq!(queue.pop(), next);
                now = next.map_or(now, |(at, _)| at);
            }
        }
        while let Some(next) = planned.pop_first() {
            assert_eq!(queue.pop(), Some(next));
        }
        assert_eq!(queue.pop(), None);
    }
}
