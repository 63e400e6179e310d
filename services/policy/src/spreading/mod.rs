//! Spreading.

pub(crate) mod growth;
mod parts;
mod splitting;
