//! The frames between an agent and a child: a JSON head and a raw body, over a Unix socket pair
//! whose descriptor the child finds in `FIEC_SOCKET_FD` (3 if unset).
//!
//! ```text
//! u32 LE length of head │ u64 LE length of body │ head (JSON) │ body
//! ```
//!
//! The agent sends one `run` and waits for its one end (`completed`, `failed`, `cancelled`, or a
//! `boundary` whose reason is `yield`) before the next. Only the built-in programs' own child may be
//! sent the next ones ahead, while its runs are short: it computes them one after the other, and
//! other orders mean the present one. Orders that arrive when nothing runs mean nothing.

use std::io::{self, IoSlice, Read, Write};
use std::path::PathBuf;

use fiec_schemas::package::{Grant, Manifest};
use fiec_schemas::programs::TileRange;
use fiec_schemas::surroundings::{Asked, GrantChange, Surroundings};
use fiec_schemas::{BoundaryIndex, CommitPolicy, Digest, Epoch, ExecutionId, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::reserve::{Reserve, Reserved};
pub use crate::shares::{Merge, Shares};

/// Names the descriptor of the socket in a child's environment.
pub const SOCKET_ENV: &str = "FIEC_SOCKET_FD";
/// Names the folder of inputs with relative paths in a child's environment.
pub const DATA_DIR_ENV: &str = "FIEC_DATA_DIR";
/// Names all folders of inputs, `:` between them: no file elsewhere is read for parameters.
pub const INPUT_DIRS_ENV: &str = "FIEC_INPUT_DIRS";
/// Names a folder of the agent's in which a built-in program leaves marks for its next attempt.
pub const RUN_FOLDER_ENV: &str = "FIEC_MARKS_DIR";
/// Bytes before the head.
pub const PREFIX_BYTES: usize = 12;
/// Longest head in bytes; a submission has at most half of it.
pub const HEAD_LIMIT: usize = 1 << 20;
/// Longest body in bytes: 4 GiB of σ and as much again for outputs.
pub const BODY_LIMIT: u64 = 1 << 33;

/// What an agent asks of a child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Order {
    /// Have inputs parsed: a `run` with these parameters will come. Answered by `prepared`.
    Prepare {
        /// The program.
        program: String,
        /// Its parameters.
        params: Value,
        /// Where it is no built-in.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        package: Option<Package>,
        /// The device that the run will be granted: its context is made now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Make the context of this device, for whatever comes. Answered by `prepared`. Only the
    /// built-in programs' own child is asked for that.
    Heat {
        /// Its UUID.
        device: String,
    },
    /// Compute. The body is σ.
    Run(Box<Run>),
    /// Commit the next boundary; the run ends there and the execution goes on elsewhere or later.
    Yield(Yield),
    /// End the run at the next boundary without a commit. A parked run ends where it is.
    Cancel,
    /// Commit the next boundary and wait there for `unpark` or `cancel`. The run is not over.
    Park(Park),
    /// Go on from where it is parked.
    Unpark {
        /// What may be used from now on, where that has changed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grant: Option<Grant>,
    },
    /// Give the last half of the tiles that are left away: the next boundary is committed with
    /// the range that is given, or `whole` is the answer. Only for a run with `spread`.
    Split,
    /// The answer to `reserve`.
    Reserved(Reserved),
    /// The answer to `surroundings`.
    Surroundings(Box<Surroundings>),
    /// The answer to `ask`.
    Asked(Asked),
    /// From the next boundary on another grant holds.
    Reconfigure {
        /// What may be used then.
        grant: Grant,
    },
    /// The answer to `fetch`. The body is the data.
    Data {
        /// Which.
        digest: Digest,
        /// Why there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// Whether asking again is pointless.
        #[serde(default, skip_serializing_if = "is_default")]
        permanent: bool,
    },
    /// A commit is durable.
    Committed {
        /// Its boundary.
        index: BoundaryIndex,
    },
    /// Routine commits by time are at least so far apart.
    Stretch {
        /// In milliseconds.
        interval_ms: u32,
    },
}

/// A program that is not built in, unpacked on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    /// Its folder; never written to.
    pub folder: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
    /// `name@version`, for messages.
    pub program: String,
}

/// Cause and deadline of an order to yield.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Yield {
    /// In a few words; told to programs that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Milliseconds after which it is ended without a boundary; none: it may take its time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u32>,
    /// Not before this boundary; for tests that cut at a certain one. It may come before the
    /// `run` that it is meant for. A program that does not know it yields sooner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<BoundaryIndex>,
}

/// Why an execution is to wait at a boundary, and with what.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Park {
    /// In a few words; told to programs that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// What may be used while it waits: without a device, where what it has there is to go to the
    /// host's memory. None: what it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
}

/// An execution to compute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Which.
    pub execution: ExecutionId,
    /// Under which binding.
    pub epoch: Epoch,
    /// The program.
    pub program: String,
    /// Its parameters.
    pub params: Value,
    /// When to commit.
    pub commit: CommitPolicy,
    /// The boundary to go on from; none where the body is no σ and it begins.
    pub boundary: Option<BoundaryIndex>,
    /// Park at a boundary when a commit is unacknowledged for so long, in milliseconds.
    pub lease_ms: u32,
    /// Routine commits by time are at least so far apart, in milliseconds; 0: no wish.
    #[serde(default)]
    pub interval_ms: u32,
    /// Where the program is no built-in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<Package>,
    /// What may be used.
    #[serde(default, skip_serializing_if = "is_default")]
    pub grant: Grant,
    /// How its range of tiles is shared, where it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Shares>,
    /// A part that has ended, which is taken back before anything else. Its σ stands in the body
    /// behind the run's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Why a boundary is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The commit policy.
    Commit,
    /// A `yield`; the run has ended at this boundary.
    Yield,
    /// A `park`; the execution waits at this boundary.
    Park,
    /// Nothing is left to one whose range is shared: `completed` follows.
    End,
}

/// An output whose bytes are in the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// The program's name for it.
    pub name: String,
    /// Digest of its bytes; none: the agent computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Their number.
    pub bytes: u64,
}

/// Messages that one capsule may emit.
pub const EMITS_LIMIT: usize = 128;
/// Bytes that they may have in all. Twice as much of both waits for a commit at most.
pub const EMIT_BYTES_LIMIT: usize = 256 * 1024;

/// A message to the outside, published once after the commit that carries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emit {
    /// The last part of its subject: letters, digits, `_` and `-`, 1 to 64.
    pub name: String,
    /// The boundary that its capsule led to.
    pub boundary: BoundaryIndex,
    /// Which one of that capsule, from 0.
    pub index: u32,
    /// Its bytes in base64.
    pub data: String,
}

/// A boundary with its σ as the body, and behind it the bytes of the outputs in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BoundaryReport {
    /// Capsules completed.
    pub index: BoundaryIndex,
    /// Digest of σ; none: the agent computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Bytes of σ.
    pub bytes: u64,
    /// When the capsule before it ended.
    pub computed_at: Timestamp,
    /// Microseconds since the report before.
    pub compute_us: u64,
    /// Boundaries in all, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<BoundaryIndex>,
    /// The program's word on where it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Outputs made since the report before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Made>,
    /// Messages emitted since the report before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub emits: Vec<Emit>,
    /// What was split off here: σ ends before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<TileRange>,
    /// σ has what the part of the run's `merge` has done.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merged: bool,
    /// Why.
    pub reason: Reason,
}

/// What a child tells its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Report {
    /// It waits for orders.
    Ready,
    /// The answer to `prepare`.
    Prepared {
        /// Why it failed; a `run` will say so again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The first capsule begins. Left out where the executions before ended within a
    /// millisecond; `completed` says it too.
    Began {
        /// When.
        at: Timestamp,
        /// Whether it knows `park`. Programs in the agent's own child always do.
        #[serde(default, skip_serializing_if = "is_default")]
        parks: bool,
    },
    /// A boundary to be committed.
    Boundary(Box<BoundaryReport>),
    /// Where it stands; at most five a second.
    Progress {
        /// Capsules completed.
        index: BoundaryIndex,
        /// In all, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<BoundaryIndex>,
        /// The program's word.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// It is done. The body is the bytes of the outputs in order.
    Completed {
        /// The program's words.
        #[serde(default, skip_serializing_if = "Value::is_null")]
        result: Value,
        /// Capsules in all.
        capsules: BoundaryIndex,
        /// When the first capsule of this run began.
        computing_since: Timestamp,
        /// When the last one ended.
        computed_until: Timestamp,
        /// Outputs made since the last report of a boundary.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        outputs: Vec<Made>,
        /// Messages emitted since then.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        emits: Vec<Emit>,
    },
    /// Data is needed, and nothing goes on before it is there. Answered by `data`; orders may
    /// come before that.
    Fetch {
        /// Which.
        digest: Digest,
        /// How many bytes it is expected to have; 0: not known.
        #[serde(default)]
        bytes: u64,
    },
    /// It is parked, and has moved what it was to move.
    Aside,
    /// There is nothing to split off: less than two tiles are left, or it cannot be split.
    Whole,
    /// It needs more than its grant, and waits for the answer: `reserved`; orders may come before
    /// that.
    Reserve(Reserve),
    /// It wants to know where it is, and waits for the answer: `surroundings`.
    Surroundings,
    /// It wants another grant of its node, and waits for the answer: `asked`.
    Ask(GrantChange),
    /// It cannot complete.
    Failed {
        /// Whether trying again is pointless.
        permanent: bool,
        /// Why, for a person.
        reason: String,
    },
    /// A `cancel` has ended the run.
    Cancelled,
}

impl Report {
    /// True for the one report that ends a run.
    pub fn ends_run(&self) -> bool {
        match self {
            Self::Completed { .. } | Self::Failed { .. } | Self::Cancelled => true,
            Self::Boundary(boundary) => boundary.reason == Reason::Yield,
            _ => false,
        }
    }
}

/// Bytes that are no frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A length over its limit.
    #[error("frame with a {what} of {found} bytes, over the limit of {limit}")]
    TooLarge {
        /// Head or body.
        what: &'static str,
        /// What the prefix says.
        found: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A head that says nothing known.
    #[error("frame with a head that cannot be read: {0}")]
    Head(#[from] serde_json::Error),
    /// The other end is gone, or the socket failed.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
}

/// The prefix and head of a frame whose body has `body` bytes.
///
/// # Errors
/// When head or body are over their limits.
pub fn head<T: Serialize>(message: &T, body: u64) -> Result<Vec<u8>, FrameError> {
    let mut out = Vec::with_capacity(256);
    out.resize(PREFIX_BYTES, 0);
    serde_json::to_writer(&mut out, message)?;
    let length = out.len() - PREFIX_BYTES;
    check(length as u64, body)?;
    out[..4].copy_from_slice(&(length as u32).to_le_bytes());
    out[4..PREFIX_BYTES].copy_from_slice(&body.to_le_bytes());
    Ok(out)
}

/// The lengths of head and body that a prefix announces.
///
/// # Errors
/// When one is over its limit.
pub fn lengths(prefix: &[u8; PREFIX_BYTES]) -> Result<(usize, u64), FrameError> {
    let [a, b, c, d, body @ ..] = *prefix;
    let (head, body) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(body));
    check(head.into(), body)?;
    Ok((head as usize, body))
}

fn check(head: u64, body: u64) -> Result<(), FrameError> {
    if head > HEAD_LIMIT as u64 {
        return Err(FrameError::TooLarge {
            what: "head",
            found: head,
            limit: HEAD_LIMIT as u64,
        });
    }
    if body > BODY_LIMIT {
        return Err(FrameError::TooLarge {
            what: "body",
            found: body,
            limit: BODY_LIMIT,
        });
    }
    Ok(())
}

/// Reads a head.
///
/// # Errors
/// When it says nothing known.
pub fn parse<T: DeserializeOwned>(head: &[u8]) -> Result<T, FrameError> {
    Ok(serde_json::from_slice(head)?)
}

/// Writes a frame whose body is these pieces, in as few calls as the socket allows.
///
/// # Errors
/// When a limit is exceeded or the socket fails.
pub fn write<T: Serialize>(
    mut to: impl Write,
    message: &T,
    body: &[&[u8]],
) -> Result<(), FrameError> {
    let head = head(message, body.iter().map(|b| b.len() as u64).sum())?;
    if body.is_empty() {
        return Ok(to.write_all(&head)?);
    }
    let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(body.len() + 1);
    slices.push(IoSlice::new(&head));
    slices.extend(
        body.iter()
            .filter(|b| !b.is_empty())
            .map(|b| IoSlice::new(b)),
    );
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match to.write_vectored(rest) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Ok(n) => IoSlice::advance_slices(&mut rest, n),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Of a body so much is read at once, into memory that was taken for it.
const WHOLE_BYTES: u64 = 1 << 20;

/// Reads a frame; none at a clean end.
///
/// # Errors
/// When the bytes are no frame or the socket fails.
pub fn read<T: DeserializeOwned>(mut from: impl Read) -> Result<Option<(T, Vec<u8>)>, FrameError> {
    let mut prefix = [0; PREFIX_BYTES];
    let found = loop {
        match from.read(&mut prefix) {
            Ok(0) => return Ok(None),
            Ok(found) => break found,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    };
    from.read_exact(&mut prefix[found..])?;
    let (head, body) = lengths(&prefix)?;
    let mut text = vec![0; head];
    from.read_exact(&mut text)?;
    let message = parse(&text)?;
    // In one piece where that is no risk; otherwise the buffer grows with what really arrives.
    let mut bytes = vec![0; body.min(WHOLE_BYTES) as usize];
    from.read_exact(&mut bytes)?;
    let rest = body - bytes.len() as u64;
    bytes.reserve(rest.min(1 << 26) as usize);
    let found = from.take(rest).read_to_end(&mut bytes)? as u64;
    if found < rest {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(Some((message, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_survives_the_wire() {
        let mut wire = Vec::new();
        write(
            &mut wire,
            &Order::Committed { index: 7 },
            &[b"ab", b"", b"c"],
        )
        .unwrap();
        write(&mut wire, &Order::Yield(Yield::default()), &[]).unwrap();
        let mut from = &wire[..];
        let (order, body) = read::<Order>(&mut from).unwrap().unwrap();
        assert_eq!(
            (order, &body[..]),
            (Order::Committed { index: 7 }, &b"abc"[..])
        );
        assert_eq!(
            read::<Order>(&mut from).unwrap().unwrap().0,
            Order::Yield(Yield::default())
        );
        assert!(read::<Order>(&mut from).unwrap().is_none());
    }

    #[test]
    fn fields_that_came_later_may_be_left_out() {
        let order: Order = serde_json::from_str(r#"{"is":"yield"}"#).unwrap();
        assert_eq!(order, Order::Yield(Yield::default()));
        assert_eq!(serde_json::to_string(&order).unwrap(), r#"{"is":"yield"}"#);
        let order: Order =
            serde_json::from_str(r#"{"is":"prepare","program":"cg@1","params":{}}"#).unwrap();
        assert!(matches!(&order, Order::Prepare { package: None, .. }));
        let report: Report = serde_json::from_str(
            r#"{"is":"boundary","index":1,"bytes":0,"compute_us":5,"reason":"commit",
                "computed_at":"2026-05-01T12:00:00.000001Z","outputs":[{"name":"a","bytes":2}]}"#,
        )
        .unwrap();
        let Report::Boundary(report) = report else {
            panic!("{report:?}")
        };
        assert_eq!((report.digest, report.outputs[0].digest), (None, None));
    }

    #[test]
    fn damaged_frames_are_errors() {
        let mut wire = Vec::new();
        write(&mut wire, &Order::Yield(Yield::default()), &[b"abc"]).unwrap();
        for cut in 1..wire.len() {
            assert!(read::<Order>(&wire[..cut]).is_err(), "cut at {cut}");
        }
        let mut long_head = wire.clone();
        long_head[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(
            read::<Order>(&long_head[..]),
            Err(FrameError::TooLarge { what: "head", .. })
        ));
        let mut long_body = wire.clone();
        long_body[4..12].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(
            read::<Order>(&long_body[..]),
            Err(FrameError::TooLarge { what: "body", .. })
        ));
        let mut nonsense = wire;
        nonsense[PREFIX_BYTES] = b'!';
        assert!(matches!(
            read::<Order>(&nonsense[..]),
            Err(FrameError::Head(_))
        ));
    }
}
