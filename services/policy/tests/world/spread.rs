//! Workers of the simulated cluster that compute ranges of tiles, one tile per capsule. They split,
//! wait for parts, take them back, move and complete. The shell makes requested parts.

use std::collections::BTreeSet;

use fiec_policy::{Fate, Seen};
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{part_id, tiles};

use super::*;

/// The finished and the remaining tiles of an execution.
#[derive(Debug, Clone)]
pub struct Tiles {
    pub done: Vec<u64>,
    pub next: u64,
    pub end: u64,
    /// Completed capsules; a merge counts as one.
    capsules: u64,
    /// Time of its start here.
    since: u64,
    /// Number of tiles that were finished at its start here.
    before: u64,
}

/// The state of all executions with ranges.
#[derive(Debug, Default)]
pub struct Tiled {
    pub of: BTreeMap<ExecutionId, Tiles>,
    /// Executions that must split at their next boundary.
    splitting: BTreeSet<ExecutionId>,
    /// Orders to split, in order of time.
    pub told: Vec<ExecutionId>,
    /// Time of a tile, in ms.
    pub each_ms: u64,
    /// Slow nodes, with their factor.
    pub slow: BTreeMap<String, u64>,
    /// The reason with which all workers refuse to split, if they do.
    pub refuse: Option<String>,
    /// True if workers accept the order and do nothing.
    pub deaf: bool,
    /// The largest number that computed at once.
    pub most: usize,
}

impl Tiled {
    pub fn new(each_ms: u64) -> Self {
        Self {
            each_ms,
            ..Self::default()
        }
    }
}

/// A node that runs the program with the tiles, one at a time.
pub fn tiled(i: usize) -> NodeDescriptor {
    let mut d = descriptor(i, 100 + i as u128);
    d.slots = 1;
    d.programs.push("sweep@1".into());
    d
}

impl World {
    /// Submits a range of tiles that up to `up_to` nodes may compute.
    pub fn submit_tiles(&mut self, n: u64, count: u64, up_to: u32, more: &str) {
        let line = format!(
            r#"{{"program":"sweep@1","params":{{"tiles":{{"from":0,"to":{count}}}}},"spread":{{"up_to":{up_to}}}{more}}}"#
        );
        self.submit_spec(n, Submission::parse(line.as_bytes()).unwrap());
        self.carry_out();
    }

    /// The shell makes the requested parts.
    pub fn make_parts(&mut self) {
        for action in std::mem::take(&mut self.births) {
            let Action::MakePart { part, holder, .. } = action else {
                continue;
            };
            if self.ledgers.contains_key(&part) {
                match Fate::of(self.state_of(part).phase.kind()) {
                    Some(fate) => {
                        let seen = Seen::Ended(fate);
                        self.step(Input::Ended {
                            execution: part,
                            seen,
                        });
                    }
                    None => self.tell(part, true),
                }
                continue;
            }
            let state = self.state_of(holder).clone();
            let found = state.parts().iter().find(|p| p.id == part).copied();
            let Some(found) = found.filter(|_| !state.phase.is_terminal()) else {
                continue;
            };
            let whole = match &state.spec {
                Some(spec) => spec.clone(),
                None => continue,
            };
            let own = Arc::new(whole.part(found.range(), state.submitted_at));
            let unborn = ExecutionState::unborn_part(&state, &found, own, self.wall());
            self.unborn.insert(part, unborn);
            self.append(part, vec![Event::Submitted], "policy/p", false);
            self.tell_events(part, vec![Event::Submitted], true);
        }
    }

    pub fn state_of(&self, id: ExecutionId) -> &ExecutionState {
        &self.ledgers[&id].state
    }

    /// All live executions.
    pub fn live(&self) -> Vec<ExecutionId> {
        let all = self.ledgers.iter();
        let live = all.filter(|(_, l)| !l.state.phase.is_terminal());
        live.map(|(id, _)| *id).collect()
    }

    /// All parts that were ever made.
    pub fn parts(&self) -> Vec<ExecutionId> {
        let all = self.ledgers.iter();
        let parts = all.filter(|(_, l)| l.state.part_of().is_some());
        parts.map(|(id, _)| *id).collect()
    }

    /// Runs the cluster and its workers for `ms`.
    pub fn work(&mut self, tiled: &mut Tiled, ms: u64) {
        for _ in 0..ms / 50 {
            self.pass(50);
            self.obey_tiled(tiled);
            for id in self.live() {
                self.work_on(tiled, id);
            }
            let computing = |id: &ExecutionId| {
                let state = self.state_of(*id);
                state.spread.is_some() && matches!(state.phase, Phase::Started(_))
            };
            let count = self.live().iter().filter(|id| computing(id)).count();
            tiled.most = tiled.most.max(count);
            self.carry_out();
        }
    }

    /// The same until no execution lives, at most `ms`.
    pub fn work_out(&mut self, tiled: &mut Tiled, ms: u64) {
        let until = self.now + ms;
        while !self.live().is_empty() && self.now < until {
            self.work(tiled, 250);
        }
        let live = self.live();
        assert!(live.is_empty(), "{}", self.stand(&live));
    }

    /// The state of these executions, for a failing test.
    pub fn stand(&self, ids: &[ExecutionId]) -> String {
        let words = ids.iter().map(|id| {
            let why = self.policy.why(self.at(), *id).map(|w| w.summary);
            format!("{id} {:?} {why:?}\n", self.state_of(*id).spread)
        });
        words.collect()
    }

    /// Replaces the policy service by an empty one that reads the last message of each ledger.
    pub fn replace_policy(&mut self, own: u128) {
        let config = self.policy.config().clone();
        self.policy = self.trace.policy(&config, InstanceId(Uuid::from_u128(own)));
        self.births.clear();
        self.out.clear();
        for i in 0..self.nodes.len() {
            let d = self.nodes[i].0.clone();
            self.step(Input::Descriptor {
                descriptor: Box::new(d),
            });
            self.prove(i, true);
        }
        self.vectors();
        let mut last: Vec<_> = self.ledgers.iter().map(|(id, l)| (l.seq, *id)).collect();
        last.sort_unstable();
        for (_, id) in last {
            if !self.state_of(id).phase.is_terminal() {
                self.tell(id, false);
            }
        }
        self.step(Input::Loaded);
    }

    fn obey_tiled(&mut self, tiled: &mut Tiled) {
        for (_, request) in self.take_controls() {
            match request {
                ControlRequest::Split { execution, epoch } => {
                    tiled.told.push(execution);
                    let outcome = match &tiled.refuse {
                        Some(reason) => fiec_policy::ControlOutcome::Refused(reason.clone()),
                        None => fiec_policy::ControlOutcome::Taken,
                    };
                    if tiled.refuse.is_none() && !tiled.deaf {
                        tiled.splitting.insert(execution);
                    }
                    self.step(Input::SplitAnswered {
                        execution,
                        epoch,
                        answer: outcome,
                    });
                }
                ControlRequest::Cancel { execution, who }
                    if !self.state_of(execution).phase.is_terminal() =>
                {
                    let author = self.author_of(execution);
                    self.append(execution, vec![Event::Cancelled { who }], &author, true);
                }
                ControlRequest::Yield {
                    execution,
                    epoch,
                    cause,
                    to,
                    ..
                } => {
                    let state = self.state_of(execution);
                    if state.epoch != epoch || !matches!(state.phase, Phase::Started(_)) {
                        continue;
                    }
                    let author = self.author_of(execution);
                    let mut events = self.boundary_of(tiled, execution);
                    events.push(Event::Yielded {
                        cause: cause.clone(),
                        computed_until: self.wall(),
                    });
                    if let Some(to) = to {
                        events.push(Event::Bound {
                            epoch: epoch + 1,
                            node: to.node,
                            instance: to.instance,
                            substrate: to.substrate,
                            cause,
                            decision: None,
                        });
                    }
                    self.append(execution, events, &author, true);
                }
                _ => {}
            }
        }
    }

    pub fn author_of(&self, id: ExecutionId) -> String {
        let b = self.state_of(id).phase.binding().unwrap();
        format!("worker/{}/{}", b.node, b.instance)
    }

    fn work_on(&mut self, tiled: &mut Tiled, id: ExecutionId) {
        let state = self.state_of(id).clone();
        let Some(node) = state.phase.binding().map(|b| b.node.clone()) else {
            return;
        };
        let number: usize = node.as_str()[1..].parse().unwrap();
        if !self.nodes[number].3 {
            return;
        }
        let author = self.author_of(id);
        match &state.phase {
            Phase::Bound(_) => self.take_tiles_up(tiled, id, &state, &author),
            Phase::Started(_) => self.make_tiles(tiled, id, &author),
            _ => {}
        }
    }

    fn take_tiles_up(
        &mut self,
        tiled: &mut Tiled,
        id: ExecutionId,
        state: &ExecutionState,
        author: &str,
    ) {
        let began = Event::Started {
            epoch: state.epoch,
            computing_since: self.wall(),
        };
        self.append(id, vec![began], author, true);
        let range = state.spec.as_ref().and_then(|s| tiles(&s.params));
        let Some(TileRange { from, to }) = range.filter(|_| state.spread.is_some()) else {
            return;
        };
        let now = self.now;
        let own = tiled.of.entry(id).or_insert(Tiles {
            done: Vec::new(),
            next: from,
            end: to,
            capsules: 0,
            since: now,
            before: 0,
        });
        (own.since, own.before) = (now, own.next);
        let spread = state.spread.as_ref().unwrap();
        if !spread.waits {
            return;
        }
        let last = *spread.last().unwrap();
        let part = &self.ledgers[&last.id].state;
        assert!(
            part.phase.is_terminal(),
            "it was bound before its last part has ended"
        );
        // A part that never started has no tiles.
        let taken = tiled.of.get(&last.id).cloned();
        let own = tiled.of.get_mut(&id).unwrap();
        let next = taken.as_ref().map_or(last.from, |t| t.next);
        own.done.extend(taken.map_or_else(Vec::new, |t| t.done));
        (own.next, own.end, own.before) = (next, last.to, next);
        own.capsules += 1;
        let mut events = vec![self.tile_boundary(tiled, id, 1_000)];
        events.push(Event::Merged { part: last.id });
        self.append(id, events, author, true);
    }

    /// A boundary if a tile was finished since the last one.
    fn boundary_of(&mut self, tiled: &mut Tiled, id: ExecutionId) -> Vec<Event> {
        let made = self.advance(tiled, id);
        let us = made * tiled.each_ms * 1_000;
        let new = tiled.of[&id].capsules > self.state_of(id).boundary_index();
        if new {
            vec![self.tile_boundary(tiled, id, us)]
        } else {
            Vec::new()
        }
    }

    fn tile_boundary(&self, tiled: &Tiled, id: ExecutionId, compute_us: u64) -> Event {
        let own = &tiled.of[&id];
        Event::Boundary(BoundaryEvent {
            index: own.capsules,
            digest: Digest::of(format!("{:?}", own.done).as_bytes()),
            bytes: 8,
            computed_at: self.wall(),
            compute_us,
            of: Some(own.capsules + own.end - own.next),
            note: None,
            outputs: vec![],
            energy: None,
        })
    }

    /// Finishes the tiles for which there was time since the start.
    fn advance(&mut self, tiled: &mut Tiled, id: ExecutionId) -> u64 {
        let binding = self.state_of(id).phase.binding();
        let slow = binding.and_then(|b| tiled.slow.get(b.node.as_str()));
        let (now, each) = (self.now, tiled.each_ms * slow.unwrap_or(&1));
        let own = tiled.of.get_mut(&id).unwrap();
        let until = (own.before + (now - own.since) / each).min(own.end);
        let made = until.saturating_sub(own.next);
        own.done.extend(own.next..own.next + made);
        own.next += made;
        own.capsules += made;
        made
    }

    fn make_tiles(&mut self, tiled: &mut Tiled, id: ExecutionId, author: &str) {
        if !tiled.of.contains_key(&id) {
            return;
        }
        let mut events = self.boundary_of(tiled, id);
        let own = tiled.of[&id].clone();
        let spread = self.state_of(id).spread.clone().unwrap();
        if own.next == own.end {
            tiled.splitting.remove(&id);
            let at = self.wall();
            if !spread.parts.is_empty() {
                events.push(Event::Yielded {
                    cause: Cause::Parts,
                    computed_until: at,
                });
            } else {
                if events.is_empty() && spread.part_of.is_some() {
                    // Its last tile was already committed, so the end is a boundary of its own.
                    tiled.of.get_mut(&id).unwrap().capsules += 1;
                    events.push(self.tile_boundary(tiled, id, 1_000));
                }
                events.push(Event::Completed {
                    result: serde_json::Value::Null,
                    object: None,
                    computed_until: at,
                    capsules: tiled.of[&id].capsules,
                    outputs: vec![],
                    energy: None,
                });
            }
        } else if !events.is_empty() && tiled.splitting.remove(&id) {
            let left = TileRange {
                from: own.next,
                to: own.end,
            };
            if let Some(range) = left.last_half() {
                tiled.of.get_mut(&id).unwrap().end = range.from;
                let us = tiled.each_ms * 1_000;
                events = vec![self.tile_boundary(tiled, id, us)];
                events.push(Event::Split {
                    part: part_id(id, spread.splits, range),
                    nth: spread.splits,
                    from: range.from,
                    to: range.to,
                });
            }
        }
        if !events.is_empty() {
            self.append(id, events, author, true);
        }
    }
}
