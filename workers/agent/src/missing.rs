//! A state that is missing where its commit says. The runner tries a bounded number of times: where
//! the state was stored, beside the ledger, and from PostgreSQL, from which the recorder restores
//! it. If it is nowhere, the execution goes back to the earlier boundary that PostgreSQL has. If there
//! is none, it fails with the reason, so that it does not go from node to node.
//!
//! It never goes forward to a later boundary, which the broker has lost: the outputs and the emitted
//! messages of the lost commits would be missing.

use std::time::Duration;

use bytes::Bytes;
use fiec_broker::chunks::Manifest;
use fiec_broker::{BrokerError, store};
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::{Cause, Epoch, Event, ExecutionId, Fault, StatePlace, subjects};
use tokio::time::Instant;

use crate::attempts;
use crate::message::backoff;
use crate::runner::{Runner, Wait};
use crate::shared::Shared;

/// Retries before a recorder's answer "no copy" is final. With their pauses they take 25 s by
/// default: longer than a leader that was cut off answers ([`fiec_broker::leader::CUT_OFF`]).
const TRIES: u32 = 8;
/// Retries if no recorder answers, or if its copy cannot be read. With their pauses they take about
/// a quarter of an hour.
const TRIES_ALONE: u32 = 40;
/// Time limit of the recorder's answer: it copies up to its `--state-limit` within this time.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The recorder's answer.
enum Word {
    /// The state lies beside the ledger now.
    Restored,
    /// It has no copy, for this reason. The state of an earlier boundary may lie beside the ledger.
    NoCopy(String, Option<StatePlace>),
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
        let bound = (self.tip.state.execution, self.epoch);
        let Ok(state) = beside_the_ledger(&self.shared, bound, place).await else {
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
            let lost = match restore(&self.shared, self.tip.state.execution, &place).await {
                Word::Restored => {
                    let reason = "the copy from PostgreSQL cannot be read either".to_owned();
                    Some((reason, None)).filter(|_| self.missed >= TRIES_ALONE)
                }
                Word::NoCopy(reason, earlier) => {
                    Some((reason, earlier)).filter(|_| self.missed >= TRIES)
                }
                Word::Silent(reason) => Some((reason, None)).filter(|_| self.missed >= TRIES_ALONE),
            };
            if let Some((reason, earlier)) = lost {
                let reason = format!(
                    "the state of boundary {} cannot be had any more: {error}; {reason}",
                    place.index
                );
                // A step back counts as one to a verified boundary, which this one need not be.
                let earlier = earlier.filter(|_| !self.tip.state.guarded);
                return match earlier.filter(|earlier| earlier.index < place.index) {
                    Some(earlier) => self.go_back(earlier, reason),
                    None => self.fail_now(Fault::DataLost, reason).await,
                };
            }
            pause = backoff(self.shared.options.backoff, self.missed);
        }
        tracing::warn!(%error, "cannot fetch the state; trying again");
        self.wait = Some((Wait::Retry, Instant::now() + pause));
    }

    /// Appends that the execution continues from an earlier boundary, on any node.
    fn go_back(&mut self, to: StatePlace, reason: String) {
        tracing::warn!(to = to.index, reason, "stepped back");
        self.wait = None;
        let reason = attempts::cut(reason);
        self.finish(vec![Event::SteppedBack {
            to: Some(to),
            cause: Cause::Orphaned { reason },
        }]);
    }
}

/// Returns the copy of a state that is kept beside the ledger, for an execution that is bound here
/// under this epoch.
///
/// # Errors
/// When it is missing or damaged.
pub(crate) async fn beside_the_ledger(
    shared: &Shared,
    (execution, epoch): (ExecutionId, Epoch),
    place: &StatePlace,
) -> Result<Bytes, BrokerError> {
    let turn = shared.fetches.turn(execution, epoch, place.bytes).await;
    if let Some(state) = turn.whole(place.digest) {
        return Ok(state);
    }
    let reached = |bytes| turn.reached(bytes, place.bytes);
    let state = store::kept_state(&shared.broker, execution, place, reached).await?;
    turn.put_whole(place.digest, state.clone());
    Ok(state)
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
        Ok(RestoreReply { error: None, .. }) => Word::Restored,
        Ok(RestoreReply {
            error: Some(error),
            earlier,
        }) => Word::NoCopy(error, earlier),
        Err(error) => Word::Silent(format!("no recorder answered ({error})")),
    }
}
