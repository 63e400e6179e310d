//! Chooses which running execution is preempted, and by which rule ([`super::preempting`]).
//!
//! A round is bounded. It reads 1,024 running executions; the next round goes on behind them. The
//! candidates that a rule allows are tried in order of regret until the place of one would do. A
//! node where the waiting execution could never run costs one look into its ranking. Executions
//! with the same claim on one node are tried once.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::scheduling::Rule;
use fiec_schemas::{ExecutionId, Timestamp};

use super::Sharing;
use super::preempting::Contender;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::tenants::TenantIx;
use crate::lifecycle::cluster::{NodeIx, Presence, Stage};
use crate::lifecycle::placement::Ask;
use crate::lifecycle::placement::kept::KeptPlaces;
use crate::lifecycle::queue::order::{self, Discipline};
use crate::lifecycle::queue::regret::{Regret, residency_ms};
use crate::time::Millis;
use crate::time::seconds;

/// Most running executions that one round reads.
pub(super) const WINDOW: usize = 1_024;
/// Most spared executions that a reason names.
const NAMED: usize = 3;

/// A running execution that may be preempted.
pub(super) struct Victim {
    pub id: ExecutionId,
    pub node: NodeIx,
    pub claim: Claim,
    tenant: TenantIx,
    priority: i32,
    deadline: Timestamp,
    level: u32,
    slack_ms: Option<i64>,
    runs_ms: u64,
    regret: Regret,
}

/// The result of a choice.
pub(super) struct Chosen {
    /// Index into the candidates.
    pub at: usize,
    pub rule: Rule,
    /// Others that the rule allows, with more regret; the first few.
    spared: Vec<usize>,
    /// Number of all spared executions.
    spared_count: usize,
    /// Candidates with less regret whose place would not do.
    in_vain: usize,
}

/// Tenants' holdings after all pending orders are obeyed.
struct Holdings<'a> {
    life: &'a Lifecycle,
    changes: Vec<(TenantIx, f64)>,
}

impl Holdings<'_> {
    fn held(&self, tenant: TenantIx) -> f64 {
        let coming = self.changes.iter().filter(|(t, _)| *t == tenant);
        f64::from(self.life.cluster().tenants.held(tenant)) + coming.map(|(_, n)| n).sum::<f64>()
    }

    fn fair(&self, tenant: TenantIx) -> f64 {
        let waits = |ix| self.life.waiting().of_tenant(ix) > 0;
        self.life.cluster().tenants.fair(tenant, waits)
    }

    /// True if one more execution stays within the tenant's share.
    fn may_have(&self, tenant: TenantIx) -> bool {
        self.held(tenant) + 1.0 <= self.fair(tenant)
    }

    /// True if the tenant keeps its share with one execution less.
    fn can_spare(&self, tenant: TenantIx) -> bool {
        self.held(tenant) - 1.0 >= self.fair(tenant)
    }
}

impl Sharing {
    /// Running executions that may be moved and have run for long enough, a window at a time.
    pub(super) fn victims(&mut self, life: &mut Lifecycle) -> Vec<Victim> {
        let nodes = life.cluster().keys();
        let next = |ix: &NodeIx| Some(*ix) > self.window;
        let first = nodes.iter().position(next).unwrap_or(0);
        let (before, after) = nodes.split_at(first);
        let mut looked = 0;
        let mut victims = Vec::new();
        for ix in after.iter().chain(before).copied() {
            if looked >= WINDOW {
                break;
            }
            let node = life.cluster().node(ix);
            looked += node.assigned.len();
            if looked >= WINDOW {
                self.window = Some(ix);
            }
            if node.presence != Presence::Up || node.is_draining() || node.flags.cordoned {
                continue;
            }
            victims.extend(
                node.assigned
                    .iter()
                    .filter_map(|id| self.victim(life, *id, ix)),
            );
        }
        victims
    }

    fn victim(&self, life: &Lifecycle, id: ExecutionId, node: NodeIx) -> Option<Victim> {
        let now = life.now;
        let e = life.cluster().execution(id)?;
        let free = matches!(e.stage, Stage::Started(..))
            && !e.is_appending()
            && e.order().is_none()
            && e.parked().is_none()
            && !e.was_told(now.mono);
        if !free {
            return None;
        }
        let profile = life.cluster().profiles.get(e.profile)?;
        let rhythm = life.rhythm(id);
        let regret = Regret::of(e, rhythm, life.take_up(), now.mono);
        let runs_ms = now.mono.since(e.since);
        let residency = match life.config.discipline {
            Discipline::Shared => residency_ms(&life.config, regret.move_ms),
            _ => life.config.preempt_residency_ms,
        };
        let tenant = match life.config.discipline {
            Discipline::Shared => life.cluster().tenants.find(&e.tenant)?,
            _ => TenantIx(0),
        };
        (runs_ms >= residency).then(|| Victim {
            id,
            node,
            claim: e.claim,
            tenant,
            priority: order::priority(&life.config, profile),
            deadline: order::deadline(&life.config, profile, e.submitted_at),
            level: order::level(&life.config, profile, e.attained_ms(now.mono)),
            slack_ms: self.slack_ms(life, profile, e),
            runs_ms,
            regret,
        })
    }

    /// The rule by which a running execution yields to a waiting one, if any.
    fn rule(
        &self,
        life: &Lifecycle,
        holdings: &Holdings<'_>,
        c: &Contender,
        v: &Victim,
    ) -> Option<Rule> {
        let now = life.now;
        let slice = life.config.slice_ms;
        let discipline = life.config.discipline;
        if life.config.preempt && c.priority > v.priority {
            return Some(Rule::Priority);
        }
        let shared = discipline == Discipline::Shared && life.config.preempt;
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
        let gang = life
            .leading()
            .filter(|leading| leading.members.contains(&c.id));
        let waited = |since: Millis| now.mono.since(since) > slice;
        let crowded = match discipline {
            Discipline::Shared => {
                life.waiting().since().is_some_and(waited) || gang.is_some_and(|g| waited(g.since))
            }
            Discipline::LeastAttained => true,
            Discipline::Fifo | Discipline::Priority => false,
        };
        // An execution that leads only by its long wait preempts one that has run for the ageing
        // time. Otherwise many long executions would swap places with every slice.
        let ahead = (c.deadline, c.level) < (v.deadline, v.level);
        let leads = (c.priority >= v.priority && ahead)
            || (c.effective > v.priority && v.runs_ms >= life.config.ageing_ms);
        let fair = c.tenant == v.tenant || holdings.may_have(c.tenant);
        (life.config.sharing.slicing && crowded && v.runs_ms >= slice && leads && fair)
            .then_some(Rule::TimeSlice)
    }

    /// Chooses the lowest priority, then the least regret, among those whose place would do.
    /// `planned`: for whom others were chosen in this round, and not ordered yet.
    pub(super) fn choose_victim(
        &self,
        life: &mut Lifecycle,
        contender: &Contender,
        victims: &[Victim],
        planned: &[(ExecutionId, ExecutionId)],
    ) -> Option<Chosen> {
        let e = life.cluster().execution(contender.id)?;
        let (profile, here) = (e.profile, e.stage.node());
        let nodes = victims.iter().map(|v| v.node);
        let could = life.could_be(profile, nodes);
        let mut changes = Vec::new();
        let tenant = |id| {
            let e = life.cluster().execution(id)?;
            life.cluster().tenants.find(&e.tenant)
        };
        let asked = self.asking.iter().map(|(by, (victim, _))| (*by, *victim));
        for (by, victim) in asked.chain(planned.iter().copied()) {
            changes.extend(tenant(by).map(|t| (t, 1.0)));
            changes.extend(tenant(victim).map(|t| (t, -1.0)));
        }
        let holdings = Holdings { life, changes };
        let mut found: Vec<_> = victims
            .iter()
            .enumerate()
            .filter_map(|(at, v)| Some((at, self.rule(life, &holdings, contender, v)?)))
            .collect();
        found.sort_by(|(a, _), (b, _)| {
            let (a, b) = (&victims[*a], &victims[*b]);
            let by_regret = a.regret.total_ms().total_cmp(&b.regret.total_ms());
            a.priority
                .cmp(&b.priority)
                .then(by_regret)
                .then(b.id.cmp(&a.id))
        });
        // Places that are reserved for a gang are not available, even after a preemption.
        let kept = life.kept_from(contender.id);
        let mut asked = BTreeMap::new();
        let would_do = |(at, _): &(usize, Rule)| {
            let Victim { node, claim, .. } = victims[*at];
            let asks = could[*at] || here == Some(node);
            asks && *asked
                .entry((node, claim))
                .or_insert_with(|| self.would_serve(life, contender.id, (node, claim), &kept))
        };
        let chosen = found.iter().position(would_do)?;
        let rest = &found[chosen + 1..];
        Some(Chosen {
            at: found[chosen].0,
            rule: found[chosen].1,
            spared: rest.iter().take(NAMED).map(|(at, _)| *at).collect(),
            spared_count: rest.len(),
            in_vain: chosen,
        })
    }

    /// True if a waiting execution could run on a node on which this claim and a slot become free.
    fn would_serve(
        &self,
        life: &Lifecycle,
        id: ExecutionId,
        (node, claim): (NodeIx, Claim),
        kept: &Option<Arc<KeptPlaces>>,
    ) -> bool {
        let Some(e) = life.cluster().execution(id) else {
            return false;
        };
        if e.stage.node() == Some(node) && life.goes_on_here(id, Some(claim), kept) {
            // It was parked there, and lacks only a slot or its device.
            return true;
        }
        let ask = Ask {
            counted: Some((node, claim)),
            kept: kept.clone(),
            ..Ask::of(e)
        };
        life.would_do(&ask, node)
    }

    /// The reason in words.
    pub(super) fn reason(
        &self,
        life: &Lifecycle,
        c: &Contender,
        chosen: &Chosen,
        victims: &[Victim],
    ) -> String {
        let v = &victims[chosen.at];
        let why = match chosen.rule {
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
                life.cluster().tenants.name(c.tenant),
                life.cluster().tenants.held(c.tenant),
                life.cluster().tenants.name(v.tenant),
                life.cluster().tenants.held(v.tenant)
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
        let mut words = format!("{why}; its regret is {}", v.regret.in_words());
        match chosen.in_vain {
            0 => {}
            1 => {
                words += "; one that would be preempted first is on a node that the waiting one cannot use"
            }
            n => {
                words += &format!(
                    "; {n} that would be preempted first are on nodes that the waiting one cannot use"
                )
            }
        }
        let named = chosen.spared.iter().map(|at| {
            let other = &victims[*at];
            format!("{} {}", other.id, seconds(other.regret.total_ms()))
        });
        let named: Vec<_> = named.collect();
        if !named.is_empty() {
            words += &format!("; spared: {}", named.join(", "));
            if chosen.spared_count > NAMED {
                words += &format!(" and {} others", chosen.spared_count - NAMED);
            }
        }
        words
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds for people")]
fn as_ms(ms: i64) -> f64 {
    ms as f64
}
