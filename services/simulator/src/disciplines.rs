//! Compares disciplines on one trace: heavy-tailed jobs of one device each on a small cluster, with
//! the moving costs of training jobs.
//!
//! The trace is drawn, not recorded. Lengths are bounded Pareto from 52 s to 7 days with exponent
//! 0.5. Their median (204 s) and mean (5,600 s) imitate the 206 s and 6,652 s of the 1,580,464 GPU
//! jobs of the Helios clusters. Source: `med_run_time_gpu` and `avg_run_time_gpu` of all four
//! clusters in `analysis/1_compare with Philly trace/helios_cluster_summary.csv` of the artifact
//! S-Lab-System-Group/HeliosArtifact of Hu et al., *Characterization and Prediction of Deep
//! Learning Workloads in Large-Scale GPU Datacenters*, SC 2021, arXiv 2109.01313. Those jobs had
//! 3.7 GPUs on average and one in the median.
//!
//! The rest is invented. Submissions are Poisson. Half of the jobs below an hour have priority 10,
//! like jobs that people wait for; no longer job has. No job states its length.

use fiec_policy::{Config, Policy};
use fiec_schemas::{FieldError, Submission};

use crate::scenario::{Arrivals, NodeGroup, Quantity, Scenario, Workload};
use crate::summary::Summary;
use crate::world::World;
use crate::{Outcome, settings::Settings};

pub use fiec_policy::Discipline;

/// Lengths of the shortest and the longest job, in seconds.
const SHORTEST_S: f64 = 52.0;
const LONGEST_S: f64 = 7.0 * 86_400.0;
/// Exponent of the tail.
const ALPHA: f64 = 0.5;
/// Longest length of a short job, in seconds.
const SHORT_S: f64 = 3_600.0;

/// A trace and its cluster.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Number of nodes, with four slots each.
    pub nodes: u32,
    /// Number of jobs.
    pub jobs: u64,
    /// Submitted work relative to the slots' capacity.
    pub load: f64,
    /// Time to start a job on a node, in ms.
    pub start_ms: u64,
}

impl Default for Trace {
    fn default() -> Self {
        Self {
            seed: 1,
            nodes: 4,
            jobs: 2_000,
            load: 0.85,
            start_ms: 10_000,
        }
    }
}

/// The share of jobs up to this length.
fn share_up_to(seconds: f64) -> f64 {
    (1.0 - (SHORTEST_S / seconds).powf(ALPHA)) / (1.0 - (SHORTEST_S / LONGEST_S).powf(ALPHA))
}

/// The mean length of all jobs, in seconds.
pub fn mean_s() -> f64 {
    let rest = 1.0 - ALPHA;
    ALPHA / rest * SHORTEST_S.powf(ALPHA) * (LONGEST_S.powf(rest) - SHORTEST_S.powf(rest))
        / (1.0 - (SHORTEST_S / LONGEST_S).powf(ALPHA))
}

impl Trace {
    /// The scenario of the trace.
    pub fn scenario(&self) -> Scenario {
        let slots = f64::from(4 * self.nodes);
        let per_s = self.load * slots / mean_s();
        let short = share_up_to(SHORT_S);
        // Cutting a bounded Pareto distribution at a length gives one below it and one above it.
        let workload = |name: &str, share: f64, low: f64, high: f64, priority: i16| {
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a number of jobs"
            )]
            let count = (self.jobs as f64 * share).round() as u64;
            let mut submission = Submission::of("synthetic@1");
            submission.priority = priority;
            if let Some(minute) = std::num::NonZeroU32::new(60_000) {
                submission.commit = fiec_schemas::CommitPolicy::EveryMs(minute);
            }
            Workload {
                name: name.to_owned(),
                arrivals: Arrivals::Poisson {
                    per_s: per_s * share,
                    from_ms: 0,
                    count: Some(count),
                },
                work_ms: Quantity::Pareto {
                    low: low * 1_000.0,
                    high: high * 1_000.0,
                    alpha: ALPHA,
                },
                capsule_ms: Quantity::Uniform {
                    low: 1_000.0,
                    high: 20_000.0,
                },
                state_bytes: Quantity::Fixed(1e8),
                memory_bytes: Quantity::Fixed(0.0),
                tenant: None,
                after: Vec::new(),
                gang: None,
                spread: None,
                fails: 0.0,
                submission,
            }
        };
        Scenario {
            about: "Heavy-tailed jobs of one device each on a small cluster".to_owned(),
            seed: self.seed,
            duration_ms: 180 * 86_400_000,
            drain_ms: 180 * 86_400_000,
            policies: 1,
            policy: Settings {
                liveness_ms: Some(90_000),
                stall_ms: Some(10_000),
                take_ms: Some(60_000),
                order_repeat_ms: Some(120_000),
                ..Settings::default()
            },
            tick_ms: 1_000,
            hold_ms: 0,
            telemetry: crate::scenario::Telemetry {
                sample_ms: 30_000,
                heartbeat_ms: 30_000,
            },
            network: crate::scenario::Network::default(),
            nodes: vec![NodeGroup {
                name: "node".to_owned(),
                count: self.nodes,
                slots: 4,
                memory_bytes: 64 << 30,
                cpus: 8,
                start_ms: self.start_ms,
                parks: 0,
                speed: Quantity::Fixed(1.0),
                labels: Default::default(),
                thresholds: None,
                load: Default::default(),
            }],
            workloads: vec![
                workload("urgent", short / 2.0, SHORTEST_S, SHORT_S, 10),
                workload("short", short / 2.0, SHORTEST_S, SHORT_S, 0),
                workload("long", 1.0 - short, SHORT_S, LONGEST_S, 0),
            ],
            quotas: Vec::new(),
            faults: Vec::new(),
        }
    }

    /// Plays the trace under a discipline, with defaults otherwise.
    ///
    /// # Errors
    /// If a promise is broken, or a job does not end.
    pub fn play(&self, discipline: Discipline) -> Result<Summary, String> {
        play(&self.scenario(), discipline)
    }
}

/// Plays a scenario to the end of all its jobs under a discipline, with its own settings otherwise.
///
/// # Errors
/// If a promise is broken, or a job does not end.
pub fn play(scenario: &Scenario, discipline: Discipline) -> Result<Summary, String> {
    let mut make = |config: &Config, id| {
        let config = Config {
            discipline,
            ..config.clone()
        };
        Policy::new(config, id)
    };
    let world = World::new(scenario, &mut make);
    let world = world.map_err(|e: FieldError| format!("{}: {}", e.field, e.reason))?;
    let Outcome { summary, violation } = world.run(&mut |_| {});
    match violation {
        Some(violation) => Err(violation.to_string()),
        None if summary.completed < summary.submitted => Err(format!(
            "{} of {} jobs ended",
            summary.completed, summary.submitted
        )),
        None => Ok(summary),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_imitates_what_was_published() {
        assert!((mean_s() - 5_600.0).abs() < 100.0, "{}", mean_s());
        let median = share_up_to(204.0);
        assert!((median - 0.5).abs() < 0.005, "{median}");
    }

    #[test]
    fn ours_is_better_than_age_alone_and_everything_ends() {
        let trace = Trace {
            jobs: 150,
            nodes: 1,
            ..Trace::default()
        };
        let mean = |discipline| match trace.play(discipline) {
            Ok(summary) => summary.lasted.mean_ms,
            Err(error) => panic!("{discipline}: {error}"),
        };
        let (fifo, ours) = (mean(Discipline::Fifo), mean(Discipline::Shared));
        assert!(ours < fifo, "{ours} against {fifo}");
    }
}
