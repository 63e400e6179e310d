//! All places in the order in which an execution without a history would take them. One ranking is
//! kept for each profile in use, so that a choice reads few places.
//!
//! * A ranking is updated on use: it ranks the nodes again that have [changed](crate::lifecycle::cluster::changes)
//!   since.
//! * Between two changes of its node, a place can only become worse: a vector becomes stale, a
//!   proof expires, the queue of an idle node shrinks. So no stored rank is too low. A walk that
//!   ranks each place again when it meets it visits the places in their current order.
//!
//! A choice costs `c·log(places)`, with `c` the nodes changed since the last choice plus the
//! visited places. These are the chosen one, those listed as candidates, and those that the
//! execution's history excludes.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use fiec_schemas::NodeId;
use slotmap::SecondaryMap;

use super::filters::{View, reasons};
use super::{Search, score};
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::DeviceIx;
use crate::lifecycle::cluster::profile::ProfileIx;

/// Most places in all rankings. The ranking that was unused for longest is dropped first. A place
/// takes about 120 bytes.
const PLACES_LIMIT: usize = 1 << 19;

/// Rank of a place; less is better.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rank {
    /// It passes every filter. With its score.
    Open(f64),
    /// Only its current use by others is against it.
    Full,
    /// Another reason is against it.
    Closed,
}

impl Rank {
    /// The rank of a place under a question.
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

/// A place in the order: by rank, then by node name, then the host before devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub rank: Rank,
    pub node: NodeId,
    pub ix: NodeIx,
    pub at: Option<DeviceIx>,
}

impl Key {
    /// The key of a place under a question.
    pub fn of(view: &View<'_, '_>) -> Self {
        Self {
            rank: Rank::of(view),
            node: view.node.id.clone(),
            ix: view.ix,
            at: view.at,
        }
    }
}

/// The places of all joined nodes, in order.
#[derive(Debug, Default)]
pub(super) struct Ranking {
    order: BTreeSet<Key>,
    /// The same keys by node.
    nodes: SecondaryMap<NodeIx, Vec<Key>>,
    /// Buffer for the places of one node.
    scratch: Vec<Key>,
    /// Number of processed node changes.
    seen: u64,
    /// Serial number of its profile, because profile indices are reused.
    serial: u64,
    /// Time of its last use, as a count of questions.
    asked: u64,
}

impl Ranking {
    /// Number of places.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// True if no place of a node would do, even if others left.
    pub fn rules_out(&self, ix: NodeIx) -> bool {
        let known = self.nodes.get(ix);
        known.is_none_or(|keys| keys.iter().all(|key| matches!(key.rank, Rank::Closed)))
    }

    fn catch_up(&mut self, search: &Search<'_, '_>) {
        let changes = search.cluster.changed.nodes();
        match changes.since(self.seen) {
            Some(changed) => changed.for_each(|ix| self.look_at(search, ix)),
            None => self.look_at_all(search),
        }
        self.seen = changes.count();
    }

    fn look_at_all(&mut self, search: &Search<'_, '_>) {
        let nodes = search.cluster.keys().into_iter();
        self.nodes = nodes.map(|ix| (ix, keys(search, ix).collect())).collect();
        self.order = self.nodes.values().flatten().cloned().collect();
    }

    /// Ranks the places of a node again.
    fn look_at(&mut self, search: &Search<'_, '_>, ix: NodeIx) {
        let mut found = std::mem::take(&mut self.scratch);
        found.extend(keys(search, ix));
        let mut known = self.nodes.remove(ix).unwrap_or_default();
        if known != found {
            for key in &known {
                self.order.remove(key);
            }
            self.order.extend(found.iter().cloned());
            std::mem::swap(&mut known, &mut found);
        }
        if !known.is_empty() {
            self.nodes.insert(ix, known);
        }
        found.clear();
        self.scratch = found;
    }

    /// The next place after this one, in the current order.
    pub fn next(&mut self, search: &Search<'_, '_>, after: Option<&Key>) -> Option<Key> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        loop {
            let met = self.order.range((from, Bound::Unbounded)).next()?.clone();
            let now = Key::of(&search.view(met.ix, met.at));
            if now == met {
                return Some(met);
            }
            // It has become worse: move it to its current rank, where the walk meets it again.
            let mut known = self.nodes.get_mut(met.ix).into_iter().flatten();
            if let Some(key) = known.find(|key| key.at == met.at) {
                key.rank = now.rank;
            }
            self.order.remove(&met);
            self.order.insert(now);
        }
    }
}

/// The keys of a node's places; none before it has joined.
fn keys(search: &Search<'_, '_>, ix: NodeIx) -> impl Iterator<Item = Key> {
    let joined = search.cluster.node(ix).descriptor.is_some();
    let places = joined.then(|| search.places(ix).map(|place| Key::of(&place)));
    places.into_iter().flatten()
}

/// The rankings of all profiles in use.
#[derive(Debug, Default)]
pub struct Rankings {
    of: BTreeMap<ProfileIx, Ranking>,
    /// Number of questions so far.
    asked: u64,
}

impl Rankings {
    /// The up-to-date ranking for a question without a history.
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
