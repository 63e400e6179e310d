//! The figures, as SVG text. The time axis is seconds since the submission.

use std::collections::BTreeMap;

use fiec_schemas::Timestamp;
use plotters::prelude::*;

use super::facts::{Facts, Signal};
use crate::error::{RecorderError, Result};

pub(super) const WIDTH: u32 = 960;
/// Distinguishable also without seeing colours well (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(110, 110, 110),
];
pub(super) const LIMIT: RGBColor = RGBColor(190, 30, 45);
/// Opacity of the line of a high threshold, and of a low one.
const HIGH: f64 = 1.0;
const LOW: f64 = 0.5;

/// Height of the text on the axes, in pixels.
pub(super) const TEXT: u32 = 13;

/// Nodes in the order of their first use, each with its colour.
pub(super) struct Nodes(BTreeMap<String, usize>);

impl Nodes {
    pub fn of(facts: &Facts) -> Self {
        let mut nodes = BTreeMap::new();
        for placement in &facts.placements {
            let next = nodes.len();
            nodes.entry(placement.node.clone()).or_insert(next);
        }
        Self(nodes)
    }

    fn place(&self, node: &str) -> usize {
        self.0.get(node).copied().unwrap_or(self.0.len())
    }

    pub fn colour(&self, node: &str) -> RGBColor {
        COLOURS
            .get(self.place(node) % COLOURS.len())
            .copied()
            .unwrap_or(BLACK)
    }

    fn name(&self, place: f64) -> String {
        let found = self.0.iter().find(|(_, p)| **p as f64 == place.round());
        found.map(|(name, _)| name.clone()).unwrap_or_default()
    }
}

struct Axis {
    from: Timestamp,
    to: f64,
}

impl Axis {
    fn of(facts: &Facts) -> Self {
        let from = facts.submitted_at;
        let to = (facts.until.micros() - from.micros()) as f64 / 1e6;
        Self {
            from,
            to: to.max(0.001),
        }
    }

    fn at(&self, time: Timestamp) -> f64 {
        ((time.micros() - self.from.micros()) as f64 / 1e6).clamp(0.0, self.to)
    }
}

/// Registers the font with which plotters measures and draws text: Noto Sans, under the SIL Open
/// Font License 1.1. Call it before you draw.
///
/// # Errors
/// When the embedded font is not valid.
pub fn register_font() -> Result<()> {
    plotters::style::register_font("sans-serif", FontStyle::Normal, notosans::REGULAR_TTF)
        .map_err(|_| RecorderError::Figure("the embedded font is not valid".to_owned()))
}

pub(super) fn failed(error: impl std::fmt::Display) -> RecorderError {
    RecorderError::Figure(error.to_string())
}

/// Where it was.
pub(super) fn location(facts: &Facts, nodes: &Nodes) -> Result<String> {
    let axis = Axis::of(facts);
    let rows = nodes.0.len().max(1);
    let mut svg = String::new();
    {
        let height = 90 + 34 * u32::try_from(rows).unwrap_or(50).min(50);
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(110)
            .build_cartesian_2d(0.0..axis.to, (rows as f64 - 0.4)..-0.6)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .x_desc("seconds since submission")
            .x_label_formatter(&number)
            .y_labels(rows)
            .y_label_formatter(&|y| {
                if is_whole(*y) {
                    nodes.name(*y)
                } else {
                    String::new()
                }
            })
            .draw()
            .map_err(failed)?;
        let bars = facts.placements.iter().filter_map(|p| {
            let from = axis.at(p.started_at.or(p.bound_at)?);
            let to = axis.at(p.ended_at.unwrap_or(facts.until));
            let y = nodes.place(&p.node) as f64;
            // A placement that never started is drawn faint.
            let style = nodes
                .colour(&p.node)
                .mix(if p.started_at.is_some() { 0.9 } else { 0.3 });
            Some(Rectangle::new(
                [(from, y - 0.32), (to, y + 0.32)],
                style.filled(),
            ))
        });
        chart.draw_series(bars).map_err(failed)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

/// The boundaries over time.
pub(super) fn capsules(facts: &Facts) -> Result<String> {
    let axis = Axis::of(facts);
    let top = facts
        .boundaries
        .iter()
        .map(|(_, index)| *index)
        .max()
        .unwrap_or(1)
        .max(1) as f64;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 260)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(110)
            .build_cartesian_2d(0.0..axis.to, 0.0..top * 1.05)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .x_desc("seconds since submission")
            .x_label_formatter(&number)
            .y_desc("committed boundary")
            .y_label_formatter(&whole)
            .draw()
            .map_err(failed)?;
        let points = facts
            .boundaries
            .iter()
            .map(|(at, index)| (axis.at(*at), *index as f64));
        let line = LineSeries::new(points, COLOURS[0].stroke_width(2));
        chart.draw_series(line).map_err(failed)?;
        marks(&mut chart, facts, &axis, top * 1.05)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

/// The lines of the figure of a signal: names and CSS colours.
pub(super) fn legend(nodes: &Nodes, signal: &Signal) -> Vec<(String, String)> {
    let css = |c: RGBColor, share: f64| format!("rgb({} {} {} / {share})", c.0, c.1, c.2);
    let lines = signal.lines.iter();
    let mut legend: Vec<_> = lines
        .map(|(node, _)| (node.clone(), css(nodes.colour(node), 1.0)))
        .collect();
    if !signal.limits.is_empty() {
        legend.push(("high".to_owned(), css(LIMIT, HIGH)));
        legend.push(("low".to_owned(), css(LIMIT, LOW)));
    }
    legend
}

/// A number on an axis, without needless decimals.
pub(super) fn number(value: &f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// True for a whole number. plotters adds up the steps of an axis: for 1 it may give
/// 0.9999999999999999.
fn is_whole(value: f64) -> bool {
    (value - value.round()).abs() < 1e-6
}

/// A whole number on an axis. Others have no label.
pub(super) fn whole(value: &f64) -> String {
    match is_whole(*value) {
        true => number(value),
        false => String::new(),
    }
}

/// How a signal pressed.
pub(super) fn pressure(facts: &Facts, nodes: &Nodes, signal: &Signal) -> Result<String> {
    let axis = Axis::of(facts);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 280)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(110)
            .build_cartesian_2d(0.0..axis.to, 0.0..1.05)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .x_desc("seconds since submission")
            .x_label_formatter(&number)
            .y_desc(signal.name.as_str())
            .y_label_formatter(&number)
            .draw()
            .map_err(failed)?;
        for (node, points) in &signal.lines {
            let colour = nodes.colour(node);
            // Steps: a value that is not written again has not moved by more than the recorder's
            // step, and a slope between two rows would show a change that nobody measured.
            let mut steps: Vec<(f64, f64)> = Vec::with_capacity(points.len() * 2);
            for (at, value) in points {
                let x = axis.at(*at);
                if let Some((_, before)) = steps.last().copied() {
                    steps.push((x, before));
                }
                steps.push((x, value.clamp(0.0, 1.05)));
            }
            chart
                .draw_series(LineSeries::new(steps, colour.stroke_width(2)))
                .map_err(failed)?;
        }
        let ends = signal.limits.iter().skip(1).map(|(at, _)| axis.at(*at));
        let spans = signal.limits.iter().zip(ends.chain([axis.to]));
        for ((from, (high, low)), to) in spans {
            let from = axis.at(*from);
            for (value, share) in [(*high, HIGH), (*low, LOW)] {
                let span = PathElement::new([(from, value), (to, value)], LIMIT.mix(share));
                chart.draw_series([span]).map_err(failed)?;
            }
        }
        marks(&mut chart, facts, &axis, 1.05)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

/// A vertical line at each rebinding.
fn marks(chart: &mut Chart<'_, '_>, facts: &Facts, axis: &Axis, top: f64) -> Result<()> {
    let lines = facts.rebindings.iter().map(|r| {
        let x = axis.at(r.at);
        PathElement::new([(x, 0.0), (x, top)], LIMIT.mix(0.8).stroke_width(1))
    });
    chart.draw_series(lines).map_err(failed)?;
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::report::facts::Placement;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_micros(seconds * 1_000_000)
    }

    fn placement(node: &str) -> Placement {
        Placement {
            epoch: 1,
            node: node.to_owned(),
            cause: "initial".to_owned(),
            bound_at: Some(at(0)),
            started_at: Some(at(0)),
            ended_at: None,
            end_reason: String::new(),
            gap_us: None,
            joules: [None, None],
        }
    }

    pub fn facts() -> Facts {
        Facts {
            ended_badly: false,
            summary: Vec::new(),
            title: "x".to_owned(),
            submitted_at: at(0),
            until: at(8_000),
            placements: vec![placement("n1")],
            boundaries: vec![(at(10), 1), (at(7_000), 4_000)],
            rebindings: Vec::new(),
            decisions: Vec::new(),
            changes: Vec::new(),
            signals: vec![Signal {
                name: "memory".to_owned(),
                limits: vec![(at(0), (0.9, 0.7)), (at(4_000), (0.5, 0.4))],
                lines: vec![("n1".to_owned(), vec![(at(0), 0.2), (at(8_000), 0.3)])],
            }],
            curves: Vec::new(),
            more_curves: 0,
            missing: Vec::new(),
        }
    }

    #[test]
    fn axes_have_no_needless_decimals_and_the_legend_is_beside_the_curves() {
        let facts = facts();
        let nodes = Nodes::of(&facts);
        let drawn = [
            location(&facts, &nodes).unwrap(),
            capsules(&facts).unwrap(),
            pressure(&facts, &nodes, &facts.signals[0]).unwrap(),
        ];
        for svg in &drawn {
            assert!(svg.contains("\n4000\n"), "{svg}");
            assert!(!svg.contains("4000.0"), "{svg}");
        }
        assert!(!drawn[2].contains("\nhigh\n"), "{}", drawn[2]);
        let legend = legend(&nodes, &facts.signals[0]);
        let names: Vec<_> = legend.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["n1", "high", "low"]);
    }

    #[test]
    fn boundaries_have_whole_numbers_and_nodes_stand_in_the_order_of_their_use() {
        let mut facts = facts();
        for top in 1..=9 {
            facts.boundaries = vec![(at(10), 1), (at(7_000), top)];
            let svg = capsules(&facts).unwrap();
            // The time axis has 0 and whole thousands.
            let is_boundary = |text: &&str| text.parse::<f64>().is_ok_and(|n| n < 1_000.0);
            let labels = svg.lines().filter(is_boundary).map(str::to_owned);
            let whole: BTreeSet<String> = (0..=top).map(|n| n.to_string()).collect();
            assert_eq!(labels.collect::<BTreeSet<_>>(), whole);
        }
        let order = ["n2", "n3", "n1"];
        facts.placements = order.into_iter().chain(["n2"]).map(placement).collect();
        let svg = location(&facts, &Nodes::of(&facts)).unwrap();
        let from_top = |node: &str| -> i32 {
            let (before, _) = svg.split_once(&format!("\n{node}\n")).unwrap();
            let (_, y) = before.rsplit_once(" y=\"").unwrap();
            y.split_once('"').unwrap().0.parse().unwrap()
        };
        let [first, second, third] = order.map(from_top);
        assert!(first < second && second < third, "{svg}");
    }

    #[test]
    fn each_threshold_is_a_line_for_the_time_that_it_was_in_force() {
        let facts = facts();
        let nodes = Nodes::of(&facts);
        let count = |svg: String| {
            svg.matches(&format!("#{:02X}{:02X}{:02X}", 190, 30, 45))
                .count()
        };
        let svg = pressure(&facts, &nodes, &facts.signals[0]).unwrap();
        assert_eq!(count(svg), 4);
    }
}
