//! Cuts the output of a child into pieces. Pure: the time is an argument, and nothing is sent here.
//!
//! A piece is a line, or a part of one: a line of more than [`PIECE_LIMIT`] bytes goes on in the next
//! piece, and a line that is not finished within [`UNFINISHED`] leaves as it is, so that a prompt is
//! seen. Output over the budget of a second is counted and dropped, except its end. The pieces and
//! the counts of a stream make up exactly what the program has written to it.

use std::time::{Duration, Instant};

use fiec_schemas::messages::{Dropped, LogStream};

/// Most bytes of a piece.
pub const PIECE_LIMIT: usize = 8 * 1024;
/// A line that is not finished after this time leaves in parts.
pub const UNFINISHED: Duration = Duration::from_millis(250);
/// Budget of one child a second.
pub const PIECES_A_SECOND: u32 = 500;
pub const BYTES_A_SECOND: usize = 512 * 1024;
const SECOND: Duration = Duration::from_secs(1);
/// Most bytes of each stream that are kept of the output over the budget: its end.
const KEPT: usize = PIECE_LIMIT;
/// Most lines of this end that leave over the budget, at the end of a run.
const KEPT_LINES: usize = 64;

/// A piece of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub stream: LogStream,
    /// Bytes of the stream before it.
    pub offset: u64,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// What the program wrote. Without `part` a line feed followed.
    Text { bytes: Vec<u8>, part: bool },
    /// Output that is not sent.
    Dropped(Dropped),
}

/// One stream.
#[derive(Debug, Default)]
struct Flow {
    /// Bytes of the stream before `open`.
    offset: u64,
    /// Bytes that are not returned as a piece yet.
    open: Vec<u8>,
    /// Since when `open` is not empty.
    since: Option<Instant>,
    /// Output that was dropped before `open`. The reader was not notified yet.
    dropped: Dropped,
}

/// The output of a child: both streams, which share a budget.
#[derive(Debug)]
pub struct Pieces {
    flows: [Flow; 2],
    /// Start of the second in which `pieces` and `bytes` are counted.
    second: Instant,
    pieces: u32,
    bytes: usize,
}

fn place(stream: LogStream) -> usize {
    match stream {
        LogStream::Stdout => 0,
        LogStream::Stderr => 1,
    }
}

fn lines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

/// Bytes up to the last whole character: a character that is cut at the end waits for its rest.
fn whole(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let at = bytes.len() - back;
        let length = match bytes[at] {
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => return bytes.len(),
        };
        return if back < length { at } else { bytes.len() };
    }
    bytes.len()
}

impl Flow {
    /// Length of the next piece, and whether the line goes on after it.
    fn next(&self, at: usize, flush: bool) -> Option<(usize, bool)> {
        let rest = &self.open[at..];
        let head = &rest[..rest.len().min(PIECE_LIMIT + 1)];
        if let Some(end) = head.iter().position(|byte| *byte == b'\n') {
            return Some((end, false));
        }
        if rest.len() > PIECE_LIMIT {
            return Some((whole(&rest[..PIECE_LIMIT]), true));
        }
        (flush && !rest.is_empty()).then_some((rest.len(), true))
    }

    /// Drops all but the end.
    fn trim(&mut self, most_lines: Option<usize>) {
        let mut start = self.open.len().saturating_sub(KEPT);
        if let Some(most) = most_lines {
            let line_feeds = self.open.iter().enumerate().rev();
            let mut line_feeds = line_feeds.filter(|(_, byte)| **byte == b'\n');
            start = start.max(line_feeds.nth(most).map_or(0, |(at, _)| at + 1));
        }
        if start == 0 {
            return;
        }
        // Not within a character.
        let cut = |byte: &u8| matches!(byte, 0x80..=0xbf);
        start += self.open[start..]
            .iter()
            .take(3)
            .take_while(|b| cut(b))
            .count();
        self.dropped.lines += lines(&self.open[..start]) as u64;
        self.dropped.bytes += start as u64;
        self.offset += start as u64;
        self.open.drain(..start);
    }
}

impl Pieces {
    pub fn new(now: Instant) -> Self {
        Self {
            flows: Default::default(),
            second: now,
            pieces: 0,
            bytes: 0,
        }
    }

    /// Takes what was read from a stream, and returns what can leave now.
    pub fn add(&mut self, stream: LogStream, bytes: &[u8], now: Instant) -> Vec<Piece> {
        self.hold(stream, bytes, now);
        self.tick(now)
    }

    /// Takes what was read, and keeps its end until it is known whose it is.
    pub fn hold(&mut self, stream: LogStream, bytes: &[u8], now: Instant) {
        let flow = &mut self.flows[place(stream)];
        flow.open.extend_from_slice(bytes);
        flow.since.get_or_insert(now);
        if flow.open.len() > BYTES_A_SECOND {
            flow.trim(None);
        }
    }

    /// Returns the pieces that are due now.
    pub fn tick(&mut self, now: Instant) -> Vec<Piece> {
        if now.duration_since(self.second) >= SECOND {
            (self.second, self.pieces, self.bytes) = (now, 0, 0);
        }
        let mut left = Vec::new();
        for stream in [LogStream::Stdout, LogStream::Stderr] {
            self.cut(stream, now, false, &mut left);
        }
        left
    }

    /// All that there is of a stream: its end has come.
    pub fn finish(&mut self, stream: LogStream, now: Instant) -> Vec<Piece> {
        let mut left = Vec::new();
        self.cut(stream, now, true, &mut left);
        left
    }

    /// When [`Pieces::tick`] has something to do.
    pub fn due(&self) -> Option<Instant> {
        let spent = self.is_spent();
        let due = |flow: &Flow| {
            if flow.dropped.bytes > 0 || (spent && !flow.open.is_empty()) {
                return Some(self.second + SECOND);
            }
            let since = flow.since.filter(|_| whole(&flow.open) > 0)?;
            Some(since + UNFINISHED)
        };
        self.flows.iter().filter_map(due).min()
    }

    /// Whether everything has left.
    pub fn is_empty(&self) -> bool {
        let empty = |flow: &Flow| flow.open.is_empty() && flow.dropped.bytes == 0;
        self.flows.iter().all(empty)
    }

    /// Bytes of each stream so far.
    pub fn offsets(&self) -> [u64; 2] {
        let end = |flow: &Flow| flow.offset + flow.open.len() as u64;
        [end(&self.flows[0]), end(&self.flows[1])]
    }

    /// Begins anew after so many bytes of each stream. What was held leaves after them.
    pub fn begin(&mut self, offsets: [u64; 2]) {
        for (flow, offset) in self.flows.iter_mut().zip(offsets) {
            flow.offset = offset + flow.dropped.bytes;
        }
    }

    /// Forgets what was held.
    pub fn clear(&mut self) {
        self.flows = Default::default();
    }

    /// These pieces, the last that were cut, could not be sent. They count as dropped.
    pub fn lost(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let dropped = &mut self.flows[place(piece.stream)].dropped;
            match &piece.content {
                Content::Text { bytes, part } => {
                    let line_feed = u64::from(!part);
                    dropped.lines += line_feed;
                    dropped.bytes += bytes.len() as u64 + line_feed;
                }
                Content::Dropped(more) => {
                    dropped.lines += more.lines;
                    dropped.bytes += more.bytes;
                }
            }
        }
    }

    fn is_spent(&self) -> bool {
        self.pieces >= PIECES_A_SECOND || self.bytes >= BYTES_A_SECOND
    }

    fn cut(&mut self, stream: LogStream, now: Instant, finish: bool, left: &mut Vec<Piece>) {
        let mut at = 0;
        let mut over = false;
        loop {
            let spent = self.is_spent();
            let flow = &mut self.flows[place(stream)];
            if spent && !over {
                flow.offset += at as u64;
                flow.open.drain(..at);
                at = 0;
                flow.trim(finish.then_some(KEPT_LINES));
                if !finish {
                    break;
                }
                over = true;
            }
            if flow.dropped.bytes > 0 {
                let dropped = std::mem::take(&mut flow.dropped);
                left.push(Piece {
                    stream,
                    offset: flow.offset - dropped.bytes,
                    content: Content::Dropped(dropped),
                });
                self.pieces += 1;
                continue;
            }
            let waited = |since: Instant| now.duration_since(since) >= UNFINISHED;
            let late = flow.since.is_some_and(waited);
            let mut next = flow.next(at, finish || late);
            if let Some((length, true)) = &mut next
                && !finish
            {
                *length = whole(&flow.open[at..at + *length]);
            }
            let Some((length, part)) = next.filter(|(length, part)| *length > 0 || !part) else {
                break;
            };
            left.push(Piece {
                stream,
                offset: flow.offset + at as u64,
                content: Content::Text {
                    bytes: flow.open[at..at + length].to_vec(),
                    part,
                },
            });
            at += length + usize::from(!part);
            // The rest has come just now, or was cut off for its length.
            flow.since = Some(now);
            self.pieces += 1;
            self.bytes += length + 1;
        }
        let flow = &mut self.flows[place(stream)];
        flow.offset += at as u64;
        flow.open.drain(..at);
        if flow.open.is_empty() {
            flow.since = None;
        }
    }
}

#[cfg(test)]
mod tests;
