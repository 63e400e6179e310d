//! The shared vocabulary of FIEC: ids, messages, events, subjects and their JSON Schemas. It
//! depends on no other crate of FIEC. All others depend on it.

pub mod array;
pub mod author;
mod cause;
pub mod chain;
mod clock;
pub mod dependency;
pub mod duty;
pub mod energy;
pub mod envelope;
pub mod event;
pub mod fault;
pub mod fold;
mod glance;
pub mod hardware;
pub mod ids;
pub mod json_schema;
pub mod limits;
pub mod machine;
pub mod messages;
pub mod named;
pub mod package;
mod plain;
pub mod programs;
pub mod quota;
pub mod requirements;
pub mod scheduling;
mod secret;
pub mod series;
pub mod spread;
pub mod strict;
pub mod subjects;
pub mod submission;
pub mod substrate;
pub mod surroundings;
mod tagged;
pub mod time;
pub mod trust;
pub mod values;
pub mod variables;

pub use clock::ClockReading;
pub use event::{
    BatchPlace, Binding, Bound, BoundaryEvent, Candidate, Cause, CauseKind, Decision, Entrusted,
    Event, EventKind, Evidence, ExecutionState, LedgerMessage, Output, Phase, PhaseKind,
    RequestKind, Requested, ResultObject, Started, StatePlace,
};
pub use fault::{Fault, FaultKind, Owner, StartError};
pub use fold::TransitionError;
pub use glance::Glance;
pub use hardware::{
    HardwareVector, NodeDescriptor, NodeFlags, Reading, Signal, Threshold, Thresholds,
};
pub use ids::{
    BatchId, BatchName, BoundaryIndex, ClientId, Digest, Epoch, ExecutionId, IdError, InstanceId,
    NodeId, Ordinal, Sequence, Tenant, Timestamp,
};
pub use secret::Secret;
pub use submission::{
    CommitPolicy, Contract, FieldError, LineError, OnFailure, Preferences, Requirements, Submission,
};
