//! A simulated lab: programs that cross boundaries, and workers that obey orders.

use std::collections::{BTreeMap, BTreeSet};

use fiec_policy::{Config, ControlOutcome, Input};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{BoundaryEvent, Cause, Digest, Event, NodeDescriptor, Phase, Tenant};

use super::{World, descriptor};

/// A node with `slots` slots.
pub fn node(slots: u32) -> NodeDescriptor {
    NodeDescriptor {
        slots,
        ..descriptor(0, 100)
    }
}

/// A lab with one such node.
pub fn lab(slots: u32) -> World {
    World::with(Config::default(), vec![node(slots)])
}

/// The simulated programs: their boundaries, and the work done so far.
pub struct Lab {
    pub w: World,
    /// Boundary interval of each, in ms.
    pub every: BTreeMap<u64, u64>,
    pub computed: BTreeMap<u64, u64>,
    pub since_boundary: BTreeMap<u64, u64>,
    pub ordered: BTreeMap<u64, ControlRequest>,
    /// Time and rule of each preemption.
    pub gave_way: Vec<(u64, u64, Rule)>,
    /// Time to start on a node, in ms.
    pub takes_up: u64,
    /// Number of answers that will be lost next; the holders obey all the same.
    pub answers_lost: u32,
    /// Executions whose holders get no orders.
    pub deaf: BTreeSet<u64>,
    /// Time and epoch of each binding.
    bound: BTreeMap<u64, (u64, u64)>,
}

impl Lab {
    pub fn new(w: World) -> Self {
        Self {
            w,
            every: BTreeMap::new(),
            computed: BTreeMap::new(),
            since_boundary: BTreeMap::new(),
            ordered: BTreeMap::new(),
            gave_way: Vec::new(),
            takes_up: 0,
            answers_lost: 0,
            deaf: BTreeSet::new(),
            bound: BTreeMap::new(),
        }
    }

    pub fn submit(&mut self, n: u64, every_ms: u64, fields: &str) {
        self.every.insert(n, every_ms);
        let fields = if fields.is_empty() {
            r#""retries":3"#
        } else {
            fields
        };
        self.w.submit_line(n, fields);
    }

    pub fn submit_of(&mut self, n: u64, tenant: &str, fields: &str) {
        let tenant = Tenant::new(tenant).unwrap();
        self.w.tenants.insert(World::id(n), tenant);
        self.submit(n, 1_000, fields);
    }

    /// True if it runs and is not parked.
    pub fn runs(&self, n: u64) -> bool {
        let ledger = self.w.ledgers.get(&World::id(n));
        ledger.is_some_and(|l| {
            matches!(l.state.phase, Phase::Started(_)) && l.state.parked().is_none()
        })
    }

    /// Number of executions that run on a node.
    pub fn computing_on(&self, node: usize) -> usize {
        let running = self.running();
        running
            .into_iter()
            .filter(|n| self.w.node_of(*n) == node)
            .count()
    }

    fn has_slot(&self, n: u64) -> bool {
        let node = self.w.node_of(n);
        self.computing_on(node) < self.w.nodes[node].0.slots as usize
    }

    pub fn boundary(&mut self, n: u64, ms: u64) -> Event {
        let total = self.computed.entry(n).or_default();
        *total += ms;
        let last = self.w.ledgers[&World::id(n)].state.boundary_index();
        Event::Boundary(BoundaryEvent {
            index: last + 1,
            digest: Digest::of(&n.to_le_bytes()),
            bytes: 1_000,
            computed_at: self.w.wall(),
            compute_us: ms * 1_000,
            of: None,
            note: None,
            outputs: vec![],
            energy: None,
        })
    }

    /// Lets programs compute, cross boundaries and obey orders for `ms`. `length` gives the total
    /// computing time of each.
    pub fn play(&mut self, ms: u64, length: impl Fn(u64) -> u64) {
        for _ in 0..ms / 50 {
            self.w.pass(50);
            for (_, request) in self.w.take_controls() {
                self.hear(request);
            }
            let all: Vec<u64> = self.every.keys().copied().collect();
            for n in all {
                if !self.w.ledgers.contains_key(&World::id(n)) {
                    continue;
                }
                if matches!(self.w.phase(n), Phase::Bound(_)) {
                    self.begin(n);
                } else if self.runs(n) {
                    self.compute(n, length(n));
                }
            }
        }
    }

    /// Starts a bound execution if it may start, has a slot, and the start time has passed.
    fn begin(&mut self, n: u64) {
        if self.w.policy.withholds(World::id(n)) || !self.has_slot(n) {
            return;
        }
        let (epoch, now) = (self.w.ledgers[&World::id(n)].state.epoch, self.w.now);
        let bound = self.bound.entry(n).or_insert((epoch, now));
        if bound.0 != epoch {
            *bound = (epoch, now);
        }
        if now - bound.1 < self.takes_up {
            return;
        }
        self.w.start(n);
        self.since_boundary.insert(n, 0);
        self.ordered.remove(&n);
    }

    /// Its number of bindings.
    pub fn epoch(&self, n: u64) -> u64 {
        self.w.ledgers[&World::id(n)].state.epoch
    }

    /// An order to a worker: a parked execution obeys at once, a running one at its next boundary.
    fn hear(&mut self, request: ControlRequest) {
        let (execution, epoch) = match &request {
            ControlRequest::Yield {
                execution, epoch, ..
            }
            | ControlRequest::Park {
                execution, epoch, ..
            }
            | ControlRequest::Unpark {
                execution, epoch, ..
            } => (*execution, *epoch),
            _ => return,
        };
        let n = u64::try_from(execution.0.as_u128() - 1_000_000).unwrap();
        let slot = self.has_slot(n);
        let refused = matches!(request, ControlRequest::Unpark { .. }) && !slot;
        let deaf = self.deaf.contains(&n);
        let lost = deaf || self.answers_lost > 0;
        self.answers_lost -= u32::from(lost && !deaf);
        let outcome = match refused {
            _ if lost => ControlOutcome::NoAnswer,
            true => ControlOutcome::Refused("no slot is free".into()),
            false => ControlOutcome::Taken,
        };
        self.w.step(Input::Ordered {
            execution,
            epoch,
            answer: outcome,
        });
        if refused || deaf {
            return;
        }
        if !self.w.is_parked(n) {
            self.ordered.insert(n, request);
            return;
        }
        let author = self.w.author(n);
        let at = self.w.wall();
        let event = match request {
            ControlRequest::Unpark { reason, .. } => Event::Unparked {
                reason,
                computing_since: at,
            },
            ControlRequest::Yield {
                to: None, cause, ..
            } => Event::Yielded {
                cause,
                computed_until: at,
            },
            moves => return self.w.obey(execution, &moves),
        };
        self.since_boundary.insert(n, 0);
        self.w.append(execution, vec![event], &author, true);
        self.w.carry_out();
    }

    pub fn compute(&mut self, n: u64, length: u64) {
        let passed = self.since_boundary.entry(n).or_default();
        *passed += 50;
        let passed = *passed;
        let done = self.computed.get(&n).copied().unwrap_or(0);
        if done + passed >= length {
            *self.computed.entry(n).or_default() += passed;
            self.w.complete(n);
            return;
        }
        if passed < self.every[&n] {
            return;
        }
        self.since_boundary.insert(n, 0);
        let boundary = self.boundary(n, passed);
        let author = self.w.author(n);
        let order = self.ordered.remove(&n);
        match order {
            None => self.w.append(World::id(n), vec![boundary], &author, true),
            Some(ref order @ ControlRequest::Yield { to: Some(_), .. }) => {
                self.w.append(World::id(n), vec![boundary], &author, true);
                self.w.obey(World::id(n), order);
            }
            Some(
                ControlRequest::Yield { ref cause, .. } | ControlRequest::Park { ref cause, .. },
            ) => {
                if let Cause::Preempted { rule, .. } = cause {
                    self.gave_way.push((n, self.w.now, *rule));
                }
                let (cause, computed_until) = (cause.clone(), self.w.wall());
                let event = match order {
                    Some(ControlRequest::Park { keep, .. }) => Event::Parked {
                        cause,
                        keep,
                        computed_until,
                    },
                    _ => Event::Yielded {
                        cause,
                        computed_until,
                    },
                };
                self.w
                    .append(World::id(n), vec![boundary, event], &author, true);
                self.w.act();
            }
            Some(_) => {}
        }
        self.w.carry_out();
    }

    pub fn running(&self) -> Vec<u64> {
        self.every
            .keys()
            .copied()
            .filter(|n| self.runs(*n))
            .collect()
    }

    pub fn phase(&self, n: u64) -> String {
        self.w.phase(n).as_str().to_owned()
    }

    /// The reason of its last preemption.
    pub fn reason(&self, n: u64) -> (Rule, String) {
        let history = &self.w.ledgers[&World::id(n)].history;
        let mut causes = history.iter().rev().filter_map(|(_, e)| match e {
            Event::Yielded {
                cause: Cause::Preempted { rule, reason, .. },
                ..
            }
            | Event::Parked {
                cause: Cause::Preempted { rule, reason, .. },
                ..
            } => Some((*rule, reason.clone())),
            _ => None,
        });
        causes.next().unwrap()
    }
}

pub const LONG: u64 = 86_400_000;

pub fn for_ever(_: u64) -> u64 {
    LONG
}
