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
//! It reads the cluster, and changes it by the event `failed`. Executions that wait for nothing more
//! are returned to the caller.
//!
//! [`PrerequisitesSettings::vanished_ms`]: crate::PrerequisitesSettings::vanished_ms

mod held;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::scheduling::{AfterOutcome, Dependency};
use fiec_schemas::{Event, ExecutionId, Fault, Tenant};

use crate::Action;
use crate::fate::{Fate, Seen};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;
use held::{Awaited, Held};

pub use settings::PrerequisitesSettings;

/// Most ledgers that one round looks at.
const LOOKS: usize = 256;
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
}

impl Prerequisites {
    /// Notes what a new execution waits for.
    pub fn join(
        &mut self,
        life: &Lifecycle,
        id: ExecutionId,
        tenant: &Tenant,
        after: &[Dependency],
    ) {
        let mut held = Held::default();
        for (nth, dependency) in after.iter().enumerate() {
            // A dependency without an execution was refused on submission.
            if let Some(other) = dependency.execution(tenant) {
                held.after.entry(other).or_insert_with(|| Awaited {
                    id: other,
                    nth,
                    name: dependency.id.clone(),
                    on: dependency.on,
                });
            }
        }
        for awaited in held.after.keys() {
            self.waiters.entry(*awaited).or_default().insert(id);
            if !life.knows(*awaited) {
                self.look_at.entry(*awaited).or_default();
            }
        }
        if !held.after.is_empty() {
            self.held.insert(id, Box::new(held));
        }
    }

    /// True for an execution that waits for no other to end.
    pub fn is_free(&self, id: ExecutionId) -> bool {
        let held = self.held.get(&id);
        held.is_none_or(|held| held.after.is_empty() && held.fails.is_none())
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
        if self.waiters.contains_key(&id) && !life.knows(id) {
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
        for waiter in self.waiters.remove(&id).into_iter().flatten() {
            let Some(held) = self.held.get_mut(&waiter) else {
                continue;
            };
            if !held.learn(id, seen, old) {
                self.waiters.entry(id).or_default().insert(waiter);
                continue;
            }
            life.changed().admission = true;
            if held.fails.is_some() {
                self.failing.insert(waiter);
            } else if held.after.is_empty() {
                free.push(waiter);
            }
        }
        free
    }

    /// An execution starts again: those that are about to fail because of its end wait for it.
    pub fn wakes(&mut self, id: ExecutionId) {
        for waiter in self.failing.clone() {
            let Some(held) = self.held.get_mut(&waiter) else {
                continue;
            };
            if let Some(in_vain) = held.fails.take_if(|vain| vain.awaited.id == id) {
                held.after.insert(id, in_vain.awaited);
                self.failing.remove(&waiter);
                self.waiters.entry(id).or_default().insert(waiter);
            }
        }
    }

    /// Forgets an execution that no longer lives.
    pub fn forget(&mut self, id: ExecutionId) {
        if let Some(held) = self.held.remove(&id) {
            for awaited in held.after.keys() {
                if let Some(waiters) = self.waiters.get_mut(awaited) {
                    waiters.remove(&id);
                    if waiters.is_empty() {
                        self.waiters.remove(awaited);
                        self.look_at.remove(awaited);
                    }
                }
            }
        }
        self.failing.remove(&id);
    }

    /// These executions are not known here, and are looked up.
    pub fn look_for(&mut self, now: Millis, ids: Vec<ExecutionId>) {
        for id in ids {
            self.look_at.entry(id).or_insert(now);
        }
    }

    /// Looks at the ledgers of awaited executions that are not known here, and fails what can no
    /// longer run. `reserved_by`: the tenant with a reservation for an execution.
    pub fn act(
        &mut self,
        life: &mut Lifecycle,
        reserved_by: impl Fn(ExecutionId) -> Option<Tenant>,
    ) {
        self.look_at_ledgers(life, reserved_by);
        self.fail_what_cannot_run(life);
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
                None => reserved_by(id),
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
                fault: Some(Box::new(Fault::Dependency {
                    id: in_vain.awaited.id,
                })),
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
        (!held.after.is_empty()).then(|| awaited_in_words(life, held))
    }

    /// For people: what would let an execution run that is not free. None if nothing does.
    pub fn help(&self, id: ExecutionId) -> Option<String> {
        let held = self.held.get(&id).filter(|held| held.fails.is_none())?;
        let count = held.after.len();
        Some(format!("the end of the {count} that it waits for"))
    }
}

fn awaited_in_words(life: &Lifecycle, held: &Held) -> String {
    let where_it_is = |id| match life.cluster().execution(id).map(|e| e.stage) {
        None => "not known here",
        Some(Stage::Pending) => "pending",
        Some(Stage::Bound(..)) => "bound",
        Some(Stage::Started(..)) => "computing",
        Some(Stage::Paused) => "paused",
        Some(Stage::Held) => "held after a failure",
        Some(Stage::Verifying) => "verifying",
    };
    let named = held.first(NAMED).into_iter().map(|awaited| {
        let how = match awaited.on {
            AfterOutcome::Ok => "complete",
            AfterOutcome::Any => "end",
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
