//! What a program of JSON lines says and is told, and a connection that never waits for it.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::TileRange;
use fiec_schemas::surroundings::{Asked, GrantChange, Surroundings};
use fiec_schemas::{BoundaryIndex, ExecutionId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::frames::Shares;
use crate::program::{Capsule, ProgramError};
use crate::reserve::{Reserve, Reserved};

/// Room in a line beside σ.
const ROOM: u64 = 1 << 20;
/// σ that a line may carry where the manifest declares no `limits.state_bytes`.
const STATE_DEFAULT: u64 = 64 << 20;
/// σ that a line may carry at most.
const STATE_MOST: u64 = 1 << 30;
const CHUNK: usize = 64 * 1024;

/// A message to the outside in a program's line.
#[derive(Debug, PartialEq, Deserialize)]
pub struct Emitted {
    name: String,
    /// As text.
    #[serde(default)]
    text: Option<String>,
    /// Or in base64.
    #[serde(default)]
    data: Option<String>,
}

/// Emits what a line says.
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

/// A program's line.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Said {
    /// A boundary; σ may come along.
    Boundary {
        /// Boundaries in all, where known.
        #[serde(default)]
        of: Option<BoundaryIndex>,
        /// A short word.
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
    },
    /// The answer to `state`.
    State {
        /// σ in base64.
        state: String,
        /// Outputs that are complete now.
        #[serde(default)]
        outputs: Vec<String>,
    },
    /// It wants to know where it runs.
    Surroundings,
    /// It asks for another grant.
    Ask(GrantChange),
    /// It asks for more than its grant.
    Reserve(Reserve),
    /// The answer to `split`: it has given these tiles away, and σ ends before them.
    Split(TileRange),
    /// The answer to `split`: there is nothing to give away.
    Whole,
    /// It is done.
    Completed {
        /// σ in base64, where others go on from it.
        #[serde(default)]
        state: Option<String>,
        /// A few words.
        #[serde(default)]
        result: Value,
        /// Outputs that are complete now.
        #[serde(default)]
        outputs: Vec<String>,
        /// Messages to the outside.
        #[serde(default)]
        emit: Vec<Emitted>,
    },
    /// It cannot go on.
    Failed {
        /// Why, for a person.
        reason: String,
        /// Whether trying again is pointless.
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

/// A part that is taken back.
#[derive(Debug, Serialize)]
pub struct Returned<'a> {
    /// Its first tile.
    pub from: u64,
    /// The one behind its last.
    pub to: u64,
    /// Its σ in base64; null where it has reached no boundary.
    pub state: Option<&'a str>,
}

/// What it is told.
#[derive(Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Told<'a> {
    /// The first line.
    Run {
        /// Its parameters.
        params: &'a Value,
        /// The boundary to go on from.
        boundary: Option<BoundaryIndex>,
        /// σ of it, in base64.
        state: Option<&'a str>,
        /// What it may use.
        grant: &'a Grant,
        /// The folder of inputs.
        inputs: &'a str,
        /// The folder of the objects that parameters name.
        objects: &'a str,
        /// The folder of outputs.
        outputs: &'a str,
        /// Which execution.
        execution: Option<ExecutionId>,
        /// How its range is shared, where it may be.
        #[serde(skip_serializing_if = "Option::is_none")]
        spread: Option<Shares>,
        /// A part to take back before anything else.
        #[serde(skip_serializing_if = "Option::is_none")]
        merge: Option<Returned<'a>>,
    },
    /// Go on.
    Go,
    /// Give the last half of what is left away.
    Split,
    /// Send σ.
    State,
    /// End here; the execution goes on elsewhere or later.
    Yield {
        /// Why.
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
        /// It.
        grant: &'a Grant,
    },
    /// End; nothing is kept.
    Cancel,
}

/// σ as it stands in a line.
pub fn to_text(state: &[u8]) -> String {
    STANDARD.encode(state)
}

/// σ from a line.
///
/// # Errors
/// Where it is not base64.
pub fn from_text(text: &str) -> Result<Vec<u8>, String> {
    STANDARD
        .decode(text)
        .map_err(|error| format!("its state is not base64 ({error})"))
}

/// The beginning of a line, for messages.
pub fn shorten(line: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(&line[..line.len().min(320)])
        .chars()
        .take(80)
        .collect();
    format!("{text:?}")
}

/// Longest line for a σ of so many bytes.
pub fn line_limit(state_bytes: Option<u64>) -> usize {
    let state = state_bytes.map_or(STATE_DEFAULT, |bytes| {
        bytes.clamp(STATE_DEFAULT, STATE_MOST)
    });
    // Four characters for three bytes.
    (state.div_ceil(3) * 4 + ROOM) as usize
}

/// A connection.
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
    /// Over this socket; lines are at most so long.
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

    /// To wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether something waits to be written.
    pub fn has_more_to_say(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Says something, as far as the other end takes it now.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn tell(&mut self, told: &Told<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.outbox, told)?;
        self.outbox.push(b'\n');
        self.flush()
    }

    /// Says a line that is written already.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn say(&mut self, line: String) -> io::Result<()> {
        self.outbox.extend_from_slice(line.as_bytes());
        self.outbox.push(b'\n');
        self.flush()
    }

    /// Writes as much as the other end takes now.
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
                    // What it said before it went is still to be read.
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

    /// The next whole line among what has come.
    ///
    /// # Errors
    /// Permanent where it is too long, transient where the socket fails.
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
