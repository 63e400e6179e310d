//! Numbers over time: what a program reports by name with `run.progress(loss=0.31)`.
//!
//! A number belongs to the boundary that ends its capsule, and becomes durable with the commit that
//! carries it. A computation that is repeated after a crash reports the same numbers for the same
//! boundaries, so each execution has one curve for each name, wherever it ran.
//!
//! Everything is bounded: [`NAMES_LIMIT`] names a run, [`POINTS_LIMIT`] points a ledger message. Beyond
//! that, points that lie side by side become one, which keeps their mean, their extremes and how many
//! there were. No report is dropped, so means stay what they were.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::ids::{BoundaryIndex, IdError, shorten};

/// Most names in one run.
pub const NAMES_LIMIT: usize = 24;
/// Most points in one ledger message, over all names.
pub const POINTS_LIMIT: usize = 48;
/// Largest boundary of a point: what a `bigint` holds.
pub const BOUNDARY_LIMIT: BoundaryIndex = i64::MAX as BoundaryIndex;
/// Most reports of a point: sums of many points stay small.
const REPORTS_LIMIT: u64 = 1_000_000_000_000;
/// Longest name in bytes.
pub const NAME_LIMIT: usize = 64;

/// The name of a curve: 1 to 64 letters, digits and `_ - . / : @ % +`, as in `val/loss`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SeriesName(Box<str>);

impl SeriesName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`IdError::Series`] when it breaks the rule.
    pub fn new(text: &str) -> Result<Self, IdError> {
        let fits = |b: u8| b.is_ascii_alphanumeric() || b"_-./:@%+".contains(&b);
        if (1..=NAME_LIMIT).contains(&text.len()) && text.bytes().all(fits) {
            return Ok(Self(text.into()));
        }
        Err(IdError::Series {
            text: shorten(text),
        })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for SeriesName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for SeriesName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SeriesName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        Self::new(&text).map_err(de::Error::custom)
    }
}

impl JsonSchema for SeriesName {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "SeriesName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^[A-Za-z0-9_./:@%+-]{1,64}$"})
    }
}

/// Consecutive reports of one number. JSON: `[boundary, value]` for one report, and
/// `[boundary, mean, lowest, highest, reports]` for several. JSON has no NaN and no infinity: they are
/// the texts `"NaN"`, `"Infinity"` and `"-Infinity"`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// The boundary that ends the capsule of the last report.
    pub boundary: BoundaryIndex,
    /// The mean of the reports.
    pub mean: f64,
    /// The lowest one. NaN only if all are.
    pub lowest: f64,
    /// The highest one. NaN only if all are.
    pub highest: f64,
    /// How many there are, at least 1.
    pub reports: u64,
}

impl Point {
    /// One report.
    pub fn one(boundary: BoundaryIndex, value: f64) -> Self {
        Self {
            boundary,
            mean: value,
            lowest: value,
            highest: value,
            reports: 1,
        }
    }

    /// This point and the next one as one point.
    pub fn with(self, next: Self) -> Self {
        let reports = self.reports.saturating_add(next.reports);
        let share = next.reports as f64 / reports as f64;
        Self {
            boundary: next.boundary,
            // Exact where both are equal, and infinite or NaN where one of them is.
            mean: match self.mean == next.mean {
                true => self.mean,
                false => self.mean * (1.0 - share) + next.mean * share,
            },
            lowest: self.lowest.min(next.lowest),
            highest: self.highest.max(next.highest),
            reports,
        }
    }
}

/// A float in JSON: a number, or one of the texts `"NaN"`, `"Infinity"` and `"-Infinity"`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Number {
    /// A number.
    Finite(f64),
    /// A text.
    Other(NotFinite),
}

/// The floats that JSON does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotFinite {
    /// Not a number.
    NaN,
    /// Above all numbers.
    Infinity,
    /// Below all numbers.
    #[serde(rename = "-Infinity")]
    MinusInfinity,
}

impl From<Number> for f64 {
    fn from(number: Number) -> Self {
        match number {
            Number::Finite(value) => value,
            Number::Other(NotFinite::NaN) => Self::NAN,
            Number::Other(NotFinite::Infinity) => Self::INFINITY,
            Number::Other(NotFinite::MinusInfinity) => Self::NEG_INFINITY,
        }
    }
}

struct Written(f64);

impl Serialize for Written {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            value if value.is_finite() => to.serialize_f64(value),
            value if value.is_nan() => NotFinite::NaN.serialize(to),
            value if value > 0.0 => NotFinite::Infinity.serialize(to),
            _ => NotFinite::MinusInfinity.serialize(to),
        }
    }
}

impl Serialize for Point {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self {
            boundary,
            mean,
            lowest,
            highest,
            reports,
        } = *self;
        let mean = Written(mean);
        match reports {
            1 => (boundary, mean).serialize(to),
            _ => (boundary, mean, Written(lowest), Written(highest), reports).serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Point {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Read {
            One(BoundaryIndex, Number),
            Several(BoundaryIndex, Number, Number, Number, u64),
        }
        Ok(match Read::deserialize(from)? {
            Read::One(boundary, value) => Self::one(boundary, value.into()),
            Read::Several(boundary, mean, lowest, highest, reports) => Self {
                boundary,
                mean: mean.into(),
                lowest: lowest.into(),
                highest: highest.into(),
                reports: reports.max(1),
            },
        })
    }
}

impl JsonSchema for Point {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Point".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let number = json_schema!({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]});
        let boundary = json_schema!({"type": "integer", "minimum": 0});
        json_schema!({
            "description": "[boundary, value] for one report, [boundary, mean, lowest, highest, reports] \
                            for several that are drawn together.",
            "type": "array",
            "prefixItems": [boundary, number, number, number, {"type": "integer", "minimum": 1}],
            "minItems": 2,
            "maxItems": 5
        })
    }
}

/// The points of each name, by growing boundaries.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Series(pub BTreeMap<SeriesName, Vec<Point>>);

/// Numbers that cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SeriesError {
    /// Not a name.
    #[error(transparent)]
    Name(#[from] IdError),
    /// One name too many.
    #[error(
        "progress: {name} would be one name more than the {NAMES_LIMIT} that a run may report: report \
         fewer, or write the others to an output"
    )]
    Names {
        /// The name that is too many.
        name: String,
    },
    /// More points than a message has.
    #[error("progress: {points} points in one commit, and {POINTS_LIMIT} are the most")]
    Points {
        /// Their number.
        points: usize,
    },
    /// A number that PostgreSQL does not hold.
    #[error(
        "progress: a point of {name} has a boundary or a number of reports over 63 bits or 10^12"
    )]
    Large {
        /// Of which curve.
        name: String,
    },
    /// Boundaries that do not grow, or that lie outside the commit.
    #[error(
        "progress: a number of {name} is for boundary {found}, which is not after {after} and up to \
         {upto}"
    )]
    Boundary {
        /// Of which curve.
        name: String,
        /// Its boundary.
        found: BoundaryIndex,
        /// The boundary before it.
        after: BoundaryIndex,
        /// The last boundary that it may have.
        upto: BoundaryIndex,
    },
}

impl Series {
    /// Whether there is no point.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(Vec::is_empty)
    }

    /// The first boundary of a point.
    pub fn first(&self) -> Option<BoundaryIndex> {
        let firsts = self.0.values().filter_map(|points| points.first());
        firsts.map(|point| point.boundary).min()
    }

    /// Checks what a program says with a commit of boundary `upto`, where `after` is the last boundary
    /// that it has reported.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub fn check(&self, after: BoundaryIndex, upto: BoundaryIndex) -> Result<(), SeriesError> {
        if let Some(name) = self.0.keys().nth(NAMES_LIMIT) {
            return Err(SeriesError::Names {
                name: name.to_string(),
            });
        }
        let points = self.0.values().map(Vec::len).sum();
        if points > POINTS_LIMIT {
            return Err(SeriesError::Points { points });
        }
        for (name, points) in &self.0 {
            let mut last = after;
            for point in points {
                let is_large = point.boundary > BOUNDARY_LIMIT || point.reports > REPORTS_LIMIT;
                if is_large {
                    return Err(SeriesError::Large {
                        name: name.to_string(),
                    });
                }
                if point.boundary <= last || point.boundary > upto {
                    return Err(SeriesError::Boundary {
                        name: name.to_string(),
                        found: point.boundary,
                        after: last,
                        upto,
                    });
                }
                last = point.boundary;
            }
        }
        Ok(())
    }
}

/// Numbers that wait for a commit: at most [`NAMES_LIMIT`] names over its whole life, and at most
/// [`POINTS_LIMIT`] points at a time.
#[derive(Debug, Clone, Default)]
pub struct Waiting {
    /// A name stays after its points are taken.
    series: BTreeMap<SeriesName, Curve>,
    points: usize,
}

/// The points of one name.
#[derive(Debug, Clone)]
struct Curve {
    points: Vec<Point>,
    /// Reports that a point takes, but for the last one: the same for all, so that no part of the
    /// curve is coarser than another.
    width: u64,
}

impl Curve {
    const EMPTY: Self = Self {
        points: Vec::new(),
        width: 1,
    };

    /// Adds a report. The last point stays as it is until another one follows. Returns whether there is
    /// one point more.
    fn add(&mut self, point: Point) -> bool {
        if let [.., last] = self.points.as_mut_slice()
            && last.boundary == point.boundary
        {
            *last = last.with(point);
            return false;
        }
        if let [.., before, last] = self.points.as_mut_slice()
            && before.reports + last.reports <= self.width
        {
            *before = before.with(*last);
            *last = point;
            return false;
        }
        self.points.push(point);
        true
    }

    /// Draws neighbours together. The last point stays as it is.
    fn halve(&mut self) {
        let Some(last) = self.points.pop() else {
            return;
        };
        self.width = self.width.saturating_mul(2);
        let pairs = self.points.chunks(2).map(|pair| match *pair {
            [one, two] => one.with(two),
            [one, ..] => one,
            // `chunks` gives no empty one.
            [] => last,
        });
        self.points = pairs.chain([last]).collect();
    }
}

impl Waiting {
    /// Adds a report of the capsule that ends in `boundary`, which is not before that of the last
    /// one. Several reports of one capsule become one point.
    ///
    /// # Errors
    /// [`SeriesError::Name`] and [`SeriesError::Names`].
    pub fn report(
        &mut self,
        name: &str,
        boundary: BoundaryIndex,
        value: f64,
    ) -> Result<(), SeriesError> {
        if !self.series.contains_key(name) {
            self.begin(SeriesName::new(name)?)?;
        }
        if let Some(curve) = self.series.get_mut(name) {
            self.points += usize::from(curve.add(Point::one(boundary, value)));
        }
        self.fit();
        Ok(())
    }

    fn begin(&mut self, name: SeriesName) -> Result<(), SeriesError> {
        if self.series.len() >= NAMES_LIMIT {
            return Err(SeriesError::Names {
                name: name.to_string(),
            });
        }
        self.series.insert(name, Curve::EMPTY);
        Ok(())
    }

    /// Draws neighbours together until the points are few enough.
    fn fit(&mut self) {
        while self.points > POINTS_LIMIT {
            self.series.values_mut().for_each(Curve::halve);
            self.points = self.series.values().map(|curve| curve.points.len()).sum();
        }
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.points == 0
    }

    /// Takes all points.
    pub fn take(&mut self) -> Series {
        if self.is_empty() {
            return Series::default();
        }
        self.points = 0;
        let all = self
            .series
            .iter_mut()
            .filter(|(_, curve)| !curve.points.is_empty());
        Series(
            all.map(|(name, curve)| (name.clone(), std::mem::replace(curve, Curve::EMPTY).points))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(waiting: &mut Waiting, name: &str) -> Vec<Point> {
        waiting.take().0.remove(name).unwrap_or_default()
    }

    #[test]
    fn many_reports_become_few_points_that_keep_mean_and_extremes() {
        let mut waiting = Waiting::default();
        for boundary in 1..=10_000 {
            let value = f64::from(u32::try_from(boundary % 100).unwrap());
            waiting.report("loss", boundary, value).unwrap();
            waiting.report("lr", boundary, 0.1).unwrap();
            assert!(waiting.points <= POINTS_LIMIT);
        }
        let all = waiting.take();
        all.check(0, 10_000).unwrap();
        let loss = &all.0["loss"];
        assert!(loss.len() > POINTS_LIMIT / 5, "{}", loss.len());
        let reports: u64 = loss.iter().map(|point| point.reports).sum();
        assert_eq!(reports, 10_000);
        let sum: f64 = loss.iter().map(|p| p.mean * p.reports as f64).sum();
        assert!((sum / 10_000.0 - 49.5).abs() < 1e-9, "{sum}");
        assert_eq!(loss.iter().map(|p| p.lowest as i64).min(), Some(0));
        assert_eq!(loss.iter().map(|p| p.highest as i64).max(), Some(99));
        assert_eq!(loss.last(), Some(&Point::one(10_000, 0.0)));
        assert!(all.0["lr"].iter().all(|point| point.mean == 0.1));
        assert!(waiting.is_empty() && waiting.take().is_empty());
    }

    #[test]
    fn no_part_of_a_curve_is_coarser_than_another() {
        for reports in [49, 97, 200, 2_864, 100_000] {
            let mut waiting = Waiting::default();
            for boundary in 1..=reports {
                waiting.report("loss", boundary, 1.0).unwrap();
            }
            let points = of(&mut waiting, "loss");
            let (last, older) = points.split_last().unwrap();
            let widest = older.iter().map(|point| point.reports).max().unwrap();
            assert_eq!(last.reports, 1);
            assert!(
                points.len() > POINTS_LIMIT / 3,
                "{reports}: {}",
                points.len()
            );
            assert!(
                widest <= 2 * reports.div_ceil(POINTS_LIMIT as u64),
                "{reports}: {widest}"
            );
        }
    }

    #[test]
    fn reports_of_one_capsule_are_one_point() {
        let mut waiting = Waiting::default();
        for value in [1.0, 2.0, 6.0] {
            waiting.report("loss", 7, value).unwrap();
        }
        let point = Point {
            boundary: 7,
            mean: 3.0,
            lowest: 1.0,
            highest: 6.0,
            reports: 3,
        };
        assert_eq!(of(&mut waiting, "loss"), [point]);
    }

    #[test]
    fn a_run_has_so_many_names_and_no_more() {
        let mut waiting = Waiting::default();
        for n in 0..NAMES_LIMIT {
            waiting.report(&format!("n{n}"), 1, 0.0).unwrap();
        }
        // Also not after a commit.
        waiting.take();
        waiting.report("n0", 2, 0.0).unwrap();
        let error = waiting.report("more", 2, 0.0).unwrap_err();
        assert!(error.to_string().contains("more"), "{error}");
        for wrong in ["", "a b", "a\u{202e}", &"x".repeat(65)] {
            assert!(matches!(
                Waiting::default().report(wrong, 1, 0.0),
                Err(SeriesError::Name(_))
            ));
        }
    }

    #[test]
    fn points_survive_json_also_those_that_are_no_numbers() {
        let point = Point {
            boundary: 9,
            mean: f64::INFINITY,
            lowest: -0.5,
            highest: f64::INFINITY,
            reports: 4,
        };
        let mut series = Series::default();
        let points = vec![Point::one(7, 0.25), Point::one(8, f64::NEG_INFINITY), point];
        series
            .0
            .insert(SeriesName::new("val/loss").unwrap(), points);
        let text = serde_json::to_string(&series).unwrap();
        assert_eq!(
            text,
            r#"{"val/loss":[[7,0.25],[8,"-Infinity"],[9,"Infinity",-0.5,"Infinity",4]]}"#
        );
        assert_eq!(serde_json::from_str::<Series>(&text).unwrap(), series);
        let nan = serde_json::to_string(&Point::one(1, f64::NAN)).unwrap();
        let read: Point = serde_json::from_str(&nan).unwrap();
        assert!(read.mean.is_nan() && read.lowest.is_nan(), "{nan}");
    }

    #[test]
    fn what_is_not_a_number_does_not_hide_the_extremes() {
        let point = Point::one(1, 2.0).with(Point::one(2, f64::NAN));
        assert!(point.mean.is_nan());
        assert_eq!((point.lowest, point.highest, point.reports), (2.0, 2.0, 2));
    }

    #[test]
    fn boundaries_outside_the_commit_and_out_of_order_are_refused() {
        let series = |boundaries: &[u64]| {
            let points = boundaries.iter().map(|b| Point::one(*b, 0.0)).collect();
            Series([(SeriesName::new("loss").unwrap(), points)].into())
        };
        assert_eq!(series(&[3, 4, 9]).check(2, 9), Ok(()));
        for wrong in [&[2][..], &[3, 3], &[4, 3], &[10]] {
            assert!(series(wrong).check(2, 9).is_err(), "{wrong:?}");
        }
        let many: Vec<u64> = (1..=POINTS_LIMIT as u64 + 1).collect();
        let error = series(&many).check(0, 1_000).unwrap_err();
        assert_eq!(error, SeriesError::Points { points: 49 });
        let large = series(&[u64::MAX - 1, u64::MAX]).check(0, u64::MAX);
        assert!(matches!(large, Err(SeriesError::Large { .. })));
    }
}
