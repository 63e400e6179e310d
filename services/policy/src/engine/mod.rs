//! The engine: one input and one moment go in, actions come out.
//!
//! [`Lifecycle`] has nodes and executions, and only it can write them. What stands here reads them, and
//! changes them by its methods.
//!
//! * [`input`] and [`action`]: the types of a step; [`refusal`]: why a request is refused;
//!   [`questions`]: what others may ask.
//! * [`ledger`] follows the feed, [`appends`] takes the results of the policy's own appends.
//! * [`bind`] places executions that need a binding: new, pending, refused, lost, or queued behind
//!   long work.
//! * [`fill`] serves the queue in order.
//! * [`orders`] moves running executions: pressure, drains, operators.
//! * [`leaving`] empties a node before it leaves.
//! * [`admission`]: what must hold before an execution may wait for a place.
//! * [`nodes`] reviews the executions of nodes that are silent, lost or unviable; [`absent`] forgets
//!   nodes, [`reconcile`] binds again what a node lacks.
//! * [`why`] explains to people, [`tell`] records explanations, [`offers`] lists programs,
//!   [`duties`] counts who must act next.

mod absent;
mod action;
mod admission;
mod appends;
mod beliefs;
pub(crate) mod bind;
mod duties;
mod fill;
mod input;
mod leaving;
mod ledger;
mod nodes;
mod offers;
mod orders;
mod questions;
mod reconcile;
mod refusal;
mod requests;
mod tell;
mod why;

use fiec_schemas::{ExecutionId, InstanceId};

use crate::config::Config;
use crate::gangs::Gangs;
use crate::lifecycle::Lifecycle;
use crate::parking::{self, Parking};
use crate::prerequisites::Prerequisites;
use crate::quotas::Quotas;
use crate::reallocation::Reallocation;

use crate::sharing::Sharing;
use crate::spreading::{Claims, Ranges};
use crate::time::{Millis, Now};
use crate::verification::Verification;
use crate::view::LedgerView;

pub use action::{Action, Good};
pub use bind::{NewExecution, Submitted};
pub use duties::Duties;
pub use input::{ControlOutcome, Input, Judged, Remembered, Ticket};
pub use refusal::{UnknownNode, YieldRefusal};

/// All state of the policy.
#[derive(Debug)]
pub struct Policy {
    /// Nodes and executions, and what changes them.
    pub(crate) life: Lifecycle,
    /// Preemption, and deadlines.
    pub(crate) sharing: Sharing,
    /// Executions that stay on their node without computing.
    pub(crate) parking: Parking,
    /// Moves between devices.
    pub(crate) reallocation: Reallocation,
    /// Ranges that several nodes compute.
    pub(crate) ranges: Ranges,
    /// Comparisons of what nodes compute.
    pub(crate) verification: Verification,
    /// Reports on waiting executions.
    pub(crate) told: tell::Told,
    /// How much of a quota is used.
    pub(crate) quotas: Quotas,
    /// Executions that start together.
    pub(crate) gangs: Gangs,
    /// Executions that wait for others to end.
    pub(crate) prerequisites: Prerequisites,
}

impl Policy {
    /// An empty policy. `own` is this replica's id.
    pub fn new(config: Config, own: InstanceId) -> Self {
        Self {
            life: Lifecycle::new(config, own),
            sharing: Sharing::default(),
            parking: Parking::default(),
            reallocation: Reallocation::default(),
            ranges: Ranges::default(),
            verification: Verification::new(own),
            told: tell::Told::default(),
            quotas: Quotas::new(own),
            gangs: Gangs::default(),
            prerequisites: Prerequisites::default(),
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
        self.follow_ledger(view, reread);
        out.append(&mut self.life.out);
    }

    /// Processes one input and pushes the resulting actions.
    pub fn step(&mut self, now: Now, input: Input, out: &mut Vec<Action>) {
        self.begin_step(now);
        match input {
            Input::Spec { execution, spec } => self.learn_spec(execution, &spec),
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => self.appended(execution, seq, epoch, &phase),
            Input::Vanished { execution } => self.forget(execution),
            Input::Container { program } => self.life.runs_in_container(&program),
            Input::Descriptor { descriptor } => self.descriptor(*descriptor),
            Input::Gone { node } => self.life.gone(&node),
            Input::Flags { node, flags } => self.flags(&node, flags),
            Input::Proof {
                node,
                signed,
                judged,
            } => self
                .verification
                .proof(&mut self.life, &node, &signed, judged),
            Input::Quarantine { node, quarantine } => {
                self.verification
                    .quarantine(&mut self.life, &node, quarantine)
            }
            Input::Verdict { verdict } => self.verification.verdict(&mut self.life, *verdict),
            Input::Recalled {
                execution,
                up_to,
                named,
            } => self
                .verification
                .recalled(&mut self.life, execution, (up_to, &named)),
            Input::Vector { vector, age_ms } => self.vector(*vector, age_ms),
            Input::Probe { node, answered } => self.probed(&node, answered),
            Input::Holdings {
                node,
                instance,
                held,
            } => self.reconcile(&node, instance, &held),
            Input::Ordered {
                execution,
                epoch,
                answer,
            } => self.life.ordered(execution, epoch, answer),
            Input::SplitAnswered {
                execution,
                epoch,
                answer,
            } => self.ranges.answered(execution, epoch, answer),
            Input::Ended { execution, seen } => {
                self.quotas.orphan_seen(&mut self.life, execution, seen);
                let free = self
                    .prerequisites
                    .looked_up(&mut self.life, execution, seen);
                self.wait_again(free);
                let holder = self.ranges.seen(&mut self.life, execution, seen);
                self.wait_again(holder);
            }
            Input::Aged { up_to } => self.life.keep_aged(up_to),
            Input::Quota { tenant, quota } => {
                let admitted = self.quotas.set(&mut self.life, &tenant, quota);
                self.wait_again(admitted);
            }
            Input::Reserved {
                tenant,
                table,
                answer,
            } => {
                let table = table.as_ref().map(|(seq, table)| (*seq, &**table));
                let reserved = self.quotas.reserved(&mut self.life, &tenant, table, answer);
                self.wait_again(reserved);
            }
            Input::Replica { id, leaving } => self.life.replicas.heard(now.mono, id, leaving),
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => self.operator_yield(ticket, execution, to.as_ref(), &who),
            Input::Tenant { tenant, weight } => {
                self.life.set_weight(&tenant, weight);
                self.life.changed().places = true;
            }
            Input::Connected { connected } => {
                self.life.connected = connected;
                self.start_clocks_anew();
            }
            Input::Lost => self.life.heal_until = now.mono.plus(self.life.config.heal_ms),
            Input::Loaded => self.begin(),
            Input::Tick => self.tick(),
        }
        out.append(&mut self.life.out);
    }

    /// Binds waiting executions as far as there is room. The shell calls it after each round of
    /// inputs.
    pub fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        self.life.pass(now);
        self.serve_waiting();
        out.append(&mut self.life.out);
    }

    fn serve_waiting(&mut self) {
        if !self.life.loaded || !self.life.connected || self.life.now.mono < self.life.heal_until {
            return;
        }
        self.act_on_admission();
        if self.life.cluster().changed.may_fill() {
            self.fill();
        }
    }

    fn begin_step(&mut self, now: Now) {
        self.life.pass(now);
        // After a stall of this process, silence of others must not count by its clock.
        if self
            .life
            .last_tick
            .is_some_and(|last| now.mono.since(last) > self.life.config.stall_ms)
        {
            self.life.last_tick = Some(now.mono);
            self.start_clocks_anew();
        }
    }

    fn tick(&mut self) {
        let now = self.life.now;
        self.life.last_tick = Some(now.mono);
        self.life
            .replicas
            .expire(now.mono, self.life.config.replica_ms);
        let silent = now.mono.0.saturating_sub(self.life.config.liveness_ms);
        self.life.strangers.forget_before(Millis(silent));
        if !self.life.loaded {
            return;
        }
        for ix in self.life.cluster().keys() {
            self.look_at_node(ix);
            self.verification.look_at(&mut self.life, ix);
        }
        if !self.life.connected || now.mono < self.life.heal_until {
            return;
        }
        // A review may schedule the next one at once. One round a tick is enough.
        let mut due = Vec::new();
        while let Some(id) = self.life.pop_due() {
            due.push(id);
        }
        for id in due {
            self.look_at_execution(id);
        }
        self.look_at_absent();
        self.sharing.fail_late_ones(&mut self.life);
        let released = self.ranges.settle(&mut self.life);
        self.wait_again(released);
        self.let_ranges_grow();
        self.serve_waiting();
        self.quotas.review(&mut self.life);
        self.preempt();
        let ranges = &self.ranges;
        let may_wait = |id| !ranges.awaits_parts(id);
        self.parking.review(&mut self.life, may_wait);
        self.reallocation
            .review(&mut self.life, |life| self.sharing.served(life));
        self.verification.review(&mut self.life);
        self.tell_waiting();
    }

    fn let_ranges_grow(&mut self) {
        for root in self.ranges.review(&mut self.life) {
            let Some(one) = self.ranges.candidate(&self.life, root) else {
                continue;
            };
            let claims = Claims {
                gang_gathers: self.gangs.gathers(&self.life),
                denied: self.quotas.denies_one_more(&self.life, one.id),
            };
            self.ranges.grow(&mut self.life, root, one, claims);
        }
    }

    fn preempt(&mut self) {
        // The replica that holds the reservations of all members acts, whichever is preferred now.
        let admitted = |id: &ExecutionId| self.quotas.is_admitted(&self.life, *id);
        let leading = self.life.leading();
        let leading = leading.filter(|leading| leading.members.iter().all(admitted));
        let lacking = leading.and_then(|_| self.gangs.lacking(&self.life));
        self.sharing
            .preempt(&mut self.life, lacking, parking::park_for);
    }

    /// An execution has yielded to this one, which is bound next.
    pub(crate) fn gave_way(&mut self, by: ExecutionId) {
        self.sharing.obeyed(by);
        self.life.promise(by);
        self.gangs.hurry(&mut self.life, by);
    }

    /// Queues those of these executions that may wait for a place again.
    pub(crate) fn wait_again(&mut self, ids: impl IntoIterator<Item = ExecutionId>) {
        for id in ids {
            self.wait_if_pending(id);
        }
    }

    /// After a stall or a lost connection of this process, silence of nodes does not count.
    fn start_clocks_anew(&mut self) {
        self.quotas.distrust();
        self.life.changed().holds = true;
        self.life.start_clocks_anew();
    }

    /// The initial load is complete: timers start.
    fn begin(&mut self) {
        let now = self.life.now;
        self.life.loaded = true;
        self.life.changed().places = true;
        self.quotas.begin(now.mono);
        self.life.last_tick = Some(now.mono);
        self.start_clocks_anew();
    }
}
