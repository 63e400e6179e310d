//! Plays clusters against the production policy on a virtual clock.
//!
//! A [`Scenario`] says what nodes there are, what presses on them, what is submitted and what goes
//! wrong; everything that is drawn follows from its seed. [`play`] runs it: workers and the broker
//! are played (compare-and-set appends over the real fold, feeds, lost and doubled messages, stalls,
//! partitions), the policy is the real one. At every step the promises of [`broken::Rule`] are
//! checked; the first that is broken ends the run, and [`shrink`](shrink::shrink) makes the scenario
//! smaller.
//!
//! What is modelled: computing time by a node's speed, boundaries, commits, memory that executions
//! take, dependencies, gangs, batches of which some run at once, tenants' quotas and reservations,
//! parking, programs that fail, drains with a deadline, revocations, ranges that are spread. What is
//! not: the time that σ takes on the way (its bytes are counted), devices, programs that crash and
//! are tried again, or ask for more, energy, verification, operators other than drains and cordons,
//! leases.

pub mod broken;
mod check_scenario;
pub mod decide;
mod demands;
pub mod disciplines;
pub mod draw;
pub mod feed;
pub mod history;
pub mod load;
pub mod node;
pub mod placements;
pub mod queue;
pub mod random;
pub mod reallocation;
pub mod scenario;
pub mod settings;
pub mod shrink;
pub mod summary;
pub mod trace;
pub mod world;

pub use broken::{Rule, Violation};
pub use decide::Decide;
pub use scenario::Scenario;
pub use summary::Summary;
pub use world::{Outcome, Progress, World};

use fiec_policy::Policy;
use fiec_schemas::FieldError;

/// Plays a scenario with the production policy; `watch` is told from time to time how far it is.
///
/// # Errors
/// The field of the scenario and the rule that it breaks.
pub fn play(scenario: &Scenario, watch: &mut dyn FnMut(Progress)) -> Result<Outcome, FieldError> {
    let mut make = |config: &fiec_policy::Config, id| Policy::new(config.clone(), id);
    Ok(World::new(scenario, &mut make)?.run(watch))
}
