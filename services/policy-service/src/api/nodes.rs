//! Questions about nodes and the operators' flags on them.

use fiec_broker::flags;
use fiec_schemas::messages::{ApiReply, ControlRequest, NodeRequest};
use fiec_schemas::surroundings::OffersReply;
use fiec_schemas::{InstanceId, NodeFlags, Timestamp};

use super::{Answered, Api, parse, somebody};
use crate::events::Ask;

impl Api {
    pub(super) async fn nodes(&self) -> Answered<ApiReply> {
        Ok(ApiReply {
            nodes: self.ask(Ask::Nodes).await?,
            ..ApiReply::default()
        })
    }

    /// For agents whose programs ask.
    pub(super) async fn offers(&self) -> OffersReply {
        match self.ask(Ask::Offers).await {
            Ok(offers) => OffersReply {
                error: None,
                offers: Some(offers),
            },
            Err(error) => OffersReply {
                error: Some(error),
                offers: None,
            },
        }
    }

    /// Gives a node its contracts back; its canaries run anew and decide.
    pub(super) async fn release(&self, payload: &[u8]) -> Answered<ApiReply> {
        let NodeRequest { node, who, .. } = parse(payload)?;
        let nodes = self.ask(Ask::Nodes).await?;
        if !nodes.iter().any(|n| n.descriptor.node == node) {
            let names: Vec<_> = nodes.iter().map(|n| n.descriptor.node.as_str()).collect();
            return Err(format!(
                "there is no node {node}; there are: {}",
                names.join(", ")
            ));
        }
        let lost = self.effects.release(&node, &somebody(&who)).await?;
        if lost.is_empty() {
            return Err(format!("{node} is not quarantined"));
        }
        let request = ControlRequest::Prove;
        let timeout = self.options.control_timeout;
        let proves = match self.effects.control(&node, &request, timeout).await {
            Ok(_) => "its canaries run anew, and it takes work again once they pass".to_owned(),
            Err(no_reply) => {
                let reason = no_reply.reason();
                format!("it could not be asked to run its canaries anew ({reason}): restart it")
            }
        };
        let names: Vec<_> = lost.iter().map(|c| c.as_str()).collect();
        Ok(ApiReply {
            message: format!("{node} is released ({}): {proves}", names.join(", ")),
            ..ApiReply::default()
        })
    }

    pub(super) async fn node(&self, verb: &str, payload: &[u8]) -> Answered<ApiReply> {
        let NodeRequest { node, who, seconds } = parse(payload)?;
        let nodes = self.ask(Ask::Nodes).await?;
        let Some(status) = nodes.iter().find(|n| n.descriptor.node == node) else {
            let names: Vec<_> = nodes.iter().map(|n| n.descriptor.node.as_str()).collect();
            return Err(format!(
                "there is no node {node}; there are: {}",
                names.join(", ")
            ));
        };
        if seconds.is_some() && !matches!(verb, "drain" | "revoke") {
            return Err(format!("seconds: {verb} knows no time"));
        }
        if verb == "revoke" && seconds.is_none() {
            return Err("seconds: in how many the node will be gone must be given".to_owned());
        }
        let (who, now) = (somebody(&who), self.effects.broker.now());
        let at = seconds
            .map(|s| Timestamp::from_micros(now.micros().saturating_add(i64::from(s) * 1_000_000)));
        let life = status.descriptor.instance;
        let change = |before| Some(changed(verb, before, (at, life), (&who, now)));
        flags::change_flags(&self.effects.broker, &node, change)
            .await
            .map_err(|error| format!("cannot write the flags of {node}: {error}"))?;
        let bound = match status.bound {
            1 => "1 execution".to_owned(),
            bound => format!("{bound} executions"),
        };
        let message = match (verb, at) {
            ("drain", None) => format!(
                "{node} is draining: {bound} will move to other nodes at their next boundary, as \
                 these can take them"
            ),
            ("drain", Some(at)) => format!(
                "{node} is draining: {bound} will move to other nodes at their next boundary; what \
                 is there at {at} is given up and goes on from its last commit"
            ),
            ("revoke", Some(at)) => format!(
                "{node} will be gone at {at}: {bound} will move before, and what finds no place \
                 commits and waits"
            ),
            ("cordon", _) => format!("{node} is cordoned: nothing new is bound to it"),
            _ => format!("{node} takes work again"),
        };
        Ok(ApiReply {
            message,
            ..ApiReply::default()
        })
    }
}

/// A node's flags after a request.
fn changed(
    verb: &str,
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
        "cordon" => NodeFlags {
            cordoned: true,
            draining: before.draining,
            drain_by: before.drain_by,
            revoked_at: before.revoked_at,
            revoked: before.revoked,
            ..said
        },
        "drain" => NodeFlags {
            cordoned: true,
            draining: true,
            drain_by: at,
            revoked_at: before.revoked_at,
            revoked: before.revoked,
            ..said
        },
        "revoke" => NodeFlags {
            cordoned: before.cordoned,
            draining: before.draining,
            drain_by: before.drain_by,
            revoked_at: at,
            revoked: Some(life),
            ..said
        },
        _ => said,
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
        let drained = say("drain", NodeFlags::default(), Some(at));
        assert!(drained.cordoned && drained.draining && drained.drain_by == Some(at));
        let cordoned = say("cordon", drained.clone(), None);
        assert_eq!(cordoned, drained);
        let revoked = say("revoke", drained.clone(), Some(now));
        assert_eq!(
            (revoked.revoked_at, revoked.revoked),
            (Some(now), Some(life))
        );
        assert_eq!(revoked.drain_by, Some(at));
        assert_eq!(say("drain", revoked.clone(), None).revoked_at, Some(now));
        for verb in ["uncordon", "undrain"] {
            let open = say(verb, revoked.clone(), None);
            assert!(!open.cordoned && !open.draining && open.drain_by.is_none());
            assert_eq!((open.revoked_at, open.revoked), (None, None));
        }
    }
}
