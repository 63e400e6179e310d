//! The NATS micro service `fiec`, which answers operators and clients.

mod answer;
mod batches;
mod changes;
mod ended;
mod endpoints;
mod envelopes;
mod executions;
mod newcomers;
mod nodes;
mod pages;
mod parts;
mod question;
mod quotas;
mod retries;
mod sight;
mod submit;
mod view;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use async_nats::service::{Request, Service, ServiceExt};
use fiec_schemas::Tenant;
use fiec_schemas::messages::{ApiReply, NodeVerb, Record, SubmitReply};
use fiec_schemas::submission::ATOMIC_HEADER;
use futures_util::StreamExt;
use futures_util::stream::select_all;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::Permit;
use tokio::sync::{Semaphore, oneshot};

use self::answer::Answer;
use self::endpoints::Endpoint;
use crate::effects::Effects;
use crate::events::{Ask, Outcome};
use crate::refusal::Refusal;
use crate::{Options, ServiceError};

/// Requests answered at the same time.
const AT_ONCE: usize = 256;
/// KiB that requests may take, including those that wait for their turn. Beyond it, a request is
/// refused, so that its asker knows. Each request counts `REQUEST_KIB` beside its text.
const ROOM_KIB: usize = 32 * 1024;
const REQUEST_KIB: usize = 8;
/// Time for the core to answer, beside the time that a node may take.
const CORE_WITHIN: Duration = Duration::from_secs(3);

/// Handles that request handlers need. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    effects: Effects,
    options: Arc<Options>,
    loaded: Arc<AtomicBool>,
    known: Arc<newcomers::Known>,
    pages: pages::Pages,
}

/// Answers requests until it is dropped.
pub async fn serve(
    effects: Effects,
    options: Options,
    loaded: Arc<AtomicBool>,
) -> Result<(), ServiceError> {
    let failed = |reason: String| ServiceError::Task {
        task: "api",
        reason,
    };
    let service = effects
        .broker
        .client
        .service_builder()
        .description("FIEC: submit, follow and move executions; cordon and drain nodes")
        .start("fiec", env!("CARGO_PKG_VERSION"))
        .await
        .map_err(|error| failed(format!("cannot start the micro service: {error}")))?;
    let mut endpoints = Vec::new();
    for endpoint in Endpoint::all(options.id) {
        let name = endpoint.name();
        let requests = service
            .endpoint_builder()
            .name(name)
            .metadata(endpoint.payloads())
            .add(endpoint.subject())
            .await
            .map_err(|error| failed(format!("cannot add the endpoint {name}: {error}")))?;
        endpoints.push(requests.map(move |request| (endpoint, request)));
    }
    let _registered = Registered(Some(service));
    let api = Api {
        effects,
        options: Arc::new(options),
        loaded,
        known: Arc::default(),
        pages: pages::Pages::default(),
    };
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let room = Arc::new(Semaphore::new(ROOM_KIB));
    let mut requests = select_all(endpoints);
    while let Some((endpoint, request)) = requests.next().await {
        let kib = REQUEST_KIB + request.message.payload.len() / 1024;
        let kib = u32::try_from(kib).unwrap_or(u32::MAX);
        let Ok(room) = Arc::clone(&room).try_acquire_many_owned(kib) else {
            let answer = busy(endpoint);
            respond(&api.effects.broker.client, endpoint, request, answer).await;
            continue;
        };
        let (api, turns) = (api.clone(), Arc::clone(&turns));
        let running = api.effects.running.clone();
        running.run(None, async move {
            if let Ok(_turn) = turns.acquire_owned().await {
                api.answer(endpoint, request).await;
            }
            drop(room);
        });
    }
    Err(failed("its subscriptions ended".to_owned()))
}

/// The micro service as the broker's clients see it. It is withdrawn on drop: its answers to
/// `nats micro info` would otherwise outlive the life that served it.
struct Registered(Option<Service>);

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(service) = self.0.take() {
            tokio::spawn(service.stop());
        }
    }
}

/// Result of a handler: a value, or the refusal of the request.
type Answered<T> = Result<T, Refusal>;

impl Api {
    async fn answer(&self, endpoint: Endpoint, request: Request) {
        let payload = &request.message.payload;
        let subject = &request.message.subject;
        let tenant = subject.rsplit('.').next().unwrap_or_default();
        let answer = match endpoint {
            Endpoint::Submit => {
                let headers = request.message.headers.as_ref();
                let atomic = headers.and_then(|h| h.get(ATOMIC_HEADER));
                let atomic = atomic.is_some_and(|value| value.as_str() == "true");
                Answer::of(self.submit(tenant, payload, atomic).await)
            }
            Endpoint::Batch => Answer::of(self.batch(subject, payload).await),
            Endpoint::Quota => Answer::of(self.quota(tenant, payload).await),
            Endpoint::Quotas => Answer::of(self.quotas().await),
            Endpoint::Offers => Answer::of(self.offers().await),
            Endpoint::Nodes => Answer::of(self.nodes().await),
            Endpoint::Node(NodeVerb::Release) => Answer::of(self.release(payload).await),
            Endpoint::Node(verb) => Answer::of(self.node(verb, payload).await),
            Endpoint::Envelope => Answer::of(self.envelope(payload).await),
            Endpoint::View(_) => Answer::of(self.view(payload).await),
            Endpoint::Execution(verb) => Answer::of(self.execution(verb, tenant, payload).await),
        };
        respond(&self.effects.broker.client, endpoint, request, answer).await;
    }

    /// Records a change for the history. `id` keeps it from being recorded twice.
    async fn record(&self, subject: String, id: String, record: &Record) -> Result<(), String> {
        let payload = serde_json::to_vec(record).map_err(|e| e.to_string())?;
        let mut failure = String::new();
        for _ in 0..3 {
            let publish = PublishMessage::build()
                .payload(payload.clone().into())
                .message_id(id.as_str());
            let stored = async {
                let js = &self.effects.broker.js;
                js.send_publish(subject.clone(), publish).await?.await
            };
            match tokio::time::timeout(self.options.control_timeout, stored).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) => failure = error.to_string(),
                Err(_) => failure = "no answer from the broker".to_owned(),
            }
        }
        Err(failure)
    }

    /// Asks the core and waits until the deadline.
    async fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Answered<T> {
        if !self.loaded.load(Ordering::Relaxed) {
            return Err(Refusal::Loading);
        }
        question::ask(&self.effects.outcomes, self.core_within(), make).await
    }

    /// Reserves a place in the core's channel before a change is made, so that the core is certain
    /// to hear of it.
    async fn room(&self) -> Answered<Permit<'_, Outcome>> {
        question::room(&self.effects.outcomes, self.core_within()).await
    }

    fn core_within(&self) -> Duration {
        self.options.control_timeout + CORE_WITHIN
    }
}

async fn respond(
    client: &async_nats::Client,
    endpoint: Endpoint,
    request: Request,
    answer: Answer,
) {
    if let Err(error) = answer.send(client, request).await {
        tracing::warn!(%error, endpoint = endpoint.name(), "cannot answer a request");
    }
}

/// The answer when requests use all the memory reserved for them.
fn busy(endpoint: Endpoint) -> Answer {
    match endpoint {
        Endpoint::Submit => Answer::of::<SubmitReply>(Err(Refusal::Busy)),
        _ => Answer::of::<ApiReply>(Err(Refusal::Busy)),
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> Answered<T> {
    Ok(serde_json::from_slice(payload)?)
}

fn tenant(text: &str) -> Answered<Tenant> {
    Ok(text.parse::<Tenant>()?)
}

fn somebody(who: &str) -> String {
    if who.is_empty() {
        "anonymous".to_owned()
    } else {
        who.chars().take(64).collect()
    }
}
