//! Answers to control requests: where an answer goes, and why a request is not taken.

use async_nats::Subject;
use fiec_schemas::Epoch;
use fiec_schemas::messages::Refusal;

/// Where the answer to a control request goes. Nobody waits for the answer to an order of the
/// worker itself, or to one that is answered already.
#[derive(Debug, Clone, Default)]
pub struct Reply(pub(crate) Option<Subject>);

/// Why a request is not taken. Its `Display` is the sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The request is no JSON of a known one.
    #[error("request cannot be read: {0}")]
    Unreadable(String),
    /// The execution does not live here.
    #[error("the execution is not here")]
    NotHeld,
    /// The execution lives here under another epoch.
    #[error("the execution is here under epoch {here}, not {ordered}")]
    Epoch {
        /// Its epoch here.
        here: Epoch,
        /// The epoch of the order.
        ordered: Epoch,
    },
    /// The execution waits for a slot.
    #[error("the execution is not started")]
    NotStarted,
    /// The execution yields, is cancelled, or its last message is in flight.
    #[error("the execution is leaving")]
    Leaving,
    /// Another node holds the execution.
    #[error("somebody else holds this execution now")]
    Overtaken,
    /// The event that the request asked for cannot be appended.
    #[error("the worker could not record it: {0}")]
    NotRecorded(String),
    /// The queue of the execution's orders is full.
    #[error("the execution has too many orders waiting")]
    Busy,
    /// The node takes no new work.
    #[error("the node is draining")]
    Draining,
    /// No child computes the execution at this moment.
    #[error("the execution is between two attempts")]
    BetweenAttempts,
    /// A park is ordered or done.
    #[error("the execution is already parked, or about to be")]
    Parked,
    /// The program has not reported that it supports `park`.
    #[error("its program does not support parking; use `fiec yield`")]
    CannotPark,
    /// The node's memory is beyond its threshold.
    #[error("the node's memory is above its threshold: it parks no execution")]
    MemoryPresses,
    /// The node has as many parked executions as it may have.
    #[error("{parked} executions are parked on this node, the limit is {most}")]
    ManyParked {
        /// Parked executions.
        parked: usize,
        /// Most of them.
        most: usize,
    },
    /// There is nothing to unpark.
    #[error("it is not parked")]
    NotParked,
    /// A park is ordered, and its boundary is not committed yet.
    #[error("the execution is about to be parked; try again when it is")]
    NotYetParked,
    /// Every slot is taken.
    #[error(
        "no slot is free: {running} of {slots} compute, {queued} wait; try again when an execution \
         completes or leaves"
    )]
    NoSlot {
        /// Executions that compute.
        running: u32,
        /// Slots of the node.
        slots: u32,
        /// Bindings that wait for a slot.
        queued: usize,
    },
    /// The submission has no `spread`.
    #[error("its submission does not allow to share its range (`spread`)")]
    NotShared,
    /// σ is too large for a part.
    #[error("its σ does not fit a message, so a part could not be merged")]
    LargeState,
    /// A split is ordered.
    #[error("the range is already about to be split")]
    Splitting,
    /// The execution has the most parts that it may have.
    #[error("the execution already has the most parts")]
    ManyParts,
    /// The execution has this grant.
    #[error("the execution already has this grant")]
    SameGrant,
    /// The node is already computing another verification.
    #[error("the node already computes another verification")]
    Verifying,
    /// No slot is free for a verification.
    #[error("no slot is free for a verification")]
    NoSpareSlot,
    /// The node lacks the resources that the execution needs, or does not grant them.
    #[error("{0}")]
    NotGranted(String),
}

impl NotTaken {
    /// The reason as a type, if the sender can react to it.
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::NotHeld => Some(Refusal::NotHeld),
            Self::Epoch { .. }
            | Self::NotStarted
            | Self::Leaving
            | Self::Overtaken
            | Self::NotRecorded(_) => Some(Refusal::Moving),
            _ => None,
        }
    }
}
