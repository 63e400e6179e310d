//! What is known of one gang.

use std::collections::BTreeSet;

use fiec_schemas::{ExecutionId, Timestamp};

use crate::time::Millis;

/// A gang: a set of executions that starts together.
#[derive(Debug, Default)]
pub struct GangState {
    /// Its number of members.
    pub size: u32,
    /// The live members, oldest first.
    pub members: BTreeSet<(Timestamp, ExecutionId)>,
    /// Time at which the first member was seen to start.
    pub begun: Option<Millis>,
    /// The started members were ordered to yield, so that all start again.
    pub dissolving: bool,
    /// Its bindings were given back because not all members were bound in time.
    pub given_back: bool,
    /// Its capsules were sent.
    pub sent: bool,
    /// The gang is not tried before this moment.
    pub retry_at: Millis,
    /// Time since which it lacks only places.
    pub ready_since: Option<Millis>,
    /// Members that found no place in the last attempt. None before the first attempt.
    pub lacking: Option<Vec<ExecutionId>>,
    /// The nodes that are here have no room for all members, even without anything else.
    pub is_too_large: bool,
}

impl GangState {
    /// The members of the gang: the oldest, as many as its size. None if members are missing.
    pub fn complete(&self) -> Option<Vec<ExecutionId>> {
        let size = self.size as usize;
        let first: Vec<_> = self.members.iter().take(size).map(|(_, id)| *id).collect();
        (first.len() == size).then_some(first)
    }
}
