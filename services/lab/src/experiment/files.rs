//! The result files of an experiment: CSV, figures, `report.md`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use fiec_schemas::Signal;

use super::Experiment;
use super::figures::{Bar, Figure, Line};
use super::report;
use super::run::{Run, Variant};
use super::stand::Place;
use super::trace::{Sample, cause_name};

const GB: f64 = 1e9;
const MILLIWATTS: f64 = 1e3;

/// Writes all files. Creates the folder if it is missing.
pub(super) fn write(folder: &Path, experiment: &Experiment) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let runs = &experiment.runs;
    let text = |name: &str, text: String| {
        let file = folder.join(name);
        std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    };
    text("capsules.csv", capsules(runs))?;
    text("pressure.csv", pressure(runs))?;
    text("location.csv", location(runs))?;
    text("rebindings.csv", rebindings(runs))?;
    text("summary.csv", report::summary_csv(experiment))?;
    let mut names: Vec<&str> = runs.iter().map(|r| r.workload).collect();
    names.dedup();
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
            figures(folder, experiment, name)?;
        }
    }
    text("report.md", report::markdown(experiment, &seen))
}

fn field(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_owned()
}

fn head(run: &Run) -> String {
    format!("{},{},{}", run.workload, run.variant.name(), run.number)
}

fn capsules(runs: &[Run]) -> String {
    let mut csv = "workload,variant,run,seconds,capsules,state_bytes\n".to_owned();
    for run in runs {
        for p in &run.trace.points {
            let seconds = run.trace.seconds(p.at);
            let _ = writeln!(csv, "{},{seconds:.6},{},{}", head(run), p.index, p.bytes);
        }
    }
    csv
}

fn pressure(runs: &[Run]) -> String {
    let mut csv = "workload,variant,run,seconds,node,device,signal,value,used,offered\n".to_owned();
    for run in runs {
        for s in &run.samples {
            let _ = writeln!(
                csv,
                "{},{:.6},{},{},{},{:.6},{:.0},{:.0}",
                head(run),
                run.trace.seconds(s.at),
                s.node,
                s.device.as_deref().unwrap_or_default(),
                s.signal,
                s.value,
                s.raw,
                s.cap
            );
        }
    }
    csv
}

fn location(runs: &[Run]) -> String {
    let mut csv = "workload,variant,run,epoch,node,from_seconds,to_seconds\n".to_owned();
    for run in runs {
        for stay in &run.trace.stays {
            let seconds = |at| format!("{:.6}", run.trace.seconds(at));
            let _ = writeln!(
                csv,
                "{},{},{},{},{}",
                head(run),
                stay.epoch,
                stay.node,
                stay.since.map(seconds).unwrap_or_default(),
                stay.until.map(seconds).unwrap_or_default()
            );
        }
    }
    csv
}

fn rebindings(runs: &[Run]) -> String {
    let mut csv =
        "workload,variant,run,seconds,from,to,cause,in_words,state_bytes,gap_ms\n".to_owned();
    for run in runs {
        for m in run.trace.moves() {
            let gap = m.gap_ms.map(|g| format!("{g:.3}")).unwrap_or_default();
            let _ = writeln!(
                csv,
                "{},{:.6},{},{},{},{},{},{gap}",
                head(run),
                run.trace.seconds(m.at),
                m.from,
                m.to,
                field(&cause_name(&m.cause)),
                field(&m.cause.in_words()),
                m.state_bytes
            );
        }
    }
    csv
}

fn figures(folder: &Path, experiment: &Experiment, name: &str) -> anyhow::Result<()> {
    let of = |r: &&Run| r.workload == name;
    let runs: Vec<&Run> = experiment.runs.iter().filter(of).collect();
    let lines = runs.iter().map(|run| Line {
        group: run.variant as usize,
        name: run.variant.name().to_owned(),
        points: run.trace.curve(),
    });
    Figure {
        title: format!("{}: {name}: capsules over time, every run", experiment.name),
        x: "seconds since the first capsule began".to_owned(),
        y: "capsules".to_owned(),
        lines: lines.collect(),
        ..Figure::default()
    }
    .write(folder, &format!("{name}-capsules"))?;
    let mut moved = runs.iter().filter(|r| r.variant == Variant::Rebinding);
    let Some(run) = moved.next() else {
        return Ok(());
    };
    let marks: Vec<f64> = run
        .trace
        .moves()
        .iter()
        .map(|m| run.trace.seconds(m.at))
        .collect();
    let title = |what: &str| {
        format!(
            "{}: {name}: {what}, first run with rebinding",
            experiment.name
        )
    };
    let nodes = experiment.nodes.clone();
    let device = experiment.place == Place::Device;
    let series = |signal: Signal, value: &dyn Fn(&Sample) -> f64| -> Vec<Line> {
        let line = |(group, node): (usize, &String)| {
            let own = run.samples.iter().filter(|s| s.is(signal, node, device));
            Line {
                group,
                name: node.clone(),
                points: steps(own.map(|s| (run.trace.seconds(s.at), value(s)))),
            }
        };
        nodes.iter().enumerate().map(line).collect()
    };
    let over_time = |what: &str, y: &str, lines: Vec<Line>| Figure {
        title: title(what),
        x: "seconds since the first capsule began".to_owned(),
        y: y.to_owned(),
        lines,
        marks: marks.clone(),
        ..Figure::default()
    };
    let limits = vec![
        ("high", experiment.threshold.high),
        ("low", experiment.threshold.low),
    ];
    let pressure = |what: &str, y: &str, signal: Signal| Figure {
        levels: limits.clone(),
        top: Some(1.05),
        ..over_time(what, y, series(signal, &|s| s.value))
    };
    pressure("memory pressure", "memory in use / offered", Signal::Memory)
        .write(folder, &format!("{name}-pressure"))?;
    if experiment.swings {
        let offered = series(Signal::Memory, &|s| s.cap / GB);
        over_time("envelopes of memory", "memory offered, GB", offered)
            .write(folder, &format!("{name}-envelopes"))?;
        pressure("power", "power drawn / offered", Signal::Power)
            .write(folder, &format!("{name}-power"))?;
        let offered = series(Signal::Power, &|s| s.cap / MILLIWATTS);
        over_time("envelopes of power", "power offered, W", offered)
            .write(folder, &format!("{name}-power-envelopes"))?;
    }
    let bars = run.trace.stays.iter().filter_map(|stay| {
        Some(Bar {
            row: nodes.iter().position(|n| n == stay.node.as_str())?,
            from: run.trace.seconds(stay.since?),
            to: run.trace.seconds(stay.until?),
        })
    });
    Figure {
        title: title("location"),
        x: "seconds since the first capsule began".to_owned(),
        bars: bars.collect(),
        rows: nodes.clone(),
        marks,
        ..Figure::default()
    }
    .write(folder, &format!("{name}-location"))
}

/// Turns points into steps: a value holds until the next one.
fn steps(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        if let Some((_, before)) = steps.last().copied() {
            steps.push((x, before));
        }
        steps.push((x, y));
    }
    steps
}
