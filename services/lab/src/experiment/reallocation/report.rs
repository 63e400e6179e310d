//! The result files: CSV, figures and `report.md`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use fiec_simulator::reallocation::{Measured, Mode};

use super::compared::{HEAD, Part, count};
use crate::experiment::figures::{Figure, Line};

/// Writes all files. Creates the folder if it is missing.
pub(super) fn write(folder: &Path, parts: &[Part]) -> anyhow::Result<()> {
    let cannot = || format!("cannot write to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    std::fs::write(folder.join("runs.csv"), csv(parts)).with_context(cannot)?;
    for part in parts {
        over_sizes(folder, part, "mean_time", "s", |m| m.mean_s)?;
        over_sizes(folder, part, "utilization", "share", |m| m.utilization)?;
        over_sizes(folder, part, "lost", "s", |m| m.lost_s)?;
    }
    std::fs::write(folder.join("report.md"), markdown(parts)).with_context(cannot)
}

fn csv(parts: &[Part]) -> String {
    let mut csv = String::from(
        "part,mode,nodes,seed,makespan_s,mean_s,p95_s,device_hours,utilization,partly_used,lost_s,\
         lost_to_revocation_s,killed,moved,parked,suspended,unfinished\n",
    );
    for part in parts {
        for row in &part.rows {
            for (seed, runs) in (1..).zip(&row.runs) {
                for (nodes, m) in part.sizes.iter().zip(runs) {
                    let _ = writeln!(
                        csv,
                        "{},{},{nodes},{seed},{:.1},{:.2},{:.2},{:.4},{:.4},{:.4},{:.2},{:.2},{},{},{},{},{}",
                        part.name,
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
                    );
                }
            }
        }
    }
    csv
}

/// Plots a value over the cluster sizes, as the mean over the seeds.
fn over_sizes(
    folder: &Path,
    part: &Part,
    what: &str,
    unit: &str,
    of: fn(&Measured) -> f64,
) -> anyhow::Result<()> {
    let lines = part.rows.iter().enumerate().map(|(group, row)| {
        let at = |n: usize| {
            let values = row.runs.iter().filter_map(|runs| runs.get(n)).map(of);
            values.sum::<f64>() / count(row.runs.len().max(1))
        };
        let sizes = part.sizes.iter().enumerate();
        Line {
            group,
            name: row.mode.as_str().to_owned(),
            points: sizes.map(|(n, nodes)| (count(*nodes), at(n))).collect(),
        }
    });
    Figure {
        title: format!("{}: {}", part.title, what.replace('_', " ")),
        x: "nodes".to_owned(),
        y: unit.to_owned(),
        lines: lines.collect(),
        ..Figure::default()
    }
    .write(folder, &format!("{}-{what}", part.name))
}

fn markdown(parts: &[Part]) -> String {
    let mut text = "# Over-commit against reconfiguration\n\n\
         *Reserved*: a job has its peak of device memory from its beginning to its end. \
         *Over-commit*: it has what it needs at first and takes its peak when it needs that; where the \
         device has not so much it is killed, and goes on from its last commit. *Reconfigured*: it \
         asks for its peak at a boundary, and is granted it, moved, parked or suspended; a revoked node \
         is left at boundaries.\n"
        .to_owned();
    for part in parts {
        let _ = writeln!(text, "\n## {}\n", part.title);
        for note in &part.notes {
            let _ = writeln!(text, "- {note}");
        }
        text.push('\n');
        let bar = |cells: [String; 11]| format!("| {} |\n", cells.join(" | "));
        text += &bar(HEAD.map(str::to_owned));
        text += &bar(HEAD.map(|_| "---".to_owned()));
        for cells in part.cells() {
            text += &bar(cells);
        }
        text.push('\n');
        text += &found(part);
        if part.sizes.len() > 1 {
            for what in ["mean_time", "utilization", "lost"] {
                let _ = writeln!(text, "\n![{what} over nodes]({}-{what}.svg)", part.name);
            }
        }
    }
    text += "\n*Cost at equal performance*: the nodes, and their device hours until the last \
             completion, with which the mean time is that of reserved peaks on the cluster above, \
             in proportion between the sizes that were tried. *Partly used*: the share of the \
             devices' time in which one was held with less than half of its memory in use. \
             *Utilization*: the share of the devices' units that did work that counted. *Lost*: \
             computing that was done again. `runs.csv` holds every run; the figures are there as \
             PNG, too.\n";
    text
}

/// The findings in words, from the values.
fn found(part: &Part) -> String {
    let of = |mode| part.rows.iter().find(|r| r.mode == mode);
    let (Some(reserved), Some(over), Some(asked)) = (
        of(Mode::Reserved),
        of(Mode::OverCommit),
        of(Mode::Reconfigured),
    ) else {
        return String::new();
    };
    let mut text = String::new();
    for (name, other) in [("reserved peaks", reserved), ("over-commit", over)] {
        let (a, b) = (
            part.mean(asked, |m| m.mean_s),
            part.mean(other, |m| m.mean_s),
        );
        let (lost, more) = (
            part.mean(asked, |m| m.lost_s),
            part.mean(other, |m| m.lost_s),
        );
        let word = if a <= b { "shorter" } else { "longer" };
        let _ = writeln!(
            text,
            "- Reconfiguration's mean time is {word} than that of {name} ({a:.1} s and {b:.1} s); it \
             computes {lost:.1} s again, {name} {more:.1} s."
        );
    }
    if let (Some((nodes, _)), Some((all, _))) = (part.cost(asked), part.cost(reserved)) {
        let _ = writeln!(
            text,
            "- It is as fast as reserved peaks on {:.0} % of the nodes.",
            100.0 * nodes / all.max(1e-9)
        );
    }
    if let Some((same, all)) = part.same {
        let _ = writeln!(
            text,
            "- {same} of {all} jobs ended with the bits of an undisturbed one."
        );
    }
    text
}
