//! Rows of the history as shapes of the page's figures: lanes, a line, curves.

use fiec_schemas::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::rows::{Boundary, Placement, Point};
use crate::words;

/// A bar of the timeline.
#[derive(Debug, Serialize)]
pub(super) struct Bar {
    pub(super) epoch: i64,
    pub(super) left: f64,
    pub(super) width: f64,
    pub(super) words: String,
}

/// A node's lane of the timeline.
#[derive(Debug, Serialize)]
pub(super) struct Lane {
    pub(super) node: String,
    pub(super) bars: Vec<Bar>,
}

/// A curve as its figure needs it: boundaries, means, lowest, highest, and the index of the node.
#[derive(Debug, Serialize)]
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) data: String,
}

/// A share in percent, as a style needs it.
pub(super) fn share(at: Timestamp, from: Timestamp, until: Timestamp) -> f64 {
    let all = (until.micros() - from.micros()).max(1) as f64;
    ((at.micros() - from.micros()) as f64 * 100.0 / all).clamp(0.0, 100.0)
}

pub(super) fn lanes(placements: &[Placement], from: Timestamp, until: Timestamp) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = Vec::new();
    for placement in placements.iter().rev() {
        let Some(begin) = placement.computing_since.or(placement.bound_at) else {
            continue;
        };
        let end = placement.computed_until.or(placement.ended_at);
        let end = end
            .filter(|_| placement.end_reason.is_some())
            .unwrap_or(until);
        let node = placement.node.clone().unwrap_or_default();
        let left = share(begin, from, until);
        let ms = end.millis() - begin.millis();
        let why = placement.end_reason.as_deref().unwrap_or("it is there");
        let bar = Bar {
            epoch: placement.epoch,
            left,
            width: (share(end, from, until) - left).max(0.15),
            words: format!(
                "{node}, epoch {}: {}, {why}",
                placement.epoch,
                words::span_ms(ms)
            ),
        };
        match lanes.iter_mut().find(|lane| lane.node == node) {
            Some(lane) => lane.bars.push(bar),
            None => lanes.push(Lane {
                node,
                bars: vec![bar],
            }),
        }
    }
    lanes
}

/// The boundaries as `x,y` pairs in a box of 1000 by 100.
pub(super) fn reached(boundaries: &[Boundary], from: Timestamp, until: Timestamp) -> String {
    let most = boundaries.iter().map(|b| b.index).max().unwrap_or(0).max(1) as f64;
    let pair = |b: &Boundary| {
        let x = share(b.at, from, until) * 10.0;
        format!("{x:.1},{:.1}", 100.0 - b.index as f64 * 100.0 / most)
    };
    boundaries.iter().map(pair).collect::<Vec<_>>().join(" ")
}

pub(super) fn curves(points: Vec<Point>) -> Vec<Curve> {
    let mut curves: Vec<(String, Vec<Value>)> = Vec::new();
    let mut nodes: Vec<String> = Vec::new();
    for point in points {
        let node = point.node.unwrap_or_default();
        let at = nodes
            .iter()
            .position(|known| *known == node)
            .unwrap_or_else(|| {
                nodes.push(node);
                nodes.len() - 1
            });
        // NaN and infinities leave a gap in the curve.
        let number = |value: Value| {
            if value.is_number() {
                value
            } else {
                Value::Null
            }
        };
        let row = Value::Array(vec![
            point.boundary.into(),
            number(point.value),
            number(point.lowest),
            number(point.highest),
            at.into(),
        ]);
        match curves.last_mut() {
            Some((name, rows)) if *name == point.name => rows.push(row),
            _ => curves.push((point.name, vec![row])),
        }
    }
    let nodes = Value::from(nodes);
    let data = |rows: Vec<Value>| serde_json::json!({"nodes": &nodes, "rows": rows}).to_string();
    let drawn = curves.into_iter().map(|(name, rows)| Curve {
        name,
        data: data(rows),
    });
    drawn.collect()
}
