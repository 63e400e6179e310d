//! Encodes a ledger message as policy services read it: only the fields of
//! [`fiec_policy::LedgerView`], because a run passes tens of millions of them. A test compares it
//! with the full encoding.

use fiec_schemas::event::Left;
use fiec_schemas::scheduling::Parked;
use fiec_schemas::spread::Spreading;
use fiec_schemas::{
    Cause, Event, EventKind, ExecutionId, ExecutionState, Fault, Phase, Submission, Tenant,
    Timestamp,
};
use serde::Serialize;

#[derive(Serialize)]
struct Message<'a> {
    v: u8,
    events: Vec<EventPart<'a>>,
    state: StatePart<'a>,
}

#[derive(Serialize)]
struct EventPart<'a> {
    #[serde(rename = "type")]
    kind: EventKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    computing_since: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'a Cause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<&'a Fault>,
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

/// The text of a message. It includes the submission only if a reader may not know it yet.
///
/// # Errors
/// Never for states of the fold, whose times have years of four digits.
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
            parked: state.parked(),
            spread: state.spread.as_deref(),
            left: &state.left,
            totals: TotalsPart {
                compute_us: state.totals.compute_us,
                // Readers use the count only for spread executions.
                commits: state.spread.as_ref().map(|_| state.totals.commits),
            },
        },
    };
    serde_json::to_string(&message)
}

impl EventPart<'_> {
    fn new(kind: EventKind) -> Self {
        Self {
            kind,
            computing_since: None,
            cause: None,
            reason: None,
            fault: None,
            computed_until: None,
            index: None,
            compute_us: None,
            of: None,
            who: None,
        }
    }
}

fn part(event: &Event) -> EventPart<'_> {
    let nothing = EventPart::new(event.kind());
    match event {
        Event::Started {
            computing_since, ..
        } => EventPart {
            computing_since: Some(*computing_since),
            ..nothing
        },
        Event::Bound { cause, .. } | Event::SteppedBack { cause, .. } => EventPart {
            cause: Some(cause),
            ..nothing
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
            cause: Some(cause),
            computed_until: Some(*computed_until),
            ..nothing
        },
        Event::Unparked {
            reason,
            computing_since,
        } => EventPart {
            reason: Some(reason),
            computing_since: Some(*computing_since),
            ..nothing
        },
        Event::Boundary(boundary) => EventPart {
            index: Some(boundary.index),
            compute_us: Some(boundary.compute_us),
            of: boundary.of,
            ..nothing
        },
        Event::Cancelled { who } => EventPart {
            who: Some(who),
            ..nothing
        },
        Event::Refused { reason, fault, .. } => EventPart {
            reason: Some(reason),
            fault: fault.as_deref(),
            ..nothing
        },
        Event::Failed { reason, .. } => EventPart {
            reason: Some(reason),
            ..nothing
        },
        Event::Completed { computed_until, .. } => EventPart {
            computed_until: Some(*computed_until),
            ..nothing
        },
        _ => nothing,
    }
}
