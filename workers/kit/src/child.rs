//! The run time of a child process: takes orders, owns the loop, commits beside the computation.
//!
//! The computing thread reads its orders itself: while it waits for one, by blocking; while it
//! computes, by looking at the socket at a boundary, at most every [`LOOK_INTERVAL`]. So a boundary
//! costs one reading of the clock, and no execution pays for a thread's wake-up.

use std::collections::VecDeque;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fiec_schemas::{BoundaryIndex, Digest, Timestamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::commit::{Due, Schedule};
use crate::frames::{
    self, BoundaryReport, DATA_DIR_ENV, FrameError, Order, Reason, Report, Run, SOCKET_ENV,
};
use crate::program::{Capsule, Inputs, ProgramError, Step};
use crate::programs::{self, Instance};
use crate::writer::{Writer, describe};

const LOOK_INTERVAL: Duration = Duration::from_micros(100);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// A run that ends sooner says only at its end when it began.
const BRIEF: Duration = Duration::from_millis(1);

/// The entry of a child process. Exits with 0 when the agent has closed the socket.
#[allow(unsafe_code)]
pub fn child_main() -> ExitCode {
    let fd: Option<RawFd> = match std::env::var(SOCKET_ENV) {
        Ok(text) => text.parse().ok(),
        Err(_) => Some(3),
    };
    let Some(fd) = fd.filter(|fd| *fd > 2) else {
        eprintln!("{SOCKET_ENV} names no socket; this command is run by a FIEC agent");
        return ExitCode::from(2);
    };
    // SAFETY: called once, at the start of a process whose parent made this descriptor for it;
    // nothing else in the process has taken it. If it is not open, its first use fails.
    let socket = unsafe { UnixStream::from_raw_fd(fd) };
    let folder = std::env::var_os(DATA_DIR_ENV).unwrap_or_default();
    match serve(socket, Inputs::in_folder(folder)) {
        Ok(()) => ExitCode::SUCCESS,
        // The agent is gone: nobody is left to be told.
        Err(FrameError::Io(_)) => ExitCode::from(3),
        Err(error) => {
            eprintln!("fiec child: {error}");
            ExitCode::from(2)
        }
    }
}

/// Serves orders until the other end closes the socket.
///
/// # Errors
/// When the socket fails or a frame is damaged.
pub fn serve(socket: UnixStream, inputs: Inputs) -> Result<(), FrameError> {
    let writer = Writer::new(socket.try_clone()?)?;
    let mut child = Child {
        socket,
        writer,
        inputs,
        kept: None,
        orders: VecDeque::new(),
        brief: false,
        clock: Instant::now(),
    };
    child.writer.report(&Report::Ready, &[])?;
    while let Some((order, body)) = child.next_order()? {
        match order {
            Order::Prepare { program, params } => {
                let error = child
                    .prepare(&program, &params)
                    .err()
                    .map(|e| e.to_string());
                child.writer.report(&Report::Prepared { error }, &[])?;
            }
            Order::Run(run) => child.run(&run, body)?,
            // Crossed with the end of the run that they were meant for.
            Order::Yield | Order::Cancel | Order::Committed { .. } | Order::Stretch { .. } => {}
        }
    }
    Ok(())
}

struct Kept {
    program: String,
    params: serde_json::Value,
    instance: Box<dyn Instance>,
}

struct Child {
    socket: UnixStream,
    writer: Writer,
    inputs: Inputs,
    /// The last program with its inputs parsed.
    kept: Option<Kept>,
    orders: VecDeque<(Order, Vec<u8>)>,
    brief: bool,
    clock: Instant,
}

#[derive(Default)]
struct Orders {
    stop: Option<Reason>,
    cancel: bool,
}

struct Running<'a> {
    schedule: Schedule,
    sent: VecDeque<(BoundaryIndex, Duration)>,
    orders: Orders,
    lease: Duration,
    /// End of the last report's capsule.
    mark: Duration,
    run: &'a Run,
}

impl Child {
    fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    fn next_order(&mut self) -> Result<Option<(Order, Vec<u8>)>, FrameError> {
        match self.orders.pop_front() {
            Some(order) => Ok(Some(order)),
            None => frames::read(&self.socket),
        }
    }

    /// Has the program's inputs parsed.
    fn prepare(&mut self, program: &str, params: &serde_json::Value) -> Result<(), ProgramError> {
        if let Some(kept) = &self.kept
            && kept.program == program
            && kept.params == *params
            && self.inputs.are_current()
        {
            return Ok(());
        }
        self.kept = None;
        let instance = programs::start(program, params, &mut self.inputs)?;
        self.kept = Some(Kept {
            program: program.to_owned(),
            params: params.clone(),
            instance,
        });
        Ok(())
    }

    fn run(&mut self, run: &Run, state: Vec<u8>) -> Result<(), FrameError> {
        match self.compute(run, state) {
            Ok(()) => Ok(()),
            Err(End::Frame(error)) => Err(error),
            Err(End::Program(error)) => {
                // A failed program's scratch is not trusted again.
                self.kept = None;
                let permanent = error.is_permanent();
                self.writer.report(
                    &Report::Failed {
                        permanent,
                        reason: error.to_string(),
                    },
                    &[],
                )
            }
        }
    }

    fn compute(&mut self, run: &Run, state: Vec<u8>) -> Result<(), End> {
        self.prepare(&run.program, &run.params)?;
        let Some(mut kept) = self.kept.take() else {
            return Ok(());
        };
        kept.instance.resume(run.boundary.map(|_| &state[..]))?;
        drop(state);
        let mut cx = Capsule::new(run.boundary.unwrap_or(0));
        let began = self.now();
        let since = Timestamp::now();
        if !self.brief || run.boundary.is_some() {
            self.writer.report(&Report::Began { at: since }, &[])?;
        }
        let mut running = Running {
            schedule: Schedule::new(
                run.commit,
                Duration::from_millis(run.interval_ms.into()),
                began,
            ),
            sent: VecDeque::new(),
            orders: Orders::default(),
            lease: Duration::from_millis(u64::from(run.lease_ms.max(1))),
            mark: began,
            run,
        };
        let (mut looked, mut told) = (Duration::ZERO, began);
        loop {
            match kept.instance.capsule(&mut cx)? {
                Step::Boundary => cx.advance(),
                Step::Complete { result } => {
                    cx.advance();
                    let computed_until = Timestamp::now();
                    self.brief = self.now() - began < BRIEF;
                    let outputs = std::mem::take(&mut cx.outputs);
                    let report = Report::Completed {
                        result,
                        capsules: cx.index(),
                        computing_since: since,
                        computed_until,
                        outputs: describe(&outputs),
                    };
                    self.kept = Some(kept);
                    return Ok(self.writer.report(&report, &outputs)?);
                }
            }
            let now = self.now();
            if now - looked >= LOOK_INTERVAL {
                looked = now;
                self.look(&mut running)?;
            }
            if running
                .sent
                .front()
                .is_some_and(|(_, at)| now.saturating_sub(*at) > running.lease)
            {
                self.park(&mut running)?;
            }
            let due = running.schedule.boundary(now);
            if due != Due::No || running.orders.stop.is_some() || running.orders.cancel {
                let computed_at = Timestamp::now();
                if due == Due::CommitWhenAcknowledged {
                    while running.schedule.is_full()
                        && running.orders.stop.is_none()
                        && !running.orders.cancel
                    {
                        self.wait(&mut running)?;
                    }
                }
                if running.orders.cancel {
                    self.kept = Some(kept);
                    return Ok(self.writer.report(&Report::Cancelled, &[])?);
                }
                let reason = running.orders.stop.unwrap_or(Reason::Commit);
                self.commit(
                    &mut running,
                    kept.instance.as_ref(),
                    &mut cx,
                    computed_at,
                    now,
                    reason,
                )?;
                if reason == Reason::Yield {
                    self.brief = false;
                    self.kept = Some(kept);
                    return Ok(());
                }
                told = now;
            } else if now - told >= PROGRESS_INTERVAL && !self.writer.is_busy()? {
                told = now;
                let progress = kept.instance.progress();
                let report = Report::Progress {
                    index: cx.index(),
                    of: progress.of,
                    note: progress.note,
                };
                self.writer.report(&report, &[])?;
            }
        }
    }

    fn commit(
        &mut self,
        running: &mut Running<'_>,
        instance: &dyn Instance,
        cx: &mut Capsule,
        computed_at: Timestamp,
        now: Duration,
        reason: Reason,
    ) -> Result<(), End> {
        let mut state = self.writer.buffer()?;
        let before = self.now();
        instance.encode(&mut state);
        let sent = self.now();
        let bytes = state.len();
        let progress = instance.progress();
        let report = BoundaryReport {
            index: cx.index(),
            digest: Digest([0; 32]),
            bytes: 0,
            computed_at,
            compute_us: now.saturating_sub(running.mark).as_micros() as u64,
            of: progress.of,
            note: progress.note,
            outputs: Vec::new(),
            reason,
        };
        self.writer
            .boundary(report, state, std::mem::take(&mut cx.outputs))?;
        running.schedule.sent(sent, sent - before, bytes);
        running.sent.push_back((cx.index(), sent));
        running.mark = self.now();
        Ok(())
    }

    fn has_order(&self, timeout: Duration) -> Result<bool, FrameError> {
        if !self.orders.is_empty() {
            return Ok(true);
        }
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(n) => Ok(n > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(std::io::Error::from(error).into()),
        }
    }

    /// Takes the orders that have arrived.
    fn look(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        while self.has_order(Duration::ZERO)? {
            self.take_order(running)?;
        }
        Ok(())
    }

    fn wait(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        self.has_order(Duration::from_secs(3600))
            .and_then(|_| self.look(running))
    }

    /// No commit was possible for a lease: waits until one is, or for an order to stop.
    fn park(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        eprintln!(
            "fiec: boundary not acknowledged within {} ms; {} waits at a boundary",
            running.lease.as_millis(),
            running.run.execution
        );
        while !running.sent.is_empty() && !running.orders.cancel && running.orders.stop.is_none() {
            self.wait(running)?;
        }
        Ok(())
    }

    fn take_order(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        let Some((order, body)) = frames::read::<Order>(&self.socket)? else {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        };
        match order {
            Order::Yield => running.orders.stop = Some(Reason::Yield),
            Order::Cancel => running.orders.cancel = true,
            Order::Committed { index } => {
                while let Some((sent, at)) = running.sent.front().copied()
                    && sent <= index
                {
                    running.sent.pop_front();
                    let now = self.now();
                    running.schedule.acknowledged(now.saturating_sub(at));
                }
            }
            Order::Stretch { interval_ms } => {
                running
                    .schedule
                    .stretch(Duration::from_millis(interval_ms.into()));
            }
            // For later: a preparation while something runs.
            order @ (Order::Prepare { .. } | Order::Run(_)) => self.orders.push_back((order, body)),
        }
        Ok(())
    }
}

enum End {
    Frame(FrameError),
    Program(ProgramError),
}

impl From<FrameError> for End {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<ProgramError> for End {
    fn from(error: ProgramError) -> Self {
        Self::Program(error)
    }
}
