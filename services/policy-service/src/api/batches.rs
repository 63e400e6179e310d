//! Requests about whole batches. A batch is found by the last message of each ledger of its tenant,
//! so any service answers; submissions that have no ledgers yet are waited for, and counted where
//! they take long. Reading the ledgers and changing the executions is cut into pages: each answer
//! takes a bounded time, says how far it has come, and names a cursor to go on with
//! ([`super::pages`]).

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::RawMessageErrorKind;
use fiec_broker::BrokerError;
use fiec_schemas::messages::{BatchReply, BatchRequest, BatchVerb, Untaken};
use fiec_schemas::{
    BatchId, BatchName, ExecutionId, ExecutionState, Glance, LedgerMessage, PhaseKind, RequestKind,
    Sequence, Tenant, subjects,
};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::answer::refused;
use super::changes::{Asked, Change, is_paused, is_requested};
use super::pages::{About, KEPT, Member, Page, Unread};
use super::{Answered, Api, parse, somebody, tenant};
use crate::refusal::Refusal;

/// Executions that are changed at the same time.
const AT_ONCE: usize = 32;
/// Executions taken from a page between two looks at the clock.
const CHUNK: usize = 512;
/// How long one answer may take, where nothing is said, and at most.
const WITHIN_MS: u64 = 5_000;
const WITHIN_LIMIT_MS: u64 = 8_000;
/// The broker sends ledgers without a pause; after so long it is asked anew.
const SILENCE: Duration = Duration::from_secs(5);
/// Submissions that have no ledgers yet are waited for so long at most, and looked at so often.
const PATIENCE: Duration = Duration::from_millis(1_000);
const LOOK: Duration = Duration::from_millis(20);
/// Most reasons that an answer names.
const REASONS: usize = 5;

/// What became of one execution.
enum Fate {
    /// Nothing: the time was over.
    NotReached,
    /// It is as it is asked to be, by this request.
    Done(PhaseKind),
    /// It cannot be done yet.
    Later(PhaseKind),
    /// It has ended, or was so before.
    Unconcerned(PhaseKind),
    /// It has no ledger any more.
    Gone,
    /// It is not so.
    Failed(Option<PhaseKind>, Refusal),
}

/// What a verb changes about each execution; none: it changes nothing.
fn change_of(verb: BatchVerb) -> Option<Change> {
    match verb {
        BatchVerb::Status => None,
        BatchVerb::Cancel => Some(Change::Cancel),
        BatchVerb::Pause => Some(Change::Pause),
        BatchVerb::Resume => Some(Change::Resume),
    }
}

impl Api {
    /// A request about a whole batch: one page.
    pub(super) async fn batch(&self, subject: &str, payload: &[u8]) -> Answered<BatchReply> {
        let mut tokens = subject.rsplit('.');
        let tenant_text = tokens.next().unwrap_or_default();
        let verb: BatchVerb = tokens.next().unwrap_or_default().parse()?;
        let tenant = tenant(tenant_text)?;
        let request: BatchRequest = parse(payload)?;
        let who = somebody(&request.who);
        let within = request.within_ms.unwrap_or(WITHIN_MS).min(WITHIN_LIMIT_MS);
        let within = Duration::from_millis(within);
        let batch = batch_of(&tenant, &request.batch)?;
        let about = About {
            verb,
            tenant,
            batch,
        };
        let own = &self.effects.author;
        let cursor = request.cursor.as_deref();
        let kept = cursor.and_then(|cursor| self.pages.take(cursor, own, &about));
        let mut page = match kept {
            Some(page) => page,
            None => match self.begin(about, &request, within).await? {
                Ok(page) => page,
                Err(reply) => return Ok(*reply),
            },
        };
        let deadline = Instant::now() + within;
        self.read_members(&mut page, deadline).await?;
        let mut done = 0;
        if page.unread.is_none() {
            if page.phases.is_empty() && page.members.is_empty() {
                return Ok(none_known(&page, request.batch));
            }
            done = self.change_members(&mut page, &who, deadline).await;
        }
        let mut reply = page.reply(done);
        if page.goes_on() {
            reply.cursor = Some(self.pages.keep(page, own));
        }
        Ok(reply)
    }

    /// Looks at what has not been taken in, and then begins to read: what has been taken in by then
    /// has its ledgers. An answer instead, where submissions that were to be waited for have not
    /// been taken in.
    async fn begin(
        &self,
        about: About,
        request: &BatchRequest,
        within: Duration,
    ) -> Answered<Result<Page, Box<BatchReply>>> {
        let patience = match about.verb {
            BatchVerb::Status => Duration::ZERO,
            _ => within.min(PATIENCE),
        };
        let untaken = self
            .untaken(&about.tenant, request.untaken, patience)
            .await?;
        if let (Some(_), Some(untaken)) = (request.untaken, untaken) {
            let About { tenant, batch, .. } = about;
            let refusal = Refusal::NotTakenIn { tenant, untaken };
            return Ok(Err(Box::new(BatchReply {
                batch: Some(batch),
                untaken: Some(untaken),
                ..refused(&refusal)
            })));
        }
        let unread = self.unread(&about.tenant).await?;
        Ok(Ok(Page::new(about, unread, untaken)))
    }

    /// Changes what is to be changed, until the deadline; how many were.
    async fn change_members(&self, page: &mut Page, who: &str, deadline: Instant) -> u32 {
        let mut done = 0;
        let change = change_of(page.about.verb);
        let Some(change) = change.filter(|_| !page.levels.is_empty()) else {
            return done;
        };
        let sight = &self.sight().await;
        while Instant::now() < deadline
            && let Some(level) = page.levels.front_mut()
        {
            let some: Vec<_> = level.drain(..level.len().min(CHUNK)).collect();
            let tenant = page.about.tenant.clone();
            let asked = Asked {
                change: &change,
                tenant: &tenant,
                who,
                sight,
                name: None,
            };
            let mut fates = stream::iter(some)
                .map(|id| async move {
                    if Instant::now() >= deadline {
                        return (id, Fate::NotReached);
                    }
                    (id, self.change_member(asked, id).await)
                })
                .buffer_unordered(AT_ONCE);
            let mut not_reached = VecDeque::new();
            while let Some((id, fate)) = fates.next().await {
                if matches!(fate, Fate::NotReached) {
                    not_reached.push_back(id);
                } else {
                    page.members.remove(&id);
                }
                done += u32::from(matches!(fate, Fate::Done(_)));
                note(page, fate);
            }
            drop(fates);
            match page.levels.front_mut() {
                Some(level) if level.is_empty() && not_reached.is_empty() => {
                    page.levels.pop_front();
                }
                Some(level) => not_reached
                    .into_iter()
                    .rev()
                    .for_each(|id| level.push_front(id)),
                None => {}
            }
        }
        done
    }

    async fn change_member(&self, asked: Asked<'_>, id: ExecutionId) -> Fate {
        let entry = match self.effects.ledger.last(asked.tenant, id).await {
            Ok(Some(entry)) => entry,
            Ok(None) => return Fate::Gone,
            Err(error) => return Fate::Failed(None, error.into()),
        };
        let phase = entry.message.state.phase.kind();
        if !concerns(asked.change, &entry.message.state) {
            return Fate::Unconcerned(phase);
        }
        match self.change(asked, entry).await {
            Ok(changed) => {
                let phase = changed.state().map_or(phase, |state| state.phase.kind());
                // Some of its parts, or itself.
                match changed.is_pausing() {
                    true => Fate::Later(phase),
                    false => Fate::Done(phase),
                }
            }
            Err(refusal) if refusal.is_pausing() => Fate::Later(phase),
            // It ended in the meantime, or is as it is asked to be.
            Err(refusal) if refusal.is_moot() => Fate::Unconcerned(phase),
            Err(refusal) => Fate::Failed(Some(phase), refusal),
        }
    }

    /// Waits so long at most until each submission message of the tenant up to this one (of those
    /// that are there by now, where nothing is said) has been taken in, and has its ledgers; what
    /// has not.
    async fn untaken(
        &self,
        tenant: &Tenant,
        upto: Option<Sequence>,
        patience: Duration,
    ) -> Result<Option<Untaken>, BrokerError> {
        const WHAT: &str = "look at the submissions";
        let js = &self.effects.broker.js;
        let stream = js
            .get_stream_no_info(subjects::SUBMIT_STREAM)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let state = stream
            .get_info()
            .await
            .map_err(BrokerError::operation(WHAT))?
            .state;
        let upto = upto.unwrap_or(state.last_sequence);
        // Taken in, they are removed.
        if state.first_sequence > upto {
            return Ok(None);
        }
        let subject = subjects::submit(tenant);
        let until = tokio::time::Instant::now() + patience;
        let oldest = loop {
            let oldest = stream.get_first_raw_message_by_subject(&subject, 1).await;
            let oldest = match oldest {
                Ok(message) if message.sequence <= upto => message.sequence,
                Ok(_) => return Ok(None),
                Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => {
                    return Ok(None);
                }
                Err(error) => return Err(BrokerError::operation(WHAT)(error)),
            };
            if tokio::time::Instant::now() >= until {
                break oldest;
            }
            tokio::time::sleep(LOOK).await;
        };
        let mut counted = stream
            .info_with_subjects(subject)
            .await
            .map_err(BrokerError::operation(WHAT))?;
        let messages = match counted.next().await {
            Some(counted) => counted.map_err(BrokerError::operation(WHAT))?.1 as u64,
            None => return Ok(None),
        };
        Ok(Some(Untaken {
            messages,
            oldest,
            upto,
        }))
    }

    /// The last message of each ledger of a tenant; none where there are none.
    async fn unread(&self, tenant: &Tenant) -> Result<Option<Unread>, BrokerError> {
        let mut consumer = self
            .effects
            .broker
            .js
            .create_consumer_on_stream(
                pull::Config {
                    ack_policy: AckPolicy::None,
                    headers_only: true,
                    deliver_policy: DeliverPolicy::LastPerSubject,
                    filter_subject: format!("fiec.ledger.{tenant}.*"),
                    inactive_threshold: KEPT,
                    ..Default::default()
                },
                subjects::LEDGER_STREAM,
            )
            .await
            .map_err(BrokerError::operation(READ))?;
        let info = consumer
            .info()
            .await
            .map_err(BrokerError::operation(READ))?;
        let count = info.num_pending;
        if count == 0 {
            return Ok(None);
        }
        let messages = consumer
            .stream()
            .max_messages_per_batch(1_000)
            .messages()
            .await
            .map_err(BrokerError::operation(READ))?;
        Ok(Some(Unread { messages, count }))
    }

    /// Reads the members of a batch, until the deadline.
    async fn read_members(&self, page: &mut Page, deadline: Instant) -> Result<(), BrokerError> {
        let batch = page.about.batch;
        let mut heard = Instant::now();
        while let Some(unread) = &mut page.unread {
            let next = tokio::time::timeout_at(deadline, unread.messages.next());
            let message = match next.await {
                Ok(Some(message)) => message.map_err(BrokerError::operation(READ))?,
                // Members that were appended meanwhile come last.
                Ok(None) => break,
                Err(_) if heard.elapsed() < SILENCE => return Ok(()),
                Err(_) => {
                    return Err(BrokerError::Missing {
                        what: format!("the rest of the ledgers of {}", page.about.tenant),
                        hint: format!(": nothing came for {SILENCE:?}"),
                    });
                }
            };
            heard = Instant::now();
            let Ok(info) = message.info() else { continue };
            let (seq, pending) = (info.stream_sequence, info.pending);
            unread.count = pending;
            let header = message.headers.as_ref();
            let header = header.and_then(|h| h.get(subjects::EVENT_HEADER));
            if let Some(text) = header.map(|h| h.as_str()).filter(|h| may_be_of(h, batch)) {
                match LedgerMessage::decode(text, seq) {
                    Ok(message) => take_member(page, message.state, seq),
                    Err(error) => tracing::warn!(seq, %error, "a ledger message was passed over"),
                }
            }
            if pending == 0 {
                break;
            }
            if Instant::now() >= deadline {
                return Ok(());
            }
        }
        if page.unread.take().is_some() {
            page.arrange();
        }
        Ok(())
    }
}

const READ: &str = "read the ledgers of a tenant";

/// True for a message of an execution of this batch, and for one that cannot be read: that is said
/// where it is read whole.
fn may_be_of(header: &str, batch: BatchId) -> bool {
    let of = |glance: Glance| glance.batch().is_some_and(|place| place.id == batch);
    Glance::read(header).map_or(true, of)
}

/// Takes in what a message says of an execution; one that is read twice, since it was changed
/// meanwhile, counts as it was last.
fn take_member(page: &mut Page, state: ExecutionState, seq: Sequence) {
    if state.batch.is_none_or(|batch| batch.id != page.about.batch) {
        return;
    }
    let spec = state.spec.as_ref();
    let after = spec.map_or(&[][..], |spec| &spec.after);
    let member = Member {
        seq,
        phase: state.phase.kind(),
        concerned: change_of(page.about.verb).is_some_and(|change| concerns(&change, &state)),
        after: after
            .iter()
            .filter_map(|other| other.execution(&page.about.tenant))
            .collect(),
    };
    page.members.insert(state.execution, member);
}

fn note(page: &mut Page, fate: Fate) {
    match fate {
        Fate::NotReached => {}
        Fate::Done(phase) => page.count(phase),
        Fate::Later(phase) => {
            page.count(phase);
            page.later += 1;
        }
        Fate::Unconcerned(phase) => {
            page.count(phase);
            page.unconcerned += 1;
        }
        Fate::Gone => page.unconcerned += 1,
        Fate::Failed(phase, refusal) => {
            phase.into_iter().for_each(|phase| page.count(phase));
            page.failed.0 += 1;
            if page.failed.1.len() < REASONS {
                page.failed.1.push(refusal);
            }
        }
    }
}

/// The answer where no execution of the batch was found.
fn none_known(page: &Page, batch: String) -> BatchReply {
    let refusal = Refusal::UnknownBatch {
        tenant: page.about.tenant.clone(),
        batch,
        untaken: page.untaken,
    };
    BatchReply {
        batch: Some(page.about.batch),
        untaken: page.untaken,
        ..refused(&refusal)
    }
}

fn batch_of(tenant: &Tenant, text: &str) -> Answered<BatchId> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let name: BatchName = text.parse().map_err(|_| {
        let rule = format!("{text:?} is neither a batch's UUID nor its name");
        Refusal::invalid("batch", rule)
    })?;
    Ok(BatchId::from_client(tenant, &name))
}

/// True where something remains to be done.
fn concerns(change: &Change, state: &ExecutionState) -> bool {
    let live = !state.phase.is_terminal();
    let is_ending = is_requested(state, RequestKind::Cancel);
    match change {
        // Its parts may have paused of their own, or not have been reached before.
        Change::Resume => is_paused(state) || live && !state.parts().is_empty(),
        Change::Pause => live && !is_paused(state) && !is_ending,
        Change::Cancel | Change::Adjust(_) => live && !is_ending,
    }
}
