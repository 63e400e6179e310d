//! Groups that executions wait for: a batch, an array, or ids that begin alike. All that were
//! submitted with one message share a group, so that many that wait for many are few entries.
//!
//! ```text
//! asked for ─▶ members known ─▶ a member ends ─▶ … ─▶ all have ended
//!     ▲  │ no answer                  ▲  │ it is retried
//!     └──┘                            └──┘
//! ```

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::dependency::{AfterOutcome, Group};
use fiec_schemas::{ExecutionId, Tenant, Timestamp};
use serde::{Deserialize, Serialize};

use super::held::Outlook;
use crate::fate::{Fate, Seen};
use crate::time::Millis;

/// A group whose members are looked for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SoughtGroup {
    /// The group.
    pub group: Group,
    /// It has the members that were submitted up to this moment.
    pub up_to: Timestamp,
}

/// The members of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FoundMembers {
    /// The group.
    pub sought: SoughtGroup,
    /// Each with what its ledger shows.
    pub members: Vec<(ExecutionId, Seen)>,
}

/// Identifies a group.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupKey {
    /// Its tenant.
    pub tenant: Tenant,
    /// Which of the tenant's executions belong to it.
    pub sought: SoughtGroup,
}

/// A group for which executions wait.
#[derive(Debug)]
struct Awaited {
    /// The executions that wait for it, or fail because of it.
    waiters: BTreeSet<ExecutionId>,
    /// The members with their ends; none while it is not known who they are.
    members: Option<BTreeMap<ExecutionId, Option<Fate>>>,
    /// Number of members that have ended, and how many of those have completed.
    ended: usize,
    completed: usize,
}

/// The groups for which executions wait.
#[derive(Debug, Default)]
pub struct Groups {
    all: BTreeMap<GroupKey, Awaited>,
    /// The groups of each member.
    of: BTreeMap<ExecutionId, BTreeSet<GroupKey>>,
    /// Tenants for whose groups no new question is asked before this moment.
    asked: BTreeMap<Tenant, Millis>,
}

impl Groups {
    /// An execution waits for a group.
    pub fn join(&mut self, key: &GroupKey, waiter: ExecutionId) {
        let group = self.all.entry(key.clone()).or_insert_with(|| Awaited {
            waiters: BTreeSet::new(),
            members: None,
            ended: 0,
            completed: 0,
        });
        group.waiters.insert(waiter);
    }

    /// An execution waits for a group no more. A group for which nobody waits is forgotten.
    pub fn leave(&mut self, key: &GroupKey, waiter: ExecutionId) {
        let Some(group) = self.all.get_mut(key) else {
            return;
        };
        group.waiters.remove(&waiter);
        if !group.waiters.is_empty() {
            return;
        }
        let members = self.all.remove(key).and_then(|group| group.members);
        for member in members.into_iter().flatten().map(|(id, _)| id) {
            if let Some(of) = self.of.get_mut(&member) {
                of.remove(key);
                if of.is_empty() {
                    self.of.remove(&member);
                }
            }
        }
    }

    /// The questions that are due: the groups of each tenant whose members are not known. Another
    /// one is due at `again` if no answer comes.
    pub fn ask(&mut self, now: Millis, again: Millis) -> Vec<(Tenant, Vec<SoughtGroup>)> {
        self.asked.retain(|_, until| *until > now);
        let mut due: Vec<(Tenant, Vec<SoughtGroup>)> = Vec::new();
        for (key, _) in self.all.iter().filter(|(_, group)| group.members.is_none()) {
            if self.asked.contains_key(&key.tenant) {
                continue;
            }
            match due.last_mut().filter(|(tenant, _)| *tenant == key.tenant) {
                Some((_, sought)) => sought.push(key.sought.clone()),
                None => due.push((key.tenant.clone(), vec![key.sought.clone()])),
            }
        }
        let asked = due.iter().map(|(tenant, _)| (tenant.clone(), again));
        self.asked.extend(asked);
        due
    }

    /// A question about a tenant's groups is answered. Unless all were found, the next one is due
    /// at `again`.
    pub fn answered(&mut self, tenant: &Tenant, again: Option<Millis>) {
        match again {
            Some(again) => drop(self.asked.insert(tenant.clone(), again)),
            None => drop(self.asked.remove(tenant)),
        }
    }

    /// The members of a group are known. Returns false if nobody waits for it, or it was known.
    pub fn found(&mut self, key: &GroupKey, members: Vec<(ExecutionId, Seen)>) -> bool {
        let Some(group) = self
            .all
            .get_mut(key)
            .filter(|group| group.members.is_none())
        else {
            return false;
        };
        let fates = members.into_iter().map(|(id, seen)| match seen {
            Seen::Ended(fate) => (id, Some(fate)),
            Seen::Lives | Seen::Vanished => (id, None),
        });
        let fates: BTreeMap<_, _> = fates.collect();
        for id in fates.keys() {
            self.of.entry(*id).or_default().insert(key.clone());
        }
        let ends = || fates.values().flatten();
        group.ended = ends().count();
        group.completed = ends().filter(|fate| **fate == Fate::Completed).count();
        group.members = Some(fates);
        true
    }

    /// The members that have not ended.
    pub fn open(&self, key: &GroupKey) -> Vec<ExecutionId> {
        let members = self.all.get(key).and_then(|group| group.members.as_ref());
        let all = members.into_iter().flatten();
        all.filter(|(_, fate)| fate.is_none())
            .map(|(id, _)| *id)
            .collect()
    }

    /// True for a member of a group.
    pub fn has(&self, id: ExecutionId) -> bool {
        self.of.contains_key(&id)
    }

    /// The tenant of a member.
    pub fn tenant(&self, id: ExecutionId) -> Option<&Tenant> {
        self.of.get(&id)?.first().map(|key| &key.tenant)
    }

    /// A member has ended, or lives again (`None`). Returns its groups for whose waiters that can
    /// change something.
    pub fn note(&mut self, id: ExecutionId, fate: Option<Fate>) -> Vec<GroupKey> {
        let mut concerned = Vec::new();
        for key in self.of.get(&id).into_iter().flatten() {
            let Some(group) = self.all.get_mut(key) else {
                continue;
            };
            let Some(known) = group.members.as_mut().and_then(|all| all.get_mut(&id)) else {
                continue;
            };
            let before = std::mem::replace(known, fate);
            if before == fate {
                continue;
            }
            let count = |fate: Option<Fate>| {
                let completed = fate == Some(Fate::Completed);
                (usize::from(fate.is_some()), usize::from(completed))
            };
            let ((old, old_good), (new, new_good)) = (count(before), count(fate));
            group.ended = group.ended + new - old;
            group.completed = group.completed + new_good - old_good;
            let all = group.members.as_ref().map_or(0, BTreeMap::len);
            // A completed member changes nothing while others are left.
            if group.ended == all || fate != Some(Fate::Completed) {
                concerned.push(key.clone());
            }
        }
        concerned
    }

    /// The executions that wait for a group, or fail because of it.
    pub fn waiters(&self, key: &GroupKey) -> Vec<ExecutionId> {
        let group = self.all.get(key);
        group
            .map(|group| group.waiters.iter().copied().collect())
            .unwrap_or_default()
    }

    /// What a group means for an execution that waits for it with this wish. `name`: the group, for
    /// people.
    pub fn outlook(&self, key: &GroupKey, on: AfterOutcome, name: &str) -> Outlook {
        let group = self.all.get(key);
        let Some((group, members)) = group.and_then(|g| Some((g, g.members.as_ref()?))) else {
            return Outlook::Open;
        };
        let (all, open) = (members.len(), members.len() - group.ended);
        let is_met = |completed| match on {
            AfterOutcome::Ok => completed == all,
            AfterOutcome::Any => true,
            AfterOutcome::AtLeast(share) => share.is_met(completed, all),
        };
        if all == 0 {
            let words = format!("it waits for {name}, of which nothing is known");
            return Outlook::InVain { words, by: None };
        }
        if is_met(group.completed + open) {
            return match open {
                0 => Outlook::Met,
                _ => Outlook::Open,
            };
        }
        let lost = |fate: &Option<Fate>| fate.is_some_and(|fate| fate != Fate::Completed);
        let by = members.iter().find(|(_, fate)| lost(fate));
        let lacking = group.ended - group.completed;
        let must = match on {
            AfterOutcome::AtLeast(share) => format!("; a share of {share} must"),
            AfterOutcome::Ok | AfterOutcome::Any => String::new(),
        };
        Outlook::InVain {
            words: format!(
                "it waits for {name}, of which {lacking} of {all} did not complete{must}"
            ),
            by: by.map(|(id, _)| *id),
        }
    }

    /// For people: how far a group is.
    pub fn in_words(&self, key: &GroupKey) -> String {
        let group = self.all.get(key);
        match group.and_then(|g| Some((g, g.members.as_ref()?))) {
            Some((group, members)) => {
                format!("{} of {} have ended", group.ended, members.len())
            }
            None => "its members are looked for".to_owned(),
        }
    }
}
