//! The ledger of one execution. Messages are appended by compare-and-set on the subject's last
//! sequence. An author that loses the race reads and decides again.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::context::{PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::{PublishMessage, StreamMessage};
use async_nats::jetstream::stream::{DirectGetErrorKind, LastRawMessageErrorKind, Stream};
use bytes::Bytes;
use fiec_schemas::chain::Link;
use fiec_schemas::event::MessageError;
use fiec_schemas::{
    Digest, Event, ExecutionId, ExecutionState, LedgerMessage, Ordinal, Sequence, StatePlace,
    Tenant, Timestamp, TransitionError, limits, subjects,
};
use std::sync::Arc;
use tokio::sync::OnceCell;

use crate::{Broker, BrokerError, Unacknowledged, store};

/// Number of messages after which the one with the last σ may soon drop out of the stream. The next
/// message then carries σ again.
pub const CARRY_AGAIN_AFTER: Ordinal = subjects::LEDGER_DEPTH - 8;

/// Retries of a read from a replica that is behind, and the pause between them.
const LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// A message in the stream.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its sequence.
    pub seq: Sequence,
    /// Digest of its header.
    pub digest: Digest,
    /// Its contents, with its own sequence filled in.
    pub message: LedgerMessage,
    /// σ, if it carries one.
    pub body: Bytes,
    /// The connection in which it was read: [`Broker::connection`].
    pub seen_in: u64,
}

impl Entry {
    /// Its link in the chain.
    pub fn link(&self) -> Link {
        let state = &self.message.state;
        Link {
            seq: self.seq,
            digest: self.digest,
            prev: state.prev,
            ordinal: state.ordinal,
        }
    }
}

/// The end of a ledger, as its next author must know it.
#[derive(Debug, Clone)]
pub struct Tip {
    /// Sequence of the last message, or 0 if there is none.
    pub seq: Sequence,
    /// Digest of its header.
    pub digest: Option<Digest>,
    /// The state after it.
    pub state: ExecutionState,
    /// The connection in which it was seen to be stored, or 0 if that is not known.
    pub seen_in: u64,
}

impl Tip {
    /// Its link in the chain. None before the first message.
    pub fn link(&self) -> Option<Link> {
        Some(Link {
            seq: self.seq,
            digest: self.digest?,
            prev: self.state.prev,
            ordinal: self.state.ordinal,
        })
    }
}

impl From<Entry> for Tip {
    fn from(entry: Entry) -> Self {
        Self {
            seq: entry.seq,
            digest: Some(entry.digest),
            state: entry.message.state,
            seen_in: entry.seen_in,
        }
    }
}

/// The reason why an append did not happen.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Another author appended first: read the last message and decide again.
    #[error("the ledger has moved on")]
    Conflict,
    /// The state does not allow the events.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// The message is too large or cannot be written.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The broker did not answer or refused. It is not known whether the message is stored.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// A message that is ready to append.
#[derive(Debug, Clone)]
pub struct Draft {
    /// The sequence that must be the subject's last.
    pub expected: Sequence,
    /// The connection in which that message was seen, or 0 if that is not known.
    pub seen_in: u64,
    /// The header's value.
    pub header: String,
    /// Its digest.
    pub digest: Digest,
    /// The state after it. 0 stands for the message's own sequence until it is known.
    pub state: ExecutionState,
    subject: String,
    carries_state: bool,
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
        let draft = Self::of(on, events, state).map_err(|(error, _)| error)?;
        Ok(Self {
            carries_state,
            ..draft
        })
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
        let draft = Self::of(on, Vec::new(), state).map_err(|(error, _)| error)?;
        Ok(Self {
            carries_state,
            ..draft
        })
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
            Ok(state) => Self::of((0, 0), events, state).map_err(|(e, events)| (e.into(), events)),
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
        let draft = Self::of(on, vec![event], state).map_err(|(error, _)| error)?;
        Ok((draft, needs_state))
    }

    fn of(
        (expected, seen_in): (Sequence, u64),
        events: Vec<Event>,
        state: ExecutionState,
    ) -> Result<Self, (MessageError, Vec<Event>)> {
        let message = LedgerMessage {
            v: 1,
            events,
            state,
            sig: None,
        };
        let header = match message.encode() {
            Ok(header) => header,
            Err(error) => return Err((error, message.events)),
        };
        let state = message.state;
        Ok(Self {
            expected,
            seen_in,
            digest: Digest::of(header.as_bytes()),
            header,
            subject: subjects::ledger(&state.tenant, state.execution),
            state,
            carries_state: false,
        })
    }

    /// Whether the body must be the last σ again, although the message commits nothing.
    pub fn carries_state(&self) -> bool {
        self.carries_state
    }

    /// The tip that this message makes, once the broker has given it a sequence in the connection
    /// `seen_in`.
    pub fn into_tip(self, seq: Sequence, seen_in: u64) -> Tip {
        let mut state = self.state;
        state.resolve(seq);
        Tip {
            seq,
            digest: Some(self.digest),
            state,
            seen_in,
        }
    }
}

/// An append in flight.
pub struct InFlight {
    /// The message.
    pub draft: Draft,
    body: Bytes,
    ack: Unacknowledged,
    /// The connection that sent it.
    sent_in: u64,
}

/// All ledgers, over one connection.
#[derive(Clone)]
pub struct Ledger {
    broker: Broker,
    stream: Arc<OnceCell<Stream<()>>>,
}

impl Ledger {
    /// The ledgers over this connection.
    pub fn new(broker: &Broker) -> Self {
        Self {
            broker: broker.clone(),
            stream: Arc::default(),
        }
    }

    async fn stream(&self) -> Result<&Stream<()>, BrokerError> {
        self.stream
            .get_or_try_init(|| self.broker.js.get_stream_no_info(subjects::LEDGER_STREAM))
            .await
            .map_err(BrokerError::operation("open the ledger stream"))
    }

    /// Returns the last message of an execution's ledger, if it has one.
    ///
    /// # Errors
    /// When the broker does not answer, or the message cannot be read.
    pub async fn last(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
    ) -> Result<Option<Entry>, BrokerError> {
        self.last_of(&subjects::ledger(tenant, execution)).await
    }

    /// Returns the last message. While `reached` rejects it, a replica that is behind is asked again,
    /// for half a second.
    ///
    /// # Errors
    /// As [`Ledger::last`].
    pub async fn last_once(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        reached: impl Fn(&Entry) -> bool,
    ) -> Result<Option<Entry>, BrokerError> {
        let subject = subjects::ledger(tenant, execution);
        self.last_of_once(&subject, reached).await
    }

    /// Returns the last message. If the replica that answers has no message as new as `from`, which
    /// exists, the stream's leader is asked: the replica may be behind.
    ///
    /// # Errors
    /// As [`Ledger::last`].
    pub async fn last_from(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        from: Sequence,
    ) -> Result<Option<Entry>, BrokerError> {
        let subject = subjects::ledger(tenant, execution);
        let last = self.last_of(&subject).await?;
        if from == 0 || last.as_ref().is_some_and(|last| last.seq >= from) {
            return Ok(last);
        }
        let connection = self.broker.connection();
        match self
            .stream()
            .await?
            .get_last_raw_message_by_subject(&subject)
            .await
        {
            Ok(message) => entry(message, connection).map(Some),
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
            Err(error) => Err(BrokerError::operation(format!(
                "read the last of {subject} from its leader"
            ))(error)),
        }
    }

    async fn last_of_once(
        &self,
        subject: &str,
        reached: impl Fn(&Entry) -> bool,
    ) -> Result<Option<Entry>, BrokerError> {
        let mut last = self.last_of(subject).await?;
        for _ in 0..LOOKS {
            if last.as_ref().is_some_and(&reached) {
                break;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
            last = self.last_of(subject).await?;
        }
        Ok(last)
    }

    async fn last_of(&self, subject: &str) -> Result<Option<Entry>, BrokerError> {
        match self
            .stream()
            .await?
            .direct_get_last_for_subject(subject)
            .await
        {
            Ok(message) => entry(message, self.broker.connection()).map(Some),
            Err(error) if error.kind() == DirectGetErrorKind::NotFound => Ok(None),
            Err(error) => Err(BrokerError::operation(format!(
                "read the last of {subject}"
            ))(error)),
        }
    }

    /// Returns the message of this sequence.
    ///
    /// # Errors
    /// When it has dropped out, or cannot be read.
    pub async fn by_sequence(&self, seq: Sequence) -> Result<Entry, BrokerError> {
        match self.stream().await?.direct_get(seq).await {
            Ok(message) => entry(message, self.broker.connection()),
            Err(error) if error.kind() == DirectGetErrorKind::NotFound => {
                Err(BrokerError::Missing {
                    what: format!("ledger message {seq}"),
                    hint: ": it has dropped out of the stream; PostgreSQL has its history"
                        .to_owned(),
                })
            }
            Err(error) => Err(BrokerError::operation(format!("read ledger message {seq}"))(error)),
        }
    }

    /// Returns σ of the last commit from its place.
    ///
    /// # Errors
    /// When it is missing or damaged.
    pub async fn state(
        &self,
        execution: ExecutionId,
        place: &StatePlace,
    ) -> Result<Bytes, BrokerError> {
        store::get_state(&self.broker, execution, place).await
    }

    /// Sends a message without waiting for its acknowledgement. `body` is σ (or the list of its
    /// chunks) if the events commit a boundary, otherwise empty. A σ that must be carried again is
    /// fetched here if `body` is empty.
    ///
    /// # Errors
    /// When it could not be sent.
    pub async fn send(&self, draft: Draft, body: Bytes) -> Result<InFlight, AppendError> {
        // Rare branches are boxed here and below: the future of an append is created millions of
        // times.
        let body = match &draft.state.boundary {
            Some(place) if draft.carries_state && body.is_empty() && place.bytes > 0 => {
                Box::pin(self.carried(&draft)).await?
            }
            _ => body,
        };
        let sent_in = self.broker.connection();
        let ack = self.publish(&draft, body.clone()).await?;
        let ack = self.broker.sent(ack);
        Ok(InFlight {
            draft,
            body,
            ack,
            sent_in,
        })
    }

    /// Fetches the σ that a draft must carry again, from the place in the message before.
    async fn carried(&self, draft: &Draft) -> Result<Bytes, AppendError> {
        let reached = |last: &Entry| last.seq >= draft.expected;
        match self.last_of_once(&draft.subject, reached).await? {
            Some(last) if last.seq == draft.expected => match &last.message.state.boundary {
                Some(before) if store::is_large(before) => {
                    Ok(self.by_sequence(before.seq.unwrap_or(0)).await?.body)
                }
                Some(before) => Ok(self.state(draft.state.execution, before).await?),
                None => Err(AppendError::Conflict),
            },
            _ => Err(AppendError::Conflict),
        }
    }

    async fn publish(&self, draft: &Draft, body: Bytes) -> Result<PublishAckFuture, AppendError> {
        let mut headers = HeaderMap::new();
        headers.insert(subjects::EVENT_HEADER, draft.header.as_str());
        let message = PublishMessage::build()
            .payload(body)
            .headers(headers)
            .expected_last_subject_sequence(draft.expected);
        self.broker
            .js
            .send_publish(draft.subject.clone(), message)
            .await
            .map_err(BrokerError::operation(format!(
                "append to {}",
                draft.subject
            )))
            .map_err(AppendError::Broker)
    }

    /// Waits for the acknowledgement of a message in flight. If it was lost, reads the ledger back,
    /// and sends the message again if it is not stored.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] if another author was first.
    pub async fn settle(&self, in_flight: InFlight) -> Result<Tip, AppendError> {
        let InFlight {
            draft,
            body,
            ack,
            sent_in,
        } = in_flight;
        let error = match ack.settled().await {
            // A restarted broker may have lost a message that it had acknowledged before.
            Ok(_) if self.broker.connection() != sent_in => {
                return Box::pin(self.retry(draft, body)).await;
            }
            Ok(ack) => return self.stored(draft, ack.sequence).await,
            Err(error) => error,
        };
        match error.kind() {
            // Also the answer to a retry of ours if its first attempt was stored.
            PublishErrorKind::WrongLastSequence => Box::pin(self.conflict_or_own(draft)).await,
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => {
                tracing::warn!(
                    subject = draft.subject,
                    "append was not acknowledged; reading back"
                );
                Box::pin(self.retry(draft, body)).await
            }
            _ => Err(AppendError::Broker(BrokerError::operation(format!(
                "append to {}",
                draft.subject
            ))(error))),
        }
    }

    /// Completes a message of ours with this sequence. If the message before it was seen in another
    /// connection, another message may have its sequence by now. Then ours has a wrong predecessor,
    /// and is removed.
    async fn stored(&self, draft: Draft, seq: Sequence) -> Result<Tip, AppendError> {
        let connection = self.broker.connection();
        if draft.expected == 0 || draft.seen_in == connection {
            return Ok(draft.into_tip(seq, connection));
        }
        let before = Box::pin(self.by_sequence(draft.expected)).await;
        match before {
            Ok(before) if Some(before.digest) == draft.state.prev => {
                Ok(draft.into_tip(seq, connection))
            }
            Ok(_) | Err(BrokerError::Missing { .. }) => {
                tracing::warn!(
                    subject = draft.subject,
                    seq,
                    "the broker gave a sequence out again; the message behind it is removed"
                );
                let removed = self.stream().await?.delete_message(seq).await;
                removed.map_err(BrokerError::operation(
                    "remove a message that follows nothing",
                ))?;
                Err(AppendError::Conflict)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn conflict_or_own(&self, draft: Draft) -> Result<Tip, AppendError> {
        // The message that caused the refusal comes after the expected one.
        let reached = |last: &Entry| last.seq > draft.expected;
        match self.last_of_once(&draft.subject, reached).await? {
            Some(last) if last.digest == draft.digest => self.stored(draft, last.seq).await,
            _ => Err(AppendError::Conflict),
        }
    }

    async fn retry(&self, draft: Draft, body: Bytes) -> Result<Tip, AppendError> {
        let mut wait = Duration::from_millis(100);
        let mut last_error = None;
        for _ in 0..8 {
            match self.last_of(&draft.subject).await {
                Ok(Some(last)) if last.digest == draft.digest => {
                    return self.stored(draft, last.seq).await;
                }
                Ok(last) if last.as_ref().map(|l| l.digest) == draft.state.prev => {
                    let again = Draft {
                        expected: last.as_ref().map_or(0, |l| l.seq),
                        seen_in: self.broker.connection(),
                        ..draft.clone()
                    };
                    match self.publish(&again, body.clone()).await?.await {
                        Ok(ack) => return self.stored(again, ack.sequence).await,
                        Err(error) => last_error = Some(error),
                    }
                }
                Ok(Some(last)) if last.seq >= draft.expected => return Err(AppendError::Conflict),
                // A replica that is behind, or a broker that has lost messages.
                Ok(_) if self.broker.connection() != draft.seen_in => {
                    return Err(AppendError::Conflict);
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "cannot read the ledger back yet"),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        let what = format!("append to {}", draft.subject);
        Err(AppendError::Broker(match last_error {
            Some(error) => BrokerError::operation(what)(error),
            None => BrokerError::Missing {
                what,
                hint: ": no acknowledgement came".to_owned(),
            },
        }))
    }

    /// Appends a message and waits for its acknowledgement.
    ///
    /// # Errors
    /// As [`Ledger::settle`].
    pub async fn append(&self, draft: Draft, body: Bytes) -> Result<Tip, AppendError> {
        let in_flight = self.send(draft, body).await?;
        self.settle(in_flight).await
    }
}

fn entry(message: StreamMessage, seen_in: u64) -> Result<Entry, BrokerError> {
    let malformed = |reason: String| BrokerError::Malformed {
        what: format!("ledger message {} on {}", message.sequence, message.subject),
        reason,
    };
    let header = message
        .headers
        .get(subjects::EVENT_HEADER)
        .ok_or_else(|| malformed(format!("it has no {} header", subjects::EVENT_HEADER)))?
        .as_str();
    Ok(Entry {
        seq: message.sequence,
        digest: Digest::of(header.as_bytes()),
        message: LedgerMessage::decode(header, message.sequence)
            .map_err(|error| malformed(error.to_string()))?,
        body: message.payload.clone(),
        seen_in,
    })
}
