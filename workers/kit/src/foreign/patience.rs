//! Time limits of a foreign program's capsule: its own limit, a deadline of its agent, a cancel.

use std::time::{Duration, Instant};

use fiec_schemas::BoundaryIndex;
use fiec_schemas::package::OnSilence;

use super::Package;
use super::process::{DIES_WITHIN, Process};
use crate::port::{Wanted, Wishes};
use crate::program::{Capsule, ProgramError};

/// Time between SIGTERM and SIGKILL.
pub const GRACE: Duration = Duration::from_secs(2);
/// Longest wait between two checks of the clocks.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The reason why a program is being ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// No boundary within its own limit, or the caller gave it up.
    Silent(ProgramError),
    /// No boundary by the deadline. A boundary that it still reaches counts.
    Deadline(ProgramError),
    /// The execution was cancelled.
    Cancelled,
}

impl Ending {
    /// The error of the capsule.
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
    /// The cause of the order to yield or cancel.
    yield_cause: Option<String>,
    is_yield_told: bool,
    ending: Option<(Ending, Instant)>,
    killed: Option<Instant>,
    /// A time that the caller waits for, beside the clocks here.
    other: Option<Instant>,
}

impl<'a> Patience<'a> {
    /// Starts the clocks of the capsule `cx`.
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
            killed: None,
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

    /// Applies the agent's wishes, and acts on clocks that are due.
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
        {
            match self.killed {
                None => {
                    self.killed = Some(now);
                    process.kill();
                }
                Some(since) if now.saturating_duration_since(since) >= DIES_WITHIN => {
                    let error = process.does_not_end();
                    // How long a container takes to end says nothing of the kernel.
                    return Err(match self.ending.take() {
                        Some((ending, _)) if process.is_container() => ending.into_error(),
                        _ => error,
                    });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Ends the program because of the caller's error.
    pub fn give_up(&mut self, process: &Process, error: ProgramError) {
        self.end(process, Ending::Silent(error));
    }

    /// Ends the wait at this time as well.
    pub fn look_again(&mut self, at: Instant) {
        self.other = Some(at);
    }

    /// Time since the start of the capsule.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether the package bounds the time between boundaries.
    pub fn is_unlimited(&self) -> bool {
        self.package.manifest.limits.boundary_ms.is_none()
    }

    /// Returns the cause of an order to yield, once. The caller passes it to the program.
    pub fn take_yield_cause(&mut self) -> Option<&str> {
        if self.is_yield_told || self.yield_cause.is_none() {
            return None;
        }
        self.is_yield_told = true;
        self.yield_cause.as_deref()
    }

    /// Takes the reason why it is being ended, if it is.
    pub fn ending(&mut self) -> Option<Ending> {
        self.ending.take().map(|(ending, _)| ending)
    }

    /// Returns the time until a clock is due.
    pub fn wait(&self) -> Duration {
        let now = Instant::now();
        let ending = self.ending.as_ref().map(|(_, at)| *at);
        let killing = self.killed.map(|at| at + DIES_WITHIN).or(ending);
        let other = self.other.filter(|at| *at > now);
        [self.limit, self.deadline.map(|(at, _)| at), killing, other]
            .into_iter()
            .flatten()
            .map(|at| at.saturating_duration_since(now))
            .min()
            // A poll rounds its timeout down: wait slightly longer.
            .map_or(LONGEST_WAIT, |wait| wait + Duration::from_micros(100))
            .min(LONGEST_WAIT)
    }
}
