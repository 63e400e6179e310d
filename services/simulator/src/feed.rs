//! A ledger message as policy services read it: only the fields of [`fiec_policy::LedgerView`],
//! since a run passes tens of millions of them on. A test holds it against the full encoding.

use fiec_schemas::event::Left;
use fiec_schemas::scheduling::Parked;
use fiec_schemas::spread::Spreading;
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, Phase, Submission, Tenant, Timestamp,
};
use serde::Serialize;

#[derive(Serialize)]
struct Message<'a> {
    v: u8,
    events: Vec<EventPart<'a>>,
    state: StatePart<'a>,
}

#[derive(Serialize, Default)]
struct EventPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    computing_since: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'a Cause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    computed_until: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    of: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<&'a str>,
}

#[derive(Serialize)]
struct TotalsPart {
    compute_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    commits: Option<u64>,
}

#[derive(Serialize)]
struct StatePart<'a> {
    execution: ExecutionId,
    tenant: &'a Tenant,
    author: &'a str,
    at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<&'a Submission>,
    submitted_at: Timestamp,
    phase: &'a Phase,
    epoch: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    boundary: Option<BoundaryPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moved_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parked: Option<Parked>,
    #[serde(skip_serializing_if = "Option::is_none")]
    spread: Option<&'a Spreading>,
    #[serde(skip_serializing_if = "slice_is_empty")]
    left: &'a [Left],
    totals: TotalsPart,
}

fn slice_is_empty<T>(slice: &&[T]) -> bool {
    slice.is_empty()
}

#[derive(Serialize)]
struct BoundaryPart {
    index: u64,
    bytes: u64,
}

/// The text of a message; with the submission only where the reader may not know it yet.
///
/// # Errors
/// Never for what the fold makes: its times have years of four digits.
pub fn encode(
    events: &[Event],
    state: &ExecutionState,
    with_spec: bool,
) -> Result<String, serde_json::Error> {
    let message = Message {
        v: 1,
        events: events.iter().map(part).collect(),
        state: StatePart {
            execution: state.execution,
            tenant: &state.tenant,
            author: &state.author,
            at: state.at,
            spec: state.spec.as_deref().filter(|_| with_spec),
            submitted_at: state.submitted_at,
            phase: &state.phase,
            epoch: state.epoch,
            boundary: state.boundary.as_ref().map(|b| BoundaryPart {
                index: b.index,
                bytes: b.bytes,
            }),
            moved_at: state.moved_at,
            parked: state.parked,
            spread: state.spread.as_deref(),
            left: &state.left,
            totals: TotalsPart {
                compute_us: state.totals.compute_us,
                // Only of what is spread anybody asks for it.
                commits: state.spread.as_ref().map(|_| state.totals.commits),
            },
        },
    };
    serde_json::to_string(&message)
}

fn part(event: &Event) -> EventPart<'_> {
    let kind = name(event);
    match event {
        Event::Started {
            computing_since, ..
        } => EventPart {
            kind,
            computing_since: Some(*computing_since),
            ..EventPart::default()
        },
        Event::Bound { cause, .. } | Event::SteppedBack { cause, .. } => EventPart {
            kind,
            cause: Some(cause),
            ..EventPart::default()
        },
        Event::Yielded {
            cause,
            computed_until,
        }
        | Event::Parked {
            cause,
            computed_until,
            ..
        } => EventPart {
            kind,
            cause: Some(cause),
            computed_until: Some(*computed_until),
            ..EventPart::default()
        },
        Event::Unparked {
            reason,
            computing_since,
        } => EventPart {
            kind,
            reason: Some(reason),
            computing_since: Some(*computing_since),
            ..EventPart::default()
        },
        Event::Boundary(boundary) => EventPart {
            kind,
            index: Some(boundary.index),
            compute_us: Some(boundary.compute_us),
            of: boundary.of,
            ..EventPart::default()
        },
        Event::Cancelled { who } => EventPart {
            kind,
            who: Some(who),
            ..EventPart::default()
        },
        Event::Refused { reason, .. } | Event::Failed { reason, .. } => EventPart {
            kind,
            reason: Some(reason),
            ..EventPart::default()
        },
        Event::Completed { computed_until, .. } => EventPart {
            kind,
            computed_until: Some(*computed_until),
            ..EventPart::default()
        },
        _ => EventPart {
            kind,
            ..EventPart::default()
        },
    }
}

/// Types of events, of those that this world's actors write; `other` for the rest, which no policy
/// looks at.
const NAMES: [&str; 18] = [
    "submitted",
    "bound",
    "started",
    "boundary",
    "yielded",
    "refused",
    "paused",
    "resumed",
    "parked",
    "unparked",
    "completed",
    "stepped_back",
    "failed",
    "cancelled",
    "split",
    "merged",
    "returned",
    "other",
];

/// The number of no event.
pub const NOTHING: u8 = u8::MAX;

/// An event's type, by number.
pub fn number(event: &Event) -> u8 {
    match event {
        Event::Submitted => 0,
        Event::Bound { .. } => 1,
        Event::Started { .. } => 2,
        Event::Boundary(_) => 3,
        Event::Yielded { .. } => 4,
        Event::Refused { .. } => 5,
        Event::Paused { .. } => 6,
        Event::Resumed { .. } => 7,
        Event::Parked { .. } => 8,
        Event::Unparked { .. } => 9,
        Event::Completed { .. } => 10,
        Event::SteppedBack { .. } => 11,
        Event::Failed { .. } => 12,
        Event::Cancelled { .. } => 13,
        Event::Split { .. } => 14,
        Event::Merged { .. } => 15,
        Event::Returned { .. } => 16,
        _ => 17,
    }
}

/// The type of this number, if there is one.
pub fn name_of(number: u8) -> Option<&'static str> {
    NAMES.get(usize::from(number)).copied()
}

/// An event's type.
pub fn name(event: &Event) -> &'static str {
    name_of(number(event)).unwrap_or("other")
}
