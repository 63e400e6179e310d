//! Prerequisites: executions that must end before another one may be bound.
//!
//! ```text
//! waits for others ─▶ one has ended as required ─▶ … ─▶ free
//!        ▲                  │ one has ended otherwise, or is not known any more
//!        │ that one starts  ▼
//!        └───────────── fails
//! ```
//!
//! An awaited execution that is not known here is looked up in its ledger. Executions of one batch may
//! get their ledgers a moment apart, so one that is missing counts as vanished only after
//! [`PrerequisitesSettings::vanished_ms`]. Given up: an execution whose dependency was refused fails that much later.
//!
//! * [`Held`]: what one execution waits for.
//! * [`Groups`]: batches, arrays and ids that begin alike. Their members are those that were submitted
//!   before the waiting execution or together with it, so they are asked for once.
//!
//! It reads the cluster, and changes it by the event `failed`. Executions that wait for nothing more
//! are returned to the caller.
//!
//! [`PrerequisitesSettings::vanished_ms`]: crate::PrerequisitesSettings::vanished_ms

mod groups;
mod held;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::dependency::{AfterOutcome, Target};
use fiec_schemas::{Event, ExecutionId, Fault, Tenant, Timestamp};

use crate::Action;
use crate::fate::{Fate, Seen};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::BondSpec;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;
use groups::{GroupKey, Groups};
use held::{Awaited, Goal, Held};

pub use groups::{FoundMembers, SoughtGroup};
pub use settings::PrerequisitesSettings;

/// Most ledgers that one round looks at.
const LOOKS: usize = 256;
/// A question about groups whose answer takes longer than this many looks is asked again.
const LOST_LOOKS: u64 = 120;
/// Most awaited executions that words name.
const NAMED: usize = 5;

/// The state of prerequisites.
#[derive(Debug, Default)]
pub(crate) struct Prerequisites {
    /// Executions that wait for others, or did.
    held: BTreeMap<ExecutionId, Box<Held>>,
    /// For each awaited execution, those that wait for it.
    waiters: BTreeMap<ExecutionId, BTreeSet<ExecutionId>>,
    /// Awaited executions that are not known here, with the time of the next look at their ledgers.
    look_at: BTreeMap<ExecutionId, Millis>,
    /// Executions that can no longer run.
    failing: BTreeSet<ExecutionId>,
    /// Groups for which executions wait.
    groups: Groups,
    /// The moments for which executions wait.
    alarms: BTreeSet<(Timestamp, ExecutionId)>,
}

impl Prerequisites {
    /// Notes what a new execution waits for.
    pub fn join(&mut self, life: &Lifecycle, id: ExecutionId, tenant: &Tenant, spec: &BondSpec) {
        let mut held = Held {
            not_before: spec.not_before.filter(|at| *at > life.now.wall),
            ..Held::default()
        };
        let submitted_at = life.cluster().execution(id).map(|e| e.submitted_at);
        for (nth, dependency) in spec.after.iter().enumerate() {
            // A dependency without an execution was refused on submission.
            let goal = match (dependency.target(tenant), submitted_at) {
                (Some(Target::One(other)), _) => Goal::One(other),
                (Some(Target::All(group)), Some(up_to)) => Goal::All(Box::new(GroupKey {
                    tenant: tenant.clone(),
                    sought: SoughtGroup { group, up_to },
                })),
                _ => continue,
            };
            held.after.entry(goal).or_insert_with(|| Awaited {
                nth,
                name: dependency.to_string(),
                on: dependency.on,
            });
        }
        for goal in held.after.keys() {
            match goal {
                Goal::One(other) => self.await_one(life, *other, id),
                Goal::All(key) => self.groups.join(key, id),
            }
        }
        if held.is_free() {
            return;
        }
        self.alarms.extend(held.not_before.map(|at| (at, id)));
        // Others may wait for the same groups, whose members are known.
        let groups: Vec<_> = held.after.keys().cloned().collect();
        self.held.insert(id, Box::new(held));
        for goal in groups {
            if let Goal::All(key) = goal {
                self.judge(&key, id);
            }
        }
    }

    fn await_one(&mut self, life: &Lifecycle, awaited: ExecutionId, waiter: ExecutionId) {
        self.waiters.entry(awaited).or_default().insert(waiter);
        if !life.knows(awaited) {
            self.look_at.entry(awaited).or_default();
        }
    }

    /// True for an execution that waits for no other to end.
    pub fn is_free(&self, id: ExecutionId) -> bool {
        let held = self.held.get(&id);
        held.is_none_or(|held| held.is_free())
    }

    /// Handles the end of an execution. Returns the executions that wait for nothing more.
    #[must_use]
    pub fn ended(&mut self, life: &mut Lifecycle, id: ExecutionId, fate: Fate) -> Vec<ExecutionId> {
        self.seen(life, id, Seen::Ended(fate), true)
    }

    /// Handles the result of a look at a ledger. Returns the executions that wait for nothing more.
    #[must_use]
    pub fn looked_up(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        seen: Seen,
    ) -> Vec<ExecutionId> {
        let now = life.now;
        let wall = now.wall.millis();
        let old_ms = i64::try_from(life.config.prerequisites.vanished_ms).unwrap_or(i64::MAX);
        // Executions of one batch may get their ledgers a moment apart.
        let youngest = self.waiters.get(&id).into_iter().flatten();
        let youngest = youngest.filter_map(|w| Some(life.cluster().execution(*w)?.submitted_at));
        let old = youngest.max().is_none_or(|at| wall - at.millis() > old_ms);
        if matches!(seen, Seen::Ended(_)) || (seen == Seen::Vanished && old) {
            return self.seen(life, id, seen, old);
        }
        let is_awaited = self.waiters.contains_key(&id) || self.groups.has(id);
        if is_awaited && !life.knows(id) {
            let again = now.mono.plus(life.config.look_ms);
            self.look_at.insert(id, again);
        }
        Vec::new()
    }

    fn seen(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        seen: Seen,
        old: bool,
    ) -> Vec<ExecutionId> {
        let mut free = Vec::new();
        self.look_at.remove(&id);
        let goal = Goal::One(id);
        for waiter in self.waiters.remove(&id).into_iter().flatten() {
            let Some(held) = self.held.get_mut(&waiter) else {
                continue;
            };
            let outlook = held.after.get(&goal).map(|a| a.outlook(id, seen, old));
            if !outlook.is_some_and(|outlook| held.learn(&goal, outlook)) {
                self.waiters.entry(id).or_default().insert(waiter);
                continue;
            }
            free.extend(self.learned(life, waiter));
        }
        // A member had a ledger when the group was found. It has ended, however.
        let fate = match seen {
            Seen::Ended(fate) => fate,
            Seen::Lives | Seen::Vanished => Fate::Cancelled,
        };
        for key in self.groups.note(id, Some(fate)) {
            free.extend(self.judge_all(life, &key));
        }
        free
    }

    /// Handles the members of a tenant's groups. Returns the executions that wait for nothing more.
    #[must_use]
    pub fn found(
        &mut self,
        life: &mut Lifecycle,
        tenant: &Tenant,
        found: Vec<FoundMembers>,
    ) -> Vec<ExecutionId> {
        let again = life.now.mono.plus(life.config.look_ms);
        let again = found.is_empty().then_some(again);
        self.groups.answered(tenant, again);
        life.changed().admission = true;
        let mut free = Vec::new();
        for FoundMembers { sought, members } in found {
            let tenant = tenant.clone();
            let key = GroupKey { tenant, sought };
            if !self.groups.found(&key, members) {
                continue;
            }
            for member in self.groups.open(&key) {
                if !life.knows(member) {
                    self.look_at.entry(member).or_default();
                }
            }
            free.extend(self.judge_all(life, &key));
        }
        free
    }

    fn judge_all(&mut self, life: &mut Lifecycle, key: &GroupKey) -> Vec<ExecutionId> {
        let mut free = Vec::new();
        for waiter in self.groups.waiters(key) {
            if self.judge(key, waiter) {
                free.extend(self.learned(life, waiter));
            }
        }
        free
    }

    /// Tells an execution how a group stands. Returns true if something changed for it.
    fn judge(&mut self, key: &GroupKey, waiter: ExecutionId) -> bool {
        let goal = Goal::All(Box::new(key.clone()));
        let Some(held) = self.held.get_mut(&waiter) else {
            return false;
        };
        let Some(awaited) = held.after.get(&goal) else {
            return false;
        };
        let outlook = self.groups.outlook(key, awaited.on, &awaited.name);
        if !held.learn(&goal, outlook) {
            return false;
        }
        if held.fails.is_some() {
            self.failing.insert(waiter);
        } else {
            self.groups.leave(key, waiter);
        }
        true
    }

    /// An execution learned something of a dependency. Returns it if it waits for nothing more.
    fn learned(&mut self, life: &mut Lifecycle, waiter: ExecutionId) -> Option<ExecutionId> {
        let held = self.held.get(&waiter)?;
        life.changed().admission = true;
        if held.fails.is_some() {
            self.failing.insert(waiter);
            return None;
        }
        held.is_free().then_some(waiter)
    }

    /// An execution starts again: those that are about to fail because of its end wait for it.
    pub fn wakes(&mut self, id: ExecutionId) {
        let one = Goal::One(id);
        for waiter in self.failing.clone() {
            let held = self.held.get_mut(&waiter);
            if held.is_some_and(|held| held.wait_again(&one)) {
                self.failing.remove(&waiter);
                self.waiters.entry(id).or_default().insert(waiter);
            }
        }
        for key in self.groups.note(id, None) {
            let goal = Goal::All(Box::new(key.clone()));
            for waiter in self.groups.waiters(&key) {
                let held = self.held.get_mut(&waiter);
                if !held.is_some_and(|held| held.wait_again(&goal)) {
                    continue;
                }
                self.failing.remove(&waiter);
                // Another member may have ended otherwise, too.
                self.judge(&key, waiter);
            }
        }
    }

    /// Forgets an execution that no longer lives.
    pub fn forget(&mut self, id: ExecutionId) {
        if let Some(held) = self.held.remove(&id) {
            if let Some(at) = held.not_before {
                self.alarms.remove(&(at, id));
            }
            let failing = held.fails.map(|in_vain| in_vain.goal);
            for goal in held.after.into_keys().chain(failing) {
                match goal {
                    Goal::One(awaited) => self.await_no_more(awaited, id),
                    Goal::All(key) => self.groups.leave(&key, id),
                }
            }
        }
        self.failing.remove(&id);
    }

    fn await_no_more(&mut self, awaited: ExecutionId, waiter: ExecutionId) {
        if let Some(waiters) = self.waiters.get_mut(&awaited) {
            waiters.remove(&waiter);
            if waiters.is_empty() {
                self.waiters.remove(&awaited);
                if !self.groups.has(awaited) {
                    self.look_at.remove(&awaited);
                }
            }
        }
    }

    /// These executions are not known here, and are looked up.
    pub fn look_for(&mut self, now: Millis, ids: Vec<ExecutionId>) {
        for id in ids {
            self.look_at.entry(id).or_insert(now);
        }
    }

    /// Looks at the ledgers of awaited executions that are not known here, and fails what can no
    /// longer run. `reserved_by`: the tenant with a reservation for an execution.
    /// Returns the executions that wait for nothing more.
    #[must_use]
    pub fn act(
        &mut self,
        life: &mut Lifecycle,
        reserved_by: impl Fn(ExecutionId) -> Option<Tenant>,
    ) -> Vec<ExecutionId> {
        self.look_at_ledgers(life, reserved_by);
        self.look_for_members(life);
        self.fail_what_cannot_run(life);
        self.ring(life.now.wall)
    }

    /// True if a moment has come for which an execution waits.
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.alarms.first().is_some_and(|(at, _)| *at <= now)
    }

    fn ring(&mut self, now: Timestamp) -> Vec<ExecutionId> {
        let mut free = Vec::new();
        while self.is_due(now)
            && let Some((_, id)) = self.alarms.pop_first()
        {
            if let Some(held) = self.held.get_mut(&id) {
                held.not_before = None;
                free.extend(held.is_free().then_some(id));
            }
        }
        free
    }

    fn look_at_ledgers(
        &mut self,
        life: &mut Lifecycle,
        reserved_by: impl Fn(ExecutionId) -> Option<Tenant>,
    ) {
        let now = life.now;
        let due = |at: &Millis| *at <= now.mono;
        let ids: Vec<_> = self
            .look_at
            .iter()
            .filter(|(_, at)| due(at))
            .map(|(id, _)| *id)
            .take(LOOKS)
            .collect();
        life.changed().admission |= ids.len() == LOOKS;
        for id in ids {
            self.look_at.remove(&id);
            let waiter = self.waiters.get(&id).and_then(|w| w.first());
            let tenant = match waiter {
                Some(waiter) => life.tenant(*waiter),
                None => self.groups.tenant(id).cloned().or_else(|| reserved_by(id)),
            };
            let Some(tenant) = tenant else {
                continue;
            };
            if !life.knows(id) {
                // Look again if no answer comes.
                let again = now.mono.plus(10 * life.config.look_ms);
                self.look_at.insert(id, again);
                life.push(Action::Lookup {
                    execution: id,
                    tenant,
                });
            }
        }
    }

    fn look_for_members(&mut self, life: &mut Lifecycle) {
        let now = life.now.mono;
        let again = now.plus(LOST_LOOKS * life.config.look_ms);
        for (tenant, sought) in self.groups.ask(now, again) {
            life.push(Action::FindMembers { tenant, sought });
        }
    }

    fn fail_what_cannot_run(&mut self, life: &mut Lifecycle) {
        let ids: Vec<_> = self.failing.iter().copied().collect();
        for id in ids {
            let Some(e) = life.cluster().execution(id) else {
                self.failing.remove(&id);
                continue;
            };
            if e.is_appending() || !matches!(e.stage, Stage::Pending | Stage::Paused) {
                continue;
            }
            if life.defers(id, life.config.grace_ms) {
                life.changed().admission = true;
                continue;
            }
            let held = self.held.get(&id);
            let Some(in_vain) = held.and_then(|held| held.fails.clone()) else {
                self.failing.remove(&id);
                continue;
            };
            let failed = Event::Failed {
                reason: in_vain.words,
                stderr: String::new(),
                fault: in_vain.by.map(|id| Box::new(Fault::Dependency { id })),
            };
            life.end_with(id, failed);
        }
    }

    /// For people: what an execution waits for, or why it fails.
    pub fn in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String> {
        let held = self.held.get(&id)?;
        if let Some(in_vain) = &held.fails {
            return Some(in_vain.words.clone());
        }
        let others = (!held.after.is_empty()).then(|| self.awaited_in_words(life, held));
        let moment = held.not_before;
        let moment = moment.map(|at| format!("it is not to begin before {at}"));
        let words: Vec<_> = moment.into_iter().chain(others).collect();
        (!words.is_empty()).then(|| words.join(", and "))
    }

    /// For people: what would let an execution run that is not free. None if nothing does.
    pub fn help(&self, id: ExecutionId) -> Option<String> {
        let held = self.held.get(&id).filter(|held| held.fails.is_none())?;
        match (held.after.len(), held.not_before) {
            (0, Some(at)) => Some(format!("the moment {at}")),
            (count, _) => Some(format!("the end of the {count} that it waits for")),
        }
    }

    fn awaited_in_words(&self, life: &Lifecycle, held: &Held) -> String {
        let where_it_is = |goal: &Goal| match goal {
            Goal::One(id) => format!("it is {}", stage_in_words(life, *id)),
            Goal::All(key) => self.groups.in_words(key),
        };
        let named = held.first(NAMED).into_iter().map(|(goal, awaited)| {
            let how = match awaited.on {
                AfterOutcome::Ok => "complete".to_owned(),
                AfterOutcome::Any => "end".to_owned(),
                AfterOutcome::AtLeast(share) => format!("end, a share of {share} completed"),
            };
            format!("{} to {how} ({})", awaited.name, where_it_is(goal))
        });
        let mut words = format!("it waits for {}", named.collect::<Vec<_>>().join(", "));
        if held.after.len() > NAMED {
            words += &format!(" and {} others", held.after.len() - NAMED);
        }
        words
    }
}

fn stage_in_words(life: &Lifecycle, id: ExecutionId) -> &'static str {
    match life.cluster().execution(id).map(|e| e.stage) {
        None => "not known here",
        Some(Stage::Pending) => "pending",
        Some(Stage::Bound(..)) => "bound",
        Some(Stage::Started(..)) => "computing",
        Some(Stage::Paused) => "paused",
        Some(Stage::Held) => "held after a failure",
        Some(Stage::Verifying) => "verifying",
    }
}
