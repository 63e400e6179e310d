//! An execution and its ledger.

use std::sync::Arc;

use fiec_policy::Fate;
use fiec_schemas::dependency::AfterOutcome;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::Part;
use fiec_schemas::{
    BoundaryIndex, Event, EventKind, ExecutionId, ExecutionState, Phase, Submission,
};
use uuid::Uuid;

/// Most events of an execution that are kept for a report.
const KEPT: usize = 24;
/// Most events of one message in a report.
const TOLD: usize = 4;

/// An execution. A run may have a million of them, so it is small, and smaller once it has ended.
#[derive(Debug)]
pub struct Exec {
    /// Its workload.
    pub workload: u32,
    /// Its tenant, by number.
    pub tenant: u32,
    /// Its submission. Most executions share it with all others of their workload.
    pub spec: Arc<Submission>,
    /// Time of its submission, in microseconds.
    pub submitted: u64,
    /// Computing time on a node of speed 1, in microseconds.
    pub work_us: u64,
    /// The same for one capsule.
    pub capsule_us: u64,
    /// Size of σ, in bytes.
    pub state_bytes: u64,
    /// Memory that it uses while it runs, in bytes.
    pub memory_bytes: u64,
    /// True if its program fails at its end.
    pub fails: bool,
    /// Sequence of its ledger's last message; 0 if there is none.
    pub seq: u64,
    /// The state after it, while it lives.
    pub state: Option<Box<ExecutionState>>,
    /// Time of its first binding.
    pub first_bound: u64,
    /// The reason and the start of its wait, if it waits.
    pub waits: Option<(Waits, u64)>,
    /// Time of its first capsule.
    pub began: u64,
    /// Time of its end.
    pub done: u64,
    /// The kind of its end.
    pub fate: Option<Fate>,
    /// The node and epoch under which a worker runs it, as far as that worker knows.
    pub running: Option<(u32, u64)>,
    /// Number of its preemptions.
    pub preempted: u32,
    /// Its holds, if any.
    pub held: Option<Box<Held>>,
    /// Its range, if that may be spread or is a part.
    pub tiles: Option<Box<Tiles>>,
    /// True if its ledger binds it to a node.
    pub tied: bool,
    /// True if its tenant has a reservation for it.
    pub reserved: bool,
    /// Its last events.
    pub trace: Vec<Past>,
}

/// The reasons of a wait that the policy can end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// It waits for a binding.
    Pending,
    /// It waits for its start.
    Bound,
    /// It is parked and waits for a resume, in place or elsewhere.
    Parked,
    /// It waits to be failed because a dependency has failed.
    Doomed,
}

impl Waits {
    /// All reasons, each at its own index.
    pub const ALL: [Self; 4] = [Self::Pending, Self::Bound, Self::Parked, Self::Doomed];
}

/// The holds of an execution.
#[derive(Debug, Default)]
pub struct Held {
    /// Dependencies that have not ended, with the required outcome.
    pub after: Vec<(u32, AfterOutcome)>,
    /// True if a dependency has ended otherwise.
    pub doomed: bool,
    /// Its gang, by number.
    pub gang: Option<u32>,
    /// Its batch with a limit, by number.
    pub batch: Option<u32>,
}

/// A range of tiles, one per capsule, and its progress.
#[derive(Debug)]
pub struct Tiles {
    /// The id of a part, which follows from its split.
    pub id: Option<ExecutionId>,
    /// The submitted execution, by number.
    pub whole: u32,
    /// The holder of a part, by number.
    pub holder: Option<u32>,
    /// Most nodes that may compute the whole range.
    pub up_to: u32,
    /// The range that it was given.
    pub given: TileRange,
    /// The first unfinished tile of its last committed σ.
    pub next: u64,
    /// The tile after its last one in the same σ.
    pub end: u64,
    /// Time of its last split.
    pub split_at: u64,
    /// Start of its wait for its last part, while it waits.
    pub rests_since: u64,
}

impl Tiles {
    /// The range of a submitted execution with `count` tiles.
    pub fn whole(e: u32, up_to: u32, count: u64) -> Box<Self> {
        Box::new(Self {
            id: None,
            whole: e,
            holder: None,
            up_to,
            given: TileRange { from: 0, to: count },
            next: 0,
            end: count,
            split_at: 0,
            rests_since: 0,
        })
    }

    /// The range of a part that was split off.
    pub fn part(&self, holder: u32, part: &Part) -> Box<Self> {
        Box::new(Self {
            id: Some(part.id),
            whole: self.whole,
            holder: Some(holder),
            up_to: self.up_to,
            given: part.range(),
            next: part.from,
            end: part.to,
            split_at: 0,
            rests_since: 0,
        })
    }
}

/// A past message.
#[derive(Debug, Clone, Copy)]
pub struct Past {
    /// Its time, in microseconds.
    pub at: u64,
    /// The last committed boundary after it.
    pub boundary: BoundaryIndex,
    /// The epoch after it.
    epoch: u32,
    /// The node that it is bound to after it; `u32::MAX` for none.
    node: u32,
    /// The first events.
    what: [Option<EventKind>; TOLD],
}

impl Past {
    /// The summary of a message.
    pub fn of(at: u64, events: &[Event], after: &ExecutionState, node: Option<u32>) -> Self {
        let mut what = [None; TOLD];
        for (place, event) in what.iter_mut().zip(events) {
            *place = Some(event.kind());
        }
        Self {
            at,
            boundary: after.boundary_index(),
            epoch: u32::try_from(after.epoch).unwrap_or(u32::MAX),
            node: node.unwrap_or(u32::MAX),
            what,
        }
    }

    /// In words. `name` gives the name of a node.
    pub fn in_words<'a>(&self, name: impl Fn(u32) -> Option<&'a str>) -> String {
        #[expect(clippy::cast_precision_loss, reason = "a time for people")]
        let seconds = self.at as f64 / 1e6;
        let what: Vec<_> = self
            .what
            .iter()
            .flatten()
            .map(|kind| kind.as_str())
            .collect();
        format!(
            "{seconds:>12.6} s  {:<24} epoch {} boundary {} on {}",
            what.join("+"),
            self.epoch,
            self.boundary,
            name(self.node).unwrap_or("-")
        )
    }
}

impl Exec {
    /// Number of boundaries; the last one is the end.
    pub fn boundaries(&self) -> BoundaryIndex {
        self.work_us.div_ceil(self.capsule_us).max(1)
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.done > 0
    }

    /// Keeps a message for a report.
    pub fn note(&mut self, past: Past) {
        if self.trace.len() >= KEPT {
            self.trace.remove(0);
        }
        self.trace.push(past);
    }

    /// Its phase.
    pub fn phase(&self) -> Option<&Phase> {
        self.state.as_ref().map(|s| &s.phase)
    }

    /// Its final phase, once it has ended.
    pub fn phase_at_end(&self) -> Option<Phase> {
        self.fate.map(|fate| match fate {
            Fate::Completed => Phase::Completed,
            Fate::Failed => Phase::Failed,
            Fate::Cancelled => Phase::Cancelled,
            Fate::Returned => Phase::Returned,
        })
    }

    /// True for a part of another execution's range.
    pub fn is_part(&self) -> bool {
        self.tiles.as_ref().is_some_and(|t| t.holder.is_some())
    }

    /// Its gang, by number.
    pub fn gang(&self) -> Option<u32> {
        self.held.as_ref()?.gang
    }

    /// Its batch with a limit, by number.
    pub fn batch(&self) -> Option<u32> {
        self.held.as_ref()?.batch
    }

    /// True while it waits for others, or can never run.
    pub fn is_held(&self) -> bool {
        let held = self.held.as_ref();
        held.is_some_and(|h| h.doomed || !h.after.is_empty())
    }
}

/// The id of the `number`-th execution, submitted `millis` after the Unix epoch.
pub fn id(number: u32, millis: u64) -> ExecutionId {
    let time = u128::from(millis & 0xffff_ffff_ffff) << 80;
    ExecutionId(Uuid::from_u128(
        time | (7 << 76) | (2 << 62) | u128::from(number),
    ))
}

/// The number in an id. None for the id of a part, which follows from its split.
#[expect(clippy::cast_possible_truncation, reason = "the lowest 32 bits are it")]
pub fn number(id: ExecutionId) -> Option<u32> {
    let bits = id.0.as_u128();
    ((bits >> 76) & 0xf == 7).then_some(bits as u32)
}
