//! What a child has printed and is not published yet, and whose it is.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use fiec_schemas::limits::STDERR_TAIL_LIMIT;
use fiec_schemas::messages::LogStream;
use fiec_schemas::{BoundaryIndex, Epoch, ExecutionId, Tenant, subjects};

use super::pieces::{Piece, Pieces};

#[derive(Debug, Clone)]
pub struct Source {
    pub tenant: Tenant,
    pub execution: ExecutionId,
    pub epoch: Epoch,
}

impl Source {
    pub fn subject(&self) -> String {
        subjects::log(&self.tenant, self.execution)
    }
}

/// Whose the output is.
#[derive(Debug)]
pub enum Owner {
    /// The child is new: what it says at its start belongs to its first execution.
    First,
    /// The child is idle, or computes nothing that has a log.
    Nobody,
    Execution(Source),
    /// The run has yielded. What the program prints on its way out still belongs to it, until then.
    Leaving {
        source: Source,
        until: Instant,
    },
}

impl Owner {
    fn source(&self) -> Option<&Source> {
        match self {
            Self::Execution(source) | Self::Leaving { source, .. } => Some(source),
            Self::First | Self::Nobody => None,
        }
    }
}

#[derive(Debug)]
pub struct State {
    pub owner: Owner,
    /// The last boundary, for the pieces after it.
    pub boundary: BoundaryIndex,
    /// The tail of stderr, for a crash report.
    pub tail: Vec<u8>,
    pub pieces: Pieces,
    pub pipes: Vec<(Arc<OwnedFd>, LogStream)>,
    pub printed: bool,
}

/// What a read found.
pub enum Found {
    Bytes,
    Nothing,
    End,
}

impl State {
    /// Reads a pipe once and cuts what came.
    pub fn read(
        &mut self,
        stream: LogStream,
        chunk: &mut [u8],
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> (Found, Vec<Piece>) {
        let now = Instant::now();
        let found = match read(chunk) {
            Ok(0) => return (Found::End, self.finish(stream, now)),
            Ok(found) => &chunk[..found],
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => {
                    return (Found::Nothing, Vec::new());
                }
                _ => return (Found::End, self.finish(stream, now)),
            },
        };
        self.printed = true;
        if let Owner::Leaving { until, .. } = self.owner
            && now > until
        {
            self.owner = Owner::Nobody;
            self.pieces.clear();
        }
        if stream == LogStream::Stderr {
            let new = &found[found.len().saturating_sub(STDERR_TAIL_LIMIT)..];
            self.tail.extend_from_slice(new);
            let excess = self.tail.len().saturating_sub(STDERR_TAIL_LIMIT);
            self.tail.drain(..excess);
        }
        let pieces = match self.owner {
            Owner::Execution(_) | Owner::Leaving { .. } => self.pieces.add(stream, found, now),
            Owner::First => {
                self.pieces.hold(stream, found, now);
                Vec::new()
            }
            Owner::Nobody => Vec::new(),
        };
        (Found::Bytes, pieces)
    }

    pub fn finish(&mut self, stream: LogStream, now: Instant) -> Vec<Piece> {
        match self.owner.source() {
            Some(_) => self.pieces.finish(stream, now),
            None => Vec::new(),
        }
    }

    /// Reads what the pipes hold now, and cuts all of it.
    pub fn rest(&mut self) -> Vec<Piece> {
        let mut pieces = self.read_all(&mut [0; 4 * 1024]);
        let now = Instant::now();
        pieces.extend(self.finish(LogStream::Stdout, now));
        pieces.extend(self.finish(LogStream::Stderr, now));
        pieces
    }

    pub fn tick(&mut self, now: Instant) -> Vec<Piece> {
        match self.owner.source() {
            Some(_) => self.pieces.tick(now),
            None => Vec::new(),
        }
    }

    pub fn due(&self) -> Option<Instant> {
        self.owner.source().and_then(|_| self.pieces.due())
    }

    /// Whether nothing waits in the pipes or in pieces.
    pub fn is_empty(&self) -> bool {
        let empty =
            |(pipe, _): &(Arc<OwnedFd>, _)| matches!(rustix::io::ioctl_fionread(pipe), Ok(0));
        self.pieces.is_empty() && self.pipes.iter().all(empty)
    }

    /// Reads what the pipes hold now, and no more: a program may go on to print.
    pub fn read_all(&mut self, chunk: &mut [u8]) -> Vec<Piece> {
        let mut all = Vec::new();
        for (pipe, stream) in self.pipes.clone() {
            let mut left = rustix::io::ioctl_fionread(&pipe).unwrap_or(0);
            while left > 0 {
                let most = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let (found, pieces) = self.read(stream, &mut chunk[..most], |chunk| {
                    Ok(rustix::io::read(&pipe, chunk)?)
                });
                all.extend(pieces);
                match found {
                    Found::Bytes => left = left.saturating_sub(most as u64),
                    Found::Nothing | Found::End => break,
                }
            }
        }
        all
    }

    /// To whom and where pieces go that were cut just now.
    pub fn source(&self) -> Option<(Source, BoundaryIndex)> {
        let source = self.owner.source()?;
        Some((source.clone(), self.boundary))
    }
}
