//! Ranges of tiles that several executions share: who has which, folded from what they say.
//!
//! An execution whose work is a range of tiles that know nothing of each other is the **whole**.
//! It, and each **part** that was split off, holds what it has done and what is left:
//!
//! ```text
//! advanced  (holder)            the first tile that is left is done
//! split     (holder → part)     the tail of what is left becomes a part of its own
//! returned  (part)              a part ends early; what it has left is nobody's
//! merged    (nobody → holder)   a piece of that is taken by a holder, at its boundary
//! ```
//!
//! At all times what is done, left, and nobody's of all of them partitions the whole: no tile is
//! lost and none is there twice. A part's id derives from its holder, how often that was split
//! before, and its range; and an event that is heard again changes nothing: whoever sees a `split`
//! may make the part, and all who do make the same one. (By holder and range alone it would be
//! that of an earlier part, where a range came back and is split off once more.)
//!
//! Only the rules are here: no worker and no policy service splits anything yet. Until then a batch
//! whose lines name their ranges of tiles shares a product out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, ExecutionId};
use crate::programs::TileRange;

/// What is heard of one of the executions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SpreadEvent {
    /// This tile, the first one that was left to it, is done and committed.
    Advanced {
        /// Who.
        of: ExecutionId,
        /// Which.
        tile: u64,
    },
    /// The tail of what is left to it is a part's.
    Split {
        /// Who gives.
        of: ExecutionId,
        /// Who has it now: [`part_id`].
        part: ExecutionId,
        /// How often it was split before.
        nth: u32,
        /// The first tile.
        from: u64,
        /// The one behind the last.
        to: u64,
    },
    /// A part has ended with what it has done; what was left is nobody's.
    Returned {
        /// Which.
        part: ExecutionId,
    },
    /// What was nobody's is left to a holder.
    Merged {
        /// Whom.
        into: ExecutionId,
        /// The part that had it.
        part: ExecutionId,
        /// The first tile.
        from: u64,
        /// The one behind the last.
        to: u64,
    },
}

/// Why an event cannot have happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{execution}: {rule}")]
pub struct SpreadError {
    /// Whose event it is.
    pub execution: ExecutionId,
    /// The rule that it breaks.
    pub rule: String,
}

/// What one execution has of the whole. Ranges are in order, not empty, and apart from each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holder {
    /// Done, each tile by this one.
    pub done: Vec<TileRange>,
    /// To be done, from the first tile on.
    pub left: Vec<TileRange>,
    /// It has ended before all that it was given was done.
    pub returned: bool,
    /// How often it was split.
    pub splits: u32,
}

/// The fold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    whole: TileRange,
    first: ExecutionId,
    holders: BTreeMap<ExecutionId, Holder>,
    /// What is nobody's, by the part that had it.
    open: BTreeMap<ExecutionId, Vec<TileRange>>,
    /// Who took which piece of a part.
    taken: BTreeMap<(ExecutionId, u64, u64), ExecutionId>,
}

/// The id of the part that has this range of a holder's, which was split `nth` times before: the
/// same for everybody who derives it. UUIDv8 of BLAKE3.
pub fn part_id(of: ExecutionId, nth: u32, range: TileRange) -> ExecutionId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"part/").update(of.0.as_bytes());
    hasher.update(&nth.to_le_bytes());
    hasher.update(&range.from.to_le_bytes());
    hasher.update(&range.to.to_le_bytes());
    let mut bytes = [0; 16];
    hasher.finalize_xof().fill(&mut bytes);
    ExecutionId(uuid::Builder::from_custom_bytes(bytes).into_uuid())
}

/// How many tiles there are in all.
pub fn count(ranges: &[TileRange]) -> u64 {
    ranges.iter().map(|r| r.to - r.from).sum()
}

fn covers(ranges: &[TileRange], range: TileRange) -> bool {
    ranges
        .iter()
        .any(|r| r.from <= range.from && range.to <= r.to)
}

/// Puts a range among others that it does not overlap.
fn add(ranges: &mut Vec<TileRange>, range: TileRange) {
    let at = ranges.partition_point(|r| r.from < range.from);
    ranges.insert(at, range);
    ranges.dedup_by(|next, before| {
        let touch = before.to == next.from;
        if touch {
            before.to = next.to;
        }
        touch
    });
}

/// Takes a range out; false where it is not there as a whole.
fn remove(ranges: &mut Vec<TileRange>, range: TileRange) -> bool {
    let Some(at) = ranges
        .iter()
        .position(|r| r.from <= range.from && range.to <= r.to)
    else {
        return false;
    };
    let found = ranges.remove(at);
    let (before, behind) = (
        TileRange {
            from: found.from,
            to: range.from,
        },
        TileRange {
            from: range.to,
            to: found.to,
        },
    );
    for rest in [behind, before].into_iter().filter(|r| r.from < r.to) {
        ranges.insert(at, rest);
    }
    true
}

impl Ranges {
    /// One execution has the whole.
    pub fn new(first: ExecutionId, whole: TileRange) -> Self {
        let holder = Holder {
            left: (whole.from < whole.to)
                .then_some(whole)
                .into_iter()
                .collect(),
            ..Holder::default()
        };
        Self {
            whole,
            first,
            holders: BTreeMap::from([(first, holder)]),
            open: BTreeMap::new(),
            taken: BTreeMap::new(),
        }
    }

    /// Who has what.
    pub fn holders(&self) -> &BTreeMap<ExecutionId, Holder> {
        &self.holders
    }

    /// What is nobody's, by the part that had it.
    pub fn open(&self) -> &BTreeMap<ExecutionId, Vec<TileRange>> {
        &self.open
    }

    /// True once every tile is done: the whole may complete.
    pub fn is_done(&self) -> bool {
        self.open.is_empty() && self.holders.values().all(|h| h.left.is_empty())
    }

    /// The range that a holder gives away when it is to be halved: of what is left the last half,
    /// as far as that is one range; none where less than two tiles are left. The tile that it
    /// computes now stays with it.
    pub fn half(&self, of: ExecutionId) -> Option<TileRange> {
        let left = &self.holders.get(&of)?.left;
        let gives = count(left) / 2;
        let last = left.last().filter(|_| gives > 0)?;
        Some(TileRange {
            from: last.to - gives.min(last.to - last.from),
            to: last.to,
        })
    }

    /// The tiles in order, from what each holder has made of what it has done: `made` gives a
    /// holder's digest of a tile.
    ///
    /// # Errors
    /// The first tile that nobody has made.
    pub fn assemble(
        &self,
        mut made: impl FnMut(ExecutionId, u64) -> Option<Digest>,
    ) -> Result<Vec<Digest>, u64> {
        (self.whole.from..self.whole.to)
            .map(|tile| {
                let one = TileRange {
                    from: tile,
                    to: tile + 1,
                };
                let mut holders = self.holders.iter();
                let (id, _) = holders.find(|(_, h)| covers(&h.done, one)).ok_or(tile)?;
                made(*id, tile).ok_or(tile)
            })
            .collect()
    }

    /// Takes an event in. One that was heard before changes nothing.
    ///
    /// # Errors
    /// When it cannot have happened; nothing is changed then.
    pub fn apply(&mut self, event: &SpreadEvent) -> Result<(), SpreadError> {
        match *event {
            SpreadEvent::Advanced { of, tile } => self.advanced(of, tile),
            SpreadEvent::Split {
                of,
                part,
                nth,
                from,
                to,
            } => self.split(of, (part, nth), TileRange { from, to }),
            SpreadEvent::Returned { part } => self.returned(part),
            SpreadEvent::Merged {
                into,
                part,
                from,
                to,
            } => self.merged(into, part, from, to),
        }
    }

    fn holder(&mut self, id: ExecutionId) -> Result<&mut Holder, SpreadError> {
        self.holders
            .get_mut(&id)
            .ok_or_else(|| wrong(id, "it has no part of this"))
    }

    fn advanced(&mut self, of: ExecutionId, tile: u64) -> Result<(), SpreadError> {
        let holder = self.holder(of)?;
        let one = TileRange {
            from: tile,
            to: tile + 1,
        };
        if covers(&holder.done, one) {
            return Ok(());
        }
        if holder.left.first().is_none_or(|r| r.from != tile) {
            return Err(wrong(
                of,
                format!("tile {tile} is not the first left to it"),
            ));
        }
        remove(&mut holder.left, one);
        add(&mut holder.done, one);
        Ok(())
    }

    fn split(
        &mut self,
        of: ExecutionId,
        (part, nth): (ExecutionId, u32),
        range: TileRange,
    ) -> Result<(), SpreadError> {
        let TileRange { from, to } = range;
        if from >= to || part != part_id(of, nth, range) {
            return Err(wrong(part, "it is not the part of that range"));
        }
        if self.holders.contains_key(&part) {
            return Ok(());
        }
        let holder = self.holder(of)?;
        if nth != holder.splits {
            let rule = format!("it was split {} times before, not {nth}", holder.splits);
            return Err(wrong(of, rule));
        }
        let is_tail = holder.left.last().is_some_and(|r| r.to == to);
        let keeps = holder.left.first().is_some_and(|r| r.from < from);
        if !is_tail || !keeps || !remove(&mut holder.left, range) {
            let rule = format!("{from} to {to} is not the tail of what is left to it");
            return Err(wrong(of, rule));
        }
        holder.splits += 1;
        let left = vec![range];
        self.holders.insert(
            part,
            Holder {
                left,
                ..Holder::default()
            },
        );
        Ok(())
    }

    fn returned(&mut self, part: ExecutionId) -> Result<(), SpreadError> {
        if part == self.first {
            return Err(wrong(part, "the whole gives nothing back"));
        }
        let holder = self.holder(part)?;
        if holder.returned {
            return Ok(());
        }
        holder.returned = true;
        let left = std::mem::take(&mut holder.left);
        if !left.is_empty() {
            self.open.insert(part, left);
        }
        Ok(())
    }

    fn merged(
        &mut self,
        into: ExecutionId,
        part: ExecutionId,
        from: u64,
        to: u64,
    ) -> Result<(), SpreadError> {
        let range = TileRange { from, to };
        if self.taken.get(&(part, from, to)) == Some(&into) {
            return Ok(());
        }
        if self.holder(into)?.returned {
            return Err(wrong(into, "it has ended"));
        }
        let open = self.open.get_mut(&part);
        if from >= to || !open.is_some_and(|open| remove(open, range)) {
            let rule = format!("{from} to {to} is not what {part} has given back");
            return Err(wrong(into, rule));
        }
        self.open.retain(|_, ranges| !ranges.is_empty());
        self.taken.insert((part, from, to), into);
        add(&mut self.holder(into)?.left, range);
        Ok(())
    }
}

fn wrong(execution: ExecutionId, rule: impl Into<String>) -> SpreadError {
    SpreadError {
        execution,
        rule: rule.into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(from: u64, to: u64) -> TileRange {
        TileRange { from, to }
    }

    fn first() -> ExecutionId {
        ExecutionId(uuid::Uuid::from_u128(1))
    }

    /// How often each tile is somewhere; and it is in order everywhere.
    fn tally(ranges: &Ranges, tiles: u64) -> Vec<u32> {
        let mut seen = vec![0; usize::try_from(tiles).unwrap()];
        let held = ranges.holders.values().flat_map(|h| [&h.done, &h.left]);
        for list in held.chain(ranges.open.values()) {
            for pair in list.windows(2) {
                assert!(pair[0].to < pair[1].from, "{list:?}");
            }
            for r in list {
                assert!(r.from < r.to, "{list:?}");
                (r.from..r.to).for_each(|t| seen[usize::try_from(t).unwrap()] += 1);
            }
        }
        seen
    }

    /// What may happen next, by chance.
    fn next(ranges: &Ranges, kind: u8, pick: usize) -> Option<SpreadEvent> {
        let live: Vec<_> = ranges.holders.iter().filter(|(_, h)| !h.returned).collect();
        let (of, holder) = *live.get(pick % live.len())?;
        match kind {
            0..=3 => Some(SpreadEvent::Advanced {
                of: *of,
                tile: holder.left.first()?.from,
            }),
            4..=5 => {
                let range = ranges.half(*of)?;
                Some(SpreadEvent::Split {
                    of: *of,
                    part: part_id(*of, holder.splits, range),
                    nth: holder.splits,
                    from: range.from,
                    to: range.to,
                })
            }
            6 => (*of != first()).then_some(SpreadEvent::Returned { part: *of }),
            _ => {
                let (part, open) = ranges.open.iter().nth(pick % ranges.open.len().max(1))?;
                let whole = open.first()?;
                // A piece of it, or all.
                let to = whole.from + 1 + pick as u64 % (whole.to - whole.from);
                Some(SpreadEvent::Merged {
                    into: *of,
                    part: *part,
                    from: whole.from,
                    to,
                })
            }
        }
    }

    fn made(tile: u64) -> Digest {
        Digest::of(&tile.to_le_bytes())
    }

    proptest! {
        #[test]
        fn no_tile_is_lost_or_there_twice_whatever_is_split_given_back_and_merged(
            tiles in 1_u64..60,
            steps in prop::collection::vec((0_u8..8, any::<u16>()), 0..300),
        ) {
            let mut ranges = Ranges::new(first(), range(0, tiles));
            let mut heard = Vec::new();
            for (kind, pick) in steps {
                let Some(event) = next(&ranges, kind, usize::from(pick)) else { continue };
                ranges.apply(&event).unwrap();
                heard.push(event);
                prop_assert!(tally(&ranges, tiles).iter().all(|n| *n == 1), "{ranges:?}");
                // Heard again, now or much later, nothing changes.
                let before = ranges.clone();
                for event in [event, heard[usize::from(pick) % heard.len()]] {
                    ranges.apply(&event).unwrap();
                }
                prop_assert_eq!(&ranges, &before);
            }
            // From what was heard anybody comes to the same.
            let mut again = Ranges::new(first(), range(0, tiles));
            heard.iter().for_each(|event| again.apply(event).unwrap());
            prop_assert_eq!(&again, &ranges);
            // What is nobody's goes back to the first, and all that is left is computed.
            for (part, open) in ranges.open.clone() {
                for r in open {
                    let (into, from, to) = (first(), r.from, r.to);
                    ranges.apply(&SpreadEvent::Merged { into, part, from, to }).unwrap();
                }
            }
            for (of, holder) in ranges.holders.clone() {
                for tile in holder.left.iter().flat_map(|r| r.from..r.to) {
                    prop_assert!(!ranges.is_done());
                    prop_assert!(ranges.assemble(|_, t| Some(made(t))).is_err());
                    ranges.apply(&SpreadEvent::Advanced { of, tile }).unwrap();
                }
            }
            prop_assert!(ranges.is_done());
            let whole: Vec<Digest> = (0..tiles).map(made).collect();
            prop_assert_eq!(ranges.assemble(|_, t| Some(made(t))), Ok(whole));
        }
    }

    #[test]
    fn what_cannot_have_happened_is_an_error_and_changes_nothing() {
        let mut ranges = Ranges::new(first(), range(0, 10));
        let other = ExecutionId(uuid::Uuid::from_u128(2));
        let split = |nth, from, to| SpreadEvent::Split {
            of: first(),
            part: part_id(first(), nth, range(from, to)),
            nth,
            from,
            to,
        };
        let part = part_id(first(), 0, range(6, 10));
        ranges.apply(&split(0, 6, 10)).unwrap();
        let before = ranges.clone();
        let merged = |into, from, to| SpreadEvent::Merged {
            into,
            part,
            from,
            to,
        };
        for (event, rule) in [
            (split(1, 4, 5), "not the tail"),
            (split(1, 0, 6), "not the tail"),
            (split(0, 4, 6), "split 1 times"),
            (SpreadEvent::Advanced { of: other, tile: 0 }, "no part"),
            (SpreadEvent::Advanced { of: part, tile: 7 }, "not the first"),
            (SpreadEvent::Returned { part: first() }, "gives nothing"),
            (merged(first(), 6, 10), "has given back"),
        ] {
            let error = ranges.apply(&event).unwrap_err();
            assert!(error.rule.contains(rule), "{error}");
            assert_eq!(ranges, before);
        }
        // Once given back it is taken once, and the same range can be split off once more.
        ranges.apply(&SpreadEvent::Returned { part }).unwrap();
        ranges.apply(&merged(first(), 6, 10)).unwrap();
        assert!(ranges.apply(&merged(part, 6, 10)).is_err());
        ranges.apply(&split(1, 6, 10)).unwrap();
        assert_eq!(ranges.holders().len(), 3);
    }

    #[test]
    fn half_of_what_is_left_is_given_away_as_long_as_a_tile_stays() {
        for (tiles, half) in [(1, None), (2, Some((1, 2))), (9, Some((5, 9)))] {
            let ranges = Ranges::new(first(), range(0, tiles));
            let found = ranges.half(first()).map(|r| (r.from, r.to));
            assert_eq!(found, half, "of {tiles}");
        }
    }
}
