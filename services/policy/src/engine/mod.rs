//! The engine: one input, one moment, the actions that follow.
//!
//! * [`ledger`] follows the feed and our own appends.
//! * [`bind`] places what must be bound: new, pending, refused, lost, queued behind long work.
//! * [`orders`] moves what runs: pressure, drains, operators.
//! * [`nodes`] follows nodes: vectors, silence, probes, joining and leaving.
//! * [`trust`] follows what nodes prove and lose.
//! * [`verify`] has parts of executions computed once more, [`judge`] judges.
//! * [`why`] tells people.

mod bind;
mod judge;
mod ledger;
mod nodes;
mod orders;
mod trust;
mod verify;
mod why;

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use fiec_schemas::messages::{ControlRequest, Record};
use fiec_schemas::trust::{Proof, Quarantine, SignedProof, Verdict};
use fiec_schemas::{
    Cause, Contract, Digest, Event, ExecutionId, HardwareVector, InstanceId, NodeDescriptor,
    NodeFlags, NodeId, Phase, Sequence, StatePlace, Submission, Tenant, Timestamp,
};

use crate::cluster::{Cluster, NodeIx};
use crate::config::Config;
use crate::profile::ProfileIx;
use crate::replicas::Replicas;
use crate::time::{Millis, Now};
use crate::verify::Check;
use crate::view::LedgerView;

/// Names a question that waits for its [`Action::Reply`].
pub type Ticket = u64;

/// What became of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// This instance answered.
    Answered(InstanceId),
    /// Nobody did.
    Silent,
}

/// What became of a control request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlOutcome {
    /// The node will do it.
    Taken,
    /// The node will not, and says why.
    Refused(String),
    /// No answer came.
    NoAnswer,
}

/// What happened.
#[derive(Debug)]
pub enum Input<'a> {
    /// A submission was read; its id is not known yet.
    Submission {
        /// Its id.
        execution: ExecutionId,
        /// Whose.
        tenant: &'a Tenant,
        /// What.
        spec: &'a Submission,
        /// By the broker's clock.
        submitted_at: Timestamp,
        /// Whether [`Action::Hold`] is a welcome answer.
        may_hold: bool,
    },
    /// A message of a ledger.
    Ledger(&'a LedgerView<'a>),
    /// The last message of a ledger after an append of ours failed: it counts whatever was
    /// believed before.
    Reread(&'a LedgerView<'a>),
    /// A submission that was too large for its ledger message.
    Spec {
        /// Of which execution.
        execution: ExecutionId,
        /// It.
        spec: &'a Submission,
    },
    /// An append of ours is stored.
    Appended {
        /// To which ledger.
        execution: ExecutionId,
        /// As which message.
        seq: Sequence,
        /// The epoch after it.
        epoch: u64,
        /// The phase after it.
        phase: &'a Phase,
    },
    /// An append of ours failed and the ledger is empty.
    Vanished {
        /// Which.
        execution: ExecutionId,
    },
    /// A node's key in `FIEC_NODES`.
    Descriptor(Box<NodeDescriptor>),
    /// A node's key is gone.
    Gone(&'a NodeId),
    /// An operator's flags.
    Flags(&'a NodeId, NodeFlags),
    /// A node's proof, and what a look at its signature has shown.
    Proof {
        /// Whose.
        node: &'a NodeId,
        /// As it is stored.
        signed: &'a SignedProof,
        /// What it states, or why that does not count.
        judged: Result<Proof, String>,
    },
    /// The contracts that a node has lost.
    Quarantine(&'a NodeId, Quarantine),
    /// What a node found that computed a part of an execution once more.
    Verdict(Verdict),
    /// A vector, and how old it is.
    Vector(HardwareVector, u64),
    /// What became of a probe.
    Probe(&'a NodeId, ProbeOutcome),
    /// What became of a yield order.
    Ordered {
        /// Which execution.
        execution: ExecutionId,
        /// Under which epoch.
        epoch: u64,
        /// The answer.
        outcome: ControlOutcome,
    },
    /// Another policy service spoke.
    Replica {
        /// Which.
        id: InstanceId,
        /// For the last time.
        leaving: bool,
    },
    /// An operator wants an execution to move.
    Yield {
        /// For the reply.
        ticket: Ticket,
        /// Which.
        execution: ExecutionId,
        /// Where to, if there is a wish.
        to: Option<&'a NodeId>,
        /// Who asks.
        who: &'a str,
    },
    /// The connection to the broker is there (again), or not.
    Connected(bool),
    /// Everything that was there at the start has been told.
    Loaded,
    /// Time passes.
    Tick,
}

/// The boundary to which an execution goes back.
#[derive(Debug, Clone, PartialEq)]
pub enum Good {
    /// This one, or the beginning.
    Known(Option<StatePlace>),
    /// The last one before the culprit had it, as far as its ledger still shows that; else the
    /// beginning.
    BeforeIt,
}

/// What the shell must do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Append these events after the message of this sequence; answer with [`Input::Appended`],
    /// [`Input::Reread`] or [`Input::Vanished`]. After success a binding's capsule is sent.
    Append {
        /// To which ledger.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// The message before; 0 for none.
        expected: Sequence,
        /// The events.
        events: Vec<Event>,
        /// Who waits for it.
        ticket: Option<Ticket>,
    },
    /// No node has room yet, but one learns how fast it is: ask again in a moment.
    Hold,
    /// Send the capsule of a binding that is stored (again).
    SendCapsule {
        /// Which execution.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// Sequence of the message that the node must follow.
        seq: Sequence,
    },
    /// Ask a node; answer a yield with [`Input::Ordered`].
    Control {
        /// Which.
        node: NodeId,
        /// What.
        request: ControlRequest,
        /// Who waits for the answer.
        ticket: Option<Ticket>,
    },
    /// Ping a node and answer with [`Input::Probe`].
    Probe(NodeId),
    /// Read a large submission and answer with [`Input::Spec`].
    FetchSpec {
        /// Which execution.
        execution: ExecutionId,
        /// Sequence of its last message.
        seq: Sequence,
        /// Whose.
        tenant: Tenant,
    },
    /// Take a contract away from a node, durably.
    Quarantine {
        /// Which node.
        node: NodeId,
        /// Which contract.
        contract: Contract,
        /// On which of its devices; none: on all of it.
        substrate: Option<String>,
        /// Why.
        reason: String,
    },
    /// Append that an execution goes on from an earlier boundary, whoever appends to it at the
    /// same time; answer with [`Input::Reread`].
    StepBack {
        /// Which.
        execution: ExecutionId,
        /// Whose.
        tenant: Tenant,
        /// Because of whom, where that is known.
        culprit: Option<NodeId>,
        /// From which boundary it goes on.
        good: Good,
        /// Why.
        cause: Cause,
    },
    /// Remove a σ that was kept beside the ledger and is not needed any more.
    DropKept {
        /// Of which execution.
        execution: ExecutionId,
        /// Its digest.
        digest: Digest,
    },
    /// Publish a fact.
    Record(Box<Record>),
    /// Answer a question.
    Reply(Ticket, Result<String, String>),
}

/// The policy's whole memory.
#[derive(Debug)]
pub struct Policy {
    config: Config,
    /// What is known.
    pub(crate) cluster: Cluster,
    replicas: Replicas,
    /// Executions that must be bound, by what they ask and by age.
    waiting: BTreeMap<ProfileIx, BTreeSet<(Timestamp, ExecutionId)>>,
    /// Something changed that may give a waiting execution its place.
    dirty: bool,
    connected: bool,
    loaded: bool,
    last_tick: Option<Millis>,
    completions: u64,
    /// Executions of which something is compared.
    checks: BTreeMap<ExecutionId, Box<Check>>,
    /// Of those, the ones with something to do.
    to_verify: BTreeSet<ExecutionId>,
    /// Executions that are being taken back, since when; what their holders still commit does not
    /// end that.
    stepping: BTreeMap<ExecutionId, Millis>,
    /// Questions asked so far.
    questions: u64,
    /// Draws the boundaries that are compared.
    seed: InstanceId,
}

impl Policy {
    /// Knows nothing yet; `own` is this replica's name among others.
    pub fn new(config: Config, own: InstanceId) -> Self {
        Self {
            config,
            cluster: Cluster::default(),
            replicas: Replicas::new(own),
            waiting: BTreeMap::new(),
            dirty: false,
            connected: true,
            loaded: false,
            last_tick: None,
            completions: 0,
            checks: BTreeMap::new(),
            to_verify: BTreeSet::new(),
            stepping: BTreeMap::new(),
            questions: 0,
            seed: own,
        }
    }

    /// Takes one input and pushes what follows from it.
    pub fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>) {
        // Whatever comes first after a stall of the observer must not be judged by its clock.
        if self
            .last_tick
            .is_some_and(|last| now.mono.since(last) > self.config.stall_ms)
        {
            self.last_tick = Some(now.mono);
            self.start_clocks_anew(now.mono);
        }
        match input {
            Input::Submission {
                execution,
                tenant,
                spec,
                submitted_at,
                may_hold,
            } => {
                self.submission(now, execution, tenant, spec, submitted_at, may_hold, out);
            }
            Input::Ledger(view) => self.follow(now, view, false, out),
            Input::Reread(view) => self.follow(now, view, true, out),
            Input::Spec { execution, spec } => self.learn_spec(now, execution, spec),
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => {
                self.appended(now, execution, seq, epoch, phase);
            }
            Input::Vanished { execution } => self.forget(execution),
            Input::Descriptor(descriptor) => self.descriptor(now, *descriptor, out),
            Input::Gone(node) => self.gone(now, node, out),
            Input::Flags(node, flags) => self.flags(now, node, flags, out),
            Input::Proof {
                node,
                signed,
                judged,
            } => self.proof(now, node, signed, judged, out),
            Input::Quarantine(node, quarantine) => self.quarantine(now, node, quarantine, out),
            Input::Verdict(verdict) => self.verdict(now, verdict, out),
            Input::Vector(vector, age_ms) => self.vector(now, vector, age_ms, out),
            Input::Probe(node, outcome) => self.probed(now, node, outcome, out),
            Input::Ordered {
                execution,
                epoch,
                outcome,
            } => {
                self.ordered(now, execution, epoch, outcome);
            }
            Input::Replica { id, leaving } => self.replicas.heard(now.mono, id, leaving),
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => {
                self.operator_yield(now, ticket, execution, to, who, out);
            }
            Input::Connected(connected) => {
                self.connected = connected;
                self.start_clocks_anew(now.mono);
            }
            Input::Loaded => self.begin(now),
            Input::Tick => self.tick(now, out),
        }
    }

    /// Binds what waits, as far as there is room; the shell calls it after each round of inputs.
    pub fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        if self.loaded && self.connected && self.dirty {
            self.fill(now, out);
        }
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Action>) {
        self.last_tick = Some(now.mono);
        self.replicas.expire(now.mono, self.config.replica_ms);
        if !self.loaded {
            return;
        }
        for ix in 0..self.cluster.node_count() {
            self.look_at_node(now, NodeIx(ix), out);
            self.look_at_trust(now, NodeIx(ix), out);
        }
        if !self.connected {
            return;
        }
        // What is looked at may want to be looked at again at once; one round a tick is enough.
        let mut due = Vec::new();
        while let Some(id) = self.cluster.pop_due(now.mono) {
            due.push(id);
        }
        for id in due {
            self.look_at_execution(now, id, out);
        }
        self.act(now, out);
        self.verify_round(now, out);
    }

    /// After a stall or a cut of the observer nobody's silence counts.
    fn start_clocks_anew(&mut self, now: Millis) {
        for ix in 0..self.cluster.node_count() {
            let node = self.cluster.node_mut(NodeIx(ix));
            node.heard = node.heard.max(now);
            if matches!(node.presence, crate::cluster::Presence::Probing { .. }) {
                node.presence = crate::cluster::Presence::Up;
            }
        }
    }

    /// The load is complete: clocks start, bindings get their deadlines.
    fn begin(&mut self, now: Now) {
        self.loaded = true;
        self.dirty = true;
        self.last_tick = Some(now.mono);
        self.start_clocks_anew(now.mono);
    }

    /// True when this replica acts first for the execution.
    fn is_mine(&self, id: ExecutionId) -> bool {
        self.replicas.prefers_self(id.0.as_bytes())
    }

    /// True for an execution that is known and lives.
    pub fn knows(&self, id: ExecutionId) -> bool {
        self.cluster.execution(id).is_some()
    }

    /// Whose a live execution is.
    pub fn tenant(&self, id: ExecutionId) -> Option<Tenant> {
        self.cluster.execution(id).map(|e| e.tenant.clone())
    }

    /// How many executions live.
    pub fn live(&self) -> usize {
        self.cluster.live()
    }

    /// How many wait to be bound.
    pub fn waiting(&self) -> usize {
        self.waiting.values().map(BTreeSet::len).sum()
    }

    /// Completions seen since the start; a change means that there may be room again.
    pub fn completions(&self) -> u64 {
        self.completions
    }

    /// Policy services present, this one included.
    pub fn replicas(&self) -> usize {
        self.replicas.count()
    }

    /// The shard from which a node pulls its capsules.
    pub fn shard(&self, node: &NodeId) -> u16 {
        self.cluster
            .find(node)
            .and_then(|ix| self.cluster.node(ix).descriptor.as_ref())
            .map_or(0, |d| d.shard)
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A digest over all that is known of the cluster; for tests of determinism.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> Digest {
        Digest::of(format!("{:?}", self.cluster).as_bytes())
    }
}
