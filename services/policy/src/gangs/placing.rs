//! Binds the members of gangs, and keeps them together until all have started.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId};

use super::{Gangs, Members, Round, is_ready};
use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::GangKey;
use crate::lifecycle::cluster::Stage;
use crate::time::Millis;

/// Time until a gang without places is tried again, in ms.
const AGAIN_MS: u64 = 500;

impl Gangs {
    /// Acts on gangs with a change: places them, or keeps them together.
    #[must_use]
    pub fn act(&mut self, life: &mut Lifecycle, of: &impl Members) -> Round {
        let mut round = Round::default();
        for key in std::mem::take(&mut self.due) {
            if self.act_on_gang(life, &key, of, &mut round) {
                self.due.insert(key);
            }
        }
        round
    }

    /// Returns true if the gang needs another look without a further event.
    fn act_on_gang(
        &mut self,
        life: &mut Lifecycle,
        key: &GangKey,
        of: &impl Members,
        round: &mut Round,
    ) -> bool {
        let now = life.now;
        let Some(gang) = self.gangs.get(key) else {
            return false;
        };
        if gang.begun.is_some() {
            return self.keep_together(life, key, round);
        }
        let Some(members) = gang.complete() else {
            return false;
        };
        let (retry_at, sent) = (gang.retry_at, gang.sent);
        if members.iter().all(|id| is_bound(life, *id)) {
            // The replica that bound them sends the capsules. If it is gone, the sweep of each
            // member does.
            if !sent && members.iter().all(|id| of.is_admitted(life, *id)) {
                members.iter().for_each(|id| life.send_capsule(*id));
            }
            if let Some(gang) = self.gangs.get_mut(key) {
                gang.sent = true;
            }
            return false;
        }
        let pending = |id: &ExecutionId| life.stage(*id) == Some(Stage::Pending);
        if !members.iter().all(pending) {
            return false;
        }
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.sent = false;
        }
        // The replica that holds all reservations places the gang, whichever is preferred now.
        if retry_at > now.mono {
            return true;
        }
        if !members.iter().all(|id| is_ready(of, life, *id)) {
            return false;
        }
        let unreserved = members.iter().filter(|id| !of.is_admitted(life, **id));
        let unreserved: Vec<_> = unreserved.copied().collect();
        if unreserved.is_empty() {
            let lacking = life.bind_together(&members);
            if let Some(gang) = self.gangs.get_mut(key) {
                if !lacking.is_empty() {
                    gang.retry_at = now.mono.plus(AGAIN_MS);
                }
                gang.lacking = Some(lacking);
            }
        }
        round.unreserved.extend(unreserved);
        true
    }

    /// Handles a bound member of a gang that is not fully bound: reviews it again, and gives it
    /// back after a timeout. Returns false if the gang is fully bound.
    pub fn awaits_members(&mut self, life: &mut Lifecycle, id: ExecutionId) -> bool {
        let now = life.now;
        if self.gangs.is_empty() {
            return false;
        }
        let Some((key, _)) = life.gang_of(id) else {
            return false;
        };
        let Some(gang) = self.gangs.get(&key).filter(|g| g.begun.is_none()) else {
            return false;
        };
        if self.is_alone(life, id) {
            return false;
        }
        // Once the capsules were sent, a member may be bound again on its own.
        let sent = gang.sent;
        let bound = |id: &ExecutionId| match life.stage(*id) {
            Some(Stage::Bound(..)) => sent || is_bound(life, *id),
            _ => false,
        };
        if gang.complete().is_some_and(|all| all.iter().all(bound)) {
            return false;
        }
        let Some(e) = life.cluster().execution(id) else {
            return false;
        };
        let limit = life.config.gangs.start_ms;
        let waited = now.mono.since(e.since);
        if waited < limit || life.defers(id, life.config.grace_ms) {
            let again = now.mono.plus(limit.saturating_sub(waited).max(AGAIN_MS));
            life.set_due(id, again);
            return true;
        }
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.given_back = true;
            gang.retry_at = now.mono.plus(AGAIN_MS);
        }
        let refused = Event::Refused {
            reason: format!(
                "given back: its gang {} was not bound in full within {limit} ms",
                key.1
            ),
            offer: 0,
            fault: None,
        };
        life.append(id, vec![refused]);
        true
    }

    /// Handles a gang that has begun with a member that finds no place: the started members yield.
    fn keep_together(&mut self, life: &mut Lifecycle, key: &GangKey, round: &mut Round) -> bool {
        let now = life.now;
        let Some(gang) = self.gangs.get(key) else {
            return false;
        };
        let Some(begun) = gang.begun.filter(|begun| *begun != Millis(0)) else {
            return false;
        };
        let Some(members) = gang.complete() else {
            // A member has ended: the others go on independently.
            let members: Vec<_> = gang.members.iter().map(|(_, id)| *id).collect();
            if let Some(gang) = self.gangs.get_mut(key) {
                (gang.begun, gang.dissolving) = (Some(Millis(0)), false);
            }
            round.alone.extend(members);
            return false;
        };
        let stages: Vec<_> = members.iter().map(|id| life.stage(*id)).collect();
        let started = |s: &Option<Stage>| matches!(s, Some(Stage::Started(..)));
        let lacks = |s: &Option<Stage>| matches!(s, Some(Stage::Pending | Stage::Bound(..)));
        if !stages.iter().any(lacks) {
            // They have started together; from now on each moves independently.
            if let Some(gang) = self.gangs.get_mut(key) {
                (gang.begun, gang.dissolving) = (Some(Millis(0)), false);
            }
            return false;
        }
        // Nothing of the gang runs or has its capsule: who finds a place first must not start alone.
        let ended = members
            .iter()
            .all(|id| match life.cluster().execution(*id) {
                Some(e) => {
                    e.stage == Stage::Pending || e.is_appending() && !started(&Some(e.stage))
                }
                None => false,
            });
        if now.mono.since(begun) < life.config.gangs.start_ms && !ended {
            return true;
        }
        if !stages.iter().any(started) {
            if let Some(gang) = self.gangs.get_mut(key) {
                (gang.begun, gang.sent, gang.given_back) = (None, false, true);
                gang.dissolving = false;
            }
            members.iter().for_each(|id| life.stop_waiting(*id));
            round.alone.extend(members);
            return true;
        }
        // From now on no replica binds the members. One replica sends the orders.
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.dissolving = true;
        }
        let late = life.config.gangs.start_ms + life.config.order_grace_ms;
        if !life.places_gangs() && now.mono.since(begun) < late {
            return true;
        }
        for id in members {
            let Some(e) = life.cluster().execution(id) else {
                continue;
            };
            let Stage::Started(ix, _) = e.stage else {
                continue;
            };
            life.push(Action::Control {
                node: life.cluster().node(ix).id.clone(),
                request: ControlRequest::Yield {
                    execution: id,
                    epoch: e.epoch,
                    cause: Cause::NotTaken {
                        reason: format!("its gang {} could not start in full", key.1),
                        fault: None,
                    },
                    to: None,
                    decision: None,
                },
                ticket: None,
            });
        }
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.begun = Some(now.mono);
        }
        true
    }
}

/// True for a member whose binding is known to be stored.
fn is_bound(life: &Lifecycle, id: ExecutionId) -> bool {
    let e = life.cluster().execution(id);
    e.is_some_and(|e| matches!(e.stage, Stage::Bound(..)) && !e.is_appending())
}
