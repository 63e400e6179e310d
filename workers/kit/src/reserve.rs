//! Asking beyond the grant: what a program says, and what it is told.
//!
//! A capsule asks at its boundary and waits for the answer, which comes at once: the node grants
//! it where what is not granted to others suffices; else the execution's needs are changed in its
//! ledger, and it is moved, or waits, as its submission says (`when_unviable`).

use fiec_schemas::package::Grant;
use serde::{Deserialize, Serialize};

use crate::frames::{FrameError, Order, Report};
use crate::port::Port;
use crate::program::{Capsule, ProgramError};

/// What a program needs in all, not on top of what it has.
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
    /// So much of the host's memory.
    pub fn memory(bytes: u64) -> Self {
        Self {
            memory_bytes: Some(bytes),
            ..Self::default()
        }
    }

    /// So much of its device's memory.
    pub fn device_memory(bytes: u64) -> Self {
        Self {
            device_memory_bytes: Some(bytes),
            ..Self::default()
        }
    }
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Reserved {
    /// This grant holds; the program is told of it (`configure`) at its next boundary.
    Granted {
        /// What may be used then.
        grant: Grant,
    },
    /// This place does not have it. The execution yields or parks at a boundary soon, and goes on
    /// where it is there; until then it makes do with what it has, or ends its capsule.
    Moves {
        /// What is missing here.
        reason: String,
    },
    /// No place will have it.
    Refused {
        /// Why.
        reason: String,
    },
}

impl Port {
    /// Asks the agent, and waits for its answer; other orders wait meanwhile.
    pub(crate) fn reserve(&self, wish: Reserve) -> Result<Reserved, FrameError> {
        self.converse(&Report::Reserve(wish), |order| match order {
            Order::Reserved(answer) => Some(answer.clone()),
            _ => None,
        })
    }
}

impl Capsule {
    /// Asks for memory beyond the grant; best at the beginning of a capsule, whose work can then
    /// be fitted to the answer. The answer may change the speed, never the bits.
    ///
    /// # Errors
    /// Permanent where nothing is asked for; transient where the agent is gone.
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
