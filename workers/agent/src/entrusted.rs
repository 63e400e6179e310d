//! First bindings that the policy service has left to this node: computed at once, and appended
//! with whatever there is to say when there is something, as the first message of their ledgers.
//!
//! The policy service appends a binding by itself when it has not seen it for a while. Then this
//! node's message loses its race, and follows that one: it is the same binding, as its digest says.
//! Any other message there means that the execution is somebody else's. Where the policy service
//! says that it is appending the binding already, this node waits for that from the beginning.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, BrokerError, Draft, Entry, Tip};
use fiec_schemas::{Digest, Entrusted, Event, LedgerMessage, Phase, Timestamp};
use tokio::sync::oneshot;

use crate::appends;
use crate::job::{Job, Live, Start, Stored};
use crate::runner::{Flight, Runner};
use crate::shared::{Shared, enqueue};

/// So old a binding is never appended here: a ledger that was deleted must not begin anew. The
/// stream keeps the last message of each for weeks, and clocks differ by less.
const APPENDED_WITHIN: Duration = Duration::from_secs(3_600);
/// So long a binding that is appended elsewhere is waited for.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked whether it was, should nobody say so.
const LOOK: Duration = Duration::from_millis(250);
/// A broker that does not answer is asked again after this.
const RETRY: Duration = Duration::from_secs(1);
/// A replica of the broker that does not have a message yet is asked so often, after this.
const LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// A first binding that is not known to be appended.
#[derive(Debug)]
pub struct Birth {
    /// The events that make it.
    events: Vec<Event>,
    /// When it was decided.
    at: Timestamp,
    /// The policy service is appending it.
    appended: bool,
    /// Its sequence, should the policy service have appended it.
    confirmed: oneshot::Receiver<Stored>,
}

impl Birth {
    /// Its sequence, where the policy service is known to have appended it.
    pub fn confirmed(&mut self) -> Option<Stored> {
        self.confirmed.try_recv().ok()
    }

    /// It, where it may be appended here; else what comes true once it is known to be appended.
    pub fn or_wait(self, shared: &Arc<Shared>, tip: &Tip) -> Result<Self, Flight> {
        match self.appended {
            true => Err(self.wait(shared.clone(), tip.clone())),
            false => Ok(self),
        }
    }

    /// Waits until the policy service has appended it; `tip` is what it makes. Its capsule message
    /// may never come here, to a node that is leaving.
    fn wait(self, shared: Arc<Shared>, tip: Tip) -> Flight {
        let confirmed = wait(shared.clone(), tip.clone(), self.confirmed);
        Box::pin(async move {
            let (tenant, execution) = (&tip.state.tenant, tip.state.execution);
            let found = async {
                loop {
                    tokio::time::sleep(LOOK).await;
                    let last = shared.ledger.last(tenant, execution).await;
                    if let Ok(Some(last)) = last {
                        return match Some(last.digest) == tip.digest {
                            true => Ok(Tip::from(last)),
                            false => Err(AppendError::Conflict),
                        };
                    }
                }
            };
            tokio::select! {
                tip = confirmed => tip,
                tip = found => tip,
            }
        })
    }

    fn is_too_old(&self, now: Timestamp) -> bool {
        let age = now.micros().abs_diff(self.at.micros());
        u128::from(age) > APPENDED_WITHIN.as_micros()
    }
}

/// Waits until a binding that is appended elsewhere is confirmed; `tip` is what it makes.
pub fn wait(shared: Arc<Shared>, mut tip: Tip, confirmed: oneshot::Receiver<Stored>) -> Flight {
    Box::pin(async move {
        if let Ok(Ok(stored)) = tokio::time::timeout(CONFIRMED_WITHIN, confirmed).await {
            stored.complete(&mut tip);
            return Ok(tip);
        }
        // Taken back, or no word: whether it was appended after all the ledger knows.
        let (tenant, execution) = (&tip.state.tenant, tip.state.execution);
        let reached = |last: &Entry| last.message.state.ordinal >= tip.state.ordinal;
        match shared.ledger.last_once(tenant, execution, reached).await {
            Ok(Some(last)) if Some(last.digest) == tip.digest => Ok(last.into()),
            _ => Err(AppendError::Conflict),
        }
    })
}

/// How to follow a binding that the policy service has appended after all.
#[derive(Clone, Copy)]
pub struct Second {
    /// Digest of the binding's message.
    bound: Option<Digest>,
    /// So many of a first message's events make the binding.
    skip: usize,
}

impl Second {
    /// Appends what was to be appended with the binding behind it, if it is the ledger's last
    /// message.
    ///
    /// # Errors
    /// [`AppendError::Conflict`] where it is not.
    pub async fn append(
        self,
        shared: &Shared,
        first: &Draft,
        body: Bytes,
    ) -> Result<Tip, AppendError> {
        let state = &first.state;
        let mut looks = 0;
        let last = loop {
            let wait = match shared.ledger.last(&state.tenant, state.execution).await {
                // That the append was refused says that there is one.
                Ok(None) if looks < LOOKS => {
                    looks += 1;
                    LOOK_AGAIN
                }
                Ok(last) => break last,
                Err(error @ BrokerError::Malformed { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the ledger; trying again");
                    RETRY
                }
            };
            tokio::time::sleep(wait).await;
        };
        match last {
            Some(last) if Some(last.digest) == self.bound => {
                shared.metrics.overtaken.inc();
                let mut events = LedgerMessage::decode(&first.header, 0)?.events;
                let events = events.split_off(self.skip.min(events.len()));
                let draft = Draft::new(&last.into(), events, &shared.author, shared.broker.now())?;
                appends::append(shared, draft, body).await
            }
            _ => Err(AppendError::Conflict),
        }
    }
}

/// What can be done about a message that is to be appended.
#[expect(
    clippy::large_enum_variant,
    reason = "made and taken apart once, never stored"
)]
pub enum Drafted {
    /// It can be sent; where it is the ledger's first, also how to follow the binding should that
    /// be there already.
    Ready(Draft, Option<Second>),
    /// These events can only follow the binding, once the policy service has appended that.
    Wait(Flight, Vec<Event>),
}

/// Takes bindings up, a line each; `appended`: the policy service is doing that at this moment.
pub fn take(shared: &Arc<Shared>, body: &Bytes, appended: bool) {
    let Ok(text) = std::str::from_utf8(body) else {
        tracing::warn!("bindings that are no text were dropped");
        return;
    };
    for line in text.lines() {
        // Who cannot take one says nothing: it is appended without this node, and refused then.
        if shared.is_draining() || shared.queued() >= shared.options.queue {
            return;
        }
        take_one(shared, line, appended);
    }
}

fn take_one(shared: &Arc<Shared>, text: &str, appended: bool) {
    let LedgerMessage {
        mut events, state, ..
    } = match LedgerMessage::decode(text, 0) {
        Ok(message) => message,
        Err(error) => {
            tracing::warn!(%error, "a binding that cannot be read was dropped");
            return;
        }
    };
    let (execution, epoch) = (state.execution, state.epoch);
    let mine = matches!(&state.phase, Phase::Bound(b) if b.instance == shared.instance && b.node == *shared.node());
    let first = state.ordinal == 1 && epoch == 1 && state.boundary.is_none();
    let binds = matches!(
        &events[..],
        [Event::Submitted, Event::Bound { epoch: 1, node, instance, .. }]
            if *instance == shared.instance && *node == *shared.node()
    );
    if !mine || !first || !binds || state.spec.is_none() {
        tracing::warn!(%execution, epoch, node = %shared.node(), "a binding that is no first one of this node was dropped");
        return;
    }
    if let Some(Event::Bound {
        decision: Some(decision),
        ..
    }) = events.last_mut()
    {
        decision.entrusted = Some(Entrusted {
            by: state.author.clone(),
            at: state.at,
        });
    }
    let digest = Digest::of(text.as_bytes());
    let (confirm, confirmed) = oneshot::channel();
    let (entry, control) = Live::new(&state, (0, digest), Some(confirm));
    let progress = entry.progress.clone();
    let mut live = shared.live();
    // A drain orders away what lives here by then, and comes only once.
    if shared.is_draining() || live.contains_key(&execution) {
        return;
    }
    live.insert(execution, entry);
    drop(live);
    let birth = Birth {
        events,
        at: state.at,
        appended,
        confirmed,
    };
    let tip = Tip {
        seq: 0,
        digest: Some(digest),
        state,
        seen_in: 0,
    };
    let job = Job {
        start: Start::Entrusted(Box::new(tip), Box::new(birth)),
        ack: None,
        control,
        progress,
    };
    enqueue(shared, job);
}

impl Runner {
    /// The draft of these events behind the last message, or, with the binding, as the ledger's
    /// first one; not that where they hand over, since the destination goes by this very message.
    ///
    /// # Errors
    /// When the state does not allow the events, or the message would be too large.
    pub(crate) fn draft(
        &mut self,
        events: Vec<Event>,
        hands_over: bool,
    ) -> Result<Drafted, AppendError> {
        let (author, now) = (&self.shared.author, self.shared.broker.now());
        let Some(mut birth) = self.birth.take() else {
            return Ok(Drafted::Ready(
                Draft::new(&self.tip, events, author, now)?,
                None,
            ));
        };
        if let Some(stored) = birth.confirmed() {
            stored.complete(&mut self.tip);
            return Ok(Drafted::Ready(
                Draft::new(&self.tip, events, author, now)?,
                None,
            ));
        }
        let shared = self.shared.clone();
        if hands_over || birth.is_too_old(now) {
            return Ok(Drafted::Wait(birth.wait(shared, self.tip.clone()), events));
        }
        let second = Second {
            bound: self.tip.digest,
            skip: birth.events.len(),
        };
        let mut all = std::mem::take(&mut birth.events);
        all.extend(events);
        match Draft::first(&self.tip.state, all, second.skip, author, now) {
            Ok(draft) => Ok(Drafted::Ready(draft, Some(second))),
            Err((error, mut all)) => {
                // What is said of that goes with the binding.
                all.truncate(second.skip);
                birth.events = all;
                self.birth = Some(birth);
                Err(error)
            }
        }
    }
}
