//! The nodes as one request sees them. They are read once, and a silent node is not asked again. So
//! a request about thousands of executions waits at most once for each node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use fiec_schemas::NodeId;

use super::Api;
use crate::events::Ask;

/// Lost and silent nodes while one request is answered.
#[derive(Debug, Default)]
pub(super) struct Sight {
    lost: BTreeSet<NodeId>,
    silent: Mutex<BTreeMap<NodeId, String>>,
}

impl Sight {
    /// True if the node is lost, so that its executions may be changed without asking it.
    pub(super) fn is_lost(&self, node: &NodeId) -> bool {
        self.lost.contains(node)
    }

    /// Why a node did not answer earlier in this request.
    pub(super) fn silence_of(&self, node: &NodeId) -> Option<String> {
        let silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.get(node).cloned()
    }

    /// Notes that a node did not answer.
    pub(super) fn was_silent(&self, node: &NodeId, reason: &str) {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.insert(node.clone(), reason.to_owned());
    }
}

impl Api {
    /// Reads the lost nodes once.
    pub(super) async fn sight(&self) -> Sight {
        Sight {
            // While the core knows nothing yet, no node counts as lost, and each is asked.
            lost: self.ask(Ask::Lost).await.unwrap_or_default(),
            silent: Mutex::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_was_silent_is_known_as_such_for_the_rest_of_the_request() {
        let node = |name: &str| name.parse::<NodeId>().unwrap();
        let sight = Sight {
            lost: BTreeSet::from([node("gone")]),
            ..Sight::default()
        };
        assert!(sight.is_lost(&node("gone")) && !sight.is_lost(&node("n1")));
        assert_eq!(sight.silence_of(&node("n1")), None);
        sight.was_silent(&node("n1"), "no answer within 2000 ms");
        let reason = sight.silence_of(&node("n1"));
        assert_eq!(reason.as_deref(), Some("no answer within 2000 ms"));
        assert_eq!(sight.silence_of(&node("n2")), None);
    }
}
