//! Begins the ledgers of parts that holders have split off. Every service that knows of a split may
//! do it. The part's id follows from the split, and compare-and-set accepts one first message.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Entry, Tip, store};
use fiec_policy::{Fate, Seen};
use fiec_schemas::{Event, ExecutionId, ExecutionState, Phase, RequestKind, Submission, Tenant};

use crate::effects::Effects;
use crate::events::Outcome;

/// Time limit for making a part. After it, the policy asks again.
const WITHIN: Duration = Duration::from_secs(5);

/// Result of making a part.
enum Made {
    /// Its ledger begins with this tip.
    Born(Tip),
    /// Its ledger existed already.
    There(Entry),
    /// Its holder no longer has it, has ended, or is paused.
    Moot,
}

impl Effects {
    /// Begins a part's ledger, unless it exists or its holder no longer has the part.
    pub async fn make_part(self, tenant: Tenant, holder: ExecutionId, part: ExecutionId) {
        let making = self.try_part(&tenant, holder, part);
        let made = match tokio::time::timeout(WITHIN, making).await {
            Ok(Ok(made)) => made,
            Ok(Err(error)) => {
                tracing::warn!(execution = %part, %holder, %error, "a part could not be made; it is tried again");
                return;
            }
            Err(_) => {
                tracing::warn!(execution = %part, %holder, "a part was not made within {WITHIN:?}; it is tried again");
                return;
            }
        };
        match made {
            Made::Born(tip) => {
                tracing::info!(execution = %part, %holder, "a part of it is made");
                let born = Outcome::Changed(Box::new(tip), vec![Event::Submitted]);
                self.tell(born).await;
            }
            Made::There(entry) => match Fate::of(entry.message.state.phase.kind()) {
                Some(fate) => self.tell(Outcome::Ended(part, Seen::Ended(fate))).await,
                None => self.tell(Outcome::Found(Box::new(entry))).await,
            },
            Made::Moot => {}
        }
    }

    async fn try_part(
        &self,
        tenant: &Tenant,
        holder: ExecutionId,
        part: ExecutionId,
    ) -> Result<Made, AppendError> {
        if let Some(entry) = self.ledger.last(tenant, part).await? {
            return Ok(Made::There(entry));
        }
        let Some(last) = self.ledger.last(tenant, holder).await? else {
            return Ok(Made::Moot);
        };
        let state = last.message.state;
        let found = state.parts().iter().find(|p| p.id == part).copied();
        // A paused holder resumes with all of its parts. No part begins before.
        let pauses = state
            .requested()
            .is_some_and(|r| r.what == RequestKind::Pause);
        let rests = pauses || matches!(state.phase, Phase::Paused { .. } | Phase::Held { .. });
        let Some(found) = found.filter(|_| !rests && !state.phase.is_terminal()) else {
            return Ok(Made::Moot);
        };
        let whole = self.submission_of(&state).await?;
        let now = self.broker.now();
        let own = Arc::new(whole.part(found.range(), state.submitted_at));
        let unborn = ExecutionState::unborn_part(&state, &found, Arc::clone(&own), now);
        if unborn.spec.is_none() {
            store::put_data(&self.broker, unborn.submission, &own.to_json()).await?;
        }
        let tip = Tip {
            seq: 0,
            digest: None,
            state: unborn.into(),
            seen_in: 0,
        };
        let draft = Draft::new(&tip, vec![Event::Submitted], &self.author, now)?;
        match self.ledger.append(draft, Bytes::new()).await {
            Ok(tip) => Ok(Made::Born(tip)),
            // Another service was first.
            Err(AppendError::Conflict) => Ok(match self.ledger.last(tenant, part).await? {
                Some(entry) => Made::There(entry),
                None => Made::Moot,
            }),
            Err(error) => Err(error),
        }
    }

    /// An execution's submission, from its ledger or from `FIEC_DATA` if it is large.
    pub(crate) async fn submission_of(
        &self,
        state: &ExecutionState,
    ) -> Result<Arc<Submission>, AppendError> {
        if let Some(spec) = &state.spec {
            return Ok(Arc::clone(spec));
        }
        let json = store::get_data(&self.broker, state.submission, 0).await?;
        let malformed = |error: serde_json::Error| fiec_broker::BrokerError::Malformed {
            what: format!("the submission of {}", state.execution),
            reason: error.to_string(),
        };
        let spec: Submission = serde_json::from_slice(&json).map_err(malformed)?;
        Ok(Arc::new(spec))
    }
}
