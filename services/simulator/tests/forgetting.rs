//! A policy keeps nothing of an execution that ended a while ago.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use fiec_policy::{Config, LedgerView, Now, Policy};
use fiec_schemas::ExecutionId;
use fiec_simulator::{Decide, World, random};

/// Time for which a policy may remember an end, in ms.
const A_WHILE: u64 = 60_000;
/// Ledger messages between two looks.
const EVERY: u64 = 100;

/// The production policy, whose whole state is searched for executions that have ended.
struct Searched {
    inner: Policy,
    /// The ends that it heard of, with their times in ms.
    ended: BTreeMap<ExecutionId, u64>,
    live: BTreeSet<ExecutionId>,
    heard: u64,
    counts: Rc<Counts>,
}

/// How many executions were searched for.
#[derive(Debug, Default)]
struct Counts {
    /// Live ones that were found.
    live: Cell<usize>,
    /// Ended ones that were not.
    gone: Cell<usize>,
}

impl Decide for Searched {
    fn policy(&self) -> &Policy {
        &self.inner
    }

    fn policy_mut(&mut self) -> &mut Policy {
        &mut self.inner
    }

    fn hear(&mut self, now: Now, view: &LedgerView<'_>) {
        let id = view.state.execution;
        match view.state.phase.is.is_terminal() {
            true => {
                self.live.remove(&id);
                self.ended.insert(id, now.mono.0);
            }
            false => {
                self.ended.remove(&id);
                self.live.insert(id);
            }
        }
        self.heard += 1;
        if !self.heard.is_multiple_of(EVERY) {
            return;
        }
        let all = format!("{:?}", self.inner);
        let old = self
            .ended
            .iter()
            .filter(|(_, at)| **at + A_WHILE < now.mono.0);
        for (id, at) in old {
            let uuid = id.to_string();
            if let Some(place) = all.find(&uuid) {
                let around = &all[place.saturating_sub(400)..(place + 200).min(all.len())];
                panic!(
                    "{uuid} ended {} s ago: …{around}…",
                    (now.mono.0 - at) / 1_000
                );
            }
            self.counts.gone.set(self.counts.gone.get() + 1);
        }
        let live = self.live.iter().filter(|id| all.contains(&id.to_string()));
        self.counts.live.set(self.counts.live.get() + live.count());
    }
}

#[test]
fn nothing_is_remembered_of_an_execution_that_ended_a_while_ago() {
    let counts = Rc::new(Counts::default());
    for seed in 1..=30 {
        println!("seed {seed}");
        let scenario = random::scenario(seed);
        let mut make = |config: &Config, id| Searched {
            inner: Policy::new(config.clone(), id),
            ended: BTreeMap::new(),
            live: BTreeSet::new(),
            heard: 0,
            counts: Rc::clone(&counts),
        };
        let outcome = World::new(&scenario, &mut make).unwrap().run(&mut |_| {});
        assert!(outcome.violation.is_none(), "{:?}", outcome.violation);
    }
    assert!(
        counts.gone.get() > 1_000 && counts.live.get() > 1_000,
        "{counts:?}"
    );
}
