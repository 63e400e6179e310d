//! Runners that panicked. The execution continues from its last commit, until its retries are used
//! up, like one whose program crashed.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Tip};
use fiec_schemas::{
    Cause, Digest, Epoch, Event, ExecutionId, Fault, Phase, RequestKind, Tenant, Timestamp,
};

use crate::appends;
use crate::job::{Job, Start};
use crate::shared::Shared;

/// Pause before the ledger is read again.
const RETRY: Duration = Duration::from_secs(1);

/// The binding that a runner holds, kept outside of the runner.
pub(crate) struct Held {
    tenant: Tenant,
    execution: ExecutionId,
    epoch: Epoch,
    /// Digest of the message that made the binding.
    bound: Option<Digest>,
}

impl Held {
    /// The binding that the runner of this job will hold.
    pub fn of(job: &Job) -> Self {
        let (state, bound) = match &job.start {
            Start::Bound(tip) | Start::Entrusted(tip, _) => (&*tip.state, tip.digest),
            Start::Speculative { state, digest, .. } => (&**state, Some(*digest)),
        };
        Self {
            tenant: state.tenant.clone(),
            execution: state.execution,
            epoch: state.epoch,
            bound,
        }
    }

    /// The span of all that the runner logs.
    pub fn span(&self, shared: &Shared) -> tracing::Span {
        let Self {
            execution, epoch, ..
        } = self;
        // Not within that of the runner whose end has started this one.
        tracing::info_span!(parent: None, "execution", %execution, epoch, node = %shared.node())
    }

    /// Forgets the execution here: its runner has ended.
    pub fn forget(&self, shared: &Shared) {
        if let Some(bound) = self.bound {
            shared.forget(self.execution, bound);
        }
    }

    /// Appends the crash of the runner with its consequence, and forgets the execution here.
    pub async fn record_panic(self, shared: &Arc<Shared>, panic: Box<dyn Any + Send>) {
        let words = in_words(&*panic);
        let (execution, epoch) = (self.execution, self.epoch);
        shared.metrics.panics.inc();
        tracing::error!(%execution, epoch, panic = words, "a runner panicked; the execution yields");
        loop {
            let error = match self.append(shared, words).await {
                Ok(()) => break,
                Err(error) => error,
            };
            tracing::warn!(%execution, epoch, %error, "cannot append the crash; trying again");
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = shared.halt.cancelled() => return,
            }
        }
        self.forget(shared);
    }

    /// Appends the crash and its outcome, unless another binding holds the execution. A first
    /// binding that is not appended comes again, in a capsule message.
    async fn append(&self, shared: &Shared, words: &str) -> Result<(), AppendError> {
        let last = shared.ledger.last(&self.tenant, self.execution).await?;
        let Some(tip) = last.map(Tip::from) else {
            return Ok(());
        };
        let binding = tip.state.phase.binding();
        if tip.state.epoch != self.epoch || binding.is_none_or(|b| b.instance != shared.instance) {
            return Ok(());
        }
        let now = shared.broker.now();
        let events = outcome(&tip, words, now);
        let draft = Draft::new(&tip, events, &shared.author, now)?;
        appends::append(shared, draft, Bytes::new()).await.map(drop)
    }
}

/// The events of a panic: the binding is given back. That is not the program's fault, and costs it no
/// attempt.
fn outcome(tip: &Tip, words: &str, now: Timestamp) -> Vec<Event> {
    let state = &tip.state;
    let mut events = Vec::new();
    if matches!(state.phase, Phase::Bound(_)) {
        events.push(Event::Started {
            epoch: state.epoch,
            computing_since: now,
        });
    }
    let requested = state.requested();
    let asked = |what| requested.filter(|r| r.what == what).map(|r| r.who.clone());
    if let Some(who) = asked(RequestKind::Cancel) {
        events.push(Event::Cancelled { who });
    } else {
        events.push(Event::Yielded {
            cause: Cause::NotTaken {
                reason: format!("the worker's runner panicked: {words}"),
                fault: Some(Box::new(Fault::WorkerPanicked)),
            },
            computed_until: now,
        });
        events.extend(asked(RequestKind::Pause).map(|who| Event::Paused { who }));
    }
    events
}

/// The message of a panic.
fn in_words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let owned = || panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(owned).unwrap_or("without a message")
}
