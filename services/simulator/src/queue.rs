//! The virtual clock: what happens next, in order of time and, at one time, of being planned.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Something at a moment in microseconds.
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
    // The heap gives the greatest first; what is earliest must be that.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// All that is planned.
#[derive(Debug)]
pub struct Queue<T> {
    heap: BinaryHeap<Planned<T>>,
    number: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            number: 0,
        }
    }
}

impl<T> Queue<T> {
    /// Plans something; what never happens (`u64::MAX`) is dropped.
    pub fn plan(&mut self, at: u64, what: T) {
        if at == u64::MAX {
            return;
        }
        self.number += 1;
        let number = self.number;
        self.heap.push(Planned { at, number, what });
    }

    /// What comes next, and when.
    pub fn pop(&mut self) -> Option<(u64, T)> {
        self.heap.pop().map(|p| (p.at, p.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planned_comes_in_order_of_time_and_then_of_planning() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (2, "b"), (u64::MAX, "never")] {
            queue.plan(at, name);
        }
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, [(1, "a"), (2, "b"), (5, "c"), (5, "d")]);
    }
}
