//! Appends to ledgers that exist: how many are open, what saves them a read, and who waits for their
//! results.

use std::collections::HashMap;

use fiec_broker::Tip;
use fiec_policy::Ticket;
use fiec_schemas::{ExecutionId, Sequence};
use tokio::sync::oneshot;

use crate::bounds::weight_of;
use crate::refusal::Refusal;

/// Most tips of waiting executions that are kept, so that a binding needs no read.
const TIPS: usize = 4_000;
/// Most bytes of a tip that is kept.
const TIP_BYTES: usize = 16 * 1024;

/// The receiver of an order's result.
pub(super) type Answer = oneshot::Sender<Result<String, Refusal>>;

/// Appends to ledgers that exist.
pub(super) struct Appends {
    /// Appends, and reads after a failed append, without a result.
    open: usize,
    /// The policy binds no more while there are this many.
    limit: usize,
    /// Tips of executions that wait for a node, so that binding them needs no read.
    tips: HashMap<ExecutionId, Box<Tip>>,
    /// Receiver of each order's result, and the text that it gets if the worker accepts.
    answers: HashMap<Ticket, (Answer, String)>,
    /// The last ticket that was issued.
    last: Ticket,
}

impl Appends {
    /// None is open.
    pub fn new(limit: usize) -> Self {
        Self {
            open: 0,
            limit,
            tips: HashMap::new(),
            answers: HashMap::new(),
            last: 0,
        }
    }

    /// True if the policy may bind further executions.
    pub fn has_room(&self) -> bool {
        self.open < self.limit
    }

    /// Number of open appends.
    pub fn open(&self) -> usize {
        self.open
    }

    /// An append to a ledger begins. Returns the ledger's tip if it is known and stands at `expected`.
    pub fn begin(&mut self, execution: ExecutionId, expected: Sequence) -> Option<Box<Tip>> {
        self.open += 1;
        let known = self.tips.remove(&execution);
        known.filter(|tip| tip.seq == expected)
    }

    /// An append, or a read, begins that needs no tip.
    pub fn begin_read(&mut self, execution: ExecutionId) {
        self.open += 1;
        self.forget(execution);
    }

    /// An append has a result. Returns who waits for it.
    pub fn end(&mut self, ticket: Option<Ticket>) -> Option<(Answer, String)> {
        self.open -= 1;
        self.answer(ticket)
    }

    /// Keeps the tip of an execution that waits for a node, unless it takes much memory: a
    /// submission's text is short, but its parameters may be large.
    pub fn keep(&mut self, tip: Box<Tip>) {
        let spec = tip.state.spec.as_ref();
        let is_light = spec.is_none_or(|spec| weight_of(spec, 0) <= TIP_BYTES);
        if is_light && self.tips.len() < TIPS {
            self.tips.insert(tip.state.execution, tip);
        }
    }

    /// The tip of an execution, if it is kept.
    pub fn tip(&self, execution: ExecutionId) -> Option<&Tip> {
        self.tips.get(&execution).map(|tip| &**tip)
    }

    /// The ledger of an execution has moved on.
    pub fn forget(&mut self, execution: ExecutionId) {
        self.tips.remove(&execution);
    }

    /// Somebody waits for the result of an order, and gets `promise` if the worker accepts it.
    pub fn await_answer(&mut self, answer: Answer, promise: String) -> Ticket {
        self.last += 1;
        self.answers.insert(self.last, (answer, promise));
        self.last
    }

    /// Who waits for the result of an order, and what it gets if the worker accepts it.
    pub fn answer(&mut self, ticket: Option<Ticket>) -> Option<(Answer, String)> {
        self.answers.remove(&ticket?)
    }

    /// Drops the answers that nobody waits for any more.
    pub fn drop_unawaited(&mut self) {
        self.answers.retain(|_, (answer, _)| !answer.is_closed());
    }
}
