//! Explanations for people.

use fiec_schemas::duty::{Actor, Duty};
use fiec_schemas::messages::{InForce, Place, Remedy, Why};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Candidate, ExecutionId, NodeId};

use super::Reasons;
use super::duties::standing;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{NodeIx, Stage};
use crate::lifecycle::placement::{Ask, Leaving, Operators};
use crate::time::Now;

/// Explains the place of a live execution.
pub(crate) fn why(life: &Lifecycle, of: &impl Reasons, now: Now, id: ExecutionId) -> Option<Why> {
    let e = life.cluster().execution(id)?;
    let name = |ix: NodeIx| &life.cluster().node(ix).id;
    let on = |ix: NodeIx| match e.device() {
        None => name(ix).to_string(),
        device => {
            let node = life.cluster().node(ix);
            format!("{} ({})", node.id, node.devices.id_of(device))
        }
    };
    #[expect(clippy::cast_precision_loss, reason = "a time below 2^52")]
    let waited = now.mono.since(e.since) as f64 / 1_000.0;
    let held = of.held_in_words(life, id);
    let here = e.stage.node();
    let apart = life.apart_from(now, id);
    let ask = Ask {
        apart,
        ..Ask::of(e)
    }
    .leaves(here.map(|node| Leaving::Place(node, e.device())));
    let change = e.extra.as_ref().and_then(|x| x.adjusted.as_deref());
    let operators = change.map(|change| Operators {
        execution: id,
        change,
    });
    let mut review = life.review(now, &ask, operators);
    let mut summary = match e.stage {
        Stage::Pending if e.profile == ProfileIx::UNKNOWN => {
            "pending: its submission is being fetched".to_owned()
        }
        Stage::Pending => {
            let nobody = match review.is_lasting {
                true => "no node that has joined can ever take it",
                false => "no node can take it now",
            };
            let why = held.as_deref().unwrap_or(nobody);
            format!("pending for {waited:.1} s: {why}")
        }
        Stage::Paused => "paused: it waits for `fiec resume`".to_owned(),
        Stage::Held => "held: it has failed, and waits for `fiec retry`".to_owned(),
        Stage::Verifying => "verifying: it is computed, and counts once others have computed \
                             it with the same bits"
            .to_owned(),
        Stage::Bound(ix, _) => {
            let arriving = life.arriving(id);
            let arriving = arriving.map(|a| format!("; the node is {}", a.in_words()));
            format!(
                "bound to {} under epoch {} for {waited:.1} s, not started yet{}",
                on(ix),
                e.epoch,
                arriving.unwrap_or_default()
            )
        }
        Stage::Started(ix, _) => match of.parked_in_words(now, e) {
            Some(words) => format!("parked on {} under epoch {} {words}", on(ix), e.epoch),
            None => format!("computing on {} under epoch {}", on(ix), e.epoch),
        },
    };
    if let Some(extra) = &e.extra {
        if let Some(order) = &extra.order {
            summary += &format!("; it {}", order.in_words(|ix| name(ix).to_string()));
        } else if let Some(note) = &extra.note {
            summary += &format!("; {note}");
        }
        if e.stage == Stage::Pending
            && let Some(cause) = &extra.cause
        {
            summary += &format!("; it must be bound anew: {}", cause.in_words());
        }
    }
    summary += &of.notes_in_words(life, id);
    if let Some(here) = here {
        // For its own place, only the pressure there counts.
        let node = life.cluster().node(here);
        let profile = life.cluster().profiles.get(e.profile);
        let judged = node.judged(profile, e.device());
        let device = judged.device.unwrap_or(HOST);
        let is_here = |c: &&mut Candidate| {
            c.node == node.id && c.substrate.as_deref().unwrap_or(HOST) == device
        };
        for candidate in review.candidates.iter_mut().filter(is_here) {
            candidate.score = None;
            candidate.rejected = node
                .watch(e.profile)
                .map(|w| w.complaints_of(judged, now.mono))
                .unwrap_or_default();
            candidate.rejected.insert(0, "it is there now".to_owned());
        }
    }
    let noted = e.order().is_none() && e.extra.as_ref().is_some_and(|x| x.note.is_some());
    let would_help = match e.stage {
        Stage::Pending if held.is_some() => of.help_for_held(life, id),
        Stage::Pending if review.candidates.is_empty() => {
            vec!["a worker joining: there is no node at all".to_owned()]
        }
        Stage::Pending => review.would_help,
        Stage::Paused => vec![format!("`fiec resume {id}`")],
        Stage::Held => vec![format!("`fiec retry {id}`")],
        _ if noted && review.candidates.len() < 2 => {
            vec!["another worker joining: there is no other node".to_owned()]
        }
        _ if noted => review.would_help,
        _ => Vec::new(),
    };
    let remedies = match e.stage {
        Stage::Pending if held.is_some() => Vec::new(),
        Stage::Paused => vec![Remedy::Resume],
        Stage::Held => vec![Remedy::Retry {
            more_memory_than: None,
        }],
        Stage::Pending => review.requests,
        _ if noted => review.requests,
        _ => Vec::new(),
    };
    let thresholds = here.map_or_else(Vec::new, |ix| in_force(life, id, ix));
    let would_move = here.map_or_else(Vec::new, |ix| would_move(life, id, ix, &thresholds));
    let may_move = here.is_some() && e.order().is_none();
    let would_go_to = may_move.then(|| acceptable(&review.candidates));
    Some(Why {
        summary,
        candidates: review.candidates,
        would_help,
        remedies,
        phase: e.stage.phase(),
        place: here.map(|ix| Place {
            node: name(ix).clone(),
            substrate: life.cluster().node(ix).devices.id_of(e.device()).to_owned(),
            epoch: e.epoch,
            from: None,
        }),
        cause: e.extra.as_ref().and_then(|x| x.cause.clone()),
        decision: None,
        thresholds,
        would_move,
        would_go_to,
        waits_for: waits_for(life, of, id),
        next: here
            .filter(|_| e.arrived_of_state().is_some())
            .and_then(|ix| duty_of_holder(life, of, now, id, ix)),
    })
}

/// The duty on an execution whose state arrives at its node.
fn duty_of_holder(
    life: &Lifecycle,
    of: &impl Reasons,
    now: Now,
    id: ExecutionId,
    ix: NodeIx,
) -> Option<Duty> {
    let duty = standing(life, of, now, id)?.duty(now.wall);
    let node = Some(life.cluster().node(ix).id.clone());
    let node = node.filter(|_| duty.who == Actor::Worker);
    Some(Duty { node, ..duty })
}

/// The reasons to wait other than nodes.
fn waits_for(life: &Lifecycle, of: &impl Reasons, id: ExecutionId) -> Vec<String> {
    of.held_in_words(life, id).into_iter().collect()
}

/// The thresholds that apply to an execution in its place.
fn in_force(life: &Lifecycle, id: ExecutionId, ix: NodeIx) -> Vec<InForce> {
    let Some(e) = life.cluster().execution(id) else {
        return Vec::new();
    };
    let (node, profile) = (
        life.cluster().node(ix),
        life.cluster().profiles.get(e.profile),
    );
    let own = |signal| profile.is_some_and(|p| p.viability.contains_key(&signal));
    let judged = node.judged(profile, e.device());
    let watched = node.watch(e.profile).into_iter();
    watched
        .flat_map(|watch| watch.of_place(judged))
        .map(|w| InForce {
            signal: w.signal,
            device: w.device.as_deref().map(str::to_owned),
            threshold: w.threshold,
            own: own(w.signal),
            value: w.automaton.value(),
            state: w.automaton.state().kind(),
        })
        .collect()
}

/// The events that would make an execution leave its place.
fn would_move(
    life: &Lifecycle,
    id: ExecutionId,
    ix: NodeIx,
    thresholds: &[InForce],
) -> Vec<String> {
    let node = &life.cluster().node(ix).id;
    if let Some(order) = life.cluster().execution(id).and_then(|e| e.order()) {
        let when = if order.taken {
            "its next boundary"
        } else {
            "its next boundary, once its node has taken the order"
        };
        return vec![format!("{when}: {}", order.cause.in_words())];
    }
    let measured = thresholds.iter().filter_map(|t| {
        let value = t.value?;
        let of = t.device.as_deref().map(|d| format!(" of {d}"));
        Some(format!(
            "{}{} on {node} at or above {:.1} % for {} ms; it is {} at {:.1} %",
            t.signal,
            of.unwrap_or_default(),
            t.threshold.high * 100.0,
            t.threshold.dwell_ms,
            t.state,
            value * 100.0,
        ))
    });
    let mut would: Vec<_> = measured.collect();
    would.push(format!(
        "{node} silent for {} ms and not answering",
        life.config.liveness_ms
    ));
    would.push(format!(
        "an operator: `fiec move {id} --to NODE`, `fiec drain {node}`"
    ));
    would
}

/// Predicts the effect of a change before it is made, in words.
///
/// # Errors
/// The reasons of each node if none can take the execution under the change. The change is
/// still possible: the execution then waits, or stays, until a node can.
pub(crate) fn foresee(
    life: &mut Lifecycle,
    now: Now,
    id: ExecutionId,
    change: &Adjustment,
) -> Result<String, String> {
    life.pass(now);
    let Some(e) = life.cluster().execution(id) else {
        return Ok(String::new());
    };
    let (here, device) = (e.stage.node(), e.device());
    let Some(mut profile) = life.cluster().profiles.get(e.profile).cloned() else {
        return Ok(String::new());
    };
    profile.adjust(change);
    let requires = &profile.requires;
    let stays = here.is_some_and(|ix| {
        let name = &life.cluster().node(ix).id;
        (requires.nodes.is_empty() || requires.nodes.contains(name))
            && !requires.exclude.contains(name)
    });
    let named = change.exclude.iter().chain(&change.nodes).flatten();
    let unknown: Vec<_> = named.filter(|node| !life.has_node(node)).collect();
    if stays || matches!(e.stage, Stage::Paused | Stage::Held | Stage::Verifying) {
        return match unknown.first() {
            Some(node) => Err(life.no_such(node).to_string()),
            None => Ok(String::new()),
        };
    }
    let named: Vec<_> = requires
        .nodes
        .iter()
        .filter(|node| !life.has_node(node))
        .map(|node| format!("{node}: there is no such node"))
        .collect();
    let wanted = requires.nodes.clone();
    let profile = life.acquire(profile);
    let ask = Ask::new(profile).leaves(here.map(|ix| Leaving::Place(ix, device)));
    let operators = Operators {
        execution: id,
        change,
    };
    let review = life.review(now, &ask, Some(operators));
    life.release_profile(profile);
    let from = here.map(|ix| life.cluster().node(ix).id.to_string());
    let best = review
        .candidates
        .iter()
        .filter_map(|c| Some((c.score?, &c.node)))
        .reduce(|a, b| if b.0 > a.0 { b } else { a });
    match (best, from) {
        (Some((_, to)), Some(from)) => {
            Ok(format!("it moves from {from} to {to} at its next boundary"))
        }
        (Some((_, to)), None) => Ok(format!("{to} can take it")),
        (None, from) => {
            let asked = review
                .candidates
                .iter()
                .filter(|c| wanted.is_empty() || wanted.contains(&c.node))
                .map(|c| format!("{}: {}", c.node, c.rejected.join("; ")));
            let reasons: Vec<_> = asked.chain(named).collect();
            let until = match from {
                Some(from) => format!("it stays on {from}"),
                None => "it waits".to_owned(),
            };
            Err(format!(
                "no node satisfies that now ({}): {until} until one does",
                reasons.join(", ")
            ))
        }
    }
}

/// The first acceptable nodes.
fn acceptable(candidates: &[Candidate]) -> Vec<NodeId> {
    let candidates = candidates.iter().filter(|c| c.score.is_some());
    candidates.map(|c| c.node.clone()).take(4).collect()
}
