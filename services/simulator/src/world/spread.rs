//! Spread ranges: makes parts on request of policy services, and keeps the world's own books of
//! tiles, their owners and their state.
//!
//! After every message of a *whole*, which is an execution with all its parts, these promises hold.
//! The ranges of holder and parts, by ledgers and by states, cover the range of the whole, each
//! tile once. No finished tile is computed again, and none is skipped. Over time, each part that
//! was split off is made. A part without a place is given back to a holder that waits for it. No
//! part outlives its holder.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::*;
use crate::broken::Rule;
use crate::world::broker::Author;
use exec::{Tiles, Waits};
use fiec_policy::Fate;
use fiec_schemas::Cause;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{Part, Spreading};

/// A requested part, in flight to the broker.
#[derive(Debug)]
pub(super) struct Birth {
    part: ExecutionId,
    /// The holder's number.
    holder: u32,
}

/// An execution with all its parts.
#[derive(Debug)]
struct Whole {
    /// Their numbers; the root first.
    members: Vec<u32>,
    /// One bit per tile: it is finished and committed.
    done: Vec<u64>,
}

/// All ranges.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// Parts that were made.
    numbers: FxHashMap<ExecutionId, u32>,
    /// Wholes with a live member.
    wholes: BTreeMap<u32, Whole>,
    /// The range in the σ that a worker appends now: the first unfinished tile, and the tile after
    /// the last.
    pub said: Option<(u64, u64)>,
}

impl Ranges {
    /// A part's number, or a number without an execution if it was not made.
    pub fn number(&self, id: ExecutionId) -> u32 {
        self.numbers.get(&id).copied().unwrap_or(u32::MAX)
    }

    /// Adds a submitted range with this many tiles.
    pub fn begin(&mut self, e: u32, tiles: u64) {
        let words = usize::try_from(tiles.div_ceil(64)).unwrap_or(usize::MAX);
        let whole = Whole {
            members: vec![e],
            done: vec![0; words],
        };
        self.wholes.insert(e, whole);
    }
}

impl Whole {
    fn is_done(&self, tile: u64) -> bool {
        let word = usize::try_from(tile / 64).ok();
        let word = word.and_then(|n| self.done.get(n));
        word.is_some_and(|bits| bits >> (tile % 64) & 1 == 1)
    }

    fn note_done(&mut self, tile: u64) {
        let word = usize::try_from(tile / 64).ok();
        if let Some(bits) = word.and_then(|n| self.done.get_mut(n)) {
            *bits |= 1 << (tile % 64);
        }
    }
}

impl<D: Decide> World<'_, D> {
    /// A policy service requests a part.
    pub(super) fn ask_for_part(&mut self, p: usize, part: ExecutionId, holder: ExecutionId) {
        if self.is_lost() {
            return;
        }
        let holder = self.number_of(holder);
        let (at, life) = (self.arrival(), self.replicas[p].life);
        let birth = Box::new(Birth { part, holder });
        self.queue.plan(at, What::Part(p as u8, life, birth));
    }

    /// The request reaches the broker. The part exists, or is made if its holder still has it.
    pub(super) fn bear(&mut self, p: u8, life: u32, birth: Birth) -> Result<(), Wrong> {
        let Birth { part, holder } = birth;
        if let Some(e) = self.ranges.numbers.get(&part).copied() {
            if !self.is_lost() {
                let at = self.arrival();
                let found = match self.exec(e).fate {
                    Some(fate) => What::Looked(p, life, e, Seen::Ended(fate)),
                    None => What::Found(p, life, e),
                };
                self.queue.plan(at, found);
            }
            return Ok(());
        }
        let of = self.exec(holder);
        let (Some(state), Some(tiles)) = (&of.state, &of.tiles) else {
            return Ok(());
        };
        let Some(found) = state.parts().iter().find(|p| p.id == part).copied() else {
            return Ok(());
        };
        let whole = tiles.whole;
        let spec = of.spec.part(found.range(), state.submitted_at);
        let exec = Exec {
            workload: of.workload,
            tenant: of.tenant,
            spec: Arc::new(spec),
            submitted: self.now,
            work_us: found.range().count() * of.capsule_us,
            capsule_us: of.capsule_us,
            state_bytes: of.state_bytes,
            memory_bytes: of.memory_bytes,
            fails: fails(part, self.scenario.workloads[of.workload as usize].fails),
            seq: 0,
            state: None,
            first_bound: 0,
            waits: None,
            began: 0,
            done: 0,
            fate: None,
            running: None,
            preempted: 0,
            held: None,
            tiles: Some(tiles.part(holder, &found)),
            tied: false,
            reserved: false,
            trace: Vec::new(),
        };
        let e = u32::try_from(self.execs.len()).unwrap_or(u32::MAX);
        self.execs.push(exec);
        self.tally.parts += 1;
        self.ranges.numbers.insert(part, e);
        if let Some(whole) = self.ranges.wholes.get_mut(&whole) {
            whole.members.push(e);
        }
        let name = self.replicas[p as usize].author.clone();
        // Its author gets the message like all others.
        let author = Author {
            name: &name,
            replica: None,
            node: None,
        };
        self.append(e, 0, &[Event::Submitted], author).map(drop)
    }

    /// The last message of an unknown part reaches the policy service.
    pub(super) fn found(&mut self, p: u8, life: u32, e: u32) -> Result<(), Wrong> {
        if !self.is_alive(p, life) || self.waits(p, What::Found(p, life, e)).is_none() {
            return Ok(());
        }
        match self.last_message(e)? {
            Some((seq, text)) => {
                let view = services::read(&text, seq, e)?;
                self.follow(p as usize, &view, true);
                self.perform(p as usize)
            }
            None => Ok(()),
        }
    }

    /// The result of an order to split reaches the policy service.
    pub(super) fn split_answered(
        &mut self,
        p: u8,
        e: u32,
        epoch: u64,
        outcome: Box<ControlOutcome>,
    ) -> Result<(), Wrong> {
        let Some(What::Split(p, e, epoch, outcome)) =
            self.waits(p, What::Split(p, e, epoch, outcome))
        else {
            return Ok(());
        };
        let input = Input::SplitAnswered {
            execution: self.id_of(e),
            epoch,
            answer: *outcome,
        };
        self.input(p as usize, input)
    }

    /// A part before any message. If it outlives its holder, the remaining facts about it.
    pub(super) fn unborn_part(
        &self,
        tiles: &Tiles,
        tenant: Tenant,
        spec: Arc<Submission>,
        submitted: Timestamp,
    ) -> ExecutionState {
        let part = Part {
            id: tiles.id.unwrap_or_else(|| self.id_of(tiles.whole)),
            from: tiles.given.from,
            to: tiles.given.to,
        };
        let holder = tiles.holder.map(|holder| self.exec(holder));
        if let Some(state) = holder.and_then(|holder| holder.state.as_deref()) {
            return ExecutionState::unborn_part(state, &part, spec, submitted);
        }
        let mut state = ExecutionState::unborn(tenant, part.id, spec, None, submitted);
        state.spread = Some(Box::new(Spreading {
            up_to: tiles.up_to,
            part_of: tiles.holder.map(|holder| self.id_of(holder)),
            splits: 0,
            since: 0,
            end: Some(part.to),
            waits: false,
            parts: Vec::new(),
        }));
        state
    }

    /// Applies a message to the books of a range: finished tiles and their owners.
    pub(super) fn note_tiles(&mut self, e: u32, events: &[Event]) -> Result<(), Wrong> {
        let (now, said) = (self.now, self.ranges.said.take());
        let Some(tiles) = self.execs[e as usize].tiles.as_deref_mut() else {
            return Ok(());
        };
        let mut merges = false;
        for event in events {
            match event {
                Event::Yielded {
                    cause: Cause::Parts,
                    ..
                } => tiles.rests_since = now.max(1),
                Event::Split { .. } => tiles.split_at = now,
                Event::Merged { .. } => (merges, tiles.rests_since) = (true, 0),
                Event::Returned { .. } => self.tally.returned += 1,
                _ => {}
            }
        }
        let Some((next, end)) = said else {
            return Ok(());
        };
        let before = std::mem::replace(&mut tiles.next, next);
        tiles.end = end;
        let Some(whole) = self.ranges.wholes.get_mut(&tiles.whole) else {
            return Ok(());
        };
        let wrong = |said: String| Err((Some(e), (Rule::Ranges, said)));
        if next < before {
            return wrong(format!("tile {before} was next, and now {next} is"));
        }
        for tile in before..next {
            match (merges, whole.is_done(tile)) {
                (false, true) => return wrong(format!("tile {tile} is done twice")),
                (false, false) => whole.note_done(tile),
                (true, false) => {
                    return wrong(format!(
                        "its part has left tile {tile} out, and it goes on with {next}"
                    ));
                }
                (true, true) => {}
            }
        }
        Ok(())
    }

    /// Follows up on a message of a range: the effects on its holder and its parts, and the check
    /// that each tile has one owner.
    pub(super) fn follow_range(&mut self, e: u32) -> Result<(), Wrong> {
        let exec = self.exec(e);
        let Some(tiles) = &exec.tiles else {
            return Ok(());
        };
        let (whole, holder, given) = (tiles.whole, tiles.holder, tiles.given);
        let (ended, completed) = (exec.is_done(), exec.fate == Some(Fate::Completed));
        if ended {
            self.tally.parts_ended += u64::from(holder.is_some());
            let members = self.members_of(whole).to_vec();
            let parts = members.into_iter().filter(|m| self.is_part_of(*m, e));
            for other in parts.chain(holder).collect::<Vec<_>>() {
                self.wait(other, false);
            }
        }
        let range = self.exec(whole).tiles.as_ref().map_or(given, |t| t.given);
        self.covers(whole, range)?;
        let Some(book) = self.ranges.wholes.get(&whole) else {
            return Ok(());
        };
        if ended && e == whole && completed {
            let left = (range.from..range.to).find(|tile| !book.is_done(*tile));
            if let Some(tile) = left {
                let said = format!("it has completed, and tile {tile} is not done");
                return Err((Some(e), (Rule::Ranges, said)));
            }
        }
        if ended && book.members.iter().all(|m| self.exec(*m).is_done()) {
            self.ranges.wholes.remove(&whole);
        }
        Ok(())
    }

    fn members_of(&self, whole: u32) -> &[u32] {
        let book = self.ranges.wholes.get(&whole);
        book.map_or(&[], |book| &book.members)
    }

    fn is_part_of(&self, e: u32, holder: u32) -> bool {
        let tiles = self.exec(e).tiles.as_ref();
        tiles.is_some_and(|tiles| tiles.holder == Some(holder))
    }

    /// Checks that the ranges of an execution and its parts cover its given range, each tile once.
    fn covers(&self, e: u32, given: TileRange) -> Result<(), Wrong> {
        let wrong = |said: String| Err((Some(e), (Rule::Ranges, said)));
        let (exec, to) = (self.exec(e), given.to);
        let Some(tiles) = exec.tiles.as_deref() else {
            return wrong("it is a part, and has no range".to_owned());
        };
        if tiles.given != given {
            let TileRange { from, to } = tiles.given;
            return wrong(format!(
                "it has tiles {from} to {to}, and was given {} to {}",
                given.from, given.to
            ));
        }
        let spread = match (&exec.state, exec.fate) {
            (Some(state), _) => state.spread.as_deref(),
            (None, Some(fate @ (Fate::Completed | Fate::Returned))) => {
                if tiles.end != to {
                    let end = tiles.end;
                    return wrong(format!(
                        "it has ended, and tiles {end} to {to} are nobody's"
                    ));
                }
                if fate == Fate::Completed && tiles.next != to {
                    let next = tiles.next;
                    return wrong(format!("it has completed, and tile {next} is not done"));
                }
                return Ok(());
            }
            // It fails as a whole, or has no ledger yet.
            (None, _) => return Ok(()),
        };
        let Some(spread) = spread else {
            return wrong("its ledger says nothing of its range".to_owned());
        };
        let end = spread.end.unwrap_or(tiles.end);
        if tiles.end != end {
            let (low, high) = (tiles.end.min(end), tiles.end.max(end));
            let whose = match tiles.end > end {
                true => "of two: it has given them away, and has them by its state",
                false => "nobody's: its state has them no more",
            };
            return wrong(format!("tiles {low} to {high} are {whose}"));
        }
        let mut at = end;
        for part in spread.parts.iter().rev() {
            let from = part.from;
            match from.cmp(&at) {
                Ordering::Greater => {
                    return wrong(format!("tiles {at} to {from} are nobody's"));
                }
                Ordering::Less => return wrong(format!("tiles {from} to {at} are of two")),
                Ordering::Equal => {}
            }
            if let Some(number) = self.ranges.numbers.get(&part.id) {
                self.covers(*number, part.range())?;
            }
            at = part.to;
        }
        match at.cmp(&to) {
            Ordering::Less => wrong(format!("tiles {at} to {to} are nobody's")),
            Ordering::Greater => wrong(format!("tiles {to} to {at} were not given to it")),
            Ordering::Equal => Ok(()),
        }
    }

    /// True if a part of the execution has failed or was cancelled, so that it cannot complete.
    pub(super) fn lacks_part(&self, e: u32) -> bool {
        let Some(tiles) = &self.exec(e).tiles else {
            return false;
        };
        let lost = |m: &u32| {
            let fate = self.exec(*m).fate;
            matches!(fate, Some(Fate::Failed | Fate::Cancelled)) && self.is_part_of(*m, e)
        };
        self.members_of(tiles.whole).iter().any(lost)
    }

    /// The reason of a wait of a spread execution without a place.
    pub(super) fn range_waits(&self, e: u32) -> Option<Waits> {
        let exec = self.exec(e);
        let holder = exec.tiles.as_ref()?.holder;
        if holder.is_some_and(|holder| self.exec(holder).is_done()) {
            return None;
        }
        if self.lacks_part(e) {
            return Some(Waits::Doomed);
        }
        let spread = exec.state.as_ref()?.spread.as_ref()?;
        let last = spread.last().filter(|_| spread.waits);
        let ended = |part: &Part| {
            let number = self.ranges.numbers.get(&part.id);
            number.is_some_and(|e| self.exec(*e).is_done())
        };
        last.is_none_or(ended).then_some(Waits::Pending)
    }

    /// Checks that parts are made, given back and ended in time.
    pub(super) fn watch_ranges(&self, patience: u64) -> Result<(), Wrong> {
        let (now, c) = (self.now, &self.config);
        let patience = patience + 2_000 * c.spreading.dwell_ms + 10_000 * c.look_ms;
        for e in self.ranges.wholes.values().flat_map(|w| &w.members) {
            let exec = self.exec(*e);
            let (Some(tiles), false) = (&exec.tiles, exec.is_done()) else {
                continue;
            };
            // The wait in seconds, if it is too long.
            let late = |since: u64| {
                let since = since.max(self.disturbed_until);
                (now >= since.saturating_add(patience)).then(|| (now - since) / 1_000_000)
            };
            let wrong = |said: String| Err((Some(*e), (Rule::Ranges, said)));
            let parts = exec.state.as_ref().map_or(&[][..], |state| state.parts());
            let unmade = |part: &&Part| !self.ranges.numbers.contains_key(&part.id);
            if let Some(part) = parts.iter().find(unmade)
                && let Some(seconds) = late(tiles.split_at)
            {
                let (from, to) = (part.from, part.to);
                return wrong(format!(
                    "it has given tiles {from} to {to} away for {seconds} s, and the part is not made"
                ));
            }
            let Some(holder) = tiles.holder else { continue };
            let of = self.exec(holder);
            if let Some(seconds) = of.is_done().then(|| late(of.done)).flatten() {
                return wrong(format!(
                    "its holder, execution {holder}, has ended for {seconds} s, and it has not"
                ));
            }
            let rests = of.tiles.as_ref().map_or(0, |t| t.rests_since);
            let awaited = of.state.as_ref().and_then(|s| s.spread.as_ref());
            let awaited = awaited.filter(|s| s.waits).and_then(|s| s.last());
            if rests > 0
                && awaited.map(|part| part.id) == tiles.id
                && parts.is_empty()
                && let Some((Waits::Pending, since)) = exec.waits
                && let Some(seconds) = late(since.max(rests))
            {
                return wrong(format!(
                    "it has no place and its holder waits for it for {seconds} s, and it is not \
                     given back"
                ));
            }
        }
        Ok(())
    }
}

/// True if a part's program fails at its end. It follows from the part's id, so that it does not
/// change other draws.
fn fails(part: ExecutionId, share: f64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "48 bits fit")]
    let drawn = (part.0.as_u128() >> 80) as f64 / (1u64 << 48) as f64;
    drawn < share
}
