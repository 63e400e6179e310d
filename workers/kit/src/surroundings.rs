//! What a capsule may ask of where it runs: the node's vector, what other places could give, and
//! another grant.
//!
//! Whoever reads this must not let its bits depend on it: it differs from run to run. It is for
//! the speed, for how work is laid out in time, and for words to people.

pub use fiec_schemas::surroundings::{Asked, GrantChange, Offer, Offers, Surroundings};

use crate::frames::{FrameError, Order, Report};
use crate::port::Port;
use crate::program::{Capsule, ProgramError};

/// Why a run without an agent gets nothing.
const NO_NODE: &str = "this run has no node";

impl Port {
    /// Asks the agent, and waits for its answer; other orders wait meanwhile.
    pub(crate) fn surroundings(&self) -> Result<Surroundings, FrameError> {
        self.converse(&Report::Surroundings, |order| match order {
            Order::Surroundings(answer) => Some((**answer).clone()),
            _ => None,
        })
    }

    /// Asks the agent, and waits for its answer; other orders wait meanwhile.
    pub(crate) fn ask_for(&self, change: GrantChange) -> Result<Asked, FrameError> {
        self.converse(&Report::Ask(change), |order| match order {
            Order::Asked(answer) => Some(answer.clone()),
            _ => None,
        })
    }
}

impl Capsule {
    /// What is known of where it runs: its node's last vector, its grant, and what other nodes
    /// could give. Best at the beginning of a capsule. The state, the outputs and the result must
    /// not depend on it.
    ///
    /// # Errors
    /// Transient where the agent is gone.
    pub fn surroundings(&mut self) -> Result<Surroundings, ProgramError> {
        match &self.wishes {
            Some(wishes) => wishes.surroundings(),
            None => Ok(Surroundings {
                unknown: Some(NO_NODE.to_owned()),
                ..Surroundings::default()
            }),
        }
    }

    /// Asks its node for another grant: more or fewer threads, other processors, less memory. What
    /// is granted holds from the next boundary on. The answer may change the speed, never the
    /// bits.
    ///
    /// # Errors
    /// Permanent where nothing is asked for; transient where the agent is gone.
    pub fn ask(&mut self, change: GrantChange) -> Result<Asked, ProgramError> {
        if change.is_empty() {
            let rule = "ask: name threads, cpus or memory_bytes";
            return Err(ProgramError::Permanent(rule.to_owned()));
        }
        match &self.wishes {
            Some(wishes) => wishes.ask(change),
            None => Ok(Asked::Refused {
                reason: NO_NODE.to_owned(),
            }),
        }
    }
}
