//! Explanations.

mod beliefs;
pub(crate) mod duties;
mod offers;
pub(crate) mod reports;
mod why;
