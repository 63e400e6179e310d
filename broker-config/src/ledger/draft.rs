//! A ledger message before it is stored.

use std::ops::Deref;
use std::sync::Arc;

use fiec_schemas::event::MessageError;
use fiec_schemas::{
    Digest, Event, ExecutionState, LedgerMessage, Ordinal, Sequence, Timestamp, limits, subjects,
};

use super::{AppendError, Entry, Tip};

/// Number of messages after which the one with the last σ may soon drop out of the stream. The next
/// message then carries σ again.
pub const CARRY_AGAIN_AFTER: Ordinal = subjects::LEDGER_DEPTH - 8;

/// A message that is ready to append. Cheap to clone: an append holds several copies, for what may
/// follow a lost acknowledgement.
#[derive(Debug, Clone)]
pub struct Draft {
    /// The sequence that must be the subject's last.
    pub expected: Sequence,
    /// The connection in which that message was seen, or 0 if that is not known.
    pub seen_in: u64,
    content: Arc<Content>,
}

/// What a message says, wherever it is appended.
#[derive(Debug)]
pub struct Content {
    /// The header's value.
    pub header: String,
    /// Its digest.
    pub digest: Digest,
    /// The state after it. 0 stands for the message's own sequence until it is known.
    pub state: Arc<ExecutionState>,
    pub(super) subject: String,
    pub(super) carries_state: bool,
}

impl Deref for Draft {
    type Target = Content;

    fn deref(&self) -> &Content {
        &self.content
    }
}

impl Draft {
    /// A message with these events after `tip`.
    ///
    /// # Errors
    /// When the state does not allow the events, or the message would be too large.
    pub fn new(
        tip: &Tip,
        mut events: Vec<Event>,
        author: &str,
        at: Timestamp,
    ) -> Result<Self, AppendError> {
        limits::fit(&mut events);
        let mut state = tip.state.after(&events, author, at, tip.digest)?;
        let commits = state
            .boundary
            .as_ref()
            .is_some_and(|b| b.ordinal == state.ordinal);
        let ages = state
            .boundary
            .as_ref()
            .is_some_and(|b| b.seq.is_some() && state.ordinal - b.ordinal >= CARRY_AGAIN_AFTER);
        let carries_state = !commits && ages && !state.phase.is_terminal();
        if carries_state {
            state.carry_state_again();
        }
        let on = (tip.seq, tip.seen_in);
        Self::of(on, events, state, carries_state).map_err(|(error, _)| error.into())
    }

    /// A message without events that carries the last σ again, so that both stay in the stream for
    /// another age.
    ///
    /// # Errors
    /// When the execution has ended, or the message would be too large.
    pub fn keeping(tip: &Tip, author: &str, at: Timestamp) -> Result<Self, AppendError> {
        let mut state = tip.state.after(&[], author, at, tip.digest)?;
        let place = state.boundary.as_ref();
        let carries_state = place.is_some_and(|place| place.seq.is_some());
        state.carry_state_again();
        let on = (tip.seq, tip.seen_in);
        Self::of(on, Vec::new(), state, carries_state).map_err(|(error, _)| error.into())
    }

    /// A ledger's first message. Its first `made` events were not appended yet; `bound` is the
    /// state after them.
    ///
    /// # Errors
    /// When the state does not allow the other events, or the message would be too large. The error
    /// returns all events.
    pub fn first(
        bound: &ExecutionState,
        mut events: Vec<Event>,
        made: usize,
        author: &str,
        at: Timestamp,
    ) -> Result<Self, (AppendError, Vec<Event>)> {
        limits::fit(events.get_mut(made..).unwrap_or_default());
        let more = events.get(made..).unwrap_or_default();
        match bound.with_more(more, author, at) {
            Ok(state) => {
                let draft = Self::of((0, 0), events, state, false);
                draft.map_err(|(error, events)| (error.into(), events))
            }
            Err(error) => Err((error.into(), events)),
        }
    }

    /// A message that appends the state of `tip` again, after the last message that the broker has
    /// not lost. Also returns whether its body must be σ.
    ///
    /// # Errors
    /// When the tip has no binding, or the message would be too large.
    pub fn again(
        tip: &Tip,
        last: Option<&Entry>,
        author: &str,
        at: Timestamp,
    ) -> Result<(Self, bool), AppendError> {
        let over = tip.digest.ok_or(AppendError::Conflict)?;
        let link = last.map(Entry::link);
        let (event, state) = tip.state.healed(link.as_ref(), over, author, at)?;
        let needs_state = state.boundary.as_ref().is_some_and(|b| b.seq == Some(0));
        let on = last.map_or((0, 0), |last| (last.seq, last.seen_in));
        let draft = Self::of(on, vec![event], state, false).map_err(|(error, _)| error)?;
        Ok((draft, needs_state))
    }

    fn of(
        (expected, seen_in): (Sequence, u64),
        events: Vec<Event>,
        state: ExecutionState,
        carries_state: bool,
    ) -> Result<Self, (MessageError, Vec<Event>)> {
        let message = LedgerMessage {
            v: 1,
            events,
            state: state.into(),
            sig: None,
        };
        let header = match message.encode() {
            Ok(header) => header,
            Err(error) => return Err((error, message.events)),
        };
        let state = message.state;
        let content = Content {
            digest: Digest::of(header.as_bytes()),
            header,
            subject: subjects::ledger(&state.tenant, state.execution),
            state,
            carries_state,
        };
        Ok(Self {
            expected,
            seen_in,
            content: Arc::new(content),
        })
    }

    /// A message as it was made before, to append it again after the message `expected`. Its σ, if it
    /// has one, is the caller's to add.
    ///
    /// # Errors
    /// When the header cannot be read.
    pub fn read(header: &str, expected: Sequence) -> Result<Self, AppendError> {
        let state = LedgerMessage::decode(header, 0)?.state;
        let content = Content {
            digest: Digest::of(header.as_bytes()),
            header: header.to_owned(),
            subject: subjects::ledger(&state.tenant, state.execution),
            state,
            carries_state: false,
        };
        Ok(Self {
            expected,
            seen_in: 0,
            content: Arc::new(content),
        })
    }

    /// Whether the body must be the last σ again, although the message commits nothing.
    pub fn carries_state(&self) -> bool {
        self.carries_state
    }

    /// The tip that this message makes, once the broker has given it a sequence in the connection
    /// `seen_in`.
    pub fn into_tip(self, seq: Sequence, seen_in: u64) -> Tip {
        let digest = Some(self.digest);
        let mut state = Arc::clone(&self.state);
        if !state.is_resolved() {
            Arc::make_mut(&mut state).resolve(seq);
        }
        Tip {
            seq,
            digest,
            state,
            seen_in,
        }
    }
}
