//! What an execution's next ledger messages say: pure, from what its child reports.

use std::time::Duration;

use async_nats::Subject;
use bytes::Bytes;
use fiec_broker::outbox::Emit;
use fiec_broker::{Draft, Tip};
use fiec_kit::frames::{BoundaryReport, Made};
use fiec_schemas::messages::Destination;
use fiec_schemas::scheduling::Keep;
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{
    BoundaryEvent, BoundaryIndex, Cause, Decision, Digest, Event, Output, Phase, Timestamp,
};

use tokio::sync::oneshot;

use crate::large::{Cut, Priority};

const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// What follows the acknowledgement of a message.
#[derive(Debug)]
pub enum After {
    /// The child is told; σ is kept for a restart.
    Commit {
        /// Which boundary.
        index: BoundaryIndex,
        /// Bytes of σ.
        bytes: u64,
        /// σ, where it travels in the message.
        state: Option<Bytes>,
    },
    /// Somebody waits for an answer.
    Answer(Subject),
    /// The destination is told the sequence.
    Confirm(Destination),
}

/// A ledger message that is to be appended.
#[derive(Debug, Default)]
pub struct Message {
    /// What it says.
    pub events: Vec<Event>,
    /// σ, if it commits one.
    pub state: Bytes,
    /// Its digest.
    pub digest: Option<Digest>,
    /// Outputs that must be stored before it.
    pub outputs: Vec<(Digest, Bytes)>,
    /// Messages to the outside, published after it.
    pub emits: Vec<Emit>,
    /// What follows.
    pub after: Vec<After>,
    /// A large σ's chunks.
    pub cut: Cut,
    /// Held where it belongs to a rebinding.
    pub priority: Priority,
    /// Where σ goes at the same moment.
    pub handover: Option<Destination>,
    /// Comes true when the broker has passed on what was handed over.
    pub turn: Option<oneshot::Receiver<()>>,
    /// Built ahead of the message before it being acknowledged.
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

    /// Commits a boundary; `body` is σ and the outputs behind it. None where the lengths disagree.
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

    fn commits(&self) -> bool {
        self.events.iter().any(|e| matches!(e, Event::Boundary(_)))
    }

    /// Builds the draft on a message that is not acknowledged yet: possible where both commit a
    /// boundary, since then nothing of the state depends on the sequence in between.
    pub fn build_ahead(&mut self, ahead: Option<&Tip>, author: &str, now: Timestamp) {
        if let Some(tip) = ahead
            && self.draft.is_none()
            && self.commits()
        {
            self.draft = Draft::new(tip, self.events.clone(), author, now).ok();
        }
    }
}

/// The tip that a draft will make, for [`Message::build_ahead`]; none where the state depends on
/// the draft's own sequence in a way that the next boundary does not replace.
pub fn ahead_of(draft: &Draft) -> Option<Tip> {
    match &draft.state.phase {
        Phase::Started(binding) if binding.seq != 0 => Some(Tip {
            seq: 0,
            digest: Some(draft.digest),
            state: draft.state.clone(),
        }),
        _ => None,
    }
}

/// Outputs as they are recorded, and their bytes in the same order.
pub type Split = (Vec<Output>, Vec<(Digest, Bytes)>);

/// The outputs as they are recorded, and the pieces of the body that they are; none where the
/// lengths disagree.
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

/// Why the program is to stop at its next boundary.
#[derive(Debug, Clone)]
pub enum Intent {
    /// A yield.
    Yield {
        /// Why.
        cause: Cause,
        /// Where to.
        to: Option<(Destination, Option<Decision>)>,
    },
    /// A pause.
    Pause {
        /// Who asked.
        who: String,
    },
    /// It stays here and waits.
    Park {
        /// Why.
        cause: Cause,
        /// What it keeps.
        keep: Keep,
    },
}

impl Intent {
    /// Why, for the program.
    pub fn in_words(&self) -> String {
        match self {
            Self::Yield { cause, .. } | Self::Park { cause, .. } => cause.in_words(),
            Self::Pause { who } => format!("paused by {who}"),
        }
    }

    /// The events behind the last boundary's, and the destination.
    pub fn events(
        self,
        epoch: u64,
        computed_until: Timestamp,
    ) -> (Vec<Event>, Option<Destination>) {
        match self {
            Self::Park { cause, keep } => {
                let parked = Event::Parked {
                    cause,
                    keep,
                    computed_until,
                };
                (vec![parked], None)
            }
            Self::Yield { cause, to: None } => (
                vec![Event::Yielded {
                    cause,
                    computed_until,
                }],
                None,
            ),
            Self::Yield {
                cause,
                to: Some((to, decision)),
            } => {
                let bound = Event::Bound {
                    epoch: epoch + 1,
                    node: to.node.clone(),
                    instance: to.instance,
                    substrate: to.substrate.clone(),
                    cause: cause.clone(),
                    decision,
                };
                (
                    vec![
                        Event::Yielded {
                            cause,
                            computed_until,
                        },
                        bound,
                    ],
                    Some(to),
                )
            }
            Self::Pause { who } => {
                let cause = Cause::Operator { who: who.clone() };
                (
                    vec![
                        Event::Yielded {
                            cause,
                            computed_until,
                        },
                        Event::Paused { who },
                    ],
                    None,
                )
            }
        }
    }
}

/// How long the next attempt waits after so many crashes.
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

    #[test]
    fn backoff_doubles_up_to_half_a_minute() {
        let first = Duration::from_millis(200);
        assert_eq!(backoff(first, 1), first);
        assert_eq!(backoff(first, 3), first * 4);
        assert_eq!(backoff(first, 60), LONGEST_BACKOFF);
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
