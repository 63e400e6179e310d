//! Reallocation when devices are short. It covers executions without a viable place, parked ones,
//! and ones that ask for more than their place has. It also covers executions on a device that
//! others need, and executions that gain from a larger device.
//!
//! * [`unviable`] compares going on, waiting and suspending.

pub mod unviable;

use std::collections::BTreeMap;

use crate::cluster::NodeIx;
use crate::places::DeviceIx;
use crate::profile::ProfileIx;
use crate::time::Millis;

/// State of reallocation.
#[derive(Debug, Default)]
pub struct Memory {
    /// Idle devices, with the time since when without a break.
    pub idle: BTreeMap<(NodeIx, DeviceIx), Millis>,
    /// Profiles for which an execution was ordered off its device, and when.
    pub freed_for: BTreeMap<ProfileIx, Millis>,
    /// Time of the last review of devices.
    pub reviewed: Millis,
    /// Time of the last review of parked executions.
    pub looked: Millis,
}
