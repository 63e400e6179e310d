//! Order of the queue: effective priority, then the tenant's share, then the earliest deadline,
//! then the least service, then age.
//!
//! The **effective priority** grows during the wait, so that no execution starves:
//!
//! ```text
//! e = priority + floor(time waited / (ageing + service))
//! ```
//!
//! *service* is the expected remaining service. Executions with much service age more slowly, or a
//! crowd of long ones would age past all short ones. A newcomer has an effective priority of 100 at
//! most. So no execution passes one that was submitted (101 − priority) · (ageing + service)
//! earlier. The wait counts from the submission, or from the last computation if there was one.
//!
//! A **preempted, parked** execution keeps memory, and perhaps its device, while it waits. Short
//! executions could pass it again and again. So once it has waited for
//!
//! ```text
//! patience = slice · (1 + service level)
//! ```
//!
//! it goes before all executions of its effective priority, tenant and deadline that were submitted
//! later, as if it had attained nothing. The service level is a logarithm. An execution with much
//! service thus waits longer, and still gets at least one of every 2 + level slices if short work
//! never ends. No execution is preempted for this reason: the parked one gets the next free place.
//!
//! The **service level** stands for the expected remaining time. For a job of unknown length with a
//! heavy tail, the best guess is the time that it has computed: the mean residual life of a Pareto
//! distribution is proportional to its age. So the least attained service goes first. If the client
//! stated the length, the rest of it counts instead. Levels double: 0 up to one slice, 1 up to two,
//! 2 up to four, …. So two long jobs swap places ever more rarely (discretized two-dimensional LAS
//! as in Tiresias, Gu et al., NSDI 2019; foreground-background scheduling, Nuyens and Wierman,
//! 2008).

use std::fmt;
use std::str::FromStr;

use fiec_schemas::{ExecutionId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::lifecycle::cluster::profile::Profile;

/// Order of the queue and rule of preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Discipline {
    /// By age alone, without preemption.
    Fifo,
    /// By priority, then age; a higher priority preempts.
    Priority,
    /// Least attained service first, one slice at a time.
    LeastAttained,
    /// Priority, ageing, fair share, deadlines, and doubling service levels.
    #[default]
    Shared,
}

impl Discipline {
    /// All disciplines.
    pub const ALL: [Self; 4] = [
        Self::Fifo,
        Self::Priority,
        Self::LeastAttained,
        Self::Shared,
    ];

    /// The name in settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Priority => "priority",
            Self::LeastAttained => "least_attained",
            Self::Shared => "shared",
        }
    }
}

impl fmt::Display for Discipline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Discipline {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|d| d.as_str() == text);
        found.ok_or_else(|| {
            format!("{text:?} is no discipline; there are fifo, priority, least_attained, shared")
        })
    }
}

/// Rank of an execution within its effective priority and tenant; the smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Its deadline, or the far future.
    pub deadline: Timestamp,
    /// Its service level.
    pub level: u32,
    /// Time of its submission.
    pub submitted_at: Timestamp,
    /// Its id.
    pub id: ExecutionId,
}

/// A moment after all others.
pub const NEVER: Timestamp = Timestamp::from_micros(i64::MAX);

/// The priority that the discipline uses.
pub fn priority(config: &Config, profile: &Profile) -> i32 {
    match config.discipline {
        Discipline::Priority | Discipline::Shared => i32::from(profile.priority),
        Discipline::Fifo | Discipline::LeastAttained => 0,
    }
}

/// Wait after which the effective priority rises by one, given the expected service. None if it
/// never rises.
pub fn step_ms(config: &Config, service_ms: u64) -> Option<u64> {
    let ages = config.discipline == Discipline::Shared && config.ageing_ms > 0;
    ages.then(|| config.ageing_ms.saturating_add(service_ms))
}

/// Number of priority levels gained by a wait.
pub fn aged(config: &Config, waited_ms: u64, service_ms: u64) -> i32 {
    step_ms(config, service_ms).map_or(0, |step| {
        i32::try_from(waited_ms / step).unwrap_or(i32::MAX / 2)
    })
}

/// How long shorter executions may pass a parked execution of this service level, in ms. None if
/// the discipline has no such bound, or the level is 0.
pub fn patience_ms(config: &Config, level: u32) -> Option<u64> {
    let bounded = config.discipline == Discipline::Shared && level > 0;
    bounded.then(|| config.slice_ms.saturating_mul(u64::from(level) + 1))
}

/// Expected remaining time, in ms.
pub fn rest_ms(profile: &Profile, attained_ms: u64) -> u64 {
    let expected = profile.expected_s.map_or(0, |s| u64::from(s) * 1_000);
    match expected.checked_sub(attained_ms) {
        Some(rest) if rest > 0 => rest,
        // The length was not stated, or was wrong.
        _ => attained_ms,
    }
}

/// The service level after this much computing.
pub fn level(config: &Config, profile: &Profile, attained_ms: u64) -> u32 {
    let slice = config.slice_ms.max(1);
    match config.discipline {
        Discipline::Fifo | Discipline::Priority => 0,
        Discipline::LeastAttained => u32::try_from(attained_ms / slice).unwrap_or(u32::MAX),
        Discipline::Shared => match rest_ms(profile, attained_ms) / slice {
            0 => 0,
            slices => slices.ilog2() + 1,
        },
    }
}

/// The deadline if the discipline uses deadlines.
pub fn deadline(config: &Config, profile: &Profile, submitted_at: Timestamp) -> Timestamp {
    match (config.discipline, profile.deadline) {
        (Discipline::Shared, Some(deadline)) => deadline.moment(submitted_at),
        _ => NEVER,
    }
}

/// The rank within an effective priority and tenant.
pub fn rank(
    config: &Config,
    profile: &Profile,
    attained_ms: u64,
    submitted_at: Timestamp,
    id: ExecutionId,
) -> Rank {
    Rank {
        deadline: deadline(config, profile, submitted_at),
        level: level(config, profile, attained_ms),
        submitted_at,
        id,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_schemas::Submission;

    fn profile(fields: &str) -> Profile {
        let line = format!(r#"{{"program":"synthetic@1"{fields}}}"#);
        Profile::from(&Submission::parse(line.as_bytes()).unwrap())
    }

    #[test]
    fn levels_double_with_what_was_attained_and_fall_with_what_is_left() {
        let config = Config::default();
        let unknown = profile("");
        let levels = [0, 29_999, 30_000, 59_999, 60_000, 120_000, 3_600_000];
        let found = levels.map(|ms| level(&config, &unknown, ms));
        assert_eq!(found, [0, 0, 1, 1, 2, 3, 7]);
        let told = profile(r#","expected_s":3600"#);
        assert_eq!(level(&config, &told, 0), 7);
        assert_eq!(level(&config, &told, 3_590_000), 0, "ten seconds are left");
        assert_eq!(level(&config, &told, 7_200_000), 8, "it was not so");
    }

    #[test]
    fn every_discipline_is_read_by_its_name() {
        for discipline in Discipline::ALL {
            assert_eq!(discipline.as_str().parse(), Ok(discipline));
        }
        let wrong = "lottery".parse::<Discipline>();
        assert!(wrong.unwrap_err().contains("least_attained"));
    }
}
