//! Makes what runs give way to what waits: to a higher priority, to a deadline that would be
//! missed, to a tenant below its share, to one that has attained less when a slice of time is over.
//! Of those that may be asked the one with the lowest priority and then the least regret
//! ([`crate::share::regret`]) gives way at its next boundary: to another place where there is one,
//! else its pause keeps what is worth keeping ([`super::aside`]). The one that it gave way to goes
//! first then.
//!
//! A look is bounded: at the first 16 that wait and at 1,024 that run, the next ones in turn.

use std::sync::Arc;

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, ExecutionId, Timestamp};

use super::aside::{GivesWay, is_aside};
use super::{Action, Policy};
use crate::cluster::{NodeIx, Order, Presence, Stage, Wanted};
use crate::placement::{self, Ask, Leaving};
use crate::places::Claim;
use crate::profile::Profile;
use crate::share::order::{self, Discipline, NEVER};
use crate::share::pause::seconds;
use crate::share::queue::Waiter;
use crate::share::regret::{Regret, residency_ms};
use crate::share::tenants::TenantIx;
use crate::time::{Millis, Now};
use crate::view::LedgerView;

/// How many of those that wait are looked at.
const CONTENDERS: usize = 16;
/// How many of those that run are looked at.
const WINDOW: usize = 1_024;
/// How many places are tried for one that waits.
const TRIES: usize = 8;
/// How many that are spared are named.
const NAMED: usize = 3;

/// One that waits and may ask another to give way.
pub(super) struct Contender {
    pub id: ExecutionId,
    tenant: TenantIx,
    priority: i32,
    effective: i32,
    deadline: Timestamp,
    level: u32,
    rest_ms: u64,
    /// Milliseconds that are left for it beyond what it still takes, where it has a deadline.
    slack_ms: Option<i64>,
}

/// One that runs and may be asked.
pub(super) struct Victim {
    pub id: ExecutionId,
    node: NodeIx,
    claim: Claim,
    tenant: TenantIx,
    priority: i32,
    deadline: Timestamp,
    level: u32,
    slack_ms: Option<i64>,
    runs_ms: u64,
    regret: Regret,
}

/// What tenants hold once all that was ordered has happened.
struct Holdings<'a> {
    policy: &'a Policy,
    changes: Vec<(TenantIx, f64)>,
}

impl Holdings<'_> {
    fn held(&self, tenant: TenantIx) -> f64 {
        let coming = self.changes.iter().filter(|(t, _)| *t == tenant);
        f64::from(self.policy.cluster.tenants.held(tenant)) + coming.map(|(_, n)| n).sum::<f64>()
    }

    fn fair(&self, tenant: TenantIx) -> f64 {
        let waits = |ix| self.policy.waiting.of_tenant(ix) > 0;
        self.policy.cluster.tenants.fair(tenant, waits)
    }

    /// True where one more is still within its share.
    fn may_have(&self, tenant: TenantIx) -> bool {
        self.held(tenant) + 1.0 <= self.fair(tenant)
    }

    /// True where one less is still its share.
    fn can_spare(&self, tenant: TenantIx) -> bool {
        self.held(tenant) - 1.0 >= self.fair(tenant)
    }
}

impl Policy {
    /// Learns from a message what sharing goes by.
    pub(super) fn note_sharing(&mut self, now: Now, view: &LedgerView<'_>) {
        let id = view.state.execution;
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        let boundary = view.event("boundary");
        if !self.loaded && e.attained == Default::default() {
            // What it has had before this policy service began.
            let (ms, at) = (view.state.compute_us() / 1_000, view.state.at());
            let tenant = e.tenant.clone();
            self.cluster.tenants.credit(&tenant, ms, now.moment_of(at));
        }
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        if boundary.is_some() || e.attained == Default::default() {
            e.attained.ms = view.state.compute_us() / 1_000;
            e.attained.at = now.moment_of(view.state.at());
        }
        let started = matches!(e.stage, Stage::Started(..));
        if let Some(boundary) = boundary.filter(|_| started)
            && let (Some(index), Some(us)) = (boundary.index, boundary.compute_us)
        {
            let rhythm = self.share.rhythms.entry(id).or_default();
            if rhythm.last.is_none() && view.state.commits() > 1 {
                // Its earlier boundaries were not seen here: how many lie behind it is not known.
                rhythm.last = Some((index, now.mono));
            } else {
                rhythm.committed(now.mono, index, us);
            }
        }
        if let Some(since) = view.event("started").and_then(|s| s.computing_since())
            && let Some(bound) = view.state.moved_at()
        {
            #[expect(clippy::cast_precision_loss, reason = "a short time")]
            let took_ms = (since.micros() - bound.micros()) as f64 / 1_000.0;
            let bytes = self.cluster.execution(id).map_or(0, |e| e.state_bytes);
            self.share.take_up.began(took_ms, bytes);
            if view.state.epoch > 1 {
                self.share.rhythms.entry(id).or_default().moved(took_ms);
            }
        }
        let yielded = view.event("yielded").and_then(|y| y.cause());
        if let Some(Cause::Preempted { rule, by, .. }) = yielded {
            if rule == Rule::Quota {
                self.left_quota(now, id);
            }
            if let Some(by) = by {
                self.gave_way(now, by);
            }
        }
        let parked = view.event("parked").and_then(|p| p.cause());
        let stood = self
            .cluster
            .execution(id)
            .is_some_and(|e| e.parked().is_some());
        if matches!(parked, Some(Cause::Preempted { .. })) && !stood {
            self.share.rhythms.entry(id).or_default().parks += 1;
        }
        self.note_deadline(id);
    }

    /// It has ended.
    pub(super) fn forget_sharing(&mut self, id: ExecutionId) {
        self.share.rhythms.remove(&id);
        self.share.asking.remove(&id);
        self.share.promised.remove(&id);
        self.share.deadlines.forget(id);
    }

    /// Looks who should give way to whom.
    pub(super) fn preempt(&mut self, now: Now, out: &mut Vec<Action>) {
        let due = now.mono.since(self.share.reviewed) >= self.config.preempt_review_ms;
        let nobody = self.waiting.is_empty() && self.holds.first.is_none();
        if !due || nobody || self.config.discipline == Discipline::Fifo {
            return;
        }
        self.share.reviewed = now.mono;
        self.waiting.age(&self.config, now.mono);
        self.forget_vain_orders();
        let contenders = self.contenders(now);
        if contenders.is_empty() && self.holds.first.is_none() {
            return;
        }
        let mut victims = self.victims(now);
        for contender in contenders {
            let Some((at, rule)) = self.choose_victim(now, &contender, &victims) else {
                continue;
            };
            let reason = self.reason(&contender, at, rule, &victims);
            let victim = victims.swap_remove(at);
            self.give_way(now, victim, &contender, rule, reason, out);
        }
        self.preempt_for_gang(now, &mut victims, out);
    }

    /// Orders of which nothing came.
    fn forget_vain_orders(&mut self) {
        let cluster = &self.cluster;
        self.share.asking.retain(|by, (victim, _)| {
            let order = cluster.execution(*victim).and_then(|e| e.order());
            order.is_some_and(
                |o| matches!(&o.cause, Cause::Preempted { by: Some(b), .. } if b == by),
            )
        });
    }

    fn slack_ms(&self, now: Now, profile: &Profile, e: &crate::cluster::Execution) -> Option<i64> {
        let deadline = order::deadline(&self.config, profile, e.submitted_at);
        let rest = order::rest_ms(profile, e.attained_ms(now.mono));
        let rest = i64::try_from(rest).unwrap_or(i64::MAX);
        (deadline < NEVER).then(|| deadline.millis() - now.wall.millis() - rest)
    }

    /// The first that wait for nothing but room, and for whom this replica acts.
    fn contenders(&mut self, now: Now) -> Vec<Contender> {
        let profiles: Vec<_> = self.waiting.profiles().take(WINDOW).collect();
        let mut possible = std::collections::BTreeSet::new();
        for profile in profiles {
            if self.is_only_full(now, profile) {
                possible.insert(profile);
            }
        }
        let skip = |profile| !possible.contains(&profile);
        let ids = self.first_waiting(CONTENDERS, skip, |id| {
            self.share.asking.contains_key(&id)
                || self.share.promised.contains_key(&id)
                || !self.is_mine(id)
        });
        let contender = |id| {
            let (waiter, effective) = self.waiting.get(id)?;
            self.contender(now, id, waiter, effective)
        };
        ids.into_iter().filter_map(contender).collect()
    }

    /// One that waits, or was set aside, as one to whom others may give way.
    pub(super) fn contender(
        &self,
        now: Now,
        id: ExecutionId,
        waiter: Waiter,
        effective: i32,
    ) -> Option<Contender> {
        let e = self.cluster.execution(id)?;
        let profile = self.cluster.profiles.get(e.profile)?;
        let fresh = self.steps_back_for(now, e).is_some();
        let waits = e.stage == Stage::Pending || is_aside(e) && e.order().is_none();
        (waits && !e.busy && !fresh).then(|| Contender {
            id,
            tenant: waiter.tenant,
            priority: waiter.priority,
            effective,
            deadline: waiter.rank.deadline,
            level: waiter.rank.level,
            rest_ms: order::rest_ms(profile, e.attained_ms(now.mono)),
            slack_ms: self.slack_ms(now, profile, e),
        })
    }

    /// Those that run, may be moved and have been where they are for long enough; some at a time.
    fn victims(&mut self, now: Now) -> Vec<Victim> {
        let count = self.cluster.node_count();
        let mut looked = 0;
        let mut victims = Vec::new();
        for step in 0..count {
            if looked >= WINDOW {
                break;
            }
            let ix = NodeIx((self.share.window + step) % count);
            let node = self.cluster.node(ix);
            looked += node.holds.len();
            if looked >= WINDOW {
                self.share.window = ix.0 + 1;
            }
            if node.presence != Presence::Up || node.is_draining() || node.flags.cordoned {
                continue;
            }
            victims.extend(node.holds.iter().filter_map(|id| self.victim(now, *id, ix)));
        }
        victims
    }

    fn victim(&self, now: Now, id: ExecutionId, node: NodeIx) -> Option<Victim> {
        let e = self.cluster.execution(id)?;
        let refused = e.avoided().iter();
        let refused = refused.filter(|a| a.node == node && now.mono < a.until);
        let free = matches!(e.stage, Stage::Started(..))
            && !e.busy
            && e.order().is_none()
            && e.parked().is_none()
            && refused.count() == 0;
        if !free {
            return None;
        }
        let profile = self.cluster.profiles.get(e.profile)?;
        let rhythm = self.share.rhythms.get(&id);
        let regret = Regret::of(e, rhythm, &self.share.take_up, now.mono);
        let runs_ms = now.mono.since(e.since);
        let residency = match self.config.discipline {
            Discipline::Shared => residency_ms(&self.config, regret.move_ms),
            _ => self.config.preempt_residency_ms,
        };
        let tenant = match self.config.discipline {
            Discipline::Shared => self.cluster.tenants.find(&e.tenant)?,
            _ => TenantIx(0),
        };
        (runs_ms >= residency).then(|| Victim {
            id,
            node,
            claim: e.claim,
            tenant,
            priority: order::priority(&self.config, profile),
            deadline: order::deadline(&self.config, profile, e.submitted_at),
            level: order::level(&self.config, profile, e.attained_ms(now.mono)),
            slack_ms: self.slack_ms(now, profile, e),
            runs_ms,
            regret,
        })
    }

    /// By which rule one that runs gives way to one that waits.
    fn rule(&self, now: Now, holdings: &Holdings<'_>, c: &Contender, v: &Victim) -> Option<Rule> {
        let slice = self.config.slice_ms;
        let discipline = self.config.discipline;
        if self.config.preempt && c.priority > v.priority {
            return Some(Rule::Priority);
        }
        let shared = discipline == Discipline::Shared && self.config.preempt;
        if shared && c.priority >= v.priority {
            let rest = i64::try_from(c.rest_ms).unwrap_or(i64::MAX);
            let margin = i64::try_from(slice).unwrap_or(i64::MAX);
            let would_miss = c.slack_ms.is_some_and(|ms| (0..margin).contains(&ms));
            if would_miss && v.slack_ms.is_none_or(|ms| ms > rest.saturating_add(margin)) {
                return Some(Rule::Deadline);
            }
            let others = c.tenant != v.tenant;
            if others && holdings.may_have(c.tenant) && holdings.can_spare(v.tenant) {
                return Some(Rule::FairShare);
            }
        }
        let first = self.holds.first.as_ref();
        let gang = first.filter(|first| first.members.contains(&c.id));
        let waited = |since: Millis| now.mono.since(since) > slice;
        let crowded = match discipline {
            Discipline::Shared => {
                self.share.crowded.is_some_and(waited) || gang.is_some_and(|g| waited(g.since))
            }
            Discipline::LeastAttained => true,
            Discipline::Fifo | Discipline::Priority => false,
        };
        // Who is ahead by its long wait alone has a turn against one that has been there as long as
        // ageing takes; or many long ones would change places with every slice.
        let ahead = (c.deadline, c.level) < (v.deadline, v.level);
        let first = c.priority >= v.priority && ahead
            || c.effective > v.priority && v.runs_ms >= self.config.ageing_ms;
        let fair = c.tenant == v.tenant || holdings.may_have(c.tenant);
        (self.config.slicing && crowded && v.runs_ms >= slice && first && fair)
            .then_some(Rule::TimeSlice)
    }

    /// Who gives way: the lowest priority, then the least regret, of those whose place would do.
    pub(super) fn choose_victim(
        &mut self,
        now: Now,
        contender: &Contender,
        victims: &[Victim],
    ) -> Option<(usize, Rule)> {
        let mut changes = Vec::new();
        for (by, (victim, _)) in &self.share.asking {
            let tenant = |id| {
                let e = self.cluster.execution(id)?;
                self.cluster.tenants.find(&e.tenant)
            };
            changes.extend(tenant(*by).map(|t| (t, 1.0)));
            changes.extend(tenant(*victim).map(|t| (t, -1.0)));
        }
        let holdings = Holdings {
            policy: self,
            changes,
        };
        let mut found: Vec<_> = victims
            .iter()
            .enumerate()
            .filter_map(|(at, v)| Some((at, self.rule(now, &holdings, contender, v)?)))
            .collect();
        found.sort_by(|(a, _), (b, _)| {
            let (a, b) = (&victims[*a], &victims[*b]);
            let by_regret = a.regret.total_ms().total_cmp(&b.regret.total_ms());
            a.priority
                .cmp(&b.priority)
                .then(by_regret)
                .then(b.id.cmp(&a.id))
        });
        let e = self.cluster.execution(contender.id)?;
        let (profile, left, avoid) = (e.profile, e.left().to_vec(), e.avoided().to_vec());
        // What is kept for a gang is no place for this one, whoever gives way there.
        let kept = self.kept_from(contender.id);
        let here = e.stage.node();
        let here = here.filter(|ix| kept.as_ref().is_none_or(|kept| !kept.contains(ix)));
        found.into_iter().take(TRIES).find(|(at, _)| {
            let victim = &victims[*at];
            if here == Some(victim.node) && self.fits_back(now, contender.id, Some(victim.claim)) {
                // It was set aside there, and only the slot is missing, or its device.
                return true;
            }
            let ask = Ask {
                only: Some(victim.node),
                counted: Some((victim.node, victim.claim)),
                avoid: &avoid,
                kept: kept.as_deref(),
                ..Ask::new(profile, &left)
            };
            let (cluster, config) = (&self.cluster, &self.config);
            placement::choose(&mut self.rankings, cluster, config, now, &ask).is_some()
        })
    }

    /// Why this one, in words.
    pub(super) fn reason(
        &self,
        c: &Contender,
        at: usize,
        rule: Rule,
        victims: &[Victim],
    ) -> String {
        let v = &victims[at];
        let why = match rule {
            Rule::Priority => format!(
                "{} waits with priority {}, and this one has {}",
                c.id, c.priority, v.priority
            ),
            Rule::Deadline => format!(
                "{} would miss its deadline: {} are left beyond what it takes",
                c.id,
                seconds(as_ms(c.slack_ms.unwrap_or(0)))
            ),
            Rule::FairShare => format!(
                "{} waits, whose tenant {} holds {} places, and this one's tenant {} holds {}",
                c.id,
                self.cluster.tenants.name(c.tenant),
                self.cluster.tenants.held(c.tenant),
                self.cluster.tenants.name(v.tenant),
                self.cluster.tenants.held(v.tenant)
            ),
            Rule::TimeSlice => format!(
                "{} waits at service level {} and priority {}, and this one has run here for {} \
                 and is at level {} and priority {}",
                c.id,
                c.level,
                c.effective,
                seconds(as_ms(i64::try_from(v.runs_ms).unwrap_or(i64::MAX))),
                v.level,
                v.priority
            ),
            Rule::Quota => format!("{} waits", c.id),
        };
        let mut spared: Vec<_> = victims.iter().filter(|o| o.id != v.id).collect();
        spared.sort_by(|a, b| a.regret.total_ms().total_cmp(&b.regret.total_ms()));
        let mut words = format!("{why}; its regret is {}", v.regret.in_words());
        if !spared.is_empty() {
            let named: Vec<_> = spared
                .iter()
                .take(NAMED)
                .map(|o| format!("{} {}", o.id, seconds(o.regret.total_ms())))
                .collect();
            words += &format!("; spared: {}", named.join(", "));
            if spared.len() > NAMED {
                words += &format!(" and {} others", spared.len() - NAMED);
            }
        }
        words
    }

    pub(super) fn give_way(
        &mut self,
        now: Now,
        victim: Victim,
        contender: &Contender,
        rule: Rule,
        reason: String,
        out: &mut Vec<Action>,
    ) {
        let cause = Cause::Preempted {
            rule,
            by: Some(contender.id),
            reason,
        };
        let asked = (victim.id, now.mono);
        self.share.asking.insert(contender.id, asked);
        // Nor where a gang could be that what becomes free is kept for.
        let first = self.holds.first.as_ref();
        let first = first.filter(|f| f.keeps || f.members.contains(&contender.id));
        let kept = first.map(|first| Arc::clone(&first.nodes));
        let node = self.cluster.node(victim.node).id.clone();
        if let Some(e) = self.cluster.execution_mut(contender.id) {
            let note = format!(
                "{} on {node} gives way to it at its next boundary",
                victim.id
            );
            e.extra().note = Some(note);
        }
        // Where only its device is wanted, another one of the same node will do.
        let node = self.cluster.node(victim.node);
        let leaving = match victim.claim.device() {
            Some(device) if node.held() < node.slots() => Leaving::Place(victim.node, Some(device)),
            _ => Leaving::Node(victim.node),
        };
        let elsewhere = self.cluster.execution(victim.id).and_then(|e| {
            let ask = Ask {
                avoid: e.avoided(),
                kept: kept.as_deref(),
                ..Ask::new(e.profile, e.left())
            }
            .leaves(Some(leaving));
            let (cluster, config) = (&self.cluster, &self.config);
            placement::choose(&mut self.rankings, cluster, config, now, &ask)
        });
        match elsewhere {
            Some(choice) => self.give_order(now, victim.id, choice, cause, None, out),
            None => {
                let gives = GivesWay {
                    id: victim.id,
                    node: victim.node,
                    to: contender.id,
                    rest_ms: contender.rest_ms,
                };
                self.set_aside(now, gives, cause, out);
            }
        }
    }

    /// Has it yield without a destination: it waits as pending then.
    pub(super) fn order_off(
        &mut self,
        now: Now,
        id: ExecutionId,
        cause: Cause,
        out: &mut Vec<Action>,
    ) {
        let order = Order {
            wants: Wanted::Yield,
            to: None,
            claim: Claim::Host,
            cause,
            decision: None,
            taken: false,
        };
        self.put_order(now, id, order, None, out);
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn as_ms(ms: i64) -> f64 {
    ms as f64
}
