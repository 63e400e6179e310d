//! The better direction of each figure, and its tolerance.

/// The better direction of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// More is better.
    More,
    /// Less is better.
    Less,
}

use Direction::{Less, More};

/// The end of a metric's name and its direction. The first line that fits counts.
const DIRECTIONS: [(&str, Direction); 18] = [
    ("bytes_per_s", Less), // of an agent at rest
    ("_per_s", More),
    ("_per_capsule", Less),
    ("_per_execution", Less),
    ("gflops", More),
    ("ratio_low", More),
    ("ratio_high", More),
    ("pairs_in_order", More),
    ("_ms", Less),
    ("_us", Less),
    ("_bytes", Less),
    ("_mb", Less),
    ("reproducibility_cost", Less),
    ("growth", Less),
    ("preemptions", Less),
    ("crossings_unseen", Less),
    ("_s", Less),
    ("_percent", Less),
];

/// The better direction of a metric; none if the table does not have it.
pub fn direction(metric: &str) -> Option<Direction> {
    let mut table = DIRECTIONS.iter();
    table
        .find(|(end, _)| metric.ends_with(end))
        .map(|(_, direction)| *direction)
}

/// The share by which a metric may be worse: 10 % for a 99th percentile, else 3 %.
pub fn tolerance(metric: &str) -> f64 {
    if metric.contains("p99") { 0.10 } else { 0.03 }
}
