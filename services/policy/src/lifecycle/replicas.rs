//! Several policy services share the work without a leader. For each execution one live replica is
//! preferred by rendezvous hash and acts at once. The others wait for a grace period and check
//! again. Correctness does not depend on their agreement: the ledger's compare-and-set settles
//! every race.

use std::collections::BTreeMap;

use fiec_schemas::InstanceId;

use crate::time::Millis;

/// The live replicas.
#[derive(Debug)]
pub struct Replicas {
    own: InstanceId,
    others: BTreeMap<InstanceId, Millis>,
}

impl Replicas {
    /// This replica alone.
    pub fn new(own: InstanceId) -> Self {
        Self {
            own,
            others: BTreeMap::new(),
        }
    }

    /// Notes a sign of life of another replica, or its last message.
    pub fn heard(&mut self, now: Millis, id: InstanceId, leaving: bool) {
        if leaving {
            self.others.remove(&id);
        } else if id != self.own {
            self.others.insert(id, now);
        }
    }

    /// Forgets replicas that were silent for `limit_ms`.
    pub fn expire(&mut self, now: Millis, limit_ms: u64) {
        self.others.retain(|_, heard| now.since(*heard) <= limit_ms);
    }

    /// Number of live replicas, including this one.
    pub fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// True for a replica that was heard recently.
    pub fn is_present(&self, id: InstanceId) -> bool {
        id == self.own || self.others.contains_key(&id)
    }

    /// True if this replica is preferred for the key.
    pub fn prefers_self(&self, key: &[u8]) -> bool {
        let own = weight(self.own, key);
        self.others
            .keys()
            .all(|other| (weight(*other, key), *other) < (own, self.own))
    }
}

/// FNV-1a with a final avalanche (the finalizer of MurmurHash3): for an even spread, not for
/// secrecy.
fn weight(id: InstanceId, key: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in id.0.as_bytes().iter().chain(key) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> InstanceId {
        InstanceId(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn exactly_one_present_replica_is_preferred() {
        let ids = [id(1), id(2), id(3)];
        let mut shares = [0; 3];
        for key in 0u32..3_000 {
            let mine: Vec<usize> = (0..3)
                .filter(|i| {
                    let mut view = Replicas::new(ids[*i]);
                    ids.iter()
                        .for_each(|other| view.heard(Millis(0), *other, false));
                    view.prefers_self(&key.to_le_bytes())
                })
                .collect();
            assert_eq!(mine.len(), 1);
            shares[mine[0]] += 1;
        }
        assert!(
            shares.iter().all(|s| (700..1_300).contains(s)),
            "{shares:?}"
        );
    }

    #[test]
    fn a_silent_replica_loses_its_share() {
        let mut view = Replicas::new(id(1));
        view.heard(Millis(0), id(2), false);
        view.expire(Millis(4_000), 3_000);
        assert_eq!(view.count(), 1);
        assert!(view.prefers_self(b"anything"));
    }
}
