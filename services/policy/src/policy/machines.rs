//! The machines beside the life cycle.

use fiec_schemas::InstanceId;

use crate::gangs::Gangs;
use crate::parking::Parking;
use crate::prerequisites::Prerequisites;
use crate::quotas::Quotas;
use crate::reallocation::Reallocation;
use crate::sharing::Sharing;
use crate::spreading::Ranges;
use crate::verification::Verification;

/// The machines beside the life cycle. None knows another one.
#[derive(Debug)]
pub(crate) struct Machines {
    /// Preemption, and deadlines.
    pub sharing: Sharing,
    /// Executions that stay on their node without computing.
    pub parking: Parking,
    /// Moves between devices.
    pub reallocation: Reallocation,
    /// Ranges that several nodes compute.
    pub ranges: Ranges,
    /// Comparisons of what nodes compute.
    pub verification: Verification,
    /// How much of a quota is used.
    pub quotas: Quotas,
    /// Executions that start together.
    pub gangs: Gangs,
    /// Executions that wait for others to end.
    pub prerequisites: Prerequisites,
}

impl Machines {
    /// Nothing is known yet. `own` is this replica's id.
    pub fn new(own: InstanceId) -> Self {
        Self {
            sharing: Sharing::default(),
            parking: Parking::default(),
            reallocation: Reallocation::default(),
            ranges: Ranges::default(),
            verification: Verification::new(own),
            quotas: Quotas::new(own),
            gangs: Gangs::default(),
            prerequisites: Prerequisites::default(),
        }
    }
}
