//! Over-commit against reconfiguration: one mix of jobs whose need for device memory grows, on
//! devices with budgets, under the production policy on a virtual clock.
//!
//! Three ways to give jobs memory:
//!
//! * **reserved**: each has its peak from its beginning to its end.
//! * **over-commit**: each has what it needs at first, and takes its peak when it needs that. Where
//!   a device has not so much, the job is killed and goes on from its last commit, on the same
//!   device, again and again, ever later, until it fits; until then it holds nothing. A node that is
//!   revoked takes its jobs down as it goes.
//! * **reconfigured**: each has what it needs at first and asks for its peak at a boundary. The
//!   node grants what is free on the device; else the policy moves it, parks it or suspends it. A
//!   revoked node is left at boundaries before it is gone.
//!
//! What is modelled: devices' memory, computing time (jobs on one device share it evenly where they
//! want more than all of it), boundaries, commits, crashes, revocation. What is not: the time that
//! σ takes on the way and a process takes to begin, which are one second together.
//!
//! Which of the three is best depends on what is short ([`Short`]): where jobs leave most of a
//! device's units idle, its memory decides how many compute at once; where a few jobs fill the
//! units, memory that is held and not used costs little.

mod stage;

use serde::{Deserialize, Serialize};

use crate::draw::{Draw, Purpose};
use stage::Stage;

/// How jobs are given memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The peak, all the time.
    Reserved,
    /// What is needed at first; the peak is taken without being granted.
    OverCommit,
    /// What is needed at first; the peak is asked for at a boundary.
    Reconfigured,
}

impl Mode {
    /// All of them.
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

/// Of which the devices of a mix have too little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Short {
    /// Memory: a job keeps a tenth to three tenths of a device's units busy.
    Memory,
    /// Units: a job keeps three to six tenths of them busy.
    Units,
}

impl Short {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Memory, Self::Units];

    /// The name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Units => "units",
        }
    }

    /// The least and the largest share of a device's units that a job keeps busy.
    pub fn units(self) -> (f64, f64) {
        match self {
            Self::Memory => (0.1, 0.3),
            Self::Units => (0.3, 0.6),
        }
    }
}

/// The mix and the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// What is short.
    pub short: Short,
    /// Everything that is drawn follows from it.
    pub seed: u64,
    /// Nodes with two devices each, of 80 and of 40 GiB.
    pub nodes: usize,
    /// Jobs.
    pub jobs: u64,
    /// Mean seconds between two submissions.
    pub every_s: f64,
    /// Every so many seconds a node is revoked, with a notice of 30 s, and comes back after 60 s;
    /// 0: never.
    pub revoke_every_s: u64,
}

/// What a job is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// When it is submitted, in milliseconds from the beginning.
    pub submit_ms: u64,
    /// Computing time alone on a device, in milliseconds.
    pub work_ms: u64,
    /// GiB at first.
    pub base: u64,
    /// GiB from `grows_at_ms` of its work on.
    pub peak: u64,
    /// When it grows, in milliseconds of its work.
    pub grows_at_ms: u64,
    /// The share of a device's units that it keeps busy.
    pub units: f64,
}

/// What came of a mix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// From the first submission to the last completion, in seconds.
    pub makespan_s: f64,
    /// Mean time from submission to completion, in seconds.
    pub mean_s: f64,
    /// The ninety-fifth percentile of that.
    pub p95_s: f64,
    /// Device hours that the cluster had until the last completion.
    pub device_hours: f64,
    /// The share of the devices' units that did work that counted.
    pub utilization: f64,
    /// The share of the devices' time in which one was held with less than half of its memory in use.
    pub partly_used: f64,
    /// Seconds of computing that were done again, in all.
    pub lost_s: f64,
    /// Of those, because a node was gone.
    pub lost_to_revocation_s: f64,
    /// Times that a job was killed for want of memory.
    pub killed: u64,
    /// Moves from one node or device to another.
    pub moved: u64,
    /// Times that one was parked, and suspended.
    pub parked: u64,
    /// Executions that gave their place up and waited.
    pub suspended: u64,
    /// Jobs that did not end within the time that is played.
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
            // A heavy tail: most take minutes, a few an hour.
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
