//! Whatever happens to the cluster, the policy keeps its promises.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use std::collections::BTreeMap;

use fiec_policy::{Automaton, State};
use fiec_policy::{ControlOutcome, Input, Millis};
use fiec_schemas::hardware::default_thresholds;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, Phase, Signal};
use proptest::prelude::*;
use world::trace::untraced;
use world::{World, digest_of};

#[derive(Debug, Clone)]
enum Step {
    Submit,
    Start(u64),
    Complete(u64),
    Refuse(u64),
    Reading(usize, f64),
    Silence(usize),
    Speak(usize),
    Restart(usize),
    Drain(usize, bool),
    Yield(u64),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let exec = 1u64..12;
    let step = prop_oneof![
        2 => Just(Step::Submit),
        4 => exec.clone().prop_map(Step::Start),
        1 => exec.clone().prop_map(Step::Complete),
        1 => exec.clone().prop_map(Step::Refuse),
        4 => (0usize..3, prop_oneof![Just(0.95), Just(0.8), Just(0.3)]).prop_map(|(n, v)| Step::Reading(n, v)),
        1 => (0usize..3).prop_map(Step::Silence),
        2 => (0usize..3).prop_map(Step::Speak),
        1 => (0usize..3).prop_map(Step::Restart),
        1 => (0usize..3, any::<bool>()).prop_map(|(n, on)| Step::Drain(n, on)),
        1 => exec.prop_map(Step::Yield),
        8 => (1u64..240).prop_map(|n| Step::Pass(n * 50)),
    ];
    prop::collection::vec(step, 1..80)
}

/// Performs the policy's actions like a correct cluster, and checks each.
struct Checker {
    w: World,
    silent: [bool; 3],
    shadow: Vec<Automaton>,
    /// Each node's last reading and its time: it holds for the liveness time.
    told: [(u64, f64); 3],
    /// True while the node's current instance has sent nothing; readings of an earlier one do not
    /// count.
    unheard: [bool; 3],
    submitted: u64,
    orders: BTreeMap<(String, u64), usize>,
}

impl Checker {
    fn new() -> Self {
        untraced();
        let w = World::new(3);
        let shadow = (0..3).map(|_| Automaton::new()).collect();
        let told = [0, 1, 2].map(|i| (w.now, w.reading(i)));
        Self {
            w,
            silent: [false; 3],
            shadow,
            told,
            unheard: [false; 3],
            submitted: 0,
            orders: BTreeMap::new(),
        }
    }

    fn exists(&self, n: u64) -> bool {
        self.w.ledgers.contains_key(&World::id(n))
    }

    fn apply(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Submit if self.submitted < 11 => {
                self.submitted += 1;
                self.w.submit_and_store(self.submitted);
            }
            Step::Start(n)
                if self.exists(*n)
                    && matches!(self.w.phase(*n), Phase::Bound(_))
                    && !self.silent[self.w.node_of(*n)] =>
            {
                self.w.start(*n);
            }
            Step::Complete(n)
                if self.exists(*n) && matches!(self.w.phase(*n), Phase::Started(_)) =>
            {
                self.w.complete(*n);
            }
            Step::Refuse(n) if self.exists(*n) && matches!(self.w.phase(*n), Phase::Bound(_)) => {
                self.w.refuse(*n);
            }
            Step::Reading(node, value) => self.w.set_reading(*node, *value),
            Step::Silence(node) => {
                self.w.silence(*node);
                self.silent[*node] = true;
            }
            Step::Speak(node) => {
                self.w.speak(*node);
                self.silent[*node] = false;
            }
            Step::Restart(node) => {
                self.w.restart_node(*node);
                self.unheard[*node] = true;
            }
            Step::Drain(node, on) => self.w.flag(*node, *on, *on),
            Step::Yield(n) => {
                self.w.step(Input::Yield {
                    ticket: 1,
                    execution: World::id(*n),
                    to: None,
                    who: "ann".to_owned(),
                });
                self.w.carry_out();
            }
            Step::Pass(ms) => {
                for _ in 0..ms / 50 {
                    self.w.pass(50);
                    self.observe();
                    self.obey()?;
                }
            }
            _ => {}
        }
        self.obey()
    }

    fn observe(&mut self) {
        let threshold = default_thresholds()[&Signal::Memory];
        let tells = self.w.now.is_multiple_of(500);
        let liveness = fiec_policy::Config::default().liveness_ms;
        for (i, automaton) in self.shadow.iter_mut().enumerate() {
            if tells && !self.silent[i] {
                self.told[i] = (self.w.now, self.w.reading(i));
                self.unheard[i] = false;
            }
            if tells || self.unheard[i] {
                let (at, value) = self.told[i];
                let fresh = self.w.now - at <= liveness && !self.unheard[i];
                automaton.observe(Millis(self.w.now), fresh.then_some(value), &threshold);
            }
        }
    }

    fn obey(&mut self) -> Result<(), TestCaseError> {
        for (node, request) in self.w.take_controls() {
            let ControlRequest::Yield {
                execution,
                epoch,
                to: Some(to),
                ..
            } = &request
            else {
                continue;
            };
            let index: usize = node.as_str()[1..].parse().unwrap();
            prop_assert_ne!(&to.node, &node, "nobody yields to itself");
            let there: usize = to.node.as_str()[1..].parse().unwrap();
            let pressed = matches!(
                self.shadow[there].state(),
                State::Unviable { .. } | State::Recovering { .. }
            );
            prop_assert!(
                !pressed,
                "{} is no destination: {:?}",
                to.node,
                self.shadow[there]
            );
            let seen = self
                .orders
                .entry((execution.to_string(), *epoch))
                .or_default();
            prop_assert!(
                *seen == 0,
                "a second destination while the first order stands"
            );
            let outcome = if self.silent[index] {
                ControlOutcome::NoAnswer
            } else {
                *seen += 1;
                ControlOutcome::Taken
            };
            let taken = outcome == ControlOutcome::Taken;
            self.w.step(Input::Ordered {
                execution: *execution,
                epoch: *epoch,
                answer: outcome,
            });
            if taken {
                self.w.obey(*execution, &request);
                self.orders.remove(&(execution.to_string(), *epoch));
            }
        }
        for name in self.w.take_probes() {
            let index: usize = name[1..].parse().unwrap();
            let outcome = if self.silent[index] {
                None
            } else {
                Some(self.w.instance(index))
            };
            let node = self.w.node(index);
            self.w.step(Input::Probe {
                node: node.clone(),
                answered: outcome,
            });
            self.w.carry_out();
        }
        Ok(())
    }

    /// The counter of waiting executions is what a count of them gives.
    fn check_waiting(&self) -> Result<(), TestCaseError> {
        let (live, _) = self.w.policy.beliefs(None, usize::MAX);
        let waiting = live.iter().filter(|e| e.node.is_none()).count();
        let counted = self.w.policy.waiting_of(&World::tenant());
        prop_assert_eq!(usize::try_from(counted).unwrap(), waiting);
        Ok(())
    }

    fn check_bindings(&self) -> Result<(), TestCaseError> {
        for ledger in self.w.ledgers.values() {
            let mut epoch = 0;
            for (_, event) in &ledger.history {
                let Event::Bound {
                    epoch: e,
                    node,
                    decision: Some(decision),
                    ..
                } = event
                else {
                    continue;
                };
                epoch += 1;
                prop_assert_eq!(*e, epoch);
                prop_assert_eq!(&decision.candidates[0].node, node);
                prop_assert!(decision.candidates[0].rejected.is_empty());
                prop_assert!(decision.candidates[0].score.is_some());
            }
            // The dwell of memory is 10 s.
            let moves: Vec<u64> = ledger
                .history
                .iter()
                .filter(|(_, e)| {
                    matches!(
                        e,
                        Event::Bound {
                            cause: Cause::Pressure { .. },
                            ..
                        }
                    )
                })
                .map(|(at, _)| *at)
                .collect();
            if let (Some(first), Some(last)) = (moves.first(), moves.last()) {
                let bound = (last - first).div_ceil(10_000) + 1;
                prop_assert!(moves.len() as u64 <= bound, "{moves:?}");
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn decisions_keep_their_promises_whatever_happens(steps in steps()) {
        let mut checker = Checker::new();
        for step in &steps {
            checker.apply(step)?;
            checker.check_bindings()?;
            checker.check_waiting()?;
        }
        // When all nodes are well again, nothing starves.
        for node in 0..3 {
            checker.w.set_reading(node, 0.2);
            checker.w.speak(node);
            checker.silent[node] = false;
            checker.w.flag(node, false, false);
        }
        checker.apply(&Step::Pass(120_000))?;
        for n in 1..=checker.submitted {
            if checker.exists(n) && matches!(checker.w.phase(n), Phase::Bound(_)) {
                checker.w.start(n);
            }
        }
        let idle = (1..=checker.submitted).filter(|n| checker.w.phase(*n).binding().is_some()).count();
        let pending = (1..=checker.submitted).filter(|n| matches!(checker.w.phase(*n), Phase::Pending { .. })).count();
        prop_assert!(pending == 0 || idle >= 6, "{pending} wait while only {idle} of 6 slots are taken");
        checker.check_bindings()?;
    }

    #[test]
    fn the_same_inputs_give_the_same_decisions(steps in steps()) {
        let run = || {
            let mut checker = Checker::new();
            for step in &steps {
                checker.apply(step).unwrap();
            }
            digest_of(&checker.w.policy)
        };
        prop_assert_eq!(run(), run());
    }
}
