//! `fiec pressure`: real memory pressure on a node of this machine. The process allocates and writes
//! memory inside the node's limit and stays below 95 % of it. It asks the kernel to kill it first.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use fiec_probes::MemoryLimit;
use fiec_schemas::Timestamp;

/// Fill the memory of a node on this machine
#[derive(Debug, Clone, Args)]
pub struct PressureArgs {
    /// The node's memory limit: `memory_limit_source` of `fiec nodes --json` [default: the control
    /// group of this process, as inside a container]
    #[arg(long, requires = "limit_bytes")]
    pub limit_source: Option<String>,
    /// The limit in bytes [default: that of this process's control group]
    #[arg(long, requires = "limit_source")]
    pub limit_bytes: Option<u64>,
    /// Run folder of the node, for a node with a declared budget
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Bytes that the node already uses, for a node with a declared budget
    #[arg(long, default_value_t = 0)]
    pub used_bytes: u64,
    /// Share of the limit to fill, with the memory of all other processes of the node
    #[arg(long, default_value_t = 0.88)]
    pub share: f64,
    /// Seconds to hold it
    #[arg(long, default_value_t = 30.0)]
    pub hold: f64,
    /// Print `crossed MICROSECONDS` when the memory in use crosses this share: the wall clock before
    /// the allocation that crosses it
    #[arg(long, hide = true)]
    pub say_share: Option<f64>,
}

/// Time until a node with a declared budget has found a new process.
const FOUND: Duration = Duration::from_millis(150);

/// Share that is never exceeded, so that the kernel's limit is not reached.
const MOST: f64 = 0.95;
/// One allocation, in bytes.
const STEP: usize = 4 << 20;

/// Fills the memory, holds it and frees it.
///
/// # Errors
/// If the share is out of range, or this process cannot join the node's limit.
pub fn run(args: &PressureArgs) -> anyhow::Result<()> {
    if !(args.share > 0.0 && args.share < MOST) {
        bail!(
            "--share must be above 0 and below {MOST}, but is {}",
            args.share
        );
    }
    first_to_be_ended()?;
    let (node, limit_bytes) = match (&args.limit_source, args.limit_bytes) {
        (Some(source), Some(bytes)) => (Node::join(args, source)?, bytes),
        _ => Node::around_this_process()?,
    };
    let target = (limit_bytes as f64 * args.share) as u64;
    let most = (limit_bytes as f64 * MOST) as u64;
    if matches!(node, Node::Declared { .. }) {
        std::thread::sleep(FOUND);
    }
    let mut to_say = args
        .say_share
        .map(|share| (limit_bytes as f64 * share) as u64);
    let until = Instant::now() + Duration::from_secs_f64(args.hold.clamp(0.0, 86_400.0));
    let mut held: Vec<Vec<u8>> = Vec::new();
    while Instant::now() < until {
        let (working, all) = node.usage((held.len() * STEP) as u64)?;
        let step = STEP as u64;
        if working + step <= target && all + step <= most {
            // Written, not only reserved: a page of zeros would not count.
            let began = Timestamp::now();
            held.push(vec![0xA5; STEP]);
            let crossed = |at: u64| node.usage((held.len() * STEP) as u64).map(|(w, _)| w >= at);
            if let Some(at) = to_say
                && crossed(at)?
            {
                println!("crossed {}", began.micros());
                to_say = None;
            }
        } else {
            if working > target + 2 * step || all > most {
                held.pop();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    println!("held {} MiB", (held.len() * STEP) >> 20);
    Ok(())
}

fn first_to_be_ended() -> anyhow::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000")
        .context("cannot make this process the first that the kernel would end")
}

/// The node's memory, of which this process has become a part.
enum Node {
    /// A cgroup, with the file that says what is in use.
    Cgroup { usage: PathBuf, stat: PathBuf },
    /// A declared budget: this process is registered in the node's tree.
    Declared { used: u64, registered: PathBuf },
}

impl Node {
    /// The group that this process is in already, and the least limit that encloses it.
    fn around_this_process() -> anyhow::Result<(Self, u64)> {
        let limit = MemoryLimit::detect();
        match &limit {
            MemoryLimit::CgroupV1(path) | MemoryLimit::CgroupV2(path) => {
                let bytes = limit.bytes().context("cannot read the host's memory")?;
                Ok((Self::group(path)?, bytes))
            }
            MemoryLimit::Host | MemoryLimit::Declared { .. } => bail!(
                "no control group limits the memory of this process. The host's memory is never \
                 filled: name a node's limit with --limit-source and --limit-bytes, see \
                 `fiec nodes --json`"
            ),
        }
    }

    fn group(path: &Path) -> anyhow::Result<Self> {
        let usage = ["memory.current", "memory.usage_in_bytes"]
            .map(|name| path.join(name))
            .into_iter()
            .find(|file| file.exists())
            .with_context(|| format!("{} has no memory controller", path.display()))?;
        let stat = path.join("memory.stat");
        Ok(Self::Cgroup { usage, stat })
    }

    fn join(args: &PressureArgs, source: &str) -> anyhow::Result<Self> {
        let pid = std::process::id();
        if let Some(path) = cgroup_path(source) {
            std::fs::write(path.join("cgroup.procs"), pid.to_string())
                .with_context(|| format!("cannot join {}", path.display()))?;
            return Self::group(path);
        }
        let Some(run_dir) = &args.run_dir else {
            bail!("the node's limit {source:?} is no cgroup: give --run-dir of the node");
        };
        let tree = tree_of(run_dir)?;
        let registered = tree.join(format!("pressure-{pid}.pid"));
        std::fs::write(&registered, pid.to_string())
            .with_context(|| format!("cannot write {}", registered.display()))?;
        Ok(Self::Declared {
            used: args.used_bytes,
            registered,
        })
    }

    /// Bytes in use without reclaimable cache, and with it.
    fn usage(&self, held: u64) -> anyhow::Result<(u64, u64)> {
        match self {
            Self::Declared { used, .. } => {
                // This process itself counts as well, as the node counts it.
                let all = used + private_bytes().unwrap_or(held).max(held);
                Ok((all, all))
            }
            Self::Cgroup { usage, stat } => {
                let read = |file: &Path| {
                    std::fs::read_to_string(file)
                        .with_context(|| format!("cannot read {}", file.display()))
                };
                let all: u64 = read(usage)?
                    .trim()
                    .parse()
                    .with_context(|| format!("{} holds no number", usage.display()))?;
                let field = |text: &str, name: &str| {
                    text.lines()
                        .find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok())
                };
                let stat = read(stat)?;
                let pages = |v1: &str, v2: &str| {
                    let found = field(&stat, v1).or_else(|| field(&stat, v2));
                    found.unwrap_or(0)
                };
                let cache = pages("total_inactive_file ", "inactive_file ")
                    + pages("total_active_file ", "active_file ");
                Ok((all.saturating_sub(cache), all))
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Self::Declared { registered, .. } = self {
            // A registration whose process is gone no longer counts.
            let _ = std::fs::remove_file(registered);
        }
    }
}

/// Folder in which a worker looks for processes that count as its own. A folder that no worker uses
/// is refused, because memory held there would press no node.
fn tree_of(run_dir: &Path) -> anyhow::Result<PathBuf> {
    let entries = std::fs::read_dir(run_dir).map(|entries| entries.flatten().collect::<Vec<_>>());
    // Every worker keeps the keys of its nodes in its run folder.
    let is_key = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|e| e == "key");
    if !entries.is_ok_and(|entries| entries.iter().any(is_key)) {
        bail!(
            "--run-dir {} is not the run folder of a worker: it holds no node's key. Give the \
             folder of `fiec worker --run-dir`, by default fiec-NODE in $XDG_RUNTIME_DIR, or \
             fiec-UID-NODE in the temporary folder",
            run_dir.display()
        );
    }
    let tree = run_dir.join("tree");
    std::fs::create_dir_all(&tree).with_context(|| format!("cannot create {}", tree.display()))?;
    Ok(tree)
}

/// Resident less shared bytes of this process.
fn private_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = text.split(' ').skip(1).map_while(|w| w.parse::<u64>().ok());
    let private = pages.next()?.saturating_sub(pages.next()?);
    Some(private * rustix::param::page_size() as u64)
}

fn cgroup_path(source: &str) -> Option<&Path> {
    let path = source
        .split_whitespace()
        .find(|word| word.starts_with("/sys/fs/cgroup"))?;
    Some(Path::new(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_no_worker_uses_is_refused_before_any_memory_is_held() {
        let base = tempfile::tempdir().unwrap();
        for folder in [base.path().join("none"), base.path().to_owned()] {
            let args = PressureArgs {
                limit_source: Some("declared".to_owned()),
                limit_bytes: Some(1 << 20),
                run_dir: Some(folder.clone()),
                used_bytes: 0,
                share: 0.5,
                hold: 0.0,
                say_share: None,
            };
            let refused = Node::join(&args, "declared").err().map(|e| e.to_string());
            let words = refused.expect("no worker has this run folder");
            assert!(words.contains("not the run folder of a worker"), "{words}");
            assert!(words.contains(&folder.display().to_string()), "{words}");
            assert!(!folder.join("tree").exists());
        }
        std::fs::write(base.path().join("n1.key"), "").unwrap();
        assert!(tree_of(base.path()).unwrap().is_dir());
    }
}
