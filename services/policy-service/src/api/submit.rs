//! Submission by request: every line is answered with its id or its error, and the good ones go
//! into `FIEC_SUBMIT` as one message, each on its own line number.

use std::collections::{HashMap, HashSet};

use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_schemas::messages::{Accepted, SubmitReply};
use fiec_schemas::submission::{LINES_LIMIT, lines};
use fiec_schemas::{
    BatchId, ClientId, Digest, ExecutionId, FieldError, LineError, Submission, Tenant, Timestamp,
    package, subjects,
};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::{Answered, Api};
use crate::core::taken;
use crate::events::{Ask, Outcome, Rejected};
use crate::intake::{STAMP_HEADER, excerpt, name};

/// Ledgers looked up at once.
const LOOK_UPS: usize = 64;

struct Checked<'a> {
    number: u32,
    text: &'a [u8],
    spec: Submission,
}

impl Api {
    pub(super) async fn submit(&self, tenant: &str, body: &[u8]) -> SubmitReply {
        match self.submit_lines(tenant, body).await {
            Ok(reply) => reply,
            Err(error) => SubmitReply {
                error: Some(error),
                ..SubmitReply::default()
            },
        }
    }

    async fn submit_lines(&self, tenant_text: &str, body: &[u8]) -> Answered<SubmitReply> {
        let tenant = super::tenant(tenant_text)?;
        if lines(body).take(LINES_LIMIT + 1).count() > LINES_LIMIT {
            return Err(format!(
                "more than {LINES_LIMIT} lines; send them in several requests"
            ));
        }
        let mut reply = SubmitReply::default();
        let mut refused = Vec::new();
        let mut refuse = |reply: &mut SubmitReply, number, text: &[u8], error: FieldError| {
            let error = LineError {
                line: number,
                field: error.field,
                reason: error.reason,
            };
            refused.push((error.clone(), excerpt(text)));
            reply.errors.push(error);
        };
        let mut good = Vec::new();
        for (number, text) in lines(body) {
            match Submission::parse(text) {
                Ok(spec) => good.push(Checked { number, text, spec }),
                Err(error) => refuse(&mut reply, number, text, error),
            }
        }
        let missing = self.missing_programs(&good).await?;
        let (unknown, good): (Vec<_>, Vec<_>) = good
            .into_iter()
            .partition(|line| missing.contains(&line.spec.program));
        for line in unknown {
            let error = package::unregistered(&line.spec.program);
            refuse(&mut reply, line.number, line.text, error);
        }
        let existing = self.look_up(&tenant, &good).await?;
        let mut earlier: HashMap<ClientId, Digest> = HashMap::new();
        let mut new = Vec::new();
        for line in good {
            let Some(client) = line.spec.id.clone() else {
                new.push(line);
                continue;
            };
            let execution = ExecutionId::from_client(&tenant, &client);
            let digest = line.spec.digest();
            let stored = existing.get(&client).copied();
            match stored.or(earlier.get(&client).copied()) {
                Some(there) if there != digest => {
                    let error = FieldError::new("id", taken(execution, &there.short()));
                    refuse(&mut reply, line.number, line.text, error);
                }
                Some(_) => reply.accepted.push(Accepted {
                    line: line.number,
                    id: execution,
                    client_id: Some(client),
                    existing: true,
                }),
                None => {
                    earlier.insert(client, digest);
                    new.push(line);
                }
            }
        }
        if !refused.is_empty() {
            let rejected = Rejected {
                tenant: tenant_text.to_owned(),
                lines: refused,
            };
            let _ = self
                .effects
                .outcomes
                .send(Outcome::Ask(Ask::Rejected(Box::new(rejected))))
                .await;
        }
        if !new.is_empty() {
            self.publish(&tenant, &new, &mut reply).await?;
        }
        reply.accepted.sort_by_key(|a| a.line);
        reply.errors.sort_by_key(|e| e.line);
        Ok(reply)
    }

    /// The programs among the lines that are neither built in nor registered.
    async fn missing_programs(&self, good: &[Checked<'_>]) -> Answered<HashSet<String>> {
        let programs = &self.effects.programs;
        let doubtful: HashSet<String> = good
            .iter()
            .map(|line| &line.spec.program)
            .filter(|program| !programs.has(program))
            .cloned()
            .collect();
        stream::iter(doubtful)
            .map(|program| async move {
                let there = programs.look_up(&program).await;
                let there = there.map_err(|error| error.to_string())?;
                Ok::<_, String>((!there).then_some(program))
            })
            .buffer_unordered(LOOK_UPS)
            .try_filter_map(|missing| async move { Ok(missing) })
            .try_collect()
            .await
    }

    /// Submissions that are there under clients' ids.
    async fn look_up(
        &self,
        tenant: &Tenant,
        good: &[Checked<'_>],
    ) -> Answered<HashMap<ClientId, Digest>> {
        let clients: Vec<ClientId> = good.iter().filter_map(|l| l.spec.id.clone()).collect();
        stream::iter(clients)
            .map(|client| async move {
                let execution = ExecutionId::from_client(tenant, &client);
                let last = self.effects.ledger.last(tenant, execution).await;
                let last = last.map_err(|error| error.to_string())?;
                Ok::<_, String>(last.map(|entry| (client, entry.message.state.submission)))
            })
            .buffer_unordered(LOOK_UPS)
            .try_filter_map(|found| async move { Ok(found) })
            .try_collect()
            .await
    }

    async fn publish(
        &self,
        tenant: &Tenant,
        new: &[Checked<'_>],
        reply: &mut SubmitReply,
    ) -> Answered<()> {
        let mut body = Vec::new();
        let mut number = 1;
        for line in new {
            // Blank lines stand for the ones that are not sent.
            while number < line.number {
                body.push(b'\n');
                number += 1;
            }
            body.extend_from_slice(line.text);
        }
        let stamp = Timestamp::now();
        let several = new.len() > 1;
        let message = PublishMessage::build()
            .payload(Bytes::from(body))
            .header(STAMP_HEADER, stamp.micros().to_string().as_str());
        let failed = |error: &dyn std::fmt::Display| {
            format!(
                "the submission was not stored: {error}; it is safe to send it again only if every line has an id"
            )
        };
        let ack = self
            .effects
            .broker
            .js
            .send_publish(subjects::submit(tenant), message)
            .await
            .map_err(|error| failed(&error))?
            .await
            .map_err(|error| failed(&error))?;
        let batch = several.then(|| BatchId::from_submission(tenant, stamp, ack.sequence));
        let mut batches = Vec::new();
        for line in new {
            let (id, place) = name(tenant, stamp, ack.sequence, line.number, batch, &line.spec);
            batches.extend(place.map(|p| p.id));
            reply.accepted.push(Accepted {
                line: line.number,
                id,
                client_id: line.spec.id.clone(),
                existing: false,
            });
        }
        batches.sort_unstable();
        batches.dedup();
        reply.batch = if let [only] = batches[..] {
            Some(only)
        } else {
            batch
        };
        Ok(())
    }
}
