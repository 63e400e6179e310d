//! Carries out the faults of a schedule on the processes of a cluster, and undoes them when their
//! time has come.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use fiec_schemas::subjects;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use super::schedule::{Fault, Target};
use super::store;
use crate::cluster::Cluster;
use crate::process::Lag;

/// What must be done at a time so that a process runs again.
#[derive(Debug)]
enum Undo {
    /// Continue the process with this id.
    Continue(u32),
    /// Start it again.
    Start,
    /// Let it run all the time again.
    Drop(Lag),
    /// Join it to the other servers again.
    Join,
}

/// Since when each process that had a fault runs undisturbed. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Calm(Arc<Mutex<BTreeMap<Target, Option<Instant>>>>);

impl Calm {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Target, Option<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All children count as one.
    fn of(target: Target) -> Target {
        match target {
            Target::Child(_) => Target::Child(0),
            other => other,
        }
    }

    fn ends(&self, target: Target) {
        self.lock().insert(Self::of(target), None);
    }

    fn begins(&self, target: Target) {
        self.lock().insert(Self::of(target), Some(Instant::now()));
    }

    /// True if a process has had no fault for this long.
    pub fn lasts(&self, target: Target, time: Duration) -> bool {
        match self.lock().get(&Self::of(target)) {
            None => true,
            Some(None) => false,
            Some(Some(since)) => since.elapsed() > time,
        }
    }
}

/// Pause before a service that ended by itself is started again.
const SUPERVISED: Duration = Duration::from_secs(1);

/// The faults that are open.
#[derive(Debug, Default)]
pub struct Faults {
    open: Vec<(Instant, Target, Undo)>,
    /// Number of faults so far.
    pub count: u32,
    /// Who runs undisturbed.
    pub calm: Calm,
}

impl Faults {
    /// Begins a fault. One of a process that is down already does nothing.
    ///
    /// # Errors
    /// If a process cannot be signalled.
    pub async fn begin(
        &mut self,
        cluster: &mut Cluster,
        target: Target,
        fault: Fault,
    ) -> anyhow::Result<()> {
        let target = chosen(cluster, target);
        if self.open.iter().any(|(_, open, _)| *open == target) {
            return Ok(());
        }
        let Some(pid) = pid_of(cluster, target) else {
            return Ok(());
        };
        eprintln!("{target:?}: {fault:?}");
        self.count += 1;
        self.calm.ends(target);
        let now = Instant::now();
        match fault {
            Fault::Stop(time) => {
                signal(pid, Signal::STOP)?;
                self.open.push((now + time, target, Undo::Continue(pid)));
            }
            Fault::Kill(time) => {
                match target {
                    Target::Broker(which) => {
                        if let Some(server) = cluster.servers.broker_mut(at(which)) {
                            server.kill().await;
                        }
                    }
                    Target::Postgres => {
                        if let Some(postgres) = &mut cluster.servers.postgres {
                            postgres.kill().await;
                        }
                    }
                    _ => signal(pid, Signal::KILL)?,
                }
                self.open.push((now + time, target, Undo::Start));
            }
            Fault::Lag(time) => {
                let undo = Undo::Drop(Lag::of(pid)?);
                self.open.push((now + time, target, undo));
            }
            Fault::LoseTail { bytes } => {
                let server = &mut cluster.servers.nats;
                server.kill().await;
                let has = store::length(server, subjects::LEDGER_STREAM)?;
                store::cut_tail(server, subjects::LEDGER_STREAM, bytes.min(has / 2))?;
                self.open.push((now, target, Undo::Start));
            }
            Fault::Cut(time) => {
                if let (Target::Broker(which), Some(routes)) = (target, &cluster.servers.routes) {
                    routes.cut(at(which));
                }
                self.open.push((now + time, target, Undo::Join));
            }
            Fault::Terminate(time) => {
                signal(pid, Signal::TERM)?;
                self.open.push((now + time, target, Undo::Start));
            }
        }
        Ok(())
    }

    /// Plans to start again what has ended by itself, as a supervisor does: a service that is started
    /// while the broker is stopped gives up.
    fn supervise(&mut self, cluster: &mut Cluster) {
        let number = |at: usize| at as u64;
        let policies = cluster.policies.iter_mut().enumerate();
        let policies = policies.map(|(at, process)| (Target::Policy(number(at)), process));
        let workers = cluster.workers.iter_mut().enumerate();
        let workers = workers.map(|(at, process)| (Target::Worker(number(at)), process));
        let recorder = cluster.recorder.iter_mut();
        let recorder = recorder.map(|process| (Target::Recorder, process));
        for (target, process) in policies.chain(workers).chain(recorder) {
            let is_open = self.open.iter().any(|(_, open, _)| *open == target);
            let Some(status) = process.ended().filter(|_| !is_open) else {
                continue;
            };
            eprintln!("{target:?} ended by itself ({status}); started again");
            self.calm.ends(target);
            self.open
                .push((Instant::now() + SUPERVISED, target, Undo::Start));
        }
    }

    /// Undoes what is due. Gives the time until the next one.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub async fn undo_due(&mut self, cluster: &mut Cluster) -> anyhow::Result<Option<Duration>> {
        self.supervise(cluster);
        let now = Instant::now();
        let (due, open): (Vec<_>, Vec<_>) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|(at, ..)| *at <= now);
        self.open = open;
        for (_, target, undo) in due {
            match undo {
                // It may have been killed meanwhile.
                Undo::Continue(pid) => drop(signal(pid, Signal::CONT)),
                // It joins a thread, for a second at most.
                Undo::Drop(lag) => drop(tokio::task::spawn_blocking(|| drop(lag)).await),
                Undo::Join => {
                    if let (Target::Broker(which), Some(routes)) = (target, &cluster.servers.routes)
                    {
                        routes.join(at(which));
                    }
                }
                Undo::Start => {
                    if !start(cluster, target).await? {
                        // It still ends in order.
                        let soon = now + Duration::from_millis(200);
                        self.open.push((soon, target, undo));
                        continue;
                    }
                }
            }
            self.calm.begins(target);
        }
        let next = self.open.iter().map(|(at, ..)| *at).min();
        Ok(next.map(|at| at.saturating_duration_since(Instant::now())))
    }
}

/// The process that a number chooses, by its place among those of its kind.
fn chosen(cluster: &Cluster, target: Target) -> Target {
    let of = |which: u64, count: usize| which % (count.max(1) as u64);
    match target {
        Target::Policy(which) => Target::Policy(of(which, cluster.policies.len())),
        Target::Worker(which) => Target::Worker(of(which, cluster.workers.len())),
        Target::Broker(which) => Target::Broker(of(which, cluster.servers.brokers().count())),
        other => other,
    }
}

fn at(which: u64) -> usize {
    usize::try_from(which).unwrap_or(usize::MAX)
}

fn pid_of(cluster: &Cluster, target: Target) -> Option<u32> {
    match target {
        Target::Broker(which) => Some(cluster.servers.brokers().nth(at(which))?.pid()),
        Target::Postgres => Some(cluster.servers.postgres.as_ref()?.pid()),
        Target::Recorder => Some(cluster.recorder.as_ref()?.pid()),
        Target::Policy(which) => Some(cluster.policies.get(at(which))?.pid()),
        Target::Worker(which) => Some(cluster.workers.get(at(which))?.pid()),
        Target::Child(which) => {
            let workers = cluster.workers.iter().map(|worker| worker.pid());
            let all: Vec<u32> = workers.flat_map(children_of).collect();
            all.get(at(which % (all.len().max(1) as u64))).copied()
        }
    }
}

/// The children of a process, by the kernel's word.
fn children_of(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    let words = lists.iter().flat_map(|list| list.split_whitespace());
    words.filter_map(|word| word.parse().ok()).collect()
}

fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.context("no such process")?;
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).context("cannot signal a process"),
    }
}

/// Starts a process again. Gives false if the one before it has not ended.
async fn start(cluster: &mut Cluster, target: Target) -> anyhow::Result<bool> {
    match target {
        Target::Broker(which) => {
            if let Some(server) = cluster.servers.broker_mut(at(which)) {
                server.restart().await?;
            }
        }
        Target::Postgres => {
            if let Some(postgres) = &mut cluster.servers.postgres {
                postgres.restart().await?;
            }
        }
        Target::Recorder => {
            let ended = cluster
                .recorder
                .as_mut()
                .is_none_or(|r| r.ended().is_some());
            if !ended {
                return Ok(false);
            }
            cluster.start_recorder()?;
        }
        Target::Policy(which) => {
            let Some(policy) = cluster.policies.get_mut(at(which)) else {
                return Ok(true);
            };
            if policy.ended().is_none() {
                return Ok(false);
            }
            cluster.restart_policy(at(which))?;
        }
        Target::Worker(which) => {
            let Some(worker) = cluster.workers.get_mut(at(which)) else {
                return Ok(true);
            };
            if worker.ended().is_none() {
                return Ok(false);
            }
            cluster.restart_worker(at(which) + 1)?;
        }
        // Its worker starts another one.
        Target::Child(_) => {}
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_calm_from_the_end_of_its_last_fault_on() {
        let (calm, hour) = (Calm::default(), Duration::from_secs(3_600));
        assert!(calm.lasts(Target::Broker(0), hour));
        calm.ends(Target::Broker(0));
        assert!(!calm.lasts(Target::Broker(0), Duration::ZERO));
        calm.begins(Target::Broker(0));
        assert!(!calm.lasts(Target::Broker(0), hour));
        std::thread::sleep(Duration::from_millis(1));
        assert!(calm.lasts(Target::Broker(0), Duration::ZERO));
    }

    #[test]
    fn a_fault_of_one_child_disturbs_all_of_them() {
        let calm = Calm::default();
        calm.ends(Target::Child(7));
        assert!(!calm.lasts(Target::Child(0), Duration::ZERO));
        assert!(calm.lasts(Target::Worker(0), Duration::ZERO));
    }
}
