//! Shrinks a failing scenario while the same promise is broken: fewer faults, workloads,
//! executions, nodes and services, less noise, less time.

use std::collections::BTreeSet;

use fiec_schemas::{FieldError, NodeId};

use crate::broken::{Rule, Violation};
use crate::scenario::{Arrivals, Fault, Load, Quantity, Scenario, Workload, node_names};

/// Runs a scenario to its first broken promise, if any.
pub type Player<'a> = dyn FnMut(&Scenario) -> Result<Option<Violation>, FieldError> + 'a;

/// The result of shrinking.
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// The smallest scenario found.
    pub scenario: Scenario,
    /// The violation in it.
    pub violation: Violation,
    /// Number of runs.
    pub runs: u32,
}

/// Shrinks a scenario that breaks a promise, in at most `most_runs` runs. None if it breaks no
/// promise.
///
/// # Errors
/// The field of the scenario and the rule that it breaks.
pub fn shrink(
    scenario: &Scenario,
    most_runs: u32,
    play: &mut Player<'_>,
) -> Result<Option<Shrunk>, FieldError> {
    let Some(violation) = play(scenario)? else {
        return Ok(None);
    };
    let mut found = Shrunk {
        scenario: scenario.clone(),
        violation,
        runs: 1,
    };
    let rule = found.violation.rule;
    // Each round tries every change once. The loop ends after a round without success.
    loop {
        let mut changed = false;
        let mut tried = 0;
        while let Some(smaller) = candidate(&found.scenario, &found.violation, tried) {
            if found.runs >= most_runs {
                return Ok(Some(found));
            }
            match attempt(&smaller, rule, play, &mut found.runs) {
                Some(violation) => {
                    found.scenario = smaller;
                    found.violation = violation;
                    changed = true;
                    // Try the same change again: halving continues, and the next fault now has this
                    // number.
                }
                None => tried += 1,
            }
        }
        if !changed {
            return Ok(Some(found));
        }
    }
}

fn attempt(
    smaller: &Scenario,
    rule: Rule,
    play: &mut Player<'_>,
    runs: &mut u32,
) -> Option<Violation> {
    // A scenario that names a removed node, for example, is invalid and no candidate.
    smaller.check().ok()?;
    *runs += 1;
    play(smaller).ok()?.filter(|v| v.rule == rule)
}

/// The `number`-th change that makes it smaller. None if there are no more.
fn candidate(s: &Scenario, violation: &Violation, number: usize) -> Option<Scenario> {
    let mut ways: Vec<Scenario> = Vec::new();
    let mut way = |change: &dyn Fn(&mut Scenario)| {
        let mut smaller = s.clone();
        change(&mut smaller);
        tidy(&mut smaller);
        if smaller != *s {
            ways.push(smaller);
        }
    };
    let ended_ms = violation.at_us.div_ceil(1_000);
    way(&|s| {
        s.duration_ms = s.duration_ms.min(ended_ms + 1);
        s.drain_ms = 60_000;
    });
    // Large changes first.
    way(&|s| s.faults.clear());
    way(&|s| s.quotas.clear());
    way(&|s| {
        for w in &mut s.workloads {
            w.after.clear();
            (w.gang, w.spread, w.fails) = (None, None, 0.0);
            w.submission.gang = None;
        }
    });
    for half in [false, true] {
        way(&|s| {
            let keep = s.faults.len() / 2;
            s.faults = if half {
                s.faults.split_off(keep)
            } else {
                s.faults.drain(..keep).collect()
            };
        });
    }
    for n in 0..s.faults.len() {
        way(&|s| {
            s.faults.remove(n);
        });
    }
    if s.workloads.len() > 1 {
        for n in 0..s.workloads.len() {
            way(&|s| {
                s.workloads.remove(n);
            });
        }
    }
    if s.nodes.len() > 1 {
        for n in 0..s.nodes.len() {
            way(&|s| {
                s.nodes.remove(n);
            });
        }
    }
    for n in 0..s.nodes.len() {
        way(&|s| s.nodes[n].count = s.nodes[n].count.div_ceil(2).max(2));
        way(&|s| s.nodes[n].count = (s.nodes[n].count - 1).max(1));
        way(&|s| s.nodes[n].slots = s.nodes[n].slots.div_ceil(2));
        way(&|s| s.nodes[n].load.clear());
        way(&|s| s.nodes[n].speed = Quantity::Fixed(1.0));
        way(&|s| s.nodes[n].parks = 0);
        way(&|s| {
            for load in s.nodes[n].load.values_mut() {
                *load = Load::Constant(0.2);
            }
        });
    }
    for n in 0..s.workloads.len() {
        for take_one in [false, true] {
            way(&|s| fewer(&mut s.workloads[n].arrivals, take_one));
        }
        let simpler: [fn(&mut Workload); 12] = [
            |w| w.memory_bytes = Quantity::Fixed(0.0),
            |w| w.after.clear(),
            |w| w.gang = None,
            |w| w.submission.gang = None,
            |w| w.spread = None,
            |w| w.spread = w.spread.map(|up_to| up_to.div_ceil(2).max(2)),
            |w| w.gang = w.gang.map(|size| size.div_ceil(2).max(2)),
            |w| w.fails = 0.0,
            |w| w.tenant = None,
            |w| (w.submission.batch, w.submission.at_once) = (None, None),
            |w| w.submission.priority = 0,
            |w| w.submission.viability.clear(),
        ];
        for simpler in simpler {
            way(&|s| simpler(&mut s.workloads[n]));
        }
    }
    for n in 0..s.quotas.len() {
        way(&|s| {
            s.quotas.remove(n);
        });
    }
    way(&|s| s.network = crate::scenario::Network::default());
    way(&|s| s.network.duplicate = 0.0);
    way(&|s| s.network.loss = 0.0);
    way(&|s| s.policies = 1);
    ways.into_iter().nth(number)
}

/// Removes references to removed nodes and services.
fn tidy(s: &mut Scenario) {
    let nodes: BTreeSet<String> = s.nodes.iter().flat_map(node_names).collect();
    let is_there = |node: &NodeId| nodes.contains(node.as_str());
    let policies = s.policies;
    let workloads = &s.workloads;
    let is_played = |program: &str| workloads.iter().any(|w| w.submission.program == program);
    s.faults.retain(|fault| match fault {
        Fault::CannotStart(f) => is_there(&f.node) && f.program.as_deref().is_none_or(is_played),
        Fault::Kills(f) => is_played(&f.program),
        Fault::Loss(f) | Fault::Silence(f) | Fault::Stall(f) | Fault::Cordon(f) => {
            is_there(&f.node)
        }
        Fault::Drain(f) => is_there(&f.node),
        Fault::Revoke(f) => is_there(&f.node),
        Fault::PolicyStall(f) | Fault::PolicyLoss(f) => f.policy < policies,
        Fault::Random { .. } => true,
    });
    let mut names = BTreeSet::new();
    for w in &mut s.workloads {
        names.insert(w.name.clone());
        w.after.retain(|after| names.contains(&after.workload));
    }
}

fn fewer(arrivals: &mut Arrivals, take_one: bool) {
    let less = |n: u64| match take_one {
        true => n.saturating_sub(1).max(1),
        false => n.div_ceil(2),
    };
    match arrivals {
        Arrivals::AtOnce { count, .. } => *count = less(*count),
        Arrivals::Poisson { count, .. } | Arrivals::Batches { count, .. } => {
            *count = Some(less(count.unwrap_or(1 << 20)));
        }
        Arrivals::Listed(moments) => {
            let keep = usize::try_from(less(moments.len() as u64)).unwrap_or(usize::MAX);
            moments.truncate(keep);
        }
    }
}
