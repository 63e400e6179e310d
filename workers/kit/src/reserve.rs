//! Requests for memory beyond the grant, and their answers.
//!
//! A capsule asks during its work and waits for the answer, which comes at once. The node grants
//! the request if its ungranted memory suffices. Otherwise the execution's needs change in its
//! ledger. It then moves or waits, as its submission says (`when_unviable`).

use fiec_schemas::package::Grant;
use serde::{Deserialize, Serialize};

use crate::frames::{FrameError, Order, Report};
use crate::port::Port;
use crate::program::{Capsule, ProgramError};

/// The memory that a program needs in all, including its present grant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// Bytes of the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes of its device's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
}

impl Reserve {
    /// Asks for this much of the host's memory.
    pub fn memory(bytes: u64) -> Self {
        Self {
            memory_bytes: Some(bytes),
            ..Self::default()
        }
    }

    /// Asks for this much of the device's memory.
    pub fn device_memory(bytes: u64) -> Self {
        Self {
            device_memory_bytes: Some(bytes),
            ..Self::default()
        }
    }
}

/// The node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Reserved {
    /// This grant holds. The program receives it (`configure`) at its next boundary.
    Granted {
        /// The grant from then on.
        grant: Grant,
    },
    /// This node lacks the memory. The execution yields or parks at a boundary soon, and continues
    /// on a node that has it. Until then the program works with its present grant, or ends its
    /// capsule.
    Moves {
        /// The missing memory, described.
        reason: String,
    },
    /// It may run on this node alone, or has no device to ask memory of.
    Refused {
        /// The reason.
        reason: String,
    },
}

impl Port {
    /// Asks the agent and waits for its answer. Other orders are queued.
    pub(crate) fn reserve(&self, wish: Reserve) -> Result<Reserved, FrameError> {
        self.converse(&Report::Reserve(wish), |order| match order {
            Order::Reserved(answer) => Some(answer.clone()),
            _ => None,
        })
    }
}

impl Capsule {
    /// Asks for memory beyond the grant. Call it at the start of a capsule, so that the capsule's
    /// work can fit the answer. The answer may change the speed, never the bits.
    ///
    /// # Errors
    /// Permanent if the wish is empty, transient if the agent is gone.
    pub fn reserve(&mut self, wish: Reserve) -> Result<Reserved, ProgramError> {
        if wish == Reserve::default() {
            let rule = "reserve: name bytes of memory, or of device memory";
            return Err(ProgramError::Permanent(rule.to_owned()));
        }
        let Some(wishes) = &self.wishes else {
            return Ok(Reserved::Refused {
                reason: "this run has no node that could grant it".to_owned(),
            });
        };
        wishes.reserve(wish)
    }
}
