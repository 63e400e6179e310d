//! Requests about whole batches. A batch is found by the last message of each ledger of its tenant,
//! so any service can answer. A request waits for submissions that have no ledger yet, and counts
//! those that take long. Reading ledgers and changing executions is split into pages. Each answer
//! takes a bounded time, reports its progress, and names a cursor for the next page
//! ([`super::pages`]).

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::jetstream::stream::RawMessageErrorKind;
use fiec_broker::last_messages::{LastMessages, Next};
use fiec_broker::{BrokerError, Entry};
use fiec_schemas::dependency::{Group, Target};
use fiec_schemas::messages::{BatchReply, BatchRequest, BatchVerb, Untaken};
use fiec_schemas::{
    ClientId, ExecutionId, ExecutionState, Glance, LedgerMessage, Phase, PhaseKind, RequestKind,
    Sequence, Tenant, subjects,
};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::answer::refused;
use super::changes::{Asked, Change, is_paused, is_requested};
use super::pages::{About, Concern, Member, Page};
use super::{Answered, Api, parse, somebody, tenant};
use crate::refusal::Refusal;

/// Executions changed at the same time.
const AT_ONCE: usize = 32;
/// Executions that are taken from a page before the clock is read again.
const CHUNK: usize = 512;
/// Time limit of one answer in ms: the default, and the maximum.
const WITHIN_MS: u64 = 5_000;
const WITHIN_LIMIT_MS: u64 = 8_000;
/// Longest wait for submissions without ledgers, and the interval of the checks.
const PATIENCE: Duration = Duration::from_millis(1_000);
const LOOK: Duration = Duration::from_millis(20);
/// Time in which a copy of the ledgers answers.
const GLIMPSE: Duration = Duration::from_millis(100);
/// Most reasons that an answer names.
const REASONS: usize = 5;

/// Result for one execution of the batch.
enum Fate {
    /// The time was over before its turn.
    NotReached,
    /// This request brought it into the requested state.
    Done(PhaseKind),
    /// Its worker has accepted the change, and will make it at its next boundary.
    Underway(PhaseKind),
    /// The change is not possible yet.
    Later(PhaseKind),
    /// It has ended, or was in the requested state before.
    Unconcerned(PhaseKind),
    /// Its ledger no longer exists.
    Gone,
    /// The change failed.
    Failed(Option<PhaseKind>, Refusal),
}

/// The change that a request makes to each execution, if it makes one.
fn change_of(about: &About) -> Option<Change> {
    match about.verb {
        BatchVerb::Status => None,
        BatchVerb::Cancel => Some(Change::Cancel),
        BatchVerb::Pause => Some(Change::Pause),
        BatchVerb::Resume => Some(Change::Resume),
        BatchVerb::Retry => Some(Change::Retry {
            from: None,
            with: None,
        }),
    }
}

impl Api {
    /// Answers one page of a request about a whole batch.
    pub(super) async fn batch(&self, subject: &str, payload: &[u8]) -> Answered<BatchReply> {
        let mut tokens = subject.rsplit('.');
        let tenant_text = tokens.next().unwrap_or_default();
        let verb: BatchVerb = tokens.next().unwrap_or_default().parse()?;
        let tenant = tenant(tenant_text)?;
        let request: BatchRequest = parse(payload)?;
        let who = somebody(&request.who);
        let within = request.within_ms.unwrap_or(WITHIN_MS).min(WITHIN_LIMIT_MS);
        let within = Duration::from_millis(within);
        let group = group_of(&tenant, &request)?;
        let about = About {
            verb,
            tenant,
            group,
            failed: request.failed,
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
                return Ok(none_known(&page, request.of().to_string()));
            }
            done = self.change_members(&mut page, &who, deadline).await;
        }
        let mut reply = page.reply(done);
        if page.goes_on() {
            reply.cursor = Some(self.pages.keep(page, own));
        }
        Ok(reply)
    }

    /// Waits for queued submissions, and then requests the ledgers, so that the new ledgers are
    /// among them. Returns an answer instead if submissions that the request names are still
    /// queued.
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
            let batch = about.batch();
            let About { tenant, .. } = about;
            let refusal = Refusal::NotTakenIn { tenant, untaken };
            return Ok(Err(Box::new(BatchReply {
                batch,
                untaken: Some(untaken),
                ..refused(&refusal)
            })));
        }
        let unread = LastMessages::of(&self.effects.broker, &about.tenant).await?;
        Ok(Ok(Page::new(about, unread, untaken)))
    }

    /// Changes members until the deadline. Returns the number of changed executions.
    async fn change_members(&self, page: &mut Page, who: &str, deadline: Instant) -> u32 {
        let mut done = 0;
        let change = change_of(&page.about);
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
        let entry = match self.member(asked, id).await {
            Ok(Some(entry)) => entry,
            Ok(None) => return Fate::Gone,
            Err(error) => return Fate::Failed(None, error.into()),
        };
        let phase = entry.message.state.phase.kind();
        match concern(asked.change, &entry.message.state) {
            Concern::Change => {}
            Concern::Underway => return Fate::Underway(phase),
            Concern::Nothing => return Fate::Unconcerned(phase),
        }
        match self.change(asked, entry).await {
            // The execution itself, or one of its parts, is about to pause.
            Ok(changed) if changed.is_pausing() => {
                Fate::Later(changed.state().map_or(phase, |state| state.phase.kind()))
            }
            Ok(changed) => match &changed.own {
                // A worker's answer has no state.
                Ok(reply) if reply.state.is_none() => Fate::Underway(phase),
                _ => Fate::Done(changed.state().map_or(phase, |state| state.phase.kind())),
            },
            Err(refusal) if refusal.is_pausing() => Fate::Later(phase),
            // It has ended meanwhile, or is in the requested state.
            Err(refusal) if refusal.is_moot() => Fate::Unconcerned(phase),
            Err(refusal) => Fate::Failed(Some(phase), refusal),
        }
    }

    /// The last message of a member. Some copy's word suffices if there is something to change: the
    /// change is refused if that word is old. That there is nothing to do, only the leader says, and it
    /// is asked also if a copy does not answer at once.
    async fn member(
        &self,
        asked: Asked<'_>,
        id: ExecutionId,
    ) -> Result<Option<Entry>, BrokerError> {
        let glimpse = self.effects.ledger.glimpse(asked.tenant, id);
        let entry = tokio::time::timeout(GLIMPSE, glimpse).await;
        let entry = entry.ok().and_then(Result::ok).flatten();
        let changes = |entry: &Entry| {
            let state = &entry.message.state;
            // A resume of an execution that is not paused changes only its parts: nothing is appended to
            // its own ledger, so nothing would show that this word is old.
            let itself = is_paused(state) || !matches!(asked.change, Change::Resume);
            itself && matches!(concern(asked.change, state), Concern::Change)
        };
        if let Some(entry) = entry.filter(changes) {
            return Ok(Some(entry));
        }
        self.effects.ledger.last(asked.tenant, id).await
    }

    /// Waits up to `patience` until the tenant's queued messages up to `upto` have become ledgers.
    /// Without `upto`, all messages in the queue now count. Returns the messages that remain.
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
        // Messages are removed once they are taken in.
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

    /// Reads members of a batch until the deadline.
    async fn read_members(&self, page: &mut Page, deadline: Instant) -> Result<(), BrokerError> {
        let Some(mut unread) = page.unread.take() else {
            return Ok(());
        };
        unread.go_on();
        loop {
            match unread.next(deadline).await? {
                Next::Over => break,
                Next::NotYet => {
                    page.unread = Some(unread);
                    return Ok(());
                }
                Next::Message { seq, header } if may_be_of(&header, &page.about.group) => {
                    match LedgerMessage::decode(&header, seq) {
                        Ok(message) => take_member(page, &message.state, seq),
                        Err(error) => {
                            tracing::warn!(seq, %error, "a ledger message was passed over");
                        }
                    }
                }
                Next::Message { .. } => {}
            }
        }
        page.arrange();
        Ok(())
    }
}

/// True for a message of an execution of this group. An unreadable message also counts: the full
/// read reports its error.
fn may_be_of(header: &str, group: &Group) -> bool {
    let of = |glance: Glance<'_>| {
        let batch = glance.batch().map(|place| place.id);
        group.has(glance.client_id(), batch)
    };
    Glance::read(header).map_or(true, of)
}

/// Adds an execution's last message to the page. If an execution changed while the ledgers were
/// read, its later message replaces the earlier one.
fn take_member(page: &mut Page, state: &ExecutionState, seq: Sequence) {
    let batch = state.batch.map(|place| place.id);
    let id = state.client_id.as_ref().map(ClientId::as_str);
    if !page.about.group.has(id, batch) {
        return;
    }
    let spec = state.spec.as_ref();
    let after = spec.map_or(&[][..], |spec| &spec.after);
    let member = Member {
        seq,
        phase: state.phase.kind(),
        concern: match change_of(&page.about) {
            Some(_) if page.about.leaves_out(state.phase.kind()) => Concern::Nothing,
            Some(change) => concern(&change, state),
            None => Concern::Nothing,
        },
        id: state.client_id.clone(),
        batch,
        after: after
            .iter()
            .filter_map(|other| other.target(&page.about.tenant))
            .collect(),
    };
    // A copy that lags behind may have been read first.
    let known = page.members.get(&state.execution);
    if known.is_none_or(|known| known.seq <= seq) {
        page.members.insert(state.execution, member);
    }
}

fn note(page: &mut Page, fate: Fate) {
    match fate {
        Fate::NotReached => {}
        Fate::Done(phase) => page.count(phase),
        Fate::Underway(phase) => {
            page.count(phase);
            page.underway += 1;
        }
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

/// The answer if the batch has no known execution.
fn none_known(page: &Page, batch: String) -> BatchReply {
    let refusal = Refusal::UnknownBatch {
        tenant: page.about.tenant.clone(),
        batch,
        untaken: page.untaken,
    };
    BatchReply {
        batch: page.about.batch(),
        untaken: page.untaken,
        ..refused(&refusal)
    }
}

fn group_of(tenant: &Tenant, request: &BatchRequest) -> Answered<Group> {
    match request.of().target(tenant) {
        Some(Target::All(group)) => Ok(group),
        Some(Target::One(_)) | None => Err(Refusal::invalid(
            "",
            "one of these must be given: batch (its name or UUID), array (a client's id), ids (the \
             beginning of clients' ids with a * at its end)",
        )),
    }
}

/// What the change has to do for an execution.
fn concern(change: &Change, state: &ExecutionState) -> Concern {
    let is_live = !state.phase.is_terminal();
    let is_ending = is_live && is_requested(state, RequestKind::Cancel);
    let is_pausing = is_live && is_requested(state, RequestKind::Pause);
    match change {
        // Its parts may have paused on their own, or an earlier request may not have reached them.
        Change::Resume if is_paused(state) => Concern::Change,
        Change::Resume if is_live && !state.parts().is_empty() => Concern::Change,
        Change::Pause if is_pausing => Concern::Underway,
        Change::Pause if matches!(state.phase, Phase::Held { .. }) => Concern::Nothing,
        Change::Pause if is_live && !is_paused(state) && !is_ending => Concern::Change,
        Change::Cancel if is_ending => Concern::Underway,
        Change::Cancel | Change::Adjust(_) if is_live && !is_ending => Concern::Change,
        Change::Retry { .. } if state.phase.kind().can_be_retried() => Concern::Change,
        Change::Resume
        | Change::Pause
        | Change::Cancel
        | Change::Adjust(_)
        | Change::Retry { .. } => Concern::Nothing,
    }
}
