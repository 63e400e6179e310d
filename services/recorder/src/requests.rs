//! Answers requests of other services. Any recorder may take any of them.

use std::time::Duration;

use fiec_broker::Broker;
use futures_util::StreamExt;
use serde::Serialize;

use crate::tasks::{Shared, pause};

/// Answers the requests of a subject until the recorder stops, at most `at_once` at the same time.
pub(crate) async fn answer<R, F>(
    broker: &Broker,
    shared: &Shared,
    (subject, at_once): (&'static str, usize),
    reply: impl Fn(bytes::Bytes) -> F,
) where
    R: Serialize,
    F: Future<Output = R>,
{
    let reply = &reply;
    while !shared.stop.is_cancelled() {
        let queue = "recorder".to_owned();
        match broker.client.queue_subscribe(subject, queue).await {
            Ok(requests) => {
                let answers = requests.for_each_concurrent(at_once, |request| async move {
                    let Some(to) = request.reply else { return };
                    let Ok(reply) = serde_json::to_vec(&reply(request.payload).await) else {
                        return;
                    };
                    if let Err(error) = broker.client.publish(to, reply.into()).await {
                        tracing::debug!(%error, subject, "a request was not answered");
                    }
                });
                tokio::select! {
                    () = answers => {}
                    () = shared.stop.cancelled() => return,
                }
            }
            Err(error) => {
                tracing::warn!(%error, subject, "cannot listen to requests; trying again")
            }
        }
        pause(&shared.stop, Duration::from_secs(1)).await;
    }
}
