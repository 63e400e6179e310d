//! A confirmed request is done, an accepted line has a ledger, and what was said to be over stays
//! over. The stage notes each answer that a client gets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fiec_schemas::{ExecutionId, PhaseKind, RequestKind, Timestamp};

use super::ledgers::Last;
use crate::judge::checker::{Rule, Violation};

/// What a client was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// The line is accepted.
    Accepted,
    /// It is paused, or will be at its next boundary.
    Paused,
    /// It will go on.
    Resumed,
    /// It is cancelled, or will be.
    Cancelled,
    /// It starts again, whatever was said before.
    Retried,
    /// It has completed.
    Completed,
    /// Nothing certain: the request may still be done.
    Unknown,
}

/// An answer to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub execution: ExecutionId,
    pub said: Said,
    pub at: Timestamp,
}

/// All answers of a test, in order. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Answers(Arc<Mutex<Vec<Answer>>>);

impl Answers {
    /// Notes an answer.
    pub fn note(&self, execution: ExecutionId, said: Said) {
        let at = Timestamp::now();
        let answer = Answer {
            execution,
            said,
            at,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(answer);
    }

    /// Forgets all of them: the broker has lost what they rested on.
    pub fn forget(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    /// All so far.
    pub fn all(&self) -> Vec<Answer> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Compares answers with the ledgers after a quiet period. A later answer replaces an earlier one
/// about the same execution; that a line was accepted and that it has completed stay.
pub fn judge(answers: &[Answer], ledgers: &BTreeMap<ExecutionId, Last>) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut last: BTreeMap<ExecutionId, Said> = BTreeMap::new();
    for answer in answers {
        let earlier = last.get(&answer.execution);
        let is_final = matches!(earlier, Some(Said::Completed | Said::Cancelled));
        if !is_final || answer.said == Said::Retried {
            last.insert(answer.execution, answer.said);
        }
    }
    for (id, said) in last {
        let ledger = ledgers.get(&id).map(|last| &last.state);
        let mut say = |what: &str| {
            found.push(Violation::new(Rule::Answers, &id.to_string(), what));
        };
        let Some(state) = ledger else {
            say("was accepted, and has no ledger");
            continue;
        };
        let phase = state.phase.kind();
        let pauses = state.requested();
        let pauses = pauses.is_some_and(|r| r.what == RequestKind::Pause);
        match said {
            Said::Accepted | Said::Retried | Said::Unknown => {}
            // Until its next boundary, which may be far, the request stands in its ledger.
            Said::Paused if phase == PhaseKind::Paused || phase.is_terminal() => {}
            // It failed before its next boundary.
            Said::Paused if phase == PhaseKind::Held => {}
            Said::Paused if pauses && phase == PhaseKind::Started => {}
            Said::Paused => say("was said to be paused, and is not"),
            Said::Resumed if phase == PhaseKind::Paused => say("was resumed, and is paused"),
            Said::Resumed => {}
            // It may have ended otherwise before the cancel came.
            Said::Cancelled if phase.is_terminal() => {}
            Said::Cancelled => say("was cancelled, and lives"),
            Said::Completed if phase == PhaseKind::Completed => {}
            Said::Completed => say("was said to have completed, and has not"),
        }
    }
    found
}
