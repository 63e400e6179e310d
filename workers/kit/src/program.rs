//! The program contract: one trait that a program implements. A run time owns the loop around it.

use std::any::Any;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_kernels::device::{Devices, NoDevices};
use fiec_schemas::ids::check_emit_name;
use fiec_schemas::limits::RESULT_LIMIT;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::TileRange;
use fiec_schemas::series::Waiting;
use fiec_schemas::{BoundaryIndex, Digest, ExecutionId, Fault, FaultKind};
use serde_json::Value;

use crate::beneath::{Folder, Links, is_led_away};
use crate::frames::{EMIT_BYTES_LIMIT, EMITS_LIMIT, Emit};
use crate::port::Wishes;
use crate::start::NotStarted;

/// Bytes of a ledger message's header that outputs may take. If they take as many, a commit is due:
/// the message has to fit a header.
const NAMED_BYTES: usize = 2 * 1024;
/// Bytes that an output takes there beside its name: digest, size, and JSON around them.
const OUTPUT_BYTES: usize = 110;
/// Parsed inputs that a process keeps. The least recently used one is evicted.
const INPUTS_LIMIT: usize = 2;

/// Why a program cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// A retry fails the same way: bad input, a broken rule. The text names the file, line or
    /// field, and the rule.
    #[error("{0}")]
    Permanent(String),
    /// A retry may succeed: a file system that did not answer, a refused thread.
    #[error("{0}")]
    Transient(String),
    /// A fault that decides by its kind who it is charged to: see [`Fault`].
    #[error("{words}")]
    Faulty {
        /// The fault.
        fault: Box<Fault>,
        /// Details, for a person.
        words: String,
    },
}

/// Checks that a result is not too large for a report.
pub(crate) fn check_result(result: &Value) -> Result<(), ProgramError> {
    // Only strings, arrays and objects can be large.
    if !(result.is_string() || result.is_array() || result.is_object()) {
        return Ok(());
    }
    let size = result.to_string().len();
    if size <= RESULT_LIMIT {
        return Ok(());
    }
    Err(ProgramError::Permanent(format!(
        "the result has {size} bytes; at most {RESULT_LIMIT} are allowed: make it an output"
    )))
}

impl From<NotStarted> for ProgramError {
    fn from(error: NotStarted) -> Self {
        let words = error.to_string();
        Self::Faulty {
            fault: Box::new(error.fault),
            words,
        }
    }
}

impl ProgramError {
    /// For `map_err`: an error that a retry does not cure.
    pub fn permanent(error: impl std::fmt::Display) -> Self {
        Self::Permanent(error.to_string())
    }

    /// For `map_err`: an error that a retry may cure.
    pub fn transient(error: impl std::fmt::Display) -> Self {
        Self::Transient(error.to_string())
    }

    /// For `map_err`: an error of the file system. A full disk is the node's fault.
    pub fn of_files(what: &str, path: &Path, error: &io::Error) -> Self {
        let words = format!("cannot {what} {}: {error}", path.display());
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Faulty {
                fault: Box::new(Fault::DiskFull),
                words,
            },
            _ => Self::Transient(words),
        }
    }

    /// Whether a retry is pointless.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Permanent(_) => true,
            Self::Transient(_) => false,
            Self::Faulty { fault, .. } => fault.kind() == FaultKind::BrokenPackage,
        }
    }

    /// The fault, if it is a certain one.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Permanent(_) | Self::Transient(_) => None,
            Self::Faulty { fault, .. } => Some(fault),
        }
    }
}

/// σ: the state that suffices to continue from a boundary on any node, and its encoding.
pub trait State: Sized + Send {
    /// Moves data out of the state with a commit, as [`crate::Pages`] does. The run time calls it
    /// at a boundary that it commits, before [`State::encode`]. It must not change the encoded
    /// bytes.
    ///
    /// # Errors
    /// When the data cannot be moved.
    fn settle(&mut self, _cx: &mut Capsule) -> Result<(), ProgramError> {
        Ok(())
    }

    /// Appends the state's bytes. Equal states give equal bytes, on every machine.
    fn encode(&self, out: &mut Vec<u8>);

    /// Approximate number of bytes that [`State::encode`] appends, or 0 for a small state. The
    /// default commit policy uses it to delay the first commit of a large state as long as later
    /// ones.
    fn size_hint(&self) -> usize {
        0
    }

    /// Reads a state from its bytes.
    ///
    /// # Errors
    /// When the bytes are no state of this program.
    fn decode(bytes: &[u8]) -> Result<Self, ProgramError>;
}

/// The end of a capsule. Yielding is not among them: the run time yields, at a boundary.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// The state is complete, and there is more to do.
    Boundary,
    /// Nothing is left to do.
    Complete {
        /// A short result, as JSON.
        result: Value,
    },
}

/// The progress of a program, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Boundaries in all, if the program knows.
    pub of: Option<BoundaryIndex>,
    /// A short note.
    pub note: Option<String>,
}

/// A computation in capsules. The state holds everything that a later capsule needs. The value
/// itself holds only parameters, parsed inputs and scratch. It may serve several executions with
/// the same parameters.
pub trait Program: Sized + Send {
    /// σ.
    type State: State;

    /// Reads and checks parameters and inputs.
    ///
    /// # Errors
    /// When they break a rule.
    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError>;

    /// Returns the state before the first capsule.
    ///
    /// # Errors
    /// When there is none.
    fn initial(&mut self) -> Result<Self::State, ProgramError>;

    /// Computes from one boundary to the next.
    ///
    /// # Errors
    /// When the next boundary cannot be reached. The state is then not used any more.
    fn capsule(&mut self, state: &mut Self::State, cx: &mut Capsule) -> Result<Step, ProgramError>;

    /// Reports the progress. Called a few times a second at most.
    fn progress(&self, _state: &Self::State) -> Progress {
        Progress::default()
    }

    /// Applies a grant. Called before the first capsule, and again at a boundary after the grant
    /// has changed. It changes the speed, never the bits.
    ///
    /// # Errors
    /// When the program cannot continue with this grant.
    fn configure(&mut self, _grant: &Grant) -> Result<(), ProgramError> {
        Ok(())
    }

    /// Says that the time that the execution may compute (`limit.computed_s`) will soon be over.
    /// Called once, at a boundary. `left`: the time that it may still compute. The program may say
    /// so, or emit a message; the state may not depend on it.
    fn near_limit(&mut self, _left: Duration) {}

    /// Copies back the parts of the state that are kept elsewhere between boundaries, as in the
    /// memory of a device. Called before the state is encoded, and before the grant changes.
    ///
    /// # Errors
    /// When a part cannot be read back.
    fn read_back(&mut self, _state: &mut Self::State) -> Result<(), ProgramError> {
        Ok(())
    }

    /// Gives away the last half of the remaining tiles, so that another execution computes them.
    /// From then on the state ends before that half. Called at a boundary, which is then committed.
    /// Returns none if less than two tiles are left ([`TileRange::last_half`]), or if the program
    /// cannot share its range.
    fn split(&mut self, _state: &mut Self::State) -> Option<TileRange> {
        None
    }

    /// Takes back a range that was given away. Called when nothing else is left; the range begins
    /// where the state ends. It is a capsule: it appends the part's work to the state, and leaves
    /// the rest of the range to compute. `part` is the part's last σ, or none if the part reached
    /// no boundary. After all merges the state must be that of an undisturbed run, bit by bit. If
    /// the merge completes the program, the state has to be whole without [`Program::read_back`].
    ///
    /// # Errors
    /// Permanent if the program does not share its range, or if the part does not belong to this
    /// state.
    fn merge(
        &mut self,
        _state: &mut Self::State,
        _range: TileRange,
        _part: Option<Self::State>,
        _cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        Err(does_not_spread())
    }

    /// Ends the run: releases resources outside this process that the program or its grant held,
    /// such as a device. The next run calls [`Program::configure`] again. `warm` means that the run
    /// ended by itself: a similar run may follow, so costly resources may be kept for it.
    fn let_go(&mut self, _warm: bool) {}
}

/// The error of a merge into a program that cannot share its range.
pub(crate) fn does_not_spread() -> ProgramError {
    ProgramError::Permanent(
        "the program does not spread: it cannot take back a part of its range".to_owned(),
    )
}

/// Bytes by their digest: outputs of earlier capsules, and pushed objects.
pub trait Fetch {
    /// Returns the bytes with this digest. `bytes` is their number, or 0 if the caller does not
    /// know it. A known number that does not match is an error.
    ///
    /// # Errors
    /// Permanent if no such object exists, transient if it cannot be fetched now.
    fn fetch(&mut self, digest: Digest, bytes: u64) -> Result<Vec<u8>, ProgramError>;
}

/// An output of a capsule. It is visible only with the commit that names its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputData {
    /// The program's name for it.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its digest, if computed already.
    pub digest: Option<Digest>,
}

impl OutputData {
    /// Returns the digest, and computes it if it is not known.
    pub fn digest(&self) -> Digest {
        self.digest.unwrap_or_else(|| Digest::of(&self.bytes))
    }
}

/// A capsule's access to everything beside its state: outputs, messages, data, and its node.
#[derive(Default)]
pub struct Capsule {
    index: BoundaryIndex,
    pub(crate) outputs: Vec<OutputData>,
    pub(crate) emits: Vec<Emit>,
    emitted_bytes: usize,
    /// Numbers that no commit has taken yet.
    pub(crate) numbers: Waiting,
    fetch: Option<Box<dyn Fetch + Send>>,
    /// The execution, if the capsule belongs to one.
    pub(crate) execution: Option<ExecutionId>,
    /// Crashes of the execution before this run.
    pub(crate) crashes: u64,
    /// The agent's wishes while the capsule computes.
    pub(crate) wishes: Option<Arc<dyn Wishes>>,
}

impl std::fmt::Debug for Capsule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.outputs.iter().map(|o| o.name.as_str()).collect();
        f.debug_struct("Capsule")
            .field("index", &self.index)
            .field("outputs", &names)
            .field("fetches", &self.fetch.is_some())
            .finish()
    }
}

impl Capsule {
    /// A capsule that calls `fetch` for data that it does not hold itself.
    pub fn with_fetch(index: BoundaryIndex, fetch: Box<dyn Fetch + Send>) -> Self {
        Self {
            index,
            fetch: Some(fetch),
            ..Self::default()
        }
    }

    pub(crate) fn advance(&mut self) {
        self.index += 1;
    }

    /// Capsules completed before this one.
    pub fn index(&self) -> BoundaryIndex {
        self.index
    }

    /// Outputs that no commit has taken yet.
    pub fn outputs(&self) -> &[OutputData] {
        &self.outputs
    }

    /// Declares an output. It replaces an earlier one of the same name.
    pub fn output(&mut self, name: impl Into<String>, bytes: Vec<u8>) {
        self.declare(name.into(), bytes, None);
    }

    /// Declares an output and returns its digest. [`Capsule::fetch`] returns the output by this
    /// digest later, on any node.
    pub fn output_digested(&mut self, name: impl Into<String>, bytes: Vec<u8>) -> Digest {
        let digest = Digest::of(&bytes);
        self.declare(name.into(), bytes, Some(digest));
        digest
    }

    /// Declares an output whose digest is known.
    pub(crate) fn output_known(&mut self, name: String, bytes: Vec<u8>, digest: Digest) {
        self.declare(name, bytes, Some(digest));
    }

    fn declare(&mut self, name: String, bytes: Vec<u8>, digest: Option<Digest>) {
        self.outputs.retain(|o| o.name != name);
        self.outputs.push(OutputData {
            name,
            bytes,
            digest,
        });
    }

    /// Sends a message to the outside. It is published on
    /// `fiec.outbox.<tenant>.<execution>.<name>`, once, after the commit of this capsule's
    /// boundary, and never without it. `name` has 1 to 64 letters, digits, `_` or `-`.
    ///
    /// # Errors
    /// Permanent if the name breaks that rule, or if the capsule emits more than [`EMITS_LIMIT`]
    /// messages or [`EMIT_BYTES_LIMIT`] bytes.
    pub fn emit(&mut self, name: &str, bytes: &[u8]) -> Result<(), ProgramError> {
        let boundary = self.index + 1;
        check_emit_name(name).map_err(|error| ProgramError::Permanent(error.to_string()))?;
        let own = self
            .emits
            .iter()
            .rev()
            .take_while(|e| e.boundary == boundary);
        let count = own.count();
        if count == 0 {
            self.emitted_bytes = 0;
        }
        self.emitted_bytes += bytes.len();
        if count >= EMITS_LIMIT || self.emitted_bytes > EMIT_BYTES_LIMIT {
            return Err(ProgramError::Permanent(format!(
                "emit: the capsule before boundary {boundary} emits more than {EMITS_LIMIT} \
                 messages or {EMIT_BYTES_LIMIT} bytes; make shorter capsules, or outputs, and emit \
                 their names"
            )));
        }
        self.emits.push(Emit {
            name: name.to_owned(),
            boundary,
            index: count as u32,
            data: STANDARD.encode(bytes),
        });
        Ok(())
    }

    /// Reports a number, as the residual of a solver: a point of the curve `name` at this capsule's
    /// boundary. It becomes durable with that boundary's commit, and is in SQL (`execution_series`).
    /// A run has at most [`NAMES_LIMIT`] names. Several reports in one capsule, and boundaries that
    /// come too fast to be kept one by one, become one point with their mean and extremes.
    ///
    /// # Errors
    /// Permanent if the name is not 1 to 64 letters, digits and `_ - . / : @ % +`, or is one name
    /// too many.
    ///
    /// [`NAMES_LIMIT`]: fiec_schemas::series::NAMES_LIMIT
    pub fn number(&mut self, name: &str, value: f64) -> Result<(), ProgramError> {
        self.numbers
            .report(name, self.index + 1, value)
            .map_err(ProgramError::permanent)
    }

    /// Whether the waiting outputs make a commit due, so that its message can name them all.
    pub(crate) fn has_made_much(&self) -> bool {
        let named = self.outputs.iter().map(|o| o.name.len() + OUTPUT_BYTES);
        named.sum::<usize>() >= NAMED_BYTES
    }

    /// Whether the emitted messages make a commit due, so that the next capsule has room.
    pub(crate) fn has_emitted_much(&self) -> bool {
        !self.emits.is_empty()
            && (self.emits.len() >= EMITS_LIMIT
                || self.emits.iter().map(|e| e.data.len()).sum::<usize>() >= EMIT_BYTES_LIMIT)
    }

    /// Returns the bytes of an earlier capsule's output, or of a pushed object, by digest. `bytes`
    /// is their number, or 0 if it is not known. Outputs that no commit has taken yet are found
    /// here. The run time fetches all others.
    ///
    /// # Errors
    /// See [`Fetch::fetch`].
    pub fn fetch(&mut self, digest: Digest, bytes: u64) -> Result<Vec<u8>, ProgramError> {
        let held = self.outputs.iter().find(|o| o.digest == Some(digest));
        if let Some(held) = held {
            return Ok(held.bytes.clone());
        }
        match &mut self.fetch {
            Some(fetch) => fetch.fetch(digest, bytes),
            None => Err(ProgramError::Transient(format!(
                "{digest} is not held by this process, and nothing here can fetch it"
            ))),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

struct Cached {
    key: String,
    file: Option<(PathBuf, Stamp)>,
    value: Arc<dyn Any + Send + Sync>,
}

/// The files that parameters may name.
enum Files {
    /// All files that this process may read, for runs by hand.
    Anywhere,
    /// Files in these folders.
    Beneath(Vec<PathBuf>),
}

/// Parsed inputs that this process keeps, so that the next execution on the same input does not
/// parse it again. A file counts as unchanged while its path, size and modification time are the
/// same. By default no files are read: parameters come from submitters, files belong to operators.
pub struct Inputs {
    files: Files,
    cached: Vec<Cached>,
    fetch: Option<Box<dyn Fetch + Send>>,
    devices: Option<Arc<dyn Devices>>,
}

impl Default for Inputs {
    fn default() -> Self {
        Self::beneath(Vec::new())
    }
}

/// Returns the part of an absolute path that is below a folder.
fn below<'a>(folder: &Path, path: &'a Path) -> Option<&'a Path> {
    let absolute = std::path::absolute(folder).ok();
    let real = std::fs::canonicalize(folder).ok();
    [absolute, real]
        .into_iter()
        .flatten()
        .find_map(|folder| path.strip_prefix(folder).ok())
}

impl Inputs {
    /// Reads only files in this folder.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        Self::beneath(vec![match folder.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => folder,
        }])
    }

    /// Reads only files in these folders. A relative name is looked up in each.
    pub fn beneath(folders: Vec<PathBuf>) -> Self {
        Self {
            files: Files::Beneath(folders),
            cached: Vec::new(),
            fetch: None,
            devices: None,
        }
    }

    /// Reads every file that this process may read. Relative names start at the working folder.
    /// Only for parameters of the user who runs this process.
    pub fn anywhere() -> Self {
        Self {
            files: Files::Anywhere,
            ..Self::default()
        }
    }

    /// The folder that a foreign program is given, if there is one: the first.
    pub fn folder(&self) -> Option<PathBuf> {
        match &self.files {
            Files::Anywhere => Some(PathBuf::from(".")),
            Files::Beneath(folders) => folders.first().cloned(),
        }
    }

    /// Opens the file that parameter `field` names, and returns its path with it.
    ///
    /// # Errors
    /// Permanent if the file is in none of the folders, or cannot be read. No error shows the
    /// contents of a file.
    pub fn file(&self, field: &str, name: &str) -> Result<(PathBuf, File), ProgramError> {
        let refuse = |why: &str| ProgramError::Permanent(format!("params.{field}: {name:?} {why}"));
        let cannot = |error: std::io::Error| refuse(&format!("cannot be read: {error}"));
        let asked = Path::new(name);
        let folders = match &self.files {
            Files::Anywhere => {
                let folder = Folder::open(Path::new("/")).map_err(cannot)?;
                let path = std::path::absolute(asked).map_err(cannot)?;
                let path = std::fs::canonicalize(path).map_err(cannot)?;
                let below = path.strip_prefix("/").unwrap_or(&path);
                let file = folder.file(below, Links::Inside).map_err(cannot)?;
                return Ok((path, file));
            }
            Files::Beneath(folders) => folders,
        };
        if folders.is_empty() {
            return Err(refuse(
                "cannot be read: the worker has no --input-dir; start it with `fiec worker \
                 --input-dir DIR`, or name an object (`fiec data push`)",
            ));
        }
        let mut missing = None;
        for folder in folders {
            let name = match asked.is_absolute() {
                true => below(folder, asked),
                false => Some(asked),
            };
            let Some(name) = name else { continue };
            let opened = Folder::open(folder).and_then(|it| it.file(name, Links::Inside));
            match opened {
                Ok(file) => return Ok((folder.join(name), file)),
                Err(error) if is_led_away(&error) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    missing = Some(error);
                }
                Err(error) => return Err(cannot(error)),
            }
        }
        Err(match missing {
            Some(error) => cannot(error),
            None => refuse("is not under the worker's --input-dir (of `fiec run`: --data-dir)"),
        })
    }

    /// Reads and parses the file that parameter `field` names. `kind` names the parsed form. The
    /// result is kept as by [`Inputs::get`].
    ///
    /// # Errors
    /// See [`Inputs::file`], and those of `parse`.
    pub fn get_file<T: Any + Send + Sync>(
        &mut self,
        kind: &str,
        (field, name): (&str, &str),
        parse: impl FnOnce(&[u8]) -> Result<T, ProgramError>,
    ) -> Result<Arc<T>, ProgramError> {
        let (path, mut file) = self.file(field, name)?;
        let key = format!("{kind} file {}", path.display());
        self.get(&key, Some(path), || {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(|error| {
                ProgramError::Permanent(format!("params.{field}: {name:?} cannot be read: {error}"))
            })?;
            parse(&bytes)
        })
    }

    /// Fetches objects that parameters name by digest with `fetch`.
    #[must_use]
    pub fn with_fetch(mut self, fetch: Box<dyn Fetch + Send>) -> Self {
        self.fetch = Some(fetch);
        self
    }

    /// Opens devices that a grant names with `devices`.
    #[must_use]
    pub fn with_devices(mut self, devices: Arc<dyn Devices>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// The source of devices.
    pub fn devices(&self) -> Arc<dyn Devices> {
        let none = || -> Arc<dyn Devices> { Arc::new(NoDevices("this program has none to open")) };
        self.devices.clone().unwrap_or_else(none)
    }

    /// Returns the bytes of an object that a parameter names.
    ///
    /// # Errors
    /// See [`Fetch::fetch`].
    pub fn object(&mut self, digest: Digest) -> Result<Vec<u8>, ProgramError> {
        match &mut self.fetch {
            Some(fetch) => fetch.fetch(digest, 0),
            None => Err(ProgramError::Permanent(format!(
                "object {digest} cannot be had: this run has no object store; name a file"
            ))),
        }
    }

    /// Fetches and parses the object under `digest`. `kind` names the parsed form. The result is
    /// kept as by [`Inputs::get`].
    ///
    /// # Errors
    /// See [`Fetch::fetch`], and those of `parse`.
    pub fn get_object<T: Any + Send + Sync>(
        &mut self,
        kind: &str,
        digest: Digest,
        parse: impl FnOnce(Vec<u8>) -> Result<T, ProgramError>,
    ) -> Result<Arc<T>, ProgramError> {
        let key = format!("{kind} object {digest}");
        if !self.cached.iter().any(|c| c.key == key) {
            let bytes = self.object(digest)?;
            return self.get(&key, None, || parse(bytes));
        }
        self.get(&key, None, || {
            Err(ProgramError::Transient(format!("{key} is no longer kept")))
        })
    }

    fn stamp(path: &PathBuf) -> Option<Stamp> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Stamp {
            bytes: meta.len(),
            modified: meta.modified().ok(),
        })
    }

    /// Whether every kept input still matches its file on disk.
    pub(crate) fn are_current(&self) -> bool {
        self.cached.iter().all(|c| {
            c.file
                .as_ref()
                .is_none_or(|(path, stamp)| Self::stamp(path).as_ref() == Some(stamp))
        })
    }

    /// Returns the input under `key`. Calls `make` unless the input is kept and its file, if it has
    /// one, is unchanged.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn get<T: Any + Send + Sync>(
        &mut self,
        key: &str,
        file: Option<PathBuf>,
        make: impl FnOnce() -> Result<T, ProgramError>,
    ) -> Result<Arc<T>, ProgramError> {
        // Take the stamp before reading: a file that changes during the read is read again next
        // time.
        let file = file.and_then(|path| Self::stamp(&path).map(|stamp| (path, stamp)));
        if let Some(at) = self.cached.iter().position(|c| c.key == key) {
            let found = self.cached.remove(at);
            if found.file == file
                && let Ok(value) = Arc::clone(&found.value).downcast::<T>()
            {
                self.cached.push(found);
                return Ok(value);
            }
        }
        let value = Arc::new(make()?);
        if self.cached.len() >= INPUTS_LIMIT {
            self.cached.remove(0);
        }
        self.cached.push(Cached {
            key: key.to_owned(),
            file,
            value: value.clone(),
        });
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_the_nodes_fault_and_no_other_error_of_a_file_is() {
        let full = std::fs::write("/dev/full", "x").unwrap_err();
        let error = ProgramError::of_files("write", Path::new("/dev/full"), &full);
        assert_eq!(error.fault(), Some(&Fault::DiskFull), "{error}");
        let absent = std::fs::read("/no/such/file").unwrap_err();
        let error = ProgramError::of_files("read", Path::new("/no/such/file"), &absent);
        assert_eq!(error.fault(), None, "{error}");
    }
}
