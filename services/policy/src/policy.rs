//! The order of a step: one input and one moment go in, actions come out.
//!
//! Two halves: the life cycle has nodes and executions, and only it can write them. The machines
//! stand beside it, and each keeps what is its own. They hear of messages, answer questions before a
//! binding, and take over what the life cycle cannot go on with. None calls another one: whose turn
//! it is stands here, in [`gate`] and in [`admission`].
//!
//! * [`machines`]: the machines.
//! * [`gate`]: what they hear of a message, and what they answer, in order.
//! * [`admission`]: what must hold before an execution may wait for a place, in order.
//! * [`questions`]: what others may ask; nothing changes by it.

mod admission;
mod gate;
mod machines;
mod questions;

use fiec_schemas::{Event, InstanceId};

use crate::config::Config;
use crate::explanation::Reports;
use crate::lifecycle::Lifecycle;
use crate::submission::{NewExecution, Submitted};
use crate::time::Now;
use crate::view::LedgerView;
use crate::{Action, Input};
use machines::Machines;

/// All state of the policy.
#[derive(Debug)]
pub struct Policy {
    /// Nodes and executions, and what changes them.
    pub(crate) life: Lifecycle,
    /// What stands beside the life cycle.
    machines: Machines,
    /// Reports on waiting executions.
    reports: Reports,
}

impl Policy {
    /// An empty policy. `own` is this replica's id.
    pub fn new(config: Config, own: InstanceId) -> Self {
        Self {
            life: Lifecycle::new(config, own),
            machines: Machines::new(own),
            reports: Reports::default(),
        }
    }

    /// Follows a message of a ledger, by any author, and pushes the resulting actions. It also reports
    /// an append of ours whose acknowledgement was lost.
    ///
    /// `reread`: it is the last message of a ledger after an append of ours failed. It replaces the
    /// policy's own view of the ledger. If the message is older than the last known one, the policy
    /// returns to what it knew before the append, and decides again after a pause.
    pub fn follow(&mut self, now: Now, view: &LedgerView<'_>, reread: bool, out: &mut Vec<Action>) {
        self.begin_step(now);
        self.life.follow_ledger(&mut self.machines, view, reread);
        self.life.take_actions(out);
    }

    /// Processes a submission, and pushes further actions. `may_hold` permits [`Submitted::Hold`].
    pub fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted {
        self.begin_step(now);
        let answer = if self.life.knows(new.execution) {
            // The compare-and-set will fail and the shell will compare the two submissions.
            Submitted::Append(vec![Event::Submitted])
        } else {
            if self.life.cluster().changed.places {
                // Waiting executions have the first claim on free room.
                self.serve_waiting();
            }
            self.life.take_in(&mut self.machines, new, may_hold)
        };
        self.life.take_actions(out);
        answer
    }

    /// Processes one input and pushes the resulting actions.
    pub fn step(&mut self, now: Now, input: Input, out: &mut Vec<Action>) {
        self.begin_step(now);
        match input {
            Input::Spec { execution, spec } => {
                self.life.learn_spec(&mut self.machines, execution, &spec)
            }
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => self
                .life
                .appended(&mut self.machines, execution, seq, epoch, &phase),
            Input::Vanished { execution } => self.life.forget(&mut self.machines, execution),
            Input::Container { program } => self.life.runs_in_container(&program),
            Input::Descriptor { descriptor } => {
                self.life.descriptor(&mut self.machines, *descriptor)
            }
            Input::Gone { node } => self.life.gone(&node),
            Input::Flags { node, flags } => self.life.flags(&mut self.machines, &node, flags),
            Input::Proof {
                node,
                signed,
                judged,
            } => self
                .machines
                .verification
                .proof(&mut self.life, &node, &signed, judged),
            Input::Quarantine { node, quarantine } => {
                self.machines
                    .verification
                    .quarantine(&mut self.life, &node, quarantine)
            }
            Input::Verdict { verdict } => {
                self.machines.verification.verdict(&mut self.life, *verdict)
            }
            Input::Recalled {
                execution,
                up_to,
                named,
            } => self
                .machines
                .verification
                .recalled(&mut self.life, execution, (up_to, &named)),
            Input::Vector { vector, age_ms } => {
                self.life.vector(&mut self.machines, *vector, age_ms)
            }
            Input::Probe { node, answered } => {
                self.life.probed(&mut self.machines, &node, answered)
            }
            Input::Holdings {
                node,
                instance,
                held,
            } => self
                .life
                .reconcile(&mut self.machines, &node, instance, &held),
            Input::Ordered {
                execution,
                epoch,
                answer,
            } => self.life.ordered(execution, epoch, answer),
            Input::SplitAnswered {
                execution,
                epoch,
                answer,
            } => self.machines.ranges.answered(execution, epoch, answer),
            Input::Members { tenant, found } => {
                let life = &mut self.life;
                let free = self.machines.prerequisites.found(life, &tenant, found);
                self.machines.wait_again(life, free);
            }
            Input::Ended { execution, seen } => {
                self.machines
                    .quotas
                    .orphan_seen(&mut self.life, execution, seen);
                let free = self
                    .machines
                    .prerequisites
                    .looked_up(&mut self.life, execution, seen);
                self.machines.wait_again(&mut self.life, free);
                let holder = self.machines.ranges.seen(&mut self.life, execution, seen);
                self.machines.wait_again(&mut self.life, holder);
            }
            Input::Aged { up_to } => self.life.keep_aged(up_to),
            Input::Quota { tenant, quota } => {
                let admitted = self.machines.quotas.set(&mut self.life, &tenant, quota);
                self.machines.wait_again(&mut self.life, admitted);
            }
            Input::Reserved {
                tenant,
                table,
                answer,
            } => {
                let table = table.as_ref().map(|(seq, table)| (*seq, &**table));
                let reserved =
                    self.machines
                        .quotas
                        .reserved(&mut self.life, &tenant, table, answer);
                self.machines.wait_again(&mut self.life, reserved);
            }
            Input::Replica { id, leaving } => self.life.hear_replica(id, leaving),
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => self
                .life
                .operator_yield(&mut self.machines, ticket, execution, to.as_ref(), &who),
            Input::Tenant { tenant, weight } => {
                self.life.set_weight(&tenant, weight);
                self.life.changed().places = true;
            }
            Input::Connected { connected } => {
                self.life.set_connected(connected);
                self.start_clocks_anew();
            }
            Input::Lost => self.life.lost_messages(),
            Input::Loaded => self.begin(),
            Input::Tick => self.tick(),
        }
        self.life.take_actions(out);
    }

    /// Binds waiting executions as far as there is room. The shell calls it after each round of
    /// inputs.
    pub fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        self.life.pass(now);
        self.serve_waiting();
        self.life.take_actions(out);
    }

    fn serve_waiting(&mut self) {
        if !self.life.may_bind() {
            return;
        }
        self.machines.act_on_admission(&mut self.life);
        if self.life.cluster().changed.may_fill() {
            self.life.fill(&mut self.machines);
        }
    }

    fn begin_step(&mut self, now: Now) {
        // After a stall of this process, silence of others must not count by its clock.
        if self.life.begin_step(now) {
            self.start_clocks_anew();
        }
    }

    fn tick(&mut self) {
        self.life.begin_tick();
        if !self.life.is_loaded() {
            return;
        }
        for ix in self.life.cluster().keys() {
            self.life.look_at_node(&mut self.machines, ix);
            self.machines.verification.look_at(&mut self.life, ix);
        }
        if !self.life.may_bind() {
            return;
        }
        // A review may schedule the next one at once. One round a tick is enough.
        let mut due = Vec::new();
        while let Some(id) = self.life.pop_due() {
            due.push(id);
        }
        for id in due {
            self.life.look_at_execution(&mut self.machines, id);
        }
        self.life.look_at_absent(&mut self.machines);
        self.machines.sharing.fail_late_ones(&mut self.life);
        let released = self.machines.ranges.settle(&mut self.life);
        self.machines.wait_again(&mut self.life, released);
        self.machines.let_ranges_grow(&mut self.life);
        self.serve_waiting();
        self.machines.quotas.review(&mut self.life);
        self.machines.preempt(&mut self.life);
        let ranges = &self.machines.ranges;
        let may_wait = |id| !ranges.awaits_parts(id);
        self.machines.parking.review(&mut self.life, may_wait);
        self.machines
            .reallocation
            .review(&mut self.life, |life| self.machines.sharing.served(life));
        self.machines.verification.review(&mut self.life);
        self.reports.report(&mut self.life, &self.machines);
    }

    /// After a stall or a lost connection of this process, silence of nodes does not count.
    fn start_clocks_anew(&mut self) {
        self.machines.quotas.distrust();
        self.life.changed().admission = true;
        self.life.start_clocks_anew();
    }

    /// The initial load is complete: timers start.
    fn begin(&mut self) {
        self.life.begin();
        self.machines.quotas.begin(self.life.now.mono);
        self.start_clocks_anew();
    }
}
