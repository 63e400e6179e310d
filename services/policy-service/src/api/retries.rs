//! Retries: what has failed, is held or was cancelled starts again from its last commit, under the
//! same id. What failed because it waited for that starts again, too.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use fiec_broker::{BrokerError, chunk_list, feed, store};
use fiec_schemas::scheduling::OnMiss;
use fiec_schemas::{
    BoundaryIndex, Cause, Event, ExecutionId, ExecutionState, Fault, LedgerMessage, StatePlace,
    Tenant, subjects,
};
use futures_util::StreamExt as _;
use tokio::time::Instant;

use super::changes::{Asked, Change, called};
use super::{Answered, Api};
use crate::refusal::{CannotRetry, Refusal};

/// Time in which all ledgers of a tenant are searched for executions that waited in vain.
const SEARCH: Duration = Duration::from_secs(5);
impl Api {
    /// The events by which an execution starts again, from this boundary or from its last commit.
    pub(super) async fn retry_events(
        &self,
        asked: Asked<'_>,
        from: Option<BoundaryIndex>,
        state: &ExecutionState,
    ) -> Answered<Vec<Event>> {
        let cannot = |why| Refusal::CannotRetry {
            name: asked.name.map_or_else(|| called(state), str::to_owned),
            why,
        };
        let phase = state.phase.kind();
        if !phase.can_be_retried() {
            return Err(cannot(CannotRetry::Phase(phase)));
        }
        if state.part_of().is_some() || !state.parts().is_empty() {
            return Err(cannot(CannotRetry::Spread));
        }
        let Ok(spec) = self.effects.submission_of(state).await else {
            return Err(cannot(CannotRetry::NoSubmission));
        };
        let adjusted = state.adjusted.as_ref().and_then(|change| change.deadline);
        let deadline = adjusted.or(spec.deadline);
        let deadline = deadline.filter(|deadline| deadline.on_miss == OnMiss::Fail);
        if let Some(at) = deadline.map(|deadline| deadline.moment(state.submitted_at))
            && at <= self.effects.broker.now()
        {
            return Err(cannot(CannotRetry::Late(at)));
        }
        let who = asked.who.to_owned();
        let mut events = vec![Event::Retried { who: who.clone() }];
        let last = state.boundary.as_ref();
        let wanted = from.unwrap_or_else(|| state.boundary_index());
        let to = match wanted {
            0 => None,
            index => match self.place_of(state, index).await? {
                Some(place) => Some(place),
                None => {
                    let stored = self.places_of(state).await?;
                    let stored = stored.into_iter().map(|place| place.index).collect();
                    return Err(cannot(CannotRetry::NoState(index, stored)));
                }
            },
        };
        if to.as_ref() != last {
            let cause = Cause::Operator { who };
            events.push(Event::SteppedBack { to, cause });
        }
        Ok(events)
    }

    /// Where σ of a boundary is stored, if it still is.
    async fn place_of(
        &self,
        state: &ExecutionState,
        index: BoundaryIndex,
    ) -> Answered<Option<StatePlace>> {
        let last = state.boundary.as_ref().filter(|place| place.index == index);
        if let Some(place) = last {
            let is_stored = self.is_stored(state, place).await?;
            return Ok(Some(place.clone()).filter(|_| is_stored));
        }
        let stored = self.places_of(state).await?;
        Ok(stored.into_iter().find(|place| place.index == index))
    }

    /// The boundaries whose σ lies in messages that the ledger still has, the newest first.
    async fn places_of(&self, state: &ExecutionState) -> Answered<Vec<StatePlace>> {
        let broker = &self.effects.broker;
        let items = feed::of_execution(broker, &state.tenant, state.execution).await?;
        let mut places: Vec<StatePlace> = Vec::new();
        for item in items.iter().rev() {
            let Ok(message) = item.message() else {
                continue;
            };
            let Some(place) = &message.state.boundary else {
                continue;
            };
            let known = places.iter().any(|known| known.index == place.index);
            // An earlier σ in chunks has lost those that a later one does not share.
            let carries = place.seq == Some(item.seq) && !store::is_large(place);
            if carries && !known && place.index <= state.boundary_index() {
                places.push(place.clone());
            }
        }
        Ok(places)
    }

    async fn is_stored(&self, state: &ExecutionState, place: &StatePlace) -> Answered<bool> {
        let broker = &self.effects.broker;
        let gone = |error: &BrokerError| {
            matches!(
                error,
                BrokerError::Missing { .. } | BrokerError::Malformed { .. }
            )
        };
        if !store::is_large(place) {
            return match store::get_state(broker, state.execution, place).await {
                Ok(_) => Ok(true),
                Err(error) if gone(&error) => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
        let mut manifest = match store::manifest(broker, place).await {
            Ok(manifest) => manifest,
            Err(error) if gone(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let subject = subjects::chunk(&state.tenant, state.execution);
        let stored = chunk_list::stored(broker, &subject).await?;
        Ok(manifest.keep_stored(&stored) == 0)
    }

    /// Starts those again that failed because they waited for this execution, and those that waited
    /// for them. Returns their number, or none if there are too many ledgers to search.
    pub(super) async fn retry_dependents(
        &self,
        asked: Asked<'_>,
        id: ExecutionId,
    ) -> Answered<Option<u32>> {
        let Some(mut waited) = self.waited_in_vain(asked.tenant).await? else {
            return Ok(None);
        };
        let change = Change::Retry { from: None };
        let asked = Asked {
            change: &change,
            name: None,
            ..asked
        };
        let (mut count, mut parents) = (0, VecDeque::from([id]));
        while let Some(parent) = parents.pop_front() {
            for dependent in waited.remove(&parent).unwrap_or_default() {
                let Some(entry) = self.effects.ledger.last(asked.tenant, dependent).await? else {
                    continue;
                };
                // It may have been retried meanwhile.
                if vain(&entry.message) != Some(parent) {
                    continue;
                }
                match self.change_one(asked, entry).await {
                    Ok(_) => count += 1,
                    Err(refusal) => {
                        tracing::warn!(%dependent, %refusal, "a dependent was not retried");
                        continue;
                    }
                }
                parents.push_back(dependent);
            }
        }
        Ok(Some(count))
    }

    /// The executions of a tenant that failed because of another one, by that one.
    async fn waited_in_vain(
        &self,
        tenant: &Tenant,
    ) -> Answered<Option<BTreeMap<ExecutionId, Vec<ExecutionId>>>> {
        let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let Some(mut unread) = self.unread(tenant).await? else {
            return Ok(Some(found));
        };
        let deadline = Instant::now() + SEARCH;
        loop {
            let next = tokio::time::timeout_at(deadline, unread.messages.next()).await;
            let Ok(next) = next else {
                return Ok(None);
            };
            let Some(message) = next else {
                return Ok(Some(found));
            };
            let message = message.map_err(BrokerError::operation("search the ledgers"))?;
            let Ok(info) = message.info() else { continue };
            let (seq, pending) = (info.stream_sequence, info.pending);
            let headers = message.headers.as_ref();
            let header = headers.and_then(|h| h.get(subjects::EVENT_HEADER));
            let header = header
                .map(|h| h.as_str())
                .filter(|h| h.contains("dependency"));
            if let Some(message) = header.and_then(|h| LedgerMessage::decode(h, seq).ok())
                && let Some(other) = vain(&message)
            {
                found
                    .entry(other)
                    .or_default()
                    .push(message.state.execution);
            }
            if pending == 0 {
                return Ok(Some(found));
            }
        }
    }
}

/// The execution for which this one waited in vain, if it failed for that.
fn vain(message: &LedgerMessage) -> Option<ExecutionId> {
    message.events.iter().find_map(|event| match event {
        Event::Failed { fault, .. } => match fault.as_deref()? {
            Fault::Dependency { id } => Some(*id),
            _ => None,
        },
        _ => None,
    })
}
