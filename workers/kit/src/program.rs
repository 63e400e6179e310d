//! What a program is: one trait, whose loop is owned by a run time.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use fiec_schemas::BoundaryIndex;
use serde_json::Value;

/// Inputs that a process keeps parsed; the least recently used one goes.
const INPUTS_LIMIT: usize = 2;

/// Why a program cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Trying again gives the same: bad input, a broken rule. The text names file, line or field
    /// and the rule.
    #[error("{0}")]
    Permanent(String),
    /// Another attempt may succeed: a file system that did not answer, a refused thread.
    #[error("{0}")]
    Transient(String),
}

impl ProgramError {
    /// For `map_err`: an error that trying again does not cure.
    pub fn permanent(error: impl std::fmt::Display) -> Self {
        Self::Permanent(error.to_string())
    }

    /// For `map_err`: an error that trying again may cure.
    pub fn transient(error: impl std::fmt::Display) -> Self {
        Self::Transient(error.to_string())
    }

    /// Whether trying again is pointless.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Permanent(_))
    }
}

/// σ: all that is needed to go on anywhere, with its bytes.
pub trait State: Sized + Send {
    /// Appends the bytes; equal states give equal bytes, on every machine.
    fn encode(&self, out: &mut Vec<u8>);

    /// The state that the bytes are.
    ///
    /// # Errors
    /// When they are no state of this program.
    fn decode(bytes: &[u8]) -> Result<Self, ProgramError>;
}

/// What a capsule ended in. Yielding is no outcome: the run time does it, at a boundary.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// The state is complete; there is more to do.
    Boundary,
    /// Nothing is left to do.
    Complete {
        /// A few words on the result; small.
        result: Value,
    },
}

/// Where a program stands, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Boundaries in all, where that is known.
    pub of: Option<BoundaryIndex>,
    /// A short word on it.
    pub note: Option<String>,
}

/// A computation in capsules. Everything that a later capsule needs is in the state; the value
/// itself holds parameters, parsed inputs and scratch only, and may serve several executions with
/// the same parameters.
pub trait Program: Sized + Send {
    /// σ.
    type State: State;

    /// Reads and checks parameters and inputs.
    ///
    /// # Errors
    /// When they break a rule.
    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError>;

    /// The state before the first capsule.
    ///
    /// # Errors
    /// When there is none.
    fn initial(&mut self) -> Result<Self::State, ProgramError>;

    /// From one boundary to the next.
    ///
    /// # Errors
    /// When it cannot be reached; the state is then not used any more.
    fn capsule(&mut self, state: &mut Self::State, cx: &mut Capsule) -> Result<Step, ProgramError>;

    /// Where it stands; called a few times a second at most.
    fn progress(&self, _state: &Self::State) -> Progress {
        Progress::default()
    }
}

/// An output that a capsule made; visible only with the commit that names its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputData {
    /// The program's name for it.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// What a capsule may know and do beside its state.
#[derive(Debug, Default)]
pub struct Capsule {
    index: BoundaryIndex,
    pub(crate) outputs: Vec<OutputData>,
}

impl Capsule {
    pub(crate) fn new(index: BoundaryIndex) -> Self {
        Self {
            index,
            outputs: Vec::new(),
        }
    }

    pub(crate) fn advance(&mut self) {
        self.index += 1;
    }

    /// Capsules completed before this one.
    pub fn index(&self) -> BoundaryIndex {
        self.index
    }

    /// Declares an output; a later one of the same name takes its place.
    pub fn output(&mut self, name: impl Into<String>, bytes: Vec<u8>) {
        let name = name.into();
        self.outputs.retain(|o| o.name != name);
        self.outputs.push(OutputData { name, bytes });
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

/// Parsed inputs that this process keeps, so that the next execution on the same input need not
/// parse it. A file counts as the same while its path, size and modification time are.
#[derive(Default)]
pub struct Inputs {
    folder: PathBuf,
    cached: Vec<Cached>,
}

impl Inputs {
    /// Relative paths are looked up in this folder.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            cached: Vec::new(),
        }
    }

    /// The path that a name stands for.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn stamp(path: &PathBuf) -> Option<Stamp> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Stamp {
            bytes: meta.len(),
            modified: meta.modified().ok(),
        })
    }

    /// True when every input that is kept is still what lies on disk.
    pub(crate) fn are_current(&self) -> bool {
        self.cached.iter().all(|c| {
            c.file
                .as_ref()
                .is_none_or(|(path, stamp)| Self::stamp(path).as_ref() == Some(stamp))
        })
    }

    /// The input under `key`, made by `make` unless it is kept and its file (if it has one) is
    /// unchanged.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<T: Any + Send + Sync>(
        &mut self,
        key: &str,
        file: Option<PathBuf>,
        make: impl FnOnce() -> Result<T, ProgramError>,
    ) -> Result<Arc<T>, ProgramError> {
        // Stamped before it is read: a file that changes meanwhile is read again next time.
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
