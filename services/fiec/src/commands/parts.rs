//! The parts that an execution has split off and not taken back, and their parts, as their ledgers
//! show them now.

use std::sync::Arc;

use fiec_broker::{Broker, Ledger};
use fiec_schemas::ExecutionState;
use fiec_schemas::spread::Part;
use serde_json::{Value, json};

use crate::ui;

/// Most parts that are read.
const LIMIT: usize = 256;

/// A part and its state.
#[derive(Debug)]
pub struct Standing {
    /// Distance from the requested execution. 1 is a part of that execution.
    pub depth: usize,
    /// Its range.
    pub part: Part,
    /// State in the last message. `None` if its ledger has not begun.
    pub state: Option<Arc<ExecutionState>>,
}

/// The parts of an execution, each before its own parts. An unreadable ledger counts as not begun.
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
            .as_deref()
            .map_or(0, ExecutionState::boundary_index)
    }

    /// JSON for scripts.
    pub fn to_json(&self) -> Value {
        let holder = self.state.as_deref().and_then(ExecutionState::part_of);
        json!({
            "part": self.part.id, "holder": holder, "from": self.part.from, "to": self.part.to,
            "phase": self.phase(), "node": self.node(), "boundary": self.boundary(),
        })
    }
}

/// A table for people.
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
    ui::table(["part", "tiles", "phase", "node", "boundary"], rows)
}
