//! Limits of all parts of a ledger message, in bytes of JSON unless another unit is named.
//!
//! A last message that does not fit would leave its execution `started` for ever. Therefore every
//! text and every list of an event has a limit here. [`fit`] cuts each to its limit before a
//! message is made. `tests/limits.rs` builds the largest message of every kind and checks that it
//! fits. Outputs and results are data and are never cut: their writer checks them ([`outputs_len`])
//! and stores a large result beside the ledger ([`INLINE_RESULT_LIMIT`]).

use crate::cause::{Candidate, Cause, Decision, Evidence};
use crate::event::{Event, Output};
use crate::fault::Fault;
use crate::hardware::Reading;

/// Longest `Fiec-Event` header in bytes. The broker refuses header blocks of 64 KiB.
pub const EVENT_HEADER_LIMIT: usize = 48 * 1024;
/// Longest canonical submission in bytes that a ledger message contains. A longer one is in
/// `FIEC_DATA`, by its digest.
pub const INLINE_SUBMISSION_LIMIT: usize = 2 * 1024;
/// Largest result of a program in bytes.
pub const RESULT_LIMIT: usize = 256 * 1024;
/// Longest result in bytes that a ledger message contains. A longer one is in `FIEC_DATA`, by its
/// digest.
pub const INLINE_RESULT_LIMIT: usize = 4 * 1024;
/// Longest list of outputs in one event.
pub const OUTPUTS_LIMIT: usize = 8 * 1024;
/// Longest tail of a program's stderr in bytes, before it is written as JSON.
pub const STDERR_TAIL_LIMIT: usize = 1_500;
/// Longest tail of a program's stderr in an event.
pub const STDERR_LIMIT: usize = 3_000;
/// Longest reason, exit or note.
pub const REASON_LIMIT: usize = 1_000;
/// Longest name of a person, a place, a source or a unit.
pub const WORD_LIMIT: usize = 128;
/// Most readings in an event's evidence.
pub const EVIDENCE_LIMIT: usize = 16;
/// Most candidates that a message lists. The others are counted.
pub const CANDIDATES_LIMIT: usize = 12;
/// Longest list of reasons against one candidate.
pub const REJECTED_LIMIT: usize = 400;
/// Most nodes that an event names.
pub const NODES_LIMIT: usize = 32;
/// Most processors that a grant names.
pub const CPUS_LIMIT: usize = 1_024;

/// Bytes of a character in a JSON string.
fn char_len(c: char) -> usize {
    match c {
        '"' | '\\' | '\u{8}' | '\u{c}' | '\n' | '\r' | '\t' => 2,
        '\0'..='\u{1f}' => 6,
        c => c.len_utf8(),
    }
}

/// Bytes of a text in a JSON string, without its quotes.
pub fn text_len(text: &str) -> usize {
    text.chars().map(char_len).sum()
}

/// Bytes of a list of outputs, as JSON.
pub fn outputs_len(outputs: &[Output]) -> usize {
    // {"name":"","digest":"<64>","bytes":<20>}, and a comma.
    let one = |output: &Output| text_len(&output.name) + 120;
    outputs.iter().map(one).sum()
}

/// Length of the longest beginning that takes at most `limit` bytes of JSON.
fn beginning(chars: impl Iterator<Item = char>, limit: usize) -> usize {
    let mut left = limit;
    let mut end = 0;
    for c in chars {
        let Some(rest) = left.checked_sub(char_len(c)) else {
            break;
        };
        left = rest;
        end += c.len_utf8();
    }
    end
}

/// Keeps the beginning of a text, at most `limit` bytes of JSON.
pub fn cut(text: &mut String, limit: usize) {
    // One byte of text takes at most six bytes of JSON.
    if text.len() * 6 > limit {
        text.truncate(beginning(text.chars(), limit));
    }
}

/// Keeps the end of a text, at most `limit` bytes of JSON.
pub fn cut_front(text: &mut String, limit: usize) {
    if text.len() * 6 > limit {
        let kept = beginning(text.chars().rev(), limit);
        text.drain(..text.len() - kept);
    }
}

fn cut_if_any(text: &mut Option<String>, limit: usize) {
    if let Some(text) = text {
        cut(text, limit);
    }
}

/// Cuts the texts and lists of a message's events to their limits. Lists the readings of a pressure
/// once: in the binding, if there is one.
pub fn fit(events: &mut [Event]) {
    for event in &mut *events {
        fit_event(event);
    }
    let is_evident = |event: &Event| match event {
        Event::Bound { cause, .. } => matches!(cause, Cause::Pressure { .. }),
        _ => false,
    };
    if events.iter().any(is_evident) {
        for event in events {
            if let Event::Yielded {
                cause: Cause::Pressure { evidence },
                ..
            } = event
            {
                evidence.vector.clear();
            }
        }
    }
}

fn fit_event(event: &mut Event) {
    match event {
        Event::Submitted
        | Event::Started { .. }
        | Event::Noted { .. }
        | Event::Emitted { .. }
        | Event::Split { .. }
        | Event::Merged { .. }
        | Event::Returned { .. }
        | Event::Healed { .. }
        | Event::Completed { .. }
        | Event::Computed { .. } => {}
        Event::Bound {
            substrate,
            cause,
            decision,
            ..
        } => {
            cut(substrate, WORD_LIMIT);
            fit_cause(cause);
            if let Some(decision) = decision {
                fit_decision(decision);
            }
        }
        Event::Boundary(boundary) => cut_if_any(&mut boundary.note, REASON_LIMIT),
        Event::Yielded { cause, .. }
        | Event::Parked { cause, .. }
        | Event::SteppedBack { cause, .. } => fit_cause(cause),
        Event::Refused { reason, fault, .. } => {
            cut(reason, REASON_LIMIT);
            fit_fault(fault);
        }
        Event::Unparked { reason, .. } => cut(reason, REASON_LIMIT),
        Event::Paused { who }
        | Event::Resumed { who }
        | Event::Retried { who }
        | Event::Cancelled { who }
        | Event::Requested { who, .. }
        | Event::Adjusted { who, .. } => cut(who, WORD_LIMIT),
        Event::Reconfigured { who, grant } => {
            cut(who, WORD_LIMIT);
            cut_if_any(&mut grant.substrate, WORD_LIMIT);
            if let Some(device) = &mut grant.device {
                cut(&mut device.uuid, WORD_LIMIT);
            }
        }
        Event::Crashed {
            exit,
            stderr,
            fault,
            ..
        } => {
            cut(exit, REASON_LIMIT);
            cut_front(stderr, STDERR_LIMIT);
            fit_fault(fault);
        }
        Event::Failed {
            reason,
            stderr,
            fault,
        }
        | Event::Held {
            reason,
            stderr,
            fault,
        } => {
            cut(reason, REASON_LIMIT);
            cut_front(stderr, STDERR_LIMIT);
            fit_fault(fault);
        }
        Event::Verified { by, .. } => by.truncate(NODES_LIMIT),
    }
}

fn fit_cause(cause: &mut Cause) {
    match cause {
        Cause::Initial | Cause::Lost { .. } | Cause::Resumed | Cause::Balance | Cause::Parts => {}
        Cause::Pressure { evidence } => fit_evidence(evidence),
        Cause::Operator { who } | Cause::Drain { who } | Cause::Revoked { who, .. } => {
            cut(who, WORD_LIMIT);
        }
        Cause::NotTaken { reason, fault } => {
            cut(reason, REASON_LIMIT);
            fit_fault(fault);
        }
        Cause::Corrupt { reason, .. }
        | Cause::Preempted { reason, .. }
        | Cause::Reallocated { reason, .. }
        | Cause::Asked { reason }
        | Cause::Unviable { reason }
        | Cause::Orphaned { reason }
        | Cause::PartFailed { reason, .. } => cut(reason, REASON_LIMIT),
    }
}

fn fit_fault(fault: &mut Option<Box<Fault>>) {
    if let Some(Fault::CannotStart { command, .. }) = fault.as_deref_mut() {
        cut(command, WORD_LIMIT);
    }
}

fn fit_evidence(evidence: &mut Evidence) {
    cut_if_any(&mut evidence.device, WORD_LIMIT);
    evidence.vector.truncate(EVIDENCE_LIMIT);
    for reading in &mut evidence.vector {
        let Reading {
            device,
            unit,
            source,
            missing,
            envelope,
            ..
        } = reading;
        cut_if_any(device, WORD_LIMIT);
        cut(unit, WORD_LIMIT / 4);
        cut(source, WORD_LIMIT);
        cut_if_any(missing, WORD_LIMIT);
        if let Some(envelope) = envelope {
            cut(&mut envelope.source, WORD_LIMIT);
        }
    }
}

fn fit_decision(decision: &mut Decision) {
    let beyond = decision.candidates.len().saturating_sub(CANDIDATES_LIMIT);
    decision.candidates.truncate(CANDIDATES_LIMIT);
    let beyond = u32::try_from(beyond).unwrap_or(u32::MAX);
    decision.omitted = decision.omitted.saturating_add(beyond);
    if let Some(entrusted) = &mut decision.entrusted {
        cut(&mut entrusted.by, WORD_LIMIT);
    }
    for candidate in &mut decision.candidates {
        let Candidate {
            substrate,
            rejected,
            ..
        } = candidate;
        cut_if_any(substrate, WORD_LIMIT);
        let mut left = REJECTED_LIMIT;
        rejected.retain_mut(|reason| {
            // Two quotes and a comma.
            left = left.saturating_sub(3);
            cut(reason, left);
            left -= text_len(reason);
            !reason.is_empty()
        });
    }
}
