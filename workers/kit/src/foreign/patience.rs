//! How long a foreign program may take for a capsule, and what ends its time: its own limit, a
//! deadline of its agent, a cancellation.

use std::time::{Duration, Instant};

use fiec_schemas::BoundaryIndex;
use fiec_schemas::package::OnSilence;

use super::Package;
use super::process::Process;
use crate::port::{Wanted, Wishes};
use crate::program::{Capsule, ProgramError};

/// Between SIGTERM and SIGKILL.
pub const GRACE: Duration = Duration::from_secs(2);
/// Clocks are looked at so often even where nothing is due.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Why a program is being ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It reached no boundary within its own limit, or none in time for another reason.
    Silent(ProgramError),
    /// It did not reach a boundary by the deadline; one that it still reaches counts.
    Deadline(ProgramError),
    /// The execution was cancelled.
    Cancelled,
}

impl Ending {
    /// The error that the capsule ends with.
    pub fn into_error(self) -> ProgramError {
        match self {
            Self::Silent(error) | Self::Deadline(error) => error,
            Self::Cancelled => ProgramError::Transient("cancelled".to_owned()),
        }
    }
}

/// The clocks of one capsule.
pub struct Patience<'a> {
    package: &'a Package,
    next: BoundaryIndex,
    since: Instant,
    limit: Option<Instant>,
    deadline: Option<(Instant, u32)>,
    /// Cause of the order to yield or cancel.
    yield_cause: Option<String>,
    is_yield_told: bool,
    ending: Option<(Ending, Instant)>,
    killed: bool,
    /// Something that is not known here is due then.
    other: Option<Instant>,
}

impl<'a> Patience<'a> {
    /// Begins now; `cx` is that of the capsule.
    pub fn new(package: &'a Package, cx: &Capsule) -> Self {
        let since = Instant::now();
        let limit = package.manifest.limits.boundary_ms;
        Self {
            package,
            next: cx.index() + 1,
            since,
            limit: limit.map(|ms| since + Duration::from_millis(ms)),
            deadline: None,
            yield_cause: None,
            is_yield_told: false,
            ending: None,
            killed: false,
            other: None,
        }
    }

    fn end(&mut self, process: &Process, ending: Ending) {
        if self.ending.is_none() {
            process.term();
            self.ending = Some((ending, Instant::now() + GRACE));
        }
    }

    fn heard(&mut self, wanted: Wanted, process: &Process) {
        if let Some(order) = wanted.yields
            && self.yield_cause.is_none()
            && order.at.is_none_or(|at| at <= self.next)
        {
            self.deadline = order.deadline_ms.map(|ms| {
                let until = Instant::now() + Duration::from_millis(ms.into());
                (until, ms)
            });
            self.yield_cause = Some(order.cause.unwrap_or_else(|| "yield".to_owned()));
        }
        if wanted.cancel {
            self.yield_cause.get_or_insert_with(|| "cancel".to_owned());
            self.end(process, Ending::Cancelled);
        }
    }

    /// Takes up wishes and does what is due by now.
    ///
    /// # Errors
    /// When the agent is gone.
    pub fn tick(
        &mut self,
        process: &Process,
        wishes: Option<&dyn Wishes>,
    ) -> Result<(), ProgramError> {
        if let Some(wishes) = wishes {
            self.heard(wishes.wanted()?, process);
        }
        let now = Instant::now();
        if self.limit.is_some_and(|limit| now >= limit) {
            self.limit = None;
            let limits = &self.package.manifest.limits;
            let text = format!(
                "{} reached no boundary within its limits.boundary_ms of {} (capsule {})",
                self.package.program,
                limits.boundary_ms.unwrap_or_default(),
                self.next
            );
            match limits.on_silence {
                OnSilence::Fail => {
                    self.end(process, Ending::Silent(ProgramError::Permanent(text)));
                }
                OnSilence::Wait => eprintln!("fiec: warning: {text}; it is waited for"),
            }
        }
        if let Some((at, ms)) = self.deadline
            && now >= at
        {
            self.deadline = None;
            let text = format!(
                "{} reached no boundary within the {ms} ms that it had to yield (capsule {})",
                self.package.program, self.next
            );
            self.end(process, Ending::Deadline(ProgramError::Transient(text)));
        }
        if let Some((_, at)) = &self.ending
            && now >= *at
            && !self.killed
        {
            self.killed = true;
            process.kill();
        }
        Ok(())
    }

    /// Gives up for another reason.
    pub fn give_up(&mut self, process: &Process, error: ProgramError) {
        self.end(process, Ending::Silent(error));
    }

    /// Lets a wait end at that time, too.
    pub fn look_again(&mut self, at: Instant) {
        self.other = Some(at);
    }

    /// Time since the capsule began.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether the package bounds the time between boundaries.
    pub fn is_unlimited(&self) -> bool {
        self.package.manifest.limits.boundary_ms.is_none()
    }

    /// The cause of an order to yield, once: the caller tells it to the program.
    pub fn take_yield_cause(&mut self) -> Option<&str> {
        if self.is_yield_told || self.yield_cause.is_none() {
            return None;
        }
        self.is_yield_told = true;
        self.yield_cause.as_deref()
    }

    /// Why it is being ended, if it is.
    pub fn ending(&mut self) -> Option<Ending> {
        self.ending.take().map(|(ending, _)| ending)
    }

    /// How long nothing is due.
    pub fn wait(&self) -> Duration {
        let now = Instant::now();
        let killing = (!self.killed)
            .then_some(self.ending.as_ref().map(|(_, at)| *at))
            .flatten();
        let other = self.other.filter(|at| *at > now);
        [self.limit, self.deadline.map(|(at, _)| at), killing, other]
            .into_iter()
            .flatten()
            .map(|at| at.saturating_duration_since(now))
            .min()
            // A timeout of a poll is cut to what lies before it.
            .map_or(LONGEST_WAIT, |wait| wait + Duration::from_micros(100))
            .min(LONGEST_WAIT)
    }
}
