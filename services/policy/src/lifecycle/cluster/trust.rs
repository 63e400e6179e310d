//! A node's standing with the numeric contracts, from its proofs and its losses.

use std::sync::Arc;

use fiec_schemas::messages::StandingKind;
use fiec_schemas::trust::{NodeIdentity, Proof, Proved, Quarantine, Quarantined};
use fiec_schemas::{Contract, NodeDescriptor, Timestamp};

/// Evidence on a node's trust.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// Why its key is not the pinned one. If set, it gets no work.
    pub stranger: Option<String>,
    /// Its last proof with a valid signature.
    pub proof: Option<Arc<Proof>>,
    /// Why its last proof does not count, if it does not.
    pub refused: Option<String>,
    /// The contracts that it has lost.
    pub quarantine: Quarantine,
}

/// A node's standing with a contract on a substrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing<'a> {
    /// It has proved the contract.
    Proved {
        /// The proof expires at this time.
        until: Timestamp,
    },
    /// It has no proof yet.
    Unproved,
    /// The canaries could not run on it.
    Unable(&'a str),
    /// Its key is not the pinned one.
    Stranger(&'a str),
    /// Its proof does not count.
    Refused(&'a str),
    /// Its proof is from an earlier instance or environment, or from before its release.
    Outdated,
    /// Its proof has expired.
    Expired {
        /// The time of the expiry.
        at: Timestamp,
    },
    /// The canaries broke the contract.
    Failed(&'a Proved),
    /// The contract was taken away.
    Quarantined(&'a Quarantined),
}

impl Trust {
    /// The standing of the node with this descriptor.
    pub fn standing(
        &self,
        descriptor: &NodeDescriptor,
        contract: Contract,
        substrate: &str,
        now: Timestamp,
    ) -> Standing<'_> {
        if let Some(reason) = &self.stranger {
            return Standing::Stranger(reason);
        }
        if let Some(entry) = self.quarantine.at(contract, substrate) {
            return Standing::Quarantined(entry);
        }
        if let Some(reason) = &self.refused {
            return Standing::Refused(reason);
        }
        let Some(proof) = &self.proof else {
            return Standing::Unproved;
        };
        let environment = |identity: &NodeIdentity| identity.environment == proof.environment;
        let present = proof.instance == descriptor.instance
            && descriptor.identity.as_ref().is_some_and(environment);
        let released = self.quarantine.released.as_ref();
        if !present || released.is_some_and(|r| proof.at < r.at) {
            return Standing::Outdated;
        }
        if proof.expires_at <= now {
            return Standing::Expired {
                at: proof.expires_at,
            };
        }
        let mut results = proof.results.iter();
        match results.find(|r| r.contract == contract && r.substrate == substrate) {
            Some(result) if result.passed => Standing::Proved {
                until: proof.expires_at,
            },
            Some(result) => Standing::Failed(result),
            None => {
                let mut unproved = proof.unproved.iter();
                let unable = unproved.find(|u| u.substrate == substrate);
                unable.map_or(Standing::Unproved, |u| Standing::Unable(&u.reason))
            }
        }
    }

    /// Contracts that the last proof breaks and that are not quarantined yet. A proof from before a
    /// release does not count.
    pub fn broken(&self) -> Vec<&Proved> {
        let Some(proof) = &self.proof else {
            return Vec::new();
        };
        let released = self.quarantine.released.as_ref();
        if released.is_some_and(|r| proof.at < r.at) {
            return Vec::new();
        }
        let results = proof.results.iter().filter(|r| !r.passed);
        let lost = |r: &&Proved| self.quarantine.at(r.contract, &r.substrate).is_some();
        results.filter(|r| !lost(r)).collect()
    }
}

impl Standing<'_> {
    /// True if executions under the contract may run there.
    pub fn is_good(self) -> bool {
        matches!(self, Standing::Proved { .. })
    }

    /// The standing without its reason, as messages have it.
    pub fn kind(self) -> StandingKind {
        match self {
            Standing::Proved { .. } => StandingKind::Proved,
            Standing::Unproved | Standing::Unable(_) => StandingKind::Unproved,
            Standing::Refused(_) | Standing::Stranger(_) => StandingKind::Refused,
            Standing::Outdated => StandingKind::Outdated,
            Standing::Expired { .. } => StandingKind::Expired,
            Standing::Failed(_) => StandingKind::Failed,
            Standing::Quarantined(_) => StandingKind::Quarantined,
        }
    }

    /// The standing in a sentence.
    pub fn in_words(self, contract: Contract) -> String {
        let contract = contract.as_str();
        match self {
            Standing::Proved { until } => {
                format!("it has proved the {contract} contract, until {until}")
            }
            Standing::Unproved => {
                format!(
                    "it has not proved that it keeps the {contract} contract (its canaries have not run here yet)"
                )
            }
            Standing::Unable(reason) => format!(
                "it has not proved that it keeps the {contract} contract: its canaries could not run there: {reason}"
            ),
            Standing::Stranger(reason) => format!("it is given no work: {reason}"),
            Standing::Refused(reason) => {
                format!("its proof of the {contract} contract does not count: {reason}")
            }
            Standing::Outdated => format!(
                "its proof of the {contract} contract is of an earlier start or environment, or from before its release; the canaries run anew"
            ),
            Standing::Expired { at } => {
                format!("its proof of the {contract} contract has expired at {at}")
            }
            Standing::Failed(result) => {
                format!(
                    "its canaries broke the {contract} contract: {}",
                    result.detail
                )
            }
            Standing::Quarantined(entry) => format!(
                "it is quarantined for the {contract} contract{} since {}: {}",
                entry
                    .substrate
                    .as_ref()
                    .map_or_else(String::new, |device| format!(" on {device}")),
                entry.at,
                entry.reason
            ),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_schemas::trust::Released;
    use fiec_schemas::{Digest, InstanceId};

    const NOW: Timestamp = Timestamp::from_micros(1_000);

    fn descriptor() -> NodeDescriptor {
        serde_json::from_value(serde_json::json!({
            "v": 1, "node": "n1", "instance": "00000000-0000-0000-0000-000000000001",
            "host": "h", "pid": 1, "version": "0", "started_at": "2026-01-01T00:00:00.000000Z",
            "shard": 0, "slots": 1, "cpus": 1, "isa": "x", "memory_limit_bytes": 1,
            "memory_limit_source": "x", "substrates": [], "programs": [], "thresholds": {},
            "identity": {"key": "U", "environment": Digest::of(b"e")},
        }))
        .unwrap()
    }

    fn proof(passed: bool) -> Proof {
        let result = |contract| Proved {
            substrate: "host".into(),
            contract,
            passed: passed || contract == Contract::Bounded,
            detail: if passed { "" } else { "canary dot" }.into(),
            cases: 1,
            ran_on: "cpu".into(),
            digest: Digest::of(b""),
        };
        Proof {
            v: 1,
            node: descriptor().node,
            instance: descriptor().instance,
            suite: 1,
            environment: Digest::of(b"e"),
            at: Timestamp::from_micros(500),
            expires_at: Timestamp::from_micros(2_000),
            results: vec![result(Contract::Bitwise), result(Contract::Bounded)],
            unproved: vec![],
        }
    }

    fn word(trust: &Trust, contract: Contract) -> &'static str {
        trust
            .standing(&descriptor(), contract, "host", NOW)
            .kind()
            .as_str()
    }

    #[test]
    fn only_a_present_unexpired_passing_proof_counts() {
        let mut trust = Trust::default();
        assert_eq!(word(&trust, Contract::Bitwise), "unproved");
        trust.proof = Some(Arc::new(proof(true)));
        assert_eq!(word(&trust, Contract::Bitwise), "proved");
        let at = |d: &str| {
            trust
                .standing(&descriptor(), Contract::Bitwise, d, NOW)
                .kind()
                .as_str()
        };
        assert_eq!(at("GPU-1"), "unproved");
        let late = Timestamp::from_micros(2_000);
        let expired = trust.standing(&descriptor(), Contract::Bitwise, "host", late);
        assert_eq!(expired.kind().as_str(), "expired");
        let mut other = descriptor();
        other.instance = InstanceId::random();
        let outdated = trust.standing(&other, Contract::Bitwise, "host", NOW);
        assert_eq!(outdated.kind().as_str(), "outdated");
        let mut other = descriptor();
        other.identity = None;
        assert!(
            !trust
                .standing(&other, Contract::Bitwise, "host", NOW)
                .is_good()
        );
        trust.refused = Some("signature".into());
        assert_eq!(word(&trust, Contract::Bitwise), "refused");
    }

    #[test]
    fn a_contract_is_lost_alone_and_a_release_asks_for_a_new_proof() {
        let mut trust = Trust {
            proof: Some(Arc::new(proof(false))),
            ..Trust::default()
        };
        assert_eq!(word(&trust, Contract::Bitwise), "failed");
        assert_eq!(word(&trust, Contract::Bounded), "proved");
        let broken = trust.broken();
        let broken: Vec<_> = broken.iter().map(|r| (r.contract, &*r.detail)).collect();
        assert_eq!(broken, [(Contract::Bitwise, "canary dot")]);
        trust.quarantine.entries.push(Quarantined {
            contract: Contract::Bitwise,
            substrate: None,
            reason: "canary dot".into(),
            who: "policy/x".into(),
            at: NOW,
        });
        assert_eq!(word(&trust, Contract::Bitwise), "quarantined");
        assert_eq!(trust.broken(), Vec::<&Proved>::new());
        trust.quarantine = Quarantine {
            entries: vec![],
            released: Some(Released {
                who: "ann".into(),
                at: Timestamp::from_micros(600),
            }),
        };
        assert_eq!(word(&trust, Contract::Bitwise), "outdated");
        assert_eq!(trust.broken(), Vec::<&Proved>::new());
    }

    #[test]
    fn a_device_is_lost_alone_and_one_that_could_not_run_is_unproved_with_the_reason() {
        let mut both = proof(true);
        for result in proof(false).results {
            both.results.push(Proved {
                substrate: "GPU-1".into(),
                ..result
            });
        }
        both.unproved.push(fiec_schemas::trust::Unproved {
            substrate: "GPU-2".into(),
            reason: "no device to compute on".into(),
        });
        let mut trust = Trust {
            proof: Some(Arc::new(both)),
            ..Trust::default()
        };
        let at = |trust: &Trust, substrate: &str| {
            let d = descriptor();
            let standing = trust.standing(&d, Contract::Bitwise, substrate, NOW);
            (
                standing.kind().as_str(),
                standing.in_words(Contract::Bitwise),
            )
        };
        let broken = trust.broken();
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].substrate, "GPU-1");
        trust.quarantine.entries.push(Quarantined {
            contract: Contract::Bitwise,
            substrate: Some("GPU-1".into()),
            reason: "canary dot".into(),
            who: "policy/x".into(),
            at: NOW,
        });
        assert!(trust.broken().is_empty());
        let (word, said) = at(&trust, "GPU-1");
        assert_eq!(word, "quarantined");
        assert!(
            said.contains("on GPU-1") && said.contains("canary dot"),
            "{said}"
        );
        assert_eq!(at(&trust, "host").0, "proved");
        let (word, said) = at(&trust, "GPU-2");
        assert_eq!(word, "unproved");
        assert!(said.contains("no device to compute on"), "{said}");
    }
}
