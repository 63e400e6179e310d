//! Applies what holds executions back. This file has the dependencies; [`super::reserve`] has
//! reservations and [`super::gang`] gangs.

use fiec_schemas::{BatchId, Event, ExecutionId, Fault, Tenant};

use super::{Action, Policy};
use crate::fate::{Fate, Seen};
use crate::holds::{Awaited, Held, HoldSpec};
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::profile::ProfileIx;
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
        let mut held = Held {
            batch: spec
                .batch
                .as_ref()
                .map(|name| BatchId::from_client(tenant, name)),
            at_once: spec.at_once,
            gang: spec.gang,
            ..Held::default()
        };
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
        if let Some(batch) = held.batch {
            let batch = self.holds.batches.entry(batch).or_default();
            batch.insert(id, held.at_once);
        }
        self.life.changed().holds = true;
        self.holds.held.insert(id, Box::new(held));
        self.join_gang(id);
    }

    /// True for a new execution that must not be bound by its first message.
    pub(crate) fn begins_held(&self, tenant: &Tenant, spec: Option<&HoldSpec>) -> bool {
        let batch = |name| BatchId::from_client(tenant, name);
        self.holds.limits(tenant)
            || spec.is_some_and(|spec| {
                let limited = self.holds.at_once(spec.batch.as_ref().map(batch));
                let own = !spec.after.is_empty() || spec.gang.is_some() || spec.at_once.is_some();
                own || limited.is_some()
            })
    }

    /// Adds a known execution to its gang.
    fn join_gang(&mut self, id: ExecutionId) {
        let Some(gang) = self.holds.held.get(&id).and_then(|h| h.gang.clone()) else {
            return;
        };
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        let (key, member) = ((e.tenant.clone(), gang.name), (e.submitted_at, id));
        let together = self.holds.gangs.entry(key.clone()).or_default();
        together.size = gang.size;
        together.members.insert(member);
        self.holds.gangs_due.insert(key);
        self.life.changed().holds = true;
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
        let Some(e) = self.life.cluster().execution(id) else {
            return;
        };
        if self.holds.is_idle() {
            return;
        }
        let (tenant, started) = (e.tenant.clone(), matches!(e.stage, Stage::Started(..)));
        let member = (e.submitted_at, id);
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
            if let Some(batch) = held.batch
                && let Some(limited) = self.holds.batches.get_mut(&batch)
            {
                limited.remove(id);
                if limited.is_empty() {
                    self.holds.batches.remove(&batch);
                }
            }
            if let Some(gang) = held.gang {
                self.leave_gang((tenant.clone(), gang.name), member, started);
            }
        }
        self.holds.failing.remove(&id);
        self.holds.unplaced.remove(&id);
        self.holds.dequeue(&tenant, id);
        self.free_soon(&tenant, id);
    }

    /// True if the execution lacks only a place. If it lacks a reservation, this requests one.
    pub(crate) fn may_wait(&mut self, id: ExecutionId) -> bool {
        if self.ranges.awaits_parts(id) {
            return false;
        }
        let pending = self.life.cluster().execution(id);
        if self.holds.is_idle() || pending.is_none_or(|e| e.stage != Stage::Pending) {
            return true;
        }
        // Its holds and its reservation are not known yet.
        if pending.is_some_and(|e| e.profile == ProfileIx::UNKNOWN) {
            return false;
        }
        if let Some(held) = self.holds.held.get(&id) {
            if !held.after.is_empty() || held.fails.is_some() {
                return false;
            }
            if let Some(gang) = &held.gang
                && !self.is_alone(id)
            {
                if let Some(tenant) = self.life.tenant(id) {
                    let key = (tenant, gang.name.clone());
                    self.holds.gangs_due.insert(key);
                    self.life.changed().holds = true;
                }
                return false;
            }
        }
        self.admit(id)
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
            if let Some(gang) = &held.gang
                && !self.is_alone(id)
            {
                return Some(self.gang_in_words(&e.tenant, gang));
            }
        }
        self.unreserved_in_words(id)
            .or_else(|| self.kept_in_words(self.life.now, id))
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
        let batch = held.and_then(|h| h.batch);
        let help = match held {
            Some(held) if held.fails.is_some() => return Vec::new(),
            Some(held) if !held.after.is_empty() => {
                format!("the end of the {} that it waits for", held.after.len())
            }
            Some(held) if held.gang.is_some() && !self.is_alone(id) => {
                "all members of its gang being ready, and room for all of them at once".to_owned()
            }
            _ if self.is_admitted(id) => "that gang having started, or more nodes".to_owned(),
            _ if self.holds.at_once(batch).is_some() => {
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
        let now = self.life.now;
        if self.holds.is_idle() {
            return;
        }
        self.look_at_first();
        let sweep = now.mono.since(self.holds.swept) >= self.life.config.look_ms;
        if sweep {
            self.holds.swept = now.mono;
            self.sweep_reservations();
        }
        if !std::mem::take(&mut self.life.changed().holds) && !sweep {
            return;
        }
        self.look_at_ledgers();
        self.fail_what_cannot_run();
        self.act_on_gangs();
        self.ask_for_reservations();
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
            let reserved = self.holds.tables.iter();
            let mut reserved = reserved.filter(|(_, table)| table.entries.contains_key(&id));
            let tenant = match waiter {
                Some(waiter) => self.life.tenant(*waiter),
                None => reserved.next().map(|(tenant, _)| tenant.clone()),
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
