//! A pause reaches the parts that an execution has split off, and theirs; so do its end and every
//! change (`adjust`, `pin`, `exclude`): a part is the same submission for its range, so what is
//! changed about the whole holds for each that computes a piece of it. A deadline stays the moment
//! that it is for the whole. What is not made yet takes the change over from its holder's ledger as
//! it is made. A cancel needs no help here: parts whose holder has ended are cancelled by the
//! policy, for whoever asked.

use std::time::Duration;

use fiec_broker::Entry;
use fiec_schemas::messages::ApiReply;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{ExecutionId, ExecutionState, Phase, Tenant};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::executions::{NOT_PAUSED, NOT_YET};
use super::sight::Sight;
use super::{Answered, Api};

/// Parts that are changed at the same time.
const AT_ONCE: usize = 16;
/// A part that is being made while its holder is changed is there within this.
const BORN_WITHIN: Duration = Duration::from_secs(1);
const BORN_PAUSE: Duration = Duration::from_millis(50);

/// What is asked of each part.
#[derive(Clone, Copy)]
struct Asked<'a> {
    verb: &'static str,
    change: Option<&'a Adjustment>,
    tenant: &'a Tenant,
    who: &'a str,
    sight: &'a Sight,
}

/// What became of the parts.
#[derive(Default)]
struct Reached {
    /// Their holder is as it is asked to be, whatever it was that answered.
    so: bool,
    /// So many are, by this request.
    count: usize,
    /// Why others are not.
    failed: Vec<String>,
}

/// What became of one part.
enum Fate {
    /// It is as it is asked to be, by this request.
    Reached,
    /// It was so before, has ended, or is made so later.
    Moot,
    /// It is not so.
    Failed(String),
}

impl Api {
    /// Changes an execution, and its parts with it.
    pub(super) async fn change(
        &self,
        asked: (&str, Option<Adjustment>),
        tenant: &Tenant,
        entry: Entry,
        who: &str,
        sight: &Sight,
    ) -> Answered<ApiReply> {
        let (mut reply, parts) = self.change_whole(asked, tenant, entry, who, sight).await?;
        reply.message += &parts;
        Ok(reply)
    }

    /// The same, and what became of its parts in words of their own; none where there are none.
    pub(super) async fn change_whole(
        &self,
        (verb, adjustment): (&str, Option<Adjustment>),
        tenant: &Tenant,
        entry: Entry,
        who: &str,
        sight: &Sight,
    ) -> Answered<(ApiReply, String)> {
        let state = &entry.message.state;
        let (id, submitted_at) = (state.execution, state.submitted_at);
        let of_parts = ["pause", "resume", "adjust"];
        let verb_of_parts = of_parts.into_iter().find(|known| *known == verb);
        let live = state.spread.is_some() && !state.phase.is_terminal();
        let state = live.then(|| state.clone());
        let change = adjustment.as_ref().map(|c| c.for_part(submitted_at));
        let asked = (verb, adjustment.clone());
        let own = self.change_one(asked, tenant, entry, who, sight).await;
        let Some(verb) = verb_of_parts.filter(|_| live) else {
            return Ok((own?, String::new()));
        };
        let asked = Asked {
            verb,
            change: change.as_ref(),
            tenant,
            who,
            sight,
        };
        let of_itself = Asked {
            change: adjustment.as_ref(),
            ..asked
        };
        let Reached {
            so,
            count: reached,
            mut failed,
        } = self.change_parts(asked, of_itself, id).await?;
        let mut words = String::new();
        let reply = match own {
            Ok(reply) => reply,
            // What is so already may have parts that were not reached when that was asked.
            Err(error) if so && failed.is_empty() && reached > 0 => {
                let reply = ApiReply {
                    message: format!("{verb} reached {reached} of its parts; itself: {error}"),
                    state,
                    ..ApiReply::default()
                };
                return Ok((reply, words));
            }
            Err(error) => {
                if !so || failed.is_empty() {
                    failed.insert(0, error);
                }
                let error = foremost(&failed).unwrap_or_default();
                return Err(match reached {
                    0 => error.to_owned(),
                    _ => format!("{verb} reached {reached} of its parts; {error}"),
                });
            }
        };
        if reached > 0 {
            words += &format!("; so it is with {reached} of its parts");
        }
        if let Some(error) = foremost(&failed) {
            words += &format!("; {} of its parts are not: {error}", failed.len());
        }
        Ok((reply, words))
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
                reached.so |= holder == id && !now.phase.is_terminal() && is_so(of_itself, now);
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
                    Fate::Failed(error) => reached.failed.push(error),
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
        let Asked { verb, tenant, .. } = asked;
        let began = Instant::now();
        let entry = loop {
            if let Some(entry) = self.last(tenant, part).await? {
                break entry;
            }
            // It is not made while its holder is paused, and as it is made it takes over what was
            // changed about that before. Whoever is making it just now may have looked earlier.
            if verb != "adjust" || rests {
                return Ok(Fate::Moot);
            }
            if began.elapsed() >= BORN_WITHIN {
                return Ok(Fate::Failed(format!(
                    "its part {part} is being made; ask once more when `fiec status {part}` knows it"
                )));
            }
            tokio::time::sleep(BORN_PAUSE).await;
        };
        if is_so(asked, &entry.message.state) {
            return Ok(Fate::Moot);
        }
        let change = (verb, asked.change.cloned());
        let done = self.change_one(change, tenant, entry, asked.who, asked.sight);
        Ok(match done.await {
            Ok(_) => Fate::Reached,
            // It is as it is asked to be, or has ended, since it was looked at.
            Err(error) if error.ends_with("already") || error.contains(NOT_PAUSED) => Fate::Moot,
            Err(error) => Fate::Failed(error),
        })
    }

    async fn last(&self, tenant: &Tenant, id: ExecutionId) -> Answered<Option<Entry>> {
        let last = self.effects.ledger.last(tenant, id).await;
        last.map_err(|error| error.to_string())
    }
}

/// The reason that is told: before all others that the same request can go on in a moment.
fn foremost(reasons: &[String]) -> Option<&str> {
    let soon = reasons.iter().find(|reason| reason.ends_with(NOT_YET));
    soon.or(reasons.first()).map(String::as_str)
}

/// Whether nothing is to be done about one: it has ended, or is as it is asked to be.
fn is_so(asked: Asked<'_>, state: &ExecutionState) -> bool {
    let so = match asked.change {
        Some(change) => {
            let mut changed = state.adjusted.as_deref().cloned().unwrap_or_default();
            changed.merge(change);
            state.adjusted.as_deref() == Some(&changed)
        }
        None => is_paused(state) == (asked.verb == "pause"),
    };
    state.phase.is_terminal() || so
}

fn is_paused(state: &ExecutionState) -> bool {
    let asked = state.requested.as_ref();
    let pauses = asked.is_some_and(|asked| asked.what == "pause");
    pauses || matches!(state.phase, Phase::Paused { .. })
}
