//! Options of a policy service for sharing the nodes among executions.

use clap::Args;
use fiec_policy::Config;
use fiec_policy::Discipline;

/// Order of the queue, and rules of preemption.
#[derive(Debug, Args)]
pub struct SharingArgs {
    /// Order of the queue: `shared` (priority, ageing, fair share, deadline, least service),
    /// `fifo`, `priority`, `least_attained`
    #[arg(long, env = "FIEC_DISCIPLINE", default_value_t = Discipline::Shared)]
    pub discipline: Discipline,
    /// Never preempt a running execution for a higher priority, a tenant below its share or a
    /// deadline
    #[arg(long, env = "FIEC_NO_PREEMPTION")]
    pub no_preemption: bool,
    /// Never preempt a running execution because its time slice is over
    #[arg(long, env = "FIEC_NO_SLICING")]
    pub no_slicing: bool,
    /// Time slice in milliseconds; only an execution that has waited for a slice can end another
    /// one's
    #[arg(long, env = "FIEC_SLICE_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub slice_ms: u64,
    /// Least milliseconds that an execution computes in its place before it is preempted
    #[arg(long, env = "FIEC_RESIDENCY_MS", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub residency_ms: u64,
    /// The same, as a multiple of the measured cost of a move
    #[arg(long, env = "FIEC_RESIDENCY_MOVES", default_value_t = 20)]
    pub residency_moves: u64,
    /// Milliseconds of waiting that count as one higher priority; 0: never
    #[arg(long, env = "FIEC_AGEING_MS", default_value_t = 3_600_000)]
    pub ageing_ms: u64,
    /// Milliseconds that a gang waits before freed slots and devices are reserved for it
    #[arg(long, env = "FIEC_GANG_KEEP_MS", default_value_t = 10_000)]
    pub gang_keep_ms: u64,
    /// Milliseconds that executions beyond a lowered quota continue
    #[arg(long, env = "FIEC_QUOTA_GRACE_MS", default_value_t = 30_000)]
    pub quota_grace_ms: u64,
    /// Milliseconds after which a tenant's past usage counts half
    #[arg(long, env = "FIEC_HALF_LIFE_MS", default_value_t = 3_600_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub half_life_ms: u64,
}

impl SharingArgs {
    /// Copies the options into a policy's settings.
    pub fn apply(&self, config: &mut Config) {
        config.discipline = self.discipline;
        config.preempt = !self.no_preemption;
        config.sharing.slicing = !self.no_slicing;
        config.slice_ms = self.slice_ms;
        config.preempt_residency_ms = self.residency_ms;
        config.preempt_residency_moves = self.residency_moves;
        config.ageing_ms = self.ageing_ms;
        config.gangs.keep_ms = self.gang_keep_ms;
        config.quotas.grace_ms = self.quota_grace_ms;
        config.half_life_ms = self.half_life_ms;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        sharing: SharingArgs,
    }

    #[test]
    fn without_options_the_policy_is_as_by_default() {
        let parsed = Command::try_parse_from(["policy"]).unwrap();
        let mut config = Config {
            slice_ms: 1,
            ..Config::default()
        };
        parsed.sharing.apply(&mut config);
        assert_eq!(config, Config::default());
    }

    #[test]
    fn a_discipline_is_named_and_a_wrong_one_refused_with_the_names() {
        let parsed = Command::try_parse_from(["policy", "--discipline", "fifo", "--no-slicing"]);
        let mut config = Config::default();
        parsed.unwrap().sharing.apply(&mut config);
        assert_eq!(
            (config.discipline, config.sharing.slicing),
            (Discipline::Fifo, false)
        );
        let wrong = Command::try_parse_from(["policy", "--discipline", "lottery"]);
        assert!(wrong.unwrap_err().to_string().contains("least_attained"));
    }
}
