//! Has parts of executions computed again on other nodes; [`super::judge`] compares the results.
//!
//! If two nodes disagree, a third decides. Without a third, both nodes run their canaries again. If
//! these pass, the execution waits and reports it.

use std::collections::BTreeMap;

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::is_built_in;
use fiec_schemas::substrate::HOST;
use fiec_schemas::trust::{Finding, Verify, digest_of_result};
use fiec_schemas::{Contract, Event, EventKind, ExecutionId, NodeId};

use crate::engine::{Action, Policy, Remembered};
use crate::lifecycle::cluster::execution::Avoided;
use crate::lifecycle::cluster::trust::Standing;
use crate::lifecycle::cluster::{NodeIx, Presence};
use crate::lifecycle::placement::Ask;
use crate::time::Millis;
use crate::verification::{Check, Named, Recall, Trial, is_drawn};
use crate::view::LedgerView;

/// Wait for a third node that is present but not free, in ms. Then both nodes are asked for new
/// proofs.
const THIRD_WITHIN_MS: u64 = 10_000;
/// Time until an unanswered question for the verified boundary is repeated, in ms.
const RECALL_WITHIN_MS: u64 = 10_000;
/// Most nodes whose reasons a note names.
const REASONS_LIMIT: usize = 4;

impl Policy {
    fn mode_of(&self, id: ExecutionId, guarded: bool) -> Option<Verify> {
        if guarded {
            return Some(Verify::All);
        }
        // The result of an execution from a given boundary depends on its parts, so spread
        // executions are not verified.
        if self.spread.members.contains_key(&id) {
            return None;
        }
        let profile = self.life.cluster().execution(id)?.profile;
        let profile = self.life.cluster().profiles.get(profile)?;
        if profile.contract != Contract::Bitwise {
            return None;
        }
        // By default only built-in programs are verified: they are known to be deterministic.
        let usual = || Verify::Share(self.life.config.verify_share);
        let mode = match profile.verify {
            Some(mode) => mode,
            None if is_built_in(&profile.program) => usual(),
            None => Verify::None,
        };
        match mode {
            Verify::None => None,
            Verify::Share(share) if share <= 0.0 => None,
            mode => Some(mode),
        }
    }

    /// Notes the claims in a message.
    pub(crate) fn note_claims(&mut self, view: &LedgerView<'_>) {
        let now = self.life.now;
        let id = view.state.execution;
        if view.event(EventKind::SteppedBack).is_some() {
            if let Some(check) = self.checks.get_mut(&id) {
                check.stepped_back(view.place());
                check.counted(view.state.commits(), view.state.commits());
            }
            self.to_verify.remove(&id);
            return;
        }
        let here = view.all(EventKind::Boundary).count() as u64;
        let computed = view.event(EventKind::Computed);
        if here == 0 && computed.is_none() {
            return;
        }
        let Some(mode) = self.mode_of(id, view.state.guarded) else {
            return;
        };
        let author = view.worker().and_then(|w| w.parse::<NodeId>().ok());
        let author = author.map(|name| self.life.intern(&name));
        let seed = self.seed;
        let first = view.state.commits() == here && view.state.steps_back() == 0;
        let new = !self.checks.contains_key(&id);
        let check = self
            .checks
            .entry(id)
            .or_insert_with(|| Box::new(Check::new(mode, first)));
        if new {
            check.counted(view.state.commits(), view.state.commits());
        } else {
            check.counted(view.state.commits(), here);
        }
        if let (true, Some(place), Some(node)) = (here > 0, view.place(), author) {
            let mut found = Finding {
                index: place.index,
                digest: place.digest,
                outputs: BTreeMap::new(),
            };
            for event in view.all(EventKind::Boundary) {
                found.made(&event.outputs());
            }
            let share = match mode {
                Verify::Share(share) => share,
                Verify::All => 1.0,
                Verify::None => 0.0,
            };
            let index = place.index;
            check.boundary(place, found, node, || is_drawn(seed, id, index, share));
        }
        if let Some(end) = computed {
            let (result, outputs) = (end.result(), end.outputs());
            let capsules = end.capsules.unwrap_or(0);
            let mut found = Finding {
                index: capsules,
                digest: end
                    .object
                    .map_or_else(|| digest_of_result(&result), |object| object.digest),
                outputs: BTreeMap::new(),
            };
            found.made(&outputs);
            let completed = Event::Completed {
                result,
                object: end.object,
                computed_until: end.computed_until().unwrap_or(now.wall),
                capsules,
                outputs,
                energy: None,
            };
            check.computed(found, author, completed);
        }
        if !check.claims.is_empty() {
            self.to_verify.insert(id);
        }
    }

    /// The periodic work: asks verifiers, gives up on silent ones, steps executions back.
    pub(crate) fn verify_round(&mut self) {
        let now = self.life.now;
        if self.to_verify.is_empty() {
            return;
        }
        let ids: Vec<_> = self.to_verify.iter().copied().collect();
        let mut open = 0;
        for id in &ids {
            self.give_up_the_silent(*id);
            let trial = self.checks.get(id).and_then(|c| c.trial.as_ref());
            open += usize::from(trial.is_some_and(|t| t.asked.is_some()));
        }
        for id in ids {
            let Some(check) = self.checks.get(&id) else {
                self.to_verify.remove(&id);
                continue;
            };
            if !self.life.is_mine(id) {
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
                self.step_back(id, culprit, reason);
                continue;
            }
            if check.claims.is_empty() {
                if check.completed.is_some() {
                    self.finish(id);
                } else {
                    self.to_verify.remove(&id);
                }
                continue;
            }
            let asked = check.trial.as_ref().is_some_and(|t| t.asked.is_some());
            if self.gives_up_comparing(id) {
                continue;
            }
            // Waiting executions go before verification.
            if asked || open >= self.life.config.verify_at_once || !self.life.waiting.is_empty() {
                continue;
            }
            if self.recalls(id) {
                open += usize::from(self.ask_somebody(id));
            }
        }
    }

    /// True if the boundary verified before is known; otherwise asks for it.
    fn recalls(&mut self, id: ExecutionId) -> bool {
        let now = self.life.now;
        let Some(check) = self.checks.get_mut(&id) else {
            return false;
        };
        match check.recall {
            Recall::Known => return true,
            Recall::Asked(at) if now.mono.since(at) < RECALL_WITHIN_MS => return false,
            Recall::Asked(_) | Recall::Wanted => {}
        }
        check.recall = Recall::Asked(now.mono);
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        self.life.out.push(Action::Recall {
            execution: id,
            tenant: e.tenant.clone(),
        });
        false
    }

    /// Handles the boundary up to which another service, or an earlier instance of this one, has
    /// verified.
    pub(crate) fn recalled(&mut self, id: ExecutionId, (up_to, named): (Remembered, &Named)) {
        let now = self.life.now;
        let retry = self.life.config.verify_retry_ms;
        let up_to = match up_to {
            Remembered::Nothing => None,
            Remembered::Stored(u) => {
                let by = u.by.iter().map(|name| self.life.intern(name));
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

    fn give_up_the_silent(&mut self, id: ExecutionId) {
        let now = self.life.now;
        let silence = self.life.config.verify_silence_ms;
        let retry = self.life.config.verify_retry_ms;
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
        let node = self.life.cluster().node(ix);
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
    fn ask_somebody(&mut self, id: ExecutionId) -> bool {
        let now = self.life.now;
        let (Some(e), Some(check)) = (self.life.cluster().execution(id), self.checks.get(&id))
        else {
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
        let choice = self.life.choose(&ask);
        let Some(choice) = choice else {
            let soon = self.could_be_asked(&avoid);
            let review = self.life.review(now, &ask, None);
            let out_of = |node: &NodeId| {
                let ix = self.life.cluster().find(node);
                avoid.iter().any(|a| Some(a.node) == ix)
            };
            let others = review.candidates.iter().filter(|c| !out_of(&c.node));
            let reasons: Vec<_> = others
                .map(|c| format!("{}: {}", c.node, c.rejected.join(", ")))
                .take(REASONS_LIMIT)
                .collect();
            self.nobody_to_ask(id, soon, &reasons.join("; "));
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
        self.life.out.push(Action::Control {
            node: self.life.cluster().node(choice.node).id.clone(),
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
    fn could_be_asked(&self, out_of_question: &[Avoided]) -> bool {
        let now = self.life.now;
        self.life.cluster().nodes().any(|(ix, node)| {
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

    fn nobody_to_ask(&mut self, id: ExecutionId, soon: bool, why: &str) {
        let now = self.life.now;
        let retry = self.life.config.verify_retry_ms;
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
            self.life.ask_for_proof(ix);
        }
    }

    /// For people: how far verification has come.
    pub(crate) fn verification_in_words(&self, check: &Check) -> String {
        let mut words = String::new();
        if check.mode == Verify::All {
            let good = check.good.as_ref().map_or(0, |p| p.index);
            words += &format!("; verified up to boundary {good}");
        }
        if let (Some(claim), Some(trial)) = (check.claims.front(), &check.trial)
            && let Some((verifier, _)) = &trial.other
        {
            let (from, to) = claim.ends();
            let both = claim.node.into_iter().chain([*verifier]);
            let names: Vec<_> = both
                .map(|ix| self.life.cluster().node(ix).id.as_str())
                .collect();
            let names = names.join(" and ");
            words += &format!("; {names} disagree on boundaries {from} to {to}");
        }
        if let Some(asked) = check.trial.as_ref().and_then(|t| t.asked) {
            words += &format!(
                "; {} computes a part once more",
                self.life.cluster().node(asked).id
            );
        } else if let Some(note) = &check.note {
            words += &format!("; {note}");
        }
        words
    }
}
