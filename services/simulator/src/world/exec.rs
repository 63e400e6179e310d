//! An execution and its ledger.

use std::sync::Arc;

use fiec_policy::holds::Fate;
use fiec_schemas::programs::TileRange;
use fiec_schemas::scheduling::AfterOutcome;
use fiec_schemas::spread::Part;
use fiec_schemas::{
    BoundaryIndex, Event, EventKind, ExecutionId, ExecutionState, Phase, Submission,
};
use uuid::Uuid;

/// How many of an execution's last events are kept to be told.
const KEPT: usize = 24;
/// Most events of one message that are told.
const TOLD: usize = 4;

/// An execution. A million of them may live and have lived: small, and smaller once done.
#[derive(Debug)]
pub struct Exec {
    /// Which workload it is of.
    pub workload: u32,
    /// Whose, by number.
    pub tenant: u32,
    /// What was submitted; most share it with all others of their workload.
    pub spec: Arc<Submission>,
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
    /// Its program fails at its end.
    pub fails: bool,
    /// Sequence of its ledger's last message; 0 while there is none.
    pub seq: u64,
    /// The state after it, while it lives.
    pub state: Option<Box<ExecutionState>>,
    /// When it was first bound.
    pub first_bound: u64,
    /// What it waits for and since when, while it does.
    pub waits: Option<(Waits, u64)>,
    /// When it began to compute for the first time.
    pub began: u64,
    /// When it was done.
    pub done: u64,
    /// How it ended.
    pub fate: Option<Fate>,
    /// Under which epoch it is running, wherever that is believed.
    pub running: Option<(u32, u64)>,
    /// How often it gave way to others.
    pub preempted: u32,
    /// What holds it back, where anything does.
    pub held: Option<Box<Held>>,
    /// Its range, where that may be spread, or it is a part of one.
    pub tiles: Option<Box<Tiles>>,
    /// Its ledger ties it to a node.
    pub tied: bool,
    /// Its tenant's reservations have it.
    pub reserved: bool,
    /// The last things that happened to it.
    pub trace: Vec<Past>,
}

/// What an execution waits for that is not for others to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// To be bound.
    Pending,
    /// To be started.
    Bound,
    /// To go on where it is parked, or elsewhere.
    Parked,
    /// To be failed, since what it waits for has failed.
    Doomed,
}

impl Waits {
    /// All of them, each at its own number.
    pub const ALL: [Self; 4] = [Self::Pending, Self::Bound, Self::Parked, Self::Doomed];
}

/// What holds an execution back.
#[derive(Debug, Default)]
pub struct Held {
    /// Executions that have not ended, and how they must.
    pub after: Vec<(u32, AfterOutcome)>,
    /// One of those has ended otherwise.
    pub doomed: bool,
    /// Its gang, by number.
    pub gang: Option<u32>,
    /// Its batch of which only some run at once, by number.
    pub batch: Option<u32>,
}

/// A range of tiles, one a capsule, and how far it is done.
#[derive(Debug)]
pub struct Tiles {
    /// The id of a part, which follows from the split that has made it.
    pub id: Option<ExecutionId>,
    /// The execution that was submitted, by number.
    pub whole: u32,
    /// Of a part, its holder, by number.
    pub holder: Option<u32>,
    /// How many may compute the whole.
    pub up_to: u32,
    /// What it was given: the first tile, and the one behind the last.
    pub given: TileRange,
    /// By its last committed σ: the first tile that is not done.
    pub next: u64,
    /// By the same: the tile behind its last one.
    pub end: u64,
    /// When it last gave a part away.
    pub split_at: u64,
    /// Since when it waits for its last part, while it does.
    pub rests_since: u64,
}

impl Tiles {
    /// Of an execution that is submitted with so many.
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

    /// Of a part that one has given away.
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

/// Something that happened.
#[derive(Debug, Clone, Copy)]
pub struct Past {
    /// When, in microseconds.
    pub at: u64,
    /// The last committed boundary after it.
    pub boundary: BoundaryIndex,
    /// The epoch after it.
    epoch: u32,
    /// The node that it is tied to after it; none: `u32::MAX`.
    node: u32,
    /// The first events.
    what: [Option<EventKind>; TOLD],
}

impl Past {
    /// What a message says.
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

    /// In words; `name` of a node.
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

    /// Where it stands for ever, once it has ended.
    pub fn phase_at_end(&self) -> Option<Phase> {
        self.fate.map(|fate| match fate {
            Fate::Completed => Phase::Completed,
            Fate::Failed => Phase::Failed,
            Fate::Cancelled => Phase::Cancelled,
            Fate::Returned => Phase::Returned,
        })
    }

    /// True for a part of another one's range.
    pub fn is_part(&self) -> bool {
        self.tiles.as_ref().is_some_and(|t| t.holder.is_some())
    }

    /// Its gang, by number.
    pub fn gang(&self) -> Option<u32> {
        self.held.as_ref()?.gang
    }

    /// Its batch of which only some run at once, by number.
    pub fn batch(&self) -> Option<u32> {
        self.held.as_ref()?.batch
    }

    /// True while it waits for others, or never will be let go.
    pub fn is_held(&self) -> bool {
        let held = self.held.as_ref();
        held.is_some_and(|h| h.doomed || !h.after.is_empty())
    }
}

/// The id of the `number`-th execution, submitted so many milliseconds after the epoch.
pub fn id(number: u32, millis: u64) -> ExecutionId {
    let time = u128::from(millis & 0xffff_ffff_ffff) << 80;
    ExecutionId(Uuid::from_u128(
        time | (7 << 76) | (2 << 62) | u128::from(number),
    ))
}

/// The number in an id; none in that of a part, which follows from its split.
#[expect(clippy::cast_possible_truncation, reason = "the lowest 32 bits are it")]
pub fn number(id: ExecutionId) -> Option<u32> {
    let bits = id.0.as_u128();
    ((bits >> 76) & 0xf == 7).then_some(bits as u32)
}
