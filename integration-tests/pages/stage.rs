//! The place in which pages run: a folder with the project's files, the programs on the `PATH`, and servers
//! or a cluster once a block asks for them.

use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use fiec::context::UpFile;
use fiec_dev_servers::{DevServers, NoProgress, Options, locate_nats, locate_postgres};
use fiec_lab::process::Process;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use crate::blocks::{Block, Marker, Place, Run};
use crate::python_support::Python;

/// The binary under test: it has the commands of `fiec` too.
pub const BINARY: &str = env!("CARGO_BIN_EXE_fiec-lab");
/// How long a block may take; nothing takes this long when all is well.
const PATIENCE: Duration = Duration::from_secs(300);
/// Variables of the caller that would change what a page does.
const UNSET: [&str; 9] = [
    "FIEC_NATS_URL",
    "FIEC_NATS_CREDS",
    "FIEC_DATABASE_URL",
    "PGSERVICEFILE",
    "FIEC_TENANT",
    "FIEC_LOG",
    "FIEC_LOG_JSON",
    "FIEC_HTTP",
    "PYTHONPATH",
];

pub struct Stage {
    folder: tempfile::TempDir,
    path: std::ffi::OsString,
    /// Ended in reverse order.
    background: Vec<Process>,
    servers: Option<DevServers>,
}

pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type().unwrap().is_dir() {
            true => copy(&from, &to),
            false => drop(std::fs::copy(&from, &to).unwrap()),
        }
    }
}

fn on_path(program: &str, path: &std::ffi::OsStr) -> bool {
    std::env::split_paths(path).any(|folder| folder.join(program).is_file())
}

impl Stage {
    pub async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        copy(&root().join("examples"), &work.join("examples"));
        for entry in std::fs::read_dir(root()).unwrap() {
            let name = entry.unwrap().file_name();
            if !["examples", "target", ".git"]
                .iter()
                .any(|other| name == *other)
            {
                symlink(root().join(&name), work.join(&name)).unwrap();
            }
        }
        let run = folder.path().join("run");
        std::fs::DirBuilder::new().mode(0o700).create(run).unwrap();
        Self {
            path: programs(folder.path()).await,
            folder,
            background: Vec::new(),
            servers: None,
        }
    }

    fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    /// The `fiec up` that runs on this stage.
    fn up(&self) -> Option<UpFile> {
        let file = self.folder.path().join("run/fiec/up.json");
        serde_json::from_slice(&std::fs::read(file).ok()?).ok()
    }

    /// Does with a block what the comment above it says.
    pub async fn perform(&mut self, block: &Block) {
        let began = Instant::now();
        match &block.marker {
            Some(Marker::File(name)) => self.write(name, &block.text),
            Some(Marker::Run(run)) => self.run(block, run).await,
            Some(Marker::NotHere { .. }) | None => return,
        }
        eprintln!("{block}: {:.1?}", began.elapsed());
    }

    fn write(&self, name: &Path, text: &str) {
        let path = self.work().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        if text.starts_with("#!") {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    async fn run(&mut self, block: &Block, run: &Run) {
        let mut environment = self.environment(run.place).await;
        match run.needs.as_deref() {
            Some("numpy") if Python::get().has_packages => {
                let path = Python::get().path.to_string_lossy().into_owned();
                environment.push(("PYTHONPATH".to_owned(), path));
            }
            Some(program) if !on_path(program, &self.path) => {
                // Past the capture of the test harness.
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED {block}: there is no `{program}`"
                );
                return;
            }
            Some(_) | None => {}
        }
        match &run.until {
            Some(until) => self.start(block, until, &environment).await,
            None => {
                let began = Instant::now();
                let (code, said) = self
                    .shell(&script(&block.text), &environment, PATIENCE)
                    .await;
                let is_right = code.is_some_and(|code| run.exits.contains(&code));
                assert!(
                    is_right,
                    "{block}: exit code {code:?} after {:?}\n{said}\n{}",
                    began.elapsed(),
                    self.logs()
                );
            }
        }
    }

    /// What a place adds to the environment. Starts what the place has.
    async fn environment(&mut self, place: Place) -> Vec<(String, String)> {
        let (nats, (name, database)) = match place {
            Place::Local => return Vec::new(),
            Place::Cluster => {
                if self.up().is_none() {
                    self.launch("fiec up", "fiec nodes", &[]).await.unwrap();
                }
                let up = self.up().expect("`fiec up` says where it is");
                // The commands find the database by themselves.
                let services = self.folder.path().join("run/fiec/pg_service.conf");
                let services = services.display().to_string();
                (up.nats.expose().to_owned(), ("PGSERVICEFILE", services))
            }
            Place::Servers => {
                if self.servers.is_none() {
                    let servers = DevServers::start(Options::default(), &NoProgress).await;
                    self.servers = Some(servers.unwrap());
                }
                let servers = self.servers.as_ref().unwrap();
                let owner = servers.postgres_url().unwrap();
                (servers.nats_url(), ("FIEC_DATABASE_URL", owner))
            }
        };
        let variables = [
            ("NATS_URL", nats.clone()),
            ("FIEC_NATS_URL", nats),
            (name, database),
        ];
        variables
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec()
    }

    async fn start(&mut self, block: &Block, until: &str, environment: &[(String, String)]) {
        let started = self.launch(&script(&block.text), until, environment).await;
        if let Err(why) = started {
            panic!("{block}: {why}\n{}", self.logs());
        }
    }

    /// Starts a command that stays, and waits until it is ready.
    async fn launch(
        &mut self,
        command: &str,
        until: &str,
        environment: &[(String, String)],
    ) -> Result<(), String> {
        let log = self
            .folder
            .path()
            .join(format!("background-{}.log", self.background.len()));
        let mut variables = self.own_variables();
        variables.extend_from_slice(environment);
        let unset = UNSET
            .iter()
            .filter(|name| variables.iter().all(|(set, _)| set != *name));
        let mut text: String = unset.map(|name| format!("unset {name}; ")).collect();
        text += &format!("cd '{}'; exec {command}", self.work().display());
        let process = Process::start(
            command,
            Path::new("/bin/sh"),
            &["-ec".to_owned(), text],
            &variables,
            log,
        )
        .map_err(|error| error.to_string())?;
        self.background.push(process);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (code, said) = self.shell(until, environment, PATIENCE).await;
            if code == Some(0) {
                return Ok(());
            }
            let process = self.background.last_mut().unwrap();
            if let Some(status) = process.ended() {
                return Err(format!("it ended before it was ready: {status}"));
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "not ready after {PATIENCE:?}: `{until}` says {said}"
                ));
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn own_variables(&self) -> Vec<(String, String)> {
        let inside = |name: &str| self.folder.path().join(name).display().to_string();
        vec![
            ("PATH".to_owned(), self.path.to_string_lossy().into_owned()),
            ("XDG_RUNTIME_DIR".to_owned(), inside("run")),
            // No context of the user's own `nats` command takes part.
            ("XDG_CONFIG_HOME".to_owned(), inside("config")),
            ("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned()),
        ]
    }

    /// Runs a script to its end; its exit code and what it said.
    async fn shell(
        &self,
        script: &str,
        environment: &[(String, String)],
        patience: Duration,
    ) -> (Option<i32>, String) {
        let said = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-exc", script]).current_dir(self.work());
        for name in UNSET {
            command.env_remove(name);
        }
        let mut child = command
            .envs(self.own_variables())
            .envs(environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(said.reopen().unwrap())
            .stderr(said.reopen().unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let status = timeout(patience, child.wait()).await;
        let text = std::fs::read(said.path()).unwrap();
        let text = String::from_utf8_lossy(&text).into_owned();
        (status.ok().and_then(|status| status.unwrap().code()), text)
    }

    /// The ends of the logs of what stays.
    fn logs(&self) -> String {
        let tails = self.background.iter();
        tails
            .map(|process| format!("--- {}\n{}\n", process.name, process.tail(20)))
            .collect()
    }

    /// Ends what stays, the last first. Each must end by itself.
    pub async fn end(mut self) {
        while let Some(mut process) = self.background.pop() {
            assert!(process.stop(PATIENCE).await, "{} did not end", process.name);
        }
    }
}

/// The commands of a block. A line that only shows where an address goes is left out: the stage sets it.
fn script(text: &str) -> String {
    let shown = |line: &&str| !(line.starts_with("export ") && line.contains('…'));
    text.lines()
        .filter(shown)
        .map(|line| format!("{line}\n"))
        .collect()
}

/// A `PATH` with everything that pages may call and that is to be had.
async fn programs(folder: &Path) -> std::ffi::OsString {
    let own = folder.join("bin");
    std::fs::create_dir(&own).unwrap();
    for name in ["fiec", "fiec-lab"] {
        symlink(BINARY, own.join(name)).unwrap();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let nats = locate_nats(&NoProgress).await.unwrap();
    symlink(nats.path, own.join("nats-server")).unwrap();
    let postgres = locate_postgres(&NoProgress).await.unwrap();
    let psql = postgres.bin_dir.join("psql");
    if !on_path("psql", &path) && psql.is_file() {
        symlink(psql, own.join("psql")).unwrap();
    }
    // Where `go install` puts the nats command.
    let go = std::process::Command::new("go")
        .args(["env", "GOPATH"])
        .output();
    let go = go.map(|out| PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()).join("bin"));
    let folders = std::iter::once(own).chain(std::env::split_paths(&path));
    std::env::join_paths(folders.chain(go.ok())).unwrap()
}
