//! Submission lines from the intake to their ledgers: the checks before the first append, the wait
//! for a slot, and the end of each.

use std::time::{Duration, Instant};

use fiec_policy::{Input, NewExecution, Submitted};
use fiec_schemas::{FieldError, LineError};

use super::{Core, taken};
use crate::effects::Effects;
use crate::events::{Outcome, UnderName};
use crate::intake::{Check, Line, Next, Others, excerpt};

/// Lines taken in before other news is handled.
const LINES_AT_ONCE: usize = 64;
/// Longest time for which lines are taken in before other news, because some lines take long to
/// read.
const LINES_WITHIN: Duration = Duration::from_millis(10);

impl Core {
    /// True while a line may be taken in before anything else happens.
    pub(super) fn has_lines(&self) -> bool {
        self.is_loaded() && self.lines.has_next()
    }

    /// Takes lines in, as many as memory and time allow.
    pub(super) async fn take_lines_in(&mut self) {
        let began = Instant::now();
        for _ in 0..LINES_AT_ONCE {
            if !self.lines.has_room() || !self.is_loaded() || began.elapsed() > LINES_WITHIN {
                return;
            }
            let Some(next) = self.lines.next() else {
                return;
            };
            match next {
                Next::Line(line) => {
                    if !self.check_line(line).await {
                        return;
                    }
                }
                Next::End(message) => self.lines.settle(message).await,
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
        let (now, may_hold) = (self.now(), self.lines.may_hold(self.policy.completions()));
        match self.policy.submit(now, new, may_hold, &mut self.actions) {
            Submitted::Append(events) => {
                self.lines.end_hold();
                // The policy counts it now.
                line.promise = None;
                self.begin_ledger(line, events).await;
                true
            }
            Submitted::Hold => {
                self.lines.hold(line);
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

    /// The line has its ledger.
    pub(super) async fn accept_line(&mut self, line: &Line) {
        self.lines.done(line.message, Ok(())).await;
    }

    /// The line failed for a reason that may pass: its message is tried again.
    pub(super) async fn retry_line(&mut self, line: &Line, reason: String) {
        self.lines.done(line.message, Err(reason)).await;
    }

    /// The line never gets a ledger.
    pub(super) fn refuse_line(&mut self, line: &Line, field: &str, reason: String) {
        self.lines.refused();
        let error = LineError::of(line.number, FieldError::new(field, reason));
        let tenant = line.tip.state.tenant.to_string();
        let excerpt = excerpt(&line.spec.to_json());
        self.reject(Some(line.message), tenant, error, excerpt);
    }

    /// Takes the result of looking up a line's program.
    pub(super) async fn settle_program(
        &mut self,
        line: Box<Line>,
        found: Result<Option<FieldError>, String>,
    ) {
        match found {
            Ok(None) => self.lines.resume(line, Check::Size),
            Ok(Some(error)) => self.refuse_line(&line, &error.field, error.reason),
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
                self.lines.resume(line, Check::Ledger);
            }
            UnderName::Unknown if self.allowance(&line.tip.state.tenant).left() == 0 => {
                let reason = "its id could not be looked up".to_owned();
                self.retry_line(&line, reason).await;
            }
            UnderName::Unknown => self.lines.resume(line, Check::Ledger),
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
            Ok(()) => self.lines.resume(line, Check::Name),
            Err(error) => {
                tracing::warn!(execution = %line.execution(), error, "a large submission could not be stored; it is tried again");
                let reason = format!("a large submission could not be stored: {error}");
                self.retry_line(&line, reason).await;
            }
        }
    }
}
