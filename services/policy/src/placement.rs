//! The choice of a place: filters, then a score, every verdict kept so that it can be told. A place
//! is a node's host or one of its devices; which are looked at is the submission's to say.
//!
//! Filters, in the order in which people read them: wanted at all; there; neither cordoned nor
//! draining; the program is offered; the submission's requirements of the node and of the device;
//! the numeric contract; viable under the thresholds in force for this execution, by the device's
//! readings and its host's; not a place that it left for pressure without recovery; capacity of
//! the node and of the device.
//!
//! The score is in [`score`]. Ties fall to the name that sorts first. It is cheap, so it comes
//! before the filters, but for what the submission itself rules out: only a place that would be
//! the best so far is looked at closely.

mod filters;
mod reason;
mod score;

use fiec_schemas::event::CANDIDATES_LIMIT;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Candidate, Decision, Timestamp};

use self::filters::{View, reasons};
use crate::cluster::{Cluster, Node, NodeIx};
use crate::config::Config;
use crate::execution::Avoided;
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
    /// A free slot is wanted, not a place in a queue.
    pub free_slot: bool,
    /// The node that counts it already, for a life of its agent that is over or for a place that
    /// it leaves, and what it has there that counts no more.
    pub counted: Option<(NodeIx, Claim)>,
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
            free_slot: false,
            counted: None,
        }
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
        self.cluster.nodes().flat_map(move |(ix, node)| {
            let places = node.devices.places(self.wants);
            places.map(move |at| self.view(ix, node, at))
        })
    }

    fn view(&self, ix: NodeIx, node: &'a Node, at: Option<DeviceIx>) -> View<'a, 'b> {
        View {
            node,
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
        let rejected = reasons(view).next();
        let score = score::score(view);
        Candidate {
            node: view.node.id.clone(),
            substrate: self.substrate(view),
            score: (rejected.is_none()).then_some((score * 1_000.0).round() / 1_000.0),
            rejected: rejected
                .map(|reason| reason.in_words(view.node, self.now.mono))
                .into_iter()
                .collect(),
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
pub fn choose(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> Option<Choice> {
    let search = Search::new(cluster, config, now, ask)?;
    let mut best: Option<(f64, NodeIx, Option<DeviceIx>)> = None;
    let mut joined = 0_usize;
    let demands = !search.profile.requires.is_empty();
    for view in search.views() {
        joined += usize::from(view.node.descriptor.is_some());
        if demands && filters::rules_out(&view) {
            continue;
        }
        let score = score::score(&view);
        if best.is_none_or(|(top, ..)| score > top) && reasons(&view).next().is_none() {
            best = Some((score, view.ix, view.at));
        }
    }
    let (_, node, device) = best?;
    let chosen = search.view(node, cluster.node(node), device);
    let others = search
        .views()
        .filter(|v| (v.ix, v.at) != (node, device) && v.node.descriptor.is_some());
    let mut candidates = Vec::with_capacity(joined.min(CANDIDATES_LIMIT));
    candidates.push(search.candidate(&chosen));
    candidates.extend(
        others
            .take(CANDIDATES_LIMIT - 1)
            .map(|view| search.candidate(&view)),
    );
    let omitted = u32::try_from(joined - candidates.len()).unwrap_or(u32::MAX);
    Some(Choice {
        node,
        device,
        decision: Decision {
            candidates,
            omitted,
        },
    })
}

/// True when a node would take it but for its capacity.
pub fn would_take_with_room(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> bool {
    Search::new(cluster, config, now, ask).is_some_and(|search| {
        search.views().any(|view| {
            reasons(&view)
                .next()
                .is_some_and(|reason| reason.is_only_full())
        })
    })
}

/// Everybody's verdict and what would help.
pub fn review(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> Review {
    let Some(search) = Search::new(cluster, config, now, ask) else {
        return Review::default();
    };
    let mut review = Review::default();
    for view in search.views() {
        let mut found = search.candidate(&view);
        let first = reasons(&view).next();
        if let Some(first) = first {
            review.would_help.extend(first.remedy(view.node));
            found.rejected = reasons(&view)
                .map(|r| r.in_words(view.node, now.mono))
                .collect();
        }
        review.candidates.push(found);
    }
    review.would_help.dedup();
    review
}
