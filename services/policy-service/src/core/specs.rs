//! After a start, submissions that are too large for their ledgers are fetched, a few at a time. A
//! failed fetch is retried with a growing delay. A lost submission fails its execution, because no
//! node could start it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_policy::Input;
use fiec_schemas::{Event, ExecutionId, Fault, Submission, Tenant};

use super::Core;
use crate::effects::panicked;
use crate::events::{NoSpec, Outcome};

/// Submissions that are fetched at the same time.
const AT_ONCE: usize = 8;
/// Delay before the first retry of a fetch. It doubles with each retry.
const AGAIN: Duration = Duration::from_secs(1);
const DOUBLINGS: u32 = 5;
/// A submission that is missing for this time is permanently lost.
const LOST: Duration = Duration::from_secs(15);

/// A submission to fetch.
#[derive(Debug)]
struct Wanted {
    tenant: Tenant,
    tries: u32,
    /// First time that it was found missing.
    lost: Option<Instant>,
}

/// Submissions to fetch.
#[derive(Debug, Default)]
pub struct Specs {
    wanted: HashMap<ExecutionId, Wanted>,
    /// Submissions that are not being fetched, by the time of the next attempt.
    due: BTreeSet<(Instant, ExecutionId)>,
    under_way: usize,
}

impl Specs {
    /// Queues a submission, unless it is queued already.
    pub fn want(&mut self, execution: ExecutionId, tenant: Tenant) {
        if self.wanted.contains_key(&execution) {
            return;
        }
        let wanted = Wanted {
            tenant,
            tries: 0,
            lost: None,
        };
        self.wanted.insert(execution, wanted);
        self.due.insert((Instant::now(), execution));
    }

    /// Returns the next submission that is due, if fewer than [`AT_ONCE`] are being fetched.
    fn next(&mut self) -> Option<(Tenant, ExecutionId)> {
        let (due, execution) = *self.due.first()?;
        if self.under_way >= AT_ONCE || due > Instant::now() {
            return None;
        }
        self.due.remove(&(due, execution));
        let wanted = self.wanted.get_mut(&execution)?;
        wanted.tries += 1;
        self.under_way += 1;
        Some((wanted.tenant.clone(), execution))
    }

    fn end(&mut self, execution: ExecutionId) -> Option<Wanted> {
        self.under_way = self.under_way.saturating_sub(1);
        self.wanted.remove(&execution)
    }

    fn again(&mut self, execution: ExecutionId, wanted: Wanted) {
        let doublings = wanted.tries.saturating_sub(1).min(DOUBLINGS);
        let due = Instant::now() + AGAIN * 2_u32.pow(doublings);
        self.due.insert((due, execution));
        self.wanted.insert(execution, wanted);
    }
}

impl Core {
    /// Starts to fetch the submissions that are due.
    pub(super) fn fetch_specs(&mut self) {
        while let Some((tenant, execution)) = self.specs.next() {
            let panicked = NoSpec::Unknown("its effect panicked".to_owned());
            let owed = Outcome::Spec(execution, Err(panicked));
            let fetch = self.effects.clone().fetch_spec(tenant, execution);
            self.effects.running.run(owed, fetch);
        }
    }

    /// Takes the result of a fetch.
    pub(super) fn fetched(
        &mut self,
        execution: ExecutionId,
        found: Result<Option<Arc<Submission>>, NoSpec>,
    ) {
        let wanted = self.specs.end(execution);
        match (found, wanted) {
            (Ok(Some(spec)), _) => self.step(Input::Spec { execution, spec }),
            (Ok(None), _) | (Err(_), None) => {}
            (Err(NoSpec::Unknown(reason)), Some(wanted)) => {
                tracing::warn!(%execution, reason, "a submission cannot be fetched yet");
                let lost = None;
                self.specs.again(execution, Wanted { lost, ..wanted });
            }
            (Err(NoSpec::Lost(reason)), Some(mut wanted)) => {
                let since = *wanted.lost.get_or_insert(Instant::now());
                tracing::warn!(%execution, reason, "a submission is lost");
                if since.elapsed() < LOST {
                    self.specs.again(execution, wanted);
                } else {
                    self.fail_without_spec(execution, wanted.tenant, &reason);
                }
            }
        }
        self.fetch_specs();
    }

    fn fail_without_spec(&mut self, execution: ExecutionId, tenant: Tenant, reason: &str) {
        let reason = format!(
            "its submission cannot be read any more, so it can start nowhere: {reason}; submit it \
             again"
        );
        let event = Event::Failed {
            reason,
            stderr: String::new(),
            fault: Some(Box::new(Fault::DataLost)),
        };
        self.appends.begin_read(execution);
        let effects = self.effects.clone();
        let append = effects.append_while_pending(tenant, execution, event);
        self.effects.running.run(panicked(execution, None), append);
    }
}
