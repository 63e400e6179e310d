//! Child processes. One thread that lives as long as the agent starts them, because the
//! parent-death signal is tied to the starting thread. Each child has its own process group, a
//! socket pair and two pipes. Dropping a [`Child`] ends its whole group.

use std::ffi::{CStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fiec_kit::frames::{
    DATA_DIR_ENV, FrameError, INPUT_DIRS_ENV, Order, RUN_FOLDER_ENV, SOCKET_ENV,
};
use fiec_kit::simulated::SIMULATED_DEVICES_ENV;
use fiec_kit::start::NotStarted;
use fiec_schemas::messages::LogStream;
use fiec_schemas::{ExecutionId, Tenant};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::affinity;
use crate::ahead::Ahead;
use crate::endings::Exit;
use crate::leftovers;
use crate::link::Link;
use crate::logs::Logs;
use crate::packages::Package;

/// Most queued requests to start or reap a child.
const TASKS: usize = 1_024;
const SOCKET_BUFFER: usize = 4 << 20;

struct Raw {
    process: std::process::Child,
    /// The agent's end of the pair.
    socket: std::os::unix::net::UnixStream,
}

enum Task {
    /// Fork and execute on one thread that lives as long as the agent. The kernel ties a child's
    /// death signal to the thread that forked it.
    Spawn(Launch, oneshot::Sender<io::Result<Raw>>),
    /// Wait for a killed child, which may take a moment.
    Reap(std::process::Child),
}

/// A process to start.
#[derive(Debug, Clone)]
struct Launch {
    /// Program and arguments.
    command: Vec<String>,
    /// The folder that it runs in. None means the agent's.
    folder: Option<PathBuf>,
}

/// Variables of the agent's environment that programs must not see: the servers' addresses and
/// credentials.
const OWN_ENVIRONMENT: [&str; 3] = ["FIEC_NATS_URL", "FIEC_NATS_CREDS", "FIEC_DATABASE_URL"];

/// Starts and reaps children.
#[derive(Debug, Clone)]
pub struct Spawner {
    tasks: mpsc::SyncSender<Task>,
    command: Vec<String>,
    run_dir: PathBuf,
}

/// The executions that one child may serve in sequence: those of one program and tenant.
pub type Key = (String, Tenant);

/// A running child process. Boxed: it passes from pool to runner and back, and would be copied each
/// time.
pub type Child = Box<ChildProcess>;

/// A child process, with its socket and its output.
pub struct ChildProcess {
    /// Its socket.
    pub link: Link,
    /// Its output.
    pub logs: Logs,
    /// Its key; none while it is new.
    pub key: Option<Key>,
    /// The execution that it was prepared for.
    pub prepared_for: Option<ExecutionId>,
    /// Start of its idle time.
    pub idle_since: Instant,
    /// The package that it runs. The package's folder stays for as long.
    pub package: Option<Arc<Package>>,
    /// Its last run was short.
    pub quick: bool,
    /// Runs that it was given ahead.
    pub ahead: Ahead,
    /// It serves no execution after its present run.
    pub spent: bool,
    /// The device whose context it holds while it is idle.
    pub context: Option<String>,
    /// The processors that it is confined to. Empty means the worker's own.
    confined: Vec<u32>,
    pid: u32,
    process: Option<std::process::Child>,
    readers: Vec<JoinHandle<()>>,
    spawner: Spawner,
}

/// Folders that children receive in their environment.
struct Folders {
    /// The input folders, in the form that children read.
    inputs: OsString,
    /// The first of them.
    first_input: Option<PathBuf>,
    /// The folder where built-in programs leave marks.
    marks: PathBuf,
}

impl Folders {
    fn new(inputs: &[PathBuf], run_dir: &Path) -> io::Result<Self> {
        let named = |folder: &PathBuf, error: &dyn std::fmt::Display| {
            io::Error::other(format!("input folder {}: {error}", folder.display()))
        };
        let mut all = Vec::new();
        for folder in inputs {
            // Resolved, because children of packages run in folders of their own.
            let real = folder
                .canonicalize()
                .map_err(|error| named(folder, &error))?;
            std::env::join_paths([&real]).map_err(|error| named(folder, &error))?;
            all.push(real);
        }
        let marks = std::path::absolute(run_dir.join("marks"))?;
        std::fs::create_dir_all(&marks)?;
        Ok(Self {
            inputs: std::env::join_paths(&all).map_err(io::Error::other)?,
            first_input: all.into_iter().next(),
            marks,
        })
    }
}

/// How much sooner than its worker the kernel ends a program when memory is short, from 0 to 1,000.
const EXPENDABLE: i32 = 500;
const OOM_SCORE: &CStr = c"/proc/self/oom_score_adj";

/// What a program's `oom_score_adj` is to be: not less than this process's own.
fn expendable() -> String {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    let own: i32 = own.trim().parse().unwrap_or(0);
    own.max(EXPENDABLE).to_string()
}

#[allow(unsafe_code)]
fn start(launch: &Launch, folders: &Folders, device_file: Option<&Path>) -> io::Result<Raw> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    for socket in [&ours, &theirs] {
        // As much as the system grants: the default is small for a σ of megabytes.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER);
    }
    let (program, arguments) = launch
        .command
        .split_first()
        .ok_or_else(|| io::Error::other("the child command is empty"))?;
    let fd = theirs.as_raw_fd();
    let parent = rustix::process::getpid();
    let expendable = expendable();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env(SOCKET_ENV, fd.to_string())
        .env(INPUT_DIRS_ENV, &folders.inputs)
        .env(RUN_FOLDER_ENV, &folders.marks)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    match &folders.first_input {
        Some(folder) => command.env(DATA_DIR_ENV, folder),
        None => command.env_remove(DATA_DIR_ENV),
    };
    if let Some(file) = device_file {
        command.env(SIMULATED_DEVICES_ENV, file);
    }
    for name in OWN_ENVIRONMENT {
        command.env_remove(name);
    }
    if let Some(folder) = &launch.folder {
        command.current_dir(folder);
    }
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated. `fd` is
    // open in the child, since `theirs` lives until the process was started.
    unsafe {
        command.pre_exec(move || {
            let fd = std::os::fd::BorrowedFd::borrow_raw(fd);
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the call above.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from(io::ErrorKind::BrokenPipe));
            }
            // Refused only where it may not be raised, and then it is as high already.
            if let Ok(file) = rustix::fs::open(OOM_SCORE, OFlags::WRONLY, Mode::empty()) {
                let _ = rustix::io::write(&file, expendable.as_bytes());
            }
            Ok(())
        });
    }
    let process = command.spawn()?;
    ours.set_nonblocking(true)?;
    Ok(Raw {
        process,
        socket: ours,
    })
}

impl Spawner {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(
        command: Vec<String>,
        input_dirs: &[PathBuf],
        run_dir: PathBuf,
        device_file: Option<PathBuf>,
    ) -> io::Result<Self> {
        let folders = Folders::new(input_dirs, &run_dir)?;
        let device_file = device_file.map(std::path::absolute).transpose()?;
        let (tasks, inbox) = mpsc::sync_channel(TASKS);
        std::thread::Builder::new()
            .name("fiec-spawn".to_owned())
            .spawn(move || {
                for task in inbox {
                    match task {
                        Task::Spawn(launch, reply) => {
                            drop(reply.send(start(&launch, &folders, device_file.as_deref())));
                        }
                        Task::Reap(mut process) => drop(process.wait()),
                    }
                }
            })?;
        Ok(Self {
            tasks,
            command,
            run_dir,
        })
    }

    /// Starts a child, which reports `ready` by itself. A package that speaks frames runs as its
    /// own process, in its folder. Any other program runs in the agent's own child.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub async fn spawn(
        &self,
        package: Option<&Arc<Package>>,
        logs: Logs,
    ) -> Result<Child, NotStarted> {
        let own = package.and_then(|p| Some((p.command()?, p.told.folder.clone())));
        let launch = match own {
            Some((command, folder)) => Launch {
                command,
                folder: Some(folder),
            },
            None => Launch {
                command: self.command.clone(),
                folder: None,
            },
        };
        let command = launch.command.first().cloned().unwrap_or_default();
        let folder = launch.folder.clone();
        let (reply, answer) = oneshot::channel();
        let gone = || io::Error::other("the starting thread has ended");
        let task = Task::Spawn(launch, reply);
        self.tasks.send(task).map_err(|_| gone())?;
        let Raw {
            mut process,
            socket,
        } = answer
            .await
            .map_err(|_| gone())?
            .map_err(|error| NotStarted::of(&command, folder.as_deref(), &error))?;
        let pid = process.id();
        leftovers::note(&self.run_dir, pid);
        let mut readers = Vec::new();
        for (pipe, stream) in [
            (process.stdout.take().map(OwnedFd::from), LogStream::Stdout),
            (process.stderr.take().map(OwnedFd::from), LogStream::Stderr),
        ] {
            if let Some(pipe) = pipe {
                readers.push(logs.follow(pipe, stream)?);
            }
        }
        Ok(Box::new(ChildProcess {
            link: Link::new(tokio::net::UnixStream::from_std(socket)?),
            logs,
            key: None,
            prepared_for: None,
            idle_since: Instant::now(),
            package: package.cloned(),
            quick: false,
            ahead: Ahead::default(),
            spent: false,
            context: None,
            confined: Vec::new(),
            pid,
            process: Some(process),
            readers,
            spawner: self.clone(),
        }))
    }
}

impl ChildProcess {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Confines the child and its descendants to these processors. Empty means the worker's own. A
    /// refusal of the kernel is only logged, because the grant was checked before.
    pub fn confine(&mut self, cpus: &[u32]) {
        if self.confined == cpus {
            return;
        }
        // Set even if the call fails half-way, because the old confinement no longer holds.
        self.confined = cpus.to_vec();
        if let Err(error) = affinity::confine(self.pid, cpus) {
            tracing::warn!(%error, ?cpus, "a program cannot be confined to its processors");
        }
    }

    /// Sends an order. If the child does not read it in time, the child is ended: a part of the
    /// order may have arrived.
    ///
    /// # Errors
    /// When the child is gone.
    pub async fn order(&mut self, order: &Order, body: &[u8]) -> Result<(), FrameError> {
        let sent = self.link.send(order, body).await;
        if matches!(&sent, Err(FrameError::Io(error)) if error.kind() == io::ErrorKind::TimedOut) {
            tracing::warn!("the child took nothing for long and is ended");
            self.kill();
        }
        sent
    }

    /// Kills it and its whole group, stopped or not. [`Child::autopsy`] says how it ended.
    pub fn kill(&self) {
        if let Some(group) = Pid::from_raw(self.pid as i32) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
    }

    /// Ends a child that has closed its socket, and returns how it ended.
    pub async fn autopsy(mut self) -> Exit {
        // Its last output arrives with the end of the pipes, unless a grandchild holds them open.
        for reader in &mut self.readers {
            let _ = tokio::time::timeout(Duration::from_millis(300), reader).await;
        }
        self.logs.rest().await;
        let Some(pid) = Pid::from_raw(self.pid as i32) else {
            return Exit::Unknown("unknown exit".to_owned());
        };
        // NOWAIT: it is reaped when it is dropped, after its group was killed.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        for _ in 0..100 {
            match rustix::process::waitid(WaitId::Pid(pid), options) {
                Ok(Some(status)) => return Exit::from(&status),
                Ok(None) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(error) => return Exit::Unknown(error.to_string()),
            }
        }
        Exit::Killed
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            // It is not reaped yet, so its process id and its group's id are still its own.
            self.kill();
            let _ = self.spawner.tasks.send(Task::Reap(process));
        }
        for reader in &self.readers {
            reader.abort();
        }
        leftovers::forget(&self.spawner.run_dir, self.pid);
    }
}
