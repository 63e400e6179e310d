//! The run time of a child process: receives orders, runs the loop, commits beside the computation.
//!
//! The computing thread reads its orders itself. While it is idle it blocks on the socket. While it
//! computes it checks the socket at a boundary, at most every `LOOK_INTERVAL`. So a boundary
//! costs one reading of the clock, and no execution pays for waking a thread.

mod orders;

use std::collections::VecDeque;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_kernels::device::{Devices, NoDevices};
use fiec_schemas::programs::TileRange;
use fiec_schemas::{BoundaryIndex, Timestamp};

use crate::commit::{Due, Schedule};
use crate::flips::Flips;
use crate::frames::{
    BoundaryReport, DATA_DIR_ENV, FrameError, INPUT_DIRS_ENV, Merge, Order, Package, Reason,
    Report, Run, SOCKET_ENV, Shares,
};
use crate::port::{FromAgent, Port};
use crate::program::{Capsule, Inputs, ProgramError, Step, check_result};
use crate::programs::{self, Instance, RunEnd};
use crate::writer::{Writer, describe};
use crate::{foreign, frames, simulated};

use orders::Orders;

const LOOK_INTERVAL: Duration = Duration::from_micros(100);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// A run that is shorter reports its start only with its end.
const BRIEF: Duration = Duration::from_millis(1);

/// Entry of a child process without devices. It exits with 0 when the agent closes the socket.
pub fn child_main() -> ExitCode {
    child_main_with(Arc::new(NoDevices("this program was built without them")))
}

/// Entry of a child process whose programs may be granted these devices.
#[allow(unsafe_code)]
pub fn child_main_with(devices: Arc<dyn Devices>) -> ExitCode {
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
    // Programs of packages are separate processes and must not inherit the socket.
    if let Err(error) = rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC) {
        eprintln!("fiec child: descriptor {fd} of {SOCKET_ENV} is no socket: {error}");
        return ExitCode::from(2);
    }
    let _ = rustix::thread::set_name(c"fiec-child");
    foreign::own_orphans();
    let watched = socket.try_clone().and_then(foreign::end_with_socket);
    if let Err(error) = watched {
        eprintln!(
            "fiec child: the end of its agent will not be noticed while it computes: {error}"
        );
        return ExitCode::from(2);
    }
    let inputs = inputs_of_environment().with_devices(simulated::in_place_of(devices));
    match serve(socket, inputs) {
        Ok(()) => ExitCode::SUCCESS,
        // The agent is gone: nobody is left to report to.
        Err(FrameError::Io(_)) => ExitCode::from(3),
        Err(error) => {
            eprintln!("fiec child: {error}");
            ExitCode::from(2)
        }
    }
}

/// Inputs as the agent or `fiec run` configured them in the environment.
fn inputs_of_environment() -> Inputs {
    match (
        std::env::var_os(INPUT_DIRS_ENV),
        std::env::var_os(DATA_DIR_ENV),
    ) {
        (Some(folders), _) => {
            let folders = std::env::split_paths(&folders);
            Inputs::beneath(folders.filter(|f| !f.as_os_str().is_empty()).collect())
        }
        (None, Some(folder)) => Inputs::in_folder(folder),
        (None, None) => Inputs::default(),
    }
}

/// Serves orders until the other end closes the socket.
///
/// # Errors
/// When the socket fails or a frame is damaged.
pub fn serve(socket: UnixStream, inputs: Inputs) -> Result<(), FrameError> {
    let port = Arc::new(Port::new(socket));
    let writer = Writer::new(Arc::clone(&port))?;
    let mut child = Child {
        inputs: inputs.with_fetch(Box::new(FromAgent(Arc::clone(&port)))),
        port,
        writer,
        kept: None,
        orders: VecDeque::new(),
        brief: false,
        flips: Flips::from_env(),
        ahead: None,
        clock: Instant::now(),
    };
    child.writer.report(&Report::Ready, &[])?;
    while let Some((order, body)) = child.next_order()? {
        match order {
            Order::Prepare {
                program,
                params,
                package,
                device,
            } => {
                // The context first: it takes longest and needs no input.
                let heated = device.map_or(Ok(()), |device| child.heat(&device));
                let error = child
                    .prepare(&program, &params, package.as_ref())
                    .err()
                    .map(|e| e.to_string())
                    .or(heated.err());
                child.writer.report(&Report::Prepared { error }, &[])?;
            }
            Order::Heat { device } => {
                let error = child.heat(&device).err();
                child.writer.report(&Report::Prepared { error }, &[])?;
            }
            Order::Run(run) => {
                child.run(&run, body)?;
                if foreign::serves_no_more() {
                    return Ok(());
                }
            }
            Order::Yield(order) if order.at.is_some() => child.ahead = Some(order),
            // These orders crossed the end of their run on the way.
            Order::Yield(_)
            | Order::Cancel
            | Order::Park(_)
            | Order::Unpark { .. }
            | Order::Committed { .. }
            | Order::Stretch { .. }
            | Order::Reconfigure { .. }
            | Order::Limit { .. }
            | Order::Split
            | Order::Reserved(_)
            | Order::Surroundings(_)
            | Order::Asked(_)
            | Order::Data { .. } => {}
        }
    }
    Ok(())
}

struct Kept {
    program: String,
    params: serde_json::Value,
    package: Option<Package>,
    instance: Box<dyn Instance>,
}

struct Child {
    port: Arc<Port>,
    writer: Writer,
    inputs: Inputs,
    /// The last program with its inputs parsed.
    kept: Option<Kept>,
    orders: VecDeque<(Order, Vec<u8>)>,
    brief: bool,
    /// Deliberate corruption, in tests.
    flips: Option<Flips>,
    /// A `yield` at a certain boundary of the next run.
    ahead: Option<frames::Yield>,
    clock: Instant,
}

struct Running<'a> {
    schedule: Schedule,
    sent: VecDeque<(BoundaryIndex, Duration)>,
    orders: Orders,
    lease: Duration,
    /// When the socket was last empty: an order that is read later arrived after that.
    empty_at: Duration,
    /// End of the last report's capsule.
    mark: Duration,
    run: &'a Run,
    /// How the range is shared, if it may be.
    shares: Option<Shares>,
    /// The range that is split off at this boundary.
    split: Option<TileRange>,
    /// The part was merged at this boundary.
    merged: bool,
}

/// A part to merge, with its σ if it has one.
struct Returning {
    merge: Merge,
    state: Option<Vec<u8>>,
}

/// Separates σ of the run from σ of the part to merge, which follows it.
fn apart(run: &Run, mut state: Vec<u8>) -> Result<(Vec<u8>, Option<Returning>), ProgramError> {
    let Some(merge) = run.merge else {
        return Ok((state, None));
    };
    let part = merge.bytes.map(|bytes| {
        let own = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| state.len().checked_sub(bytes));
        own.map(|own| state.split_off(own)).ok_or_else(|| {
            ProgramError::Transient(format!("a part's σ of {bytes} bytes did not come along"))
        })
    });
    let returning = Returning {
        merge,
        state: part.transpose()?,
    };
    Ok((state, Some(returning)))
}

impl Running<'_> {
    /// Whether the end reports a last σ, because another execution continues from it.
    fn ends_at_a_boundary(&self) -> bool {
        let shared = self.shares.is_some_and(|s| s.part || s.parts > 0);
        shared || self.merged
    }
}

impl Child {
    fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    fn next_order(&mut self) -> Result<Option<(Order, Vec<u8>)>, FrameError> {
        match self.orders.pop_front() {
            Some(order) => Ok(Some(order)),
            None => self.port.take(),
        }
    }

    /// Makes the context of a device.
    fn heat(&self, device: &str) -> Result<(), String> {
        let heated = self.inputs.devices().heat(device);
        heated.map_err(|error| error.to_string())
    }

    /// Parses the program's inputs.
    fn prepare(
        &mut self,
        program: &str,
        params: &serde_json::Value,
        package: Option<&Package>,
    ) -> Result<(), ProgramError> {
        if let Some(kept) = &self.kept
            && kept.program == program
            && kept.params == *params
            && kept.package.as_ref() == package
            && self.inputs.are_current()
        {
            return Ok(());
        }
        self.kept = None;
        let instance = programs::start(program, package, params, &mut self.inputs)?;
        self.kept = Some(Kept {
            program: program.to_owned(),
            params: params.clone(),
            package: package.cloned(),
            instance,
        });
        Ok(())
    }

    fn run(&mut self, run: &Run, state: Vec<u8>) -> Result<(), FrameError> {
        match self.compute(run, state) {
            Ok(()) => Ok(()),
            Err(End::Frame(error)) => Err(error),
            Err(End::Program(error)) => {
                // The scratch of a failed program is not used again.
                self.kept = None;
                let permanent = error.is_permanent();
                self.writer.report(
                    &Report::Failed {
                        permanent,
                        reason: error.to_string(),
                        fault: error.fault().cloned().map(Box::new),
                    },
                    &[],
                )
            }
        }
    }

    fn compute(&mut self, run: &Run, state: Vec<u8>) -> Result<(), End> {
        self.prepare(&run.program, &run.params, run.package.as_ref())?;
        let Some(mut kept) = self.kept.take() else {
            return Ok(());
        };
        kept.instance.configure(&run.grant)?;
        let (state, mut returning) = apart(run, state)?;
        kept.instance.resume(run.boundary.map(|_| &state[..]))?;
        drop(state);
        if let Some(shares) = run.spread {
            kept.instance.share(shares);
        }
        let mut cx = Capsule::with_fetch(
            run.boundary.unwrap_or(0),
            Box::new(FromAgent(Arc::clone(&self.port))),
        );
        cx.execution = Some(run.execution);
        cx.crashes = run.crashes;
        cx.wishes = Some(self.port.clone());
        let began = self.now();
        let since = Timestamp::now();
        if !self.brief || run.boundary.is_some() {
            self.writer.report(
                &Report::Began {
                    at: since,
                    parks: true,
                    limits: true,
                },
                &[],
            )?;
        }
        let mut running = Running {
            schedule: Schedule::new(
                run.commit,
                Duration::from_millis(run.interval_ms.into()),
                began,
            )
            .expecting(kept.instance.size_hint()),
            sent: VecDeque::new(),
            orders: Orders {
                later: self
                    .ahead
                    .take()
                    .and_then(|order| Some((order.at?, order.cause))),
                ..Orders::default()
            },
            lease: Duration::from_millis(u64::from(run.lease_ms.max(1))),
            empty_at: began,
            mark: began,
            run,
            shares: run.spread,
            split: None,
            merged: false,
        };
        let (mut looked, mut told) = (Duration::ZERO, began);
        loop {
            let step = match returning.take() {
                None => kept.instance.capsule(&mut cx),
                Some(Returning { merge, state }) => {
                    running.merged = true;
                    let instance = &mut kept.instance;
                    instance.merge(merge.range(), state.as_deref(), &mut cx)
                }
            };
            match step {
                Ok(Step::Boundary) => {
                    cx.advance();
                    if let Some(flips) = &mut self.flips {
                        flips.boundary(kept.instance.as_mut(), &mut cx)?;
                    }
                }
                Err(error) => return self.given_up(&mut running, error.into()),
                Ok(Step::Complete { result }) => {
                    if let Err(error) = check_result(&result) {
                        return self.given_up(&mut running, error.into());
                    }
                    cx.advance();
                    let computed_until = Timestamp::now();
                    if running.ends_at_a_boundary() {
                        let (now, instance) = (self.now(), kept.instance.as_mut());
                        let reason = Reason::End;
                        let last = self.commit(
                            &mut running,
                            instance,
                            &mut cx,
                            computed_until,
                            now,
                            reason,
                        );
                        if let Err(error) = last {
                            return self.given_up(&mut running, error);
                        }
                    }
                    self.brief = self.now() - began < BRIEF;
                    let outputs = std::mem::take(&mut cx.outputs);
                    let report = Report::Completed {
                        result,
                        capsules: cx.index(),
                        computing_since: since,
                        computed_until,
                        outputs: describe(&outputs),
                        emits: std::mem::take(&mut cx.emits),
                        numbers: cx.numbers.take(),
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
            if let Some((at, cause)) = &running.orders.later
                && *at <= cx.index()
            {
                running.orders.cause.clone_from(cause);
                running.orders.reason = Some(Reason::Yield);
            }
            if running.orders.grant.is_some()
                && let Some(grant) = running.orders.grant.take()
            {
                kept.instance.configure(&grant)?;
            }
            if let Some(left) = running.orders.limit.take() {
                kept.instance.near_limit(left);
            }
            if running
                .sent
                .front()
                .is_some_and(|(_, at)| now.saturating_sub(*at) > running.lease)
            {
                self.park(&mut running)?;
            }
            if std::mem::take(&mut running.orders.split) {
                self.split(&mut running, kept.instance.as_mut(), &cx)?;
            }
            let mut due = running.schedule.boundary(now);
            let shared = running.split.is_some() || running.merged;
            let much = cx.has_emitted_much() || cx.has_made_much();
            if due == Due::No && (shared || much) {
                due = Due::CommitWhenAcknowledged;
            }
            if due != Due::No || running.orders.reason.is_some() || running.orders.cancel {
                let computed_at = Timestamp::now();
                if due == Due::CommitWhenAcknowledged {
                    while running.schedule.is_full()
                        && running.orders.reason.is_none()
                        && !running.orders.cancel
                    {
                        self.wait(&mut running)?;
                    }
                    if std::mem::take(&mut running.orders.split) {
                        self.split(&mut running, kept.instance.as_mut(), &cx)?;
                    }
                }
                if running.orders.cancel {
                    kept.instance.end_run(RunEnd::Cancel);
                    self.kept = Some(kept);
                    return Ok(self.writer.report(&Report::Cancelled, &[])?);
                }
                let reason = running.orders.reason.unwrap_or(Reason::Commit);
                let instance = kept.instance.as_mut();
                let committed =
                    self.commit(&mut running, instance, &mut cx, computed_at, now, reason);
                if let Err(error) = committed {
                    return self.given_up(&mut running, error);
                }
                if reason == Reason::Yield {
                    self.brief = false;
                    let cause = running.orders.cause.take();
                    let cause = cause.as_deref().unwrap_or("yield");
                    kept.instance.end_run(RunEnd::Yield { cause });
                    self.kept = Some(kept);
                    return Ok(());
                }
                if reason == Reason::Park {
                    if !self.stand(&mut running, kept.instance.as_mut())? {
                        self.kept = Some(kept);
                        return Ok(self.writer.report(&Report::Cancelled, &[])?);
                    }
                    looked = Duration::ZERO;
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

    /// Returns the program's error, unless a cancel ended the program.
    fn given_up(&mut self, running: &mut Running<'_>, error: End) -> Result<(), End> {
        if matches!(error, End::Program(_)) {
            self.look(running)?;
            if running.orders.cancel {
                return Ok(self.writer.report(&Report::Cancelled, &[])?);
            }
        }
        Err(error)
    }

    fn commit(
        &mut self,
        running: &mut Running<'_>,
        instance: &mut dyn Instance,
        cx: &mut Capsule,
        computed_at: Timestamp,
        now: Duration,
        reason: Reason,
    ) -> Result<(), End> {
        let mut state = self.writer.buffer()?;
        let before = self.now();
        instance.encode(&mut state, cx)?;
        let sent = self.now();
        let bytes = state.len();
        let progress = instance.progress();
        let report = BoundaryReport {
            index: cx.index(),
            digest: None,
            bytes: 0,
            computed_at,
            compute_us: now.saturating_sub(running.mark).as_micros() as u64,
            of: progress.of,
            note: progress.note,
            outputs: Vec::new(),
            emits: std::mem::take(&mut cx.emits),
            numbers: cx.numbers.take(),
            split: running.split.take(),
            merged: std::mem::take(&mut running.merged),
            reason,
        };
        self.writer
            .boundary(report, state, std::mem::take(&mut cx.outputs))?;
        running.schedule.sent(sent, sent - before, bytes);
        running.sent.push_back((cx.index(), sent));
        running.mark = self.now();
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
