//! The JSON lines between a child and a foreign program, over a connection that never blocks.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::TileRange;
use fiec_schemas::series::Number;
use fiec_schemas::surroundings::{Asked, GrantChange, Surroundings};
use fiec_schemas::{BoundaryIndex, ExecutionId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::frames::Shares;
use crate::program::{Capsule, ProgramError};
use crate::reserve::{Reserve, Reserved};

/// Bytes of a line beside σ.
const ROOM: u64 = 1 << 20;
/// Bytes of σ in a line if the manifest declares no `limits.state_bytes`.
const STATE_DEFAULT: u64 = 64 << 20;
/// Most bytes of σ in a line.
const STATE_MOST: u64 = 1 << 30;
const CHUNK: usize = 64 * 1024;

/// A message to the outside, in a program's line.
#[derive(Debug, PartialEq, Deserialize)]
pub struct Emitted {
    name: String,
    /// The message as text.
    #[serde(default)]
    text: Option<String>,
    /// The message in base64.
    #[serde(default)]
    data: Option<String>,
}

/// Emits the messages of a line.
pub fn emit(program: &str, said: &[Emitted], cx: &mut Capsule) -> Result<(), ProgramError> {
    for Emitted { name, text, data } in said {
        match (text, data) {
            (Some(text), None) => cx.emit(name, text.as_bytes())?,
            (None, Some(data)) => {
                let bytes = from_text(data).map_err(|why| {
                    ProgramError::Permanent(format!("{program} emitted {name:?}, but {why}"))
                })?;
                cx.emit(name, &bytes)?;
            }
            _ => {
                return Err(ProgramError::Permanent(format!(
                    "{program} emitted {name:?} with both or neither of \"text\" and \"data\""
                )));
            }
        }
    }
    Ok(())
}

/// Reports the numbers of a capsule.
pub fn report(numbers: &BTreeMap<String, Number>, cx: &mut Capsule) -> Result<(), ProgramError> {
    let mut all = numbers.iter();
    all.try_for_each(|(name, value)| cx.number(name, (*value).into()))
}

/// A line from the program.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Said {
    /// A boundary, with or without σ.
    Boundary {
        /// Boundaries in all, if known.
        #[serde(default)]
        of: Option<BoundaryIndex>,
        /// A short note.
        #[serde(default)]
        note: Option<String>,
        /// σ in base64.
        #[serde(default)]
        state: Option<String>,
        /// Outputs that are complete now.
        #[serde(default)]
        outputs: Vec<String>,
        /// Messages to the outside.
        #[serde(default)]
        emit: Vec<Emitted>,
        /// Numbers of this capsule, by name.
        #[serde(default)]
        numbers: BTreeMap<String, Number>,
    },
    /// The answer to `state`.
    State {
        /// σ in base64.
        state: String,
        /// Outputs that are complete now.
        #[serde(default)]
        outputs: Vec<String>,
    },
    /// The program asks for its surroundings.
    Surroundings,
    /// The program asks for another grant.
    Ask(GrantChange),
    /// The program asks for more memory than its grant.
    Reserve(Reserve),
    /// The answer to `split`: the program has given away these tiles, and σ ends before them.
    Split(TileRange),
    /// The answer to `split`: there is nothing to give away.
    Whole,
    /// The program has completed.
    Completed {
        /// σ in base64, if another execution continues from it.
        #[serde(default)]
        state: Option<String>,
        /// A short result.
        #[serde(default)]
        result: Value,
        /// Outputs that are complete now.
        #[serde(default)]
        outputs: Vec<String>,
        /// Messages to the outside.
        #[serde(default)]
        emit: Vec<Emitted>,
        /// Numbers of this capsule, by name.
        #[serde(default)]
        numbers: BTreeMap<String, Number>,
    },
    /// The program cannot continue.
    Failed {
        /// The reason, for a person.
        reason: String,
        /// Whether a retry is pointless.
        #[serde(default)]
        permanent: bool,
    },
}

impl Said {
    /// Its tag, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Boundary { .. } => "boundary",
            Self::State { .. } => "state",
            Self::Surroundings => "surroundings",
            Self::Ask(_) => "ask",
            Self::Reserve(_) => "reserve",
            Self::Split(_) => "split",
            Self::Whole => "whole",
            Self::Completed { .. } => "completed",
            Self::Failed { .. } => "failed",
        }
    }
}

/// A part to merge.
#[derive(Debug, Serialize)]
pub struct Returned<'a> {
    /// Its first tile.
    pub from: u64,
    /// The tile after its last one.
    pub to: u64,
    /// Its σ in base64; null if the part reached no boundary.
    pub state: Option<&'a str>,
}

/// A line to the program.
#[derive(Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Told<'a> {
    /// The first line.
    Run {
        /// Its parameters.
        params: &'a Value,
        /// The boundary to continue from.
        boundary: Option<BoundaryIndex>,
        /// σ at that boundary, in base64.
        state: Option<&'a str>,
        /// The grant.
        grant: &'a Grant,
        /// The folder of inputs.
        inputs: &'a str,
        /// The folder of the objects that parameters name.
        objects: &'a str,
        /// The folder of outputs.
        outputs: &'a str,
        /// The execution's id.
        execution: Option<ExecutionId>,
        /// How the range is shared, if it may be.
        #[serde(skip_serializing_if = "Option::is_none")]
        spread: Option<Shares>,
        /// A part to merge before anything else.
        #[serde(skip_serializing_if = "Option::is_none")]
        merge: Option<Returned<'a>>,
    },
    /// Continue.
    Go {
        /// If the limit is near: milliseconds that the execution may still compute.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_left_ms: Option<u64>,
    },
    /// Give away the last half of the remaining tiles.
    Split,
    /// Send σ.
    State,
    /// End here. The execution continues elsewhere or later.
    Yield {
        /// The cause.
        cause: &'a str,
    },
    /// The answer to `surroundings`.
    Surroundings(&'a Surroundings),
    /// The answer to `ask`.
    Asked(&'a Asked),
    /// The answer to `reserve`.
    Reserved(&'a Reserved),
    /// Another grant holds.
    Reconfigure {
        /// The new grant.
        grant: &'a Grant,
    },
    /// End. Nothing is kept.
    Cancel,
}

/// Encodes σ for a line.
pub fn to_text(state: &[u8]) -> String {
    STANDARD.encode(state)
}

/// Decodes σ from a line.
///
/// # Errors
/// When it is not base64.
pub fn from_text(text: &str) -> Result<Vec<u8>, String> {
    STANDARD
        .decode(text)
        .map_err(|error| format!("its state is not base64 ({error})"))
}

/// The first characters of a line, for messages.
pub fn shorten(line: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(&line[..line.len().min(320)])
        .chars()
        .take(80)
        .collect();
    format!("{text:?}")
}

/// Longest line for a σ of this many bytes.
pub fn line_limit(state_bytes: Option<u64>) -> usize {
    let state = state_bytes.map_or(STATE_DEFAULT, |bytes| {
        bytes.clamp(STATE_DEFAULT, STATE_MOST)
    });
    // Four characters for three bytes.
    (state.div_ceil(3) * 4 + ROOM) as usize
}

/// A connection of JSON lines.
pub struct Lines {
    stream: UnixStream,
    inbox: Vec<u8>,
    scanned: usize,
    outbox: Vec<u8>,
    limit: usize,
    /// The other end has closed it.
    pub closed: bool,
}

impl Lines {
    /// A connection on this socket. `limit` is the longest line in bytes.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn new(stream: UnixStream, limit: usize) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            inbox: Vec::new(),
            scanned: 0,
            outbox: Vec::new(),
            limit,
            closed: false,
        })
    }

    /// The descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether bytes wait to be written.
    pub fn has_more_to_say(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Queues a line and writes as much as the other end accepts now.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn tell(&mut self, told: &Told<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.outbox, told)?;
        self.outbox.push(b'\n');
        self.flush()
    }

    /// Queues a line that is encoded already, and writes as much as the other end accepts now.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn say(&mut self, line: String) -> io::Result<()> {
        self.outbox.extend_from_slice(line.as_bytes());
        self.outbox.push(b'\n');
        self.flush()
    }

    /// Writes as much as the other end accepts now.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.outbox.len() {
            match self.stream.write(&self.outbox[written..]) {
                Ok(n) => written += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                    ) =>
                {
                    // The lines that it sent before it closed are still to be read.
                    self.outbox.clear();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.outbox.drain(..written);
        if self.outbox.is_empty() && self.outbox.capacity() > CHUNK {
            self.outbox = Vec::new();
        }
        Ok(())
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let at = self.inbox[self.scanned..].iter().position(|b| *b == b'\n');
        let Some(at) = at else {
            self.scanned = self.inbox.len();
            return None;
        };
        let rest = self.inbox.split_off(self.scanned + at + 1);
        let mut line = std::mem::replace(&mut self.inbox, rest);
        line.pop();
        self.scanned = 0;
        Some(line)
    }

    /// Returns the next whole line that has arrived.
    ///
    /// # Errors
    /// Permanent if the line is too long, transient if the socket fails.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, ProgramError> {
        loop {
            if let Some(line) = self.line() {
                return Ok(Some(line));
            }
            if self.inbox.len() > self.limit {
                return Err(ProgramError::Permanent(format!(
                    "a line of over {} bytes that begins with {}; a larger σ needs \
                     limits.state_bytes (up to {STATE_MOST}), state_dir or frames",
                    self.limit,
                    shorten(&self.inbox)
                )));
            }
            if self.closed {
                return Ok(None);
            }
            let begin = self.inbox.len();
            self.inbox.resize(begin + CHUNK, 0);
            let read = self.stream.read(&mut self.inbox[begin..]);
            self.inbox.truncate(begin + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => self.closed = true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.closed = true,
                Err(error) => return Err(ProgramError::transient(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_however_they_are_cut_and_a_long_one_is_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours, 100).unwrap();
        for byte in b"{\"is\":1}\n\nx" {
            assert_eq!(lines.next().unwrap(), None);
            theirs.write_all(&[*byte]).unwrap();
            if *byte == b'\n' {
                assert!(lines.next().unwrap().is_some());
            }
        }
        theirs.write_all(&[b'x'; 200]).unwrap();
        let error = lines.next().unwrap_err();
        assert!(
            error.is_permanent() && error.to_string().contains("over 100 bytes"),
            "{error}"
        );
    }

    #[test]
    fn what_the_other_end_does_not_read_waits_without_blocking() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours, 100).unwrap();
        let cause = "c".repeat(3 << 20);
        lines.tell(&Told::Yield { cause: &cause }).unwrap();
        assert!(lines.has_more_to_say());
        let mut read = Vec::new();
        let mut chunk = vec![0; 1 << 20];
        while lines.has_more_to_say() {
            let n = theirs.read(&mut chunk).unwrap();
            read.extend_from_slice(&chunk[..n]);
            lines.flush().unwrap();
        }
        drop(lines);
        theirs.read_to_end(&mut read).unwrap();
        let said: Value = serde_json::from_slice(&read).unwrap();
        assert_eq!(said["cause"].as_str().unwrap().len(), 3 << 20);
    }
}
