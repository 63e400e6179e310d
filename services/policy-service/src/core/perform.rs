//! Performs the policy's actions, records facts, and answers questions.

use async_nats::jetstream::message::PublishMessage;
use fiec_policy::{Action, ControlOutcome, Input};
use fiec_schemas::messages::{ControlRequest, NodeEventKind, Record, VIEW_PAGE, ViewReply};
use fiec_schemas::trust::Proof;
use fiec_schemas::{Event, LineError, subjects};

use super::Core;
use crate::effects::{order_outcome, panicked};
use crate::events::{Ask, Outcome};

impl Core {
    /// Performs the policy's actions.
    pub(super) async fn perform(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Append {
                    execution,
                    tenant,
                    expected,
                    events,
                    ticket,
                } => {
                    for event in &events {
                        if let Event::Bound { cause, .. } = event {
                            self.metrics.bound(cause.as_str());
                        }
                    }
                    let known = self.appends.begin(execution, expected);
                    let effects = self.effects.clone();
                    let append = effects.append(tenant, execution, expected, events, ticket, known);
                    self.effects
                        .running
                        .run(panicked(execution, ticket), append);
                }
                Action::Keep {
                    execution,
                    tenant,
                    expected,
                } => {
                    self.appends.begin_read(execution);
                    let keep = self.effects.clone().keep(tenant, execution, expected);
                    self.effects.running.run(panicked(execution, None), keep);
                }
                Action::SendCapsule {
                    execution,
                    tenant,
                    seq,
                } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().capsule(tenant, execution, seq));
                }
                Action::Control {
                    node,
                    request,
                    ticket,
                } => {
                    if let ControlRequest::Yield {
                        execution,
                        epoch,
                        cause,
                        to,
                        ..
                    } = &request
                    {
                        self.metrics.yield_orders.inc();
                        let to = to.as_ref().map_or("", |to| to.node.as_str());
                        tracing::info!(%execution, epoch, %node, to, cause = cause.as_str(), "ordering it to yield");
                    }
                    let timeout = self.options.control_timeout;
                    if matches!(request, ControlRequest::Verify { .. }) {
                        let effects = self.effects.clone();
                        self.effects
                            .running
                            .run(None, effects.ask_to_verify(node, request, timeout));
                        continue;
                    }
                    let owed = order_outcome(&request, ControlOutcome::NoAnswer, ticket);
                    let order = self.effects.clone().order(node, request, ticket, timeout);
                    self.effects.running.run(owed, order);
                }
                Action::Probe { node } => {
                    self.metrics.probes.inc();
                    self.effects.running.run(
                        None,
                        self.effects.clone().probe(node, self.options.probe_timeout),
                    );
                }
                Action::Forget { node, instance } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().forget(node, instance));
                }
                Action::AskHoldings { node } => {
                    let timeout = self.options.control_timeout;
                    self.effects
                        .running
                        .run(None, self.effects.clone().ask_for_holdings(node, timeout));
                }
                Action::FetchSpec {
                    execution, tenant, ..
                } => self.specs.want(execution, tenant),
                Action::Quarantine {
                    node,
                    contract,
                    substrate,
                    reason,
                } => {
                    let effects = self.effects.clone();
                    self.effects.running.run(
                        None,
                        effects.quarantine(node, (contract, substrate), reason),
                    );
                }
                Action::StepBack {
                    execution,
                    tenant,
                    culprit,
                    to: good,
                    cause,
                } => {
                    self.appends.begin_read(execution);
                    let effects = self.effects.clone();
                    let back = effects.step_back(tenant, execution, culprit, good, cause);
                    self.effects.running.run(panicked(execution, None), back);
                }
                Action::Lookup { execution, tenant } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().look_at_end(tenant, execution));
                }
                Action::FindMembers { tenant, sought } => {
                    let owed = Outcome::Members(tenant.clone(), Vec::new());
                    let find = self.effects.clone().find_members(tenant, sought);
                    self.effects.running.run(owed, find);
                }
                Action::MakePart {
                    part,
                    holder,
                    tenant,
                } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().make_part(tenant, holder, part));
                }
                Action::Reserve {
                    tenant,
                    quota,
                    change,
                } => {
                    let owed = Outcome::Reserved(tenant.clone(), None);
                    let reserve = self.effects.clone().reserve(tenant, quota, change);
                    self.effects.running.run(owed, reserve);
                }
                Action::Recall { execution, tenant } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().recall(execution, tenant));
                }
                Action::Verified {
                    execution,
                    up_to,
                    drop,
                } => {
                    self.effects.running.run(
                        None,
                        self.effects.clone().keep_verified(execution, up_to, drop),
                    );
                }
                Action::DropKept { execution, digest } => {
                    self.effects
                        .running
                        .run(None, self.effects.clone().drop_kept(execution, digest));
                }
                Action::Record { record } => self.record(&record, None).await,
                Action::Refuse { ticket, refusal } => {
                    if let Some((answer, _)) = self.appends.answer(Some(ticket)) {
                        let _ = answer.send(Err(refusal.into()));
                    }
                }
            }
        }
    }

    /// Records that a line was refused. Its message is acknowledged after that.
    pub(super) fn reject(
        &mut self,
        message: Option<u64>,
        tenant: String,
        error: LineError,
        excerpt: String,
    ) {
        self.metrics.rejected.inc();
        tracing::info!(tenant, %error, "a submission line was refused");
        let record = Record::Rejection {
            tenant,
            seq: message,
            error,
            excerpt,
            at: self.effects.broker.now(),
        };
        let effects = self.effects.clone();
        let lost = |message| Outcome::Recorded(message, Err("recording panicked".to_owned()));
        let owed = message.map(lost);
        self.effects.running.run(owed, async move {
            effects.record_rejection(record, message).await
        });
    }

    pub(super) async fn record(&mut self, record: &Record, id: Option<String>) {
        // A second or restarted service reports some facts again. The message id removes the
        // copies.
        let (subject, own_id) = match record {
            Record::Node {
                node,
                instance,
                what,
                detail,
                ..
            } => {
                tracing::info!(%node, %what, detail, "node");
                let id = match (what, instance) {
                    (NodeEventKind::Joined, Some(instance)) => {
                        Some(format!("joined/{node}/{instance}"))
                    }
                    _ => None,
                };
                (subjects::node_record(node), id)
            }
            Record::Proof { proof, refused, .. } => {
                let stated = serde_json::from_str::<Proof>(&proof.statement);
                let Ok(Proof { node, .. }) = stated else {
                    return;
                };
                let refused = refused.as_deref().unwrap_or_default();
                tracing::info!(%node, refused, "proof");
                let id = format!("proof/{node}/{}/{}", proof.sig, refused.len());
                (subjects::node_record(&node), Some(id))
            }
            Record::Verification {
                execution,
                node,
                by,
                outcome,
                detail,
                ..
            } => {
                tracing::info!(%execution, %outcome, detail, "verification");
                let Some(node) = node.as_ref().or(by.first()) else {
                    return;
                };
                (subjects::node_record(node), None)
            }
            Record::Waiting { execution, .. } => (subjects::waiting_record(*execution), None),
            _ => return,
        };
        let id = id.or(own_id);
        let Ok(payload) = serde_json::to_vec(record) else {
            return;
        };
        let mut publish = PublishMessage::build().payload(payload.into());
        if let Some(id) = id {
            publish = publish.message_id(id);
        }
        match self
            .effects
            .broker
            .js
            .send_publish(subject.clone(), publish)
            .await
        {
            Ok(ack) => {
                let sent = self.effects.broker.sent(ack);
                // Fails only while the service ends.
                let _ = self.acks.send(sent).await;
            }
            Err(error) => tracing::warn!(%error, subject, "cannot record a fact"),
        }
    }

    pub(super) fn ask(&mut self, ask: Ask) {
        match ask {
            Ask::Why(execution, reply) => {
                let _ = reply.send(self.policy.why(self.now(), execution));
            }
            Ask::Nodes(reply) => {
                let _ = reply.send(self.policy.node_statuses(self.now()));
            }
            Ask::Lost(reply) => {
                let _ = reply.send(self.policy.lost_nodes());
            }
            Ask::Offers(reply) => {
                let _ = reply.send(self.policy.offers(self.now()));
            }
            Ask::View(after, reply) => {
                let (executions, more) = self.policy.beliefs(after, VIEW_PAGE);
                let _ = reply.send(ViewReply {
                    executions,
                    more,
                    ..ViewReply::default()
                });
            }
            Ask::Progress(execution, reply) => {
                let arriving = self.policy.arriving(execution);
                let _ = reply.send((self.policy.progress(execution), arriving));
            }
            Ask::Yield {
                execution,
                to,
                who,
                reply,
            } => {
                let promise = match &to {
                    Some(to) => format!("it moves to {to} at its next boundary"),
                    None => "it moves to another node at its next boundary".to_owned(),
                };
                let ticket = self.appends.await_answer(reply, promise);
                self.step(Input::Yield {
                    ticket,
                    execution,
                    to,
                    who,
                });
            }
            Ask::Foresee(execution, change, reply) => {
                let _ = reply.send(self.policy.foresee(self.now(), execution, &change));
            }
            Ask::Allowance(tenant, reply) => {
                let _ = reply.send(self.allowance(&tenant));
            }
            Ask::Rejected(rejected) => {
                for (error, excerpt) in rejected.lines {
                    self.reject(None, rejected.tenant.clone(), error, excerpt);
                }
            }
        }
    }
}
