//! An agent's configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fiec_schemas::hardware::default_thresholds;
use fiec_schemas::{BoundaryIndex, NodeId, Thresholds};
use tokio_util::sync::CancellationToken;

use crate::revocation::RevocationOptions;
use crate::run_dir;
use crate::superseded;

/// An agent's configuration; see the fields for the defaults.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name.
    pub node: NodeId,
    /// Executions at once; 1 by default.
    pub slots: u32,
    /// This process is the agent's alone: processes whose parents have ended become its children, and
    /// are ended.
    pub adopts_orphans: bool,
    /// Executions that may be parked at once; as many as slots by default.
    pub parked: Option<u32>,
    /// Bindings that may wait for a slot. Beyond that the node refuses. 20,000 by default.
    pub queue: usize,
    /// Memory limit in bytes: enforced by a cgroup where permitted, else a declared budget. None
    /// means the limit that encloses the process.
    pub memory_limit: Option<u64>,
    /// Whether to create a cgroup if possible; true by default.
    pub cgroup: bool,
    /// Whether to measure NVIDIA devices; true by default.
    pub devices: bool,
    /// A file of simulated devices that replaces the machine's own, for tests. See
    /// [`fiec_probes::simulated`].
    pub device_file: Option<PathBuf>,
    /// Folder of earlier measurements of this machine; in the user's cache by default.
    pub profile_cache: Option<PathBuf>,
    /// Path of sysfs: `/sys`, or a tree of the same form for tests.
    pub sysfs: PathBuf,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// Thresholds of this node.
    pub thresholds: Thresholds,
    /// The shard of the capsule stream that it pulls from.
    pub shard: u16,
    /// Folders of inputs. Parameters may name files in them and no others. None by default.
    pub input_dirs: Vec<PathBuf>,
    /// What the programs of packages see and may do.
    pub launch: fiec_kit::launch::Rules,
    /// Folder of the files whose content submissions may take for variables. None by default.
    pub secret_dir: Option<PathBuf>,
    /// Folder where the agent notes its children, so that a later agent can end orphans. It must
    /// belong to this user alone. See [`crate::run_dir`] for the default.
    pub run_dir: PathBuf,
    /// Address of `/metrics` and `/healthz`, if they are served.
    pub http: Option<SocketAddr>,
    /// Interval of vectors without a change; 1 s by default.
    pub heartbeat: Duration,
    /// Command of a child; this executable with `program-child` by default.
    pub child_command: Vec<String>,
    /// How long an idle child is kept; 60 s by default.
    pub child_idle: Duration,
    /// Whether children are started ahead and kept for the next execution. True by default; false
    /// only for measurements.
    pub warm: bool,
    /// Idle new children with a device's context, per device; 0 by default. Beside them at most one
    /// child holds a context: prepared for an execution, or idle after one.
    pub warm_contexts: usize,
    /// How long an idle child keeps a device's context without a request; 30 s by default.
    pub context_idle: Duration,
    /// A program parks at a boundary if it could not commit for this long; 30 s by default.
    pub lease: Duration,
    /// Longest interval of routine commits while the recorder is behind; a minute by default.
    /// See [`crate::unrecorded`].
    pub longest_commit_interval: Duration,
    /// How long a superseded large σ stays in the broker: readers may be fetching it, and a broker
    /// that loses the end of a ledger needs it again. 150 s by default.
    pub superseded_after: Duration,
    /// Deadline of a drain; 30 s by default.
    pub drain_deadline: Duration,
    /// Time for a cancelled program to reach its next boundary; 2 s by default.
    pub cancel_grace: Duration,
    /// Patterns of the programs beyond the built-in ones that may run here, e.g. `train@*`; none
    /// by default.
    pub allow_programs: Vec<String>,
    /// What their containers may have.
    pub containers: crate::containers::Containers,
    /// Folder of the cache of packages and data, for this node alone. `cache` in the run folder by
    /// default.
    pub cache_dir: Option<PathBuf>,
    /// Bytes that the cache may hold; 8 GiB by default.
    pub cache_limit: u64,
    /// Threads that one execution is granted. By default the slots share the node's processors
    /// equally.
    pub threads: Option<u32>,
    /// First pause after a crash, doubled each time up to 30 s; 200 ms by default.
    pub backoff: Duration,
    /// Lifetime of a proof. The canaries run again at half of it. 24 h by default.
    pub proof_lifetime: Duration,
    /// How long `started` waits for a message to travel with; 3 ms by default.
    pub started_alone_after: Duration,
    /// How the node learns that its machine will be revoked.
    pub revocation: RevocationOptions,
    /// For tests: a runner panics when its program reaches this boundary.
    pub panics_at: Option<BoundaryIndex>,
    /// Leave at once: set by the second signal.
    pub leave_now: CancellationToken,
}

/// This process's own program, also after its file was replaced or removed.
const OWN_FILE: &str = "/proc/self/exe";

impl Options {
    /// The defaults for this node.
    pub fn new(node: NodeId) -> Self {
        let run_dir = run_dir::default_of(&node);
        Self {
            node,
            slots: 1,
            adopts_orphans: false,
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
            launch: fiec_kit::launch::Rules::default(),
            secret_dir: None,
            run_dir,
            http: None,
            heartbeat: Duration::from_secs(1),
            child_command: vec![OWN_FILE.to_owned(), "program-child".to_owned()],
            child_idle: Duration::from_secs(60),
            warm: true,
            warm_contexts: 0,
            context_idle: Duration::from_secs(30),
            lease: Duration::from_secs(30),
            longest_commit_interval: Duration::from_secs(60),
            superseded_after: superseded::KEPT,
            drain_deadline: Duration::from_secs(30),
            cancel_grace: Duration::from_secs(2),
            allow_programs: Vec::new(),
            containers: crate::containers::Containers::default(),
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
