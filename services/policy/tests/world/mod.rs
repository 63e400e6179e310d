//! A small cluster in memory: ledgers with compare-and-set, nodes with vectors, a clock.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

pub mod holds;
pub mod lab;
pub mod offers;
pub mod parking;
pub mod scenes;
pub mod spread;
pub mod trace;
mod trust;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_policy::{Action, Config, Good, Input, LedgerView, Millis, NewExecution, Now, Policy};
use fiec_schemas::envelope::EnvelopeNow;
use fiec_schemas::hardware::{ArrivingState, Substrate, default_thresholds};
use fiec_schemas::limits::INLINE_SUBMISSION_LIMIT;
use fiec_schemas::messages::{ControlRequest, Why};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::substrate::SubstrateKind;
use fiec_schemas::trust::{
    Finding, NodeIdentity, Proof, Quarantine, Segment, SignedProof, Verdict, VerifiedUpTo,
};
use fiec_schemas::{
    BoundaryEvent, Cause, Contract, Digest, Event, ExecutionId, ExecutionState, HardwareVector,
    InstanceId, LedgerMessage, NodeDescriptor, NodeFlags, NodeId, Phase, Reading, Signal,
    Submission, Tenant, Timestamp,
};
use fiec_simulator::decide::Decide as _;
use fiec_simulator::trace::Traced;
use uuid::Uuid;

use trace::Trace;

pub struct Ledger {
    pub seq: u64,
    pub state: ExecutionState,
    pub history: Vec<(u64, Event)>,
}

pub struct World {
    pub policy: Traced<Policy>,
    trace: Trace,
    pub now: u64,
    seq: u64,
    pub ledgers: BTreeMap<ExecutionId, Ledger>,
    nodes: Vec<(NodeDescriptor, f64, u64, bool)>,
    /// Caps on memory in bytes, by node and device.
    caps: BTreeMap<(usize, Option<String>), f64>,
    /// Signals of devices other than memory, by node and id.
    signals: BTreeMap<(usize, String, Signal), f64>,
    /// Memory readings of devices, by node and id.
    devices: BTreeMap<(usize, String), f64>,
    /// The states that nodes fetch.
    pub arriving: BTreeMap<usize, Vec<ArrivingState>>,
    specs: BTreeMap<ExecutionId, Submission>,
    /// Tenants of executions that are not the lab's.
    pub tenants: BTreeMap<ExecutionId, Tenant>,
    pub out: Vec<Action>,
    controls: Vec<(NodeId, ControlRequest)>,
    probes: Vec<String>,
    /// Nodes that the broker was asked to forget, with the instances of their descriptors.
    pub forgotten: Vec<(NodeId, Option<InstanceId>)>,
    capsules: usize,
    recalls: Vec<ExecutionId>,
    /// The outputs that the ledgers name, as far as a stream would still show them.
    pub named: BTreeMap<ExecutionId, fiec_policy::Named>,
    /// The shell's open requests about holds, in order.
    /// Appends to this ledger are lost, and the policy hears nothing of them.
    pub unanswered: Option<ExecutionId>,
    pub holds: holds::Asked,
    /// Parts that the shell must make, in order.
    pub births: Vec<Action>,
    /// Parts before their first message.
    unborn: BTreeMap<ExecutionId, ExecutionState>,
    /// True if the shell cannot read how far executions are verified.
    pub hide_verified: bool,
    /// How far executions are verified, as stored by the shell.
    pub verified: BTreeMap<ExecutionId, VerifiedUpTo>,
}

const START: u64 = 86_400_000;

impl World {
    pub fn new(nodes: usize) -> Self {
        Self::of((0..nodes).map(|i| descriptor(i, 100 + i as u128)).collect())
    }

    /// A world with these nodes.
    pub fn of(nodes: Vec<NodeDescriptor>) -> Self {
        Self::with(Config::default(), nodes)
    }

    /// The same with these settings.
    pub fn with(config: Config, nodes: Vec<NodeDescriptor>) -> Self {
        let trace = Trace::begin();
        let mut world = Self {
            policy: trace.policy(&config, InstanceId(Uuid::from_u128(1))),
            trace,
            now: START,
            seq: 0,
            ledgers: BTreeMap::new(),
            nodes: Vec::new(),
            caps: BTreeMap::new(),
            signals: BTreeMap::new(),
            devices: BTreeMap::new(),
            arriving: BTreeMap::new(),
            specs: BTreeMap::new(),
            tenants: BTreeMap::new(),
            out: Vec::new(),
            controls: Vec::new(),
            probes: Vec::new(),
            forgotten: Vec::new(),
            capsules: 0,
            recalls: Vec::new(),
            named: BTreeMap::new(),
            unanswered: None,
            holds: holds::Asked::default(),
            births: Vec::new(),
            unborn: BTreeMap::new(),
            hide_verified: false,
            verified: BTreeMap::new(),
        };
        for (i, d) in nodes.into_iter().enumerate() {
            for device in d.substrates.iter().filter(|s| s.is_device()) {
                world.devices.insert((i, device.id.clone()), 0.1);
            }
            world.nodes.push((d.clone(), 0.2, 0, true));
            world.step(Input::Descriptor {
                descriptor: Box::new(d),
            });
            world.prove(i, true);
        }
        world.vectors();
        world.step(Input::Loaded);
        world
    }

    pub fn id(n: u64) -> ExecutionId {
        ExecutionId(Uuid::from_u128(1_000_000 + u128::from(n)))
    }

    pub fn tenant() -> Tenant {
        Tenant::new("lab").unwrap()
    }

    fn tenant_of(&self, id: ExecutionId) -> Tenant {
        self.tenants.get(&id).cloned().unwrap_or_else(Self::tenant)
    }

    pub fn at(&self) -> Now {
        Now {
            mono: Millis(self.now),
            wall: self.wall(),
        }
    }

    pub fn wall(&self) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + i64::try_from(self.now).unwrap() * 1_000)
    }

    pub fn step(&mut self, input: Input) -> Vec<Action> {
        let mut out = Vec::new();
        self.policy.step(self.at(), input, &mut out);
        self.sort_out(&out);
        out
    }

    fn sort_out(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Control { node, request, .. } => {
                    self.controls.push((node.clone(), request.clone()))
                }
                Action::Forget { node, instance } => self.forgotten.push((node.clone(), *instance)),
                Action::Probe { node } => self.probes.push(node.to_string()),
                Action::SendCapsule { .. } => self.capsules += 1,
                Action::Lookup { .. } | Action::Reserve { .. } | Action::FindMembers { .. } => {
                    self.holds.asked.push(action.clone());
                }
                Action::MakePart { .. } => self.births.push(action.clone()),
                Action::Recall { execution, .. } => self.recalls.push(*execution),
                Action::Verified {
                    execution, up_to, ..
                } => {
                    self.verified.insert(*execution, up_to.clone());
                }
                Action::Append { .. } => self.out.push(action.clone()),
                _ => {}
            }
        }
    }

    /// Stores the policy's appends.
    pub fn carry_out(&mut self) {
        while !self.out.is_empty() {
            for action in std::mem::take(&mut self.out) {
                let Action::Append {
                    execution,
                    expected,
                    events,
                    ..
                } = action
                else {
                    continue;
                };
                if self.unanswered == Some(execution) {
                    continue;
                }
                let tip = self.ledgers.get(&execution).map_or(0, |l| l.seq);
                if tip == expected {
                    self.append(execution, events, "policy/p", false);
                    let l = &self.ledgers[&execution];
                    let (seq, epoch, phase) = (l.seq, l.state.epoch, l.state.phase.clone());
                    self.step(Input::Appended {
                        execution,
                        seq,
                        epoch,
                        phase: phase.clone(),
                    });
                } else {
                    self.tell(execution, true);
                }
            }
            self.act();
        }
    }

    pub fn act(&mut self) {
        let mut out = Vec::new();
        self.policy.act(self.at(), &mut out);
        self.sort_out(&out);
        if !self.out.is_empty() {
            self.carry_out();
        }
    }

    pub fn append(&mut self, id: ExecutionId, events: Vec<Event>, author: &str, told: bool) {
        let at = self.wall();
        let state = match self.ledgers.get(&id) {
            Some(l) => l.state.clone(),
            None if self.unborn.contains_key(&id) => self.unborn[&id].clone(),
            None => {
                let spec = self.specs.get(&id).cloned().unwrap_or_else(spec);
                ExecutionState::unborn(self.tenant_of(id), id, Arc::new(spec), None, at)
            }
        };
        let mut next = state.after(&events, author, at, None).unwrap();
        self.seq += 1;
        next.resolve(self.seq);
        self.named.entry(id).or_default().note(&events, &next);
        let mut history = self
            .ledgers
            .remove(&id)
            .map_or_else(Vec::new, |l| l.history);
        history.extend(events.iter().map(|e| (self.now, e.clone())));
        self.ledgers.insert(
            id,
            Ledger {
                seq: self.seq,
                state: next,
                history,
            },
        );
        if told {
            self.tell_events(id, events, false);
        }
    }

    pub fn tell(&mut self, id: ExecutionId, reread: bool) {
        self.tell_events(id, Vec::new(), reread);
    }

    fn tell_events(&mut self, id: ExecutionId, events: Vec<Event>, reread: bool) {
        let l = &self.ledgers[&id];
        let (message, seq) = (
            LedgerMessage {
                v: 1,
                events,
                state: l.state.clone().into(),
                sig: None,
            },
            l.seq,
        );
        let header = message.encode().unwrap();
        let view = LedgerView::read(&header, seq).unwrap();
        self.follow(&view, reread);
    }

    pub fn follow(&mut self, view: &LedgerView<'_>, reread: bool) {
        let mut out = Vec::new();
        self.policy.follow(self.at(), view, reread, &mut out);
        self.sort_out(&out);
    }

    pub fn submit(&mut self, n: u64) -> Vec<Action> {
        self.submit_spec(n, spec())
    }

    /// Submits a line of JSON without the program.
    pub fn submit_line(&mut self, n: u64, line: &str) -> Vec<Action> {
        self.submit_of("synthetic@1", n, line)
    }

    pub fn submit_of(&mut self, program: &str, n: u64, line: &str) -> Vec<Action> {
        let line = format!(r#"{{"program":"{program}",{line}}}"#);
        let actions = self.submit_spec(n, Submission::parse(line.as_bytes()).unwrap());
        self.carry_out();
        actions
    }

    fn submit_spec(&mut self, n: u64, spec: Submission) -> Vec<Action> {
        let tenant = self.tenant_of(Self::id(n));
        let at = self.wall();
        self.specs.insert(Self::id(n), spec.clone());
        let new = NewExecution {
            execution: Self::id(n),
            tenant: &tenant,
            spec: &spec,
            submitted_at: at,
        };
        let mut out = Vec::new();
        self.policy.submit_now(self.at(), new, &mut out);
        self.sort_out(&out);
        out
    }

    pub fn submit_and_store(&mut self, n: u64) -> Vec<Action> {
        let actions = self.submit(n);
        self.carry_out();
        actions
    }

    pub fn foreign_pending(&mut self, n: u64) {
        self.append(Self::id(n), vec![Event::Submitted], "policy/other", true);
    }

    /// As [`World::foreign_pending`], with a submission that no ledger message contains.
    pub fn foreign_large(&mut self, n: u64) {
        let mut large = spec();
        large.params = serde_json::json!({ "x": "x".repeat(INLINE_SUBMISSION_LIMIT) });
        self.specs.insert(Self::id(n), large);
        self.foreign_pending(n);
    }

    pub fn author(&self, n: u64) -> String {
        let b = self.ledgers[&Self::id(n)]
            .state
            .phase
            .binding()
            .unwrap()
            .clone();
        format!("worker/{}/{}", b.node, b.instance)
    }

    pub fn phase(&self, n: u64) -> Phase {
        self.ledgers[&Self::id(n)].state.phase.clone()
    }

    pub fn node_of(&self, n: u64) -> usize {
        self.node_with(Self::id(n))
    }

    pub fn node_with(&self, id: ExecutionId) -> usize {
        let phase = &self.ledgers[&id].state.phase;
        phase.binding().unwrap().node.as_str()[1..].parse().unwrap()
    }

    /// `node` or `node/device` of an execution, or its phase without a node.
    pub fn place_of(&self, n: u64) -> String {
        let phase = self.phase(n);
        match phase.binding() {
            Some(b) if b.substrate == "host" => b.node.to_string(),
            Some(b) => format!("{}/{}", b.node, b.substrate),
            None => phase.as_str().to_owned(),
        }
    }

    pub fn set_device(&mut self, node: usize, device: &str, value: f64) {
        self.devices.insert((node, device.to_owned()), value);
    }

    pub fn last_cause(&self, n: u64) -> Option<Cause> {
        self.ledgers[&Self::id(n)]
            .history
            .iter()
            .rev()
            .find_map(|(_, e)| match e {
                Event::Bound { cause, .. } => Some(cause.clone()),
                _ => None,
            })
    }

    /// Time passes: a tick every 50 ms, vectors every 500 ms.
    pub fn pass(&mut self, ms: u64) {
        let until = self.now + ms;
        while self.now < until {
            self.now += 50;
            if self.now.is_multiple_of(500) {
                self.vectors();
            }
            self.tick();
        }
    }

    pub fn tick(&mut self) {
        self.step(Input::Tick);
        self.answer_recalls();
        self.answer_holds();
        self.make_parts();
        self.carry_out();
    }

    pub fn freeze(&mut self, ms: u64) {
        self.now += ms;
    }

    pub fn pressure(&mut self, node: usize, value: f64, ms: u64) {
        self.nodes[node].1 = value;
        self.pass(ms);
    }

    pub fn set_reading(&mut self, node: usize, value: f64) {
        self.nodes[node].1 = value;
    }

    pub fn silence(&mut self, node: usize) {
        self.nodes[node].3 = false;
    }

    pub fn speak(&mut self, node: usize) {
        self.nodes[node].3 = true;
    }

    pub fn restart_node(&mut self, node: usize) {
        let instance = InstanceId(Uuid::from_u128(5_000 + u128::from(self.now)));
        self.nodes[node].0.instance = instance;
        self.nodes[node].2 = 0;
        let d = self.nodes[node].0.clone();
        self.step(Input::Descriptor {
            descriptor: Box::new(d),
        });
        self.prove(node, true);
    }

    pub fn vectors(&mut self) {
        for i in 0..self.nodes.len() {
            let at = self.wall();
            let (d, value, count, speaks) = &mut self.nodes[i];
            if !*speaks {
                continue;
            }
            *count += 1;
            let caps = &self.caps;
            let reading = |device: Option<String>, value: f64| Reading {
                signal: Signal::Memory,
                envelope: caps.get(&(i, device.clone())).map(|cap| EnvelopeNow {
                    cap: *cap,
                    source: "set by ann".into(),
                }),
                device,
                value: Some(value),
                raw: Some(value * 100.0),
                limit: Some(100.0),
                unit: "ratio".into(),
                source: "test".into(),
                at,
                missing: None,
            };
            let mut readings = vec![reading(None, *value)];
            for ((_, device), value) in self.devices.iter().filter(|((n, _), _)| *n == i) {
                readings.push(reading(Some(device.clone()), *value));
            }
            let signals = self.signals.iter().filter(|((n, ..), _)| *n == i);
            for ((_, device, signal), value) in signals {
                readings.push(Reading {
                    signal: *signal,
                    ..reading(Some(device.clone()), *value)
                });
            }
            let vector = HardwareVector {
                v: 1,
                node: d.node.clone(),
                instance: d.instance,
                count: *count,
                at,
                clock: None,
                readings,
                draining: false,
                slots: d.slots,
                running_count: 0,
                queued_count: 0,
                running: vec![],
                arriving: self.arriving.get(&i).cloned().unwrap_or_default(),
                stuck: Vec::new(),
            };
            self.step(Input::Vector {
                vector: Box::new(vector),
                age_ms: 0,
            });
        }
    }

    pub fn flag(&mut self, node: usize, cordoned: bool, draining: bool) {
        let (name, at) = (self.node(node), self.wall());
        self.step(Input::Flags {
            node: name.clone(),
            flags: NodeFlags {
                cordoned,
                draining,
                who: "ann".into(),
                at,
                ..NodeFlags::default()
            },
        });
        self.carry_out();
    }

    pub fn cordon(&mut self, node: usize, on: bool) {
        self.flag(node, on, false);
    }

    pub fn drain(&mut self, node: usize) {
        self.flag(node, true, true);
    }

    pub fn rival(&mut self) {
        self.step(Input::Replica {
            id: InstanceId(Uuid::from_u128(2)),
            leaving: false,
        });
    }

    pub fn node(&self, i: usize) -> NodeId {
        self.nodes[i].0.node.clone()
    }

    pub fn instance(&self, i: usize) -> InstanceId {
        self.nodes[i].0.instance
    }

    pub fn reading(&self, i: usize) -> f64 {
        self.nodes[i].1
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    pub fn take_controls(&mut self) -> Vec<(NodeId, ControlRequest)> {
        std::mem::take(&mut self.controls)
    }

    pub fn take_probes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.probes)
    }

    pub fn sent_capsules(&mut self) -> usize {
        std::mem::take(&mut self.capsules)
    }

    /// The predicted effect of a change of an execution.
    pub fn foresee(&mut self, n: u64, change: &Adjustment) -> Result<String, String> {
        let at = self.at();
        self.policy.unrecorded().foresee(at, Self::id(n), change)
    }

    /// True if the policy's state names the execution anywhere.
    pub fn remembers(&self, n: u64) -> bool {
        format!("{:?}", self.policy.policy()).contains(&Self::id(n).to_string())
    }

    pub fn why(&self, n: u64) -> Why {
        self.policy.why(self.at(), Self::id(n)).unwrap()
    }
}

pub fn spec() -> Submission {
    Submission::parse(br#"{"program":"synthetic@1","params":{"work_us":5}}"#).unwrap()
}

pub fn descriptor(i: usize, instance: u128) -> NodeDescriptor {
    NodeDescriptor {
        v: 1,
        node: NodeId::new(format!("n{i}")).unwrap(),
        instance: InstanceId(Uuid::from_u128(instance)),
        host: "h".into(),
        pid: 1,
        version: "0".into(),
        started_at: Timestamp::default(),
        shard: 0,
        slots: 2,
        cpus: 2,
        isa: "x86_64+avx2+fma".into(),
        memory_limit_bytes: 1 << 30,
        memory_limit_source: "declared".into(),
        substrates: vec![Substrate {
            id: "host".into(),
            kind: SubstrateKind::Cpu,
            name: "host".into(),
            memory_bytes: None,
            device: None,
        }],
        profile: Default::default(),
        programs: vec!["synthetic@1".into()],
        labels: BTreeMap::new(),
        thresholds: default_thresholds(),
        http: None,
        parks: 0,
        identity: Some(NodeIdentity {
            key: "U".into(),
            environment: Digest::of(b"here"),
        }),
    }
}

pub fn digest_of(policy: &Policy) -> Digest {
    policy.fingerprint()
}
