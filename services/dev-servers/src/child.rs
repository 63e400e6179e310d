//! A child process that dies with this process and is never signalled by a
//! recycled id.
//!
//! `PR_SET_PDEATHSIG` fires when the *thread* that forked ends, not the process. Each child
//! therefore has a keeper thread. The keeper forks the child and then only waits for its end. So
//! the thread lives exactly as long as the child, whatever runtime or thread the caller uses.
//!
//! The keeper waits with `WNOWAIT`. It reaps the child under the lock that protects sending
//! signals. So a signal can only reach a child that is not reaped.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::sync::{oneshot, watch};

use crate::account::Account;
use crate::error::{At, Error, Result};

/// The command of a child, and the signals that end it.
pub(crate) struct Plan {
    pub(crate) command: Command,
    /// Receives stdout and stderr.
    pub(crate) log: PathBuf,
    pub(crate) account: Option<Account>,
    /// Signal that the kernel sends when this process ends.
    pub(crate) on_parent_death: Signal,
    /// Signal that dropping the handle sends. `KILL` follows if it is not enough.
    pub(crate) on_drop: Signal,
}

#[derive(Debug)]
struct Shared {
    /// `None` while the child runs.
    status: Mutex<Option<ExitStatus>>,
    ended: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    shared: Arc<Shared>,
    ended: watch::Receiver<Option<ExitStatus>>,
    on_drop: Signal,
}

impl Child {
    pub(crate) async fn spawn(plan: Plan) -> Result<Self> {
        let program = PathBuf::from(plan.command.get_program());
        let (started, start) = oneshot::channel();
        std::thread::Builder::new()
            .name("server-keeper".into())
            .stack_size(256 * 1024)
            .spawn(move || keep(plan, started))
            .at("cannot start a thread for", &program)?;
        start.await.unwrap_or_else(|_| {
            Err(Error::Spawn {
                program,
                source: io::Error::other("its keeper thread ended"),
            })
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(crate) fn status(&self) -> Option<ExitStatus> {
        *self.shared.lock()
    }

    /// Sends a signal, unless the child has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let status = self.shared.lock();
        if status.is_none()
            && let Err(e) = rustix::process::kill_process(self.pid, signal)
        {
            tracing::warn!(pid = self.id(), error = %e, "cannot signal a server");
        }
    }

    pub(crate) async fn wait(&mut self) -> ExitStatus {
        match self.ended.wait_for(Option::is_some).await {
            Ok(status) => status.unwrap_or_else(|| ExitStatus::from_raw(0)),
            // The keeper is gone, so the kernel has killed the child.
            Err(_) => ExitStatus::from_raw(Signal::KILL.as_raw()),
        }
    }

    /// Sends `signal`, and `KILL` after `deadline`. Returns true if the first signal was enough.
    pub(crate) async fn end(&mut self, signal: Signal, deadline: Duration) -> bool {
        self.signal(signal);
        let in_time = tokio::time::timeout(deadline, self.wait()).await.is_ok();
        if !in_time {
            self.signal(Signal::KILL);
            self.wait().await;
        }
        in_time
    }

    fn wait_blocking(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut status = self.shared.lock();
        while status.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            status = self
                .shared
                .ended
                .wait_timeout(status, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Waits until the child is gone, at most a few seconds. The caller usually removes its folder
/// next.
impl Drop for Child {
    fn drop(&mut self) {
        self.signal(self.on_drop);
        self.wait_blocking(Duration::from_secs(3));
        self.signal(Signal::KILL);
        self.wait_blocking(Duration::from_secs(1));
    }
}

fn keep(plan: Plan, started: oneshot::Sender<Result<Child>>) {
    let on_drop = plan.on_drop;
    let (mut process, pid) = match fork(plan) {
        Ok(forked) => forked,
        Err(e) => {
            let _ = started.send(Err(e));
            return;
        }
    };
    let shared = Arc::new(Shared {
        status: Mutex::new(None),
        ended: Condvar::new(),
    });
    let (told, ended) = watch::channel(None);
    let handle = Child {
        pid,
        shared: shared.clone(),
        ended,
        on_drop,
    };
    // The handle itself is sent. If the receiver is gone, dropping the handle ends the child. That
    // drop waits for this thread, so another thread must do it.
    if let Err(unclaimed) = started.send(Ok(handle)) {
        std::thread::spawn(move || drop(unclaimed));
    }
    let wait = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), wait) {}
    let mut status = shared.lock();
    let ended = process.wait().unwrap_or_else(|_| ExitStatus::from_raw(0));
    *status = Some(ended);
    drop(status);
    shared.ended.notify_all();
    let _ = told.send(Some(ended));
}

#[allow(unsafe_code)]
fn fork(plan: Plan) -> Result<(std::process::Child, Pid)> {
    let Plan {
        mut command,
        log,
        account,
        on_parent_death,
        on_drop: _,
    } = plan;
    let out = File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log)
        .at("cannot open the log", &log)?;
    let err = out.try_clone().at("cannot open the log", &log)?;
    // A process group of its own: a Ctrl-C in the terminal reaches this process, which stops the
    // child.
    command
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .process_group(0);
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    let parent = rustix::process::getpid();
    // SAFETY: the closure makes two system calls, does not allocate and takes no lock. The standard
    // library runs it after the switch of user, which would have cleared the setting.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(on_parent_death))?;
            // The parent may have died before the setting took effect.
            if rustix::process::getppid() != Some(parent) {
                return Err(rustix::io::Errno::SRCH.into());
            }
            Ok(())
        });
    }
    let program = PathBuf::from(command.get_program());
    let process = match command.spawn() {
        Ok(process) => process,
        Err(source) => return Err(Error::Spawn { program, source }),
    };
    // A child of this process: the id is positive.
    let pid = Pid::from_child(&process);
    Ok((process, pid))
}

/// The last lines of a log, for an error message.
pub(crate) fn tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(log: PathBuf) -> Plan {
        let mut command = Command::new("sleep");
        command.arg("60");
        Plan {
            command,
            log,
            account: None,
            on_parent_death: Signal::KILL,
            on_drop: Signal::TERM,
        }
    }

    #[tokio::test]
    async fn a_child_outlives_the_thread_that_asked_for_it_and_not_its_handle() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let child = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap()
                .block_on(Child::spawn(sleeper(log)))
                .unwrap()
        })
        .join()
        .unwrap();
        let pid = child.pid;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(child.status().is_none());
        rustix::process::test_kill_process(pid).unwrap();
        drop(child);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }

    #[tokio::test]
    async fn a_child_that_nobody_takes_ends() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let mut plan = sleeper(dir.path().join("log"));
        plan.command = Command::new("sh");
        plan.command
            .args(["-c", "echo $$ > \"$0\"; exec sleep 60"])
            .arg(&pid_file);
        // Polled once and dropped, whether or not the fork has happened.
        let _ = tokio::time::timeout(Duration::ZERO, Child::spawn(plan)).await;
        let until = Instant::now() + Duration::from_secs(3);
        loop {
            let text = std::fs::read_to_string(&pid_file).unwrap_or_default();
            let pid = text.trim().parse().ok().and_then(Pid::from_raw);
            if pid.is_some_and(|p| rustix::process::test_kill_process(p).is_err()) {
                break;
            }
            // The child may have ended before it wrote its process id.
            if Instant::now() > until {
                assert!(pid.is_none(), "{pid:?} still runs");
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_program_that_does_not_exist_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut plan = sleeper(dir.path().join("log"));
        plan.command = Command::new("/no/such/program");
        let e = Child::spawn(plan).await.unwrap_err();
        assert!(e.to_string().contains("/no/such/program"), "{e}");
    }
}
