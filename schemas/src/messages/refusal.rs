//! Why something was not done, for programs. The text beside it is for people and may change.

use crate::named::named;

named! {
    /// Why the policy service did not do what was asked. It stands in `refusal`, beside the text in
    /// `error`.
    pub enum RefusalCode {
        /// The request or its subject cannot be read.
        Unreadable,
        /// The request asks for something that is not allowed: the text names the field.
        Invalid,
        /// The tenant has no such execution.
        UnknownExecution,
        /// The tenant has no such batch.
        UnknownBatch,
        /// There is no such node.
        UnknownNode,
        /// The execution has ended.
        Ended,
        /// It is as it is asked to be.
        AlreadySo,
        /// It cannot be resumed: it is not paused.
        NotPaused,
        /// It cannot be resumed yet: it pauses at its next boundary. Ask again.
        Pausing,
        /// It is about to start on a node, or to leave one. Ask again once it runs.
        Moving,
        /// It does not run, and only one that runs can be changed so.
        NotRunning,
        /// No other node can take it.
        NoPlace,
        /// Its node does not do it.
        NodeRefused,
        /// Its node does not answer. Ask again.
        NodeSilent,
        /// It changed faster than it could be changed. Ask again.
        Overtaken,
        /// Submissions of the tenant are still being taken in. Ask again.
        NotTakenIn,
        /// The service has no room for the request, and did nothing. Ask again.
        Busy,
        /// The service did not answer in time. It may still do what was asked.
        Unanswered,
        /// The service is reading the ledgers at its start. Ask again.
        Loading,
        /// The service ends. Another one answers.
        Ending,
        /// The broker did not do what the service needed for it.
        Broker,
    }
}
