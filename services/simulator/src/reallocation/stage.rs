//! The simulated cluster: ledgers with compare-and-set, nodes with devices, and jobs.

mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_policy::{Action, Config, Input, Judged, LedgerView, Millis, NewExecution, Now, Policy};
use fiec_schemas::hardware::{Substrate, default_thresholds};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::substrate::SubstrateKind;
use fiec_schemas::trust::{NodeIdentity, Proof, SignedProof};
use fiec_schemas::{
    Digest, Event, ExecutionId, ExecutionState, HardwareVector, InstanceId, LedgerMessage,
    NodeDescriptor, NodeFlags, NodeId, Phase, Reading, Signal, Submission, Tenant, Timestamp,
    author,
};
use uuid::Uuid;

use super::{DEVICES, Job, Measured, Mix, Mode};
use crate::decide::Decide as _;

const GIB: u64 = 1 << 30;
const STEP_MS: u64 = 500;
const NOTICE_MS: u64 = 30_000;
const GONE_MS: u64 = 60_000;

struct Node {
    descriptor: NodeDescriptor,
    count: u64,
    /// It is gone until this moment.
    gone_until: Option<u64>,
    drains: bool,
}

struct Running {
    job: Job,
    id: ExecutionId,
    seq: u64,
    state: ExecutionState,
    /// Computing time that is done, and that is committed, in ms.
    done: f64,
    committed: f64,
    since_boundary: f64,
    since_commit: f64,
    /// It computes from this moment on.
    from_ms: u64,
    /// Memory that its place has granted, in GiB.
    granted: u64,
    /// Number of its kills for lack of memory.
    kills: u32,
    order: Option<ControlRequest>,
    ended_ms: Option<u64>,
}

impl Running {
    fn needs(&self) -> u64 {
        if self.done >= as_f64(self.job.grows_at_ms) {
            self.job.peak
        } else {
            self.job.base
        }
    }

    /// Node and device where it computes or is parked.
    fn place(&self) -> Option<(&str, &str)> {
        let binding = self.state.phase.binding()?;
        Some((binding.node.as_str(), &binding.substrate))
    }

    fn is_started(&self) -> bool {
        matches!(self.state.phase, Phase::Started(_))
    }
}

pub(super) struct Stage {
    mode: Mode,
    mix: Mix,
    now: u64,
    policy: Policy,
    seq: u64,
    nodes: Vec<Node>,
    jobs: Vec<Running>,
    waiting: Vec<Job>,
    by_id: BTreeMap<ExecutionId, usize>,
    actions: Vec<Action>,
    found: Measured,
    useful_ms: f64,
    partly_ms: f64,
}

#[expect(clippy::cast_precision_loss, reason = "times and counts below 2^52")]
fn as_f64(n: u64) -> f64 {
    n as f64
}

fn number(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

impl Stage {
    pub fn new(mix: &Mix, mode: Mode, mut jobs: Vec<Job>) -> Self {
        jobs.reverse();
        let config = Config::default();
        let own = InstanceId(Uuid::from_u128(1));
        let mut stage = Self {
            mode,
            mix: *mix,
            now: 0,
            policy: Policy::new(config, own),
            seq: 0,
            nodes: Vec::new(),
            jobs: Vec::new(),
            waiting: jobs,
            by_id: BTreeMap::new(),
            actions: Vec::new(),
            found: Measured::default(),
            useful_ms: 0.0,
            partly_ms: 0.0,
        };
        for n in 0..mix.nodes {
            stage.nodes.push(Node {
                descriptor: descriptor(n, 0),
                count: 0,
                gone_until: None,
                drains: false,
            });
            stage.join(n);
        }
        stage.vectors();
        stage.step(Input::Loaded);
        stage
    }

    fn at(&self) -> Now {
        Now {
            mono: Millis(self.now + 86_400_000),
            wall: self.wall(),
        }
    }

    fn wall(&self) -> Timestamp {
        let ms = i64::try_from(self.now).unwrap_or(i64::MAX / 2_000);
        Timestamp::from_micros(1_700_000_000_000_000 + ms * 1_000)
    }

    fn step(&mut self, input: Input) {
        let now = self.at();
        self.policy.step(now, input, &mut self.actions);
    }

    fn join(&mut self, n: usize) {
        let descriptor = self.nodes[n].descriptor.clone();
        let expires = Timestamp::from_micros(4_000_000_000_000_000);
        let proof = Proof::passing(&descriptor, 1, self.wall(), expires);
        let signed = SignedProof {
            v: 1,
            statement: String::new(),
            key: String::new(),
            sig: String::new(),
        };
        self.step(Input::Descriptor {
            descriptor: Box::new(descriptor.clone()),
        });
        self.step(Input::Proof {
            node: descriptor.node.clone(),
            signed: Box::new(signed),
            judged: Judged::Counts(proof),
        });
    }

    fn vectors(&mut self) {
        let at = self.wall();
        for n in 0..self.nodes.len() {
            let node = &mut self.nodes[n];
            if node.gone_until.is_some() {
                continue;
            }
            node.count += 1;
            let reading = |device: Option<&str>| Reading {
                signal: Signal::Memory,
                device: device.map(str::to_owned),
                value: Some(0.2),
                raw: Some(20.0),
                limit: Some(100.0),
                unit: "ratio".into(),
                source: "played".into(),
                at,
                missing: None,
                envelope: None,
            };
            let mut readings = vec![reading(None)];
            readings.extend(DEVICES.iter().map(|(id, _)| reading(Some(id))));
            let vector = HardwareVector {
                v: 1,
                node: node.descriptor.node.clone(),
                instance: node.descriptor.instance,
                count: node.count,
                at,
                clock: None,
                readings,
                draining: false,
                slots: node.descriptor.slots,
                running_count: 0,
                queued_count: 0,
                running: vec![],
                arriving: vec![],
                stuck: Vec::new(),
            };
            self.step(Input::Vector {
                vector: Box::new(vector),
                age_ms: 0,
            });
        }
    }

    /// Plays until all jobs have ended, at most `longest` ms.
    pub fn run(mut self, longest: u64) -> Measured {
        while self.now < longest
            && (!self.waiting.is_empty() || self.jobs.iter().any(|j| j.ended_ms.is_none()))
        {
            self.now += STEP_MS;
            self.revoke();
            if self.now.is_multiple_of(1_000) {
                self.vectors();
            }
            while self.waiting.last().is_some_and(|j| j.submit_ms <= self.now) {
                if let Some(job) = self.waiting.pop() {
                    self.submit(job);
                }
            }
            self.compute();
            self.step(Input::Tick);
            self.perform();
        }
        self.measure()
    }

    fn submit(&mut self, job: Job) {
        let n = self.jobs.len();
        let id = ExecutionId(Uuid::from_u128(1 << 64 | number(n) as u128));
        let share = match self.mode {
            Mode::Reserved => job.peak,
            Mode::OverCommit | Mode::Reconfigured => job.base,
        } * GIB;
        let line = format!(
            r#"{{"program":"synthetic@1","requires":{{"device":{{"share_bytes":{share}}}}}}}"#
        );
        let Ok(spec) = Submission::parse(line.as_bytes()) else {
            return;
        };
        let spec = Arc::new(spec);
        let Ok(tenant) = Tenant::new("lab") else {
            return;
        };
        let at = self.wall();
        let state = ExecutionState::unborn(tenant.clone(), id, Arc::clone(&spec), None, at);
        self.by_id.insert(id, n);
        self.jobs.push(Running {
            job,
            id,
            seq: 0,
            state,
            done: 0.0,
            committed: 0.0,
            since_boundary: 0.0,
            since_commit: 0.0,
            from_ms: 0,
            granted: share / GIB,
            kills: 0,
            order: None,
            ended_ms: None,
        });
        let new = NewExecution {
            execution: id,
            tenant: &tenant,
            spec: &spec,
            submitted_at: at,
        };
        let now = self.at();
        self.policy.submit_now(now, new, &mut self.actions);
        self.perform();
    }

    /// Appends as the policy (`own`) or as the worker of its node.
    fn append(&mut self, n: usize, events: Vec<Event>, own: bool) {
        let at = self.wall();
        let job = &mut self.jobs[n];
        let author = match (own, job.state.phase.binding()) {
            (false, Some(b)) => author::of_worker(&b.node, b.instance),
            _ => "policy/p".to_owned(),
        };
        let Ok(mut next) = job.state.after(&events, &author, at, None) else {
            return;
        };
        self.seq += 1;
        next.resolve(self.seq);
        job.seq = self.seq;
        job.state = next;
        let message = LedgerMessage {
            v: 1,
            events,
            state: job.state.clone().into(),
            sig: None,
        };
        let (seq, id) = (job.seq, job.id);
        if own {
            let (epoch, phase) = (message.state.epoch, message.state.phase.clone());
            self.step(Input::Appended {
                execution: id,
                seq,
                epoch,
                phase: phase.clone(),
            });
        }
        if let Ok(header) = message.encode()
            && let Ok(view) = LedgerView::read(&header, seq)
        {
            let now = self.at();
            self.policy.follow(now, &view, false, &mut self.actions);
        }
    }

    fn perform(&mut self) {
        loop {
            let now = self.at();
            self.policy.act(now, &mut self.actions);
            let actions = std::mem::take(&mut self.actions);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Append {
                        execution,
                        expected,
                        events,
                        ..
                    } => {
                        let Some(n) = self.by_id.get(&execution).copied() else {
                            continue;
                        };
                        if self.jobs[n].seq == expected {
                            self.append(n, events, true);
                        } else {
                            self.reread(n);
                        }
                        self.begin(n);
                    }
                    Action::Control { node, request, .. } => self.ordered(&node, request),
                    Action::Probe { node } => self.probed(&node),
                    _ => {}
                }
            }
        }
    }

    fn reread(&mut self, n: usize) {
        let job = &self.jobs[n];
        let message = LedgerMessage {
            v: 1,
            events: vec![],
            state: job.state.clone().into(),
            sig: None,
        };
        let seq = job.seq;
        if let Ok(header) = message.encode()
            && let Ok(view) = LedgerView::read(&header, seq)
        {
            let now = self.at();
            self.policy.follow(now, &view, true, &mut self.actions);
        }
    }

    fn probed(&mut self, name: &NodeId) {
        let node = self.nodes.iter().find(|n| n.descriptor.node == *name);
        let outcome = match node {
            Some(node) if node.gone_until.is_none() => Some(node.descriptor.instance),
            _ => None,
        };
        self.step(Input::Probe {
            node: name.clone(),
            answered: outcome,
        });
    }

    /// Revokes nodes and lets them return.
    fn revoke(&mut self) {
        let every = self.mix.revoke_every_s * 1_000;
        if every == 0 {
            return;
        }
        let round = self.now / every;
        let n = usize::try_from(round).unwrap_or(0) % self.nodes.len();
        let into = self.now % every;
        if round > 0 && into == 0 && self.mode == Mode::Reconfigured {
            self.nodes[n].drains = true;
            self.flag(n, true);
        }
        if round > 0 && into == NOTICE_MS && self.nodes[n].gone_until.is_none() {
            self.nodes[n].gone_until = Some(self.now + GONE_MS);
            let name = self.nodes[n].descriptor.node.to_string();
            let held =
                |j: &&mut Running| j.is_started() && j.place().is_some_and(|(at, _)| at == name);
            let mut lost = 0.0;
            for job in self.jobs.iter_mut().filter(held) {
                lost += job.done - job.committed;
                job.done = job.committed;
                job.order = None;
            }
            self.found.lost_s += lost / 1_000.0;
            self.found.lost_to_revocation_s += lost / 1_000.0;
        }
        for n in 0..self.nodes.len() {
            if self.nodes[n]
                .gone_until
                .is_some_and(|until| until <= self.now)
            {
                self.nodes[n].gone_until = None;
                self.nodes[n].count = 0;
                self.nodes[n].descriptor = descriptor(n, self.now);
                self.join(n);
                if std::mem::take(&mut self.nodes[n].drains) {
                    self.flag(n, false);
                }
            }
        }
    }

    fn flag(&mut self, n: usize, on: bool) {
        let name = self.nodes[n].descriptor.node.clone();
        let notice = i64::try_from(NOTICE_MS).unwrap_or(0) * 1_000;
        let gone = Timestamp::from_micros(self.wall().micros() + notice);
        let flags = NodeFlags {
            who: "the provider".to_owned(),
            at: self.wall(),
            revoked_at: on.then_some(gone),
            revoked: on.then_some(self.nodes[n].descriptor.instance),
            ..NodeFlags::default()
        };
        self.step(Input::Flags {
            node: name.clone(),
            flags,
        });
        self.perform();
    }

    fn measure(mut self) -> Measured {
        let mut times: Vec<f64> = Vec::new();
        let mut last = 0;
        for job in &self.jobs {
            if let Some(at) = job.ended_ms {
                times.push(as_f64(at - job.job.submit_ms) / 1_000.0);
                last = last.max(at);
            }
        }
        let first = self.jobs.first().map_or(0, |j| j.job.submit_ms);
        times.sort_by(f64::total_cmp);
        let devices = as_f64(number(self.nodes.len() * DEVICES.len()));
        let span_ms = as_f64(last.saturating_sub(first)).max(1.0);
        let ended = times.len();
        let found = &mut self.found;
        found.unfinished = number(self.jobs.len() - ended + self.waiting.len());
        found.makespan_s = span_ms / 1_000.0;
        found.mean_s = times.iter().sum::<f64>() / as_f64(number(ended)).max(1.0);
        found.p95_s = times
            .get(ended.saturating_sub(1) * 95 / 100)
            .copied()
            .unwrap_or(0.0);
        found.device_hours = devices * span_ms / 3_600_000.0;
        found.utilization = self.useful_ms / (devices * span_ms);
        found.partly_used = self.partly_ms / (devices * span_ms);
        self.found
    }
}

fn descriptor(n: usize, life: u64) -> NodeDescriptor {
    let host = Substrate {
        id: "host".into(),
        kind: SubstrateKind::Cpu,
        name: "host".into(),
        memory_bytes: None,
        device: None,
    };
    let device = |(id, gib): &(&str, u64)| Substrate {
        id: (*id).to_owned(),
        kind: SubstrateKind::Gpu,
        name: format!("emulated {gib} GiB"),
        memory_bytes: Some(gib * GIB),
        device: Some(Default::default()),
    };
    let mut substrates = vec![host];
    substrates.extend(DEVICES.iter().map(device));
    let instance = (u128::from(life) << 64) + (number(n) as u128) + 100;
    NodeDescriptor {
        v: 1,
        node: NodeId::from_host_name(&format!("n{n}")),
        instance: InstanceId(Uuid::from_u128(instance)),
        host: "played".into(),
        pid: 1,
        version: "0".into(),
        started_at: Timestamp::default(),
        shard: 0,
        slots: 12,
        parks: 12,
        cpus: 32,
        isa: "x86_64+avx2+fma".into(),
        memory_limit_bytes: 512 * GIB,
        memory_limit_source: "played".into(),
        substrates,
        profile: Default::default(),
        programs: vec!["synthetic@1".into()],
        labels: BTreeMap::new(),
        thresholds: default_thresholds(),
        http: None,
        identity: Some(NodeIdentity {
            key: "U".into(),
            environment: Digest::of(b"played"),
        }),
    }
}
