//! Makes parts, gives back those without a place, and ends those that nobody takes back.
//!
//! A part is given back if it finds no place for [`crate::SpreadingSettings::dwell_ms`] while its
//! holder waits for it: the holder then computes the rest itself. If a part fails or is cancelled,
//! its holder fails. If a holder ends without its parts, or restarts without them, the parts are
//! cancelled.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId, Fault};

use super::Ranges;
use super::member::Member;
use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Presence, Stage};

/// Most executions of each kind that one round handles.
const AT_ONCE: usize = 256;

impl Ranges {
    /// The periodic work: makes parts and ends executions. Returns parts that may wait for a place
    /// again.
    #[must_use]
    pub fn settle(&mut self, life: &mut Lifecycle) -> Vec<ExecutionId> {
        if self.members.is_empty() {
            return Vec::new();
        }
        self.look_for_unknown(life);
        let released = self.end_orphans(life);
        self.fail_without_part(life);
        released
    }

    /// Looks up unknown parts and holders, and makes parts that do not exist yet.
    fn look_for_unknown(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        let again = now.mono.plus(2 * life.config.look_ms);
        let due = self.unknown.iter();
        let due = due.filter(|(_, (_, at))| *at <= now.mono);
        let parts: Vec<_> = due
            .map(|(part, (holder, _))| (*part, *holder))
            .take(AT_ONCE)
            .collect();
        for (part, holder) in parts {
            let tenant = life.tenant(holder).filter(|_| !life.knows(part));
            let Some(tenant) = tenant else {
                self.unknown.remove(&part);
                continue;
            };
            self.unknown.insert(part, (holder, again));
            life.push(Action::MakePart {
                part,
                holder,
                tenant,
            });
        }
        let due = self.holders.iter();
        let holders: Vec<_> = due
            .filter(|(_, at)| **at <= now.mono)
            .map(|(holder, _)| *holder)
            .take(AT_ONCE)
            .collect();
        for holder in holders {
            let of = |m: &Member| m.spreading.part_of == Some(holder);
            let mut parts = self.members.iter().filter(|(_, m)| of(m));
            let tenant = parts.next().and_then(|(part, _)| life.tenant(*part));
            let Some(tenant) = tenant.filter(|_| !life.knows(holder)) else {
                self.holders.remove(&holder);
                continue;
            };
            self.holders.insert(holder, again);
            life.push(Action::Lookup {
                execution: holder,
                tenant,
            });
        }
    }

    /// Gives parts back that found no place while their holders wait for them.
    pub(super) fn give_back(&mut self, life: &mut Lifecycle) {
        let members = self.members.iter();
        let waited: Vec<_> = members
            .filter(|(id, _)| !self.failing.contains_key(id))
            .filter_map(|(holder, _)| Some((*holder, self.awaited_by(*holder)?.id)))
            .filter(|(_, part)| self.has_no_place(life, *part))
            .take(AT_ONCE)
            .collect();
        for (holder, part) in waited {
            if life.defers(part, life.config.grace_ms) {
                continue;
            }
            life.stop_waiting(part);
            life.append(part, vec![Event::Returned { to: holder }]);
        }
    }

    /// True for a part without parts of its own that has waited for a place for the dwell time.
    fn has_no_place(&self, life: &Lifecycle, part: ExecutionId) -> bool {
        let now = life.now;
        let alone = self.members.get(&part);
        let alone = alone.is_some_and(|m| m.spreading.parts.is_empty());
        let e = life.cluster().execution(part).filter(|_| alone);
        e.is_some_and(|e| {
            let waited = now.mono.since(e.since) >= life.config.spreading.dwell_ms;
            e.stage == Stage::Pending && !e.is_appending() && waited
        })
    }

    /// Cancels parts whose holders have ended. Returns those whose holders live after all.
    fn end_orphans(&mut self, life: &mut Lifecycle) -> Vec<ExecutionId> {
        let mut released = Vec::new();
        let now = life.now;
        let due = self.orphans.iter();
        let due: Vec<_> = due
            .filter(|(_, orphan)| orphan.again <= now.mono)
            .map(|(part, orphan)| (*part, orphan.who.clone()))
            .take(AT_ONCE)
            .collect();
        let again = now.mono.plus(life.config.order_retry_ms);
        for (part, who) in due {
            if self.is_listed(part) {
                // Its holder, or the holder's current state, was not known at first.
                self.orphans.remove(&part);
                released.push(part);
                continue;
            }
            let Some(e) = life.cluster().execution(part) else {
                // It was never made, or has ended.
                self.orphans.remove(&part);
                continue;
            };
            if let Some(orphan) = self.orphans.get_mut(&part) {
                orphan.again = again;
            }
            let lost = |ix| matches!(life.cluster().node(ix).presence, Presence::Lost { .. });
            let on = match e.stage {
                Stage::Started(ix, _) if !lost(ix) => Some(ix),
                _ => None,
            };
            if e.is_appending() || life.defers(part, life.config.grace_ms) {
                continue;
            }
            match on {
                Some(ix) => life.push(Action::Control {
                    node: life.cluster().node(ix).id.clone(),
                    request: ControlRequest::Cancel {
                        execution: part,
                        who,
                    },
                    ticket: None,
                }),
                None => self.end(life, part, Event::Cancelled { who }),
            }
        }
        released
    }

    /// True for a part that its holder lists.
    fn is_listed(&self, part: ExecutionId) -> bool {
        let member = self.members.get(&part);
        let holder = member.and_then(|m| m.spreading.part_of);
        let holder = holder.and_then(|holder| self.members.get(&holder));
        holder.is_some_and(|m| m.part(part).is_some())
    }

    /// Fails holders of a failed part. A running holder yields first.
    fn fail_without_part(&mut self, life: &mut Lifecycle) {
        let now = life.now;
        let failing = self.failing.iter();
        let failing: Vec<_> = failing
            .map(|(id, (part, reason))| (*id, *part, reason.clone()))
            .take(AT_ONCE)
            .collect();
        for (id, part, reason) in failing {
            let Some(e) = life.cluster().execution(id) else {
                self.failing.remove(&id);
                continue;
            };
            match e.stage {
                _ if e.is_appending() => {}
                Stage::Started(..) if e.order().is_some() => {}
                Stage::Started(..) => {
                    if !e.was_told(now.mono) && !life.defers(id, life.config.order_grace_ms) {
                        life.order_yield(id, Cause::PartFailed { part, reason });
                    }
                }
                _ => {
                    let failed = Event::Failed {
                        reason,
                        stderr: String::new(),
                        fault: Some(Box::new(Fault::Part { id: part })),
                    };
                    self.end(life, id, failed);
                }
            }
        }
    }

    fn end(&mut self, life: &mut Lifecycle, id: ExecutionId, event: Event) {
        if life.defers(id, life.config.grace_ms) {
            return;
        }
        life.end_with(id, event);
    }
}
