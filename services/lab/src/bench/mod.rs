//! `fiec bench NAME`: figures of the product, each with its floor from the same run. A bench runs real
//! processes: workers with their children, services and servers.

pub mod against;
pub mod boundary;
pub mod cpu;
pub mod device;
pub mod disciplines;
pub mod figures;
pub mod follow;
pub mod history;
pub mod idle;
pub mod interval;
pub mod kernels;
pub mod latency;
mod library;
pub mod policy;
pub mod python;
pub mod rebind;
pub mod recover;
pub mod telemetry;
pub mod throughput;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use async_nats::HeaderMap;
use clap::{Args, ValueEnum};
use fiec::client;
use fiec::context::Global;
use fiec::exit::Outcome;
use fiec::sql;
use fiec::ui::Steps;
use fiec_broker::Broker;
use fiec_policy_service::STAMP_HEADER;
use fiec_schemas::messages::ExecutionVerb;
use fiec_schemas::{ExecutionId, Tenant, Timestamp, subjects};
use sqlx::PgPool;

use crate::cluster::{Cluster, ClusterOptions};
use figures::Figures;

/// The benches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bench {
    /// Cost of boundaries: CG with the default commit policy against the bare loop; 32 KiB of
    /// state committed at every capsule against raw appends
    Boundary,
    /// Gap of a move, from the last capsule on A to the first on B; bytes and times of a commit and
    /// a move of 24 MB of σ of which 1 % changes
    Rebind,
    /// Publish of a submission to the start of its first capsule, on an idle system; for Rust and
    /// Python programs, with a warm child and with a new one
    Latency,
    /// No-op executions a second, with complete history in PostgreSQL
    Throughput,
    /// Time until a new policy service has taken over 100,000 live executions, or 200,000 waiting
    /// ones; then `why`, and requests about a whole batch
    Recover,
    /// Ledger events into PostgreSQL, against COPY of the same rows
    History,
    /// Cost of worker, policy service and recorder at rest; time until a new node has joined, with
    /// its canaries and without
    Idle,
    /// Time from memory pressure to the first capsule on another node, by stage; cost of telemetry
    Telemetry,
    /// Placements a second on one core at 100, 1,000 and 10,000 nodes; memory of each
    Policy,
    /// Heavy-tailed jobs under FIFO, priority, least attained service and ours: completion times
    Disciplines,
    /// Cost of reproducible bits: GEMM, LU and QR against faer, CG against the plain loop
    Kernels,
    /// A GPU: GEMM, LU, QR and CG against its peak, a warm context against a new one, bytes that
    /// move; exit code 5 if there is none
    Device,
    /// All benches, one after the other
    All,
}

/// Default of `--workers`.
const WORKERS: u32 = 2;
/// Default of `--slots`.
const SLOTS: u32 = 4;

/// Measure the product, each figure with its floor from the same run
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The bench
    #[arg(value_enum)]
    pub name: Bench,
    /// Take a tenth of the samples. Use it to try the bench, not for figures to quote
    #[arg(long)]
    pub quick: bool,
    /// For `throughput`: worker processes
    #[arg(long, default_value_t = WORKERS)]
    pub workers: u32,
    /// For `throughput`: slots of each worker
    #[arg(long, default_value_t = SLOTS)]
    pub slots: u32,
    /// For `disciplines`: run real processes at a smaller scale, beside the same jobs simulated; ten
    /// minutes
    #[arg(long)]
    pub real: bool,
    /// Compare with another build in alternating pairs of runs. BINARY is its `fiec-lab`, or its
    /// `fiec` with `fiec-lab` beside it; an older `fiec` has the benches itself. Prints the exact
    /// 95 % interval of the median ratio by order statistics and a verdict for each figure. The
    /// bound is 3 % worse (10 % for a p99). "not worse": the interval lies wholly on its better side;
    /// "worse": wholly on the other, then the exit code is 1; otherwise "undecided". While a figure
    /// is undecided, ten more pairs are run, up to 40
    #[arg(long, value_name = "BINARY")]
    pub against: Option<PathBuf>,
    /// For `--against`: pairs of runs before the first look, 10 to 40. Each further look gives
    /// chance another try; `--pairs 40` looks once
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(10..=i64::from(against::MOST)))]
    pub pairs: u16,
}

impl BenchArgs {
    /// The same command line without `--against`, with JSON. Options that have their default are
    /// left out, so that a build which does not know them can be compared with.
    fn alone(&self) -> Vec<OsString> {
        let Self {
            name,
            quick,
            workers,
            slots,
            real,
            against: _,
            pairs: _,
        } = self;
        let name = name.to_possible_value();
        let name = name.as_ref().map_or("all", |name| name.get_name());
        let mut args = vec!["bench".to_owned(), name.to_owned(), "--json".to_owned()];
        for (flag, set) in [("--quick", *quick), ("--real", *real)] {
            args.extend(set.then(|| flag.to_owned()));
        }
        for (option, value, default) in
            [("--workers", *workers, WORKERS), ("--slots", *slots, SLOTS)]
        {
            if value != default {
                args.extend([option.to_owned(), value.to_string()]);
            }
        }
        args.into_iter().map(OsString::from).collect()
    }
}

/// Compares this program with another build of it.
async fn compare(old: &Path, args: &BenchArgs, global: &Global) -> anyhow::Result<Outcome> {
    let new = std::env::current_exe().context("cannot find this program's own file")?;
    let steps = Steps::new(global.json);
    let plan = against::Plan {
        old,
        new: &new,
        args: args.alone(),
        pairs: args.pairs,
    };
    let step = |text: &str| steps.step(text);
    let compared = against::compare(&plan, step).await?;
    steps.done("measured");
    against::print(&compared, global.json)?;
    let is_worse = |c: &against::Compared| c.verdict == against::Verdict::Worse;
    Ok(if compared.iter().any(is_worse) {
        Outcome::Failed
    } else {
        Outcome::Done
    })
}

/// Context of every bench.
pub struct Lab<'a> {
    /// Collects the figures.
    pub figures: &'a mut Figures,
    /// Progress for people.
    pub steps: &'a Steps,
    /// Takes a tenth of the samples.
    pub quick: bool,
}

impl Lab<'_> {
    /// Shows the current step.
    pub fn steps_message(&self, message: &str) {
        self.steps.step(message);
    }

    /// Reports on stderr that a part is left out, also with `--json`.
    pub fn left_out(&self, what: &str, why: &str) {
        eprintln!("left out: {what}: {why}");
    }

    /// Number of samples: all, or a tenth of them.
    pub fn samples(&self, full: usize) -> usize {
        if self.quick { (full / 10).max(1) } else { full }
    }
}

/// Runs a bench and prints its figures.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(args: BenchArgs, global: &Global) -> anyhow::Result<Outcome> {
    if let Some(old) = &args.against {
        return compare(old, &args, global).await;
    }
    let mut figures = Figures::new(global.json);
    let steps = Steps::new(global.json);
    let all = [
        Bench::Boundary,
        Bench::Rebind,
        Bench::Latency,
        Bench::Throughput,
        Bench::Recover,
        Bench::History,
        Bench::Idle,
        Bench::Telemetry,
        Bench::Policy,
        Bench::Disciplines,
        Bench::Kernels,
        Bench::Device,
    ];
    let mut outcome = Outcome::Done;
    for bench in all {
        if args.name != bench && args.name != Bench::All {
            continue;
        }
        let mut lab = Lab {
            figures: &mut figures,
            steps: &steps,
            quick: args.quick,
        };
        match bench {
            Bench::Boundary => boundary::run(&mut lab).await,
            Bench::Rebind => rebind::run(&mut lab).await,
            Bench::Latency => latency::run(&mut lab).await,
            Bench::Throughput => throughput::run(&mut lab, args.workers, args.slots).await,
            Bench::Recover => recover::run(&mut lab).await,
            Bench::History => history::run(&mut lab).await,
            Bench::Idle => idle::run(&mut lab).await,
            Bench::Telemetry => telemetry::run(&mut lab).await,
            Bench::Policy => policy::run(&mut lab),
            Bench::Disciplines => disciplines::run(&mut lab, args.real).await,
            Bench::Kernels => kernels::run(&mut lab).await,
            Bench::Device => device::run(&mut lab).map(|found| {
                // With `all`, a missing device is reported and changes no exit code.
                if args.name == Bench::Device {
                    outcome = found;
                }
            }),
            Bench::All => Ok(()),
        }
        .with_context(|| format!("bench {bench:?}"))?;
    }
    figures.finish();
    Ok(outcome)
}

/// The tenant of all benches.
fn tenant() -> anyhow::Result<Tenant> {
    Ok(Tenant::new("bench")?)
}

/// Starts a cluster for a bench.
async fn cluster(
    lab: &Lab<'_>,
    workers: u32,
    worker_args: &[&str],
    history: bool,
) -> anyhow::Result<Cluster> {
    Cluster::start(
        ClusterOptions {
            workers,
            worker_args: worker_args.iter().map(|a| (*a).to_owned()).collect(),
            history,
            ..ClusterOptions::default()
        },
        lab.steps,
    )
    .await
}

/// Publishes a body to the submission stream and waits until it is stored.
async fn publish(broker: &Broker, body: String) -> anyhow::Result<()> {
    broker
        .js
        .publish(subjects::submit(&tenant()?), body.into())
        .await?
        .await
        .context("the submission was not stored")?;
    Ok(())
}

/// Asks the policy service for something about one execution.
async fn request(
    broker: &Broker,
    verb: ExecutionVerb,
    execution: ExecutionId,
) -> anyhow::Result<()> {
    let id = execution.to_string();
    let reply = client::me(broker)
        .execution(verb, &tenant()?, &id, None)
        .await?;
    match reply.error {
        Some(error) => bail!("{verb} of {id} was refused: {error}"),
        None => Ok(()),
    }
}

/// Returns the sequence of the last ledger message that the recorder has written to PostgreSQL.
async fn recorded(pool: &PgPool) -> anyhow::Result<u64> {
    let select = format!(
        "SELECT seq::text AS seq FROM recorder_checkpoint WHERE stream = '{}'",
        subjects::LEDGER_STREAM
    );
    let rows = sql::query(pool, select).await?;
    Ok(rows.get(0, "seq").and_then(|t| t.parse().ok()).unwrap_or(0))
}

/// Submits one line with a client's id.
async fn submit(
    broker: &Broker,
    id: &str,
    mut submission: serde_json::Value,
) -> anyhow::Result<ExecutionId> {
    if let Some(object) = submission.as_object_mut() {
        object.insert("id".to_owned(), id.into());
    }
    publish(broker, submission.to_string()).await?;
    Ok(ExecutionId::from_client(
        &tenant()?,
        &fiec_schemas::ClientId::new(id)?,
    ))
}

/// Submits one line without an id, as most do.
async fn submit_unnamed(
    broker: &Broker,
    submission: &serde_json::Value,
) -> anyhow::Result<ExecutionId> {
    let tenant = tenant()?;
    // The id follows from the stamp, so the bench knows it without a request.
    let stamp = Timestamp::now();
    let mut headers = HeaderMap::new();
    headers.insert(STAMP_HEADER, stamp.micros().to_string().as_str());
    let body = submission.to_string().into();
    let stored = broker
        .js
        .publish_with_headers(subjects::submit(&tenant), headers, body)
        .await?
        .await
        .context("the submission was not stored")?;
    Ok(ExecutionId::from_submission(
        &tenant,
        stamp,
        stored.sequence,
        1,
    ))
}
