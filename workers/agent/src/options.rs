//! What an agent is told before it starts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fiec_schemas::hardware::default_thresholds;
use fiec_schemas::{BoundaryIndex, NodeId, Thresholds};
use tokio_util::sync::CancellationToken;

use crate::revocation::RevocationOptions;
use crate::run_dir;

/// An agent's configuration; see the fields for the defaults.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name.
    pub node: NodeId,
    /// Executions at once; 1 by default.
    pub slots: u32,
    /// Executions that may be parked at once; as many as slots by default.
    pub parked: Option<u32>,
    /// Bindings that may wait for a slot; beyond them it refuses. 20,000 by default.
    pub queue: usize,
    /// Memory limit in bytes: of a cgroup where permitted, else a declared budget. None: whatever
    /// encloses the process.
    pub memory_limit: Option<u64>,
    /// Whether to try for a cgroup of its own; true by default.
    pub cgroup: bool,
    /// Whether to measure NVIDIA devices; true by default.
    pub devices: bool,
    /// A file of simulated devices in place of the machine's own, for tests; see
    /// [`fiec_probes::simulated`].
    pub device_file: Option<PathBuf>,
    /// Folder of earlier measurements of this machine; in the user's cache by default.
    pub profile_cache: Option<PathBuf>,
    /// Where sysfs is: `/sys`, or another tree of its form for tests.
    pub sysfs: PathBuf,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Thresholds of this node.
    pub thresholds: Thresholds,
    /// Which capsule stream it pulls from.
    pub shard: u16,
    /// Folders of inputs: parameters may name files in them and no others; none by default.
    pub input_dirs: Vec<PathBuf>,
    /// Folder where the agent notes its children, so that a later one can end what is left; it
    /// must belong to this user alone. See [`crate::run_dir`] for the default.
    pub run_dir: PathBuf,
    /// Where `/metrics` and `/healthz` are served, if anywhere.
    pub http: Option<SocketAddr>,
    /// Time between two vectors when nothing changes; 1 s by default.
    pub heartbeat: Duration,
    /// Command of a child; this executable with `program-child` by default.
    pub child_command: Vec<String>,
    /// How long an idle child is kept; 60 s by default.
    pub child_idle: Duration,
    /// Whether children are started ahead and kept for the next execution; true by default, false
    /// only to measure what that is worth.
    pub warm: bool,
    /// New children that hold a device's context, for each device; 0 by default. Those that are
    /// prepared for an execution, or have just served one, come to no more than one beside them.
    pub warm_contexts: usize,
    /// How long an idle child keeps a device's context that nobody has asked for; 30 s by default.
    pub context_idle: Duration,
    /// A program parks at a boundary when it could not commit for so long; 30 s by default.
    pub lease: Duration,
    /// How long a large σ that was superseded stays in the object store, since readers may be
    /// fetching it; 15 s by default.
    pub superseded_after: Duration,
    /// How long a drain may take; 30 s by default.
    pub drain_deadline: Duration,
    /// How long a cancelled program may take to its next boundary; 2 s by default.
    pub cancel_grace: Duration,
    /// Patterns of the programs beyond the built-in ones that may run here, e.g. `train@*`; none
    /// by default.
    pub allow_programs: Vec<String>,
    /// Folder of the node's cache of packages and data, this node's alone; `cache` in the run
    /// folder by default.
    pub cache_dir: Option<PathBuf>,
    /// Bytes that the cache may hold; 8 GiB by default.
    pub cache_limit: u64,
    /// Threads that one execution is granted; the node's processors shared among its slots by
    /// default.
    pub threads: Option<u32>,
    /// First wait after a crash, doubled each time up to 30 s; 200 ms by default.
    pub backoff: Duration,
    /// How long what the canaries have shown counts; they run again at half of it. 24 h by default.
    pub proof_lifetime: Duration,
    /// How long `started` waits to be appended together with what follows it; 3 ms by default.
    pub started_alone_after: Duration,
    /// How it learns that its machine will be gone.
    pub revocation: RevocationOptions,
    /// For tests: a runner panics when its program reaches this boundary.
    pub panics_at: Option<BoundaryIndex>,
    /// Leave at once: the second signal.
    pub leave_now: CancellationToken,
}

impl Options {
    /// The defaults for this node.
    pub fn new(node: NodeId) -> Self {
        let exe = std::env::current_exe().unwrap_or_default();
        let run_dir = run_dir::default_of(&node);
        Self {
            node,
            slots: 1,
            parked: None,
            queue: 20_000,
            memory_limit: None,
            cgroup: true,
            devices: true,
            device_file: None,
            profile_cache: fiec_probes::profile::default_cache(),
            sysfs: PathBuf::from("/sys"),
            labels: BTreeMap::new(),
            thresholds: default_thresholds(),
            shard: 0,
            input_dirs: Vec::new(),
            run_dir,
            http: None,
            heartbeat: Duration::from_secs(1),
            child_command: vec![exe.display().to_string(), "program-child".to_owned()],
            child_idle: Duration::from_secs(60),
            warm: true,
            warm_contexts: 0,
            context_idle: Duration::from_secs(30),
            lease: Duration::from_secs(30),
            superseded_after: Duration::from_secs(15),
            drain_deadline: Duration::from_secs(30),
            cancel_grace: Duration::from_secs(2),
            allow_programs: Vec::new(),
            cache_dir: None,
            cache_limit: 8 << 30,
            threads: None,
            backoff: Duration::from_millis(200),
            proof_lifetime: Duration::from_secs(86_400),
            started_alone_after: Duration::from_millis(3),
            revocation: RevocationOptions::default(),
            panics_at: None,
            leave_now: CancellationToken::new(),
        }
    }
}
