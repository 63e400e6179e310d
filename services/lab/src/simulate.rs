//! `fiec simulate`: the production policy on a virtual clock, without any server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use fiec::context::Global;
use fiec::exit::Outcome;
use fiec::ui;
use fiec_simulator::shrink::shrink;
use fiec_simulator::{Outcome as Played, Progress, Scenario, Summary, play};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Play a scenario: nodes, loads, submissions and faults against the production policy, on a
/// virtual clock. If a promise is broken, prints the steps before it and ends with 1
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The scenario as JSON (its schema: `--schema`)
    #[arg(required_unless_present_any = ["schema", "random"])]
    pub scenario: Option<PathBuf>,
    /// Use this seed, not the scenario's
    #[arg(long)]
    pub seed: Option<u64>,
    /// Change the policy, e.g. `dwell_ms=5000`, `high.memory=0.8`, `balance_ms=200`; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// If a promise is broken, make the scenario smaller and write it to this file
    #[arg(long, value_name = "FILE")]
    pub shrink: Option<PathBuf>,
    /// Runs that shrinking may take
    #[arg(long, default_value_t = 300, value_name = "RUNS")]
    pub shrink_runs: u32,
    /// Draw this number of small scenarios, from --seed on, and play them
    #[arg(long, value_name = "COUNT", conflicts_with = "scenario")]
    pub random: Option<u64>,
    /// Print the JSON Schema of a scenario
    #[arg(long)]
    pub schema: bool,
}

/// Reads a scenario. The error names file, field and rule.
///
/// # Errors
/// If it cannot be read, or is invalid.
pub fn read(path: &Path) -> anyhow::Result<Scenario> {
    let text = std::fs::read(path)
        .with_context(|| format!("cannot read the scenario {}", path.display()))?;
    Scenario::parse(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

/// Plays the scenario.
///
/// # Errors
/// If the smaller scenario cannot be written.
pub fn run(args: &SimulateArgs, global: &Global) -> anyhow::Result<Outcome> {
    if args.schema {
        let schema = fiec_simulator::scenario::schema();
        println!("{}", serde_json::to_string_pretty(&schema)?);
        return Ok(Outcome::Done);
    }
    if let Some(count) = args.random {
        return many(args, count, global);
    }
    let Some(path) = &args.scenario else {
        bail!("give a scenario, or --random COUNT");
    };
    let mut scenario = match read(path) {
        Ok(scenario) => scenario,
        Err(error) => {
            eprintln!("fiec: {error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    if let Some(seed) = args.seed {
        scenario.seed = seed;
    }
    for change in &args.set {
        if let Err(error) = fiec_simulator::settings::set(&mut scenario, change) {
            eprintln!("fiec: --set {error}");
            return Ok(Outcome::BadInput);
        }
    }
    one(args, &scenario, global)
}

fn one(args: &SimulateArgs, scenario: &Scenario, global: &Global) -> anyhow::Result<Outcome> {
    let played = match with_bar(scenario, global.json) {
        Ok(played) => played,
        Err(error) => {
            eprintln!("fiec: {error}");
            return Ok(Outcome::BadInput);
        }
    };
    if global.json {
        let line = serde_json::json!({"summary": played.summary, "violation": played.violation});
        println!("{line}");
    } else {
        println!("{}", table(&[("", &played.summary)]));
    }
    let Some(violation) = played.violation else {
        return Ok(Outcome::Done);
    };
    eprintln!("{violation}");
    if let Some(path) = &args.shrink {
        smaller(args, scenario, path)?;
    } else {
        eprintln!("--shrink FILE looks for a smaller scenario that breaks the same promise");
    }
    Ok(Outcome::Failed)
}

fn smaller(args: &SimulateArgs, scenario: &Scenario, path: &Path) -> anyhow::Result<()> {
    let bar = ProgressBar::new(u64::from(args.shrink_runs));
    let mut player = |s: &Scenario| {
        bar.inc(1);
        Ok(play(s, &mut |_| {})?.violation)
    };
    let found = shrink(scenario, args.shrink_runs, &mut player)
        .map_err(|error| anyhow::anyhow!("{error}"))?
        .context("it did not fail again: is something else than the seed drawn?")?;
    bar.finish_and_clear();
    std::fs::write(path, found.scenario.to_json())
        .with_context(|| format!("cannot write {}", path.display()))?;
    let nodes = found.scenario.node_count();
    eprintln!(
        "after {} runs, {nodes} nodes suffice: {}\n{}",
        found.runs,
        path.display(),
        found.violation
    );
    Ok(())
}

/// Plays many small random scenarios.
fn many(args: &SimulateArgs, count: u64, global: &Global) -> anyhow::Result<Outcome> {
    let first = args.seed.unwrap_or(1);
    let bar = bar(count, global.json);
    for seed in first..first.saturating_add(count) {
        let mut scenario = fiec_simulator::random::scenario(seed);
        for change in &args.set {
            fiec_simulator::settings::set(&mut scenario, change)
                .map_err(|error| anyhow::anyhow!("--set {error}"))?;
        }
        let played = play(&scenario, &mut |_| {}).map_err(|e| anyhow::anyhow!("{e}"))?;
        bar.inc(1);
        if played.violation.is_some() {
            bar.finish_and_clear();
            return one(args, &scenario, global);
        }
    }
    bar.finish_and_clear();
    println!("{count} scenarios from seed {first} on keep every promise");
    Ok(Outcome::Done)
}

fn bar(length: u64, quiet: bool) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if quiet {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg} {elapsed:.dim}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Plays a scenario with a progress bar over virtual time.
///
/// # Errors
/// The field of the scenario and the rule that it breaks.
pub fn with_bar(scenario: &Scenario, quiet: bool) -> Result<Played, fiec_schemas::FieldError> {
    let bar = bar(scenario.duration_ms, quiet);
    let played = play(scenario, &mut |p: Progress| {
        bar.set_position((p.now_us / 1_000).min(scenario.duration_ms));
        let played = Duration::from_secs(p.now_us / 1_000_000);
        bar.set_message(format!("{played:?}, {} of {} ended", p.ended, p.submitted));
    });
    bar.finish_and_clear();
    played
}

/// A row of the table: its name, and its value for a summary.
type Row<'a> = (&'a str, &'a dyn Fn(&Summary) -> String);

/// Summaries side by side, for people.
pub fn table(all: &[(&str, &Summary)]) -> String {
    let ms = |ms: f64| ui::micros((ms * 1e3) as i64);
    let rows: [Row<'_>; 26] = [
        ("executions", &|s| {
            format!("{} of {} completed", s.completed, s.submitted)
        }),
        ("failed", &|s| some(s.failed)),
        ("unfinished", &|s| {
            let all = s
                .unfinished
                .iter()
                .map(|u| format!("{} {}", u.count, u.why));
            all.collect::<Vec<_>>().join(", ")
        }),
        ("makespan", &|s| ms(s.makespan_ms)),
        ("utilization", &|s| {
            format!("{:.1} %", s.utilization * 100.0)
        }),
        ("waited, mean", &|s| ms(s.waited.mean_ms)),
        ("waited, p50", &|s| ms(s.waited.p50_ms)),
        ("waited, p95", &|s| ms(s.waited.p95_ms)),
        ("waited, most", &|s| ms(s.waited.most_ms)),
        ("completed after, mean", &|s| ms(s.lasted.mean_ms)),
        ("completed after, p95", &|s| ms(s.lasted.p95_ms)),
        ("rebindings", &|s| counts(&s.rebindings)),
        ("orders to yield", &|s| s.orders.to_string()),
        ("parked, given up", &|s| match s.parks + s.given_up {
            0 => String::new(),
            _ => format!("{}, {}", s.parks, s.given_up),
        }),
        ("changes of reservations", &|s| some(s.reservations)),
        ("parts, given back", &|s| match s.parts {
            0 => String::new(),
            parts => format!("{parts}, {}", s.returned),
        }),
        ("work lost", &|s| ms(s.lost_ms)),
        ("σ moved", &|s| ui::bytes(s.moved_bytes)),
        ("commits", &|s| s.commits.to_string()),
        ("faults", &|s| counts(&s.faults)),
        ("refused, overtaken, fenced", &|s| {
            format!("{}, {}, {}", s.refusals, s.conflicts, s.fenced)
        }),
        ("decisions/s", &|s| format!("{:.0}", s.decisions_per_s)),
        ("events of the clock", &|s| s.steps.to_string()),
        ("inputs of the policy", &|s| s.inputs.to_string()),
        ("virtual time", &|s| ms(s.played_ms)),
        ("real time", &|s| {
            format!(
                "{:.2} s, {:.0} % of it in the policy",
                s.wall_s,
                s.policy_share * 100.0
            )
        }),
    ];
    let head = std::iter::once(String::new()).chain(all.iter().map(|(name, _)| (*name).to_owned()));
    let rows = rows.iter().filter_map(|(name, of)| {
        let values: Vec<String> = all.iter().map(|(_, summary)| of(summary)).collect();
        let said = values.iter().any(|v| !v.is_empty());
        said.then(|| {
            std::iter::once((*name).to_owned())
                .chain(values)
                .collect::<Vec<_>>()
        })
    });
    ui::table(head, rows)
}

/// A number, or an empty text for 0.
fn some(n: u64) -> String {
    if n == 0 { String::new() } else { n.to_string() }
}

fn counts(map: &std::collections::BTreeMap<String, u64>) -> String {
    let all = map.iter().map(|(kind, count)| format!("{count} {kind}"));
    all.collect::<Vec<_>>().join(", ")
}
