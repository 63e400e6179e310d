//! Child processes. One thread that lives as long as the agent starts them, because the
//! parent-death signal is tied to the starting thread. Each child has a socket pair and two pipes. A
//! package that speaks frames runs under a keeper. Dropping a [`Child`] ends all its processes.

use std::ffi::OsString;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fiec_kit::frames::{DATA_DIR_ENV, FrameError, INPUT_DIRS_ENV, Order, SOCKET_ENV};
use fiec_kit::launch::{self, Kind, Rules, Said, Values};
use fiec_kit::room::Room;
use fiec_kit::simulated::SIMULATED_DEVICES_ENV;
use fiec_kit::start::NotStarted;
use fiec_schemas::hardware::StuckProcess;
use fiec_schemas::messages::LogStream;
use fiec_schemas::{ExecutionId, Tenant};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::affinity;
use crate::ahead::Ahead;
use crate::endings::Exit;
use crate::leftovers;
use crate::link::Link;
use crate::logs::Logs;
use crate::options::Options;
use crate::packages::Package;
use crate::reaper::Reaper;

/// Most queued requests to start a child.
const TASKS: usize = 1_024;
/// A keeper that has not started its program in this time is ended.
const STARTS_WITHIN: Duration = Duration::from_secs(10);
/// How often and how long a child that has closed its socket is awaited.
const ROUNDS: usize = 100;
const ROUND: Duration = Duration::from_millis(5);
/// The name that the agent's own program shows.
const NAME: &str = "fiec";
const SOCKET_BUFFER: usize = 4 << 20;

struct Raw {
    body: Body,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    /// The agent's end of the pair.
    socket: UnixStream,
}

/// The process of a child.
#[derive(Debug)]
enum Body {
    /// The agent's own program, the leader of its group.
    Own(process::Child),
    /// A package's own process, whose parent is its keeper.
    Kept {
        /// The keeper.
        keeper: process::Child,
        /// Its control socket, which it ends with.
        control: UnixStream,
        /// The program.
        pid: u32,
    },
}

impl Body {
    fn pid(&self) -> u32 {
        match self {
            Self::Own(process) => process.id(),
            Self::Kept { pid, .. } => *pid,
        }
    }

    /// The process from which all others of this child descend.
    fn root(&self) -> u32 {
        match self {
            Self::Own(process)
            | Self::Kept {
                keeper: process, ..
            } => process.id(),
        }
    }

    fn kill(&self) {
        match self {
            Self::Own(process) => {
                // It is not reaped yet, so its process id and its group's id are still its own.
                if let Some(group) = Pid::from_raw(process.id().cast_signed()) {
                    let _ = rustix::process::kill_process_group(group, Signal::KILL);
                }
            }
            // The keeper ends all that it keeps.
            Self::Kept { control, .. } => drop(control.shutdown(Shutdown::Write)),
        }
    }
}

/// A child to start, with the place for the answer.
type Task = (Launch, oneshot::Sender<io::Result<Raw>>);

/// A process to start.
#[derive(Debug, Clone)]
struct Launch {
    /// Program and arguments.
    command: Vec<String>,
    /// Whose code it runs.
    who: Who,
}

#[derive(Debug, Clone)]
enum Who {
    /// The agent's own.
    Own,
    /// That of a package which speaks frames.
    Package {
        /// The command of its keeper.
        keeper: String,
        /// Its folder, in which it runs.
        folder: PathBuf,
        /// Device and variables that the program sees.
        setting: Setting,
    },
}

/// What a package's own process sees. It is settled when the process starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setting {
    /// The device that it may use.
    pub device: Option<String>,
    /// The variables that the submission sets.
    pub values: Values,
}

/// Starts children.
#[derive(Debug, Clone)]
pub struct Spawner {
    tasks: mpsc::SyncSender<Task>,
    reaper: Reaper,
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
    /// What a package's own process sees.
    pub sees: Option<Setting>,
    /// The processors that it is confined to. Empty means the worker's own.
    confined: Vec<u32>,
    body: Option<Body>,
    readers: Vec<JoinHandle<()>>,
    spawner: Spawner,
}

/// What all children of a node start from.
struct Ground {
    /// The rules for programs.
    rules: Rules,
    /// A file of simulated devices, instead of the machine's own.
    device_file: Option<PathBuf>,
    /// The input folders, in the form that children read.
    inputs: OsString,
    /// The first of them.
    first_input: Option<PathBuf>,
}

impl Ground {
    fn new(options: &Options) -> io::Result<Self> {
        let named = |folder: &PathBuf, error: &dyn std::fmt::Display| {
            io::Error::other(format!("input folder {}: {error}", folder.display()))
        };
        let mut all = Vec::new();
        for folder in &options.input_dirs {
            // Resolved, because children of packages run in folders of their own.
            let real = folder
                .canonicalize()
                .map_err(|error| named(folder, &error))?;
            std::env::join_paths([&real]).map_err(|error| named(folder, &error))?;
            all.push(real);
        }
        let device_file = options.device_file.as_ref();
        Ok(Self {
            rules: options.launch.clone(),
            device_file: device_file.map(std::path::absolute).transpose()?,
            inputs: std::env::join_paths(&all).map_err(io::Error::other)?,
            first_input: all.into_iter().next(),
        })
    }
}

fn start(launch: &Launch, ground: &Ground, reaper: &Reaper) -> io::Result<Raw> {
    let (ours, theirs) = UnixStream::pair()?;
    for socket in [&ours, &theirs] {
        // As much as the system grants: the default is small for a σ of megabytes.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER);
    }
    let (program, arguments) = launch
        .command
        .split_first()
        .ok_or_else(|| io::Error::other("the child command is empty"))?;
    let (mut command, control) = match &launch.who {
        Who::Own => {
            let mut command = Command::new(program);
            command.arg0(NAME).stdin(Stdio::null());
            (command, None)
        }
        Who::Package { keeper, .. } => {
            let (control, theirs) = UnixStream::pair()?;
            let mut command = Command::new(keeper);
            command.arg0(NAME).args([launch::KEEPER, program]);
            command.stdin(OwnedFd::from(theirs));
            (command, Some(control))
        }
    };
    command
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let kind = match &launch.who {
        Who::Own => {
            ground.rules.prepare_own(&mut command);
            if let Some(file) = &ground.device_file {
                command.env(SIMULATED_DEVICES_ENV, file);
            }
            Kind::Own
        }
        Who::Package {
            folder, setting, ..
        } => {
            let device = setting.device.as_deref();
            ground.rules.prepare(&mut command, device, &setting.values);
            command.current_dir(folder);
            Kind::Keeper
        }
    };
    command
        .env(SOCKET_ENV, theirs.as_raw_fd().to_string())
        .env(INPUT_DIRS_ENV, &ground.inputs);
    let first = ground.first_input.as_deref().unwrap_or(Path::new(""));
    command.env(DATA_DIR_ENV, first);
    let socket = Some(theirs.as_fd());
    let mut process = reaper.start(|| launch::spawn(&mut command, &ground.rules, kind, socket))?;
    // It holds its own ends of the pairs.
    drop((command, theirs));
    let stdout = process.stdout.take().map(OwnedFd::from);
    let stderr = process.stderr.take().map(OwnedFd::from);
    let body = match control {
        None => Body::Own(process),
        Some(control) => kept(process, control, reaper)?,
    };
    ours.set_nonblocking(true)?;
    Ok(Raw {
        body,
        stdout,
        stderr,
        socket: ours,
    })
}

/// Waits until a keeper has started its program. If it has not, the keeper ends by itself.
fn kept(keeper: process::Child, control: UnixStream, reaper: &Reaper) -> io::Result<Body> {
    control.set_read_timeout(Some(STARTS_WITHIN))?;
    let said = Said::read(&control).and_then(|said| match said {
        Said::Started { pid } => Ok(pid),
        Said::NotStarted { errno } => Err(io::Error::from_raw_os_error(errno)),
        Said::Ended { .. } => Err(io::Error::other("a program's keeper ended it immediately")),
    });
    match said {
        Ok(pid) => {
            control.set_nonblocking(true)?;
            Ok(Body::Kept {
                keeper,
                control,
                pid,
            })
        }
        Err(error) => {
            // It notices that its control socket is closed.
            drop(control);
            reaper.take(keeper);
            Err(error)
        }
    }
}

impl Spawner {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(options: &Options) -> io::Result<Self> {
        let ground = Ground::new(options)?;
        let reaper = Reaper::new(options.adopts_orphans)?;
        let starts = reaper.clone();
        let (tasks, inbox) = mpsc::sync_channel(TASKS);
        std::thread::Builder::new()
            .name("fiec-spawn".to_owned())
            .spawn(move || {
                for (launch, reply) in inbox {
                    let reply: oneshot::Sender<_> = reply;
                    drop(reply.send(start(&launch, &ground, &starts)));
                }
            })?;
        Ok(Self {
            tasks,
            reaper,
            command: options.child_command.clone(),
            run_dir: options.run_dir.clone(),
        })
    }

    /// The processes of programs that SIGKILL does not end; at most 16.
    pub fn stuck(&self) -> Vec<StuckProcess> {
        self.reaper.stuck()
    }

    /// Slots that such processes cost.
    pub fn lost_slots(&self) -> u32 {
        self.reaper.lost_slots()
    }

    /// Starts a child, which reports `ready` by itself. A package that speaks frames runs as its own
    /// process, in its folder, and sees only what the setting says. Any other program runs in the
    /// agent's own child.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub async fn spawn(
        &self,
        package: Option<&Arc<Package>>,
        setting: &Setting,
        logs: Logs,
    ) -> Result<Child, NotStarted> {
        let own = package.and_then(|p| Some((p.command()?, p.told.folder.clone())));
        let folder = own.as_ref().map(|(_, folder)| folder.clone());
        let sees = own.is_some().then(|| setting.clone());
        let launch = match own {
            Some((command, folder)) => Launch {
                command,
                who: Who::Package {
                    keeper: self.command.first().cloned().unwrap_or_default(),
                    folder,
                    setting: setting.clone(),
                },
            },
            None => Launch {
                command: self.command.clone(),
                who: Who::Own,
            },
        };
        let command = launch.command.first().cloned().unwrap_or_default();
        let (reply, answer) = oneshot::channel();
        let gone = || io::Error::other("the starting thread has ended");
        self.tasks.send((launch, reply)).map_err(|_| gone())?;
        let Raw {
            body,
            stdout,
            stderr,
            socket,
        } = answer
            .await
            .map_err(|_| gone())?
            .map_err(|error| NotStarted::of(&command, folder.as_deref(), &error))?;
        leftovers::note(&self.run_dir, body.pid());
        let mut readers = Vec::new();
        for (pipe, stream) in [(stdout, LogStream::Stdout), (stderr, LogStream::Stderr)] {
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
            sees,
            confined: Vec::new(),
            body: Some(body),
            readers,
            spawner: self.clone(),
        }))
    }
}

impl ChildProcess {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.body.as_ref().map_or(0, Body::pid)
    }

    /// Whether the program has left other processes: they may belong to its last run.
    pub fn has_left_others(&self) -> bool {
        match &self.body {
            Some(Body::Kept { keeper, pid, .. }) => launch::has_left_others(keeper.id(), *pid),
            _ => false,
        }
    }

    /// Confines the child and its descendants to these processors. Empty means the worker's own. A
    /// refusal of the kernel is only logged, because the grant was checked before.
    pub fn confine(&mut self, cpus: &[u32]) {
        if self.confined == cpus {
            return;
        }
        // Set even if the call fails half-way, because the old confinement no longer holds.
        self.confined = cpus.to_vec();
        let root = self.body.as_ref().map_or(0, Body::root);
        if let Err(error) = affinity::confine(root, cpus) {
            tracing::warn!(%error, ?cpus, "a program cannot be confined to its processors");
        }
    }

    /// Sends an order, and makes room for the reports that may follow. If the child does not read it
    /// in time, the child is ended: a part of the order may have arrived.
    ///
    /// # Errors
    /// When the child is gone.
    pub async fn order(&mut self, order: &Order, body: &[u8]) -> Result<(), FrameError> {
        match order {
            Order::Run(run) => self.link.make(Room::of(run.package.as_ref(), &run.grant)),
            Order::Reconfigure { grant } | Order::Unpark { grant: Some(grant) } => {
                self.link.widen(grant);
            }
            _ => {}
        }
        let sent = self.link.send(order, body).await;
        if matches!(&sent, Err(FrameError::Io(error)) if error.kind() == io::ErrorKind::TimedOut) {
            tracing::warn!("ending a child that has accepted nothing for long");
            self.kill();
        }
        sent
    }

    /// Kills all its processes, stopped or not. [`Child::autopsy`] says how it ended.
    pub fn kill(&self) {
        if let Some(body) = &self.body {
            body.kill();
        }
    }

    /// Ends a child that has closed its socket, and returns how it ended.
    pub async fn autopsy(mut self) -> Exit {
        // Its last output arrives with the end of the pipes, unless a grandchild holds them open.
        for reader in &mut self.readers {
            let _ = tokio::time::timeout(Duration::from_millis(300), reader).await;
        }
        self.logs.rest().await;
        let process = match &self.body {
            Some(Body::Own(process)) => process,
            Some(Body::Kept {
                keeper, control, ..
            }) => match exit_of_kept(control).await {
                Some(exit) => return exit,
                // It has ended without a word.
                None => keeper,
            },
            None => return Exit::Unknown("unknown exit".to_owned()),
        };
        let pid = Pid::from_child(process);
        // NOWAIT: it is reaped when it is dropped, after its group was killed.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        for _ in 0..ROUNDS {
            match rustix::process::waitid(WaitId::Pid(pid), options) {
                Ok(Some(status)) => return Exit::from(&status),
                Ok(None) => tokio::time::sleep(ROUND).await,
                Err(error) => return Exit::Unknown(error.to_string()),
            }
        }
        Exit::Killed
    }
}

/// How a kept program ended, as its keeper says; none if that has ended itself. Longer waits are for
/// what does not end.
async fn exit_of_kept(control: &UnixStream) -> Option<Exit> {
    for _ in 0..ROUNDS {
        match Said::read(control) {
            Ok(Said::Ended {
                status: Some(status),
                ..
            }) => return Some(Exit::Status(status)),
            Ok(Said::Ended {
                signal: Some(signal),
                ..
            }) => return Some(Exit::Signal(signal)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(ROUND).await;
            }
            Ok(_) => return Some(Exit::Killed),
            Err(_) => return None,
        }
    }
    Some(Exit::Killed)
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            leftovers::forget(&self.spawner.run_dir, body.pid());
            // Its sockets are closed now. It ends its program's processes, and then itself.
            match body {
                Body::Own(process) => self.spawner.reaper.take(process),
                Body::Kept { keeper, .. } => self.spawner.reaper.take(keeper),
            }
        }
        for reader in &self.readers {
            reader.abort();
        }
    }
}
