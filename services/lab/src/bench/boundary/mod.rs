//! `bench boundary`: the cost of boundaries. CG through FIEC with the default commit policy, against
//! the bare loop of the same program in the same binary; a boundary without a commit in a Python
//! loop; and a `chain` of commits, one at every capsule.
//!
//! The two solves of a pair run interleaved (`interleave`). So a slow second of the machine meets
//! both, and pairs differ little enough to judge 2 %. The median of the pairs' ratios is printed with
//! an interval that holds the median of all such pairs, whatever their distribution is ([`interval`]).
//! That interval says whether the reach is met, missed or not decided. Commits are due by the wall
//! clock, which goes on while a solve waits for its turn. So each solve makes about twice as many
//! commits as it would alone, and the ratio is too low rather than too high.

mod chain;
mod interleave;

use anyhow::Context as _;
use serde_json::json;

use super::figures::median;
use super::interval::{CHANCE, interval, middle};
use super::python::Kit;
use super::{Lab, cluster};

/// The share of the bare loop's speed that is wanted.
const REACH: f64 = 0.98;

/// A matrix, with the parameters of its solve.
struct Case {
    name: &'static str,
    params: serde_json::Value,
    /// Load cases of the trial solve. Its time tells how many load cases take `seconds`.
    few: u64,
    /// Least time of computing of a solve, in seconds. The one with the large state must commit it.
    seconds: f64,
    /// Pairs of solves.
    pairs: usize,
}

/// Runs the bench: `iterations_per_s` for each matrix, floor = bare loop, reach ≥ 0.98, with
/// `ratio_low` and `ratio_high`, between which it lies; `boundary_us` of the Python kit, reach < 20;
/// and the figures of `chain`.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let matrix = crate::demo::matrix()?;
    let cases = [
        Case {
            name: "bcsstk16",
            params: json!({"matrix": {"file": matrix}, "iterations_per_capsule": 10}),
            few: 20,
            seconds: 1.3,
            pairs: 12,
        },
        Case {
            name: "poisson 1000x1000",
            params: json!({"matrix": {"poisson2d": {"n": 1000}}, "iterations_per_capsule": 10,
                           "tolerance": if lab.quick { 1e-1 } else { 1e-3 }}),
            few: 2,
            seconds: 5.2,
            pairs: 6,
        },
    ];
    let cluster = cluster(lab, 1, &[], true).await?;
    for case in cases {
        let name = case.name;
        let pairs = if lab.quick { 1 } else { case.pairs };
        let slug = name.replace(' ', "-");
        let with = |load_cases: u64| {
            let mut params = case.params.clone();
            params["load_cases"] = json!(load_cases);
            params
        };
        // One unmeasured solve on each side warms pages and caches, and reads the matrix.
        lab.steps_message(&format!("{name}: a trial"));
        let trial = interleave::pair(&cluster, &slug, with(case.few)).await?;
        let seconds = if lab.quick { 0.3 } else { case.seconds };
        let load_cases = (seconds * case.few as f64 / trial.bare.as_secs_f64()).ceil();
        let params = with((load_cases as u64).max(1));
        let (mut bare, mut ratios) = (Vec::new(), Vec::new());
        for pair in 0..pairs {
            lab.steps_message(&format!("{name}: pair {} of {pairs}", pair + 1));
            let id = format!("{slug}-{pair}");
            let found = interleave::pair(&cluster, &id, params.clone()).await?;
            bare.push(found.iterations / found.bare.as_secs_f64());
            ratios.push(found.bare.as_secs_f64() / found.ours.as_secs_f64());
        }
        let floor = median(&mut bare);
        // The ratio is the median of the pairs' ratios, not of the medians.
        let ratio = middle(&mut ratios);
        let (low, high, chance) = interval(&mut ratios);
        let value = floor * ratio;
        let figures = &mut *lab.figures;
        figures.add(
            "boundary",
            name,
            "iterations_per_s",
            "1/s",
            value,
            Some(floor),
        );
        figures.add("boundary", name, "ratio_low", "1", low, None);
        figures.add("boundary", name, "ratio_high", "1", high, None);
        eprintln!(
            "boundary, {name}: {ratio:.3} of the bare loop, between {low:.3} and {high:.3} with \
             {:.0} %: at least {REACH} is {}",
            chance * 100.0,
            verdict(low, high, chance)
        );
    }
    cluster.stop().await;
    python(lab).await?;
    chain::run(lab).await
}

/// The verdict on the reach of an interval that holds the median with this chance.
fn verdict(low: f64, high: f64, chance: f64) -> &'static str {
    if chance < CHANCE {
        "not decided"
    } else if low >= REACH {
        "met"
    } else if high < REACH {
        "missed"
    } else {
        "not decided"
    }
}

/// Microseconds that a boundary without a commit adds to a turn of a loop in Python.
async fn python(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let kit = match Kit::find().await {
        Ok(kit) => kit,
        Err(why) => {
            lab.left_out("bench boundary: the cases of the Python kit", &why);
            return Ok(());
        }
    };
    lab.steps_message("the Python kit's own bench");
    const METRIC: &str = "boundary_us";
    let figures = kit.bench().await.context("python3 -m fiec.bench")?;
    let boundaries: Vec<_> = figures.iter().filter(|f| f.metric == METRIC).collect();
    anyhow::ensure!(
        !boundaries.is_empty(),
        "python3 -m fiec.bench gave no {METRIC}: {figures:?}"
    );
    for figure in boundaries {
        let case = format!("python: {}", figure.case);
        let (unit, floor) = (&figure.unit, figure.floor);
        lab.figures
            .add("boundary", &case, METRIC, unit, figure.value, floor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_around_the_reach_decides_nothing() {
        assert_eq!(verdict(0.981, 0.99, 0.96), "met");
        assert_eq!(verdict(0.981, 0.99, 0.9), "not decided");
        assert_eq!(verdict(0.95, 0.979, 0.96), "missed");
        assert_eq!(verdict(0.97, 0.99, 0.96), "not decided");
    }
}
