//! Applies what holds executions back. This file has the dependencies; [`super::reserve`] has
//! reservations and [`super::gang`] gangs.

use fiec_schemas::{BatchId, Event, ExecutionId, Fault, PhaseKind, Tenant};

use super::{Action, Policy};
use crate::fate::{Fate, Seen};
use crate::gangs::{Gangs, Members};
use crate::holds::{Awaited, Held, HoldSpec, Holds};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::Bonds;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::quotas::{Quotas, Sets};
use crate::share;
use crate::time::Millis;

/// Most ledgers that one round looks at.
const LOOKS: usize = 256;

impl Policy {
    /// Stores the holds of a new execution. `bound`: it was bound before, so its dependencies have
    /// ended.
    pub(crate) fn take_holds(
        &mut self,
        id: ExecutionId,
        tenant: &Tenant,
        spec: Option<HoldSpec>,
        bound: bool,
    ) {
        let Some(spec) = spec else {
            return;
        };
        let mut held = Held::default();
        for dependency in spec.after.iter().filter(|_| !bound) {
            // A dependency without an execution was refused on submission.
            if let Some(other) = dependency.execution(tenant)
                && !held.after.iter().any(|a| a.id == other)
            {
                held.after.push(Awaited {
                    id: other,
                    name: dependency.id.clone(),
                    on: dependency.on,
                });
            }
        }
        for awaited in &held.after {
            self.holds.waiters.entry(awaited.id).or_default().insert(id);
            if !self.life.knows(awaited.id) {
                self.holds.look_at.entry(awaited.id).or_default();
            }
        }
        let batch = spec.batch.as_ref();
        let bonds = Bonds {
            batch: batch.map(|name| BatchId::from_client(tenant, name)),
            at_once: spec.at_once,
            gang: spec.gang,
        };
        self.life.note_bonds(id, bonds);
        self.quotas.join(&self.life, id);
        self.life.changed().holds = true;
        if !held.after.is_empty() {
            self.holds.held.insert(id, Box::new(held));
        }
        self.gangs.join(&mut self.life, id);
    }

    /// True for a new execution that must not be bound by its first message.
    pub(crate) fn begins_held(&self, tenant: &Tenant, spec: Option<&HoldSpec>) -> bool {
        let batch = |name| BatchId::from_client(tenant, name);
        self.quotas.is_limited(tenant)
            || spec.is_some_and(|spec| {
                let limited = self.quotas.at_once(spec.batch.as_ref().map(batch));
                let own = !spec.after.is_empty() || spec.gang.is_some() || spec.at_once.is_some();
                own || limited.is_some()
            })
    }

    /// Handles the end of an execution.
    pub(crate) fn ended(&mut self, id: ExecutionId, fate: Fate) {
        self.seen(id, Seen::Ended(fate), true);
    }

    /// Handles the result of a look at a ledger.
    pub(crate) fn looked_up(&mut self, id: ExecutionId, seen: Seen) {
        let now = self.life.now;
        let wall = now.wall.millis();
        let old_ms = i64::try_from(self.life.config.vanished_ms).unwrap_or(i64::MAX);
        // Executions of one batch may get their ledgers a moment apart.
        let youngest = self.holds.waiters.get(&id).into_iter().flatten();
        let youngest =
            youngest.filter_map(|w| Some(self.life.cluster().execution(*w)?.submitted_at));
        let old = youngest.max().is_none_or(|at| wall - at.millis() > old_ms);
        if matches!(seen, Seen::Ended(_)) || (seen == Seen::Vanished && old) {
            self.seen(id, seen, old);
        } else if self.holds.waiters.contains_key(&id) && !self.life.knows(id) {
            let again = now.mono.plus(self.life.config.look_ms);
            self.holds.look_at.insert(id, again);
        }
    }

    fn seen(&mut self, id: ExecutionId, seen: Seen, old: bool) {
        self.holds.look_at.remove(&id);
        for waiter in self.holds.waiters.remove(&id).into_iter().flatten() {
            let Some(held) = self.holds.held.get_mut(&waiter) else {
                continue;
            };
            if !held.learn(id, seen, old) {
                self.holds.waiters.entry(id).or_default().insert(waiter);
                continue;
            }
            self.life.changed().holds = true;
            if held.fails.is_some() {
                self.holds.failing.insert(waiter);
            } else if held.after.is_empty() {
                self.wait_if_pending(waiter);
            }
        }
    }

    /// An execution starts again: those that are about to fail because of its end wait for it.
    pub(crate) fn wakes(&mut self, id: ExecutionId) {
        for waiter in self.holds.failing.clone() {
            let Some(held) = self.holds.held.get_mut(&waiter) else {
                continue;
            };
            if let Some(in_vain) = held.fails.take_if(|vain| vain.awaited.id == id) {
                held.after.push(in_vain.awaited);
                self.holds.failing.remove(&waiter);
                self.holds.waiters.entry(id).or_default().insert(waiter);
            }
        }
    }

    pub(crate) fn wait_if_pending(&mut self, id: ExecutionId) {
        let pending = self.life.cluster().execution(id);
        if pending.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending()) {
            self.wait(id);
        }
    }

    /// Forgets the holds of an execution that no longer lives.
    pub(crate) fn forget_holds(&mut self, id: ExecutionId) {
        if !self.life.knows(id) || self.is_unbound() {
            return;
        }
        if let Some(held) = self.holds.held.remove(&id) {
            for awaited in &held.after {
                if let Some(waiters) = self.holds.waiters.get_mut(&awaited.id) {
                    waiters.remove(&id);
                    if waiters.is_empty() {
                        self.holds.waiters.remove(&awaited.id);
                        self.holds.look_at.remove(&awaited.id);
                    }
                }
            }
        }
        self.gangs.forget(&mut self.life, id);
        self.holds.failing.remove(&id);
        self.quotas.forget(&mut self.life, id);
        self.life.forget_bonds(id);
    }

    /// True if no execution is held back and no tenant has limits.
    pub(crate) fn is_unbound(&self) -> bool {
        self.life.all_bonds().len() == 0 && self.quotas.is_idle()
    }

    /// True if the execution lacks only a place. If it lacks a reservation, this requests one.
    pub(crate) fn may_wait(&mut self, id: ExecutionId) -> bool {
        if self.ranges.awaits_parts(id) {
            return false;
        }
        let pending = self.life.cluster().execution(id);
        if self.is_unbound() || pending.is_none_or(|e| e.stage != Stage::Pending) {
            return true;
        }
        // Its holds and its reservation are not known yet.
        if pending.is_some_and(|e| e.profile == ProfileIx::UNKNOWN) {
            return false;
        }
        if !self.sets().is_free(id) {
            return false;
        }
        if self.gangs.holds_back(&mut self.life, id) {
            return false;
        }
        self.quotas.admit(&mut self.life, id)
    }

    /// For people: why an execution may not be bound now, independent of room.
    pub(crate) fn held_in_words(&self, id: ExecutionId) -> Option<String> {
        let e = self.life.cluster().execution(id)?;
        if e.stage != Stage::Pending {
            return None;
        }
        if let Some(words) = self.ranges.parts_in_words(&self.life, id) {
            return Some(words);
        }
        if let Some(held) = self.holds.held.get(&id) {
            if let Some(in_vain) = &held.fails {
                return Some(in_vain.words.clone());
            }
            if !held.after.is_empty() {
                return Some(self.awaited_in_words(held));
            }
        }
        let unreserved = |id| self.quotas.in_words(&self.life, id, &self.sets());
        let members = Waiting {
            holds: &self.holds,
            quotas: &self.quotas,
            share: &self.share,
        };
        self.gangs
            .in_words(&self.life, id, &members, unreserved)
            .or_else(|| unreserved(id))
            .or_else(|| self.life.kept_in_words(id))
    }

    /// For people: what would let it be bound.
    pub(crate) fn help_for_held(&self, id: ExecutionId) -> Vec<String> {
        let Some((e, held)) = self
            .life
            .cluster()
            .execution(id)
            .map(|e| (e, self.holds.held.get(&id)))
        else {
            return Vec::new();
        };
        if let Some(help) = self.ranges.help_for_parts(id) {
            return vec![help];
        }
        let bonds = self.life.bonds(id);
        let batch = bonds.and_then(|bonds| bonds.batch);
        let help = match held {
            Some(held) if held.fails.is_some() => return Vec::new(),
            Some(held) if !held.after.is_empty() => {
                format!("the end of the {} that it waits for", held.after.len())
            }
            _ if bonds.is_some_and(|b| b.gang.is_some())
                && !self.gangs.is_alone(&self.life, id) =>
            {
                "all members of its gang being ready, and room for all of them at once".to_owned()
            }
            _ if self.quotas.is_admitted(&self.life, id) => {
                "that gang having started, or more nodes".to_owned()
            }
            _ if self.quotas.at_once(batch).is_some() => {
                "the end of another execution of its batch".to_owned()
            }
            _ => format!(
                "the end of another execution of {0}, or more for it: `fiec quota set {0}`",
                e.tenant
            ),
        };
        vec![help]
    }

    fn awaited_in_words(&self, held: &Held) -> String {
        const NAMED: usize = 5;
        let where_it_is = |id| match self.life.cluster().execution(id).map(|e| e.stage) {
            None => "not known here",
            Some(Stage::Pending) => "pending",
            Some(Stage::Bound(..)) => "bound",
            Some(Stage::Started(..)) => "computing",
            Some(Stage::Paused) => "paused",
            Some(Stage::Held) => "held after a failure",
            Some(Stage::Verifying) => "verifying",
        };
        let named = held.after.iter().take(NAMED).map(|awaited| {
            let how = match awaited.on {
                fiec_schemas::scheduling::AfterOutcome::Ok => "complete",
                fiec_schemas::scheduling::AfterOutcome::Any => "end",
            };
            let name = &awaited.name;
            format!("{name} to {how} (it is {})", where_it_is(awaited.id))
        });
        let mut words = format!("it waits for {}", named.collect::<Vec<_>>().join(", "));
        if held.after.len() > NAMED {
            words += &format!(" and {} others", held.after.len() - NAMED);
        }
        words
    }

    /// Acts on changes of holds.
    pub(crate) fn act_on_holds(&mut self) {
        if self.is_unbound() {
            return;
        }
        let members = Waiting {
            holds: &self.holds,
            quotas: &self.quotas,
            share: &self.share,
        };
        self.gangs.choose_leading(&mut self.life, &members);
        let sweep = self.sweep();
        if !std::mem::take(&mut self.life.changed().holds) && !sweep {
            return;
        }
        self.look_at_ledgers();
        self.fail_what_cannot_run();
        let members = Waiting {
            holds: &self.holds,
            quotas: &self.quotas,
            share: &self.share,
        };
        let round = self.gangs.act(&mut self.life, &members);
        for id in round.unreserved {
            self.quotas.admit(&mut self.life, id);
        }
        self.wait_again(round.alone);
        let sets = Bound {
            holds: &self.holds,
            gangs: &self.gangs,
        };
        let stale = self.quotas.ask(&mut self.life, &sets);
        self.wait_again(stale);
    }

    /// Returns true if it was time to look for unused reservations.
    fn sweep(&mut self) -> bool {
        let share = &self.share;
        let leading = self.life.leading().filter(|leading| leading.keeps);
        let kept_for = leading.map(|leading| leading.members.clone());
        // Another execution yields for it, or places are reserved.
        let asked = |id: ExecutionId| {
            share.asking.contains_key(&id)
                || share.promised.contains_key(&id)
                || kept_for
                    .as_ref()
                    .is_some_and(|members| members.contains(&id))
        };
        let Some(swept) = self.quotas.sweep(&mut self.life, asked) else {
            return false;
        };
        let ranges = &self.ranges;
        let again = swept.requeue.into_iter();
        let again = again.filter(|id| !ranges.awaits_parts(*id));
        self.quotas.queue_again(&mut self.life, again);
        let now = self.life.now.mono;
        for id in swept.unknown {
            self.holds.look_at.entry(id).or_insert(now);
        }
        self.life.changed().holds |= self.gangs.has_due();
        true
    }

    /// What quotas ask about executions.
    pub(crate) fn sets(&self) -> Bound<'_> {
        Bound {
            holds: &self.holds,
            gangs: &self.gangs,
        }
    }

    /// Handles the end of an execution, as its ledger says.
    pub(crate) fn note_end(&mut self, id: ExecutionId, phase: PhaseKind) {
        if let Some(fate) = Fate::of(phase)
            && !self.is_unbound()
        {
            self.ended(id, fate);
        }
    }

    fn look_at_ledgers(&mut self) {
        let now = self.life.now;
        let due = |at: &Millis| *at <= now.mono;
        let ids: Vec<_> = self
            .holds
            .look_at
            .iter()
            .filter(|(_, at)| due(at))
            .map(|(id, _)| *id)
            .take(LOOKS)
            .collect();
        self.life.changed().holds |= ids.len() == LOOKS;
        for id in ids {
            self.holds.look_at.remove(&id);
            let waiter = self.holds.waiters.get(&id).and_then(|w| w.first());
            let tenant = match waiter {
                Some(waiter) => self.life.tenant(*waiter),
                None => self.quotas.tenant_of(id).cloned(),
            };
            let Some(tenant) = tenant else {
                continue;
            };
            if !self.life.knows(id) {
                // Look again if no answer comes.
                let again = now.mono.plus(10 * self.life.config.look_ms);
                self.holds.look_at.insert(id, again);
                self.life.out.push(Action::Lookup {
                    execution: id,
                    tenant,
                });
            }
        }
    }

    fn fail_what_cannot_run(&mut self) {
        let ids: Vec<_> = self.holds.failing.iter().copied().collect();
        for id in ids {
            let Some(e) = self.life.cluster().execution(id) else {
                self.holds.failing.remove(&id);
                continue;
            };
            if e.is_appending() || !matches!(e.stage, Stage::Pending | Stage::Paused) {
                continue;
            }
            if self.life.defers(id, self.life.config.grace_ms) {
                self.life.changed().holds = true;
                continue;
            }
            let held = self.holds.held.get(&id);
            let Some(in_vain) = held.and_then(|held| held.fails.clone()) else {
                self.holds.failing.remove(&id);
                continue;
            };
            let failed = Event::Failed {
                reason: in_vain.words,
                stderr: String::new(),
                fault: Some(Box::new(Fault::Dependency {
                    id: in_vain.awaited.id,
                })),
            };
            self.life.end_with(id, failed);
        }
    }
}

/// What holds executions back apart from quotas.
pub(crate) struct Bound<'a> {
    holds: &'a Holds,
    gangs: &'a Gangs,
}

/// What gangs ask about their members.
pub(crate) struct Waiting<'a> {
    holds: &'a Holds,
    quotas: &'a Quotas,
    share: &'a share::Memory,
}

impl Members for Waiting<'_> {
    fn is_free(&self, id: ExecutionId) -> bool {
        self.holds.is_free(id)
    }

    fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        self.quotas.is_admitted(life, id)
    }

    fn have_reserved(&self, tenant: &Tenant, ids: &[ExecutionId]) -> bool {
        self.quotas.have_reserved(tenant, ids)
    }

    fn is_yielded_to(&self, id: ExecutionId) -> bool {
        self.share.asking.contains_key(&id)
    }
}

impl Sets for Bound<'_> {
    fn is_free(&self, id: ExecutionId) -> bool {
        self.holds.is_free(id)
    }

    fn set_of(&self, life: &Lifecycle, id: ExecutionId) -> Option<Vec<ExecutionId>> {
        self.gangs.set_of(life, id)
    }
}
