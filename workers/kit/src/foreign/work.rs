//! The folders of one foreign program, and how its entry is started in them.
//!
//! ```text
//! <temporary folder>/run/state       σ (state_dir)
//!                    run/outputs     finished files are outputs
//!                    run/outbox      finished files are messages to the outside (state_dir)
//!                    run/objects     objects that parameters name, by digest
//!                    run/params.json
//!                    run/result.json
//!                    run/socket      (json_lines)
//!                    taken/          outputs that wait for a commit
//! ```

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use serde_json::Value;

use super::container::{self, Engine};
use super::guard::{Guard, quoted};
use super::outputs::Outputs;
use super::process::Process;
use super::{
    BOUNDARY_ENV, EXECUTION_ENV, GRANT_ENV, INPUTS_ENV, OBJECTS_ENV, OUTBOX_ENV, OUTPUTS_ENV,
    PARAMS_ENV, Package, RESULT_ENV, RESULT_LIMIT, SOCKET_PATH_ENV, STATE_DIR_ENV, pack,
};
use crate::frames::EMIT_BYTES_LIMIT;
use crate::program::{Capsule, Inputs, ProgramError};

/// A path that a Unix socket may have.
const SOCKET_PATH_LIMIT: usize = 100;

/// The folders, and what its processes are started with.
pub struct Work {
    // Dropped in this order: the guard forgets the folders once they are gone.
    dir: tempfile::TempDir,
    guard: Option<Guard>,
    inputs: PathBuf,
    /// Its outputs.
    pub outputs: Outputs,
    /// What it may use.
    pub grant: Grant,
    container: Option<(Engine, String)>,
}

fn cannot<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(io::Error) -> ProgramError + 'a {
    move |error| ProgramError::Transient(format!("cannot {what} {}: {error}", path.display()))
}

/// The objects that parameters name.
fn objects(params: &Value, found: &mut Vec<Digest>) {
    match params {
        Value::Object(fields) => {
            if let (1, Some(Value::String(text))) = (fields.len(), fields.get("object"))
                && let Ok(digest) = text.parse()
            {
                found.push(digest);
            }
            fields.values().for_each(|value| objects(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| objects(value, found)),
        _ => {}
    }
}

fn empty(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir(folder)
}

impl Work {
    /// Makes them.
    ///
    /// # Errors
    /// When there is no place for them, an object cannot be had, or a container engine is needed
    /// and missing.
    pub fn new(
        package: &Package,
        params: &Value,
        inputs: &mut Inputs,
    ) -> Result<Self, ProgramError> {
        let place = std::env::temp_dir();
        let dir = tempfile::Builder::new()
            .prefix("fiec-")
            .tempdir_in(&place)
            .map_err(cannot("make a folder in", &place))?;
        let folder = inputs.path("");
        let folder = match folder.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => folder,
        };
        let folder = fs::canonicalize(&folder).map_err(cannot("find the data folder", &folder))?;
        let container = match &package.manifest.image {
            Some(image) => {
                let engine = Engine::find().map_err(ProgramError::Permanent)?;
                let image = engine.image(&package.folder, image)?;
                Some((engine, image))
            }
            None => None,
        };
        let taken = dir.path().join("taken");
        let guard = match Guard::new() {
            Ok(guard) => Some(guard),
            Err(error) => {
                eprintln!("fiec: no guard for the program's processes: {error}");
                None
            }
        };
        let mut work = Self {
            inputs: folder,
            outputs: Outputs::new(dir.path().join("run/outputs"), taken.clone()),
            grant: Grant::default(),
            container,
            guard,
            dir,
        };
        for folder in [
            taken,
            work.run(),
            work.state(),
            work.run().join("outputs"),
            work.outbox(),
            work.run().join("objects"),
        ] {
            fs::create_dir(&folder).map_err(cannot("make", &folder))?;
        }
        work.ended();
        let path = work.run().join("params.json");
        fs::write(&path, params.to_string()).map_err(cannot("write", &path))?;
        let mut named = Vec::new();
        objects(params, &mut named);
        for digest in named {
            let path = work.run().join("objects").join(digest.to_string());
            if !path.exists() {
                let bytes = inputs.object(digest)?;
                fs::write(&path, bytes).map_err(cannot("write", &path))?;
            }
        }
        Ok(work)
    }

    fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// The folder of σ.
    pub fn state(&self) -> PathBuf {
        self.run().join("state")
    }

    fn outbox(&self) -> PathBuf {
        self.run().join("outbox")
    }

    /// Emits what lies in the outbox, in the order of the names: the part of a name before its
    /// first dot is the message's.
    ///
    /// # Errors
    /// When a file is no regular one or cannot be read, or [`Capsule::emit`] refuses it.
    pub fn emit_all(&self, cx: &mut Capsule) -> Result<(), ProgramError> {
        let folder = self.outbox();
        for file in pack::scan(&folder, "message")? {
            let path = folder.join(&file.name);
            let text = file.name.to_string_lossy();
            let name = text.split('.').next().unwrap_or_default();
            let mut bytes = Vec::new();
            fs::File::open(&path)
                // One more than is allowed, so that the refusal says so.
                .and_then(|file| {
                    file.take(EMIT_BYTES_LIMIT as u64 + 1)
                        .read_to_end(&mut bytes)
                })
                .map_err(cannot("read", &path))?;
            cx.emit(name, &bytes)?;
            fs::remove_file(&path).map_err(cannot("remove", &path))?;
        }
        Ok(())
    }

    /// The file that asks a program to stop.
    pub fn yield_file(&self) -> PathBuf {
        self.state().join(pack::YIELD_FILE)
    }

    /// Where a file is written before it is moved to its place.
    pub fn part(&self) -> PathBuf {
        self.dir.path().join("part")
    }

    /// The path of the socket.
    ///
    /// # Errors
    /// When it would be too long for one.
    pub fn socket(&self) -> Result<PathBuf, ProgramError> {
        let path = self.run().join("socket");
        if path.as_os_str().len() > SOCKET_PATH_LIMIT {
            return Err(ProgramError::Transient(format!(
                "{} is too long for a socket; set TMPDIR to a shorter folder",
                path.display()
            )));
        }
        Ok(path)
    }

    /// Empties them for another run.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn clear(&mut self) -> Result<(), ProgramError> {
        self.outputs.clear();
        for name in ["taken", "run/state", "run/outputs", "run/outbox"] {
            let folder = self.dir.path().join(name);
            empty(&folder).map_err(cannot("empty", &folder))?;
        }
        for name in ["result.json", "socket"] {
            let path = self.run().join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(cannot("remove", &path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The result that was written, if one was.
    ///
    /// # Errors
    /// Where it is too large or no JSON.
    pub fn result(&self, package: &Package) -> Result<Value, ProgramError> {
        let path = self.run().join("result.json");
        let size = match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => meta.len(),
            Ok(_) => u64::MAX,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Value::Null),
            Err(error) => return Err(cannot("look at", &path)(error)),
        };
        check_result(package, size)?;
        let text = fs::read(&path).map_err(cannot("read", &path))?;
        serde_json::from_slice(&text).map_err(|error| {
            ProgramError::Permanent(format!(
                "{} wrote a result that is not JSON: {error}",
                package.program
            ))
        })
    }

    /// Path as the program sees it.
    pub fn seen(&self, name: &str) -> PathBuf {
        match &self.container {
            Some(_) => Path::new(container::RUN).join(name),
            None => self.run().join(name),
        }
    }

    /// The folder of inputs as the program sees it.
    pub fn seen_inputs(&self) -> PathBuf {
        match &self.container {
            Some(_) => PathBuf::from(container::INPUTS),
            None => self.inputs.clone(),
        }
    }

    fn environment(&self, cx: &Capsule, extra: (&str, PathBuf)) -> Vec<(String, String)> {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let grant = serde_json::to_string(&self.grant).unwrap_or_default();
        let mut all = vec![
            (PARAMS_ENV, text(self.seen("params.json"))),
            (INPUTS_ENV, text(self.seen_inputs())),
            (OBJECTS_ENV, text(self.seen("objects"))),
            (OUTPUTS_ENV, text(self.seen("outputs"))),
            (OUTBOX_ENV, text(self.seen("outbox"))),
            (RESULT_ENV, text(self.seen("result.json"))),
            (BOUNDARY_ENV, cx.index().to_string()),
            (GRANT_ENV, grant),
            (extra.0, text(extra.1)),
        ];
        if let Some(execution) = cx.execution {
            all.push((EXECUTION_ENV, execution.to_string()));
        }
        all.into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    /// Starts the package's entry for a state folder or a socket. What it prints goes where this
    /// process prints, except standard error where it is to be `piped`.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn spawn(
        &mut self,
        package: &Package,
        cx: &Capsule,
        piped: bool,
    ) -> Result<Process, ProgramError> {
        let extra = match package.manifest.protocol {
            fiec_schemas::package::Protocol::StateDir => (STATE_DIR_ENV, self.seen("state")),
            _ => (SOCKET_PATH_ENV, self.seen("socket")),
        };
        let environment = self.environment(cx, extra);
        let entry = &package.manifest.entry;
        let name = entry.first().map_or("", String::as_str);
        let mut ender = None;
        let mut command = match &self.container {
            Some((engine, image)) => {
                let own = self.dir.path().file_name().unwrap_or_default();
                let call = container::Call {
                    name: &own.to_string_lossy(),
                    image,
                    entry,
                    package: &package.folder,
                    run: &self.run(),
                    inputs: &self.inputs,
                    network: package.manifest.network,
                    grant: &self.grant,
                    environment: &environment,
                    user: (
                        rustix::process::getuid().as_raw(),
                        rustix::process::getgid().as_raw(),
                    ),
                };
                ender = Some(engine.end(call.name));
                let mut command = Command::new(&engine.program);
                command.args(engine.run(&call)?);
                command
            }
            None => {
                let program = match name.contains('/') {
                    true => package.folder.join(name),
                    false => PathBuf::from(name),
                };
                let mut command = Command::new(program);
                command.args(&entry[1..]).current_dir(&package.folder);
                // Addresses and passwords of servers are no business of a program.
                for (name, _) in std::env::vars_os() {
                    if name.to_string_lossy().starts_with("FIEC_") {
                        command.env_remove(name);
                    }
                }
                command.envs(environment);
                command
            }
        };
        if piped {
            command.stderr(Stdio::piped());
        }
        let remove = self.remove();
        let process = Process::spawn(command, name, ender)?;
        if let Some(guard) = &mut self.guard {
            guard.will(&format!("{}; {remove}", process.will()));
        }
        Ok(process)
    }

    fn remove(&self) -> String {
        let remove = format!("rm -rf -- {}", quoted(&self.dir.path().to_string_lossy()));
        // A process that is being killed may still make a file.
        format!("{remove} || {{ sleep 1; {remove}; }}")
    }

    /// To be called when no process that was started here runs (any more).
    pub fn ended(&mut self) {
        let remove = self.remove();
        if let Some(guard) = &mut self.guard {
            guard.will(&remove);
        }
    }
}

/// Checks a result's size.
pub fn check_result(package: &Package, bytes: u64) -> Result<(), ProgramError> {
    if bytes <= RESULT_LIMIT {
        return Ok(());
    }
    Err(ProgramError::Permanent(format!(
        "{} gave a result over {RESULT_LIMIT} bytes, or no regular file; make it an output",
        package.program
    )))
}
