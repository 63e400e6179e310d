//! From the values of pairs to verdicts, and whether more pairs are needed. No run happens here.
//!
//! Each verdict is by all pairs so far. Looking again after more pairs gives chance more than one
//! look: if the median ratio lies exactly on the bound, four looks decide about one figure in eleven by
//! chance, and a single look at 40 pairs decides one in twenty-six. `--pairs 40` looks once. The
//! alternative, wider intervals at each look, would take more pairs for every figure.

use serde::Serialize;

use super::direction::{Direction, direction, tolerance};
use crate::bench::interval::{CHANCE, interval, middle};

/// Most pairs of a comparison.
pub const MOST: u16 = 40;
/// Pairs that are added before each further look.
const STEP: u16 = 10;

/// The conclusion on a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The interval lies wholly within the tolerance.
    NotWorse,
    /// The interval lies wholly beyond the tolerance.
    Worse,
    /// The interval holds the bound between the two.
    Undecided,
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
    /// The chance with which the interval holds the median ratio, at least 0.95 at a single look.
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

/// Both builds' values of one figure, one entry a pair.
#[derive(Debug)]
pub(super) struct Row {
    pub bench: String,
    pub case: String,
    pub metric: String,
    pub unit: String,
    pub pairs: Vec<[Option<f64>; 2]>,
}

/// Pairs to add before the next look; 0 if every figure is decided, or there are [`MOST`] pairs.
pub(super) fn more(compared: &[Compared], pairs: u16) -> u16 {
    if compared.iter().any(|c| c.verdict == Verdict::Undecided) {
        MOST.saturating_sub(pairs).min(STEP)
    } else {
        0
    }
}

/// The verdict on a median ratio new/old whose interval is `low` to `high`.
fn decide(direction: Direction, tolerance: f64, low: f64, high: f64) -> Verdict {
    let (within, beyond) = match direction {
        Direction::More => (low > 1.0 - tolerance, high < 1.0 - tolerance),
        Direction::Less => (high < 1.0 + tolerance, low > 1.0 + tolerance),
    };
    match (within, beyond) {
        (true, _) => Verdict::NotWorse,
        (_, true) => Verdict::Worse,
        (false, false) => Verdict::Undecided,
    }
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

/// Compares the values of one figure.
pub(super) fn judge(row: &Row) -> Compared {
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
    let (verdict, why) = match direction {
        _ if new.is_none() => refused("only the old build prints it"),
        _ if old.is_none() => refused("only the new build prints it"),
        None => refused("no direction is known for this metric"),
        Some(_) if ratios.len() < pairs => refused("it is below 0, so it has no ratio"),
        Some(_) if chance < CHANCE => refused(&format!(
            "both builds print it in only {pairs} of {} pairs",
            row.pairs.len()
        )),
        Some(direction) => (decide(direction, tolerance, low, high), None),
    };
    let known = |value: f64| why.is_none().then_some(value);
    Compared {
        ratio: known(middle(&mut ratios)),
        low: known(low),
        high: known(high),
        chance: known(chance),
        bench: row.bench.clone(),
        case: row.case.clone(),
        metric: row.metric.clone(),
        unit: row.unit.clone(),
        direction,
        old,
        new,
        pairs,
        tolerance,
        verdict,
        why,
    }
}

fn refused(why: &str) -> (Verdict, Option<String>) {
    (Verdict::NotCompared, Some(why.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: &str, pairs: Vec<[Option<f64>; 2]>) -> Row {
        Row {
            bench: "b".to_owned(),
            case: "c".to_owned(),
            metric: metric.to_owned(),
            unit: "1".to_owned(),
            pairs,
        }
    }

    /// Ten pairs: the old build always has 100.
    fn judged(metric: &str, new: [f64; 10]) -> Verdict {
        let pairs = new.map(|new| [Some(100.0), Some(new)]).to_vec();
        judge(&row(metric, pairs)).verdict
    }

    /// Takes pairs as a comparison does: the old build always has 100, the new one `new(pair)`.
    fn until_decided(metric: &str, new: impl Fn(u16) -> f64) -> (Verdict, u16) {
        let mut row = row(metric, Vec::new());
        let (mut pairs, mut wanted) = (0, 10);
        loop {
            let values = (pairs..pairs + wanted).map(|pair| [Some(100.0), Some(new(pair))]);
            row.pairs.extend(values);
            pairs += wanted;
            let compared = judge(&row);
            wanted = more(std::slice::from_ref(&compared), pairs);
            if wanted == 0 {
                return (compared.verdict, pairs);
            }
        }
    }

    #[test]
    fn each_side_of_the_tolerance_has_its_verdict_and_an_interval_across_it_has_none() {
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
        assert_eq!(judged("gap_p50_ms", wide), Verdict::Undecided);
        let down = up.map(|v| 200.0 - v);
        assert_eq!(judged("rows_per_s", down), Verdict::Worse);
        assert_eq!(judged("gap_p50_ms", down), Verdict::NotWorse);
        assert_eq!(
            judged("rows_per_s", wide.map(|v| 200.0 - v)),
            Verdict::Undecided
        );
        assert_eq!(judged("gap_p99_ms", up.map(|v| v + 10.0)), Verdict::Worse);
    }

    #[test]
    fn a_bound_itself_is_on_neither_side() {
        let on = [97.0; 10];
        assert_eq!(judged("rows_per_s", on), Verdict::Undecided);
        assert_eq!(judged("rows_per_s", [97.1; 10]), Verdict::NotWorse);
        assert_eq!(judged("rows_per_s", [96.9; 10]), Verdict::Worse);
    }

    #[test]
    fn a_clear_figure_takes_ten_pairs_and_an_undecided_one_takes_more_until_it_is_clear_or_forty() {
        // Every third pair differs from the others.
        let mixed = |most: f64, some: f64| {
            move |pair: u16| if pair.is_multiple_of(3) { some } else { most }
        };
        for (case, new, wanted) in [
            ("better", mixed(120.0, 110.0), (Verdict::NotWorse, 10)),
            ("worse", mixed(90.0, 80.0), (Verdict::Worse, 10)),
            // 3 to 4 of 10 are among the eight in the middle; 13 to 14 of 40 are the k-th at most.
            ("noisy", mixed(99.0, 90.0), (Verdict::Undecided, 40)),
        ] {
            assert_eq!(until_decided("rows_per_s", new), wanted, "{case}");
        }
        // Two slow pairs of the first ten, none later: one remains in the interval of ten.
        let settles = |pair: u16| if pair < 2 { 90.0 } else { 99.0 };
        let wanted = (Verdict::NotWorse, 20);
        assert_eq!(until_decided("rows_per_s", settles), wanted);
        let halves = |pair: u16| if pair.is_multiple_of(2) { 90.0 } else { 110.0 };
        let wanted = (Verdict::Undecided, 40);
        assert_eq!(until_decided("rows_per_s", halves), wanted);
    }

    #[test]
    fn only_an_undecided_figure_asks_for_more_pairs() {
        let of = |new: f64, pairs: usize| {
            judge(&row("rows_per_s", vec![[Some(100.0), Some(new)]; pairs]))
        };
        let undecided = || of(97.0, 10);
        let incomparable = judge(&row("bananas", vec![[Some(1.0), Some(2.0)]; 10]));
        assert_eq!(more(&[of(100.0, 10), of(80.0, 10), incomparable], 10), 0);
        assert_eq!(more(&[of(100.0, 10), undecided()], 10), 10);
        assert_eq!(more(&[undecided()], 35), 5);
        assert_eq!(more(&[undecided()], 40), 0);
        assert_eq!(more(&[], 10), 0);
    }

    #[test]
    fn four_looks_are_wrong_about_as_often_as_the_module_says() {
        // Logarithms of ratios around the bound, from a fixed linear congruential generator.
        let mut state = 7_u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        const RUNS: u32 = 4_000;
        let mut decided = [0_u32; 2]; // after the first look, after the last
        for _ in 0..RUNS {
            let values: Vec<f64> = (0..MOST)
                .map(|_| 97.0 * (0.95 + uniform() / 10.0))
                .collect();
            let value = |pair: u16| values[usize::from(pair)];
            let (verdict, pairs) = until_decided("rows_per_s", value);
            decided[0] += u32::from(pairs == 10);
            decided[1] += u32::from(verdict != Verdict::Undecided);
        }
        let share = decided.map(|n| f64::from(n) / f64::from(RUNS));
        assert!(share[0] < 0.05 && share[1] < 0.12, "{share:?}");
    }

    #[test]
    fn a_figure_without_a_ratio_or_a_direction_or_enough_pairs_is_not_compared() {
        let same = |old, new, n| vec![[old, new]; n];
        let of = |metric, pairs| judge(&row(metric, pairs));
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
}
