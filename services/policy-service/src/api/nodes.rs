//! Questions about nodes, and the operators' flags on them.

use std::collections::BTreeSet;

use fiec_broker::flags;
use fiec_policy::UnknownNode;
use fiec_schemas::messages::{ApiReply, ControlRequest, NodeRequest, NodeStatus, NodeVerb};
use fiec_schemas::surroundings::OffersReply;
use fiec_schemas::{InstanceId, NodeFlags, NodeId, Timestamp};

use super::{Answered, Api, parse, somebody};
use crate::events::Ask;
use crate::refusal::Refusal;

/// Executions on a node that is to be left that are looked at.
const LOOKED_AT: usize = 20;

impl Api {
    pub(super) async fn nodes(&self) -> Answered<ApiReply> {
        Ok(ApiReply {
            nodes: self.ask(Ask::Nodes).await?,
            ..ApiReply::default()
        })
    }

    /// The resources that nodes can offer. Agents ask for it.
    pub(super) async fn offers(&self) -> Answered<OffersReply> {
        Ok(OffersReply {
            offers: Some(self.ask(Ask::Offers).await?),
            ..OffersReply::default()
        })
    }

    /// A node that has joined.
    pub(super) async fn joined(&self, node: &NodeId) -> Answered<NodeStatus> {
        let mut nodes = self.ask(Ask::Nodes).await?;
        match nodes.iter().position(|n| n.descriptor.node == *node) {
            Some(at) => Ok(nodes.swap_remove(at)),
            None => {
                let joined = nodes.into_iter().map(|n| n.descriptor.node);
                let unknown = UnknownNode::new(node.clone(), joined.collect());
                Err(Refusal::UnknownNode(unknown))
            }
        }
    }

    /// Ends the quarantine of a node. Its canaries run again and decide.
    pub(super) async fn release(&self, payload: &[u8]) -> Answered<ApiReply> {
        let NodeRequest { node, who, .. } = parse(payload)?;
        self.joined(&node).await?;
        let lost = self.effects.release(&node, &somebody(&who)).await;
        let lost = lost.map_err(Refusal::Broker)?;
        if lost.is_empty() {
            return Err(Refusal::NotQuarantined(node));
        }
        let request = ControlRequest::Prove;
        let timeout = self.options.control_timeout;
        let proves = match self.effects.control(&node, &request, timeout).await {
            Ok(_) => "its canaries run again, and it accepts work once they pass".to_owned(),
            Err(no_reply) => {
                let reason = no_reply.reason();
                format!(
                    "it did not accept the request to run its canaries again ({reason}): restart \
                     its worker"
                )
            }
        };
        let names: Vec<_> = lost.iter().map(|c| c.as_str()).collect();
        Ok(ApiReply {
            message: format!("{node} is released ({}): {proves}", names.join(", ")),
            ..ApiReply::default()
        })
    }

    /// The executions on a node that no other node can take now, with the reasons. Looks at the first
    /// few that run there.
    async fn without_other_place(&self, status: &NodeStatus) -> Vec<String> {
        let running = status.vector.iter().flat_map(|vector| &vector.running);
        let mut without = Vec::new();
        for execution in running.map(|running| running.execution).take(LOOKED_AT) {
            let Ok(Some(why)) = self.ask(|reply| Ask::Why(execution, reply)).await else {
                continue;
            };
            if why.would_go_to.is_some_and(|nodes| nodes.is_empty()) {
                let others = why.candidates.iter();
                let others = others.filter(|other| other.node != status.descriptor.node);
                let reasons: BTreeSet<_> = others.flat_map(|other| &other.rejected).collect();
                let reasons: Vec<&str> = reasons.into_iter().map(String::as_str).collect();
                without.push(match reasons.is_empty() {
                    true => execution.to_string(),
                    false => format!("{execution} ({})", reasons.join("; ")),
                });
            }
        }
        without
    }

    /// Sets the flags of a node.
    pub(super) async fn node(&self, verb: NodeVerb, payload: &[u8]) -> Answered<ApiReply> {
        let NodeRequest { node, who, seconds } = parse(payload)?;
        let status = self.joined(&node).await?;
        if seconds.is_some() && !matches!(verb, NodeVerb::Drain | NodeVerb::Revoke) {
            return Err(Refusal::invalid("seconds", format!("{verb} knows no time")));
        }
        if verb == NodeVerb::Revoke && seconds.is_none() {
            let rule = "in how many the node will be gone must be given";
            return Err(Refusal::invalid("seconds", rule));
        }
        let (who, now) = (somebody(&who), self.effects.broker.now());
        let at = seconds
            .map(|s| Timestamp::from_micros(now.micros().saturating_add(i64::from(s) * 1_000_000)));
        let life = status.descriptor.instance;
        let leaves = matches!(verb, NodeVerb::Drain | NodeVerb::Revoke);
        let without = match leaves {
            true => self.without_other_place(&status).await,
            false => Vec::new(),
        };
        let change = |before| Some(changed(verb, before, (at, life), (&who, now)));
        flags::change_flags(&self.effects.broker, &node, change)
            .await
            .map_err(|error| Refusal::broker(&format!("write the flags of {node}"), error))?;
        let bound = match status.bound {
            1 => "1 execution".to_owned(),
            bound => format!("{bound} executions"),
        };
        let message = match (verb, at) {
            (NodeVerb::Drain, None) => format!(
                "{node} is draining: {bound} will move to other nodes at their next boundary, as \
                 these can take them"
            ),
            (NodeVerb::Drain, Some(at)) => format!(
                "{node} is draining: {bound} will move to other nodes at their next boundary; \
                 executions that are still there at {at} are ended and continue from their last \
                 commit"
            ),
            (NodeVerb::Revoke, Some(at)) => format!(
                "{node} ends at {at}: {bound} will move before; an execution without \
                 another place commits and waits"
            ),
            (NodeVerb::Cordon, _) => format!("{node} is cordoned: nothing new is bound to it"),
            (NodeVerb::Uncordon | NodeVerb::Undrain | NodeVerb::Revoke | NodeVerb::Release, _) => {
                format!("{node} takes work again")
            }
        };
        let message = match without.is_empty() {
            true => message,
            false => format!("{message}; no other node can take {}", without.join(", ")),
        };
        Ok(ApiReply {
            message,
            ..ApiReply::default()
        })
    }
}

/// A node's flags after a request.
fn changed(
    verb: NodeVerb,
    before: NodeFlags,
    (at, life): (Option<Timestamp>, InstanceId),
    (who, now): (&str, Timestamp),
) -> NodeFlags {
    let said = NodeFlags {
        who: who.to_owned(),
        at: now,
        ..NodeFlags::default()
    };
    match verb {
        NodeVerb::Cordon => NodeFlags {
            cordoned: true,
            draining: before.draining,
            drain_by: before.drain_by,
            revoked_at: before.revoked_at,
            revoked: before.revoked,
            ..said
        },
        NodeVerb::Drain => NodeFlags {
            cordoned: true,
            draining: true,
            drain_by: at,
            revoked_at: before.revoked_at,
            revoked: before.revoked,
            ..said
        },
        NodeVerb::Revoke => NodeFlags {
            cordoned: before.cordoned,
            draining: before.draining,
            drain_by: before.drain_by,
            revoked_at: at,
            revoked: Some(life),
            ..said
        },
        NodeVerb::Uncordon | NodeVerb::Undrain | NodeVerb::Release => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_word_keeps_what_it_does_not_speak_of_and_undrain_takes_all_back() {
        let (at, now) = (Timestamp::from_micros(9), Timestamp::from_micros(5));
        let life = InstanceId::random();
        let say = |verb, before, at| changed(verb, before, (at, life), ("ann", now));
        let drained = say(NodeVerb::Drain, NodeFlags::default(), Some(at));
        assert!(drained.cordoned && drained.draining && drained.drain_by == Some(at));
        let cordoned = say(NodeVerb::Cordon, drained.clone(), None);
        assert_eq!(cordoned, drained);
        let revoked = say(NodeVerb::Revoke, drained.clone(), Some(now));
        assert_eq!(
            (revoked.revoked_at, revoked.revoked),
            (Some(now), Some(life))
        );
        assert_eq!(revoked.drain_by, Some(at));
        assert_eq!(
            say(NodeVerb::Drain, revoked.clone(), None).revoked_at,
            Some(now)
        );
        for verb in [NodeVerb::Uncordon, NodeVerb::Undrain] {
            let open = say(verb, revoked.clone(), None);
            assert!(!open.cordoned && !open.draining && open.drain_by.is_none());
            assert_eq!((open.revoked_at, open.revoked), (None, None));
        }
    }
}
