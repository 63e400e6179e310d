//! FIEC's own images and containers as the tests use them: made from the binary under test, run by
//! the engine of this machine, and gone with the test, also when it fails.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use fiec_kit::foreign::container::{Engine, Kind};
use fiec_lab::process::Process;

use crate::stage::{BINARY, proc};

/// The lab's binary in a container: it is no part of the images.
pub const LAB: &str = "/usr/bin/fiec-lab";
/// The label of all that a test makes: the process id of the test.
const LABEL: &str = "fiec.test.pid";

/// The project.
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

/// What a command of the engine says, or why it failed.
pub fn ask(engine: &Engine, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new(&engine.program);
    let output = command.args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

/// FIEC's images, made from the binary under test; they are removed when nobody holds them.
#[derive(Debug)]
pub struct Images {
    pub engine: Engine,
    /// References of the images.
    pub worker: String,
    pub services: String,
}

impl Images {
    /// Those of this process; why there are none where no engine answers.
    pub fn get() -> Result<Arc<Self>, String> {
        static MADE: Mutex<Weak<Images>> = Mutex::new(Weak::new());
        // A test that panicked while it held the lock has left nothing half done here.
        let mut made = MADE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(images) = made.upgrade() {
            return Ok(images);
        }
        let engine = Engine::find()?;
        sweep(&engine);
        let images = Arc::new(Self::build(engine));
        images.start()?;
        *made = Arc::downgrade(&images);
        Ok(images)
    }

    fn build(engine: Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let staged = Command::new(root().join("services/deploy/stage"))
            .args([&product(), folder.path()])
            .output()
            .unwrap();
        assert!(staged.status.success(), "{staged:?}");
        let images = Self {
            worker: format!("localhost/fiec-test-worker:{}", std::process::id()),
            services: format!("localhost/fiec-test-services:{}", std::process::id()),
            engine,
        };
        let label = format!("{LABEL}={}", std::process::id());
        for (name, file) in [
            (&images.worker, "workers/Containerfile"),
            (&images.services, "services/Containerfile"),
        ] {
            let file = root().join(file);
            let mut words = vec!["build"];
            if images.engine.kind == Kind::Podman {
                // The other format has no place for a health check.
                words.extend(["--format", "docker"]);
            }
            words.extend(["--tag", name, "--label", &label]);
            words.extend(["--file", file.to_str().unwrap()]);
            words.push(folder.path().to_str().unwrap());
            ask(&images.engine, &words).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
        images
    }

    /// Starts the image, which must succeed, and again under a memory limit, which takes rights
    /// that an engine without root may lack.
    fn start(&self) -> Result<(), String> {
        let run = |limit: &[&str]| {
            let flags: Vec<&str> = self.engine.flags.iter().map(String::as_str).collect();
            let entry = ["--entrypoint", "/usr/bin/fiec", &self.worker, "--version"];
            ask(
                &self.engine,
                &[
                    &["run", "--rm", "--network", "none"],
                    &flags[..],
                    limit,
                    &entry,
                ]
                .concat(),
            )
        };
        let said = run(&[]).unwrap_or_else(|why| panic!("the image does not start: {why}"));
        assert!(said.starts_with("fiec"), "{said}");
        let limited = run(&["--memory", "256m"]);
        limited.map_err(|why| format!("no container can be limited here: {why}"))?;
        Ok(())
    }

    /// What the engine says of an image by this template.
    pub fn inspect(&self, image: &str, template: &str) -> String {
        let words = ["image", "inspect", "--format", template, image];
        ask(&self.engine, &words).unwrap()
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        for image in [&self.worker, &self.services] {
            // One that was never made is not there to be removed.
            let _ = ask(&self.engine, &["rmi", "--force", image]);
        }
    }
}

/// The product's binary, which cargo builds beside the lab's for the tests of the workspace.
fn product() -> PathBuf {
    let product = Path::new(BINARY).with_file_name("fiec");
    let missing = "the images hold the product: build it with `cargo build --package fiec`";
    assert!(product.is_file(), "{}: {missing}", product.display());
    product
}

/// Removes what tests that were killed have left.
fn sweep(engine: &Engine) {
    let label = format!("label={LABEL}");
    let template = format!("{{{{.ID}}}} {{{{index .Labels \"{LABEL}\"}}}}");
    let template = template.as_str();
    let all = ["ps", "--all", "--filter", &label, "--format", template];
    // Docker prints labels of containers otherwise; there is nothing to sweep then.
    for line in ask(engine, &all).unwrap_or_default().lines() {
        if let Some((id, pid)) = line.split_once(' ')
            && pid.parse().is_ok_and(|pid| !proc::is_alive(pid))
        {
            let _ = ask(engine, &["rm", "--force", id]);
        }
    }
    let images = ["images", "--quiet", "--filter", &label];
    for id in ask(engine, &images).unwrap_or_default().lines() {
        let template = format!("{{{{index .Config.Labels \"{LABEL}\"}}}}");
        let words = ["image", "inspect", "--format", template.as_str(), id];
        let pid = ask(engine, &words).ok().and_then(|pid| pid.parse().ok());
        if pid.is_some_and(|pid| !proc::is_alive(pid)) {
            let _ = ask(engine, &["rmi", "--force", id]);
        }
    }
}

/// A running container. Its engine's command is a child of this process, passes signals on, and
/// ends with this process; what is left is removed when this is dropped.
#[derive(Debug)]
pub struct Container {
    pub name: String,
    pub process: Process,
    images: Arc<Images>,
}

impl Container {
    /// Runs an image with these flags of `run` and these words for its entry point: walled in, on
    /// a root that nobody can write, in the host's network, where the servers of the tests listen.
    pub fn run(
        images: &Arc<Images>,
        image: &str,
        flags: &[String],
        words: &[&str],
        log: PathBuf,
    ) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fiec-test-{}-{count}", std::process::id());
        let label = format!("{LABEL}={}", std::process::id());
        let mut all: Vec<String> = [
            "run",
            "--rm",
            "--name",
            &name,
            "--label",
            &label,
            "--network",
            "host",
            "--read-only",
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
        ]
        .map(str::to_owned)
        .to_vec();
        all.extend(["--volume".to_owned(), format!("{BINARY}:{LAB}:ro")]);
        all.extend(images.engine.flags.iter().cloned());
        all.extend_from_slice(flags);
        all.push(image.to_owned());
        all.extend(words.iter().map(|word| (*word).to_owned()));
        let process = Process::start(&name, &images.engine.program, &all, &[], log).unwrap();
        Self {
            name,
            process,
            images: Arc::clone(images),
        }
    }

    /// Runs a command inside; what it says, or why it failed.
    pub fn exec(&self, words: &[&str]) -> Result<String, String> {
        let all = [&["exec", &self.name], words].concat();
        ask(&self.images.engine, &all)
    }

    /// The first process inside, as the host numbers it; none before it runs.
    pub fn pid(&self) -> Option<u32> {
        let words = ["inspect", "--format", "{{.State.Pid}}", &self.name];
        let pid = ask(&self.images.engine, &words).ok()?.parse().ok()?;
        (pid != 0).then_some(pid)
    }

    /// Whether the engine says that it is well, by the check of its image.
    pub fn is_healthy(&self) -> bool {
        match self.images.engine.kind {
            Kind::Podman => {
                let words = ["healthcheck", "run", &self.name];
                ask(&self.images.engine, &words).is_ok()
            }
            Kind::Docker => {
                let template = "{{.State.Health.Status}}";
                let words = ["inspect", "--format", template, &self.name];
                ask(&self.images.engine, &words).is_ok_and(|status| status == "healthy")
            }
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.name, self.process.tail(25));
        }
        let mut words = vec!["rm", "--force"];
        if self.images.engine.kind == Kind::Podman {
            words.extend(["--time", "0", "--ignore"]);
        }
        words.push(&self.name);
        if let Err(why) = ask(&self.images.engine, &words) {
            eprintln!("container {} may be left: {why}", self.name);
        }
    }
}

/// The containers of this process that the engine still knows.
pub fn left(engine: &Engine) -> Vec<String> {
    let filter = format!("label={LABEL}={}", std::process::id());
    let words = ["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"];
    let names = ask(engine, &words).unwrap();
    names.lines().map(str::to_owned).collect()
}
