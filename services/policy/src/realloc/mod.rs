//! What becomes of what runs when devices are short: an execution whose place is not viable and
//! for which there is no other, one that is parked, one that asks for more than its place has, one
//! on a device that others need, one that would gain by a larger one.
//!
//! * [`unviable`] weighs going on, waiting and suspending.

pub mod unviable;

use std::collections::BTreeMap;

use crate::cluster::NodeIx;
use crate::places::DeviceIx;
use crate::profile::ProfileIx;
use crate::time::Millis;

/// What reallocation remembers.
#[derive(Debug, Default)]
pub struct Memory {
    /// Devices that nobody has, since when that is so without a break.
    pub idle: BTreeMap<(NodeIx, DeviceIx), Millis>,
    /// For whom something was told to leave its device, and when.
    pub freed_for: BTreeMap<ProfileIx, Millis>,
    /// When devices were last looked at.
    pub reviewed: Millis,
    /// When parked executions were last looked at.
    pub looked: Millis,
}
