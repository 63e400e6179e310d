//! Appends by compare-and-set, and what follows a lost acknowledgement.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::context::{PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_schemas::{Sequence, subjects};

use super::{AppendError, Draft, Entry, Ledger, Tip};
use crate::{BrokerError, Unacknowledged, store};

/// An append in flight.
pub struct InFlight {
    /// The message.
    pub draft: Draft,
    body: Bytes,
    ack: Unacknowledged,
    /// The connection that sent it.
    sent_in: u64,
}

impl Ledger {
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
        match self.last_of_from(&draft.subject, draft.expected).await? {
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
            Ok(ack) => return self.stored(draft, ack.sequence, sent_in).await,
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

    /// Completes a message of ours with this sequence, which was seen in the connection `seen_in`. If
    /// the message before it was seen in another connection, the broker may have lost that one, and
    /// another author may have got its sequence. Then ours has a wrong predecessor, and is removed.
    async fn stored(&self, draft: Draft, seq: Sequence, seen_in: u64) -> Result<Tip, AppendError> {
        if draft.expected == 0 || draft.seen_in == seen_in {
            return Ok(draft.into_tip(seq, seen_in));
        }
        match Box::pin(self.at(draft.expected)).await? {
            Some(before) if Some(before.digest) == draft.state.prev => {
                Ok(draft.into_tip(seq, seen_in))
            }
            Some(_) => {
                tracing::warn!(
                    subject = draft.subject,
                    seq,
                    "the broker reused a sequence; removing the message that it stored there"
                );
                let removed = self.stream().await?.delete_message(seq).await;
                removed.map_err(BrokerError::operation(
                    "remove a message without a predecessor",
                ))?;
                Err(AppendError::Conflict)
            }
            // The broker found it when it stored ours. It has dropped out since, or both are lost.
            None => match Box::pin(self.at(seq)).await? {
                Some(own) if own.digest == draft.digest => Ok(draft.into_tip(seq, seen_in)),
                _ => Err(AppendError::Conflict),
            },
        }
    }

    /// The tip of the ledger, if its last message is one of these, which this author has sent, and
    /// follows the message that it was made for.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn own(&self, last: &Entry, sent: &[Draft]) -> Result<Option<Tip>, BrokerError> {
        let Some(draft) = sent.iter().find(|draft| draft.digest == last.digest) else {
            return Ok(None);
        };
        let follows = draft.expected == 0
            || draft.seen_in == last.seen_in
            || self
                .at(draft.expected)
                .await?
                .is_some_and(|before| Some(before.digest) == draft.state.prev);
        Ok(follows.then(|| last.clone().into()))
    }

    async fn conflict_or_own(&self, draft: Draft) -> Result<Tip, AppendError> {
        // The message that caused the refusal comes after the expected one.
        let from = draft.expected + 1;
        match self.last_of_from(&draft.subject, from).await? {
            Some(last) if last.digest == draft.digest => {
                self.stored(draft, last.seq, last.seen_in).await
            }
            _ => Err(AppendError::Conflict),
        }
    }

    async fn retry(&self, draft: Draft, body: Bytes) -> Result<Tip, AppendError> {
        let mut wait = Duration::from_millis(100);
        let mut last_error = None;
        for _ in 0..8 {
            match self.last_of_from(&draft.subject, draft.expected).await {
                Ok(Some(last)) if last.digest == draft.digest => {
                    return self.stored(draft, last.seq, last.seen_in).await;
                }
                Ok(last) if last.as_ref().map(|l| l.digest) == draft.state.prev => {
                    let sent_in = self.broker.connection();
                    let mut again = draft.clone();
                    again.expected = last.as_ref().map_or(0, |l| l.seq);
                    again.seen_in = last.map_or(sent_in, |l| l.seen_in);
                    match self.publish(&again, body.clone()).await?.await {
                        Ok(ack) => return self.stored(again, ack.sequence, sent_in).await,
                        Err(error) => last_error = Some(error),
                    }
                }
                Ok(Some(last)) if last.seq >= draft.expected => return Err(AppendError::Conflict),
                // The broker has lost messages.
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
