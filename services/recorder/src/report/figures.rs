//! The figures, as SVG text. The time axis is seconds since the submission.

use std::collections::BTreeMap;

use fiec_schemas::Timestamp;
use plotters::prelude::*;

use super::facts::{Facts, Signal};
use crate::error::{RecorderError, Result};

const WIDTH: u32 = 960;
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
const LIMIT: RGBColor = RGBColor(190, 30, 45);

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

    fn colour(&self, node: &str) -> RGBColor {
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

fn failed(error: impl std::fmt::Display) -> RecorderError {
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
            .build_cartesian_2d(0.0..axis.to, -0.6..(rows as f64 - 0.4))
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("seconds since submission")
            .y_labels(rows)
            .y_label_formatter(&|y| {
                if (y - y.round()).abs() < 1e-6 {
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

/// What it had reached.
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
            .x_desc("seconds since submission")
            .y_desc("committed boundary")
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
            .x_desc("seconds since submission")
            .y_desc(signal.name.as_str())
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
                .map_err(failed)?
                .label(node.as_str())
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
                });
        }
        if let Some((high, low)) = signal.limits {
            for (value, name) in [(high, "high"), (low, "low")] {
                let style = LIMIT.mix(if name == "high" { 1.0 } else { 0.5 });
                chart
                    .draw_series([PathElement::new([(0.0, value), (axis.to, value)], style)])
                    .map_err(failed)?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
            }
        }
        marks(&mut chart, facts, &axis, 1.05)?;
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()
            .map_err(failed)?;
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
