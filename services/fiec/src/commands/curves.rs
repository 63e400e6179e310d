//! Numbers that programs report, as words and small curves in a line of a terminal.

use std::collections::BTreeMap;

use fiec_schemas::series::{Point, Series};
use fiec_schemas::{BoundaryIndex, ExecutionId};
use sqlx::PgPool;

use crate::sql;

/// Characters of a curve.
const WIDTH: usize = 20;
/// Heights, from low to high.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Means that are no number.
const NO_NUMBER: char = '×';
/// Points of a curve that are kept. Beyond that, neighbours become one.
const KEPT: usize = 256;
/// Executions whose curves are kept.
const EXECUTIONS: usize = 1_000;

/// The curves of the executions that are watched.
#[derive(Debug, Default)]
pub struct Curves(BTreeMap<ExecutionId, BTreeMap<String, Vec<Point>>>);

impl Curves {
    /// Reads what was recorded of an execution before it is watched.
    ///
    /// # Errors
    /// What PostgreSQL says.
    pub async fn read(&mut self, pool: &PgPool, execution: ExecutionId) -> anyhow::Result<()> {
        let rows = sql::query(
            pool,
            format!(
                "SELECT name, boundary, value, lowest, highest, reports FROM (\
                 SELECT *, row_number() OVER (PARTITION BY name ORDER BY boundary) AS nth, \
                 count(*) OVER (PARTITION BY name) AS points \
                 FROM execution_series WHERE execution = '{execution}') s \
                 WHERE nth % (points / {KEPT} + 1) = 0 OR nth = points ORDER BY name, boundary"
            ),
        )
        .await?;
        for row in 0..rows.rows.len() {
            let text = |column| rows.get(row, column).unwrap_or_default();
            let point = Point {
                boundary: text("boundary").parse()?,
                mean: text("value").parse()?,
                lowest: text("lowest").parse()?,
                highest: text("highest").parse()?,
                reports: text("reports").parse()?,
            };
            self.add(execution, text("name"), point);
        }
        Ok(())
    }

    /// Adds what an execution has reported. Returns its curves in words.
    pub fn note(&mut self, execution: ExecutionId, numbers: &Series) -> String {
        if self.0.len() >= EXECUTIONS && !self.0.contains_key(&execution) {
            self.0.pop_first();
        }
        for (name, points) in &numbers.0 {
            for point in points {
                self.add(execution, name.as_str(), *point);
            }
        }
        let curves = self.0.get(&execution).into_iter().flatten();
        let named = curves.filter(|(name, _)| numbers.0.contains_key(name.as_str()));
        named
            .map(|(name, points)| in_words(name, points))
            .collect::<Vec<_>>()
            .join("  ")
    }

    fn add(&mut self, execution: ExecutionId, name: &str, point: Point) {
        let curves = self.0.entry(execution).or_default();
        let points = curves.entry(name.to_owned()).or_default();
        // PostgreSQL may be ahead of the feed.
        if points
            .last()
            .is_some_and(|last| last.boundary >= point.boundary)
        {
            return;
        }
        points.push(point);
        if points.len() > KEPT {
            let pairs = points.chunks(2).map(|pair| match *pair {
                [one, two] => one.with(two),
                [one, ..] => one,
                [] => point,
            });
            *points = pairs.collect();
        }
    }

    /// An execution goes on from an earlier boundary: what it said beyond it does not count.
    pub fn go_back(&mut self, execution: ExecutionId, to: BoundaryIndex) {
        let curves = self.0.get_mut(&execution).into_iter().flatten();
        for (_, points) in curves {
            points.retain(|point| point.boundary <= to);
        }
    }

    /// Forgets an execution that has ended.
    pub fn forget(&mut self, execution: ExecutionId) {
        self.0.remove(&execution);
    }
}

/// Numbers of a message as words, without a curve.
pub fn last_values(numbers: &Series) -> String {
    let all = numbers.0.iter();
    let said = all.filter_map(|(name, points)| Some((name, points.last()?)));
    said.map(|(name, last)| format!("{name} {}", number(last.mean)))
        .collect::<Vec<_>>()
        .join("  ")
}

fn in_words(name: &str, points: &[Point]) -> String {
    let last = points.last().map_or(f64::NAN, |point| point.mean);
    format!("{name} {} {}", number(last), sparkline(points))
}

/// A number in four significant digits.
pub fn number(value: f64) -> String {
    if !value.is_finite() || value == 0.0 {
        return value.to_string();
    }
    if !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.3e}");
    }
    let before = value.abs().log10().floor() as i32;
    let decimals = usize::try_from(3 - before).unwrap_or(0);
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// The curve over the boundaries, from its lowest to its highest mean.
fn sparkline(points: &[Point]) -> String {
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return String::new();
    };
    let finite = points
        .iter()
        .map(|p| p.mean)
        .filter(|mean| mean.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), mean| {
        (low.min(mean), high.max(mean))
    });
    let span = (last.boundary - first.boundary).max(1) as f64;
    let cells = WIDTH.min(points.len());
    let cell_of = |boundary: BoundaryIndex| {
        let share = (boundary - first.boundary) as f64 / span;
        ((share * cells as f64) as usize).min(cells - 1)
    };
    let mut drawn: Vec<Option<Point>> = vec![None; cells];
    for point in points {
        if let Some(cell) = drawn.get_mut(cell_of(point.boundary)) {
            *cell = Some(cell.map_or(*point, |before| before.with(*point)));
        }
    }
    let mut before = *first;
    let mut line = String::new();
    for cell in drawn {
        // Between two points that lie far apart the curve stays where it was.
        before = cell.unwrap_or(before);
        let height = (before.mean - low) / (high - low);
        line.push(match () {
            () if !before.mean.is_finite() => NO_NUMBER,
            // All are equal.
            () if height.is_nan() => '▄',
            () => {
                let top = BLOCKS.len() - 1;
                let at = (height * top as f64).round() as usize;
                BLOCKS.get(at.min(top)).copied().unwrap_or('█')
            }
        });
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::series::SeriesName;

    fn points(values: &[f64]) -> Vec<Point> {
        let numbered = values.iter().zip(1..);
        numbered.map(|(value, n)| Point::one(n, *value)).collect()
    }

    #[test]
    fn a_curve_goes_from_its_lowest_to_its_highest() {
        assert_eq!(sparkline(&points(&[0.0, 1.0, 2.0, 7.0])), "▁▂▃█");
        assert_eq!(sparkline(&points(&[3.0; 5])), "▄▄▄▄▄");
        assert_eq!(sparkline(&points(&[1.0])), "▄");
        assert_eq!(sparkline(&points(&[1.0, f64::NAN, 2.0])), "▁×█");
        assert_eq!(sparkline(&[]), "");
        let falls: Vec<f64> = (0..1_000).map(|n| 1_000.0 - f64::from(n)).collect();
        let line = sparkline(&points(&falls));
        assert_eq!(line.chars().count(), WIDTH);
        assert!(line.starts_with('█') && line.ends_with('▁'), "{line}");
    }

    #[test]
    fn numbers_have_four_digits() {
        let cases = [
            (0.312_345, "0.3123"),
            (1e-3, "0.001"),
            (1.5e-7, "1.500e-7"),
            (12.0, "12"),
            (123_456.7, "123457"),
            (-2.5e9, "-2.500e9"),
            (0.0, "0"),
            (f64::NAN, "NaN"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_curve_goes_on_from_message_to_message_and_stays_small() {
        let mut curves = Curves::default();
        let id = ExecutionId(uuid::Uuid::nil());
        let name = SeriesName::new("loss").unwrap();
        let of = |point| Series([(name.clone(), vec![point])].into());
        curves.note(id, &of(Point::one(1, 8.0)));
        assert_eq!(curves.note(id, &of(Point::one(2, 1.0))), "loss 1 █▁");
        // What PostgreSQL had said already.
        assert_eq!(curves.note(id, &of(Point::one(2, 5.0))), "loss 1 █▁");
        for n in 3..5_000 {
            curves.note(id, &of(Point::one(n, 1.0)));
        }
        assert!(curves.0[&id]["loss"].len() <= KEPT);
        curves.forget(id);
        assert!(curves.0.is_empty());
    }
}
