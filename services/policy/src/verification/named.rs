//! The outputs that an execution's ledger has named, as far as the stream still shows them. A
//! policy service that has just started has seen only the last message.

use fiec_schemas::{BoundaryIndex, Digest, Event, ExecutionState, Output};

use serde::{Deserialize, Serialize};

use super::claim::Claim;

/// Valid outputs, with the boundaries that named them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Named {
    /// All outputs after this boundary are known. None: nothing is known.
    after: Option<BoundaryIndex>,
    outputs: Vec<(BoundaryIndex, String, Digest)>,
}

impl Named {
    /// Adds the next message of the ledger, from the first one still in the stream on.
    pub fn note(&mut self, events: &[Event], state: &ExecutionState) {
        let begins = || events.iter().any(|e| matches!(e, Event::Submitted));
        let first = || if begins() { 0 } else { state.boundary_index() };
        let mut after = self.after.unwrap_or_else(first);
        for event in events {
            match event {
                Event::Boundary(boundary) => self.made(boundary.index, &boundary.outputs),
                Event::Computed {
                    capsules, outputs, ..
                } => self.made(*capsules, outputs),
                Event::SteppedBack { to, .. } => {
                    // Outputs named beyond it are withdrawn, and made again in later messages.
                    let to = to.as_ref().map_or(0, |place| place.index);
                    self.outputs.retain(|(at, ..)| *at <= to);
                    after = after.min(to);
                }
                _ => {}
            }
        }
        self.after = Some(after);
    }

    fn made(&mut self, at: BoundaryIndex, outputs: &[Output]) {
        let made = outputs.iter().map(|o| (at, o.name.clone(), o.digest));
        self.outputs.extend(made);
    }

    /// Adds the missing outputs to a claim if all of them are known. Returns true if it did.
    pub(super) fn completes(&self, claim: &mut Claim) -> bool {
        let (from, to) = claim.ends();
        if !claim.unseen || self.after.is_none_or(|after| after > from) {
            return false;
        }
        for (at, name, digest) in &self.outputs {
            let later = claim.made.get(name).is_some_and(|made| made > at);
            if *at > from && *at <= to && !later {
                claim.made.insert(name.clone(), *at);
                claim.found.outputs.insert(name.clone(), *digest);
            }
        }
        claim.unseen = false;
        claim.whole = true;
        true
    }
}
