//! Submission by request. Every line is answered with its id or its error. The valid lines go into
//! `FIEC_SUBMIT` as one message, each with its own line number.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::BrokerError;
use fiec_schemas::array::LISTED_LIMIT;
use fiec_schemas::messages::{Accepted, SubmitReply};
use fiec_schemas::submission::{ATOMIC_HEADER, LINES_LIMIT, lines};
use fiec_schemas::{BatchId, ExecutionId, FieldError, LineError, Tenant, subjects};

use super::{Answered, Api};
use crate::allowance::Allowance;
use crate::core::taken;
use crate::events::{Ask, Outcome, Rejected};
use crate::intake::{STAMP_HEADER, excerpt, name};
use crate::reading::{Verdict, Vetted};
use crate::refusal::Refusal;
use crate::vetting::{self, There};

/// Time limit of the broker's acknowledgement. A message that it stores later than
/// [`STAMP_WITHIN`](crate::intake::STAMP_WITHIN) gets other ids than the answer says. The difference
/// is more than the error of the measured clock.
const STORED_WITHIN: Duration = Duration::from_secs(8);

impl Api {
    /// Answers a submission. `atomic`: all lines are accepted, or none.
    pub(super) async fn submit(
        &self,
        tenant_text: &str,
        body: &Bytes,
        atomic: bool,
    ) -> Answered<SubmitReply> {
        let tenant = super::tenant(tenant_text)?;
        if lines(body).take(LINES_LIMIT + 1).count() > LINES_LIMIT {
            let rule = format!("more than {LINES_LIMIT} lines; send them in several requests");
            return Err(Refusal::invalid("", rule));
        }
        if lines(body).next().is_none() {
            let rule = "the request is empty: send one submission a line, as JSON";
            return Err(Refusal::invalid("", rule));
        }
        let reading = self.effects.reader.read(body.clone(), self.core_within());
        let mut read = reading.await?;
        let (good, bad) = (&read.good, &mut read.bad);
        let existing = self.look_up(&tenant, good, bad).await?;
        let allowance = self.allowance(&tenant).await;
        self.effects.vet_lines(&allowance, good, bad, false).await?;
        if atomic {
            vetting::all_or_nothing(good.iter().map(|vetted| vetted.line), bad);
        }
        let mut reply = SubmitReply::default();
        let mut new = Vec::new();
        for vetted in good {
            if bad.contains_key(&vetted.line) {
                continue;
            }
            match there_already(&tenant, vetted, &existing) {
                Some(accepted) => reply.accepted.push(accepted),
                None => new.push(vetted),
            }
        }
        let bad = std::mem::take(bad);
        self.refuse(tenant_text, body, bad, &mut reply).await;
        if !new.is_empty() {
            // A broker with a full disk may acknowledge a message that it cannot keep.
            self.effects.upkeep.stores().map_err(Refusal::Broker)?;
            reply.note = self.newcomer(&tenant).await;
            self.publish(&tenant, body, &new, atomic, &mut reply)
                .await?;
        }
        reply.accepted.sort_by_key(|a| a.line);
        Ok(reply)
    }

    /// How many executions the tenant may add. Unlimited if the core cannot answer now: it checks
    /// each line again before its ledger begins.
    async fn allowance(&self, tenant: &Tenant) -> Allowance {
        let asked = self.ask(|reply| Ask::Allowance(tenant.clone(), reply));
        asked.await.unwrap_or_else(|_| Allowance {
            tenant: tenant.clone(),
            limit: u32::MAX,
            is_quota: false,
            waiting: 0,
            begun: BTreeSet::new(),
        })
    }

    async fn refuse(&self, tenant: &str, body: &[u8], bad: Verdict, reply: &mut SubmitReply) {
        if bad.is_empty() {
            return;
        }
        let mut refused = Vec::new();
        for (line, text) in lines(body) {
            if let Some(error) = bad.get(&line).cloned() {
                let error = LineError::of(line, error);
                refused.push((error.clone(), excerpt(text)));
                reply.errors.push(error);
            }
        }
        let rejected = Rejected {
            tenant: tenant.to_owned(),
            lines: refused,
        };
        match self.room().await {
            Ok(room) => room.send(Outcome::Ask(Ask::Rejected(Box::new(rejected)))),
            // The asker gets the errors in any case.
            Err(error) => tracing::warn!(tenant, %error, "refused lines are not in the history"),
        }
    }

    /// Finds lines whose client's id exists already, in a ledger or earlier in the same body.
    /// Refuses a line whose id belongs to another submission.
    async fn look_up(
        &self,
        tenant: &Tenant,
        good: &[Vetted],
        bad: &mut Verdict,
    ) -> Answered<HashMap<ExecutionId, (There, u32)>> {
        let all = good.iter().flat_map(|v| &v.elements);
        let ids = all.filter_map(|e| Some(ExecutionId::from_client(tenant, e.id.as_ref()?)));
        let there = self.effects.submissions_of(tenant, ids).await?;
        let known = there.into_iter().map(|(id, there)| (id, (there, 0)));
        let mut known: HashMap<_, _> = known.collect();
        for vetted in good {
            for element in &vetted.elements {
                let Some(client) = &element.id else { continue };
                let id = ExecutionId::from_client(tenant, client);
                let digest = element.digest;
                let new = There::long_ago(digest);
                let there = known.entry(id).or_insert((new, vetted.line)).0.submission;
                if there != digest {
                    let error = FieldError::new("id", taken(id, &there.short()));
                    bad.entry(vetted.line).or_insert(error);
                }
            }
        }
        Ok(known)
    }

    async fn publish(
        &self,
        tenant: &Tenant,
        text: &[u8],
        new: &[&Vetted],
        atomic: bool,
        reply: &mut SubmitReply,
    ) -> Answered<()> {
        let mut body = Vec::new();
        let mut number = 1;
        let mut rest = new.iter().peekable();
        for (line, text) in lines(text) {
            if rest.next_if(|vetted| vetted.line == line).is_none() {
                continue;
            }
            // Blank lines replace the lines that are not sent.
            while number < line {
                body.push(b'\n');
                number += 1;
            }
            body.extend_from_slice(text);
        }
        let stamp = self.effects.broker.now();
        let several = new.len() > 1 || new.iter().any(|vetted| vetted.array);
        let mut message = PublishMessage::build()
            .payload(Bytes::from(body))
            .header(STAMP_HEADER, stamp.micros().to_string().as_str());
        if atomic {
            message = message.header(ATOMIC_HEADER, "true");
        }
        let failed = |error: &dyn std::fmt::Display| {
            Refusal::Broker(format!(
                "the submission was not stored: {error}; it is safe to send it again only if \
                 every line has an id"
            ))
        };
        let js = &self.effects.broker.js;
        let stored = async {
            js.send_publish(subjects::submit(tenant), message)
                .await?
                .await
        };
        let ack = tokio::time::timeout(STORED_WITHIN, stored)
            .await
            .map_err(|error| failed(&error))?
            .map_err(BrokerError::operation("store the submission"))
            .map_err(|error| failed(&error))?;
        let batch = several.then(|| BatchId::from_submission(tenant, stamp, ack.sequence));
        let mut batches = Vec::new();
        for vetted in new {
            let mut ids = Vec::with_capacity(vetted.elements.len());
            for (index, element) in (0..).zip(&vetted.elements) {
                let place = (ack.sequence, vetted.line, vetted.array.then_some(index));
                let client = (element.id.as_ref(), vetted.batch.as_ref());
                let (id, place) = name(tenant, stamp, place, batch, client);
                batches.extend(place.map(|p| p.id));
                ids.push(id);
            }
            reply.accepted.extend(accepted(vetted, ids, false));
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

/// The answer to a line whose submissions all exist already.
fn there_already(
    tenant: &Tenant,
    vetted: &Vetted,
    known: &HashMap<ExecutionId, (There, u32)>,
) -> Option<Accepted> {
    let mut ids = Vec::with_capacity(vetted.elements.len());
    let mut phase = None;
    for element in &vetted.elements {
        let id = ExecutionId::from_client(tenant, element.id.as_ref()?);
        // This very line was the first to name it, so it does not exist yet.
        let (there, line) = known.get(&id)?;
        if *line == vetted.line {
            return None;
        }
        phase = there.phase;
        ids.push(id);
    }
    let accepted = accepted(vetted, ids, true)?;
    Some(Accepted {
        phase: phase.filter(|_| !vetted.array),
        ..accepted
    })
}

fn accepted(vetted: &Vetted, ids: Vec<ExecutionId>, existing: bool) -> Option<Accepted> {
    let only = vetted.elements.first().filter(|_| !vetted.array);
    Some(Accepted {
        line: vetted.line,
        id: *ids.first()?,
        client_id: only.and_then(|element| element.id.clone()),
        existing,
        phase: None,
        count: u32::try_from(ids.len()).ok().filter(|_| vetted.array),
        elements: if vetted.array && ids.len() <= LISTED_LIMIT {
            ids
        } else {
            Vec::new()
        },
    })
}
