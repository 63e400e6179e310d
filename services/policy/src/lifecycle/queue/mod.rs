//! The queue: who waits for a place, whose turn it is, and who is bound first.
//!
//! * [`order`] compares executions, [`waiting`] keeps them in that order, [`turn`] finds whose turn it
//!   is.
//! * [`filling`] binds them as far as there is room.
//! * [`leading`]: the gang for which places are kept, and who may take them all the same.
//! * [`regret`] estimates the loss by a preemption.

mod filling;
pub(crate) mod leading;
pub(crate) mod order;
pub(crate) mod regret;
mod turn;
pub(crate) mod waiting;
