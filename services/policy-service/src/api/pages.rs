//! Requests about whole batches, between one answer and the next. An answer is a page: it
//! takes a bounded time and names a cursor, by which the next request goes on where it ended.
//! Another policy service, or this one after a while, does not know the cursor and looks at the
//! ledgers anew: what was done before no longer concerns the request then.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::pull;
use fiec_schemas::messages::{BatchReply, BatchVerb, Untaken};
use fiec_schemas::{BatchId, ExecutionId, PhaseKind, Sequence, Tenant};

use crate::refusal::Refusal;

/// Requests that may be between two answers. The oldest is given up for another one.
const AT_ONCE: usize = 8;
/// Nobody asks for the next answer after this.
pub const KEPT: Duration = Duration::from_secs(60);

/// What a cursor must be used for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// What is asked.
    pub verb: BatchVerb,
    /// Whose.
    pub tenant: Tenant,
    /// Which batch.
    pub batch: BatchId,
}

/// An execution of the batch as its ledger showed it.
#[derive(Debug)]
pub struct Member {
    /// Sequence of its last message.
    pub seq: Sequence,
    /// Its phase.
    pub phase: PhaseKind,
    /// True where something remains to be done.
    pub concerned: bool,
    /// The executions that it waits for.
    pub after: Vec<ExecutionId>,
}

/// How far a request about a batch has come.
pub struct Page {
    /// Its batch and its verb.
    pub about: About,
    /// The ledgers that are not read yet; none once all are.
    pub unread: Option<Unread>,
    /// Its executions that were read.
    pub members: HashMap<ExecutionId, Member>,
    /// What is to be changed, level by level: what waits for others before those.
    pub levels: VecDeque<VecDeque<ExecutionId>>,
    /// How many are in each phase.
    pub phases: BTreeMap<PhaseKind, u32>,
    /// Those that the request does not concern.
    pub unconcerned: u32,
    /// Those for which it cannot be done yet.
    pub later: u32,
    /// Those for which it failed, and why for the first few.
    pub failed: (u32, Vec<Refusal>),
    /// What had not been taken in when it began.
    pub untaken: Option<Untaken>,
}

/// The last messages of a tenant's ledgers.
pub struct Unread {
    /// They come by this.
    pub messages: pull::Stream,
    /// How many there are still.
    pub count: u64,
}

impl Page {
    /// Nothing is read yet.
    pub fn new(about: About, unread: Option<Unread>, untaken: Option<Untaken>) -> Self {
        Self {
            about,
            unread,
            members: HashMap::new(),
            levels: VecDeque::new(),
            phases: BTreeMap::new(),
            unconcerned: 0,
            later: 0,
            failed: (0, Vec::new()),
            untaken,
        }
    }

    /// Counts an execution under a phase.
    pub fn count(&mut self, phase: PhaseKind) {
        *self.phases.entry(phase).or_default() += 1;
    }

    /// True while there is something to do for another request.
    pub fn goes_on(&self) -> bool {
        self.unread.is_some() || !self.levels.is_empty()
    }

    /// The answer so far, where so many were changed for it.
    pub fn reply(&self, done: u32) -> BatchReply {
        let left = self.levels.iter().map(VecDeque::len).sum::<usize>();
        let mut phases = self.phases.clone();
        for id in self.levels.iter().flatten() {
            if let Some(member) = self.members.get(id) {
                *phases.entry(member.phase).or_default() += 1;
            }
        }
        BatchReply {
            batch: Some(self.about.batch),
            phases,
            done,
            unconcerned: self.unconcerned,
            failed: self.failed.0,
            left: u32::try_from(left).unwrap_or(u32::MAX) + self.later,
            unread: self.unread.as_ref().map_or(0, |unread| unread.count),
            untaken: self.untaken,
            reasons: self.failed.1.iter().map(Refusal::to_string).collect(),
            ..BatchReply::default()
        }
    }

    /// Once all is read: what is to be changed, in order.
    pub fn arrange(&mut self) {
        for member in self.members.values() {
            if !member.concerned {
                *self.phases.entry(member.phase).or_default() += 1;
                let counts = self.about.verb != BatchVerb::Status;
                self.unconcerned += u32::from(counts);
            }
        }
        self.members.retain(|_, member| member.concerned);
        self.levels = in_order(&self.members);
    }
}

/// In levels, what waits for others before those: so that nothing fails, or starts, because of what
/// is done to the ones that it waits for.
fn in_order(members: &HashMap<ExecutionId, Member>) -> VecDeque<VecDeque<ExecutionId>> {
    let mut waiters: HashMap<ExecutionId, usize> = HashMap::new();
    for other in members.values().flat_map(|member| &member.after) {
        if members.contains_key(other) {
            *waiters.entry(*other).or_default() += 1;
        }
    }
    let mut level: HashMap<ExecutionId, usize> = HashMap::new();
    let ids = members.keys().copied();
    let mut free: Vec<_> = ids.filter(|id| !waiters.contains_key(id)).collect();
    let mut levels: BTreeMap<usize, Vec<ExecutionId>> = BTreeMap::new();
    while let Some(id) = free.pop() {
        let own = level.get(&id).copied().unwrap_or(0);
        levels.entry(own).or_default().push(id);
        for other in members
            .get(&id)
            .into_iter()
            .flat_map(|member| &member.after)
        {
            let Some(left) = waiters.get_mut(other) else {
                continue;
            };
            let theirs = level.entry(*other).or_default();
            *theirs = (*theirs).max(own + 1);
            *left -= 1;
            if *left == 0 {
                free.push(*other);
            }
        }
    }
    // In order of their ledgers, so that what was submitted first is reached first.
    let sorted = levels.into_values().map(|mut ids| {
        ids.sort_unstable_by_key(|id| members.get(id).map(|member| member.seq));
        ids.into()
    });
    sorted.collect()
}

#[derive(Default)]
struct Kept {
    last: u64,
    pages: BTreeMap<u64, (Instant, Page)>,
}

/// The requests that are between two answers; cheap to clone.
#[derive(Clone, Default)]
pub struct Pages(Arc<Mutex<Kept>>);

impl Pages {
    /// Takes what a cursor stands for, unless it is for something else, or not known here.
    pub fn take(&self, cursor: &str, own: &str, about: &About) -> Option<Page> {
        let number = cursor.strip_prefix(own)?.strip_prefix('/')?.parse().ok()?;
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, page) = kept.pages.remove(&number)?;
        (page.about == *about).then_some(page)
    }

    /// Keeps it for the next request, which names this cursor.
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
                concerned: true,
                after: after.iter().copied().map(id).collect(),
            };
            (id(*number), member)
        };
        (1..).zip(of).map(member).collect()
    }

    #[test]
    fn what_waits_for_others_comes_before_them_and_else_the_oldest_first() {
        // 3 waits for 1 and 2, 2 for 1, 4 for what is not there.
        let all = members(&[(1, &[]), (2, &[1]), (3, &[1, 2]), (4, &[9])]);
        let levels = in_order(&all);
        let expected = [vec![id(3), id(4)], vec![id(2)], vec![id(1)]];
        assert_eq!(levels, expected.map(VecDeque::from));
    }

    #[test]
    fn a_cursor_is_good_once_and_for_the_same_request_only() {
        let about = |verb| About {
            verb,
            tenant: "lab".parse().unwrap(),
            batch: BatchId(uuid::Uuid::nil()),
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
        // The oldest gives way.
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
