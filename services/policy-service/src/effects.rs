//! Effects that the core starts and does not wait for: requests to nodes, appends to ledgers that exist, reads.
//! Most end with one [`Outcome`].

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use fiec_broker::{
    AppendError, Broker, BrokerError, Draft, Entry, Ledger, Tip, Upkeep, nodes, store,
};
use fiec_policy::{ControlOutcome, Ticket};
use fiec_schemas::ids::is_name;
use fiec_schemas::messages::{
    CapsuleBinding, ControlReply, ControlRequest, Holding, Record, Refusal,
};
use fiec_schemas::{
    Event, ExecutionId, InstanceId, NodeId, Phase, Sequence, Submission, Tenant, subjects,
};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Sender;

use crate::allowance::Allowance;
use crate::events::{AppendEnd, NoSpec, Outcome, UnderName};
use crate::history::History;
use crate::intake::{Cursor, Line};
use crate::programs::Programs;
use crate::reading::Reader;
use crate::running::Running;
use crate::vetting::Vetting;

/// Time limit for fetching a large submission.
const FETCH: Duration = Duration::from_secs(20);

/// Time limit for deleting what the broker keeps of a node.
const FORGET: Duration = Duration::from_secs(10);

/// Pause before a ledger is read after an append with an unknown result.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// Most executions that one node may hold. A longer answer is ignored.
const MOST_HELD: usize = 1_000_000;

/// Handles that effects need. Cheap to clone.
#[derive(Clone)]
pub struct Effects {
    /// The connection.
    pub broker: Broker,
    /// All ledgers.
    pub ledger: Ledger,
    /// Channel to the core.
    pub outcomes: Sender<Outcome>,
    /// `policy/<id>`.
    pub author: String,
    /// Registered programs.
    pub programs: Programs,
    /// The broker's health.
    pub upkeep: Upkeep,
    /// Executions whose ledgers have dropped out of the stream.
    pub history: History,
    /// Limits the number of readers of the queue of submissions.
    pub looking: Arc<Semaphore>,
    /// Limits the number of readers of all ledgers of a tenant.
    pub scanning: Arc<Semaphore>,
    /// Reads messages that are checked as a whole.
    pub reader: Reader,
    /// The effects that run.
    pub running: Running,
}

/// Why a node's answer is missing or negative.
pub enum NoReply {
    /// The node refused.
    Refused(String),
    /// The node does not hold the execution.
    NotHeld(String),
    /// The execution is about to start on the node, or to leave it.
    Moving(String),
    /// The node did not answer.
    Silent(String),
}

impl NoReply {
    /// The node's words, or why there are none.
    pub fn reason(self) -> String {
        match self {
            Self::Refused(reason)
            | Self::NotHeld(reason)
            | Self::Moving(reason)
            | Self::Silent(reason) => reason,
        }
    }
}

/// What the core is told if an append panics: its result is unknown.
pub fn panicked(execution: ExecutionId, ticket: Option<Ticket>) -> Outcome {
    let reason = "its effect panicked".to_owned();
    Outcome::Append(execution, ticket, AppendEnd::Failed(reason))
}

/// What the core is told of the answer to an order. None: the policy waits for the effect of the
/// order, not for the answer.
pub fn order_outcome(
    request: &ControlRequest,
    answer: ControlOutcome,
    ticket: Option<Ticket>,
) -> Option<Outcome> {
    let (execution, epoch) = request.runner()?;
    let epoch = epoch?;
    match request {
        ControlRequest::Split { .. } => Some(Outcome::Split(execution, epoch, answer)),
        ControlRequest::Yield { .. }
        | ControlRequest::Park { .. }
        | ControlRequest::Unpark { .. } => Some(Outcome::Ordered(execution, epoch, answer, ticket)),
        _ => None,
    }
}

impl Effects {
    pub(crate) async fn tell(&self, outcome: Outcome) {
        // Fails only while the service ends.
        let _ = self.outcomes.send(outcome).await;
    }

    /// Sends a request to a node and waits for its answer.
    ///
    /// # Errors
    /// If the node refuses or does not answer.
    pub async fn control(
        &self,
        node: &NodeId,
        request: &ControlRequest,
        timeout: Duration,
    ) -> Result<ControlReply, NoReply> {
        let payload =
            serde_json::to_vec(request).map_err(|error| NoReply::Silent(error.to_string()))?;
        let asked = self
            .broker
            .client
            .request(subjects::control(node), payload.into());
        let message = match tokio::time::timeout(timeout, asked).await {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => return Err(NoReply::Silent(error.to_string())),
            Err(_) => {
                return Err(NoReply::Silent(format!(
                    "no answer within {} ms",
                    timeout.as_millis()
                )));
            }
        };
        let reply: ControlReply = serde_json::from_slice(&message.payload)
            .map_err(|error| NoReply::Refused(format!("its answer cannot be read: {error}")))?;
        match (&reply.error, reply.refusal) {
            (Some(error), Some(Refusal::NotHeld)) => Err(NoReply::NotHeld(error.clone())),
            (Some(error), Some(Refusal::Moving)) => Err(NoReply::Moving(error.clone())),
            (Some(error), None) => Err(NoReply::Refused(error.clone())),
            (None, _) => Ok(reply),
        }
    }

    /// Sends a request to a node that does not answer now. It reads it when it runs again; if its
    /// connection breaks, it reads its ledgers instead.
    pub async fn leave_word(&self, node: &NodeId, request: &ControlRequest) {
        let told = match serde_json::to_vec(request) {
            Ok(payload) => {
                let subject = subjects::control(node);
                let told = self.broker.client.publish(subject, payload.into()).await;
                told.map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = told {
            tracing::debug!(%node, error, "a silent node was not notified");
        }
    }

    /// Sends an order to a node and reports the result.
    pub async fn order(
        self,
        node: NodeId,
        request: ControlRequest,
        ticket: Option<Ticket>,
        timeout: Duration,
    ) {
        let answer = self.control(&node, &request, timeout).await;
        let Some((execution, Some(epoch))) = request.runner() else {
            return;
        };
        let outcome = match answer {
            Ok(_) => ControlOutcome::Taken,
            Err(NoReply::Refused(reason)) => ControlOutcome::Refused(reason),
            Err(NoReply::Moving(reason)) => ControlOutcome::Moving(reason),
            Err(NoReply::NotHeld(_)) => ControlOutcome::NotHeld,
            Err(NoReply::Silent(reason)) => {
                tracing::warn!(%execution, epoch, %node, reason, "no answer to an order");
                ControlOutcome::NoAnswer
            }
        };
        if let Some(outcome) = order_outcome(&request, outcome, ticket) {
            self.tell(outcome).await;
        }
    }

    /// Pings a node. Every answer shows that it is alive.
    pub async fn probe(self, node: NodeId, timeout: Duration) {
        let outcome = match self.control(&node, &ControlRequest::Ping, timeout).await {
            Ok(reply) => Some(reply.instance),
            Err(no_reply) => {
                let reason = no_reply.reason();
                tracing::info!(%node, reason, "a probe was not answered");
                None
            }
        };
        self.tell(Outcome::Probed(node, outcome)).await;
    }

    /// Deletes what the broker keeps of a node. If that fails, the policy asks again later.
    pub async fn forget(self, node: NodeId, instance: Option<InstanceId>) {
        let forgotten = tokio::time::timeout(FORGET, nodes::forget(&self.broker, &node, instance));
        match forgotten.await {
            Ok(Ok(true)) => {
                tracing::info!(%node, "the node was removed: it was silent for long and holds nothing");
                self.tell(Outcome::Forgotten(node, instance)).await;
            }
            Ok(Ok(false)) => tracing::info!(%node, "the node was not removed: it has joined again"),
            Ok(Err(error)) => tracing::warn!(%node, %error, "a node was not forgotten"),
            Err(_) => tracing::warn!(%node, "a node was not forgotten: the broker does not answer"),
        }
    }

    /// Asks a node for all executions that it holds, page by page. If the node does not answer, the
    /// policy asks again later.
    pub async fn ask_for_holdings(self, node: NodeId, timeout: Duration) {
        let (mut held, mut instance) = (Vec::new(), None);
        loop {
            let after = held.last().map(|holding: &Holding| holding.execution);
            let request = ControlRequest::Holdings { after };
            let Ok(reply) = self.control(&node, &request, timeout).await else {
                return;
            };
            let page = reply.holdings.unwrap_or_default();
            let same_life = *instance.get_or_insert(reply.instance) == reply.instance;
            if !same_life || held.len() >= MOST_HELD || (page.more && page.held.is_empty()) {
                tracing::warn!(%node, "the node's list of its executions cannot be used");
                return;
            }
            held.extend(page.held);
            if !page.more {
                break;
            }
        }
        held.sort_unstable_by_key(|holding| holding.execution);
        if let Some(instance) = instance {
            self.tell(Outcome::Held(node, instance, held)).await;
        }
    }

    /// Appends to a ledger that exists.
    pub async fn append(
        self,
        tenant: Tenant,
        execution: ExecutionId,
        expected: Sequence,
        events: Vec<Event>,
        ticket: Option<Ticket>,
        known: Option<Box<Tip>>,
    ) {
        let end = match self
            .append_at(&tenant, execution, expected, events, known)
            .await
        {
            Ok(end) => end,
            Err(error) => AppendEnd::Failed(error.to_string()),
        };
        self.tell(Outcome::Append(execution, ticket, end)).await;
    }

    async fn append_at(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        expected: Sequence,
        events: Vec<Event>,
        known: Option<Box<Tip>>,
    ) -> Result<AppendEnd, AppendError> {
        let tip = match known {
            Some(tip) => *tip,
            None => match self.ledger.last_from(tenant, execution, expected).await? {
                Some(last) if last.seq == expected => last.into(),
                Some(last) => return Ok(AppendEnd::Overtaken(Box::new(last))),
                None => return Ok(AppendEnd::Vanished),
            },
        };
        let draft = Draft::new(&tip, events, &self.author, self.broker.now())?;
        match self.ledger.append(draft, bytes::Bytes::new()).await {
            Ok(tip) => Ok(AppendEnd::Stored(Box::new(tip))),
            Err(AppendError::Conflict) => {
                let from = expected.saturating_add(1);
                Ok(
                    match self.ledger.last_from(tenant, execution, from).await? {
                        Some(last) => AppendEnd::Overtaken(Box::new(last)),
                        None => AppendEnd::Vanished,
                    },
                )
            }
            Err(error) => Err(error),
        }
    }

    /// Appends the state of a ledger again, with σ.
    pub async fn keep(self, tenant: Tenant, execution: ExecutionId, expected: Sequence) {
        let kept = self.keep_at(&tenant, execution, expected).await;
        let end = kept.unwrap_or_else(|error| AppendEnd::Failed(error.to_string()));
        self.tell(Outcome::Append(execution, None, end)).await;
    }

    async fn keep_at(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        expected: Sequence,
    ) -> Result<AppendEnd, AppendError> {
        let last = match self.ledger.last(tenant, execution).await? {
            Some(last) if last.seq == expected => last,
            Some(last) => return Ok(AppendEnd::Overtaken(Box::new(last))),
            None => return Ok(AppendEnd::Vanished),
        };
        let draft = Draft::keeping(&last.into(), &self.author, self.broker.now())?;
        match self.ledger.append(draft, bytes::Bytes::new()).await {
            Ok(tip) => Ok(AppendEnd::Changed(Box::new(tip), Vec::new())),
            Err(AppendError::Conflict) => Ok(match self.ledger.last(tenant, execution).await? {
                Some(last) => AppendEnd::Overtaken(Box::new(last)),
                None => AppendEnd::Vanished,
            }),
            Err(error) => Err(error),
        }
    }

    /// Appends an event if the execution waits for a node. Otherwise another author decides.
    pub async fn append_while_pending(self, tenant: Tenant, execution: ExecutionId, event: Event) {
        let last = self.ledger.last(&tenant, execution).await;
        let appended = match last {
            Ok(Some(last)) if matches!(last.message.state.phase, Phase::Pending { .. }) => {
                let (seq, tip) = (last.seq, Box::new(Tip::from(last)));
                let events = vec![event];
                self.append_at(&tenant, execution, seq, events, Some(tip))
                    .await
            }
            Ok(Some(last)) => Ok(AppendEnd::Overtaken(Box::new(last))),
            Ok(None) => Ok(AppendEnd::Vanished),
            Err(error) => Err(error.into()),
        };
        let end = appended.unwrap_or_else(|error| AppendEnd::Failed(error.to_string()));
        self.tell(Outcome::Append(execution, None, end)).await;
    }

    /// Reads the ledger that a first append met. The ledger may be empty for a moment, if an append
    /// of this service is still in flight.
    pub async fn existing(self, line: Box<Line>) {
        let mut found = Ok(None);
        for _ in 0..20 {
            found = self
                .ledger
                .last(&line.tip.state.tenant, line.execution())
                .await
                .map(|entry| entry.map(Box::new))
                .map_err(|error| error.to_string());
            if !matches!(found, Ok(None)) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        self.tell(Outcome::Existing(line, found)).await;
    }

    /// Looks up what there is under the client's id of a line.
    pub async fn look_up_name(self, line: Box<Line>) {
        let there = self.ledger.last(&line.tip.state.tenant, line.execution());
        let found = match there.await {
            Ok(Some(entry)) => UnderName::Ledger(Box::new(entry)),
            Ok(None) => {
                let ended = self.history.ended(line.execution()).await;
                ended.map_or(UnderName::Nothing, UnderName::Ended)
            }
            // The first append meets the broker's trouble.
            Err(_) => UnderName::Unknown,
        };
        self.tell(Outcome::Name(line, found)).await;
    }

    /// Looks up the program of a line if the table of programs does not have it.
    pub async fn look_up(self, line: Box<Line>) {
        let found = self.programs.look_up(&line.spec.program).await;
        self.tell(Outcome::Program(line, found.map_err(|e| e.to_string())))
            .await;
    }

    /// Checks a message as a whole.
    pub async fn vet_message(self, cursor: Box<Cursor>, allowance: Option<Allowance>) {
        let verdict = match allowance {
            Some(allowance) => {
                let place = (cursor.stamp, cursor.seq);
                self.vet(
                    allowance,
                    place,
                    cursor.body.clone(),
                    cursor.atomic,
                    cursor.again,
                )
                .await
            }
            None => Ok(Vetting::default()),
        };
        self.tell(Outcome::Vetted(cursor, verdict)).await;
    }

    /// Stores a submission that is too large for its ledger message.
    pub async fn store_large(self, line: Box<Line>) {
        let json = line.spec.to_json();
        let digest = fiec_schemas::Digest::of(&json);
        let stored = store::put_data(&self.broker, digest, &json)
            .await
            .map_err(|e| e.to_string());
        self.tell(Outcome::Large(line, stored)).await;
    }

    /// Reads a large submission, once.
    pub async fn fetch_spec(self, tenant: Tenant, execution: ExecutionId) {
        let read = tokio::time::timeout(FETCH, self.read_spec(&tenant, execution)).await;
        let found = match read {
            Ok(Ok(spec)) => Ok(spec.map(Arc::new)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(NoSpec::Unknown(format!(
                "the object store did not answer within {FETCH:?}"
            ))),
        };
        self.tell(Outcome::Spec(execution, found)).await;
    }

    async fn read_spec(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
    ) -> Result<Option<Submission>, NoSpec> {
        let unknown = |error: BrokerError| NoSpec::Unknown(error.to_string());
        let Some(last) = self.ledger.last(tenant, execution).await.map_err(unknown)? else {
            return Ok(None);
        };
        if last.message.state.phase.is_terminal() {
            return Ok(None);
        }
        let digest = last.message.state.submission;
        let json = match store::get_data(&self.broker, digest, 0).await {
            Ok(json) => json,
            Err(error @ BrokerError::Digest { .. }) => return Err(NoSpec::Lost(error.to_string())),
            // Ask the store whether the data is lost or only slow.
            Err(error) => match store::data_size(&self.broker, digest).await {
                Ok(None) => return Err(NoSpec::Lost(error.to_string())),
                Ok(Some(_)) | Err(_) => return Err(unknown(error)),
            },
        };
        let spec = serde_json::from_slice(&json);
        spec.map(Some)
            .map_err(|error| NoSpec::Lost(error.to_string()))
    }

    /// Reads a ledger whose last known message is `known`, after an append with an unknown result.
    /// Retries until the read succeeds.
    pub async fn reread(self, tenant: Tenant, execution: ExecutionId, known: Sequence) {
        loop {
            tokio::time::sleep(READ_AGAIN).await;
            let read = self.ledger.last_from(&tenant, execution, known);
            let end = match read.await {
                Ok(Some(last)) => AppendEnd::Overtaken(Box::new(last)),
                Ok(None) => AppendEnd::Vanished,
                Err(error) => {
                    tracing::warn!(%execution, %error, "a ledger cannot be read yet");
                    continue;
                }
            };
            self.tell(Outcome::Append(execution, None, end)).await;
            return;
        }
    }

    /// Publishes that a line was refused, and reports whether the record is stored.
    pub async fn record_rejection(&self, record: Record, message: Option<Sequence>) {
        let Record::Rejection {
            tenant, seq, error, ..
        } = &record
        else {
            return;
        };
        // An invalid tenant cannot be part of a subject.
        let token = if is_name(tenant) {
            tenant.as_str()
        } else {
            "_"
        };
        let Ok(payload) = serde_json::to_vec(&record) else {
            return;
        };
        let mut publish = PublishMessage::build().payload(payload.into());
        if let Some(seq) = seq {
            publish = publish.message_id(format!("rejection/{seq}/{}", error.line));
        }
        let stored = match self
            .broker
            .js
            .send_publish(subjects::rejection(token), publish)
            .await
        {
            Ok(ack) => ack.await.map(|_| ()),
            Err(error) => Err(error),
        };
        if let Err(error) = &stored {
            tracing::warn!(%error, "a rejection could not be recorded");
        }
        if let Some(message) = message {
            let recorded =
                stored.map_err(|error| format!("a rejection could not be recorded: {error}"));
            self.tell(Outcome::Recorded(message, recorded)).await;
        }
    }

    /// Reads a binding whose capsule message must be sent again.
    pub async fn capsule(self, tenant: Tenant, execution: ExecutionId, seq: Sequence) {
        match self.ledger.last(&tenant, execution).await {
            Ok(Some(Entry {
                seq: last,
                digest,
                message,
                ..
            })) if last == seq && matches!(message.state.phase, Phase::Bound(_)) => {
                let binding = CapsuleBinding {
                    seq,
                    digest,
                    state: message.state,
                };
                self.tell(Outcome::Capsule(Box::new(binding))).await;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%execution, %error, "cannot read a binding to send it again")
            }
        }
    }
}
