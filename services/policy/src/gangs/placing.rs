//! Gangs: sets of executions that start together or not at all.
//!
//! One replica places all gangs, one after the other. Another one does so after a grace period if
//! that one does not. Each gets places for all its members or none, so two gangs never hold half of
//! what the other needs. Each member is bound by its own append. The capsules are sent once all of
//! these are stored.
//!
//! If not all members are bound in time, the bindings are given back and tried again. A member that
//! a node refuses is bound elsewhere at once. If that does not succeed in time, the started members
//! yield, no member is bound alone, and the gang starts again. A gang of which nothing runs any more
//! starts again at once.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::scheduling::Gang;
use fiec_schemas::{Cause, Event, ExecutionId, Tenant, Timestamp};

use crate::engine::{Action, Policy};
use crate::holds::GangKey;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::placement::Ask;
use crate::time::Millis;

/// Time until a gang without places is tried again, in ms.
const AGAIN_MS: u64 = 500;

impl Policy {
    /// True if a complete gang waits for places.
    pub(crate) fn gathers(&self) -> bool {
        let waits = |id| {
            let e = self.life.cluster().execution(id);
            e.is_some_and(|e| e.stage == Stage::Pending)
        };
        let mut gangs = self.holds.gangs.values();
        gangs.any(|gang| {
            let members = gang.complete();
            members.is_some_and(|ids| ids.into_iter().any(waits))
        })
    }

    /// True for a member that is bound on its own because its gang has begun.
    pub(crate) fn is_alone(&self, id: ExecutionId) -> bool {
        self.holds.is_alone(&self.life, id)
    }

    /// True while the capsule of a binding must wait for the rest of its gang.
    pub fn withholds(&self, id: ExecutionId) -> bool {
        let Some(gang) = gang_of(&self.life, id).and_then(|key| self.holds.gangs.get(&key)) else {
            return false;
        };
        // A gang that has begun waits for nobody, even if members have ended since.
        gang.begun.is_none() && !gang.sent && !self.is_alone(id)
    }

    pub(crate) fn leave_gang(
        &mut self,
        key: GangKey,
        member: (Timestamp, ExecutionId),
        started: bool,
    ) {
        let Some(gang) = self.holds.gangs.get_mut(&key) else {
            return;
        };
        gang.members.remove(&member);
        if started {
            gang.begun.get_or_insert(Millis(0));
        }
        if gang.members.is_empty() {
            self.holds.gangs.remove(&key);
            self.holds.gangs_due.remove(&key);
        } else {
            self.holds.gangs_due.insert(key);
            self.life.changed().holds = true;
        }
    }

    /// Notes that a member was bound, has started, or waits again.
    pub(crate) fn note_gang(&mut self, id: ExecutionId) {
        let now = self.life.now;
        if self.holds.gangs.is_empty() {
            return;
        }
        let Some(key) = gang_of(&self.life, id) else {
            return;
        };
        let started = matches!(self.life.stage(id), Some(Stage::Started(..)));
        if let Some(gang) = self.holds.gangs.get_mut(&key) {
            if started && gang.begun.is_none() {
                // For members that started before this replica, the moment of the start is unknown.
                gang.begun = Some(if self.life.loaded {
                    now.mono
                } else {
                    Millis(0)
                });
                // Members that were refused in the meantime are bound on their own from now on.
                let members: Vec<_> = gang.members.iter().map(|(_, id)| *id).collect();
                members.into_iter().for_each(|id| self.wait_if_pending(id));
            }
            self.holds.gangs_due.insert(key);
            self.life.changed().holds = true;
        }
    }

    pub(crate) fn gang_in_words(&self, tenant: &Tenant, gang: &Gang) -> String {
        let key = (tenant.clone(), gang.name.clone());
        let Some(together) = self.holds.gangs.get(&key) else {
            return format!("it waits for its gang {}", gang.name);
        };
        let count = together.members.len();
        let Some(members) = together.complete() else {
            return format!(
                "it waits for its gang {}, of which {count} of {} members are there",
                gang.name, together.size
            );
        };
        let ready = members.iter().filter(|id| self.is_ready(**id)).count();
        if ready < members.len() {
            return format!(
                "it waits for its gang {}, of which {ready} of {} members could start now",
                gang.name,
                members.len()
            );
        }
        let waits = self.quotas.in_words(&self.life, members[0], &self.sets());
        let lacking = together.lacking.as_ref().map(Vec::len);
        let waits = waits.unwrap_or_else(|| match lacking {
            Some(lacking) => {
                let found = members.len().saturating_sub(lacking);
                format!("there is room for {found} of them now")
            }
            None => "there is no room for all of it now".to_owned(),
        });
        let first = self.holds.first.as_ref();
        let keeps = first.is_some_and(|f| f.keeps && f.key == key);
        format!(
            "it starts together with its gang {} of {}: {waits}{}",
            gang.name,
            members.len(),
            if keeps {
                ", and what becomes free is kept for it"
            } else {
                ""
            }
        )
    }

    /// True for a pending member whose dependencies have ended.
    pub(crate) fn is_ready(&self, id: ExecutionId) -> bool {
        let held = self.holds.held.get(&id);
        let free = held.is_none_or(|h| h.after.is_empty() && h.fails.is_none());
        let e = self.life.cluster().execution(id);
        free && e.is_some_and(|e| e.stage == Stage::Pending && !e.is_appending())
    }

    pub(crate) fn act_on_gangs(&mut self) {
        for key in std::mem::take(&mut self.holds.gangs_due) {
            if self.act_on_gang(&key) {
                self.holds.gangs_due.insert(key);
            }
        }
    }

    /// Returns true if the gang needs another look without a further event.
    fn act_on_gang(&mut self, key: &GangKey) -> bool {
        let now = self.life.now;
        let Some(gang) = self.holds.gangs.get(key) else {
            return false;
        };
        if gang.begun.is_some() {
            return self.keep_together(key);
        }
        let Some(members) = gang.complete() else {
            return false;
        };
        let (retry_at, sent) = (gang.retry_at, gang.sent);
        let is = |id: &ExecutionId, bound: bool| {
            let e = self.life.cluster().execution(*id);
            e.is_some_and(|e| match e.stage {
                Stage::Bound(..) => bound && !e.is_appending(),
                Stage::Pending => !bound,
                _ => false,
            })
        };
        if members.iter().all(|id| is(id, true)) {
            // The replica that bound them sends the capsules. If it is gone, the sweep of each
            // member does.
            if !sent
                && members
                    .iter()
                    .all(|id| self.quotas.is_admitted(&self.life, *id))
            {
                members.iter().for_each(|id| self.life.send_capsule(*id));
            }
            if let Some(gang) = self.holds.gangs.get_mut(key) {
                gang.sent = true;
            }
            return false;
        }
        if !members.iter().all(|id| is(id, false)) {
            return false;
        }
        if let Some(gang) = self.holds.gangs.get_mut(key) {
            gang.sent = false;
        }
        // The replica that holds all reservations places the gang, whichever is preferred now.
        if retry_at > now.mono {
            return true;
        }
        if !members.iter().all(|id| self.is_ready(*id)) {
            return false;
        }
        let mut admitted = true;
        for id in &members {
            admitted &= self.quotas.admit(&mut self.life, *id);
        }
        if admitted {
            let lacking = self.place_gang(&members);
            if let Some(gang) = self.holds.gangs.get_mut(key) {
                if !lacking.is_empty() {
                    gang.retry_at = now.mono.plus(AGAIN_MS);
                }
                gang.lacking = Some(lacking);
            }
        }
        true
    }

    /// Places all members or none. Returns the members without a place.
    fn place_gang(&mut self, members: &[ExecutionId]) -> Vec<ExecutionId> {
        let now = self.life.now;
        for id in members {
            if self.hold_if_deadly(*id, &Cause::Initial) {
                return vec![*id];
            }
        }
        let (before, mut placed, mut lacking) = (self.life.out.len(), Vec::new(), Vec::new());
        for id in members {
            let Some(e) = self.life.cluster().execution(*id) else {
                lacking.push(*id);
                continue;
            };
            let cause = match e.epoch {
                0 => Cause::Initial,
                _ => Cause::NotTaken {
                    reason: "its gang began anew".to_owned(),
                    fault: None,
                },
            };
            let known = e.extra.as_ref().and_then(|x| x.cause.clone());
            let (mark, cause) = (self.life.out.len(), known.unwrap_or(cause));
            let kept = self.kept_from(*id);
            let apart = self.apart_from(now, *id);
            let ask = Ask {
                apart,
                kept,
                // A member in a node's queue would start later than the others.
                free_slot: true,
                ..Ask::of(e)
            };
            let choice = self.life.choose(&ask);
            if let Some(choice) = choice {
                self.append_bound(*id, choice, cause, None);
            }
            if self.life.out.len() == mark {
                // The other members are tried as well: preemption needs to know exactly which ones
                // lack a place.
                lacking.push(*id);
            } else {
                placed.push(*id);
            }
        }
        if lacking.is_empty() {
            return lacking;
        }
        self.life.out.truncate(before);
        for id in placed {
            self.life.take_back(id);
        }
        lacking
    }

    /// Handles a bound member of a gang that is not fully bound: reviews it again, and gives it
    /// back after a timeout. Returns false if the gang is fully bound.
    pub(crate) fn wait_for_gang(&mut self, id: ExecutionId) -> bool {
        let now = self.life.now;
        let Some(key) = gang_of(&self.life, id) else {
            return false;
        };
        let Some(gang) = self.holds.gangs.get(&key).filter(|g| g.begun.is_none()) else {
            return false;
        };
        if self.is_alone(id) {
            return false;
        }
        let bound = |id: &ExecutionId| matches!(self.life.stage(*id), Some(Stage::Bound(..)));
        if gang.complete().is_some_and(|all| all.iter().all(bound)) {
            return false;
        }
        let Some(e) = self.life.cluster().execution(id) else {
            return false;
        };
        let limit = self.life.config.gang_ms;
        let waited = now.mono.since(e.since);
        if waited < limit || self.life.defers(id, self.life.config.grace_ms) {
            let again = now.mono.plus(limit.saturating_sub(waited).max(AGAIN_MS));
            self.life.set_due(id, again);
            return true;
        }
        if let Some(gang) = self.holds.gangs.get_mut(&key) {
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
        self.life.append(id, vec![refused]);
        true
    }

    /// Handles a gang that has begun with a member that finds no place: the started members yield.
    fn keep_together(&mut self, key: &GangKey) -> bool {
        let now = self.life.now;
        let Some(gang) = self.holds.gangs.get(key) else {
            return false;
        };
        let Some(begun) = gang.begun.filter(|begun| *begun != Millis(0)) else {
            return false;
        };
        let Some(members) = gang.complete() else {
            // A member has ended: the others go on independently.
            let members: Vec<_> = gang.members.iter().map(|(_, id)| *id).collect();
            if let Some(gang) = self.holds.gangs.get_mut(key) {
                (gang.begun, gang.dissolving) = (Some(Millis(0)), false);
            }
            members.into_iter().for_each(|id| self.wait_if_pending(id));
            return false;
        };
        let stages: Vec<_> = members.iter().map(|id| self.life.stage(*id)).collect();
        let started = |s: &Option<Stage>| matches!(s, Some(Stage::Started(..)));
        let lacks = |s: &Option<Stage>| matches!(s, Some(Stage::Pending | Stage::Bound(..)));
        if !stages.iter().any(lacks) {
            // They have started together; from now on each moves independently.
            if let Some(gang) = self.holds.gangs.get_mut(key) {
                (gang.begun, gang.dissolving) = (Some(Millis(0)), false);
            }
            return false;
        }
        // Nothing of the gang runs or has its capsule: who finds a place first must not start alone.
        let ended = members
            .iter()
            .all(|id| match self.life.cluster().execution(*id) {
                Some(e) => {
                    e.stage == Stage::Pending || e.is_appending() && !started(&Some(e.stage))
                }
                None => false,
            });
        if now.mono.since(begun) < self.life.config.gang_ms && !ended {
            return true;
        }
        if !stages.iter().any(started) {
            if let Some(gang) = self.holds.gangs.get_mut(key) {
                (gang.begun, gang.sent, gang.given_back) = (None, false, true);
                gang.dissolving = false;
            }
            for id in members {
                self.life.stop_waiting(id);
                self.wait_if_pending(id);
            }
            return true;
        }
        // From now on no replica binds the members. One replica sends the orders.
        if let Some(gang) = self.holds.gangs.get_mut(key) {
            gang.dissolving = true;
        }
        let late = self.life.config.gang_ms + self.life.config.order_grace_ms;
        if !self.life.places_gangs() && now.mono.since(begun) < late {
            return true;
        }
        for id in members {
            let Some(e) = self.life.cluster().execution(id) else {
                continue;
            };
            let Stage::Started(ix, _) = e.stage else {
                continue;
            };
            self.life.out.push(Action::Control {
                node: self.life.cluster().node(ix).id.clone(),
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
        if let Some(gang) = self.holds.gangs.get_mut(key) {
            gang.begun = Some(now.mono);
        }
        true
    }
}

/// The gang of an execution.
fn gang_of(life: &Lifecycle, id: ExecutionId) -> Option<GangKey> {
    let gang = life.bonds(id)?.gang.as_ref()?;
    let tenant = life.cluster().execution(id)?.tenant.clone();
    Some((tenant, gang.name.clone()))
}

impl crate::holds::Holds {
    /// True for a member that is bound on its own because its gang has begun.
    pub(crate) fn is_alone(&self, life: &Lifecycle, id: ExecutionId) -> bool {
        let Some(gang) = gang_of(life, id).and_then(|key| self.gangs.get(&key)) else {
            return true;
        };
        if gang.begun.is_some() {
            return !(gang.dissolving && gang.complete().is_some());
        }
        // A bound gang with members that have ended must have begun earlier.
        let bound = life.cluster().execution(id).is_some_and(|e| e.epoch > 0);
        bound && !gang.given_back && gang.complete().is_none()
    }

    /// The executions that are reserved together: the gang, or only this one.
    pub(crate) fn set_of(&self, life: &Lifecycle, id: ExecutionId) -> Option<Vec<ExecutionId>> {
        match gang_of(life, id) {
            Some(key) if !self.is_alone(life, id) => self.gangs.get(&key)?.complete(),
            _ => Some(vec![id]),
        }
    }
}
