//! The choice of a node: filters, then a score, every verdict kept so that it can be told.
//!
//! Filters, in the order in which people read them: there at all; neither cordoned nor draining;
//! the program is offered; the submission's requirements; the numeric contract; viable under the
//! thresholds in force for this execution; not a node that it left for pressure without recovery;
//! not one that has just refused it; capacity.
//!
//! Score: a node with a free slot (2 + its free share) before one that would queue (its share of
//! room ahead), less half the pressure. Ties fall to the name that sorts first.

use fiec_schemas::event::CANDIDATES_LIMIT;
use fiec_schemas::package::{is_built_in, matches};
use fiec_schemas::{Candidate, Contract, Decision, Timestamp};

use crate::cluster::{Cluster, Node, NodeIx, Presence};
use crate::config::Config;
use crate::execution::Avoided;
use crate::hysteresis::State;
use crate::profile::{Profile, ProfileIx};
use crate::time::{Millis, Now};
use crate::watch::Watched;

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// What the execution needs.
    pub profile: ProfileIx,
    /// Nodes that it left for pressure.
    pub left: &'a [(NodeIx, Timestamp)],
    /// The node that it must leave.
    pub leaving: Option<NodeIx>,
    /// Nodes that are not asked for a while.
    pub avoid: &'a [Avoided],
    /// The only node that is wanted.
    pub only: Option<NodeIx>,
    /// A free slot is wanted, not a place in a queue.
    pub free_slot: bool,
    /// The node that counts it already, for a life of its agent that is over.
    pub counted: Option<NodeIx>,
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
}

/// Why a node was not taken.
#[derive(Debug, Clone, Copy)]
enum Reason<'a> {
    Unknown,
    Lost {
        silent_ms: u64,
    },
    NoVector,
    Stale {
        age_ms: u64,
    },
    Cordoned,
    Draining,
    Program {
        wanted: &'a str,
        offered: &'a [String],
    },
    NotNamed,
    Excluded,
    Memory {
        has: u64,
        needs: u64,
    },
    Label {
        key: &'a str,
        value: &'a str,
    },
    Contract,
    Unmeasured(&'a Watched),
    Pressing(&'a Watched),
    Left,
    Refused,
    Leaving,
    NotWanted,
    Full {
        held: u32,
        limit: u32,
    },
}

impl Reason<'_> {
    fn in_words(self, node: &Node, now: Millis) -> String {
        match self {
            Reason::Unknown => "it has not joined".to_owned(),
            Reason::Lost { silent_ms } => format!("it has been silent for {silent_ms} ms"),
            Reason::NoVector => "it has sent no hardware vector yet".to_owned(),
            Reason::Stale { age_ms } => format!("its hardware vector is {age_ms} ms old"),
            Reason::Cordoned => format!("it was cordoned by {}", node.flags.who),
            Reason::Draining => "it is draining".to_owned(),
            Reason::Program { wanted, offered } => format!(
                "it does not offer {wanted} (its worker runs {})",
                offered.join(", ")
            ),
            Reason::NotNamed => "the submission names other nodes".to_owned(),
            Reason::Excluded => "the submission excludes it".to_owned(),
            Reason::Memory { has, needs } => {
                format!("its memory limit is {has} bytes, {needs} are required")
            }
            Reason::Label { key, value } => format!("label {key} is not {value}"),
            Reason::Contract => {
                "its instruction set has no fused multiply-add, which the bitwise contract needs"
                    .to_owned()
            }
            Reason::Unmeasured(w) => {
                format!(
                    "{} has a threshold in the submission and is not measured here",
                    w.signal
                )
            }
            Reason::Pressing(w) => w.in_words(now),
            Reason::Left => {
                "it was left because of pressure and has not recovered for the dwell since"
                    .to_owned()
            }
            Reason::Refused => "it has just refused this execution".to_owned(),
            Reason::Leaving => "it is the node to leave".to_owned(),
            Reason::NotWanted => "another node was asked for".to_owned(),
            Reason::Full { held, limit } => {
                format!(
                    "it holds {held} executions and may hold {limit} (slots and what it begins soon)"
                )
            }
        }
    }

    fn remedy(self, node: &Node) -> Option<String> {
        let id = &node.id;
        Some(match self {
            Reason::Lost { .. } | Reason::Stale { .. } | Reason::NoVector => {
                format!("the worker on {id} answering again")
            }
            Reason::Cordoned | Reason::Draining if !node.flags.who.is_empty() => {
                format!("`fiec cordon --undo {id}`")
            }
            Reason::Pressing(w) => format!(
                "{} on {id} below {:.1} % for {} ms",
                w.signal,
                w.threshold.low * 100.0,
                w.threshold.dwell_ms
            ),
            Reason::Full { .. } => format!("something on {id} completing, or more slots there"),
            Reason::Program { wanted, .. } if is_built_in(wanted) => {
                format!("a worker on {id} of a version that has {wanted}")
            }
            Reason::Program { wanted, .. } => {
                format!("a worker on {id} with `--allow-program {wanted}`")
            }
            Reason::NotNamed | Reason::Excluded | Reason::Memory { .. } | Reason::Label { .. } => {
                format!("other requirements in the submission (they rule out {id})")
            }
            _ => return None,
        })
    }
}

/// A choice.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The node.
    pub node: NodeIx,
    /// Whom it was chosen from.
    pub decision: Decision,
}

/// Everybody's verdict, for people.
#[derive(Debug, Clone, Default)]
pub struct Review {
    /// Every node.
    pub candidates: Vec<Candidate>,
    /// What would have to change.
    pub would_help: Vec<String>,
}

/// Chooses a node, if one is acceptable.
pub fn choose(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> Option<Choice> {
    let profile = cluster.profiles.get(ask.profile)?;
    let mut best: Option<(f64, NodeIx)> = None;
    for (ix, node) in cluster.nodes() {
        if let Ok(score) = verdict(node, ix, profile, config, now, ask)
            && best.is_none_or(|(top, _)| score > top)
        {
            best = Some((score, ix));
        }
    }
    let (_, chosen) = best?;
    let mut candidates = Vec::with_capacity((cluster.node_count() as usize).min(CANDIDATES_LIMIT));
    candidates.push(candidate(
        cluster.node(chosen),
        chosen,
        profile,
        config,
        now,
        ask,
    ));
    let others = cluster
        .nodes()
        .filter(|(ix, node)| *ix != chosen && node.descriptor.is_some());
    let mut omitted = 0;
    for (ix, node) in others {
        if candidates.len() < CANDIDATES_LIMIT {
            candidates.push(candidate(node, ix, profile, config, now, ask));
        } else {
            omitted += 1;
        }
    }
    Some(Choice {
        node: chosen,
        decision: Decision {
            candidates,
            omitted,
        },
    })
}

/// True when a node would take it but for its capacity.
pub fn would_take_with_room(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> bool {
    let Some(profile) = cluster.profiles.get(ask.profile) else {
        return false;
    };
    cluster.nodes().any(|(ix, node)| {
        matches!(
            verdict(node, ix, profile, config, now, ask),
            Err(Reason::Full { .. })
        )
    })
}

/// Everybody's verdict and what would help.
pub fn review(cluster: &Cluster, config: &Config, now: Now, ask: &Ask<'_>) -> Review {
    let Some(profile) = cluster.profiles.get(ask.profile) else {
        return Review::default();
    };
    let mut review = Review::default();
    for (ix, node) in cluster.nodes() {
        let mut found = candidate(node, ix, profile, config, now, ask);
        match verdict(node, ix, profile, config, now, ask) {
            Ok(_) => {}
            Err(first) => {
                review.would_help.extend(first.remedy(node));
                found.rejected = reasons(node, ix, profile, config, now, ask)
                    .map(|r| r.in_words(node, now.mono))
                    .collect();
            }
        }
        review.candidates.push(found);
    }
    review.would_help.dedup();
    review
}

fn candidate(
    node: &Node,
    ix: NodeIx,
    profile: &Profile,
    config: &Config,
    now: Now,
    ask: &Ask<'_>,
) -> Candidate {
    let (score, rejected) = match verdict(node, ix, profile, config, now, ask) {
        Ok(score) => (Some((score * 1_000.0).round() / 1_000.0), Vec::new()),
        Err(reason) => (None, vec![reason.in_words(node, now.mono)]),
    };
    Candidate {
        node: node.id.clone(),
        score,
        rejected,
    }
}

fn verdict<'a>(
    node: &'a Node,
    ix: NodeIx,
    profile: &'a Profile,
    config: &Config,
    now: Now,
    ask: &Ask<'_>,
) -> Result<f64, Reason<'a>> {
    match reasons(node, ix, profile, config, now, ask).next() {
        Some(reason) => Err(reason),
        None => Ok(score(node, now.mono, config)),
    }
}

type Filter = for<'a> fn(&View<'a, '_>) -> Option<Reason<'a>>;

struct View<'a, 'b> {
    node: &'a Node,
    ix: NodeIx,
    profile: &'a Profile,
    config: &'b Config,
    now: Now,
    ask: &'b Ask<'b>,
}

/// The filters in order; lazily, so that the first reason costs no more than it must.
const FILTERS: [Filter; 8] = [
    wanted,
    present,
    operators,
    program,
    requirements,
    contract,
    viable,
    capacity,
];

fn reasons<'a, 'b>(
    node: &'a Node,
    ix: NodeIx,
    profile: &'a Profile,
    config: &'b Config,
    now: Now,
    ask: &'b Ask<'b>,
) -> impl Iterator<Item = Reason<'a>> + use<'a, 'b> {
    let view = View {
        node,
        ix,
        profile,
        config,
        now,
        ask,
    };
    FILTERS.iter().filter_map(move |filter| filter(&view))
}

fn wanted<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    if v.ask.leaving == Some(v.ix) {
        return Some(Reason::Leaving);
    }
    if v.ask.only.is_some_and(|only| only != v.ix) {
        return Some(Reason::NotWanted);
    }
    let mut avoided = v.ask.avoid.iter();
    let refused = avoided.any(|a| a.node == v.ix && v.now.mono < a.until);
    refused.then_some(Reason::Refused)
}

fn present<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let (node, now) = (v.node, v.now.mono);
    if node.descriptor.is_none() {
        return Some(Reason::Unknown);
    }
    match node.presence {
        Presence::Up => {}
        Presence::Probing { .. } | Presence::Lost { .. } => {
            return Some(Reason::Lost {
                silent_ms: now.since(node.heard),
            });
        }
    }
    if node.vector.is_none() {
        return Some(Reason::NoVector);
    }
    let age_ms = now.since(node.vector_at);
    (age_ms > v.config.liveness_ms).then_some(Reason::Stale { age_ms })
}

fn operators<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    if v.node.is_draining() {
        Some(Reason::Draining)
    } else {
        v.node.flags.cordoned.then_some(Reason::Cordoned)
    }
}

fn program<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let (offered, wanted) = (&v.node.descriptor.as_ref()?.programs, &v.profile.program);
    let offers = offered.iter().any(|pattern| matches(pattern, wanted));
    (!offers).then_some(Reason::Program { wanted, offered })
}

fn requirements<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let descriptor = v.node.descriptor.as_ref()?;
    let requires = &v.profile.requires;
    if !requires.nodes.is_empty() && !requires.nodes.contains(&v.node.id) {
        return Some(Reason::NotNamed);
    }
    if requires.exclude.contains(&v.node.id) {
        return Some(Reason::Excluded);
    }
    if let Some(needs) = requires.memory_bytes
        && descriptor.memory_limit_bytes < needs
    {
        return Some(Reason::Memory {
            has: descriptor.memory_limit_bytes,
            needs,
        });
    }
    requires
        .labels
        .iter()
        .find(|(key, value)| descriptor.labels.get(*key) != Some(value))
        .map(|(key, value)| Reason::Label { key, value })
}

/// The bitwise kernels fuse multiply and add: only instruction sets that do so give the same bits.
/// Every node that ever held the execution passed here, so both sides of a move have it.
fn contract<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let isa = &v.node.descriptor.as_ref()?.isa;
    let fused = isa.starts_with("aarch64") || isa.split('+').any(|part| part == "fma");
    (v.profile.contract == Contract::Bitwise && !fused).then_some(Reason::Contract)
}

fn viable<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let watch = v.node.watch(v.ask.profile)?;
    let substrate = v.node.substrate();
    if let Some(watched) = watch.obstacle(substrate) {
        return Some(Reason::Pressing(watched));
    }
    if !v.profile.viability.is_empty() {
        let unmeasured = watch.of_place("").find(|w| {
            v.profile.viability.contains_key(&w.signal)
                && matches!(w.automaton.state(), State::Unknown { .. })
        });
        if let Some(watched) = unmeasured {
            return Some(Reason::Unmeasured(watched));
        }
    }
    let left = v.ask.left.iter().find(|(ix, _)| *ix == v.ix)?;
    let back = watch.admits_return(substrate, v.now.moment_of(left.1));
    (!back).then_some(Reason::Left)
}

fn capacity<'a>(v: &View<'a, '_>) -> Option<Reason<'a>> {
    let own = u32::from(v.ask.counted == Some(v.ix));
    let held = v.node.held().saturating_sub(own);
    let limit = if v.ask.free_slot {
        v.node.slots()
    } else {
        v.node.limit(v.now.mono, v.config)
    };
    (held >= limit).then_some(Reason::Full { held, limit })
}

fn score(node: &Node, now: Millis, config: &Config) -> f64 {
    let (slots, held) = (node.slots(), node.held());
    let room = if held < slots {
        2.0 + f64::from(slots - held) / f64::from(slots.max(1))
    } else {
        let limit = node.limit(now, config).max(1);
        f64::from(limit.saturating_sub(held)) / f64::from(limit)
    };
    room - 0.5 * node.base.as_ref().map_or(0.0, |w| w.pressure().min(1.0))
}
