//! `setup`, `worker`, `policy`, `recorder`: the parts of a cluster. The last three run until
//! SIGTERM or Ctrl-C.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use fiec_agent::containers::{Containers, ImagePrefix};
use fiec_broker::topology;
use fiec_kit::launch::{self, Environment, Passed, Rules};
use fiec_schemas::{NodeId, Signal, Threshold, Thresholds, subjects};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::commands::sharing::SharingArgs;
use crate::context::Global;
use crate::exit::Outcome;
use crate::node_keys;

/// Address of `/metrics` and `/healthz`.
#[derive(Debug, Args)]
pub struct HttpArg {
    /// Address of /metrics and /healthz; port 0 takes a free one
    #[arg(long, env = "FIEC_HTTP", default_value = "127.0.0.1:0")]
    pub http: SocketAddr,
}

/// Options of `fiec setup`.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Copies of each stream and bucket: 1, or 3 or 5 in a cluster [default: as many as it has; a
    /// new one gets as many as the others have, the first ones 1]
    #[arg(long)]
    pub replicas: Option<usize>,
    /// Lets --replicas take copies away from a stream that has more
    #[arg(long, requires = "replicas")]
    pub allow_fewer_replicas: bool,
    /// Shards of nodes; about 500 nodes each [default: as many as there are, else 1]
    #[arg(long)]
    pub shards: Option<u16>,
    /// Bytes that streams and buckets share, e.g. 200GiB: each gets a share [default: as before, at
    /// first half of the server's limit]
    #[arg(long, value_parser = parse_bytes)]
    pub store_bytes: Option<u64>,
    /// First sequence of a ledger stream that is created again after a loss
    #[arg(long)]
    pub ledger_first_sequence: Option<u64>,
}

/// Creates or updates streams and buckets, and tables if a database is known.
///
/// # Errors
/// If a server refuses.
pub async fn setup(args: SetupArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("setup").await?;
    // Tables first: a stream that is created again must begin after the last recorded sequence.
    let mut recorded = BTreeMap::new();
    match global.owner_url() {
        Ok(url) => {
            let pool = fiec_recorder::connect(url.expose()).await?;
            fiec_recorder::migrate(&pool).await?;
            recorded = fiec_recorder::checkpoints(&pool).await?;
            println!("tables, views and roles are as they should be");
        }
        Err(error) => println!("tables were left alone: {error}"),
    }
    let behind = |stream: &str| {
        recorded
            .get(stream)
            .filter(|seq| **seq > 0)
            .map(|seq| seq + 1)
    };
    let profile = topology::Profile {
        replicas: args.replicas,
        allow_fewer_replicas: args.allow_fewer_replicas,
        shards: args.shards,
        store_bytes: args.store_bytes,
        ledger_first_sequence: args
            .ledger_first_sequence
            .or_else(|| behind(subjects::LEDGER_STREAM)),
        record_first_sequence: behind(subjects::RECORD_STREAM),
    };
    let applied = topology::apply(&broker, &profile).await?;
    for note in &applied.notes {
        println!("{note}");
    }
    println!(
        "streams and buckets are as they should be, and share {}",
        crate::ui::bytes(applied.store_bytes)
    );
    Ok(Outcome::Done)
}

/// A worker's options.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Name of the node, unique in the cluster [default: the host's name]
    #[arg(long, env = "FIEC_NODE", value_parser = crate::cli::parse_node)]
    pub node: Option<NodeId>,
    /// Name of the host, from which the node's name derives without --node; set it in a container,
    /// which does not know it [default: the system's name]
    #[arg(long, env = "FIEC_HOST_NAME")]
    pub host_name: Option<String>,
    /// Executions that run at the same time
    #[arg(long, env = "FIEC_SLOTS", default_value_t = 1)]
    pub slots: u32,
    /// Executions that may be parked in addition: they wait at a boundary with a live process
    /// [default: as many as slots; 0: none]
    #[arg(long, env = "FIEC_PARKED")]
    pub parked: Option<u32>,
    /// Memory limit of all executions here, e.g. 2GiB: a cgroup where permitted, else a declared
    /// budget [default: the tightest limit that encloses the process]
    #[arg(long, env = "FIEC_MEMORY_LIMIT", value_parser = parse_bytes)]
    pub memory_limit: Option<u64>,
    /// Never create a cgroup: the memory limit is a declared budget
    #[arg(long)]
    pub no_cgroup: bool,
    /// Threshold instead of a default: signal=high:low:dwell_ms, e.g. memory=0.9:0.75:10000;
    /// repeatable
    #[arg(long, value_parser = parse_threshold)]
    pub threshold: Vec<(Signal, Threshold)>,
    /// Label for `requires.labels`, e.g. rack=7; repeatable
    #[arg(long, value_parser = parse_label)]
    pub label: Vec<(String, String)>,
    /// Shard of the node
    #[arg(long, default_value_t = 0)]
    pub shard: u16,
    /// Folder for files of a running agent, with a sub-folder for each node; it must belong to this
    /// user alone [default: in XDG_RUNTIME_DIR, else in the temporary folder]
    #[arg(long, env = "FIEC_RUN_DIR")]
    pub run_dir: Option<PathBuf>,
    /// Folder of inputs: parameters may name files in it, and in no other folder; repeatable, or
    /// several separated by `:` [default: no files are read]
    #[arg(
        long,
        env = "FIEC_INPUT_DIR",
        value_name = "DIR",
        value_delimiter = ':'
    )]
    pub input_dir: Vec<PathBuf>,
    /// Program that may run here besides the built-in ones: NAME@VERSION, or a pattern with `*`;
    /// repeatable
    #[arg(
        long,
        env = "FIEC_ALLOW_PROGRAM",
        value_delimiter = ',',
        value_name = "PATTERN"
    )]
    pub allow_program: Vec<String>,
    /// Containers of programs may have the network, if their manifest asks for it
    #[arg(long, env = "FIEC_ALLOW_NETWORK")]
    pub allow_network: bool,
    /// Images that programs may use besides those in their packages: the beginning of their names by
    /// whole parts, e.g. registry.example/team, or `sha256:` for ids, or `*`; repeatable
    #[arg(
        long,
        env = "FIEC_ALLOW_IMAGE",
        value_delimiter = ',',
        value_name = "PREFIX"
    )]
    pub allow_image: Vec<ImagePrefix>,
    /// Variable of this worker's environment that programs see besides PATH, HOME and the like;
    /// repeatable. Not of containers
    #[arg(
        long,
        env = "FIEC_PASS_ENV",
        value_delimiter = ',',
        value_name = "NAME"
    )]
    pub pass_env: Vec<Passed>,
    /// Folder of files that submissions may use as values of their programs' environment variables
    /// (`"env": {"TOKEN": {"file": "NAME"}}`)
    #[arg(long, env = "FIEC_SECRET_DIR", value_name = "DIR")]
    pub secret_dir: Option<PathBuf>,
    /// Processes and threads that programs may add to those of the machine, if this worker is not
    /// root's
    #[arg(long, env = "FIEC_MAX_PROCESSES", default_value_t = fiec_kit::launch::PROCESSES)]
    pub max_processes: u32,
    /// Folder for fetched packages and data, with a sub-folder for each node [default: in
    /// XDG_CACHE_HOME; with --run-dir, there]
    #[arg(long, env = "FIEC_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Most bytes in that folder; the least recently used files are removed first
    #[arg(long, env = "FIEC_CACHE_LIMIT", default_value = "8GiB", value_parser = parse_bytes)]
    pub cache_limit: u64,
    /// Threads of one execution [default: the processors divided among the slots]
    #[arg(long, env = "FIEC_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// JSON file of simulated devices, instead of the machine's own (for tests and trials)
    #[arg(long, value_name = "FILE", hide = true)]
    pub device_file: Option<PathBuf>,
    /// Path of sysfs (for tests: a tree with its own counters)
    #[arg(long, env = "FIEC_SYSFS", hide = true, default_value = "/sys")]
    pub sysfs: PathBuf,
    /// Milliseconds between two hardware vectors when nothing changes
    #[arg(long, env = "FIEC_HEARTBEAT_MS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub heartbeat_ms: u64,
    /// Warm processes for each device, which already have a device context: an execution starts
    /// faster, and each waiting process takes device memory
    #[arg(long, env = "FIEC_WARM_CONTEXTS", default_value_t = 0, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=16))]
    pub warm_contexts: u8,
    /// File that announces the machine's revocation when it appears: empty, a number of seconds, a
    /// time (RFC 3339), or JSON with `time` or `seconds`; SIGUSR1 and SIGPWR announce it too
    #[arg(long, env = "FIEC_REVOCATION_FILE", value_name = "PATH")]
    pub revocation_file: Option<PathBuf>,
    /// Seconds until the machine goes away, if the notice does not say it
    #[arg(
        long,
        env = "FIEC_REVOCATION_SECONDS",
        default_value_t = 120,
        value_name = "SECONDS"
    )]
    pub revocation_seconds: u32,
    /// Keep no child processes warm (for measurements)
    #[arg(long, hide = true)]
    pub cold: bool,
    /// Milliseconds from a program's first crash to its next attempt, doubled after each further
    /// crash (for experiments with faster time)
    #[arg(long, hide = true, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=30_000))]
    pub backoff_ms: u64,
    /// Time limit of a drain in seconds
    #[arg(long, default_value_t = 30.0)]
    pub drain_seconds: f64,
    /// Seconds without a commit after which an execution pauses at its next boundary, until the
    /// broker is reachable again
    #[arg(long, default_value_t = 30.0)]
    pub lease_seconds: f64,
    /// Seconds that a recorder that is behind may keep two routine commits apart: σ never waits
    /// longer, and the history of a long outage has gaps
    #[arg(long, default_value_t = 60.0)]
    pub longest_commit_interval_seconds: f64,
    /// Seconds to keep the chunks of a state that a newer commit has replaced; must be longer than
    /// the work that a broker can lose in a power loss
    #[arg(long, default_value_t = 150.0)]
    pub superseded_seconds: f64,
    #[command(flatten)]
    pub http: HttpArg,
}

/// Runs a worker agent until a signal ends it. Then the agent drains.
///
/// # Errors
/// If another worker has the node's name, or the broker cannot be reached.
pub async fn worker(args: WorkerArgs, global: &Global) -> anyhow::Result<Outcome> {
    hide();
    let node = args.node.unwrap_or_else(|| {
        let system = rustix::system::uname();
        let own = || system.nodename().to_string_lossy().into_owned();
        NodeId::from_host_name(&args.host_name.unwrap_or_else(own))
    });
    let mut thresholds: Thresholds = fiec_schemas::hardware::default_thresholds();
    thresholds.extend(args.threshold);
    let mut options = fiec_agent::Options {
        slots: args.slots,
        parked: args.parked,
        memory_limit: args.memory_limit,
        cgroup: !args.no_cgroup,
        thresholds,
        labels: args.label.into_iter().collect::<BTreeMap<_, _>>(),
        shard: args.shard,
        http: Some(args.http.http),
        drain_deadline: Duration::from_secs_f64(args.drain_seconds.clamp(0.0, 86_400.0)),
        lease: Duration::from_secs_f64(args.lease_seconds.clamp(0.001, 86_400.0)),
        longest_commit_interval: Duration::from_secs_f64(
            args.longest_commit_interval_seconds.clamp(0.001, 86_400.0),
        ),
        superseded_after: Duration::from_secs_f64(args.superseded_seconds.clamp(0.0, 86_400.0)),
        ..fiec_agent::Options::new(node.clone())
    };
    options.allow_programs = args.allow_program;
    options.containers = Containers {
        network: args.allow_network,
        images: args.allow_image,
    };
    options.cache_limit = args.cache_limit;
    options.threads = args.threads;
    options.heartbeat = Duration::from_millis(args.heartbeat_ms);
    options.sysfs = args.sysfs;
    options.device_file = args.device_file;
    options.backoff = Duration::from_millis(args.backoff_ms);
    let cache = args.cache_dir.or_else(|| match &args.run_dir {
        // The cache of a private cluster is removed with its folder.
        Some(_) => None,
        None => user_cache(),
    });
    options.cache_dir = cache.map(|folder| folder.join(node.as_str()));
    if let Some(folder) = args.run_dir {
        options.run_dir = folder.join(node.as_str());
    }
    options.input_dirs = args.input_dir;
    options.secret_dir = args.secret_dir;
    options.adopts_orphans = true;
    options.launch = Rules {
        environment: Environment::Passed(args.pass_env),
        processes: args.max_processes,
    };
    options.revocation.file = args.revocation_file;
    options.revocation.seconds = args.revocation_seconds;
    revoke_on_signals(Arc::clone(&options.revocation.signal))?;
    options.warm = !args.cold;
    options.warm_contexts = args.warm_contexts.into();
    let broker = global.broker(&format!("worker {node}")).await?;
    let stop = stop_on_signals(options.leave_now.clone())?;
    fiec_agent::Agent::run(options, broker, stop).await?;
    Ok(Outcome::Done)
}

/// Hides the secrets in this process's memory and environment from its user's other processes, such
/// as the programs that it starts.
fn hide() {
    if let Err(error) = launch::hide() {
        tracing::warn!(%error, "other processes of this user can read this one");
    }
}

/// Cache folder of this user's nodes.
fn user_cache() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(folder.join("fiec").join("nodes"))
}

/// A policy service's options.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// Milliseconds of silence after which a node is probed; without an answer it counts as lost
    #[arg(long, default_value_t = 5_000)]
    pub liveness_ms: u64,
    /// Seconds of silence after which a node that holds nothing is forgotten; a cordon, a drain and a
    /// quarantine keep it
    #[arg(long, env = "FIEC_FORGET_NODES_S", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(1..))]
    pub forget_nodes_s: u64,
    /// Hold an execution after this many workers ended while they computed it, without a commit
    /// between, since its program may end them; 0: never
    #[arg(long, default_value_t = 3)]
    pub deadly_workers: u32,
    /// Milliseconds for a node to append an execution's first binding itself, with its first
    /// result; then this service appends the binding; 0: it always does
    #[arg(long, env = "FIEC_ENTRUST_MS", default_value_t = 200)]
    pub entrust_ms: u64,
    /// Most waiting executions of a tenant whose quota sets no limit; submission lines beyond it are
    /// refused
    #[arg(long, env = "FIEC_WAITING", default_value_t = fiec_policy_service::WAITING)]
    pub waiting: u32,
    /// Share (0 to 1) of the committed boundaries of built-in programs that another node computes
    /// again, if the submission does not set `verify`
    #[arg(long, default_value_t = 0.01, value_parser = parse_share)]
    pub verify_share: f64,
    /// File of the nodes that may have work, with their public keys: lines `NODE = KEY`, as printed
    /// by `fiec nodes --keys`; a node that is missing or has another key gets no work [default:
    /// each node names its own key]
    #[arg(long, env = "FIEC_NODE_KEYS", value_name = "FILE")]
    pub node_keys: Option<PathBuf>,
    #[command(flatten)]
    pub sharing: SharingArgs,
    #[command(flatten)]
    pub http: HttpArg,
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err("a share is at least 0 and at most 1".to_owned())
    }
}

/// Runs a policy service until a signal ends it.
///
/// # Errors
/// If the broker cannot be reached or lacks its streams.
pub async fn policy(args: PolicyArgs, global: &Global) -> anyhow::Result<Outcome> {
    hide();
    let broker = global.broker("policy").await?;
    let mut options = fiec_policy_service::Options {
        entrust: Duration::from_millis(args.entrust_ms),
        waiting: args.waiting,
        http: Some(args.http.http),
        ..fiec_policy_service::Options::default()
    };
    options.policy.liveness_ms = args.liveness_ms;
    options.policy.deadly_workers = args.deadly_workers;
    options.policy.forget_ms = args.forget_nodes_s.saturating_mul(1_000);
    options.policy.verification.share = args.verify_share;
    args.sharing.apply(&mut options.policy);
    if let Some(file) = &args.node_keys {
        let keys = node_keys::read(file)?;
        tracing::info!(nodes = keys.len(), file = %file.display(), "work goes to nodes of these keys alone");
        options.policy.node_keys = Some(Arc::new(keys));
    }
    let stop = stop_on_signals(CancellationToken::new())?;
    fiec_policy_service::PolicyService::new(options, broker)
        .run(stop)
        .await?;
    Ok(Outcome::Done)
}

/// A recorder's options.
#[derive(Debug, Args)]
pub struct RecorderArgs {
    /// Largest state, in bytes, that is copied into PostgreSQL
    #[arg(long, default_value = "64MiB", value_parser = parse_bytes)]
    pub state_limit: u64,
    /// Days of boundaries, decisions and vectors to keep
    #[arg(long, default_value_t = 90)]
    pub keep_days: u32,
    /// Days after which unused objects, states and chunks are removed from the broker; at least 30,
    /// 0: never
    #[arg(long, default_value_t = 30, value_parser = parse_collect_days)]
    pub collect_days: u32,
    /// The same time in seconds, with four sweeps in it (for experiments with faster time)
    #[arg(long, hide = true, conflicts_with = "collect_days", value_parser = clap::value_parser!(u32).range(1..))]
    pub collect_seconds: Option<u32>,
    /// Seconds for which no ledger may name a chunk of a state before it is removed; longer than what
    /// a broker can lose in a power loss
    #[arg(long, default_value_t = 150)]
    pub chunk_grace_seconds: u32,
    /// Days for which the large state of an execution that failed or was cancelled is kept for
    /// `fiec retry`
    #[arg(long, default_value_t = 7)]
    pub keep_failed_days: u32,
    /// Remove nothing; the log and the table `collection` say what would be removed
    #[arg(long)]
    pub collect_dry_run: bool,
    #[command(flatten)]
    pub http: HttpArg,
}

fn parse_collect_days(text: &str) -> Result<u32, String> {
    match text.parse() {
        // The ledger can refer to a result for 30 days.
        Ok(days) if days == 0 || days >= 30 => Ok(days),
        _ => Err(format!("{text:?} must be 0 (never) or at least 30 days")),
    }
}

/// Runs the recorder until a signal ends it.
///
/// # Errors
/// If the broker cannot be reached, or the ledger stream was lost or rolled back.
pub async fn recorder(args: RecorderArgs, global: &Global) -> anyhow::Result<Outcome> {
    hide();
    let broker = global.broker("recorder").await?;
    let pool = fiec_recorder::connect(global.owner_url()?.expose()).await?;
    let mut collection = fiec_recorder::Collection {
        after: (args.collect_days > 0)
            .then(|| Duration::from_secs(u64::from(args.collect_days) * 86_400)),
        dry_run: args.collect_dry_run,
        chunk_grace: Duration::from_secs(args.chunk_grace_seconds.max(1).into()),
        keep_failed: Duration::from_secs(u64::from(args.keep_failed_days) * 86_400),
        ..fiec_recorder::Collection::default()
    };
    if let Some(seconds) = args.collect_seconds {
        let after = Duration::from_secs(seconds.into());
        (collection.after, collection.every) = (Some(after), after / 4);
    }
    let options = fiec_recorder::RecorderOptions {
        http: Some(args.http.http),
        state_limit_bytes: args.state_limit,
        retention_days: args.keep_days,
        collection,
        ..fiec_recorder::RecorderOptions::default()
    };
    let stop = stop_on_signals(CancellationToken::new())?;
    fiec_recorder::Recorder::new(options, broker, pool)
        .run(stop)
        .await?;
    Ok(Outcome::Done)
}

/// SIGUSR1, and SIGPWR of a failing power supply, announce that this machine will go away.
fn revoke_on_signals(notice: Arc<Notify>) -> anyhow::Result<()> {
    let mut asked = signal(SignalKind::user_defined1())?;
    let power = rustix::process::Signal::POWER.as_raw();
    let mut power = signal(SignalKind::from_raw(power))?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                Some(()) = asked.recv() => {}
                Some(()) = power.recv() => {}
                else => return,
            }
            notice.notify_one();
        }
    });
    Ok(())
}

/// A token that SIGTERM and Ctrl-C cancel. The second signal cancels `leave_now`. The third one
/// ends the process at once.
fn stop_on_signals(leave_now: CancellationToken) -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = stop.clone();
    tokio::spawn(async move {
        for count in 0.. {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            match count {
                0 => {
                    tracing::info!("stopping");
                    token.cancel();
                }
                1 => {
                    tracing::warn!("second signal: exiting immediately");
                    leave_now.cancel();
                }
                _ => std::process::exit(130),
            }
        }
    });
    Ok(stop)
}

/// Parses `512MiB`, `2GiB`, `1000000`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        other => return Err(format!("unit {other:?} is not B, KiB, MiB, GiB or TiB")),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is no size, e.g. 512MiB"))?;
    let bytes = number * unit as f64;
    if (1.0..9.0e18).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(format!(
            "{text:?} must be at least one byte and below 8 EiB"
        ))
    }
}

pub(crate) fn parse_threshold(text: &str) -> Result<(Signal, Threshold), String> {
    let form = || format!("{text:?} must be signal=high:low:dwell_ms, e.g. memory=0.9:0.75:10000");
    let (name, numbers) = text.split_once('=').ok_or_else(form)?;
    let signal = Signal::ALL
        .into_iter()
        .find(|s| s.as_str() == name)
        .ok_or_else(|| {
            let known: Vec<_> = Signal::ALL.iter().map(|s| s.as_str()).collect();
            format!("{name:?} is no signal; there are {}", known.join(", "))
        })?;
    let parts: Vec<&str> = numbers.split([':', ',']).map(str::trim).collect();
    let [high, low, dwell] = parts.as_slice() else {
        return Err(form());
    };
    let threshold = Threshold {
        high: high.parse().map_err(|_| form())?,
        low: low.parse().map_err(|_| form())?,
        dwell_ms: dwell.parse().map_err(|_| form())?,
    };
    threshold
        .check()
        .map_err(|(field, rule)| format!("{field} {rule}"))?;
    Ok((signal, threshold))
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .ok_or_else(|| format!("{text:?} must be name=value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        assert!(parse_bytes("12 parsecs").is_err());
        assert!(parse_bytes("0").is_err());
    }

    #[test]
    fn a_threshold_that_breaks_its_rule_is_refused_with_the_field() {
        assert!(parse_threshold("memory=0.9:0.75:1000").is_ok());
        assert!(parse_threshold("memory=0.9,0.75,1000").is_ok());
        assert!(
            parse_threshold("memory=0.5:0.75:1000")
                .unwrap_err()
                .contains("low")
        );
        assert!(
            parse_threshold("mood=0.5:0.1:1")
                .unwrap_err()
                .contains("no signal")
        );
        assert!(
            parse_threshold("memory=0.5")
                .unwrap_err()
                .contains("high:low")
        );
    }
}
