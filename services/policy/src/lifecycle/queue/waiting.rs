//! The queue of executions that wait for a binding, with one sub-queue for each effective priority,
//! tenant and profile. So a round reads few of a hundred thousand entries.
//!
//! A *lane* holds one effective priority and tenant. A walk merges its sub-queues by rank. Ageing
//! moves an execution to a higher lane, and a preempted one to the front of its own lane.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Bound::{Excluded, Unbounded};

use fiec_schemas::ExecutionId;

use super::order::{self, Rank};
use crate::config::Config;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::time::Millis;

/// Most executions that one round of ageing moves.
const PROMOTIONS: usize = 4_096;

/// An effective priority, highest first, and a tenant.
pub type LaneKey = (Reverse<i32>, TenantIx);

/// A queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiter {
    /// Its own priority.
    pub priority: i32,
    /// Its tenant.
    pub tenant: TenantIx,
    /// Its profile.
    pub profile: ProfileIx,
    /// Its rank in its sub-queue.
    pub rank: Rank,
    /// Start of its wait.
    pub since: Millis,
    /// Expected service, in ms.
    pub service_ms: u64,
    /// From this moment its service level no longer lets others pass it ([`order::patience_ms`]).
    pub returns: Option<Millis>,
}

impl Waiter {
    /// The entry as of `now`.
    #[must_use]
    pub fn at(mut self, now: Millis) -> Self {
        if self.returns.is_some_and(|at| at <= now) {
            (self.rank.level, self.returns) = (0, None);
        }
        self
    }
}

#[derive(Debug, Clone, Copy)]
struct Place {
    waiter: Waiter,
    effective: i32,
    /// Time at which its effective priority or its rank rises.
    rises: Option<Millis>,
}

#[derive(Debug, Default)]
struct Lane {
    heads: BTreeSet<(Rank, ProfileIx)>,
    queues: BTreeMap<ProfileIx, BTreeSet<Rank>>,
}

impl Lane {
    fn insert(&mut self, profile: ProfileIx, rank: Rank) {
        let queue = self.queues.entry(profile).or_default();
        let before = queue.first().copied();
        queue.insert(rank);
        if before.is_none_or(|head| rank < head) {
            if let Some(head) = before {
                self.heads.remove(&(head, profile));
            }
            self.heads.insert((rank, profile));
        }
    }

    fn remove(&mut self, profile: ProfileIx, rank: Rank) {
        let Some(queue) = self.queues.get_mut(&profile) else {
            return;
        };
        queue.remove(&rank);
        let next = queue.first().copied();
        if self.heads.remove(&(rank, profile))
            && let Some(next) = next
        {
            self.heads.insert((next, profile));
        }
        if next.is_none() {
            self.queues.remove(&profile);
        }
    }
}

/// Progress of a walk through a lane. Removals during the walk are harmless.
#[derive(Debug, Default)]
pub struct Cursor {
    next: BinaryHeap<Reverse<(Rank, ProfileIx)>>,
    last: Option<(Rank, ProfileIx)>,
    begun: BTreeSet<ProfileIx>,
}

/// Failed attempts since the last change.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Profiles without a place.
    pub blocked: BTreeSet<ProfileIx>,
    /// Executions with a history of their own without a place.
    pub tried: BTreeSet<ExecutionId>,
}

/// The executions that wait for a binding.
#[derive(Debug, Default)]
pub struct Waiting {
    lanes: BTreeMap<LaneKey, Lane>,
    places: BTreeMap<ExecutionId, Place>,
    profiles: BTreeMap<ProfileIx, u32>,
    tenants: BTreeMap<TenantIx, u32>,
    ageing: BTreeSet<(Millis, ExecutionId)>,
    /// Time since which, without a break, an execution has waited.
    since: Option<Millis>,
}

impl Waiting {
    /// Time since which, without a break, an execution has waited for a place.
    pub fn since(&self) -> Option<Millis> {
        self.since
    }

    /// Number of waiting executions.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// True if none waits.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// True if the execution waits.
    pub fn contains(&self, id: ExecutionId) -> bool {
        self.places.contains_key(&id)
    }

    /// Its entry, and its effective priority.
    pub fn get(&self, id: ExecutionId) -> Option<(Waiter, i32)> {
        let place = self.places.get(&id)?;
        Some((place.waiter, place.effective))
    }

    /// The profiles of all waiting executions.
    pub fn profiles(&self) -> impl Iterator<Item = ProfileIx> {
        self.profiles.keys().copied()
    }

    /// Number of waiting executions of a tenant.
    pub fn of_tenant(&self, tenant: TenantIx) -> u32 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// All lanes, highest effective priority first.
    pub fn lanes(&self) -> Vec<LaneKey> {
        self.lanes.keys().copied().collect()
    }

    /// Adds an entry. An existing one keeps the start of its wait.
    pub fn insert(&mut self, config: &Config, now: Millis, waiter: Waiter) {
        let mut waiter = waiter.at(now);
        let id = waiter.rank.id;
        if let Some(before) = self.take(id) {
            waiter.since = waiter.since.min(before.since);
        }
        let waited = now.since(waiter.since);
        let effective =
            waiter
                .priority
                .saturating_add(order::aged(config, waited, waiter.service_ms));
        *self.profiles.entry(waiter.profile).or_default() += 1;
        *self.tenants.entry(waiter.tenant).or_default() += 1;
        let key = (Reverse(effective), waiter.tenant);
        let lane = self.lanes.entry(key).or_default();
        lane.insert(waiter.profile, waiter.rank);
        let rises = next_step(config, &waiter, now);
        self.ageing.extend(rises.map(|due| (due, id)));
        let place = Place {
            waiter,
            effective,
            rises,
        };
        self.places.insert(id, place);
        self.since.get_or_insert(now);
    }

    /// Removes an entry.
    pub fn remove(&mut self, id: ExecutionId) {
        self.take(id);
        if self.is_empty() {
            self.since = None;
        }
    }

    fn take(&mut self, id: ExecutionId) -> Option<Waiter> {
        let Place {
            waiter,
            effective,
            rises,
        } = self.places.remove(&id)?;
        self.leave_lane(waiter, effective);
        fewer(&mut self.profiles, waiter.profile);
        fewer(&mut self.tenants, waiter.tenant);
        if let Some(due) = rises {
            self.ageing.remove(&(due, id));
        }
        Some(waiter)
    }

    fn leave_lane(&mut self, waiter: Waiter, effective: i32) {
        let key = (Reverse(effective), waiter.tenant);
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.remove(waiter.profile, waiter.rank);
            if lane.queues.is_empty() {
                self.lanes.remove(&key);
            }
        }
    }

    /// Moves aged entries up. Returns true if one moved. A round is bounded, and the next one
    /// continues.
    pub fn age(&mut self, config: &Config, now: Millis) -> bool {
        let mut moved = false;
        for _ in 0..PROMOTIONS {
            let Some(&(due, id)) = self.ageing.first() else {
                break;
            };
            if due > now {
                break;
            }
            self.ageing.pop_first();
            let Some(place) = self.places.get_mut(&id) else {
                continue;
            };
            let (old, before) = (place.waiter, place.effective);
            let waiter = old.at(now);
            let aged = order::aged(config, now.since(waiter.since), waiter.service_ms);
            place.waiter = waiter;
            place.effective = waiter.priority.saturating_add(aged);
            place.rises = next_step(config, &waiter, now);
            let (higher, rises) = (place.effective, place.rises);
            self.ageing.extend(rises.map(|due| (due, id)));
            if higher > before || waiter != old {
                self.leave_lane(old, before);
                let lane = self.lanes.entry((Reverse(higher), waiter.tenant));
                lane.or_default().insert(waiter.profile, waiter.rank);
                moved = true;
            }
        }
        moved
    }

    /// The next entry of a lane in order of rank. Skips profiles in `leave_out`.
    pub fn next(
        &self,
        lane: LaneKey,
        cursor: &mut Cursor,
        leave_out: impl Fn(ProfileIx) -> bool,
    ) -> Option<(ExecutionId, ProfileIx)> {
        let lane = self.lanes.get(&lane)?;
        loop {
            let from = cursor.last.map_or(Unbounded, Excluded);
            let mut heads = lane.heads.range((from, Unbounded));
            let head = heads.find(|(_, profile)| !cursor.begun.contains(profile));
            let followed = cursor.next.peek().map(|Reverse(entry)| *entry);
            let fresh = match (head, followed) {
                (None, None) => return None,
                (Some(head), Some(followed)) => *head < followed,
                (head, _) => head.is_some(),
            };
            let (rank, profile) = if fresh {
                let head = *head?;
                cursor.last = Some(head);
                cursor.begun.insert(head.1);
                head
            } else {
                cursor.next.pop()?.0
            };
            if leave_out(profile) {
                continue;
            }
            let queue = lane.queues.get(&profile);
            let after = queue.and_then(|q| q.range((Excluded(rank), Unbounded)).next());
            if let Some(after) = after {
                cursor.next.push(Reverse((*after, profile)));
            }
            return Some((rank.id, profile));
        }
    }
}

/// Time of the next rise of rank or lane.
fn next_step(config: &Config, waiter: &Waiter, now: Millis) -> Option<Millis> {
    let step = order::step_ms(config, waiter.service_ms).map(|step| {
        let steps = now.since(waiter.since) / step + 1;
        waiter.since.plus(steps.saturating_mul(step))
    });
    step.into_iter().chain(waiter.returns).min()
}

fn fewer<K: Ord + Copy>(counts: &mut BTreeMap<K, u32>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Timestamp;
    use proptest::prelude::*;
    use uuid::Uuid;

    fn waiter(n: u64, priority: i32, tenant: u32, profile: u32, level: u32) -> Waiter {
        Waiter {
            priority,
            tenant: TenantIx(tenant),
            profile: ProfileIx(profile),
            rank: Rank {
                deadline: order::NEVER,
                level,
                submitted_at: Timestamp::from_micros(i64::try_from(n).unwrap_or(0)),
                id: ExecutionId(Uuid::from_u128(u128::from(n))),
            },
            since: Millis(n),
            service_ms: 0,
            returns: None,
        }
    }

    fn walk(waiting: &Waiting, lane: LaneKey) -> Vec<u128> {
        let mut cursor = Cursor::default();
        std::iter::from_fn(|| waiting.next(lane, &mut cursor, |_| false))
            .map(|(id, _)| id.0.as_u128())
            .collect()
    }

    proptest! {
        #[test]
        fn a_lane_is_walked_in_order_of_rank_and_leaves_nobody_out(
            entries in prop::collection::vec((0u32..6, 0u32..4, any::<bool>()), 0..60)
        ) {
            let config = Config::default();
            let mut waiting = Waiting::default();
            let mut left = Vec::new();
            for (n, (profile, level, leaves)) in (1u64..).zip(&entries) {
                let w = waiter(n, 0, 0, *profile, *level);
                waiting.insert(&config, Millis(n), w);
                if *leaves {
                    waiting.remove(w.rank.id);
                } else {
                    left.push(w.rank);
                }
            }
            left.sort_unstable();
            let found = walk(&waiting, (Reverse(0), TenantIx(0)));
            prop_assert_eq!(found, left.iter().map(|r| r.id.0.as_u128()).collect::<Vec<_>>());
            prop_assert_eq!(waiting.len(), left.len());
            let counted: usize = waiting.profiles.values().map(|n| *n as usize).sum();
            prop_assert_eq!(counted, left.len());
        }

        /// Nothing that arrives (101 - priority) steps later passes a waiting execution.
        #[test]
        fn ageing_lets_nobody_starve(
            priority in -100i32..=100,
            others in prop::collection::vec((-100i32..=100, 0u32..5), 1..40),
        ) {
            let config = Config { ageing_ms: 1_000, ..Config::default() };
            let mut waiting = Waiting::default();
            let old = Waiter { since: Millis(0), ..waiter(1, priority, 0, 0, 99) };
            waiting.insert(&config, Millis(0), old);
            let later = 1_000 * u64::try_from(101 - priority).unwrap_or(0);
            for (n, (priority, profile)) in (2u64..).zip(&others) {
                let since = Millis(later + n);
                let new = Waiter { since, ..waiter(n, *priority, 0, *profile, 0) };
                waiting.insert(&config, since, new);
            }
            let mut now = Millis(0);
            for _ in 0..40 {
                now = now.plus(later / 20 + 50);
                waiting.age(&config, now);
            }
            let first = waiting.lanes()[0];
            prop_assert_eq!(walk(&waiting, first)[0], 1);
            let (_, effective) = waiting.get(old.rank.id).unwrap_or((old, 0));
            prop_assert_eq!(effective, priority + order::aged(&config, now.0, 0));
        }
    }

    #[test]
    fn who_returns_goes_before_what_was_submitted_after_it_and_not_before_what_was_first() {
        let config = Config {
            ageing_ms: 0,
            ..Config::default()
        };
        let mut waiting = Waiting::default();
        let returns = Some(Millis(1_000));
        let old = Waiter {
            returns,
            ..waiter(5, 0, 0, 0, 7)
        };
        waiting.insert(&config, Millis(10), old);
        for n in [1, 9] {
            waiting.insert(&config, Millis(10), waiter(n, 0, 0, 1, 0));
        }
        let lane = (Reverse(0), TenantIx(0));
        waiting.age(&config, Millis(999));
        assert_eq!(walk(&waiting, lane), [1, 9, 5]);
        assert!(waiting.age(&config, Millis(1_000)));
        assert_eq!(walk(&waiting, lane), [1, 5, 9]);
        assert!(waiting.ageing.is_empty(), "once");
        // An entry that is inserted after that moment is there at once.
        waiting.remove(old.rank.id);
        waiting.insert(&config, Millis(2_000), old);
        assert_eq!(walk(&waiting, lane), [1, 5, 9]);
        waiting.remove(old.rank.id);
        assert_eq!(walk(&waiting, lane), [1, 9]);
    }

    #[test]
    fn what_is_left_out_is_left_out_with_its_whole_queue() {
        let config = Config::default();
        let mut waiting = Waiting::default();
        for n in 1..=10_000 {
            let w = waiter(n, 0, 0, u32::from(n > 9_990), 0);
            waiting.insert(&config, Millis(n), w);
        }
        let lane = (Reverse(0), TenantIx(0));
        let mut cursor = Cursor::default();
        let first = waiting.next(lane, &mut cursor, |_| false);
        assert_eq!(first.map(|(id, _)| id.0.as_u128()), Some(1));
        let next = waiting.next(lane, &mut cursor, |profile| profile == ProfileIx(0));
        assert_eq!(next.map(|(id, _)| id.0.as_u128()), Some(9_991));
    }
}
