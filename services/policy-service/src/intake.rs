//! Submission messages on their way to ledgers: cut into lines, read, named; acknowledged when the
//! last line has found its place.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use async_nats::HeaderMap;
use async_nats::jetstream::{self, AckKind};
use bytes::Bytes;
use fiec_schemas::submission::ATOMIC_HEADER;
use fiec_schemas::{
    BatchId, BatchPlace, Digest, Epoch, ExecutionId, FieldError, LineError, NodeId, Sequence,
    Submission, Tenant, Timestamp, subjects, submission,
};

use crate::vetting::{Verdict, check_count};

/// Header by which the service's API fixes the time stamp that ids derive from, since it must
/// answer with ids before the broker's own stamp can be known. Without it the broker's counts.
pub const STAMP_HEADER: &str = "Fiec-Stamp";
/// Messages that are looked at as a whole at once.
pub const VETTED_AT_ONCE: usize = 64;
/// Longest excerpt of a rejected line.
const EXCERPT: usize = 512;
/// A message that could not be taken in is delivered again after this.
const RETRY: std::time::Duration = std::time::Duration::from_secs(1);

/// A line that is a submission.
#[derive(Debug)]
pub struct Line {
    /// Sequence of its message.
    pub message: Sequence,
    /// Its number.
    pub number: u32,
    /// Whose.
    pub tenant: Tenant,
    /// Its id.
    pub execution: ExecutionId,
    /// Its batch.
    pub batch: Option<BatchPlace>,
    /// When it was stored.
    pub stamp: Timestamp,
    /// It.
    pub spec: Arc<Submission>,
    /// It is not to be expected that it has a ledger: its id is no client's, it was not delivered
    /// before, and its message need not be refused as a whole.
    pub fresh: bool,
    /// The node that was told of its first binding while that is appended, its epoch, and the
    /// digest of its message.
    pub told: Option<(NodeId, Epoch, Digest)>,
    /// True once a large one lies in `FIEC_DATA`.
    pub stored: bool,
    /// True once its program was found to be registered.
    pub registered: bool,
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
    /// The lines that are refused, once it was looked at as a whole.
    verdict: Option<Verdict>,
    /// What remains of an array, of which line, from which index on.
    elements: std::vec::IntoIter<Submission>,
    index: u32,
    /// Executions that it has become.
    made: usize,
    /// Bytes that were read.
    at: usize,
    /// Lines that were read.
    number: u32,
    /// Several lines are a batch of their own.
    batch: Option<BatchId>,
}

impl std::fmt::Debug for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cursor({})", self.seq)
    }
}

struct Open {
    /// For its acknowledgement.
    message: jetstream::Message,
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
    /// A line that was read and waits for its turn.
    pub head: Option<Box<Line>>,
}

impl Intake {
    /// True when nothing is left to read.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.head.is_none()
    }

    /// Takes a message.
    pub fn push(&mut self, message: jetstream::Message) {
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
        let again = info.delivered > 1;
        let body = message.payload.clone();
        self.open.insert(
            seq,
            Open {
                message,
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
            verdict: None,
            elements: Vec::new().into_iter(),
            index: 0,
            made: 0,
            at: 0,
            number: 0,
            batch,
        });
    }

    /// The next line, read and named. It counts as open until [`Intake::done`].
    pub fn next(&mut self) -> Option<Next> {
        loop {
            let cursor = self.queue.front_mut()?;
            let unread = cursor.atomic && cursor.verdict.is_none() && cursor.tenant.is_ok();
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
    pub async fn vetted(&mut self, mut cursor: Box<Cursor>, verdict: Result<Verdict, String>) {
        self.vetting -= 1;
        let seq = cursor.seq;
        match verdict {
            Ok(verdict) => {
                cursor.verdict = Some(verdict);
                self.queue.push_back(*cursor);
            }
            Err(error) => {
                tracing::warn!(
                    error,
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
            AckKind::Nak(Some(RETRY))
        } else {
            AckKind::Ack
        };
        if let Err(error) = open.message.ack_with(kind).await {
            // It will be delivered again, which is harmless.
            tracing::warn!(%error, submission = message, "cannot acknowledge a submission");
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
/// the line, and the index of an array's element. The elements of an array are a batch.
pub fn name(
    tenant: &Tenant,
    stamp: Timestamp,
    place: (Sequence, u32, Option<u32>),
    batch: Option<BatchId>,
    spec: &Submission,
) -> (ExecutionId, Option<BatchPlace>) {
    let (seq, number, index) = place;
    let execution = match (&spec.id, index) {
        (Some(client), _) => ExecutionId::from_client(tenant, client),
        (None, None) => ExecutionId::from_submission(tenant, stamp, seq, number),
        (None, Some(index)) => ExecutionId::from_element(tenant, stamp, seq, number, index),
    };
    let batch = batch.or_else(|| index.map(|_| BatchId::from_submission(tenant, stamp, seq)));
    let batch = spec
        .batch
        .as_ref()
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
        if let Some(spec) = self.elements.next() {
            let index = self.index;
            self.index += 1;
            return Some(self.element(spec, Some(index)));
        }
        let (at, number) = (self.at, self.number);
        let Some((line, text)) = self.line() else {
            return Some(Read::End);
        };
        if text.is_empty() {
            return Some(Read::Blank);
        }
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
        if !spec.after.is_empty() && self.verdict.is_none() {
            (self.at, self.number) = (at, number);
            return None;
        }
        self.made += spec.count();
        if spec.array.is_none() {
            return Some(self.element(spec, None));
        }
        let expanded = check_count(&spec, self.made).and_then(|()| spec.expand());
        match expanded {
            Ok(all) => {
                (self.elements, self.index) = (all.into_iter(), 0);
                Some(Read::Blank)
            }
            Err(error) => Some(self.bad(line, tenant, error, &text)),
        }
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
        let (execution, batch) = name(tenant, self.stamp, place, self.batch, &spec);
        let fresh = spec.id.is_none() && !self.again && !self.atomic;
        Read::Next(Box::new(Next::Line(Box::new(Line {
            message: self.seq,
            number: self.number,
            tenant: tenant.clone(),
            execution,
            batch,
            stamp: self.stamp,
            spec: Arc::new(spec),
            fresh,
            told: None,
            stored: false,
            registered: false,
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
