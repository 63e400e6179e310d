//! Submission lines from the intake to their ledgers: the checks before the first append, the wait
//! for a slot, and the end of each.

use std::time::{Duration, Instant};

use fiec_policy::{Input, NewExecution, Submitted};
use fiec_schemas::{LineError, Sequence, package};

use super::{Core, taken};
use crate::effects::Effects;
use crate::events::{Outcome, UnderName};
use crate::intake::{Check, Line, Next, Others, excerpt};

/// Lines taken in before other news is handled.
const LINES_AT_ONCE: usize = 64;
/// Longest time for which lines are taken in before other news, because some lines take long to
/// read.
const LINES_WITHIN: Duration = Duration::from_millis(10);

/// Whether the next line waits for a slot if all nodes are full. A line that gets a slot before its
/// first append costs one ledger message; otherwise it costs three. The lines after it wait too.
/// After [`Options::hold`](crate::Options) the line is appended without a slot.
#[derive(Debug, Clone, Copy, Default)]
pub enum Hold {
    /// It may wait.
    #[default]
    Possible,
    /// It waits until then.
    Until(Instant),
    /// The last line got no slot. The next one may wait after a further completion.
    InVain { completions: u64 },
}

impl Hold {
    /// Returns when the line has waited long enough.
    pub async fn ends(self) {
        match self {
            Self::Until(moment) => tokio::time::sleep_until(moment.into()).await,
            Self::Possible | Self::InVain { .. } => std::future::pending().await,
        }
    }
}

impl Core {
    /// True while a line may be taken in before anything else happens.
    pub(super) fn has_lines(&self) -> bool {
        let waits = matches!(self.hold, Hold::Until(_));
        self.is_loaded() && !self.intake.is_empty() && self.has_room() && !waits
    }

    fn has_room(&self) -> bool {
        self.in_flight < self.options.in_flight && !self.intake.is_full()
    }

    /// Takes lines in, as many as memory and time allow.
    pub(super) async fn take_lines_in(&mut self) {
        let began = Instant::now();
        for _ in 0..LINES_AT_ONCE {
            if !self.has_room() || !self.is_loaded() || began.elapsed() > LINES_WITHIN {
                return;
            }
            let Some(next) = self.intake.next() else {
                return;
            };
            match next {
                Next::Line(line) => {
                    self.in_flight += 1;
                    if !self.check_line(line).await {
                        return;
                    }
                }
                Next::End(message) => self.intake.settle(message).await,
                Next::Bad {
                    message,
                    tenant,
                    error,
                    excerpt,
                } => self.reject(Some(message), tenant, error, excerpt),
                Next::Vet(cursor) => self.vet(cursor),
            }
        }
    }

    /// Makes the remaining checks, then begins the ledger. Returns false if the line waits for a
    /// slot.
    async fn check_line(&mut self, mut line: Box<Line>) -> bool {
        if line.check == Check::Program {
            if !self.effects.programs.has(&line.spec.program) {
                self.run_for_line(line, Effects::look_up);
                return true;
            }
            line.check = Check::Size;
        }
        if line.check == Check::Size && line.tip.state.spec.is_none() {
            self.run_for_line(line, Effects::store_large);
            return true;
        }
        if matches!(line.check, Check::Size | Check::Name) {
            line.check = Check::Ledger;
            if self.must_look_up_name(&line) {
                self.run_for_line(line, Effects::look_up_name);
                return true;
            }
        }
        if self.policy.knows(line.execution()) {
            self.run_for_line(line, Effects::existing);
            return true;
        }
        if line.promise.is_none() {
            let allowance = self.allowance(&line.tip.state.tenant);
            if allowance.left() == 0 {
                self.refuse_excess(line, &allowance);
                return true;
            }
        }
        if self.effects.programs.in_container(&line.spec.program) {
            self.step(Input::Container {
                program: line.spec.program.clone(),
            });
        }
        let new = NewExecution {
            execution: line.execution(),
            tenant: &line.tip.state.tenant,
            spec: &line.spec,
            submitted_at: line.tip.state.submitted_at,
        };
        let (now, may_hold) = (self.now(), self.may_hold());
        match self.policy.submit(now, new, may_hold, &mut self.actions) {
            Submitted::Append(events) => {
                self.end_hold();
                // The policy counts it now.
                line.promise = None;
                self.begin_ledger(line, events).await;
                true
            }
            Submitted::Hold => {
                self.in_flight -= 1;
                self.hold_line(line);
                false
            }
        }
    }

    /// True if a look-up of the line's client's id is worth its time: it lets the first binding be
    /// entrusted, or the history may know an end.
    fn must_look_up_name(&self, line: &Line) -> bool {
        let pays = line.others == Others::SameName && !self.options.entrust.is_zero();
        line.spec.id.is_some()
            && !self.policy.knows(line.execution())
            && (pays || self.effects.history.may_know_more())
    }

    fn may_hold(&self) -> bool {
        match self.hold {
            Hold::Possible | Hold::Until(_) => true,
            Hold::InVain { completions } => completions != self.policy.completions(),
        }
    }

    fn hold_line(&mut self, line: Box<Line>) {
        if !matches!(self.hold, Hold::Until(_)) {
            self.hold = Hold::Until(Instant::now() + self.hold_for());
        }
        self.intake.put_back(line);
    }

    /// Runs an effect that reports the line back.
    pub(super) fn run_for_line<F>(
        &self,
        line: Box<Line>,
        effect: impl FnOnce(Effects, Box<Line>) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let lost = Outcome::LineLost(line.message);
        self.effects
            .running
            .run(lost, effect(self.effects.clone(), line));
    }

    /// The line that waited got its slot.
    fn end_hold(&mut self) {
        if matches!(self.hold, Hold::Until(_)) {
            self.hold = Hold::Possible;
            self.hold_pays = true;
        }
    }

    /// The line that waited got no slot in time, and is appended without one.
    pub(super) fn give_up_hold(&mut self) {
        self.hold_pays = false;
        self.hold = Hold::InVain {
            completions: self.policy.completions(),
        };
    }

    /// Takes a line back after a check. The next check follows in its turn.
    pub(super) fn resume_line(&mut self, mut line: Box<Line>, next: Check) {
        self.in_flight -= 1;
        line.check = next;
        self.intake.resume(line);
    }

    /// The line has its ledger.
    pub(super) async fn accept_line(&mut self, line: &Line) {
        self.in_flight -= 1;
        self.intake.done(line.message, Ok(())).await;
    }

    /// The line failed for a reason that may pass: its message is tried again.
    pub(super) async fn retry_line(&mut self, line: &Line, reason: String) {
        self.in_flight -= 1;
        self.intake.done(line.message, Err(reason)).await;
    }

    /// A line was lost with the effect that had it: its message is tried again.
    pub(super) async fn retry_lost_line(&mut self, message: Sequence) {
        self.in_flight -= 1;
        let reason = "a check of one of its lines panicked".to_owned();
        self.intake.done(message, Err(reason)).await;
    }

    /// The line never gets a ledger.
    pub(super) fn refuse_line(&mut self, line: &Line, field: &str, reason: String) {
        self.in_flight -= 1;
        let error = LineError {
            line: line.number,
            field: field.to_owned(),
            reason,
        };
        let tenant = line.tip.state.tenant.to_string();
        let excerpt = excerpt(&line.spec.to_json());
        self.reject(Some(line.message), tenant, error, excerpt);
    }

    /// Takes the result of looking up a line's program.
    pub(super) async fn settle_program(&mut self, line: Box<Line>, found: Result<bool, String>) {
        match found {
            Ok(true) => self.resume_line(line, Check::Size),
            Ok(false) => {
                let error = package::unregistered(&line.spec.program);
                self.refuse_line(&line, &error.field, error.reason);
            }
            Err(error) => {
                tracing::warn!(execution = %line.execution(), error, "a program could not be looked up; its submission is tried again");
                let reason = format!("a program could not be looked up: {error}");
                self.retry_line(&line, reason).await;
            }
        }
    }

    /// Takes the result of looking up a client's id. If it has ended, the same submission is accepted
    /// and another one is refused, as if the ledger was still there.
    pub(super) async fn settle_name(&mut self, mut line: Box<Line>, found: UnderName) {
        match found {
            UnderName::Nothing => {
                line.is_new = true;
                if line.others == Others::SameName {
                    line.others = Others::Nobody;
                }
                self.resume_line(line, Check::Ledger);
            }
            UnderName::Unknown if self.allowance(&line.tip.state.tenant).left() == 0 => {
                let reason = "its id could not be looked up".to_owned();
                self.retry_line(&line, reason).await;
            }
            UnderName::Unknown => self.resume_line(line, Check::Ledger),
            UnderName::Ledger(entry) => self.compare_with_ledger(line, Ok(Some(entry))).await,
            UnderName::Ended(digest) if digest == line.tip.state.submission => {
                self.metrics.repeated.inc();
                self.accept_line(&line).await;
            }
            UnderName::Ended(digest) => {
                let reason = taken(line.execution(), &digest.short());
                self.refuse_line(&line, "id", reason);
            }
        }
    }

    /// Takes the result of storing a large submission.
    pub(super) async fn settle_large(&mut self, line: Box<Line>, stored: Result<(), String>) {
        match stored {
            Ok(()) => self.resume_line(line, Check::Name),
            Err(error) => {
                tracing::warn!(execution = %line.execution(), error, "a large submission could not be stored; it is tried again");
                let reason = format!("a large submission could not be stored: {error}");
                self.retry_line(&line, reason).await;
            }
        }
    }
}
