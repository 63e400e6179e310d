//! Questions about nodes and the operators' flags on them.

use async_nats::jetstream::kv;
use fiec_schemas::messages::{ApiReply, ControlRequest, NodeRequest};
use fiec_schemas::{NodeFlags, Timestamp, subjects};

use super::{Answered, Api, parse, somebody};
use crate::effects::NoReply;
use crate::events::Ask;

impl Api {
    pub(super) async fn nodes(&self) -> Answered<ApiReply> {
        Ok(ApiReply {
            nodes: self.ask(Ask::Nodes).await?,
            ..ApiReply::default()
        })
    }

    /// Gives a node its contracts back; its canaries run anew and decide.
    pub(super) async fn release(&self, payload: &[u8]) -> Answered<ApiReply> {
        let NodeRequest { node, who } = parse(payload)?;
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
            Err(NoReply::Refused(reason) | NoReply::Silent(reason)) => {
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
        let NodeRequest { node, who } = parse(payload)?;
        let nodes = self.ask(Ask::Nodes).await?;
        let Some(status) = nodes.iter().find(|n| n.descriptor.node == node) else {
            let names: Vec<_> = nodes.iter().map(|n| n.descriptor.node.as_str()).collect();
            return Err(format!(
                "there is no node {node}; there are: {}",
                names.join(", ")
            ));
        };
        let who = somebody(&who);
        let key = subjects::flags_key(&node);
        let words =
            |error: &dyn std::fmt::Display| format!("cannot write the flags of {node}: {error}");
        let bucket = self
            .effects
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .map_err(|error| words(&error))?;
        for _ in 0..8 {
            let entry = bucket.entry(&key).await.map_err(|error| words(&error))?;
            let (revision, before) = match &entry {
                Some(e) if e.operation == kv::Operation::Put => (
                    e.revision,
                    serde_json::from_slice(&e.value).unwrap_or_default(),
                ),
                Some(e) => (e.revision, NodeFlags::default()),
                None => (0, NodeFlags::default()),
            };
            let flags = NodeFlags {
                cordoned: verb != "uncordon",
                draining: verb == "drain" || (verb == "cordon" && before.draining),
                who: who.clone(),
                at: Timestamp::now(),
            };
            let value = serde_json::to_vec(&flags).map_err(|error| words(&error))?;
            match bucket.update(&key, value.into(), revision).await {
                Ok(_) => {
                    let message = match verb {
                        "drain" => format!(
                            "{node} is draining: {} executions will move to other nodes at their next boundary, as these can take them",
                            status.bound
                        ),
                        "cordon" => format!("{node} is cordoned: nothing new is bound to it"),
                        _ => format!("{node} takes work again"),
                    };
                    return Ok(ApiReply {
                        message,
                        ..ApiReply::default()
                    });
                }
                // Somebody else wrote at this moment: read again.
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(words(&error)),
            }
        }
        Err(words(&"others keep writing them"))
    }
}
