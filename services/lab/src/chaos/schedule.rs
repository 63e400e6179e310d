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
    /// It is cut off from the other servers of its cluster, so long. Its clients still reach it.
    Cut(Duration),
    /// It dies and loses the end of the ledgers, as after a power loss, and is started again.
    LoseTail {
        /// So much of their end.
        bytes: u64,
    },
}

/// Faults that begin together, after a pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Pause before it.
    pub after: Duration,
    /// It begins once every earlier fault is over, and ends before another one begins.
    pub alone: bool,
    /// The faults.
    pub faults: Vec<(Target, Fault)>,
}

/// Draws steps for ever.
#[derive(Debug, Clone)]
pub struct Schedule {
    dice: Dice,
    /// Draw stops of over a minute, too: beyond the retries of an append.
    long: bool,
    /// Steps until something happens to one process alone.
    until_alone: u64,
    /// The broker is a cluster: some of its servers lag behind the others, or are cut off.
    is_cluster: bool,
    /// The broker shall yet lose the end of the ledgers.
    loses: bool,
}

/// What kinds of faults a schedule has.
#[derive(Debug, Clone, Copy)]
pub struct Draws {
    /// Stops of over a minute, too: beyond the retries of an append.
    pub long: bool,
    /// Servers of the broker. If there are several, some of them lag behind or are cut off at times.
    pub brokers: usize,
    /// Once the broker loses the end of the ledgers.
    pub lost_tail: bool,
}

impl Schedule {
    /// The schedule of a seed.
    pub fn new(seed: u64, draws: Draws) -> Self {
        let mut dice = Dice::new(seed);
        let until_alone = 6 + dice.below(10);
        Self {
            dice,
            long: draws.long,
            until_alone,
            is_cluster: draws.brokers > 1,
            loses: draws.lost_tail,
        }
    }

    /// The recorder or its database alone is away for so long that commits without a bound would
    /// become too rare. The ledgers still hold what was not read: with 24 messages at first, and then
    /// one in 2 s, 64 last for about 80 s. A long absence goes beyond that, and beyond the time after
    /// which the broker drops a consumer that nobody asks: 60 s after the end of its last request,
    /// which is open for 30 s.
    fn history_is_away(&mut self) -> (Target, Fault) {
        let (from, to) = match self.long {
            true => (93_000, 98_000),
            false => (58_000, 62_000),
        };
        let away = self.dice.between(from, to);
        match self.dice.below(2) {
            0 => (Target::Recorder, Fault::Stop(away)),
            _ => (Target::Postgres, Fault::Kill(away)),
        }
    }

    /// Some five to fifty messages.
    fn tail_is_lost(&mut self) -> (Target, Fault) {
        self.loses = false;
        let bytes = 8_000 + self.dice.below(72_000);
        (Target::Broker(0), Fault::LoseTail { bytes })
    }

    /// One process has a fault while all others run.
    fn one_alone(&mut self) -> Step {
        self.until_alone = 30 + self.dice.below(20);
        let after = self.dice.between(4_000, 6_000);
        let fault = match self.loses {
            true => self.tail_is_lost(),
            false => self.history_is_away(),
        };
        Step {
            after,
            alone: true,
            faults: vec![fault],
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
            (Target::Broker(_), 0 | 1) if self.is_cluster => Fault::Lag(5 * down),
            // A leader that is cut off gives up after 10 to 20 s.
            (Target::Broker(_), 2 | 4) if self.is_cluster => Fault::Cut(7 * down),
            (_, 0..=3) => Fault::Kill(down),
            (Target::Policy(_) | Target::Worker(_) | Target::Recorder, 4) => Fault::Terminate(down),
            _ => self.stop(target),
        }
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.until_alone == 0 {
            return Some(self.one_alone());
        }
        self.until_alone -= 1;
        let after = self.dice.between(200, 4_000);
        let count = if self.dice.below(4) == 0 { 2 } else { 1 };
        let mut faults: Vec<(Target, Fault)> = Vec::new();
        for _ in 0..count {
            let target = self.target();
            let fault = self.fault(target);
            if faults.iter().all(|(other, _)| *other != target) {
                faults.push((target, fault));
            }
        }
        Some(Step {
            after,
            alone: false,
            faults,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Draws = Draws {
        long: false,
        brokers: 1,
        lost_tail: false,
    };

    #[test]
    fn a_seed_gives_one_schedule_and_another_seed_another_one() {
        let steps = |seed| Schedule::new(seed, ONE).take(50).collect::<Vec<_>>();
        assert_eq!(steps(7), steps(7));
        assert_ne!(steps(7), steps(8));
    }

    #[test]
    fn a_hundred_steps_have_every_target_every_fault_and_pairs() {
        let all: Vec<Step> = Schedule::new(1, Draws { long: true, ..ONE })
            .take(100)
            .collect();
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
    fn only_a_server_of_a_cluster_lags_behind_or_is_cut_off() {
        let has = |brokers, is: fn(Fault) -> bool| {
            let all = Schedule::new(1, Draws { brokers, ..ONE }).take(100);
            let mut faults = all.flat_map(|step| step.faults);
            faults.any(|(of, fault)| matches!(of, Target::Broker(_)) && is(fault))
        };
        let kinds: [fn(Fault) -> bool; 2] = [
            |fault| matches!(fault, Fault::Lag(_)),
            |fault| matches!(fault, Fault::Cut(_)),
        ];
        assert!(kinds.iter().all(|is| has(3, *is) && !has(1, *is)));
        assert!(has(3, |fault| matches!(fault, Fault::Kill(_))));
    }

    /// The first step of one process alone.
    fn first_alone(seed: u64, draws: Draws) -> (Target, Fault) {
        let mut before = Duration::ZERO;
        let mut steps = Schedule::new(seed, draws).skip_while(|step| {
            before += step.after;
            !step.alone
        });
        let step = steps.next().unwrap();
        assert!(before < Duration::from_secs(90), "seed {seed}: {before:?}");
        step.faults[0]
    }

    #[test]
    fn the_recorder_or_its_database_is_away_alone_early_in_every_schedule() {
        let mut away = std::collections::BTreeSet::new();
        for seed in 0..100 {
            let (target, fault) = first_alone(seed, ONE);
            let (Fault::Stop(away_for) | Fault::Kill(away_for)) = fault else {
                panic!("seed {seed}: {fault:?}");
            };
            assert!(away_for >= Duration::from_secs(58), "seed {seed}");
            away.insert(target);
        }
        assert_eq!(away, [Target::Postgres, Target::Recorder].into());
    }

    #[test]
    fn where_it_is_asked_for_the_broker_loses_its_tail_once() {
        let draws = Draws {
            lost_tail: true,
            ..ONE
        };
        for seed in 0..100 {
            let (target, fault) = first_alone(seed, draws);
            assert_eq!(target, Target::Broker(0), "seed {seed}: {fault:?}");
            let all = Schedule::new(seed, draws).take(300);
            let lost = all.flat_map(|step| step.faults);
            let lost = lost.filter(|(_, fault)| matches!(fault, Fault::LoseTail { .. }));
            assert_eq!(lost.count(), 1, "seed {seed}");
        }
    }
}
