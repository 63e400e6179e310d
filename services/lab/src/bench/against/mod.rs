//! `bench NAME --against BINARY`: is this program worse than another build of it? Both run in pairs of
//! alternating order. Each figure has the interval of the pairs' median ratio. A slow minute of the
//! machine meets both runs of a pair.

mod direction;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use fiec::ui;
use serde::{Deserialize, Serialize};

use super::interval::{CHANCE, interval, middle};
pub use direction::{Direction, direction, tolerance};

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
    /// Pairs of runs.
    pub pairs: u16,
}

/// The conclusion on a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The interval does not lie wholly beyond the tolerance.
    NotWorse,
    /// The interval lies wholly beyond the tolerance.
    Worse,
    /// There is no interval; `why` says the reason.
    NotCompared,
}

/// A figure of both builds.
#[derive(Debug, Clone, Serialize)]
pub struct Compared {
    /// The bench.
    pub bench: String,
    /// The case.
    pub case: String,
    /// The figure's name, which ends in its unit.
    pub metric: String,
    /// Unit of `old` and `new`.
    pub unit: String,
    /// The better direction.
    pub direction: Option<Direction>,
    /// The median of the old build.
    pub old: Option<f64>,
    /// The median of the new build.
    pub new: Option<f64>,
    /// The median of new/old over the pairs. JSON has `null` if it is infinite.
    pub ratio: Option<f64>,
    /// The lower end of the ratio's interval.
    pub low: Option<f64>,
    /// The upper end of the ratio's interval.
    pub high: Option<f64>,
    /// The chance with which the interval holds the median ratio, at least 0.95.
    pub chance: Option<f64>,
    /// Pairs in which both builds print the figure.
    pub pairs: usize,
    /// The share by which it may be worse.
    pub tolerance: f64,
    /// The conclusion.
    pub verdict: Verdict,
    /// Why it was not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
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

/// Both builds' values of one figure, one entry a pair.
struct Row {
    bench: String,
    case: String,
    metric: String,
    unit: String,
    pairs: Vec<[Option<f64>; 2]>,
}

/// Runs the pairs and compares every figure, in the order in which they were printed first.
///
/// # Errors
/// When a run fails, or prints a line that is no figure.
pub async fn compare(plan: &Plan<'_>, step: impl Fn(&str)) -> anyhow::Result<Vec<Compared>> {
    let mut rows: Vec<Row> = Vec::new();
    let mut known: HashMap<[String; 3], usize> = HashMap::new();
    let pairs = usize::from(plan.pairs);
    for pair in 0..pairs {
        let order = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
        for side in order {
            let (binary, word) = [(plan.old, "old"), (plan.new, "new")][side];
            step(&format!("pair {} of {pairs}: {word}", pair + 1));
            for printed in measure(binary, &plan.args).await? {
                let key = [&printed.bench, &printed.case, &printed.metric].map(Clone::clone);
                let at = *known.entry(key).or_insert_with(|| {
                    rows.push(Row {
                        bench: printed.bench,
                        case: printed.case,
                        metric: printed.metric,
                        unit: printed.unit,
                        pairs: vec![[None; 2]; pairs],
                    });
                    rows.len() - 1
                });
                rows[at].pairs[pair][side] = printed.value.filter(|v| v.is_finite());
            }
        }
    }
    Ok(rows.into_iter().map(judge).collect())
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

/// The ratio of a pair; none if it is not defined.
fn ratio(old: f64, new: f64) -> Option<f64> {
    if old == new {
        Some(1.0) // also of two zeros
    } else if old < 0.0 || new < 0.0 {
        None
    } else {
        Some(new / old)
    }
}

fn judge(row: Row) -> Compared {
    let side = |i: usize| {
        let values = row.pairs.iter().filter_map(|pair| pair[i]);
        let mut values: Vec<f64> = values.collect();
        (!values.is_empty()).then(|| middle(&mut values))
    };
    let (old, new) = (side(0), side(1));
    let both = row
        .pairs
        .iter()
        .filter_map(|[old, new]| Some(((*old)?, (*new)?)));
    let pairs = both.clone().count();
    let mut ratios: Vec<f64> = both.filter_map(|(old, new)| ratio(old, new)).collect();
    let direction = direction(&row.metric);
    let tolerance = tolerance(&row.metric);
    let (low, high, chance) = interval(&mut ratios);
    let refused = match direction {
        _ if new.is_none() => Some("only the old build prints it".to_owned()),
        _ if old.is_none() => Some("only the new build prints it".to_owned()),
        None => Some("no direction is known for this metric".to_owned()),
        Some(_) if ratios.len() < pairs => Some("it is below 0, so it has no ratio".to_owned()),
        Some(_) if chance < CHANCE => Some(format!(
            "both builds print it in only {pairs} of {} pairs",
            row.pairs.len()
        )),
        Some(_) => None,
    };
    let beyond = match direction {
        Some(Direction::More) => high < 1.0 - tolerance,
        Some(Direction::Less) => low > 1.0 + tolerance,
        None => false,
    };
    let verdict = match (&refused, beyond) {
        (Some(_), _) => Verdict::NotCompared,
        (None, true) => Verdict::Worse,
        (None, false) => Verdict::NotWorse,
    };
    let known = |value: f64| refused.is_none().then_some(value);
    Compared {
        ratio: known(middle(&mut ratios)),
        low: known(low),
        high: known(high),
        chance: known(chance),
        bench: row.bench,
        case: row.case,
        metric: row.metric,
        unit: row.unit,
        direction,
        old,
        new,
        pairs,
        tolerance,
        verdict,
        why: refused,
    }
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
            match (c.verdict, &c.why) {
                (Verdict::Worse, _) => format!("WORSE by more than {:.0} %", c.tolerance * 100.0),
                (Verdict::NotWorse, _) => "not worse".to_owned(),
                (Verdict::NotCompared, why) => why.clone().unwrap_or_default(),
            },
        ]
    });
    println!("{}", super::figures::machine());
    println!(
        "{}",
        ui::table(
            [
                "bench", "case", "metric", "old", "new", "unit", "new/old", "95 %", "verdict"
            ],
            rows
        )
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten pairs: the old build always has 100.
    fn judged(metric: &str, new: [f64; 10]) -> Verdict {
        judge(row(
            metric,
            new.map(|new| [Some(100.0), Some(new)]).to_vec(),
        ))
        .verdict
    }

    fn row(metric: &str, pairs: Vec<[Option<f64>; 2]>) -> Row {
        Row {
            bench: "b".to_owned(),
            case: "c".to_owned(),
            metric: metric.to_owned(),
            unit: "1".to_owned(),
            pairs,
        }
    }

    #[test]
    fn worse_is_what_lies_wholly_beyond_the_tolerance() {
        // The interval of ten pairs leaves out one at each end.
        let up = [
            90.0, 104.0, 104.0, 105.0, 106.0, 106.0, 107.0, 108.0, 109.0, 130.0,
        ];
        assert_eq!(judged("gap_p50_ms", up), Verdict::Worse);
        assert_eq!(
            judged("gap_p99_ms", up),
            Verdict::NotWorse,
            "10 % for a p99"
        );
        assert_eq!(
            judged("rows_per_s", up),
            Verdict::NotWorse,
            "more is better"
        );
        let mut wide = up;
        wide[1] = 101.0;
        assert_eq!(judged("gap_p50_ms", wide), Verdict::NotWorse);
        let down = up.map(|v| 200.0 - v);
        assert_eq!(judged("rows_per_s", down), Verdict::Worse);
        assert_eq!(judged("gap_p50_ms", down), Verdict::NotWorse);
        assert_eq!(judged("gap_p99_ms", up.map(|v| v + 10.0)), Verdict::Worse);
    }

    #[test]
    fn a_figure_without_a_ratio_or_a_direction_or_enough_pairs_is_not_compared() {
        let same = |old, new, n| vec![[old, new]; n];
        let of = |metric, pairs| judge(row(metric, pairs));
        let why = |c: Compared| (c.verdict, c.why.unwrap_or_default());
        for (metric, pairs, words) in [
            ("x_ms", same(Some(1.0), None, 10), "only the old"),
            ("x_ms", same(None, Some(1.0), 10), "only the new"),
            ("x_ms", same(Some(-1.0), Some(2.0), 10), "below 0"),
            ("bananas", same(Some(1.0), Some(2.0), 10), "no direction"),
            ("x_ms", same(Some(1.0), Some(2.0), 5), "only 5 of 5 pairs"),
        ] {
            let (verdict, why) = why(of(metric, pairs));
            assert_eq!(verdict, Verdict::NotCompared);
            assert!(why.contains(words), "{why:?} lacks {words:?}");
        }
        let zeros = of("x_ms", same(Some(0.0), Some(0.0), 10));
        assert_eq!((zeros.verdict, zeros.ratio), (Verdict::NotWorse, Some(1.0)));
        let from_zero = of("x_ms", same(Some(0.0), Some(1.0), 10));
        assert_eq!(from_zero.verdict, Verdict::Worse);
    }

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
