//! Ranges of tiles that several executions compute ([`fiec_schemas::spread`]): what is known of
//! holders and their parts, and when one more is worth it.
//!
//! One that computes is told to give the last half of what it has left away when all of this holds:
//!
//! * fewer than `up_to` compute the whole, and all of them do (none waits for a place),
//! * nobody else waits that could use the place, and the tenant's quota has room for one more,
//! * for [`Config::spread_dwell_ms`] without a break there has been a place for one more: on a node
//!   that none of them is on, or on any free device where they are on devices,
//! * by its own rhythm it has at least [`Config::spread_least_ms`] left, and
//!   [`Config::spread_moves`] times what a move and having its inputs cost it, and
//! * of all of them it has the most left, in time.
//!
//! One order at a time for each whole. Where nothing comes of an order, the next one comes later and
//! later.
//!
//! [`Config::spread_dwell_ms`]: crate::Config::spread_dwell_ms
//! [`Config::spread_least_ms`]: crate::Config::spread_least_ms
//! [`Config::spread_moves`]: crate::Config::spread_moves

use std::collections::BTreeMap;

use fiec_schemas::ExecutionId;
use fiec_schemas::spread::{Part, Spreading};

use crate::holds::Fate;
use crate::time::Millis;

/// The longest time between two orders of which nothing comes, in doublings of the first.
const DOUBLINGS: u32 = 6;

/// A live execution that may be split, or is a part.
#[derive(Debug, Clone)]
pub struct Member {
    /// As its ledger says.
    pub spreading: Box<Spreading>,
    /// Something was asked of its holder and is not done yet.
    pub requested: bool,
    /// The epoch under which it last yielded to its parts; 0 where that was not seen.
    pub waits_since: u64,
    /// Capsules left to it at its last boundary, where its program knows.
    pub left: Option<u64>,
    /// Capsules before its first commit, and what they took in milliseconds, its inputs included;
    /// none where that was not seen.
    pub first: Option<(u64, u64)>,
}

impl Member {
    /// The part that it waits for: it has done all that it kept.
    pub fn waits_for(&self) -> Option<&Part> {
        self.spreading.last().filter(|_| self.spreading.waits)
    }

    /// What it took to have its inputs, in milliseconds, where a capsule takes so long.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn inputs_ms(&self, each_ms: f64) -> f64 {
        let over = |(capsules, ms): (u64, u64)| ms as f64 - capsules as f64 * each_ms;
        self.first.map_or(0.0, over).max(0.0)
    }

    /// Its part of this name.
    pub fn part(&self, id: ExecutionId) -> Option<&Part> {
        self.spreading.parts.iter().find(|part| part.id == id)
    }
}

/// One that was told to split.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Which.
    pub execution: ExecutionId,
    /// Under which epoch.
    pub epoch: u64,
    /// How often it had been split before.
    pub splits: u32,
    /// When.
    pub at: Millis,
    /// It should have done so by then.
    pub until: Millis,
    /// Why its holder will not.
    pub refused: Option<String>,
}

/// How a whole grows; kept under the execution that is no part.
#[derive(Debug, Clone, Default)]
pub struct Growth {
    /// Since when, without a break, there has been a place for one more.
    pub room_since: Option<Millis>,
    /// Who was told to split.
    pub asked: Option<Asked>,
    /// Nobody is told to before.
    pub not_before: Millis,
    /// Why nothing came of the last order.
    pub because: String,
    /// Orders in a row of which nothing came.
    pub vain: u32,
    /// Why nobody is told to, as of the last look.
    pub stays: Option<Stay>,
}

impl Growth {
    /// Nothing has come of the last order: the next one comes after `ms`, doubled for each in a row.
    pub fn in_vain(&mut self, now: Millis, ms: u64) {
        let asked = self.asked.take();
        let because = asked.and_then(|asked| asked.refused);
        self.because = because.unwrap_or_else(|| "it was not split in time".to_owned());
        self.not_before = now.plus(ms.saturating_mul(1 << self.vain.min(DOUBLINGS)));
        self.vain = self.vain.saturating_add(1);
    }

    /// The last order was carried out.
    pub fn grown(&mut self) {
        *self = Self::default();
    }
}

/// Why a whole is not spread further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stay {
    /// As many compute it as may.
    Full,
    /// This one of them does not compute yet, or not now.
    Settling(ExecutionId),
    /// This one was told to split.
    Asked(ExecutionId),
    /// What is left, and what a capsule takes, is not known yet.
    Unknown,
    /// So much is left to the one with the most, and less than that is not worth it, in
    /// milliseconds.
    Short {
        /// What is left.
        left_ms: u64,
        /// What must be.
        least_ms: u64,
    },
    /// Others wait that could use the place.
    Others,
    /// The tenant's quota.
    Quota(String),
    /// There is no place.
    NoRoom,
    /// There is one, not for long enough.
    Soon,
    /// Nothing has come of the last order; in so many milliseconds there may be another.
    Later {
        /// How long.
        ms: u64,
        /// Why nothing came of it.
        because: String,
    },
}

impl Stay {
    /// For people.
    pub fn in_words(&self) -> String {
        match self {
            Stay::Full => "as many compute it as may".to_owned(),
            Stay::Settling(id) => format!("{id} does not compute yet"),
            Stay::Asked(id) => format!("{id} is told to give half of what it has left away"),
            Stay::Unknown => "how long it still takes is not known yet".to_owned(),
            Stay::Short { left_ms, least_ms } => {
                format!("{left_ms} ms are left to the slowest, and {least_ms} ms would be worth it")
            }
            Stay::Others => "others wait that could use the place".to_owned(),
            Stay::Quota(why) => format!("one more is over the tenant's quota ({why})"),
            Stay::NoRoom => "no other place could take one more".to_owned(),
            Stay::Soon => "a place has come free only a moment ago".to_owned(),
            Stay::Later { ms, because } => {
                format!("the last attempt was in vain ({because}); the next one is in {ms} ms")
            }
        }
    }
}

/// One that could be split.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Splittable {
    /// Which.
    pub id: ExecutionId,
    /// Capsules left to it.
    pub left: u64,
    /// What one takes, in milliseconds.
    pub each_ms: f64,
    /// What it takes until one more computes, in milliseconds: a move, and its inputs.
    pub move_ms: f64,
}

impl Splittable {
    /// What it still takes, in milliseconds.
    #[expect(clippy::cast_precision_loss, reason = "a time for a choice")]
    pub fn left_ms(&self) -> f64 {
        self.left as f64 * self.each_ms
    }
}

/// Who is split: the one with the most left, in time, where that is worth it. `least_ms` and
/// `moves`: what must be left at least, and as a multiple of what a move costs.
///
/// # Errors
/// Why nobody is.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times below 2^52, not negative"
)]
pub fn choose(all: &[Splittable], least_ms: u64, moves: u64) -> Result<Splittable, Stay> {
    let divisible = all.iter().filter(|one| one.left >= 2);
    let most = divisible.max_by(|a, b| {
        let by_time = a.left_ms().total_cmp(&b.left_ms());
        by_time.then_with(|| b.id.cmp(&a.id))
    });
    let Some(most) = most else {
        let short = Stay::Short {
            left_ms: all
                .iter()
                .map(|one| one.left_ms() as u64)
                .max()
                .unwrap_or(0),
            least_ms,
        };
        return Err(if all.is_empty() { Stay::Unknown } else { short });
    };
    let least = (least_ms as f64).max(moves as f64 * most.move_ms);
    if most.left_ms() < least {
        return Err(Stay::Short {
            left_ms: most.left_ms() as u64,
            least_ms: least as u64,
        });
    }
    Ok(*most)
}

/// A part whose holder has ended: it ends too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// Who ended its holder, or what became of that.
    pub who: String,
    /// When it is told again.
    pub again: Millis,
}

/// What is remembered.
#[derive(Debug, Default)]
pub struct Memory {
    /// Live executions that may be split, or are parts.
    pub members: BTreeMap<ExecutionId, Member>,
    /// What became of parts that have ended, until their holders take them back.
    pub ended: BTreeMap<ExecutionId, Fate>,
    /// Parts that are not known here, with their holders and when they are looked for (again).
    pub unknown: BTreeMap<ExecutionId, (ExecutionId, Millis)>,
    /// Holders of parts that are not known here, and when their ledgers are looked at (again).
    pub holders: BTreeMap<ExecutionId, Millis>,
    /// Parts whose holders have ended.
    pub orphans: BTreeMap<ExecutionId, Orphan>,
    /// Executions that cannot complete any more, since a part of them did not: which, and why.
    pub failing: BTreeMap<ExecutionId, (ExecutionId, String)>,
    /// How wholes grow.
    pub growth: BTreeMap<ExecutionId, Growth>,
    /// When it was last looked whether something should grow.
    pub looked: Millis,
    /// The member with which the next look begins.
    pub next: Option<ExecutionId>,
}

impl Memory {
    /// True where nothing is to be done.
    pub fn is_idle(&self) -> bool {
        self.members.is_empty()
    }

    /// The execution that is no part, or whose holder is not known here.
    pub fn root_of(&self, id: ExecutionId) -> ExecutionId {
        let mut root = id;
        // Each is a part of one that was there before: there is no circle, but for forged ledgers.
        for _ in 0..self.members.len() {
            let holder = self.members.get(&root).and_then(|m| m.spreading.part_of);
            match holder.filter(|holder| self.members.contains_key(holder)) {
                Some(holder) => root = holder,
                None => break,
            }
        }
        root
    }

    /// The part that an execution waits for, which has not ended as far as is known.
    pub fn awaited_by(&self, id: ExecutionId) -> Option<&Part> {
        let part = self.members.get(&id)?.waits_for()?;
        (!self.ended.contains_key(&part.id)).then_some(part)
    }

    /// Those that compute a whole, or will: all of the tree but what waits for its parts. The second
    /// are parts that are not known here.
    pub fn those_of(&self, root: ExecutionId) -> (Vec<ExecutionId>, Vec<ExecutionId>) {
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
    use uuid::Uuid;

    fn id(n: u128) -> ExecutionId {
        ExecutionId(Uuid::from_u128(n))
    }

    fn one(n: u128, left: u64, each_ms: f64) -> Splittable {
        Splittable {
            id: id(n),
            left,
            each_ms,
            move_ms: 100.0,
        }
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
    fn the_one_with_the_most_left_in_time_is_split_whatever_the_number_of_its_tiles() {
        let all = [one(1, 100, 20.0), one(2, 10, 400.0), one(3, 1, 90_000.0)];
        assert_eq!(choose(&all, 2_000, 2).map(|s| s.id), Ok(id(2)));
        // Of equals the same one everywhere.
        let all = [one(2, 100, 50.0), one(1, 100, 50.0)];
        assert_eq!(choose(&all, 2_000, 2).map(|s| s.id), Ok(id(1)));
    }

    #[test]
    fn what_is_nearly_done_or_dear_to_move_or_of_one_piece_is_not_split() {
        let short = |left_ms, least_ms| Err(Stay::Short { left_ms, least_ms });
        assert_eq!(choose(&[one(1, 10, 100.0)], 2_000, 2), short(1_000, 2_000));
        let dear = Splittable {
            move_ms: 5_000.0,
            ..one(1, 90, 100.0)
        };
        assert_eq!(choose(&[dear], 2_000, 2), short(9_000, 10_000));
        assert_eq!(choose(&[one(1, 1, 9_000.0)], 2_000, 2), short(9_000, 2_000));
        assert_eq!(choose(&[], 2_000, 2), Err(Stay::Unknown));
    }

    #[test]
    fn a_tree_counts_those_that_compute_and_parts_that_are_not_known_but_none_that_wait_or_ended() {
        let mut memory = Memory::default();
        memory.members.insert(id(1), member(None, &[2, 3], true));
        memory
            .members
            .insert(id(2), member(Some(1), &[4, 5], false));
        memory.members.insert(id(4), member(Some(2), &[], false));
        memory.ended.insert(id(3), Fate::Completed);
        memory.unknown.insert(id(5), (id(2), Millis(0)));
        let (mut live, unborn) = memory.those_of(id(1));
        live.sort();
        assert_eq!((live, unborn), (vec![id(1), id(2), id(4)], vec![id(5)]));
        // It is to take the last one back. Before that one has ended, it waits.
        memory.ended.clear();
        let (live, unborn) = memory.those_of(id(1));
        assert_eq!((live.len(), unborn.len()), (2, 2));
        assert_eq!(memory.root_of(id(4)), id(1));
        assert_eq!(memory.root_of(id(1)), id(1));
    }

    #[test]
    fn orders_of_which_nothing_comes_are_given_more_and_more_rarely() {
        let mut growth = Growth::default();
        let waits: Vec<u64> = (0..9)
            .map(|_| {
                growth.in_vain(Millis(1_000), 1_000);
                growth.not_before.since(Millis(1_000))
            })
            .collect();
        assert_eq!(waits[..3], [1_000, 2_000, 4_000]);
        assert_eq!(waits[7..], [64_000, 64_000]);
    }
}
