//! What has been said about nodes: their flags in `FIEC_NODES`, changed by compare-and-set.

use async_nats::jetstream::kv;
use fiec_schemas::{NodeFlags, NodeId, subjects};

use crate::{Broker, BrokerError};

/// How often a change is tried that others come before.
const TRIES: u32 = 16;

/// Puts what `change` makes of a node's flags in their place, and returns it; none where `change`
/// says that there is nothing to do.
///
/// # Errors
/// When the broker does not do it, or others keep writing them.
pub async fn change_flags(
    broker: &Broker,
    node: &NodeId,
    mut change: impl FnMut(NodeFlags) -> Option<NodeFlags>,
) -> Result<Option<NodeFlags>, BrokerError> {
    const WHAT: &str = "write a node's flags";
    let key = subjects::flags_key(node);
    let bucket = broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .map_err(BrokerError::operation(WHAT))?;
    for _ in 0..TRIES {
        let entry = bucket
            .entry(&key)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let (revision, before) = match &entry {
            // Flags that cannot be read are as good as none: they are replaced.
            Some(e) if e.operation == kv::Operation::Put => (
                e.revision,
                serde_json::from_slice(&e.value).unwrap_or_default(),
            ),
            Some(e) => (e.revision, NodeFlags::default()),
            None => (0, NodeFlags::default()),
        };
        let Some(flags) = change(before) else {
            return Ok(None);
        };
        let value = serde_json::to_vec(&flags).map_err(BrokerError::operation(WHAT))?;
        match bucket.update(&key, value.into(), revision).await {
            Ok(_) => return Ok(Some(flags)),
            // Somebody else wrote at this moment: read again.
            Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
            Err(error) => return Err(BrokerError::operation(WHAT)(error)),
        }
    }
    Err(BrokerError::Missing {
        what: format!("a quiet moment on key {key}"),
        hint: ": others keep writing it".to_owned(),
    })
}
