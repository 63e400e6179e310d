//! Executions whose range may be split, and the tree of a range: its root, its parts, their parts.

use fiec_schemas::ExecutionId;
use fiec_schemas::spread::{Part, Spreading};

use super::Ranges;
use crate::time::Millis;

/// A live execution that may be split, or is a part.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its spread state in the ledger.
    pub spreading: Box<Spreading>,
    /// True if a request to its worker, to cancel or pause it, is still open.
    pub requested: bool,
    /// The epoch in which it last yielded to wait for its parts; 0 if not seen.
    pub waits_since: u64,
    /// Remaining capsules at its last boundary, if its program knows.
    pub left: Option<u64>,
    /// Number of capsules before its first commit, and their time in ms, including the inputs. None
    /// if not seen.
    pub first: Option<(u64, u64)>,
}

impl Member {
    /// The part that it waits for after its own range is done.
    pub fn waits_for(&self) -> Option<&Part> {
        self.spreading.last().filter(|_| self.spreading.waits)
    }

    /// Time to read its inputs, in ms, given the time of a capsule.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn inputs_ms(&self, each_ms: f64) -> f64 {
        let over = |(capsules, ms): (u64, u64)| ms as f64 - capsules as f64 * each_ms;
        self.first.map_or(0.0, over).max(0.0)
    }

    /// Its part with this id.
    pub fn part(&self, id: ExecutionId) -> Option<&Part> {
        self.spreading.parts.iter().find(|part| part.id == id)
    }
}

/// A part whose holder has ended: it is cancelled too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// The person who ended its holder, or the holder's end in words.
    pub who: String,
    /// Time at which the order is repeated.
    pub again: Millis,
}

impl Ranges {
    /// The root of an execution: no part itself, or a part of an unknown holder.
    pub(super) fn root_of(&self, id: ExecutionId) -> ExecutionId {
        let mut root = id;
        // A part is younger than its holder, so only forged ledgers form a cycle.
        for _ in 0..self.members.len() {
            let holder = self.members.get(&root).and_then(|m| m.spreading.part_of);
            match holder.filter(|holder| self.members.contains_key(holder)) {
                Some(holder) => root = holder,
                None => break,
            }
        }
        root
    }

    /// The part that an execution waits for, unless its end is known.
    pub(super) fn awaited_by(&self, id: ExecutionId) -> Option<&Part> {
        let part = self.members.get(&id)?.waits_for()?;
        (!self.ended.contains_key(&part.id)).then_some(part)
    }

    /// The present and future members of a range: the whole tree without executions that wait for
    /// their parts. The second list has the parts that are not known here.
    pub(super) fn those_of(&self, root: ExecutionId) -> (Vec<ExecutionId>, Vec<ExecutionId>) {
        let (mut live, mut unborn, mut stack) = (Vec::new(), Vec::new(), vec![root]);
        let mut steps = 0;
        while let Some(id) = stack.pop() {
            steps += 1;
            if steps > self.members.len() + self.unknown.len() + 1 {
                break;
            }
            let Some(member) = self.members.get(&id) else {
                unborn.push(id);
                continue;
            };
            if self.awaited_by(id).is_none() {
                live.push(id);
            }
            let parts = member.spreading.parts.iter().map(|part| part.id);
            stack.extend(parts.filter(|part| !self.ended.contains_key(part)));
        }
        (live, unborn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fate::Fate;
    use uuid::Uuid;

    fn id(n: u128) -> ExecutionId {
        ExecutionId(Uuid::from_u128(n))
    }

    fn member(part_of: Option<u128>, parts: &[u128], waits: bool) -> Member {
        let part = |n: &u128| Part {
            id: id(*n),
            from: 0,
            to: 1,
        };
        Member {
            spreading: Box::new(Spreading {
                up_to: 4,
                part_of: part_of.map(id),
                splits: 0,
                since: 0,
                end: None,
                waits,
                parts: parts.iter().map(part).collect(),
            }),
            requested: false,
            waits_since: 0,
            left: None,
            first: None,
        }
    }

    #[test]
    fn what_the_first_commit_took_beyond_its_capsules_were_its_inputs() {
        let mut one = member(None, &[], false);
        assert_eq!(one.inputs_ms(100.0), 0.0);
        one.first = Some((3, 2_300));
        assert_eq!(one.inputs_ms(100.0), 2_000.0);
        assert_eq!(one.inputs_ms(900.0), 0.0);
    }

    #[test]
    fn a_tree_counts_those_that_compute_and_parts_that_are_not_known_but_none_that_wait_or_ended() {
        let mut ranges = Ranges::default();
        ranges.members.insert(id(1), member(None, &[2, 3], true));
        ranges
            .members
            .insert(id(2), member(Some(1), &[4, 5], false));
        ranges.members.insert(id(4), member(Some(2), &[], false));
        ranges.ended.insert(id(3), Fate::Completed);
        ranges.unknown.insert(id(5), (id(2), Millis(0)));
        let (mut live, unborn) = ranges.those_of(id(1));
        live.sort();
        assert_eq!((live, unborn), (vec![id(1), id(2), id(4)], vec![id(5)]));
        // It must take the last part back, and waits until that has ended.
        ranges.ended.clear();
        let (live, unborn) = ranges.those_of(id(1));
        assert_eq!((live.len(), unborn.len()), (2, 2));
        assert_eq!(ranges.root_of(id(4)), id(1));
        assert_eq!(ranges.root_of(id(1)), id(1));
    }
}
