//! Gives workers PostgreSQL's copy of a state that the broker has lost.

use std::time::Duration;

use fiec_broker::{Broker, store};
use fiec_schemas::Digest;
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::subjects;
use futures_util::StreamExt;
use sqlx::PgPool;

use crate::ledger::{Shared, pause};
use crate::table::argument;

/// Most restores at once; each holds a whole state in memory.
const AT_ONCE: usize = 2;

/// Answers until the recorder stops.
pub(crate) async fn run(broker: Broker, shared: Shared) {
    while !shared.stop.is_cancelled() {
        let subject = subjects::RECORDER_RESTORE;
        let queue = "recorder".to_owned();
        match broker.client.queue_subscribe(subject, queue).await {
            Ok(requests) => {
                let answers = requests.for_each_concurrent(AT_ONCE, |request| {
                    let (broker, shared) = (&broker, &shared);
                    async move {
                        let Some(to) = request.reply else { return };
                        let error = restore(broker, &shared.pool, &request.payload).await.err();
                        if let Some(error) = &error {
                            tracing::warn!(error, "a state was not restored");
                        }
                        let Ok(reply) = serde_json::to_vec(&RestoreReply { error }) else {
                            return;
                        };
                        if let Err(error) = broker.client.publish(to, reply.into()).await {
                            tracing::debug!(%error, "a worker was not answered");
                        }
                    }
                });
                tokio::select! {
                    () = answers => {}
                    () = shared.stop.cancelled() => return,
                }
            }
            Err(error) => tracing::warn!(%error, "cannot listen to workers; trying again"),
        }
        pause(&shared.stop, Duration::from_secs(1)).await;
    }
}

async fn restore(broker: &Broker, pool: &PgPool, payload: &[u8]) -> Result<(), String> {
    let request: RestoreRequest = serde_json::from_slice(payload).map_err(|e| e.to_string())?;
    let state: Option<Option<Vec<u8>>> = sqlx::query_scalar(
        "SELECT state FROM boundary_state WHERE execution = $1 AND index = $2 AND digest = $3",
    )
    .bind(argument(&request.execution))
    .bind(argument(&request.index))
    .bind(argument(&request.digest))
    .fetch_optional(pool)
    .await
    .map_err(|error| format!("PostgreSQL cannot be asked: {error}"))?;
    let state = match state {
        Some(Some(state)) => state,
        Some(None) => {
            return Err("PostgreSQL has its digest alone: it is over --state-limit".into());
        }
        None => return Err("PostgreSQL has no copy of it".into()),
    };
    if Digest::of(&state) != request.digest {
        return Err("the copy in PostgreSQL is damaged".into());
    }
    let kept = store::keep_state(broker, request.execution, request.digest, &state).await;
    kept.map_err(|error| error.to_string())
}
