//! The frames between an agent and a child: a JSON head and a raw body. They use a Unix socket
//! pair. The child finds its descriptor in `FIEC_SOCKET_FD` (3 if unset).
//!
//! ```text
//! u32 LE length of head │ u64 LE length of body │ head (JSON) │ body
//! ```
//!
//! The agent sends one `run` and waits for its end before the next. The end is `completed`,
//! `failed`, `cancelled`, or a `boundary` whose reason is `yield`. Only the child for built-in
//! programs may receive further runs ahead, while its runs are short. It computes them one after
//! the other, and other orders apply to the present one. Orders that arrive while nothing runs are
//! ignored.

use std::io::{self, IoSlice, Read, Write};
use std::path::PathBuf;

use fiec_schemas::package::{Grant, Manifest};
use fiec_schemas::programs::TileRange;
use fiec_schemas::series::Series;
use fiec_schemas::submission::FieldError;
use fiec_schemas::surroundings::{Asked, GrantChange, Surroundings};
use fiec_schemas::{BoundaryIndex, CommitPolicy, Digest, Epoch, ExecutionId, Fault, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::launch::Values;
use crate::reserve::{Reserve, Reserved};
use crate::room::NoRoom;
pub use crate::shares::{Merge, Shares};

/// Names the descriptor of the socket in a child's environment.
pub const SOCKET_ENV: &str = "FIEC_SOCKET_FD";
/// Names the folder of inputs with relative paths in a child's environment.
pub const DATA_DIR_ENV: &str = "FIEC_DATA_DIR";
/// Names all folders of inputs, separated by `:`. Parameters cannot name a file elsewhere.
pub const INPUT_DIRS_ENV: &str = "FIEC_INPUT_DIRS";
/// Bytes before the head.
pub const PREFIX_BYTES: usize = 12;
/// Longest head in bytes. A submission takes at most half of it.
pub const HEAD_LIMIT: usize = 1 << 20;
/// Longest body in bytes: 4 GiB of σ and as much for outputs.
pub const BODY_LIMIT: u64 = 1 << 33;

/// An order from an agent to a child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Order {
    /// Parse inputs: a `run` with these parameters will come. Answered by `prepared`.
    Prepare {
        /// The program.
        program: String,
        /// Its parameters.
        params: Value,
        /// The package, unless the program is built in.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        package: Option<Package>,
        /// The device that the run will be granted. Its context is made now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Make the context of this device for any later run. Answered by `prepared`. Only the child
    /// for built-in programs receives it.
    Heat {
        /// Its UUID.
        device: String,
    },
    /// Compute. The body is σ.
    Run(Box<Run>),
    /// Commit the next boundary and end the run there. The execution continues elsewhere or later.
    Yield(Yield),
    /// End the run at the next boundary without a commit. A parked run ends where it is.
    Cancel,
    /// Commit the next boundary and wait there for `unpark` or `cancel`. The run does not end.
    Park(Park),
    /// Continue a parked run.
    Unpark {
        /// The grant from now on, if it has changed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grant: Option<Grant>,
    },
    /// Give away the last half of the remaining tiles. The next boundary is committed with the
    /// range that is given, or the answer is `whole`. Only for a run with `spread`.
    Split,
    /// The answer to `reserve`.
    Reserved(Reserved),
    /// The answer to `surroundings`.
    Surroundings(Box<Surroundings>),
    /// The answer to `ask`.
    Asked(Asked),
    /// Apply another grant from the next boundary on.
    Reconfigure {
        /// The new grant.
        grant: Grant,
    },
    /// The time that the execution may compute will soon be over. Only for a program whose `began`
    /// says `limits`.
    Limit {
        /// Milliseconds of computing until then.
        left_ms: u64,
    },
    /// The answer to `fetch`. The body is the data.
    Data {
        /// Its digest.
        digest: Digest,
        /// The reason if there is no data.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// Whether a retry is pointless.
        #[serde(default, skip_serializing_if = "is_default")]
        permanent: bool,
    },
    /// A commit is durable.
    Committed {
        /// Its boundary.
        index: BoundaryIndex,
    },
    /// Keep routine commits by time at least this far apart.
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
    /// Its manifest.
    pub manifest: Manifest,
    /// `name@version`, for messages.
    pub program: String,
    /// Variables of its environment, unless it is a process of its own, which has them already.
    #[serde(default, skip_serializing_if = "Values::is_empty")]
    pub values: Values,
}

/// Cause and deadline of an order to yield.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Yield {
    /// A few words, passed to programs that accept them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Milliseconds after which the run is ended without a boundary. None means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u32>,
    /// The earliest boundary to yield at, for tests that cut at a certain one. The order may come
    /// before its `run`. A program that ignores this field yields sooner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<BoundaryIndex>,
}

/// Cause and grant of an order to park.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Park {
    /// A few words, passed to programs that accept them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The grant while the execution is parked. A grant without a device moves device data to the
    /// host's memory. None keeps the present grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
}

/// An execution to compute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Its id.
    pub execution: ExecutionId,
    /// The epoch of its binding.
    pub epoch: Epoch,
    /// The program.
    pub program: String,
    /// Its parameters.
    pub params: Value,
    /// The commit policy.
    pub commit: CommitPolicy,
    /// The boundary to continue from. None means that the execution starts and the body is no σ.
    pub boundary: Option<BoundaryIndex>,
    /// Park at a boundary if a commit is unacknowledged for this many milliseconds.
    pub lease_ms: u32,
    /// Least interval of routine commits by time, in milliseconds. 0 means no limit.
    #[serde(default)]
    pub interval_ms: u32,
    /// The package, unless the program is built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<Package>,
    /// The grant.
    #[serde(default, skip_serializing_if = "is_default")]
    pub grant: Grant,
    /// How the range of tiles is shared, if it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Shares>,
    /// A part that has ended, to be merged before anything else. Its σ follows the run's own in the
    /// body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// Crashes of the execution so far, on all nodes. Only built-in programs receive it: a result
    /// must not depend on attempts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub crashes: u64,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Reason of a boundary report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The commit policy asks for it.
    Commit,
    /// A `yield`: the run has ended at this boundary.
    Yield,
    /// A `park`: the execution waits at this boundary.
    Park,
    /// A run with a shared range has nothing left to compute: `completed` follows.
    End,
}

/// An output whose bytes are in the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// The program's name for it.
    pub name: String,
    /// Digest of its bytes. None means that the agent computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Their number.
    pub bytes: u64,
}

/// Messages that one capsule may emit.
pub const EMITS_LIMIT: usize = 128;
/// Bytes of all messages that one capsule may emit. At most twice as much of both waits for a
/// commit.
pub const EMIT_BYTES_LIMIT: usize = 256 * 1024;

/// A message to the outside. It is published once, after the commit that carries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emit {
    /// The last part of its subject: 1 to 64 letters, digits, `_` or `-`.
    pub name: String,
    /// The boundary that ends its capsule.
    pub boundary: BoundaryIndex,
    /// Its number within the capsule, from 0.
    pub index: u32,
    /// Its bytes in base64.
    pub data: String,
}

/// A boundary. The body is σ, followed by the bytes of the outputs in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BoundaryReport {
    /// Capsules completed.
    pub index: BoundaryIndex,
    /// Digest of σ. None means that the agent computes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Bytes of σ.
    pub bytes: u64,
    /// End of the last capsule.
    pub computed_at: Timestamp,
    /// Microseconds since the last report.
    pub compute_us: u64,
    /// Boundaries in all, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<BoundaryIndex>,
    /// The program's note on its progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Outputs made since the last report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Made>,
    /// Messages emitted since the last report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub emits: Vec<Emit>,
    /// Numbers reported since the last report.
    #[serde(default, skip_serializing_if = "Series::is_empty")]
    pub numbers: Series,
    /// The range that was split off here. σ ends before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<TileRange>,
    /// σ contains the work of the part in the run's `merge`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merged: bool,
    /// Why the boundary is reported.
    pub reason: Reason,
}

/// A report from a child to its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Report {
    /// The child waits for orders.
    Ready,
    /// The answer to `prepare`.
    Prepared {
        /// The error, if parsing failed. A `run` will report it again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The first capsule starts. Left out if the executions before ended within a millisecond;
    /// `completed` states the time, too.
    Began {
        /// Start of the first capsule.
        at: Timestamp,
        /// Whether the program supports `park`. Built-in programs always do.
        #[serde(default, skip_serializing_if = "is_default")]
        parks: bool,
        /// Whether the program knows the order `limit`. Built-in programs always do.
        #[serde(default, skip_serializing_if = "is_default")]
        limits: bool,
    },
    /// A boundary to commit.
    Boundary(Box<BoundaryReport>),
    /// The progress, at most five times a second.
    Progress {
        /// Capsules completed.
        index: BoundaryIndex,
        /// Boundaries in all, if known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<BoundaryIndex>,
        /// The program's note.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// The program has completed. The body has the bytes of the outputs in order.
    Completed {
        /// The program's result.
        #[serde(default, skip_serializing_if = "Value::is_null")]
        result: Value,
        /// Capsules in all.
        capsules: BoundaryIndex,
        /// Start of the first capsule of this run.
        computing_since: Timestamp,
        /// End of the last capsule.
        computed_until: Timestamp,
        /// Outputs made since the last boundary report.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        outputs: Vec<Made>,
        /// Messages emitted since the last boundary report.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        emits: Vec<Emit>,
        /// Numbers reported since the last boundary report.
        #[serde(default, skip_serializing_if = "Series::is_empty")]
        numbers: Series,
    },
    /// The capsule needs data and waits for the answer, `data`. Other orders may come first.
    Fetch {
        /// Digest of the data.
        digest: Digest,
        /// Expected number of bytes; 0 if it is not known.
        #[serde(default)]
        bytes: u64,
    },
    /// The run is parked, and its device data has been moved.
    Aside,
    /// The answer to `split`: less than two tiles are left, or the program cannot split.
    Whole,
    /// The capsule needs more than its grant and waits for the answer, `reserved`. Other orders may
    /// come first.
    Reserve(Reserve),
    /// The capsule asks for its surroundings and waits for the answer, `surroundings`.
    Surroundings,
    /// The capsule asks its node for another grant and waits for the answer, `asked`.
    Ask(GrantChange),
    /// The run cannot complete.
    Failed {
        /// Whether a retry is pointless.
        permanent: bool,
        /// The reason, for a person.
        reason: String,
        /// The fault, if the adaptor knows it. A worker ignores it from a package that speaks frames
        /// itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<Box<Fault>>,
    },
    /// A `cancel` ended the run.
    Cancelled,
}

impl Report {
    /// Whether this report ends a run.
    pub fn ends_run(&self) -> bool {
        match self {
            Self::Completed { .. } | Self::Failed { .. } | Self::Cancelled => true,
            Self::Boundary(boundary) => boundary.reason == Reason::Yield,
            _ => false,
        }
    }
}

/// An error while reading or writing a frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A length over its limit.
    #[error("frame with a {what} of {found} bytes, over the limit of {limit}")]
    TooLarge {
        /// Head or body.
        what: &'static str,
        /// The length in the prefix.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// More bytes than the run has room for.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// A body that its report does not describe.
    #[error("a body of {body} bytes where the report describes {described}")]
    Body {
        /// The length in the prefix.
        body: u64,
        /// Bytes of σ and outputs that the report describes.
        described: u64,
    },
    /// A head of no known form.
    #[error("frame with a head that cannot be read: {0}")]
    Head(#[from] serde_json::Error),
    /// A head with a value that cannot be kept.
    #[error("frame with a head that cannot be kept: {0}")]
    Value(#[from] FieldError),
    /// The other end is gone, or the socket failed.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
}

/// Encodes the prefix and head of a frame whose body has `body` bytes.
///
/// # Errors
/// When head or body exceed their limits.
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

/// Reads the lengths of head and body from a prefix.
///
/// # Errors
/// When one exceeds its limit.
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

/// Parses a head.
///
/// # Errors
/// When its form is not known.
pub fn parse<T: DeserializeOwned>(head: &[u8]) -> Result<T, FrameError> {
    Ok(serde_json::from_slice(head)?)
}

/// Writes a frame whose body consists of these pieces, in as few calls as the socket allows.
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

/// Bytes of a body that are read at once, into memory allocated for them.
const WHOLE_BYTES: u64 = 1 << 20;

/// Reads a frame. Returns none at a clean end.
///
/// # Errors
/// When the bytes are no frame, or the socket fails.
pub fn read<T: DeserializeOwned>(from: impl Read) -> Result<Option<(T, Vec<u8>)>, FrameError> {
    read_if(from, |_, _| Ok(()))
}

/// As [`read`]. `admits` sees the message and the length of its body before the body is read.
///
/// # Errors
/// Those of [`read`] and of `admits`.
pub fn read_if<T: DeserializeOwned>(
    mut from: impl Read,
    admits: impl FnOnce(&T, u64) -> Result<(), FrameError>,
) -> Result<Option<(T, Vec<u8>)>, FrameError> {
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
    admits(&message, body)?;
    let mut bytes = vec![0; body.min(WHOLE_BYTES) as usize];
    from.read_exact(&mut bytes)?;
    let rest = body - bytes.len() as u64;
    // Of memory that is allocated here, only as much is used as bytes arrive. Where so much cannot
    // be had, the buffer grows with them.
    if usize::try_from(rest).map_or(true, |rest| bytes.try_reserve_exact(rest).is_err()) {
        bytes.reserve(rest.min(1 << 26) as usize);
    }
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
