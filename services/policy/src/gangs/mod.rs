//! Gangs: sets of executions that start together or not at all.
//!
//! ```text
//! complete, ready, reserved ─▶ placed ─▶ all bound: capsules sent ─▶ begun ─▶ each on its own
//!     ▲            ▲ (leads: what becomes free is kept for it)          │
//!     │            └── not all bound in time: given back                │ a member finds no place
//!     └───────────── the started members yield (dissolving) ◀───────────┘
//! ```
//!
//! One replica places all gangs, one after the other. Another one does so after a grace period if
//! that one does not. Each gets places for all its members or none, so two gangs never hold half of
//! what the other needs. Each member is bound by its own append. The capsules are sent once all of
//! these are stored.
//!
//! If not all members are bound in time, the bindings are given back and tried again. A member that
//! a node refuses is bound elsewhere at once. If that does not succeed in time, the started members
//! yield, no member is bound alone, and the gang starts again. A gang of which nothing runs any more
//! starts again at once.
//!
//! * [`placing`] binds the members and keeps them together.
//! * [`leader`] chooses the gang for which free places are kept ([`crate::lifecycle::queue::leading`]),
//!   [`rooms`] and [`places`] find these.
//!
//! Given up: one gang at a time has places kept for it. With more, two gangs could wait for each
//! other's places.
//!
//! It reads the cluster, and changes it by bindings of members, events that give these back, orders
//! to yield, and the choice of the leading gang. Executions that may wait for a place on their own
//! are returned to the caller.

mod leader;
mod places;
mod placing;
mod rooms;
mod settings;
mod state;

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::{ExecutionId, Tenant};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::GangKey;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;
use state::GangState;

pub use settings::GangsSettings;

/// What gangs ask about their members.
pub(crate) trait Members {
    /// True if it waits for no other execution to end.
    fn is_free(&self, id: ExecutionId) -> bool;

    /// True if no limit prevents its binding by this replica.
    fn is_admitted(&self, life: &Lifecycle, id: ExecutionId) -> bool;

    /// True if all of these have reserved, whichever replica did.
    fn have_reserved(&self, tenant: &Tenant, ids: &[ExecutionId]) -> bool;

    /// True if another execution was ordered to yield for it.
    fn is_yielded_to(&self, id: ExecutionId) -> bool;
}

/// What a round of gangs leaves to others.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// Executions that may wait for a place on their own.
    pub alone: Vec<ExecutionId>,
    /// Members that need a reservation.
    pub unreserved: Vec<ExecutionId>,
}

/// The state of gangs.
#[derive(Debug, Default)]
pub(crate) struct Gangs {
    gangs: BTreeMap<GangKey, GangState>,
    /// Gangs with a change.
    due: BTreeSet<GangKey>,
    /// Time of the last choice of the leading gang.
    looked: Millis,
    /// Index from which gangs are checked. The gangs before it would not have room even on an empty
    /// cluster.
    from: usize,
    /// Start of the leading gang that the last review of the queue used.
    ends: Option<Millis>,
}

impl Gangs {
    /// True if a gang has changed.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Adds a known execution to its gang.
    pub fn join(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let Some((key, size)) = life.gang_of(id) else {
            return;
        };
        let Some(e) = life.cluster().execution(id) else {
            return;
        };
        let gang = self.gangs.entry(key.clone()).or_default();
        gang.size = size;
        gang.members.insert((e.submitted_at, id));
        self.look_again(life, key);
    }

    /// Forgets an execution that no longer lives.
    pub fn forget(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let Some((key, _)) = life.gang_of(id) else {
            return;
        };
        let (Some(e), Some(gang)) = (life.cluster().execution(id), self.gangs.get_mut(&key)) else {
            return;
        };
        gang.members.remove(&(e.submitted_at, id));
        if matches!(e.stage, Stage::Started(..)) {
            gang.begun.get_or_insert(Millis(0));
        }
        if gang.members.is_empty() {
            self.gangs.remove(&key);
            self.due.remove(&key);
        } else {
            self.look_again(life, key);
        }
    }

    fn look_again(&mut self, life: &mut Lifecycle, key: GangKey) {
        self.due.insert(key);
        life.changed().admission = true;
    }

    /// Notes that a member was bound, has started, or waits again. Returns the members that are bound
    /// on their own from now on.
    #[must_use]
    pub fn hear(&mut self, life: &mut Lifecycle, id: ExecutionId) -> Vec<ExecutionId> {
        if self.gangs.is_empty() {
            return Vec::new();
        }
        let Some((key, _)) = life.gang_of(id) else {
            return Vec::new();
        };
        let Some(gang) = self.gangs.get_mut(&key) else {
            return Vec::new();
        };
        let started = matches!(life.stage(id), Some(Stage::Started(..)));
        let mut alone = Vec::new();
        if started && gang.begun.is_none() {
            // For members that started before this replica, the moment of the start is unknown.
            gang.begun = Some(if life.is_loaded() {
                life.now.mono
            } else {
                Millis(0)
            });
            // Members that were refused in the meantime are bound on their own from now on.
            alone.extend(gang.members.iter().map(|(_, id)| *id));
        }
        self.look_again(life, key);
        alone
    }

    /// An execution was preempted for a member of the leading gang: it is tried again at once.
    pub fn hurry(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        if !life.leads(id) {
            return;
        }
        // All replicas learn this from the ledger, whichever of them preempted.
        life.keep_for_leading();
        self.retry_leading(life);
    }

    /// Tries the leading gang again at once: there may be room for it now.
    pub fn retry_leading(&mut self, life: &mut Lifecycle) {
        if let Some(key) = life.leading().map(|leading| leading.key.clone())
            && let Some(gang) = self.gangs.get_mut(&key)
        {
            gang.retry_at = Millis(0);
            self.look_again(life, key);
        }
    }

    /// True for an execution that must not wait for a place on its own. Its gang is looked at again.
    pub fn holds_back(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        if self.is_alone(life, id) {
            return false;
        }
        if let Some((key, _)) = life.gang_of(id) {
            self.look_again(life, key);
        }
        true
    }

    /// True if a complete gang waits for places.
    pub fn gathers(&self, life: &Lifecycle) -> bool {
        let waits = |id| {
            let e = life.cluster().execution(id);
            e.is_some_and(|e| e.stage == Stage::Pending)
        };
        let mut gangs = self.gangs.values();
        gangs.any(|gang| {
            let members = gang.complete();
            members.is_some_and(|ids| ids.into_iter().any(waits))
        })
    }

    /// True for a member that is bound on its own because its gang has begun.
    pub fn is_alone(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let Some(gang) = life.gang_of(id).and_then(|(key, _)| self.gangs.get(&key)) else {
            return true;
        };
        if gang.begun.is_some() {
            return !(gang.dissolving && gang.complete().is_some());
        }
        // A bound gang with members that have ended must have begun earlier.
        let bound = life.cluster().execution(id).is_some_and(|e| e.epoch > 0);
        bound && !gang.given_back && gang.complete().is_none()
    }

    /// True while the capsule of a binding must wait for the rest of its gang.
    pub fn withholds(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let Some(gang) = life.gang_of(id).and_then(|(key, _)| self.gangs.get(&key)) else {
            return false;
        };
        // A gang that has begun waits for nobody, even if members have ended since.
        gang.begun.is_none() && !gang.sent && !self.is_alone(life, id)
    }

    /// The executions that are reserved together: the gang, or only this one.
    pub fn set_of(&self, life: &Lifecycle, id: ExecutionId) -> Option<Vec<ExecutionId>> {
        match life.gang_of(id) {
            Some((key, _)) if !self.is_alone(life, id) => self.gangs.get(&key)?.complete(),
            _ => Some(vec![id]),
        }
    }

    /// Members of the leading gang that found no place in the last attempt.
    pub fn lacking(&self, life: &Lifecycle) -> Option<&[ExecutionId]> {
        let gang = self.gangs.get(&life.leading()?.key);
        Some(
            gang.and_then(|gang| gang.lacking.as_deref())
                .unwrap_or_default(),
        )
    }

    /// True for a member of a gang for which the nodes that are here have no room, even without
    /// anything else on them.
    pub fn is_too_large(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let gang = life.gang_of(id).and_then(|(key, _)| self.gangs.get(&key));
        gang.is_some_and(|gang| gang.is_too_large)
    }

    /// For people: what a member waits for that must not wait for a place on its own.
    /// `unreserved`: why an execution has no reservation.
    pub fn in_words(
        &self,
        life: &Lifecycle,
        id: ExecutionId,
        members: &impl Members,
        unreserved: impl Fn(ExecutionId) -> Option<String>,
    ) -> Option<String> {
        let (key, _) = life.gang_of(id)?;
        if self.is_alone(life, id) {
            return None;
        }
        let (gang, name) = (self.gangs.get(&key)?, &key.1);
        let count = gang.members.len();
        let Some(all) = gang.complete() else {
            return Some(format!(
                "it waits for its gang {name}, of which {count} of {} members are there",
                gang.size
            ));
        };
        let ready = all
            .iter()
            .filter(|id| is_ready(members, life, **id))
            .count();
        if ready < all.len() {
            return Some(format!(
                "it waits for its gang {name}, of which {ready} of {} members could start now",
                all.len()
            ));
        }
        let waits = all.first().and_then(|id| unreserved(*id));
        let lacking = gang.lacking.as_ref().map(Vec::len);
        let waits = waits.unwrap_or_else(|| match lacking {
            Some(lacking) => {
                let found = all.len().saturating_sub(lacking);
                format!("there is room for {found} of them now")
            }
            None => "there is no room for all of it now".to_owned(),
        });
        let keeps = life.leading().is_some_and(|l| l.keeps && l.key == key);
        let outlook = match (gang.is_too_large, keeps) {
            (true, _) => ", and the present nodes cannot hold all of it, even if they were empty",
            (false, true) => ", and free slots are reserved for it",
            (false, false) => "",
        };
        let all = all.len();
        Some(format!(
            "it starts together with its gang {name} of {all}: {waits}{outlook}"
        ))
    }
}

/// True for a pending member whose dependencies have ended.
fn is_ready(members: &impl Members, life: &Lifecycle, id: ExecutionId) -> bool {
    let e = life.cluster().execution(id);
    members.is_free(id) && e.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending())
}
