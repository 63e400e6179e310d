//! The gang that goes first of those that wait for room, and what is kept for it.
//!
//! A gang needs all its places at once, and on a cluster that is always full no two are ever free
//! at once. So of all gangs that only room keeps from starting the first one, in the order of
//! everything that waits, has what becomes free kept for it once it has waited for
//! `gang_keep_ms`, or once somebody has given way to it. Nothing that comes after it in that order
//! is bound where the gang could be ([`KeptPlaces`]), but for what ends before the gang can begin, or
//! may be told to give way by then ([`First::lets_pass`]). One gang at a time keeps places, and fewer than its
//! members stay free for it: as soon as there are enough it begins.

use std::cmp::Ordering;
use std::sync::Arc;

use fiec_schemas::ExecutionId;

use super::GangKey;
use super::room::KeptPlaces;
use crate::share::order::Rank;
use crate::share::tenants::TenantIx;
use crate::time::Millis;

/// Where something stands among all that waits; less goes first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    /// Its effective priority; the highest goes first.
    pub effective: i32,
    /// Its tenant's share.
    pub share: f64,
    /// Its place within both.
    pub rank: Rank,
}

impl Turn {
    /// In which order two go; less goes first.
    pub fn order(&self, other: &Self) -> Ordering {
        let by_priority = other.effective.cmp(&self.effective);
        let by_share = self.share.total_cmp(&other.share);
        by_priority.then(by_share).then(self.rank.cmp(&other.rank))
    }

    /// True where it goes before the other one.
    pub fn is_before(&self, other: &Self) -> bool {
        self.order(other).is_lt()
    }
}

/// The gang that goes first.
#[derive(Debug, Clone)]
pub struct First {
    /// Which.
    pub key: GangKey,
    /// Its members.
    pub members: Vec<ExecutionId>,
    /// Whose.
    pub tenant: TenantIx,
    /// Where it stands.
    pub turn: Turn,
    /// The priority of its members, without ageing.
    pub priority: i32,
    /// Since when only room keeps it from starting.
    pub since: Millis,
    /// The places where it could be.
    pub places: Arc<KeptPlaces>,
    /// When it will have room, as far as clients have said how long their executions take.
    pub ends: Option<Millis>,
    /// The earliest such moment since places are kept for it. What passes is gone by then: were it
    /// only by `ends`, whatever passes could put that off for what passes next.
    pub until: Option<Millis>,
    /// What becomes free is kept for it.
    pub keeps: bool,
}

/// What something else must have to be bound where a gang could be.
#[derive(Debug, Clone, Copy)]
pub struct Passes {
    /// Its own priority, without ageing.
    pub priority: i32,
    /// How long it takes, where its client has said so, in milliseconds.
    pub takes_ms: Option<u64>,
    /// How long it computes before it may be told to give way, in milliseconds; none where a higher
    /// priority is no reason for that.
    pub gives_way_ms: Option<u64>,
}

impl First {
    /// Takes over how long something may pass, if places were kept for it before.
    pub fn goes_on(&mut self, before: Option<&Self>) {
        let before = before.filter(|before| before.keeps && before.key == self.key);
        let known = before.and_then(|before| before.until);
        self.until = match (known, self.ends) {
            (Some(known), Some(ends)) => Some(known.min(ends)),
            (known, ends) => known.or(ends),
        };
    }

    /// Whether something that comes after it may be bound where it could be, since it is gone by
    /// the time that the gang can begin.
    pub fn lets_pass(&self, now: Millis, other: Passes) -> bool {
        let (Some(ends), Some(until)) = (self.ends, self.until) else {
            return false;
        };
        let left = ends.min(until).since(now);
        let ends = other.takes_ms.is_some_and(|ms| ms <= left);
        let lower = other.priority < self.priority;
        ends || lower && other.gives_way_ms.is_some_and(|ms| ms <= left)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_schemas::{BatchName, Tenant, Timestamp};
    use uuid::Uuid;

    fn turn(effective: i32, share: f64, at: i64) -> Turn {
        Turn {
            effective,
            share,
            rank: Rank {
                deadline: crate::share::order::NEVER,
                level: 0,
                submitted_at: Timestamp::from_micros(at),
                id: ExecutionId(Uuid::from_u128(1)),
            },
        }
    }

    fn first(ends: Option<u64>) -> First {
        First {
            key: (Tenant::new("a").unwrap(), BatchName::new("g").unwrap()),
            members: Vec::new(),
            tenant: TenantIx(0),
            turn: turn(0, 0.0, 5),
            priority: 0,
            since: Millis(0),
            places: Arc::default(),
            ends: ends.map(Millis),
            until: ends.map(Millis),
            keeps: true,
        }
    }

    #[test]
    fn priority_goes_before_share_and_share_before_age() {
        let gang = turn(1, 2.0, 5);
        assert!(turn(2, 9.0, 9).is_before(&gang) && !turn(0, 0.0, 0).is_before(&gang));
        assert!(turn(1, 1.0, 9).is_before(&gang) && !turn(1, 3.0, 0).is_before(&gang));
        assert!(turn(1, 2.0, 4).is_before(&gang) && !turn(1, 2.0, 5).is_before(&gang));
    }

    #[test]
    fn what_passes_does_not_put_off_for_how_long_others_pass() {
        let before = first(Some(10_000));
        let mut later = first(Some(14_000));
        later.goes_on(Some(&before));
        assert_eq!(later.until, Some(Millis(10_000)));
        let mut unknown = first(None);
        unknown.goes_on(Some(&later));
        assert_eq!(unknown.until, Some(Millis(10_000)));
        let mut sooner = first(Some(8_000));
        sooner.goes_on(Some(&unknown));
        assert_eq!(sooner.until, Some(Millis(8_000)));
        let another = First {
            keeps: false,
            ..before
        };
        let mut anew = first(Some(20_000));
        anew.goes_on(Some(&another));
        assert_eq!(anew.until, Some(Millis(20_000)));
    }

    #[test]
    fn only_what_is_gone_by_then_passes() {
        let passes = |ends, priority, takes_ms, gives_way_ms| {
            let other = Passes {
                priority,
                takes_ms,
                gives_way_ms,
            };
            first(ends).lets_pass(Millis(1_000), other)
        };
        assert!(passes(Some(11_000), 0, Some(10_000), None), "it ends");
        assert!(!passes(Some(11_000), 0, Some(10_001), None));
        assert!(!passes(Some(11_000), 0, None, Some(5_000)), "its equal");
        assert!(passes(Some(11_000), -1, None, Some(5_000)));
        assert!(!passes(Some(4_000), -1, None, Some(5_000)), "not by then");
        assert!(!passes(None, -1, Some(1), Some(1)), "nobody knows when");
    }
}
