//! `fiec experiment reallocation`: compares over-commit with reconfiguration, on one mix of jobs
//! whose need for device memory grows.
//!
//! Two parts run on a virtual clock with the production policy ([`fiec_simulator::reallocation`]):
//! one where memory is scarce, one where units are. The third part is scaled down and uses real
//! servers, workers and jobs ([`real`]). All devices are emulated.

mod compared;
mod real;
mod report;

use std::path::PathBuf;

use fiec::context::Global;
use fiec::exit::Outcome;
use fiec::ui::{self, Steps};
use fiec_simulator::reallocation::{Measured, Mix, Mode, Short, play};
use serde_json::json;

use super::ExperimentArgs;
use compared::{Part, Row, count};

/// Nodes of the simulated cluster, and the smallest and largest cluster that are compared with it.
const NODES: usize = 4;
const LEAST: usize = 2;
const MOST: usize = 6;
/// The same for the real cluster. It has only one size, because each run takes minutes.
const REAL_NODES: usize = 2;
const REAL_MOST: usize = 2;
/// Seconds between two revocations, in the mix's time.
const REVOKE_EVERY_S: u64 = 900;

/// Runs the experiment. Ends with 1 if a job did not end, a job that requests memory at boundaries
/// was killed, or bits differ.
///
/// # Errors
/// If a part could not be started, or the files cannot be written.
pub(super) async fn run(args: &ExperimentArgs, global: &Global) -> anyhow::Result<Outcome> {
    let steps = Steps::new(global.json);
    let mut parts = Vec::new();
    if super::wanted(args, "simulated") {
        for short in Short::ALL {
            parts.push(simulated(args, &steps, short).await?);
        }
    }
    if super::wanted(args, "real") {
        parts.push(processes(args, &steps).await?);
    }
    steps.done("stopped");
    anyhow::ensure!(
        !parts.is_empty(),
        "reallocation has the parts simulated and real, and no {}",
        args.only.as_deref().unwrap_or_default()
    );
    let out = args.out.clone();
    let folder = out.unwrap_or_else(|| PathBuf::from("target/experiments/reallocation"));
    report::write(&folder, &parts)?;
    let broken = parts.iter().any(Part::is_broken);
    if global.json {
        for part in &parts {
            for row in &part.rows {
                let cost = part
                    .cost(row)
                    .map(|(nodes, hours)| json!({"nodes": nodes, "device_hours": hours}));
                println!(
                    "{}",
                    json!({"part": part.name, "mode": row.mode.as_str(), "runs": part.runs(row),
                           "equal_performance": cost, "same_bits": part.same})
                );
            }
        }
        println!(
            "{}",
            json!({"experiment": "reallocation", "ok": !broken, "folder": folder})
        );
    } else {
        for part in &parts {
            println!("{}", part.title);
            println!("{}", ui::table(compared::HEAD, part.cells()));
        }
        println!("report: {}", folder.join("report.md").display());
    }
    Ok(if broken {
        Outcome::Failed
    } else {
        Outcome::Done
    })
}

/// The part on a virtual clock.
async fn simulated(args: &ExperimentArgs, steps: &Steps, short: Short) -> anyhow::Result<Part> {
    let seeds = u64::from(super::runs(args));
    let mix = Mix {
        short,
        seed: 1,
        nodes: NODES,
        jobs: if args.quick { 40 } else { 300 },
        every_s: every_s(short),
        revoke_every_s: REVOKE_EVERY_S,
    };
    let sizes: Vec<usize> = match args.quick {
        true => vec![NODES - 1, NODES],
        false => (LEAST..=MOST).collect(),
    };
    let mut rows = Vec::new();
    for mode in Mode::ALL {
        let mut runs = Vec::new();
        for seed in 1..=seeds {
            steps.step(&format!(
                "simulated, {} short, {}, seed {seed} of {seeds}",
                short.as_str(),
                mode.as_str()
            ));
            let all = sizes.clone();
            let played = tokio::task::spawn_blocking(move || -> Vec<Measured> {
                let all = all.into_iter();
                all.map(|nodes| play(&Mix { seed, nodes, ..mix }, mode))
                    .collect()
            });
            runs.push(played.await?);
        }
        rows.push(Row { mode, runs });
    }
    Ok(Part {
        name: match short {
            Short::Memory => "simulated-memory",
            Short::Units => "simulated-units",
        },
        title: format!("Simulated, {} is what is short", what_is(short)),
        notes: vec![
            notes(&mix, 1.0),
            format!("{seeds} seeds; the table's figures are their means."),
            "The devices are emulated, the clock is virtual, the policy is the production one. Not \
             modelled: the time that σ takes on the way and a process takes to begin, which are 1 s \
             together."
                .to_owned(),
        ],
        nodes: NODES,
        sizes,
        rows,
        same: None,
    })
}

/// The part with real processes, in which one second is a minute of the mix.
async fn processes(args: &ExperimentArgs, steps: &Steps) -> anyhow::Result<Part> {
    let speed = if args.quick { 120.0 } else { 60.0 };
    // Each run takes minutes, so the default is one seed.
    let seeds = u64::from(args.runs.unwrap_or(1));
    let (nodes, most, jobs) = match args.quick {
        true => (1, 1, 10),
        false => (REAL_NODES, REAL_MOST, 100),
    };
    let mix = Mix {
        short: Short::Memory,
        seed: 1,
        nodes,
        jobs,
        every_s: every_s(Short::Memory) * count(NODES) / count(nodes),
        // The return of a node takes a fixed time that is not scaled down.
        revoke_every_s: 2 * REVOKE_EVERY_S,
    };
    let sizes: Vec<usize> = (1..=most).collect();
    let (mut rows, mut same, mut all) = (Vec::new(), 0, 0);
    for mode in Mode::ALL {
        let mut runs = Vec::new();
        for seed in 1..=seeds {
            let mut by_size = Vec::new();
            for nodes in sizes.iter().copied() {
                steps.step(&format!(
                    "real processes, {}, {nodes} nodes, seed {seed} of {seeds}",
                    mode.as_str()
                ));
                let mix = Mix { seed, nodes, ..mix };
                let played = real::play(&mix, mode, speed, steps).await?;
                same += played.same;
                all += played.ended;
                by_size.push(played.measured);
            }
            runs.push(by_size);
        }
        rows.push(Row { mode, runs });
    }
    Ok(Part {
        name: "real",
        title: "Real processes, memory is what is short".to_owned(),
        notes: vec![
            notes(&mix, speed),
            format!(
                "{seeds} seed{}. Servers, policy service, workers and jobs are real processes on \
                 this machine, and a revoked node is killed. The devices are emulated, also where \
                 there are real ones: what a job holds of its device's memory it notes where all \
                 processes on that device see it, and one that finds no room is killed by its own \
                 hand; it sleeps for as long as its device would compute. Nothing moves for pressure.",
                if seeds == 1 { "" } else { "s" }
            ),
            format!(
                "Time runs {speed:.0} times as fast as in the mix; what the system itself takes does \
                 not: a notice is {:.0} s, a node is away for {:.0} s, boundaries are {:.0} ms apart, \
                 commits {:.0} ms. No job is longer than 20 minutes of the mix's time.",
                real::NOTICE.as_secs_f64(),
                real::AWAY.as_secs_f64(),
                real::CAPSULE.as_secs_f64() * 1e3,
                real::COMMIT.as_secs_f64() * 1e3,
            ),
            "Lost time is counted from the jobs' own journals: capsules that were computed more than \
             once."
                .to_owned(),
        ],
        nodes,
        sizes,
        rows,
        same: Some((same, all)),
    })
}

fn what_is(short: Short) -> &'static str {
    match short {
        Short::Memory => "memory of devices",
        Short::Units => "computing units of devices",
    }
}

/// Seconds between two jobs. With reserved peaks on [`NODES`], a queue grows if memory is scarce,
/// and just does not grow if units are.
fn every_s(short: Short) -> f64 {
    match short {
        Short::Memory => 10.0,
        Short::Units => 18.0,
    }
}

/// The mix in words.
fn notes(mix: &Mix, speed: f64) -> String {
    let (least, most) = mix.short.units();
    let scaled = |s: f64| {
        let s = s / speed;
        if s < 10.0 {
            format!("{s:.2} s")
        } else {
            format!("{s:.0} s")
        }
    };
    format!(
        "{} jobs, one every {} in the mean, of heavy-tailed length (2 to 60 minutes of computing \
         alone{}), on {} nodes with one device of 80 and one of 40 GiB each. A job keeps {:.0} to \
         {:.0} % of a device's units busy and needs 4 to 16 GiB; six of ten need 16 to 40 GiB from \
         some point between 40 and 90 % of their work on. Every {} a node is revoked.",
        mix.jobs,
        scaled(mix.every_s),
        if speed > 1.0 {
            ", in the mix's time"
        } else {
            ""
        },
        mix.nodes,
        100.0 * least,
        100.0 * most,
        scaled(mix.revoke_every_s as f64),
    )
}
