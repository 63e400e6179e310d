//! An execution and its ledger.

use fiec_schemas::{BoundaryIndex, ExecutionId, ExecutionState, NodeId, Phase};
use uuid::Uuid;

/// How many of an execution's last events are kept to be told.
const KEPT: usize = 24;

/// An execution. A million of them may live and have lived: small, and smaller once done.
#[derive(Debug)]
pub struct Exec {
    /// Which workload it is of.
    pub workload: u32,
    /// When it was submitted, in microseconds.
    pub submitted: u64,
    /// Computing time on a node of speed 1, in microseconds.
    pub work_us: u64,
    /// The same of one capsule.
    pub capsule_us: u64,
    /// Bytes of σ.
    pub state_bytes: u64,
    /// Bytes of memory while it runs.
    pub memory_bytes: u64,
    /// Sequence of its ledger's last message; 0 while there is none.
    pub seq: u64,
    /// The state after it, while it lives.
    pub state: Option<Box<ExecutionState>>,
    /// When it was first bound.
    pub first_bound: u64,
    /// Since when it waits to compute, while it does.
    pub waits_since: Option<u64>,
    /// When it began to compute for the first time.
    pub began: u64,
    /// When it was done.
    pub done: u64,
    /// Under which epoch it is running, wherever that is believed.
    pub running: Option<(u32, u64)>,
    /// How often it gave way to others.
    pub preempted: u32,
    /// The last things that happened to it.
    pub trace: Vec<Past>,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Past {
    /// When, in microseconds.
    pub at: u64,
    /// What: names of events.
    pub what: Vec<&'static str>,
    /// The state after it.
    pub epoch: u64,
    /// The last committed boundary after it.
    pub boundary: BoundaryIndex,
    /// The node that it is tied to after it.
    pub node: Option<NodeId>,
}

impl Past {
    /// In words.
    pub fn in_words(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "a time for people")]
        let seconds = self.at as f64 / 1e6;
        let node = self.node.as_ref().map_or("-", NodeId::as_str);
        format!(
            "{seconds:>12.6} s  {:<24} epoch {} boundary {} on {node}",
            self.what.join("+"),
            self.epoch,
            self.boundary
        )
    }
}

impl Exec {
    /// Boundaries in all; the last one is the end.
    pub fn boundaries(&self) -> BoundaryIndex {
        self.work_us.div_ceil(self.capsule_us).max(1)
    }

    /// True once nothing more will happen to it.
    pub fn is_done(&self) -> bool {
        self.done > 0
    }

    /// Keeps an event to be told.
    pub fn note(&mut self, past: Past) {
        if self.trace.len() >= KEPT {
            self.trace.remove(0);
        }
        self.trace.push(past);
    }

    /// Where it stands.
    pub fn phase(&self) -> Option<&Phase> {
        self.state.as_ref().map(|s| &s.phase)
    }
}

/// The id of the `number`-th execution, submitted so many milliseconds after the epoch.
pub fn id(number: u32, millis: u64) -> ExecutionId {
    let time = u128::from(millis & 0xffff_ffff_ffff) << 80;
    ExecutionId(Uuid::from_u128(
        time | (7 << 76) | (2 << 62) | u128::from(number),
    ))
}

/// The number in an id.
#[expect(clippy::cast_possible_truncation, reason = "the lowest 32 bits are it")]
pub fn number(id: ExecutionId) -> u32 {
    id.0.as_u128() as u32
}
