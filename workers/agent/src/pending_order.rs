//! The order that an execution carries out at its next boundary. The order to yield has one name
//! and the same data on its whole way:
//!
//! ```text
//! policy `Wanted::Yield` ─▶ `ControlRequest::Yield` ─▶ runner `PendingOrder::Yield`
//!   ─▶ child `frames::Order::Yield` ─▶ boundary with `Reason::Yield`
//!   ─▶ ledger: `boundary` and `yielded`, and `bound` if the order names a destination
//! ```

use fiec_schemas::messages::Destination;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::{Cause, Decision, Epoch, Event, Timestamp};

/// The order that an execution carries out at its next boundary.
#[derive(Debug, Clone)]
pub enum PendingOrder {
    /// Yield, as [`ControlRequest::Yield`](fiec_schemas::messages::ControlRequest::Yield) says.
    Yield {
        /// The cause.
        cause: Cause,
        /// The destination. Without it the policy service binds the execution again.
        to: Option<Destination>,
        /// The decision that chose it.
        decision: Option<Decision>,
    },
    /// Yield, and stay paused.
    Pause {
        /// The author of the request.
        who: String,
    },
    /// End with this event.
    End {
        /// That it has failed, or is held.
        event: Box<Event>,
    },
    /// Stay here and wait.
    Park {
        /// The cause.
        cause: Cause,
        /// The resources that the execution keeps.
        keep: Keep,
    },
}

impl PendingOrder {
    /// The cause in words, for the program.
    pub fn in_words(&self) -> String {
        match self {
            Self::Yield { cause, .. } | Self::Park { cause, .. } => cause.in_words(),
            Self::Pause { who } => format!("paused by {who}"),
            Self::End { .. } => "it has computed as long as it may".to_owned(),
        }
    }

    /// The events that follow the last boundary, and the destination.
    pub fn events(
        self,
        epoch: Epoch,
        computed_until: Timestamp,
    ) -> (Vec<Event>, Option<Destination>) {
        let yielded = |cause| Event::Yielded {
            cause,
            computed_until,
        };
        match self {
            Self::Park { cause, keep } => {
                let parked = Event::Parked {
                    cause,
                    keep,
                    computed_until,
                };
                (vec![parked], None)
            }
            Self::Yield {
                cause, to: None, ..
            } => (vec![yielded(cause)], None),
            Self::Yield {
                cause,
                to: Some(to),
                decision,
            } => {
                let bound = Event::Bound {
                    epoch: epoch + 1,
                    node: to.node.clone(),
                    instance: to.instance,
                    substrate: to.substrate.clone(),
                    cause: cause.clone(),
                    decision,
                };
                (vec![yielded(cause), bound], Some(to))
            }
            Self::End { event } => (vec![*event], None),
            Self::Pause { who } => {
                let cause = Cause::Operator { who: who.clone() };
                (vec![yielded(cause), Event::Paused { who }], None)
            }
        }
    }
}
