//! A restarted broker may have lost the messages that it acknowledged last. The holder of the
//! binding then knows more than the ledger, and appends the loss again. It appends one message on
//! top of the rest, with the event `healed` and the lost state. Nothing is computed twice.
//!
//! The rules are in `schemas/PROTOCOL.md`. [`Held::compare`] decides.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
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

/// Pause before a silent broker is asked again.
const RETRY: Duration = Duration::from_millis(500);
/// Age of a binding after which its older messages are read, in case the broker loses messages.
const SETTLED: Duration = Duration::from_secs(1);
/// First pause after a refusal that the ledger does not explain. It doubles up to the limit: together
/// they are longer than a leader that was cut off answers ([`fiec_broker::leader::CUT_OFF`]).
const AGAIN: Duration = Duration::from_millis(50);
const AGAIN_AT_MOST: Duration = Duration::from_secs(25);
/// Limit for reading the messages before a binding.
const READ_WITHIN: Duration = Duration::from_secs(10);

/// The tip that the next message is appended to, and the data to append the tip again.
#[derive(Debug, Clone)]
pub(crate) struct Ground {
    tip: Tip,
    spec: Arc<Submission>,
    chain: Held,
    older: Older,
    /// σ of the last commit, if it travels in a message.
    state: Option<Bytes>,
    /// The chunks of a large σ.
    known: Arc<Known>,
    /// Another message was stored after the tip.
    is_followed: bool,
}

/// The messages before a binding that came from elsewhere, oldest first. Without them a rollback
/// beyond the binding could not be distinguished from another holder. They are read after
/// [`SETTLED`], so that short executions cost nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Older(Arc<OnceLock<Vec<Link>>>);

impl Older {
    /// Reads them after a while, unless their owner is gone by then.
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

/// Returns the last message of an execution's ledger, as soon as the broker answers.
///
/// # Errors
/// When this version cannot read it.
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
    /// Returns the tip as the ledger has it now. Appends it again if the broker has lost it.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] if another worker holds the execution, or if a lost σ is not here.
    async fn restore(&self, shared: &Shared) -> Result<Tip, AppendError> {
        let last = last(shared, &self.tip.state).await?;
        self.restore_on(shared, last).await
    }

    /// As [`Ground::restore`], when the ledger's last message was read already.
    async fn restore_on(&self, shared: &Shared, last: Option<Entry>) -> Result<Tip, AppendError> {
        let mut chain = self.chain.clone();
        for link in self.older.0.get().into_iter().flatten().rev() {
            chain.extend_back(link);
        }
        match (chain.compare(last.as_ref().map(Entry::link).as_ref()), last) {
            (Standing::Unchanged, Some(last)) => {
                let tip = &self.tip.state;
                let place = tip.boundary.as_ref().filter(|p| store::is_large(p));
                if let Some(place) = place.filter(|_| !tip.phase.is_terminal()) {
                    // They are in another stream, which may have lost some of them.
                    Box::pin(self.known.check(shared, tip, place)).await;
                }
                Ok(last.into())
            }
            (Standing::Behind { .. }, last) => self.again(shared, last).await,
            // Only a worker that wrote to a ledger may begin it again when it is empty: a binding
            // that nobody ever appended does not exist.
            (Standing::Empty, None) if chain.has_first() && self.was_stored(shared) => {
                self.again(shared, None).await
            }
            _ => Err(AppendError::Conflict),
        }
    }

    /// A tip without earlier messages.
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

    /// As it is kept for an execution whose last message is stored. Unread messages before the
    /// binding stay unread.
    pub(crate) fn at_rest(&self) -> Self {
        let mut kept = self.clone();
        kept.is_followed = true;
        // A copy: the slice may be part of a much larger frame.
        kept.state = self.state.as_deref().map(Bytes::copy_from_slice);
        let place = self.tip.state.boundary.as_ref();
        if place.is_none_or(|place| !store::is_large(place)) {
            kept.known = Arc::default();
        }
        if self.older.0.get().is_none() {
            kept.older = Older::default();
        }
        kept
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

    /// Whether this worker has appended the tip, or a message after it.
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
            // The submission is too large for the ledger, and the broker may have lost it too. An
            // adjusted one is not here in its submitted form.
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
                    tracing::warn!("the broker has lost a σ that this worker no longer has");
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
            "the broker had lost messages of the ledger; their last state was appended again"
        );
        Ok(tip)
    }

    /// Returns the body of a message that carries this σ.
    async fn body(&self, shared: &Shared, place: &StatePlace) -> Option<Bytes> {
        if !store::is_large(place) {
            let state = self.state.clone()?;
            return (Digest::of(&state) == place.digest).then_some(state);
        }
        let state = self.known.whole()?;
        if Digest::of(&state) != place.digest {
            return None;
        }
        // Some of its chunks may be lost as well.
        Box::pin(self.known.check(shared, &self.tip.state, place)).await;
        let commit = large::Commit {
            tenant: self.tip.state.tenant.clone(),
            execution: self.tip.state.execution,
            index: place.index,
            digest: place.digest,
            state,
            cut: Cut::default(),
            before: Some(place.clone()),
            urgent: false,
        };
        let ready = commit.store(shared, &self.known).await.ok()?;
        let body = ready.body();
        ready.committed(shared, &self.known);
        Some(body)
    }

    /// Appends the draft after the restored tip. `store` sends the objects that the message refers
    /// to once more, since they may be lost as well. It returns the message's body.
    ///
    /// The policy service may have appended the binding of a ledger's first message. Then only the
    /// events after the binding are appended.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] if another worker holds the execution.
    pub(crate) async fn append_again(
        &self,
        shared: &Shared,
        draft: &Draft,
        store: impl Future<Output = Result<Bytes, AppendError>>,
    ) -> Result<Tip, AppendError> {
        let mut events = LedgerMessage::decode(&draft.header, 0)?.events;
        if draft.expected == 0 {
            shared.metrics.overtaken.inc();
            events.drain(..BINDING_EVENTS.min(events.len()));
        }
        let mut store = Some(store);
        let mut body = Bytes::new();
        // A message whose acknowledgement was lost may be stored.
        let mut sent = vec![draft.clone()];
        let mut pause = AGAIN;
        loop {
            let last = last(shared, &self.tip.state).await?;
            if let Some(last) = &last
                && let Some(tip) = shared.ledger.own(last, &sent).await?
            {
                return Ok(tip);
            }
            let tip = self.restore_on(shared, last).await?;
            if let Some(store) = store.take() {
                body = store.await?;
            }
            let now = shared.broker.now();
            let again = Draft::new(&tip, events.clone(), &shared.author, now)?;
            sent.push(again.clone());
            match appends::append(shared, again, body.clone()).await {
                // The ledger shows nobody else, and yet the append is refused: what was read is old,
                // as a leader may say that was cut off from the other servers.
                Err(AppendError::Conflict) if pause < AGAIN_AT_MOST => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                appended => return appended,
            }
        }
    }
}

impl Runner {
    /// The ground of the next message.
    pub(crate) fn ground(&self) -> Box<Ground> {
        Box::new(Ground {
            tip: self.tip.clone(),
            spec: Arc::clone(&self.spec),
            chain: self.chain.clone(),
            older: self.older.clone(),
            state: self.last.clone(),
            known: Arc::clone(&self.known),
            is_followed: false,
        })
    }

    /// Checks whether the ledger still has the tip, and appends it again if not.
    pub(crate) fn restored(&self) -> Flight {
        let (shared, ground) = (self.shared.clone(), self.ground());
        Box::pin(async move { ground.restore(&shared).await })
    }

    /// Notes a stored message. The chain grows, and a new σ replaces the kept one. A draft that was
    /// built on another message is dropped.
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
                After::Answer(_) | After::Confirm(_) | After::Begin(_) => {}
            }
        }
        if let Some(next) = self.staged.front_mut() {
            let fits = |draft: &Draft| draft.state.prev == tip.digest;
            next.draft = next.draft.take().filter(fits);
        }
    }
}

/// Whenever the broker begins a new life, checks the ledgers of all live executions and appends
/// lost ends again.
pub(crate) async fn follow(shared: Arc<Shared>, stop: CancellationToken) {
    let mut connections = shared.broker.connections();
    let mut server = shared.broker.server();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = connections.changed() => if changed.is_err() { return },
        }
        let now = match stop
            .run_until_cancelled(shared.broker.server_in_use())
            .await
        {
            Some(Ok(now)) => now,
            Some(Err(error)) => {
                tracing::debug!(%error, "the broker's server is not known; asking again");
                stop.run_until_cancelled(tokio::time::sleep(RETRY)).await;
                connections.mark_changed();
                continue;
            }
            None => return,
        };
        if std::mem::replace(&mut server, now.clone()) == now {
            continue;
        }
        tracing::info!("the broker restarted; checking whether it has lost messages");
        // The node's claim and proof may be lost too.
        shared.prove.notify_one();
        let rechecks = recheck(&shared);
        let both = async { tokio::join!(ended::say_again(&shared), rechecks) };
        stop.run_until_cancelled(both).await;
    }
}

/// Makes all live executions check their ledgers.
async fn recheck(shared: &Shared) {
    let mut orders: Vec<_> = shared.live().values().map(|l| l.control.clone()).collect();
    while !orders.is_empty() {
        // Retry runners whose order queue is full. A runner that has left needs no order.
        orders.retain(|order| {
            let sent = order.try_send(RunnerOrder::Recheck);
            matches!(sent, Err(tokio::sync::mpsc::error::TrySendError::Full(_)))
        });
        tokio::time::sleep(RETRY).await;
    }
}
