//! What ledgers say.
//!
//! * [`following`] follows the messages of a ledger, [`facts`] reads them.
//! * [`appends`] and [`settling`]: the results of this service's own appends.
//! * [`pace`] learns how fast executions compute; [`rhythm`] is what is known of it.

mod appends;
mod facts;
mod following;
mod pace;
pub(crate) mod rhythm;
mod settling;
