//! All places in the order in which an execution without a history would take them, kept for each
//! profile that is asked for, so that a choice looks at few of them.
//!
//! * A ranking is brought up to date when it is asked: it looks again at the nodes that were
//!   [changed](crate::changes) since.
//! * Between two changes of its node a place can only become worse as time passes: a vector grows
//!   stale, a proof expires, a node that completes nothing is given less ahead. So no rank that is
//!   kept is too low, and who goes down the order and looks again at each place that it meets finds
//!   the places in the order of this very moment.
//!
//! One choice costs `c·log(places)` for the `c` nodes changed since the last one and the places
//! that are met: the chosen one, those told as candidates, and those that this execution's own
//! history rules out.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use fiec_schemas::NodeId;

use super::filters::{View, reasons};
use super::{Search, score};
use crate::cluster::NodeIx;
use crate::places::DeviceIx;
use crate::profile::ProfileIx;

/// At most so many places are kept in all rankings; what was asked for longest ago is forgotten
/// first. A place takes about 120 bytes.
const PLACES_LIMIT: usize = 1 << 19;

/// How a place stands; less is better.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rank {
    /// Everything speaks for it; with its score.
    Open(f64),
    /// Only what others take at the moment speaks against it.
    Full,
    /// Something else does.
    Closed,
}

impl Rank {
    /// How a place stands under a question.
    pub fn of(view: &View<'_, '_>) -> Self {
        match reasons(view).next() {
            None => Rank::Open(score::score(view)),
            Some(reason) if reason.is_only_full() => Rank::Full,
            Some(_) => Rank::Closed,
        }
    }
}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        let class = |rank: &Self| match rank {
            Rank::Open(_) => 0,
            Rank::Full => 1,
            Rank::Closed => 2,
        };
        match (self, other) {
            (Rank::Open(a), Rank::Open(b)) => b.total_cmp(a),
            _ => class(self).cmp(&class(other)),
        }
    }
}
impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Rank {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Rank {}

/// A place in the order: by rank, then by the name of its node, then the host before devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub rank: Rank,
    pub node: NodeId,
    pub ix: NodeIx,
    pub at: Option<DeviceIx>,
}

impl Key {
    /// The place under a question.
    pub fn of(view: &View<'_, '_>) -> Self {
        Self {
            rank: Rank::of(view),
            node: view.node.id.clone(),
            ix: view.ix,
            at: view.at,
        }
    }
}

/// The places of all nodes that have joined, in order.
#[derive(Debug, Default)]
pub(super) struct Ranking {
    order: BTreeSet<Key>,
    /// The same by node.
    nodes: Vec<Vec<Key>>,
    /// The places of one node, while it is looked at.
    scratch: Vec<Key>,
    /// How many changes of nodes were taken in.
    seen: u64,
    /// Which of all profiles that have had this index it is of.
    serial: u64,
    /// When it was asked last.
    asked: u64,
}

impl Ranking {
    /// How many places there are.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// True where no place of a node would do, whoever made room there.
    pub fn rules_out(&self, ix: NodeIx) -> bool {
        let known = self.nodes.get(ix.0 as usize);
        known.is_none_or(|keys| keys.iter().all(|key| matches!(key.rank, Rank::Closed)))
    }

    fn catch_up(&mut self, search: &Search<'_, '_>) {
        let changes = &search.cluster.changes;
        match changes.since(self.seen) {
            Some(changed) => changed.for_each(|ix| self.look_at(search, ix)),
            None => self.look_at_all(search),
        }
        self.seen = changes.count();
    }

    fn look_at_all(&mut self, search: &Search<'_, '_>) {
        let nodes = (0..search.cluster.node_count()).map(NodeIx);
        self.nodes = nodes.map(|ix| keys(search, ix).collect()).collect();
        self.order = self.nodes.iter().flatten().cloned().collect();
    }

    /// Ranks the places of a node anew.
    fn look_at(&mut self, search: &Search<'_, '_>, ix: NodeIx) {
        let at = ix.0 as usize;
        if self.nodes.len() <= at {
            self.nodes.resize_with(at + 1, Vec::new);
        }
        let mut found = std::mem::take(&mut self.scratch);
        found.extend(keys(search, ix));
        let known = &mut self.nodes[at];
        if *known != found {
            for key in known.iter() {
                self.order.remove(key);
            }
            self.order.extend(found.iter().cloned());
            std::mem::swap(known, &mut found);
        }
        found.clear();
        self.scratch = found;
    }

    /// The first place after this one in the order of this moment.
    pub fn next(&mut self, search: &Search<'_, '_>, after: Option<&Key>) -> Option<Key> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        loop {
            let met = self.order.range((from, Bound::Unbounded)).next()?.clone();
            let now = Key::of(&search.view(met.ix, met.at));
            if now == met {
                return Some(met);
            }
            // It became worse as time passed: it is met again where it belongs now.
            let known = &mut self.nodes[met.ix.0 as usize];
            if let Some(key) = known.iter_mut().find(|key| key.at == met.at) {
                key.rank = now.rank;
            }
            self.order.remove(&met);
            self.order.insert(now);
        }
    }
}

/// The places of a node as they stand; none while it has not joined.
fn keys(search: &Search<'_, '_>, ix: NodeIx) -> impl Iterator<Item = Key> {
    let joined = search.cluster.node(ix).descriptor.is_some();
    let places = joined.then(|| search.places(ix).map(|place| Key::of(&place)));
    places.into_iter().flatten()
}

/// The rankings of the profiles that were asked for.
#[derive(Debug, Default)]
pub struct Rankings {
    of: BTreeMap<ProfileIx, Ranking>,
    /// How often anything was asked.
    asked: u64,
}

impl Rankings {
    /// The ranking for a question by an execution without a history, up to date.
    pub(super) fn of(&mut self, search: &Search<'_, '_>) -> &mut Ranking {
        let (profiles, ix) = (&search.cluster.profiles, search.ask.profile);
        let serial = profiles.serial(ix).unwrap_or(0);
        if self.of.get(&ix).is_none_or(|r| r.serial != serial) {
            self.of
                .retain(|ix, r| profiles.serial(*ix) == Some(r.serial));
            self.make_room(search.cluster.node_count() as usize);
        }
        self.asked += 1;
        let ranking = self.of.entry(ix).or_default();
        (ranking.serial, ranking.asked) = (serial, self.asked);
        ranking.catch_up(search);
        ranking
    }

    fn make_room(&mut self, places: usize) {
        let mut kept: usize = self.of.values().map(Ranking::len).sum();
        while kept + places > PLACES_LIMIT
            && let Some((ix, ranking)) = self.of.iter().min_by_key(|(_, r)| r.asked)
        {
            kept -= ranking.len();
            let ix = *ix;
            self.of.remove(&ix);
        }
    }
}
