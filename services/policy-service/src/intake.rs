//! Submission messages on their way to ledgers. The intake splits a message into lines, parses them
//! and derives their ids. It acknowledges a message after its last line is settled. A message with a
//! line that cannot be taken in now waits (`waiting`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::{self, AckKind};
use bytes::Bytes;
use fiec_broker::Tip;
use fiec_schemas::array::Elements;
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{
    BatchId, BatchName, BatchPlace, ClientId, ExecutionId, ExecutionState, FieldError, LineError,
    Sequence, Submission, Tenant, Timestamp, subjects, submission,
};

use crate::bounds::{Gauge, Share, weight_of};
use crate::pulling::{Asked, Pulled, Room};
use crate::reading::Verdict;
use crate::refusal::Refusal;
use crate::waiting::{KEEP_ALIVE, Waiting};

/// Header that fixes the time stamp from which ids derive. The service's API sets it, because the
/// API answers with ids before the broker has stamped the message. Without the header, the broker's
/// time stamp counts.
pub const STAMP_HEADER: &str = "Fiec-Stamp";
/// Longest time between the header and the broker's time stamp. Waiting time raises the priority,
/// so an older header would jump the queue.
pub const STAMP_WITHIN: Duration = Duration::from_secs(10);
/// Most messages that are checked as a whole at the same time.
pub const VETTED_AT_ONCE: usize = 64;
/// Longest excerpt of a rejected line, in bytes.
const EXCERPT: usize = 512;
/// Limit on the bytes of lines that have no ledger yet. Beyond it, no further line is read.
const LINES_BYTES: usize = 48 * 1024 * 1024;

/// A line that is a submission.
#[derive(Debug)]
pub struct Line {
    /// Sequence of its message.
    pub message: Sequence,
    /// Its number in the message, from 1.
    pub number: u32,
    /// The submission.
    pub spec: Arc<Submission>,
    /// Its ledger before the first message.
    pub tip: Tip,
    /// Who else can have begun that ledger.
    pub others: Others,
    /// When its message was requested from the broker.
    pub asked: Asked,
    /// The next step towards its ledger.
    pub check: Check,
    /// Its share of the memory for lines.
    pub _share: Share,
    /// A look-up found nothing under its id.
    pub is_new: bool,
    /// Its message was checked as a whole, so that it counts as waiting until the policy counts it.
    pub promise: Option<Share>,
}

impl Line {
    /// Its id.
    pub fn execution(&self) -> ExecutionId {
        self.tip.state.execution
    }
}

/// Who else can have begun the ledger of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// Nobody: the id is new.
    Nobody,
    /// Another line with the same client's id. A look-up shows whether there was one.
    SameName,
    /// Another policy service: the message was delivered before, is atomic, or was here for long.
    OtherService,
}

/// The next step of a line towards its ledger, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Check that its program is registered.
    Program,
    /// Store the submission in `FIEC_DATA` if it is too large for a ledger message.
    Size,
    /// Look up whether a client's id has a ledger, or has ended and its ledger is gone.
    Name,
    /// Make its first append.
    Ledger,
}

/// The next item of the intake.
pub enum Next {
    /// The end of a message.
    End(Sequence),
    /// A submission.
    Line(Box<Line>),
    /// A message that must be checked as a whole. It comes back by [`Intake::vetted`].
    Vet(Box<Cursor>),
    /// A line that breaks a rule.
    Bad {
        /// Sequence of its message.
        message: Sequence,
        /// Tenant, as the subject names it.
        tenant: String,
        /// Line, field, reason.
        error: LineError,
        /// The beginning of the line.
        excerpt: String,
    },
}

/// A message and the position up to which it was read.
pub struct Cursor {
    /// Its sequence.
    pub seq: Sequence,
    /// Tenant from the subject, or the subject's text if it is not a valid tenant.
    pub tenant: Result<Tenant, String>,
    /// Time stamp from which ids derive that no client chose.
    pub stamp: Timestamp,
    /// Its lines.
    pub body: Bytes,
    /// The message is accepted as a whole or refused as a whole.
    pub atomic: bool,
    /// The message was delivered or tried before.
    pub again: bool,
    /// When the message was requested from the broker.
    pub asked: Asked,
    /// Number of deliveries, if they exceed the limit.
    given_up: Option<i64>,
    /// Refused lines, once the message was checked as a whole.
    verdict: Option<Verdict>,
    /// Its executions that wait and that the policy does not count yet.
    promise: Option<Share>,
    /// Remaining elements of the array in the current line.
    elements: Option<Elements>,
    /// Bytes of the line that was read last.
    text: usize,
    held: Gauge,
    /// Bytes read so far.
    at: usize,
    /// Lines read so far.
    number: u32,
    /// Batch of the message, if it has several lines.
    batch: Option<BatchId>,
    /// The message has a line that is not blank, or was refused because it has none.
    has_lines: bool,
}

impl std::fmt::Debug for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cursor({})", self.seq)
    }
}

struct Open {
    /// The message, to acknowledge it.
    message: jetstream::Message,
    /// Its share of the memory for messages.
    _room: Room,
    /// Time of the last progress report to the broker.
    told: Instant,
    /// Lines that were read and are not settled.
    lines: usize,
    /// All lines were read.
    read: bool,
    /// Why a line failed, if the reason may pass. The message must be tried again.
    failed: Option<String>,
}

/// Messages that are being taken in.
pub struct Intake {
    /// Most deliveries of a message that is read.
    deliveries: i64,
    queue: VecDeque<Cursor>,
    open: HashMap<Sequence, Open>,
    /// Number of messages that are being checked as a whole.
    vetting: usize,
    /// Memory of the lines that have no ledger yet.
    held: Gauge,
    /// Lines that were read before and continue before further lines are read.
    ready: VecDeque<Box<Line>>,
    /// Messages that must be tried again.
    waiting: Waiting,
}

impl Intake {
    /// An intake that refuses messages with more deliveries.
    pub fn new(deliveries: i64, waiting: Waiting) -> Self {
        Self {
            deliveries,
            queue: VecDeque::new(),
            open: HashMap::new(),
            vetting: 0,
            held: Gauge::default(),
            ready: VecDeque::new(),
            waiting,
        }
    }

    /// True if nothing is left to read.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.ready.is_empty()
    }

    /// True if the next line is unread and the lines in progress leave no memory for it.
    pub fn is_full(&self) -> bool {
        self.ready.is_empty() && self.held.used() >= LINES_BYTES
    }

    /// Returns a line that waits for a slot. It is the next line again.
    pub fn put_back(&mut self, line: Box<Line>) {
        self.ready.push_front(line);
    }

    /// Returns a line after a check. It follows the other lines that were read before.
    pub fn resume(&mut self, line: Box<Line>) {
        self.ready.push_back(line);
    }

    /// Adds a message to the queue.
    pub fn push(&mut self, pulled: Pulled) {
        let Pulled {
            message,
            asked,
            again,
            room,
        } = pulled;
        let Ok(info) = message.info() else {
            tracing::warn!(subject = %message.subject, "a submission without its place was passed over");
            return;
        };
        let seq = info.stream_sequence;
        let published = info.published.unix_timestamp_nanos();
        let stamp = stamp(message.headers.as_ref(), published);
        let subject = message.subject.as_str();
        let tenant = subjects::parse_submit(subject)
            .ok_or_else(|| subject.trim_start_matches("fiec.submit.").to_owned());
        if self.open.contains_key(&seq) || (!again && self.waiting.contains(seq)) {
            // The message is still in progress or waits. The acknowledgement of the first delivery
            // counts.
            return;
        }
        let batch = batch_of(&tenant, stamp, seq, &message.payload);
        let header = message.headers.as_ref().and_then(|h| h.get(ATOMIC_HEADER));
        let atomic = header.is_some_and(|value| value.as_str() == "true");
        let delivered = info.delivered;
        let body = message.payload.clone();
        self.open.insert(
            seq,
            Open {
                message,
                _room: room,
                told: Instant::now(),
                lines: 0,
                read: false,
                failed: None,
            },
        );
        self.queue.push_back(Cursor {
            seq,
            tenant,
            stamp,
            body,
            atomic,
            again: again || delivered > 1,
            asked,
            given_up: (delivered > self.deliveries).then_some(delivered),
            verdict: None,
            promise: None,
            elements: None,
            text: 0,
            held: self.held.clone(),
            at: 0,
            number: 0,
            batch,
            has_lines: false,
        });
    }

    /// The next item. A line of it counts as unsettled until [`Intake::done`].
    pub fn next(&mut self) -> Option<Next> {
        if let Some(line) = self.ready.pop_front() {
            return Some(Next::Line(line));
        }
        loop {
            let cursor = self.queue.front_mut()?;
            let vetted = cursor.verdict.is_some() || cursor.given_up.is_some();
            let unread = cursor.atomic && !vetted && cursor.tenant.is_ok();
            let next = if unread { None } else { cursor.next() };
            match next {
                Some(Read::Blank) => {}
                Some(Read::Next(next)) => {
                    if let Some(open) = self.open.get_mut(&cursor.seq) {
                        open.lines += 1;
                    }
                    return Some(*next);
                }
                Some(Read::End) => {
                    let seq = cursor.seq;
                    self.queue.pop_front();
                    if let Some(open) = self.open.get_mut(&seq) {
                        open.read = true;
                    }
                    return Some(Next::End(seq));
                }
                None => {
                    let cursor = self.queue.pop_front()?;
                    self.vetting += 1;
                    return Some(Next::Vet(Box::new(cursor)));
                }
            }
        }
    }

    /// Takes the result of checking a message as a whole, and the executions that it may add. The
    /// message continues at its position, without the refused lines. If the check failed, the
    /// message must be tried again.
    pub async fn vetted(
        &mut self,
        mut cursor: Box<Cursor>,
        vetted: Result<(Verdict, Share), Refusal>,
    ) {
        self.vetting -= 1;
        let seq = cursor.seq;
        match vetted {
            Ok((verdict, promise)) => {
                (cursor.verdict, cursor.promise) = (Some(verdict), Some(promise));
                self.queue.push_back(*cursor);
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    submission = seq,
                    "a submission cannot be checked as a whole; trying again"
                );
                if let Some(open) = self.open.get_mut(&seq) {
                    (open.read, open.failed) = (true, Some(error.to_string()));
                }
                self.settle(seq).await;
            }
        }
    }

    /// True if no more messages may be checked as a whole for now.
    pub fn is_crowded(&self) -> bool {
        self.vetting >= VETTED_AT_ONCE
    }

    /// Settles one line. An error says why its message must be tried again. The last line
    /// acknowledges the message.
    pub async fn done(&mut self, message: Sequence, settled: Result<(), String>) {
        let Some(open) = self.open.get_mut(&message) else {
            return;
        };
        open.lines = open.lines.saturating_sub(1);
        if let Err(reason) = settled {
            open.failed = Some(reason);
        }
        self.settle(message).await;
    }

    /// Acknowledges the message if all its lines are read and settled, or lets it wait.
    pub async fn settle(&mut self, message: Sequence) {
        if !self
            .open
            .get(&message)
            .is_some_and(|o| o.read && o.lines == 0)
        {
            return;
        }
        let Some(open) = self.open.remove(&message) else {
            return;
        };
        if let Some(reason) = open.failed {
            self.waiting.put_off(message, &open.message, reason);
            return;
        }
        self.waiting.remove(message);
        if let Err(error) = open.message.ack().await {
            // The broker delivers it again, which does no harm.
            tracing::warn!(%error, submission = message, "cannot acknowledge a submission");
        }
    }

    /// Reports progress for messages that take long or wait, so that the broker does not deliver
    /// them to another policy service.
    pub async fn keep_alive(&mut self) {
        for (seq, open) in &mut self.open {
            if open.told.elapsed() < KEEP_ALIVE {
                continue;
            }
            open.told = Instant::now();
            if let Err(error) = open.message.ack_with(AckKind::Progress).await {
                tracing::debug!(%error, submission = seq, "cannot report that a submission is in progress");
            }
        }
        self.waiting.keep_alive().await;
    }

    /// Number of messages that are not acknowledged.
    pub fn open(&self) -> usize {
        self.open.len()
    }
}

/// Time stamp from which ids derive that no client chose. The header fixes it, if it is close to the
/// broker's time stamp `published`, in ns since 1970. Otherwise `published` counts.
pub fn stamp(headers: Option<&HeaderMap>, published: i128) -> Timestamp {
    let published = i64::try_from(published / 1_000).unwrap_or_default();
    let stamp = headers
        .and_then(|h| h.get(STAMP_HEADER)?.as_str().parse().ok())
        .filter(|stamp: &i64| Duration::from_micros(stamp.abs_diff(published)) <= STAMP_WITHIN);
    Timestamp::from_micros(stamp.unwrap_or(published))
}

fn batch_of(
    tenant: &Result<Tenant, String>,
    stamp: Timestamp,
    seq: Sequence,
    body: &[u8],
) -> Option<BatchId> {
    let tenant = tenant.as_ref().ok()?;
    (submission::lines(body).take(2).count() > 1)
        .then(|| BatchId::from_submission(tenant, stamp, seq))
}

/// Derives the id and the batch of a line, or of an element of its array. `place` is the message's
/// sequence, the line's number, and the element's index. The last argument has the client's id and
/// the client's name of the batch. The elements of an array form a batch.
pub fn name(
    tenant: &Tenant,
    stamp: Timestamp,
    place: (Sequence, u32, Option<u32>),
    batch: Option<BatchId>,
    (client, named): (Option<&ClientId>, Option<&BatchName>),
) -> (ExecutionId, Option<BatchPlace>) {
    let (seq, number, index) = place;
    let execution = match (client, index) {
        (Some(client), _) => ExecutionId::from_client(tenant, client),
        (None, None) => ExecutionId::from_submission(tenant, stamp, seq, number),
        (None, Some(index)) => ExecutionId::from_element(tenant, stamp, seq, number, index),
    };
    let batch = batch.or_else(|| index.map(|_| BatchId::from_submission(tenant, stamp, seq)));
    let batch = named
        .map(|name| BatchId::from_client(tenant, name))
        .or(batch);
    (execution, batch.map(|id| BatchPlace { id, line: number }))
}

/// The beginning of a line, for people to read.
pub fn excerpt(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(EXCERPT)]).into_owned()
}

/// Result of one step of a cursor.
enum Read {
    /// A blank line, or the start of an array.
    Blank,
    /// A line, or an element of an array.
    Next(Box<Next>),
    /// The end of the message.
    End,
}

impl Cursor {
    /// Reads on. Returns `None` if the message must be checked as a whole first.
    fn next(&mut self) -> Option<Read> {
        if let Some(delivered) = self.given_up.take() {
            self.at = self.body.len() + 1;
            self.has_lines = true;
            return Some(self.give_up(delivered));
        }
        if let Some(elements) = &mut self.elements {
            let index = elements.number();
            match elements.next() {
                Some(Ok(spec)) => return Some(self.element(spec, index)),
                // Does not happen: the check of the whole message has read this array.
                Some(Err(error)) => {
                    self.elements = None;
                    let tenant = self
                        .tenant
                        .as_ref()
                        .map_or_else(String::clone, |t| t.to_string());
                    return Some(self.bad(self.number, tenant, error, &[]));
                }
                None => self.elements = None,
            }
        }
        let (at, number) = (self.at, self.number);
        let Some((line, text)) = self.line() else {
            if std::mem::replace(&mut self.has_lines, true) {
                return Some(Read::End);
            }
            let tenant = self.tenant.as_ref();
            let tenant = tenant.map_or_else(String::clone, ToString::to_string);
            let error = FieldError::new("", "the message is empty: it has no submission");
            return Some(self.bad(1, tenant, error, &[]));
        };
        if text.is_empty() {
            return Some(Read::Blank);
        }
        self.has_lines = true;
        let tenant = match &self.tenant {
            Ok(tenant) => tenant.to_string(),
            Err(tenant) => {
                let reason = format!(
                    "{tenant:?} is no tenant: 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'"
                );
                let tenant = tenant.clone();
                return Some(self.bad(line, tenant, FieldError::new("", reason), &text));
            }
        };
        if let Some(error) = self.verdict.as_mut().and_then(|v| v.remove(&line)) {
            return Some(self.bad(line, tenant, error, &text));
        }
        let spec = match Submission::parse(&text) {
            Ok(spec) => spec,
            Err(error) => return Some(self.bad(line, tenant, error, &text)),
        };
        let alone = spec.after.is_empty() && spec.array.is_none();
        if !alone && self.verdict.is_none() {
            (self.at, self.number) = (at, number);
            return None;
        }
        self.text = text.len();
        if spec.array.is_none() {
            return Some(self.element(spec, None));
        }
        self.elements = Some(spec.elements());
        Some(Read::Blank)
    }

    /// Rejects the message as a whole. Executions of its lines that have a ledger continue.
    fn give_up(&self, delivered: i64) -> Read {
        let reason = format!(
            "the message was delivered {delivered} times, but each policy service ended or lost its \
             connection before it admitted all lines (see their logs). Admitted lines continue; \
             send the others again, in smaller messages"
        );
        let tenant = self
            .tenant
            .as_ref()
            .map_or_else(String::clone, |t| t.to_string());
        self.bad(1, tenant, FieldError::new("", reason), &self.body)
    }

    fn bad(&self, line: u32, tenant: String, error: FieldError, text: &[u8]) -> Read {
        Read::Next(Box::new(Next::Bad {
            message: self.seq,
            tenant,
            error: LineError::of(line, error),
            excerpt: excerpt(text),
        }))
    }

    fn element(&mut self, spec: Submission, index: Option<u32>) -> Read {
        let Ok(tenant) = &self.tenant else {
            return Read::Blank;
        };
        let place = (self.seq, self.number, index);
        let named = (spec.id.as_ref(), spec.batch.as_ref());
        let (execution, batch) = name(tenant, self.stamp, place, self.batch, named);
        let others = match spec.id {
            _ if self.again || self.atomic => Others::OtherService,
            Some(_) => Others::SameName,
            None => Others::Nobody,
        };
        let share = self.held.take(weight_of(&spec, self.text));
        let promise = self.promise.as_mut().map(|promise| promise.split(1));
        let spec = Arc::new(spec);
        let tenant = tenant.clone();
        let state = ExecutionState::unborn(tenant, execution, Arc::clone(&spec), batch, self.stamp);
        Read::Next(Box::new(Next::Line(Box::new(Line {
            message: self.seq,
            number: self.number,
            spec,
            tip: Tip {
                seq: 0,
                digest: None,
                state: state.into(),
                seen_in: 0,
            },
            others,
            asked: self.asked,
            check: Check::Program,
            _share: share,
            is_new: false,
            promise,
        }))))
    }

    /// The next line with its number. A blank line is empty.
    fn line(&mut self) -> Option<(u32, Bytes)> {
        if self.at > self.body.len() {
            return None;
        }
        let rest = &self.body[self.at..];
        let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        let line = match self.at {
            0 => submission::without_mark(&rest[..end]),
            _ => &rest[..end],
        };
        let line = self.body.slice_ref(line.trim_ascii());
        self.at += end + 1;
        self.number += 1;
        Some((self.number, line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_stamp_jumps_no_queue() {
        const PUBLISHED: i64 = 1_764_000_000_000_000;
        let stamped = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(STAMP_HEADER, value);
            stamp(Some(&headers), i128::from(PUBLISHED) * 1_000).micros()
        };
        for close in [PUBLISHED - 10_000_000, PUBLISHED, PUBLISHED + 10_000_000] {
            assert_eq!(stamped(&close.to_string()), close);
        }
        for other in [0, -1, PUBLISHED - 10_000_001, i64::MIN, i64::MAX] {
            assert_eq!(stamped(&other.to_string()), PUBLISHED, "{other}");
        }
        assert_eq!(stamped("soon"), PUBLISHED);
        assert_eq!(
            stamp(None, i128::from(PUBLISHED) * 1_000).micros(),
            PUBLISHED
        );
    }
}
