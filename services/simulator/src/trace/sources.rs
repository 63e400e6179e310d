//! Runs of the simulator that are traced: committed scenarios, and scenarios drawn by seed.

use std::path::{Path, PathBuf};

use fiec_policy::Policy;

use super::{Digested, Recorder, TraceError};
use crate::{Scenario, World, random};

/// The seeds whose traces are committed.
pub const SEEDS: std::ops::RangeInclusive<u64> = 1..=120;
/// From this seed on, policy services hold submissions that find no free slot.
pub const HOLDING: u64 = 101;
/// For so long, in ms: a policy service's default.
const HOLD_MS: u64 = 25;
/// Length of a drawn scenario in a trace, in ms of virtual time. Faults are drawn from 10 s on.
const DURATION_MS: u64 = 40_000;
/// Time for the remaining executions after that, in ms of virtual time.
const DRAIN_MS: u64 = 10_000;
/// Scenarios with more nodes are traced only on demand.
const NODES_LIMIT: usize = 1_000;

/// The scenario of a seed, as it is traced: short.
pub fn drawn(seed: u64) -> Scenario {
    let mut scenario = random::scenario(seed);
    scenario.duration_ms = DURATION_MS;
    scenario.drain_ms = DRAIN_MS;
    if seed >= HOLDING {
        scenario.hold_ms = HOLD_MS;
    }
    scenario
}

/// The name of a seed's trace.
pub fn name_of_seed(seed: u64) -> String {
    format!("seed:{seed}")
}

/// The seed of such a name.
pub fn seed_of(name: &str) -> Option<u64> {
    name.strip_prefix("seed:")?.parse().ok()
}

/// Scenario files of a folder whose traces are committed, in order.
///
/// # Errors
/// If the folder or a file cannot be read. A file that is no scenario is listed.
pub fn scenarios(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let text = match path.extension().is_some_and(|e| e == "json") {
            true => std::fs::read(&path)?,
            false => continue,
        };
        let scenario = Scenario::parse(&text);
        if scenario.map_or(true, |s| s.node_count() <= NODES_LIMIT) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Plays a scenario with the production policy, recorded.
///
/// # Errors
/// The field of the scenario and the rule that it breaks, or a failure to write.
pub fn record(scenario: &Scenario, recorder: &Recorder) -> Result<Digested, TraceError> {
    let mut make = |config: &fiec_policy::Config, id| {
        recorder.policy(config, id, |config, id| Policy::new(config.clone(), id))
    };
    World::new(scenario, &mut make)?.run(&mut |_| {});
    recorder.finish()
}
