//! The parts that an execution has split off and not taken back, theirs, and so on, as their ledgers
//! say now.

use fiec_broker::{Broker, Ledger};
use fiec_schemas::ExecutionState;
use fiec_schemas::spread::Part;
use serde_json::{Value, json};

use crate::ui;

/// Most parts that are looked at.
const LIMIT: usize = 256;

/// A part and where it stands.
#[derive(Debug)]
pub struct Standing {
    /// How far it is from the one that was asked for; 1: a part of that.
    pub depth: usize,
    /// Its range.
    pub part: Part,
    /// The last message's state; none while its ledger has not begun.
    pub state: Option<ExecutionState>,
}

/// The parts of an execution, each before its own ones; what cannot be read is not there yet.
pub async fn of(broker: &Broker, state: &ExecutionState) -> Vec<Standing> {
    let ledger = Ledger::new(broker);
    let mut found = Vec::new();
    let mut stack = Vec::new();
    let push = |stack: &mut Vec<(usize, Part)>, depth, state: &ExecutionState| {
        stack.extend(state.parts().iter().map(|part| (depth, *part)));
    };
    push(&mut stack, 1, state);
    while let Some((depth, part)) = stack.pop() {
        if found.len() == LIMIT {
            break;
        }
        let last = ledger.last(&state.tenant, part.id).await;
        let state = last.ok().flatten().map(|entry| entry.message.state);
        if let Some(state) = &state {
            push(&mut stack, depth + 1, state);
        }
        found.push(Standing { depth, part, state });
    }
    found
}

impl Standing {
    fn phase(&self) -> &'static str {
        self.state
            .as_ref()
            .map_or("not made yet", |state| state.phase.as_str())
    }

    fn node(&self) -> Option<&str> {
        let binding = self.state.as_ref()?.phase.binding()?;
        Some(binding.node.as_str())
    }

    fn boundary(&self) -> u64 {
        self.state
            .as_ref()
            .map_or(0, ExecutionState::boundary_index)
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let holder = self.state.as_ref().and_then(ExecutionState::part_of);
        json!({
            "part": self.part.id, "holder": holder, "from": self.part.from, "to": self.part.to,
            "phase": self.phase(), "node": self.node(), "boundary": self.boundary(),
        })
    }
}

/// For people.
pub fn table(parts: &[Standing]) -> String {
    let rows = parts.iter().map(|standing| {
        let indent = "  ".repeat(standing.depth.saturating_sub(1));
        vec![
            format!("{indent}{}", standing.part.id),
            format!("{} to {}", standing.part.from, standing.part.to),
            standing.phase().to_owned(),
            standing.node().unwrap_or_default().to_owned(),
            standing.boundary().to_string(),
        ]
    });
    ui::table(["part", "tiles", "phase", "node", "boundary"], rows).to_string()
}
