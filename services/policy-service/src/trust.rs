//! Performs the policy's decisions on trust. It changes the quarantine of a node in `FIEC_NODES`,
//! and takes an execution back to a boundary that is known to be good.

use std::sync::Arc;

use async_nats::jetstream::kv;
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::{AppendError, BrokerError, Draft, Entry, feed, outbox, store};
use fiec_policy::Good;
use fiec_policy::Named;
use fiec_schemas::messages::{ControlRequest, NodeEventKind, Record};
use fiec_schemas::trust::{Quarantine, Quarantined, Released, Verdict, VerifiedUpTo};
use fiec_schemas::{
    Cause, Contract, Digest, Event, ExecutionId, ExecutionState, Fault, InstanceId, NodeId, Phase,
    StatePlace, Tenant, TransitionError, subjects,
};

use crate::effects::Effects;
use crate::events::{AppendEnd, Outcome};

/// Attempts to change a key that other services change too.
const ATTEMPTS: usize = 16;
/// Time limit for reading a note. After it, the policy asks again.
const WITHIN: std::time::Duration = std::time::Duration::from_secs(5);

impl Effects {
    /// Takes a contract from a node or from one of its devices, once. The service that does it also
    /// records it.
    pub async fn quarantine(
        self,
        node: NodeId,
        (contract, substrate): (Contract, Option<String>),
        reason: String,
    ) {
        let (who, at) = (self.author.clone(), self.broker.now());
        let entry = Quarantined {
            contract,
            substrate: substrate.clone(),
            reason: reason.clone(),
            who,
            at,
        };
        let changed = self.change_quarantine(&node, |now| {
            if now.of(contract, substrate.as_deref()).is_some() {
                return false;
            }
            now.entries.push(entry.clone());
            true
        });
        match changed.await {
            Ok(true) => {
                tracing::error!(%node, contract = contract.as_str(), reason, "quarantined");
                let place = substrate.as_deref().map(|device| format!(" on {device}"));
                let place = place.unwrap_or_default();
                let detail = format!("{}{place}: {reason}", contract.as_str());
                let lost = Some((contract, substrate));
                self.record_node(&node, NodeEventKind::Quarantined, lost, detail, None)
                    .await;
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%node, error, "a node could not be quarantined for the others; it is here");
            }
        }
    }

    /// Ends the quarantine of a node, which then runs its canaries again. Returns the contracts it
    /// had lost.
    pub async fn release(&self, node: &NodeId, who: &str) -> Result<Vec<Contract>, String> {
        let mut lost = Vec::new();
        self.change_quarantine(node, |now| {
            lost.clear();
            for entry in &now.entries {
                if !lost.contains(&entry.contract) {
                    lost.push(entry.contract);
                }
            }
            if lost.is_empty() {
                return false;
            }
            *now = Quarantine {
                entries: Vec::new(),
                released: Some(Released {
                    who: who.to_owned(),
                    at: self.broker.now(),
                }),
            };
            true
        })
        .await?;
        if !lost.is_empty() {
            let names: Vec<_> = lost.iter().map(|c| c.as_str()).collect();
            let detail = format!("{} given back by {who}", names.join(", "));
            let who = Some(who.to_owned());
            self.record_node(node, NodeEventKind::Released, None, detail, who)
                .await;
        }
        Ok(lost)
    }

    /// Changes a node's quarantine. Returns false if `change` finds nothing to do.
    async fn change_quarantine(
        &self,
        node: &NodeId,
        mut change: impl FnMut(&mut Quarantine) -> bool,
    ) -> Result<bool, String> {
        let words =
            |error: &dyn std::fmt::Display| format!("cannot write what {node} has lost: {error}");
        let key = subjects::quarantine_key(node);
        let bucket = self
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .map_err(|error| words(&error))?;
        for _ in 0..ATTEMPTS {
            let entry = bucket.entry(&key).await.map_err(|error| words(&error))?;
            let mut now: Quarantine = match &entry {
                Some(e) if e.operation == kv::Operation::Put => {
                    serde_json::from_slice(&e.value).map_err(|error| words(&error))?
                }
                _ => Quarantine::default(),
            };
            if !change(&mut now) {
                return Ok(false);
            }
            let value = serde_json::to_vec(&now).map_err(|error| words(&error))?;
            let revision = entry.map_or(0, |e| e.revision);
            match bucket.update(&key, value.into(), revision).await {
                Ok(_) => return Ok(true),
                // Another service wrote at this moment: read again.
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(words(&error)),
            }
        }
        Err(words(&"others keep writing it"))
    }

    /// `lost`: the contract, and the device that lost it, if it is not all of the node.
    async fn record_node(
        &self,
        node: &NodeId,
        what: NodeEventKind,
        lost: Option<(Contract, Option<String>)>,
        detail: String,
        who: Option<String>,
    ) {
        let (contract, substrate) = lost.unzip();
        let record = Record::Node {
            node: node.clone(),
            instance: None,
            what,
            contract,
            substrate: substrate.flatten(),
            detail,
            who,
            at: self.broker.now(),
            descriptor: None,
        };
        let Ok(payload) = serde_json::to_vec(&record) else {
            return;
        };
        let publish = PublishMessage::build().payload(payload.into());
        let sent = self
            .broker
            .js
            .send_publish(subjects::node_record(node), publish);
        let stored = match sent.await {
            Ok(ack) => ack.await.map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = stored {
            tracing::warn!(%error, %node, %what, "cannot record a node's change");
        }
    }

    /// Asks a node to compute a part again. The result is a verdict, also if the node refuses.
    pub async fn ask_to_verify(
        self,
        node: NodeId,
        request: ControlRequest,
        timeout: std::time::Duration,
    ) {
        let ControlRequest::Verify {
            question,
            execution,
            ..
        } = &request
        else {
            return;
        };
        let (question, execution) = (*question, *execution);
        let reason = match self.control(&node, &request, timeout).await {
            Ok(_) => return,
            Err(no_reply) => no_reply.reason(),
        };
        let verdict = Verdict {
            v: 1,
            question,
            node,
            instance: InstanceId(uuid::Uuid::nil()),
            execution,
            finding: None,
            error: Some(reason),
            gone: false,
        };
        self.tell(Outcome::Verdict(Box::new(verdict))).await;
    }

    /// Reads how far an execution was verified before, and the outputs that its ledger names.
    pub async fn recall(self, execution: ExecutionId, tenant: Tenant) {
        let mut named = Named::default();
        let found = async {
            let up_to = store::get_verified(&self.broker, execution).await?;
            for item in feed::of_execution(&self.broker, &tenant, execution).await? {
                let message = item.message()?;
                named.note(&message.events, &message.state);
            }
            Ok(up_to)
        };
        let up_to = match tokio::time::timeout(WITHIN, found).await {
            Ok(found) => found.map_err(|error: BrokerError| error.to_string()),
            Err(_) => Err(format!(
                "how far it was verified before could not be read within {WITHIN:?}"
            )),
        };
        if let Ok(Some(up_to)) = &up_to {
            let good = up_to.good.index;
            tracing::info!(%execution, good, "the execution's verification continues from there");
        }
        self.tell(Outcome::Recalled(execution, up_to, named)).await;
    }

    /// Stores how far an execution is verified, and then removes the σ that was kept before. In
    /// this order, the noted σ exists whenever the service ends.
    pub async fn keep_verified(
        self,
        execution: ExecutionId,
        up_to: VerifiedUpTo,
        drop: Option<Digest>,
    ) {
        if let Err(error) = store::keep_verified(&self.broker, execution, &up_to).await {
            tracing::warn!(%execution, %error, "the progress of a verification could not be stored; another service would start further back");
            return;
        }
        if let Some(digest) = drop {
            self.drop_state(execution, digest).await;
        }
    }

    /// Removes a σ that was kept beside the ledger, and the note about it.
    pub async fn drop_kept(self, execution: ExecutionId, digest: Digest) {
        self.drop_state(execution, digest).await;
        if let Err(error) = store::drop_verified(&self.broker, execution).await {
            tracing::debug!(%execution, %error, "a note was not dropped; its bucket's age limit will");
        }
    }

    async fn drop_state(&self, execution: ExecutionId, digest: Digest) {
        if let Err(error) = store::drop_state(&self.broker, execution, digest).await {
            tracing::debug!(%execution, %error, "a kept state was not dropped; its bucket's age limit will");
        }
    }

    /// Drops the last σ of an execution that ended without a worker, and publishes the outputs that
    /// it still owes.
    pub async fn forget_state(self, state: Arc<ExecutionState>) {
        let execution = state.execution;
        self.clone().settle_outbox(Arc::clone(&state)).await;
        let Some(place) = &state.boundary else { return };
        if let Err(error) = store::drop_last(&self.broker, execution, place).await {
            tracing::debug!(%execution, %error, "a state was not dropped; its age limit will");
        }
    }

    /// Publishes the outputs that an execution still owes.
    pub async fn settle_outbox(self, state: Arc<ExecutionState>) {
        let execution = state.execution;
        if let Err(error) = outbox::settle(&self.broker, &state).await {
            tracing::warn!(%execution, %error, "the emitted messages may not be published");
        }
    }

    /// Appends that an execution continues from an earlier boundary. Its holder may commit at the
    /// same time, so a lost append is retried.
    pub async fn step_back(
        self,
        tenant: Tenant,
        execution: ExecutionId,
        culprit: Option<NodeId>,
        good: Good,
        cause: Cause,
    ) {
        let done = self.try_step_back(&tenant, execution, culprit.as_ref(), &good, &cause);
        let end = match done.await {
            Ok(end) => end,
            Err(error) => AppendEnd::Failed(error.to_string()),
        };
        self.tell(Outcome::Append(execution, None, end)).await;
    }

    async fn try_step_back(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        culprit: Option<&NodeId>,
        good: &Good,
        cause: &Cause,
    ) -> Result<AppendEnd, AppendError> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let Some(entry) = self.ledger.last(tenant, execution).await? else {
                return Ok(AppendEnd::Vanished);
            };
            let state = &entry.message.state;
            let held = state.phase.binding().map(|b| &b.node);
            let away =
                matches!(good, Good::BeforeTheCulprit) && held.is_none_or(|n| Some(n) != culprit);
            if state.phase.is_terminal() || away {
                return Ok(AppendEnd::Overtaken(Box::new(entry)));
            }
            let to = match good {
                Good::Known(place) => place.clone(),
                Good::BeforeTheCulprit => match culprit {
                    Some(node) => self.before(tenant, execution, node).await?,
                    None => None,
                },
            };
            let (to, body) = self.carried(execution, to).await;
            // A boundary ahead of the ledger is no step back: no execution gains progress here.
            let to = to.filter(|place| place.index <= state.boundary_index());
            let body = if to.is_some() { body } else { Bytes::new() };
            let (mut events, mut body) = (
                vec![Event::SteppedBack {
                    to,
                    cause: cause.clone(),
                }],
                body,
            );
            let tip = entry.clone().into();
            let draft = |events| Draft::new(&tip, events, &self.author, self.broker.now());
            let draft = match draft(events.clone()) {
                // Parts were split off after that boundary, so it cannot continue from there.
                Err(AppendError::Transition(TransitionError::Spread { rule })) => {
                    events = vec![Event::Failed {
                        reason: format!("{}; it cannot go back for that: {rule}", cause.in_words()),
                        stderr: String::new(),
                        fault: Some(Box::new(Fault::Corrupt)),
                    }];
                    body = Bytes::new();
                    draft(events.clone())?
                }
                drafted => drafted?,
            };
            match self.ledger.append(draft, body).await {
                Ok(tip) => {
                    let to = tip.state.boundary_index();
                    if tip.state.phase.is_terminal() {
                        tracing::warn!(%execution, cause = cause.in_words(), "failed, since it cannot step back");
                        // No worker holds it, so no worker deletes its state.
                        self.running
                            .run(None, self.clone().forget_state(tip.state.clone()));
                    } else {
                        tracing::warn!(%execution, to, cause = cause.in_words(), "stepped back");
                    }
                    return Ok(AppendEnd::Changed(Box::new(tip), events));
                }
                Err(AppendError::Conflict) => last = Some(entry),
                Err(error) => return Err(error),
            }
        }
        Ok(match last {
            Some(entry) => AppendEnd::Overtaken(Box::new(entry)),
            None => AppendEnd::Vanished,
        })
    }

    /// The last boundary before a node held the execution, as far as the stream still has it.
    async fn before(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        node: &NodeId,
    ) -> Result<Option<StatePlace>, BrokerError> {
        let items = feed::of_execution(&self.broker, tenant, execution).await?;
        for item in items {
            let message = item.message()?;
            let state = message.state;
            let holds = |phase: &Phase| phase.binding().is_some_and(|b| b.node == *node);
            if !holds(&state.phase) {
                continue;
            }
            // The first message that binds it to the node, from the previous holder or a policy
            // service. If the stream begins later, nothing before is known.
            let binds = message
                .events
                .iter()
                .any(|event| matches!(event, Event::Bound { node: to, .. } if to == node));
            return Ok(state.boundary.clone().filter(|_| binds));
        }
        Ok(None)
    }

    /// Returns a lasting state place, and the body that the message needs for it: σ, or the list of
    /// its chunks. Returns no place if the state is gone, so the execution starts from the
    /// beginning.
    async fn carried(
        &self,
        execution: ExecutionId,
        place: Option<StatePlace>,
    ) -> (Option<StatePlace>, Bytes) {
        let Some(place) = place else {
            return (None, Bytes::new());
        };
        // Read the whole state, so that the ledger does not refer to a missing one.
        if let Err(error) = store::get_state(&self.broker, execution, &place).await {
            tracing::warn!(%execution, boundary = place.index, %error, "a good boundary's state is gone; back to the beginning");
            return (None, Bytes::new());
        }
        let Some(seq) = place.seq else {
            return (Some(place), Bytes::new());
        };
        match self.ledger.by_sequence(seq).await {
            Ok(Entry { body, .. }) => (
                Some(StatePlace {
                    seq: Some(0),
                    ..place
                }),
                body,
            ),
            Err(_) => (None, Bytes::new()),
        }
    }
}
