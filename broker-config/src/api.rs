//! The operator's side of the NATS micro service `fiec`: one method for each request.

use std::time::{Duration, Instant};

use async_nats::RequestErrorKind;
use bytes::Bytes;
use fiec_schemas::dependency::Dependency;
use fiec_schemas::messages::{
    ApiReply, BatchReply, BatchRequest, BatchVerb, EnvelopeChange, EnvelopeRequest,
    ExecutionRequest, ExecutionVerb, NodeRequest, NodeVerb, QuotaChange, QuotaReply, QuotaRequest,
    RefusalCode, SubmitReply,
};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{NodeId, Tenant, subjects};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Broker;

/// Why there is no answer. A refusal is in the answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No policy service answered in time.
    #[error("{0}")]
    Unreachable(String),
    /// A policy service could not answer.
    #[error("the policy service could not answer {subject}: {error}")]
    Failed {
        /// What was asked for.
        subject: String,
        /// What it says.
        error: String,
    },
    /// An answer that cannot be read, or a request that cannot be written.
    #[error("the request or the answer on {subject} is not of the expected form: {error}")]
    Form {
        /// What was asked for.
        subject: String,
        /// Why.
        error: serde_json::Error,
    },
}

/// A person or a program that asks policy services.
#[derive(Debug, Clone)]
pub struct Operator {
    broker: Broker,
    who: String,
}

/// Longest wait for a submission to be taken in. One answer takes some seconds of it.
const QUEUED: Duration = Duration::from_secs(60);

/// Longest time for which a request is made again while the service does nothing for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time for which no policy service need be there: one that has lost its broker's data ends
/// and begins again.
const ABSENCE: Duration = Duration::from_secs(3);

/// Pause before a request is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// Time limit of one answer about a batch in ms, short enough to show progress.
const BATCH_WITHIN_MS: u64 = 1_000;
/// After this many answers about a batch without progress, the request is given up.
const IN_VAIN: u32 = 20;

/// Time limit of an answer. The answer of a worker is part of it.
const DEADLINE: Duration = Duration::from_secs(10);

/// An answer that can be a refusal.
trait Reply: DeserializeOwned {
    fn refusal(&self) -> Option<RefusalCode>;
}

macro_rules! replies {
    ($($reply:ty),+) => {
        $(impl Reply for $reply {
            fn refusal(&self) -> Option<RefusalCode> {
                self.refusal
            }
        })+
    };
}

replies!(ApiReply, BatchReply, QuotaReply, SubmitReply);

async fn request<T: Reply>(broker: &Broker, subject: String, body: Bytes) -> Result<T, ApiError> {
    request_with(broker, subject, body, async_nats::HeaderMap::new()).await
}

/// Asks until a service does or refuses what is asked for, within [`PATIENCE`]: one that is starting
/// or ending, or has no room, does nothing. Where none is there, asks for [`ABSENCE`].
async fn request_with<T: Reply>(
    broker: &Broker,
    subject: String,
    body: Bytes,
    headers: async_nats::HeaderMap,
) -> Result<T, ApiError> {
    let since = Instant::now();
    loop {
        let reply = once(broker, &subject, body.clone(), headers.clone()).await?;
        let Some(reply): Option<T> = reply else {
            if since.elapsed() >= ABSENCE {
                return Err(ApiError::Unreachable(
                    "no policy service answers: start one with `fiec policy` (or everything with \
                     `fiec up`)"
                        .to_owned(),
                ));
            }
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let is_momentary = reply.refusal().is_some_and(RefusalCode::is_momentary);
        if !is_momentary || since.elapsed() >= PATIENCE {
            return Ok(reply);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Asks once. None if no policy service is there.
async fn once<T: Reply>(
    broker: &Broker,
    subject: &str,
    body: Bytes,
    headers: async_nats::HeaderMap,
) -> Result<Option<T>, ApiError> {
    let request = async_nats::Request::new()
        .payload(body)
        .headers(headers)
        .timeout(Some(DEADLINE));
    let reply = match broker
        .client
        .send_request(subject.to_owned(), request)
        .await
    {
        Ok(reply) => reply,
        Err(error) if error.kind() == RequestErrorKind::NoResponders => return Ok(None),
        Err(error) => {
            return Err(ApiError::Unreachable(format!(
                "no answer on {subject} within {DEADLINE:?}: {error}"
            )));
        }
    };
    // The body of a refusal says more than its header.
    if let Some(error) = reply
        .headers
        .as_ref()
        .and_then(|headers| headers.get(async_nats::service::NATS_SERVICE_ERROR))
        .filter(|_| reply.payload.is_empty())
    {
        return Err(ApiError::Failed {
            subject: subject.to_owned(),
            error: error.to_string(),
        });
    }
    let reply = serde_json::from_slice(&reply.payload);
    Ok(Some(reply.map_err(|error| form(subject, error))?))
}

fn form(subject: &str, error: serde_json::Error) -> ApiError {
    ApiError::Form {
        subject: subject.to_owned(),
        error,
    }
}

fn bytes<T: Serialize>(body: &T) -> Result<Bytes, ApiError> {
    let text = serde_json::to_vec(body);
    Ok(text.map_err(|error| form("the service", error))?.into())
}

impl Operator {
    /// Asks in the name of `who`, as the history will have it.
    pub fn new(broker: Broker, who: impl Into<String>) -> Self {
        Self {
            broker,
            who: who.into(),
        }
    }

    /// Sends a request about one execution.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn ask(
        &self,
        verb: ExecutionVerb,
        tenant: &Tenant,
        body: &ExecutionRequest,
    ) -> Result<ApiReply, ApiError> {
        let subject = subjects::api_execution(verb, tenant);
        let body: Bytes = bytes(body)?;
        let since = Instant::now();
        loop {
            let reply: ApiReply = request(&self.broker, subject.clone(), body.clone()).await?;
            let is_queued = reply.refusal == Some(RefusalCode::NotTakenIn);
            if !is_queued || since.elapsed() >= QUEUED {
                return Ok(reply);
            }
        }
    }

    /// Sends a request about one execution that needs only its id.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn execution(
        &self,
        verb: ExecutionVerb,
        tenant: &Tenant,
        id: &str,
        to: Option<NodeId>,
    ) -> Result<ApiReply, ApiError> {
        let body = ExecutionRequest {
            id: id.to_owned(),
            who: self.who.clone(),
            to,
            ..ExecutionRequest::default()
        };
        self.ask(verb, tenant, &body).await
    }

    /// Changes the grant of a running execution.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn reconfigure(
        &self,
        tenant: &Tenant,
        id: &str,
        grant: Grant,
    ) -> Result<ApiReply, ApiError> {
        let body = ExecutionRequest {
            id: id.to_owned(),
            who: self.who.clone(),
            grant: Some(grant),
            ..ExecutionRequest::default()
        };
        self.ask(ExecutionVerb::Reconfigure, tenant, &body).await
    }

    /// Adjusts a live execution.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn adjust(
        &self,
        tenant: &Tenant,
        id: &str,
        change: Adjustment,
    ) -> Result<ApiReply, ApiError> {
        let body = ExecutionRequest {
            id: id.to_owned(),
            who: self.who.clone(),
            change: Some(change),
            ..ExecutionRequest::default()
        };
        self.ask(ExecutionVerb::Adjust, tenant, &body).await
    }

    /// Sends a request about one node. `seconds` is the time limit of the request, for verbs that have
    /// one.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn node(
        &self,
        verb: NodeVerb,
        node: NodeId,
        seconds: Option<u32>,
    ) -> Result<ApiReply, ApiError> {
        let body = NodeRequest {
            node,
            who: self.who.clone(),
            seconds,
        };
        request(&self.broker, subjects::api_node(verb), bytes(&body)?).await
    }

    /// Reads the envelopes of a node, or changes them first.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`ApiReply::error`].
    pub async fn envelope(
        &self,
        node: NodeId,
        change: Option<EnvelopeChange>,
    ) -> Result<ApiReply, ApiError> {
        let body = EnvelopeRequest {
            node,
            who: self.who.clone(),
            change,
        };
        request(
            &self.broker,
            subjects::API_ENVELOPE.to_owned(),
            bytes(&body)?,
        )
        .await
    }

    /// Lists all nodes as a policy service sees them.
    ///
    /// # Errors
    /// If no policy service answers.
    pub async fn nodes(&self) -> Result<ApiReply, ApiError> {
        request(&self.broker, subjects::API_NODES.to_owned(), Bytes::new()).await
    }

    /// Submits lines of JSON. The answer covers every line. `atomic`: all lines are accepted, or none.
    ///
    /// # Errors
    /// If no policy service answers.
    pub async fn submit(
        &self,
        tenant: &Tenant,
        lines: Bytes,
        atomic: bool,
    ) -> Result<SubmitReply, ApiError> {
        let mut headers = async_nats::HeaderMap::new();
        if atomic {
            headers.insert(ATOMIC_HEADER, "true");
        }
        request_with(&self.broker, subjects::api_submit(tenant), lines, headers).await
    }

    /// Requests one page about a whole batch.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`BatchReply::error`].
    pub async fn batch(
        &self,
        verb: BatchVerb,
        tenant: &Tenant,
        request: &BatchRequest,
    ) -> Result<BatchReply, ApiError> {
        let subject = subjects::api_batch(verb, tenant);
        let request = BatchRequest {
            who: self.who.clone(),
            ..request.clone()
        };
        let body = bytes(&request)?;
        crate::api::request(&self.broker, subject, body).await
    }

    /// Requests page after page about a group until all is done, there is no progress, or `goes_on`
    /// says no. `goes_on` sees each answer. `failed`: for `retry`, what was cancelled stays so. Returns
    /// the last answer, with the counts of all, and true if it is complete.
    ///
    /// # Errors
    /// If no policy service answers.
    pub async fn all_of_batch(
        &self,
        verb: BatchVerb,
        tenant: &Tenant,
        of: &Dependency,
        failed: bool,
        mut goes_on: impl FnMut(&BatchReply) -> bool,
    ) -> Result<(BatchReply, bool), ApiError> {
        let (mut done, mut underway, mut in_vain) = (0, 0, 0);
        let (mut oldest, mut untaken, mut cursor) = (None, None, None);
        loop {
            let request = BatchRequest {
                batch: of.batch.clone(),
                array: of.array.clone(),
                ids: of.id.clone(),
                who: String::new(),
                within_ms: Some(BATCH_WITHIN_MS),
                untaken,
                cursor,
                failed,
            };
            let mut reply = self.batch(verb, tenant, &request).await?;
            let waits = reply.untaken.filter(|_| verb != BatchVerb::Status);
            let advanced = reply.done > 0 || reply.underway > underway;
            let moved = advanced || reply.cursor.is_some() || waits.map(|u| u.oldest) != oldest;
            in_vain = if moved { 0 } else { in_vain + 1 };
            done += reply.done;
            underway = reply.underway;
            reply.done = done;
            // Another service counts executions that this command changed as unconcerned. Subtract
            // them.
            let members: u32 = reply.phases.values().sum();
            let others = members.saturating_sub(done + reply.underway + reply.left + reply.failed);
            reply.unconcerned = reply.unconcerned.min(others);
            let goes_on = goes_on(&reply);
            cursor = reply.cursor.take();
            oldest = waits.map(|u| u.oldest);
            let ended = cursor.is_none();
            untaken = waits.filter(|_| ended && reply.left == 0).map(|u| u.upto);
            let on = !ended || reply.left > 0 || waits.is_some();
            let refused = reply.error.is_some() && waits.is_none();
            if !on || refused || in_vain >= IN_VAIN || !goes_on {
                return Ok((reply, !on));
            }
        }
    }

    /// Changes a tenant's quota.
    ///
    /// # Errors
    /// If no policy service answers. A refusal is in [`QuotaReply::error`].
    pub async fn quota(
        &self,
        tenant: &Tenant,
        change: QuotaChange,
    ) -> Result<QuotaReply, ApiError> {
        let body = QuotaRequest {
            who: self.who.clone(),
            change: Some(change),
        };
        request(&self.broker, subjects::api_quota(tenant), bytes(&body)?).await
    }

    /// Reads all quotas.
    ///
    /// # Errors
    /// If no policy service answers.
    pub async fn quotas(&self) -> Result<QuotaReply, ApiError> {
        request(&self.broker, subjects::API_QUOTAS.to_owned(), Bytes::new()).await
    }
}
