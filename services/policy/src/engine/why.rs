//! Tells people what the policy sees.

use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::messages::{NodeStatus, Why};
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Candidate, ExecutionId, NodeId};

use super::Policy;
use super::trust::standings;
use crate::cluster::{NodeIx, Presence, Stage};
use crate::placement::{self, Ask, Leaving};
use crate::places::Judged;
use crate::profile::ProfileIx;
use crate::time::Now;

impl Policy {
    /// Why a live execution is where it is.
    pub fn why(&self, now: Now, id: ExecutionId) -> Option<Why> {
        let e = self.cluster.execution(id)?;
        let name = |ix: NodeIx| &self.cluster.node(ix).id;
        let on = |ix: NodeIx| match e.device() {
            None => name(ix).to_string(),
            device => {
                let node = self.cluster.node(ix);
                format!("{} ({})", node.id, node.devices.id_of(device))
            }
        };
        let waited = now.mono.since(e.since);
        let mut summary = match e.stage {
            Stage::Pending if e.profile == ProfileIx::UNKNOWN => {
                "pending: its submission is being fetched".to_owned()
            }
            Stage::Pending => format!("pending for {waited} ms: no node can take it now"),
            Stage::Paused => "paused: it waits for `fiec resume`".to_owned(),
            Stage::Verifying => "verifying: it is computed, and counts once others have computed \
                                 it with the same bits"
                .to_owned(),
            Stage::Bound(ix, _) => {
                format!(
                    "bound to {} under epoch {} for {waited} ms, not started yet",
                    on(ix),
                    e.epoch
                )
            }
            Stage::Started(ix, _) => format!("computing on {} under epoch {}", on(ix), e.epoch),
        };
        if let Some(extra) = &e.extra {
            if let Some(order) = &extra.order {
                let to = order
                    .to
                    .map(|to| format!(" to {}", name(to)))
                    .unwrap_or_default();
                let word = if order.taken {
                    "will move at its next boundary"
                } else {
                    "is being asked to move"
                };
                summary += &format!("; it {word}{to}: {}", order.cause.in_words());
            } else if let Some(note) = &extra.note {
                summary += &format!("; {note}");
            }
            if e.stage == Stage::Pending
                && let Some(cause) = &extra.cause
            {
                summary += &format!("; it must be bound anew: {}", cause.in_words());
            }
        }
        if let Some(check) = self.checks.get(&id) {
            summary += &self.verification_in_words(check);
        }
        let here = e.stage.node();
        let ask = Ask {
            avoid: e.avoided(),
            ..Ask::new(e.profile, e.left())
        }
        .leaves(here.map(|node| Leaving::Place(node, e.device())));
        let mut review = placement::review(&self.cluster, &self.config, now, &ask);
        if let Some(here) = here {
            // For where it is, what counts is what presses there.
            let node = self.cluster.node(here);
            let profile = self.cluster.profiles.get(e.profile);
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
        let would_help = if e.stage == Stage::Pending
            || e.order().is_none() && e.extra.as_ref().is_some_and(|x| x.note.is_some())
        {
            if review.candidates.is_empty() {
                vec!["a worker joining: there is no node at all".to_owned()]
            } else {
                review.would_help
            }
        } else {
            Vec::new()
        };
        Some(Why {
            summary,
            candidates: review.candidates,
            would_help,
        })
    }

    /// Every node that has joined, in order of names.
    pub fn node_statuses(&self, now: Now) -> Vec<NodeStatus> {
        self.cluster
            .nodes()
            .filter_map(|(_, node)| {
                let descriptor = node.descriptor.as_ref()?;
                let base = node.base.as_ref();
                let fresh = node.is_fresh(now.mono, &self.config);
                let viability = match node.presence {
                    Presence::Lost { .. } => "lost",
                    _ if !fresh => "unknown",
                    _ => base.map_or("unknown", |b| b.worst_of(Judged::HOST).as_str()),
                };
                Some(NodeStatus {
                    descriptor: (**descriptor).clone(),
                    flags: node.flags.clone(),
                    viability: viability.to_owned(),
                    pressing: base.map(|b| b.complaints(now.mono)).unwrap_or_default(),
                    vector: node.vector.as_deref().cloned(),
                    silent_ms: Some(now.mono.since(node.heard)),
                    bound: u32::try_from(node.holds.len()).unwrap_or(u32::MAX),
                    contracts: standings(node, descriptor, now),
                })
            })
            .collect()
    }

    /// What a node said last of an execution that it runs.
    pub fn progress(&self, id: ExecutionId) -> Option<RunningProgress> {
        let Stage::Started(ix, _) = self.cluster.execution(id)?.stage else {
            return None;
        };
        let vector = self.cluster.node(ix).vector.as_ref()?;
        vector.running.iter().find(|r| r.execution == id).cloned()
    }

    /// True for a node that has joined.
    pub fn has_node(&self, node: &NodeId) -> bool {
        self.cluster
            .find(node)
            .is_some_and(|ix| self.cluster.node(ix).descriptor.is_some())
    }
}
