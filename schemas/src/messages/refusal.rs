//! Codes of refusals, for programs. The text beside a code is for people and may change.

use crate::named::named;

named! {
    /// Why the policy service refused a request. The code is in `refusal`, beside the text in
    /// `error`.
    pub enum RefusalCode {
        /// The request or its subject cannot be read.
        Unreadable,
        /// The request breaks a rule. The text names the field.
        Invalid,
        /// The tenant has no such execution.
        UnknownExecution,
        /// The tenant has no such batch.
        UnknownBatch,
        /// There is no such node.
        UnknownNode,
        /// The execution has ended.
        Ended,
        /// The execution is in the requested state already.
        AlreadySo,
        /// The execution cannot be resumed because it is not paused.
        NotPaused,
        /// The execution cannot be retried: it has not failed and was not cancelled, or what it needs is
        /// gone.
        CannotRetry,
        /// The execution cannot be resumed yet: it pauses at its next boundary. Ask again.
        Pausing,
        /// The execution is about to start on a node, or to leave one. Ask again once it runs.
        Moving,
        /// The execution does not run, and the request is for running executions only.
        NotRunning,
        /// No other node can run the execution.
        NoPlace,
        /// The execution's node refused the request.
        NodeRefused,
        /// The execution's node does not answer. Ask again.
        NodeSilent,
        /// Other writers were first at each attempt. Ask again.
        Overtaken,
        /// Submissions of the tenant are still queued. Ask again.
        NotTakenIn,
        /// The service has no room for the request, and did nothing. Ask again.
        Busy,
        /// The service did not answer in time. It may still do the request.
        Unanswered,
        /// The service is starting and still reads the ledgers. Ask again.
        Loading,
        /// The service is ending, and did nothing. Another one answers.
        Ending,
        /// An operation of the broker failed.
        Broker,
    }
}

impl RefusalCode {
    /// True if the service did nothing, and will soon do the same request: it is starting, is ending
    /// and has a successor, or has too much to do at the moment.
    pub fn is_momentary(self) -> bool {
        matches!(self, Self::Busy | Self::Loading | Self::Ending)
    }
}
