//! Compares what two nodes computed for the same claim, and decides what follows.

use fiec_schemas::messages::{Record, VerificationOutcome};
use fiec_schemas::package::is_built_in;
use fiec_schemas::substrate::HOST;
use fiec_schemas::trust::{Proof, Verdict, VerifiedUpTo};
use fiec_schemas::{Contract, Event, ExecutionId, Fault, NodeId, StatePlace};

use super::Verification;
use super::claim::Claim;
use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{NodeIx, Stage};

/// Most verifiers that an event names.
const VERIFIERS_LIMIT: usize = 16;

/// How often a claim may have three different ends before that is the program's fault. The nodes' canaries
/// run between.
const BABELS_LIMIT: u8 = 3;

/// Result of the comparisons of a claim.
enum Outcome {
    /// The claim is right: these nodes found the same.
    Agreed(Vec<NodeIx>),
    /// The claim is wrong: this node is the second with the same other result.
    Wrong(NodeIx),
    /// The claim is right: the second node confirms it, the first had found something else.
    Slandered(NodeIx, NodeIx),
    /// Two different results: a third node must decide.
    Undecided,
    /// The claim cannot be judged. This node made outputs whose digests the ledger no longer shows.
    Unknown(NodeIx),
    /// Three different results, the last one by this node.
    Babel(NodeIx),
}

/// True if σ is stored beside the ledger, by the verifying service.
fn is_kept(place: &StatePlace) -> bool {
    place.seq.is_none()
}

impl Verification {
    /// Processes the result of a verifier.
    pub fn verdict(&mut self, life: &mut Lifecycle, verdict: Verdict) {
        let now = life.now;
        let id = verdict.execution;
        let retry = life.config.verification.retry_ms;
        let from = life.cluster().find(&verdict.node);
        let Some(check) = self.checks.get_mut(&id) else {
            return;
        };
        let Some(trial) = check
            .trial
            .as_mut()
            .filter(|t| t.question == verdict.question && t.asked.is_some() && t.asked == from)
        else {
            return;
        };
        trial.heard = now.mono;
        let (Some(verifier), Some(claim)) = (trial.asked, check.claims.front()) else {
            return;
        };
        let finding = match (verdict.finding, verdict.error) {
            (Some(finding), _) => finding,
            (None, Some(reason)) => {
                check.failed(now.mono, retry, format!("{}: {reason}", verdict.node));
                if verdict.gone {
                    check.begin_anew();
                }
                return;
            }
            // The verifier is not done yet.
            (None, None) => return,
        };
        trial.asked = None;
        let outcome = match (&trial.other, claim.agrees(&finding)) {
            (_, true) if claim.is_beyond(&finding) => Outcome::Unknown(verifier),
            (None, true) => Outcome::Agreed(vec![verifier]),
            (Some((slanderer, _)), true) => Outcome::Slandered(*slanderer, verifier),
            (None, false) => {
                trial.other = Some((verifier, finding));
                Outcome::Undecided
            }
            (Some((_, other)), false) if *other == finding => Outcome::Wrong(verifier),
            (Some(_), false) => Outcome::Babel(verifier),
        };
        self.decide(life, id, outcome);
    }

    fn decide(&mut self, life: &mut Lifecycle, id: ExecutionId, outcome: Outcome) {
        let now = life.now;
        let retry = life.config.verification.retry_ms;
        let Some(check) = self.checks.get_mut(&id) else {
            return;
        };
        let Some(claim) = check.claims.front().cloned() else {
            return;
        };
        let (from, to) = claim.ends();
        let what = format!("boundaries {from} to {to} of {id}");
        let first = check
            .trial
            .as_ref()
            .and_then(|t| t.other.as_ref())
            .map(|(ix, _)| *ix);
        let name = |ix: NodeIx| life.cluster().node(ix).id.clone();
        let claimant = claim.node.map(name);
        let said = claimant
            .as_ref()
            .map_or("its nodes", |n| n.as_str())
            .to_owned();
        let record = |by: Vec<NodeId>, outcome: VerificationOutcome, detail: String| {
            Action::record(Record::Verification {
                execution: id,
                from,
                to,
                node: claimant.clone(),
                by,
                outcome,
                detail,
                at: now.wall,
            })
        };
        match outcome {
            Outcome::Agreed(by) => {
                let names: Vec<_> = by.iter().map(|ix| name(*ix)).collect();
                life.push(record(
                    names,
                    VerificationOutcome::Agreed,
                    format!("{said} had computed the same"),
                ));
                self.confirm(life, id, &by);
            }
            Outcome::Slandered(slanderer, by) => {
                let others: Vec<_> = claim.node.into_iter().chain([by]).collect();
                let excuse = self.excuse(life, id, slanderer, &others);
                let mut reason = format!(
                    "its bits for {what} differ from those of {said} and {}",
                    name(by)
                );
                reason.extend(excuse.iter().map(String::as_str));
                let outcome = match excuse {
                    None => VerificationOutcome::VerifierCorrupt,
                    Some(_) => VerificationOutcome::Undecided,
                };
                life.push(record(
                    vec![name(slanderer), name(by)],
                    outcome,
                    format!("{}: {reason}", name(slanderer)),
                ));
                self.confirm(life, id, &[by]);
                match excuse {
                    None => self.convict(life, slanderer, reason),
                    Some(_) => life.ask_for_proof(slanderer),
                }
            }
            Outcome::Wrong(by) => {
                let by: Vec<_> = first.into_iter().chain([by]).collect();
                let names: Vec<_> = by.iter().map(|ix| name(*ix)).collect();
                let words: Vec<_> = names.iter().map(|n| n.as_str()).collect();
                let excuse = claim.node.and_then(|node| self.excuse(life, id, node, &by));
                let mut reason = format!(
                    "its bits for {what} differ from those of {}",
                    words.join(" and ")
                );
                reason.extend(excuse.iter().map(String::as_str));
                let outcome = match excuse {
                    None => VerificationOutcome::NodeCorrupt,
                    Some(_) => VerificationOutcome::Undecided,
                };
                life.push(record(names, outcome, format!("{said}: {reason}")));
                self.go_back(life, id, claim.node, reason.clone());
                match (claim.node, excuse) {
                    (Some(node), None) => self.convict(life, node, reason),
                    (Some(node), Some(_)) => life.ask_for_proof(node),
                    (None, _) => {}
                }
            }
            Outcome::Undecided => {
                let names: Vec<_> = first.into_iter().map(name).collect();
                life.push(record(
                    names,
                    VerificationOutcome::Undecided,
                    format!("{said} had different bits"),
                ));
                check.retry_at = now.mono;
            }
            Outcome::Unknown(by) => {
                let reason = format!(
                    "the ledger shows no more which outputs {what} have named, so they are \
                     computed anew"
                );
                life.push(record(
                    vec![name(by)],
                    VerificationOutcome::Undecided,
                    reason.clone(),
                ));
                self.go_back(life, id, None, reason);
            }
            Outcome::Babel(by) => {
                let others: Vec<_> = first.into_iter().chain([by]).collect();
                let names: Vec<_> = others.iter().map(|ix| name(*ix)).collect();
                let note = format!(
                    "{what} ended with three different values, and all three nodes run their canaries. If \
                     these pass, the bits of the program depend on the node: `fiec check` shows where"
                );
                life.push(record(names, VerificationOutcome::Undecided, note.clone()));
                check.trial = None;
                check.failed(now.mono, retry, note);
                check.babels = check.babels.saturating_add(1);
                for ix in claim.node.into_iter().chain(others) {
                    life.ask_for_proof(ix);
                }
            }
        }
    }

    fn confirm(&mut self, life: &mut Lifecycle, id: ExecutionId, by: &[NodeIx]) {
        let Some(check) = self.checks.get_mut(&id) else {
            return;
        };
        let before = check.good.clone();
        let done = check.confirmed(by);
        if let Some(good) = check
            .good
            .clone()
            .filter(|good| Some(good) != before.as_ref())
        {
            let old = before.filter(is_kept).map(|place| place.digest);
            let by = check
                .by
                .iter()
                .map(|ix| life.cluster().node(*ix).id.clone());
            let up_to = VerifiedUpTo {
                v: 1,
                by: by.take(VERIFIERS_LIMIT).collect(),
                segments: check.segments,
                good,
            };
            let drop = old.filter(|digest| *digest != up_to.good.digest);
            life.push(Action::Verified {
                execution: id,
                up_to,
                drop,
            });
        }
        if done {
            self.finish(life, id);
        }
    }

    /// Ends an execution that nobody can compute twice with the same bits, once everything of it was
    /// computed. While it computes, its nodes may yet be found to be at fault.
    pub(super) fn gives_up_comparing(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        let (Some(check), Some(e)) = (self.checks.get(&id), life.cluster().execution(id)) else {
            return false;
        };
        if check.babels < BABELS_LIMIT || e.stage != Stage::Verifying || e.is_appending() {
            return false;
        }
        let Some((from, to)) = check.claims.front().map(Claim::ends) else {
            return false;
        };
        let reason = format!(
            "boundaries {from} to {to} ended with three different values in {} rounds, on nodes whose \
             canaries pass: the bits of the program depend on the node or on chance. `fiec check` shows where",
            check.babels
        );
        let failed = Event::Failed {
            reason,
            stderr: String::new(),
            fault: Some(Box::new(Fault::WrongAnswer)),
        };
        life.end_with(id, failed);
        self.drop_kept(life, id);
        true
    }

    /// Removes the kept σ: the execution has ended, or ends with the next append, and is not
    /// stepped back any more.
    pub fn drop_kept(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let good = self.checks.get(&id).and_then(|check| check.good.as_ref());
        if let Some(good) = good.filter(|place| is_kept(place)) {
            life.push(Action::DropKept {
                execution: id,
                digest: good.digest,
            });
        }
    }

    /// Appends `verified` and `completed` once everything of an execution is verified.
    pub(super) fn finish(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let Some(check) = self.checks.get(&id) else {
            return;
        };
        let Some(completed) = check.completed.clone() else {
            return;
        };
        let (by, segments) = (check.by.clone(), check.segments);
        let by = by.iter().map(|ix| life.cluster().node(*ix).id.clone());
        let verified = Event::Verified {
            by: by.take(VERIFIERS_LIMIT).collect(),
            segments,
        };
        let Some(e) = life.cluster().execution(id) else {
            return;
        };
        // An append in flight settles first; a later tick tries again.
        if e.is_appending() || e.stage != Stage::Verifying {
            return;
        }
        life.wait_anew(id);
        life.append(id, vec![verified, completed]);
        self.drop_kept(life, id);
    }

    fn go_back(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        culprit: Option<NodeIx>,
        reason: String,
    ) {
        let now = life.now;
        let retry = life.config.verification.retry_ms;
        if let Some(check) = self.checks.get_mut(&id) {
            check.must_step_back = Some((culprit, reason.clone()));
            check.retry_at = now.mono.plus(retry);
        }
        self.step_back(life, id, culprit, reason);
    }

    /// Why a node that is alone with its bits is not to blame, if it may be the program: none of the
    /// nodes that agree has as many processors, and the program is a package, whose threads may follow
    /// them. Built-in programs have the same bits on any number.
    fn excuse(
        &self,
        life: &Lifecycle,
        id: ExecutionId,
        alone: NodeIx,
        agreed: &[NodeIx],
    ) -> Option<String> {
        let profile = life.cluster().execution(id)?.profile;
        if is_built_in(&life.cluster().profiles.get(profile)?.program) {
            return None;
        }
        let cpus = |ix: NodeIx| Some(life.cluster().node(ix).descriptor.as_ref()?.cpus);
        let own = cpus(alone);
        let is_like = |ix: &NodeIx| own.is_some() && cpus(*ix) == own;
        (!agreed.iter().any(is_like)).then(|| {
            "; it has another number of processors, and the bits of a program may depend on that \
             (see `fiec check`), so it is not quarantined"
                .to_owned()
        })
    }

    /// Uses a node's new proof to decide between two nodes that disagree when no third one can.
    pub(super) fn proof_tells(&mut self, life: &mut Lifecycle, ix: NodeIx, proof: &Proof) {
        let now = life.now;
        // Claims are recomputed on the host, so only the host's canary counts. A device that broke
        // the contract has lost it already.
        let broken = |r: &&fiec_schemas::trust::Proved| {
            r.contract == Contract::Bitwise && r.substrate == HOST && !r.passed
        };
        let Some(broken) = proof.results.iter().find(broken) else {
            return;
        };
        let reason = broken.detail.clone();
        for id in self.open.iter().copied().collect::<Vec<_>>() {
            let Some(check) = self.checks.get_mut(&id) else {
                continue;
            };
            let (Some(claim), Some(trial)) = (check.claims.front(), check.trial.as_ref()) else {
                continue;
            };
            let Some((verifier, _)) = trial.other else {
                continue;
            };
            if trial.proofs_since.is_none_or(|since| proof.at < since) {
                continue;
            }
            if claim.node == Some(ix) {
                self.go_back(life, id, Some(ix), reason.clone());
                self.convict(life, ix, reason.clone());
            } else if verifier == ix {
                check.trial = None;
                check.retry_at = now.mono;
                self.convict(life, ix, reason.clone());
            }
        }
    }
}
