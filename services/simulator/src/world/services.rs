//! Policy services: their inputs, and the execution of their actions.

use super::*;
use crate::broken::{self, Rule};
use crate::node::instance;
use crate::world::broker::{Author, Stored};
use fiec_policy::{Action, LedgerView, Ticket};
use fiec_schemas::InstanceId;
use uuid::Uuid;

/// Timeout of a probe, in microseconds.
const PROBE_TIMEOUT_US: u64 = 1_000_000;
/// Time until the broker delivers a submission again, in microseconds.
pub(super) const REDELIVERY_US: u64 = 1_000_000;

/// A policy service.
#[derive(Debug)]
pub(super) struct Replica<D> {
    /// None while it is dead.
    pub policy: Option<D>,
    pub id: InstanceId,
    pub author: String,
    pub life: u32,
    pub stalled_until: u64,
    /// Arrival of its feed's last message.
    pub fed_at: u64,
    /// Actions that are not performed yet.
    pub out: Vec<Action>,
    /// Submissions that have reached it.
    pub intake: super::intake::Intake,
    /// For each node, the instance that it last heard and when, in microseconds.
    pub heard: Vec<(InstanceId, u64)>,
}

/// An append in flight.
#[derive(Debug)]
pub(super) struct Append {
    e: u32,
    expected: u64,
    events: Vec<Event>,
    ticket: Option<Ticket>,
    /// True if the message arrives but its acknowledgement does not.
    unacknowledged: bool,
    /// True if it never arrives.
    lost: bool,
}

/// Result of an append.
#[derive(Debug)]
pub(super) enum Fate {
    /// Stored with this sequence, epoch and phase.
    Stored(u64, u64, Phase),
    /// It lost a race, or its result is unknown: the policy service reads the ledger again.
    Unknown {
        /// True for the first message of a submission.
        first: bool,
    },
}

impl<D: Decide> World<'_, D> {
    pub(super) fn new_replica(&mut self, number: u32, life: u32) -> Replica<D> {
        let id = InstanceId(Uuid::from_u128(
            (0xb0 << 120) | (u128::from(number) << 32) | u128::from(life) | (7 << 76) | (2 << 62),
        ));
        Replica {
            policy: Some((self.make)(&self.config, id)),
            id,
            author: format!("policy/{id}"),
            life,
            stalled_until: 0,
            fed_at: self.now,
            out: Vec::new(),
            intake: super::intake::Intake::default(),
            heard: self
                .nodes
                .iter()
                .map(|n| (n.descriptor.instance, 0))
                .collect(),
        }
    }

    /// Gives a new policy service everything that it would read from the broker at its start.
    pub(super) fn introduce(&mut self, p: usize) {
        for node in 0..self.nodes.len() {
            self.tell_joined(p, node);
            let n = &self.nodes[node];
            if n.cordoned || n.draining || n.revoked {
                self.tell_flags(p, node);
            }
        }
        for tenant in 0..self.books.len() {
            self.tell_quota(p, tenant);
            self.tell_table(p, tenant);
        }
        let live: Vec<u32> = (0u32..)
            .zip(&self.execs)
            .filter(|(_, e)| e.state.is_some())
            .map(|(n, _)| n)
            .collect();
        for e in live {
            if let Ok(Some((seq, text))) = self.last_message(e)
                && let Ok(view) = LedgerView::read(&text, seq)
            {
                self.follow(p, &view, false);
            }
        }
        self.tell(p, Input::Loaded);
    }

    /// Schedules the ticks and signs of life of a policy service.
    pub(super) fn plan_clock(&mut self, p: usize) {
        let (number, life) = (p as u8, self.replicas[p].life);
        let offset = 1_000 * (1 + p as u64);
        self.queue.plan(self.now + offset, What::Tick(number, life));
        if self.scenario.policies > 1 {
            self.queue
                .plan(self.now + offset, What::Presence(number, life));
        }
    }

    /// Gives one input, without performing the actions.
    pub(super) fn tell(&mut self, p: usize, input: Input) {
        self.give(p, |policy, now, out| policy.step(now, input, out));
    }

    /// Gives a ledger message, without performing the actions.
    pub(super) fn follow(&mut self, p: usize, view: &LedgerView<'_>, reread: bool) {
        self.give(p, |policy, now, out| policy.follow(now, view, reread, out));
    }

    fn give(&mut self, p: usize, give: impl FnOnce(&mut D, Now, &mut Vec<Action>)) {
        let now = self.moment();
        let replica = &mut self.replicas[p];
        if let Some(policy) = &mut replica.policy {
            self.tally.inputs += 1;
            // Sampling the policy's time is enough.
            if self.tally.inputs.is_multiple_of(64) {
                let began = std::time::Instant::now();
                give(policy, now, &mut replica.out);
                self.tally.in_policy += began.elapsed() * 64;
            } else {
                give(policy, now, &mut replica.out);
            }
        }
    }

    /// Gives one input, and performs the actions.
    pub(super) fn input(&mut self, p: usize, input: Input) -> Result<(), Wrong> {
        self.tell(p, input);
        self.perform(p)
    }

    /// Performs the actions of a policy service.
    pub(super) fn perform(&mut self, p: usize) -> Result<(), Wrong> {
        self.take_lines_in(p);
        let now = self.moment();
        let replica = &mut self.replicas[p];
        if let Some(policy) = &mut replica.policy {
            policy.act(now, &mut replica.out);
        }
        while !self.replicas[p].out.is_empty() {
            for action in std::mem::take(&mut self.replicas[p].out) {
                self.carry_out(p, action)?;
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, p: usize, action: Action) -> Result<(), Wrong> {
        match action {
            Action::Append {
                execution,
                expected,
                events,
                ticket,
                ..
            } => {
                let e = self.number_of(execution);
                self.heard_before_lost(p, e, expected, &events)?;
                let lost = self.is_lost();
                let append = Append {
                    e,
                    expected,
                    events,
                    ticket,
                    lost: lost && self.network.chance(0.5),
                    unacknowledged: lost,
                };
                let at = self.arrival();
                let life = self.replicas[p].life;
                self.queue
                    .plan(at, What::Store(p as u8, life, Box::new(append)));
            }
            Action::SendCapsule { execution, .. } => self.send_capsule(self.number_of(execution)),
            Action::Control { node, request, .. } => self.send_control(p, &node, request),
            Action::Probe { node } => {
                self.tally.probes += 1;
                let Some(ix) = self.by_name.get(&node).copied() else {
                    return Ok(());
                };
                let sent = self.now;
                if self.is_lost() {
                    let silent = What::Probed(p as u8, ix, None);
                    self.queue.plan(sent + PROBE_TIMEOUT_US, silent);
                } else {
                    let at = self.arrival();
                    self.queue.plan(at, What::Probe(p as u8, ix, sent));
                }
            }
            Action::FetchSpec { execution, .. } => {
                let at = self.arrival();
                let e = self.number_of(execution);
                self.queue.plan(at, What::Spec(p as u8, e));
            }
            Action::Record { .. } => self.tally.records += 1,
            Action::Lookup { execution, .. } => {
                let arrives = !self.is_lost();
                if arrives {
                    let at = self.arrival();
                    let (e, life) = (self.number_of(execution), self.replicas[p].life);
                    self.queue.plan(at, What::Lookup(p as u8, life, e));
                }
            }
            Action::Reserve {
                tenant,
                quota,
                change,
            } => self.wish(p, &tenant, quota, change),
            Action::MakePart { part, holder, .. } => self.ask_for_part(p, part, holder),
            // In a run, operators do not ask, and nothing is verified.
            _ => {}
        }
        Ok(())
    }

    /// Checks that no execution is bound away from a node that this policy service has just heard.
    /// A decision on an outdated message does not count, because the broker refuses it.
    fn heard_before_lost(
        &self,
        p: usize,
        e: u32,
        expected: u64,
        events: &[Event],
    ) -> Result<(), Wrong> {
        let state = self.exec(e).state.as_ref();
        let Some(held) = state.and_then(|s| s.phase.binding()) else {
            return Ok(());
        };
        if !events.iter().any(broken::is_loss) || self.exec(e).seq != expected {
            return Ok(());
        }
        let Some(ix) = self.by_name.get(&held.node) else {
            return Ok(());
        };
        let (instance, at) = self.replicas[p].heard[*ix as usize];
        let silent = self.now.saturating_sub(at);
        if instance == held.instance && silent < self.config.liveness_ms * 1_000 {
            return Err((
                Some(e),
                (
                    Rule::OneBinding,
                    format!(
                        "it is bound away from {} as lost, which was heard {} ms ago",
                        held.node,
                        silent / 1_000
                    ),
                ),
            ));
        }
        Ok(())
    }

    /// Sends the capsule message of a binding to its node.
    pub(super) fn send_capsule(&mut self, e: u32) {
        let Some(Phase::Bound(bound)) = self.exec(e).phase() else {
            return;
        };
        let Some(node) = self.by_name.get(&bound.binding.node).copied() else {
            return;
        };
        let seq = self.exec(e).seq;
        if self.is_lost() {
            return;
        }
        let twice = self.is_doubled();
        for _ in 0..=u8::from(twice) {
            let at = self.arrival() + self.nodes[node as usize].start_us;
            self.queue.plan(at, What::Capsule(node, e, seq));
        }
    }

    /// Returns the event unless the policy service is stalled; then it is scheduled again.
    pub(super) fn waits(&mut self, p: u8, what: What) -> Option<What> {
        let until = self.replicas[p as usize].stalled_until;
        if until <= self.now {
            return Some(what);
        }
        self.queue.plan(until, what);
        None
    }

    pub(super) fn is_alive(&self, p: u8, life: u32) -> bool {
        let replica = &self.replicas[p as usize];
        replica.policy.is_some() && replica.life == life
    }

    pub(super) fn tick(&mut self, p: usize, life: u32) -> Result<(), Wrong> {
        if !self.is_alive(p as u8, life) || self.waits(p as u8, What::Tick(p as u8, life)).is_none()
        {
            return Ok(());
        }
        let next = self.now + self.scenario.tick_ms * 1_000;
        self.queue.plan(next, What::Tick(p as u8, life));
        let began = std::time::Instant::now();
        self.tell(p, Input::Tick);
        self.tally.in_ticks += began.elapsed();
        self.perform(p)
    }

    pub(super) fn presence(&mut self, p: usize, life: u32) -> Result<(), Wrong> {
        if !self.is_alive(p as u8, life)
            || self.waits(p as u8, What::Presence(p as u8, life)).is_none()
        {
            return Ok(());
        }
        self.queue
            .plan(self.now + 1_000_000, What::Presence(p as u8, life));
        let id = self.replicas[p].id;
        for other in 0..self.replicas.len() {
            let stalled = self.replicas[other].stalled_until > self.now;
            if other != p && !stalled && !self.is_lost() {
                self.input(other, Input::Replica { id, leaving: false })?;
            }
        }
        Ok(())
    }

    /// An append of a policy service reaches the broker.
    pub(super) fn store(&mut self, p: u8, life: u32, append: Append) -> Result<(), Wrong> {
        let e = append.e;
        let first = append.expected == 0;
        let author = self.replicas[p as usize].author.clone();
        // The successor of a dead policy service gets that service's messages like all others.
        let own = self.is_alive(p, life).then_some(p);
        let stored = if append.lost {
            Stored::No
        } else {
            let author = Author {
                name: &author,
                replica: own,
                node: None,
            };
            self.append(e, append.expected, &append.events, author)?
        };
        let unknown = append.lost || append.unacknowledged;
        let exec = self.exec(e);
        let phase = exec.phase().cloned().or_else(|| exec.phase_at_end());
        let epoch = exec.state.as_ref().map_or(0, |s| s.epoch);
        let fate = match (stored, phase) {
            (Stored::Yes(seq), Some(phase)) if !unknown => Fate::Stored(seq, epoch, phase),
            _ => Fate::Unknown { first },
        };
        let _ = append.ticket;
        let at = match unknown {
            true => self.now + ACK_TIMEOUT_US,
            false => self.arrival(),
        };
        self.queue.plan(at, What::Fate(p, life, e, Box::new(fate)));
        Ok(())
    }

    /// The result of an append reaches the policy service.
    pub(super) fn fate(&mut self, p: u8, life: u32, e: u32, fate: Box<Fate>) -> Result<(), Wrong> {
        if !self.is_alive(p, life) {
            // A submission that was not processed is delivered again.
            if self.exec(e).seq == 0 && matches!(*fate, Fate::Unknown { first: true }) {
                self.deliver_again(p, e);
            }
            return Ok(());
        }
        let Some(What::Fate(p, _, e, fate)) = self.waits(p, What::Fate(p, life, e, fate)) else {
            return Ok(());
        };
        let execution = self.id_of(e);
        match *fate {
            Fate::Stored(seq, epoch, phase) => {
                self.tell(
                    p as usize,
                    Input::Appended {
                        execution,
                        seq,
                        epoch,
                        phase: phase.clone(),
                    },
                );
                let policy = self.replicas[p as usize].policy.as_ref();
                let withheld = policy.is_some_and(|policy| policy.withholds(execution));
                // If the binding was moved since, its new author sends the capsule message.
                if matches!(phase, Phase::Bound(_)) && self.exec(e).seq == seq && !withheld {
                    self.send_capsule(e);
                }
                self.perform(p as usize)
            }
            Fate::Unknown { first } => {
                self.tally.conflicts += 1;
                match self.last_message(e)? {
                    Some((seq, text)) => {
                        let view = read(&text, seq, e)?;
                        self.follow(p as usize, &view, true);
                        self.perform(p as usize)
                    }
                    None => {
                        if first && self.exec(e).seq == 0 {
                            self.queue
                                .plan(self.now + REDELIVERY_US, What::Submit(p, e));
                        }
                        self.input(p as usize, Input::Vanished { execution })
                    }
                }
            }
        }
    }

    /// A ledger message reaches a policy service.
    pub(super) fn fed(&mut self, p: u8, life: u32, message: Box<Message>) -> Result<(), Wrong> {
        if !self.is_alive(p, life) {
            return Ok(());
        }
        let Some(What::Feed(p, _, message)) = self.waits(p, What::Feed(p, life, message)) else {
            return Ok(());
        };
        let view = read(&message.text, message.seq, u32::MAX)?;
        if let Some(ix) = message.by {
            self.hear(p, ix);
        }
        self.follow(p as usize, &view, false);
        self.perform(p as usize)
    }

    /// Notes that a policy service has heard a node.
    pub(super) fn hear(&mut self, p: u8, node: u32) {
        let instance = instance(node, self.nodes[node as usize].life);
        self.replicas[p as usize].heard[node as usize] = (instance, self.now);
    }

    pub(super) fn ordered(
        &mut self,
        p: u8,
        e: u32,
        epoch: u64,
        outcome: Box<ControlOutcome>,
    ) -> Result<(), Wrong> {
        let Some(What::Ordered(p, e, epoch, outcome)) =
            self.waits(p, What::Ordered(p, e, epoch, outcome))
        else {
            return Ok(());
        };
        let execution = self.id_of(e);
        self.input(
            p as usize,
            Input::Ordered {
                execution,
                epoch,
                answer: *outcome,
            },
        )
    }

    pub(super) fn probed(
        &mut self,
        p: u8,
        node: u32,
        outcome: Option<InstanceId>,
    ) -> Result<(), Wrong> {
        if self.waits(p, What::Probed(p, node, outcome)).is_none() {
            return Ok(());
        }
        if outcome.is_some() {
            self.hear(p, node);
        }
        let node = self.nodes[node as usize].descriptor.node.clone();
        let answered = outcome;
        self.input(p as usize, Input::Probe { node, answered })
    }

    pub(super) fn spec(&mut self, p: u8, e: u32) -> Result<(), Wrong> {
        let spec = Arc::clone(&self.exec(e).spec);
        let execution = self.id_of(e);
        self.input(p as usize, Input::Spec { execution, spec })
    }
}

pub(super) fn read(text: &str, seq: u64, e: u32) -> Result<LedgerView<'_>, Wrong> {
    LedgerView::read(text, seq)
        .map_err(|error| (Some(e), (Rule::PossibleEvents, error.to_string())))
}
