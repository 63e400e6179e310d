//! The author of a ledger message, as its state names it: `policy/<id>` or
//! `worker/<node>/<instance>`.

use crate::ids::{InstanceId, NodeId};

/// The author name of a policy service.
pub fn of_policy(id: InstanceId) -> String {
    format!("policy/{id}")
}

/// The author name of a life of a node's agent.
pub fn of_worker(node: &NodeId, instance: InstanceId) -> String {
    format!("worker/{node}/{instance}")
}

/// The node and the life of its agent in an author name. `None` if the author is no worker.
pub fn worker(author: &str) -> Option<(&str, &str)> {
    author.strip_prefix("worker/")?.split_once('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_read_as_it_was_written_and_a_policy_service_is_none() {
        let (node, instance) = (NodeId::new("n1").unwrap(), InstanceId::random());
        let author = of_worker(&node, instance);
        assert_eq!(worker(&author), Some(("n1", &*instance.to_string())));
        assert_eq!(worker(&of_policy(instance)), None);
    }
}
