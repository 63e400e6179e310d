//! Dependencies, gangs, and batches with limits. The world keeps its own books of them, and checks
//! the decisions of policy services against these.

use std::collections::BTreeMap;

use super::*;
use crate::broken::Rule;
use crate::scenario::Workload;
use exec::{Held, Waits};
use fiec_policy::Fate;
use fiec_schemas::BatchName;
use fiec_schemas::dependency::{AfterOutcome, Dependency};
use fiec_schemas::scheduling::{Gang as GangSpec, OnMiss};

/// Most executions that one waits for. More need more time and show nothing else.
const AWAITED: usize = 256;

/// A gang.
#[derive(Debug, Default)]
pub(super) struct Gang {
    /// Its size.
    pub size: u32,
    /// The members that have arrived.
    pub members: Vec<u32>,
    /// Members that were bound, and that have started, in the current attempt to start the gang.
    bound: BTreeSet<u32>,
    started: BTreeSet<u32>,
    /// Time since which some members have started and others have not.
    pub partial_since: Option<u64>,
    /// True once all have started; from then on each moves independently.
    pub together: bool,
}

impl Gang {
    /// True once a member has started in the current attempt to start the gang.
    pub fn has_begun(&self) -> bool {
        self.together || !self.started.is_empty()
    }
}

/// A batch with a limit on concurrent executions.
#[derive(Debug)]
pub(super) struct Batch {
    /// The largest limit of its members if each has one, else no limit.
    pub at_once: Option<u32>,
    /// The smallest limit: from this number on, members may have to wait.
    pub least: u32,
    /// Number of its members that are bound or reserved.
    pub count: u32,
    /// Size of its largest gang.
    pub need: u32,
    /// Time since which there has been room for that many; `u64::MAX` if there is none.
    pub room_since: u64,
}

/// All dependencies, gangs and batches.
#[derive(Debug)]
pub(super) struct Holds {
    pub gangs: Vec<Gang>,
    pub batches: Vec<Batch>,
    /// For each workload, its batch.
    batch_of: Vec<Option<u32>>,
    /// For each workload that is a dependency, its executions so far.
    awaited: Vec<Option<Vec<u32>>>,
    /// For each workload, its dependencies.
    after: Vec<Vec<(usize, bool, AfterOutcome)>>,
    /// For each execution, the executions that wait for it.
    waiters: HashMap<u32, Vec<u32>>,
    /// For each workload, the index of the gang that it fills. Workloads of a named gang share one.
    place_of: Vec<usize>,
    /// The gang at each index.
    filling: Vec<Option<u32>>,
    /// Last time at which free places may have been reserved for a gang.
    pub kept_until: u64,
}

/// Identifies a batch.
type Key<'a> = (Option<&'a Tenant>, &'a BatchName);

fn key(w: &Workload) -> Option<Key<'_>> {
    Some((w.tenant.as_ref(), w.submission.batch.as_ref()?))
}

impl Holds {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let all = &scenario.workloads;
        // For each batch with a limit, the largest and the smallest one.
        let mut limits: BTreeMap<Key<'_>, (Option<u32>, Option<u32>, u32)> = BTreeMap::new();
        for w in all {
            if let Some(key) = key(w) {
                let (own, size) = (w.submission.at_once, w.gang_size().unwrap_or(1));
                limits
                    .entry(key)
                    .and_modify(|(most, least, need)| {
                        *most = most.zip(own).map(|(a, b)| a.max(b));
                        *least = least.iter().copied().chain(own).min();
                        *need = size.max(*need);
                    })
                    .or_insert((own, own, size));
            }
        }
        limits.retain(|_, (_, least, _)| least.is_some());
        let batches = limits.values().map(|(most, least, need)| Batch {
            at_once: *most,
            least: least.unwrap_or(u32::MAX),
            count: 0,
            need: *need,
            room_since: match least.is_some_and(|least| least >= *need) {
                true => 0,
                false => u64::MAX,
            },
        });
        let batches = batches.collect();
        let numbers: BTreeMap<_, u32> = limits.keys().copied().zip(0..).collect();
        let batch_of = all.iter().map(|w| numbers.get(&key(w)?).copied());
        let batch_of = batch_of.collect();
        let names: HashMap<&str, usize> = all.iter().map(|w| w.name.as_str()).zip(0..).collect();
        let after: Vec<Vec<_>> = all
            .iter()
            .map(|w| {
                let after = w.after.iter();
                let number = |name: &String| names.get(name.as_str()).copied();
                let found = after.filter_map(|a| Some((number(&a.workload)?, a.all, a.on)));
                found.collect()
            })
            .collect();
        let mut awaited = vec![None; all.len()];
        for (other, _, _) in after.iter().flatten() {
            awaited[*other] = Some(Vec::new());
        }
        let mut places: HashMap<Key<'_>, usize> = HashMap::new();
        let mut count = 0;
        let place_of = all.iter().map(|w| {
            let gang = w.submission.gang.as_ref();
            let place = match gang.map(|gang| (w.tenant.as_ref(), &gang.name)) {
                Some(key) => *places.entry(key).or_insert(count),
                None => count,
            };
            count = count.max(place + 1);
            place
        });
        let place_of = place_of.collect();
        Self {
            gangs: Vec::new(),
            batches,
            batch_of,
            awaited,
            after,
            waiters: HashMap::new(),
            place_of,
            filling: vec![None; count],
            kept_until: 0,
        }
    }
}

impl<D: Decide> World<'_, D> {
    /// The submission of a workload's next execution, and its holds.
    pub(super) fn demands(
        &mut self,
        workload: usize,
        number: u64,
        e: u32,
    ) -> (Arc<Submission>, Option<Box<Held>>) {
        let plain = Arc::clone(&self.specs[workload]);
        let size = self.scenario.workloads[workload].gang_size();
        let (batch, after) = (self.holds.batch_of[workload], self.awaits(workload, number));
        if let Some(known) = &mut self.holds.awaited[workload] {
            known.push(e);
        }
        if after.is_empty() && size.is_none() {
            let held = batch.map(|_| {
                Box::new(Held {
                    batch,
                    ..Held::default()
                })
            });
            return (plain, held);
        }
        let mut spec = (*plain).clone();
        let mut held = Held {
            batch,
            ..Held::default()
        };
        for (other, on) in after {
            spec.after
                .push(Dependency::new(self.id_of(other).to_string(), on));
            match self.exec(other).fate {
                Some(fate) => held.doomed |= on == AfterOutcome::Ok && fate != Fate::Completed,
                None => {
                    held.after.push((other, on));
                    self.holds.waiters.entry(other).or_default().push(e);
                }
            }
        }
        if let Some(size) = size {
            let gang = self.gang_for(workload, size, e);
            held.gang = Some(gang);
            spec.gang = BatchName::new(format!("gang-{gang}"))
                .ok()
                .map(|name| GangSpec { name, size });
        }
        (Arc::new(spec), Some(Box::new(held)))
    }

    fn gang_for(&mut self, workload: usize, size: u32, e: u32) -> u32 {
        let place = self.holds.place_of[workload];
        let gang = self.holds.filling[place].unwrap_or_else(|| {
            self.holds.gangs.push(Gang {
                size,
                ..Gang::default()
            });
            u32::try_from(self.holds.gangs.len() - 1).unwrap_or(u32::MAX)
        });
        let members = &mut self.holds.gangs[gang as usize].members;
        members.push(e);
        let full = members.len() >= size as usize;
        self.holds.filling[place] = (!full).then_some(gang);
        gang
    }

    /// The dependencies of a workload's `number`-th execution.
    fn awaits(&self, workload: usize, number: u64) -> Vec<(u32, AfterOutcome)> {
        let mut found = Vec::new();
        for (other, all, on) in &self.holds.after[workload] {
            let come = self.holds.awaited[*other].as_deref().unwrap_or_default();
            let one = match *other == workload {
                true => come.last(),
                false => usize::try_from(number).ok().and_then(|n| come.get(n)),
            };
            match all {
                true => found.extend(come.iter().rev().take(AWAITED).map(|e| (*e, *on))),
                false => found.extend(one.map(|e| (*e, *on))),
            }
        }
        found.truncate(AWAITED);
        found
    }

    /// The reason of an execution's wait, by its ledger.
    fn waits_for(&self, e: u32) -> Option<Waits> {
        let exec = self.exec(e);
        let state = exec.state.as_ref()?;
        match &state.phase {
            Phase::Pending { .. } if exec.held.as_ref().is_some_and(|h| h.doomed) => {
                Some(Waits::Doomed)
            }
            Phase::Pending { .. } if exec.is_held() => None,
            Phase::Pending { .. } if exec.tiles.is_some() => self.range_waits(e),
            Phase::Pending { .. } => self.gang_lets(exec).then_some(Waits::Pending),
            Phase::Bound(_) => Some(Waits::Bound),
            Phase::Started(_) if state.parked().is_some() => Some(Waits::Parked),
            _ => None,
        }
    }

    /// True if its gang does not prevent its binding.
    fn gang_lets(&self, exec: &Exec) -> bool {
        let Some(gang) = exec.gang() else { return true };
        let gang = &self.holds.gangs[gang as usize];
        let ready = |e: &u32| {
            let member = self.exec(*e);
            member.state.is_some() && !member.is_held()
        };
        gang.has_begun()
            || gang.members.len() == gang.size as usize && gang.members.iter().all(ready)
    }

    /// Updates the reason and the start of an execution's wait.
    pub(super) fn wait(&mut self, e: u32, anew: bool) {
        let waits = self.waits_for(e);
        let now = self.now;
        let exec = &mut self.execs[e as usize];
        let workload = exec.workload as usize;
        if let Some((what, since)) = exec.waits {
            if !anew && waits == Some(what) {
                return;
            }
            self.waiting[what as usize][workload].remove(&(since, e));
        }
        exec.waits = waits.map(|what| (what, now));
        if let Some(what) = waits {
            self.waiting[what as usize][workload].insert((now, e));
            if !std::mem::replace(&mut self.is_awake[workload], true) {
                self.awake.push(workload as u32);
            }
        }
    }

    /// Applies the effects of an execution's message on others.
    pub(super) fn note_holds(
        &mut self,
        e: u32,
        events: &[Event],
        by_policy: bool,
    ) -> Result<(), Broken> {
        if self.exec(e).held.is_none() && self.holds.waiters.is_empty() {
            return Ok(());
        }
        for event in events {
            match event {
                Event::Bound { node, .. } => self.may_be_bound(e, node)?,
                Event::Started { .. } => self.starts_in_gang(e)?,
                Event::Failed { reason, .. } if by_policy => self.may_fail(e, reason)?,
                _ => {}
            }
        }
        if let Some(gang) = self.exec(e).gang() {
            self.note_gang(e, gang);
        }
        if let Some(fate) = self.exec(e).fate {
            self.release(e, fate);
        }
        Ok(())
    }

    fn may_be_bound(&mut self, e: u32, node: &NodeId) -> Result<(), Broken> {
        let Some(held) = &self.exec(e).held else {
            return Ok(());
        };
        if held.doomed {
            let said = format!("it is bound to {node}, and what it waits for has failed");
            return Err((Rule::Order, said));
        }
        if let Some((other, _)) = held.after.first() {
            let said = format!("it is bound to {node} before execution {other} has ended");
            return Err((Rule::Order, said));
        }
        let gang = held.gang;
        if let Some(gang) = gang {
            self.holds.gangs[gang as usize].bound.insert(e);
        }
        Ok(())
    }

    fn may_fail(&self, e: u32, reason: &str) -> Result<(), Broken> {
        let exec = self.exec(e);
        let late = exec
            .spec
            .deadline
            .is_some_and(|d| d.on_miss == OnMiss::Fail);
        if late || exec.held.as_ref().is_some_and(|h| h.doomed) || self.lacks_part(e) {
            return Ok(());
        }
        let said = format!("it is failed ({reason}), and all that it waits for may yet complete");
        Err((Rule::Order, said))
    }

    /// No member of a gang starts before all have a place.
    fn starts_in_gang(&mut self, e: u32) -> Result<(), Broken> {
        let Some(number) = self.exec(e).gang() else {
            return Ok(());
        };
        let gang = &mut self.holds.gangs[number as usize];
        let lacks = gang.members.iter().find(|m| !gang.bound.contains(m));
        let short = gang.members.len() < gang.size as usize;
        if !gang.has_begun() && (short || lacks.is_some()) {
            let said = format!(
                "it starts, and of its gang of {} only {} have been bound",
                gang.size,
                gang.bound.len()
            );
            return Err((Rule::Gangs, said));
        }
        gang.started.insert(e);
        Ok(())
    }

    fn note_gang(&mut self, e: u32, number: u32) {
        let gang = &self.holds.gangs[number as usize];
        if gang.together {
            return;
        }
        let full = gang.members.len() == gang.size as usize;
        let all = full && gang.members.iter().all(|e| gang.started.contains(e));
        // Once a member has ended, the others go on independently.
        let ended = gang.members.iter().any(|e| self.exec(*e).is_done());
        let tied = gang.members.iter().any(|e| self.exec(*e).tied);
        let begun = gang.has_begun();
        let now = self.now;
        let gang = &mut self.holds.gangs[number as usize];
        if begun && (all || ended) {
            (gang.together, gang.partial_since) = (true, None);
        } else if !tied {
            // The gang starts again.
            gang.bound.clear();
            gang.started.clear();
            gang.partial_since = None;
        } else if begun {
            gang.partial_since.get_or_insert(now);
        }
        let others: Vec<u32> = gang.members.iter().copied().filter(|m| *m != e).collect();
        for other in others {
            self.wait(other, false);
        }
    }

    /// Handles the end of an execution for those that wait for it.
    fn release(&mut self, e: u32, fate: Fate) {
        for waiter in self.holds.waiters.remove(&e).unwrap_or_default() {
            if let Some(held) = &mut self.execs[waiter as usize].held {
                let fails = |(other, on): &(u32, AfterOutcome)| {
                    *other == e && *on == AfterOutcome::Ok && fate != Fate::Completed
                };
                held.doomed |= held.after.iter().any(fails);
                held.after.retain(|(other, _)| *other != e);
            }
            self.wait(waiter, false);
            if let Some(gang) = self.exec(waiter).gang() {
                for member in self.holds.gangs[gang as usize].members.clone() {
                    self.wait(member, false);
                }
            }
        }
    }

    /// A look at a ledger reaches the broker.
    pub(super) fn lookup(&mut self, p: u8, life: u32, e: u32) {
        let seen = match self.execs.get(e as usize) {
            Some(exec) if exec.seq > 0 => exec.fate.map_or(Seen::Lives, Seen::Ended),
            _ => Seen::Vanished,
        };
        self.tally.lookups += 1;
        if !self.is_lost() {
            let at = self.arrival();
            self.queue.plan(at, What::Looked(p, life, e, seen));
        }
    }

    /// The answer reaches the policy service.
    pub(super) fn looked(&mut self, p: u8, life: u32, e: u32, seen: Seen) -> Result<(), Wrong> {
        if !self.is_alive(p, life) || self.waits(p, What::Looked(p, life, e, seen)).is_none() {
            return Ok(());
        }
        let execution = self.id_of(e);
        self.input(p as usize, Input::Ended { execution, seen })
    }

    /// Notes whether a gang has waited long enough for a reservation of free places. Other
    /// executions then wait although there is room.
    pub(super) fn note_kept(&mut self) {
        let (now, keep_us) = (self.now, 1_000 * self.config.gangs.keep_ms);
        let waits = |e: &u32| {
            let since = match self.exec(*e).waits {
                Some((Waits::Pending, since)) => since,
                _ => return false,
            };
            now - since >= keep_us
        };
        let mut gangs = self.holds.gangs.iter().filter(|gang| !gang.has_begun());
        if gangs.any(|gang| gang.members.iter().all(waits)) {
            self.holds.kept_until = now;
        }
    }

    /// Checks that no gang has run in part for too long.
    pub(super) fn watch_gangs(&self, patience: u64) -> Result<(), Wrong> {
        for gang in &self.holds.gangs {
            let Some(since) = gang.partial_since else {
                continue;
            };
            let since = since.max(self.disturbed_until);
            if self.now >= since.saturating_add(patience) {
                let lacks = gang.members.iter().find(|m| !gang.started.contains(m));
                let said = format!(
                    "of a gang of {} only {} have started for {} s",
                    gang.size,
                    gang.started.len(),
                    (self.now - since) / 1_000_000
                );
                return Err((lacks.copied(), (Rule::Gangs, said)));
            }
        }
        Ok(())
    }
}
