//! An execution on its way into a slot, and its record while it lives here.

use std::sync::{Arc, Mutex};

use async_nats::Subject;
use bytes::Bytes;
use fiec_broker::Tip;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Digest, Epoch, ExecutionId, Sequence, Signal, Threshold};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::entrusted_bindings::EntrustedBinding;
use crate::replies::Reply;

/// Queued orders of one execution.
const ORDERS: usize = 16;

/// A ledger message that another author has appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Its sequence.
    pub seq: Sequence,
    /// The connection in which the sequence is valid, or 0 if that is not known.
    pub seen_in: u64,
}

impl Stored {
    /// Completes the tip that the message makes.
    pub fn complete(self, tip: &mut Tip) {
        tip.seq = self.seq;
        tip.seen_in = self.seen_in;
        Arc::make_mut(&mut tip.state).resolve(self.seq);
    }
}

/// An order to the runner of one execution.
#[derive(Debug)]
pub enum RunnerOrder {
    /// A control request that names the execution.
    Request(Box<Request>),
    /// The broker has begun a new life: check whether it still has the execution's messages.
    Recheck,
}

/// A control request on its way to a runner.
#[derive(Debug)]
pub struct Request {
    /// The request.
    pub request: ControlRequest,
    /// The subject of the runner's answer.
    pub reply: Reply,
}

/// Acknowledges a capsule message when the last of its bindings is settled.
#[derive(Debug)]
pub struct CapsuleAck {
    /// Where the acknowledgement goes.
    pub reply: Subject,
    /// The task that sends it.
    pub acks: mpsc::Sender<Subject>,
}

impl Drop for CapsuleAck {
    fn drop(&mut self) {
        // The broker delivers at most as many unacknowledged messages as the channel holds. If it
        // were full all the same, the capsule would come again and be dropped by its epoch.
        let _ = self.acks.try_send(self.reply.clone());
    }
}

/// σ as a handover delivered it.
#[derive(Debug)]
pub enum Sigma {
    /// The whole σ, checked.
    Whole(Bytes),
    /// The list of a large σ's chunks, and the new ones among them.
    Delta(Bytes),
}

/// The way in which an execution came here.
#[derive(Debug)]
pub enum Start {
    /// Its binding is in the ledger.
    Bound(Box<Tip>),
    /// Its binding is being appended. Nothing may be appended before the confirmation.
    Speculative {
        /// The state that the binding's message makes, with 0 as its own sequence.
        state: Arc<ExecutionState>,
        /// σ.
        sigma: Sigma,
        /// The binding's sequence. The sender is dropped if the binding was not appended.
        confirmed: oneshot::Receiver<Stored>,
        /// Digest of the binding's message.
        digest: Digest,
    },
    /// Its first binding was entrusted to this node: the tip that it makes, and the binding.
    Entrusted(Box<Tip>, Box<EntrustedBinding>),
}

/// An execution to start on this node.
#[derive(Debug)]
pub struct Job {
    /// How it came.
    pub start: Start,
    /// Held until `started` is in the ledger.
    pub ack: Option<Arc<CapsuleAck>>,
    /// Its orders.
    pub control: mpsc::Receiver<RunnerOrder>,
    /// Its progress, for telemetry.
    pub progress: Arc<Mutex<RunningProgress>>,
}

/// An execution that lives here.
#[derive(Debug)]
pub struct Live {
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// Digest of the message that it follows: the binding's message, or a later change.
    pub bound: Digest,
    /// Sequence of that message, or 0 if it is not known to be stored.
    pub seq: Sequence,
    /// Its orders.
    pub control: mpsc::Sender<RunnerOrder>,
    /// Its progress, for telemetry.
    pub progress: Arc<Mutex<RunningProgress>>,
    /// Whether a child has started to compute it.
    pub begun: bool,
    /// Start of the work that no commit holds. None while it does not compute.
    pub uncommitted: Option<Instant>,
    /// Confirms a speculation.
    pub confirm: Option<oneshot::Sender<Stored>>,
    /// Its own threshold of M, if it has one.
    pub memory: Option<Threshold>,
}

impl Live {
    /// A new record under the binding in `state`, with the receiver of its orders.
    pub fn new(
        state: &ExecutionState,
        (seq, bound): (Sequence, Digest),
        confirm: Option<oneshot::Sender<Stored>>,
    ) -> (Self, mpsc::Receiver<RunnerOrder>) {
        let (control, orders) = mpsc::channel(ORDERS);
        let progress = RunningProgress {
            execution: state.execution,
            epoch: state.epoch,
            boundary: state.boundary_index(),
            of: None,
            note: None,
        };
        let live = Self {
            epoch: state.epoch,
            bound,
            seq,
            control,
            progress: Arc::new(Mutex::new(progress)),
            begun: false,
            uncommitted: None,
            confirm,
            memory: Self::memory_threshold(state),
        };
        (live, orders)
    }

    /// Orders the execution to yield, in the worker's own name. The policy service binds it again.
    /// Returns false if its queue of orders is full, or its runner has ended.
    pub fn order_yield(&self, execution: ExecutionId, cause: Cause) -> bool {
        let request = ControlRequest::Yield {
            execution,
            epoch: self.epoch,
            cause,
            to: None,
            decision: None,
        };
        let reply = Reply::default();
        let order = RunnerOrder::Request(Box::new(Request { request, reply }));
        self.control.try_send(order).is_ok()
    }

    /// Returns the threshold of M from an execution's submission, or from a later change.
    pub fn memory_threshold(state: &ExecutionState) -> Option<Threshold> {
        let adjusted = state.adjusted.as_ref();
        let adjusted = adjusted.and_then(|change| change.viability.get(&Signal::Memory));
        let submitted = || state.spec.as_ref()?.viability.get(&Signal::Memory);
        adjusted.or_else(submitted).copied()
    }
}
