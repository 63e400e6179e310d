//! Parking: executions that stay on their node without computing, and how they go on.
//!
//! ```text
//!              pressure, and no other place      the place is viable and has room
//! computes ──────────────────────────────▶ parked ──────────────────────────────▶ computes
//!    │  preempted, and a park is cheapest ▲   │ another place has room, longer than a move costs
//!    └────────────────────────────────────┘   ▼
//!                                          moves, or leaves as pending if keeping costs more
//! ```
//!
//! Hysteresis bounds the moves: an execution stops only for pressure that lasted its dwell time. It
//! resumes when the pressure has been gone for as long, or when another place admits it.
//!
//! * [`deciding`]: go on, park or leave, when no place is viable; [`unviable`] compares the costs.
//! * [`preempted`]: the same for preempted executions; [`pause`] compares what a park could keep.
//! * [`reviewing`] resumes parked executions.
//!
//! Given up: the length of a pause is a guess (as long again as it has lasted), so a park may turn out
//! dearer than a move.
//!
//! It reads the cluster, and changes it by orders to park, to resume and to yield. It keeps no more
//! than the time of its last review: what is parked stands in the cluster.

mod deciding;
mod pause;
mod preempted;
mod reviewing;
mod unviable;

use fiec_schemas::{Cause, EventKind, ExecutionId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Execution;
use crate::time::{Millis, Now};
use crate::view::LedgerView;

pub(crate) use deciding::{parked_first, wish, without_place};
pub(crate) use preempted::{park_for, resume};

/// The author of a program's own request in the ledger.
const PROGRAM: &str = "program";

/// The state of parking.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    /// Time of the last review of parked executions.
    looked: Millis,
}

/// A message says that an execution was preempted and parked.
pub(crate) struct ParkedFor {
    /// The execution that takes its place, if it is known.
    pub by: Option<ExecutionId>,
}

/// Reads from a message whether an execution is parked, and whether it asks for more.
pub(crate) fn hear(life: &mut Lifecycle, view: &LedgerView<'_>) -> Option<ParkedFor> {
    let asked = view
        .event(EventKind::Adjusted)
        .is_some_and(|a| a.who.as_deref() == Some(PROGRAM));
    life.set_parked(view);
    if life.note_park(view, asked) {
        return None;
    }
    let cause = view.event(EventKind::Parked).and_then(|p| p.cause());
    match cause {
        Some(Cause::Preempted { by, .. }) => Some(ParkedFor { by }),
        _ => None,
    }
}

/// For people: how long it has been parked, what it keeps, and why. None if it is not parked.
pub(crate) fn in_words(now: Now, e: &Execution) -> Option<String> {
    let parked = e.parked()?;
    let waited = now.mono.since(now.moment_of(parked.at));
    let why = e.extra.as_ref().and_then(|x| x.why_parked.as_ref());
    let why = why.map_or_else(String::new, |cause| format!(" ({})", cause.in_words()));
    Some(format!(
        "for {waited} ms, keeping its {}{why}",
        parked.keep.as_str()
    ))
}
