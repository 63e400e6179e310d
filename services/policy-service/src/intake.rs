//! Submission messages on their way to ledgers: cut into lines, read, named; acknowledged when the
//! last line has found its place.

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

/// Header by which the service's API fixes the time stamp that ids derive from, since it must
/// answer with ids before the broker's own stamp can be known. Without it the broker's counts.
pub const STAMP_HEADER: &str = "Fiec-Stamp";
/// Messages that are looked at as a whole at once.
pub const VETTED_AT_ONCE: usize = 64;
/// Longest excerpt of a rejected line.
const EXCERPT: usize = 512;
/// A message that could not be taken in is delivered again after this, after twice as long the next
/// time, and so on so many times.
const RETRY: Duration = Duration::from_secs(1);
const DOUBLINGS: u32 = 8;
/// A message that was delivered more often is refused: by then it has failed for half an hour, or
/// has ended as many policy services.
pub const DELIVERIES: i64 = 16;
/// The broker is told so often that a message is still being taken in: well within the time after
/// which it delivers it again.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Bytes of lines that are on their way into ledgers, beyond which no further one is begun.
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
    /// False if nobody else can have begun that ledger: the id is no client's, the message was not
    /// delivered before, and it need not be refused as a whole.
    pub can_have_ledger: bool,
    /// When its message was asked for.
    pub asked: Asked,
    /// The next step towards its ledger.
    pub check: Check,
    /// Its share of the memory.
    pub _share: Share,
}

impl Line {
    /// Its id.
    pub fn execution(&self) -> ExecutionId {
        self.tip.state.execution
    }
}

/// What a line needs next, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Its program must be registered.
    Program,
    /// It must lie in `FIEC_DATA` if it is too large for a ledger message.
    Size,
    /// Its first append.
    Ledger,
}

/// What the next line is.
pub enum Next {
    /// No line: this message has been read to its end.
    End(Sequence),
    /// A submission.
    Line(Box<Line>),
    /// Its message must be looked at as a whole; it comes back by [`Intake::vetted`].
    Vet(Box<Cursor>),
    /// A line that breaks a rule.
    Bad {
        /// Sequence of its message.
        message: Sequence,
        /// As the subject says.
        tenant: String,
        /// Line, field, reason.
        error: LineError,
        /// Its beginning.
        excerpt: String,
    },
}

/// A message as far as it was read.
pub struct Cursor {
    /// Its sequence.
    pub seq: Sequence,
    /// From the subject; the text itself where it is no name.
    pub tenant: Result<Tenant, String>,
    /// What ids without a client's derive from.
    pub stamp: Timestamp,
    /// Its lines.
    pub body: Bytes,
    /// It is taken as a whole or not at all.
    pub atomic: bool,
    /// It was delivered before.
    pub again: bool,
    /// When it was asked for.
    pub asked: Asked,
    /// How often it was delivered, where that was too often.
    given_up: Option<i64>,
    /// The lines that are refused, once it was looked at as a whole.
    verdict: Option<Verdict>,
    /// What remains of an array, of which line, from which index on.
    elements: Option<Elements>,
    /// Bytes of the line that was read last.
    text: usize,
    held: Gauge,
    /// Bytes that were read.
    at: usize,
    /// Lines that were read.
    number: u32,
    /// Several lines are a batch of their own.
    batch: Option<BatchId>,
    /// It has a line that is not blank, or was refused for having none.
    has_lines: bool,
}

impl std::fmt::Debug for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cursor({})", self.seq)
    }
}

struct Open {
    /// For its acknowledgement.
    message: jetstream::Message,
    /// Its share of the room for messages.
    _room: Room,
    /// When the broker was told last that it is being taken in.
    told: Instant,
    /// How often it was delivered.
    delivered: i64,
    /// Lines that were read and have found no place yet.
    lines: usize,
    /// No further line comes.
    read: bool,
    /// A line found no place, for a reason that may pass: the message is to come again.
    failed: bool,
}

/// Messages that are being taken in.
#[derive(Default)]
pub struct Intake {
    queue: VecDeque<Cursor>,
    open: HashMap<Sequence, Open>,
    /// Messages that are being looked at as a whole.
    vetting: usize,
    /// What the lines under way take.
    held: Gauge,
    /// Lines that were read and go on before further ones are read.
    ready: VecDeque<Box<Line>>,
}

impl Intake {
    /// True when nothing is left to read.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.ready.is_empty()
    }

    /// True if the next line is unread, and those under way leave no memory for it.
    pub fn is_full(&self) -> bool {
        self.ready.is_empty() && self.held.used() >= LINES_BYTES
    }

    /// Takes a line back that waits for a slot. It is the next one again.
    pub fn put_back(&mut self, line: Box<Line>) {
        self.ready.push_front(line);
    }

    /// Takes a line back after a check. It follows those that go on already.
    pub fn resume(&mut self, line: Box<Line>) {
        self.ready.push_back(line);
    }

    /// Takes a message.
    pub fn push(&mut self, pulled: Pulled) {
        let Pulled {
            message,
            asked,
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
        if self.open.contains_key(&seq) {
            // Delivered again while still under way: the first delivery's acknowledgement counts.
            return;
        }
        let batch = batch_of(&tenant, stamp, seq, &message.payload);
        let header = message.headers.as_ref().and_then(|h| h.get(ATOMIC_HEADER));
        let atomic = header.is_some_and(|value| value.as_str() == "true");
        let delivered = info.delivered;
        let again = delivered > 1;
        let body = message.payload.clone();
        self.open.insert(
            seq,
            Open {
                message,
                _room: room,
                told: Instant::now(),
                delivered,
                lines: 0,
                read: false,
                failed: false,
            },
        );
        self.queue.push_back(Cursor {
            seq,
            tenant,
            stamp,
            body,
            atomic,
            again,
            asked,
            given_up: (delivered > DELIVERIES).then_some(delivered),
            verdict: None,
            elements: None,
            text: 0,
            held: self.held.clone(),
            at: 0,
            number: 0,
            batch,
            has_lines: false,
        });
    }

    /// The next line, read and named. It counts as open until [`Intake::done`].
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

    /// A message was looked at as a whole: it goes on where it was, without the lines that are
    /// refused. Where that could not be done, it is to come again.
    pub async fn vetted(&mut self, mut cursor: Box<Cursor>, verdict: Result<Verdict, Refusal>) {
        self.vetting -= 1;
        let seq = cursor.seq;
        match verdict {
            Ok(verdict) => {
                cursor.verdict = Some(verdict);
                self.queue.push_back(*cursor);
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    submission = seq,
                    "a submission cannot be looked at as a whole; it is delivered again"
                );
                if let Some(open) = self.open.get_mut(&seq) {
                    (open.read, open.failed) = (true, true);
                }
                self.settle(seq).await;
            }
        }
    }

    /// True where no more messages are to be looked at as a whole for now.
    pub fn is_crowded(&self) -> bool {
        self.vetting >= VETTED_AT_ONCE
    }

    /// A line has found its place (or has not); the message is acknowledged with its last one.
    pub async fn done(&mut self, message: Sequence, well: bool) {
        let Some(open) = self.open.get_mut(&message) else {
            return;
        };
        open.lines = open.lines.saturating_sub(1);
        open.failed |= !well;
        self.settle(message).await;
    }

    /// Acknowledges a message whose lines have all been read and have found their places.
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
        let kind = if open.failed {
            let doublings = u32::try_from(open.delivered - 1).unwrap_or(0);
            AckKind::Nak(Some(RETRY * 2_u32.pow(doublings.min(DOUBLINGS))))
        } else {
            AckKind::Ack
        };
        if let Err(error) = open.message.ack_with(kind).await {
            // It will be delivered again, which is harmless.
            tracing::warn!(%error, submission = message, "cannot acknowledge a submission");
        }
    }

    /// Tells the broker of messages that take long, so that they are not delivered to others as
    /// well while they are being taken in.
    pub async fn keep_alive(&mut self) {
        for (seq, open) in &mut self.open {
            if open.told.elapsed() < KEEP_ALIVE {
                continue;
            }
            open.told = Instant::now();
            if let Err(error) = open.message.ack_with(AckKind::Progress).await {
                tracing::debug!(%error, submission = seq, "cannot tell that it is being taken in");
            }
        }
    }

    /// Messages that are not acknowledged yet.
    pub fn open(&self) -> usize {
        self.open.len()
    }
}

/// What ids without a client's derive from: as the header fixes it, else when the broker stored the
/// message, in nanoseconds since 1970.
pub fn stamp(headers: Option<&HeaderMap>, published: i128) -> Timestamp {
    headers
        .and_then(|h| h.get(STAMP_HEADER)?.as_str().parse().ok())
        .or_else(|| i64::try_from(published / 1_000).ok())
        .map_or_else(Timestamp::default, Timestamp::from_micros)
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

/// The id and the batch of what a line of a message stands for; `place`: the message's sequence,
/// the line, and the index of an array's element; then what its client calls it and its batch. The
/// elements of an array are a batch.
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

/// A line's beginning, for people.
pub fn excerpt(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(EXCERPT)]).into_owned()
}

/// What a cursor comes to.
enum Read {
    /// Nothing.
    Blank,
    /// A line, or an element of one.
    Next(Box<Next>),
    /// No further line.
    End,
}

impl Cursor {
    /// What comes next; none where the message must be looked at as a whole before.
    fn next(&mut self) -> Option<Read> {
        if let Some(delivered) = self.given_up.take() {
            self.at = self.body.len() + 1;
            return Some(self.give_up(delivered));
        }
        if let Some(elements) = &mut self.elements {
            let index = elements.index();
            match elements.next() {
                Some(Ok(spec)) => return Some(self.element(spec, index)),
                // The message was looked at as a whole, so this does not happen.
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

    /// One rejection for the message as a whole; what was taken in of it before goes on.
    fn give_up(&self, delivered: i64) -> Read {
        let reason = format!(
            "its message was delivered {delivered} times, and no policy service took in all of it: \
             each ended meanwhile or failed, and its log says why. Lines of the message that were \
             taken in go on; send the others again, in smaller messages"
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
            error: LineError {
                line,
                field: error.field,
                reason: error.reason,
            },
            excerpt: excerpt(text),
        }))
    }

    fn element(&self, spec: Submission, index: Option<u32>) -> Read {
        let Ok(tenant) = &self.tenant else {
            return Read::Blank;
        };
        let place = (self.seq, self.number, index);
        let named = (spec.id.as_ref(), spec.batch.as_ref());
        let (execution, batch) = name(tenant, self.stamp, place, self.batch, named);
        let can_have_ledger = spec.id.is_some() || self.again || self.atomic;
        let share = self.held.take(weight_of(&spec, self.text));
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
                state,
                seen_in: 0,
            },
            can_have_ledger,
            asked: self.asked,
            check: Check::Program,
            _share: share,
        }))))
    }

    /// The next line with its number, blank ones as empty.
    fn line(&mut self) -> Option<(u32, Bytes)> {
        if self.at > self.body.len() {
            return None;
        }
        let rest = &self.body[self.at..];
        let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        let line = self.body.slice_ref(rest[..end].trim_ascii());
        self.at += end + 1;
        self.number += 1;
        Some((self.number, line))
    }
}
