//! Retries: what has failed, is held or was cancelled starts again from its last commit, under the
//! same id. What failed because it waited for that starts again, too.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use fiec_broker::last_messages::{LastMessages, Next};
use fiec_broker::{AppendError, BrokerError, Entry, chunk_list, feed, store};
use fiec_schemas::messages::ApiReply;
use fiec_schemas::scheduling::{Adjustment, OnMiss};
use fiec_schemas::{
    BoundaryIndex, Cause, Event, ExecutionId, ExecutionState, Fault, LedgerMessage, Sequence,
    StatePlace, Tenant, subjects,
};
use tokio::time::Instant;

use super::changes::{Asked, Change, called};
use super::{Answered, Api};
use crate::refusal::{CannotRetry, Refusal};

/// Time in which all ledgers of a tenant are searched for executions that waited in vain.
const SEARCH: Duration = Duration::from_secs(5);

/// True if what was asked for is not stored, and not only out of reach.
fn is_gone(error: &BrokerError) -> bool {
    matches!(
        error,
        BrokerError::Missing { .. } | BrokerError::Malformed { .. }
    )
}

impl Api {
    /// Starts an execution again, and what waited for it. If it goes on already, an earlier request may
    /// have started it alone.
    pub(super) async fn retry(&self, asked: Asked<'_>, entry: Entry) -> Answered<ApiReply> {
        let (id, phase) = (
            entry.message.state.execution,
            entry.message.state.phase.kind(),
        );
        let own = match self.change(asked, entry).await {
            Ok(changed) => changed.own.map_err(|(refusal, _)| refusal),
            Err(refusal) => Err(refusal),
        };
        let goes_on = !phase.can_be_retried() && !phase.is_terminal();
        let mut reply = match own {
            Ok(reply) => reply,
            Err(Refusal::CannotRetry { name, why }) if goes_on => {
                let found = self.retry_dependents(asked, id).await;
                return match found {
                    Ok(Some(count)) if count > 0 => Ok(ApiReply {
                        message: format!(
                            "{name} is {phase}; {count} that waited for it start again"
                        ),
                        ..ApiReply::default()
                    }),
                    Ok(_) => Err(Refusal::CannotRetry { name, why }),
                    Err(error) => Err(error),
                };
            }
            Err(refusal) => return Err(refusal),
        };
        // What waits for one that was held waits still.
        if phase.is_terminal() {
            reply.message += &match self.retry_dependents(asked, id).await {
                Ok(Some(0)) => String::new(),
                Ok(Some(count)) => format!("; so do {count} that waited for it"),
                Ok(None) => "; there are too many ledgers to find those that waited for it: retry \
                             them, or their batch"
                    .to_owned(),
                Err(error) => format!(
                    "; those that waited for it were not found ({error}): the same request again \
                     looks for them"
                ),
            };
        }
        Ok(reply)
    }

    /// The events by which an execution starts again, from this boundary or from its last commit.
    pub(super) async fn retry_events(
        &self,
        asked: Asked<'_>,
        from: Option<BoundaryIndex>,
        with: Option<&Adjustment>,
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
        // The parts of a holder that has ended have ended with it. Those of one that is held go on.
        let alone = state.part_of().is_none() && state.parts().is_empty();
        if !alone && phase.is_terminal() {
            return Err(cannot(CannotRetry::Spread));
        }
        let spec = match self.effects.submission_of(state).await {
            Ok(spec) => spec,
            Err(AppendError::Broker(error)) if is_gone(&error) => {
                return Err(cannot(CannotRetry::NoSubmission));
            }
            Err(error) => return Err(error.into()),
        };
        let adjusted = [with, state.adjusted.as_deref()];
        let mut adjusted = adjusted.into_iter().flatten();
        let deadline = adjusted
            .find_map(|change| change.deadline)
            .or(spec.deadline);
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
            let cause = Cause::Operator { who: who.clone() };
            events.push(Event::SteppedBack { to, cause });
        }
        if let Some(change) = with.cloned() {
            events.push(Event::Adjusted { who, change });
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

    /// The boundaries on the way to the last one whose σ lies in messages that the ledger still has, the
    /// newest first. What a step back has withdrawn is none of them.
    async fn places_of(&self, state: &ExecutionState) -> Answered<Vec<StatePlace>> {
        let broker = &self.effects.broker;
        let items = feed::of_execution(broker, &state.tenant, state.execution).await?;
        let messages = items.iter().rev();
        let places = messages.filter_map(|item| {
            let state = item.message().ok()?.state;
            Some((item.seq, state.boundary.clone()))
        });
        Ok(on_the_way(places))
    }

    async fn is_stored(&self, state: &ExecutionState, place: &StatePlace) -> Answered<bool> {
        let broker = &self.effects.broker;
        if !store::is_large(place) {
            return match store::get_state(broker, state.execution, place).await {
                Ok(_) => Ok(true),
                Err(error) if is_gone(&error) => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
        let mut manifest = match store::manifest(broker, place).await {
            Ok(manifest) => manifest,
            Err(error) if is_gone(&error) => return Ok(false),
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
        let change = Change::Retry {
            from: None,
            with: None,
        };
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
        let Some(mut unread) = LastMessages::of(&self.effects.broker, tenant).await? else {
            return Ok(Some(found));
        };
        let deadline = Instant::now() + SEARCH;
        loop {
            let (seq, header) = match unread.next(deadline).await? {
                Next::Message { seq, header } => (seq, header),
                Next::Over => return Ok(Some(found)),
                Next::NotYet => return Ok(None),
            };
            if header.contains("dependency")
                && let Ok(message) = LedgerMessage::decode(&header, seq)
                && let Some(other) = vain(&message)
            {
                found
                    .entry(other)
                    .or_default()
                    .push(message.state.execution);
            }
        }
    }
}

/// Of the last boundaries that the messages of a ledger state, the newest message first, those that
/// carry their own σ and were not withdrawn: progress goes back only where a step back says so.
fn on_the_way(stated: impl Iterator<Item = (Sequence, Option<StatePlace>)>) -> Vec<StatePlace> {
    let mut places: Vec<StatePlace> = Vec::new();
    let mut reached = BoundaryIndex::MAX;
    for (seq, place) in stated {
        let index = place.as_ref().map_or(0, |place| place.index);
        let stands = index <= reached;
        reached = reached.min(index);
        let Some(place) = place.filter(|_| stands) else {
            continue;
        };
        let is_known = places
            .last()
            .is_some_and(|known| known.index == place.index);
        // An earlier σ in chunks has lost those that a later one does not share.
        if place.seq == Some(seq) && !store::is_large(&place) && !is_known {
            places.push(place);
        }
    }
    places
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

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Digest;

    #[test]
    fn what_a_step_back_has_withdrawn_is_no_place_to_go_back_to() {
        let place = |index, seq| {
            Some(StatePlace {
                index,
                digest: Digest::of(b""),
                bytes: 1,
                seq: Some(seq),
                ordinal: 1,
            })
        };
        // 2, 4, 7, 8, back to 4, then 5 and 9; the last message repeats the last boundary.
        let stated = [
            (9, place(9, 8)),
            (8, place(9, 8)),
            (7, place(5, 7)),
            (6, place(4, 2)),
            (5, place(8, 5)),
            (4, place(7, 4)),
            (2, place(4, 2)),
            (1, place(2, 1)),
        ];
        let found = on_the_way(stated.into_iter());
        let indices: Vec<_> = found.iter().map(|place| place.index).collect();
        assert_eq!(indices, [9, 5, 4, 2]);
        // Back to the beginning.
        let stated = [(3, place(1, 3)), (2, None), (1, place(6, 1))];
        assert_eq!(on_the_way(stated.into_iter()).len(), 1);
    }
}
