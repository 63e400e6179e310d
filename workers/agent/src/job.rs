//! An execution on its way into a slot, and what is known of it while it lives here.

use std::sync::{Arc, Mutex};

use async_nats::Subject;
use bytes::Bytes;
use fiec_broker::Tip;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Digest, Epoch, ExecutionId, Sequence, Signal, Threshold};
use tokio::sync::{mpsc, oneshot};

use crate::entrusted_bindings::EntrustedBinding;
use crate::replies::Reply;

/// Orders that one execution may have waiting.
const ORDERS: usize = 16;

/// A message that somebody else has appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Its sequence.
    pub seq: Sequence,
    /// The connection in which that holds; 0 where that is not known.
    pub seen_in: u64,
}

impl Stored {
    /// Puts it into the tip that the message makes.
    pub fn complete(self, tip: &mut Tip) {
        tip.seq = self.seq;
        tip.seen_in = self.seen_in;
        tip.state.resolve(self.seq);
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
    /// Where the runner answers.
    pub reply: Reply,
}

/// Acknowledges a capsule message when the last of its bindings is done with.
#[derive(Debug)]
pub struct CapsuleAck {
    /// Where the acknowledgement goes.
    pub reply: Subject,
    /// Who sends it.
    pub acks: mpsc::Sender<Subject>,
}

impl Drop for CapsuleAck {
    fn drop(&mut self) {
        // The broker delivers no more unacknowledged messages than the channel holds; were it full
        // all the same, the capsule would come again and be dropped by its epoch.
        let _ = self.acks.try_send(self.reply.clone());
    }
}

/// σ as it was handed over.
#[derive(Debug)]
pub enum Sigma {
    /// All of it, checked.
    Whole(Bytes),
    /// The list of a large one's chunks, and the new ones among them.
    Delta(Bytes),
}

/// How an execution came here.
#[derive(Debug)]
pub enum Start {
    /// Its binding is in the ledger.
    Bound(Box<Tip>),
    /// Its binding is being appended; nothing may be appended before the confirmation.
    Speculative {
        /// The state that the binding's message gives, its own sequence being 0.
        state: Box<ExecutionState>,
        /// σ.
        sigma: Sigma,
        /// The binding's sequence, or nothing when it was not made.
        confirmed: oneshot::Receiver<Stored>,
        /// Digest of the binding's message.
        digest: Digest,
    },
    /// Its first binding was left to this node: the tip that it makes, and the binding.
    Entrusted(Box<Tip>, Box<EntrustedBinding>),
}

/// An execution to take up.
#[derive(Debug)]
pub struct Job {
    /// How it came.
    pub start: Start,
    /// Held until `started` is in the ledger.
    pub ack: Option<Arc<CapsuleAck>>,
    /// Its orders.
    pub control: mpsc::Receiver<RunnerOrder>,
    /// What is told of it.
    pub progress: Arc<Mutex<RunningProgress>>,
}

/// An execution that lives here.
#[derive(Debug)]
pub struct Live {
    /// Under which binding.
    pub epoch: Epoch,
    /// Digest of the message that it follows: the one that made the binding, or a later change.
    pub bound: Digest,
    /// That message's sequence; 0 where it is not known to be stored.
    pub seq: Sequence,
    /// Its orders.
    pub control: mpsc::Sender<RunnerOrder>,
    /// What is told of it.
    pub progress: Arc<Mutex<RunningProgress>>,
    /// True once a child computes it.
    pub begun: bool,
    /// Confirms a speculation.
    pub confirm: Option<oneshot::Sender<Stored>>,
    /// Its own threshold of M, where it has brought one.
    pub memory: Option<Threshold>,
}

impl Live {
    /// One that has come here under the binding that `state` gives, and where its orders arrive.
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
            confirm,
            memory: Self::memory_threshold(state),
        };
        (live, orders)
    }

    /// Orders the execution to yield, in the worker's own name; the policy service binds it anew.
    /// False if its queue of orders is full, or its runner has ended.
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

    /// The threshold of M that an execution has brought with it, or was given since.
    pub fn memory_threshold(state: &ExecutionState) -> Option<Threshold> {
        let adjusted = state.adjusted.as_ref();
        let adjusted = adjusted.and_then(|change| change.viability.get(&Signal::Memory));
        let submitted = || state.spec.as_ref()?.viability.get(&Signal::Memory);
        adjusted.or_else(submitted).copied()
    }
}
