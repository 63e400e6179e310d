//! Spreading: ranges of tiles that several executions compute ([`fiec_schemas::spread`]): holders and
//! their parts.
//!
//! ```text
//!            ordered to split                    its own range is done
//! computes ──────────────────▶ has parts ──────────────────────────────▶ waits for the last part
//!    ▲   (growth, splitting)      │ a part fails                             │ that part has ended,
//!    │                            ▼                                          │ or is given back
//!    │                          fails                                        │
//!    └───────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The service that sees a split first makes the part, also after a restart. The part's id follows
//! from the split, and its ledger begins by compare-and-set. A holder that waits for its last part
//! has no node, and is bound again when that part has ended.
//!
//! * [`member`]: executions whose range may be split, and the tree that they form.
//! * [`growth`]: when one more node is worth its cost; [`splitting`] orders the split.
//! * [`parts`]: makes parts, gives them back, ends those without a holder.
//!
//! Given up: a holder takes its parts back one after another, last first, so the end of a range may
//! wait for a part that is not the slowest.
//!
//! It reads the cluster, and changes it by appends to parts, orders to yield, and requests to
//! workers. Executions that may wait for a place again are returned to the caller.

mod growth;
mod member;
mod parts;
mod settings;
mod splitting;
mod words;

use std::collections::BTreeMap;

use fiec_schemas::{Cause, EventKind, ExecutionId, PhaseKind};

use crate::fate::{Fate, Seen};
use crate::lifecycle::Lifecycle;
use crate::time::Millis;
use crate::view::LedgerView;
use growth::Growth;
use member::{Member, Orphan};

pub use settings::SpreadingSettings;

pub(crate) use splitting::Claims;

/// Most characters of a part's reason that its holder repeats when it fails.
const REASON_LIMIT: usize = 400;

/// State of spreading.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// Live executions that may be split, or are parts.
    members: BTreeMap<ExecutionId, Member>,
    /// The ends of parts, until their holders take the ranges back.
    ended: BTreeMap<ExecutionId, Fate>,
    /// Unknown parts, with their holders and the time of the next look.
    unknown: BTreeMap<ExecutionId, (ExecutionId, Millis)>,
    /// Unknown holders of parts, with the time of the next look at their ledgers.
    holders: BTreeMap<ExecutionId, Millis>,
    /// Parts whose holders have ended.
    orphans: BTreeMap<ExecutionId, Orphan>,
    /// Executions that cannot complete any more: the part that failed, and why.
    failing: BTreeMap<ExecutionId, (ExecutionId, String)>,
    /// Growth of ranges.
    growth: BTreeMap<ExecutionId, Growth>,
    /// Time of the last review of growth.
    looked: Millis,
    /// The member with which the next review begins.
    next: Option<ExecutionId>,
}

impl Ranges {
    /// Reads from a message of a live execution how it is spread.
    pub fn hear(&mut self, life: &mut Lifecycle, view: &LedgerView<'_>) {
        let now = life.now;
        let Some(spreading) = &view.state.spread else {
            return;
        };
        let id = view.state.execution;
        let boundary = view.all(EventKind::Boundary).next_back();
        let left = boundary.and_then(|b| Some(b.of?.saturating_sub(b.index?)));
        let before = self.members.get(&id);
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
            self.ended.remove(&part);
            self.unknown.remove(&part);
        }
        // Its worker did not see the end that we know of: the ledger's present state counts.
        if let Some(part) = in_vain
            && self.ended.remove(&part).is_some()
        {
            let again = now.mono.plus(2 * life.config.look_ms);
            self.unknown.insert(part, (id, again));
        }
        // Replicas that are not preferred wait for a grace period.
        let soon = if life.is_mine(id) {
            now.mono
        } else {
            now.mono.plus(life.config.grace_ms)
        };
        for part in &spreading.parts {
            if !life.knows(part.id) && !self.ended.contains_key(&part.id) {
                let unknown = &mut self.unknown;
                unknown.entry(part.id).or_insert((id, soon));
            }
        }
        self.unknown.remove(&id);
        if let Some(holder) = spreading.part_of
            && !life.knows(holder)
            && !self.orphans.contains_key(&id)
        {
            self.holders.entry(holder).or_insert(soon);
        }
        let member = Member {
            spreading: spreading.clone(),
            requested: view.state.requested.is_some(),
            waits_since,
            left,
            first,
        };
        let is_anew = view.event(EventKind::Healed).is_some() || self.holders.contains_key(&id);
        self.members.insert(id, member);
        self.note_dropped(life, id, is_anew);
    }

    /// Finds parts that their holder does not list because its ledger began again without them.
    /// Each message of a part compares that part. All parts of a holder are compared when its
    /// ledger begins again or is read after theirs.
    fn note_dropped(&mut self, life: &mut Lifecycle, id: ExecutionId, is_anew: bool) {
        let now = life.now;
        let members = &self.members;
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
        let again = now.mono.plus(2 * life.config.look_ms);
        for (part, holder) in dropped {
            let who = format!("policy: {holder}, of which it is a part, does without it");
            let orphan = Orphan { who, again };
            self.orphans.entry(part).or_insert(orphan);
        }
    }

    /// Handles the end of an execution, from its last message or an append of this service.
    /// `part_of`: its holder, if known. `why`: who cancelled it, or why it failed. Returns its holder
    /// if that may wait for a place again.
    #[must_use]
    pub fn ended(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        part_of: Option<ExecutionId>,
        (phase, why): (PhaseKind, Option<&str>),
    ) -> Option<ExecutionId> {
        let member = self.members.get(&id);
        let holder = part_of.or_else(|| member.and_then(|m| m.spreading.part_of));
        let fate = Fate::of(phase)?;
        let orphan = self.orphans.get(&id).map(|orphan| orphan.who.clone());
        let why = why.or(orphan.as_deref());
        let parts = member.map_or_else(Vec::new, |m| m.spreading.parts.clone());
        let who = match (fate, why) {
            (Fate::Cancelled, Some(who)) => who.to_owned(),
            _ => format!("policy: {id}, of which it is a part, {}", fate.in_words()),
        };
        for part in parts {
            self.disown(life.now.mono, part.id, &who);
        }
        self.part_ended(life, (holder?, id), fate, why)
    }

    fn disown(&mut self, now: Millis, part: ExecutionId, who: &str) {
        if self.ended.remove(&part).is_none() {
            let orphan = Orphan {
                who: who.to_owned(),
                again: now,
            };
            self.orphans.entry(part).or_insert(orphan);
        }
        self.unknown.remove(&part);
    }

    /// Handles the end of a holder's part. Returns the holder if it may resume. Otherwise it cannot
    /// complete any more.
    fn part_ended(
        &mut self,
        life: &mut Lifecycle,
        (holder, part): (ExecutionId, ExecutionId),
        fate: Fate,
        why: Option<&str>,
    ) -> Option<ExecutionId> {
        self.unknown.remove(&part);
        let member = self.members.get(&holder);
        let found = member.and_then(|m| m.part(part).copied())?;
        self.ended.insert(part, fate);
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
            life.stop_waiting(holder);
            let failing = self.failing.entry(holder);
            failing.or_insert((part, reason));
        }
        Some(holder)
    }

    /// Forgets an execution that no longer lives. For a part without a reported end, the ledger may
    /// only have been missing when the shell looked. So the part is looked up again.
    pub fn forget(&mut self, life: &Lifecycle, id: ExecutionId) {
        let member = self.members.remove(&id);
        let holder = member.and_then(|m| m.spreading.part_of);
        let of = holder.and_then(|holder| self.members.get(&holder));
        let out = of.is_some_and(|m| m.part(id).is_some());
        if let Some(holder) = holder.filter(|_| out && !self.ended.contains_key(&id)) {
            let again = life.now.mono.plus(2 * life.config.look_ms);
            self.unknown.insert(id, (holder, again));
        }
        self.failing.remove(&id);
        self.growth.remove(&id);
        self.orphans.remove(&id);
        self.holders.remove(&id);
    }

    /// True for an execution that is not bound now, because it waits for a part or fails because of
    /// one.
    pub fn awaits_parts(&self, id: ExecutionId) -> bool {
        self.awaited_by(id).is_some()
            || self.failing.contains_key(&id)
            || self.orphans.contains_key(&id)
    }

    /// Handles the result of a look at the ledger of an unknown part or holder. Returns a holder that
    /// may wait for a place again.
    #[must_use]
    pub fn seen(
        &mut self,
        life: &mut Lifecycle,
        id: ExecutionId,
        seen: Seen,
    ) -> Option<ExecutionId> {
        if life.knows(id) {
            self.holders.remove(&id);
            return None;
        }
        let resumes = match (self.unknown.get(&id), seen) {
            (Some((holder, _)), Seen::Ended(fate)) => {
                let holder = *holder;
                self.part_ended(life, (holder, id), fate, None)
            }
            _ => None,
        };
        let fate = match seen {
            Seen::Ended(fate) => fate.in_words(),
            Seen::Vanished => "is not known any more",
            Seen::Lives => return resumes,
        };
        if self.holders.remove(&id).is_none() {
            return resumes;
        }
        let who = format!("policy: {id}, of which it is a part, {fate}");
        let members = self.members.iter();
        let parts: Vec<_> = members
            .filter(|(_, m)| m.spreading.part_of == Some(id))
            .map(|(part, _)| *part)
            .collect();
        for part in parts {
            self.disown(life.now.mono, part, &who);
        }
        resumes
    }

    /// True if several executions compute, or may compute, its range.
    pub fn contains(&self, id: ExecutionId) -> bool {
        self.members.contains_key(&id)
    }

    /// True for an execution whose own range is done, and which waits for a part.
    pub fn is_done_but_for_parts(&self, id: ExecutionId) -> bool {
        self.members.get(&id).is_some_and(|m| m.spreading.waits)
    }
}

fn has(spreading: &fiec_schemas::spread::Spreading, id: ExecutionId) -> bool {
    spreading.parts.iter().any(|part| part.id == id)
}
