//! The schedule of faults: the same for the same seed.

use std::time::Duration;

/// A generator of numbers: SplitMix64 (Steele, Lea and Flood, “Fast Splittable Pseudorandom Number
/// Generators”, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `n - 1`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    /// A time within these bounds, in ms.
    pub fn between(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to.saturating_sub(from)))
    }
}

/// A kind of process. The number chooses one of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A server of the broker.
    Broker(u64),
    /// The database.
    Postgres,
    /// A policy service.
    Policy(u64),
    /// The recorder.
    Recorder,
    /// A worker.
    Worker(u64),
    /// A child process of a worker.
    Child(u64),
}

/// What happens to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is killed, and started again after this time.
    Kill(Duration),
    /// It is asked to end, and started again after this time.
    Terminate(Duration),
    /// It is stopped, and continued after this time.
    Stop(Duration),
    /// It runs a tenth of the time, so long.
    Lag(Duration),
}

/// Faults that begin together, after a pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Pause before it.
    pub after: Duration,
    /// The faults.
    pub faults: Vec<(Target, Fault)>,
}

/// Draws steps for ever.
#[derive(Debug, Clone)]
pub struct Schedule {
    dice: Dice,
    /// Draw stops of over a minute, too: beyond the retries of an append.
    long: bool,
    /// Steps until the history alone is away.
    until_calm: u64,
    /// How long the last step must be left alone.
    alone: Duration,
    /// The broker is a cluster: some of its servers lag behind the others.
    lags: bool,
}

impl Schedule {
    /// The schedule of a seed. If there are several brokers, some of them lag behind at times.
    pub fn new(seed: u64, long: bool, brokers: usize) -> Self {
        let mut dice = Dice::new(seed);
        let until_calm = 6 + dice.below(10);
        Self {
            dice,
            long,
            until_calm,
            alone: Duration::ZERO,
            lags: brokers > 1,
        }
    }

    /// The recorder alone is away for so long that commits without a bound would become too rare. The
    /// ledgers still hold what it has not read: with 24 messages at first, and then one in 2 s, 64
    /// last for about 80 s.
    fn calm(&mut self) -> Step {
        self.until_calm = 30 + self.dice.below(20);
        self.alone = self.dice.between(52_000, 56_000);
        Step {
            after: self.dice.between(4_000, 6_000),
            faults: vec![(Target::Recorder, Fault::Stop(self.alone))],
        }
    }

    fn target(&mut self) -> Target {
        let which = self.dice.draw();
        match self.dice.below(12) {
            0 | 1 => Target::Broker(which),
            2 => Target::Postgres,
            3..=5 => Target::Policy(which),
            6 => Target::Recorder,
            7..=9 => Target::Worker(which),
            _ => Target::Child(which),
        }
    }

    /// How long a process stays stopped: below every time limit, beyond the lease and the liveness
    /// time, beyond the broker's wait for an acknowledgement, beyond the retries of an append.
    fn stop(&mut self, target: Target) -> Fault {
        let (from, to) = match self.dice.below(8) {
            0..=2 => (100, 1_500),
            3 | 4 => (3_000, 5_000),
            5 | 6 => (8_500, 11_000),
            // Beside other faults more messages would drop out before the recorder reads them.
            _ if self.long && target != Target::Recorder => (62_000, 75_000),
            _ => (11_000, 14_000),
        };
        Fault::Stop(self.dice.between(from, to))
    }

    fn fault(&mut self, target: Target) -> Fault {
        let down = self.dice.between(0, 4_000);
        match (target, self.dice.below(10)) {
            // Stopping the first process of PostgreSQL leaves its sessions running. A child is
            // started again by its worker.
            (Target::Postgres | Target::Child(_), _) => Fault::Kill(down),
            (Target::Broker(_), 0..=3) if self.lags => Fault::Lag(5 * down),
            (_, 0..=3) => Fault::Kill(down),
            (Target::Policy(_) | Target::Worker(_) | Target::Recorder, 4) => Fault::Terminate(down),
            _ => self.stop(target),
        }
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.until_calm == 0 {
            return Some(self.calm());
        }
        self.until_calm -= 1;
        let after = std::mem::take(&mut self.alone) + self.dice.between(200, 4_000);
        let count = if self.dice.below(4) == 0 { 2 } else { 1 };
        let mut faults: Vec<(Target, Fault)> = Vec::new();
        for _ in 0..count {
            let target = self.target();
            let fault = self.fault(target);
            if faults.iter().all(|(other, _)| *other != target) {
                faults.push((target, fault));
            }
        }
        Some(Step { after, faults })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_schedule_and_another_seed_another_one() {
        let steps = |seed| Schedule::new(seed, false, 1).take(50).collect::<Vec<_>>();
        assert_eq!(steps(7), steps(7));
        assert_ne!(steps(7), steps(8));
    }

    #[test]
    fn a_hundred_steps_have_every_target_every_fault_and_pairs() {
        let all: Vec<Step> = Schedule::new(1, true, 1).take(100).collect();
        let faults: Vec<(Target, Fault)> = all.iter().flat_map(|s| s.faults.clone()).collect();
        type Is = fn(&(Target, Fault)) -> bool;
        let wanted: [Is; 9] = [
            |(target, _)| matches!(target, Target::Broker(_)),
            |(target, _)| *target == Target::Postgres,
            |(target, _)| *target == Target::Recorder,
            |(target, _)| matches!(target, Target::Policy(_)),
            |(target, _)| matches!(target, Target::Worker(_)),
            |(target, _)| matches!(target, Target::Child(_)),
            |(_, fault)| matches!(fault, Fault::Kill(_)),
            |(_, fault)| matches!(fault, Fault::Terminate(_)),
            |(_, fault)| matches!(fault, Fault::Stop(ms) if *ms > Duration::from_secs(60)),
        ];
        assert!(wanted.iter().all(|is| faults.iter().any(is)));
        assert!(all.iter().any(|step| step.faults.len() == 2));
    }

    #[test]
    fn only_a_server_of_a_cluster_lags_behind() {
        let has_lag = |brokers| {
            let all = Schedule::new(1, true, brokers).take(100);
            let faults = all.flat_map(|step| step.faults);
            faults
                .into_iter()
                .any(|(of, fault)| matches!((of, fault), (Target::Broker(_), Fault::Lag(_))))
        };
        assert!(has_lag(3) && !has_lag(1));
    }

    #[test]
    fn the_recorder_is_away_alone_in_the_first_minute_of_every_schedule() {
        for seed in 0..100 {
            let steps: Vec<Step> = Schedule::new(seed, false, 1).take(20).collect();
            let half = Duration::from_secs(45);
            let is_long = |step: &Step| matches!(step.faults[..], [(Target::Recorder, Fault::Stop(ms))] if ms >= half);
            let at = steps.iter().position(is_long).unwrap();
            let Fault::Stop(alone) = steps[at].faults[0].1 else {
                unreachable!();
            };
            assert!(steps[at + 1].after >= alone, "seed {seed}");
            let before: Duration = steps[..=at].iter().map(|step| step.after).sum();
            assert!(before < 2 * half, "seed {seed}: {before:?}");
        }
    }
}
