//! A program in a container, by podman or docker: the command line, built as data, and the engine's
//! properties.
//!
//! The package's folder, the inputs and the run's folder are mounted read-only. The folders of
//! state, outputs, messages and result are each mounted writable; its own root is read-only, but for
//! `/tmp` in memory. The container has no network unless the manifest asks for it, no more rights than
//! its user, and the memory, processes and processors of the grant.

use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fiec_schemas::package::{Grant, Image};

use super::{image, trial};
use crate::program::ProgramError;

/// The folders of the run, inside the container.
pub const RUN: &str = "/fiec/run";
/// The package's folder, inside the container.
pub const PACKAGE: &str = "/fiec/package";
/// The folder of inputs, inside the container.
pub const INPUTS: &str = "/fiec/inputs";
/// Time limit for an engine's answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for loading an image from a package.
const LOAD_WITHIN: Duration = Duration::from_secs(600);
/// Time after an engine's answer in which it may still have processes of its own, which do not share
/// their parents' session: what watches over a container, and what removes it.
const LINGERS: Duration = Duration::from_secs(30);
/// When an engine was asked last in this process.
static ASKED: Mutex<Option<Instant>> = Mutex::new(None);

fn note_asked() {
    *ASKED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// Whether children of this process that it does not know may be a container engine's.
pub fn has_asked_lately() -> bool {
    let asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    asked.is_some_and(|at| at.elapsed() < LINGERS)
}

/// Most bytes of its output that are kept.
const WORDS_LIMIT: u64 = 64 * 1024;

/// Most processes and threads of a container.
const PROCESSES: &str = "4096";
/// The part of a container's memory that its files in `/tmp` may take.
const FILES_SHARE: u64 = 4;

/// Bytes of this machine's memory.
fn memory_of_the_machine() -> u64 {
    let memory = rustix::system::sysinfo();
    memory.totalram.saturating_mul(memory.mem_unit.into())
}

/// Bytes of memory that a container of this grant may use.
pub(super) fn memory_of(grant: &Grant) -> u64 {
    grant.memory_bytes.unwrap_or_else(memory_of_the_machine)
}

/// Processes that the kernel has ended for want of memory, in all containers and elsewhere. An engine
/// says of an ended container only that SIGKILL ended it.
pub(super) fn memory_kills() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// A container engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Runs containers as its own children.
    Podman,
    /// Runs containers by a daemon.
    Docker,
}

/// An engine that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// Its kind.
    pub kind: Kind,
    /// Its command.
    pub program: PathBuf,
    /// Flags of `run` that this machine needs to start a container. Empty on most machines.
    pub flags: Vec<String>,
}

/// A container to run.
#[derive(Debug)]
pub struct Call<'a> {
    /// The container's name.
    pub name: &'a str,
    /// Its image.
    pub image: &'a str,
    /// The command of the manifest.
    pub entry: &'a [String],
    /// The package's folder.
    pub package: &'a Path,
    /// The folder of the run, mounted read-only.
    pub run: &'a Path,
    /// Its folders that are mounted writable. The container cannot replace any of them.
    pub writable: &'a [&'a str],
    /// The folder of inputs.
    pub inputs: &'a Path,
    /// Whether the container may use the network.
    pub network: bool,
    /// The grant.
    pub grant: &'a Grant,
    /// Its environment, in addition to the image's own.
    pub environment: &'a [(String, String)],
    /// A file with more of it, which no list of processes shows.
    pub environment_file: Option<&'a Path>,
    /// Owner of the files that it writes: user and group.
    pub user: (u32, u32),
}

fn mount(from: &Path, to: &str, read_only: bool) -> Result<String, ProgramError> {
    // A mount is a line of comma-separated values.
    match from
        .to_str()
        .filter(|path| !path.contains([',', '"', '\n']))
    {
        Some(path) if read_only => Ok(format!("type=bind,src={path},dst={to},readonly")),
        Some(path) => Ok(format!("type=bind,src={path},dst={to}")),
        None => Err(ProgramError::Permanent(format!(
            "{} cannot be mounted into a container: its path must be UTF-8 without commas, \
             quotes and line breaks",
            from.display()
        ))),
    }
}

impl Engine {
    /// Returns the first engine of this machine that answers and, for podman, starts a container:
    /// podman, then docker. The result is remembered for this process.
    ///
    /// # Errors
    /// The reason for each engine that does not work.
    pub fn find() -> Result<Self, String> {
        static FOUND: OnceLock<Engine> = OnceLock::new();
        if let Some(engine) = FOUND.get() {
            return Ok(engine.clone());
        }
        let engine = Self::look()?;
        Ok(FOUND.get_or_init(|| engine).clone())
    }

    fn look() -> Result<Self, String> {
        let user = (
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        let mut reasons = Vec::new();
        for (kind, name) in [(Kind::Podman, "podman"), (Kind::Docker, "docker")] {
            let engine = Self {
                kind,
                program: PathBuf::from(name),
                flags: Vec::new(),
            };
            let answered = engine.ask(&["info".to_owned()], Stdio::null(), ANSWER_WITHIN);
            let flags = answered.and_then(|_| match kind {
                Kind::Podman => trial::flags(&engine, user),
                Kind::Docker => Ok(Vec::new()),
            });
            match flags {
                Ok(flags) => return Ok(Self { flags, ..engine }),
                Err(reason) => reasons.push(format!("{name}: {reason}")),
            }
        }
        Err(format!(
            "no container engine answers on this machine ({})",
            reasons.join("; ")
        ))
    }

    /// Runs a short command of the engine, and returns its output or its error.
    pub(super) fn ask(
        &self,
        arguments: &[String],
        stdin: Stdio,
        within: Duration,
    ) -> Result<String, String> {
        let files = (tempfile::tempfile(), tempfile::tempfile());
        let (Ok(mut out), Ok(mut err)) = files else {
            return Err("no temporary files can be made".to_owned());
        };
        let run = || -> io::Result<Option<std::process::ExitStatus>> {
            let mut child = Command::new(&self.program)
                .args(arguments)
                .stdin(stdin)
                .stdout(out.try_clone()?)
                .stderr(err.try_clone()?)
                .spawn()?;
            let until = Instant::now() + within;
            loop {
                if let Some(status) = child.try_wait()? {
                    return Ok(Some(status));
                }
                if Instant::now() >= until {
                    child.kill()?;
                    child.wait()?;
                    return Ok(None);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        note_asked();
        let ran = run();
        note_asked();
        let status = match ran {
            Ok(Some(status)) => status,
            Ok(None) => return Err(format!("no answer within {} s", within.as_secs())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err("not installed".to_owned());
            }
            Err(error) => return Err(error.to_string()),
        };
        let words = |file: &mut std::fs::File| {
            let mut bytes = Vec::new();
            let read = file
                .rewind()
                .and_then(|()| file.take(WORDS_LIMIT).read_to_end(&mut bytes));
            match read {
                Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
                Err(error) => error.to_string(),
            }
        };
        if status.success() {
            return Ok(words(&mut out));
        }
        let said = words(&mut err);
        let last = said.lines().rfind(|line| !line.trim().is_empty());
        Err(last.unwrap_or("it failed without a word").trim().to_owned())
    }

    /// Returns the image of a manifest. A reference is returned unchanged. An archive of the
    /// package is loaded without its names, and its id is returned.
    ///
    /// # Errors
    /// When it is no image, or the archive cannot be loaded.
    pub fn image(&self, package: &Path, image: &str) -> Result<String, ProgramError> {
        let path = match Image::parse(image).map_err(ProgramError::permanent)? {
            Image::Reference(reference) => return Ok(reference.to_owned()),
            Image::Archive(path) => package.join(path),
        };
        let archive = image::without_names(&path)?;
        let said = self
            .ask(&["load".to_owned()], archive.into(), LOAD_WITHIN)
            .map_err(|error| {
                ProgramError::Transient(format!("cannot load image {}: {error}", path.display()))
            })?;
        loaded(&said).ok_or_else(|| {
            ProgramError::Permanent(format!("{} holds no image: {said}", path.display()))
        })
    }

    /// Builds the engine's arguments that run a container to its end.
    ///
    /// # Errors
    /// When a folder cannot be mounted.
    pub fn run(&self, call: &Call<'_>) -> Result<Vec<String>, ProgramError> {
        let (first, rest) = call
            .entry
            .split_first()
            .ok_or_else(|| ProgramError::Permanent("entry: must name a command".to_owned()))?;
        let mut all: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| all.extend(words.iter().map(|word| (*word).to_owned()));
        // Its output is the log. The engine would keep a second one, without a bound.
        add(&["run", "--rm", "--log-driver", "none", "--name", call.name]);
        add(&self.flags.iter().map(String::as_str).collect::<Vec<_>>());
        if !call.network {
            add(&["--network", "none"]);
        }
        let walls = self.walls(call.user);
        add(&walls.iter().map(String::as_str).collect::<Vec<_>>());
        let memory = memory_of(call.grant);
        let bytes = memory.to_string();
        // Without more of it in swap.
        add(&["--memory", &bytes, "--memory-swap", &bytes]);
        let files = memory / FILES_SHARE;
        add(&["--tmpfs", &format!("/tmp:rw,nosuid,nodev,size={files}")]);
        if !call.grant.cpus.is_empty() {
            let cpus: Vec<String> = call.grant.cpus.iter().map(u32::to_string).collect();
            add(&["--cpuset-cpus", &cpus.join(",")]);
        } else if let Some(threads) = call.grant.threads {
            add(&["--cpus", &threads.to_string()]);
        }
        if let Some(device) = &call.grant.device {
            match self.kind {
                Kind::Podman => add(&["--device", &format!("nvidia.com/gpu={}", device.uuid)]),
                Kind::Docker => add(&["--gpus", &format!("device={}", device.uuid)]),
            }
        }
        for (from, to, read_only) in [
            (call.package, PACKAGE, true),
            (call.inputs, INPUTS, true),
            (call.run, RUN, true),
        ] {
            add(&["--mount", &mount(from, to, read_only)?]);
        }
        for name in call.writable {
            let to = format!("{RUN}/{name}");
            add(&["--mount", &mount(&call.run.join(name), &to, false)?]);
        }
        for (name, value) in call.environment {
            add(&["--env", &format!("{name}={value}")]);
        }
        if let Some(file) = call.environment_file {
            add(&["--env-file", &file.to_string_lossy()]);
        }
        let entry = match first.contains('/') {
            true => format!("{PACKAGE}/{}", first.trim_start_matches("./")),
            false => first.clone(),
        };
        // Every word of a manifest stands after a `=` or after `--`, where an engine reads no
        // flags.
        let entry = format!("--entrypoint={entry}");
        add(&["--workdir", PACKAGE, &entry, "--", call.image]);
        all.extend(rest.iter().cloned());
        Ok(all)
    }

    /// The restrictions of every container, and its user.
    pub(super) fn walls(&self, user: (u32, u32)) -> Vec<String> {
        let mut all = [
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
            "--read-only",
            "--pids-limit",
            PROCESSES,
        ]
        .map(str::to_owned)
        .to_vec();
        all.extend(["--user".to_owned(), format!("{}:{}", user.0, user.1)]);
        if self.kind == Kind::Podman && user.0 != 0 {
            // Otherwise the user's own files would belong to nobody inside.
            all.extend(["--userns", "keep-id"].map(str::to_owned));
        }
        all
    }

    /// Builds a command that removes a container, for one that ignores signals.
    pub fn end(&self, name: &str) -> Vec<String> {
        let at_once: &[&str] = match self.kind {
            // It waits for ten seconds otherwise, if the first process ignores SIGTERM.
            Kind::Podman => &["--time", "0"],
            Kind::Docker => &[],
        };
        let program = self.program.to_string_lossy().into_owned();
        let words = ["rm", "--force"].iter().chain(at_once).chain([&name]);
        let words = words.map(|word| (*word).to_owned());
        [program].into_iter().chain(words).collect()
    }
}

/// Parses the name of the loaded image from the engine's output.
fn loaded(said: &str) -> Option<String> {
    said.lines()
        .filter_map(|line| line.trim().strip_prefix("Loaded image"))
        .filter_map(|rest| rest.split_once(':'))
        .map(|(_, name)| name.trim().to_owned())
        .rfind(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::package::DeviceGrant;

    fn call<'a>(
        grant: &'a Grant,
        environment: &'a [(String, String)],
        entry: &'a [String],
    ) -> Call<'a> {
        Call {
            name: "fiec-a1",
            image: "registry.example/sum:1",
            entry,
            package: Path::new("/cache/sum"),
            run: Path::new("/tmp/fiec-a1/run"),
            writable: &["state", "outputs"],
            inputs: Path::new("/data"),
            network: false,
            grant,
            environment,
            environment_file: None,
            user: (1000, 100),
        }
    }

    #[test]
    fn the_command_line_holds_mounts_bounds_and_the_entry_in_place_of_the_images_own() {
        let engine = |kind, name: &str| Engine {
            kind,
            program: PathBuf::from(name),
            flags: Vec::new(),
        };
        let grant = Grant {
            memory_bytes: Some(1 << 30),
            cpus: vec![2, 3],
            threads: Some(2),
            device: Some(DeviceGrant {
                uuid: "GPU-1".to_owned(),
                memory_bytes: None,
            }),
            ..Grant::default()
        };
        let environment = [("FIEC_BOUNDARY".to_owned(), "3".to_owned())];
        let entry = ["./run.sh".to_owned(), "--fast".to_owned()];
        let podman = engine(Kind::Podman, "podman")
            .run(&call(&grant, &environment, &entry))
            .unwrap();
        let expected = "run --rm --log-driver none --name fiec-a1 --network none --cap-drop all \
             --security-opt no-new-privileges --read-only --pids-limit 4096 \
             --user 1000:100 --userns keep-id --memory 1073741824 --memory-swap 1073741824 \
             --tmpfs /tmp:rw,nosuid,nodev,size=268435456 --cpuset-cpus 2,3 --device nvidia.com/gpu=GPU-1 \
             --mount type=bind,src=/cache/sum,dst=/fiec/package,readonly \
             --mount type=bind,src=/data,dst=/fiec/inputs,readonly \
             --mount type=bind,src=/tmp/fiec-a1/run,dst=/fiec/run,readonly \
             --mount type=bind,src=/tmp/fiec-a1/run/state,dst=/fiec/run/state \
             --mount type=bind,src=/tmp/fiec-a1/run/outputs,dst=/fiec/run/outputs \
             --env FIEC_BOUNDARY=3 --workdir /fiec/package \
             --entrypoint=/fiec/package/run.sh -- registry.example/sum:1 --fast";
        assert_eq!(podman.join(" "), expected);
        let bounded = Engine {
            flags: vec!["--ulimit".to_owned(), "nofile=1024:1024".to_owned()],
            ..engine(Kind::Podman, "podman")
        };
        let text = bounded.run(&call(&grant, &environment, &entry)).unwrap();
        let expected_bounded =
            expected.replace("fiec-a1 --net", "fiec-a1 --ulimit nofile=1024:1024 --net");
        assert_eq!(text.join(" "), expected_bounded);
        let docker = engine(Kind::Docker, "docker")
            .run(&call(&grant, &environment, &entry))
            .unwrap();
        let expected = expected
            .replace(" --userns keep-id", "")
            .replace("--device nvidia.com/gpu=GPU-1", "--gpus device=GPU-1");
        assert_eq!(docker.join(" "), expected);
        let grant = Grant {
            threads: Some(4),
            ..Grant::default()
        };
        let plain = Call {
            network: true,
            environment_file: Some(Path::new("/tmp/fiec-a1/env")),
            ..call(&grant, &[], &entry)
        };
        let text = engine(Kind::Docker, "docker")
            .run(&plain)
            .unwrap()
            .join(" ");
        assert!(text.contains("--env-file /tmp/fiec-a1/env "), "{text}");
        assert!(
            text.contains("--cpus 4") && !text.contains("--network"),
            "{text}"
        );
        // Without a grant of memory, not more than the machine's.
        let machine = format!("--memory {} ", memory_of_the_machine());
        assert!(text.contains(&machine), "{text}");
        assert_eq!(
            engine(Kind::Podman, "podman").end("fiec-a1"),
            ["podman", "rm", "--force", "--time", "0", "fiec-a1"]
        );
    }

    #[test]
    fn nothing_that_a_manifest_says_is_a_flag_of_the_engine() {
        let engine = Engine {
            kind: Kind::Docker,
            program: PathBuf::from("docker"),
            flags: Vec::new(),
        };
        let grant = Grant::default();
        let entry = ["--volume=/:/host".to_owned(), "--privileged".to_owned()];
        let evil = Call {
            image: "--user=0:0",
            ..call(&grant, &[], &entry)
        };
        let words = engine.run(&evil).unwrap();
        let dashes = words.iter().position(|word| word == "--").unwrap();
        let (flags, rest) = words.split_at(dashes);
        assert_eq!(rest[1..], ["--user=0:0", "--privileged"]);
        assert_eq!(
            flags.last().unwrap(),
            "--entrypoint=/fiec/package/--volume=/:/host"
        );
        for image in ["--user=0:0", "/abs.tar", "../up.tar", "python:3"] {
            let refused = engine.image(Path::new("/"), image).unwrap_err();
            assert!(refused.is_permanent(), "{refused}");
            assert!(refused.to_string().contains("is no image"), "{refused}");
        }
    }

    #[test]
    fn a_folder_that_a_mount_cannot_say_is_refused() {
        let (grant, entry) = (Grant::default(), ["x".to_owned()]);
        let evil = Call {
            inputs: Path::new("/data,readonly=false"),
            ..call(&grant, &[], &entry)
        };
        let engine = Engine {
            kind: Kind::Docker,
            program: PathBuf::from("docker"),
            flags: Vec::new(),
        };
        assert!(engine.run(&evil).unwrap_err().is_permanent());
    }

    #[test]
    fn the_name_of_a_loaded_image_is_read_from_what_engines_say() {
        for (said, expected) in [
            ("Loaded image: sum:1\n", Some("sum:1")),
            (
                "Getting image\nLoaded image: localhost/sum:1",
                Some("localhost/sum:1"),
            ),
            ("Loaded image ID: sha256:ab12\n", Some("sha256:ab12")),
            ("nothing", None),
        ] {
            assert_eq!(loaded(said).as_deref(), expected, "{said}");
        }
    }
}
