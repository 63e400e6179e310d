//! Addresses of the servers and the name of the user. They come from flags, the environment, or the
//! `fiec up` that runs on this machine.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use fiec_broker::{Broker, ConnectOptions};
use fiec_schemas::{Secret, Tenant};
use serde::{Deserialize, Serialize};

use crate::client::Unreachable;

/// Flags that every command has.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// NATS URL [default: the URL of the `fiec up` running here]
    #[arg(
        long,
        global = true,
        env = "FIEC_NATS_URL",
        value_name = "URL",
        help_heading = "Servers",
        hide_env_values = true
    )]
    pub nats: Option<Secret>,
    /// NATS credentials file
    #[arg(
        long,
        global = true,
        env = "FIEC_NATS_CREDS",
        value_name = "FILE",
        help_heading = "Servers"
    )]
    pub creds: Option<PathBuf>,
    /// PostgreSQL URL [default: the URL of the `fiec up` running here]
    #[arg(
        long,
        global = true,
        env = "FIEC_DATABASE_URL",
        value_name = "URL",
        help_heading = "Servers",
        hide_env_values = true
    )]
    pub database: Option<Secret>,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// Write logs as JSON lines
    #[arg(long, global = true, env = "FIEC_LOG_JSON")]
    pub log_json: bool,
    /// Log filter, e.g. `info` or `fiec_agent=debug` [default: info for services, warn otherwise]
    #[arg(long, global = true, env = "FIEC_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

/// The tenant of a command.
#[derive(Debug, Clone, Args)]
pub struct TenantArg {
    /// Tenant of the executions
    #[arg(long, short = 't', env = "FIEC_TENANT", default_value = "default", value_parser = parse_tenant)]
    pub tenant: Tenant,
}

/// Parses a tenant's name.
///
/// # Errors
/// The rule that the text breaks.
pub fn parse_tenant(text: &str) -> Result<Tenant, String> {
    text.parse()
        .map_err(|error: fiec_schemas::IdError| error.to_string())
}

/// The file by which a running `fiec up` tells other commands on this machine where its servers
/// are.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UpFile {
    /// Process id of the `fiec up`.
    pub pid: u32,
    /// NATS URL, with its password.
    pub nats: Secret,
    /// PostgreSQL URL of the role that reads, with its password.
    pub database: Secret,
    /// PostgreSQL URL of the owner of the tables, with its password.
    pub owner: Secret,
}

impl UpFile {
    /// File of libpq's services beside it, for `PGSERVICEFILE`.
    pub fn services() -> Option<PathBuf> {
        Some(Self::path()?.with_file_name("pg_service.conf"))
    }

    fn path() -> Option<PathBuf> {
        Some(run_folder()?.join("up.json"))
    }

    /// Writes the file, and the services of PostgreSQL beside it. A later `fiec up` replaces both.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write(&self, services: &str) -> anyhow::Result<()> {
        let path = Self::path().context("no HOME to keep up.json in")?;
        write_private(&path.with_file_name("pg_service.conf"), services.as_bytes())?;
        write_private(&path, &serde_json::to_vec_pretty(self)?)
    }

    /// Reads the file, if its `fiec up` still runs.
    pub fn read() -> Option<Self> {
        let text = std::fs::read(Self::path()?).ok()?;
        let file: Self = serde_json::from_slice(&text).ok()?;
        std::path::Path::new("/proc")
            .join(file.pid.to_string())
            .exists()
            .then_some(file)
    }

    /// Removes the files if this process wrote them.
    pub fn remove(&self) {
        if Self::read().is_some_and(|found| found.pid == self.pid) {
            for path in [Self::path(), Self::services()].into_iter().flatten() {
                // If this fails, the file names a process that is gone, and `read` ignores it.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// The folder of files by which processes of one user find each other on this machine.
pub fn run_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_RUNTIME_DIR")
        .or_else(|| std::env::var_os("XDG_CACHE_HOME"))
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(folder.join("fiec"))
}

/// Replaces a file by one that only its owner can read, whatever lay at the path: it holds passwords.
///
/// # Errors
/// If it cannot be written.
pub fn write_private(path: &Path, text: &[u8]) -> anyhow::Result<()> {
    let folder = path.parent().context("the file has no folder")?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text)?;
        file.persist(path).map_err(|error| error.error)
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

impl Global {
    /// The NATS URL.
    ///
    /// # Errors
    /// If none is given and no `fiec up` runs here.
    pub fn nats_url(&self) -> anyhow::Result<Secret> {
        if let Some(url) = &self.nats {
            return Ok(url.clone());
        }
        match UpFile::read() {
            Some(up) => Ok(up.nats),
            None => bail!(Unreachable(
                "no NATS server is known: start one with `fiec up`, or give --nats URL \
                 (or FIEC_NATS_URL)"
                    .to_owned()
            )),
        }
    }

    /// The PostgreSQL URL, of a role that reads.
    ///
    /// # Errors
    /// If none is given and no `fiec up` runs here.
    pub fn database_url(&self) -> anyhow::Result<Secret> {
        self.url_of(|up| up.database)
    }

    /// The PostgreSQL URL for the commands that write tables or read states. A URL that is given is
    /// used as it is.
    ///
    /// # Errors
    /// If none is given and no `fiec up` runs here.
    pub fn owner_url(&self) -> anyhow::Result<Secret> {
        self.url_of(|up| up.owner)
    }

    fn url_of(&self, of_up: fn(UpFile) -> Secret) -> anyhow::Result<Secret> {
        if let Some(url) = &self.database {
            return Ok(url.clone());
        }
        match UpFile::read() {
            Some(up) => Ok(of_up(up)),
            None => bail!(Unreachable(
                "no PostgreSQL server is known: start one with `fiec up`, or give --database URL \
                 (or FIEC_DATABASE_URL)"
                    .to_owned()
            )),
        }
    }

    /// Connects to NATS. `name` appears in the server's list of connections.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn broker(&self, name: &str) -> anyhow::Result<Broker> {
        let mut options = ConnectOptions::new(self.nats_url()?, format!("fiec {name}"));
        options.credentials.clone_from(&self.creds);
        options.timeout = Duration::from_secs(5);
        Ok(Broker::connect(options).await?)
    }

    /// Connects to PostgreSQL.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn database(&self) -> anyhow::Result<sqlx::PgPool> {
        let url = self.database_url()?;
        sqlx::postgres::PgPoolOptions::new()
            .max_connections(4)
            .acquire_timeout(Duration::from_secs(5))
            .connect(url.expose())
            .await
            .map_err(|error| away(url.expose(), error))
    }
}

/// Why PostgreSQL was not reached and what to do, in one sentence.
fn away(url: &str, error: sqlx::Error) -> anyhow::Error {
    let server = fiec_broker::without_secrets(url);
    match error {
        sqlx::Error::Database(refusal) => {
            let words = format!(
                "PostgreSQL at {server} refuses the connection ({}): correct --database \
                 (FIEC_DATABASE_URL)",
                refusal.message()
            );
            anyhow::Error::new(Unreachable(words))
        }
        sqlx::Error::Configuration(error) => {
            anyhow::anyhow!("--database is no URL of PostgreSQL: {error}")
        }
        error => {
            tracing::debug!(%error, "PostgreSQL");
            anyhow::Error::new(Unreachable(format!(
                "PostgreSQL at {server}, which has the history, does not answer: start it, or \
                 correct --database (FIEC_DATABASE_URL); executions continue without it"
            )))
        }
    }
}

/// The user for the history: `user@host`, or the user's number if the environment has no name.
pub fn who() -> String {
    let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let user = user.unwrap_or_else(|_| format!("uid-{}", rustix::process::getuid().as_raw()));
    format!("{user}@{host}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        global: Global,
    }

    #[test]
    fn no_password_is_seen_in_a_log_and_the_file_keeps_it() {
        let (nats, database) = ("nats://u:s3cret@h:1", "postgres://u:s3cret@h:2/fiec");
        let line = Line::parse_from(["fiec", "--nats", nats, "--database", database]);
        let shown = format!("{line:?}");
        assert!(
            shown.contains("nats: Some") && !shown.contains("s3cret"),
            "{shown}"
        );
        assert_eq!(line.global.nats_url().unwrap().expose(), nats);
        let file = UpFile {
            pid: 1,
            nats: nats.into(),
            database: database.into(),
            owner: database.into(),
        };
        let shown = format!("{file:?}");
        assert!(!shown.contains("s3cret"), "{shown}");
        let text = serde_json::to_value(&file).unwrap();
        let expected = serde_json::json!({"pid": 1, "nats": nats, "database": database,
            "owner": database});
        assert_eq!(text, expected);
    }
}
