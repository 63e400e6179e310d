//! `fiec-lab chaos`: a seeded schedule of faults over real processes under a mixed load. At the end
//! everything runs again, every execution must end, and the judge asks whether each promise holds.
//!
//! The same seed gives the same schedule and the same load. How the processes interleave differs
//! from run to run.

mod client;
mod ending;
mod faults;
mod history;
mod load;
pub mod schedule;
pub mod store;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use fiec::exit::Outcome;
use fiec::ui::Steps;
use fiec_schemas::messages::ExecutionVerb;
use fiec_schemas::{Event, Timestamp};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::client::Client;
use self::faults::Faults;
use self::load::Role;
use self::schedule::{Dice, Draws, Fault, Schedule};
use crate::cluster::{Cluster, ClusterOptions};
use crate::judge::checker::{self, Exempt, Violation};
use crate::judge::journal::Journal;
use crate::judge::oracles::answers::Answers;
use crate::judge::oracles::ledgers::last_of_each;
use crate::judge::oracles::objects::Collection;
use crate::judge::oracles::{self, Scene, health, recovery};
use crate::judge::{address_of, overdue};

/// Kill, stop and restart every process under a mixed load, and check that nothing is lost
#[derive(Debug, Args)]
pub struct ChaosArgs {
    /// Minutes of faults
    #[arg(long, default_value_t = 2.0)]
    pub minutes: f64,
    /// Seed of the schedule and the load [default: the time]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Servers of the broker; several form a cluster
    #[arg(long, default_value_t = 1)]
    pub brokers: usize,
    /// Once the broker dies and loses its last ledger messages, as after a power loss. What was
    /// answered before that need not hold
    #[arg(long, conflicts_with = "brokers")]
    pub lost_tail: bool,
    /// Folder of data and logs [default: a temporary folder]
    #[arg(long)]
    pub data_dir: Option<PathBuf>,
    /// Executable of the services and workers, for example a build with a defect [default: this one]
    #[arg(long)]
    pub binary: Option<PathBuf>,
}

impl ChaosArgs {
    fn is_long(&self) -> bool {
        self.minutes >= LONG_MINUTES
    }

    fn object_grace(&self) -> Duration {
        if self.is_long() {
            OBJECTS_LONG
        } else {
            OBJECTS
        }
    }
}

/// From this length on a process is stopped for longer than an append is tried.
const LONG_MINUTES: f64 = 5.0;
/// Pause between two lines of the load, and between two requests of the client.
const LINES: (u64, u64) = (600, 1_800);
const REQUESTS: (u64, u64) = (200, 1_200);
/// How long what was paused rests before the judgement. Superseded chunks are dropped meanwhile. It
/// is longer if objects without a reference stay longer.
const REST: Duration = Duration::from_secs(42);
/// Time without an open fault after which everything runs: services have come up or given up.
const SETTLED: Duration = Duration::from_secs(8);
/// How long workers keep superseded chunks.
const SUPERSEDED: Duration = Duration::from_secs(5);
/// How long objects stay to which nothing refers: much longer than an append takes beside the stops
/// of a short run, and of a long one.
const OBJECTS: Duration = Duration::from_secs(60);
const OBJECTS_LONG: Duration = Duration::from_secs(240);
/// Longest interval of routine commits, in seconds.
const LONGEST_INTERVAL: u64 = 2;
/// Roles that compute until they are paused.
const COMPUTE: [Role; 2] = [Role::Stays, Role::Slow];
/// Bound of the oracles afterwards.
const BOUND: Duration = Duration::from_secs(45);

/// Time limits, much shorter than in production, so that minutes play hours.
fn options(args: &ChaosArgs) -> ClusterOptions {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    ClusterOptions {
        data_dir: args.data_dir.clone(),
        workers: 3,
        // A busy machine is no pressure here.
        worker_args: words(&format!(
            "--slots 4 --lease-seconds 3 --drain-seconds 3 \
             --longest-commit-interval-seconds {LONGEST_INTERVAL} \
             --superseded-seconds {} \
             --allow-program * --threshold latency=1:0.99:1000 \
             --threshold memory_stall=1:0.99:1000",
            SUPERSEDED.as_secs(),
        )),
        brokers: args.brokers,
        policies: 2,
        policy_args: words("--liveness-ms 3000"),
        history: true,
        recorder_args: words(&format!(
            "--chunk-grace-seconds 2 --collect-seconds {}",
            args.object_grace().as_secs()
        )),
        binary: args.binary.clone(),
        patience: Duration::from_secs(90),
        ..ClusterOptions::default()
    }
}

/// Runs the faults, and judges.
///
/// # Errors
/// If a part cannot be started. A broken promise is an outcome.
pub async fn run(args: ChaosArgs, json: bool) -> anyhow::Result<Outcome> {
    let now = u64::try_from(Timestamp::now().micros()).unwrap_or(0);
    let seed = args.seed.unwrap_or(now % 1_000_000);
    let ChaosArgs {
        minutes, brokers, ..
    } = args;
    let setting = match args.lost_tail {
        true => "--lost-tail".to_owned(),
        false => format!("--brokers {brokers}"),
    };
    let again = format!("fiec-lab chaos --seed {seed} --minutes {minutes} {setting}");
    println!("repeat with: {again}");
    let mut cluster = Cluster::start(options(&args), &Steps::new(json)).await?;
    let found = play(&mut cluster, seed, &args).await;
    let logs = cluster.data_dir().join("logs");
    let broken = match found {
        Ok(found) => found,
        Err(error) => vec![Violation::unobserved(format!("{error:#}"))],
    };
    if broken.is_empty() {
        println!("every promise holds");
        cluster.stop().await;
        return Ok(Outcome::Done);
    }
    println!("{} promises are broken:", broken.len());
    for violation in broken.iter().take(40) {
        println!("  {violation}");
    }
    println!("repeat with: {again}");
    if args.data_dir.is_some() {
        println!("logs: {}", logs.display());
    }
    Ok(Outcome::Failed)
}

/// The faults beside the load, the quiet period, and the judgement.
async fn play(
    cluster: &mut Cluster,
    seed: u64,
    args: &ChaosArgs,
) -> anyhow::Result<Vec<Violation>> {
    let minutes = args.minutes;
    let broker = cluster.broker.clone();
    let mut journal = Journal::open(&broker);
    let answers = Answers::default();
    prepare(cluster).await?;
    let until = Instant::now() + Duration::from_secs_f64(60.0 * minutes.max(0.05));
    let client = Client::new(broker.clone(), answers.clone());
    let load = tokio::spawn(drive(client, seed, until));
    let mut faults = Faults::default();
    let is_over = CancellationToken::new();
    let _ends = is_over.clone().drop_guard();
    let watch = tokio::spawn(watch::recovery_points(
        broker.clone(),
        faults.calm.clone(),
        (cluster.workers.len(), args.brokers),
        recovery_bound(),
        is_over.clone(),
    ));
    let mut schedule = Schedule::new(
        seed,
        Draws {
            long: args.is_long(),
            brokers: args.brokers,
            lost_tail: args.lost_tail,
        },
    );
    let mut found = Vec::new();
    while Instant::now() < until {
        let Some(step) = schedule.next() else { break };
        pass(cluster, &mut faults, Instant::now() + step.after).await?;
        if step.alone {
            all_run(cluster, &mut faults, Duration::ZERO).await?;
        }
        for (target, fault) in step.faults {
            faults.begin(cluster, target, fault).await?;
            if matches!(fault, Fault::LoseTail { .. }) {
                all_run(cluster, &mut faults, Duration::ZERO).await?;
                answers.forget();
                journal = Journal::open(&broker);
            }
        }
        if step.alone {
            all_run(cluster, &mut faults, Duration::ZERO).await?;
            found.extend(history::catches_up(cluster).await);
        }
    }
    all_run(cluster, &mut faults, SETTLED).await?;
    let (mut client, lines) = load.await.context("the load has ended early")??;
    println!(
        "{} faults over {lines} lines; now everything must end",
        faults.count
    );
    is_over.cancel();
    found.extend(watch.await.context("the watch has ended early")?);
    report("while the faults went on", &found);
    if args.lost_tail {
        let ledgers = last_of_each(&broker).await.map_err(anyhow::Error::msg)?;
        let ledgers = ledgers.into_keys().collect();
        client.submit_lost(&ledgers).await?;
    }
    found.extend(ending::end_stays(cluster, &client, &COMPUTE, ExecutionVerb::Pause).await);
    let rested = Instant::now() + REST.max(args.object_grace());
    let stuck = ending::settle(cluster, &mut client).await;
    report("everything ends", &stuck);
    found.extend(stuck);
    sleep_until(rested).await;
    found.extend(wrong_results(&journal).await);
    // A recorder that several faults keep away for long loses history, and says so.
    let mut exempt = vec![Exempt::StatedGaps, Exempt::ShortGrace];
    if args.lost_tail {
        exempt.push(Exempt::LostMessages);
    }
    found.extend(judge(cluster, &journal, &answers, &exempt, args.object_grace()).await);
    for roles in [&COMPUTE[..], &[Role::NoPlace]] {
        found.extend(ending::end_stays(cluster, &client, roles, ExecutionVerb::Cancel).await);
    }
    Ok(found)
}

/// Says at once what was found. The judgement takes a while.
fn report(when: &str, found: &[Violation]) {
    for violation in found.iter().take(5) {
        println!("{when}: {violation}");
    }
}

fn recovery_bound() -> Duration {
    let longest = Duration::from_secs(LONGEST_INTERVAL);
    recovery::bound(longest, Duration::from_secs(5))
}

/// The quotas, the program in Python, and an object that no submission names: it goes.
async fn prepare(cluster: &Cluster) -> anyhow::Result<()> {
    let folder = cluster.data_dir().join("count");
    load::write_counter(&folder)?;
    let unused = cluster.data_dir().join("unused");
    std::fs::write(&unused, "an input that nobody uses")?;
    let (folder, unused) = (folder.display().to_string(), unused.display().to_string());
    let commands = [
        vec!["program", "push", load::COUNTER, &folder],
        vec!["data", "push", &unused],
        vec!["quota", "set", "narrow", "--running", "2"],
        vec!["quota", "set", load::STRAIT, "--running", "1"],
    ];
    let binary = std::env::current_exe().context("cannot find this program's own file")?;
    for command in commands {
        let done = tokio::process::Command::new(&binary)
            .args(&command)
            .envs(cluster.environment("program"))
            .kill_on_drop(true)
            .output()
            .await?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            bail!("{} failed: {said}", command.join(" "));
        }
    }
    Ok(())
}

/// Lets time pass. Undoes faults whose time has come.
async fn pass(cluster: &mut Cluster, faults: &mut Faults, until: Instant) -> anyhow::Result<()> {
    loop {
        let next = faults.undo_due(cluster).await?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        sleep(next.unwrap_or(left).min(left)).await;
    }
}

/// Waits until no fault has been open for this long.
async fn all_run(cluster: &mut Cluster, faults: &mut Faults, time: Duration) -> anyhow::Result<()> {
    let mut since = Instant::now();
    loop {
        if faults.undo_due(cluster).await?.is_some() {
            since = Instant::now();
        } else if since.elapsed() >= time {
            return Ok(());
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// The load and the client's requests. Gives the number of lines.
async fn drive(mut client: Client, seed: u64, until: Instant) -> anyhow::Result<(Client, u64)> {
    // Other numbers than those of the schedule.
    let mut dice = Dice::new(seed ^ u64::MAX);
    let (mut number, mut line_at, mut ask_at) = (0, Instant::now(), Instant::now());
    for line in load::standing()? {
        client.submit(line).await?;
    }
    while Instant::now() < until {
        if line_at <= Instant::now() {
            number += 1;
            for line in load::draw(&mut dice, number)? {
                client.submit(line).await?;
            }
            line_at = Instant::now() + dice.between(LINES.0, LINES.1);
        }
        if ask_at <= Instant::now() {
            client.ask(&mut dice).await;
            client.toggle(&mut dice).await;
            ask_at = Instant::now() + dice.between(REQUESTS.0, REQUESTS.1);
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok((client, number))
}

/// Executions of the same submission have one result, however often they moved: the result of a
/// synthetic program depends on its capsules and its σ alone.
async fn wrong_results(journal: &Journal) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let mut specs = BTreeMap::new();
    for line in journal.all() {
        let state = line.state();
        if let Some(spec) = &state.spec {
            specs.insert(state.execution, spec.clone());
        }
        let ended = line.message.events.iter().find_map(|event| match event {
            Event::Completed { result, .. } => result["digest"].as_str(),
            _ => None,
        });
        let (Some(digest), Some(spec)) = (ended, specs.get(&state.execution)) else {
            continue;
        };
        let key = format!("{} {}", spec.program, spec.params);
        let expected = match known.get(&key) {
            Some(expected) => expected.clone(),
            None => {
                let expected = undisturbed(&spec.program, &spec.params).await;
                let expected = expected.unwrap_or_else(|| digest.to_owned());
                known.insert(key, expected.clone());
                expected
            }
        };
        if expected != digest {
            let id = state.execution.to_string();
            let what = format!("has the result {digest}; an undisturbed run has {expected}");
            found.push(Violation::new(checker::Rule::State, &id, what));
        }
    }
    found
}

/// The digest of an undisturbed run on this machine, if the program is a built-in one.
async fn undisturbed(program: &str, params: &serde_json::Value) -> Option<String> {
    let (program, mut params) = (program.to_owned(), params.clone());
    if let Some(params) = params.as_object_mut() {
        for of_its_course in ["rest_us", "crash_at", "crash_attempts"] {
            params.remove(of_its_course);
        }
    }
    let run = move || fiec_kit::run_local(&program, &params).ok();
    let outcome = tokio::task::spawn_blocking(run).await.ok()??;
    Some(outcome.result["digest"].as_str()?.to_owned())
}

/// Everything that the judge finds.
async fn judge(
    cluster: &mut Cluster,
    journal: &Journal,
    answers: &Answers,
    exempt: &[Exempt],
    grace: Duration,
) -> Vec<Violation> {
    let mut found = Vec::new();
    let late = overdue::nobody_is_overdue(&cluster.broker, &[], BOUND).await;
    let is_late = late.is_err();
    found.extend(late.err().map(Violation::unobserved));
    let scene = Scene {
        broker: &cluster.broker,
        journal,
        policies: cluster.policies.len(),
        answers,
        patience: BOUND,
        recovery: recovery_bound(),
        copies: cluster.servers.nats_urls().len(),
        superseded: SUPERSEDED,
        collection: cluster.pool.as_ref().map(|pool| Collection { pool, grace }),
    };
    let mut broken = oracles::settle(scene).await;
    broken.retain(|violation| !exempt.iter().any(|exempt| exempt.explains(violation.rule)));
    if !broken.is_empty() {
        let services = cluster.workers.iter().chain(&cluster.policies);
        let services = services.chain(&cluster.recorder);
        let addresses: Vec<(String, String)> = services
            .filter_map(|s| Some((s.name.clone(), address_of(s)?)))
            .collect();
        let healths = health::observe(&addresses).await;
        found.extend(health::judge(&broken, &healths, is_late));
    }
    found.extend(broken);
    let pool = cluster.pool.as_ref();
    match checker::check(&cluster.broker, pool, journal, exempt).await {
        Ok(history) => found.extend(history),
        Err(why) => found.push(Violation::unobserved(why)),
    }
    found
}
