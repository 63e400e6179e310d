//! The folders of one foreign program, and how its entry is started in them.
//!
//! ```text
//! <temporary folder>/run/state       σ (state_dir)
//!                    run/outputs     finished files are outputs
//!                    run/outbox      finished files are messages to the outside (state_dir)
//!                    run/objects     objects that parameters name, by digest
//!                    run/params.json
//!                    run/result/     the file of the result, and that of numbers (state_dir)
//!                    run/socket      (json_lines)
//!                    taken/          outputs that wait for a commit
//! ```
//!
//! After a program has run, no folder is opened by its path again: the program may have replaced it
//! by a link. A container cannot replace a folder, because it writes only to its folders, each
//! mounted separately.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use fiec_schemas::package::Grant;
use fiec_schemas::values;
use fiec_schemas::{Digest, Fault, StartError};
use serde_json::Value;

use super::container::{self, Engine};
use super::guard::{Guard, quoted};
use super::outputs::{self, Outputs, Places};
use super::process::Process;
use super::{
    BOUNDARY_ENV, EXECUTION_ENV, GRANT_ENV, INPUTS_ENV, NUMBERS_ENV, OBJECTS_ENV, OUTBOX_ENV,
    OUTPUTS_ENV, PARAMS_ENV, Package, RESULT_ENV, RESULT_LIMIT, SOCKET_PATH_ENV, STATE_DIR_ENV,
    lines, pack,
};
use crate::beneath::{Folder, Links};
use crate::frames::EMIT_BYTES_LIMIT;
use crate::launch::{self, Rules, Values};
use crate::program::{Capsule, Inputs, ProgramError};
use crate::room::Room;
use crate::start::is_by_env;

/// Longest path of a Unix socket.
const SOCKET_PATH_LIMIT: usize = 100;

/// The name of the folder of σ.
const STATE: &str = "state";
/// The name of the folder of messages.
const OUTBOX: &str = "outbox";
/// The name of the folder of the result.
const RESULT: &str = "result";
/// The result's file in that folder.
const RESULT_FILE: &str = "result.json";
/// The file of numbers beside it.
const NUMBERS_FILE: &str = "numbers.json";
/// Most bytes of that file: all names, with room for spaces.
const NUMBERS_LIMIT: u64 = 16 * 1024;
/// The folders that a program writes to.
const WRITABLE: [&str; 4] = [STATE, outputs::FOLDER, OUTBOX, RESULT];
/// The name of the folder of outputs that wait for a commit.
const TAKEN: &str = "taken";

/// The folders of a program, and the settings of its processes.
pub struct Work {
    // Dropped in this order: the guard forgets the folders once they are gone.
    dir: tempfile::TempDir,
    guard: Option<Guard>,
    inputs: PathBuf,
    top: Folder,
    run: Folder,
    outputs: Outputs,
    /// The grant.
    pub grant: Grant,
    /// The node's rules for programs.
    rules: Rules,
    container: Option<(Engine, String)>,
    /// What [`container::memory_kills`] said when its process started.
    kills: u64,
}

/// The status of a container whose first process SIGKILL has ended.
const KILLED: i32 = 128 + 9;

/// The first word of an entry as it is executed: a file of the package, or a command of the node.
fn program_of(package: &Package, name: &str) -> PathBuf {
    match name.contains('/') {
        true => package.folder.join(name),
        false => PathBuf::from(name),
    }
}

fn cannot_start(command: String, error: StartError) -> Fault {
    Fault::CannotStart { command, error }
}

fn cannot<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(io::Error) -> ProgramError + 'a {
    move |error| ProgramError::of_files(what, path, &error)
}

/// Collects the objects that parameters name.
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
    /// Makes the folders.
    ///
    /// # Errors
    /// When they cannot be made, an object cannot be fetched, or a needed container engine is
    /// missing.
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
        let container = match &package.manifest.image {
            Some(image) => {
                let engine = Engine::find().map_err(|words| ProgramError::Faulty {
                    fault: Box::new(cannot_start("podman".to_owned(), StartError::NotFound)),
                    words,
                })?;
                let image = engine.image(&package.folder, image)?;
                Some((engine, image))
            }
            None => None,
        };
        let guard = match Guard::new() {
            Ok(guard) => Some(guard),
            Err(error) => {
                eprintln!("fiec: no guard for the program's processes: {error}");
                None
            }
        };
        let run = dir.path().join("run");
        let objects_folder = run.join("objects");
        for folder in [&dir.path().join(TAKEN), &run, &objects_folder] {
            fs::create_dir(folder).map_err(cannot("make", folder))?;
        }
        for name in WRITABLE {
            let folder = run.join(name);
            fs::create_dir(&folder).map_err(cannot("make", &folder))?;
        }
        let inputs_folder = match inputs.folder() {
            Some(folder) => {
                fs::canonicalize(&folder).map_err(cannot("find the data folder", &folder))?
            }
            // On a node without inputs the folder is empty.
            None => {
                let folder = dir.path().join("inputs");
                fs::create_dir(&folder).map_err(cannot("make", &folder))?;
                folder
            }
        };
        let open = |path: &Path| Folder::open(path).map_err(cannot("open", path));
        let mut work = Self {
            inputs: inputs_folder,
            top: open(dir.path())?,
            run: open(&run)?,
            outputs: Outputs::default(),
            grant: Grant::default(),
            rules: Rules::received(),
            container,
            kills: 0,
            guard,
            dir,
        };
        work.ended();
        let path = run.join("params.json");
        fs::write(&path, params.to_string()).map_err(cannot("write", &path))?;
        let mut named = Vec::new();
        objects(params, &mut named);
        for digest in named {
            let path = objects_folder.join(digest.to_string());
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

    /// Opens the folder of σ.
    ///
    /// # Errors
    /// Permanent if the program has replaced it.
    pub fn state(&self) -> Result<Folder, ProgramError> {
        pack::root(&self.run, STATE)
    }

    /// Fills the empty folder of σ.
    ///
    /// # Errors
    /// Permanent if the bytes are no state.
    pub fn unpack(&self, state: &[u8]) -> Result<(), ProgramError> {
        pack::unpack(state, &self.run().join(STATE))
    }

    /// Acts on the outputs of a run.
    fn outputs(
        &mut self,
        act: impl FnOnce(&mut Outputs, &Places<'_>) -> Result<(), ProgramError>,
    ) -> Result<(), ProgramError> {
        let path = self.dir.path().join(TAKEN);
        let taken = self.top.folder(Path::new(TAKEN));
        let taken = taken.map_err(cannot("open", &path))?;
        let places = Places {
            run: &self.run,
            taken: &taken,
        };
        act(&mut self.outputs, &places)
    }

    /// See [`Outputs::take_all`].
    pub fn take_outputs(&mut self, package: &Package) -> Result<(), ProgramError> {
        self.outputs(|outputs, places| outputs.take_all(package, places))
    }

    /// See [`Outputs::take_named`].
    pub fn take_named_outputs(
        &mut self,
        package: &Package,
        names: &[String],
    ) -> Result<(), ProgramError> {
        self.outputs(|outputs, places| outputs.take_named(package, places, names))
    }

    /// See [`Outputs::declare`].
    pub fn declare_outputs(
        &mut self,
        package: &Package,
        cx: &mut Capsule,
    ) -> Result<(), ProgramError> {
        let room = Room::of(Some(package), &self.grant);
        self.outputs(|outputs, places| outputs.declare(&room, places, cx))
    }

    /// Emits the files of the outbox in the order of their names. The part of a name before its
    /// first dot is the message's name.
    ///
    /// # Errors
    /// When a file is not regular or cannot be read, or [`Capsule::emit`] refuses it.
    pub fn emit_all(&self, cx: &mut Capsule) -> Result<(), ProgramError> {
        let folder = pack::root(&self.run, OUTBOX)?;
        for file in pack::scan(&folder, "message")? {
            let path = folder.path().join(&file.name);
            let text = file.name.to_string_lossy();
            let name = text.split('.').next().unwrap_or_default();
            let mut bytes = Vec::new();
            folder
                .file(&file.name, Links::Refused)
                // One byte more than the limit, so that the refusal names the limit.
                .and_then(|file| {
                    file.take(EMIT_BYTES_LIMIT as u64 + 1)
                        .read_to_end(&mut bytes)
                })
                .map_err(cannot("read", &path))?;
            cx.emit(name, &bytes)?;
            folder.remove(&file.name).map_err(cannot("remove", &path))?;
        }
        Ok(())
    }

    /// Reports the numbers that the last process wrote, and removes their file.
    ///
    /// # Errors
    /// Permanent if they are no JSON object of numbers, or [`Capsule::number`] refuses one.
    pub fn report_numbers(&self, package: &Package, cx: &mut Capsule) -> Result<(), ProgramError> {
        let folder = pack::root(&self.run, RESULT)?;
        let name = Path::new(NUMBERS_FILE);
        let wrong = |why: &dyn std::fmt::Display| {
            ProgramError::Permanent(format!(
                "{} wrote numbers to ${NUMBERS_ENV} that are no JSON object of numbers, as \
                 {{\"loss\": 0.31}}: {why}",
                package.program
            ))
        };
        let file = match folder.file(name, Links::Refused) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(wrong(&error)),
        };
        let mut text = Vec::new();
        file.take(NUMBERS_LIMIT + 1)
            .read_to_end(&mut text)
            .map_err(cannot("read", folder.path()))?;
        if text.len() as u64 > NUMBERS_LIMIT {
            return Err(wrong(&format!("it has more than {NUMBERS_LIMIT} bytes")));
        }
        let numbers = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
        lines::report(&numbers, cx)?;
        folder.remove(name).map_err(cannot("remove", folder.path()))
    }

    /// Orders the program to yield, by a file that appears complete.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_yield_file(&self, cause: &str) -> Result<(), ProgramError> {
        let (path, part) = (self.dir.path().join("part"), Path::new("part"));
        fs::write(&path, cause).map_err(cannot("write", &path))?;
        let state = self.state()?;
        let moved = self.top.rename(part, &state, Path::new(pack::YIELD_FILE));
        moved.map_err(cannot("write the yield file in", state.path()))
    }

    /// Removes the file with the order to yield.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_yield_file(&self) -> Result<(), ProgramError> {
        let state = match self.run.folder(Path::new(STATE)) {
            // A program may have removed the folder at its end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            _ => self.state()?,
        };
        match state.remove(Path::new(pack::YIELD_FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(cannot("remove the yield file in", state.path())(error))
            }
            _ => Ok(()),
        }
    }

    /// Returns the path of the socket.
    ///
    /// # Errors
    /// When it would be too long for a socket.
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

    /// Empties the folders for another run.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn clear(&mut self) -> Result<(), ProgramError> {
        self.outputs.clear();
        let folders = WRITABLE.map(|name| self.run().join(name));
        for folder in folders.iter().chain([&self.dir.path().join(TAKEN)]) {
            // If a link has replaced a folder, the link itself is removed.
            empty(folder).map_err(cannot("empty", folder))?;
        }
        match self.run.remove(Path::new("socket")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(cannot("remove the socket in", self.run.path())(error))
            }
            _ => Ok(()),
        }
    }

    /// Returns the result that the program wrote, or null.
    ///
    /// # Errors
    /// When it is too large or no JSON.
    pub fn result(&self, package: &Package) -> Result<Value, ProgramError> {
        let folder = pack::root(&self.run, RESULT)?;
        let mut file = match folder.file(Path::new(RESULT_FILE), Links::Refused) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Value::Null),
            // The file is a link, a pipe or a folder.
            Err(_) => return Err(too_large(package)),
        };
        let mut text = Vec::new();
        let read = (&mut file).take(RESULT_LIMIT + 1).read_to_end(&mut text);
        read.map_err(cannot("read", folder.path()))?;
        check_result(package, text.len() as u64)?;
        check_values(package, &text, "result")?;
        serde_json::from_slice(&text).map_err(|error| {
            ProgramError::Permanent(format!(
                "{} wrote a result that is not JSON: {error}",
                package.program
            ))
        })
    }

    /// A path as the program sees it.
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
            (RESULT_ENV, text(self.seen(RESULT).join(RESULT_FILE))),
            (NUMBERS_ENV, text(self.seen(RESULT).join(NUMBERS_FILE))),
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

    /// Writes the variables of the submission for a container engine, if there are any.
    fn environment_file(&self, values: &Values) -> Result<Option<PathBuf>, ProgramError> {
        if values.is_empty() {
            return Ok(None);
        }
        let path = self.dir.path().join("env");
        let lines: String = values
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect();
        // The folder is this user's alone, and the program in the container does not see it.
        fs::write(&path, lines).map_err(cannot("write", &path))?;
        Ok(Some(path))
    }

    /// Starts the package's entry, with a state folder or a socket. Its output goes to this
    /// process's output. With `piped`, standard error goes to a pipe.
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
        let mut environment = self.environment(cx, extra);
        let entry = &package.manifest.entry;
        let name = entry.first().map_or("", String::as_str);
        let mut ender = None;
        let mut command = match &self.container {
            Some((engine, image)) => {
                environment.extend(launch::thread_counts(&package.values));
                let file = self.environment_file(&package.values)?;
                let own = self.dir.path().file_name().unwrap_or_default();
                let call = container::Call {
                    name: &own.to_string_lossy(),
                    image,
                    entry,
                    package: &package.folder,
                    run: &self.run(),
                    writable: &WRITABLE,
                    inputs: &self.inputs,
                    network: package.manifest.network,
                    grant: &self.grant,
                    environment: &environment,
                    environment_file: file.as_deref(),
                    user: (
                        rustix::process::getuid().as_raw(),
                        rustix::process::getgid().as_raw(),
                    ),
                };
                ender = Some(engine.end(call.name));
                self.kills = container::memory_kills();
                let mut command = Command::new(&engine.program);
                command.args(engine.run(&call)?);
                command
            }
            None => {
                let mut command = Command::new(program_of(package, name));
                command.args(&entry[1..]).current_dir(&package.folder);
                let device = self.grant.device.as_ref();
                let device = device.map(|d| &*d.uuid);
                self.rules.prepare(&mut command, device, &package.values);
                command.envs(environment);
                command
            }
        };
        if piped {
            command.stderr(Stdio::piped());
        }
        let remove = self.remove();
        let own = self.container.is_none().then_some(&*package.folder);
        if let Some(guard) = &self.guard {
            let words = ender.iter().flatten().map(|word| quoted(word));
            let end: String = words.map(|word| word + " ").collect();
            let line = if end.is_empty() {
                remove
            } else {
                format!("{end}; {remove}")
            };
            guard.will_of(&mut command, &line);
        }
        let started = Process::spawn(command, &self.rules, own, ender);
        if started.is_err() {
            self.ended();
        }
        started
    }

    /// The error of a process of the entry that ended with a status that its protocol does not know.
    pub fn ended_with(&self, package: &Package, status: ExitStatus, words: String) -> ProgramError {
        let by_env = || {
            let name = package.manifest.entry.first()?;
            let program = program_of(package, name);
            (self.container.is_none() && is_by_env(&program.to_string_lossy())).then_some(())
        };
        let command = || package.manifest.entry.join(" ");
        let fault = match (status.code(), status.signal()) {
            (Some(126), _) if by_env().is_some() => {
                cannot_start(command(), StartError::NotExecutable)
            }
            (Some(127), _) if by_env().is_some() => cannot_start(command(), StartError::NotFound),
            (Some(KILLED), _) if self.container.is_some() => return self.killed(words),
            (Some(status), _) => Fault::Exited { status },
            (None, Some(signal)) => Fault::Signalled { signal },
            (None, None) => Fault::Unexplained,
        };
        ProgramError::Faulty {
            fault: Box::new(fault),
            words,
        }
    }

    /// The error of a container that SIGKILL has ended.
    fn killed(&self, words: String) -> ProgramError {
        let limit_bytes = container::memory_of(&self.grant);
        let (fault, words) = match container::memory_kills() > self.kills {
            true => (
                Fault::OutOfMemory {
                    limit_bytes,
                    peak_bytes: None,
                },
                format!(
                    "{words}: killed by the kernel, out of memory (its container has {} MiB)",
                    limit_bytes.div_ceil(1 << 20)
                ),
            ),
            false => (Fault::Signalled { signal: 9 }, words),
        };
        ProgramError::Faulty {
            fault: Box::new(fault),
            words,
        }
    }

    fn remove(&self) -> String {
        let remove = format!("rm -rf -- {}", quoted(&self.dir.path().to_string_lossy()));
        // A process that is being killed may still create a file.
        format!("{remove} || {{ sleep 1; {remove}; }}")
    }

    /// Notes that no process of the program runs any more.
    pub fn ended(&mut self) {
        let remove = self.remove();
        if let Some(guard) = &mut self.guard {
            guard.will(&remove);
        }
    }
}

/// Checks a result's size.
pub fn check_result(package: &Package, bytes: u64) -> Result<(), ProgramError> {
    match bytes <= RESULT_LIMIT {
        true => Ok(()),
        false => Err(too_large(package)),
    }
}

/// Checks the values of a result, or of a line with one.
pub fn check_values(package: &Package, text: &[u8], root: &str) -> Result<(), ProgramError> {
    values::check(text, root)
        .map_err(|error| ProgramError::Permanent(format!("{}: {error}", package.program)))
}

fn too_large(package: &Package) -> ProgramError {
    ProgramError::Permanent(format!(
        "{} gave a result over {RESULT_LIMIT} bytes, or no regular file; make it an output",
        package.program
    ))
}
