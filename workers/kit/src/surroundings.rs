//! A capsule's requests about its surroundings: the node's vector, offers of other nodes, and
//! another grant.
//!
//! The answers differ from run to run, so the bits of a program must not depend on them. They are
//! for the speed, for the order of work in time, and for messages to people.

pub use fiec_schemas::surroundings::{Asked, GrantChange, Offer, Offers, Surroundings};

use crate::frames::{FrameError, Order, Report};
use crate::port::Port;
use crate::program::{Capsule, ProgramError};

/// The answer in a run without an agent.
const NO_NODE: &str = "this run has no node";

impl Port {
    /// Asks the agent and waits for its answer. Other orders are queued.
    pub(crate) fn surroundings(&self) -> Result<Surroundings, FrameError> {
        self.converse(&Report::Surroundings, |order| match order {
            Order::Surroundings(answer) => Some((**answer).clone()),
            _ => None,
        })
    }

    /// Asks the agent and waits for its answer. Other orders are queued.
    pub(crate) fn ask_for(&self, change: GrantChange) -> Result<Asked, FrameError> {
        self.converse(&Report::Ask(change), |order| match order {
            Order::Asked(answer) => Some(answer.clone()),
            _ => None,
        })
    }
}

impl Capsule {
    /// Returns the node's last vector, the grant, and what other nodes could grant. Call it at the
    /// start of a capsule. The state, the outputs and the result must not depend on it.
    ///
    /// # Errors
    /// Transient if the agent is gone.
    pub fn surroundings(&mut self) -> Result<Surroundings, ProgramError> {
        match &self.wishes {
            Some(wishes) => wishes.surroundings(),
            None => Ok(Surroundings {
                unknown: Some(NO_NODE.to_owned()),
                ..Surroundings::default()
            }),
        }
    }

    /// Asks the node for another grant: more or fewer threads, other processors, less memory. The
    /// grant holds from the next boundary on. The answer may change the speed, never the bits.
    ///
    /// # Errors
    /// Permanent if the change is empty, transient if the agent is gone.
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
