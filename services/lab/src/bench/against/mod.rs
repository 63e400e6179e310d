//! `bench NAME --against BINARY`: is this program worse than another build of it? Both run in pairs of
//! alternating order. Each figure has the interval of the pairs' median ratio. A slow minute of the
//! machine meets both runs of a pair. While a figure is undecided, more pairs are run (`verdict.rs`).

mod direction;
mod verdict;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use fiec::ui;
use serde::Deserialize;

pub use direction::{Direction, direction, tolerance};
use verdict::Row;
pub use verdict::{Compared, MOST, Verdict};

/// Longest time of one run of a bench.
const PATIENCE: Duration = Duration::from_secs(3_600);
/// Bytes of a child's output that an error repeats.
const LAST_WORDS: usize = 2_000;

/// The comparison to make.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The build to compare with.
    pub old: &'a Path,
    /// The build that must not be worse.
    pub new: &'a Path,
    /// Arguments of both: `bench NAME --json …`.
    pub args: Vec<OsString>,
    /// Pairs of runs before the first look at the figures, at most [`MOST`].
    pub pairs: u16,
}

/// The fields of a printed figure that all builds share.
#[derive(Deserialize)]
struct Printed {
    bench: String,
    case: String,
    metric: String,
    unit: String,
    value: Option<f64>,
}

/// Runs pairs and compares every figure, in the order in which they were printed first. Runs more
/// pairs while a figure is undecided, up to [`MOST`].
///
/// # Errors
/// When a run fails, or prints a line that is no figure.
pub async fn compare(plan: &Plan<'_>, step: impl Fn(&str)) -> anyhow::Result<Vec<Compared>> {
    let mut table = Table::default();
    let (mut pairs, mut wanted) = (0, plan.pairs);
    loop {
        for pair in pairs..pairs + wanted {
            let order = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
            for side in order {
                let (binary, word) = [(plan.old, "old"), (plan.new, "new")][side];
                step(&format!("pair {} of {}: {word}", pair + 1, pairs + wanted));
                let figures = measure(binary, &plan.args).await?;
                table.add(usize::from(pair), side, figures);
            }
        }
        pairs += wanted;
        let compared = table.judge(usize::from(pairs));
        wanted = verdict::more(&compared, pairs);
        if wanted == 0 {
            return Ok(compared);
        }
    }
}

/// The figures of all runs.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    known: HashMap<[String; 3], usize>,
}

impl Table {
    /// Adds the figures of one run.
    fn add(&mut self, pair: usize, side: usize, figures: Vec<Printed>) {
        for printed in figures {
            let key = [&printed.bench, &printed.case, &printed.metric].map(Clone::clone);
            let at = *self.known.entry(key).or_insert_with(|| {
                self.rows.push(Row {
                    bench: printed.bench,
                    case: printed.case,
                    metric: printed.metric,
                    unit: printed.unit,
                    pairs: Vec::new(),
                });
                self.rows.len() - 1
            });
            let values = &mut self.rows[at].pairs;
            if values.len() <= pair {
                values.resize(pair + 1, [None; 2]);
            }
            values[pair][side] = printed.value.filter(|v| v.is_finite());
        }
    }

    /// Compares every figure over `pairs` pairs.
    fn judge(&mut self, pairs: usize) -> Vec<Compared> {
        let compare = |row: &mut Row| {
            row.pairs.resize(pairs, [None; 2]);
            verdict::judge(row)
        };
        self.rows.iter_mut().map(compare).collect()
    }
}

/// The figures of one run.
async fn measure(binary: &Path, args: &[OsString]) -> anyhow::Result<Vec<Printed>> {
    let name = binary.display();
    // The output goes to files, not pipes, so that a child never waits for a reader.
    let folder = tempfile::tempdir().context("cannot make a folder for a run's figures")?;
    let (figures, words) = (folder.path().join("figures"), folder.path().join("words"));
    let mut child = tokio::process::Command::new(binary)
        .args(args)
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&figures)?)
        .stderr(std::fs::File::create(&words)?)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let status = tokio::time::timeout(PATIENCE, child.wait())
        .await
        .with_context(|| format!("a run of {name} did not end within {PATIENCE:?}"))??;
    if !status.success() {
        let words = std::fs::read(&words).unwrap_or_default();
        let last = words.get(words.len().saturating_sub(LAST_WORDS)..);
        let last = String::from_utf8_lossy(last.unwrap_or_default());
        bail!("a run of {name} failed ({status}): {}", last.trim());
    }
    let text = std::fs::read_to_string(&figures)
        .with_context(|| format!("cannot read the figures of {name}"))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            serde_json::from_str(line).with_context(|| {
                format!("{name} printed a line that is no figure of a bench: {line:?}")
            })
        })
        .collect()
}

/// Prints a table for people, or one JSON line a figure.
///
/// # Errors
/// When a figure cannot be written as JSON.
pub fn print(all: &[Compared], json: bool) -> anyhow::Result<()> {
    if json {
        for compared in all {
            println!("{}", serde_json::to_string(compared)?);
        }
        return Ok(());
    }
    let value = |v: Option<f64>| super::figures::number(v);
    let share = |v: Option<f64>| v.map_or_else(|| "–".to_owned(), |v| format!("{v:.3}"));
    let rows = all.iter().map(|c| {
        vec![
            c.bench.clone(),
            c.case.clone(),
            c.metric.clone(),
            value(c.old),
            value(c.new),
            c.unit.clone(),
            share(c.ratio),
            format!("{}–{}", share(c.low), share(c.high)),
            c.pairs.to_string(),
            match (c.verdict, &c.why) {
                (Verdict::Worse, _) => format!("WORSE by more than {:.0} %", c.tolerance * 100.0),
                (Verdict::NotWorse, _) => "not worse".to_owned(),
                (Verdict::Undecided, _) => "undecided".to_owned(),
                (Verdict::NotCompared, why) => why.clone().unwrap_or_default(),
            },
        ]
    });
    println!("{}", super::figures::machine());
    println!(
        "{}",
        ui::table(
            [
                "bench", "case", "metric", "old", "new", "unit", "new/old", "95 %", "pairs",
                "verdict"
            ],
            rows
        )
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_direction() {
        use Direction::{Less, More};
        for (metric, wanted) in [
            ("iterations_per_s", More),
            ("bytes_per_s", Less),
            ("cpu_us_per_capsule", Less),
            ("start_p99_ms", Less),
            ("takeover_s", Less),
            ("p95_completion_s", Less),
            ("resident_mb", Less),
            ("policy_cpu_percent", Less),
        ] {
            assert_eq!(direction(metric), Some(wanted), "{metric}");
        }
        assert_eq!(direction("bananas"), None);
    }
}
