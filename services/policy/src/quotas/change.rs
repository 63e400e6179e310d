//! Changes to a tenant's reservations. A request is granted as far as the limits allow, given the
//! reservations at the moment of the change.
//!
//! The shell reads the tenant's last message, applies the change, and replaces the message by
//! compare-and-set. A replica that loses the race reads again and applies its change to the new
//! state. So two replicas that grant at the same time cannot exceed a limit.

use std::collections::BTreeMap;

use fiec_schemas::quota::{Quota, RESERVATIONS_LIMIT, Reservation, Reservations};
use fiec_schemas::{BatchId, ExecutionId, InstanceId, Sequence};
use serde::Serialize;

/// A change that a replica requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Entries to free if they still belong to this replica.
    pub free: Vec<(ExecutionId, InstanceId)>,
    /// Entries to take over from a gone replica, with the last message of the execution's ledger.
    pub take: Vec<(ExecutionId, InstanceId, InstanceId, Sequence)>,
    /// Entries for running executions, which count in any case.
    pub adopt: Vec<Reservation>,
    /// Entries of this replica with a new number of bytes.
    pub amend: Vec<(ExecutionId, InstanceId, u64)>,
    /// Wanted sets, each granted as a whole or not at all.
    pub sets: Vec<Vec<Reservation>>,
    /// Replace the message even without a change, so that an earlier change with an unknown result
    /// can no longer be stored.
    pub fence: bool,
}

impl Change {
    /// True if it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The reservations after this change.
    pub fn apply(&self, before: &Reservations, quota: Option<&Quota>) -> Reservations {
        let mut entries: BTreeMap<ExecutionId, Reservation> = before
            .entries
            .iter()
            .map(|entry| (entry.execution, entry.clone()))
            .collect();
        for (id, by) in &self.free {
            if entries.get(id).is_some_and(|entry| entry.by == *by) {
                entries.remove(id);
            }
        }
        for (id, from, to, seq) in &self.take {
            if let Some(entry) = entries.get_mut(id).filter(|entry| entry.by == *from) {
                (entry.by, entry.firm) = (*to, Some(*seq));
            }
        }
        for (id, by, bytes) in &self.amend {
            if let Some(entry) = entries.get_mut(id).filter(|entry| entry.by == *by) {
                entry.memory_bytes = *bytes;
            }
        }
        for entry in &self.adopt {
            // Beyond the size limit of a message, running executions are adopted after others have
            // ended.
            if entries.len() < RESERVATIONS_LIMIT {
                let known = entries.entry(entry.execution);
                known.or_insert_with(|| entry.clone());
            }
        }
        let mut sum = Sum::of(entries.values());
        for set in &self.sets {
            let new: Vec<Reservation> = set
                .iter()
                .filter(|entry| !entries.contains_key(&entry.execution))
                .cloned()
                .collect();
            if sum.admits(quota, &new).is_err() {
                continue;
            }
            for entry in new {
                sum.add(&entry);
                entries.insert(entry.execution, entry);
            }
        }
        Reservations {
            v: 1,
            entries: entries.into_values().collect(),
        }
    }
}

/// Reason why a set is not reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denied {
    /// A limit of the tenant.
    Tenant {
        /// The limit, in words.
        limit: String,
        /// True if the set exceeds the limit even without other reservations.
        ever: bool,
    },
    /// The batch's limit.
    Batch {
        /// The batch's limit.
        at_once: u32,
    },
}

impl Denied {
    /// The words for people.
    pub fn in_words(&self) -> String {
        match self {
            Denied::Tenant { limit, ever: false } => {
                format!("it waits for its tenant's quota ({limit})")
            }
            Denied::Tenant { limit, ever: true } => {
                format!("it needs more than its tenant's quota allows ({limit})")
            }
            Denied::Batch { at_once } => {
                format!("its batch runs at most {at_once} at once")
            }
        }
    }
}

/// The sum of reservations.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    running: u64,
    devices: u64,
    memory_bytes: u64,
    batches: BTreeMap<BatchId, (u32, u32)>,
}

impl Sum {
    /// The sum of these entries.
    pub fn of<'a>(entries: impl IntoIterator<Item = &'a Reservation>) -> Self {
        let mut sum = Self::default();
        entries.into_iter().for_each(|entry| sum.add(entry));
        sum
    }

    /// Adds an entry.
    pub fn add(&mut self, entry: &Reservation) {
        self.running += 1;
        self.devices += u64::from(entry.devices);
        self.memory_bytes = self.memory_bytes.saturating_add(entry.memory_bytes);
        if let Some(batch) = entry.batch {
            let (count, limit) = self.batches.entry(batch).or_insert((0, u32::MAX));
            *count += 1;
            *limit = (*limit).min(entry.at_once.unwrap_or(u32::MAX));
        }
    }

    /// True if a set fits, not counting devices and memory.
    pub fn has_count(&self, quota: Option<&Quota>, set: &[Reservation]) -> bool {
        let bare = set.iter().map(|entry| Reservation {
            devices: 0,
            memory_bytes: 0,
            ..entry.clone()
        });
        self.admits(quota, &bare.collect::<Vec<_>>()).is_ok()
    }

    /// Checks whether a set fits.
    ///
    /// # Errors
    /// The limit that it would break.
    pub fn admits(&self, quota: Option<&Quota>, set: &[Reservation]) -> Result<(), Denied> {
        let (own, mut all) = (Self::of(set), self.clone());
        set.iter().for_each(|entry| all.add(entry));
        let max = RESERVATIONS_LIMIT as u64;
        let most = |n: Option<u32>| n.map(u64::from);
        let limits = [
            (Some(max), own.running, all.running, "executions at once"),
            (
                quota.and_then(|q| most(q.running)),
                own.running,
                all.running,
                "running",
            ),
            (
                quota.and_then(|q| most(q.devices)),
                own.devices,
                all.devices,
                "on devices",
            ),
            (
                quota.and_then(|q| q.memory_bytes),
                own.memory_bytes,
                all.memory_bytes,
                "bytes of memory",
            ),
        ];
        for entry in set {
            if let Some((count, at_once)) = entry.batch.and_then(|b| all.batches.get(&b))
                && count > at_once
            {
                return Err(Denied::Batch { at_once: *at_once });
            }
        }
        for (limit, own, all, what) in limits {
            // A limit on a resource does not hold up a set that uses none of it.
            if let Some(limit) = limit.filter(|limit| own > 0 && all > *limit) {
                return Err(Denied::Tenant {
                    limit: format!("{limit} {what}"),
                    ever: own > limit,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Timestamp;
    use uuid::Uuid;

    fn entry(n: u128, by: u128) -> Reservation {
        Reservation {
            execution: ExecutionId(Uuid::from_u128(n)),
            by: InstanceId(Uuid::from_u128(by)),
            firm: None,
            devices: 0,
            memory_bytes: 0,
            batch: None,
            at_once: None,
            gang: None,
        }
    }

    fn quota(running: u32) -> Quota {
        Quota {
            v: 1,
            running: Some(running),
            devices: None,
            memory_bytes: None,
            waiting: None,
            weight: None,
            who: "ann".into(),
            at: Timestamp::default(),
        }
    }

    fn sets(sets: &[&[u128]]) -> Change {
        let of = |set: &&[u128]| set.iter().map(|n| entry(*n, 1)).collect();
        Change {
            sets: sets.iter().map(of).collect(),
            ..Change::default()
        }
    }

    fn ids(table: &Reservations) -> Vec<u128> {
        let ids = table.entries.iter();
        ids.map(|e| e.execution.0.as_u128()).collect()
    }

    #[test]
    fn a_set_is_granted_in_full_or_not_at_all() {
        let table =
            sets(&[&[1, 2], &[3, 4], &[5]]).apply(&Reservations::default(), Some(&quota(3)));
        assert_eq!(ids(&table), [1, 2, 5]);
        // Existing entries use no further room.
        let again = sets(&[&[1, 2], &[6]]).apply(&table, Some(&quota(3)));
        assert_eq!(ids(&again), [1, 2, 5]);
    }

    #[test]
    fn what_runs_counts_though_it_is_over_the_limit() {
        let change = Change {
            adopt: vec![entry(1, 1), entry(2, 1)],
            ..sets(&[&[3]])
        };
        assert_eq!(
            ids(&change.apply(&Reservations::default(), Some(&quota(1)))),
            [1, 2]
        );
    }

    #[test]
    fn no_more_is_adopted_than_a_message_holds() {
        let limit = RESERVATIONS_LIMIT as u128;
        let change = Change {
            adopt: (0..limit + 10).map(|n| entry(n, 1)).collect(),
            ..Change::default()
        };
        let table = change.apply(&Reservations::default(), None);
        assert_eq!(table.entries.len(), RESERVATIONS_LIMIT);
        // Ended executions make room for the rest.
        let change = Change {
            free: vec![(entry(0, 1).execution, entry(0, 1).by)],
            adopt: vec![entry(limit, 1)],
            ..Change::default()
        };
        let table = ids(&change.apply(&table, None));
        assert_eq!((table.len(), table[0]), (RESERVATIONS_LIMIT, 1));
        assert_eq!(table.last(), Some(&limit));
    }

    #[test]
    fn only_its_owner_frees_a_reservation_and_what_is_taken_over_is_firm() {
        let table = sets(&[&[1, 2]]).apply(&Reservations::default(), None);
        let (one, two) = (table.entries[0].execution, table.entries[1].execution);
        let (owner, other) = (table.entries[0].by, InstanceId(Uuid::from_u128(9)));
        let change = Change {
            free: vec![(one, other), (two, owner)],
            take: vec![(one, owner, other, 7)],
            ..Change::default()
        };
        let table = change.apply(&table, None);
        assert_eq!(ids(&table), [1]);
        assert_eq!(
            (table.entries[0].by, table.entries[0].firm),
            (other, Some(7))
        );
    }

    #[test]
    fn the_smallest_number_that_one_of_a_batch_gives_counts() {
        let of = |n, at_once| Reservation {
            batch: Some(BatchId(Uuid::from_u128(50))),
            at_once,
            ..entry(n, 1)
        };
        let change = Change {
            sets: vec![
                vec![of(1, Some(3))],
                vec![of(2, None)],
                vec![of(3, Some(2))],
                vec![of(4, None)],
                vec![of(5, None)],
            ],
            ..Change::default()
        };
        // The third would make it two at once, and there are two already. The fourth fits within
        // three.
        let table = change.apply(&Reservations::default(), None);
        assert_eq!(ids(&table), [1, 2, 4]);
    }

    #[test]
    fn a_limit_on_devices_holds_up_only_what_wants_one() {
        let quota = Quota {
            running: None,
            devices: Some(1),
            ..quota(0)
        };
        let device = |n| Reservation {
            devices: 1,
            ..entry(n, 1)
        };
        let change = Change {
            sets: vec![vec![device(1)], vec![device(2)], vec![entry(3, 1)]],
            ..Change::default()
        };
        let table = change.apply(&Reservations::default(), Some(&quota));
        assert_eq!(ids(&table), [1, 3]);
        let sum = Sum::of(&table.entries);
        let words = sum.admits(Some(&quota), &[device(2)]).unwrap_err();
        assert_eq!(
            words.in_words(),
            "it waits for its tenant's quota (1 on devices)"
        );
        let both = sum.admits(Some(&quota), &[device(4), device(5)]);
        assert!(matches!(both, Err(Denied::Tenant { ever: true, .. })));
    }
}
