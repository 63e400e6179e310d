//! Has parts of executions computed again on other nodes; [`super::judge`] compares the results.
//!
//! If two nodes disagree, a third decides. Without a third, both nodes run their canaries again. If
//! these pass, the execution waits and reports it.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Contract, ExecutionId, NodeId};

use super::Verification;
use super::check::Recall;
use super::claim::Trial;
use super::named::Named;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::execution::Avoided;
use crate::lifecycle::cluster::trust::Standing;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::lifecycle::placement::Ask;
use crate::time::Millis;
use crate::{Action, Remembered};

/// Wait for a third node that is present but not free, in ms. Then both nodes are asked for new
/// proofs.
const THIRD_WITHIN_MS: u64 = 10_000;
/// Time until an unanswered question for the verified boundary is repeated, in ms.
const RECALL_WITHIN_MS: u64 = 10_000;
/// Most nodes whose reasons a note names.
const REASONS_LIMIT: usize = 4;

impl Verification {
    /// The periodic work: asks verifiers, gives up on silent ones, steps executions back.
    pub fn review(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        if self.open.is_empty() {
            return;
        }
        let ids: Vec<_> = self.open.iter().copied().collect();
        let mut open = 0;
        for id in &ids {
            self.give_up_the_silent(life, *id);
            let trial = self.checks.get(id).and_then(|c| c.trial.as_ref());
            open += usize::from(trial.is_some_and(|t| t.asked.is_some()));
        }
        for id in ids {
            let Some(check) = self.checks.get(&id) else {
                self.open.remove(&id);
                continue;
            };
            if !life.is_mine(id) {
                // Another service continues the verification. Its results must be read before this
                // one takes over again.
                if let Some(check) = self.checks.get_mut(&id).filter(|c| c.trial.is_none()) {
                    check.forget_recall();
                }
                continue;
            }
            if now.mono < check.retry_at {
                continue;
            }
            if let Some((culprit, reason)) = check.must_step_back.clone() {
                self.step_back(life, id, culprit, reason);
                continue;
            }
            if check.claims.is_empty() {
                if check.completed.is_some() {
                    self.finish(life, id);
                } else {
                    self.open.remove(&id);
                }
                continue;
            }
            let asked = check.trial.as_ref().is_some_and(|t| t.asked.is_some());
            if self.gives_up_comparing(life, id) {
                continue;
            }
            // Waiting executions go before verification.
            if asked || open >= life.config.verification.at_once || !life.waiting().is_empty() {
                continue;
            }
            if self.recalls(life, id) {
                open += usize::from(self.ask_somebody(life, id));
            }
        }
    }

    /// True if the boundary verified before is known; otherwise asks for it.
    fn recalls(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        let now = life.now;
        let Some(check) = self.checks.get_mut(&id) else {
            return false;
        };
        match check.recall {
            Recall::Known => return true,
            Recall::Asked(at) if now.mono.since(at) < RECALL_WITHIN_MS => return false,
            Recall::Asked(_) | Recall::Wanted => {}
        }
        check.recall = Recall::Asked(now.mono);
        let Some(e) = life.cluster().execution(id) else {
            return false;
        };
        life.push(Action::Recall {
            execution: id,
            tenant: e.tenant.clone(),
        });
        false
    }

    /// Handles the boundary up to which another service, or an earlier instance of this one, has
    /// verified.
    pub fn recalled(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        (up_to, named): (Remembered, &Named),
    ) {
        let now = life.now;
        let retry = life.config.verification.retry_ms;
        let up_to = match up_to {
            Remembered::Nothing => None,
            Remembered::Stored(u) => {
                let by = u.by.iter().map(|name| life.intern(name));
                Some((u.good, by.collect(), u.segments))
            }
            Remembered::Unknown(reason) => {
                if let Some(check) = self.checks.get_mut(&id) {
                    check.recall = Recall::Wanted;
                    check.failed(now.mono, retry, reason);
                }
                return;
            }
        };
        if let Some(check) = self.checks.get_mut(&id)
            && matches!(check.recall, Recall::Asked(_))
        {
            check.recalled(up_to);
            check.named(named);
        }
    }

    fn give_up_the_silent(&mut self, life: &mut Lifecycle, id: ExecutionId) {
        let now = life.now;
        let silence = life.config.verification.silence_ms;
        let retry = life.config.verification.retry_ms;
        let Some(check) = self.checks.get_mut(&id) else {
            return;
        };
        let Some(Trial {
            asked: Some(ix),
            heard,
            ..
        }) = check.trial
        else {
            return;
        };
        let node = life.cluster().node(ix);
        let lost = matches!(node.presence, Presence::Lost { .. });
        if lost || now.mono.since(heard) > silence {
            let note = format!(
                "{} was asked to compute a part once more and fell silent",
                node.id
            );
            check.failed(now.mono, retry, note);
        }
    }

    /// Asks a node with a spare slot to compute the first claim again. Returns true if one was
    /// asked.
    fn ask_somebody(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        let now = life.now;
        let (Some(e), Some(check)) = (life.cluster().execution(id), self.checks.get(&id)) else {
            return false;
        };
        let (Some(claim), Some(segment)) = (check.claims.front(), check.segment()) else {
            return false;
        };
        let other = check.trial.as_ref().and_then(|t| t.other.as_ref());
        let out_of_question = |ix| Avoided {
            node: ix,
            until: Millis(u64::MAX),
            refusals: 0,
        };
        let mut avoid: Vec<Avoided> = claim.node.into_iter().map(out_of_question).collect();
        avoid.extend(other.map(|(ix, _)| out_of_question(*ix)));
        let ask = Ask {
            avoid: avoid.clone(),
            free_slot: true,
            ..Ask::new(e.profile)
        };
        let tenant = e.tenant.clone();
        let choice = life.choose(&ask);
        let Some(choice) = choice else {
            let soon = self.could_be_asked(life, &avoid);
            let review = life.review(now, &ask, None);
            let out_of = |node: &NodeId| {
                let ix = life.cluster().find(node);
                avoid.iter().any(|a| Some(a.node) == ix)
            };
            let others = review.candidates.iter().filter(|c| !out_of(&c.node));
            let reasons: Vec<_> = others
                .map(|c| format!("{}: {}", c.node, c.rejected.join(", ")))
                .take(REASONS_LIMIT)
                .collect();
            self.nobody_to_ask(life, id, soon, &reasons.join("; "));
            return false;
        };
        self.questions += 1;
        // Unique among replicas and instances as far as clocks are.
        let question =
            now.wall.micros().unsigned_abs().wrapping_mul(1_000) + self.questions % 1_000;
        let Some(check) = self.checks.get_mut(&id) else {
            return false;
        };
        let trial = check.trial.get_or_insert(Trial {
            question,
            asked: None,
            heard: now.mono,
            other: None,
            proofs_since: None,
        });
        trial.question = question;
        trial.asked = Some(choice.node);
        trial.heard = now.mono;
        life.push(Action::Control {
            node: life.cluster().node(choice.node).id.clone(),
            request: ControlRequest::Verify {
                question,
                execution: id,
                tenant,
                segment,
            },
            ticket: None,
        });
        true
    }

    /// True if another node may keep the contract and soon have a spare slot. It counts as present
    /// while it is probed or renews its proof.
    fn could_be_asked(&self, life: &Lifecycle, out_of_question: &[Avoided]) -> bool {
        let now = life.now;
        life.cluster().nodes().any(|(ix, node)| {
            let standing = node.descriptor.as_ref().is_some_and(|d| {
                let trust = &node.trust;
                let standing = trust.standing(d, Contract::Bitwise, HOST, now.wall);
                !matches!(
                    standing,
                    Standing::Quarantined(_)
                        | Standing::Failed(_)
                        | Standing::Refused(_)
                        | Standing::Stranger(_)
                )
            });
            let there = !matches!(node.presence, Presence::Lost { .. }) && !node.is_draining();
            standing && there && out_of_question.iter().all(|a| a.node != ix)
        })
    }

    fn nobody_to_ask(&mut self, life: &mut Lifecycle, id: ExecutionId, soon: bool, why: &str) {
        let now = life.now;
        let retry = life.config.verification.retry_ms;
        let Some(check) = self.checks.get_mut(&id) else {
            return;
        };
        let Some(claim) = check.claims.front() else {
            return;
        };
        let (from, to) = claim.ends();
        check.retry_at = now.mono.plus(retry);
        let Some((verifier, _)) = check.trial.as_ref().and_then(|t| t.other.clone()) else {
            check.note = Some(format!(
                "boundaries {from} to {to} are to be computed once more, and no other node is free for that ({why})"
            ));
            return;
        };
        let both: Vec<NodeIx> = claim.node.into_iter().chain([verifier]).collect();
        check.note = Some(format!("a third node is awaited to decide ({why})"));
        let Some(trial) = check.trial.as_mut().filter(|t| t.proofs_since.is_none()) else {
            return;
        };
        // Another node is present, but busy or under pressure, probably not for long.
        if soon && now.mono.since(trial.heard) < THIRD_WITHIN_MS {
            return;
        }
        trial.proofs_since = Some(now.wall);
        for ix in both {
            life.ask_for_proof(ix);
        }
    }
}
