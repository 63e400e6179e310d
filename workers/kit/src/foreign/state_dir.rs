//! A process per capsule, with its state in a folder.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::ChildStderr;

use fiec_schemas::package::Grant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use super::patience::{Ending, Patience};
use super::process::in_words;
use super::work::Work;
use super::{Package, check_state, pack};
use crate::beneath::Links;
use crate::program::{Capsule, Inputs, ProgramError, Progress, Step};
use crate::programs::{Instance, RunEnd};

/// Exit status: a boundary was reached.
pub const BOUNDARY: i32 = 85;
/// Exit status: a permanent failure.
pub const FAILED: i32 = 65;
/// Longest line that is kept of standard error.
const LINE_LIMIT: usize = 1_000;
/// Most bytes that are still read of standard error after the process has ended.
const DRAIN_LIMIT: usize = 16 << 20;

/// The program.
pub struct StateDir {
    package: Package,
    work: Work,
    files: Vec<pack::Found>,
    progress: Progress,
}

impl StateDir {
    /// Makes its folders.
    pub fn start(
        package: &Package,
        params: &Value,
        inputs: &mut Inputs,
    ) -> Result<Self, ProgramError> {
        Ok(Self {
            package: package.clone(),
            work: Work::new(package, params, inputs)?,
            files: Vec::new(),
            progress: Progress::default(),
        })
    }

    /// Runs one process from its start to its end.
    fn process(&mut self, cx: &Capsule) -> Result<(Option<i32>, String), ProgramError> {
        // Left by a park after which the execution continues here.
        self.work.remove_yield_file()?;
        let mut process = self.work.spawn(&self.package, cx, true)?;
        let mut words = Words::new(process.take_stderr())?;
        let mut patience = Patience::new(&self.package, cx);
        let wishes = cx.wishes.clone();
        loop {
            patience.tick(&process, wishes.as_deref())?;
            if let Some(cause) = patience.take_yield_cause() {
                self.work.write_yield_file(cause)?;
            }
            let fd = process.fd();
            let mut fds = vec![PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            let at_words = words.pipe.as_ref().map(|pipe| {
                fds.push(PollFd::new(pipe, PollFlags::IN));
                fds.len() - 1
            });
            if let Some(wishes) = &wishes {
                fds.push(PollFd::from_borrowed_fd(wishes.fd(), PollFlags::IN));
            }
            wait(&mut fds, &patience)?;
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if at_words.is_some_and(|at| ready[at]) {
                words.pass_on(1)?;
            }
            if ready[0] {
                break;
            }
        }
        let status = process.end()?;
        words.pass_on(DRAIN_LIMIT)?;
        self.work.ended();
        let last = words.last();
        match patience.ending() {
            Some(Ending::Deadline(_)) if matches!(status.code(), Some(0 | BOUNDARY)) => {}
            Some(ending) => return Err(ending.into_error()),
            None => {}
        }
        match status.code() {
            Some(code @ (0 | BOUNDARY | FAILED)) => Ok((Some(code), last)),
            _ => {
                let said = match last.is_empty() {
                    true => String::new(),
                    false => format!("; it said: {last}"),
                };
                let words = format!(
                    "{}: the process of capsule {} ended with {}{said}",
                    self.package.program,
                    cx.index() + 1,
                    in_words(status)
                );
                Err(self.work.ended_with(&self.package, status, words))
            }
        }
    }

    fn read_progress(&self) -> Progress {
        let mut text = String::new();
        let file = self.work.state().ok().and_then(|state| {
            let progress = Path::new("progress");
            state.file(progress, Links::Refused).ok()
        });
        let read = file.map(|file| file.take(LINE_LIMIT as u64).read_to_string(&mut text));
        if !matches!(read, Some(Ok(_))) {
            return Progress::default();
        }
        let line = text.lines().next().unwrap_or_default().trim();
        let mut parts = line.splitn(3, char::is_whitespace).skip(1);
        Progress {
            of: parts.next().and_then(|of| of.parse().ok()),
            note: parts
                .next()
                .map(|note| note.trim().chars().take(200).collect()),
        }
    }
}

pub fn wait(fds: &mut [PollFd<'_>], patience: &Patience<'_>) -> Result<(), ProgramError> {
    let wait = patience.wait();
    let timeout = Timespec {
        tv_sec: wait.as_secs() as i64,
        tv_nsec: wait.subsec_nanos().into(),
    };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(ProgramError::transient(error)),
    }
}

impl Instance for StateDir {
    fn resume(&mut self, state: Option<&[u8]>) -> Result<(), ProgramError> {
        self.work.clear()?;
        self.progress = Progress::default();
        if let Some(state) = state {
            self.work.unpack(state)?;
        }
        Ok(())
    }

    fn capsule(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError> {
        let ended = self.process(cx);
        self.work.remove_yield_file()?;
        let (code, last) = ended?;
        if code == Some(FAILED) {
            return Err(ProgramError::Permanent(match last.is_empty() {
                true => format!("{} failed with exit status {FAILED}", self.package.program),
                false => last,
            }));
        }
        self.work.take_outputs(&self.package)?;
        self.work.emit_all(cx)?;
        self.work.report_numbers(&self.package, cx)?;
        if code == Some(0) {
            self.work.declare_outputs(&self.package, cx)?;
            let result = self.work.result(&self.package)?;
            return Ok(Step::Complete { result });
        }
        let (files, bytes) = pack::look(&self.work.state()?)?;
        check_state(&self.package, &self.work.grant, bytes)?;
        self.files = files;
        self.progress = self.read_progress();
        Ok(Step::Boundary)
    }

    fn encode(&mut self, out: &mut Vec<u8>, cx: &mut Capsule) -> Result<(), ProgramError> {
        pack::pack(&self.work.state()?, &self.files, out)?;
        self.work.declare_outputs(&self.package, cx)
    }

    fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.work.grant = grant.clone();
        Ok(())
    }

    fn end_run(&mut self, _end: RunEnd<'_>) {
        // The folders are not needed any more. If they stay, the next run empties them.
        if let Err(error) = self.work.clear() {
            eprintln!("fiec: {error}");
        }
    }
}

/// Passes standard error on, and keeps its last line.
struct Words {
    pipe: Option<ChildStderr>,
    line: Vec<u8>,
    last: Vec<u8>,
}

impl Words {
    fn new(pipe: Option<ChildStderr>) -> Result<Self, ProgramError> {
        if let Some(pipe) = &pipe {
            rustix::io::ioctl_fionbio(pipe.as_fd(), true).map_err(ProgramError::transient)?;
        }
        Ok(Self {
            pipe,
            line: Vec::new(),
            last: Vec::new(),
        })
    }

    /// Passes on the bytes that have arrived: at least `most`, if there are as many.
    fn pass_on(&mut self, most: usize) -> Result<(), ProgramError> {
        let mut buffer = [0; 64 * 1024];
        let mut passed = 0;
        while passed < most
            && let Some(pipe) = &mut self.pipe
        {
            let n = match pipe.read(&mut buffer) {
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ProgramError::transient(error)),
            };
            if n == 0 {
                self.pipe = None;
                return Ok(());
            }
            passed += n;
            // If standard error is closed, the loss cannot be reported.
            let _ = io::stderr().write_all(&buffer[..n]);
            for piece in buffer[..n].split_inclusive(|b| *b == b'\n') {
                let room = LINE_LIMIT.saturating_sub(self.line.len());
                let (text, ends) = match piece.strip_suffix(b"\n") {
                    Some(text) => (text, true),
                    None => (piece, false),
                };
                self.line.extend_from_slice(&text[..text.len().min(room)]);
                if ends {
                    if !self.line.trim_ascii().is_empty() {
                        std::mem::swap(&mut self.line, &mut self.last);
                    }
                    self.line.clear();
                }
            }
        }
        Ok(())
    }

    fn last(&self) -> String {
        let line = match self.line.trim_ascii() {
            [] => self.last.trim_ascii(),
            line => line,
        };
        String::from_utf8_lossy(line).into_owned()
    }
}
