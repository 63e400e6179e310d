//! Our own services as child processes: they end with their parent, and their output goes to a
//! file.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// A running `fiec` process.
#[derive(Debug)]
pub struct Process {
    /// Its name, for messages.
    pub name: String,
    /// The file with its output.
    pub log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts `program args…`. Call it from a thread that lives as long as the process must,
    /// because the kernel ties the parent-death signal to the thread.
    ///
    /// # Errors
    /// If the program cannot be started or its log cannot be written.
    #[allow(unsafe_code)]
    pub fn start(
        name: &str,
        program: &Path,
        args: &[String],
        environment: &[(String, String)],
        log: PathBuf,
    ) -> anyhow::Result<Self> {
        let out = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command
            .args(args)
            .envs(environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .process_group(0);
        // SAFETY: between fork and exec only one system call is made, which allocates nothing.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::TERM))?;
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self {
            name: name.to_owned(),
            log,
            child,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.context("no such process")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks it to end and waits. Kills it at the deadline. Returns true if it ended by itself.
    pub async fn stop(&mut self, deadline: Duration) -> bool {
        // A process that is already gone needs no signal.
        let _ = self.signal(Signal::TERM);
        let until = Instant::now() + deadline;
        while Instant::now() < until {
            if self.ended().is_some() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.kill();
        false
    }

    /// Kills it at once, like a node that is lost.
    pub fn kill(&mut self) {
        // Both fail only if it is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last lines of its output.
    pub fn tail(&self, lines: usize) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A process that runs a tenth of the time: its connections stay, and what it says is old. Dropping
/// it lets the process run.
#[derive(Debug)]
pub struct Lag {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Lag {
    /// Begins. A process that ends in between ends it.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("no such process")?;
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) && kill_process(pid, Signal::STOP).is_ok() {
                std::thread::sleep(Duration::from_millis(900));
                // It may have been killed meanwhile.
                let _ = kill_process(pid, Signal::CONT);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Ok(Self {
            is_over,
            thread: Some(thread),
        })
    }
}

impl Drop for Lag {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
