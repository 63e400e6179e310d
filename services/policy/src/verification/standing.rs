//! Follows the proofs of nodes, and takes contracts away from a node whose canaries fail or whose
//! result a comparison refuted. Executions under that contract leave the node and resume from the
//! last boundary known to be good.

use std::sync::Arc;

use fiec_schemas::messages::Record;
use fiec_schemas::substrate::HOST;
use fiec_schemas::trust::{Quarantine, SignedProof};
use fiec_schemas::{Cause, ExecutionId, NodeId};

use super::Verification;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::{Action, Good, Judged};

/// A service that has just started also records proofs that are younger than this, in µs.
const YOUNG_US: i64 = 600_000_000;

/// Time until a step back without a known result is tried again, in ms.
const STEPPING_MS: u64 = 10_000;

impl Verification {
    /// Stores a node's proof, with the result of the signature check.
    pub fn proof(
        &mut self,
        life: &mut Lifecycle,
        name: &NodeId,
        signed: &SignedProof,
        judged: Judged,
    ) {
        let now = life.now;
        let (proof, refused) = match judged {
            Judged::Counts(proof) => (Some(Arc::new(proof)), None),
            Judged::Not(reason) => (None, Some(reason)),
        };
        let Some(ix) = life.set_proof(name, proof.clone(), refused.clone()) else {
            return;
        };
        let young = proof
            .as_ref()
            .is_some_and(|p| now.wall.micros() - p.at.micros() < YOUNG_US);
        if (life.is_loaded() || young) && life.speaks_for(name) {
            life.push(Action::record(Record::Proof {
                proof: Box::new(signed.clone()),
                refused,
                at: now.wall,
            }));
        }
        if let Some(proof) = proof {
            life.take_broken(ix);
            self.proof_tells(life, ix, &proof);
        }
    }

    /// Stores the contracts that a node has lost.
    pub fn quarantine(&mut self, life: &mut Lifecycle, name: &NodeId, quarantine: Quarantine) {
        if let Some(ix) = life.set_quarantine(name, quarantine) {
            self.take_away(life, ix);
        }
    }

    /// Takes a contract away from a node with a refuted result. The loss counts here at once.
    pub(super) fn convict(&mut self, life: &mut Lifecycle, ix: NodeIx, reason: String) {
        life.set_convicted(ix, reason);
        self.take_away(life, ix);
    }

    /// Moves executions away from a node that has lost their contract.
    fn take_away(&mut self, life: &mut Lifecycle, ix: NodeIx) {
        let node = life.cluster().node(ix);
        if node.trust.quarantine.entries.is_empty() || node.assigned.is_empty() {
            return;
        }
        let held: Vec<ExecutionId> = node.assigned.iter().copied().collect();
        for id in held {
            let Some(e) = life.cluster().execution(id) else {
                continue;
            };
            let contract = life.cluster().profiles.get(e.profile).map(|p| p.contract);
            let node = life.cluster().node(ix);
            let place = match e.claim {
                Claim::Device { device, .. } => node.devices.get(device).map_or(HOST, |d| &*d.id),
                _ => HOST,
            };
            let quarantine = &node.trust.quarantine;
            let Some(entry) = contract.and_then(|c| quarantine.at(c, place)) else {
                continue;
            };
            if !life.is_mine(id) {
                continue;
            }
            let reason = entry.reason.clone();
            self.step_back(life, id, Some(ix), reason);
        }
    }

    /// Steps an execution back to the last boundary known to be good.
    pub(super) fn step_back(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        culprit: Option<NodeIx>,
        reason: String,
    ) {
        let now = life.now;
        let good = match self.checks.get(&id) {
            Some(check) if check.mode == fiec_schemas::trust::Verify::All => {
                Good::Known(check.good.clone())
            }
            _ => Good::BeforeTheCulprit,
        };
        let node = culprit.map(|ix| life.cluster().node(ix).id.clone());
        let Some(e) = life.cluster().execution(id) else {
            return;
        };
        if self
            .stepping
            .get(&id)
            .is_some_and(|since| now.mono.since(*since) < STEPPING_MS)
        {
            return;
        }
        let waits = matches!(e.stage, Stage::Pending);
        self.stepping.insert(id, now.mono);
        let Some(tenant) = life.begin_append(id) else {
            return;
        };
        // The execution is not bound before the step is in the ledger.
        if waits {
            life.stop_waiting(id);
        }
        life.push(Action::StepBack {
            execution: id,
            tenant,
            cause: Cause::Corrupt {
                node: node.clone(),
                reason,
            },
            culprit: node,
            to: good,
        });
    }

    /// Repeats on each tick what could not be done at once.
    pub fn look_at(&mut self, life: &mut Lifecycle, ix: NodeIx) {
        if !life.is_connected() {
            return;
        }
        let node = life.cluster().node(ix);
        if !node.trust.quarantine.entries.is_empty() && !node.assigned.is_empty() {
            self.take_away(life, ix);
        }
    }
}
