//! The NATS micro service `fiec`: what operators and clients ask.

mod answer;
mod batches;
mod envelopes;
mod executions;
mod newcomers;
mod nodes;
mod pages;
mod parts;
mod question;
mod quotas;
mod sight;
mod submit;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use async_nats::service::{Request, ServiceExt};
use fiec_schemas::messages::{ApiReply, Record, SubmitReply};
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{Tenant, subjects};
use futures_util::StreamExt;
use futures_util::stream::select_all;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::Permit;
use tokio::sync::{Semaphore, oneshot};

use self::answer::Answer;
use crate::effects::Effects;
use crate::events::{Ask, Outcome};
use crate::{Options, ServiceError};

/// Requests answered at once.
const AT_ONCE: usize = 256;
/// Kibibytes that requests take, those that wait for their turn included; beyond that they are
/// refused, so that whoever asks knows. Each counts for some more than its text.
const ROOM_KIB: usize = 32 * 1024;
const REQUEST_KIB: usize = 8;
/// The core answers within this, beside the time that a node may take where one is asked.
const CORE_WITHIN: Duration = Duration::from_secs(3);

/// Endpoint names and their subjects.
const ENDPOINTS: [(&str, &str); 21] = [
    ("submit", "fiec.api.submit.*"),
    ("status", "fiec.api.status.*"),
    ("cancel", "fiec.api.cancel.*"),
    ("pause", "fiec.api.pause.*"),
    ("resume", "fiec.api.resume.*"),
    ("yield", "fiec.api.yield.*"),
    ("reconfigure", "fiec.api.reconfigure.*"),
    ("adjust", "fiec.api.adjust.*"),
    ("why", "fiec.api.why.*"),
    ("batch", "fiec.api.batch.*.*"),
    ("quota", "fiec.api.quota.*"),
    ("quotas", "fiec.api.quotas"),
    ("nodes", "fiec.api.nodes"),
    ("offers", subjects::OFFERS),
    ("cordon", "fiec.api.node.cordon"),
    ("uncordon", "fiec.api.node.uncordon"),
    ("drain", "fiec.api.node.drain"),
    ("undrain", "fiec.api.node.undrain"),
    ("revoke", "fiec.api.node.revoke"),
    ("release", "fiec.api.node.release"),
    ("envelope", "fiec.api.node.envelope"),
];

/// The payloads of an endpoint, for `nats micro info`: files of `schemas/json`.
fn payloads(name: &str) -> HashMap<String, String> {
    let request = match name {
        "submit" => "lines of submission.json",
        "batch" => "batch-request.json",
        "quota" => "quota-request.json",
        "nodes" | "offers" | "quotas" => "none",
        "envelope" => "envelope-request.json",
        "cordon" | "uncordon" | "drain" | "undrain" | "revoke" | "release" => "node-request.json",
        _ => "execution-request.json",
    };
    let reply = match name {
        "submit" => "submit-reply.json",
        "batch" => "batch-reply.json",
        "quota" | "quotas" => "quota-reply.json",
        "offers" => "offers-reply.json",
        _ => "api-reply.json",
    };
    let pairs = [("request", request), ("reply", reply)];
    let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    pairs.into_iter().collect()
}

/// What handlers need; cheap to clone.
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
    for (name, subject) in ENDPOINTS {
        let endpoint = service
            .endpoint_builder()
            .name(name)
            .metadata(payloads(name))
            .add(subject)
            .await
            .map_err(|error| failed(format!("cannot add the endpoint {name}: {error}")))?;
        endpoints.push(endpoint.map(move |request| (name, request)));
    }
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
    while let Some((name, request)) = requests.next().await {
        let kib = REQUEST_KIB + request.message.payload.len() / 1024;
        let kib = u32::try_from(kib).unwrap_or(u32::MAX);
        let Ok(room) = Arc::clone(&room).try_acquire_many_owned(kib) else {
            respond(&api.effects.broker.client, name, request, busy(name)).await;
            continue;
        };
        let (api, turns) = (api.clone(), Arc::clone(&turns));
        tokio::spawn(async move {
            if let Ok(_turn) = turns.acquire_owned().await {
                api.answer(name, request).await;
            }
            drop(room);
        });
    }
    Err(failed("its subscriptions ended".to_owned()))
}

/// For handlers: a mistake of the asker or of the world, in words.
type Answered<T> = Result<T, String>;

impl Api {
    async fn answer(&self, name: &'static str, request: Request) {
        let payload = &request.message.payload;
        let tenant = request
            .message
            .subject
            .rsplit('.')
            .next()
            .unwrap_or_default();
        let answer = if name == "submit" {
            let headers = request.message.headers.as_ref();
            let atomic = headers.and_then(|h| h.get(ATOMIC_HEADER));
            let atomic = atomic.is_some_and(|value| value.as_str() == "true");
            Answer::of(&self.submit(tenant, payload, atomic).await)
        } else if name == "batch" {
            Answer::of(&self.batch(&request.message.subject, payload).await)
        } else if name == "quota" {
            Answer::of(&self.quota(tenant, payload).await)
        } else if name == "quotas" {
            Answer::of(&self.quotas().await)
        } else if name == "offers" {
            Answer::of(&self.offers().await)
        } else {
            let reply = match name {
                "nodes" => self.nodes().await,
                "cordon" | "uncordon" | "drain" | "undrain" | "revoke" => {
                    self.node(name, payload).await
                }
                "release" => self.release(payload).await,
                "envelope" => self.envelope(payload).await,
                _ => self.execution(name, tenant, payload).await,
            };
            Answer::of(&reply.unwrap_or_else(|error| ApiReply {
                error: Some(error),
                ..ApiReply::default()
            }))
        };
        respond(&self.effects.broker.client, name, request, answer).await;
    }

    /// Tells the history of what somebody changed; `id` keeps it from being told twice.
    async fn record(&self, subject: String, id: String, record: &Record) -> Answered<()> {
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

    /// Asks the core, which answers within a deadline.
    async fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Answered<T> {
        if !self.loaded.load(Ordering::Relaxed) {
            return Err(
                "the policy service is still taking over the ledgers; try again".to_owned(),
            );
        }
        question::ask(&self.effects.outcomes, self.core_within(), make).await
    }

    /// Room to tell the core of something that is about to be done: taken before, so that what is
    /// done is told.
    async fn room(&self) -> Answered<Permit<'_, Outcome>> {
        question::room(&self.effects.outcomes, self.core_within()).await
    }

    fn core_within(&self) -> Duration {
        self.options.control_timeout + CORE_WITHIN
    }
}

async fn respond(client: &async_nats::Client, name: &str, request: Request, answer: Answer) {
    if let Err(error) = answer.send(client, request).await {
        tracing::warn!(%error, name, "cannot answer a request");
    }
}

/// Said where requests take all the room there is.
fn busy(name: &str) -> Answer {
    let error = Some(
        "the policy service has no room for this request now, and nothing was done; try again"
            .to_owned(),
    );
    match name {
        "submit" => Answer::of(&SubmitReply {
            error,
            ..SubmitReply::default()
        }),
        _ => Answer::of(&ApiReply {
            error,
            ..ApiReply::default()
        }),
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> Answered<T> {
    serde_json::from_slice(payload).map_err(|error| format!("the request cannot be read: {error}"))
}

fn tenant(text: &str) -> Answered<Tenant> {
    text.parse()
        .map_err(|error: fiec_schemas::IdError| error.to_string())
}

fn somebody(who: &str) -> String {
    if who.is_empty() {
        "anonymous".to_owned()
    } else {
        who.chars().take(64).collect()
    }
}
