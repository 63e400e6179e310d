//! A worker's share in spread ranges. At a boundary it gives the last half of the rest away. At its
//! end it waits for its parts, and it takes the last one back when it restarts.

use super::*;
use crate::node::{Run, Write};
use crate::world::worker::digest;
use fiec_policy::Fate;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{PARTS_LIMIT, part_id};
use fiec_schemas::{BoundaryEvent, Cause, Fault};

/// Time to take a part back, in microseconds.
const MERGE_US: u64 = 1_000;

impl<D: Decide> World<'_, D> {
    fn range_run(&self, node: usize, e: u32, epoch: u64) -> Option<&Run> {
        let mut runs = self.nodes[node].runs.iter();
        runs.find(|r| r.exec == e && r.epoch == epoch)
    }

    /// A node gets the order to split a part off.
    pub(super) fn told_to_split(&mut self, node: usize, e: u32, epoch: u64) -> ControlOutcome {
        let refused = |reason: &str| ControlOutcome::Refused(reason.to_owned());
        let exec = self.exec(e);
        let parts = exec.state.as_ref().map_or(0, |state| state.parts().len());
        if exec.tiles.is_none() {
            return refused("its submission has no `spread`");
        }
        let Some(run) = self.nodes[node].run(e, epoch) else {
            return refused("it does not run here under that epoch");
        };
        if run.parked || run.order.is_some() || !run.started {
            return refused("it is parked, or leaving, or has not begun");
        }
        if parts >= PARTS_LIMIT {
            return refused("it has the largest number of parts");
        }
        run.split = true;
        if run.writing.is_none() {
            self.plan_look(node, e, epoch);
        }
        ControlOutcome::Taken
    }

    /// Starts with the last part, if the execution has waited for it. Returns true if it does.
    pub(super) fn takes_back(&mut self, node: usize, e: u32, epoch: u64) -> bool {
        if self.exec(e).tiles.is_none() {
            return false;
        }
        let state = self.exec(e).state.as_ref();
        let spread = state.and_then(|state| state.spread.as_deref());
        let Some(last) = spread.filter(|s| s.waits).and_then(|s| s.last()) else {
            return false;
        };
        let part = self.execs.get(self.ranges.number(last.id) as usize);
        let write = match part.and_then(|part| part.fate) {
            Some(Fate::Completed | Fate::Returned) => Write::Merge,
            _ => Write::Rest,
        };
        if let Some(run) = self.nodes[node].run(e, epoch) {
            run.writing = Some(write);
        }
        self.write(node, e, epoch);
        true
    }

    /// The range in the σ of the message in flight: the first unfinished tile, and the tile after
    /// the last. None if the message has no σ.
    pub(super) fn range_after(&self, node: usize, e: u32, epoch: u64) -> Option<(u64, u64)> {
        let exec = self.exec(e);
        exec.tiles.as_ref()?;
        let run = self.range_run(node, e, epoch)?;
        match run.writing.as_ref()? {
            Write::Commit(index) | Write::Order(index, _) => Some((run.tile_at(*index), run.end)),
            Write::Split(index) => {
                let range = self.gives(run, *index)?;
                Some((run.tile_at(*index), range.from))
            }
            Write::Merge => {
                let part = exec.state.as_ref()?.spread.as_ref()?.last()?;
                let taken = self.execs.get(self.ranges.number(part.id) as usize)?;
                Some((taken.tiles.as_ref()?.next, part.to))
            }
            Write::Finish if self.fails_at_its_end(e) => None,
            Write::Finish => Some((run.end, run.end)),
            _ => None,
        }
    }

    /// The range that is split off at a boundary.
    fn gives(&self, run: &Run, boundary: u64) -> Option<TileRange> {
        let left = TileRange {
            from: run.tile_at(boundary),
            to: run.end,
        };
        left.last_half()
    }

    /// True if it fails once its own tiles are done.
    fn fails_at_its_end(&self, e: u32) -> bool {
        let exec = self.exec(e);
        let out = exec.state.as_ref().is_some_and(|s| !s.parts().is_empty());
        exec.fails && !out
    }

    /// The events of a run that differ because its range is spread.
    pub(super) fn range_events(&self, node: usize, e: u32, epoch: u64) -> Option<Vec<Event>> {
        let run = self.range_run(node, e, epoch)?;
        let writing = run.writing.as_ref()?;
        let (Write::Finish | Write::Split(_) | Write::Merge | Write::Rest) = writing else {
            return None;
        };
        let exec = self.exec(e);
        if exec.seq != run.seq || exec.is_done() {
            // Any message will be refused.
            return Some(Vec::new());
        }
        let (now, id) = (self.wall(), self.id_of(e));
        let spread = exec.state.as_ref()?.spread.as_deref()?;
        let capsule = self.capsule_us(node, e);
        let boundary = |index: u64, left: u64, compute_us: u64| {
            Event::Boundary(BoundaryEvent {
                index,
                digest: digest(e, index),
                bytes: exec.state_bytes,
                computed_at: now,
                compute_us,
                of: Some(index + left),
                note: None,
                outputs: Vec::new(),
                energy: None,
            })
        };
        let since = |index: u64| index.saturating_sub(run.committed) * capsule;
        let rests = Event::Yielded {
            cause: Cause::Parts,
            computed_until: now,
        };
        Some(match writing {
            Write::Split(index) => {
                let TileRange { from, to } = self.gives(run, *index)?;
                let nth = spread.splits;
                let left = from - run.tile_at(*index);
                vec![
                    boundary(*index, left, since(*index)),
                    Event::Split {
                        part: part_id(id, nth, TileRange { from, to }),
                        nth,
                        from,
                        to,
                    },
                ]
            }
            Write::Merge => {
                let part = spread.last()?.id;
                let (next, end) = self.range_after(node, e, epoch)?;
                vec![
                    boundary(run.committed + 1, end - next, MERGE_US),
                    Event::Merged { part },
                ]
            }
            Write::Rest => vec![rests],
            _ => {
                let all = run.from + run.end - run.tile;
                if !spread.parts.is_empty() {
                    let last = (all > run.committed).then(|| boundary(all, 0, since(all)));
                    return Some(last.into_iter().chain([rests]).collect());
                }
                if exec.fails {
                    return Some(vec![Event::Failed {
                        reason: "its program ended with exit status 1".to_owned(),
                        stderr: String::new(),
                        fault: Some(Box::new(Fault::Exited { status: 1 })),
                    }]);
                }
                // A part leaves its last σ to its holder, with a boundary of its own if the last
                // one is already committed.
                let part = spread.part_of.is_some();
                let capsules = match part {
                    true => all.max(run.committed + 1),
                    false => all,
                };
                let last = part.then(|| boundary(capsules, 0, since(capsules)));
                let completed = Event::Completed {
                    result: serde_json::Value::Null,
                    object: None,
                    computed_until: now,
                    capsules,
                    outputs: Vec::new(),
                    energy: None,
                };
                last.into_iter().chain([completed]).collect()
            }
        })
    }

    /// The split is stored: the run keeps only the first half.
    pub(super) fn has_split(&mut self, node: usize, e: u32, epoch: u64, boundary: u64) {
        let now = self.now;
        let mut services = self.replicas.iter().filter_map(|r| r.policy.as_ref());
        let keeps = services.any(Decide::keeps_what_it_gives);
        let end = self.exec(e).tiles.as_ref().map(|tiles| tiles.end);
        if let Some(run) = self.nodes[node].run(e, epoch) {
            (run.committed, run.committed_at, run.split) = (boundary, now, false);
            if !keeps {
                run.end = end.unwrap_or(run.end);
            }
        }
        self.plan_look(node, e, epoch);
    }

    /// The merge is stored: the run goes on where the part has stopped.
    pub(super) fn has_merged(&mut self, node: usize, e: u32, epoch: u64) {
        let now = self.now;
        let range = self.exec(e).tiles.as_ref().map(|t| (t.next, t.end));
        if let (Some((next, end)), Some(run)) = (range, self.nodes[node].run(e, epoch)) {
            run.committed += 1;
            (run.committed_at, run.from, run.base) = (now, run.committed, now);
            (run.tile, run.end) = (next, end);
        }
        self.plan_look(node, e, epoch);
    }
}
