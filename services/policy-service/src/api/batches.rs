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
use fiec_schemas::messages::{BatchReply, BatchRequest, Untaken};
use fiec_schemas::{
    BatchId, BatchName, ExecutionId, ExecutionState, LedgerMessage, Phase, Sequence, Tenant,
    subjects,
};
use futures_util::{StreamExt as _, stream};
use tokio::time::Instant;

use super::executions::{NOT_PAUSED, NOT_YET, is_asked};
use super::pages::{About, KEPT, Member, Page, Unread};
use super::sight::Sight;
use super::{Answered, Api, parse, somebody, tenant};

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
    Done(String),
    /// It cannot be done yet.
    Later(String),
    /// It has ended, or was so before.
    Unconcerned(Option<String>),
    /// It is not so.
    Failed(String, String),
}

impl Api {
    pub(super) async fn batch(&self, subject: &str, payload: &[u8]) -> BatchReply {
        let mut tokens = subject.rsplit('.');
        let tenant = tokens.next().unwrap_or_default();
        let verb = tokens.next().unwrap_or_default();
        match self.whole_batch(verb, tenant, payload).await {
            Ok(reply) => reply,
            Err(error) => BatchReply {
                error: Some(error),
                ..BatchReply::default()
            },
        }
    }

    async fn whole_batch(
        &self,
        verb: &str,
        tenant_text: &str,
        payload: &[u8],
    ) -> Answered<BatchReply> {
        let verbs = ["status", "cancel", "pause", "resume"];
        let Some(verb) = verbs.into_iter().find(|known| *known == verb) else {
            return Err(format!(
                "there is no request {verb} about a batch; there are {}",
                verbs.join(", ")
            ));
        };
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
        let read = self.read_members(&mut page, deadline).await;
        read.map_err(|error| format!("the ledgers could not be read: {error}; try again"))?;
        let mut done = 0;
        if page.unread.is_none() {
            if page.phases.is_empty() && page.members.is_empty() {
                return Ok(none_known(&page, &request.batch));
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
            "status" => Duration::ZERO,
            _ => within.min(PATIENCE),
        };
        let untaken = self.untaken(&about.tenant, request.untaken, patience).await;
        let untaken = untaken.map_err(|error| error.to_string())?;
        if let (Some(_), Some(untaken)) = (request.untaken, untaken) {
            return Ok(Err(Box::new(BatchReply {
                batch: Some(about.batch),
                error: Some(not_taken_in(&about.tenant, untaken)),
                untaken: Some(untaken),
                ..BatchReply::default()
            })));
        }
        let unread = self.unread(&about.tenant).await;
        let unread = unread.map_err(|error| error.to_string())?;
        Ok(Ok(Page::new(about, unread, untaken)))
    }

    /// Changes what is to be changed, until the deadline; how many were.
    async fn change_members(&self, page: &mut Page, who: &str, deadline: Instant) -> u32 {
        let mut done = 0;
        if page.levels.is_empty() {
            return done;
        }
        let sight = &self.sight().await;
        while Instant::now() < deadline
            && let Some(level) = page.levels.front_mut()
        {
            let some: Vec<_> = level.drain(..level.len().min(CHUNK)).collect();
            let about = page.about.clone();
            let mut fates = stream::iter(some)
                .map(|id| {
                    let about = &about;
                    async move {
                        if Instant::now() >= deadline {
                            return (id, Fate::NotReached);
                        }
                        (id, self.change_member(about, id, who, sight).await)
                    }
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

    async fn change_member(
        &self,
        about: &About,
        id: ExecutionId,
        who: &str,
        sight: &Sight,
    ) -> Fate {
        let About { verb, tenant, .. } = about;
        let entry = match self.effects.ledger.last(tenant, id).await {
            Ok(Some(entry)) => entry,
            Ok(None) => return Fate::Unconcerned(None),
            Err(error) => return Fate::Failed("unknown".to_owned(), error.to_string()),
        };
        let phase = entry.message.state.phase.as_str().to_owned();
        if !concerns(verb, &entry.message.state) {
            return Fate::Unconcerned(Some(phase));
        }
        match self.change((verb, None), tenant, entry, who, sight).await {
            Ok(answer) => {
                let after = answer.state.as_ref().map(|s| s.phase.as_str().to_owned());
                let phase = after.unwrap_or(phase);
                // Some of its parts, or itself.
                match answer.message.ends_with(NOT_YET) {
                    true => Fate::Later(phase),
                    false => Fate::Done(phase),
                }
            }
            Err(reason) if reason.ends_with(NOT_YET) => Fate::Later(phase),
            // It ended in the meantime, or is as it is asked to be.
            Err(reason) if reason.ends_with("already") || reason.contains(NOT_PAUSED) => {
                Fate::Unconcerned(Some(phase))
            }
            Err(reason) => Fate::Failed(phase, reason),
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
        let mark = format!(r#""batch":{{"id":"{}""#, page.about.batch);
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
            if let Some(text) = header.map(|h| h.as_str()).filter(|h| h.contains(&mark)) {
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

/// Takes in what a message says of an execution; one that is read twice, since it was changed
/// meanwhile, counts as it was last.
fn take_member(page: &mut Page, state: ExecutionState, seq: Sequence) {
    // A submission may hold words that look like the mark.
    if state.batch.is_none_or(|batch| batch.id != page.about.batch) {
        return;
    }
    let spec = state.spec.as_ref();
    let after = spec.map_or(&[][..], |spec| &spec.after);
    let member = Member {
        seq,
        phase: state.phase.as_str(),
        concerned: page.about.verb != "status" && concerns(page.about.verb, &state),
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
        Fate::Done(phase) => page.count(&phase),
        Fate::Later(phase) => {
            page.count(&phase);
            page.later += 1;
        }
        Fate::Unconcerned(phase) => {
            phase.iter().for_each(|phase| page.count(phase));
            page.unconcerned += 1;
        }
        Fate::Failed(phase, reason) => {
            page.count(&phase);
            page.failed.0 += 1;
            if page.failed.1.len() < REASONS {
                page.failed.1.push(reason);
            }
        }
    }
}

fn not_taken_in(tenant: &Tenant, untaken: Untaken) -> String {
    let messages = untaken.messages;
    format!("{messages} submission messages of tenant {tenant} have not been taken in; try again")
}

/// The answer where no execution of the batch was found.
fn none_known(page: &Page, name: &str) -> BatchReply {
    let tenant = &page.about.tenant;
    let error = match page.untaken {
        Some(untaken) => format!(
            "no execution of batch {name} is known, and {}",
            not_taken_in(tenant, untaken)
        ),
        None => format!(
            "tenant {tenant} has no batch {name}; one whose executions ended long ago is in \
             PostgreSQL only (the view batch_summary)"
        ),
    };
    BatchReply {
        error: Some(error),
        batch: Some(page.about.batch),
        untaken: page.untaken,
        ..BatchReply::default()
    }
}

fn batch_of(tenant: &Tenant, text: &str) -> Answered<BatchId> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let name: BatchName = text
        .parse()
        .map_err(|_| format!("{text:?} is neither a batch's UUID nor its name"))?;
    Ok(BatchId::from_client(tenant, &name))
}

/// True where something remains to be done.
fn concerns(verb: &str, state: &ExecutionState) -> bool {
    let asked = |what: &str| is_asked(state, what);
    match verb {
        // Its parts may have paused of their own, or not have been reached before.
        "resume" => {
            let paused = matches!(state.phase, Phase::Paused { .. }) || asked("pause");
            paused || !state.phase.is_terminal() && !state.parts().is_empty()
        }
        "pause" => {
            let paused = matches!(state.phase, Phase::Paused { .. });
            !state.phase.is_terminal() && !paused && !asked("pause") && !asked("cancel")
        }
        _ => !state.phase.is_terminal() && !asked("cancel"),
    }
}
