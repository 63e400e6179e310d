//! Quotas.

mod adopting;
pub(crate) mod batch;
pub(crate) mod change;
mod excess;
mod freeing;
mod reserving;
pub(crate) mod table;
mod trimming;
