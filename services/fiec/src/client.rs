//! The operator's side of the NATS micro service `fiec`: one function for each request.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use async_nats::RequestErrorKind;
use bytes::Bytes;
use fiec_broker::Broker;
use fiec_schemas::messages::{
    ApiReply, BatchReply, BatchRequest, BatchVerb, EnvelopeChange, EnvelopeRequest,
    ExecutionRequest, ExecutionVerb, NodeRequest, NodeVerb, QuotaChange, QuotaReply, QuotaRequest,
    RefusalCode, SubmitReply,
};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{NodeId, Tenant, subjects};
use serde::de::DeserializeOwned;

use crate::context::who;

/// No policy service answered in time.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(pub String);

/// Longest wait for a submission to be taken in. One answer takes some seconds of it.
const QUEUED: Duration = Duration::from_secs(60);

/// Longest time for which a request is made again while the service does nothing for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time for which no policy service need be there: one that has lost its broker's data ends
/// and begins again.
const ABSENCE: Duration = Duration::from_secs(3);

/// Pause before a request is made again.
const PAUSE: Duration = Duration::from_millis(100);

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

async fn request<T: Reply>(broker: &Broker, subject: String, body: Bytes) -> anyhow::Result<T> {
    request_with(broker, subject, body, async_nats::HeaderMap::new()).await
}

/// Asks until a service does or refuses what is asked for, within [`PATIENCE`]: one that is starting
/// or ending, or has no room, does nothing. Where none is there, asks for [`ABSENCE`].
async fn request_with<T: Reply>(
    broker: &Broker,
    subject: String,
    body: Bytes,
    headers: async_nats::HeaderMap,
) -> anyhow::Result<T> {
    let since = Instant::now();
    loop {
        let reply = once(broker, &subject, body.clone(), headers.clone()).await?;
        let Some(reply): Option<T> = reply else {
            if since.elapsed() >= ABSENCE {
                bail!(Unreachable(
                    "no policy service answers: start one with `fiec policy` (or everything with \
                     `fiec up`)"
                        .to_owned()
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
) -> anyhow::Result<Option<T>> {
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
            bail!(Unreachable(format!(
                "no answer on {subject} within {DEADLINE:?}: {error}"
            )))
        }
    };
    // The body of a refusal says more than its header.
    if let Some(error) = reply
        .headers
        .as_ref()
        .and_then(|headers| headers.get(async_nats::service::NATS_SERVICE_ERROR))
        .filter(|_| reply.payload.is_empty())
    {
        bail!("the policy service could not answer {subject}: {error}");
    }
    let reply = serde_json::from_slice(&reply.payload)
        .with_context(|| format!("the answer on {subject} is not of the expected form"))?;
    Ok(Some(reply))
}

/// Sends a request about one execution.
///
/// # Errors
/// If no policy service answers. A refusal is in [`ApiReply::error`].
pub async fn ask(
    broker: &Broker,
    verb: ExecutionVerb,
    tenant: &Tenant,
    body: &ExecutionRequest,
) -> anyhow::Result<ApiReply> {
    let subject = subjects::api_execution(verb, tenant);
    let body: Bytes = serde_json::to_vec(body)?.into();
    let since = Instant::now();
    loop {
        let reply: ApiReply = request(broker, subject.clone(), body.clone()).await?;
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
    broker: &Broker,
    verb: ExecutionVerb,
    tenant: &Tenant,
    id: &str,
    to: Option<NodeId>,
) -> anyhow::Result<ApiReply> {
    let body = ExecutionRequest {
        id: id.to_owned(),
        who: who(),
        to,
        ..ExecutionRequest::default()
    };
    ask(broker, verb, tenant, &body).await
}

/// Changes the grant of a running execution.
///
/// # Errors
/// If no policy service answers. A refusal is in [`ApiReply::error`].
pub async fn reconfigure(
    broker: &Broker,
    tenant: &Tenant,
    id: &str,
    grant: Grant,
) -> anyhow::Result<ApiReply> {
    let body = ExecutionRequest {
        id: id.to_owned(),
        who: who(),
        grant: Some(grant),
        ..ExecutionRequest::default()
    };
    ask(broker, ExecutionVerb::Reconfigure, tenant, &body).await
}

/// Adjusts a live execution.
///
/// # Errors
/// If no policy service answers. A refusal is in [`ApiReply::error`].
pub async fn adjust(
    broker: &Broker,
    tenant: &Tenant,
    id: &str,
    change: Adjustment,
) -> anyhow::Result<ApiReply> {
    let body = ExecutionRequest {
        id: id.to_owned(),
        who: who(),
        change: Some(change),
        ..ExecutionRequest::default()
    };
    ask(broker, ExecutionVerb::Adjust, tenant, &body).await
}

/// Sends a request about one node. `seconds` is the time limit of the request, for verbs that have
/// one.
///
/// # Errors
/// If no policy service answers. A refusal is in [`ApiReply::error`].
pub async fn node(
    broker: &Broker,
    verb: NodeVerb,
    node: NodeId,
    seconds: Option<u32>,
) -> anyhow::Result<ApiReply> {
    let body = NodeRequest {
        node,
        who: who(),
        seconds,
    };
    request(
        broker,
        subjects::api_node(verb),
        serde_json::to_vec(&body)?.into(),
    )
    .await
}

/// Reads the envelopes of a node, or changes them first.
///
/// # Errors
/// If no policy service answers. A refusal is in [`ApiReply::error`].
pub async fn envelope(
    broker: &Broker,
    node: NodeId,
    change: Option<EnvelopeChange>,
) -> anyhow::Result<ApiReply> {
    let body = EnvelopeRequest {
        node,
        who: who(),
        change,
    };
    request(
        broker,
        subjects::API_ENVELOPE.to_owned(),
        serde_json::to_vec(&body)?.into(),
    )
    .await
}

/// Lists all nodes as a policy service sees them.
///
/// # Errors
/// If no policy service answers.
pub async fn nodes(broker: &Broker) -> anyhow::Result<ApiReply> {
    request(broker, subjects::API_NODES.to_owned(), Bytes::new()).await
}

/// Submits lines of JSON. The answer covers every line. `atomic`: all lines are accepted, or none.
///
/// # Errors
/// If no policy service answers.
pub async fn submit(
    broker: &Broker,
    tenant: &Tenant,
    lines: Bytes,
    atomic: bool,
) -> anyhow::Result<SubmitReply> {
    let mut headers = async_nats::HeaderMap::new();
    if atomic {
        headers.insert(ATOMIC_HEADER, "true");
    }
    request_with(broker, subjects::api_submit(tenant), lines, headers).await
}

/// Requests one page about a whole batch.
///
/// # Errors
/// If no policy service answers. A refusal is in [`BatchReply::error`].
pub async fn batch(
    broker: &Broker,
    verb: BatchVerb,
    tenant: &Tenant,
    request: &BatchRequest,
) -> anyhow::Result<BatchReply> {
    let subject = subjects::api_batch(verb, tenant);
    let body = serde_json::to_vec(request)?.into();
    self::request(broker, subject, body).await
}

/// Changes a tenant's quota.
///
/// # Errors
/// If no policy service answers. A refusal is in [`QuotaReply::error`].
pub async fn quota(
    broker: &Broker,
    tenant: &Tenant,
    change: QuotaChange,
) -> anyhow::Result<QuotaReply> {
    let body = QuotaRequest {
        who: who(),
        change: Some(change),
    };
    request(
        broker,
        subjects::api_quota(tenant),
        serde_json::to_vec(&body)?.into(),
    )
    .await
}

/// Reads all quotas.
///
/// # Errors
/// If no policy service answers.
pub async fn quotas(broker: &Broker) -> anyhow::Result<QuotaReply> {
    request(broker, subjects::API_QUOTAS.to_owned(), Bytes::new()).await
}
