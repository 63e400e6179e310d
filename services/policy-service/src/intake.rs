//! Submission messages on their way to ledgers: cut into lines, read, named; acknowledged when the
//! last line has found its place.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use async_nats::jetstream::{self, AckKind};
use bytes::Bytes;
use fiec_schemas::{
    BatchId, BatchPlace, Epoch, ExecutionId, FieldError, LineError, NodeId, Sequence, Submission,
    Tenant, Timestamp, subjects, submission,
};

/// Header by which the service's API fixes the time stamp that ids derive from, since it must
/// answer with ids before the broker's own stamp can be known. Without it the broker's counts.
pub const STAMP_HEADER: &str = "Fiec-Stamp";
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
    /// True once a large one lies in `FIEC_DATA`.
    pub stored: bool,
    /// True once its program was found to be registered.
    pub registered: bool,
    /// The node that was told of its first binding ahead of the append, and that binding's epoch.
    pub told: Option<(NodeId, Epoch)>,
}

/// What the next line is.
pub enum Next {
    /// No line: this message has been read to its end.
    End(Sequence),
    /// A submission.
    Line(Box<Line>),
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

struct Cursor {
    seq: Sequence,
    /// From the subject; the text itself where it is no name.
    tenant: Result<Tenant, String>,
    /// What ids without a client's derive from.
    stamp: Timestamp,
    body: Bytes,
    /// Bytes that were read.
    at: usize,
    /// Lines that were read.
    number: u32,
    /// Several lines are a batch of their own.
    batch: Option<BatchId>,
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
        let published = info.published.unix_timestamp_nanos() / 1_000;
        let stamp = message
            .headers
            .as_ref()
            .and_then(|h| h.get(STAMP_HEADER)?.as_str().parse().ok())
            .or_else(|| i64::try_from(published).ok())
            .map_or_else(Timestamp::default, Timestamp::from_micros);
        let subject = message.subject.as_str();
        let tenant = subjects::parse_submit(subject)
            .ok_or_else(|| subject.trim_start_matches("fiec.submit.").to_owned());
        if self.open.contains_key(&seq) {
            // Delivered again while still under way: the first delivery's acknowledgement counts.
            return;
        }
        let batch = batch_of(&tenant, stamp, seq, &message.payload);
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
            at: 0,
            number: 0,
            batch,
        });
    }

    /// The next line, read and named. It counts as open until [`Intake::done`].
    pub fn next(&mut self) -> Option<Next> {
        loop {
            let cursor = self.queue.front_mut()?;
            let Some(line) = cursor.line() else {
                let seq = cursor.seq;
                self.queue.pop_front();
                if let Some(open) = self.open.get_mut(&seq) {
                    open.read = true;
                }
                return Some(Next::End(seq));
            };
            let (number, bytes) = line;
            if bytes.is_empty() {
                continue;
            }
            if let Some(open) = self.open.get_mut(&cursor.seq) {
                open.lines += 1;
            }
            return Some(cursor.read(number, &bytes));
        }
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

/// The id and the batch of a line.
pub fn name(
    tenant: &Tenant,
    stamp: Timestamp,
    seq: Sequence,
    number: u32,
    batch: Option<BatchId>,
    spec: &Submission,
) -> (ExecutionId, Option<BatchPlace>) {
    let execution = match &spec.id {
        Some(client) => ExecutionId::from_client(tenant, client),
        None => ExecutionId::from_submission(tenant, stamp, seq, number),
    };
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

impl Cursor {
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

    fn read(&self, number: u32, line: &[u8]) -> Next {
        let bad = |tenant: String, error: FieldError| Next::Bad {
            message: self.seq,
            tenant,
            error: LineError {
                line: number,
                field: error.field,
                reason: error.reason,
            },
            excerpt: excerpt(line),
        };
        let tenant = match &self.tenant {
            Ok(tenant) => tenant,
            Err(text) => {
                let reason = format!(
                    "{text:?} is no tenant: 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'"
                );
                return bad(text.clone(), FieldError::new("", reason));
            }
        };
        match Submission::parse(line) {
            Ok(spec) => {
                let (execution, batch) =
                    name(tenant, self.stamp, self.seq, number, self.batch, &spec);
                Next::Line(Box::new(Line {
                    message: self.seq,
                    number,
                    tenant: tenant.clone(),
                    execution,
                    batch,
                    stamp: self.stamp,
                    spec: Arc::new(spec),
                    stored: false,
                    registered: false,
                    told: None,
                }))
            }
            Err(error) => bad(tenant.to_string(), error),
        }
    }
}
