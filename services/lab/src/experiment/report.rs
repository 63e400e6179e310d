//! The summary and `report.md`: the measurements, and their agreement with the publication (Khan &
//! Thomas, "Infrastructure-Introspection for Self-Adaptive Applications in Accelerator-Dense
//! Computing System"). Every verdict is computed from the values beside it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::run::{Run, Variant, median, progress};
use super::trace::{Move, cause_name};
use super::{Experiment, Name};

/// A claim and its finding.
pub(super) struct Claim {
    pub holds: bool,
    pub claim: String,
    pub found: String,
    /// True if the command ends with 0 only when the claim holds.
    pub promised: bool,
}

/// A workload under a variant, over all runs.
struct Row {
    workload: &'static str,
    variant: Variant,
    runs: usize,
    seconds: f64,
    /// Progress under load relative to the baseline. None without a load.
    progress: Option<(f64, f64, f64)>,
    moves: usize,
    gap_ms: Option<f64>,
    reaction: Option<f64>,
    state_bytes: Option<(u64, u64)>,
    strained: f64,
    monotonic: bool,
    same: bool,
}

fn of<'a>(experiment: &'a Experiment, workload: &str, variant: Variant) -> Vec<&'a Run> {
    let wanted = |r: &&Run| r.workload == workload && r.variant == variant;
    experiment.runs.iter().filter(wanted).collect()
}

fn workloads(experiment: &Experiment) -> Vec<&'static str> {
    let mut names = Vec::new();
    for run in &experiment.runs {
        if !names.contains(&run.workload) {
            names.push(run.workload);
        }
    }
    names
}

fn rows(experiment: &Experiment) -> Vec<Row> {
    let mut rows = Vec::new();
    for workload in workloads(experiment) {
        let baselines = of(experiment, workload, Variant::Baseline);
        for variant in Variant::STATIC {
            let runs = of(experiment, workload, variant);
            if runs.is_empty() {
                continue;
            }
            let moves: Vec<Move> = runs.iter().flat_map(|r| r.trace.moves()).collect();
            let shares: Vec<f64> = runs.iter().map(|r| progress(r, &baselines)).collect();
            let strained = runs
                .iter()
                .map(|r| r.strained(experiment.place, experiment.threshold.high));
            let (strained, all) = strained.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            let gaps: Vec<f64> = moves.iter().filter_map(|m| m.gap_ms).collect();
            let reactions: Vec<f64> = runs.iter().filter_map(|r| r.reaction()).collect();
            let sizes = || moves.iter().map(|m| m.state_bytes);
            let loaded = experiment.is_static();
            let worst = shares.iter().copied().fold(f64::INFINITY, f64::min);
            let best = shares.iter().copied().fold(0.0, f64::max);
            rows.push(Row {
                workload,
                variant,
                runs: runs.len(),
                seconds: median(runs.iter().map(|r| r.seconds())),
                progress: loaded.then(|| (median(shares.iter().copied()), worst, best)),
                moves: moves.len(),
                gap_ms: (!gaps.is_empty()).then(|| median(gaps)),
                reaction: (loaded && !reactions.is_empty()).then(|| median(reactions)),
                state_bytes: sizes().min().zip(sizes().max()),
                strained: if all > 0.0 { strained / all } else { 0.0 },
                monotonic: runs.iter().all(|r| r.trace.is_monotonic()),
                same: runs.iter().all(|r| r.same),
            });
        }
    }
    rows
}

fn yes(ok: bool) -> &'static str {
    if ok { "yes" } else { "no" }
}

/// Column names of the summary.
pub(super) const HEAD: [&str; 12] = [
    "workload",
    "variant",
    "runs",
    "seconds (median)",
    "progress under load / baseline, median (least to most)",
    "rebindings",
    "load to first capsule elsewhere, s",
    "gap of a move, ms (median)",
    "state moved, bytes",
    "time on a pressed node",
    "monotonic",
    "same bits",
];

fn cells(row: &Row) -> [String; 12] {
    let dash = || "-".to_owned();
    [
        row.workload.to_owned(),
        row.variant.name().to_owned(),
        row.runs.to_string(),
        format!("{:.2}", row.seconds),
        row.progress.map_or_else(dash, |(m, low, high)| {
            format!("{m:.3} ({low:.3} to {high:.3})")
        }),
        row.moves.to_string(),
        row.reaction.map_or_else(dash, |s| format!("{s:.2}")),
        row.gap_ms.map_or_else(dash, |g| format!("{g:.2}")),
        row.state_bytes
            .map_or_else(dash, |(least, most)| match least == most {
                true => least.to_string(),
                false => format!("{least} to {most}"),
            }),
        format!("{:.1} %", row.strained * 100.0),
        yes(row.monotonic).to_owned(),
        yes(row.same).to_owned(),
    ]
}

/// The rows of the summary.
pub(super) fn summary(experiment: &Experiment) -> Vec<[String; 12]> {
    rows(experiment).iter().map(cells).collect()
}

pub(super) fn summary_csv(experiment: &Experiment) -> String {
    let line = |cells: &[String]| {
        let quoted = cells
            .iter()
            .map(|c| format!("\"{}\"", c.replace('"', "\"\"")));
        quoted.collect::<Vec<_>>().join(",") + "\n"
    };
    let head = HEAD.map(str::to_owned);
    let rows = summary(experiment);
    std::iter::once(line(&head))
        .chain(rows.iter().map(|r| line(r)))
        .collect()
}

/// One object per row, for scripts.
pub(super) fn summary_json(experiment: &Experiment) -> Vec<Value> {
    let object = |r: &Row| {
        json!({
            "experiment": experiment.name.as_str(), "workload": r.workload,
            "variant": r.variant.name(), "runs": r.runs, "seconds": r.seconds,
            "progress": r.progress.map(|p| p.0), "progress_least": r.progress.map(|p| p.1),
            "rebindings": r.moves, "reaction_s": r.reaction, "gap_ms": r.gap_ms,
            "state_bytes": r.state_bytes.map(|s| [s.0, s.1]), "strained": r.strained,
            "monotonic": r.monotonic, "same_bits": r.same,
            "causes": causes(experiment, r.workload, r.variant),
        })
    };
    rows(experiment).iter().map(object).collect()
}

fn causes(experiment: &Experiment, workload: &str, variant: Variant) -> Vec<String> {
    let runs = of(experiment, workload, variant);
    let moves = runs.iter().flat_map(|r| r.trace.moves());
    let mut names: Vec<String> = moves.map(|m| cause_name(&m.cause)).collect();
    names.sort();
    names.dedup();
    names
}

/// The published σ of a workload, in bytes: least and most.
fn published_state(workload: &str) -> (u64, u64) {
    match workload {
        "cg" => (20_000, 80_000),
        "container" => (50_000, 150_000),
        "gemm" => (10_000, 40_000),
        _ => (30_000, 120_000),
    }
}

/// All claims with their verdicts.
pub(super) fn claims(experiment: &Experiment) -> Vec<Claim> {
    let rows = rows(experiment);
    let mut claims = Vec::new();
    let mut add = |promised, holds, claim: String, found: String| {
        claims.push(Claim {
            holds,
            claim,
            found,
            promised,
        });
    };
    let all = experiment.runs.len();
    let monotonic = experiment
        .runs
        .iter()
        .filter(|r| r.trace.is_monotonic())
        .count();
    add(
        true,
        monotonic == all,
        "progress is monotonic under one identity".into(),
        format!("in {monotonic} of {all} runs"),
    );
    let same = experiment.runs.iter().filter(|r| r.same).count();
    add(
        true,
        same == all,
        "the result is the same however often it moved".into(),
        format!("digest and capsules of the undisturbed run in {same} of {all} runs"),
    );
    let wanted: Vec<&Run> = experiment
        .runs
        .iter()
        .filter(|r| r.variant == Variant::Rebinding)
        .collect();
    let moved = wanted.iter().filter(|r| r.pressed() > 0).count();
    add(
        true,
        moved == wanted.len(),
        "sustained pressure moves the execution".into(),
        format!(
            "a rebinding because of pressure in {moved} of {} runs",
            wanted.len()
        ),
    );
    let still: usize = experiment
        .runs
        .iter()
        .filter(|r| r.variant != Variant::Rebinding)
        .map(|r| r.trace.moves().len())
        .sum();
    add(
        true,
        still == 0,
        "without cause or permission nothing moves".into(),
        format!("{still} rebindings in the runs of the baselines and the control"),
    );
    for row in rows.iter().filter(|r| r.variant == Variant::Rebinding) {
        if let Some((least, most)) = row.state_bytes {
            let (low, high) = published_state(row.workload);
            add(
                false,
                least >= low && most <= high,
                format!(
                    "{}: the state that moves is {low} to {high} bytes",
                    row.workload
                ),
                format!("{least} to {most} bytes"),
            );
        }
        let share = |variant| {
            let of = |r: &&Row| r.workload == row.workload && r.variant == variant;
            Some(rows.iter().find(of)?.progress?.0)
        };
        let with = share(Variant::Rebinding);
        if let (Some(with), Some(without)) = (with, share(Variant::Load)) {
            add(
                false,
                with >= 0.9 && without < 0.75,
                format!(
                    "{}: progress with rebinding is at least 0.9 of the baseline, where \
                         without it falls well below (0.75)",
                    row.workload
                ),
                format!(
                    "{with:.3} with, {without:.3} without: {:.0} % of what the load took away \
                         is recovered",
                    100.0 * (with - without) / (1.0 - without).max(1e-9)
                ),
            );
        }
        if let (Some(with), Some(control)) = (with, share(Variant::Elsewhere)) {
            add(
                false,
                with >= 0.9 * control,
                format!(
                    "{}: of what the other node gives while the load is on (our control), \
                     rebinding reaches 0.9",
                    row.workload
                ),
                format!(
                    "{with:.3} of {control:.3}, which is {:.2}",
                    with / control.max(1e-9)
                ),
            );
        }
    }
    if experiment.name == Name::Trigger3 {
        swinging(experiment, &rows, &mut add);
    }
    if experiment.name == Name::MultiHop {
        let whole = wanted.iter().filter(|r| returned(r)).count();
        add(
            true,
            whole == wanted.len(),
            "it goes A, B, C and back to A under one identity".into(),
            wanted.first().map_or_else(String::new, |r| path(r))
                + &format!(", so in {whole} of {} runs", wanted.len()),
        );
    }
    claims
}

fn swinging(
    experiment: &Experiment,
    rows: &[Row],
    add: &mut impl FnMut(bool, bool, String, String),
) {
    for row in rows.iter().filter(|r| r.variant == Variant::Rebinding) {
        let load = rows
            .iter()
            .find(|r| r.workload == row.workload && r.variant == Variant::Load);
        if let Some(load) = load {
            add(
                false,
                row.strained < load.strained,
                format!(
                    "{}: less of its time is on a node that offers too little",
                    row.workload
                ),
                format!(
                    "{:.1} % with rebinding, {:.1} % without",
                    row.strained * 100.0,
                    load.strained * 100.0
                ),
            );
        }
    }
    let stay = |name: &str| {
        let runs = of(experiment, name, Variant::Rebinding);
        let moves: usize = runs.iter().map(|r| r.trace.moves().len()).sum();
        let seconds: f64 = runs.iter().map(|r| r.seconds()).sum();
        seconds / (moves + runs.len()) as f64
    };
    let names = workloads(experiment);
    for slow in ["lu", "qr"] {
        if names.contains(&slow) && names.contains(&"gemm") {
            add(
                false,
                stay(slow) > stay("gemm"),
                format!("gemm moves often, {slow} stays longer on a node"),
                format!(
                    "{:.2} s a stay for gemm, {:.2} s for {slow}",
                    stay("gemm"),
                    stay(slow)
                ),
            );
        }
    }
}

fn path(run: &Run) -> String {
    let stays = run.trace.stays.iter().filter(|s| s.since.is_some());
    stays
        .map(|s| s.node.to_string())
        .collect::<Vec<_>>()
        .join(" → ")
}

fn returned(run: &Run) -> bool {
    let nodes: Vec<_> = run
        .trace
        .stays
        .iter()
        .filter(|s| s.since.is_some())
        .map(|s| &s.node)
        .collect();
    match nodes.as_slice() {
        [a, b, c, d] => a == d && a != b && b != c && a != c,
        _ => false,
    }
}

/// The whole report.
pub(super) fn markdown(experiment: &Experiment, workloads: &[&str]) -> String {
    let mut text = format!(
        "# {}\n\n{}\n\n",
        experiment.name.title(),
        experiment.name.what()
    );
    text.push_str("## How it was run\n\n");
    for note in &experiment.notes {
        let _ = writeln!(text, "- {note}");
    }
    text.push_str("\n## What was measured\n\n");
    let _ = writeln!(
        text,
        "| {} |\n|{}",
        HEAD.join(" | "),
        "---|".repeat(HEAD.len())
    );
    for row in summary(experiment) {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    if experiment.is_static() {
        text.push_str(
            "\nProgress counts capsules by the time that the baseline runs took for the very same \
             ones, over the seconds in which the load was on (or to the end of the run, where that \
             came first). It includes the time until the move.\n",
        );
    }
    text.push_str("\n## Against what was published\n\n| agrees | claim | found |\n|---|---|---|\n");
    for claim in claims(experiment) {
        let verdict = if claim.holds { "agrees" } else { "differs" };
        let _ = writeln!(text, "| {verdict} | {} | {} |", claim.claim, claim.found);
    }
    text.push_str(
        "\nThe published runs were on three machines with a 48 GB A40 each, sampled every 10 s; these \
         were on one machine with telemetry by events, so times are not to be compared with theirs.\n\
         \n## Figures\n\n",
    );
    for name in workloads {
        let mut kinds = vec!["capsules", "pressure", "location"];
        if experiment.swings {
            kinds.extend(["envelopes", "power", "power-envelopes"]);
        }
        for kind in kinds {
            let _ = writeln!(text, "![{name}: {kind}]({name}-{kind}.svg)");
        }
    }
    text.push_str(
        "\nThe same figures are there as PNG. `capsules.csv`, `pressure.csv`, `location.csv`, \
         `rebindings.csv` and `summary.csv` hold every value.\n",
    );
    text
}
