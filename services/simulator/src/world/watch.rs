//! Finds executions that wait too long. None may wait long while a viable node has had room all
//! that time, and none may be forgotten.

use super::*;
use crate::broken::Rule;
use crate::scenario::Load;
use crate::summary::{self, Unfinished};
use exec::Waits;
use fiec_schemas::{Signal, Threshold};
use std::collections::BTreeMap;
use std::time::Duration;

/// Limits that follow from all thresholds in force.
pub(super) struct Limits {
    pub calm_below: f64,
    pub longest_dwell: u64,
    pub shortest_dwell: u64,
}

/// Computes the limits. Only thresholds of signals with a load count.
pub(super) fn limits(scenario: &Scenario, config: &Config) -> Limits {
    let mut loads: BTreeMap<Signal, Vec<&Load>> = BTreeMap::from([(Signal::Memory, Vec::new())]);
    for group in &scenario.nodes {
        for (signal, load) in &group.load {
            loads.entry(*signal).or_default().push(load);
        }
    }
    let defaults = fiec_schemas::hardware::default_thresholds();
    let of_nodes = scenario
        .nodes
        .iter()
        .map(|g| g.thresholds.as_ref().unwrap_or(&defaults));
    let of_workloads = scenario.workloads.iter().map(|w| &w.submission.viability);
    let all: Vec<Threshold> = of_nodes
        .chain(of_workloads)
        .flatten()
        .filter(|(signal, _)| loads.contains_key(signal))
        .map(|(_, t)| *t)
        .collect();
    let dwells = all.iter().map(|t| u64::from(t.dwell_ms));
    let calm_below = all.iter().map(|t| t.low).fold(1.0, f64::min);
    Limits {
        calm_below,
        longest_dwell: dwells.clone().max().unwrap_or(0),
        shortest_dwell: dwells.min().unwrap_or(config.residency_floor_ms),
    }
}

impl<D: Decide> World<'_, D> {
    /// Longest wait for a node with room, in microseconds: twice the time that an order holds a
    /// place, the time of a recovery, and time for lost messages.
    fn patience(&self) -> u64 {
        let c = &self.config;
        let order = 2 * c.order_repeat_ms.max(c.take_ms);
        let refusals = 8 * c.avoid_ms;
        1_000 * (order + refusals + 3 * self.longest_dwell + 4 * c.liveness_ms)
    }

    pub(super) fn watch(&mut self) -> Result<(), Wrong> {
        self.queue.plan(self.now + WATCH_US, What::Watch);
        let pending = self.patience();
        self.note_kept();
        let bound = pending + 2_000 * self.config.take_busy_ms;
        // If each execution is its own workload, most workloads have none that waits.
        let mut awake = std::mem::take(&mut self.awake);
        awake.retain(|workload| {
            let at = *workload as usize;
            let waits = self.waiting.iter().any(|all| !all[at].is_empty());
            self.is_awake[at] = waits;
            waits
        });
        for workload in &awake {
            let workload = *workload as usize;
            let oldest = |what: Waits| self.waiting[what as usize][workload].first().copied();
            let all = Waits::ALL.map(|what| (what, oldest(what)));
            for (what, oldest) in all {
                let patience = match what {
                    Waits::Bound => bound,
                    _ => pending,
                };
                self.starves(what, oldest, patience)?;
            }
        }
        self.awake = awake;
        let own = 1_000 * (4 * self.config.quotas.reserve_ms + 2 * self.config.gangs.start_ms);
        self.watch_gangs(pending + own)?;
        self.watch_ranges(pending + own)?;
        self.watch_quotas(pending + own)
    }

    fn starves(&self, what: Waits, oldest: Option<(u64, u32)>, patience: u64) -> Result<(), Wrong> {
        let Some((since, e)) = oldest else {
            return Ok(());
        };
        let mut since = since.max(self.disturbed_until);
        let mut patience = patience;
        if what == Waits::Pending {
            since = since.max(self.let_since(e));
            if self.exec(e).gang().is_none() {
                since = since.max(self.holds.kept_until);
            }
            // Others of its tenant may hold reservations in vain for a while.
            patience += 4_000 * self.config.quotas.reserve_ms;
        }
        if self.now < since.saturating_add(patience) {
            return Ok(());
        }
        let exec = self.exec(e);
        let wrong = |rule: Rule, said: String| Err((Some(e), (rule, said)));
        if what == Waits::Doomed {
            let said = "what it waits for has failed, and it is not failed";
            return wrong(Rule::Order, said.to_owned());
        }
        let spec = &exec.spec;
        // Requirements on free memory depend on vectors, which change all the time, so they are not
        // judged.
        if spec.requires.free_memory_bytes.is_some() {
            return Ok(());
        }
        // The policy keeps suspects apart, even if a node has room.
        if self.is_suspect(exec) {
            return Ok(());
        }
        let needs = exec.memory_bytes;
        let own = exec.phase().and_then(Phase::binding);
        // A parked execution may resume in its place.
        let own = own.filter(|_| what == Waits::Bound);
        let long_ago = self.now - patience;
        let has_room = |n: &&Node| {
            let room = if needs > 0 {
                n.empty_since <= long_ago && needs <= n.descriptor.memory_limit_bytes
            } else {
                n.room_since <= long_ago
            };
            room && own.is_none_or(|b| b.node != n.descriptor.node)
                && !self.is_set_aside(n, &spec.program, long_ago)
                && n.meets(&spec.requires, &spec.program).is_ok()
        };
        // All members of a gang must find room at once.
        let gang = exec.gang().map(|g| &self.holds.gangs[g as usize]);
        let places = match gang.filter(|g| what == Waits::Pending && !g.has_begun()) {
            Some(gang) => gang.size as usize,
            None => 1,
        };
        let mut rooms = self.nodes.iter().filter(has_room);
        match rooms.nth(places - 1) {
            None => Ok(()),
            Some(n) => wrong(
                Rule::NoStarvation,
                format!(
                    "it waits for {} s, and {} has had room for {} s",
                    (self.now - since) / 1_000_000,
                    n.descriptor.node,
                    (self.now - n.room_since.min(n.empty_since)) / 1_000_000
                ),
            ),
        }
    }

    /// The reason of the wait of an execution that has not ended.
    fn why_unfinished(&self, e: &Exec) -> &'static str {
        let parked = e.state.as_ref().is_some_and(|s| s.parked().is_some());
        match e.phase() {
            None => "not taken in yet",
            Some(Phase::Pending { .. }) if e.tiles.as_ref().is_some_and(|t| t.rests_since > 0) => {
                "waits for a part of its range"
            }
            Some(Phase::Pending { .. }) if e.is_held() => "waits for others",
            Some(Phase::Pending { .. }) if e.waits.is_none() => "waits for its gang",
            Some(Phase::Started(_)) if parked => "parked",
            Some(Phase::Pending { .. }) => "waits for a node with room",
            Some(Phase::Held { .. }) => "held after deaths of workers",
            Some(Phase::Bound(_)) => "bound, not started yet",
            Some(Phase::Started(_)) => "still computing",
            Some(_) => "other",
        }
    }

    /// The figures of the run.
    pub(super) fn summarize(&mut self, wall: Duration, steps: u64) -> Summary {
        let mut slots_us = 0u128;
        let end = self.tally.last_end.max(1);
        let begin = self.tally.first_submission.unwrap_or(0);
        let mut still_busy = 0;
        for n in &self.nodes {
            let running = if n.up { self.now - n.up_since } else { 0 };
            let lived = (n.up_us + running).min(end.saturating_sub(begin));
            slots_us += u128::from(lived) * u128::from(n.descriptor.slots);
            for run in n.runs.iter().filter(|r| r.started && !r.parked) {
                still_busy += self.now.saturating_sub(run.base);
            }
        }
        self.tally.busy_us += still_busy;
        let mut unfinished: BTreeMap<&'static str, u64> = BTreeMap::new();
        let whole = |e: &&Exec| !e.is_done() && !e.is_part();
        for e in self.execs.iter().filter(whole) {
            *unfinished.entry(self.why_unfinished(e)).or_default() += 1;
        }
        let unfinished: Vec<Unfinished> = unfinished
            .into_iter()
            .map(|(why, count)| Unfinished {
                why: why.to_owned(),
                count,
            })
            .collect();
        let submitted = self.execs.len() as u64 - self.tally.parts;
        summary::make(
            &mut self.tally,
            &summary::Frame {
                seed: self.scenario.seed,
                nodes: self.nodes.len() as u64,
                submitted,
                now_us: self.now,
                slots_us,
                wall,
                steps,
                unfinished,
            },
        )
    }
}
