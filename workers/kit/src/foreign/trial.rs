//! Finds the flags that podman needs on this machine, by starting a container.
//!
//! Podman's defaults ask for more open files and processes than a process without
//! `CAP_SYS_RESOURCE` may set. The bounds come from a service manager or an outer container. Its
//! default runtime may not support the machine's control groups. The flags lower the numbers of
//! files and processes, or name another runtime. They never weaken the isolation. If the defaults
//! work, there are no flags.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use super::container::Engine;

/// Time limit of one trial.
const WITHIN: Duration = Duration::from_secs(20);
/// Folders of a command and its libraries, mounted read-only for the trial.
const SYSTEM: [&str; 4] = ["/bin", "/lib", "/lib64", "/usr"];
/// A command that does nothing and succeeds.
const NOTHING: &str = "/bin/true";

/// Flags of `podman run` to try, in this order, after a trial without flags.
pub(super) fn candidates() -> Vec<Vec<String>> {
    let pid_max = fs::read_to_string("/proc/sys/kernel/pid_max");
    candidates_for(
        getrlimit(Resource::Nofile).maximum,
        getrlimit(Resource::Nproc).maximum,
        pid_max.ok().and_then(|text| text.trim().parse().ok()),
    )
}

/// The same for these limits of this process. `None` means no limit.
fn candidates_for(
    files: Option<u64>,
    processes: Option<u64>,
    pid_max: Option<u64>,
) -> Vec<Vec<String>> {
    // Podman first lowers its own limit of processes to the greatest process id.
    let processes = [processes, pid_max].into_iter().flatten().min();
    let limits: Vec<String> = [("nofile", files), ("nproc", processes)]
        .into_iter()
        .filter_map(|(name, limit)| limit.map(|n| (name, n)))
        .flat_map(|(name, n)| ["--ulimit".to_owned(), format!("{name}={n}:{n}")])
        .collect();
    let runtime = ["--runtime".to_owned(), "runc".to_owned()];
    vec![
        limits.clone(),
        runtime.to_vec(),
        [&runtime[..], &limits].concat(),
    ]
}

/// Returns the first flags with which a container of this machine's own files starts, as isolated
/// as a program's.
///
/// # Errors
/// The engine's error without any flag, if no flags helped.
pub(super) fn flags(engine: &Engine, user: (u32, u32)) -> Result<Vec<String>, String> {
    if !Path::new(NOTHING).exists() {
        // No command to try: a run will report a problem, if there is one.
        return Ok(Vec::new());
    }
    let root = tempfile::Builder::new()
        .prefix("fiec-trial-")
        .tempdir()
        .map_err(|error| format!("no folder can be made to try it in: {error}"))?;
    let start = |flags: &[String]| {
        let mut all: Vec<String> = vec!["run".to_owned(), "--rm".to_owned()];
        all.extend_from_slice(flags);
        all.extend(["--network".to_owned(), "none".to_owned()]);
        all.extend(engine.walls(user));
        for folder in SYSTEM.iter().filter(|f| Path::new(f).exists()) {
            all.push("--mount".to_owned());
            all.push(format!("type=bind,src={folder},dst={folder},readonly"));
        }
        all.push("--rootfs".to_owned());
        all.push(root.path().to_string_lossy().into_owned());
        all.push(NOTHING.to_owned());
        engine.ask(&all, Stdio::null(), WITHIN)
    };
    let Err(first) = start(&[]) else {
        return Ok(Vec::new());
    };
    candidates()
        .into_iter()
        .find(|flags| start(flags).is_ok())
        .ok_or_else(|| format!("it starts no container: {first}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_this_process_and_the_walls_stay() {
        let all = candidates_for(Some(20_000), Some(96_551), Some(32_768));
        let all: Vec<String> = all.iter().map(|flags| flags.join(" ")).collect();
        let limits = "--ulimit nofile=20000:20000 --ulimit nproc=32768:32768";
        assert_eq!(
            all,
            [
                limits,
                "--runtime runc",
                &format!("--runtime runc {limits}")
            ]
        );
        let unlimited = candidates_for(Some(1024), None, None);
        assert_eq!(unlimited[0].join(" "), "--ulimit nofile=1024:1024");
    }
}
