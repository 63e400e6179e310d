//! Who goes before whom: effective priority, then the tenant's share, then the earliest deadline,
//! then the least service, then age.
//!
//! The **effective priority** grows while an execution waits, so that nothing waits for ever:
//!
//! ```text
//! e = priority + floor(time waited / (ageing + service))
//! ```
//!
//! where service is what the service level goes by: who has had much, or wants much, waits in
//! proportion, or a crowd of long ones would age past everything that is short. Of what is submitted
//! more than (101 − priority) · (ageing + service) later nothing passes it: whatever comes then has
//! an effective priority of 100 at most. Time counts since the submission for what has never
//! computed, and since it last computed for what has.
//!
//! What was **set aside** for another keeps memory, and perhaps its device, while it waits, and what
//! is short would pass it again and again. So once it has waited for
//!
//! ```text
//! patience = slice · (1 + service level)
//! ```
//!
//! it goes before everything of its effective priority, tenant and deadline that was submitted after
//! it, as if it had had nothing. The level is a logarithm, so that one which has had much still
//! waits longer, and has at least one of every 2 + level slices where short work never ends. Nobody
//! gives way to it for that: it has the next place that becomes free.
//!
//! The **service level** stands for how long it will still want a place. Of a job of unknown length
//! with a heavy tail the best guess is that it goes on for about as long as it has computed (the
//! mean residual life of a Pareto distribution is proportional to its age), which is why the least
//! attained service goes first; where the client said how long it takes, what is left of that
//! counts instead. Levels double: 0 up to one slice, 1 up to two, 2 up to four, …, so that two long
//! jobs change places ever more rarely (discretized two-dimensional LAS as in Tiresias, Gu et al.,
//! NSDI 2019; foreground-background scheduling, Nuyens and Wierman, 2008).

use std::fmt;
use std::str::FromStr;

use fiec_schemas::{ExecutionId, Timestamp};

use crate::config::Config;
use crate::profile::Profile;

/// By what order what waits is served, and what may give way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Discipline {
    /// By age alone; nothing gives way.
    Fifo,
    /// By priority, then age; what runs gives way to a higher priority.
    Priority,
    /// Least attained service: whoever has computed least goes first, one slice at a time.
    LeastAttained,
    /// All of it: priority, ageing, fair share, deadlines, doubling levels of service.
    #[default]
    Shared,
}

impl Discipline {
    /// All of them.
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

/// The place of an execution among those of one effective priority and tenant; smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// By when it should be done; the far future where nothing is said.
    pub deadline: Timestamp,
    /// Its level of service.
    pub level: u32,
    /// When it was submitted.
    pub submitted_at: Timestamp,
    /// Which.
    pub id: ExecutionId,
}

/// A moment after all others.
pub const NEVER: Timestamp = Timestamp::from_micros(i64::MAX);

/// Its priority as the discipline sees it.
pub fn priority(config: &Config, profile: &Profile) -> i32 {
    match config.discipline {
        Discipline::Priority | Discipline::Shared => i32::from(profile.priority),
        Discipline::Fifo | Discipline::LeastAttained => 0,
    }
}

/// After how long a wait the effective priority rises by one, for one that is expected to want so
/// much service; none where it never does.
pub fn step_ms(config: &Config, service_ms: u64) -> Option<u64> {
    let ages = config.discipline == Discipline::Shared && config.ageing_ms > 0;
    ages.then(|| config.ageing_ms.saturating_add(service_ms))
}

/// How many levels so long a wait is worth.
pub fn aged(config: &Config, waited_ms: u64, service_ms: u64) -> i32 {
    step_ms(config, service_ms).map_or(0, |step| {
        i32::try_from(waited_ms / step).unwrap_or(i32::MAX / 2)
    })
}

/// How long one of this service level that was set aside is passed by what is shorter, in
/// milliseconds; none where the discipline knows no such bound, or it is not passed for that.
pub fn patience_ms(config: &Config, level: u32) -> Option<u64> {
    let bounded = config.discipline == Discipline::Shared && level > 0;
    bounded.then(|| config.slice_ms.saturating_mul(u64::from(level) + 1))
}

/// How much longer it is expected to want a place, in milliseconds.
pub fn rest_ms(profile: &Profile, attained_ms: u64) -> u64 {
    let expected = profile.expected_s.map_or(0, |s| u64::from(s) * 1_000);
    match expected.checked_sub(attained_ms) {
        Some(rest) if rest > 0 => rest,
        // It was not said, or was not so.
        _ => attained_ms,
    }
}

/// Its level of service after so much computing.
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

/// By when it should be done, where the discipline looks at that.
pub fn deadline(config: &Config, profile: &Profile, submitted_at: Timestamp) -> Timestamp {
    match (config.discipline, profile.deadline) {
        (Discipline::Shared, Some(deadline)) => deadline.moment(submitted_at),
        _ => NEVER,
    }
}

/// Its place among those of its effective priority and tenant.
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
