//! Reallocation when devices are short. It covers executions without a viable place, parked ones,
//! and ones that ask for more than their place has. It also covers executions on a device that
//! others need, and executions that gain from a larger device.
//!
//! * [`unviable`] compares going on, waiting and suspending.

pub mod pause;
pub(crate) mod preempted;
mod reviewing;
pub mod unviable;

use crate::time::Millis;

/// State of reallocation.
#[derive(Debug, Default)]
pub struct Memory {
    /// Time of the last review of parked executions.
    pub looked: Millis,
}
