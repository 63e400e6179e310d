//! The rules of the protocol that a test can take out, and what may go wrong.

/// Which messages a reader counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// Those whose `prev` is the digest of the last valid message before them.
    FollowsLastValid,
    /// Those whose `prev` is the digest of the message just before them, void or not.
    FollowsNeighbour,
    /// All.
    Unchecked,
}

#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub validity: Validity,
    /// An acknowledgement counts only if the life of the broker is that in which the author saw the
    /// sequence it expected.
    pub believe_within_life: bool,
    /// Tips are compared by digest, not by sequence.
    pub compare_digests: bool,
    /// An author that finds its own message in the subject checks that it is valid.
    pub own_must_be_valid: bool,
    /// A new holder knows all messages behind its binding, not only the last.
    pub know_ancestors: bool,
    /// A worker keeps the chain of an execution that it completed.
    pub keep_ended: bool,
    /// A capsule names the life in which its sequence was seen.
    pub capsule_names_life: bool,
    /// Policy services wait until living workers have healed.
    pub grace: bool,
}

impl Rules {
    pub const ALL: Self = Self {
        validity: Validity::FollowsLastValid,
        believe_within_life: true,
        compare_digests: true,
        own_must_be_valid: true,
        know_ancestors: true,
        keep_ended: true,
        capsule_names_life: true,
        grace: false,
    };
}

/// How often each fault may happen.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    pub lost_acks: u8,
    pub crashes: u8,
    /// A policy service takes a living worker for gone.
    pub suspicions: u8,
    /// Largest number of messages lost when the broker restarts; none: it does not restart.
    pub rollback: Option<u8>,
    /// Appends to other subjects behind the rollback.
    pub foreign: u8,
}
