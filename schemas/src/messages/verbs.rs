//! What can be asked of the policy service: the verbs in the subjects of its API.

use crate::named::named;

named! {
    /// A request about one execution, on `fiec.api.<verb>.<tenant>`.
    pub enum ExecutionVerb {
        /// Where it stands.
        Status,
        /// End it.
        Cancel,
        /// Stop it at its next boundary until it is resumed.
        Pause,
        /// Let a paused one go on.
        Resume,
        /// Move it to another node.
        Yield,
        /// Change what it may use where it runs.
        Reconfigure,
        /// Change its priority, thresholds, deadline, memory or nodes.
        Adjust,
        /// Why it is where it is.
        Why,
    }
}

named! {
    /// A request about a whole batch, on `fiec.api.batch.<verb>.<tenant>`.
    pub enum BatchVerb {
        /// How many of its executions are in each phase.
        Status,
        /// End all that have not ended.
        Cancel,
        /// Stop all at their next boundaries until they are resumed.
        Pause,
        /// Let the paused ones go on.
        Resume,
    }
}

named! {
    /// A request about one node, on `fiec.api.node.<verb>`.
    pub enum NodeVerb {
        /// Bind nothing new to it.
        Cordon,
        /// Take it back into use.
        Uncordon,
        /// Move everything to other nodes, and bind nothing new to it.
        Drain,
        /// Take it back into use.
        Undrain,
        /// It will be gone at a given time: move everything before that.
        Revoke,
        /// Give it back the contracts that it has lost.
        Release,
    }
}
