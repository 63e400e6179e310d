//! Plays clusters against the production policy on a virtual clock.
//!
//! A [`Scenario`] describes nodes, their loads, submissions and faults; everything that is drawn
//! follows from its seed. [`play`] runs it. Workers and the broker are simulated: compare-and-set
//! appends over the real fold, feeds, lost and duplicated messages, stalls, partitions. The policy
//! is the real one. Every step checks the promises of [`broken::Rule`]. The first violation ends
//! the run, and [`shrink`](shrink::shrink) makes the scenario smaller.
//!
//! | | |
//! |---|---|
//! | modelled | computing time by a node's speed, boundaries, commits, memory use, failing programs |
//! | | dependencies, gangs, batches with limits, quotas, reservations, parks, spread ranges |
//! | | drains with a deadline, cordons, revocations, starts that fail, programs that kill workers |
//! | not modelled | the transfer time of σ (its bytes are counted), devices, energy, leases |
//! | | crashes with retries, requests for more memory, verification, other operators' commands |

pub mod broken;
mod check_scenario;
pub mod decide;
mod demands;
pub mod disciplines;
pub mod draw;
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

/// Plays a scenario with the production policy, and reports its progress to `watch` from time to
/// time.
///
/// # Errors
/// The field of the scenario and the rule that it breaks.
pub fn play(scenario: &Scenario, watch: &mut dyn FnMut(Progress)) -> Result<Outcome, FieldError> {
    let mut make = |config: &fiec_policy::Config, id| Policy::new(config.clone(), id);
    Ok(World::new(scenario, &mut make)?.run(watch))
}
