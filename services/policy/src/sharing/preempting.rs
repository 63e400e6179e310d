//! Chooses for whom running executions are preempted, and orders these away.
//!
//! A round is bounded: the first 16 waiting executions, and a window of the running ones
//! ([`super::victims`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, ExecutionId, Timestamp};

use super::Sharing;
use super::victims::{Victim, WINDOW};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::binding::orders::GivesWay;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::placement::{Ask, Leaving};
use crate::lifecycle::queue::order::{self, Discipline, NEVER};
use crate::lifecycle::queue::waiting::Waiter;

/// Most waiting executions in one round.
const CONTENDERS: usize = 16;

/// A waiting execution for which another may be preempted.
pub(super) struct Contender {
    pub id: ExecutionId,
    pub tenant: TenantIx,
    pub priority: i32,
    pub effective: i32,
    pub deadline: Timestamp,
    pub level: u32,
    pub rest_ms: u64,
    /// Time until its deadline beyond its expected remaining time, in ms, if it has a deadline.
    pub slack_ms: Option<i64>,
}

impl Sharing {
    /// Chooses executions to preempt.
    ///
    /// `lacking`: the members of the leading gang without a place, if this replica acts for it.
    /// `park`: what happens to an execution without another place.
    pub fn preempt(
        &mut self,
        life: &mut Lifecycle,
        lacking: Option<&[ExecutionId]>,
        park: impl Fn(&mut Lifecycle, GivesWay, Cause),
    ) {
        let now = life.now;
        let due = now.mono.since(self.reviewed) >= life.config.sharing.review_ms;
        let nobody = life.waiting().is_empty() && life.leading().is_none();
        if !due || nobody || life.config.discipline == Discipline::Fifo {
            return;
        }
        self.reviewed = now.mono;
        life.age_queue();
        self.forget_vain_orders(life);
        let contenders = self.contenders(life);
        if contenders.is_empty() && life.leading().is_none() {
            return;
        }
        let mut victims = self.victims(life);
        for contender in contenders {
            let Some(chosen) = self.choose_victim(life, &contender, &victims, &[]) else {
                continue;
            };
            let reason = self.reason(life, &contender, &chosen, &victims);
            let victim = victims.swap_remove(chosen.at);
            let why = (chosen.rule, reason);
            self.give_way(life, victim, &contender, why, &park);
        }
        if let Some(lacking) = lacking {
            self.preempt_for_gang(life, lacking, victims, &park);
        }
    }

    /// Drops orders without effect. The holder may have received an order without an answer. As
    /// long as it is left alone, no other execution is preempted in its place.
    fn forget_vain_orders(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        let cluster = life.cluster();
        self.asking.retain(|by, (victim, _)| {
            cluster
                .execution(*victim)
                .is_some_and(|e| match e.order().map(|o| &o.cause) {
                    Some(Cause::Preempted { by: Some(b), .. }) => b == by,
                    Some(_) => false,
                    None => e.was_told(now.mono),
                })
        });
    }

    pub(super) fn slack_ms(
        &self,
        life: &Lifecycle,
        profile: &Profile,
        e: &crate::lifecycle::cluster::Execution,
    ) -> Option<i64> {
        let now = life.now;
        let deadline = order::deadline(&life.config, profile, e.submitted_at);
        let rest = order::rest_ms(profile, e.attained_ms(now.mono));
        let rest = i64::try_from(rest).unwrap_or(i64::MAX);
        (deadline < NEVER).then(|| deadline.millis() - now.wall.millis() - rest)
    }

    /// The first executions that lack only a place and for which this replica acts.
    fn contenders(&mut self, life: &mut Lifecycle) -> Vec<Contender> {
        let profiles: Vec<_> = life.waiting().profiles().take(WINDOW).collect();
        let mut possible = std::collections::BTreeSet::new();
        for profile in profiles {
            if life.is_only_full(profile) {
                possible.insert(profile);
            }
        }
        let skip = |profile| !possible.contains(&profile);
        let ids = life.first_waiting(CONTENDERS, skip, |id| {
            self.asking.contains_key(&id) || life.is_promised(id) || !life.is_mine(id)
        });
        let contender = |id| {
            let (waiter, effective) = life.waiting().get(id)?;
            self.contender(life, id, waiter, effective)
        };
        ids.into_iter().filter_map(contender).collect()
    }

    /// A waiting, or preempted and parked, execution as a contender.
    pub(super) fn contender(
        &self,
        life: &Lifecycle,
        id: ExecutionId,
        waiter: Waiter,
        effective: i32,
    ) -> Option<Contender> {
        let now = life.now;
        let e = life.cluster().execution(id)?;
        let profile = life.cluster().profiles.get(e.profile)?;
        let fresh = life.steps_back_for(e).is_some();
        let waits = e.stage == Stage::Pending || e.is_preempted() && e.order().is_none();
        (waits && !e.is_appending() && !fresh).then(|| Contender {
            id,
            tenant: waiter.tenant,
            priority: waiter.priority,
            effective,
            deadline: waiter.rank.deadline,
            // Its attained service, independent of its rank.
            level: order::level(&life.config, profile, e.attained_ms(now.mono)),
            rest_ms: order::rest_ms(profile, e.attained_ms(now.mono)),
            slack_ms: self.slack_ms(life, profile, e),
        })
    }

    fn give_way(
        &mut self,
        life: &mut Lifecycle,
        victim: Victim,
        contender: &Contender,
        (rule, reason): (Rule, String),
        park: &impl Fn(&mut Lifecycle, GivesWay, Cause),
    ) {
        let now = life.now;
        let cause = Cause::Preempted {
            rule,
            by: Some(contender.id),
            reason,
        };
        let asked = (victim.id, now.mono);
        self.asking.insert(contender.id, asked);
        // The victim must not move to a place that is reserved for a gang.
        let first = life.leading();
        let first = first.filter(|f| f.keeps || f.members.contains(&contender.id));
        let kept = first.map(|first| Arc::clone(&first.places));
        let node = life.cluster().node(victim.node).id.clone();
        let note = format!("it preempts {} on {node} at its next boundary", victim.id);
        life.note(contender.id, note);
        // If only its device is wanted, another device of the same node will do.
        let node = life.cluster().node(victim.node);
        let leaving = match victim.claim.device() {
            Some(device) if node.held() < node.slots() => Leaving::Place(victim.node, Some(device)),
            _ => Leaving::Node(victim.node),
        };
        let ask = life.cluster().execution(victim.id).map(|e| {
            let ask = Ask { kept, ..Ask::of(e) };
            ask.leaves(Some(leaving))
        });
        let elsewhere = ask.and_then(|ask| life.choose(&ask));
        match elsewhere {
            Some(choice) => life.order_yield_to(victim.id, choice, cause, None),
            None => {
                let gives = GivesWay {
                    id: victim.id,
                    node: victim.node,
                    to: contender.id,
                    rest_ms: contender.rest_ms,
                };
                park(life, gives, cause);
            }
        }
    }

    /// Preempts executions for the leading gang: one for each missing place, or none at all.
    fn preempt_for_gang(
        &mut self,
        life: &mut Lifecycle,
        lacking: &[ExecutionId],
        mut left: Vec<Victim>,
        park: &impl Fn(&mut Lifecycle, GivesWay, Cause),
    ) {
        let Some(leading) = life.leading() else {
            return;
        };
        let (members, key) = (leading.members.clone(), leading.key.clone());
        let effective = leading.turn.effective;
        let free = self.unasked(life, &members, lacking);
        let lacks = free.len();
        let (mut chosen, mut planned) = (Vec::new(), Vec::new());
        for id in free {
            let waiter = life.waiter_of(id);
            let contender = waiter.and_then(|w| self.contender(life, id, w, effective));
            let Some(contender) = contender else {
                break;
            };
            let Some(chose) = self.choose_victim(life, &contender, &left, &planned) else {
                break;
            };
            let reason = self.reason(life, &contender, &chose, &left);
            let victim = left.swap_remove(chose.at);
            planned.push((id, victim.id));
            chosen.push((contender, victim, chose.rule, reason));
        }
        if lacks == 0 || chosen.len() < lacks {
            return;
        }
        for (contender, victim, rule, reason) in chosen {
            let reason = format!("{reason}; for the gang {} of {}", key.1, members.len());
            self.give_way(life, victim, &contender, (rule, reason), park);
        }
        life.keep_for_leading();
    }

    /// Members without a place for which no execution has been asked to yield. Members of one
    /// profile share the places that were asked for.
    fn unasked(
        &self,
        life: &Lifecycle,
        members: &[ExecutionId],
        lacking: &[ExecutionId],
    ) -> Vec<ExecutionId> {
        let profile = |id: &ExecutionId| life.cluster().execution(*id).map(|e| e.profile);
        let asks = |id: &&ExecutionId| self.asking.contains_key(*id);
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
}
