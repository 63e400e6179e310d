//! A pause reaches the parts that an execution has split off, and theirs; so does its end. A cancel
//! needs no help here: parts whose holder has ended are cancelled by the policy, for whoever asked.

use fiec_broker::Entry;
use fiec_schemas::messages::ApiReply;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::spread::Part;
use fiec_schemas::{ExecutionState, Phase, Tenant};

use super::executions::{NOT_PAUSED, NOT_YET};
use super::sight::Sight;
use super::{Answered, Api};

impl Api {
    /// Changes an execution, and pauses or resumes its parts with it.
    pub(super) async fn change(
        &self,
        (verb, adjustment): (&str, Option<Adjustment>),
        tenant: &Tenant,
        entry: Entry,
        who: &str,
        sight: &Sight,
    ) -> Answered<ApiReply> {
        let id = entry.message.state.execution;
        let spreads = entry.message.state.spread.is_some();
        let ended = entry.message.state.phase.is_terminal();
        let state = spreads.then(|| entry.message.state.clone());
        let asked = (verb, adjustment);
        let own = self.change_one(asked, tenant, entry, who, sight).await;
        if !spreads || ended || !["pause", "resume"].contains(&verb) {
            return own;
        }
        let (mut reached, mut failed) = (0, Vec::new());
        let mut so = false;
        // It may have been split at this moment: what its ledger says now counts.
        let mut holders = vec![id];
        while let Some(holder) = holders.pop() {
            let Some(last) = self.last(tenant, holder).await? else {
                continue;
            };
            let now = &last.message.state;
            so |= holder == id && !now.phase.is_terminal() && is_so(verb, now);
            for Part { id, .. } in last.message.state.parts() {
                holders.push(*id);
                let Some(part) = self.last(tenant, *id).await? else {
                    // It is not made while its holder is paused.
                    continue;
                };
                if is_so(verb, &part.message.state) {
                    continue;
                }
                match self
                    .change_one((verb, None), tenant, part, who, sight)
                    .await
                {
                    Ok(_) => reached += 1,
                    // It is as it is asked to be, or has ended, since it was looked at.
                    Err(error) if error.ends_with("already") || error.contains(NOT_PAUSED) => {}
                    Err(error) => failed.push(error),
                }
            }
        }
        let mut reply = match own {
            Ok(reply) => reply,
            // What is so already may have parts that were not reached when that was asked.
            Err(error) if so && failed.is_empty() && reached > 0 => {
                return Ok(ApiReply {
                    message: format!("{verb} reached {reached} of its parts; itself: {error}"),
                    state,
                    ..ApiReply::default()
                });
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
            reply.message += &format!("; so it is with {reached} of its parts");
        }
        if let Some(error) = foremost(&failed) {
            reply.message += &format!("; {} of its parts are not: {error}", failed.len());
        }
        Ok(reply)
    }

    async fn last(
        &self,
        tenant: &Tenant,
        id: fiec_schemas::ExecutionId,
    ) -> Answered<Option<Entry>> {
        let last = self.effects.ledger.last(tenant, id).await;
        last.map_err(|error| error.to_string())
    }
}

/// The reason that is told: before all others that the same request can go on in a moment.
fn foremost(reasons: &[String]) -> Option<&str> {
    let soon = reasons.iter().find(|reason| reason.ends_with(NOT_YET));
    soon.or(reasons.first()).map(String::as_str)
}

/// Whether nothing is to be done about a part: it has ended, or is as it is asked to be.
fn is_so(verb: &str, state: &ExecutionState) -> bool {
    let asked = state.requested.as_ref();
    let pauses = asked.is_some_and(|asked| asked.what == "pause");
    let paused = pauses || matches!(state.phase, Phase::Paused { .. });
    state.phase.is_terminal() || paused == (verb == "pause")
}
