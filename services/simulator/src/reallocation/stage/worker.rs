//! The simulated workers: they start, compute, grow, obey orders, and are killed.

use fiec_policy::{ControlOutcome, Input};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{BoundaryEvent, Digest, Event, NodeId, Phase};

use super::super::{DEVICES, Mode};
use super::{GIB, Running, STEP_MS, Stage, as_f64};

const BOUNDARY_MS: u64 = 2_000;
const COMMIT_MS: u64 = 30_000;
/// Time from a binding to the first capsule, in ms.
const BEGIN_MS: u64 = 1_000;
/// Delay after a first crash, in ms. It doubles with each further crash, as in a real worker.
const BACKOFF_MS: u64 = 200;
const LONGEST_BACKOFF_MS: u64 = 30_000;

impl Stage {
    /// Starts a binding if the device has room for the grant, else refuses it.
    pub(super) fn begin(&mut self, n: usize) {
        let job = &self.jobs[n];
        let (Phase::Bound(_), Some((node, device))) = (&job.state.phase, job.place()) else {
            return;
        };
        if self.gone(node) {
            return;
        }
        let asked = job.state.adjusted.as_ref();
        let asked = asked.and_then(|a| a.device_memory_bytes).unwrap_or(0) / GIB;
        let share = match self.mode {
            Mode::Reserved => job.job.peak,
            Mode::OverCommit | Mode::Reconfigured => job.job.base.max(asked),
        };
        let (node, device) = (node.to_owned(), device.to_owned());
        if share > self.free(&node, &device, n) {
            let reason = "its device has not so much left".to_owned();
            let refused = Event::Refused {
                reason,
                offer: 0,
                fault: None,
            };
            return self.append(n, vec![refused], false);
        }
        let (epoch, at) = (job.state.epoch, self.wall());
        let job = &mut self.jobs[n];
        job.granted = share;
        job.done = job.committed;
        job.order = None;
        (job.since_boundary, job.since_commit) = (0.0, 0.0);
        job.from_ms = self.now + BEGIN_MS;
        let started = Event::Started {
            epoch,
            computing_since: at,
        };
        self.append(n, vec![started], false);
    }

    fn gone(&self, node: &str) -> bool {
        let mut nodes = self.nodes.iter();
        nodes.any(|n| n.descriptor.node.as_str() == node && n.gone_until.is_some())
    }

    fn on<'a>(
        &'a self,
        node: &'a str,
        device: &'a str,
    ) -> impl Iterator<Item = (usize, &'a Running)> {
        let jobs = self.jobs.iter().enumerate();
        jobs.filter(move |(_, j)| j.is_started() && j.place() == Some((node, device)))
    }

    /// GiB of a device that no other job has.
    fn free(&self, node: &str, device: &str, but: usize) -> u64 {
        let all = DEVICES.iter().find(|(id, _)| *id == device);
        let held = |j: &Running| match j.state.parked().map(|p| p.keep.as_str()) {
            Some("host") => 0,
            _ => j.granted,
        };
        let taken: u64 = self
            .on(node, device)
            .filter(|(n, _)| *n != but)
            .map(|(_, j)| held(j))
            .sum();
        all.map_or(0, |(_, gib)| gib.saturating_sub(taken))
    }

    pub(super) fn ordered(&mut self, node: &NodeId, request: ControlRequest) {
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
        let Some(n) = self.by_id.get(&execution).copied() else {
            return;
        };
        let here = self.jobs[n]
            .place()
            .is_some_and(|(at, _)| at == node.as_str());
        let outcome = if !here || self.jobs[n].state.epoch != epoch || self.gone(node.as_str()) {
            ControlOutcome::NoAnswer
        } else if let ControlRequest::Unpark { reason, .. } = &request {
            self.unpark(n, reason.clone())
        } else {
            self.jobs[n].order = Some(request);
            ControlOutcome::Taken
        };
        self.step(Input::Ordered {
            execution,
            epoch,
            answer: outcome,
        });
        if self.jobs[n].state.parked().is_some() {
            self.obey(n);
        }
    }

    fn unpark(&mut self, n: usize, reason: String) -> ControlOutcome {
        let job = &self.jobs[n];
        let Some((node, device)) = job.place() else {
            return ControlOutcome::NoAnswer;
        };
        let asked = job.state.adjusted.as_ref();
        let asked = asked.and_then(|a| a.device_memory_bytes).unwrap_or(0) / GIB;
        let share = job.granted.max(asked);
        if share > self.free(node, device, n) {
            return ControlOutcome::Refused("its device has not so much left".to_owned());
        }
        let from_ms = self.now;
        let job = &mut self.jobs[n];
        (job.granted, job.from_ms) = (share, from_ms);
        let computing_since = self.wall();
        let unparked = Event::Unparked {
            reason,
            computing_since,
        };
        self.append(n, vec![unparked], false);
        ControlOutcome::Taken
    }

    /// Computes for one step.
    pub(super) fn compute(&mut self) {
        for node in 0..self.nodes.len() {
            let name = self.nodes[node].descriptor.node.to_string();
            if self.nodes[node].gone_until.is_some() {
                continue;
            }
            for (device, gib) in DEVICES {
                let on: Vec<usize> = self.on(&name, device).map(|(n, _)| n).collect();
                let used: u64 = on
                    .iter()
                    .map(|n| self.jobs[*n].needs().min(self.jobs[*n].granted))
                    .sum();
                if !on.is_empty() && used * 2 < gib {
                    self.partly_ms += as_f64(STEP_MS);
                }
                let going: Vec<usize> = on
                    .into_iter()
                    .filter(|n| {
                        let job = &self.jobs[*n];
                        job.state.parked().is_none() && job.from_ms <= self.now
                    })
                    .collect();
                let wanted: f64 = going.iter().map(|n| self.jobs[*n].job.units).sum();
                let rate = (1.0 / wanted.max(1e-9)).min(1.0);
                for n in going {
                    self.advance(n, rate * as_f64(STEP_MS), &name, device);
                }
            }
        }
    }

    /// With over-commit, a job takes what it needs. Returns false if the device has too little.
    fn takes(&mut self, n: usize, node: &str, device: &str) -> bool {
        let needs = self.jobs[n].needs();
        if self.mode != Mode::OverCommit || needs <= self.jobs[n].granted {
            return true;
        }
        if needs > self.free(node, device, n) {
            return false;
        }
        self.jobs[n].granted = needs;
        true
    }

    fn advance(&mut self, n: usize, ms: f64, node: &str, device: &str) {
        if !self.takes(n, node, device) {
            return self.kill(n);
        }
        let job = &mut self.jobs[n];
        let ms = ms.min((as_f64(job.job.work_ms) - job.done).max(0.0));
        job.done += ms;
        job.since_boundary += ms;
        job.since_commit += ms;
        if !self.takes(n, node, device) {
            return self.kill(n);
        }
        let job = &mut self.jobs[n];
        if job.done >= as_f64(job.job.work_ms) {
            job.ended_ms = Some(self.now);
            self.useful_ms += as_f64(job.job.work_ms) * job.job.units;
            let done = Event::Completed {
                result: serde_json::Value::Null,
                object: None,
                computed_until: self.wall(),
                capsules: 1,
                outputs: vec![],
                energy: None,
            };
            return self.append(n, vec![done], false);
        }
        if job.since_boundary >= as_f64(BOUNDARY_MS) {
            job.since_boundary = 0.0;
            self.boundary(n, node, device);
        }
    }

    fn boundary(&mut self, n: usize, node: &str, device: &str) {
        let job = &self.jobs[n];
        if self.mode == Mode::Reconfigured && job.needs() > job.granted {
            let bytes = job.job.peak * GIB;
            let asked = job.state.adjusted.as_ref();
            if job.job.peak <= self.free(node, device, n) {
                self.jobs[n].granted = self.jobs[n].job.peak;
            } else if asked.is_none_or(|a| a.device_memory_bytes < Some(bytes)) {
                let change = Adjustment {
                    device_memory_bytes: Some(bytes),
                    ..Adjustment::default()
                };
                let who = "program".to_owned();
                self.append(n, vec![Event::Adjusted { who, change }], false);
                self.perform();
            }
            // Without the memory, its work until the move is worth little: it waits at its
            // boundary.
            let job = &mut self.jobs[n];
            if job.needs() > job.granted {
                job.done = job.done.min(as_f64(job.job.grows_at_ms));
            }
        }
        if self.jobs[n].order.is_some() {
            return self.obey(n);
        }
        if self.jobs[n].since_commit >= as_f64(COMMIT_MS) {
            let commit = self.commit(n);
            self.append(n, vec![commit], false);
        }
    }

    fn commit(&mut self, n: usize) -> Event {
        let at = self.wall();
        let job = &mut self.jobs[n];
        let compute_us = (job.since_commit.max(1.0)) * 1_000.0;
        (job.committed, job.since_commit) = (job.done, 0.0);
        let index = job.state.boundary_index() + 1;
        Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes: 1 << 20,
            computed_at: at,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a time, not negative"
            )]
            compute_us: compute_us as u64,
            of: None,
            note: None,
            outputs: vec![],
            energy: None,
        })
    }

    /// Obeys an order at a boundary.
    fn obey(&mut self, n: usize) {
        let Some(request) = self.jobs[n].order.take() else {
            return;
        };
        let computed_until = self.wall();
        let mut events = Vec::new();
        if self.jobs[n].state.parked().is_none() {
            events.push(self.commit(n));
        }
        match request {
            ControlRequest::Park { cause, keep, .. } => {
                self.found.parked += 1;
                events.push(Event::Parked {
                    cause,
                    keep,
                    computed_until,
                });
            }
            ControlRequest::Yield {
                cause,
                to,
                decision,
                epoch,
                ..
            } => {
                events.push(Event::Yielded {
                    cause: cause.clone(),
                    computed_until,
                });
                match to {
                    Some(to) => {
                        self.found.moved += 1;
                        events.push(Event::Bound {
                            epoch: epoch + 1,
                            node: to.node,
                            instance: to.instance,
                            substrate: to.substrate,
                            cause,
                            decision,
                        });
                    }
                    None => self.found.suspended += 1,
                }
            }
            _ => return,
        }
        self.append(n, events, false);
        self.begin(n);
    }

    /// Kills a job for lack of memory. It restarts in its place from its last commit, and holds no
    /// memory until then.
    fn kill(&mut self, n: usize) {
        let job = &mut self.jobs[n];
        let doubled = BACKOFF_MS << job.kills.min(16);
        job.kills += 1;
        let lost = job.done - job.committed;
        job.done = job.committed;
        job.since_commit = 0.0;
        job.from_ms = self.now + doubled.min(LONGEST_BACKOFF_MS);
        job.granted = 0;
        self.found.killed += 1;
        self.found.lost_s += lost / 1_000.0;
    }
}
