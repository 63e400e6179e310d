//! Reasons to refuse an operator's request.

use std::fmt;

use fiec_schemas::NodeId;

use crate::lifecycle::placement::NAMES;

/// Reason why an execution does not move to another node.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum YieldRefusal {
    /// No live execution has this id.
    #[error(
        "it is not running: it has ended, or it never was (`fiec retry` starts one that failed or \
         was cancelled again)"
    )]
    NotLive,
    /// Its binding is being appended.
    #[error("its binding to a node is being stored. Try again")]
    Busy,
    /// It has no node.
    #[error(
        "it is not bound to a node yet. `fiec why` says what it waits for, and `fiec pin` chooses \
         its node"
    )]
    Pending,
    /// It is paused.
    #[error("it is paused and on no node. Use `fiec resume`")]
    Paused,
    /// It has failed and is held.
    #[error("it has failed and is held. Use `fiec retry`")]
    HasFailed,
    /// Its computation is done, and verification is under way.
    #[error("its computation is done, and other nodes verify it")]
    Verifying,
    /// It waits for other executions.
    #[error("{0}")]
    Held(String),
    /// The node to move to has not joined.
    #[error("{0}")]
    UnknownNode(UnknownNode),
    /// It is already on the wanted node.
    #[error("it is on {0} already")]
    AlreadyThere(NodeId),
    /// The wanted node cannot take it.
    #[error("{to} cannot take it: {}", reasons.join("; "))]
    Rejected {
        /// The node.
        to: NodeId,
        /// The reasons.
        reasons: Vec<String>,
    },
    /// There is no other node.
    #[error("there is no other node")]
    NoOther,
    /// No other node can take it.
    #[error("no other node can take it ({})", in_a_row(.0))]
    NoPlace(Vec<(NodeId, Vec<String>)>),
}

fn in_a_row(nodes: &[(NodeId, Vec<String>)]) -> String {
    let nodes = nodes.iter();
    let words: Vec<_> = nodes
        .map(|(node, reasons)| format!("{node}: {}", reasons.join("; ")))
        .collect();
    words.join(", ")
}

/// A node that has not joined, with the names of those that have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownNode {
    /// The node.
    pub node: NodeId,
    /// The first joined nodes, ordered by name.
    pub joined: Vec<NodeId>,
    /// Number of further joined nodes.
    pub more: usize,
}

impl UnknownNode {
    /// `joined`: all nodes that have joined.
    pub fn new(node: NodeId, mut joined: Vec<NodeId>) -> Self {
        let more = joined.len().saturating_sub(NAMES);
        joined.truncate(NAMES);
        Self { node, joined, more }
    }
}

impl fmt::Display for UnknownNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = &self.node;
        if self.joined.is_empty() {
            return write!(f, "there is no node {node}: none has joined");
        }
        let joined: Vec<_> = self.joined.iter().map(NodeId::as_str).collect();
        write!(
            f,
            "there is no node {node}; there are: {}",
            joined.join(", ")
        )?;
        match self.more {
            0 => Ok(()),
            more => write!(f, " and {more} others"),
        }
    }
}
