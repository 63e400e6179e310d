//! The programs that a node cannot start. A node where an interpreter is missing refuses at once
//! what it is given, is free again, and would eat a queue.
//!
//! One failed start sets the node aside for the program. When the time is over, one execution tries
//! it; each failure in a row doubles the time. Two programs that fail with no success between them
//! set the node aside for all programs: then it is the node that cannot start processes. A commit
//! on the node is a success, because a program may say only after its start that it cannot go on.
//!
//! Each policy service learns this from the ledgers and keeps it in memory. After its own start it
//! pays one refusal again.

use std::collections::BTreeMap;

use fiec_schemas::StartError;
use fiec_schemas::messages::SetAside;

use crate::config::Config;
use crate::time::Millis;

/// Programs that a node remembers. The one that failed least recently goes first.
const PROGRAMS_LIMIT: usize = 64;
/// Programs that must fail before the node is set aside for all.
const FOR_ALL: usize = 2;

/// Whose turn it is with a program that could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nobody tries it before this moment.
    Aside { until: Millis },
    /// The next execution tries it.
    Open { since: Millis },
    /// An execution was bound to try it.
    Tried { since: Millis },
}

/// A program that the node could not start when it was last tried.
#[derive(Debug, Clone)]
pub struct Failing {
    command: Box<str>,
    error: StartError,
    words: Box<str>,
    /// Failures in a row.
    failures: u32,
    failed_at: Millis,
    turn: Turn,
    /// True if nothing has started on the node since.
    unbroken: bool,
}

impl Failing {
    /// What could not be started.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Why.
    pub fn error(&self) -> StartError {
        self.error
    }

    /// The failure in a few words, and when the next try is.
    pub fn in_words(&self, now: Millis) -> String {
        let why = match self.error {
            StartError::NotFound => "is not there",
            StartError::NotExecutable => "may not be executed",
            StartError::NoFormat => "has no format that it knows",
            StartError::NoProcesses => "would be one process too many",
            StartError::NoFiles => "would need one open file too many",
            StartError::NoMemory => "finds no memory",
            StartError::NoSpace => "finds no space on the disk",
            StartError::Other => "cannot be started",
        };
        format!("{} {why} ({})", self.command, self.outlook(now))
    }

    /// The same with the worker's own words.
    fn in_its_words(&self, now: Millis) -> String {
        format!("{} ({})", self.words, self.outlook(now))
    }

    fn outlook(&self, now: Millis) -> String {
        let next = match self.turn {
            Turn::Aside { until } => {
                format!("the next try is in {} s", until.since(now).div_ceil(1_000))
            }
            Turn::Open { .. } => "the next execution tries it".to_owned(),
            Turn::Tried { .. } => "one execution tries it now".to_owned(),
        };
        let failures = match self.failures {
            1 => String::new(),
            n => format!("{n} times in a row; "),
        };
        format!("{failures}{next}")
    }
}

/// Why a node is set aside for a program.
#[derive(Debug, Clone, Copy)]
pub enum Against<'a> {
    /// It cannot start this program.
    Program(&'a Failing),
    /// It could not start several others.
    Node(&'a Failing),
}

/// The programs that one node cannot start.
#[derive(Debug, Clone, Default)]
pub struct Starts {
    failing: BTreeMap<Box<str>, Failing>,
}

impl Starts {
    /// True if every program starts there, as far as is known.
    pub fn are_good(&self) -> bool {
        self.failing.is_empty()
    }

    /// Notes a start that failed. Returns true if the program started before, as far as is known.
    pub fn failed(
        &mut self,
        now: Millis,
        program: &str,
        (command, error): (&str, StartError),
        words: &str,
        config: &Config,
    ) -> bool {
        let known = self.failing.get(program);
        // It was bound before the node was set aside.
        if let Some(Turn::Aside { until }) = known.map(|f| f.turn)
            && now < until
        {
            return false;
        }
        let before = known.map_or(0, |f| f.failures);
        let doubled = config.start_retry_ms.saturating_mul(1 << before.min(20));
        let pause = doubled.min(config.start_retry_longest_ms);
        let failing = Failing {
            command: command.into(),
            error,
            words: words.into(),
            failures: before.saturating_add(1),
            failed_at: now,
            turn: Turn::Aside {
                until: now.plus(pause),
            },
            unbroken: true,
        };
        self.failing.insert(program.into(), failing);
        if self.failing.len() > PROGRAMS_LIMIT {
            let oldest = self.failing.iter().min_by_key(|(_, f)| f.failed_at);
            if let Some(program) = oldest.map(|(program, _)| program.clone()) {
                self.failing.remove(&program);
            }
        }
        before == 0
    }

    /// Notes that the program computes there, bound at this moment: what was bound before a failure
    /// says nothing of it. Returns true if it could not be started before.
    pub fn succeeded(&mut self, program: &str, bound: Millis) -> bool {
        for failing in self.failing.values_mut() {
            failing.unbroken &= failing.failed_at > bound;
        }
        let is_later = |failing: &Failing| failing.failed_at <= bound;
        self.failing.get(program).is_some_and(is_later) && self.failing.remove(program).is_some()
    }

    /// Notes that an execution of the program was bound to the node.
    pub fn bound(&mut self, now: Millis, program: &str) {
        if let Some(failing) = self.failing.get_mut(program)
            && let Turn::Open { .. } = failing.turn
        {
            failing.turn = Turn::Tried { since: now };
        }
    }

    /// Lets time pass. Returns true if a program may be tried again.
    pub fn pass(&mut self, now: Millis, config: &Config) -> bool {
        let open = Turn::Open { since: now };
        let mut opened = false;
        self.failing.retain(|_, failing| {
            failing.turn = match failing.turn {
                Turn::Aside { until } if until <= now => open,
                Turn::Tried { since } if now.since(since) >= config.take_ms => open,
                // Nobody wants it any more.
                Turn::Open { since } if now.since(since) >= config.start_retry_longest_ms => {
                    return false;
                }
                _ => return true,
            };
            opened = true;
            true
        });
        opened
    }

    /// What is against the program there now.
    pub fn against(&self, program: &str) -> Option<Against<'_>> {
        let is_closed = |f: &&Failing| !matches!(f.turn, Turn::Open { .. });
        if let Some(own) = self.failing.get(program) {
            return Some(own).filter(is_closed).map(Against::Program);
        }
        self.against_all().map(Against::Node)
    }

    /// The failure for which the node is set aside for all programs, if it is.
    fn against_all(&self) -> Option<&Failing> {
        let unbroken = self.failing.values().filter(|f| f.unbroken);
        let last = unbroken.clone().max_by_key(|f| f.failed_at)?;
        let several = unbroken.count() >= FOR_ALL;
        (several && !matches!(last.turn, Turn::Open { .. })).then_some(last)
    }

    /// For what the node is set aside.
    pub fn set_aside(&self, now: Millis) -> Vec<SetAside> {
        let of = |program: Option<&str>, failing: &Failing| SetAside {
            program: program.map(str::to_owned),
            reason: failing.in_its_words(now),
            failures: failing.failures,
        };
        let all = self.against_all().map(|failing| of(None, failing));
        let each = self.failing.iter();
        let each = each.map(|(program, failing)| of(Some(program), failing));
        all.into_iter().chain(each).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISSING: (&str, StartError) = ("python3", StartError::NotFound);

    fn fail(starts: &mut Starts, at: u64, program: &str) -> bool {
        let config = Config::default();
        starts.failed(Millis(at), program, MISSING, "no python3", &config)
    }

    fn is_against(starts: &mut Starts, at: u64, program: &str) -> bool {
        starts.pass(Millis(at), &Config::default());
        starts.against(program).is_some()
    }

    #[test]
    fn one_execution_tries_again_after_a_pause_that_doubles() {
        let mut starts = Starts::default();
        assert!(fail(&mut starts, 0, "a@1"));
        let mut at = 0;
        for pause in [5_000, 10_000, 20_000, 40_000] {
            assert!(is_against(&mut starts, at + pause - 1, "a@1"));
            assert!(!is_against(&mut starts, at + pause, "a@1"));
            at += pause;
            starts.bound(Millis(at), "a@1");
            assert!(is_against(&mut starts, at + 1, "a@1"), "one at a time");
            assert!(!fail(&mut starts, at, "a@1"));
        }
        // Ten minutes at most, and what was bound before does not count.
        for _ in 0..9 {
            at += 600_000;
            starts.pass(Millis(at), &Config::default());
            fail(&mut starts, at, "a@1");
            fail(&mut starts, at + 1, "a@1");
        }
        assert!(is_against(&mut starts, at + 599_999, "a@1"));
        assert!(!is_against(&mut starts, at + 600_000, "a@1"));
        assert!(
            !starts.succeeded("a@1", Millis(at - 1)),
            "it was bound before"
        );
        assert!(!starts.are_good());
        assert!(starts.succeeded("a@1", Millis(at + 1)));
        assert!(starts.are_good());
    }

    #[test]
    fn a_try_that_nobody_answers_leaves_the_turn_to_the_next() {
        let mut starts = Starts::default();
        fail(&mut starts, 0, "a@1");
        starts.pass(Millis(5_000), &Config::default());
        starts.bound(Millis(5_000), "a@1");
        assert!(is_against(&mut starts, 9_999, "a@1"));
        assert!(!is_against(&mut starts, 10_000, "a@1"));
        // What nobody tries for ten minutes is forgotten.
        starts.pass(Millis(700_000), &Config::default());
        assert!(starts.are_good());
    }

    #[test]
    fn two_programs_that_fail_in_a_row_are_against_all_until_one_starts() {
        let mut starts = Starts::default();
        fail(&mut starts, 0, "a@1");
        assert!(!is_against(&mut starts, 1, "c@1"));
        assert!(!starts.succeeded("c@1", Millis(1)));
        fail(&mut starts, 2, "b@1");
        assert!(
            !is_against(&mut starts, 3, "c@1"),
            "one has started between"
        );
        fail(&mut starts, 5_000, "a@1");
        assert!(is_against(&mut starts, 5_001, "c@1"));
        assert_eq!(starts.set_aside(Millis(5_001))[0].program, None);
        assert!(!is_against(&mut starts, 15_000, "c@1"), "each may try it");
        starts.succeeded("a@1", Millis(15_000));
        fail(&mut starts, 15_001, "b@1");
        assert!(!is_against(&mut starts, 15_002, "c@1"));
    }

    #[test]
    fn a_node_remembers_few_programs() {
        let mut starts = Starts::default();
        for n in 0..100 {
            fail(&mut starts, n, &format!("p{n}@1"));
        }
        assert_eq!(starts.failing.len(), PROGRAMS_LIMIT);
        assert!(starts.failing.contains_key("p99@1"));
    }
}
