//! How a small lab shares what it has: who goes first, who gives way, and what a pause keeps.
//!
//! * [`order`] says who goes before whom, [`queue`] keeps what waits in that order.
//! * [`tenants`] counts what each tenant has held lately, against its weight.
//! * [`deadlines`] says when somebody may be late.
//! * [`rhythm`] learns how far an execution's boundaries lie apart, and what a move costs it.
//! * [`regret`] weighs what a victim would lose.
//! * [`pause`] says what a pause keeps.

pub mod deadlines;
pub mod order;
pub mod pause;
pub mod queue;
pub mod regret;
pub mod rhythm;
pub mod tenants;

use std::collections::BTreeMap;

use fiec_schemas::{ExecutionId, Timestamp};

use crate::time::{Millis, Now};
use deadlines::Deadlines;
use queue::Sweep;
use rhythm::{Rhythm, TakeUp};

/// What sharing remembers beside the queues.
#[derive(Debug)]
pub struct Memory {
    /// The moment of the present input.
    pub now: Now,
    /// Of executions that have committed a boundary or were moved.
    pub rhythms: BTreeMap<ExecutionId, Rhythm>,
    /// What it takes to begin on a node.
    pub take_up: TakeUp,
    /// Who waits, and who was ordered to give way to it, since when.
    pub asking: BTreeMap<ExecutionId, (ExecutionId, Millis)>,
    /// For whom somebody gave way: it goes first, since when.
    pub promised: BTreeMap<ExecutionId, Millis>,
    /// Executions that fail when their deadline has passed, and when that is looked at.
    pub deadlines: Deadlines,
    /// Since when, without a break, something has waited for which there was no room.
    pub crowded: Option<Millis>,
    /// When it was last looked at who should give way.
    pub reviewed: Millis,
    /// The node at which the next look begins.
    pub window: u32,
    /// What has had no room since something changed last.
    pub sweep: Sweep,
    /// Something waits that was not looked at yet.
    pub fresh: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            now: Now {
                mono: Millis(0),
                wall: Timestamp::default(),
            },
            rhythms: BTreeMap::new(),
            take_up: TakeUp::default(),
            asking: BTreeMap::new(),
            promised: BTreeMap::new(),
            deadlines: Deadlines::default(),
            crowded: None,
            reviewed: Millis(0),
            window: 0,
            sweep: Sweep::default(),
            fresh: false,
        }
    }
}
