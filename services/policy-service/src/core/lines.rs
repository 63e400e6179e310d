//! A submission's line on its way into its ledger.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Entry, Tip};
use fiec_policy::{Input, NewExecution, Submitted};
use fiec_schemas::{Event, ExecutionId, ExecutionState, LineError, package};

use super::Core;
use crate::events::Outcome;
use crate::intake::{Line, Next};

impl Core {
    /// Takes one line in; false where there is none or it must wait.
    pub(super) async fn take_in(&mut self) -> bool {
        let line = match self.intake.head.take() {
            Some(line) => line,
            None => match self.intake.next() {
                None => return false,
                Some(Next::End(message)) => {
                    self.intake.settle(message).await;
                    return true;
                }
                Some(Next::Bad {
                    message,
                    tenant,
                    error,
                    excerpt,
                }) => {
                    self.reject(Some(message), tenant, error, excerpt);
                    return true;
                }
                Some(Next::Vet(cursor)) => {
                    tokio::spawn(self.effects.clone().vet_message(cursor));
                    return true;
                }
                Some(Next::Line(line)) => line,
            },
        };
        self.place(line).await
    }

    pub(super) async fn place(&mut self, line: Box<Line>) -> bool {
        let unborn = ExecutionState::unborn(
            line.tenant.clone(),
            line.execution,
            Arc::clone(&line.spec),
            line.batch,
            line.stamp,
        );
        if !line.registered && !self.effects.programs.has(&line.spec.program) {
            self.in_flight += 1;
            tokio::spawn(self.effects.clone().look_up(line));
            return true;
        }
        if unborn.spec.is_none() && !line.stored {
            self.in_flight += 1;
            tokio::spawn(self.effects.clone().store_large(line));
            return true;
        }
        if self.policy.knows(line.execution) {
            self.in_flight += 1;
            tokio::spawn(self.effects.clone().existing(line));
            return true;
        }
        if self.effects.programs.in_container(&line.spec.program) {
            self.step(Input::Container(&line.spec.program));
        }
        let new = NewExecution {
            execution: line.execution,
            tenant: &line.tenant,
            spec: &line.spec,
            submitted_at: line.stamp,
        };
        let may_hold = self.held_in_vain != Some(self.policy.completions());
        let now = self.now();
        let Submitted::Append(events) = self.policy.submit(now, new, may_hold, &mut self.actions)
        else {
            if self.hold_until.is_none() {
                self.hold_until = Some(Instant::now() + self.hold());
            }
            self.intake.head = Some(line);
            return false;
        };
        self.hold_pays |= self.hold_until.take().is_some();
        self.append_first(line, unborn, events).await;
        true
    }

    /// A line that something was found out for goes on, at once unless another one is being held
    /// back.
    pub(super) fn again(&mut self, line: Box<Line>) {
        if self.intake.head.is_none() {
            self.in_flight -= 1;
            self.intake.head = Some(line);
        } else {
            self.taken.push_back(Outcome::Again(line));
        }
    }

    /// Nobody has pushed its program.
    pub(super) fn refuse_program(&mut self, line: &Line) {
        let error = package::unregistered(&line.spec.program);
        let error = LineError {
            line: line.number,
            field: error.field,
            reason: error.reason,
        };
        let excerpt = crate::intake::excerpt(&line.spec.to_json());
        self.reject(Some(line.message), line.tenant.to_string(), error, excerpt);
    }

    async fn append_first(
        &mut self,
        mut line: Box<Line>,
        unborn: ExecutionState,
        events: Vec<Event>,
    ) {
        // It lay here for so long that another service may have taken it in since.
        if !line.asked.is_recent() {
            (line.fresh, line.again) = (false, true);
        }
        let tip = Tip {
            seq: 0,
            digest: None,
            state: unborn,
            seen_in: 0,
        };
        match Draft::new(
            &tip,
            events,
            &self.effects.author,
            self.effects.broker.now(),
        ) {
            Ok(draft) => match self.may_begin(&draft) {
                Some(node) if line.fresh => self.entrust(node, line, draft),
                Some(node) if !line.again => self.append_and_tell(node, line, draft).await,
                // Nobody begins what may have ended already.
                _ => {
                    self.append_here(line, draft).await;
                }
            },
            Err(error) => {
                self.in_flight += 1;
                self.first(line, Err(error)).await;
            }
        }
    }

    /// Sends a first append; whether it is on its way.
    pub(super) async fn append_here(&mut self, line: Box<Line>, draft: Draft) -> bool {
        self.in_flight += 1;
        match self.effects.ledger.send(draft, Bytes::new()).await {
            Ok(in_flight) => {
                debug_assert!(self.firsts.is_closed() || self.firsts.capacity() > 0);
                // Fails only while the service ends.
                let _ = self.firsts.send((line, in_flight)).await;
                true
            }
            Err(error) => {
                self.first(line, Err(error)).await;
                false
            }
        }
    }

    /// The fate of a first append.
    pub(super) async fn first(&mut self, line: Box<Line>, settled: Result<Box<Tip>, AppendError>) {
        if settled.is_err() {
            self.take_back(&line).await;
        }
        match settled {
            Ok(tip) => {
                self.in_flight -= 1;
                self.metrics.submitted.inc();
                self.intake.done(line.message, true).await;
                self.stored(tip, true).await;
            }
            Err(AppendError::Conflict) => {
                self.metrics.conflicts.inc();
                tokio::spawn(self.effects.clone().existing(line));
            }
            Err(error) => {
                self.in_flight -= 1;
                self.metrics.append_failures.inc();
                self.step(Input::Vanished {
                    execution: line.execution,
                });
                match error {
                    // These would fail in the same way for ever.
                    AppendError::Transition(_) | AppendError::Message(_) => {
                        let error = LineError {
                            line: line.number,
                            field: String::new(),
                            reason: error.to_string(),
                        };
                        let tenant = line.tenant.to_string();
                        self.reject(Some(line.message), tenant, error, String::new());
                    }
                    _ => {
                        tracing::warn!(execution = %line.execution, %error, "a submission could not be appended; it is delivered again");
                        self.intake.done(line.message, false).await;
                    }
                }
            }
        }
    }

    /// A ledger that is there already: the same submission is fine, another one is an error.
    pub(super) async fn existing(
        &mut self,
        line: Box<Line>,
        found: Result<Option<Box<Entry>>, String>,
    ) {
        self.in_flight -= 1;
        match found {
            Ok(Some(entry)) => {
                let same = entry.message.state.submission == line.spec.digest();
                let other = entry.message.state.submission;
                // What is forgotten since has ended; the message that was found may be older.
                if !line.fresh || self.policy.knows(line.execution) {
                    self.reread(&entry.message, entry.seq);
                }
                if same {
                    match line.fresh {
                        true => self.metrics.submitted.inc(),
                        false => self.metrics.repeated.inc(),
                    };
                    self.intake.done(line.message, true).await;
                } else {
                    let error = LineError {
                        line: line.number,
                        field: "id".to_owned(),
                        reason: taken(line.execution, &other.short()),
                    };
                    let excerpt = crate::intake::excerpt(&line.spec.to_json());
                    self.reject(Some(line.message), line.tenant.to_string(), error, excerpt);
                }
            }
            Ok(None) => {
                self.step(Input::Vanished {
                    execution: line.execution,
                });
                self.intake.done(line.message, false).await;
            }
            Err(error) => {
                tracing::warn!(execution = %line.execution, error, "a ledger cannot be read; the submission is delivered again");
                self.intake.done(line.message, false).await;
            }
        }
    }
}

/// What is said of an id that another submission has.
pub fn taken(execution: ExecutionId, digest: &str) -> String {
    format!(
        "exists with another body (execution {execution}, submission {digest}): \
         choose another id, or submit the same body again"
    )
}
