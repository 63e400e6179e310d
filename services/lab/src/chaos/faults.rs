//! Carries out the faults of a schedule on the processes of a cluster, and undoes them when their
//! time has come.

use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use super::schedule::{Fault, Target};
use crate::cluster::Cluster;

/// What must be done at a time so that a process runs again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undo {
    /// Continue the process with this id.
    Continue(u32),
    /// Start it again.
    Start(Target),
}

/// The faults that are open.
#[derive(Debug, Default)]
pub struct Faults {
    open: Vec<(Instant, Undo)>,
    /// Number of faults so far.
    pub count: u32,
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
        let undo = |target| Undo::Start(target);
        if self.open.iter().any(|(_, open)| *open == undo(target)) {
            return Ok(());
        }
        let Some(pid) = pid_of(cluster, target) else {
            return Ok(());
        };
        if self
            .open
            .iter()
            .any(|(_, open)| *open == Undo::Continue(pid))
        {
            return Ok(());
        }
        eprintln!("{target:?}: {fault:?}");
        self.count += 1;
        let now = Instant::now();
        match fault {
            Fault::Stop(time) => {
                signal(pid, Signal::STOP)?;
                self.open.push((now + time, Undo::Continue(pid)));
            }
            Fault::Kill(time) => {
                match target {
                    Target::Broker => cluster.servers.nats.kill().await,
                    Target::Postgres => {
                        if let Some(postgres) = &mut cluster.servers.postgres {
                            postgres.kill().await;
                        }
                    }
                    _ => signal(pid, Signal::KILL)?,
                }
                self.open.push((now + time, Undo::Start(target)));
            }
            Fault::Terminate(time) => {
                signal(pid, Signal::TERM)?;
                self.open.push((now + time, Undo::Start(target)));
            }
        }
        Ok(())
    }

    /// Undoes what is due. Gives the time until the next one.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub async fn undo_due(&mut self, cluster: &mut Cluster) -> anyhow::Result<Option<Duration>> {
        let now = Instant::now();
        let (due, open) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|(at, _)| *at <= now);
        self.open = open;
        let due: Vec<(Instant, Undo)> = due;
        for (_, undo) in due {
            match undo {
                // It may have been killed meanwhile.
                Undo::Continue(pid) => drop(signal(pid, Signal::CONT)),
                Undo::Start(target) => {
                    if !start(cluster, target).await? {
                        // It still ends in order.
                        let soon = now + Duration::from_millis(200);
                        self.open.push((soon, undo));
                    }
                }
            }
        }
        let next = self.open.iter().map(|(at, _)| *at).min();
        Ok(next.map(|at| at.saturating_duration_since(Instant::now())))
    }
}

/// The process that a number chooses, by its place among those of its kind.
fn chosen(cluster: &Cluster, target: Target) -> Target {
    let of = |which: u64, count: usize| which % (count.max(1) as u64);
    match target {
        Target::Policy(which) => Target::Policy(of(which, cluster.policies.len())),
        Target::Worker(which) => Target::Worker(of(which, cluster.workers.len())),
        other => other,
    }
}

fn at(which: u64) -> usize {
    usize::try_from(which).unwrap_or(usize::MAX)
}

fn pid_of(cluster: &Cluster, target: Target) -> Option<u32> {
    match target {
        Target::Broker => Some(cluster.servers.nats.pid()),
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
        Target::Broker => cluster.servers.nats.restart().await?,
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
