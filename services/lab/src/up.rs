//! `fiec up`: the demo's cluster without the demo. It runs until Ctrl-C or SIGTERM.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use fiec::commands::console::{Console, Service};
use fiec::context::UpFile;
use fiec::exit::Outcome;
use fiec::ui::Steps;
use fiec_broker::ConnectOptions;
use fiec_schemas::Tenant;
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster::{Cluster, ClusterOptions};
use crate::judge::address_of;
use crate::process::Process;

/// Start a private cluster on this machine and keep it until Ctrl-C
#[derive(Debug, Args)]
pub struct UpArgs {
    /// Folder of data and logs, from which the next start continues [default: a temporary folder]
    #[arg(long)]
    pub data_dir: Option<PathBuf>,
    /// Worker processes
    #[arg(long, default_value_t = 3)]
    pub workers: u32,
    /// Slots of each worker
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
    /// Memory limit of each worker, e.g. 2GiB [default: the host's]
    #[arg(long)]
    pub memory_limit: Option<String>,
    /// Folder of input files; repeatable. Submissions may name files in these folders only
    /// [default: the working directory]
    #[arg(long, value_name = "DIR")]
    pub input_dir: Vec<PathBuf>,
    /// Policy services
    #[arg(long, default_value_t = 1)]
    pub policies: u32,
    /// Seconds until a worker that has ended starts again
    #[arg(long, default_value_t = 15.0)]
    pub revive_seconds: f64,
    /// Port of nats-server [default: a free one]
    #[arg(long)]
    pub nats_port: Option<u16>,
    /// Port of PostgreSQL [default: a free one]
    #[arg(long)]
    pub postgres_port: Option<u16>,
    /// Port of the console [default: a free one]
    #[arg(long)]
    pub console_port: Option<u16>,
}

/// Starts the cluster, prints its URLs and waits.
///
/// # Errors
/// If a part could not be started, or a server ends by itself.
pub async fn run(args: UpArgs, json: bool) -> anyhow::Result<Outcome> {
    let steps = Steps::new(json);
    let mut worker_args = vec!["--slots".to_owned(), args.slots.to_string()];
    // The servers ask for a password that only this user can read. So only this user can push.
    for option in ["--allow-program", "--allow-image"] {
        worker_args.extend([option.to_owned(), "*".to_owned()]);
    }
    worker_args.push("--allow-network".to_owned());
    if let Some(limit) = &args.memory_limit {
        worker_args.extend(["--memory-limit".to_owned(), limit.clone()]);
    }
    let defaults = ClusterOptions::default();
    let input_dirs = match args.input_dir.is_empty() {
        true => defaults.input_dirs.clone(),
        false => args.input_dir.clone(),
    };
    let mut cluster = Cluster::start(
        ClusterOptions {
            data_dir: args.data_dir.clone(),
            input_dirs,
            workers: args.workers,
            worker_args,
            policies: args.policies,
            nats_port: args.nats_port,
            postgres_port: args.postgres_port,
            ..defaults
        },
        &steps,
    )
    .await?;
    let logins = cluster.logins.clone();
    let logins = logins.context("a cluster without history")?;
    let file = UpFile {
        pid: std::process::id(),
        nats: cluster.servers.nats_url().into(),
        database: logins.reader.url().into(),
        owner: logins.owner.clone().into(),
    };
    let (reader, recorder) = (&logins.reader, &logins.recorder);
    let services = [reader.service("fiec"), recorder.service("fiec_recorder")];
    // Commands go on finding the cluster that was here first.
    let first = UpFile::read();
    if first.is_none() {
        file.write(&services.join("\n"))?;
    }
    let services = UpFile::services().unwrap_or_default();
    let stop = CancellationToken::new();
    let (asked, services_to_ask) = watch::channel(Vec::new());
    let console = Console::start(
        SocketAddr::from(([127, 0, 0, 1], args.console_port.unwrap_or(0))),
        ConnectOptions::new(file.nats.clone(), "fiec console"),
        file.database.clone(),
        Tenant::new("default")?,
        services_to_ask,
        stop.clone(),
    )
    .await?;
    let entrance = console.entrance();
    // Before anybody is told that it is there, and may end it.
    let mut ends = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    ];
    if json {
        println!(
            "{}",
            json!({"pid": file.pid, "nats": file.nats.expose(),
                   "database": file.database.expose(), "pg_service_file": services,
                   "data_dir": cluster.data_dir(), "console": entrance})
        );
    } else {
        print_urls(&file, &services, &entrance, first.as_ref(), &cluster);
    }
    let pause = Duration::from_secs_f64(args.revive_seconds.clamp(0.0, 86_400.0));
    let ended = watch_over(&mut cluster, pause, &asked, &mut ends).await;
    stop.cancel();
    console.ended().await;
    file.remove();
    steps.done("stopping");
    cluster.stop().await;
    ended?;
    Ok(Outcome::Done)
}

fn print_urls(
    file: &UpFile,
    services: &Path,
    console: &str,
    first: Option<&UpFile>,
    cluster: &Cluster,
) {
    let nats = file.nats.expose();
    let database = file.database.expose();
    let logs = cluster.data_dir().join("logs");
    println!(
        "
console     {console}
            (good once; `fiec console` prints another)
NATS        {nats}
PostgreSQL  {database}
logs        {}
",
        logs.display()
    );
    if let Some(first) = first {
        println!(
            "Another cluster of yours runs here (process {}), and `fiec` commands find that one. For \
             this one:

  export FIEC_NATS_URL={nats}
  export FIEC_DATABASE_URL={database}

Ctrl-C ends everything of this one.",
            first.pid
        );
        return;
    }
    println!(
        "Your other `fiec` commands on this machine find it by themselves. Other tools get the URL of NATS
from the environment. It has a password, and everyone who knows it can run programs as you:

  export NATS_URL={nats}
  nats pub -J --send-on=newline --force-stdin --no-templates fiec.submit.default < examples/batch.jsonl
  nats micro info fiec

  export PGSERVICEFILE={services}
  psql service=fiec -c 'SELECT * FROM execution_summary'

Ctrl-C ends everything.",
        services = services.display(),
    );
}

/// Learns where services and workers can be asked for their health; true if something has changed. A
/// process that was started again has the address of the one before it until its log names another.
fn learn_addresses(cluster: &Cluster, known: &mut BTreeMap<String, (u32, Service)>) -> bool {
    let services = cluster.policies.iter().chain(&cluster.recorder);
    let all: Vec<&Process> = services.chain(&cluster.workers).collect();
    let before = known.len();
    known.retain(|name, _| all.iter().any(|process| process.name == *name));
    let mut is_new = known.len() != before;
    for process in all {
        let before = known.get(&process.name);
        if before.is_some_and(|(pid, _)| *pid == process.pid()) {
            continue;
        }
        if let Some(address) = address_of(process)
            && before.is_none_or(|(_, before)| before.address != address)
        {
            let name = process.name.clone();
            let service = Service {
                name: name.clone(),
                address,
            };
            known.insert(name, (process.pid(), service));
            is_new = true;
        }
    }
    is_new
}

/// Watches the cluster until a signal, or until a server ends. A worker that has ended restarts
/// after `pause`.
async fn watch_over(
    cluster: &mut Cluster,
    pause: Duration,
    asked: &watch::Sender<Vec<Service>>,
    [terminate, interrupt]: &mut [Signal; 2],
) -> anyhow::Result<()> {
    let mut look = tokio::time::interval(Duration::from_secs(1));
    let mut down = BTreeMap::new();
    let mut addresses = BTreeMap::new();
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = look.tick() => {
                for line in cluster.revive(&mut down, pause)? {
                    eprintln!("{line}");
                }
                if learn_addresses(cluster, &mut addresses) {
                    asked.send_replace(addresses.values().map(|(_, one)| one.clone()).collect());
                }
            }
        }
    }
}
