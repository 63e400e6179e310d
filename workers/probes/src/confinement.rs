//! Where a worker runs, and the isolation that it can give its programs.
//!
//! A worker inside a container lacks abilities that it has on the host. It cannot run programs as
//! other users or create control groups below its own, and mostly cannot start containers. A
//! submission or an operator may need to know, so a node states its abilities in its descriptor.

use std::fs;
use std::path::Path;

use fiec_schemas::substrate::Confinement;
use rustix::fs::Access;

use crate::cgroup;

/// Files that container runtimes create in a container's root.
const MARKS: [&str; 2] = ["run/.containerenv", ".dockerenv"];
/// Variables that runtimes or Kubernetes set for the first process, which passes them on.
const VARIABLES: [&str; 2] = ["container", "KUBERNETES_SERVICE_HOST"];
/// Parts of control group names (v1, or v2 without a namespace).
const GROUPS: [&str; 4] = ["libpod-", "kubepods", "docker-", "cri-containerd-"];
/// Bits of `CapEff`, as in `capability.h`.
const SETGID_AND_SETUID: u64 = 1 << 6 | 1 << 7;

/// Returns the sign that this process runs inside a container, or none on a host.
pub fn inside_container() -> Option<String> {
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let variable = |name: &str| std::env::var(name).ok();
    said_by(Path::new("/"), variable, &group)
}

fn said_by(root: &Path, variable: impl Fn(&str) -> Option<String>, group: &str) -> Option<String> {
    let mark = MARKS.iter().find(|mark| root.join(mark).exists());
    let mark = mark.map(|mark| format!("the file /{mark}"));
    let named = || {
        let set = |name: &&&str| variable(name).is_some_and(|value| !value.is_empty());
        let name = VARIABLES.iter().find(set)?;
        Some(format!("the variable {name}"))
    };
    let grouped = || {
        let path = group.lines().find_map(|line| {
            let path = line.splitn(3, ':').nth(2)?;
            path.split('/')
                .any(|part| GROUPS.iter().any(|name| part.starts_with(name)))
                .then_some(path)
        })?;
        Some(format!("the control group {path}"))
    };
    mark.or_else(named).or_else(grouped)
}

/// Returns where this process runs, and then its abilities.
pub fn confinement() -> Vec<Confinement> {
    let contained = inside_container().is_some();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let group = cgroup::locate_own();
    Confinement::ALL
        .iter()
        .copied()
        .filter(|one| match one {
            Confinement::Container => contained,
            Confinement::Host => !contained,
            Confinement::Users => may_change_user(&status),
            Confinement::Cgroups => group.as_ref().is_ok_and(|own| is_writable(&own.dir)),
            Confinement::Containers => has_engine(),
        })
        .collect()
}

fn may_change_user(status: &str) -> bool {
    let field = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let bits = field.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    bits.is_some_and(|bits| bits & SETGID_AND_SETUID == SETGID_AND_SETUID)
}

fn is_writable(folder: &Path) -> bool {
    rustix::fs::access(folder, Access::WRITE_OK).is_ok()
}

fn has_engine() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| {
        ["podman", "docker"]
            .iter()
            .any(|name| rustix::fs::access(folder.join(name), Access::EXEC_OK).is_ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn a_container_is_known_by_its_mark_its_variable_or_its_group() {
        let root = tempfile::tempdir().unwrap();
        let host = "4:memory:/user.slice\n0::/user.slice/session-1.scope\n";
        assert_eq!(said_by(root.path(), none, host), None);
        let kubernetes =
            |name: &str| (name == "KUBERNETES_SERVICE_HOST").then(|| "10.0.0.1".into());
        let said = said_by(root.path(), kubernetes, host).unwrap();
        assert_eq!(said, "the variable KUBERNETES_SERVICE_HOST");
        let group = "4:memory:/libpod_parent/libpod-ab12\n";
        let said = said_by(root.path(), none, group).unwrap();
        assert_eq!(said, "the control group /libpod_parent/libpod-ab12");
        // The daemon's own group on a host.
        let engine = "0::/system.slice/libpod_parent\n";
        assert_eq!(said_by(root.path(), none, engine), None);
        fs::write(root.path().join(".dockerenv"), "").unwrap();
        let said = said_by(root.path(), none, host).unwrap();
        assert_eq!(said, "the file /.dockerenv");
    }

    #[test]
    fn other_users_take_both_capabilities() {
        assert!(may_change_user("Name:\tx\nCapEff:\t00000000000000c0\n"));
        assert!(!may_change_user("CapEff:\t0000000000000080\n"));
        assert!(!may_change_user("CapEff:\t0000000000000000\n"));
        assert!(!may_change_user(""));
    }

    #[test]
    fn a_process_says_where_it_runs_first() {
        let all = confinement();
        let place = match inside_container() {
            Some(_) => Confinement::Container,
            None => Confinement::Host,
        };
        assert_eq!(all[0], place);
        assert_eq!(all.contains(&Confinement::Containers), has_engine());
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let users = all.contains(&Confinement::Users);
        assert_eq!(users, may_change_user(&status));
    }
}
