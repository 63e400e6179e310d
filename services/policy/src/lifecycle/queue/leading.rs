//! The leading gang among those that wait for places, and its reservation.
//!
//! A gang needs all its places at once, and on a full cluster no two places are ever free at once.
//! So the gang that is first in queue order, and lacks only places, becomes the *leading gang*.
//! Free places are reserved for it once it has waited for `gang_keep_ms`, or once an execution was
//! preempted for it.
//!
//! Executions with a later turn are not bound where the gang could run ([`KeptPlaces`]). Two
//! exceptions are backfilled: an execution that ends before the gang can start, and one that may be
//! preempted by then ([`Leading::lets_pass`]). Only one gang at a time has a reservation. It starts
//! as soon as there are enough places, so fewer than its members ever stay idle for it.

use std::cmp::Ordering;
use std::sync::Arc;

use fiec_schemas::{ExecutionId, Tenant, Timestamp};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::GangKey;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::placement::kept::KeptPlaces;
use crate::lifecycle::queue::order::{self, Discipline, Rank};
use crate::lifecycle::queue::regret::residency_ms;
use crate::time::Millis;
use crate::time::seconds;

/// The turn of a gang or an execution in queue order; the smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    /// Its effective priority; the highest goes first.
    pub effective: i32,
    /// Its tenant's share.
    pub share: f64,
    /// Its rank within both.
    pub rank: Rank,
}

impl Turn {
    /// Compares two turns; the smaller goes first.
    pub fn order(&self, other: &Self) -> Ordering {
        let by_priority = other.effective.cmp(&self.effective);
        let by_share = self.share.total_cmp(&other.share);
        by_priority.then(by_share).then(self.rank.cmp(&other.rank))
    }

    /// True if it goes before the other one.
    pub fn is_before(&self, other: &Self) -> bool {
        self.order(other).is_lt()
    }
}

/// The leading gang.
#[derive(Debug, Clone)]
pub struct Leading {
    /// Its key.
    pub key: GangKey,
    /// Its members.
    pub members: Vec<ExecutionId>,
    /// Its tenant.
    pub tenant: TenantIx,
    /// Its turn.
    pub turn: Turn,
    /// The priority of its members, without ageing.
    pub priority: i32,
    /// Time since which it lacks only places.
    pub since: Millis,
    /// The places where it could run.
    pub places: Arc<KeptPlaces>,
    /// Time at which it will have its places, as far as clients stated run times.
    pub ends: Option<Millis>,
    /// The earliest value of `ends` since places are reserved. Backfilled executions must end by
    /// then: with `ends` alone, each one could delay the gang for the next one.
    pub until: Option<Millis>,
    /// True if free places are reserved for it.
    pub keeps: bool,
}

/// The facts that decide whether an execution is backfilled where a gang could run.
#[derive(Debug, Clone, Copy)]
pub struct Passes {
    /// Its own priority, without ageing.
    pub priority: i32,
    /// Its run time if its client stated one, in ms.
    pub takes_ms: Option<u64>,
    /// Time until it may be preempted, in ms. None if a higher priority does not preempt.
    pub gives_way_ms: Option<u64>,
}

impl Leading {
    /// Carries `until` over if places were already reserved for this gang.
    pub fn goes_on(&mut self, before: Option<&Self>) {
        let before = before.filter(|before| before.keeps && before.key == self.key);
        let known = before.and_then(|before| before.until);
        self.until = match (known, self.ends) {
            (Some(known), Some(ends)) => Some(known.min(ends)),
            (known, ends) => known.or(ends),
        };
    }

    /// True if a later execution may be backfilled because it is gone when the gang can start.
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

impl Lifecycle {
    /// The leading gang.
    pub(crate) fn leading(&self) -> Option<&Leading> {
        self.leading.as_deref()
    }

    /// Another gang leads, or none. Returns the one before.
    pub(crate) fn lead(&mut self, leading: Option<Box<Leading>>) -> Option<Box<Leading>> {
        std::mem::replace(&mut self.leading, leading)
    }

    /// From now on what becomes free is kept for the leading gang.
    pub(crate) fn keep_for_leading(&mut self) {
        if let Some(leading) = &mut self.leading {
            leading.keeps = true;
        }
    }

    /// True for a member of the leading gang.
    pub(crate) fn leads(&self, id: ExecutionId) -> bool {
        let leading = self.leading.as_ref();
        leading.is_some_and(|leading| leading.members.contains(&id))
    }

    /// The places that are reserved for a gang with an earlier turn than this execution.
    pub(crate) fn kept_from(&self, id: ExecutionId) -> Option<Arc<KeptPlaces>> {
        let leading = self.leading.as_ref().filter(|leading| leading.keeps)?;
        let e = self.cluster.execution(id)?;
        let waits = e.stage == Stage::Pending || e.is_preempted();
        if !waits || leading.members.contains(&id) {
            return None;
        }
        let waiter = self.waiter_of(id)?;
        let effective = self.waiting.get(id).map(|(_, effective)| effective);
        let turn = Turn {
            effective: effective.unwrap_or(waiter.priority),
            share: self.share_of(waiter.tenant),
            rank: waiter.rank,
        };
        self.kept_from_turn(leading, turn, e.profile, e.attained_ms(self.now.mono))
    }

    /// The same for an execution that is just being submitted.
    pub(crate) fn kept_from_new(
        &self,
        id: ExecutionId,
        tenant: &Tenant,
        profile: ProfileIx,
        submitted_at: Timestamp,
    ) -> Option<Arc<KeptPlaces>> {
        let leading = self.leading.as_ref().filter(|leading| leading.keeps)?;
        let asks = self.cluster.profiles.get(profile)?;
        let tenant = self.cluster.tenants.find(tenant);
        let turn = Turn {
            effective: order::priority(&self.config, asks),
            share: tenant.map_or(0.0, |ix: TenantIx| self.share_of(ix)),
            rank: order::rank(&self.config, asks, 0, submitted_at, id),
        };
        self.kept_from_turn(leading, turn, profile, 0)
    }

    fn kept_from_turn(
        &self,
        leading: &Leading,
        turn: Turn,
        profile: ProfileIx,
        attained_ms: u64,
    ) -> Option<Arc<KeptPlaces>> {
        // A tenant's share changes all the time, so it is computed here.
        let own = Turn {
            share: self.share_of(leading.tenant),
            ..leading.turn
        };
        if turn.is_before(&own) {
            return None;
        }
        let profile = self.cluster.profiles.get(profile)?;
        let takes = profile.expected_s.map(|s| u64::from(s) * 1_000);
        let by_priority = matches!(
            self.config.discipline,
            Discipline::Priority | Discipline::Shared
        );
        let mean = self.take_up.mean_ms();
        let passes = Passes {
            priority: order::priority(&self.config, profile),
            takes_ms: takes.and_then(|ms| ms.checked_sub(attained_ms).filter(|left| *left > 0)),
            gives_way_ms: (self.config.preempt && by_priority)
                .then(|| residency_ms(&self.config, mean)),
        };
        let pass = leading.lets_pass(self.now.mono, passes);
        (!pass).then(|| Arc::clone(&leading.places))
    }

    /// Explains why a waiting execution is not bound although there may be room.
    pub(crate) fn kept_in_words(&self, id: ExecutionId) -> Option<String> {
        self.kept_from(id)?;
        let leading = self.leading.as_ref()?;
        #[expect(clippy::cast_precision_loss, reason = "a time below 2^52")]
        let waited = self.now.mono.since(leading.since) as f64;
        Some(format!(
            "no node can take it now. Free slots are reserved for the gang {} of {}, which has \
             waited for {}",
            leading.key.1,
            leading.members.len(),
            seconds(waited)
        ))
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
                deadline: crate::lifecycle::queue::order::NEVER,
                level: 0,
                submitted_at: Timestamp::from_micros(at),
                id: ExecutionId(Uuid::from_u128(1)),
            },
        }
    }

    fn first(ends: Option<u64>) -> Leading {
        Leading {
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
        let another = Leading {
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
