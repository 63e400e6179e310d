//! Reservations as known here, and the queue of those who want one.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::quota::Reservation;
use fiec_schemas::{Cause, ExecutionId, Sequence, Timestamp};

use crate::time::Millis;

/// A tenant's reservations as known here.
#[derive(Debug, Default)]
pub struct Table {
    /// Sequence of the message.
    pub seq: Sequence,
    /// Its entries.
    pub entries: BTreeMap<ExecutionId, Reservation>,
    /// Time of the change that was requested and not answered yet.
    pub asked: Option<Millis>,
    /// The executions that this change frees.
    pub freeing: BTreeSet<ExecutionId>,
    /// True if it was read, not only received as news, since the last stall.
    pub fresh: bool,
    /// Number of answers in a row that were older than the known state.
    pub behind: u8,
    /// True if the running executions were checked for missing reservations.
    pub scanned: bool,
    /// True if the memory of its entries was checked.
    pub amended: bool,
    /// Since when there have been entries of gone replicas that another replica is to take over.
    pub left: Option<Millis>,
    /// Entries to free, with the earliest time.
    pub to_free: BTreeMap<ExecutionId, Millis>,
}

/// An execution that was ordered to yield for its tenant's quota.
#[derive(Debug, Clone, PartialEq)]
pub struct Trimmed {
    /// The epoch of the order.
    pub epoch: u64,
    /// Number of orders.
    pub tries: u32,
    /// The cause.
    pub cause: Cause,
}

/// Order of the executions that want a reservation: higher priority first, then older first.
pub type Place = (Reverse<i16>, Timestamp, ExecutionId);

/// How an execution waits for a reservation.
#[derive(Debug, Clone, Copy)]
pub struct Queued {
    /// Its place in the queue.
    pub place: Place,
    /// It is not requested before.
    pub from: Millis,
    /// Since when there has been room and another replica is to reserve it.
    pub left: Option<Millis>,
}
