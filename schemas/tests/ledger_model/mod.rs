//! An exhaustive search of a small model of the ledger protocol (`schemas/PROTOCOL.md`).

pub mod message;
mod network;
pub mod rules;
pub mod state;
pub mod step;

use std::collections::HashMap;
use std::collections::VecDeque;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

use rules::{Faults, Rules};
use state::State;
use step::{Action, Model};

/// The keys are hashes already.
#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}

/// What a search found.
#[derive(Debug)]
pub struct Found {
    pub states: usize,
    pub steps: usize,
    /// States at a limit of the model.
    pub cut: usize,
    /// A property that does not hold, and the way there.
    pub violation: Option<(String, Vec<String>)>,
    /// The way to a state from which the execution can never complete.
    pub stuck: Option<Vec<String>>,
}

fn hash(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Visits every state that can be reached, breadth first, until a property is broken.
pub fn search(rules: Rules, faults: Faults) -> Found {
    let mut model = Model::new(rules, faults);
    let start = model.start();
    let mut seen: HashMap<u64, u32, BuildHasherDefault<Same>> = HashMap::default();
    let mut came: Vec<(u32, Option<Action>)> = vec![(0, None)];
    let mut edges: Vec<(u32, u32)> = Vec::new();
    let mut good: Vec<u32> = Vec::new();
    let mut queue = VecDeque::from([(0u32, start)]);
    seen.insert(hash(&start), 0);
    let (mut cut, mut violation) = (0, None);
    while let Some((at, state)) = queue.pop_front() {
        if let Some(reason) = model.broken_property(&state) {
            violation = Some((reason, at, None));
            break;
        }
        model.expand(&state);
        if let Some((action, reason)) = model.violation.take() {
            violation = Some((reason, at, Some(action)));
            break;
        }
        if model.is_done(&state) || model.is_cut {
            cut += usize::from(model.is_cut);
            good.push(at);
        }
        for (action, next) in &model.next {
            let new = u32::try_from(came.len()).expect("fewer states");
            let to = *seen.entry(hash(next)).or_insert(new);
            if to == new {
                came.push((at, Some(*action)));
                queue.push_back((new, *next));
            }
            edges.push((at, to));
        }
    }
    let way = |model: &mut Model, mut at: u32, last: Option<Action>| {
        let mut actions: Vec<Action> = last.into_iter().collect();
        while let (before, Some(action)) = came[at as usize] {
            actions.push(action);
            at = before;
        }
        actions.reverse();
        replay(model, start, &actions)
    };
    let violation = violation.map(|(reason, at, last)| (reason, way(&mut model, at, last)));
    let stuck = match &violation {
        Some(_) => None,
        None => first_stuck(came.len(), &edges, good),
    };
    Found {
        states: came.len(),
        steps: edges.len(),
        cut,
        violation,
        stuck: stuck.map(|at| way(&mut model, at, None)),
    }
}

/// The first state from which none of `good` can be reached.
fn first_stuck(states: usize, edges: &[(u32, u32)], good: Vec<u32>) -> Option<u32> {
    let mut start = vec![0u32; states + 1];
    for (_, to) in edges {
        start[*to as usize + 1] += 1;
    }
    for n in 0..states {
        start[n + 1] += start[n];
    }
    let (mut fill, mut before) = (start.clone(), vec![0u32; edges.len()]);
    for (from, to) in edges {
        before[fill[*to as usize] as usize] = *from;
        fill[*to as usize] += 1;
    }
    let (mut reached, mut open) = (vec![false; states], good);
    while let Some(at) = open.pop() {
        if !std::mem::replace(&mut reached[at as usize], true) {
            open.extend(&before[start[at as usize] as usize..start[at as usize + 1] as usize]);
        }
    }
    let stuck = reached.iter().position(|reached| !reached)?;
    Some(u32::try_from(stuck).expect("fewer states"))
}

/// The actions with what the ledger holds after each.
fn replay(model: &mut Model, mut state: State, actions: &[Action]) -> Vec<String> {
    let mut lines = Vec::new();
    for action in actions {
        model.expand(&state);
        let Some((_, next)) = model.next.iter().find(|(a, _)| a == action) else {
            lines.push(format!("{action:?}"));
            continue;
        };
        state = *next;
        let ledger: Vec<String> = state
            .server
            .entries()
            .iter()
            .map(|e| format!("{}:#{}", e.seq, e.id))
            .collect();
        let tips: Vec<String> = state
            .workers
            .iter()
            .map(|w| format!("#{}", w.tip))
            .collect();
        lines.push(format!(
            "{:28} ledger [{}] tips [{}] life {}",
            format!("{action:?}"),
            ledger.join(" "),
            tips.join(" "),
            state.server.life
        ));
    }
    let mut shown: Vec<u16> = state.server.entries().iter().map(|e| e.id).collect();
    shown.extend(state.workers.iter().map(|w| w.tip));
    shown.sort_unstable();
    shown.dedup();
    lines.extend(
        shown
            .into_iter()
            .filter(|id| *id != 0)
            .map(|id| format!("  {}", model.messages.show(id))),
    );
    lines
}
