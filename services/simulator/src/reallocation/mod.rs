//! Compares over-commit with reconfiguration: jobs whose need for device memory grows, on devices
//! with budgets, under the production policy on a virtual clock.
//!
//! Three ways to give jobs memory:
//!
//! * **reserved**: each job has its peak from start to end.
//! * **over-commit**: each job starts with its first need, and takes its peak when it needs it. If
//!   the device has too little, the job is killed. It restarts on the same device from its last
//!   commit with growing delays until it fits, and holds no memory in between. A revoked node takes
//!   its jobs down.
//! * **reconfigured**: each job starts with its first need and requests its peak at a boundary. The
//!   node grants memory that is free on the device. Otherwise the policy moves, parks or suspends
//!   the job. Jobs leave a revoked node at boundaries before its end.
//!
//! The model covers device memory, computing time, boundaries, commits, crashes and revocation.
//! Jobs on one device share it evenly if they want more than all of it. The transfer of σ and the
//! start of a process take one second together.
//!
//! The best way depends on the scarce resource ([`Short`]). If jobs leave most of a device's units
//! idle, its memory limits how many compute at once. If a few jobs fill the units, unused reserved
//! memory costs little.

mod stage;

use serde::{Deserialize, Serialize};

use crate::draw::{Draw, Purpose};
use stage::Stage;

/// The way in which jobs get memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The peak, all the time.
    Reserved,
    /// The first need; the peak is taken without a grant.
    OverCommit,
    /// The first need; the peak is requested at a boundary.
    Reconfigured,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Reserved, Self::OverCommit, Self::Reconfigured];

    /// The name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::OverCommit => "over-commit",
            Self::Reconfigured => "reconfigured",
        }
    }
}

/// The scarce resource of a mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Short {
    /// Memory: a job keeps 10 to 30 % of a device's units busy.
    Memory,
    /// Units: a job keeps 30 to 60 % of them busy.
    Units,
}

impl Short {
    /// Both resources.
    pub const ALL: [Self; 2] = [Self::Memory, Self::Units];

    /// The name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Units => "units",
        }
    }

    /// The smallest and the largest share of a device's units that a job keeps busy.
    pub fn units(self) -> (f64, f64) {
        match self {
            Self::Memory => (0.1, 0.3),
            Self::Units => (0.3, 0.6),
        }
    }
}

/// The jobs and the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// The scarce resource.
    pub short: Short,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Number of nodes with two devices each, of 80 and 40 GiB.
    pub nodes: usize,
    /// Number of jobs.
    pub jobs: u64,
    /// Mean time between two submissions, in seconds.
    pub every_s: f64,
    /// Interval of revocations in seconds, with a notice of 30 s and a return after 60 s; 0 for
    /// none.
    pub revoke_every_s: u64,
}

/// One job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// Time of its submission from the start, in ms.
    pub submit_ms: u64,
    /// Computing time alone on a device, in ms.
    pub work_ms: u64,
    /// First need, in GiB.
    pub base: u64,
    /// Need from `grows_at_ms` on, in GiB.
    pub peak: u64,
    /// Work after which it grows, in ms.
    pub grows_at_ms: u64,
    /// The share of a device's units that it keeps busy.
    pub units: f64,
}

/// The result of a mix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Time from the first submission to the last completion, in seconds.
    pub makespan_s: f64,
    /// Mean time from submission to completion, in seconds.
    pub mean_s: f64,
    /// The 95th percentile of that time, in seconds.
    pub p95_s: f64,
    /// Device hours of the cluster until the last completion.
    pub device_hours: f64,
    /// The share of the devices' units that did work that counted.
    pub utilization: f64,
    /// The share of the devices' time with less than half of a held device's memory in use.
    pub partly_used: f64,
    /// Repeated computation in total, in seconds.
    pub lost_s: f64,
    /// The part of it that is due to revocations, in seconds.
    pub lost_to_revocation_s: f64,
    /// Number of kills for lack of memory.
    pub killed: u64,
    /// Number of moves between nodes or devices.
    pub moved: u64,
    /// Number of parks.
    pub parked: u64,
    /// Number of executions that gave up their place and waited.
    pub suspended: u64,
    /// Number of jobs that did not end within the played time.
    pub unfinished: u64,
}

const LONGEST_MS: u64 = 24 * 3_600_000;

/// Devices of each node, with their GiB.
pub const DEVICES: [(&str, u64); 2] = [("large", 80), ("small", 40)];

/// The jobs of a mix, in the order of their submission.
pub fn jobs(mix: &Mix) -> Vec<Job> {
    let (least, most) = mix.short.units();
    let mut draw = Draw::new(mix.seed, Purpose::Workload(0));
    let mut at = 0.0;
    (0..mix.jobs)
        .map(|_| {
            at += draw.exponential(mix.every_s) * 1_000.0;
            // A heavy tail: most jobs take minutes, a few an hour.
            let minutes = (2.0 / (1.0 - draw.unit()).powf(0.7)).min(60.0);
            let base = 4 + draw.below(13);
            let grows = draw.chance(0.6);
            let peak = if grows {
                (base + 12 + draw.below(17)).min(40)
            } else {
                base
            };
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "times below 2^52, not negative"
            )]
            let (submit_ms, work_ms, grows_at_ms) = {
                let work = minutes * 60_000.0;
                (
                    at as u64,
                    work as u64,
                    (work * (0.4 + 0.5 * draw.unit())) as u64,
                )
            };
            Job {
                submit_ms,
                work_ms,
                base,
                peak,
                grows_at_ms,
                units: least + (most - least) * draw.unit(),
            }
        })
        .collect()
}

/// Plays a mix.
pub fn play(mix: &Mix, mode: Mode) -> Measured {
    Stage::new(mix, mode, jobs(mix)).run(LONGEST_MS)
}
