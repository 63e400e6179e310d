//! Changes that nobody has acted on yet.

use super::NodeIx;
use super::changes::Changes;

/// Changes that nobody has acted on yet. Who acts on one clears its mark.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    /// A place may have become free for an execution that waits.
    pub places: bool,
    /// An execution waits that was not tried yet.
    pub newcomers: bool,
    /// What holds executions back may have ended: a dependency, a quota, a gang.
    pub admission: bool,
    nodes: Changes,
}

impl Changed {
    /// True if executions that wait may find a place.
    pub fn may_fill(&self) -> bool {
        self.places || self.newcomers
    }

    /// Notes a changed node of a cluster of `nodes` nodes.
    pub fn node(&mut self, ix: NodeIx, nodes: usize) {
        self.nodes.note(ix, nodes);
    }

    /// The changed nodes, in order.
    pub fn nodes(&self) -> &Changes {
        &self.nodes
    }
}
