//! Runs programs without any server. A run goes to its end, or yields at boundaries and resumes in
//! fresh processes. [`check`] tests the four invariants of a capsule program. The processes are
//! those that an agent starts, and they speak the same frames.

pub mod check;
mod explain;
mod processors;
mod session;
mod traces;
mod trees;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, bail};
use fiec_kit::foreign::Package;
use fiec_kit::launch::Values;
use fiec_schemas::package::{Grant, MANIFEST_FILE, Manifest, Protocol};
use fiec_schemas::programs::BUILT_IN;
use fiec_schemas::{BoundaryIndex, Digest};
use serde::Serialize;
use serde_json::Value;

pub use session::{Event, Made, Session};

/// A program with its parameters and its environment.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Name of the program, or of its package's folder.
    pub program: String,
    /// Its parameters.
    pub params: Value,
    /// The package, unless the program is built in.
    pub package: Option<Package>,
    /// Folder of inputs.
    pub data_dir: PathBuf,
    /// Command of a child process: this program, as `fiec program-child`.
    pub child: Vec<String>,
    /// The grant of the process.
    pub grant: Grant,
    /// True to copy the program's output to standard error.
    pub echo: bool,
    /// True to give the program a fresh HOME.
    pub fresh_home: bool,
    /// Objects that parameters name, and outputs, by digest.
    pub objects: Objects,
    /// Keeps the generated package of a single file.
    _made: Option<Arc<tempfile::TempDir>>,
}

/// Objects by digest, in a temporary folder.
#[derive(Debug, Clone)]
pub struct Objects {
    folder: Arc<tempfile::TempDir>,
    known: Arc<Mutex<BTreeMap<Digest, PathBuf>>>,
}

impl Objects {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            folder: Arc::new(tempfile::tempdir().context("cannot make a temporary folder")?),
            known: Arc::default(),
        })
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<Digest, PathBuf>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a file and returns its digest.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn file(&self, path: &Path) -> anyhow::Result<Digest> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let digest = Digest::of(&bytes);
        self.known().insert(digest, path.to_owned());
        Ok(digest)
    }

    fn put(&self, bytes: &[u8]) -> anyhow::Result<Digest> {
        let digest = Digest::of(bytes);
        if !self.known().contains_key(&digest) {
            let path = self.folder.path().join(digest.to_string());
            std::fs::write(&path, bytes)
                .with_context(|| format!("cannot write {}", path.display()))?;
            self.known().insert(digest, path);
        }
        Ok(digest)
    }

    fn get(&self, digest: Digest) -> Result<Vec<u8>, String> {
        match self.known().get(&digest) {
            Some(path) => std::fs::read(path).map_err(|error| error.to_string()),
            None => Err(format!(
                "this run has no object {digest}: pass its file with --object"
            )),
        }
    }
}

/// Opens the package at a path: a folder with a manifest, a manifest, or a single file with a
/// protocol.
fn open(
    path: &Path,
    protocol: Option<Protocol>,
) -> anyhow::Result<(Package, Option<tempfile::TempDir>)> {
    let path =
        std::fs::canonicalize(path).with_context(|| format!("cannot open {}", path.display()))?;
    let name = |path: &Path| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        format!("{stem}@local")
    };
    let manifest_of = |path: &Path| -> anyhow::Result<Manifest> {
        let text =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Manifest::parse(&text).with_context(|| format!("{} is no manifest", path.display()))
    };
    if path.is_dir() || path.file_name().is_some_and(|name| name == MANIFEST_FILE) {
        let folder = match path.is_dir() {
            true => path.as_path(),
            false => path.parent().unwrap_or(Path::new("/")),
        };
        let package = Package {
            manifest: manifest_of(&folder.join(MANIFEST_FILE))?,
            program: name(folder),
            folder: folder.to_owned(),
            values: Values::default(),
        };
        return Ok((package, None));
    }
    let Some(protocol) = protocol else {
        bail!(
            "{} is a single file: say how it talks with --protocol state_dir|json_lines|frames, \
             or give a folder with a {MANIFEST_FILE}",
            path.display()
        );
    };
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    std::fs::copy(&path, folder.path().join(&*file))
        .with_context(|| format!("cannot copy {}", path.display()))?;
    let manifest = Manifest {
        entry: vec![format!("./{file}")],
        protocol,
        outputs: vec!["*".to_owned()],
        limits: fiec_schemas::package::Limits::default(),
        image: None,
        network: false,
    };
    let package = Package {
        folder: folder.path().to_owned(),
        manifest,
        program: name(&path),
        values: Values::default(),
    };
    Ok((package, Some(folder)))
}

impl Subject {
    fn speaks_frames(&self) -> bool {
        (self.package.as_ref()).is_some_and(|p| p.manifest.protocol == Protocol::Frames)
    }

    /// Opens a built-in program, or the package at a path. A single file needs a protocol.
    ///
    /// # Errors
    /// If the program does not exist, or a manifest or a parameter breaks a rule.
    pub fn open(
        program: &str,
        protocol: Option<Protocol>,
        params: Value,
        data_dir: &Path,
    ) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find this program's file")?;
        let (package, made) = if BUILT_IN.contains(&program) {
            fiec_schemas::programs::check(program, &params)?;
            (None, None)
        } else if Path::new(program).exists() {
            let (package, made) = open(Path::new(program), protocol)?;
            (Some(package), made)
        } else {
            bail!(
                "{program:?} is neither a path nor a built-in program ({})",
                BUILT_IN.join(", ")
            );
        };
        Ok(Self {
            program: package
                .as_ref()
                .map_or_else(|| program.to_owned(), |package| package.program.clone()),
            params,
            package,
            data_dir: std::fs::canonicalize(data_dir)
                .with_context(|| format!("cannot open the data folder {}", data_dir.display()))?,
            child: vec![
                this.to_string_lossy().into_owned(),
                "program-child".to_owned(),
            ],
            grant: Grant::default(),
            echo: false,
            fresh_home: false,
            objects: Objects::new()?,
            _made: made.map(Arc::new),
        })
    }

    /// The same on one of these processors.
    fn on_one_of(&self, cpus: &[u32]) -> Self {
        let mut one = self.clone();
        one.grant.cpus = cpus.iter().take(1).copied().collect();
        one.grant.threads = Some(1);
        one
    }
}

/// Observations of a run that must not depend on where it was cut.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Record {
    /// Number of capsules.
    pub capsules: BoundaryIndex,
    /// The program's result.
    pub result: Value,
    /// Digests of outputs by name.
    pub outputs: BTreeMap<String, Digest>,
    /// Digests of σ at the observed boundaries.
    pub boundaries: BTreeMap<BoundaryIndex, Digest>,
    /// Number of processes that were started.
    pub processes: u64,
    /// Seconds from the start of the first process to the end of the last.
    pub seconds: f64,
}

impl Record {
    fn made(&mut self, outputs: &[Made]) {
        for output in outputs {
            self.outputs.insert(output.name.clone(), output.digest);
        }
    }

    /// Differences to another run, in words. Empty if there are none.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for (index, digest) in &self.boundaries {
            if let Some(theirs) = other.boundaries.get(index)
                && theirs != digest
            {
                found.push(format!("σ at boundary {index}: {digest} and {theirs}"));
            }
        }
        if self.capsules != other.capsules {
            let (ours, theirs) = (self.capsules, other.capsules);
            found.push(format!("capsules: {ours} and {theirs}"));
        }
        if self.result != other.result {
            found.push(format!(
                "result: {}",
                explain::values(&self.result, &other.result)
            ));
        }
        let names: std::collections::BTreeSet<_> =
            self.outputs.keys().chain(other.outputs.keys()).collect();
        for name in names {
            match (self.outputs.get(name), other.outputs.get(name)) {
                (Some(ours), Some(theirs)) if ours == theirs => {}
                (Some(ours), Some(theirs)) => {
                    found.push(format!("output {name:?}: {ours} and {theirs}"));
                }
                (Some(_), None) => found.push(format!("output {name:?}: only in the first")),
                _ => found.push(format!("output {name:?}: only in the second")),
            }
        }
        found
    }
}

/// Runs a program to its end. With `yield_every`, it yields at each boundary whose index is a
/// multiple, and continues in a fresh process with fresh folders. Without `cut`, the same
/// boundaries are only observed. `progress` receives the current step.
///
/// # Errors
/// If the program fails or crashes, with its words.
pub fn run(
    subject: &Subject,
    yield_every: Option<u64>,
    cut: bool,
    progress: &mut dyn FnMut(&str),
) -> anyhow::Result<Record> {
    let began = Instant::now();
    let mut record = Record::default();
    let mut from: Option<(BoundaryIndex, Vec<u8>)> = None;
    'processes: loop {
        record.processes += 1;
        let mut session = Session::start(subject)?;
        let begin = from.as_ref().map_or(0, |(index, _)| *index);
        let until = yield_every
            .filter(|_| cut)
            .map(|every| (begin / every + 1) * every);
        let state = from.take();
        let state = state.as_ref().map(|(index, state)| (*index, &state[..]));
        // A program that speaks frames may receive the order after it has passed that boundary. Its
        // commit at the boundary serves as well: the process is then killed.
        let commit_every = yield_every.filter(|_| !cut || subject.speaks_frames());
        session.run(state, commit_every, until)?;
        loop {
            match session.hear()? {
                Event::Progress { index, of, note } => {
                    let of = of.map(|of| format!(" of {of}")).unwrap_or_default();
                    let note = note.map(|note| format!(", {note}")).unwrap_or_default();
                    progress(&format!("boundary {index}{of}{note}"));
                }
                Event::Boundary {
                    index,
                    state,
                    outputs,
                    yielded,
                } => {
                    record.made(&outputs);
                    record.boundaries.insert(index, Digest::of(&state));
                    progress(&format!("boundary {index}, process {}", record.processes));
                    if yielded && index <= begin {
                        bail!("the program yielded at boundary {index}, where it had started");
                    }
                    match until {
                        Some(until) if yielded && index < until => bail!(
                            "the program yielded at boundary {index}, but was ordered to yield at \
                             boundary {until}: a yield with \"at\" does not apply before that \
                             boundary"
                        ),
                        None if yielded => {
                            bail!("the program yielded at boundary {index} without an order")
                        }
                        _ => {}
                    }
                    if yielded || until.is_some_and(|until| index >= until) {
                        match yielded {
                            true => session.end(),
                            false => session.kill(),
                        }
                        from = Some((index, state));
                        continue 'processes;
                    }
                    session.committed(index);
                }
                Event::Completed {
                    result,
                    capsules,
                    outputs,
                } => {
                    record.made(&outputs);
                    record.result = result;
                    record.capsules = capsules;
                    record.seconds = began.elapsed().as_secs_f64();
                    return Ok(record);
                }
                Event::Failed { reason } => {
                    let after = match record.boundaries.last_key_value() {
                        Some((index, _)) => format!(" after boundary {index}"),
                        None => String::new(),
                    };
                    bail!("{} failed{after}: {reason}", subject.program);
                }
            }
        }
    }
}
