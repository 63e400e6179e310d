//! Checks this machine without any server. Changes nothing.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::{Check, Status};
use crate::lab;

/// Checks the machine.
pub(super) fn checks() -> Vec<Check> {
    vec![
        program(
            "nats command",
            "nats",
            "go install github.com/nats-io/natscli/nats@v0.4.0, and ~/go/bin on your PATH; `fiec submit` works without it",
        ),
        program(
            "psql",
            "psql",
            "install a PostgreSQL client (Debian: apt install postgresql-client); `fiec history` works without it",
        ),
        cgroup(),
        pressure(),
        devices(),
        laboratory(),
    ]
}

fn program(name: &'static str, file: &str, remedy: &str) -> Check {
    match lab::on_path(file) {
        Some(path) => Check::ok(name, path.display().to_string()),
        None => Check::bad(name, Status::Warning, "not on the PATH", remedy),
    }
}

/// Production does not need the lab, so its absence is no warning.
fn laboratory() -> Check {
    let detail = match lab::find() {
        Some(path) => format!(
            "{}; `fiec-lab doctor` also checks what development servers need",
            path.display()
        ),
        None => "not here; only development and experiments need it".to_owned(),
    };
    Check::ok("fiec-lab", detail)
}

/// The folder of this process's memory controller, and the kind of its hierarchy.
fn memory_controller(own: &str) -> Option<(PathBuf, &'static str)> {
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
    const REMEDY: &str = "this is not an error: a node's memory is compared with its declared \
                          budget; for kernel limits run as root or in a delegated cgroup \
                          (systemd-run --user -p Delegate=yes)";
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some((path, kind)) = memory_controller(&own) else {
        return Check::bad(NAME, Status::Warning, "no memory controller", REMEDY);
    };
    // In a container the path may be the host's. Then the root of the mount is the container's own.
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

fn devices() -> Check {
    let devices = fiec_probes::devices::cuda_devices();
    let detail = if devices.is_empty() {
        "no CUDA device: programs run on the host".to_owned()
    } else {
        devices
            .iter()
            .map(|d| d.name.clone())
            .collect::<Vec<_>>()
            .join(", ")
    };
    Check::ok("CUDA devices", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_cgroup_is_found_in_both_hierarchies() {
        let v1 = "9:name=systemd:/\n4:memory:/a/b\n0::/\n";
        let found = memory_controller(v1).unwrap();
        assert_eq!(found, ("/sys/fs/cgroup/memory/a/b".into(), "v1"));
        let v2 = "0::/user.slice\n";
        let found = memory_controller(v2).unwrap();
        assert_eq!(found, ("/sys/fs/cgroup/user.slice".into(), "v2"));
        assert_eq!(memory_controller(""), None);
    }

    #[test]
    fn every_failed_check_says_what_to_do() {
        for check in checks() {
            assert_eq!(
                check.status == Status::Ok,
                check.remedy.is_empty(),
                "{check:?}"
            );
        }
    }
}
