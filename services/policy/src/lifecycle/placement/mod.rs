//! The choice of a place: filters, then a score. A place is a node's host or one of its devices;
//! the submission decides which of them count. Every verdict is kept for explanations.
//!
//! Filters, in the order in which people read them: the place is wanted; the node is present; it is
//! neither cordoned nor draining; it offers the program and can start it; the node and the device meet the
//! submission's requirements; the numeric contract is proved; the place is viable under the
//! execution's thresholds, by the readings of the device and its host; the execution did not leave
//! it for pressure, or the place has recovered; node and device have capacity.
//!
//! The score is in [`score`]. Ties go to the name that sorts first, and on one node to the host.
//! Places are kept in this order for each profile ([`ranking`]), so that a choice reads few of
//! them: the first one that passes every filter is the best.
//!
//! A decision lists the chosen place, then others in the order of [`ranking`]: open places, full
//! ones, and the rest by name. Each has the reasons against it for this execution. Beyond
//! [`CANDIDATES_LIMIT`] places, they are only counted.

mod filters;
pub mod kept;
mod ranking;
mod reason;
mod score;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use fiec_schemas::limits::CANDIDATES_LIMIT;
use fiec_schemas::messages::Remedy;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Candidate, Decision, Timestamp};

use self::filters::{View, reasons};
pub(crate) use self::filters::{free_bytes, offered_memory};
pub use self::ranking::Rankings;
use self::ranking::{Key, Rank, Ranking};
pub(crate) use self::reason::{NAMES, Operators};
use crate::config::Config;
use crate::lifecycle::cluster::execution::Avoided;
use crate::lifecycle::cluster::places::{Claim, DeviceIx, Wants};
use crate::lifecycle::cluster::profile::{Profile, ProfileIx};
use crate::lifecycle::cluster::{Cluster, Execution, NodeIx, Presence};
use crate::lifecycle::placement::kept::KeptPlaces;
use crate::time::Now;

/// A place or node that the execution must leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// A node with all its places.
    Node(NodeIx),
    /// One place of a node; its other places are allowed.
    Place(NodeIx, Option<DeviceIx>),
}

/// A question to placement.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The execution's profile.
    pub profile: ProfileIx,
    /// Nodes that it left because of pressure.
    pub left: Vec<(NodeIx, Timestamp)>,
    /// The node or place that it must leave.
    pub leaving: Option<Leaving>,
    /// Nodes to avoid for a while.
    pub avoid: Vec<Avoided>,
    /// Nodes with other executions under which workers end, too.
    pub apart: Vec<NodeIx>,
    /// The only allowed node.
    pub only: Option<NodeIx>,
    /// Places that are reserved for others.
    pub kept: Option<Arc<KeptPlaces>>,
    /// True if a free slot is required, not a place in a node's queue.
    pub free_slot: bool,
    /// The node whose counts include the execution already, and its claim there that is not
    /// counted. This is the node of a lost instance, or of a place that it leaves.
    pub counted: Option<(NodeIx, Claim)>,
    /// True if a place under pressure shorter than the dwell is allowed.
    pub takes_suspects: bool,
}

impl Ask {
    /// A question for an execution with its own history.
    pub fn of(e: &Execution) -> Self {
        Self {
            left: e.left().to_vec(),
            avoid: e.avoided().to_vec(),
            ..Self::new(e.profile)
        }
    }

    /// A question with no other restriction.
    pub fn new(profile: ProfileIx) -> Self {
        Self {
            profile,
            left: Vec::new(),
            leaving: None,
            avoid: Vec::new(),
            apart: Vec::new(),
            only: None,
            kept: None,
            free_slot: false,
            counted: None,
            takes_suspects: false,
        }
    }

    /// True if only the profile matters.
    fn is_plain(&self) -> bool {
        let nowhere = self.left.is_empty() && self.avoid.is_empty() && self.leaving.is_none();
        let anywhere = self.only.is_none() && self.kept.is_none() && self.apart.is_empty();
        let usual = self.counted.is_none() && !self.free_slot && !self.takes_suspects;
        nowhere && anywhere && usual
    }

    /// The same for an execution that leaves a place. If it leaves one of several places of a node,
    /// it keeps its slot there.
    #[must_use]
    pub fn leaves(mut self, leaving: Option<Leaving>) -> Self {
        self.leaving = leaving;
        if let Some(Leaving::Place(node, _)) = leaving {
            self.counted = Some((node, Claim::Host));
        }
        self
    }
}

/// Joins remedies that are all necessary.
const AND: &str = ", and ";

/// The chosen place.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The node.
    pub node: NodeIx,
    /// Its device, or its host if none.
    pub device: Option<DeviceIx>,
    /// The decision for the record.
    pub decision: Decision,
}

/// The verdicts on all places, for people.
#[derive(Debug, Clone, Default)]
pub struct Review {
    /// Every place.
    pub candidates: Vec<Candidate>,
    /// Changes that would help.
    pub would_help: Vec<String>,
    /// Requests among these changes.
    pub requests: Vec<Remedy>,
    /// True if no node that there is can ever take it.
    pub is_lasting: bool,
}

impl Review {
    /// Adds a request, once, up to [`NAMES`] of them.
    fn request(&mut self, request: Remedy) {
        if self.requests.len() < NAMES && !self.requests.contains(&request) {
            self.requests.push(request);
        }
    }
}

/// One question to all places.
#[derive(Clone, Copy)]
struct Search<'a, 'b> {
    cluster: &'a Cluster,
    profile: &'a Profile,
    wants: Wants,
    /// True if the profile has preferences.
    prefers: bool,
    config: &'b Config,
    now: Now,
    ask: &'b Ask,
}

impl<'a, 'b> Search<'a, 'b> {
    fn new(cluster: &'a Cluster, config: &'b Config, now: Now, ask: &'b Ask) -> Option<Self> {
        let profile = cluster.profiles.get(ask.profile)?;
        Some(Self {
            cluster,
            profile,
            wants: Wants::of(profile),
            prefers: !profile.prefers.is_empty(),
            config,
            now,
            ask,
        })
    }

    fn views(&self) -> impl Iterator<Item = View<'a, 'b>> + use<'_, 'a, 'b> {
        let nodes = self.cluster.nodes();
        nodes.flat_map(move |(ix, _)| self.places(ix))
    }

    /// The places of a node that count for the profile.
    fn places(&self, ix: NodeIx) -> impl Iterator<Item = View<'a, 'b>> + use<'_, 'a, 'b> {
        let places = self.cluster.node(ix).devices.places(self.wants);
        places.map(move |at| self.view(ix, at))
    }

    fn view(&self, ix: NodeIx, at: Option<DeviceIx>) -> View<'a, 'b> {
        View {
            node: self.cluster.node(ix),
            ix,
            at,
            profile: self.profile,
            prefers: self.prefers,
            config: self.config,
            now: self.now,
            ask: self.ask,
        }
    }

    fn candidate(&self, view: &View<'a, 'b>) -> Candidate {
        let Some(rejected) = reasons(view).next() else {
            return self.open(view, score::score(view));
        };
        Candidate {
            node: view.node.id.clone(),
            substrate: self.substrate(view),
            score: None,
            rejected: vec![rejected.in_words(view.node, self.now.mono)],
        }
    }

    /// A place that passes every filter.
    fn open(&self, view: &View<'a, 'b>, score: f64) -> Candidate {
        Candidate {
            node: view.node.id.clone(),
            substrate: self.substrate(view),
            score: Some((score * 1_000.0).round() / 1_000.0),
            rejected: Vec::new(),
        }
    }

    /// The substrate, stated if the node offers a choice.
    fn substrate(&self, view: &View<'a, 'b>) -> Option<String> {
        match (view.device(), self.wants) {
            (Some(device), _) => Some(device.id.to_string()),
            (None, Wants::Either) => Some(HOST.to_owned()),
            (None, _) => None,
        }
    }
}

/// Chooses the best place, if one is acceptable.
pub fn choose(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    ask: &Ask,
) -> Option<Choice> {
    let plain = Ask::new(ask.profile);
    let anybody = Search::new(cluster, config, now, &plain)?;
    let search = Search { ask, ..anybody };
    let ranking = rankings.of(&anybody);
    let chosen = best(&search, &anybody, ranking)?;
    let mut candidates = Vec::with_capacity(ranking.len().min(CANDIDATES_LIMIT));
    candidates.push(search.candidate(&search.view(chosen.ix, chosen.at)));
    let mut last = None;
    while candidates.len() < CANDIDATES_LIMIT
        && let Some(key) = ranking.next(&anybody, last.as_ref())
    {
        if (key.ix, key.at) != (chosen.ix, chosen.at) {
            let view = search.view(key.ix, key.at);
            candidates.push(match key.rank {
                // The ranking's verdict counts if the execution has no restriction of its own.
                Rank::Open(score) if ask.is_plain() => search.open(&view, score),
                _ => search.candidate(&view),
            });
        }
        last = Some(key);
    }
    let omitted = u32::try_from(ranking.len() - candidates.len()).unwrap_or(u32::MAX);
    Some(Choice {
        node: chosen.ix,
        device: chosen.at,
        decision: Decision {
            candidates,
            omitted,
            entrusted: None,
        },
    })
}

/// Chooses a place for an execution that an operator moves. Without a viable place, it takes the
/// first one whose pressure has not lasted for the dwell. The operator knows more than one reading,
/// and lasting pressure moves the execution on.
pub fn choose_for_operator(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    ask: &Ask,
) -> Option<Choice> {
    let viable = choose(rankings, cluster, config, now, ask);
    viable.or_else(|| {
        let mut ask = Ask {
            takes_suspects: true,
            ..ask.clone()
        };
        let does = |ix: &NodeIx| would_do(cluster, config, now, &ask, *ix);
        let mut nodes = cluster.nodes().map(|(ix, _)| ix);
        ask.only = Some(ask.only.or_else(|| nodes.find(does))?);
        choose(rankings, cluster, config, now, &ask)
    })
}

/// For each of these nodes, whether an execution of this profile could run there if others left. It
/// ignores restrictions of a single execution.
pub fn could_be(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
    nodes: impl Iterator<Item = NodeIx>,
) -> Vec<bool> {
    let plain = Ask::new(profile);
    let Some(anybody) = Search::new(cluster, config, now, &plain) else {
        return nodes.map(|_| false).collect();
    };
    let ranking = rankings.of(&anybody);
    nodes.map(|ix| !ranking.rules_out(ix)).collect()
}

/// True if a place of this node passes the filters. It costs no more than the filters.
pub fn would_do(cluster: &Cluster, config: &Config, now: Now, ask: &Ask, node: NodeIx) -> bool {
    let search = Search::new(cluster, config, now, ask);
    let does = |place: View<'_, '_>| reasons(&place).next().is_none();
    search.is_some_and(|search| search.places(node).any(does))
}

/// The first place of the ranking that this execution may have.
fn best(search: &Search<'_, '_>, anybody: &Search<'_, '_>, ranking: &mut Ranking) -> Option<Key> {
    let ask = search.ask;
    // The execution's own use of a node is room that the ranking does not see.
    let apart = ask.only.or(ask.counted.map(|(ix, _)| ix));
    let places = apart.into_iter().flat_map(|ix| search.places(ix));
    let keys = places.map(|place| Key::of(&place));
    let found = keys.filter(|key| matches!(key.rank, Rank::Open(_))).min();
    if ask.only.is_some() {
        return found;
    }
    let mut last = None;
    while let Some(key) = ranking.next(anybody, last.as_ref()) {
        let place = search.view(key.ix, key.at);
        let open = matches!(key.rank, Rank::Open(_));
        // The ranking has all places with a free slot before those without.
        let useless = ask.free_slot && place.node.held() >= place.node.slots();
        if !open || useless || found.as_ref().is_some_and(|found| *found < key) {
            break;
        }
        if reasons(&place).next().is_none() {
            return Some(key);
        }
        last = Some(key);
    }
    found
}

/// True if a node lacks only capacity for an execution without a history. The caller has already
/// ruled out open places.
pub fn would_take_with_room(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
) -> bool {
    let plain = Ask::new(profile);
    let Some(anybody) = Search::new(cluster, config, now, &plain) else {
        return false;
    };
    let ranking = rankings.of(&anybody);
    ranking
        .next(&anybody, None)
        .is_some_and(|first| matches!(first.rank, Rank::Full))
}

/// All places for this profile on an empty cluster, best first: the open places, and those that are
/// only full.
pub fn but_for_room(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
) -> Vec<(NodeIx, Option<DeviceIx>)> {
    let plain = Ask::new(profile);
    let Some(anybody) = Search::new(cluster, config, now, &plain) else {
        return Vec::new();
    };
    let ranking = rankings.of(&anybody);
    let (mut places, mut last) = (Vec::new(), None);
    while let Some(key) = ranking.next(&anybody, last.as_ref())
        && !matches!(key.rank, Rank::Closed)
    {
        places.push((key.ix, key.at));
        last = Some(key);
    }
    places
}

/// The degree to which a place meets a profile's preferences, in [0, 1].
pub fn preference(
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
    (node, device): (NodeIx, Option<DeviceIx>),
) -> Option<f64> {
    let ask = Ask::new(profile);
    let search = Search::new(cluster, config, now, &ask)?;
    Some(score::met(&search.view(node, device)))
}

/// Time after which a node that has left, or is lost, is no longer mentioned, in ms.
const GONE_MS: u64 = 10 * 60_000;

/// True for a node that has been away for [`GONE_MS`] and that the question does not name.
fn is_long_gone(view: &View<'_, '_>) -> bool {
    let (node, ask) = (view.node, view.ask);
    let away_since = match (node.presence, &node.descriptor) {
        (Presence::Lost { since }, _) => since,
        (_, None) => node.heard,
        (_, Some(_)) => return false,
    };
    let left = match ask.leaving {
        Some(Leaving::Node(ix) | Leaving::Place(ix, _)) => Some(ix),
        None => None,
    };
    let named =
        [left, ask.only].contains(&Some(view.ix)) || view.profile.requires.nodes.contains(&node.id);
    !named && view.now.mono.since(away_since) > GONE_MS
}

/// All verdicts, and what would help. It skips a node that left long ago, unless the execution is
/// there or names it.
pub fn review(
    cluster: &Cluster,
    config: &Config,
    now: Now,
    ask: &Ask,
    operators: Option<Operators<'_>>,
) -> Review {
    let Some(search) = Search::new(cluster, config, now, ask) else {
        return Review::default();
    };
    let mut review = Review::default();
    // The command that lifts what operators restrict, if a place needs nothing else.
    let mut lifts = None;
    // Nodes that the submission itself rules out.
    let mut unfit = Vec::new();
    let mut lasts = true;
    for view in search.views().filter(|view| !is_long_gone(view)) {
        let mut found = search.candidate(&view);
        if found.score.is_none() {
            // If there are several obstacles, all of them must change.
            let (mut rejected, mut remedies, mut lifted) = (Vec::new(), Vec::new(), None);
            let mut lasts_here = false;
            for reason in reasons(&view) {
                let ruled_out = operators.and_then(|by| Some((by, by.in_words(reason)?)));
                if let Some((by, words)) = ruled_out {
                    rejected.push(words);
                    lifted = Some(by.remedy());
                    review.request(Remedy::Unpin);
                } else {
                    rejected.push(reason.in_words(view.node, now.mono));
                    lasts_here |= reason.is_lasting();
                    if reason.is_of_submission() && unfit.last() != Some(&view.node.id) {
                        unfit.push(view.node.id.clone());
                    }
                    remedies.extend(reason.remedy(view.node));
                    if let Some(request) = reason.request(view.node) {
                        review.request(request);
                    }
                }
            }
            remedies.dedup();
            match lifted {
                Some(unpin) if remedies.is_empty() => lifts = Some(unpin),
                lifted => remedies.extend(lifted),
            }
            if !remedies.is_empty() {
                review.would_help.push(remedies.join(AND));
            }
            found.rejected = rejected;
            lasts &= lasts_here;
        } else {
            lasts = false;
        }
        review.candidates.push(found);
    }
    review.is_lasting = lasts && !review.candidates.is_empty();
    if !unfit.is_empty() {
        let (named, more) = (reason::in_a_row(&unfit), unfit.len().saturating_sub(NAMES));
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        let words = format!("other requirements in the submission (they rule out {named}{more})");
        review.would_help.push(words);
    }
    review.would_help.dedup();
    if let Some(unpin) = lifts {
        let words = format!("{unpin}: it may go to any node then");
        review.would_help.insert(0, words);
    }
    review
}
