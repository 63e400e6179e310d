//! Verification.

pub mod check;
pub mod claim;
mod comparing;
mod judge;
pub mod named;
pub(crate) mod standing;

pub use check::{Check, Recall, is_drawn};
pub use claim::{Claim, Trial};
pub use named::Named;
