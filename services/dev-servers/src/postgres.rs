//! One private PostgreSQL on loopback.
//!
//! The cluster is made beside its final place and renamed, so a killed `initdb` leaves no
//! incomplete cluster there. If this process is root, the server runs as another user
//! ([`Account`]), who owns the cluster and must be able to reach it. Settings are given on the
//! command line at each start. The files in the cluster stay as `initdb` wrote them. Clients
//! connect by TCP only, with the password that lies beside the cluster.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgSslMode};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};

use crate::account::Account;
use crate::child::{Child, Plan, tail};
use crate::error::{At, Error, Result};
use crate::locate::PostgresInstall;
use crate::lock::FileLock;
use crate::login::Login;
use crate::ports;
use crate::secret::{self, USER};

/// The access rules. They replace those that `initdb` wrote in an earlier version.
const HBA: &str = "# Written by fiec.\nhost all all 127.0.0.1/32 scram-sha-256\n";

/// Settings for projections on a small machine: many short upserts, bulk COPY, little memory.
const SETTINGS: &[&str] = &[
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "shared_buffers=128MB",
    "max_wal_size=1GB",
    "jit=off",
    "autovacuum=on",
    "logging_collector=off",
    "log_destination=stderr",
    "dynamic_shared_memory_type=posix",
];

/// Options of a PostgreSQL.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    /// The programs.
    pub install: PostgresInstall,
    /// Folder of the cluster. It is made if missing or empty, and reused otherwise. The log and the
    /// lock lie beside it.
    pub data_dir: PathBuf,
    /// `None`: a free one.
    pub port: Option<u16>,
    /// Database that the first start makes.
    pub database: String,
    /// `false` only if the data may be lost in a power cut (temporary data).
    pub durable: bool,
    /// Further settings, as `-c name=value`. They override the default ones.
    pub settings: Vec<String>,
    /// Time limit until the server answers, crash recovery included.
    pub ready_within: Duration,
}

impl PostgresOptions {
    /// A free port, a database `fiec`.
    pub fn new(install: PostgresInstall, data_dir: impl Into<PathBuf>) -> Self {
        Self {
            install,
            data_dir: data_dir.into(),
            port: None,
            database: "fiec".into(),
            durable: true,
            settings: Vec::new(),
            ready_within: Duration::from_secs(60),
        }
    }
}

/// A running server. Dropping it ends the server at once (`SIGQUIT`).
#[derive(Debug)]
pub struct Postgres {
    child: Child,
    port: u16,
    password: String,
    account: Option<Account>,
    options: PostgresOptions,
    _lock: FileLock,
}

impl Postgres {
    /// Makes the cluster if it does not exist, starts the server and waits until it answers.
    ///
    /// # Errors
    /// If it cannot be started or is not ready in time. The message has the end of its log.
    pub async fn start(mut options: PostgresOptions) -> Result<Self> {
        options.data_dir =
            std::path::absolute(&options.data_dir).at("cannot resolve", &options.data_dir)?;
        let dir = options.data_dir.clone();
        let parent = dir.parent().unwrap_or(Path::new("/")).to_owned();
        // PostgreSQL's user may have to pass through this folder.
        secret::create_folder(&parent, 0o711)?;
        let account = Account::for_servers()
            .map(|chosen| Account::owner_of(&dir.join("PG_VERSION")).unwrap_or(chosen));
        if let Some(account) = &account {
            account.require_reach(&parent)?;
            account.require_reach(&options.install.bin_dir)?;
        }
        let lock = FileLock::own(&beside(&dir, ".lock"), &dir, Duration::from_secs(2)).await?;
        prepare(&options, account.as_ref()).await?;
        wait_for_former(&dir, Duration::from_secs(10)).await?;
        let password = password(&options, account.as_ref()).await?;
        let account_ref = account.as_ref();
        let (child, port) = launch(&options, account_ref, &password, options.port).await?;
        let server = Self {
            child,
            port,
            password,
            account,
            options,
            _lock: lock,
        };
        server.ensure_database().await?;
        Ok(server)
    }

    /// URL of the owner of the database, who is also its superuser.
    pub fn url(&self) -> String {
        self.login_as(USER, self.password.clone()).url()
    }

    /// Lets an existing role log in, by a password that lies beside the cluster.
    ///
    /// # Errors
    /// If there is no such role, or its password cannot be kept.
    pub async fn admit(&self, role: &str) -> Result<Login> {
        let kept = beside(&self.options.data_dir, &format!(".{role}.password"));
        let password = secret::keep(&kept)?;
        let failed = |error| sql_error(&format!("ALTER ROLE {role} PASSWORD …"), &error);
        let mut session = self.open(&self.options.database).await.map_err(failed)?;
        let set = format!("ALTER ROLE \"{role}\" PASSWORD '{password}'");
        let done = sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut session);
        done.await.map_err(failed)?;
        Ok(self.login_as(role, password))
    }

    fn login_as(&self, role: &str, password: String) -> Login {
        Login {
            role: role.to_owned(),
            password,
            port: self.port,
            database: self.options.database.clone(),
        }
    }

    /// `127.0.0.1:PORT`, for messages.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Port for clients. A restart keeps it.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Process id of the postmaster.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Folder of the cluster.
    pub fn data_dir(&self) -> &Path {
        &self.options.data_dir
    }

    /// Path of its log.
    pub fn log(&self) -> PathBuf {
        beside(&self.options.data_dir, ".log")
    }

    /// User of the server, if it is not this process's user.
    pub fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }

    /// True if the postmaster is alive.
    pub fn is_running(&self) -> bool {
        self.child.status().is_none()
    }

    /// Sends `SIGKILL` to the postmaster and waits until it is gone. Its children notice and end.
    pub async fn kill(&mut self) {
        self.child.end(Signal::KILL, Duration::from_secs(5)).await;
    }

    /// Stops the server if it runs, and starts it with the same port and data.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop(Duration::from_secs(10)).await;
        wait_for_former(&self.options.data_dir, Duration::from_secs(10)).await?;
        let account = self.account.as_ref();
        let (child, port) = launch(&self.options, account, &self.password, Some(self.port)).await?;
        self.child = child;
        self.port = port;
        Ok(())
    }

    /// Shuts down fast (ends sessions, writes data) until `deadline`, then kills the server.
    /// Returns true if it ended in time.
    pub async fn stop(&mut self, deadline: Duration) -> bool {
        self.child.end(Signal::INT, deadline).await
    }

    /// Value in the first column of the first row, for checks and tests.
    pub async fn query_one(&self, sql: &str) -> Result<Option<String>> {
        let failed = |error| sql_error(sql, &error);
        let mut session = self.open(&self.options.database).await.map_err(failed)?;
        let row = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
            .fetch_optional(&mut session)
            .await
            .map_err(failed)?;
        let Some(row) = row.filter(|row| !row.is_empty()) else {
            return Ok(None);
        };
        // The simple protocol gives every value as text.
        let value = row.try_get_raw(0).map_err(failed)?;
        value
            .as_str()
            .map(|text| Some(text.to_owned()))
            .or(Ok(None))
    }

    async fn open(&self, database: &str) -> sqlx::Result<PgConnection> {
        connect(self.port, &self.password, database).await
    }

    async fn ensure_database(&self) -> Result<()> {
        let name = &self.options.database;
        let sql = format!("CREATE DATABASE \"{}\"", name.replace('"', "\"\""));
        let is_missing = |error: &sqlx::Error| {
            let answer = error.as_database_error().and_then(|answer| answer.code());
            answer.is_some_and(|code| code == "3D000")
        };
        match self.open(name).await {
            Ok(_) => Ok(()),
            Err(error) if is_missing(&error) => {
                let failed = |error| sql_error(&sql, &error);
                let mut session = self.open("postgres").await.map_err(failed)?;
                let create = sqlx::raw_sql(AssertSqlSafe(sql.clone()));
                let created = create.execute(&mut session).await;
                created.map(drop).map_err(failed)
            }
            Err(error) => Err(sql_error("connect", &error)),
        }
    }
}

async fn connect(port: u16, password: &str, database: &str) -> sqlx::Result<PgConnection> {
    let options = PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .username(USER)
        .password(password)
        .database(database)
        .ssl_mode(PgSslMode::Disable);
    PgConnection::connect_with(&options).await
}

fn sql_error(query: &str, answer: &sqlx::Error) -> Error {
    Error::Sql {
        query: query.to_owned(),
        answer: answer.to_string(),
    }
}

/// Path of the cluster's password.
fn password_file(dir: &Path) -> PathBuf {
    beside(dir, ".password")
}

/// Reads the cluster's password. A cluster of an earlier version has none and trusts everybody: it
/// gets one now.
async fn password(options: &PostgresOptions, account: Option<&Account>) -> Result<String> {
    let dir = &options.data_dir;
    let file = password_file(dir);
    if file.exists() {
        return secret::keep(&file);
    }
    let hba = dir.join("pg_hba.conf");
    std::fs::write(&hba, HBA).at("cannot write", &hba)?;
    let password = secret::random();
    let (words, log) = (beside(dir, ".sql"), beside(dir, ".single.log"));
    secret::write(
        &words,
        &format!("ALTER ROLE {USER} PASSWORD '{password}'\n"),
    )?;
    if let Some(account) = account {
        account.own(&words)?;
    }
    let mut command = clean(Command::new("sh"));
    command.args(["-c", "exec \"$0\" --single -D \"$1\" postgres < \"$2\""]);
    command.arg(options.install.bin_dir.join("postgres"));
    command.args([dir, &words]);
    let done = run(options, account, command, &log).await;
    std::fs::remove_file(&words).at("cannot remove", &words)?;
    done?;
    // The file is written last. Without it, the next start repeats all of this.
    secret::write(&file, &password)?;
    Ok(password)
}

/// A file beside the cluster. PostgreSQL allows only its own files in the cluster's folder.
fn beside(dir: &Path, suffix: &str) -> PathBuf {
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    dir.with_file_name(name)
}

/// Ensures that a cluster of the right version is in the data folder.
async fn prepare(options: &PostgresOptions, account: Option<&Account>) -> Result<()> {
    let dir = &options.data_dir;
    match std::fs::read_to_string(dir.join("PG_VERSION")) {
        Ok(version) => {
            let have = options.install.version.0;
            if version.trim() != have.to_string() {
                return Err(Error::ClusterVersion {
                    path: dir.clone(),
                    found: version.trim().to_owned(),
                    have,
                });
            }
            return Ok(());
        }
        Err(_) if std::fs::read_dir(dir).is_ok_and(|mut d| d.next().is_some()) => {
            return Err(Error::NotACluster { path: dir.clone() });
        }
        Err(_) => {}
    }
    let partial = beside(dir, ".initdb");
    let _ = std::fs::remove_dir_all(&partial);
    std::fs::create_dir(&partial).at("cannot create", &partial)?;
    std::fs::set_permissions(&partial, PermissionsExt::from_mode(0o700))
        .at("cannot set the mode of", &partial)?;
    if let Some(account) = account {
        account.own(&partial)?;
    }
    // The password is renamed together with the cluster, so they always belong together.
    let (new, file) = (beside(dir, ".password.new"), password_file(dir));
    secret::write(&new, &secret::random())?;
    if let Some(account) = account {
        account.own(&new)?;
    }
    let mut command = program(options, "initdb");
    command
        .args([
            "--username",
            USER,
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--no-locale",
        ])
        .arg("--pwfile")
        .arg(&new)
        .args(["--no-instructions", "-D"])
        .arg(&partial);
    if !options.durable {
        command.arg("--no-sync");
    }
    let log = beside(dir, ".initdb.log");
    let _ = std::fs::remove_file(&log);
    if let Err(error) = run(options, account, command, &log).await {
        let _ = std::fs::remove_dir_all(&partial);
        return Err(error);
    }
    std::fs::rename(&new, &file).at("cannot move the password to", &file)?;
    std::fs::rename(&partial, dir).at("cannot move the cluster to", dir)
}

/// Runs a program that prepares a cluster, until it ends.
async fn run(
    options: &PostgresOptions,
    account: Option<&Account>,
    command: Command,
    log: &Path,
) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = Child::spawn(Plan {
        command,
        log: log.to_owned(),
        account: account.cloned(),
        on_parent_death: Signal::INT,
        on_drop: Signal::INT,
    })
    .await?;
    let reason = match tokio::time::timeout(options.ready_within, child.wait()).await {
        Ok(status) if status.success() => return Ok(()),
        Ok(status) => format!("{name} ended with {status}"),
        Err(_) => format!("{name} took too long"),
    };
    Err(Error::NotStarted {
        server: "PostgreSQL",
        reason,
        tail: tail(log),
        log: log.to_owned(),
    })
}

/// A program of the installation, without this process's locale and `PG*` settings.
fn program(options: &PostgresOptions, name: &str) -> Command {
    clean(Command::new(options.install.bin_dir.join(name)))
}

fn clean(mut command: Command) -> Command {
    for (key, _) in std::env::vars_os() {
        let key_text = key.to_string_lossy();
        if key_text.starts_with("PG") || key_text.starts_with("LC_") {
            command.env_remove(&key);
        }
    }
    command.env("LC_ALL", "C").env("TZ", "UTC").current_dir("/");
    command
}

/// Handles an old `postmaster.pid`. Waits for a server that is still ending. Removes the file if
/// its process id now belongs to another program. The lock is held, so no other process of ours
/// starts a server here.
async fn wait_for_former(dir: &Path, patience: Duration) -> Result<()> {
    let file = dir.join("postmaster.pid");
    let until = Instant::now() + patience;
    loop {
        let Ok(text) = std::fs::read_to_string(&file) else {
            return Ok(());
        };
        let pid = text.lines().next().and_then(|l| l.trim().parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            return Ok(());
        };
        let cwd = std::fs::read_link(format!("/proc/{}/cwd", pid.as_raw_nonzero()));
        if cwd.is_ok_and(|cwd| Some(cwd) == dir.canonicalize().ok()) {
            if Instant::now() > until {
                return Err(Error::InUse {
                    path: dir.to_owned(),
                });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        }
        if rustix::process::test_kill_process(pid).is_ok() {
            // The process is alive, but it is no server of this cluster. PostgreSQL would think
            // that it is.
            std::fs::remove_file(&file).at("cannot remove the stale", &file)?;
        }
        return Ok(());
    }
}

/// Starts the server. Retries with another free port after a lost race. Also retries while children
/// of a killed server still hold its memory or a requested port.
async fn launch(
    options: &PostgresOptions,
    account: Option<&Account>,
    password: &str,
    port: Option<u16>,
) -> Result<(Child, u16)> {
    let deadline = Instant::now() + options.ready_within;
    let mut attempts = 20;
    loop {
        let chosen = match port {
            Some(port) => port,
            None => ports::free().at("cannot listen on", Path::new("127.0.0.1"))?,
        };
        match launch_once(options, account, (chosen, password), deadline).await {
            Ok(child) => return Ok((child, chosen)),
            Err(Error::NotStarted { tail, .. }) if attempts > 0 && passes(&tail) => {
                attempts -= 1;
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            Err(e) => return Err(e),
        }
    }
}

fn passes(log: &str) -> bool {
    ["Address already in use", "is still in use"]
        .iter()
        .any(|s| log.contains(s))
}

async fn launch_once(
    options: &PostgresOptions,
    account: Option<&Account>,
    (port, password): (u16, &str),
    deadline: Instant,
) -> Result<Child> {
    let dir = &options.data_dir;
    let log = beside(dir, ".log");
    let _ = std::fs::rename(&log, beside(dir, ".log.old"));
    let mut command = program(options, "postgres");
    command.arg("-D").arg(dir).arg("-p").arg(port.to_string());
    for setting in SETTINGS {
        command.args(["-c", setting]);
    }
    for setting in &options.settings {
        command.args(["-c", setting]);
    }
    let child = Child::spawn(Plan {
        command,
        log: log.clone(),
        account: account.cloned(),
        // Not KILL: with INT the postmaster also ends its children.
        on_parent_death: Signal::INT,
        on_drop: Signal::QUIT,
    })
    .await?;
    let failed = |reason: String| Error::NotStarted {
        server: "PostgreSQL",
        reason,
        log: log.clone(),
        tail: tail(&log),
    };
    let mut last = String::from("no answer");
    loop {
        if let Some(status) = child.status() {
            return Err(failed(format!("it ended with {status}")));
        }
        if says_ready(dir, child.id()) {
            // Every cluster has a database `postgres`. The requested database may not exist yet.
            let open = connect(port, password, "postgres");
            match tokio::time::timeout(Duration::from_secs(5), open).await {
                Ok(Ok(_)) => return Ok(child),
                Ok(Err(e)) => last = e.to_string(),
                Err(_) => last = "it did not answer within 5 s".into(),
            }
        }
        if Instant::now() > deadline {
            let limit = options.ready_within.as_secs();
            return Err(failed(format!("it was not ready within {limit} s: {last}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// True if the cluster's own file names this process and reports that it is ready. So another
/// server on the port is never mistaken for this one.
fn says_ready(dir: &Path, pid: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(dir.join("postmaster.pid")) else {
        return false;
    };
    let mut lines = text.lines();
    lines.next().and_then(|l| l.trim().parse().ok()) == Some(pid)
        && lines.nth(6).is_some_and(|l| l.trim() == "ready")
}
