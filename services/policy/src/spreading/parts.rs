//! Follows executions whose range is spread over several nodes ([`super::growth`]); [`super::splitting`]
//! makes them split.
//!
//! The service that sees a split first makes the part, also after a restart. The part's id follows
//! from the split, and its ledger begins by compare-and-set. A holder that waits for its last part
//! has no node, and is bound again when that part has ended.
//!
//! A part is given back if it finds no place for [`crate::Config::spread_dwell_ms`] while its
//! holder waits for it: the holder then computes the rest itself. If a part fails or is cancelled,
//! its holder fails. If a holder ends without its parts, or restarts without them, the parts are
//! cancelled.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, EventKind, ExecutionId, Fault, PhaseKind};

use crate::engine::{Action, Policy};
use crate::holds::{Fate, Seen};
use crate::lifecycle::cluster::{Presence, Stage};
use crate::spreading::growth::{Member, Orphan};
use crate::view::LedgerView;

/// Most executions of each kind that one round handles.
const AT_ONCE: usize = 256;
/// Most characters of a part's reason that its holder repeats when it fails.
const REASON_LIMIT: usize = 400;

impl Policy {
    /// Reads from a message of a live execution how it is spread.
    pub(crate) fn note_spread(&mut self, view: &LedgerView<'_>) {
        let now = self.life.now;
        let Some(spreading) = &view.state.spread else {
            return;
        };
        let id = view.state.execution;
        let boundary = view.all(EventKind::Boundary).next_back();
        let left = boundary.and_then(|b| Some(b.of?.saturating_sub(b.index?)));
        let before = self.spread.members.get(&id);
        let gone: Vec<_> = before.map_or_else(Vec::new, |m| {
            let parts = m.spreading.parts.iter().map(|part| part.id);
            parts.filter(|id| !has(spreading, *id)).collect()
        });
        let left = match boundary {
            Some(_) => left,
            None => before.and_then(|m| m.left),
        };
        let first = before.and_then(|m| m.first);
        let first = first.or_else(|| {
            let own = boundary.filter(|_| view.state.commits() == 1)?;
            Some((own.index?, own.compute_us? / 1_000))
        });
        let yields = view.event(EventKind::Yielded).and_then(|y| y.cause());
        let yields = yields == Some(Cause::Parts);
        let waited = before.filter(|m| m.spreading.waits);
        let in_vain = waited
            .filter(|m| yields && m.waits_since < view.state.epoch)
            .and_then(|m| m.spreading.last())
            .filter(|part| spreading.last() == Some(part))
            .map(|part| part.id);
        let waits_since = match before {
            _ if yields => view.state.epoch,
            Some(member) => member.waits_since,
            None => 0,
        };
        for part in gone {
            self.spread.ended.remove(&part);
            self.spread.unknown.remove(&part);
        }
        // Its worker did not see the end that we know of: the ledger's present state counts.
        if let Some(part) = in_vain
            && self.spread.ended.remove(&part).is_some()
        {
            let again = now.mono.plus(2 * self.life.config.look_ms);
            self.spread.unknown.insert(part, (id, again));
        }
        // Replicas that are not preferred wait for a grace period.
        let soon = if self.life.is_mine(id) {
            now.mono
        } else {
            now.mono.plus(self.life.config.grace_ms)
        };
        for part in &spreading.parts {
            if !self.life.knows(part.id) && !self.spread.ended.contains_key(&part.id) {
                let unknown = &mut self.spread.unknown;
                unknown.entry(part.id).or_insert((id, soon));
            }
        }
        self.spread.unknown.remove(&id);
        if let Some(holder) = spreading.part_of
            && !self.life.knows(holder)
            && !self.spread.orphans.contains_key(&id)
        {
            self.spread.holders.entry(holder).or_insert(soon);
        }
        let member = Member {
            spreading: spreading.clone(),
            requested: view.state.requested.is_some(),
            waits_since,
            left,
            first,
        };
        let is_anew =
            view.event(EventKind::Healed).is_some() || self.spread.holders.contains_key(&id);
        self.spread.members.insert(id, member);
        self.note_dropped(id, is_anew);
    }

    /// Finds parts that their holder does not list because its ledger began again without them.
    /// Each message of a part compares that part. All parts of a holder are compared when its
    /// ledger begins again or is read after theirs.
    fn note_dropped(&mut self, id: ExecutionId, is_anew: bool) {
        let now = self.life.now;
        let members = &self.spread.members;
        let of = |part: ExecutionId| members.get(&part)?.spreading.part_of;
        let mut dropped: Vec<_> = of(id).map(|holder| (id, holder)).into_iter().collect();
        if is_anew {
            let parts = members.keys().filter(|part| of(**part) == Some(id));
            dropped.extend(parts.map(|part| (*part, id)));
        }
        dropped.retain(|(part, holder)| {
            let holder = members.get(holder);
            holder.is_some_and(|m| m.part(*part).is_none())
        });
        // The holder's newest state may not be known yet, so the part is compared again before it
        // ends.
        let again = now.mono.plus(2 * self.life.config.look_ms);
        for (part, holder) in dropped {
            let who = format!("policy: {holder}, of which it is a part, does without it");
            let orphan = Orphan { who, again };
            self.spread.orphans.entry(part).or_insert(orphan);
        }
    }

    /// True for a part that its holder lists.
    fn is_listed(&self, part: ExecutionId) -> bool {
        let member = self.spread.members.get(&part);
        let holder = member.and_then(|m| m.spreading.part_of);
        let holder = holder.and_then(|holder| self.spread.members.get(&holder));
        holder.is_some_and(|m| m.part(part).is_some())
    }

    /// Handles the end of an execution, from its last message or an append of this service.
    /// `part_of`: its holder, if known. `why`: who cancelled it, or why it failed.
    pub(crate) fn note_part_end(
        &mut self,
        id: ExecutionId,
        part_of: Option<ExecutionId>,
        (phase, why): (PhaseKind, Option<&str>),
    ) {
        let member = self.spread.members.get(&id);
        let holder = part_of.or_else(|| member.and_then(|m| m.spreading.part_of));
        let Some(fate) = Fate::of(phase) else { return };
        let parts = member.map_or_else(Vec::new, |m| m.spreading.parts.clone());
        let who = match (fate, why) {
            (Fate::Cancelled, Some(who)) => who.to_owned(),
            _ => format!("policy: {id}, of which it is a part, {}", fate.in_words()),
        };
        for part in parts {
            self.disown(part.id, &who);
        }
        if let Some(holder) = holder {
            self.part_ended(holder, id, fate, why);
        }
    }

    fn disown(&mut self, part: ExecutionId, who: &str) {
        let now = self.life.now;
        if self.spread.ended.remove(&part).is_none() {
            let orphan = Orphan {
                who: who.to_owned(),
                again: now.mono,
            };
            self.spread.orphans.entry(part).or_insert(orphan);
        }
        self.spread.unknown.remove(&part);
    }

    /// Handles the end of a part: its holder may resume, or cannot complete any more.
    fn part_ended(
        &mut self,
        holder: ExecutionId,
        part: ExecutionId,
        fate: Fate,
        why: Option<&str>,
    ) {
        self.spread.unknown.remove(&part);
        let member = self.spread.members.get(&holder);
        let Some(found) = member.and_then(|m| m.part(part).copied()) else {
            return;
        };
        self.spread.ended.insert(part, fate);
        if matches!(fate, Fate::Failed | Fate::Cancelled) {
            let mut reason = format!(
                "its part {part}, tiles {} to {}, {}",
                found.from,
                found.to,
                fate.in_words()
            );
            if let Some(why) = why {
                let by = if fate == Fate::Cancelled {
                    " by "
                } else {
                    ": "
                };
                reason.push_str(by);
                reason.extend(why.chars().take(REASON_LIMIT));
            }
            self.life.stop_waiting(holder);
            let failing = self.spread.failing.entry(holder);
            failing.or_insert((part, reason));
        }
        self.wait_if_pending(holder);
    }

    /// Forgets an execution that no longer lives. For a part without a reported end, the ledger may
    /// only have been missing when the shell looked. So the part is looked up again.
    pub(crate) fn forget_spread(&mut self, id: ExecutionId) {
        let member = self.spread.members.remove(&id);
        let holder = member.and_then(|m| m.spreading.part_of);
        let of = holder.and_then(|holder| self.spread.members.get(&holder));
        let out = of.is_some_and(|m| m.part(id).is_some());
        if let Some(holder) = holder.filter(|_| out && !self.spread.ended.contains_key(&id)) {
            let again = self.life.now.mono.plus(2 * self.life.config.look_ms);
            self.spread.unknown.insert(id, (holder, again));
        }
        self.spread.failing.remove(&id);
        self.spread.growth.remove(&id);
        self.spread.orphans.remove(&id);
        self.spread.holders.remove(&id);
    }

    /// True for an execution that is not bound now, because it waits for a part or fails because of
    /// one.
    pub(crate) fn awaits_parts(&self, id: ExecutionId) -> bool {
        self.spread.awaited_by(id).is_some()
            || self.spread.failing.contains_key(&id)
            || self.spread.orphans.contains_key(&id)
    }

    /// Handles the result of a look at the ledger of an unknown part or holder.
    pub(crate) fn spread_seen(&mut self, id: ExecutionId, seen: Seen) {
        if self.life.knows(id) {
            self.spread.holders.remove(&id);
            return;
        }
        if let (Some((holder, _)), Seen::Ended(fate)) = (self.spread.unknown.get(&id), seen) {
            let holder = *holder;
            self.part_ended(holder, id, fate, None);
        }
        let fate = match seen {
            Seen::Ended(fate) => fate.in_words(),
            Seen::Vanished => "is not known any more",
            Seen::Lives => return,
        };
        if self.spread.holders.remove(&id).is_none() {
            return;
        }
        let who = format!("policy: {id}, of which it is a part, {fate}");
        let members = self.spread.members.iter();
        let parts: Vec<_> = members
            .filter(|(_, m)| m.spreading.part_of == Some(id))
            .map(|(part, _)| *part)
            .collect();
        for part in parts {
            self.disown(part, &who);
        }
    }

    /// The periodic work: makes parts, gives them back, ends executions, and lets ranges grow.
    pub(crate) fn look_at_spread(&mut self) {
        let now = self.life.now;
        if self.spread.is_idle() {
            return;
        }
        self.look_for_unknown();
        self.end_orphans();
        self.fail_without_part();
        if now.mono.since(self.spread.looked) >= self.life.config.spread_look_ms {
            self.spread.looked = now.mono;
            self.give_back();
            self.grow();
        }
    }

    /// Looks up unknown parts and holders, and makes parts that do not exist yet.
    fn look_for_unknown(&mut self) {
        let now = self.life.now;
        let again = now.mono.plus(2 * self.life.config.look_ms);
        let due = self.spread.unknown.iter();
        let due = due.filter(|(_, (_, at))| *at <= now.mono);
        let parts: Vec<_> = due
            .map(|(part, (holder, _))| (*part, *holder))
            .take(AT_ONCE)
            .collect();
        for (part, holder) in parts {
            let tenant = self.life.tenant(holder).filter(|_| !self.life.knows(part));
            let Some(tenant) = tenant else {
                self.spread.unknown.remove(&part);
                continue;
            };
            self.spread.unknown.insert(part, (holder, again));
            self.life.out.push(Action::MakePart {
                part,
                holder,
                tenant,
            });
        }
        let due = self.spread.holders.iter();
        let holders: Vec<_> = due
            .filter(|(_, at)| **at <= now.mono)
            .map(|(holder, _)| *holder)
            .take(AT_ONCE)
            .collect();
        for holder in holders {
            let of = |m: &Member| m.spreading.part_of == Some(holder);
            let mut parts = self.spread.members.iter().filter(|(_, m)| of(m));
            let tenant = parts.next().and_then(|(part, _)| self.life.tenant(*part));
            let Some(tenant) = tenant.filter(|_| !self.life.knows(holder)) else {
                self.spread.holders.remove(&holder);
                continue;
            };
            self.spread.holders.insert(holder, again);
            self.life.out.push(Action::Lookup {
                execution: holder,
                tenant,
            });
        }
    }

    /// Gives parts back that found no place while their holders wait for them.
    fn give_back(&mut self) {
        let members = self.spread.members.iter();
        let waited: Vec<_> = members
            .filter(|(id, _)| !self.spread.failing.contains_key(id))
            .filter_map(|(holder, _)| Some((*holder, self.spread.awaited_by(*holder)?.id)))
            .filter(|(_, part)| self.has_no_place(*part))
            .take(AT_ONCE)
            .collect();
        for (holder, part) in waited {
            if self.life.defers(part, self.life.config.grace_ms) {
                continue;
            }
            self.life.stop_waiting(part);
            self.life.append(part, vec![Event::Returned { to: holder }]);
        }
    }

    /// True for a part without parts of its own that has waited for a place for the dwell time.
    fn has_no_place(&self, part: ExecutionId) -> bool {
        let now = self.life.now;
        let alone = self.spread.members.get(&part);
        let alone = alone.is_some_and(|m| m.spreading.parts.is_empty());
        let e = self.life.cluster().execution(part).filter(|_| alone);
        e.is_some_and(|e| {
            let waited = now.mono.since(e.since) >= self.life.config.spread_dwell_ms;
            e.stage == Stage::Pending && !e.is_appending() && waited
        })
    }

    /// Cancels parts whose holders have ended.
    fn end_orphans(&mut self) {
        let now = self.life.now;
        let due = self.spread.orphans.iter();
        let due: Vec<_> = due
            .filter(|(_, orphan)| orphan.again <= now.mono)
            .map(|(part, orphan)| (*part, orphan.who.clone()))
            .take(AT_ONCE)
            .collect();
        let again = now.mono.plus(self.life.config.order_retry_ms);
        for (part, who) in due {
            if self.is_listed(part) {
                // Its holder, or the holder's current state, was not known at first.
                self.spread.orphans.remove(&part);
                self.wait_if_pending(part);
                continue;
            }
            let Some(e) = self.life.cluster().execution(part) else {
                // It was never made, or has ended.
                self.spread.orphans.remove(&part);
                continue;
            };
            if let Some(orphan) = self.spread.orphans.get_mut(&part) {
                orphan.again = again;
            }
            let lost = |ix| matches!(self.life.cluster().node(ix).presence, Presence::Lost { .. });
            let on = match e.stage {
                Stage::Started(ix, _) if !lost(ix) => Some(ix),
                _ => None,
            };
            if e.is_appending() || self.life.defers(part, self.life.config.grace_ms) {
                continue;
            }
            match on {
                Some(ix) => self.life.out.push(Action::Control {
                    node: self.life.cluster().node(ix).id.clone(),
                    request: ControlRequest::Cancel {
                        execution: part,
                        who,
                    },
                    ticket: None,
                }),
                None => self.end(part, Event::Cancelled { who }),
            }
        }
    }

    /// Fails holders of a failed part. A running holder yields first.
    fn fail_without_part(&mut self) {
        let now = self.life.now;
        let failing = self.spread.failing.iter();
        let failing: Vec<_> = failing
            .map(|(id, (part, reason))| (*id, *part, reason.clone()))
            .take(AT_ONCE)
            .collect();
        for (id, part, reason) in failing {
            let Some(e) = self.life.cluster().execution(id) else {
                self.spread.failing.remove(&id);
                continue;
            };
            match e.stage {
                _ if e.is_appending() => {}
                Stage::Started(..) if e.order().is_some() => {}
                Stage::Started(..) => {
                    if !e.was_told(now.mono)
                        && !self.life.defers(id, self.life.config.order_grace_ms)
                    {
                        self.life
                            .order_yield(id, Cause::PartFailed { part, reason });
                    }
                }
                _ => {
                    let failed = Event::Failed {
                        reason,
                        stderr: String::new(),
                        fault: Some(Box::new(Fault::Part { id: part })),
                    };
                    self.end(id, failed);
                }
            }
        }
    }

    fn end(&mut self, id: ExecutionId, event: Event) {
        if self.life.defers(id, self.life.config.grace_ms) {
            return;
        }
        self.life.end_with(id, event);
    }

    /// For people: the part that an execution waits for, or because of which it fails.
    pub(crate) fn parts_in_words(&self, id: ExecutionId) -> Option<String> {
        if let Some((_, reason)) = self.spread.failing.get(&id) {
            return Some(format!("it fails, since {reason}"));
        }
        if let Some(orphan) = self.spread.orphans.get(&id) {
            return Some(format!("it is being cancelled by {}", orphan.who));
        }
        let part = self.spread.awaited_by(id)?;
        Some(format!(
            "it has done all that it kept of its range, and takes its part {} back (tiles {} to {}) \
             when that has ended; that is {}",
            part.id,
            part.from,
            part.to,
            self.stands_in_words(part.id)
        ))
    }

    /// For people: what would let it resume, if it waits for a part.
    pub(crate) fn help_for_parts(&self, id: ExecutionId) -> Option<String> {
        let part = self.spread.awaited_by(id)?.id;
        Some(format!("the end of its part: `fiec why {part}`"))
    }

    fn stands_in_words(&self, id: ExecutionId) -> String {
        let Some(e) = self.life.cluster().execution(id) else {
            return "being made".to_owned();
        };
        let on = |ix| &self.life.cluster().node(ix).id;
        match e.stage {
            Stage::Pending if self.spread.awaited_by(id).is_some() => {
                "waiting for a part of its own".to_owned()
            }
            Stage::Pending => "waiting for a place".to_owned(),
            Stage::Bound(ix, _) => format!("bound to {}", on(ix)),
            Stage::Started(ix, _) => format!("computing on {}", on(ix)),
            Stage::Paused => "paused".to_owned(),
            Stage::Held => "held after a failure".to_owned(),
            Stage::Verifying => "verifying".to_owned(),
        }
    }

    /// For people: its holder, its parts, and why it is not spread further.
    pub(crate) fn spread_in_words(&self, id: ExecutionId) -> String {
        let Some(member) = self.spread.members.get(&id) else {
            return String::new();
        };
        let mut words = String::new();
        if let Some(holder) = member.spreading.part_of {
            words += &format!("; it is a part of {holder}");
        }
        for part in &member.spreading.parts {
            let stands = match self.spread.ended.get(&part.id) {
                Some(fate) => fate.in_words().to_owned(),
                None => self.stands_in_words(part.id),
            };
            let (from, to, part) = (part.from, part.to, part.id);
            words += &format!("; its part {part} has tiles {from} to {to} and is {stands}");
        }
        let root = self.spread.root_of(id);
        let (live, unborn) = self.spread.those_of(root);
        let count = live.len() + unborn.len();
        words += &format!("; {count} of up to {} compute", member.spreading.up_to);
        if root != id {
            words += &format!(" {root} as a whole");
        }
        let stays = self.spread.growth.get(&root).and_then(|g| g.stays.as_ref());
        if let Some(stays) = stays {
            words += &format!(", and no more, since {}", stays.in_words());
        }
        words
    }
}

fn has(spreading: &fiec_schemas::spread::Spreading, id: ExecutionId) -> bool {
    spreading.parts.iter().any(|part| part.id == id)
}
