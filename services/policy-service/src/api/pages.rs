//! State of a batch request between two answers. An answer is a page: it takes a bounded time and
//! names a cursor, with which the next request continues. If a policy service does not know the
//! cursor, it reads the ledgers again. Executions that were changed before need no change then.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fiec_broker::last_messages::{KEPT, LastMessages};
use fiec_schemas::dependency::graph::{Graph, Vertex};
use fiec_schemas::dependency::{Group, Target};
use fiec_schemas::messages::{self, BatchReply, BatchVerb, Untaken};
use fiec_schemas::{BatchId, ClientId, ExecutionId, PhaseKind, Sequence, Tenant};

use crate::refusal::Refusal;

/// Most requests that are kept between two answers. A further one replaces the oldest.
const AT_ONCE: usize = 8;
/// Most executions that an answer names.
const NAMED: usize = 20;

/// Subject of a request. A cursor is valid for the same subject only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// The verb of the request.
    pub verb: BatchVerb,
    /// The tenant of the batch.
    pub tenant: Tenant,
    /// The batch, or another group.
    pub group: Group,
    /// For `retry`: what was cancelled stays so.
    pub failed: bool,
}

impl About {
    /// The batch.
    pub fn batch(&self) -> Option<BatchId> {
        match &self.group {
            Group::Batch(batch) => Some(*batch),
            Group::Array(_) | Group::Prefix(_) => None,
        }
    }

    /// True if the request leaves executions in this phase as they are.
    pub fn leaves_out(&self, phase: PhaseKind) -> bool {
        self.failed && phase == PhaseKind::Cancelled
    }
}

/// What a request has to do for an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Concern {
    /// The change.
    Change,
    /// Nothing: its worker has accepted the change before.
    Underway,
    /// Nothing: it has ended, or is in the requested state.
    Nothing,
}

/// An execution of the batch as its ledger showed it.
#[derive(Debug)]
pub struct Member {
    /// Sequence of its last message.
    pub seq: Sequence,
    /// Its phase.
    pub phase: PhaseKind,
    /// What the request has to do here.
    pub concern: Concern,
    /// Its client's id.
    pub id: Option<ClientId>,
    /// Its batch.
    pub batch: Option<BatchId>,
    /// Its dependencies.
    pub after: Vec<Target>,
}

/// Progress of a request about a batch.
pub struct Page {
    /// Its batch and its verb.
    pub about: About,
    /// Ledgers that are not read yet. `None` once all are read.
    pub unread: Option<LastMessages>,
    /// Executions of the batch that were read.
    pub members: HashMap<ExecutionId, Member>,
    /// Executions to change, level by level: a dependent comes before its dependencies.
    pub levels: VecDeque<VecDeque<ExecutionId>>,
    /// Number of executions in each phase.
    pub phases: BTreeMap<PhaseKind, u32>,
    /// Executions whose workers have accepted the request and not done it yet.
    pub underway: u32,
    /// Executions that the request does not concern.
    pub unconcerned: u32,
    /// Executions for which the change is not possible yet.
    pub later: u32,
    /// Number of failures, and the reasons of the first few.
    pub failed: (u32, Vec<Refusal>),
    /// Submissions that were queued when the request began.
    pub untaken: Option<Untaken>,
    /// The first few executions that failed, are held or were cancelled.
    pub ended_badly: Vec<messages::Member>,
}

impl Page {
    /// A page before the first read.
    pub fn new(about: About, unread: Option<LastMessages>, untaken: Option<Untaken>) -> Self {
        Self {
            about,
            unread,
            members: HashMap::new(),
            levels: VecDeque::new(),
            phases: BTreeMap::new(),
            underway: 0,
            unconcerned: 0,
            later: 0,
            failed: (0, Vec::new()),
            untaken,
            ended_badly: Vec::new(),
        }
    }

    /// Counts an execution under a phase.
    pub fn count(&mut self, phase: PhaseKind) {
        *self.phases.entry(phase).or_default() += 1;
    }

    /// True while the next request has something to do.
    pub fn goes_on(&self) -> bool {
        self.unread.is_some() || !self.levels.is_empty()
    }

    /// The answer so far. `done`: executions that this answer changed.
    pub fn reply(&self, done: u32) -> BatchReply {
        let left = self.levels.iter().map(VecDeque::len).sum::<usize>();
        let mut phases = self.phases.clone();
        for id in self.levels.iter().flatten() {
            if let Some(member) = self.members.get(id) {
                *phases.entry(member.phase).or_default() += 1;
            }
        }
        BatchReply {
            batch: self.about.batch(),
            phases,
            done,
            underway: self.underway,
            unconcerned: self.unconcerned,
            failed: self.failed.0,
            left: u32::try_from(left).unwrap_or(u32::MAX) + self.later,
            unread: self.unread.as_ref().map_or(0, LastMessages::remaining),
            untaken: self.untaken,
            ended_badly: self.ended_badly.clone(),
            reasons: self.failed.1.iter().map(Refusal::to_string).collect(),
            ..BatchReply::default()
        }
    }

    /// Orders the executions to change, after all ledgers are read.
    pub fn arrange(&mut self) {
        let changes = self.about.verb != BatchVerb::Status;
        if !changes {
            self.name_who_ended_badly();
        }
        for member in self.members.values() {
            match member.concern {
                Concern::Change => continue,
                Concern::Underway => self.underway += 1,
                Concern::Nothing => self.unconcerned += u32::from(changes),
            }
            *self.phases.entry(member.phase).or_default() += 1;
        }
        self.members
            .retain(|_, member| member.concern == Concern::Change);
        self.levels = in_order(&self.members);
        if self.about.verb == BatchVerb::Retry {
            // What waits for another one would fail again, had that not started again before.
            self.levels.make_contiguous().reverse();
        }
    }
}

impl Page {
    fn name_who_ended_badly(&mut self) {
        let is_bad = |phase| {
            matches!(
                phase,
                PhaseKind::Failed | PhaseKind::Held | PhaseKind::Cancelled
            )
        };
        let all = self.members.iter();
        let mut bad: Vec<_> = all.filter(|(_, member)| is_bad(member.phase)).collect();
        bad.sort_unstable_by_key(|(_, member)| member.seq);
        let first = bad.into_iter().take(NAMED);
        let named = first.map(|(id, member)| messages::Member {
            id: *id,
            client_id: member.id.clone(),
            phase: member.phase,
        });
        self.ended_badly = named.collect();
    }
}

/// Executions in levels, dependents before their dependencies. So no execution fails or starts
/// because its dependency was changed first.
fn in_order(members: &HashMap<ExecutionId, Member>) -> VecDeque<VecDeque<ExecutionId>> {
    // By ledger sequence, so that the first submission is reached first.
    let mut sorted: Vec<_> = members.iter().collect();
    sorted.sort_unstable_by_key(|(_, member)| member.seq);
    let vertex = |(place, (id, member)): (usize, &(&ExecutionId, &Member))| Vertex {
        place,
        execution: Some(**id),
        id: member.id.clone(),
        batch: member.batch,
        after: member.after.clone(),
    };
    let vertices: Vec<_> = (0..).zip(&sorted).map(vertex).collect();
    let graph = Graph::of(sorted.len(), &vertices);
    // A submission without a circle was taken in, so nothing is left over.
    let (order, _) = graph.sorted();
    let mut level: HashMap<usize, usize> = HashMap::new();
    let mut levels: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for at in order.into_iter().rev() {
        let own = level.get(&at).copied().unwrap_or(0);
        // A group is no step of its own.
        let theirs = own + usize::from(!graph.is_group(at));
        for needed in graph.needs(at) {
            let level = level.entry(needed).or_default();
            *level = theirs.max(*level);
        }
        if !graph.is_group(at) {
            levels.entry(own).or_default().insert(at);
        }
    }
    let ids = levels.into_values().map(|places| {
        let ids = places.into_iter().filter_map(|place| sorted.get(place));
        ids.map(|(id, _)| **id).collect()
    });
    ids.collect()
}

#[derive(Default)]
struct Kept {
    last: u64,
    pages: BTreeMap<u64, (Instant, Page)>,
}

/// Pages kept between two answers. Cheap to clone.
#[derive(Clone, Default)]
pub struct Pages(Arc<Mutex<Kept>>);

impl Pages {
    /// Takes the page of a cursor, unless the cursor has another subject or is unknown here.
    pub fn take(&self, cursor: &str, own: &str, about: &About) -> Option<Page> {
        let number = cursor.strip_prefix(own)?.strip_prefix('/')?.parse().ok()?;
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, page) = kept.pages.remove(&number)?;
        (page.about == *about).then_some(page)
    }

    /// Keeps the page for the next request, which names the returned cursor.
    pub fn keep(&self, page: Page, own: &str) -> String {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.pages.retain(|_, (since, _)| since.elapsed() < KEPT);
        while kept.pages.len() >= AT_ONCE {
            kept.pages.pop_first();
        }
        kept.last += 1;
        let number = kept.last;
        kept.pages.insert(number, (Instant::now(), page));
        format!("{own}/{number}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> ExecutionId {
        ExecutionId(uuid::Uuid::from_u128(number))
    }

    fn members(of: &[(u128, &[u128])]) -> HashMap<ExecutionId, Member> {
        let member = |(seq, (number, after)): (u64, &(u128, &[u128]))| {
            let member = Member {
                seq,
                phase: PhaseKind::Pending,
                concern: Concern::Change,
                id: None,
                batch: None,
                after: after.iter().copied().map(id).map(Target::One).collect(),
            };
            (id(*number), member)
        };
        (1..).zip(of).map(member).collect()
    }

    #[test]
    fn what_waits_for_others_comes_before_them_and_else_the_oldest_first() {
        // 3 depends on 1 and 2, 2 depends on 1, 4 depends on an unknown execution.
        let all = members(&[(1, &[]), (2, &[1]), (3, &[1, 2]), (4, &[9])]);
        let levels = in_order(&all);
        let expected = [vec![id(3), id(4)], vec![id(2)], vec![id(1)]];
        assert_eq!(levels, expected.map(VecDeque::from));
    }

    #[test]
    fn a_cursor_is_good_once_and_for_the_same_request_only() {
        let about = |verb| About {
            verb,
            failed: false,
            tenant: "lab".parse().unwrap(),
            group: Group::Batch(BatchId(uuid::Uuid::nil())),
        };
        let pages = Pages::default();
        let keep = || pages.keep(Page::new(about(BatchVerb::Cancel), None, None), "me");
        let cursor = keep();
        assert!(
            pages
                .take(&cursor, "other", &about(BatchVerb::Cancel))
                .is_none()
        );
        assert!(
            pages
                .take("me/x", "me", &about(BatchVerb::Cancel))
                .is_none()
        );
        assert!(
            pages
                .take(&cursor, "me", &about(BatchVerb::Cancel))
                .is_some()
        );
        assert!(
            pages
                .take(&cursor, "me", &about(BatchVerb::Cancel))
                .is_none()
        );
        assert!(
            pages
                .take(&keep(), "me", &about(BatchVerb::Pause))
                .is_none()
        );
        // The oldest page is replaced.
        let first = keep();
        for _ in 0..AT_ONCE {
            keep();
        }
        assert!(
            pages
                .take(&first, "me", &about(BatchVerb::Cancel))
                .is_none()
        );
    }
}
