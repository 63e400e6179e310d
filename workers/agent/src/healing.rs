//! A broker that was started again may have lost the messages that it acknowledged last. Whoever
//! holds the binding then knows more than the ledger, and says it again: one message with the
//! event `healed` and the state that was lost, on top of what is left. Nothing is computed twice.
//!
//! The rules are in `schemas/PROTOCOL.md`; [`Held::compare`] decides.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::chunks::Manifest;
use fiec_broker::{AppendError, BrokerError, Draft, Entry, Tip, feed, store};
use fiec_schemas::chain::{Held, Link, Standing};
use fiec_schemas::{Digest, ExecutionState, LedgerMessage, StatePlace, Submission};
use tokio_util::sync::CancellationToken;

use crate::appends;
use crate::ended;
use crate::entrusted_bindings::BINDING_EVENTS;
use crate::job::RunnerOrder;
use crate::large::{self, Cut, Known};
use crate::message::After;
use crate::runner::{Flight, Runner};
use crate::shared::Shared;

/// A broker that does not answer is asked again after this.
const RETRY: Duration = Duration::from_millis(500);
/// A binding that lives here for longer may see the broker lose messages.
const SETTLED: Duration = Duration::from_secs(1);
/// The messages behind a binding are read within this, or not at all.
const READ_WITHIN: Duration = Duration::from_secs(10);

/// What a message is appended to, and what it takes to append that again.
#[derive(Debug)]
pub(crate) struct Ground {
    tip: Tip,
    spec: Arc<Submission>,
    chain: Held,
    older: Older,
    /// σ of the last commit, where it travels in a message.
    state: Option<Bytes>,
    /// Of a large one, its chunks.
    known: Arc<Known>,
    /// Another message was stored behind the tip.
    is_followed: bool,
}

/// The messages behind a binding that was taken over, oldest first: without them a rollback beyond
/// the binding could not be told from another holder. Read once the execution has lived here for
/// [`SETTLED`], so that what ends soon costs nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Older(Arc<OnceLock<Vec<Link>>>);

impl Older {
    /// Reads them in a while, unless nobody wants them any more by then.
    pub(crate) fn read(shared: &Arc<Shared>, tip: &Tip) -> Self {
        let older = Self::default();
        if tip.state.ordinal > 1 {
            let (shared, wanted) = (Arc::clone(shared), Arc::downgrade(&older.0));
            let (tenant, execution) = (tip.state.tenant.clone(), tip.state.execution);
            tokio::spawn(async move {
                tokio::time::sleep(SETTLED).await;
                if wanted.strong_count() == 0 {
                    return;
                }
                let items = feed::of_execution(&shared.broker, &tenant, execution);
                let items = match tokio::time::timeout(READ_WITHIN, items).await {
                    Ok(Ok(items)) => items,
                    Ok(Err(error)) => {
                        tracing::debug!(%execution, %error, "the ledger behind the binding is not known");
                        return;
                    }
                    Err(_) => return,
                };
                let link = |item: &feed::FeedItem| {
                    let state = item.message().ok()?.state;
                    Some(Link {
                        seq: item.seq,
                        digest: item.digest(),
                        prev: state.prev,
                        ordinal: state.ordinal,
                    })
                };
                if let Some(older) = wanted.upgrade() {
                    let _ = older.set(items.iter().filter_map(link).collect());
                }
            });
        }
        older
    }
}

/// The last message of an execution's ledger, as soon as the broker answers.
///
/// # Errors
/// When it cannot be read by this version.
pub(crate) async fn last(
    shared: &Shared,
    state: &ExecutionState,
) -> Result<Option<Entry>, AppendError> {
    loop {
        match shared.ledger.last(&state.tenant, state.execution).await {
            Ok(last) => return Ok(last),
            Err(error @ (BrokerError::Malformed { .. } | BrokerError::Foreign { .. })) => {
                return Err(error.into());
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the ledger; trying again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

impl Ground {
    /// The tip as it stands in the ledger now; appended again where the broker has lost it.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] where somebody else holds the execution, or σ was lost and is not
    /// here.
    async fn restore(&self, shared: &Shared) -> Result<Tip, AppendError> {
        let last = last(shared, &self.tip.state).await?;
        let mut chain = self.chain.clone();
        for link in self.older.0.get().into_iter().flatten().rev() {
            chain.extend_back(link);
        }
        match (chain.compare(last.as_ref().map(Entry::link).as_ref()), last) {
            (Standing::Unchanged, Some(last)) => {
                let tip = &self.tip.state;
                if let Some(place) = tip.boundary.as_ref().filter(|p| store::is_large(p)) {
                    // Its chunks may be lost all the same: the next commit stores all of its own.
                    let known = &self.known;
                    known.learn(place.index, place.digest, Manifest::default());
                }
                Ok(last.into())
            }
            (Standing::Behind { .. }, last) => self.again(shared, last).await,
            // A ledger that is empty is begun anew only by who has written to it: a binding that nobody
            // ever appended is none.
            (Standing::Empty, None) if chain.has_first() && self.was_stored(shared) => {
                self.again(shared, None).await
            }
            _ => Err(AppendError::Conflict),
        }
    }

    /// A tip, and nothing behind it.
    #[cfg(test)]
    pub(crate) fn of(tip: Tip, spec: Arc<Submission>) -> Self {
        let link = Link {
            seq: tip.seq,
            digest: Digest::of(b"tip"),
            prev: None,
            ordinal: tip.state.ordinal,
        };
        Self {
            tip,
            spec,
            chain: Held::new(link),
            older: Older::default(),
            state: None,
            known: Arc::default(),
            is_followed: false,
        }
    }

    /// The same once the last message of all was stored behind it. Messages behind the binding that
    /// were not read yet are not read for what has ended.
    pub(crate) fn at_rest(mut self) -> Self {
        self.is_followed = true;
        // A copy: it may be a part of a frame that is much larger.
        self.state = self.state.as_deref().map(Bytes::copy_from_slice);
        if self
            .tip
            .state
            .boundary
            .as_ref()
            .is_none_or(|place| !store::is_large(place))
        {
            self.known = Arc::default();
        }
        if self.older.0.get().is_none() {
            self.older = Older::default();
        }
        self
    }

    /// Bytes of σ that it keeps.
    pub(crate) fn bytes(&self) -> usize {
        let large = self
            .tip
            .state
            .boundary
            .as_ref()
            .filter(|p| store::is_large(p));
        let large = large.map_or(0, |place| {
            usize::try_from(place.bytes).unwrap_or(usize::MAX)
        });
        self.state.as_ref().map_or(large, Bytes::len)
    }

    /// True where this worker has appended the tip, or something behind it.
    fn was_stored(&self, shared: &Shared) -> bool {
        self.is_followed || self.tip.state.author == shared.author
    }

    async fn again(&self, shared: &Shared, last: Option<Entry>) -> Result<Tip, AppendError> {
        let held = self.tip.state.phase.binding();
        if held.is_none_or(|binding| binding.instance != shared.instance) {
            return Err(AppendError::Conflict);
        }
        let submission = self.tip.state.submission;
        if self.tip.state.spec.is_none() && self.spec.digest() == submission {
            // It does not fit the ledger, and the broker may have lost it too. One that was adjusted is
            // not here as it was submitted.
            let text = self.spec.to_json();
            appends::until_done(|| store::put_data(&shared.broker, submission, &text)).await;
        }
        let now = shared.broker.now();
        let (draft, needs_state) = Draft::again(&self.tip, last.as_ref(), &shared.author, now)?;
        let place = self.tip.state.boundary.as_ref().filter(|_| needs_state);
        let body = match place {
            None => Bytes::new(),
            Some(place) => match self.body(shared, place).await {
                Some(body) => body,
                None => {
                    tracing::warn!("the broker has lost σ, which is not here any more");
                    return Err(AppendError::Conflict);
                }
            },
        };
        let tip = appends::append(shared, draft, body).await?;
        shared.metrics.healed.inc();
        let kept = last.map_or(0, |last| last.message.state.ordinal);
        tracing::warn!(
            kept,
            lost = self.tip.state.ordinal - kept,
            "the broker had lost messages of the ledger; what they came to was appended again"
        );
        Ok(tip)
    }

    /// The body of a message that carries this σ.
    async fn body(&self, shared: &Shared, place: &StatePlace) -> Option<Bytes> {
        if !store::is_large(place) {
            let state = self.state.clone()?;
            return (Digest::of(&state) == place.digest).then_some(state);
        }
        let state = self.known.whole()?;
        if Digest::of(&state) != place.digest {
            return None;
        }
        // Its chunks may have been lost as well: all are stored again.
        let commit = large::Commit {
            tenant: self.tip.state.tenant.clone(),
            execution: self.tip.state.execution,
            index: place.index,
            digest: place.digest,
            state,
            cut: Cut::default(),
            before: None,
            urgent: false,
        };
        let ready = commit.store(shared, &self.known).await.ok()?;
        let body = ready.body();
        ready.committed(shared, &self.known);
        Some(body)
    }

    /// Appends what was drafted behind the restored tip. `store` brings to the broker once more what the
    /// message refers to, and gives its body: what lies beside the ledger may be lost as well. If a
    /// ledger's first message lost against its own binding, which the policy service appended, only
    /// the events behind the binding are left to append.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] where somebody else holds the execution.
    pub(crate) async fn append_again(
        &self,
        shared: &Shared,
        draft: &Draft,
        store: impl Future<Output = Result<Bytes, AppendError>>,
    ) -> Result<Tip, AppendError> {
        let tip = self.restore(shared).await?;
        let body = store.await?;
        let mut events = LedgerMessage::decode(&draft.header, 0)?.events;
        if draft.expected == 0 {
            shared.metrics.overtaken.inc();
            events.drain(..BINDING_EVENTS.min(events.len()));
        }
        let draft = Draft::new(&tip, events, &shared.author, shared.broker.now())?;
        appends::append(shared, draft, body).await
    }
}

impl Runner {
    /// What its next message is appended to.
    pub(crate) fn ground(&self) -> Ground {
        Ground {
            tip: self.tip.clone(),
            spec: Arc::clone(&self.spec),
            chain: self.chain.clone(),
            older: self.older.clone(),
            state: self.last.clone(),
            known: Arc::clone(&self.known),
            is_followed: false,
        }
    }

    /// Looks whether the ledger still has the tip, and appends it again where it has not.
    pub(crate) fn restored(&self) -> Flight {
        let (shared, ground) = (self.shared.clone(), self.ground());
        Box::pin(async move { ground.restore(&shared).await })
    }

    /// Notes what is stored: the chain grows, a new σ is the one to say again, and a draft that was
    /// built on another message than this one is void.
    pub(crate) fn stored(&mut self, tip: &Tip, after: &[After]) {
        if let Some(link) = tip.link()
            && self.chain.push(link).is_err()
        {
            self.chain = Held::new(link);
        }
        for after in after {
            match after {
                After::Commit { state, .. } => self.last.clone_from(state),
                After::Keep(end) => self.shared.ends.keep(end, tip),
                After::Answer(_) | After::Confirm(_) => {}
            }
        }
        if let Some(next) = self.staged.front_mut() {
            let fits = |draft: &Draft| draft.state.prev == tip.digest;
            next.draft = next.draft.take().filter(fits);
        }
    }
}

/// Has everything that lives here look at its ledger, and what ended lately be said again, whenever
/// the broker begins a new life.
pub(crate) async fn follow(shared: Arc<Shared>, stop: CancellationToken) {
    let mut connections = shared.broker.connections();
    let mut server = shared.broker.server();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = connections.changed() => if changed.is_err() { return },
        }
        let now = shared.broker.server();
        if std::mem::replace(&mut server, now.clone()) == now {
            continue;
        }
        tracing::info!("the broker was started again; looking whether it still has everything");
        // The node's name and what it has proved may be lost too.
        shared.prove.notify_one();
        let rechecks = recheck(&shared);
        let both = async { tokio::join!(ended::say_again(&shared), rechecks) };
        stop.run_until_cancelled(both).await;
    }
}

/// Has everything that lives here look at its ledger.
async fn recheck(shared: &Shared) {
    let mut orders: Vec<_> = shared.live().values().map(|l| l.control.clone()).collect();
    while !orders.is_empty() {
        // Who has too many orders waiting is told in a moment; who has left needs none.
        orders.retain(|order| {
            let sent = order.try_send(RunnerOrder::Recheck);
            matches!(sent, Err(tokio::sync::mpsc::error::TrySendError::Full(_)))
        });
        tokio::time::sleep(RETRY).await;
    }
}
