//! Reserves free places for the leading gang ([`crate::lifecycle::backfill`]), and preempts executions for
//! it: one for each place that the gang lacks, or none at all.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::{ExecutionId, Tenant, Timestamp};

use crate::engine::Policy;
use crate::engine::victims::Victim;
use crate::gangs::places::KeptPlaces;
use crate::holds::GangKey;
use crate::lifecycle::backfill::{First, Passes, Turn};
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::share::order::{self, Discipline};
use crate::share::pause::seconds;
use crate::share::regret::residency_ms;
use crate::time::{Millis, Now};

/// Interval between two choices of the leading gang, in ms.
const LOOK_MS: u64 = 500;
/// Most gangs that one choice checks for places.
const TRIES: usize = 4;

impl Policy {
    /// Chooses the leading gang, and whether free places are reserved for it.
    pub(crate) fn look_at_first(&mut self) {
        let now = self.life.now;
        if self.holds.gangs.is_empty() {
            self.drop_first();
            return;
        }
        let waits = |id: &ExecutionId| {
            let e = self.life.cluster().execution(*id);
            e.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending())
        };
        let stands = |first: &First| first.members.iter().all(waits);
        let gone = self.holds.first.as_ref().is_some_and(|f| !stands(f));
        if !gone && now.mono.since(self.holds.first_looked) < LOOK_MS {
            return;
        }
        self.holds.first_looked = now.mono;
        if gone {
            self.holds.first_from = 0;
        }
        let mut waiting = self.waiting_gangs();
        waiting.sort_by(|a, b| a.turn.order(&b.turn));
        let (from, count) = (self.look_from(&waiting), waiting.len());
        let found = waiting
            .into_iter()
            .skip(from)
            .take(TRIES)
            .find_map(|gang| self.with_places(gang));
        // If none of these gangs can ever have room, the next round checks the ones after them.
        self.holds.first_from = match &found {
            Some(_) => from,
            None if from + TRIES < count => from + TRIES,
            None => 0,
        };
        let found = found.map(|mut first| {
            first.goes_on(self.holds.first.as_deref());
            Box::new(first)
        });
        let before = std::mem::replace(&mut self.holds.first, found);
        self.look_again_at_waiting(before.as_deref());
    }

    /// Index of the first gang to check, in order of turn. The current leading gang stays within
    /// the next [`TRIES`].
    fn look_from(&self, waiting: &[First]) -> usize {
        let from = self.holds.first_from;
        if from >= waiting.len() {
            return 0;
        }
        let first = self.holds.first.as_ref().filter(|_| from > 0);
        let at = first.and_then(|first| waiting.iter().position(|gang| gang.key == first.key));
        at.map_or(from, |at| from.min(at).max((at + 1).saturating_sub(TRIES)))
    }

    /// Marks the policy dirty if places that were reserved for a gang are free for others now.
    fn look_again_at_waiting(&mut self, before: Option<&First>) {
        let now = self.life.now;
        let first = self.holds.first.as_deref().filter(|first| first.keeps);
        // A moment in the past counts as none.
        let ends = first.and_then(|first| first.ends.filter(|at| *at > now.mono));
        let known = self.holds.first_ends.filter(|at| *at > now.mono);
        let differs = match (ends, known) {
            // Every boundary shifts the estimate a little.
            (Some(a), Some(b)) => a.max(b).since(a.min(b)) >= 2 * LOOK_MS,
            (a, b) => a.is_some() != b.is_some(),
        };
        if differs {
            self.holds.first_ends = ends;
        }
        let frees = |before: &First| {
            let keeps =
                |first: &First| first.key == before.key && before.places.is_within(&first.places);
            before.keeps && (differs || !first.is_some_and(keeps))
        };
        self.life.changed().places |= before.is_some_and(frees);
    }

    fn drop_first(&mut self) {
        self.holds.first_from = 0;
        if self.holds.first.take().is_some() {
            self.life.changed().places = true;
        }
    }

    /// Complete gangs whose members are all ready and reserved: only places are missing.
    fn waiting_gangs(&mut self) -> Vec<First> {
        let now = self.life.now;
        let keys: Vec<GangKey> = self.holds.gangs.keys().cloned().collect();
        let mut found = Vec::new();
        for key in keys {
            let Some(gang) = self.holds.gangs.get(&key) else {
                continue;
            };
            let members = gang.complete().filter(|_| gang.begun.is_none());
            let members = members.filter(|all| all.iter().all(|id| self.is_ready(*id)));
            let Some(gang) = self.holds.gangs.get_mut(&key) else {
                continue;
            };
            let Some(members) = members else {
                gang.ready_since = None;
                continue;
            };
            let since = *gang.ready_since.get_or_insert(now.mono);
            if !self.quotas.have_reserved(&key.0, &members) {
                continue;
            }
            let Some(waiter) = self.life.waiter_of(members[0]) else {
                continue;
            };
            let aged = order::aged(&self.life.config, now.mono.since(since), waiter.service_ms);
            let asked = |id: &ExecutionId| self.share.asking.contains_key(id);
            let kept = self.holds.first.as_ref();
            let kept = kept.is_some_and(|f| f.keeps && f.key == key);
            let waited = now.mono.since(since) >= self.life.config.gang_keep_ms;
            let keeps = waited || kept || members.iter().any(asked);
            found.push(First {
                turn: Turn {
                    effective: waiter.priority.saturating_add(aged),
                    share: self.life.share_of(waiter.tenant),
                    rank: waiter.rank,
                },
                priority: waiter.priority,
                tenant: waiter.tenant,
                key,
                members,
                since,
                places: Arc::default(),
                ends: None,
                until: None,
                keeps,
            });
        }
        found
    }

    /// An execution was preempted for a member: the gang is tried again at once.
    pub(crate) fn hurry_gang(&mut self, id: ExecutionId) {
        let Some(first) = self.holds.first.as_mut() else {
            return;
        };
        if !first.members.contains(&id) {
            return;
        }
        // All replicas learn this from the ledger, whichever of them preempted.
        first.keeps = true;
        if let Some(gang) = self.holds.gangs.get_mut(&first.key) {
            gang.retry_at = Millis(0);
            self.holds.gangs_due.insert(first.key.clone());
            self.life.changed().holds = true;
        }
    }

    /// True for a member of the leading gang.
    pub(crate) fn is_first(&self, id: ExecutionId) -> bool {
        let first = self.holds.first.as_ref();
        first.is_some_and(|first| first.members.contains(&id))
    }

    /// The places that are reserved for a gang with an earlier turn than this execution.
    pub(crate) fn kept_from(&self, id: ExecutionId) -> Option<Arc<KeptPlaces>> {
        let first = self.holds.first.as_ref().filter(|first| first.keeps)?;
        let e = self.life.cluster().execution(id)?;
        let waits = e.stage == Stage::Pending || e.is_aside();
        if !waits || first.members.contains(&id) {
            return None;
        }
        let waiter = self.life.waiter_of(id)?;
        let effective = self.life.waiting.get(id).map(|(_, effective)| effective);
        let turn = Turn {
            effective: effective.unwrap_or(waiter.priority),
            share: self.life.share_of(waiter.tenant),
            rank: waiter.rank,
        };
        self.kept_from_turn(first, turn, e.profile, e.attained_ms(self.life.now.mono))
    }

    /// The same for an execution that is just being submitted.
    pub(crate) fn kept_from_new(
        &self,
        id: ExecutionId,
        tenant: &Tenant,
        profile: ProfileIx,
        submitted_at: Timestamp,
    ) -> Option<Arc<KeptPlaces>> {
        let first = self.holds.first.as_ref().filter(|first| first.keeps)?;
        let asks = self.life.cluster().profiles.get(profile)?;
        let tenant = self.life.cluster().tenants.find(tenant);
        let turn = Turn {
            effective: order::priority(&self.life.config, asks),
            share: tenant.map_or(0.0, |ix: TenantIx| self.life.share_of(ix)),
            rank: order::rank(&self.life.config, asks, 0, submitted_at, id),
        };
        self.kept_from_turn(first, turn, profile, 0)
    }

    fn kept_from_turn(
        &self,
        first: &First,
        turn: Turn,
        profile: ProfileIx,
        attained_ms: u64,
    ) -> Option<Arc<KeptPlaces>> {
        // A tenant's share changes all the time, so it is computed here.
        let own = Turn {
            share: self.life.share_of(first.tenant),
            ..first.turn
        };
        if turn.is_before(&own) {
            return None;
        }
        let profile = self.life.cluster().profiles.get(profile)?;
        let takes = profile.expected_s.map(|s| u64::from(s) * 1_000);
        let by_priority = matches!(
            self.life.config.discipline,
            Discipline::Priority | Discipline::Shared
        );
        let mean = self.life.take_up.mean_ms();
        let passes = Passes {
            priority: order::priority(&self.life.config, profile),
            takes_ms: takes.and_then(|ms| ms.checked_sub(attained_ms).filter(|left| *left > 0)),
            gives_way_ms: (self.life.config.preempt && by_priority)
                .then(|| residency_ms(&self.life.config, mean)),
        };
        let pass = first.lets_pass(self.life.now.mono, passes);
        (!pass).then(|| Arc::clone(&first.places))
    }

    /// Preempts executions for the leading gang: one for each missing place, or none at all.
    pub(crate) fn preempt_for_gang(&mut self, victims: &mut Vec<Victim>) {
        let now = self.life.now;
        let Some(first) = self.holds.first.as_deref() else {
            return;
        };
        let (members, key) = (first.members.clone(), first.key.clone());
        // The replica that holds the reservations of all members acts, whichever is preferred now.
        if !members
            .iter()
            .all(|id| self.quotas.is_admitted(&self.life, *id))
        {
            return;
        }
        let gang = self.holds.gangs.get(&key);
        let lacking = gang.and_then(|gang| gang.lacking.as_deref());
        let free = self.unasked(&members, lacking.unwrap_or_default());
        let lacks = free.len();
        let mut chosen = Vec::new();
        let mut left: Vec<Victim> = std::mem::take(victims);
        for id in free {
            let waiter = self.life.waiter_of(id);
            let contender = waiter.and_then(|w| self.contender(id, w, first_effective(self)));
            let Some(contender) = contender else {
                break;
            };
            let Some(chose) = self.choose_victim(&contender, &left) else {
                break;
            };
            let reason = self.reason(&contender, &chose, &left);
            let victim = left.swap_remove(chose.at);
            // The next choice must see this one. It is undone below if there are too few victims.
            self.share.asking.insert(id, (victim.id, now.mono));
            chosen.push((contender, victim, chose.rule, reason));
        }
        let enough = chosen.len() == lacks;
        for (contender, victim, rule, reason) in chosen {
            if enough {
                let reason = format!("{reason}; for the gang {} of {}", key.1, members.len());
                self.give_way(victim, &contender, rule, reason);
            } else {
                self.share.asking.remove(&contender.id);
                left.push(victim);
            }
        }
        *victims = left;
        if enough
            && lacks > 0
            && let Some(first) = &mut self.holds.first
        {
            first.keeps = true;
        }
    }

    /// Members without a place for which no execution has been asked to yield. Members of one
    /// profile share the places that were asked for.
    fn unasked(&self, members: &[ExecutionId], lacking: &[ExecutionId]) -> Vec<ExecutionId> {
        let profile = |id: &ExecutionId| self.life.cluster().execution(*id).map(|e| e.profile);
        let asks = |id: &&ExecutionId| self.share.asking.contains_key(*id);
        let mut lacks: BTreeMap<Option<ProfileIx>, usize> = BTreeMap::new();
        for id in lacking {
            *lacks.entry(profile(id)).or_default() += 1;
        }
        for id in members.iter().filter(asks) {
            if let Some(count) = lacks.get_mut(&profile(id)) {
                *count = count.saturating_sub(1);
            }
        }
        let free = lacking.iter().filter(|id| !asks(id));
        let free = free.filter(|id| {
            let count = lacks.entry(profile(id)).or_default();
            let lacks = *count > 0;
            *count = count.saturating_sub(1);
            lacks
        });
        free.copied().collect()
    }

    /// Explains why a waiting execution is not bound although there may be room.
    pub(crate) fn kept_in_words(&self, now: Now, id: ExecutionId) -> Option<String> {
        self.kept_from(id)?;
        let first = self.holds.first.as_ref()?;
        #[expect(clippy::cast_precision_loss, reason = "a time below 2^52")]
        let waited = now.mono.since(first.since) as f64;
        Some(format!(
            "no node can take it now; what becomes free is kept for the gang {} of {}, which has \
             waited for {} and goes first",
            first.key.1,
            first.members.len(),
            seconds(waited)
        ))
    }
}

fn first_effective(policy: &Policy) -> i32 {
    let first = policy.holds.first.as_ref();
    first.map_or(0, |first| first.turn.effective)
}
