//! Verbs of the policy service's API, as they appear in its subjects.

use crate::named::named;

named! {
    /// A request about one execution, on `fiec.api.<verb>.<tenant>`.
    pub enum ExecutionVerb {
        /// Show its state.
        Status,
        /// End it.
        Cancel,
        /// Pause it at its next boundary until it is resumed.
        Pause,
        /// Resume it.
        Resume,
        /// Start it again after it failed or was cancelled, or while it is held.
        Retry,
        /// Move it to another node.
        Yield,
        /// Change its grant.
        Reconfigure,
        /// Change its priority, thresholds, deadline, memory or nodes.
        Adjust,
        /// Explain why it runs where it runs, waits, or has ended.
        Why,
    }
}

named! {
    /// A request about a whole batch, on `fiec.api.batch.<verb>.<tenant>`.
    pub enum BatchVerb {
        /// Show how many of its executions are in each phase.
        Status,
        /// End all executions that have not ended.
        Cancel,
        /// Pause all executions at their next boundaries until they are resumed.
        Pause,
        /// Resume the paused executions.
        Resume,
        /// Start those again that failed, are held or were cancelled.
        Retry,
    }
}

named! {
    /// A request about one node, on `fiec.api.node.<verb>`.
    pub enum NodeVerb {
        /// Place no new execution on it.
        Cordon,
        /// Place new executions on it again.
        Uncordon,
        /// Move all executions to other nodes, and place no new one on it.
        Drain,
        /// End a drain: place new executions on it again, and move no more away.
        Undrain,
        /// Announce when it goes away. All executions leave before.
        Revoke,
        /// Release it from quarantine.
        Release,
    }
}
