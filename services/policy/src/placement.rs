//! The choice of a place: filters, then a score, every verdict kept so that it can be told. A place
//! is a node's host or one of its devices; which are looked at is the submission's to say.
//!
//! Filters, in the order in which people read them: wanted at all; there; neither cordoned nor
//! draining; the program is offered; the submission's requirements of the node and of the device;
//! the numeric contract; viable under the thresholds in force for this execution, by the device's
//! readings and its host's; not a place that it left for pressure without recovery; capacity of
//! the node and of the device.
//!
//! The score is in [`score`]. Ties fall to the name that sorts first, and on one node to the host.
//! Places are kept in this order for each profile ([`ranking`]), so that a choice looks at few of
//! them: the first that passes every filter is the best.
//!
//! A decision tells the chosen place and then the first others in the order of [`ranking`], which
//! are the best ones that an execution without a history could take, those that are only full, and
//! the others by name, each with what speaks against it for this execution; beyond
//! [`CANDIDATES_LIMIT`] places they are counted.

mod filters;
mod ranking;
mod reason;
mod score;
#[cfg(test)]
mod tests;

use fiec_schemas::limits::CANDIDATES_LIMIT;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Candidate, Decision, Timestamp};

use self::filters::{View, reasons};
pub(crate) use self::filters::{free_bytes, offered_memory};
pub use self::ranking::Rankings;
use self::ranking::{Key, Rank, Ranking};
pub(crate) use self::reason::{EXCLUDED, NOT_NAMED, other_requirements};
use crate::cluster::{Cluster, NodeIx, Presence};
use crate::config::Config;
use crate::execution::Avoided;
use crate::holds::room::KeptPlaces;
use crate::places::{Claim, DeviceIx, Wants};
use crate::profile::{Profile, ProfileIx};
use crate::time::Now;

/// What must be left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// A node with all its places.
    Node(NodeIx),
    /// One place of a node; the others may do.
    Place(NodeIx, Option<DeviceIx>),
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// What the execution needs.
    pub profile: ProfileIx,
    /// Nodes that it left for pressure.
    pub left: &'a [(NodeIx, Timestamp)],
    /// What it must leave.
    pub leaving: Option<Leaving>,
    /// Nodes that are not asked for a while.
    pub avoid: &'a [Avoided],
    /// The only node that is wanted.
    pub only: Option<NodeIx>,
    /// What is kept for others.
    pub kept: Option<&'a KeptPlaces>,
    /// A free slot is wanted, not a place in a queue.
    pub free_slot: bool,
    /// The node that counts it already, for a life of its agent that is over or for a place that
    /// it leaves, and what it has there that counts no more.
    pub counted: Option<(NodeIx, Claim)>,
    /// A place that presses, but not yet for the dwell, will do.
    pub takes_suspects: bool,
}

impl<'a> Ask<'a> {
    /// Anything that fits.
    pub fn new(profile: ProfileIx, left: &'a [(NodeIx, Timestamp)]) -> Self {
        Self {
            profile,
            left,
            leaving: None,
            avoid: &[],
            only: None,
            kept: None,
            free_slot: false,
            counted: None,
            takes_suspects: false,
        }
    }

    /// True where nothing matters but what it asks for.
    fn is_plain(&self) -> bool {
        let nowhere = self.left.is_empty() && self.avoid.is_empty() && self.leaving.is_none();
        let anywhere = self.only.is_none() && self.kept.is_none();
        let usual = self.counted.is_none() && !self.free_slot && !self.takes_suspects;
        nowhere && anywhere && usual
    }

    /// The same, leaving a place: where that is one of several on its node, the slot that it has
    /// there already is its own.
    #[must_use]
    pub fn leaves(mut self, leaving: Option<Leaving>) -> Self {
        self.leaving = leaving;
        if let Some(Leaving::Place(node, _)) = leaving {
            self.counted = Some((node, Claim::Host));
        }
        self
    }
}

/// Between things that must all change.
pub(crate) const AND: &str = ", and ";

/// A choice.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The node.
    pub node: NodeIx,
    /// The device on it; none: its host.
    pub device: Option<DeviceIx>,
    /// Whom it was chosen from.
    pub decision: Decision,
}

/// Everybody's verdict, for people.
#[derive(Debug, Clone, Default)]
pub struct Review {
    /// Every place.
    pub candidates: Vec<Candidate>,
    /// What would have to change.
    pub would_help: Vec<String>,
}

/// One question to all places.
#[derive(Clone, Copy)]
struct Search<'a, 'b> {
    cluster: &'a Cluster,
    profile: &'a Profile,
    wants: Wants,
    /// Whether it prefers anything.
    prefers: bool,
    config: &'b Config,
    now: Now,
    ask: &'b Ask<'b>,
}

impl<'a, 'b> Search<'a, 'b> {
    fn new(cluster: &'a Cluster, config: &'b Config, now: Now, ask: &'b Ask<'b>) -> Option<Self> {
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

    /// The places of a node that are looked at.
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

    /// A place that nothing speaks against.
    fn open(&self, view: &View<'a, 'b>, score: f64) -> Candidate {
        Candidate {
            node: view.node.id.clone(),
            substrate: self.substrate(view),
            score: Some((score * 1_000.0).round() / 1_000.0),
            rejected: Vec::new(),
        }
    }

    /// Said wherever there is a choice between the places of a node.
    fn substrate(&self, view: &View<'a, 'b>) -> Option<String> {
        match (view.device(), self.wants) {
            (Some(device), _) => Some(device.id.to_string()),
            (None, Wants::Either) => Some(HOST.to_owned()),
            (None, _) => None,
        }
    }
}

/// Chooses a place, if one is acceptable.
pub fn choose(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    ask: &Ask<'_>,
) -> Option<Choice> {
    let plain = Ask::new(ask.profile, &[]);
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
                // What anybody may have is what this one finds, where nothing of its own matters.
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

/// Chooses a place for an execution that an operator moves. If no viable place is acceptable, the
/// first one that presses, but not yet for the dwell: the operator knows more than a reading of a
/// moment, and pressure that lasts moves the execution on.
pub fn choose_for_operator(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    ask: &Ask<'_>,
) -> Option<Choice> {
    let viable = choose(rankings, cluster, config, now, ask);
    viable.or_else(|| {
        let ask = Ask {
            takes_suspects: true,
            ..*ask
        };
        let does = |ix: &NodeIx| would_do(cluster, config, now, &ask, *ix);
        let mut nodes = cluster.nodes().map(|(ix, _)| ix);
        let only = Some(ask.only.or_else(|| nodes.find(does))?);
        choose(rankings, cluster, config, now, &Ask { only, ..ask })
    })
}

/// Of these nodes, in turn, whether something of this profile could be there if others made room for
/// it; what an execution has left, avoids or must leave to a gang is not looked at.
pub fn could_be(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
    nodes: impl Iterator<Item = NodeIx>,
) -> Vec<bool> {
    let plain = Ask::new(profile, &[]);
    let Some(anybody) = Search::new(cluster, config, now, &plain) else {
        return nodes.map(|_| false).collect();
    };
    let ranking = rankings.of(&anybody);
    nodes.map(|ix| !ranking.rules_out(ix)).collect()
}

/// True where a place of this node would be chosen, were there no other node. It costs no more than
/// the filters of its places.
pub fn would_do(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>, node: NodeIx) -> bool {
    let search = Search::new(cluster, config, now, ask);
    let does = |place: View<'_, '_>| reasons(&place).next().is_none();
    search.is_some_and(|search| search.places(node).any(does))
}

/// The first place, in the order of what anybody may have, that an execution may have too.
fn best(search: &Search<'_, '_>, anybody: &Search<'_, '_>, ranking: &mut Ranking) -> Option<Key> {
    let ask = search.ask;
    // What it has at a node already is room that nobody else sees there.
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
        // Whoever has a free slot comes before all who have none.
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

/// True when a node would take an execution without a history but for its capacity. Places that
/// are open to it must have been ruled out before.
pub fn would_take_with_room(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
) -> bool {
    let plain = Ask::new(profile, &[]);
    let Some(anybody) = Search::new(cluster, config, now, &plain) else {
        return false;
    };
    let ranking = rankings.of(&anybody);
    ranking
        .next(&anybody, None)
        .is_some_and(|first| matches!(first.rank, Rank::Full))
}

/// Where an execution of this profile could be, were there nothing else: every place that takes it
/// now, and every one that is only full, the best first.
pub fn but_for_room(
    rankings: &mut Rankings,
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
) -> Vec<(NodeIx, Option<DeviceIx>)> {
    let plain = Ask::new(profile, &[]);
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

/// How far a place has what a profile prefers, in [0, 1].
pub fn preference(
    cluster: &Cluster,
    config: &Config,
    now: Now,
    profile: ProfileIx,
    (node, device): (NodeIx, Option<DeviceIx>),
) -> Option<f64> {
    let ask = Ask::new(profile, &[]);
    let search = Search::new(cluster, config, now, &ask)?;
    Some(score::met(&search.view(node, device)))
}

/// A node that has left, or is lost, for this many milliseconds is no candidate that is worth a word.
const GONE_MS: u64 = 10 * 60_000;

/// True for a node that has been away for [`GONE_MS`] and that nothing in the question names.
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

/// Everybody's verdict and what would help. A node that left ten minutes ago is passed over, unless
/// the execution is there or asks for it by name.
pub fn review(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> Review {
    let Some(search) = Search::new(cluster, config, now, ask) else {
        return Review::default();
    };
    let mut review = Review::default();
    for view in search.views().filter(|view| !is_long_gone(view)) {
        let mut found = search.candidate(&view);
        if reasons(&view).next().is_some() {
            // Where several things are in the way, all of them must change.
            let mut remedies: Vec<_> = reasons(&view)
                .filter_map(|reason| reason.remedy(view.node))
                .collect();
            remedies.dedup();
            review
                .would_help
                .extend(Some(remedies.join(AND)).filter(|words| !words.is_empty()));
            found.rejected = reasons(&view)
                .map(|r| r.in_words(view.node, now.mono))
                .collect();
        }
        review.candidates.push(found);
    }
    review.would_help.dedup();
    review
}
