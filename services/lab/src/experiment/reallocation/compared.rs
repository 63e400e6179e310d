//! The measurements of the three modes as a table.

use fiec_simulator::reallocation::{Measured, Mode};

/// Column names.
pub(super) const HEAD: [&str; 11] = [
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

/// One mode, over all seeds and cluster sizes.
pub(super) struct Row {
    pub mode: Mode,
    /// By seed, then by size.
    pub runs: Vec<Vec<Measured>>,
}

/// A mix and the clusters on which it was played.
pub(super) struct Part {
    /// Its name in file names.
    pub name: &'static str,
    /// Its title, for people.
    pub title: String,
    /// Notes on the method.
    pub notes: Vec<String>,
    /// Number of nodes of the compared cluster.
    pub nodes: usize,
    /// Numbers of nodes of all clusters, ascending.
    pub sizes: Vec<usize>,
    pub rows: Vec<Row>,
    /// Number of jobs with the bits of an undisturbed run, and of all jobs, if they computed any.
    pub same: Option<(usize, usize)>,
}

pub(super) fn count(n: usize) -> f64 {
    n as f64
}

fn number(n: u64) -> f64 {
    n as f64
}

/// Nodes and device hours at which the mean time is `aim`. It is the first size that is fast
/// enough. If the next smaller one also ended all jobs, the value is interpolated between the two.
/// That overestimates the need, because each further node gains less.
fn equal(sizes: &[usize], runs: &[Measured], aim: f64) -> Option<(f64, f64)> {
    let enough = |m: &Measured| m.unfinished == 0 && m.mean_s <= aim;
    let at = runs.iter().position(enough)?;
    let here = (count(*sizes.get(at)?), runs.get(at)?);
    let before = at
        .checked_sub(1)
        .and_then(|b| Some((sizes.get(b)?, runs.get(b)?)));
    let Some((nodes, m)) = before.filter(|(_, m)| m.unfinished == 0) else {
        return Some((here.0, here.1.device_hours));
    };
    let share = (m.mean_s - aim) / (m.mean_s - here.1.mean_s).max(1e-9);
    let between = |a: f64, b: f64| a + share.clamp(0.0, 1.0) * (b - a);
    Some((
        between(count(*nodes), here.0),
        between(m.device_hours, here.1.device_hours),
    ))
}

impl Part {
    /// A row's runs on the compared cluster, by seed.
    pub fn runs(&self, row: &Row) -> Vec<Measured> {
        let at = self.sizes.iter().position(|n| *n == self.nodes);
        let of = |sizes: &Vec<Measured>| at.and_then(|at| sizes.get(at)).copied();
        row.runs.iter().filter_map(of).collect()
    }

    /// The mean of a value over the seeds, on that cluster.
    pub fn mean(&self, row: &Row, of: impl Fn(&Measured) -> f64) -> f64 {
        let runs = self.runs(row);
        runs.iter().map(of).sum::<f64>() / count(runs.len().max(1))
    }

    /// Nodes and device hours until the last completion at which a row is as fast as reserved peaks
    /// on the compared cluster. Both are means over the seeds. None if a seed had no such cluster.
    pub fn cost(&self, row: &Row) -> Option<(f64, f64)> {
        let reserved = self.rows.iter().find(|r| r.mode == Mode::Reserved)?;
        let aims = self.runs(reserved);
        let found: Option<Vec<_>> = row
            .runs
            .iter()
            .zip(&aims)
            .map(|(runs, aim)| equal(&self.sizes, runs, aim.mean_s))
            .collect();
        let found = found.filter(|f| !f.is_empty())?;
        let (nodes, hours) = found.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        Some((nodes / count(found.len()), hours / count(found.len())))
    }

    /// True if a promise was broken.
    pub fn is_broken(&self) -> bool {
        let unfinished = |row: &Row| self.runs(row).iter().any(|m| m.unfinished > 0);
        let killed = |row: &Row| {
            row.mode != Mode::OverCommit && row.runs.iter().flatten().any(|m| m.killed > 0)
        };
        let bits = self.same.is_some_and(|(same, all)| same != all);
        bits || self.rows.iter().any(|row| unfinished(row) || killed(row))
    }

    /// The cells of the table.
    pub fn cells(&self) -> Vec<[String; 11]> {
        self.rows.iter().map(|row| self.row(row)).collect()
    }

    fn row(&self, row: &Row) -> [String; 11] {
        // A real part lasts seconds, so it gets one digit.
        let seconds = |of: fn(&Measured) -> f64| match self.mean(row, of) {
            s if s < 100.0 => format!("{s:.1}"),
            s => format!("{s:.0}"),
        };
        let percent = |of: fn(&Measured) -> f64| format!("{:.1} %", 100.0 * self.mean(row, of));
        let times = |of: fn(&Measured) -> u64| format!("{:.0}", self.mean(row, |m| number(of(m))));
        [
            row.mode.as_str().to_owned(),
            seconds(|m| m.mean_s),
            seconds(|m| m.p95_s),
            seconds(|m| m.makespan_s),
            percent(|m| m.utilization),
            percent(|m| m.partly_used),
            seconds(|m| m.lost_s),
            seconds(|m| m.lost_to_revocation_s),
            times(|m| m.killed),
            format!(
                "{}, {}, {}",
                times(|m| m.moved),
                times(|m| m.parked),
                times(|m| m.suspended)
            ),
            self.cost(row).map_or_else(
                || {
                    let most = self.sizes.last().copied().unwrap_or(0);
                    format!("not with {most} nodes")
                },
                |(nodes, hours)| format!("{nodes:.2} nodes, {hours:.2} device h"),
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(mean_s: f64) -> Measured {
        Measured {
            mean_s,
            device_hours: mean_s / 10.0,
            ..Measured::default()
        }
    }

    #[test]
    fn equal_performance_lies_between_the_sizes_around_it() {
        let runs = [300.0, 200.0, 100.0].map(took);
        assert_eq!(equal(&[1, 2, 3], &runs, 150.0), Some((2.5, 15.0)));
        assert_eq!(equal(&[1, 2, 3], &runs, 200.0), Some((2.0, 20.0)));
        assert_eq!(equal(&[1, 2, 3], &runs, 900.0), Some((1.0, 30.0)));
        assert_eq!(equal(&[1, 2, 3], &runs, 99.0), None);
    }

    #[test]
    fn a_cluster_on_which_jobs_did_not_end_is_not_counted_on() {
        let stuck = Measured {
            unfinished: 1,
            ..took(10.0)
        };
        let runs = [stuck, took(100.0)];
        assert_eq!(equal(&[1, 2], &runs, 150.0), Some((2.0, 10.0)));
    }
}
