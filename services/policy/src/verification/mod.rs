//! Verification: parts of executions are computed again on other nodes, and the bits compared. A node
//! whose bits are wrong loses its contract, and what it holds resumes from the last good boundary.
//!
//! ```text
//! message of a ledger ─▶ claim ─▶ [verifier asked] ─▶ agreed ─▶ next claim, or `verified`
//!                                       │ ▲
//!                                differs▼ │third node asked
//!                                   undecided ─▶ the node that is alone is convicted, or new proofs
//!                                                of both are awaited
//! ```
//!
//! * [`Check`]: what of one execution is claimed and verified, made of claims. It changes by
//!   messages and results alone.
//! * [`verifiers`] asks nodes to compute claims again, [`judge`] compares and decides.
//! * [`standing`] follows the proofs of nodes and takes contracts away.
//!
//! Waiting executions go before verification, and a bounded number of comparisons is open at a time
//! ([`VerificationSettings::at_once`]). Given up: the check of an execution that others never leave room for
//! waits, also when it has computed everything.
//!
//! It reads the cluster, and changes it by steps back, proofs that it asks for, and the events
//! `verified`, `completed` and `failed`.
//!
//! [`VerificationSettings::at_once`]: crate::VerificationSettings::at_once

mod check;
mod claim;
mod judge;
mod named;
mod settings;
pub(crate) mod standing;
mod verifiers;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::package::is_built_in;
use fiec_schemas::trust::{Finding, Verify, digest_of_result};
use fiec_schemas::{Contract, Event, EventKind, ExecutionId, InstanceId, NodeId, Timestamp};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::time::Millis;
use crate::view::{EventView, LedgerView};
use check::{Check, is_drawn};

pub use settings::VerificationSettings;

pub use named::Named;

/// The state of verification.
#[derive(Debug)]
pub(crate) struct Verification {
    /// Executions with claims.
    checks: BTreeMap<ExecutionId, Box<Check>>,
    /// The subset of `checks` with something to do.
    open: BTreeSet<ExecutionId>,
    /// Executions that are being stepped back, with the start time. A commit of the holder does not
    /// end it.
    stepping: BTreeMap<ExecutionId, Millis>,
    /// Number of questions to verifiers so far.
    questions: u64,
    /// Seed for the choice of the boundaries to compare.
    seed: InstanceId,
}

impl Verification {
    /// Nothing is checked yet. `seed` is known to this service alone.
    pub fn new(seed: InstanceId) -> Self {
        Self {
            checks: BTreeMap::new(),
            open: BTreeSet::new(),
            stepping: BTreeMap::new(),
            questions: 0,
            seed,
        }
    }

    /// Notes the claims in a message of a ledger. `is_spread`: several nodes compute the range. The
    /// result from a given boundary depends on its parts then, so it is not verified.
    pub fn hear(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>, is_spread: bool) {
        let id = view.state.execution;
        if view.event(EventKind::SteppedBack).is_some() {
            if let Some(check) = self.checks.get_mut(&id) {
                check.stepped_back(view.place());
                check.counted(view.state.commits(), view.state.commits());
            }
            self.open.remove(&id);
            return;
        }
        let here = view.all(EventKind::Boundary).count() as u64;
        let computed = view.event(EventKind::Computed);
        if here == 0 && computed.is_none() {
            return;
        }
        let mode = if view.state.guarded {
            Some(Verify::All)
        } else {
            asked_for(life, id).filter(|_| !is_spread)
        };
        let Some(mode) = mode else {
            return;
        };
        let author = view.worker().and_then(|w| w.parse::<NodeId>().ok());
        let author = author.map(|name| life.intern(&name));
        let commits = view.state.commits();
        let check = match self.checks.entry(id) {
            Entry::Occupied(known) => {
                let check = known.into_mut();
                check.counted(commits, here);
                check
            }
            Entry::Vacant(new) => {
                let first = commits == here && view.state.steps_back() == 0;
                let check = new.insert(Box::new(Check::new(mode, first)));
                check.counted(commits, commits);
                check
            }
        };
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
            let (seed, index) = (self.seed, place.index);
            check.boundary(place, found, node, || is_drawn(seed, id, index, share));
        }
        if let Some(end) = computed {
            let (found, completed) = end_of(end, life.now.wall);
            check.computed(found, author, completed);
        }
        if !check.claims.is_empty() {
            self.open.insert(id);
        }
    }

    /// The last message of a ledger was read after an append of ours failed.
    pub fn reread(&mut self, id: ExecutionId) {
        self.stepping.remove(&id);
    }

    /// Forgets an execution that has ended.
    pub fn forget(&mut self, id: ExecutionId) {
        self.checks.remove(&id);
        self.stepping.remove(&id);
        self.open.remove(&id);
    }

    /// True if a judgement depends on a node.
    pub fn names(&self, node: NodeIx) -> bool {
        self.checks.values().any(|check| check.names(node))
    }

    /// For people: how far verification has come.
    pub fn in_words(&self, life: &Lifecycle, id: ExecutionId) -> String {
        let mut words = String::new();
        let Some(check) = self.checks.get(&id) else {
            return words;
        };
        if check.mode == Verify::All {
            let good = check.good.as_ref().map_or(0, |p| p.index);
            words += &format!("; verified up to boundary {good}");
        }
        if let (Some(claim), Some(trial)) = (check.claims.front(), &check.trial)
            && let Some((verifier, _)) = &trial.other
        {
            let (from, to) = claim.ends();
            let both = claim.node.into_iter().chain([*verifier]);
            let names: Vec<_> = both.map(|ix| life.cluster().node(ix).id.as_str()).collect();
            let names = names.join(" and ");
            words += &format!("; {names} disagree on boundaries {from} to {to}");
        }
        if let Some(asked) = check.trial.as_ref().and_then(|t| t.asked) {
            words += &format!(
                "; {} computes a part once more",
                life.cluster().node(asked).id
            );
        } else if let Some(note) = &check.note {
            words += &format!("; {note}");
        }
        words
    }
}

/// What is to be verified of an execution by its submission.
fn asked_for(life: &Lifecycle, id: ExecutionId) -> Option<Verify> {
    let profile = life.cluster().execution(id)?.profile;
    let profile = life.cluster().profiles.get(profile)?;
    if profile.contract != Contract::Bitwise {
        return None;
    }
    // By default only built-in programs are verified: they are known to be deterministic.
    let usual = || Verify::Share(life.config.verification.share);
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

/// What the end of a program claims, and the event to repeat once that is verified.
fn end_of(end: &EventView<'_>, now: Timestamp) -> (Finding, Event) {
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
        computed_until: end.computed_until().unwrap_or(now),
        capsules,
        outputs,
        energy: None,
    };
    (found, completed)
}
