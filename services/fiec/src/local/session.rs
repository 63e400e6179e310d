//! One process of a program, from start to end, in its own folders.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fiec_kit::frames::{self, DATA_DIR_ENV, FrameError, Order, Reason, Report, Run, SOCKET_ENV};
use fiec_kit::launch::{self, Environment, Kind, Rules, Values};
use fiec_kit::room::Room;
use fiec_kit::{Asked, Reserved, Surroundings};
use fiec_schemas::package::Protocol;
use fiec_schemas::{BoundaryIndex, CommitPolicy, Digest, ExecutionId};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::num::NonZeroU64;
use tempfile::TempDir;

use super::processors::Confined;
use super::{Objects, Subject};

/// Time limit until a process reports that it is ready.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Time limit for a process to end after its socket is closed.
const END_WITHIN: Duration = Duration::from_secs(10);
/// Most bytes of standard error that are kept.
const TAIL: usize = 4_000;

/// An output with its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// Its name.
    pub name: String,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Number of its bytes.
    pub bytes: u64,
}

/// A report of a process.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Progress.
    Progress {
        /// Completed capsules.
        index: BoundaryIndex,
        /// Number of all capsules, if known.
        of: Option<BoundaryIndex>,
        /// The program's note.
        note: Option<String>,
    },
    /// A requested boundary.
    Boundary {
        /// Completed capsules.
        index: BoundaryIndex,
        /// σ.
        state: Vec<u8>,
        /// Outputs since the last boundary.
        outputs: Vec<Made>,
        /// True if the process yielded here.
        yielded: bool,
    },
    /// The program has completed.
    Completed {
        /// The program's result.
        result: Value,
        /// Number of all capsules.
        capsules: BoundaryIndex,
        /// Outputs since the last boundary.
        outputs: Vec<Made>,
    },
    /// The program failed or crashed.
    Failed {
        /// The reason.
        reason: String,
    },
}

/// Fresh folders of one process.
#[derive(Debug)]
pub struct Sandbox {
    root: TempDir,
}

impl Sandbox {
    fn new() -> anyhow::Result<Self> {
        let root = tempfile::Builder::new()
            .prefix("fl-")
            .tempdir()
            .context("cannot make a temporary folder")?;
        for name in ["home", "cwd", "tmp"] {
            std::fs::create_dir(root.path().join(name))?;
        }
        Ok(Self { root })
    }

    /// Path of `home`, `cwd` or `tmp`.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
}

/// A running process.
pub struct Session<'a> {
    subject: &'a Subject,
    /// Its folders.
    pub sandbox: Sandbox,
    socket: UnixStream,
    /// The room of the present run.
    room: Room,
    process: Option<Child>,
    tail: Arc<Mutex<Vec<u8>>>,
}

fn listen(mut from: impl std::io::Read + Send + 'static, tail: Arc<Mutex<Vec<u8>>>, echo: bool) {
    // Ends when the last process that holds the other end has ended.
    std::thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if echo {
                use std::io::Write as _;
                let _ = std::io::stderr().write_all(&buffer[..n]);
            }
            let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
            tail.extend_from_slice(&buffer[..n]);
            let surplus = tail.len().saturating_sub(TAIL);
            tail.drain(..surplus);
        }
    });
}

impl<'a> Session<'a> {
    /// Starts a process and waits until it is ready.
    ///
    /// # Errors
    /// If it cannot be started, or its first report is another one.
    pub fn start(subject: &'a Subject) -> anyhow::Result<Self> {
        Self::start_under(subject, &[])
    }

    /// Starts a process under another command, such as a tracer, that keeps open descriptors.
    ///
    /// # Errors
    /// See [`Session::start`].
    pub fn start_under(subject: &'a Subject, before: &[String]) -> anyhow::Result<Self> {
        let sandbox = Sandbox::new()?;
        let (socket, theirs) = UnixStream::pair()?;
        let frames = subject
            .package
            .as_ref()
            .filter(|package| package.manifest.protocol == Protocol::Frames);
        let (mut words, folder) = match frames {
            Some(package) => {
                let mut entry = package.manifest.entry.clone();
                if let Some(first) = entry.first_mut()
                    && first.contains('/')
                {
                    *first = package.folder.join(&*first).to_string_lossy().into_owned();
                }
                (entry, package.folder.clone())
            }
            None => (subject.child.clone(), sandbox.folder("cwd")),
        };
        words.splice(0..0, before.iter().cloned());
        let (program, arguments) = words.split_first().context("the entry is empty")?;
        let mut command = Command::new(program);
        let rules = Rules {
            environment: Environment::Users,
            ..Rules::default()
        };
        let kind = match frames {
            Some(_) => {
                let device = subject.grant.device.as_ref();
                let device = device.map(|device| &*device.uuid);
                rules.prepare(&mut command, device, &Values::default());
                Kind::Program
            }
            None => {
                rules.prepare_own(&mut command);
                Kind::Own
            }
        };
        if subject.fresh_home {
            command.env("HOME", sandbox.folder("home"));
            for name in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
                command.env_remove(name);
            }
        }
        command
            .args(arguments)
            .current_dir(folder)
            .env("TMPDIR", sandbox.folder("tmp"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env(SOCKET_ENV, theirs.as_raw_fd().to_string())
            .env(DATA_DIR_ENV, &subject.data_dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let cpus = &subject.grant.cpus;
        let confined = (!cpus.is_empty()).then(|| Confined::to(cpus));
        let confined = confined.transpose().context("cannot choose processors")?;
        let mut process = launch::spawn(&mut command, &rules, kind, Some(theirs.as_fd()))
            .with_context(|| format!("cannot run {program:?}"))?;
        drop(confined);
        drop(theirs);
        let tail = Arc::default();
        if let Some(pipe) = process.stdout.take() {
            listen(pipe, Arc::clone(&tail), subject.echo);
        }
        if let Some(pipe) = process.stderr.take() {
            listen(pipe, Arc::clone(&tail), subject.echo);
        }
        let mut session = Self {
            subject,
            sandbox,
            socket,
            room: Room::NONE,
            process: Some(process),
            tail,
        };
        session.socket.set_read_timeout(Some(READY_WITHIN))?;
        match frames::read::<Report>(&session.socket) {
            Ok(Some((Report::Ready, _))) => {}
            Ok(Some((other, _))) => bail!("its process said {other:?} before it was ready"),
            Ok(None) => bail!("{}", session.crash("before it was ready")),
            Err(FrameError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => bail!(
                "its process was not ready within {} s{}",
                READY_WITHIN.as_secs(),
                session.words()
            ),
            Err(error) => bail!("{}: {error}", session.crash("before it was ready")),
        }
        // From here on there is no time limit while the process lives.
        session.socket.set_read_timeout(None)?;
        Ok(session)
    }

    /// Starts a run. It commits at every `commit_every`-th boundary and yields at boundary
    /// `yield_at`.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn run(
        &mut self,
        from: Option<(BoundaryIndex, &[u8])>,
        commit_every: Option<u64>,
        yield_at: Option<BoundaryIndex>,
    ) -> anyhow::Result<()> {
        let every = NonZeroU64::new(commit_every.unwrap_or(u64::MAX)).unwrap_or(NonZeroU64::MAX);
        self.room = Room::of(self.subject.package.as_ref(), &self.subject.grant);
        let run = Run {
            execution: ExecutionId(uuid::Uuid::nil()),
            epoch: 1,
            program: self.subject.program.clone(),
            params: self.subject.params.clone(),
            commit: CommitPolicy::Every(every),
            boundary: from.map(|(index, _)| index),
            lease_ms: u32::MAX,
            interval_ms: 0,
            package: self.subject.package.clone(),
            grant: self.subject.grant.clone(),
            spread: None,
            merge: None,
            crashes: 0,
        };
        let state = from.map_or(&[][..], |(_, state)| state);
        let order = yield_at.map(|at| {
            Order::Yield(frames::Yield {
                cause: Some("fiec run --local cuts here".to_owned()),
                deadline_ms: None,
                at: Some(at),
            })
        });
        let send = || -> Result<(), FrameError> {
            // Sent before the run: the program may pass the boundary before it reads another order.
            if let Some(order) = &order {
                frames::write(&self.socket, order, &[])?;
            }
            frames::write(&self.socket, &Order::Run(Box::new(run)), &[state])?;
            // Sent again: a program that speaks frames may ignore an order that arrives before its
            // run.
            if let (Some(order), true) = (&order, self.subject.speaks_frames()) {
                frames::write(&self.socket, order, &[])?;
            }
            Ok(())
        };
        let sent = send();
        sent.with_context(|| self.crash("when it was to run"))
    }

    /// Waits for the next report.
    ///
    /// # Errors
    /// If a frame is unknown. A crash is an event.
    pub fn hear(&mut self) -> anyhow::Result<Event> {
        loop {
            let room = self.room;
            let read =
                frames::read_if::<Report>(&self.socket, |report, body| room.admits(report, body));
            let (report, body) = match read {
                Ok(Some(frame)) => frame,
                Ok(None) | Err(FrameError::Io(_)) => {
                    let reason = self.crash("while it ran");
                    return Ok(Event::Failed { reason });
                }
                Err(FrameError::NoRoom(over)) => {
                    let reason = format!("{}: {over}", self.subject.program);
                    return Ok(Event::Failed { reason });
                }
                Err(error) => bail!("its process wrote no frame: {error}{}", self.words()),
            };
            match report {
                Report::Ready
                | Report::Prepared { .. }
                | Report::Began { .. }
                | Report::Aside
                | Report::Whole => {}
                // No other execution uses this machine's memory here, so grant every request.
                Report::Reserve(wish) => {
                    let mut grant = self.subject.grant.clone();
                    grant.memory_bytes = grant.memory_bytes.max(wish.memory_bytes);
                    if let Some(device) = &mut grant.device {
                        device.memory_bytes = device.memory_bytes.max(wish.device_memory_bytes);
                    }
                    let granted = grant.clone();
                    self.send(&Order::Reserved(Reserved::Granted { grant: granted }), &[]);
                    self.send(&Order::Reconfigure { grant }, &[]);
                }
                Report::Surroundings => {
                    let answer = Box::new(Surroundings {
                        grant: self.subject.grant.clone(),
                        unknown: Some("this run has no node".to_owned()),
                        ..Surroundings::default()
                    });
                    self.send(&Order::Surroundings(answer), &[]);
                }
                Report::Ask(change) => {
                    let answer = match change.apply(&self.subject.grant) {
                        Ok(grant) => Asked::Granted { grant },
                        Err(reason) => Asked::Refused { reason },
                    };
                    self.send(&Order::Asked(answer.clone()), &[]);
                    if let Asked::Granted { grant } = answer {
                        self.send(&Order::Reconfigure { grant }, &[]);
                    }
                }
                Report::Progress { index, of, note } => {
                    return Ok(Event::Progress { index, of, note });
                }
                Report::Boundary(report) => {
                    let size = usize::try_from(report.bytes)?;
                    let Some((state, rest)) = body.split_at_checked(size) else {
                        bail!("the program sent a boundary with less σ than it announced");
                    };
                    if report.digest.is_some_and(|d| d != Digest::of(state)) {
                        bail!(
                            "boundary {}: σ has another digest than it says",
                            report.index
                        );
                    }
                    let outputs = take(&self.subject.objects, &report.outputs, rest)?;
                    if let Some(reason) = self.breaks(&outputs) {
                        return Ok(Event::Failed { reason });
                    }
                    let yielded = report.reason == Reason::Yield;
                    return Ok(Event::Boundary {
                        index: report.index,
                        state: state.to_vec(),
                        outputs,
                        yielded,
                    });
                }
                Report::Completed {
                    result,
                    capsules,
                    outputs,
                    ..
                } => {
                    let outputs = take(&self.subject.objects, &outputs, &body)?;
                    if let Some(reason) = self.breaks(&outputs) {
                        return Ok(Event::Failed { reason });
                    }
                    return Ok(Event::Completed {
                        result,
                        capsules,
                        outputs,
                    });
                }
                Report::Fetch { digest, .. } => {
                    let (error, bytes) = match self.subject.objects.get(digest) {
                        Ok(bytes) => (None, bytes),
                        Err(error) => (Some(error), Vec::new()),
                    };
                    let data = Order::Data {
                        digest,
                        error,
                        permanent: true,
                    };
                    self.send(&data, &bytes);
                }
                Report::Failed { reason, .. } => return Ok(Event::Failed { reason }),
                Report::Cancelled => bail!("the program reported a cancel without an order"),
            }
        }
    }

    /// The manifest's rule that the outputs break, as an agent would report it.
    fn breaks(&self, outputs: &[Made]) -> Option<String> {
        let package = self.subject.package.as_ref()?;
        let (program, manifest) = (&package.program, &package.manifest);
        let undeclared = outputs.iter().find(|o| !manifest.declares(&o.name))?;
        Some(format!(
            "{program} made output {:?}, which its manifest does not declare (outputs: {:?})",
            undeclared.name, manifest.outputs
        ))
    }

    fn send(&mut self, order: &Order, body: &[u8]) {
        if let Order::Reconfigure { grant } = order {
            self.room = self.room.widened_to(grant);
        }
        // The reader of reports notices a process that has ended.
        let _ = frames::write(&self.socket, order, &[body]);
    }

    /// Reports to the process that a boundary is committed.
    pub fn committed(&mut self, index: BoundaryIndex) {
        self.send(&Order::Committed { index }, &[]);
    }

    fn words(&self) -> String {
        // The output was shown already.
        if self.subject.echo {
            return String::new();
        }
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&tail);
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        match lines.len() {
            0 => String::new(),
            n => format!(
                "; its last words:\n  {}",
                lines[n.saturating_sub(8)..].join("\n  ")
            ),
        }
    }

    fn crash(&mut self, when: &str) -> String {
        let status = self.wait(END_WITHIN);
        let how = match status {
            Some(status) => status.to_string(),
            None => "the program closed its socket".to_owned(),
        };
        // Another thread copies its last output.
        std::thread::sleep(Duration::from_millis(50));
        format!("its process ended {when} ({how}){}", self.words())
    }

    fn wait(&mut self, within: Duration) -> Option<std::process::ExitStatus> {
        let process = self.process.as_mut()?;
        let until = std::time::Instant::now() + within;
        while std::time::Instant::now() < until {
            if let Ok(Some(status)) = process.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }

    /// Closes the socket, waits until the process ends, and kills what is left of its group.
    pub fn end(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.wait(END_WITHIN);
        self.kill();
    }

    /// Kills the process at once.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // After a reaped process, others of its group may remain. They keep the group's id in
            // use.
            if let Some(group) = Pid::from_raw(process.id() as i32) {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            let _ = process.wait();
        }
    }
}

fn take(objects: &Objects, made: &[frames::Made], body: &[u8]) -> anyhow::Result<Vec<Made>> {
    let mut rest = body;
    let mut outputs = Vec::new();
    for output in made {
        let size = usize::try_from(output.bytes)?;
        let Some((bytes, left)) = rest.split_at_checked(size) else {
            bail!("output {:?} is shorter than it says", output.name);
        };
        rest = left;
        let digest = objects.put(bytes)?;
        if output.digest.is_some_and(|said| said != digest) {
            bail!("output {:?} has another digest than it says", output.name);
        }
        outputs.push(Made {
            name: output.name.clone(),
            digest,
            bytes: output.bytes,
        });
    }
    if !rest.is_empty() {
        bail!("{} bytes more than σ and outputs have", rest.len());
    }
    Ok(outputs)
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}
