//! A pause reaches the parts that an execution has split off, and theirs; so do its end and every
//! change (`adjust`, `pin`, `exclude`): a part is the same submission for its range, so what is
//! changed about the whole holds for each that computes a piece of it. A deadline stays the moment
//! that it is for the whole. What is not made yet takes the change over from its holder's ledger as
//! it is made. A cancel needs no help here: parts whose holder has ended are cancelled by the
//! policy, for whoever asked.

use std::time::Duration;

use fiec_broker::Entry;
use fiec_schemas::messages::{ApiReply, ExecutionVerb};
use fiec_schemas::{ExecutionId, ExecutionState, Tenant};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::changes::{Asked, Change, is_paused};
use super::{Answered, Api};
use crate::refusal::Refusal;

/// Parts that are changed at the same time.
const AT_ONCE: usize = 16;
/// A part that is being made while its holder is changed is there within this.
const BORN_WITHIN: Duration = Duration::from_secs(1);
const BORN_PAUSE: Duration = Duration::from_millis(50);

/// What became of the parts of an execution that was changed.
#[derive(Debug, Default)]
struct Reached {
    /// Their holder is as it is asked to be, whatever it was that answered.
    so: bool,
    /// So many are, by this request.
    count: usize,
    /// Why others are not.
    failed: Vec<Refusal>,
}

/// What became of one part.
enum Fate {
    /// It is as it is asked to be, by this request.
    Reached,
    /// It was so before, has ended, or is made so later.
    Moot,
    /// It is not so.
    Failed(Refusal),
}

/// What became of an execution that was changed, and of its parts.
#[derive(Debug)]
pub(super) struct Changed {
    /// Of itself. A refusal only where it was so before and its parts were reached.
    pub(super) own: Result<ApiReply, (Refusal, Option<ExecutionState>)>,
    verb: ExecutionVerb,
    /// Parts that are as asked, by this request.
    reached: usize,
    /// Why others are not.
    failed: Vec<Refusal>,
}

impl Changed {
    /// True where the same request comes further in a moment.
    pub(super) fn is_pausing(&self) -> bool {
        let own = self.own.as_ref().err();
        let own = own.is_some_and(|(refusal, _)| refusal.is_pausing());
        own || self.failed.iter().any(Refusal::is_pausing)
    }

    /// Its state after the change, where that is known.
    pub(super) fn state(&self) -> Option<&ExecutionState> {
        match &self.own {
            Ok(reply) => reply.state.as_ref(),
            Err((_, state)) => state.as_ref(),
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
            Change::Cancel => None,
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
            // What is so already may have parts that were not reached when that was asked.
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

    /// Changes the parts of one, and theirs.
    async fn change_parts(
        &self,
        asked: Asked<'_>,
        of_itself: Asked<'_>,
        id: ExecutionId,
    ) -> Answered<Reached> {
        let mut reached = Reached::default();
        // It may have been split at this moment: what its ledger says now counts. And a part may
        // have split before it was reached: it is read after that.
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

    /// Changes one part; `rests`: its holder is paused, or is to pause.
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
            // It is not made while its holder is paused, and as it is made it takes over what was
            // changed about that before. Whoever is making it just now may have looked earlier.
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
            // It is as it is asked to be, or has ended, since it was looked at.
            Err(refusal) if refusal.is_moot() => Fate::Moot,
            Err(refusal) => Fate::Failed(refusal),
        })
    }

    async fn last(&self, tenant: &Tenant, id: ExecutionId) -> Answered<Option<Entry>> {
        Ok(self.effects.ledger.last(tenant, id).await?)
    }
}

/// The refusal that is told: before all others that the same request can go on in a moment.
fn foremost(mut refusals: Vec<Refusal>) -> Option<Refusal> {
    let soon = refusals.iter().position(Refusal::is_pausing);
    match refusals.is_empty() {
        true => None,
        false => Some(refusals.swap_remove(soon.unwrap_or(0))),
    }
}

/// Whether nothing is to be done about one: it has ended, or is as it is asked to be.
fn is_so(change: &Change, state: &ExecutionState) -> bool {
    let so = match change {
        Change::Adjust(change) => {
            let mut changed = state.adjusted.as_deref().cloned().unwrap_or_default();
            changed.merge(change);
            state.adjusted.as_deref() == Some(&changed)
        }
        Change::Pause => is_paused(state),
        Change::Resume => !is_paused(state),
        Change::Cancel => false,
    };
    state.phase.is_terminal() || so
}
