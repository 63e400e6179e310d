//! Processes that have nothing more to do: children whose run is over, and what programs leave behind.
//! Each is ended and reaped. One that SIGKILL does not end is the kernel's, delays no other, and costs
//! its slot.
//!
//! A worker that [adopts](Reaper::new) gets every process whose parents have ended
//! (`PR_SET_CHILD_SUBREAPER`), as the first process of a container gets them anyway. These are what a
//! program left whose keeper was killed before it could end them. The worker's own processes share
//! its session, and programs have sessions of their own: so any other child of a strange session is a
//! program's.

use std::collections::{HashMap, HashSet};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use fiec_kit::foreign::container;
use fiec_kit::launch;
use fiec_schemas::hardware::StuckProcess;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};

use crate::proc_stat::Stat;

/// Between two looks at processes that have not ended yet.
const ROUND: Duration = Duration::from_millis(5);
/// Between two looks for adopted processes, and at those that do not end.
const SLOW_ROUND: Duration = Duration::from_secs(1);
/// After this time a process is killed, with its group.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// What SIGKILL has not ended after this time is stuck.
const DIES_WITHIN: Duration = Duration::from_secs(2);
/// A dead child for which nobody has waited after this time is nobody's.
const UNCLAIMED: Duration = Duration::from_secs(5);
/// Most processes that are listed as stuck.
const LISTED: usize = 16;

/// Takes over processes that have nothing more to do.
#[derive(Debug, Clone)]
pub(crate) struct Reaper {
    inbox: Sender<Child>,
    seen: Arc<Seen>,
}

/// What the reaper's thread and its owners both see.
#[derive(Debug, Default)]
struct Seen {
    /// The worker's children, until they are reaped.
    own: Mutex<HashSet<u32>>,
    stuck: Mutex<Vec<Stuck>>,
}

/// A process that SIGKILL does not end.
#[derive(Debug, Clone)]
struct Stuck {
    stat: Stat,
    pid: u32,
    since: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reaper {
    /// Starts its thread, which ends with the last copy. `adopts`: this process gets the processes
    /// whose parents end, and nobody else in it does anything about them.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(adopts: bool) -> io::Result<Self> {
        let (sender, inbox) = channel();
        let seen = Arc::new(Seen::default());
        let orphans = adopts.then(Orphans::adopt).transpose()?;
        let thread = Thread {
            seen: Arc::clone(&seen),
            ending: Vec::new(),
            orphans,
        };
        thread::Builder::new()
            .name("fiec-reap".to_owned())
            .spawn(move || thread.run(&inbox))?;
        Ok(Self {
            inbox: sender,
            seen,
        })
    }

    /// Starts a child, which is this worker's own until it is [taken](Self::take).
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&self, spawn: impl FnOnce() -> io::Result<Child>) -> io::Result<Child> {
        // Locked meanwhile: a look between start and entry would find a stranger.
        let mut own = lock(&self.seen.own);
        let child = spawn()?;
        own.insert(child.id());
        Ok(child)
    }

    /// Reaps a child when it has ended. It is the leader of its group, and is killed if it does not
    /// end by itself.
    pub fn take(&self, child: Child) {
        // The thread lives as long as this.
        let _ = self.inbox.send(child);
    }

    /// The processes that SIGKILL does not end; at most 16.
    pub fn stuck(&self) -> Vec<StuckProcess> {
        let stuck = lock(&self.seen.stuck);
        let stuck = stuck.iter().take(LISTED);
        stuck
            .map(|stuck| StuckProcess {
                pid: stuck.pid,
                command: stuck.stat.command.clone(),
                state: stuck.stat.state.to_string(),
                seconds: stuck.since.elapsed().as_secs(),
            })
            .collect()
    }

    /// Slots that they cost: one for each process group, which is what a program starts as.
    pub fn lost_slots(&self) -> u32 {
        let stuck = lock(&self.seen.stuck);
        let groups: HashSet<u32> = stuck.iter().map(|stuck| stuck.stat.group).collect();
        u32::try_from(groups.len()).unwrap_or(u32::MAX)
    }
}

struct Thread {
    seen: Arc<Seen>,
    ending: Vec<Ending>,
    orphans: Option<Orphans>,
}

/// A child whose run is over.
struct Ending {
    child: Child,
    since: Instant,
    killed: Option<Instant>,
}

impl Thread {
    fn run(mut self, inbox: &Receiver<Child>) {
        let mut looked = Instant::now();
        loop {
            let more = match self.pause() {
                Some(pause) => inbox.recv_timeout(pause),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match more {
                Ok(child) => self.ending.push(Ending {
                    child,
                    since: Instant::now(),
                    killed: None,
                }),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let own = &self.seen.own;
            if !self.ending.is_empty() {
                // Locked meanwhile: the number may be the next child's.
                let mut own = lock(own);
                self.ending.retain_mut(|ending| {
                    let is_left = ending.is_left();
                    if !is_left {
                        own.remove(&ending.child.id());
                    }
                    is_left
                });
            }
            if let Some(orphans) = &mut self.orphans
                && (orphans.are_dying() || looked.elapsed() >= SLOW_ROUND)
            {
                looked = Instant::now();
                orphans.look(own);
            }
            self.tell();
        }
    }

    /// How long it may wait for the next child.
    fn pause(&self) -> Option<Duration> {
        let orphans = self.orphans.as_ref();
        if self.ending.iter().any(|ending| !ending.is_stuck()) {
            return Some(ROUND);
        }
        if orphans.is_some_and(Orphans::are_dying) {
            return Some(ROUND * 4);
        }
        (orphans.is_some() || !self.ending.is_empty()).then_some(SLOW_ROUND)
    }

    /// Says what is stuck.
    fn tell(&self) {
        let ending = self.ending.iter().filter(|ending| ending.is_stuck());
        let ending = ending.filter_map(|ending| Some((ending.child.id(), ending.killed?)));
        let orphans = self.orphans.iter().flat_map(Orphans::stuck);
        let found = ending.chain(orphans).filter_map(|(pid, since)| {
            let stat = Stat::of(pid).filter(|stat| !stat.is_dead())?;
            Some(Stuck { stat, pid, since })
        });
        let found: Vec<Stuck> = found.collect();
        let mut stuck = lock(&self.seen.stuck);
        for new in &found {
            if !stuck.iter().any(|old| old.pid == new.pid) {
                let Stuck { stat, pid, .. } = new;
                tracing::error!(
                    pid,
                    command = stat.command,
                    state = %stat.state,
                    "SIGKILL does not end this process; it costs a slot until it ends"
                );
            }
        }
        *stuck = found;
    }
}

impl Ending {
    fn is_left(&mut self) -> bool {
        // An error says that it was reaped already.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return false;
        }
        if self.killed.is_none() && self.since.elapsed() >= ENDS_WITHIN {
            self.killed = Some(Instant::now());
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
        true
    }

    fn is_stuck(&self) -> bool {
        self.killed.is_some_and(|at| at.elapsed() >= DIES_WITHIN)
    }
}

/// The children of this process that it did not start itself.
struct Orphans {
    session: u32,
    /// Children that it had before it adopted any, or that may be a container engine's.
    earlier: HashSet<u32>,
    /// Those of this session that were found dead, with the time. Perhaps a library waits for them.
    dead: HashMap<u32, Instant>,
    /// Those of programs, with the time when they were killed.
    killed: HashMap<u32, Instant>,
}

impl Orphans {
    fn adopt() -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        // Zero, if its leader is outside of this process's namespace.
        let own = Stat::of(std::process::id());
        let own = own.ok_or_else(|| io::Error::other("/proc does not show this process"))?;
        Ok(Self {
            session: own.session,
            earlier: launch::children().into_iter().collect(),
            dead: HashMap::new(),
            killed: HashMap::new(),
        })
    }

    /// Ends and reaps what is a program's, and reaps what is nobody's.
    fn look(&mut self, own: &Mutex<HashSet<u32>>) {
        let mut strangers: HashSet<u32> = {
            let own = lock(own);
            let children = launch::children().into_iter();
            children.filter(|pid| !own.contains(pid)).collect()
        };
        self.earlier.retain(|pid| strangers.contains(pid));
        strangers.retain(|pid| !self.earlier.contains(pid));
        if container::has_asked_lately() {
            self.earlier.extend(strangers);
            return;
        }
        self.dead.retain(|pid, _| strangers.contains(pid));
        self.killed.retain(|pid, _| strangers.contains(pid));
        for number in strangers {
            let (Some(stat), Some(pid)) = (Stat::of(number), Pid::from_raw(number.cast_signed()))
            else {
                continue;
            };
            let is_programs = stat.session != self.session;
            if stat.is_dead() {
                let since = self.dead.entry(number).or_insert_with(Instant::now);
                if is_programs || since.elapsed() >= UNCLAIMED {
                    // Fails if somebody else did.
                    let _ = waitpid(Some(pid), WaitOptions::NOHANG);
                }
            } else if is_programs && !self.killed.contains_key(&number) {
                let command = stat.command;
                tracing::warn!(
                    pid = number,
                    command,
                    "ending a process that a program left"
                );
                // Fails if it has ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
                self.killed.insert(number, Instant::now());
            }
        }
    }

    /// Whether some were killed that may still end.
    fn are_dying(&self) -> bool {
        let mut killed = self.killed.values();
        killed.any(|at| at.elapsed() < DIES_WITHIN)
    }

    /// Those that SIGKILL has not ended.
    fn stuck(&self) -> impl Iterator<Item = (u32, Instant)> {
        let killed = self.killed.iter().map(|(pid, at)| (*pid, *at));
        killed.filter(|(_, at)| at.elapsed() >= DIES_WITHIN)
    }
}
