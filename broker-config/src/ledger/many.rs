//! The last messages of many ledgers with few requests: a direct get with `multi_last`
//! (NATS ADR-31).
//!
//! Traded off: some copy of the stream answers, which may lag behind its leader. A ledger that it does
//! not have may have begun, and a message of it may not be the last one. So this is for a caller
//! who will be refused by the broker if it goes on from there.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::StatusCode;
use async_nats::jetstream::message::StreamMessage;
use bytes::Bytes;
use fiec_schemas::{ExecutionId, Tenant, subjects};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::{Ledger, header};
use crate::{BrokerError, leader};

/// Ledgers in one request. The broker gives the messages of at most 1,024 subjects.
const AT_ONCE: usize = 500;
/// Time limit of one request.
const WITHIN: Duration = Duration::from_secs(5);
const READ: &str = "read the last messages of many ledgers";

impl Ledger {
    /// Returns the header of the last message, as some copy has it, of those of these ledgers that
    /// exist.
    ///
    /// # Errors
    /// If no copy answers, or a message has no header.
    pub async fn last_of_many(
        &self,
        tenant: &Tenant,
        executions: &[ExecutionId],
    ) -> Result<Vec<(ExecutionId, String)>, BrokerError> {
        let mut found = Vec::new();
        for part in executions.chunks(AT_ONCE) {
            let (messages, is_cut) = self.multi_last(tenant, part).await?;
            let mut missing: HashSet<_> = part.iter().copied().filter(|_| is_cut).collect();
            for message in messages {
                if let Some((_, id)) = subjects::parse_ledger(&message.subject) {
                    missing.remove(&id);
                    found.push((id, header(&message)?.to_owned()));
                }
            }
            for id in missing {
                let subject = subjects::ledger(tenant, id);
                if let Some(message) = leader::last(self.stream().await?, &subject).await? {
                    found.push((id, header(&message)?.to_owned()));
                }
            }
        }
        Ok(found)
    }

    /// One request. True if the answer was too long and the broker has left messages out.
    async fn multi_last(
        &self,
        tenant: &Tenant,
        executions: &[ExecutionId],
    ) -> Result<(Vec<StreamMessage>, bool), BrokerError> {
        let subjects = executions.iter().map(|id| subjects::ledger(tenant, *id));
        let request = json!({
            "batch": executions.len(),
            "multi_last": subjects.collect::<Vec<_>>(),
        });
        let client = &self.broker.client;
        let inbox = client.new_inbox();
        let mut answers = client
            .subscribe(inbox.clone())
            .await
            .map_err(BrokerError::operation(READ))?;
        let subject = format!("$JS.API.DIRECT.GET.{}", subjects::LEDGER_STREAM);
        client
            .publish_with_reply(subject, inbox, Bytes::from(request.to_string()))
            .await
            .map_err(BrokerError::operation(READ))?;
        let (mut messages, deadline) = (Vec::new(), Instant::now() + WITHIN);
        loop {
            let answer = timeout_at(deadline, answers.next())
                .await
                .map_err(BrokerError::operation(READ))?;
            let Some(answer) = answer else {
                return Err(BrokerError::operation(READ)("the connection is closed"));
            };
            match answer.status {
                None | Some(StatusCode::OK) => {
                    let message = StreamMessage::try_from(answer);
                    messages.push(message.map_err(BrokerError::operation(READ))?);
                }
                // None of them exists.
                Some(StatusCode::NOT_FOUND) => return Ok((messages, false)),
                // The end of the answer.
                Some(status) if status.as_u16() == 204 => {
                    let pending = answer.headers.as_ref();
                    let pending = pending.and_then(|headers| headers.get("Nats-Num-Pending"));
                    let is_cut = pending.is_some_and(|pending| pending.as_str() != "0");
                    return Ok((messages, is_cut));
                }
                Some(status) => {
                    let words = answer.description.unwrap_or_default();
                    return Err(BrokerError::operation(READ)(format!("{status} {words}")));
                }
            }
        }
    }
}
