//! Changes of an execution's parts. A pause reaches the parts that an execution has split off, and
//! their parts. So do a resume and every adjustment (`adjust`, `pin`, `exclude`), because a part is
//! the same submission for its range. A deadline keeps its moment. A part that is not made yet
//! takes the change from its holder's ledger. A cancel needs no code here: the policy cancels parts
//! whose holder has ended.

use std::sync::Arc;
use std::time::Duration;

use fiec_broker::Entry;
use fiec_schemas::messages::{ApiReply, ExecutionVerb};
use fiec_schemas::{ExecutionId, ExecutionState, Tenant};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::changes::{Asked, Change, is_paused};
use super::{Answered, Api};
use crate::refusal::Refusal;

/// Parts changed at the same time.
const AT_ONCE: usize = 16;
/// Time for a part to appear that is being made while its holder is changed.
const BORN_WITHIN: Duration = Duration::from_secs(1);
const BORN_PAUSE: Duration = Duration::from_millis(50);

/// Result for the parts of a changed execution.
#[derive(Debug, Default)]
struct Reached {
    /// The holder is in the requested state, whatever its own answer was.
    so: bool,
    /// Parts that this request brought into the requested state.
    count: usize,
    /// Why it failed for other parts.
    failed: Vec<Refusal>,
}

/// Result for one part.
enum Fate {
    /// This request brought it into the requested state.
    Reached,
    /// It was in that state, has ended, or takes the change over when it is made.
    Moot,
    /// The change failed.
    Failed(Refusal),
}

/// Result for a changed execution and its parts.
#[derive(Debug)]
pub(super) struct Changed {
    /// Result of the execution itself. A refusal only if it was in the requested state before and
    /// its parts were reached.
    pub(super) own: Result<ApiReply, (Refusal, Option<Arc<ExecutionState>>)>,
    verb: ExecutionVerb,
    /// Parts that this request brought into the requested state.
    reached: usize,
    /// Why it failed for other parts.
    failed: Vec<Refusal>,
}

impl Changed {
    /// True if the same request can succeed further in a moment.
    pub(super) fn is_pausing(&self) -> bool {
        let own = self.own.as_ref().err();
        let own = own.is_some_and(|(refusal, _)| refusal.is_pausing());
        own || self.failed.iter().any(Refusal::is_pausing)
    }

    /// The execution's state after the change, if it is known.
    pub(super) fn state(&self) -> Option<&ExecutionState> {
        match &self.own {
            Ok(reply) => reply.state.as_deref(),
            Err((_, state)) => state.as_deref(),
        }
    }

    /// The answer.
    pub(super) fn into_reply(self) -> ApiReply {
        let (verb, reached) = (self.verb, self.reached);
        let mut reply = match self.own {
            Ok(reply) => reply,
            Err((refusal, state)) => {
                return ApiReply {
                    message: format!("{verb} reached {reached} of its parts; itself: {refusal}"),
                    state,
                    ..ApiReply::default()
                };
            }
        };
        if reached > 0 {
            reply.message += &format!("; so it is with {reached} of its parts");
        }
        let count = self.failed.len();
        if let Some(refusal) = foremost(self.failed) {
            reply.message += &format!("; {count} of its parts are not: {refusal}");
        }
        reply
    }
}

impl Api {
    /// Changes an execution, and its parts with it.
    pub(super) async fn change(&self, asked: Asked<'_>, entry: Entry) -> Answered<Changed> {
        let state = &entry.message.state;
        let (id, submitted_at) = (state.execution, state.submitted_at);
        let live = state.spread.is_some() && !state.phase.is_terminal();
        let of_part = match asked.change {
            Change::Pause | Change::Resume => Some(asked.change.clone()),
            Change::Adjust(change) => Some(Change::Adjust(change.for_part(submitted_at))),
            Change::Cancel | Change::Retry { .. } => None,
        };
        let state = live.then(|| state.clone());
        let own = self.change_one(asked, entry).await;
        let mut changed = Changed {
            own: Ok(ApiReply::default()),
            verb: asked.change.verb(),
            reached: 0,
            failed: Vec::new(),
        };
        let Some(change) = of_part.filter(|_| live) else {
            changed.own = Ok(own?);
            return Ok(changed);
        };
        let of_part = Asked {
            change: &change,
            name: None,
            ..asked
        };
        let parts = self.change_parts(of_part, asked, id).await?;
        (changed.reached, changed.failed) = (parts.count, parts.failed);
        changed.own = match own {
            Ok(reply) => Ok(reply),
            // The execution was in the requested state, but the earlier request did not reach all
            // its parts.
            Err(refusal) if parts.so && changed.failed.is_empty() && parts.count > 0 => {
                Err((refusal, state))
            }
            Err(refusal) => {
                if !parts.so || changed.failed.is_empty() {
                    changed.failed.insert(0, refusal);
                }
                let (verb, reached) = (changed.verb, changed.reached);
                let foremost = foremost(changed.failed);
                return Err(match foremost {
                    Some(refusal) if reached > 0 => Refusal::InPart {
                        verb,
                        reached,
                        refusal: Box::new(refusal),
                    },
                    Some(refusal) => refusal,
                    None => Refusal::Overtaken {
                        name: id.to_string(),
                    },
                });
            }
        };
        Ok(changed)
    }

    /// Changes the parts of an execution, and their parts.
    async fn change_parts(
        &self,
        asked: Asked<'_>,
        of_itself: Asked<'_>,
        id: ExecutionId,
    ) -> Answered<Reached> {
        let mut reached = Reached::default();
        // The execution may have split at this moment, so read its ledger now. A part may have
        // split before it was reached, so read its ledger afterwards.
        let mut holders = vec![id];
        while !holders.is_empty() {
            let mut parts = Vec::new();
            for holder in holders {
                let Some(last) = self.last(asked.tenant, holder).await? else {
                    continue;
                };
                let now = &last.message.state;
                reached.so |=
                    holder == id && !now.phase.is_terminal() && is_so(of_itself.change, now);
                let rests = is_paused(now);
                parts.extend(now.parts().iter().map(|part| (part.id, rests)));
            }
            holders = parts.iter().map(|(part, _)| *part).collect();
            let mut fates = stream::iter(parts)
                .map(|(part, rests)| async move { self.change_part(asked, part, rests).await })
                .buffer_unordered(AT_ONCE);
            while let Some(fate) = fates.next().await {
                match fate? {
                    Fate::Reached => reached.count += 1,
                    Fate::Moot => {}
                    Fate::Failed(refusal) => reached.failed.push(refusal),
                }
            }
        }
        Ok(reached)
    }

    /// Changes one part. `rests`: its holder is paused or has an order to pause.
    async fn change_part(
        &self,
        asked: Asked<'_>,
        part: ExecutionId,
        rests: bool,
    ) -> Answered<Fate> {
        let Asked { change, tenant, .. } = asked;
        let began = Instant::now();
        let entry = loop {
            if let Some(entry) = self.last(tenant, part).await? {
                break entry;
            }
            // A part is not made while its holder is paused, and a new part takes over its holder's
            // changes. But a service that is making it now may have read the holder's ledger
            // earlier.
            if !matches!(change, Change::Adjust(_)) || rests {
                return Ok(Fate::Moot);
            }
            if began.elapsed() >= BORN_WITHIN {
                return Ok(Fate::Failed(Refusal::Unborn(part)));
            }
            tokio::time::sleep(BORN_PAUSE).await;
        };
        if is_so(change, &entry.message.state) {
            return Ok(Fate::Moot);
        }
        Ok(match self.change_one(asked, entry).await {
            Ok(_) => Fate::Reached,
            // It is in the requested state, or has ended, since it was read.
            Err(refusal) if refusal.is_moot() => Fate::Moot,
            Err(refusal) => Fate::Failed(refusal),
        })
    }

    async fn last(&self, tenant: &Tenant, id: ExecutionId) -> Answered<Option<Entry>> {
        Ok(self.effects.ledger.last(tenant, id).await?)
    }
}

/// The refusal to report. One that a retry can solve in a moment comes first.
fn foremost(mut refusals: Vec<Refusal>) -> Option<Refusal> {
    let soon = refusals.iter().position(Refusal::is_pausing);
    match refusals.is_empty() {
        true => None,
        false => Some(refusals.swap_remove(soon.unwrap_or(0))),
    }
}

/// True if nothing is left to do: the execution has ended or is in the requested state.
fn is_so(change: &Change, state: &ExecutionState) -> bool {
    let so = match change {
        Change::Adjust(change) => {
            let mut changed = state.adjusted.as_deref().cloned().unwrap_or_default();
            changed.merge(change);
            state.adjusted.as_deref() == Some(&changed)
        }
        Change::Pause => is_paused(state),
        Change::Resume => !is_paused(state),
        Change::Cancel | Change::Retry { .. } => false,
    };
    state.phase.is_terminal() || so
}
