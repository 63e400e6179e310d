//! Several policy services race for shared limits. In any order of messages, with losses, delays
//! and stalls, no limit is ever exceeded, and in the end everything has run.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

mod world;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fiec_policy::Change;
use fiec_policy::{Action, Config, Input, Judged, LedgerView, Millis, NewExecution, Now, Policy};
use fiec_policy::{Fate, Seen};
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{
    Event, ExecutionId, ExecutionState, HardwareVector, InstanceId, LedgerMessage, NodeDescriptor,
    Phase, Reading, Signal, Submission, Tenant, Timestamp,
};
use fiec_simulator::decide::Decide as _;
use fiec_simulator::trace::Traced;
use uuid::Uuid;
use world::trace::{Trace, untraced};

const START: u64 = 86_400_000;
const LIMIT: usize = 3;
const AT_ONCE: usize = 2;
const GANG: u64 = 2;
/// The traces of this many races are committed.
const TRACED_SEEDS: u64 = 3;

/// A generator of its own, so that a seed is one number (xorshift64*).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % n
    }
}

/// News for a service, in order from each source.
enum News {
    Ledger(u64, String),
    Table(u64, Reservations),
}

/// A request of a service without an answer yet.
enum Asked {
    Append(ExecutionId, u64, Vec<Event>),
    Reserve(Option<Quota>, Change),
    Lookup(ExecutionId),
}

struct Service {
    policy: Traced<Policy>,
    id: InstanceId,
    feed: VecDeque<News>,
    tables: VecDeque<News>,
    asked: Vec<Asked>,
    /// It is stalled until this moment.
    stalled: u64,
}

struct Race {
    services: Vec<Service>,
    trace: Trace,
    now: u64,
    seq: u64,
    ledgers: BTreeMap<ExecutionId, (u64, ExecutionState)>,
    specs: Vec<(ExecutionId, Submission)>,
    table: (u64, Reservations),
    nodes: Vec<NodeDescriptor>,
    dice: Dice,
    most: usize,
    count: u64,
}

fn tenant() -> Tenant {
    Tenant::new("lab").unwrap()
}

fn quota() -> Quota {
    world::scenes::quota(u32::try_from(LIMIT).unwrap())
}

impl Race {
    fn new(seed: u64, services: usize) -> Self {
        let mut race = Self {
            services: Vec::new(),
            trace: Trace::begin(),
            now: START,
            seq: 0,
            ledgers: BTreeMap::new(),
            specs: Vec::new(),
            table: (0, Reservations::default()),
            nodes: (0..4)
                .map(|i| world::descriptor(i, 100 + i as u128))
                .collect(),
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            most: 0,
            count: 0,
        };
        for n in 0..services {
            race.add_service(n as u128 + 1);
        }
        race
    }

    /// Adds a service that starts now and takes over the existing ledgers.
    fn add_service(&mut self, n: u128) {
        let id = InstanceId(Uuid::from_u128(n));
        let mut service = Service {
            policy: self.trace.policy(&Config::default(), id),
            id,
            feed: VecDeque::new(),
            tables: VecDeque::new(),
            asked: Vec::new(),
            stalled: 0,
        };
        let now = self.at();
        for d in &self.nodes {
            tell(
                &mut service,
                now,
                Input::Descriptor {
                    descriptor: Box::new(d.clone()),
                },
            );
            let expires = Timestamp::from_micros(4_000_000_000_000_000);
            let proof = Proof::passing(d, fiec_schemas::trust::SUITE, now.wall, expires);
            let signed = SignedProof {
                v: 1,
                statement: serde_json::to_string(&proof).unwrap(),
                key: "U".into(),
                sig: "s".into(),
            };
            let input = Input::Proof {
                node: d.node.clone(),
                signed: Box::new(signed),
                judged: Judged::Counts(proof),
            };
            tell(&mut service, now, input);
        }
        tell(
            &mut service,
            now,
            Input::Quota {
                tenant: tenant(),
                quota: Some(quota()),
            },
        );
        for (id, (seq, state)) in &self.ledgers {
            if !state.phase.is_terminal() {
                let header = header(&[], state);
                let view = LedgerView::read(&header, *seq).unwrap();
                follow(&mut service, now, &view, false);
                assert!(service.policy.knows(*id));
            }
        }
        tell(&mut service, now, Input::Loaded);
        self.services.push(service);
        self.vectors();
    }

    fn at(&self) -> Now {
        Now {
            mono: Millis(self.now),
            wall: Timestamp::from_micros(
                1_700_000_000_000_000 + i64::try_from(self.now).unwrap() * 1_000,
            ),
        }
    }

    fn vectors(&mut self) {
        let now = self.at();
        self.count += 1;
        for d in self.nodes.clone() {
            let vector = HardwareVector {
                v: 1,
                node: d.node.clone(),
                instance: d.instance,
                count: self.count,
                at: now.wall,
                clock: None,
                readings: vec![Reading {
                    signal: Signal::Memory,
                    device: None,
                    value: Some(0.2),
                    raw: None,
                    limit: None,
                    unit: "ratio".into(),
                    source: "test".into(),
                    at: now.wall,
                    missing: None,
                    envelope: None,
                }],
                draining: false,
                slots: d.slots,
                running_count: 0,
                queued_count: 0,
                running: vec![],
                arriving: vec![],
                stuck: Vec::new(),
            };
            for service in self.services.iter_mut().filter(|s| s.stalled <= self.now) {
                tell(
                    service,
                    now,
                    Input::Vector {
                        vector: Box::new(vector.clone()),
                        age_ms: 0,
                    },
                );
            }
        }
    }

    fn submit(&mut self, n: u64, line: &str) {
        let id = ExecutionId(Uuid::from_u128(1_000 + u128::from(n)));
        let spec = Submission::parse(line.as_bytes()).unwrap();
        self.specs.push((id, spec.clone()));
        let now = self.at();
        let at = self.dice.below(self.services.len());
        let new = NewExecution {
            execution: id,
            tenant: &tenant(),
            spec: &spec,
            submitted_at: now.wall,
        };
        let mut out = Vec::new();
        self.services[at].policy.submit_now(now, new, &mut out);
        take(&mut self.services[at], out);
    }

    /// Stores a message if its author knows the last one, and sends it to all services.
    fn append(&mut self, id: ExecutionId, expected: u64, events: Vec<Event>, author: &str) -> bool {
        let last = self.ledgers.get(&id).map_or(0, |(seq, _)| *seq);
        if last != expected {
            return false;
        }
        let at = self.at().wall;
        let state = match self.ledgers.get(&id) {
            Some((_, state)) => state.clone(),
            None => {
                let spec = self.specs.iter().find(|(other, _)| *other == id).unwrap();
                ExecutionState::unborn(tenant(), id, Arc::new(spec.1.clone()), None, at)
            }
        };
        let Ok(mut next) = state.after(&events, author, at, None) else {
            return false;
        };
        self.seq += 1;
        next.resolve(self.seq);
        let header = header(&events, &next);
        self.ledgers.insert(id, (self.seq, next));
        for service in &mut self.services {
            service
                .feed
                .push_back(News::Ledger(self.seq, header.clone()));
        }
        self.check();
        true
    }

    /// Checks that the limits hold.
    fn check(&mut self) {
        let bound: Vec<_> = self
            .ledgers
            .iter()
            .filter(|(_, (_, state))| state.phase.binding().is_some())
            .map(|(id, _)| *id)
            .collect();
        assert!(bound.len() <= LIMIT, "{} at once: {bound:?}", bound.len());
        let sweep = bound.iter().filter(|id| {
            let spec = self.specs.iter().find(|(other, _)| other == *id);
            spec.is_some_and(|(_, spec)| spec.batch.is_some())
        });
        assert!(sweep.count() <= AT_ONCE, "of the batch: {bound:?}");
        self.most = self.most.max(bound.len());
    }

    /// One random event: a service gets news or an answer, or a worker acts.
    fn something(&mut self) {
        let now = self.at();
        let at = self.dice.below(self.services.len());
        if self.services[at].stalled > self.now {
            return;
        }
        match self.dice.below(10) {
            0..4 => {
                if let Some(News::Ledger(seq, header)) = self.services[at].feed.pop_front() {
                    let view = LedgerView::read(&header, seq).unwrap();
                    follow(&mut self.services[at], now, &view, false);
                }
            }
            4 => {
                if let Some(News::Table(seq, table)) = self.services[at].tables.pop_front() {
                    let input = Input::Reserved {
                        tenant: tenant(),
                        table: Some((seq, Arc::new(table))),
                        answer: false,
                    };
                    tell(&mut self.services[at], now, input);
                }
            }
            5..8 => self.answer(at, now),
            _ => self.work(),
        }
        let service = &mut self.services[at];
        let mut out = Vec::new();
        service.policy.act(now, &mut out);
        take(service, out);
    }

    fn answer(&mut self, at: usize, now: Now) {
        if self.services[at].asked.is_empty() {
            return;
        }
        let n = self.dice.below(self.services[at].asked.len());
        match self.services[at].asked.remove(n) {
            Asked::Append(id, expected, events) => {
                let author = format!("policy/{}", self.services[at].id);
                let stored = self.append(id, expected, events, &author);
                let Some((seq, state)) = self.ledgers.get(&id).cloned() else {
                    tell(
                        &mut self.services[at],
                        now,
                        Input::Vanished { execution: id },
                    );
                    return;
                };
                if stored {
                    let input = Input::Appended {
                        execution: id,
                        seq,
                        epoch: state.epoch,
                        phase: state.phase.clone(),
                    };
                    tell(&mut self.services[at], now, input);
                } else {
                    let header = header(&[], &state);
                    let view = LedgerView::read(&header, seq).unwrap();
                    follow(&mut self.services[at], now, &view, true);
                }
            }
            Asked::Reserve(quota, change) => {
                let after = change.apply(&self.table.1, quota.as_ref());
                if after != self.table.1 || change.fence {
                    self.table = (self.table.0 + 1, after);
                    for service in &mut self.services {
                        let (seq, table) = self.table.clone();
                        service.tables.push_back(News::Table(seq, table));
                    }
                }
                let (seq, table) = self.table.clone();
                // The answer may be lost, but the change is made.
                let lost = self.dice.below(10) == 0;
                let input = Input::Reserved {
                    tenant: tenant(),
                    table: (!lost).then_some((seq, Arc::new(table))),
                    answer: true,
                };
                tell(&mut self.services[at], now, input);
            }
            Asked::Lookup(id) => {
                let seen = match self.ledgers.get(&id) {
                    None => Seen::Vanished,
                    Some((_, state)) => match Fate::of(state.phase.kind()) {
                        Some(fate) => Seen::Ended(fate),
                        None => Seen::Lives,
                    },
                };
                let input = Input::Ended {
                    execution: id,
                    seen,
                };
                tell(&mut self.services[at], now, input);
            }
        }
    }

    /// A worker starts, yields, refuses or completes an execution; an operator pauses and resumes.
    fn work(&mut self) {
        let ids: Vec<_> = self.ledgers.keys().copied().collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.dice.below(ids.len())];
        let (seq, state) = self.ledgers[&id].clone();
        let at = self.at().wall;
        let events = match (&state.phase, self.dice.below(8)) {
            (Phase::Bound(_), 0) => vec![Event::Refused {
                reason: "full".into(),
                offer: 0,
                fault: None,
            }],
            (Phase::Bound(_), 1) => vec![Event::Paused { who: "ann".into() }],
            (Phase::Bound(_), 2..6) => vec![Event::Started {
                epoch: state.epoch,
                computing_since: at,
            }],
            (Phase::Started(_), 0) => vec![Event::Yielded {
                cause: fiec_schemas::Cause::Drain { who: "ann".into() },
                computed_until: at,
            }],
            (Phase::Started(_), 1..3) => vec![Event::Completed {
                result: serde_json::Value::Null,
                object: None,
                computed_until: at,
                capsules: 1,
                outputs: vec![],
                energy: None,
            }],
            (Phase::Paused { .. }, _) => vec![Event::Resumed { who: "ann".into() }],
            (Phase::Pending { .. }, _) if self.only_nowhere_is_left() => {
                vec![Event::Cancelled { who: "ann".into() }]
            }
            _ => return,
        };
        self.append(id, seq, events, "worker/n0/x");
    }

    /// Time passes for all services that are not stalled.
    fn pass(&mut self, ms: u64) {
        self.now += ms;
        let now = self.at();
        if self.now.is_multiple_of(500) {
            self.vectors();
        }
        let ids: Vec<_> = self.services.iter().map(|s| (s.id, s.stalled)).collect();
        for service in self.services.iter_mut().filter(|s| s.stalled <= now.mono.0) {
            for (id, stalled) in &ids {
                if *stalled <= now.mono.0 {
                    let input = Input::Replica {
                        id: *id,
                        leaving: false,
                    };
                    tell(service, now, input);
                }
            }
            tell(service, now, Input::Tick);
        }
    }

    /// True if all executions that have a place somewhere have ended.
    fn only_nowhere_is_left(&self) -> bool {
        let nowhere = |spec: &Submission| !spec.requires.nodes.is_empty();
        let ended = |id| {
            let ledger = self.ledgers.get(id);
            ledger.is_some_and(|(_, s)| s.phase.is_terminal())
        };
        let mut specs = self.specs.iter();
        specs.all(|(id, spec)| nowhere(spec) || ended(id))
    }

    fn all_ended(&self) -> bool {
        let ended = |(_, s): &(u64, ExecutionState)| s.phase.is_terminal();
        self.ledgers.len() == self.specs.len() && self.ledgers.values().all(ended)
    }
}

fn header(events: &[Event], state: &ExecutionState) -> String {
    let message = LedgerMessage {
        v: 1,
        events: events.to_vec(),
        state: state.clone().into(),
        sig: None,
    };
    message.encode().unwrap()
}

fn tell(service: &mut Service, now: Now, input: Input) {
    let mut out = Vec::new();
    service.policy.step(now, input, &mut out);
    take(service, out);
}

fn follow(service: &mut Service, now: Now, view: &LedgerView<'_>, reread: bool) {
    let mut out = Vec::new();
    service.policy.follow(now, view, reread, &mut out);
    take(service, out);
}

fn take(service: &mut Service, actions: Vec<Action>) {
    for action in actions {
        let asked = match action {
            Action::Append {
                execution,
                expected,
                events,
                ..
            } => Asked::Append(execution, expected, events),
            Action::Reserve { quota, change, .. } => Asked::Reserve(quota, *change),
            Action::Lookup { execution, .. } => Asked::Lookup(execution),
            _ => continue,
        };
        service.asked.push(asked);
    }
}

/// Plays one seed. Returns the largest number of executions bound at once.
fn play(seed: u64) -> usize {
    let mut race = Race::new(seed, 2);
    race.pass(500);
    for n in 0..16 {
        let line = match n % 4 {
            0 => r#"{"program":"synthetic@1"}"#.to_owned(),
            1 => r#"{"program":"synthetic@1","batch":"sweep","at_once":2}"#.to_owned(),
            2 => format!(
                r#"{{"program":"synthetic@1","gang":{{"name":"g{}","size":{GANG}}}}}"#,
                n / 8
            ),
            _ => r#"{"program":"synthetic@1","priority":5}"#.to_owned(),
        };
        race.submit(n, &line);
    }
    // They hold reservations in turn without a place, and some of their owners are lost.
    for n in 16..16 + LIMIT as u64 {
        race.submit(
            n,
            r#"{"program":"synthetic@1","requires":{"nodes":["nowhere"]}}"#,
        );
    }
    for round in 0..40_000_u64 {
        for _ in 0..8 {
            race.something();
        }
        if round % 3 == 0 {
            race.pass(50);
        }
        let dice = race.dice.below(4_000);
        if dice < race.services.len() {
            // It stalls with its requests in flight, and continues with them later.
            race.services[dice].stalled = race.now + 4_000 + race.dice.below(12_000) as u64;
        } else if dice == 3_999 && race.services.len() < 4 {
            let n = 10 + u128::from(race.now);
            race.add_service(n);
        }
        if race.all_ended() {
            return race.most;
        }
    }
    let left: Vec<_> = race
        .ledgers
        .iter()
        .filter(|(_, (_, s))| !s.phase.is_terminal())
        .map(|(id, (_, s))| {
            let now = race.at();
            let why: Vec<_> = race
                .services
                .iter()
                .map(|p| p.policy.why(now, *id).map(|w| w.summary))
                .collect();
            format!("{id}: {} {why:?}", s.phase.as_str())
        })
        .collect();
    panic!(
        "seed {seed}: not all have run: {left:#?}\n{:#?}",
        race.table
    );
}

#[test]
fn two_services_that_race_never_exceed_a_limit_and_all_runs_in_the_end() {
    let seeds = std::env::var("FIEC_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok());
    let first = std::env::var("FIEC_SEED").ok().and_then(|n| n.parse().ok());
    let (first, count) = (first.unwrap_or(1_u64), seeds.unwrap_or(40_u64));
    if first != 1 {
        untraced();
    }
    let mut most = 0;
    for seed in first..first + count {
        eprintln!("seed {seed}");
        if seed > TRACED_SEEDS {
            untraced();
        }
        most = most.max(play(seed));
    }
    assert_eq!(most, LIMIT, "the limit is reached, or nothing was tested");
}
