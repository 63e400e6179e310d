//! The next ledger messages of an execution. Pure: made from its child's reports.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::outbox::Emit;
use fiec_broker::{Draft, Tip};
use fiec_kit::frames::{BoundaryReport, Made, Report};
use fiec_schemas::event::Outbox;
use fiec_schemas::limits::{self, INLINE_RESULT_LIMIT, OUTPUTS_LIMIT, RESULT_LIMIT};
use fiec_schemas::messages::Destination;
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{
    BoundaryEvent, BoundaryIndex, Digest, Event, Output, Phase, ResultObject, Started, Timestamp,
};
use serde_json::Value;

use tokio::sync::oneshot;

use crate::ended::End;
use crate::large::{Cut, Priority};
use crate::replies::Reply;

const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// The action that follows the acknowledgement of a message.
#[derive(Debug)]
pub enum After {
    /// Notify the child, and keep σ for a restart.
    Commit {
        /// The boundary.
        index: BoundaryIndex,
        /// Bytes of σ.
        bytes: u64,
        /// σ, if it travels in the message.
        state: Option<Bytes>,
    },
    /// Answer a request.
    Answer(Reply),
    /// Send the sequence to the destination.
    Confirm(Destination),
    /// Give this σ to a child, which begins with it.
    Begin(Bytes),
    /// Keep the end for a while, in case the broker loses it.
    Keep(Arc<End>),
}

/// A ledger message to append.
#[derive(Debug, Default)]
pub struct Message {
    /// Its events. Without any it only carries the state and σ again, before they drop out of the
    /// stream.
    pub events: Vec<Event>,
    /// σ, if it commits one.
    pub state: Bytes,
    /// Its digest.
    pub digest: Option<Digest>,
    /// Outputs that must be stored before it.
    pub outputs: Vec<(Digest, Bytes)>,
    /// Messages to the outside that must be stored before it. It cannot be built before that.
    pub unstored: Vec<Emit>,
    /// Messages to the outside that are stored, published after it.
    pub emits: Vec<Emit>,
    /// Actions after its acknowledgement.
    pub after: Vec<After>,
    /// A large σ's chunks.
    pub cut: Cut,
    /// Held while it belongs to a rebinding.
    pub priority: Priority,
    /// The node that receives σ at the same moment.
    pub handover: Option<Destination>,
    /// Resolves when the broker has passed on the handover.
    pub turn: Option<oneshot::Receiver<()>>,
    /// The draft, if it was built before the acknowledgement of the message before.
    pub draft: Option<Draft>,
}

impl Message {
    /// A message without σ.
    pub fn of(events: Vec<Event>) -> Self {
        Self {
            events,
            ..Self::default()
        }
    }

    /// Whether σ is too large for the message.
    pub fn is_large(&self) -> bool {
        self.state.len() > INLINE_STATE_LIMIT
    }

    /// A message that commits a boundary. `body` is σ followed by the outputs. Returns none if the
    /// lengths disagree.
    pub fn boundary(report: BoundaryReport, body: &Bytes) -> Option<Self> {
        let size = usize::try_from(report.bytes).ok()?;
        if body.len() < size {
            return None;
        }
        let state = body.slice(..size);
        let (made, outputs) = split_outputs(&report.outputs, &body.slice(size..))?;
        let digest = report.digest.unwrap_or_else(|| Digest::of(&state));
        let inline = size <= INLINE_STATE_LIMIT;
        let after = After::Commit {
            index: report.index,
            bytes: report.bytes,
            state: inline.then(|| state.clone()),
        };
        let event = Event::Boundary(BoundaryEvent {
            index: report.index,
            digest,
            bytes: report.bytes,
            computed_at: report.computed_at,
            compute_us: report.compute_us,
            of: report.of,
            note: report.note,
            outputs: made,
            energy: None,
        });
        Some(Self {
            events: vec![event],
            state,
            digest: Some(digest),
            outputs,
            after: vec![after],
            ..Self::default()
        })
    }

    /// Adds messages to the outside that are stored now: they belong to its boundary.
    pub fn carry(&mut self, outbox: Outbox, emits: Vec<Emit>) {
        let boundary = self
            .events
            .iter()
            .position(|e| matches!(e, Event::Boundary(_)));
        let at = boundary.map_or(self.events.len(), |at| at + 1);
        self.events.insert(at, Event::Emitted { outbox });
        self.emits = emits;
    }

    fn commits(&self) -> bool {
        self.events.iter().any(|e| matches!(e, Event::Boundary(_)))
    }

    /// Builds the draft on a message that is not acknowledged yet. This is possible if both commit
    /// a boundary: then no part of the state depends on the sequence between them.
    pub fn build_ahead(&mut self, ahead: Option<&Tip>, author: &str, now: Timestamp) {
        if let Some(tip) = ahead
            && self.draft.is_none()
            && self.unstored.is_empty()
            && self.commits()
        {
            self.draft = Draft::new(tip, self.events.clone(), author, now).ok();
        }
    }
}

/// Returns the tip that a draft will make, for [`Message::build_ahead`]. Returns none if the state
/// depends on the draft's own sequence and the next boundary does not replace that.
pub fn ahead_of(draft: &Draft) -> Option<Tip> {
    match &draft.state.phase {
        Phase::Started(Started { binding, .. }) if binding.seq != 0 => Some(Tip {
            seq: 0,
            digest: Some(draft.digest),
            state: Arc::clone(&draft.state),
            seen_in: 0,
        }),
        _ => None,
    }
}

/// Outputs in their recorded form, and their bytes in the same order.
pub type Split = (Vec<Output>, Vec<(Digest, Bytes)>);

/// Largest body whose digests are made on the thread of its task: they take a millisecond.
const DIGESTED_HERE: usize = 1 << 20;

/// Fills in the digests of σ and outputs that a program has left out, if its body is large. Another
/// thread does it, so that other tasks of this thread go on. [`Message::boundary`] and
/// [`split_outputs`] make those of a small body.
pub async fn digest(report: &mut Report, body: &Bytes) {
    if body.len() <= DIGESTED_HERE {
        return;
    }
    let (state, outputs) = match report {
        Report::Boundary(report) => (
            Some((&mut report.digest, report.bytes)),
            &mut report.outputs,
        ),
        Report::Completed { outputs, .. } => (None, outputs),
        _ => return,
    };
    let made = outputs
        .iter_mut()
        .map(|made| (&mut made.digest, made.bytes));
    let mut at = 0;
    let (mut missing, mut pieces) = (Vec::new(), Vec::new());
    for (digest, bytes) in state.into_iter().chain(made) {
        let end = usize::try_from(bytes).ok().and_then(|n| n.checked_add(at));
        let Some(end) = end.filter(|end| *end <= body.len()) else {
            return; // lengths that disagree are refused later
        };
        if digest.is_none() {
            pieces.push(body.slice(at..end));
            missing.push(digest);
        }
        at = end;
    }
    let all = move || {
        pieces
            .iter()
            .map(|piece| Digest::of(piece))
            .collect::<Vec<_>>()
    };
    // Where that thread has panicked, they are made later.
    let found = tokio::task::spawn_blocking(all).await.unwrap_or_default();
    for (digest, found) in missing.into_iter().zip(found) {
        *digest = Some(found);
    }
}

/// Separates the outputs' bytes from a body, and returns the outputs in their recorded form.
/// Returns none if the lengths disagree.
pub fn split_outputs(outputs: &[Made], body: &Bytes) -> Option<Split> {
    let mut at = 0usize;
    let mut made = Vec::with_capacity(outputs.len());
    let mut pieces = Vec::with_capacity(outputs.len());
    for output in outputs {
        let end = at.checked_add(usize::try_from(output.bytes).ok()?)?;
        if end > body.len() {
            return None;
        }
        let piece = body.slice(at..end);
        let digest = output.digest.unwrap_or_else(|| Digest::of(&piece));
        made.push(Output {
            name: output.name.clone(),
            digest,
            bytes: output.bytes,
        });
        pieces.push((digest, piece));
        at = end;
    }
    (at == body.len()).then_some((made, pieces))
}

/// Checks that a commit's message can name these outputs.
///
/// # Errors
/// The limit, and how to stay below it.
pub fn check_outputs(outputs: &[Output]) -> Result<(), String> {
    let bytes = limits::outputs_len(outputs);
    if bytes <= OUTPUTS_LIMIT {
        return Ok(());
    }
    Err(format!(
        "the names of {} outputs of one commit take {bytes} bytes in its ledger message; at most \
         {OUTPUTS_LIMIT} are allowed: make fewer outputs in one capsule, or give them shorter names",
        outputs.len()
    ))
}

/// A result in the form of its event: inline if it is small, else a reference to an object.
#[derive(Debug, Default)]
pub struct Said {
    /// The result, if it is small.
    pub result: Value,
    /// The object that will hold the result, if it is large.
    pub object: Option<ResultObject>,
    /// The object's bytes, which must be stored.
    pub piece: Option<(Digest, Bytes)>,
}

impl Said {
    /// Converts a program's result.
    ///
    /// # Errors
    /// The limit, if the result exceeds it.
    pub fn of(result: Value) -> Result<Self, String> {
        let text = result.to_string();
        if text.len() <= INLINE_RESULT_LIMIT {
            return Ok(Self {
                result,
                ..Self::default()
            });
        }
        let size = text.len();
        let Some(bytes) = u32::try_from(size).ok().filter(|_| size <= RESULT_LIMIT) else {
            return Err(format!(
                "the result has {size} bytes; at most {RESULT_LIMIT} are allowed: make it an output"
            ));
        };
        let digest = Digest::of(text.as_bytes());
        Ok(Self {
            result: Value::Null,
            object: Some(ResultObject { digest, bytes }),
            piece: Some((digest, text.into())),
        })
    }
}

/// Returns the pause before the next attempt after this many crashes.
pub fn backoff(first: Duration, attempt: u32) -> Duration {
    first
        .saturating_mul(
            1u32.checked_shl(attempt.saturating_sub(1))
                .unwrap_or(u32::MAX),
        )
        .min(LONGEST_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::trust::digest_of_result;

    #[test]
    fn backoff_doubles_up_to_half_a_minute() {
        let first = Duration::from_millis(200);
        assert_eq!(backoff(first, 1), first);
        assert_eq!(backoff(first, 3), first * 4);
        assert_eq!(backoff(first, 60), LONGEST_BACKOFF);
    }

    #[test]
    fn a_result_is_said_itself_or_by_its_digest_or_refused_with_the_limit() {
        let text = |bytes| Value::String("x".repeat(bytes - 2));
        let small = Said::of(text(INLINE_RESULT_LIMIT)).unwrap();
        assert_eq!(
            (small.result, small.object),
            (text(INLINE_RESULT_LIMIT), None)
        );
        for size in [INLINE_RESULT_LIMIT + 1, RESULT_LIMIT] {
            let large = Said::of(text(size)).unwrap();
            let (digest, piece) = large.piece.unwrap();
            assert_eq!(piece, text(size).to_string());
            assert_eq!(large.object.unwrap().digest, digest);
            assert_eq!(large.object.unwrap().bytes as usize, size);
            assert_eq!(digest, digest_of_result(&text(size)));
            assert_eq!(large.result, Value::Null);
        }
        let reason = Said::of(text(RESULT_LIMIT + 1)).unwrap_err();
        assert!(reason.contains("at most 262144 are allowed"), "{reason}");
    }

    #[tokio::test]
    async fn digests_of_a_large_body_are_made_beside_its_task() {
        let state = DIGESTED_HERE as u64 + 1;
        let body = Bytes::from(vec![7; state as usize + 2]);
        let report = |output| {
            let head = serde_json::json!({
                "is": "boundary", "index": 1, "bytes": state, "compute_us": 1, "reason": "commit",
                "computed_at": "2026-01-01T00:00:00Z",
                "outputs": [{"name": "x", "bytes": output}],
            });
            serde_json::from_value::<Report>(head).unwrap()
        };
        let mut found = report(2);
        digest(&mut found, &body).await;
        let Report::Boundary(found) = found else {
            panic!("it is another report");
        };
        assert_eq!(found.digest, Some(Digest::of(&body[..state as usize])));
        assert_eq!(found.outputs[0].digest, Some(Digest::of(&[7, 7])));

        let mut longer = report(3);
        digest(&mut longer, &body).await;
        let Report::Boundary(longer) = longer else {
            panic!("it is another report");
        };
        assert_eq!(longer.outputs[0].digest, None);
    }

    #[test]
    fn outputs_whose_lengths_disagree_with_the_body_are_refused() {
        let output = |bytes| Made {
            name: "x".into(),
            digest: None,
            bytes,
        };
        let body = Bytes::from_static(b"abcd");
        let (made, pieces) = split_outputs(&[output(1), output(3)], &body).unwrap();
        assert_eq!(pieces[1].1, "bcd");
        assert_eq!(made[1].digest, Digest::of(b"bcd"));
        assert!(split_outputs(&[output(5)], &body).is_none());
        assert!(split_outputs(&[output(3)], &body).is_none());
        assert!(split_outputs(&[output(u64::MAX), output(5)], &body).is_none());
    }
}
