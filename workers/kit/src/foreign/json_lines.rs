//! One process for the whole run, which speaks JSON lines over a Unix socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use fiec_schemas::BoundaryIndex;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::TileRange;
use rustix::event::{PollFd, PollFlags};
use serde_json::Value;

use super::lines::{self, Lines, Said, Told, from_text, line_limit, shorten, to_text};
use super::patience::{GRACE, Patience};
use super::process::{Process, in_words};
use super::state_dir::wait;
use super::work::{Work, check_result, check_values};
use super::{Package, check_state};
use crate::frames::Shares;
use crate::program::{Capsule, Inputs, ProgramError, Progress, Step};
use crate::programs::{Instance, RunEnd};

/// Time limit to connect, or to send σ, if the package declares no `boundary_ms`.
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// A process with its connection.
struct Talk {
    process: Process,
    /// Set until the process has connected.
    listener: Option<UnixListener>,
    lines: Option<Lines>,
    first: Option<String>,
}

/// The program.
pub struct JsonLines {
    package: Package,
    work: Work,
    params: Value,
    /// σ to start from.
    begin: Option<Vec<u8>>,
    boundary: Option<BoundaryIndex>,
    talk: Option<Talk>,
    /// σ that came with the boundary.
    state: Option<Vec<u8>>,
    progress: Progress,
    /// How its range is shared, if it may be.
    shares: Option<Shares>,
    /// A part to merge first, and its σ.
    merge: Option<(TileRange, Option<Vec<u8>>)>,
    /// The time that it may still compute, until the program hears of it.
    limit: Option<Duration>,
}

impl JsonLines {
    /// Makes its folders.
    pub fn start(
        package: &Package,
        params: &Value,
        inputs: &mut Inputs,
    ) -> Result<Self, ProgramError> {
        let work = Work::new(package, params, inputs)?;
        work.socket()?;
        Ok(Self {
            package: package.clone(),
            work,
            params: params.clone(),
            begin: None,
            boundary: None,
            talk: None,
            state: None,
            progress: Progress::default(),
            shares: None,
            merge: None,
            limit: None,
        })
    }

    fn connect(&mut self, cx: &Capsule) -> Result<Talk, ProgramError> {
        let path = self.work.socket()?;
        let listener = UnixListener::bind(&path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| {
                ProgramError::Transient(format!("cannot listen on {}: {error}", path.display()))
            })?;
        let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
        let state = self.begin.take().map(|state| to_text(&state));
        let merge = self.merge.take();
        let part = merge.as_ref().and_then(|(_, state)| state.as_deref());
        let part = part.map(to_text);
        let run = Told::Run {
            params: &self.params,
            boundary: self.boundary,
            state: state.as_deref(),
            grant: &self.work.grant,
            inputs: &text(self.work.seen_inputs()),
            objects: &text(self.work.seen("objects")),
            outputs: &text(self.work.seen("outputs")),
            execution: cx.execution,
            spread: self.shares,
            merge: merge.map(|(range, _)| lines::Returned {
                from: range.from,
                to: range.to,
                state: part.as_deref(),
            }),
        };
        let first = serde_json::to_string(&run).map_err(ProgramError::permanent)?;
        Ok(Talk {
            process: self.work.spawn(&self.package, cx, false)?,
            listener: Some(listener),
            lines: None,
            first: Some(first),
        })
    }

    fn wrong(&self, what: &str) -> ProgramError {
        ProgramError::Transient(format!("{} {what}", self.package.program))
    }

    /// Ends a process that broke the protocol.
    fn end(&mut self) {
        if self.talk.take().is_some() {
            self.work.ended();
        }
    }

    /// Reads a line. One that is not JSON fails for good: the next attempt would write the same.
    fn said(&self, line: &[u8]) -> Result<Said, ProgramError> {
        let said = serde_json::from_slice(line).map_err(|error| {
            if error.is_syntax() {
                return ProgramError::Permanent(format!(
                    "{} wrote a line that is not JSON, as NaN, Infinity and lone surrogates are \
                     not: {} ({error})",
                    self.package.program,
                    shorten(line)
                ));
            }
            self.wrong(&format!(
                "wrote an unknown line: {} ({error})",
                shorten(line)
            ))
        })?;
        if matches!(said, Said::Completed { .. }) {
            check_values(&self.package, line, "")?;
        }
        Ok(said)
    }

    /// Returns the next line from the process.
    fn hear(
        &mut self,
        cx: &Capsule,
        patience: &mut Patience<'_>,
        asked: bool,
    ) -> Result<Said, ProgramError> {
        let Some(talk) = &mut self.talk else {
            return Err(self.wrong("has no process"));
        };
        let limit = line_limit(self.package.manifest.limits.state_bytes);
        let program = &self.package.program;
        let transient = |text: String| ProgramError::Transient(format!("{program} {text}"));
        let mut gone = false;
        // After that it normally ends by itself.
        let mut closed = None;
        loop {
            if let Some(lines) = &mut talk.lines {
                let line = lines.next().map_err(|error| match error {
                    ProgramError::Permanent(text) => {
                        ProgramError::Permanent(format!("{program} wrote {text}"))
                    }
                    error => error,
                })?;
                if let Some(line) = line {
                    return self.said(&line);
                }
            }
            if gone {
                let status = talk.process.end()?;
                if let Some(ending) = patience.ending() {
                    return Err(ending.into_error());
                }
                let words = format!(
                    "{program} ended with {} before it completed (capsule {})",
                    in_words(status),
                    cx.index() + 1
                );
                return Err(self.work.ended_with(&self.package, status, words));
            }
            patience.tick(&talk.process, cx.wishes.as_deref())?;
            if talk.lines.as_ref().is_some_and(|lines| lines.closed) {
                let until = *closed.get_or_insert_with(|| Instant::now() + GRACE);
                patience.look_again(until);
            }
            if closed.is_some_and(|until| Instant::now() >= until) {
                let text = format!(
                    "closed its socket without a word (capsule {})",
                    cx.index() + 1
                );
                patience.give_up(&talk.process, transient(text));
            }
            if patience.is_unlimited()
                && patience.elapsed() > ANSWER_WITHIN
                && (asked || talk.lines.is_none())
            {
                let what = if asked { "send σ" } else { "connect" };
                let text = format!("did not {what} within {} s", ANSWER_WITHIN.as_secs());
                patience.give_up(&talk.process, transient(text));
            }
            let mut fds = vec![PollFd::from_borrowed_fd(talk.process.fd(), PollFlags::IN)];
            if let Some(lines) = &talk.lines
                && !lines.closed
            {
                let mut flags = PollFlags::IN;
                flags.set(PollFlags::OUT, lines.has_more_to_say());
                fds.push(PollFd::from_borrowed_fd(lines.fd(), flags));
            }
            if let Some(listener) = &talk.listener {
                fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
            }
            if let Some(wishes) = &cx.wishes {
                fds.push(PollFd::from_borrowed_fd(wishes.fd(), PollFlags::IN));
            }
            wait(&mut fds, patience)?;
            gone = !fds[0].revents().is_empty();
            if let Some(listener) = &talk.listener {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let mut lines =
                            Lines::new(stream, limit).map_err(ProgramError::transient)?;
                        if let Some(first) = talk.first.take() {
                            lines.say(first).map_err(ProgramError::transient)?;
                        }
                        talk.lines = Some(lines);
                        talk.listener = None;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(ProgramError::transient(error)),
                }
            }
            if let Some(lines) = &mut talk.lines {
                lines.flush().map_err(ProgramError::transient)?;
            }
        }
    }

    fn tell(&mut self, told: &Told<'_>) -> Result<(), ProgramError> {
        match self.talk.as_mut().and_then(|talk| talk.lines.as_mut()) {
            Some(lines) => lines.tell(told).map_err(ProgramError::transient),
            None => Ok(()),
        }
    }

    /// Returns the next line about the capsule. Requests before it are answered.
    fn hear_and_answer(
        &mut self,
        cx: &mut Capsule,
        patience: &mut Patience<'_>,
    ) -> Result<Said, ProgramError> {
        loop {
            match self.hear(cx, patience, false)? {
                Said::Surroundings => {
                    let answer = cx.surroundings()?;
                    self.tell(&Told::Surroundings(&answer))?;
                }
                Said::Ask(change) => {
                    let answer = cx.ask(change)?;
                    self.tell(&Told::Asked(&answer))?;
                }
                Said::Reserve(wish) => {
                    let answer = cx.reserve(wish)?;
                    self.tell(&Told::Reserved(&answer))?;
                }
                said => return Ok(said),
            }
        }
    }

    fn take_state(&mut self, text: &str) -> Result<(), ProgramError> {
        let state = from_text(text).map_err(|why| self.wrong(&format!("sent σ, but {why}")))?;
        check_state(&self.package, &self.work.grant, state.len() as u64)?;
        self.state = Some(state);
        Ok(())
    }

    fn step(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError> {
        self.state = None;
        if self.talk.is_some() {
            let left = self.limit.take();
            let limit_left_ms =
                left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            self.tell(&Told::Go { limit_left_ms })?;
        } else {
            self.talk = Some(self.connect(cx)?);
        }
        let package = self.package.clone();
        let mut patience = Patience::new(&package, cx);
        match self.hear_and_answer(cx, &mut patience)? {
            Said::Boundary {
                of,
                note,
                state,
                outputs,
                emit,
                numbers,
            } => {
                let note = note.map(|note| note.chars().take(200).collect());
                self.progress = Progress { of, note };
                let complete = state.is_some();
                if let Some(state) = state {
                    self.take_state(&state)?;
                }
                self.work.take_named_outputs(&self.package, &outputs)?;
                if complete {
                    // Declared now, so that a commit is due before there are too many.
                    self.work.declare_outputs(&self.package, cx)?;
                }
                lines::emit(&self.package.program, &emit, cx)?;
                lines::report(&numbers, cx)?;
                Ok(Step::Boundary)
            }
            Said::Completed {
                state,
                result,
                outputs,
                emit,
                numbers,
            } => {
                if let Some(state) = state {
                    self.take_state(&state)?;
                }
                let text = result.to_string();
                check_result(&self.package, text.len() as u64)?;
                self.work.take_named_outputs(&self.package, &outputs)?;
                self.work.declare_outputs(&self.package, cx)?;
                lines::emit(&self.package.program, &emit, cx)?;
                lines::report(&numbers, cx)?;
                self.let_go(GRACE);
                Ok(Step::Complete { result })
            }
            Said::Failed { reason, permanent } => Err(match permanent {
                true => ProgramError::Permanent(reason),
                false => ProgramError::Transient(reason),
            }),
            said @ (Said::State { .. }
            | Said::Surroundings
            | Said::Ask(_)
            | Said::Reserve(_)
            | Said::Split(_)
            | Said::Whole) => Err(self.wrong(&format!("sent {:?} without a request", said.name()))),
        }
    }

    /// Waits at most `grace` for the process to end by itself, then ends it.
    fn let_go(&mut self, grace: Duration) {
        let Some(talk) = &mut self.talk else {
            return;
        };
        let until = Instant::now() + grace;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut fds = vec![PollFd::from_borrowed_fd(talk.process.fd(), PollFlags::IN)];
            if let Some(lines) = &talk.lines
                && lines.has_more_to_say()
            {
                fds.push(PollFd::from_borrowed_fd(lines.fd(), PollFlags::OUT));
            }
            let timeout = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let failed = matches!(
                rustix::event::poll(&mut fds, Some(&timeout)),
                Err(error) if error != rustix::io::Errno::INTR
            );
            if failed || left.is_zero() || !fds[0].revents().is_empty() {
                break;
            }
            if let Some(lines) = &mut talk.lines
                && lines.flush().is_err()
            {
                break;
            }
        }
        self.end();
    }
}

impl Instance for JsonLines {
    fn resume(&mut self, state: Option<&[u8]>) -> Result<(), ProgramError> {
        self.end();
        self.work.clear()?;
        self.state = None;
        self.progress = Progress::default();
        self.begin = state.map(<[u8]>::to_vec);
        (self.shares, self.merge) = (None, None);
        Ok(())
    }

    fn share(&mut self, shares: Shares) {
        self.shares = Some(shares);
    }

    fn split(&mut self, cx: &Capsule) -> Result<Option<TileRange>, ProgramError> {
        self.tell(&Told::Split)?;
        let package = self.package.clone();
        let mut patience = Patience::new(&package, cx);
        match self.hear(cx, &mut patience, true)? {
            Said::Split(range) => {
                // The σ that came with the boundary included the given range, and so did the total
                // count.
                self.state = None;
                if let Some(of) = &mut self.progress.of {
                    *of = of.saturating_sub(range.count()).max(cx.index());
                }
                Ok(Some(range))
            }
            Said::Whole => Ok(None),
            said => {
                let text = format!("was asked to split and said {:?}", said.name());
                Err(self.wrong(&text))
            }
        }
    }

    fn merge(
        &mut self,
        range: TileRange,
        part: Option<&[u8]>,
        cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        self.merge = Some((range, part.map(<[u8]>::to_vec)));
        self.capsule(cx)
    }

    fn capsule(&mut self, cx: &mut Capsule) -> Result<Step, ProgramError> {
        if self.talk.is_none() {
            self.boundary = self.begin.is_some().then(|| cx.index());
        }
        let step = self.step(cx);
        if step.is_err() {
            self.end();
        }
        step
    }

    fn encode(&mut self, out: &mut Vec<u8>, cx: &mut Capsule) -> Result<(), ProgramError> {
        if self.state.is_none() && self.talk.is_none() {
            return Err(ProgramError::Permanent(format!(
                "{} completed without its σ, from which other executions continue: \
                 {{\"is\":\"completed\",\"state\":…}}",
                self.package.program
            )));
        }
        if self.state.is_none() {
            self.tell(&Told::State)?;
            let package = self.package.clone();
            let mut patience = Patience::new(&package, cx);
            match self.hear(cx, &mut patience, true)? {
                Said::State { state, outputs } => {
                    self.take_state(&state)?;
                    self.work.take_named_outputs(&self.package, &outputs)?;
                }
                Said::Failed { reason, permanent } => {
                    return Err(match permanent {
                        true => ProgramError::Permanent(reason),
                        false => ProgramError::Transient(reason),
                    });
                }
                said => {
                    let text = format!("was asked for σ and said {:?}", said.name());
                    return Err(self.wrong(&text));
                }
            }
        }
        match &self.state {
            Some(state) => out.extend_from_slice(state),
            None => return Err(self.wrong("gave no σ")),
        }
        self.work.declare_outputs(&self.package, cx)
    }

    fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.work.grant = grant.clone();
        self.tell(&Told::Reconfigure { grant })
    }

    fn near_limit(&mut self, left: Duration) {
        self.limit = Some(left);
    }

    fn end_run(&mut self, end: RunEnd<'_>) {
        let told = match end {
            RunEnd::Cancel => Told::Cancel,
            RunEnd::Yield { cause } => Told::Yield { cause },
        };
        if let Err(error) = self.tell(&told) {
            eprintln!("fiec: {error}");
        }
        self.let_go(GRACE);
    }
}
