//! Figures: JSON lines for scripts as they come, one table for people at the end.

use fiec::ui;
use serde::{Deserialize, Serialize};

/// One figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// The bench.
    pub bench: String,
    /// The case, e.g. `warm 72 KiB`.
    pub case: String,
    /// Name of the measure, which ends in its unit.
    pub metric: String,
    /// The product's value.
    pub value: f64,
    /// Unit of value and floor.
    pub unit: String,
    /// The value of the same work without FIEC, measured in the same run.
    pub floor: Option<f64>,
    /// Value divided by floor.
    pub ratio: Option<f64>,
}

/// All figures of a run.
#[derive(Debug)]
pub struct Figures {
    json: bool,
    all: Vec<Figure>,
}

impl Figures {
    /// Collects figures. With `json`, prints each at once.
    pub fn new(json: bool) -> Self {
        Self {
            json,
            all: Vec::new(),
        }
    }

    /// True if standard output has only JSON lines.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Adds a figure.
    pub fn add(
        &mut self,
        bench: &str,
        case: &str,
        metric: &str,
        unit: &str,
        value: f64,
        floor: Option<f64>,
    ) {
        debug_assert!(
            super::against::direction(metric).is_some(),
            "{metric} has no direction: add it to the table in bench/against/direction.rs"
        );
        let ratio = floor.filter(|f| *f > 0.0).map(|f| value / f);
        let figure = Figure {
            bench: bench.to_owned(),
            case: case.to_owned(),
            metric: metric.to_owned(),
            value,
            unit: unit.to_owned(),
            floor,
            ratio,
        };
        if self.json
            && let Ok(line) = serde_json::to_string(&figure)
        {
            println!("{line}");
        }
        self.all.push(figure);
    }

    /// Prints the table.
    pub fn finish(&self) {
        if self.json || self.all.is_empty() {
            return;
        }
        let rows = self.all.iter().map(|f| {
            vec![
                f.bench.clone(),
                f.case.clone(),
                f.metric.clone(),
                number(Some(f.value)),
                f.unit.clone(),
                number(f.floor),
                number(f.ratio),
            ]
        });
        println!("{}", machine());
        println!(
            "{}",
            ui::table(
                ["bench", "case", "metric", "value", "unit", "floor", "ratio"],
                rows
            )
        );
    }
}

/// A value with the digits that a person reads.
pub fn number(n: Option<f64>) -> String {
    match n {
        Some(n) if n.abs() >= 100.0 => format!("{n:.0}"),
        Some(n) if n.abs() >= 1.0 => format!("{n:.2}"),
        Some(n) => format!("{n:.3}"),
        None => "–".to_owned(),
    }
}

/// The machine's name, to keep with the figures.
pub fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            text.lines().find_map(|l| {
                l.strip_prefix("model name")?
                    .split_once(':')
                    .map(|(_, v)| v.trim().to_owned())
            })
        })
        .unwrap_or_else(|| "unknown processor".to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?");
    format!("{cpu}, {cores} cores, load {load} at the start of this table")
}

/// The value below which `share` of the samples lie (nearest rank); 0 for none.
pub fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (share * samples.len() as f64).ceil() as usize;
    samples
        .get(rank.clamp(1, samples.len().max(1)) - 1)
        .copied()
        .unwrap_or(0.0)
}

/// The median.
pub fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(median(&mut samples), 50.0);
        assert_eq!(quantile(&mut samples, 0.99), 99.0);
        assert_eq!(quantile(&mut [], 0.5), 0.0);
    }
}
