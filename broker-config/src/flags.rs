//! The flags of nodes in `FIEC_NODES`, changed by compare-and-set.

use async_nats::jetstream::kv;
use fiec_schemas::{NodeFlags, NodeId, subjects};

use crate::{Broker, BrokerError};

/// Most attempts of a change while other writers come first.
const TRIES: u32 = 16;

/// Replaces a node's flags by the result of `change`, and returns it. Returns none if `change`
/// returns none.
///
/// # Errors
/// When the broker fails, or other writers keep coming first.
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
            // Unreadable flags count as none and are replaced.
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
            // Another writer was first: read again.
            Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
            Err(error) => return Err(BrokerError::operation(WHAT)(error)),
        }
    }
    Err(BrokerError::Missing {
        what: format!("a quiet moment on key {key}"),
        hint: ": others keep writing it".to_owned(),
    })
}
