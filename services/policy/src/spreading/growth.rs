//! When one more execution is worth its cost.
//!
//! A running member is ordered to give away the last half of its remaining range when all of this
//! holds:
//!
//! * fewer than `up_to` members compute the range, and none of them waits for a place,
//! * no other execution waits that could use the place, and the tenant's quota has room for one
//!   more,
//! * for [`SpreadingSettings::dwell_ms`] without a break there has been a place for one more: on a node
//!   without a member, or on any free device if the members run on devices,
//! * by its own rhythm the member has at least [`SpreadingSettings::least_ms`] left,
//! * it has at least [`SpreadingSettings::moves`] times the cost of a move and of its inputs left, and
//! * of all members it has the most time left.
//!
//! Each range has one order at a time. After an order without effect, the delay before the next one
//! doubles.
//!
//! [`SpreadingSettings::dwell_ms`]: crate::SpreadingSettings::dwell_ms
//! [`SpreadingSettings::least_ms`]: crate::SpreadingSettings::least_ms
//! [`SpreadingSettings::moves`]: crate::SpreadingSettings::moves

use fiec_schemas::ExecutionId;

use crate::time::Millis;

/// Most doublings of the delay between orders without effect.
const DOUBLINGS: u32 = 6;

/// An execution that was ordered to split.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its id.
    pub execution: ExecutionId,
    /// The epoch of the order.
    pub epoch: u64,
    /// Number of its splits before the order.
    pub splits: u32,
    /// Time by which it should have split.
    pub until: Millis,
    /// The reason if its holder refuses.
    pub refused: Option<String>,
}

/// Growth of a range, stored under its root execution.
#[derive(Debug, Clone, Default)]
pub struct Growth {
    /// Time since which, without a break, there has been a place for one more.
    pub room_since: Option<Millis>,
    /// The member that was ordered to split.
    pub asked: Option<Asked>,
    /// No order is given before this moment.
    pub not_before: Millis,
    /// The reason why the last order had no effect.
    pub because: String,
    /// Number of orders in a row without effect.
    pub vain: u32,
    /// The reason for no order in the last review.
    pub stays: Option<Stay>,
}

impl Growth {
    /// Notes an order without effect. The next one is delayed by `ms`, doubled for each in a row.
    pub fn in_vain(&mut self, now: Millis, ms: u64) {
        let asked = self.asked.take();
        let because = asked.and_then(|asked| asked.refused);
        self.because = because.unwrap_or_else(|| "it was not split in time".to_owned());
        self.not_before = now.plus(ms.saturating_mul(1 << self.vain.min(DOUBLINGS)));
        self.vain = self.vain.saturating_add(1);
    }

    /// Notes an order that was carried out.
    pub fn grown(&mut self) {
        *self = Self::default();
    }
}

/// Reason why a range is not spread further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stay {
    /// The maximum number of members is reached.
    Full,
    /// This member does not compute yet, or not now.
    Settling(ExecutionId),
    /// This member was ordered to split.
    Asked(ExecutionId),
    /// The remaining range or the time of a capsule is unknown.
    Unknown,
    /// The remaining time of the slowest member is too short to be worth a split.
    Short {
        /// Its remaining time, in ms.
        left_ms: u64,
        /// The shortest time that is worth a split, in ms.
        least_ms: u64,
    },
    /// Other executions wait that could use the place.
    Others,
    /// The tenant's quota.
    Quota(String),
    /// No place is free.
    NoRoom,
    /// A place is free, but not for long enough.
    Soon,
    /// The last order had no effect, and the next one is delayed.
    Later {
        /// The remaining delay, in ms.
        ms: u64,
        /// The reason for the lack of effect.
        because: String,
    },
}

impl Stay {
    /// The words for people.
    pub fn in_words(&self) -> String {
        match self {
            Stay::Full => "it has as many parts as its `spread` allows".to_owned(),
            Stay::Settling(id) => format!("{id} has not started yet"),
            Stay::Asked(id) => {
                format!("{id} has the order to split off half of its remaining tiles")
            }
            Stay::Unknown => "its remaining time is not known yet".to_owned(),
            Stay::Short { left_ms, least_ms } => {
                format!("the slowest part has {left_ms} ms left, and a split needs {least_ms} ms")
            }
            Stay::Others => "other executions wait for the free slot".to_owned(),
            Stay::Quota(why) => format!("one more part would exceed the tenant's quota ({why})"),
            Stay::NoRoom => "no other node can take one more part".to_owned(),
            Stay::Soon => "a slot became free only a moment ago".to_owned(),
            Stay::Later { ms, because } => {
                format!("the last attempt failed ({because}); the next one is in {ms} ms")
            }
        }
    }
}

/// An execution that could be split.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Splittable {
    /// Its id.
    pub id: ExecutionId,
    /// Its remaining capsules.
    pub left: u64,
    /// Time of a capsule, in ms.
    pub each_ms: f64,
    /// Time until one more member computes, in ms: a move, and its inputs.
    pub move_ms: f64,
}

impl Splittable {
    /// Its remaining time, in ms.
    #[expect(clippy::cast_precision_loss, reason = "a time for a choice")]
    pub fn left_ms(&self) -> f64 {
        self.left as f64 * self.each_ms
    }
}

/// Chooses the member to split: the one with the most remaining time, if that is worth it. The
/// remaining time must be at least `least_ms`, and at least `moves` times the cost of a move.
///
/// # Errors
/// The reason why none is split.
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

    #[test]
    fn the_one_with_the_most_left_in_time_is_split_whatever_the_number_of_its_tiles() {
        let all = [one(1, 100, 20.0), one(2, 10, 400.0), one(3, 1, 90_000.0)];
        assert_eq!(choose(&all, 2_000, 2).map(|s| s.id), Ok(id(2)));
        // Ties are broken the same way everywhere.
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
