//! Requests about one execution. [`super::changes`] makes those that change its ledger.

use std::collections::BTreeSet;
use std::time::Duration;

use fiec_broker::Entry;
use fiec_schemas::dependency::Target;
use fiec_schemas::messages::{ApiReply, ControlRequest, ExecutionRequest, ExecutionVerb, Why};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    Binding, ClientId, Event, ExecutionId, FieldError, Phase, Started, Tenant, author, duty,
};
use tokio::time::Instant;

use super::changes::{Asked, Change, MOVE};
use super::{Answered, Api, ended, parse, somebody, tenant};
use crate::effects::NoReply;
use crate::events::Ask;
use crate::refusal::Refusal;

/// Extra time for a ledger to appear after its submission was accepted, beyond the time that a node
/// has to append it.
const NEWBORN: Duration = Duration::from_millis(300);
/// Longest wait for a queued submission to be taken in.
const QUEUED: Duration = Duration::from_secs(5);
/// Longest wait for a node before the asker gets an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks what is to change of an execution.
fn check(change: &Adjustment) -> Result<(), FieldError> {
    change.check().map_err(|error| {
        let field = format!("change.{}", error.field);
        FieldError::new(field, error.reason)
    })
}

/// Checks a grant for a running execution. Only its node knows whether the resources are free.
fn check_grant(grant: &Grant) -> Result<(), FieldError> {
    if *grant == Grant::default() {
        let rule = "names no change; threads, memory_bytes and cpus can be changed";
        return Err(FieldError::new("grant", rule));
    }
    let fixed = [
        ("substrate", grant.substrate.is_some()),
        ("device", grant.device.is_some()),
    ];
    if let Some((field, _)) = fixed.into_iter().find(|(_, named)| *named) {
        let rule = "cannot change while it runs; `fiec yield` moves it to another place";
        return Err(FieldError::new(format!("grant.{field}"), rule));
    }
    Ok(())
}

impl Api {
    /// Answers a request about one execution.
    pub(super) async fn execution(
        &self,
        verb: ExecutionVerb,
        tenant_text: &str,
        payload: &[u8],
    ) -> Answered<ApiReply> {
        let tenant = tenant(tenant_text)?;
        let request: ExecutionRequest = parse(payload)?;
        let who = somebody(&request.who);
        let entry = self.find(&tenant, &request.id).await?;
        let id = entry.message.state.execution;
        let change = match verb {
            ExecutionVerb::Status => return Ok(self.status(entry).await),
            ExecutionVerb::Why => return self.why(entry, &request.id).await,
            ExecutionVerb::Yield => {
                let to = request.to;
                let said = self
                    .ask(|reply| Ask::Yield {
                        execution: id,
                        to,
                        who,
                        reply,
                    })
                    .await?;
                return Ok(ApiReply {
                    message: said?,
                    ..ApiReply::default()
                });
            }
            ExecutionVerb::Reconfigure => {
                let grant = request.grant.unwrap_or_default();
                return self
                    .reconfigure(&tenant, entry, &request.id, (grant, who))
                    .await;
            }
            ExecutionVerb::Adjust => Change::Adjust(request.change.unwrap_or_default()),
            ExecutionVerb::Cancel => Change::Cancel,
            ExecutionVerb::Pause => Change::Pause,
            ExecutionVerb::Resume => Change::Resume,
            ExecutionVerb::Retry => Change::Retry {
                from: request.from_boundary,
                with: request.change,
            },
        };
        let foreseen = match &change {
            Change::Adjust(adjustment) => Some(self.foresee(id, adjustment).await?),
            _ => None,
        };
        let sight = self.sight().await;
        let asked = Asked {
            change: &change,
            tenant: &tenant,
            who: &who,
            sight: &sight,
            name: Some(&request.id),
        };
        if let Change::Retry { with, .. } = &change {
            with.as_ref().map_or(Ok(()), check)?;
            return self.retry(asked, entry).await;
        }
        let mut changed = self.change(asked, entry).await?;
        if let (Some(words), Ok(reply)) = (foreseen, &mut changed.own) {
            reply.message = format!("{} is changed{words}", request.id);
        }
        Ok(changed.into_reply())
    }

    /// The last message of the execution with this UUID or client's id.
    async fn find(&self, tenant: &Tenant, id: &str) -> Answered<Entry> {
        let uuid = id.parse::<ExecutionId>().ok();
        let client = id
            .parse::<ClientId>()
            .ok()
            .map(|c| ExecutionId::from_client(tenant, &c));
        if uuid.is_none() && client.is_none() {
            let rule = format!("{id:?} is neither a UUID nor a client's id");
            return Err(Refusal::invalid("id", rule));
        }
        let ids: Vec<_> = [uuid, client].into_iter().flatten().collect();
        let mut deadline = Instant::now() + self.options.entrust.min(PATIENCE) + NEWBORN;
        let mut is_queued = false;
        loop {
            if let Some(entry) = self.first_of(tenant, &ids).await? {
                return Ok(entry);
            }
            if Instant::now() > deadline {
                let id = id.to_owned();
                if is_queued {
                    return Err(Refusal::Queued { id });
                }
                if !self.is_queued(tenant, &ids).await? {
                    // A submission leaves the queue after its ledger has begun.
                    let tenant = tenant.clone();
                    let found = self.first_of(&tenant, &ids).await?;
                    return found.ok_or(Refusal::UnknownExecution { tenant, id });
                }
                is_queued = true;
                deadline = Instant::now() + QUEUED;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn first_of(&self, tenant: &Tenant, ids: &[ExecutionId]) -> Answered<Option<Entry>> {
        for execution in ids {
            if let Some(entry) = self.effects.ledger.last(tenant, *execution).await? {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// True if a queued submission will become one of these executions.
    async fn is_queued(&self, tenant: &Tenant, ids: &[ExecutionId]) -> Answered<bool> {
        let mut wanted: BTreeSet<_> = ids.iter().copied().map(Target::One).collect();
        self.effects.drop_queued(tenant, &mut wanted).await?;
        Ok(wanted.len() < ids.len())
    }

    async fn status(&self, entry: Entry) -> ApiReply {
        let id = entry.message.state.execution;
        // The ledger has the state. Progress is optional, and the core may not answer in time.
        let (progress, arriving) = self
            .ask(|reply| Ask::Progress(id, reply))
            .await
            .unwrap_or_default();
        let state = entry.message.state;
        let is_bound = matches!(state.phase, Phase::Bound(_));
        ApiReply {
            progress: progress.filter(|p| p.epoch == state.epoch),
            arriving: arriving.filter(|a| is_bound && a.epoch == state.epoch),
            state: Some(state),
            ..ApiReply::default()
        }
    }

    async fn why(&self, entry: Entry, name: &str) -> Answered<ApiReply> {
        let phase = &entry.message.state.phase;
        if phase.is_terminal() || matches!(phase, Phase::Held { .. }) {
            return Ok(ApiReply {
                why: Some(ended::why(&entry.message, name)),
                state: Some(entry.message.state),
                ..ApiReply::default()
            });
        }
        let state = entry.message.state;
        let (id, name) = (state.execution, name.to_owned());
        let why = self.ask(|reply| Ask::Why(id, reply)).await?;
        let mut why = why.ok_or(Refusal::NotReadYet { name })?;
        // Only the policy knows that a state is still arriving.
        let known = why.next.filter(|_| matches!(state.phase, Phase::Bound(_)));
        why.next = Some(known.unwrap_or_else(|| duty::of(&state, self.effects.broker.now())));
        if let Some(binding) = state.phase.binding() {
            self.tell_binding(binding, &mut why).await;
        }
        Ok(ApiReply {
            why: Some(why),
            state: Some(state),
            ..ApiReply::default()
        })
    }

    /// Adds why the execution was bound to its node, and which nodes the policy chose from. The
    /// ledger message says so while the stream still has it.
    async fn tell_binding(&self, binding: &Binding, why: &mut Why) {
        let read = self.effects.ledger.by_sequence(binding.seq);
        let found = match tokio::time::timeout(self.options.control_timeout, read).await {
            Ok(Ok(entry)) => entry.message,
            Ok(Err(_)) | Err(_) => {
                why.summary += "; why it was bound there is in PostgreSQL (`fiec history`)";
                return;
            }
        };
        let from = author::worker(&found.state.author);
        let from = from.and_then(|(node, _)| node.parse().ok());
        let moved_on = |event: &Event| matches!(event, Event::Yielded { .. });
        let handover = found.events.iter().any(moved_on);
        for event in found.events {
            if let Event::Bound {
                cause, decision, ..
            } = event
            {
                why.summary += &format!("; bound there: {}", cause.in_words());
                if let Some(place) = &mut why.place {
                    place.from = from.clone().filter(|_| handover);
                }
                (why.cause, why.decision) = (Some(cause), decision);
            }
        }
    }

    /// Effect of an adjustment, as the end of a sentence.
    async fn foresee(&self, id: ExecutionId, change: &Adjustment) -> Answered<String> {
        check(change)?;
        let told = Box::new(change.clone());
        let foreseen = self.ask(|reply| Ask::Foresee(id, told, reply)).await?;
        Ok(match foreseen {
            Ok(words) if words.is_empty() => format!(": {}", change.in_words()),
            Ok(words) => format!(": {words}"),
            Err(words) => format!(", but {words}"),
        })
    }

    /// Asks the worker to give a running program another grant. If the execution is moving, waits
    /// and asks its next worker.
    async fn reconfigure(
        &self,
        tenant: &Tenant,
        mut entry: Entry,
        name: &str,
        (grant, who): (Grant, String),
    ) -> Answered<ApiReply> {
        check_grant(&grant)?;
        let deadline = Instant::now() + MOVE;
        loop {
            let state = &entry.message.state;
            let (execution, name) = (state.execution, name.to_owned());
            let phase = state.phase.kind();
            let later = match &state.phase {
                Phase::Started(Started { binding, .. }) => {
                    let node = binding.node.clone();
                    let request = ControlRequest::Reconfigure {
                        execution,
                        epoch: state.epoch,
                        grant: grant.clone(),
                        who: who.clone(),
                    };
                    let timeout = self.options.control_timeout;
                    match self.effects.control(&node, &request, timeout).await {
                        Ok(_) => {
                            return Ok(ApiReply {
                                message: format!(
                                    "{node} will give it to {name} at its next boundary"
                                ),
                                ..ApiReply::default()
                            });
                        }
                        Err(NoReply::Refused(reason)) => {
                            return Err(Refusal::NodeRefused { node, reason });
                        }
                        Err(NoReply::NotHeld(reason) | NoReply::Moving(reason)) => {
                            Refusal::Moving { name, node, reason }
                        }
                        Err(NoReply::Silent(reason)) => Refusal::NodeSilent { name, node, reason },
                    }
                }
                Phase::Bound(_) => Refusal::BetweenNodes { name, phase },
                // It ran before, and starts again in a moment.
                Phase::Pending { .. } if state.epoch > 0 => Refusal::BetweenNodes { name, phase },
                _ => return Err(Refusal::NotRunning { name, phase }),
            };
            if Instant::now() >= deadline {
                return Err(later);
            }
            entry = self.a_moment_later(tenant, execution).await?;
        }
    }
}
