//! `fiec experiment reallocation`: over-commit against reconfiguration on one mix of jobs whose need
//! for device memory grows. The devices are emulated and the clock is virtual; the policy is the
//! production one ([`fiec_simulator::reallocation`]).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use fiec_simulator::reallocation::{Measured, Mix, Mode, play};
use serde_json::json;

use super::ExperimentArgs;
use super::figures::{Figure, Line};
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Nodes of the cluster on which the mixes are compared.
const NODES: usize = 4;
/// The largest cluster that is tried for the same performance.
const MOST: usize = 6;
const HEAD: [&str; 11] = [
    "mode",
    "mean s",
    "p95 s",
    "makespan s",
    "utilization",
    "partly used",
    "lost s",
    "lost to revocation s",
    "killed",
    "moved, parked, suspended",
    "cost at equal performance",
];

/// One mode over all seeds.
struct Row {
    mode: Mode,
    runs: Vec<Measured>,
    /// Mean times of the first seed with one node and more.
    sweep: Vec<f64>,
    /// Nodes and device hours, each in the mean, with which it is as fast as the reserved peaks on
    /// [`NODES`]; none where a seed had none.
    cost: Option<(f64, f64)>,
}

#[expect(clippy::cast_precision_loss, reason = "few of them")]
fn count(n: usize) -> f64 {
    n as f64
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^52")]
fn number(n: u64) -> f64 {
    n as f64
}

impl Row {
    fn mean(&self, of: impl Fn(&Measured) -> f64) -> f64 {
        self.runs.iter().map(of).sum::<f64>() / count(self.runs.len().max(1))
    }

    fn cells(&self) -> [String; 11] {
        let times = |of: fn(&Measured) -> u64| format!("{:.0}", self.mean(|m| number(of(m))));
        [
            self.mode.as_str().to_owned(),
            format!("{:.0}", self.mean(|m| m.mean_s)),
            format!("{:.0}", self.mean(|m| m.p95_s)),
            format!("{:.0}", self.mean(|m| m.makespan_s)),
            format!("{:.1} %", 100.0 * self.mean(|m| m.utilization)),
            format!("{:.1} %", 100.0 * self.mean(|m| m.partly_used)),
            format!("{:.0}", self.mean(|m| m.lost_s)),
            format!("{:.0}", self.mean(|m| m.lost_to_revocation_s)),
            times(|m| m.killed),
            format!(
                "{}, {}, {}",
                times(|m| m.moved),
                times(|m| m.parked),
                times(|m| m.suspended)
            ),
            self.cost.map_or_else(
                || format!("not with {MOST} nodes"),
                |(nodes, hours)| format!("{nodes:.1} nodes, {hours:.0} device h"),
            ),
        ]
    }
}

/// Runs it; ends with 1 where a job did not end or a boundary was lost in the mode that has them.
///
/// # Errors
/// When the files cannot be written.
pub(super) fn run(args: &ExperimentArgs, global: &Global) -> anyhow::Result<Outcome> {
    let seeds = u64::from(args.runs.unwrap_or(if args.quick { 1 } else { 5 }));
    let mix = |seed| Mix {
        seed,
        nodes: NODES,
        jobs: if args.quick { 40 } else { 300 },
        every_s: 14.0,
        revoke_every_s: 900,
    };
    let mut rows: Vec<Row> = Vec::new();
    for mode in Mode::ALL {
        let seeds: Vec<Vec<Measured>> = (1..=seeds)
            .map(|seed| {
                let sizes = 1..=MOST;
                sizes
                    .map(|nodes| play(&Mix { nodes, ..mix(seed) }, mode))
                    .collect()
            })
            .collect();
        let runs: Vec<Measured> = seeds.iter().map(|sizes| sizes[NODES - 1]).collect();
        let aims: Vec<f64> = match rows.first() {
            Some(reserved) => reserved.runs.iter().map(|m| m.mean_s).collect(),
            None => runs.iter().map(|m| m.mean_s).collect(),
        };
        let found: Option<Vec<_>> = seeds
            .iter()
            .zip(&aims)
            .map(|(sizes, aim)| {
                let mut sizes = sizes.iter().enumerate();
                sizes.find(|(_, m)| m.unfinished == 0 && m.mean_s <= *aim)
            })
            .collect();
        let cost = found.map(|found| {
            let all = count(found.len().max(1));
            let nodes = found.iter().map(|(n, _)| count(n + 1)).sum::<f64>();
            let hours = found.iter().map(|(_, m)| m.device_hours).sum::<f64>();
            (nodes / all, hours / all)
        });
        let sweep = seeds
            .first()
            .map(|sizes| sizes.iter().map(|m| m.mean_s).collect());
        rows.push(Row {
            mode,
            runs,
            sweep: sweep.unwrap_or_default(),
            cost,
        });
    }
    let out = args.out.clone();
    let folder = out.unwrap_or_else(|| PathBuf::from("target/experiments/reallocation"));
    write(&folder, &rows, &mix(1), seeds)?;
    let broken = rows.iter().any(|row| {
        let lost = row.mode == Mode::Reconfigured;
        let lost = lost && row.runs.iter().any(|m| m.killed > 0);
        lost || row.runs.iter().any(|m| m.unfinished > 0)
    });
    if global.json {
        for row in &rows {
            let cost = row
                .cost
                .map(|(nodes, hours)| json!({"nodes": nodes, "device_hours": hours}));
            println!(
                "{}",
                json!({"mode": row.mode.as_str(), "runs": row.runs, "equal_performance": cost})
            );
        }
        println!(
            "{}",
            json!({"experiment": "reallocation", "ok": !broken, "folder": folder})
        );
    } else {
        println!("{}", ui::table(HEAD, rows.iter().map(Row::cells)));
        println!("report: {}", folder.join("report.md").display());
    }
    Ok(if broken {
        Outcome::Failed
    } else {
        Outcome::Done
    })
}

fn write(folder: &Path, rows: &[Row], mix: &Mix, seeds: u64) -> anyhow::Result<()> {
    let cannot = || format!("cannot write to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    let mut csv = String::from(
        "mode,seed,makespan_s,mean_s,p95_s,device_hours,utilization,partly_used,lost_s,\
         lost_to_revocation_s,killed,moved,parked,suspended,unfinished\n",
    );
    for row in rows {
        for (seed, m) in (1..).zip(&row.runs) {
            writeln!(
                csv,
                "{},{seed},{:.1},{:.1},{:.1},{:.3},{:.4},{:.4},{:.1},{:.1},{},{},{},{},{}",
                row.mode.as_str(),
                m.makespan_s,
                m.mean_s,
                m.p95_s,
                m.device_hours,
                m.utilization,
                m.partly_used,
                m.lost_s,
                m.lost_to_revocation_s,
                m.killed,
                m.moved,
                m.parked,
                m.suspended,
                m.unfinished
            )?;
        }
    }
    std::fs::write(folder.join("runs.csv"), csv).with_context(cannot)?;
    let lines = rows.iter().enumerate().map(|(group, row)| Line {
        group,
        name: row.mode.as_str().to_owned(),
        points: (1..)
            .zip(&row.sweep)
            .map(|(nodes, mean_s)| (count(nodes), *mean_s))
            .collect(),
    });
    Figure {
        title: "Mean time from submission to completion".to_owned(),
        x: "nodes".to_owned(),
        y: "s".to_owned(),
        lines: lines.collect(),
        ..Figure::default()
    }
    .write(folder, "mean_time")?;
    std::fs::write(folder.join("report.md"), report(rows, mix, seeds)).with_context(cannot)
}

fn report(rows: &[Row], mix: &Mix, seeds: u64) -> String {
    let mut text = format!(
        "# Over-commit against reconfiguration\n\n\
         {} jobs, one every {:.0} s, of heavy-tailed length (2 to 60 minutes of computing alone), on \
         {} nodes with one device of 80 and one of 40 GiB each. Half of the jobs need more memory \
         from some point of their work on. Every {} s a node is revoked with a notice of 30 s. {seeds} \
         seeds; means.\n\n\
         The devices are emulated, the clock is virtual, the policy is the production one. Not modelled: \
         the time that sigma takes on the way and a process takes to begin, which are 1 s together.\n\n",
        mix.jobs, mix.every_s, mix.nodes, mix.revoke_every_s
    );
    let bar = |cells: [String; 11]| format!("| {} |\n", cells.join(" | "));
    text += &bar(HEAD.map(str::to_owned));
    text += &bar(HEAD.map(|_| "---".to_owned()));
    for row in rows {
        text += &bar(row.cells());
    }
    text += "\n*Cost at equal performance*: the least nodes, and their device hours until the last \
             completion, with which the mean time is that of reserved peaks on the nodes above. \
             *Partly used*: the share of the devices' time in which one was held with less than half of its \
             memory in use. *Lost*: computing that was done again.\n\n\
             ![mean time over nodes](mean_time.svg)\n";
    let of = |mode| rows.iter().find(|r| r.mode == mode);
    if let (Some(over), Some(asked)) = (of(Mode::OverCommit), of(Mode::Reconfigured)) {
        let (a, b) = (asked.mean(|m| m.mean_s), over.mean(|m| m.mean_s));
        let (lost, other) = (asked.mean(|m| m.lost_s), over.mean(|m| m.lost_s));
        let word = if a <= b { "shorter" } else { "longer" };
        let _ = writeln!(
            text,
            "\nReconfiguration's mean time is {word} than over-commit's ({a:.0} s and {b:.0} s); it \
             does {lost:.0} s of computing again, over-commit {other:.0} s."
        );
    }
    text
}
