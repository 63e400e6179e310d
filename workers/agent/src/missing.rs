//! A state that is missing where its commit says. The runner tries a bounded number of times: where
//! the state was stored, beside the ledger, and from PostgreSQL, from which the recorder restores
//! it. If it is nowhere the execution fails with the reason, so that it does not go from node to
//! node.

use std::time::Duration;

use bytes::Bytes;
use fiec_broker::chunks::Manifest;
use fiec_broker::{BrokerError, store};
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::{ExecutionId, StatePlace, subjects};
use tokio::time::Instant;

use crate::message::backoff;
use crate::runner::{Runner, Wait};
use crate::shared::Shared;

/// Retries before a recorder's answer "no copy" is final: a replica may be behind.
const TRIES: u32 = 6;
/// Retries if no recorder answers, or if its copy cannot be read. With their pauses they take about
/// a quarter of an hour.
const TRIES_ALONE: u32 = 40;
/// Time limit of the recorder's answer: it copies up to its `--state-limit` within this time.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The recorder's answer.
enum Word {
    /// The state lies beside the ledger now.
    Restored,
    /// It has no copy, for this reason.
    NoCopy(String),
    /// No recorder answered, for this reason.
    Silent(String),
}

/// Whether a retry cannot be expected to help: the state is missing or damaged.
fn is_missing(error: &BrokerError) -> bool {
    matches!(
        error,
        BrokerError::Missing { .. } | BrokerError::Digest { .. } | BrokerError::Malformed { .. }
    )
}

impl Runner {
    /// Returns the copy of a missing state that is kept beside the ledger, or else the error.
    pub(crate) async fn or_kept(
        &mut self,
        place: &StatePlace,
        error: BrokerError,
    ) -> Result<Bytes, BrokerError> {
        if !is_missing(&error) {
            return Err(error);
        }
        let (broker, execution) = (&self.shared.broker, self.tip.state.execution);
        let Ok(state) = store::kept_state(broker, execution, place).await else {
            return Err(error);
        };
        tracing::warn!(%error, "the state is taken from the copy beside the ledger");
        if store::is_large(place) {
            // A chunk is lost or damaged: the next commit stores all of them, in place of the rest.
            let rest = Box::pin(self.known.check(&self.shared, &self.tip.state, place)).await;
            self.known.abandon(rest.beyond(None));
            self.known
                .learn(place.index, place.digest, Manifest::default());
        }
        Ok(state)
    }

    /// Handles a state that could not be fetched: retries later, or fails the execution.
    pub(crate) async fn cannot_fetch(&mut self, error: BrokerError) {
        let mut pause = Duration::from_secs(1);
        if is_missing(&error)
            && let Some(place) = self.tip.state.boundary.clone()
        {
            self.missed += 1;
            let reason = match restore(&self.shared, self.tip.state.execution, &place).await {
                Word::Restored => Some("the copy from PostgreSQL cannot be read either".to_owned())
                    .filter(|_| self.missed >= TRIES_ALONE),
                Word::NoCopy(reason) => Some(reason).filter(|_| self.missed >= TRIES),
                Word::Silent(reason) => Some(reason).filter(|_| self.missed >= TRIES_ALONE),
            };
            if let Some(reason) = reason {
                let index = place.index;
                return self
                    .fail_now(format!(
                        "the state of boundary {index} cannot be had any more: {error}; {reason}"
                    ))
                    .await;
            }
            pause = backoff(self.shared.options.backoff, self.missed);
        }
        tracing::warn!(%error, "cannot fetch the state; trying again");
        self.wait = Some((Wait::Retry, Instant::now() + pause));
    }
}

/// Asks a recorder to restore its copy beside the ledger.
async fn restore(shared: &Shared, execution: ExecutionId, place: &StatePlace) -> Word {
    let request = RestoreRequest {
        execution,
        index: place.index,
        digest: place.digest,
    };
    let Ok(body) = serde_json::to_vec(&request) else {
        return Word::Silent("the recorder was not asked".to_owned());
    };
    let client = &shared.broker.client;
    let asked = async_nats::Request::new()
        .payload(body.into())
        .timeout(Some(ANSWER_WITHIN));
    let answer = client.send_request(subjects::RECORDER_RESTORE, asked).await;
    let reply = answer
        .map_err(|error| error.to_string())
        .and_then(|answer| {
            serde_json::from_slice::<RestoreReply>(&answer.payload).map_err(|e| e.to_string())
        });
    match reply {
        Ok(RestoreReply { error: None }) => Word::Restored,
        Ok(RestoreReply { error: Some(error) }) => Word::NoCopy(error),
        Err(error) => Word::Silent(format!("no recorder answered ({error})")),
    }
}
