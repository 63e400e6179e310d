//! An execution on its way into a slot, and what is known of it while it lives here.

use std::sync::{Arc, Mutex};

use async_nats::Subject;
use bytes::Bytes;
use fiec_broker::Tip;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::Destination;
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::{Adjustment, Keep};
use fiec_schemas::{Cause, Decision, Digest, Epoch, Sequence, Signal, Threshold};
use tokio::sync::{mpsc, oneshot};

use crate::entrusted_bindings::EntrustedBinding;

/// Orders that one execution may have waiting.
const ORDERS: usize = 16;
/// The answer to an order that comes too late.
pub const LEAVING: &str = "the execution is leaving";

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

/// An order for one execution.
#[derive(Debug)]
pub enum Control {
    /// The broker has begun a new life: look whether it still has everything.
    Recheck,
    /// Give it up at the next boundary.
    Yield {
        /// Why.
        cause: Cause,
        /// Where to.
        to: Option<(Destination, Option<Decision>)>,
    },
    /// Give it up now: what was computed since the last commit is computed again elsewhere.
    GiveUp {
        /// Why.
        cause: Cause,
    },
    /// The same as a yield, and leave it paused.
    Pause {
        /// Who asked.
        who: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
    /// Stop at the next boundary and wait there.
    Park {
        /// Why.
        cause: Cause,
        /// What it keeps.
        keep: Keep,
        /// Where to answer, before it has reached that boundary.
        reply: Option<Subject>,
    },
    /// Go on where it is parked.
    Unpark {
        /// Why.
        reason: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
    /// Split the last half of what is left off at the next boundary.
    Split {
        /// Where to answer, before it has reached that boundary.
        reply: Option<Subject>,
    },
    /// Another grant holds from the next boundary on.
    Reconfigure {
        /// What changes.
        grant: Grant,
        /// Who asked.
        who: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
    /// Something about it is changed from now on.
    Adjust {
        /// Who asked.
        who: String,
        /// What is changed.
        change: Box<Adjustment>,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
    /// End it.
    Cancel {
        /// Who asked.
        who: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
}

impl Control {
    /// Where to answer, if somebody waits for that.
    pub fn reply(self) -> Option<Subject> {
        match self {
            Self::Recheck | Self::Yield { .. } | Self::GiveUp { .. } => None,
            Self::Pause { reply, .. }
            | Self::Park { reply, .. }
            | Self::Unpark { reply, .. }
            | Self::Split { reply }
            | Self::Reconfigure { reply, .. }
            | Self::Adjust { reply, .. }
            | Self::Cancel { reply, .. } => reply,
        }
    }
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
    pub control: mpsc::Receiver<Box<Control>>,
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
    pub control: mpsc::Sender<Box<Control>>,
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
    ) -> (Self, mpsc::Receiver<Box<Control>>) {
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

    /// The threshold of M that an execution has brought with it, or was given since.
    pub fn memory_threshold(state: &ExecutionState) -> Option<Threshold> {
        let adjusted = state.adjusted.as_ref();
        let adjusted = adjusted.and_then(|change| change.viability.get(&Signal::Memory));
        let submitted = || state.spec.as_ref()?.viability.get(&Signal::Memory);
        adjusted.or_else(submitted).copied()
    }
}
