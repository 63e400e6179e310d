//! Preempts running executions for waiting ones: for a higher priority, for a deadline at risk, for
//! a tenant below its share, or for less attained service after a time slice.
//!
//! The victim has the lowest priority and then the least regret ([`crate::lifecycle::regret`]). It
//! yields at its next boundary: to another place if there is one, else to a park or to the queue
//! ([`super::aside`]). Then the preempting execution is bound first.
//!
//! A round is bounded: the first 16 waiting executions, and a window of the running ones
//! ([`super::victims`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, EventKind, ExecutionId, Timestamp};

use super::victims::{Victim, WINDOW};
use crate::engine::Policy;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::order::{self, Discipline, NEVER};
use crate::lifecycle::orders::GivesWay;
use crate::lifecycle::placement::{Ask, Leaving};
use crate::lifecycle::queue::Waiter;
use crate::parking;
use crate::view::LedgerView;

/// Most waiting executions in one round.
const CONTENDERS: usize = 16;

/// A waiting execution for which another may be preempted.
pub(crate) struct Contender {
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

impl Policy {
    /// Reads from a message the facts that sharing depends on.
    pub(crate) fn note_sharing(&mut self, view: &LedgerView<'_>) {
        let id = view.state.execution;
        if !self.life.knows(id) {
            return;
        }
        self.life.note_pace(view);
        let yielded = view.event(EventKind::Yielded).and_then(|y| y.cause());
        if let Some(Cause::Preempted { rule, by, .. }) = yielded {
            if rule == Rule::Quota {
                self.quotas.left(&mut self.life, id);
            }
            if let Some(by) = by {
                self.gave_way(by);
            }
        }
        self.note_deadline(id);
    }

    /// Forgets an execution that has ended.
    pub(crate) fn forget_sharing(&mut self, id: ExecutionId) {
        self.life.rhythms.remove(&id);
        self.share.asking.remove(&id);
        self.life.promised.remove(&id);
        self.share.deadlines.forget(id);
    }

    /// Chooses executions to preempt.
    pub(crate) fn preempt(&mut self) {
        let now = self.life.now;
        let due = now.mono.since(self.share.reviewed) >= self.life.config.preempt_review_ms;
        let nobody = self.life.waiting.is_empty() && self.life.leading().is_none();
        if !due || nobody || self.life.config.discipline == Discipline::Fifo {
            return;
        }
        self.share.reviewed = now.mono;
        self.life.waiting.age(&self.life.config, now.mono);
        self.forget_vain_orders();
        let contenders = self.contenders();
        if contenders.is_empty() && self.life.leading().is_none() {
            return;
        }
        let mut victims = self.victims();
        for contender in contenders {
            let Some(chosen) = self.choose_victim(&contender, &victims) else {
                continue;
            };
            let reason = self.reason(&contender, &chosen, &victims);
            let victim = victims.swap_remove(chosen.at);
            self.give_way(victim, &contender, chosen.rule, reason);
        }
        self.preempt_for_gang(&mut victims);
    }

    /// Drops orders without effect. The holder may have received an order without an answer. As
    /// long as it is left alone, no other execution is preempted in its place.
    fn forget_vain_orders(&mut self) {
        let now = self.life.now;
        let cluster = self.life.cluster();
        self.share.asking.retain(|by, (victim, _)| {
            cluster
                .execution(*victim)
                .is_some_and(|e| match e.order().map(|o| &o.cause) {
                    Some(Cause::Preempted { by: Some(b), .. }) => b == by,
                    Some(_) => false,
                    None => e.was_told(now.mono),
                })
        });
    }

    pub(crate) fn slack_ms(
        &self,
        profile: &Profile,
        e: &crate::lifecycle::cluster::Execution,
    ) -> Option<i64> {
        let now = self.life.now;
        let deadline = order::deadline(&self.life.config, profile, e.submitted_at);
        let rest = order::rest_ms(profile, e.attained_ms(now.mono));
        let rest = i64::try_from(rest).unwrap_or(i64::MAX);
        (deadline < NEVER).then(|| deadline.millis() - now.wall.millis() - rest)
    }

    /// The first executions that lack only a place and for which this replica acts.
    fn contenders(&mut self) -> Vec<Contender> {
        let profiles: Vec<_> = self.life.waiting.profiles().take(WINDOW).collect();
        let mut possible = std::collections::BTreeSet::new();
        for profile in profiles {
            if self.life.is_only_full(profile) {
                possible.insert(profile);
            }
        }
        let skip = |profile| !possible.contains(&profile);
        let ids = self.life.first_waiting(CONTENDERS, skip, |id| {
            self.share.asking.contains_key(&id)
                || self.life.promised.contains_key(&id)
                || !self.life.is_mine(id)
        });
        let contender = |id| {
            let (waiter, effective) = self.life.waiting.get(id)?;
            self.contender(id, waiter, effective)
        };
        ids.into_iter().filter_map(contender).collect()
    }

    /// A waiting, or preempted and parked, execution as a contender.
    pub(crate) fn contender(
        &self,
        id: ExecutionId,
        waiter: Waiter,
        effective: i32,
    ) -> Option<Contender> {
        let now = self.life.now;
        let e = self.life.cluster().execution(id)?;
        let profile = self.life.cluster().profiles.get(e.profile)?;
        let fresh = self.life.steps_back_for(e).is_some();
        let waits = e.stage == Stage::Pending || e.is_aside() && e.order().is_none();
        (waits && !e.is_appending() && !fresh).then(|| Contender {
            id,
            tenant: waiter.tenant,
            priority: waiter.priority,
            effective,
            deadline: waiter.rank.deadline,
            // Its attained service, independent of its rank.
            level: order::level(&self.life.config, profile, e.attained_ms(now.mono)),
            rest_ms: order::rest_ms(profile, e.attained_ms(now.mono)),
            slack_ms: self.slack_ms(profile, e),
        })
    }

    pub(crate) fn give_way(
        &mut self,
        victim: Victim,
        contender: &Contender,
        rule: Rule,
        reason: String,
    ) {
        let now = self.life.now;
        let cause = Cause::Preempted {
            rule,
            by: Some(contender.id),
            reason,
        };
        let asked = (victim.id, now.mono);
        self.share.asking.insert(contender.id, asked);
        // The victim must not move to a place that is reserved for a gang.
        let first = self.life.leading();
        let first = first.filter(|f| f.keeps || f.members.contains(&contender.id));
        let kept = first.map(|first| Arc::clone(&first.places));
        let node = self.life.cluster().node(victim.node).id.clone();
        let note = format!(
            "{} on {node} gives way to it at its next boundary",
            victim.id
        );
        self.life.note(contender.id, note);
        // If only its device is wanted, another device of the same node will do.
        let node = self.life.cluster().node(victim.node);
        let leaving = match victim.claim.device() {
            Some(device) if node.held() < node.slots() => Leaving::Place(victim.node, Some(device)),
            _ => Leaving::Node(victim.node),
        };
        let ask = self.life.cluster().execution(victim.id).map(|e| {
            let ask = Ask { kept, ..Ask::of(e) };
            ask.leaves(Some(leaving))
        });
        let elsewhere = ask.and_then(|ask| self.life.choose(&ask));
        match elsewhere {
            Some(choice) => self.life.order_yield_to(victim.id, choice, cause, None),
            None => {
                let gives = GivesWay {
                    id: victim.id,
                    node: victim.node,
                    to: contender.id,
                    rest_ms: contender.rest_ms,
                };
                parking::park_for(&mut self.life, gives, cause);
            }
        }
    }

    /// Preempts executions for the leading gang: one for each missing place, or none at all.
    pub(crate) fn preempt_for_gang(&mut self, victims: &mut Vec<Victim>) {
        let now = self.life.now;
        let Some(leading) = self.life.leading() else {
            return;
        };
        let (members, key) = (leading.members.clone(), leading.key.clone());
        let effective = leading.turn.effective;
        // The replica that holds the reservations of all members acts, whichever is preferred now.
        if !members
            .iter()
            .all(|id| self.quotas.is_admitted(&self.life, *id))
        {
            return;
        }
        let lacking = self.gangs.lacking(&self.life).unwrap_or_default();
        let free = self.unasked(&members, lacking);
        let lacks = free.len();
        let mut chosen = Vec::new();
        let mut left: Vec<Victim> = std::mem::take(victims);
        for id in free {
            let waiter = self.life.waiter_of(id);
            let contender = waiter.and_then(|w| self.contender(id, w, effective));
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
        if enough && lacks > 0 {
            self.life.keep_for_leading();
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
}
