//! The curves of the numbers that a program reported, as SVG text. The horizontal axis has boundaries:
//! a curve does not show how long something waited or was moved.

use plotters::prelude::*;

use super::facts::{Curve, CurvePoint, Facts};
use super::figures::{LIMIT, Nodes, TEXT, WIDTH, failed, number, whole};
use crate::error::Result;

/// Values that are all positive and spread over more than this factor have a logarithmic axis.
const SPREAD: f64 = 500.0;

/// The largest value that is drawn, and the smallest height of a figure: axes between them have steps
/// that are numbers.
const LARGEST: f64 = 1e100;
const SMALLEST: f64 = 1e-100;
/// The same relative to the values: floats have no steps between much closer ones.
const CLOSEST: f64 = 1e-9;

/// Whether a value can be drawn.
fn is_drawable(value: f64) -> bool {
    value.abs() <= LARGEST
}

/// How values become heights.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scale {
    Linear,
    /// Height is the decimal logarithm.
    Logarithmic,
}

impl Scale {
    fn of(low: f64, high: f64) -> Self {
        match low > 0.0 && high / low > SPREAD {
            true => Self::Logarithmic,
            false => Self::Linear,
        }
    }

    fn height(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Logarithmic => value.log10(),
        }
    }

    fn label(self, height: f64) -> String {
        let value = match self {
            Self::Linear => height,
            Self::Logarithmic => 10_f64.powf(height),
        };
        match value == 0.0 || (1e-3..1e6).contains(&value.abs()) {
            true => number(&value),
            false => format!("{value:.1e}"),
        }
    }
}

/// The lowest and the highest value that can be drawn.
fn range(points: &[CurvePoint]) -> Option<(f64, f64)> {
    let all = points.iter().flat_map(|p| [p.value, p.lowest, p.highest]);
    let mut drawable = all.filter(|value| is_drawable(*value));
    let first = drawable.next()?;
    Some(drawable.fold((first, first), |(low, high), value| {
        (low.min(value), high.max(value))
    }))
}

fn can_be_drawn(p: &CurvePoint) -> bool {
    [p.value, p.lowest, p.highest].into_iter().all(is_drawable)
}

/// The nodes of a curve, and what is said of points that cannot be drawn: names and CSS colours.
pub(super) fn legend(nodes: &Nodes, curve: &Curve) -> Vec<(String, String)> {
    let mut legend: Vec<(String, String)> = Vec::new();
    for point in &curve.points {
        if legend.iter().all(|(name, _)| *name != point.node) {
            let RGBColor(red, green, blue) = nodes.colour(&point.node);
            legend.push((point.node.clone(), format!("rgb({red} {green} {blue})")));
        }
    }
    let mut not_drawn = curve.points.iter().filter(|p| !can_be_drawn(p));
    if let Some(first) = not_drawn.next() {
        let words = format!(
            "{} points are NaN, infinite or too large to draw, the first at boundary {}",
            not_drawn.count() + 1,
            first.boundary
        );
        legend.push((words, "rgb(190 30 45)".to_owned()));
    }
    legend
}

/// The curve of one name: its means, and around them what their reports reached.
pub(super) fn figure(facts: &Facts, nodes: &Nodes, curve: &Curve) -> Result<String> {
    let Some((low, high)) = range(&curve.points) else {
        return Ok(String::new());
    };
    let scale = Scale::of(low, high);
    let (bottom, top) = (scale.height(low), scale.height(high));
    let room = match top - bottom {
        span if span > 0.0 => {
            let closest = CLOSEST * bottom.abs().max(top.abs());
            (span * 0.05).max(closest).max(SMALLEST)
        }
        _ => top.abs().max(1.0) * 0.05,
    };
    // Counted from the first: a float does not tell large neighbours apart.
    let origin = curve.points.first().map_or(0, |p| p.boundary);
    let along = |boundary: i64| boundary.saturating_sub(origin) as f64;
    let to = curve.points.last().map_or(0, |p| p.boundary);
    let to = along(to).max(1.0);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 280)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(110)
            .build_cartesian_2d(0.0..to, (bottom - room)..(top + room))
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .x_desc("boundary")
            .x_label_formatter(&|x| whole(&(x + origin as f64)))
            .y_label_formatter(&|height| scale.label(*height))
            .draw()
            .map_err(failed)?;
        let points: Vec<&CurvePoint> = curve.points.iter().filter(|p| can_be_drawn(p)).collect();
        let at = |p: &CurvePoint, value: f64| (along(p.boundary), scale.height(value));
        // Each piece was computed on one node, and begins where the piece before ends.
        let mut begin = 0;
        for end in 1..=points.len() {
            if end < points.len() && points[end].node == points[begin].node {
                continue;
            }
            let piece = &points[begin.saturating_sub(1)..end];
            let colour = nodes.colour(&points[begin].node);
            let upper = piece.iter().map(|p| at(p, p.highest));
            let lower = piece.iter().rev().map(|p| at(p, p.lowest));
            let band = Polygon::new(upper.chain(lower).collect::<Vec<_>>(), colour.mix(0.15));
            chart.draw_series([band]).map_err(failed)?;
            let line = piece.iter().map(|p| at(p, p.value));
            let line = LineSeries::new(line, colour.stroke_width(2));
            chart.draw_series(line).map_err(failed)?;
            begin = end;
        }
        let moves = facts.rebindings.iter().filter_map(|r| r.boundary);
        let lines = moves
            .map(along)
            .filter(|x| (0.0..=to).contains(x))
            .map(|x| {
                PathElement::new(
                    [(x, bottom - room), (x, top + room)],
                    LIMIT.mix(0.8).stroke_width(1),
                )
            });
        chart.draw_series(lines).map_err(failed)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::figures::{register_font, tests::facts};

    fn curve(values: &[(i64, f64)]) -> Curve {
        let point = |(boundary, value): &(i64, f64)| CurvePoint {
            boundary: *boundary,
            value: *value,
            lowest: *value,
            highest: *value,
            node: "n1".to_owned(),
        };
        Curve {
            name: "loss".to_owned(),
            points: values.iter().map(point).collect(),
        }
    }

    #[test]
    fn every_pair_of_values_has_a_figure() {
        register_font().unwrap();
        let facts = facts();
        let nodes = Nodes::of(&facts);
        let ends = [
            0.0,
            -0.0,
            5e-324,
            -5e-324,
            1e-200,
            1.0,
            1.0 + f64::EPSILON,
            -1.0,
            1e99,
            -1e100,
            1e300,
            f64::MAX,
            f64::MIN,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ];
        for one in ends {
            for two in ends {
                for boundaries in [(1, 2), (0, i64::MAX), (i64::MAX - 1, i64::MAX), (7, 7)] {
                    let curve = curve(&[(boundaries.0, one), (boundaries.1, two)]);
                    figure(&facts, &nodes, &curve).unwrap();
                    legend(&nodes, &curve);
                }
            }
        }
    }

    #[test]
    fn a_curve_over_many_orders_has_powers_of_ten_on_its_axis() {
        register_font().unwrap();
        let facts = facts();
        let nodes = Nodes::of(&facts);
        let falls: Vec<(i64, f64)> = (1..9).map(|n| (n, 10_f64.powi(-(n as i32)))).collect();
        let svg = figure(&facts, &nodes, &curve(&falls)).unwrap();
        assert!(
            svg.contains("\n1.0e-8\n") && svg.contains("\n0.1\n"),
            "{svg}"
        );
        let svg = figure(&facts, &nodes, &curve(&[(1, 0.5), (2, 0.25)])).unwrap();
        assert!(svg.contains("\n0.4\n"), "{svg}");
    }
}
