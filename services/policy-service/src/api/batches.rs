//! Requests about whole batches. A batch is found by the last message of each ledger of its tenant,
//! so any service answers, and nothing about batches is kept in memory; submissions that have no
//! ledgers yet are waited for, and counted where they take long. What is asked is done for
//! its executions one by one, a bounded number at the same time and for a bounded time: the answer
//! says how many are left, and the same request goes on with them.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::RawMessageErrorKind;
use fiec_broker::{BrokerError, Entry};
use fiec_schemas::messages::{BatchReply, BatchRequest, Untaken};
use fiec_schemas::{
    BatchId, BatchName, Digest, ExecutionId, LedgerMessage, Phase, Sequence, Tenant, subjects,
};
use futures_util::{StreamExt as _, stream};

use super::executions::{NOT_PAUSED, NOT_YET, is_asked};
use super::{Answered, Api, parse, somebody, tenant};

/// Requests under way at the same time.
const AT_ONCE: usize = 32;
/// How long one answer may take, where nothing is said, and at most.
const WITHIN_MS: u64 = 5_000;
const WITHIN_LIMIT_MS: u64 = 8_000;
/// Reading the ledgers of a tenant takes no longer.
const READING: Duration = Duration::from_secs(7);
/// Submissions that have no ledgers yet are waited for so long at most, and looked at so often.
const PATIENCE: Duration = Duration::from_millis(1_000);
const LOOK: Duration = Duration::from_millis(20);
/// Most reasons that an answer names.
const REASONS: usize = 5;

impl Api {
    pub(super) async fn batch(&self, subject: &str, payload: &[u8]) -> BatchReply {
        let mut tokens = subject.rsplit('.');
        let tenant = tokens.next().unwrap_or_default();
        let verb = tokens.next().unwrap_or_default();
        match self.whole_batch(verb, tenant, payload).await {
            Ok(reply) => reply,
            Err(error) => BatchReply {
                error: Some(error),
                ..BatchReply::default()
            },
        }
    }

    async fn whole_batch(
        &self,
        verb: &str,
        tenant_text: &str,
        payload: &[u8],
    ) -> Answered<BatchReply> {
        if !["status", "cancel", "pause", "resume"].contains(&verb) {
            return Err(format!(
                "there is no request {verb} about a batch; there are status, cancel, pause, resume"
            ));
        }
        let tenant = tenant(tenant_text)?;
        let request: BatchRequest = parse(payload)?;
        let who = somebody(&request.who);
        let within = request.within_ms.unwrap_or(WITHIN_MS).min(WITHIN_LIMIT_MS);
        let batch = batch_of(&tenant, &request.batch)?;
        let patience = match verb {
            "status" => Duration::ZERO,
            _ => Duration::from_millis(within).min(PATIENCE),
        };
        // In this order: what has been taken in by then has its ledgers.
        let untaken = self
            .untaken(&tenant, request.untaken, patience)
            .await
            .map_err(|error| error.to_string())?;
        let mut reply = BatchReply {
            batch: Some(batch),
            untaken,
            ..BatchReply::default()
        };
        let not_known = |messages| {
            format!(
                "{messages} submission messages of tenant {tenant} have not been taken in; try again"
            )
        };
        if let (Some(_), Some(untaken)) = (request.untaken, untaken) {
            reply.error = Some(not_known(untaken.messages));
            return Ok(reply);
        }
        let deadline = tokio::time::Instant::now() + Duration::from_millis(within);
        let members = tokio::time::timeout(READING, self.members(&tenant, batch))
            .await
            .map_err(|_| "the ledgers could not be read in time; try again".to_owned())?
            .map_err(|error| error.to_string())?;
        if members.is_empty() {
            let none = &request.batch;
            reply.error = Some(match untaken {
                Some(untaken) => format!(
                    "no execution of batch {none} is known, and {}",
                    not_known(untaken.messages)
                ),
                None => format!(
                    "tenant {tenant} has no batch {none}; one whose executions ended long ago is \
                     in PostgreSQL only (the view batch_summary)"
                ),
            });
            return Ok(reply);
        }
        let mut targets = Vec::new();
        for entry in members {
            let state = &entry.message.state;
            if verb != "status" && concerns(verb, &entry) {
                targets.push(entry);
            } else {
                count(&mut reply, state.phase.as_str());
                reply.unconcerned += u32::from(verb != "status");
            }
        }
        let sight = &self.sight().await;
        for level in in_order(&tenant, targets) {
            let mut done = stream::iter(level)
                .map(|entry| {
                    let (tenant, who) = (&tenant, &who);
                    async move {
                        let phase = entry.message.state.phase.clone();
                        if tokio::time::Instant::now() >= deadline {
                            return (phase, None);
                        }
                        let done = self.change((verb, None), tenant, entry, who, sight).await;
                        (phase, Some(done))
                    }
                })
                .buffer_unordered(AT_ONCE);
            while let Some((phase, done)) = done.next().await {
                let after = match &done {
                    Some(Ok(answer)) => answer.state.as_ref().map(|s| s.phase.as_str()),
                    _ => None,
                };
                count(&mut reply, after.unwrap_or(phase.as_str()));
                match done {
                    None => reply.left += 1,
                    // Some of its parts, or itself.
                    Some(Ok(answer)) if answer.message.ends_with(NOT_YET) => reply.left += 1,
                    Some(Ok(_)) => reply.done += 1,
                    Some(Err(reason)) if reason.ends_with(NOT_YET) => reply.left += 1,
                    // It ended in the meantime, or is as it is asked to be.
                    Some(Err(reason))
                        if reason.ends_with("already") || reason.contains(NOT_PAUSED) =>
                    {
                        reply.unconcerned += 1;
                    }
                    Some(Err(reason)) => {
                        reply.failed += 1;
                        if reply.reasons.len() < REASONS {
                            reply.reasons.push(reason);
                        }
                    }
                }
            }
        }
        Ok(reply)
    }

    /// Waits so long at most until each submission message of the tenant up to this one (of those
    /// that are there by now, where nothing is said) has been taken in, and has its ledgers; what
    /// has not.
    async fn untaken(
        &self,
        tenant: &Tenant,
        upto: Option<Sequence>,
        patience: Duration,
    ) -> Result<Option<Untaken>, BrokerError> {
        const WHAT: &str = "look at the submissions";
        let js = &self.effects.broker.js;
        let stream = js
            .get_stream_no_info(subjects::SUBMIT_STREAM)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let state = stream
            .get_info()
            .await
            .map_err(BrokerError::operation(WHAT))?
            .state;
        let upto = upto.unwrap_or(state.last_sequence);
        // Taken in, they are removed.
        if state.first_sequence > upto {
            return Ok(None);
        }
        let subject = subjects::submit(tenant);
        let until = tokio::time::Instant::now() + patience;
        let oldest = loop {
            let oldest = stream.get_first_raw_message_by_subject(&subject, 1).await;
            let oldest = match oldest {
                Ok(message) if message.sequence <= upto => message.sequence,
                Ok(_) => return Ok(None),
                Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => {
                    return Ok(None);
                }
                Err(error) => return Err(BrokerError::operation(WHAT)(error)),
            };
            if tokio::time::Instant::now() >= until {
                break oldest;
            }
            tokio::time::sleep(LOOK).await;
        };
        let mut counted = stream
            .info_with_subjects(subject)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let messages = match counted.next().await {
            Some(counted) => counted.map_err(BrokerError::operation(WHAT))?.1 as u64,
            None => return Ok(None),
        };
        Ok(Some(Untaken {
            messages,
            oldest,
            upto,
        }))
    }

    /// The last message of each execution of a batch.
    async fn members(&self, tenant: &Tenant, batch: BatchId) -> Result<Vec<Entry>, BrokerError> {
        const WHAT: &str = "read the ledgers of a tenant";
        let mut consumer = self
            .effects
            .broker
            .js
            .create_consumer_on_stream(
                pull::Config {
                    ack_policy: AckPolicy::None,
                    headers_only: true,
                    deliver_policy: DeliverPolicy::LastPerSubject,
                    filter_subject: format!("fiec.ledger.{tenant}.*"),
                    inactive_threshold: Duration::from_secs(10),
                    ..Default::default()
                },
                subjects::LEDGER_STREAM,
            )
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let info = consumer
            .info()
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let mut found = Vec::new();
        if info.num_pending == 0 {
            return Ok(found);
        }
        let mut messages = consumer
            .stream()
            .max_messages_per_batch(1_000)
            .messages()
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let mark = format!(r#""batch":{{"id":"{batch}""#);
        while let Some(message) = messages.next().await {
            let message = message.map_err(BrokerError::operation(WHAT))?;
            let Ok(info) = message.info() else { continue };
            let header = message.headers.as_ref();
            let header = header.and_then(|h| h.get(subjects::EVENT_HEADER));
            if let Some(text) = header.map(|h| h.as_str()).filter(|h| h.contains(&mark)) {
                let seq = info.stream_sequence;
                match LedgerMessage::decode(text, seq) {
                    Ok(message) => found.push(Entry {
                        seq,
                        digest: Digest::of(text.as_bytes()),
                        message,
                        body: bytes::Bytes::new(),
                    }),
                    Err(error) => tracing::warn!(seq, %error, "a ledger message was passed over"),
                }
            }
            if info.pending == 0 {
                break;
            }
        }
        // A submission may hold words that look like the mark.
        found.retain(|e| e.message.state.batch.is_some_and(|b| b.id == batch));
        // What was appended while this was read has come as well, after the message before it.
        let last: HashMap<ExecutionId, Sequence> = found
            .iter()
            .map(|e| (e.message.state.execution, e.seq))
            .collect();
        found.retain(|e| last.get(&e.message.state.execution) == Some(&e.seq));
        Ok(found)
    }
}

fn batch_of(tenant: &Tenant, text: &str) -> Answered<BatchId> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let name: BatchName = text
        .parse()
        .map_err(|_| format!("{text:?} is neither a batch's UUID nor its name"))?;
    Ok(BatchId::from_client(tenant, &name))
}

fn count(reply: &mut BatchReply, phase: &str) {
    *reply.phases.entry(phase.to_owned()).or_default() += 1;
}

/// True where something remains to be done.
fn concerns(verb: &str, entry: &Entry) -> bool {
    let state = &entry.message.state;
    let asked = |what: &str| is_asked(entry, what);
    match verb {
        // Its parts may have paused of their own, or not have been reached before.
        "resume" => {
            let paused = matches!(state.phase, Phase::Paused { .. }) || asked("pause");
            paused || !state.phase.is_terminal() && !state.parts().is_empty()
        }
        "pause" => {
            let paused = matches!(state.phase, Phase::Paused { .. });
            !state.phase.is_terminal() && !paused && !asked("pause") && !asked("cancel")
        }
        _ => !state.phase.is_terminal() && !asked("cancel"),
    }
}

/// In levels, what waits for others before those: so that nothing fails, or starts, because of what
/// is done to the ones that it waits for.
fn in_order(tenant: &Tenant, entries: Vec<Entry>) -> Vec<Vec<Entry>> {
    let at: HashMap<ExecutionId, usize> = entries
        .iter()
        .enumerate()
        .map(|(n, entry)| (entry.message.state.execution, n))
        .collect();
    let after: Vec<Vec<usize>> = entries
        .iter()
        .map(|entry| {
            let spec = entry.message.state.spec.as_ref();
            let after = spec.map_or(&[][..], |spec| &spec.after);
            let ids = after.iter().filter_map(|d| d.execution(tenant));
            ids.filter_map(|id| at.get(&id).copied()).collect()
        })
        .collect();
    let mut waiters = vec![0_usize; entries.len()];
    after.iter().flatten().for_each(|n| waiters[*n] += 1);
    let mut level = vec![0_usize; entries.len()];
    let mut free: Vec<usize> = (0..entries.len()).filter(|n| waiters[*n] == 0).collect();
    while let Some(n) = free.pop() {
        for other in &after[n] {
            level[*other] = level[*other].max(level[n] + 1);
            waiters[*other] -= 1;
            if waiters[*other] == 0 {
                free.push(*other);
            }
        }
    }
    let mut levels: BTreeMap<usize, Vec<Entry>> = BTreeMap::new();
    for (n, entry) in entries.into_iter().enumerate() {
        levels.entry(level[n]).or_default().push(entry);
    }
    levels.into_values().collect()
}
