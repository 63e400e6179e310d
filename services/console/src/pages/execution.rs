//! One execution: where it was, what it reached, its numbers, its moves and why.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Path, Query as Given, State};
use axum::response::Response;
use fiec_schemas::messages::{ApiReply, ExecutionRequest, ExecutionVerb, Why};
use fiec_schemas::{ExecutionId, Tenant, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::remedy::{self, Button};
use super::{Form, Frame, answer, missing, quoted};
use crate::database::Query;
use crate::hub::Hub;
use crate::server::Shared;
use crate::words;

const SUMMARY: &str = "SELECT e.execution, e.client_id, e.tenant, e.program, e.phase, e.node, e.epoch, \
    e.boundary, e.boundaries_in_all, e.progress, e.submitted_at, e.first_started_at, e.finished_at, \
    extract(epoch FROM e.waited)::float8 AS waited_s, extract(epoch FROM e.ran)::float8 AS ran_s, \
    extract(epoch FROM e.computed)::float8 AS computed_s, e.rebindings, e.crashes, e.commits, \
    e.last_state_bytes, e.contract, e.batch, e.failure, e.stderr_tail, e.result, \
    e.host_joules::float8 AS host_joules, e.device_joules::float8 AS device_joules, x.spec, \
    extract(epoch FROM e.uncommitted)::float8 AS uncommitted_s \
    FROM execution_summary e JOIN executions x ON x.id = e.execution WHERE e.execution = $1::uuid";
const NAMED: &str = "SELECT id AS execution FROM executions WHERE client_id = $1 AND ($2 = '' OR tenant = $2) \
    ORDER BY submitted_at DESC LIMIT 1";
const PLACEMENTS: &str = "SELECT epoch, node, substrate, cause, bound_at, computing_since, computed_until, \
    ended_at, end_reason, gap_ms::float8 AS gap_ms, host_joules::float8 AS host_joules, \
    count(*) OVER () AS in_all FROM placement_timeline WHERE execution = $1::uuid ORDER BY epoch DESC LIMIT 200";
const MOVES: &str = "SELECT r.epoch, r.at, r.from_node, r.to_node, r.cause, r.why, r.signal, r.device, \
    r.value::float8 AS value, r.high, r.low, extract(epoch FROM r.pressed_for)::float8 AS pressed_s, r.boundary, \
    r.state_bytes, r.gap_ms::float8 AS gap_ms, r.vector, count(*) OVER () AS in_all, \
    (SELECT fiec_candidates_in_words(d.candidates, d.omitted) FROM decisions d \
     WHERE d.execution = r.execution AND d.epoch = r.epoch ORDER BY d.ordinal DESC LIMIT 1) AS candidates \
    FROM rebinding_history r WHERE r.execution = $1::uuid ORDER BY r.epoch DESC LIMIT 100";
/// At most so many boundaries, evenly spread.
const BOUNDARIES: &str = "SELECT index, committed_at AS at FROM (SELECT index, committed_at, \
    row_number() OVER (ORDER BY ordinal) AS n, count(*) OVER () AS points \
    FROM boundaries WHERE execution = $1::uuid AND withdrawn_at IS NULL) b \
    WHERE n % (points / 600 + 1) = 0 OR n = points ORDER BY n";
const SERIES: &str = "SELECT name, boundary, value, lowest, highest, node FROM (SELECT *, \
    row_number() OVER (PARTITION BY name ORDER BY boundary) AS n, \
    count(*) OVER (PARTITION BY name) AS points FROM execution_series WHERE execution = $1::uuid \
    AND name IN (SELECT DISTINCT name FROM series_points WHERE execution = $1::uuid ORDER BY name LIMIT 48)) s \
    WHERE n % (points / 1500 + 1) = 0 OR n = points ORDER BY name, boundary";
const EVENTS: &str = "SELECT at, kind, node, detail FROM execution_events WHERE execution = $1::uuid \
    AND kind <> 'noted' ORDER BY ordinal DESC LIMIT 60";
/// Its own, and those of its parts where it was split.
const OUTPUTS: &str = "SELECT *, count(*) OVER () AS in_all FROM (\
    SELECT name, bytes, boundary, at FROM whole_outputs WHERE whole = $1::uuid \
    UNION ALL SELECT o ->> 'name', (o ->> 'bytes')::bigint, b.index, b.committed_at FROM boundaries b \
    CROSS JOIN LATERAL jsonb_array_elements(b.outputs) o WHERE b.execution = $1::uuid AND b.withdrawn_at IS NULL \
    AND NOT EXISTS (SELECT FROM spread_members s WHERE s.whole = $1::uuid) \
    UNION ALL SELECT o ->> 'name', (o ->> 'bytes')::bigint, e.capsules, e.finished_at FROM executions e \
    CROSS JOIN LATERAL jsonb_array_elements(e.outputs) o WHERE e.id = $1::uuid \
    AND NOT EXISTS (SELECT FROM spread_members s WHERE s.whole = $1::uuid)) o ORDER BY at DESC LIMIT 200";

#[derive(Debug, Serialize, Deserialize)]
struct Found {
    execution: String,
}

/// The execution's own row.
#[derive(Debug, Serialize, Deserialize)]
pub struct Summary {
    execution: String,
    client_id: Option<String>,
    tenant: String,
    program: Option<String>,
    phase: String,
    node: Option<String>,
    epoch: i64,
    boundary: i64,
    boundaries_in_all: Option<i64>,
    progress: Option<String>,
    submitted_at: Timestamp,
    first_started_at: Option<Timestamp>,
    finished_at: Option<Timestamp>,
    waited_s: Option<f64>,
    ran_s: Option<f64>,
    computed_s: Option<f64>,
    rebindings: i64,
    crashes: i64,
    commits: i64,
    last_state_bytes: Option<i64>,
    contract: String,
    batch: Option<String>,
    failure: Option<String>,
    stderr_tail: Option<String>,
    result: Option<Value>,
    host_joules: Option<f64>,
    device_joules: Option<f64>,
    spec: Option<Value>,
    uncommitted_s: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Placement {
    epoch: i64,
    node: Option<String>,
    substrate: Option<String>,
    cause: Option<String>,
    bound_at: Option<Timestamp>,
    computing_since: Option<Timestamp>,
    computed_until: Option<Timestamp>,
    ended_at: Option<Timestamp>,
    end_reason: Option<String>,
    gap_ms: Option<f64>,
    host_joules: Option<f64>,
    in_all: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Move {
    epoch: i64,
    at: Timestamp,
    from_node: Option<String>,
    to_node: String,
    cause: String,
    why: String,
    signal: Option<String>,
    device: Option<String>,
    value: Option<f64>,
    high: Option<f64>,
    low: Option<f64>,
    pressed_s: Option<f64>,
    boundary: Option<i64>,
    state_bytes: Option<i64>,
    gap_ms: Option<f64>,
    vector: Option<Value>,
    candidates: Option<String>,
    in_all: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Boundary {
    index: i64,
    at: Timestamp,
}

/// A point of a curve. PostgreSQL writes NaN and infinities as texts.
#[derive(Debug, Serialize, Deserialize)]
struct Point {
    name: String,
    boundary: i64,
    value: Value,
    lowest: Value,
    highest: Value,
    node: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Event {
    at: Timestamp,
    kind: String,
    node: Option<String>,
    detail: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Output {
    name: Option<String>,
    bytes: Option<i64>,
    boundary: Option<i64>,
    at: Option<Timestamp>,
    in_all: i64,
}

/// A bar of the timeline.
#[derive(Debug, Serialize)]
struct Bar {
    epoch: i64,
    left: f64,
    width: f64,
    words: String,
}

/// A node's lane of the timeline.
#[derive(Debug, Serialize)]
struct Lane {
    node: String,
    bars: Vec<Bar>,
}

/// A curve as its figure needs it: boundaries, means, lowest, highest, and the index of the node.
#[derive(Debug, Serialize)]
struct Curve {
    name: String,
    data: String,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "execution.html")]
struct Page {
    frame: Frame,
    summary: Summary,
    why: Option<Why>,
    /// What would help and can be asked for here.
    helps: Vec<Button>,
    placements: Vec<Placement>,
    moves: Vec<Move>,
    events: Vec<Event>,
    outputs: Vec<Output>,
    #[serde(skip)]
    lanes: Vec<Lane>,
    /// Boundaries over the time of the timeline, as points of an SVG line.
    #[serde(skip)]
    reached: String,
    #[serde(skip)]
    marks: Vec<f64>,
    curves: Vec<Curve>,
}

impl Page {
    fn name(&self) -> &str {
        self.summary
            .client_id
            .as_deref()
            .unwrap_or(&self.summary.execution)
    }

    fn percent(&self) -> Option<i64> {
        let all = self.summary.boundaries_in_all.filter(|all| *all > 0)?;
        Some((self.summary.boundary.saturating_mul(100) / all).clamp(0, 100))
    }

    fn placements_cut(&self) -> String {
        cut(
            self.placements.len(),
            self.placements.first().map(|one| one.in_all),
        )
    }

    fn moves_cut(&self) -> String {
        cut(self.moves.len(), self.moves.first().map(|one| one.in_all))
    }

    fn outputs_cut(&self) -> String {
        cut(
            self.outputs.len(),
            self.outputs.first().map(|one| one.in_all),
        )
    }

    /// Actions that its phase allows, besides those that would help.
    fn actions(&self) -> Vec<&'static str> {
        let all: &[&'static str] = match self.summary.phase.as_str() {
            "started" | "bound" => &["move", "pause", "cancel", "adjust"],
            "pending" => &["pause", "cancel", "adjust"],
            "paused" => &["resume", "cancel", "adjust"],
            "held" => &["retry", "cancel", "adjust"],
            "failed" | "cancelled" => &["retry"],
            "verifying" => &["cancel"],
            _ => &[],
        };
        let helps = |what: &str| self.helps.iter().any(|one| one.what == what);
        all.iter().copied().filter(|what| !helps(what)).collect()
    }

    /// Capsules of one that has completed.
    fn capsules(&self) -> i64 {
        self.summary
            .boundaries_in_all
            .unwrap_or(self.summary.boundary)
    }

    fn submission(&self) -> String {
        let spec = self.summary.spec.as_ref();
        spec.map(pretty).unwrap_or_default()
    }

    fn result(&self) -> String {
        self.summary.result.as_ref().map(pretty).unwrap_or_default()
    }
}

/// That a list is only the end of a longer one; empty for a whole one.
fn cut(shown: usize, in_all: Option<i64>) -> String {
    match in_all {
        Some(all) if i64::try_from(shown).is_ok_and(|shown| shown < all) => {
            format!("The last {shown} of {}.", words::count(&all))
        }
        _ => String::new(),
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// A share in percent, as a style needs it.
fn share(at: Timestamp, from: Timestamp, until: Timestamp) -> f64 {
    let all = (until.micros() - from.micros()).max(1) as f64;
    ((at.micros() - from.micros()) as f64 * 100.0 / all).clamp(0.0, 100.0)
}

fn lanes(placements: &[Placement], from: Timestamp, until: Timestamp) -> Vec<Lane> {
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
fn reached(boundaries: &[Boundary], from: Timestamp, until: Timestamp) -> String {
    let most = boundaries.iter().map(|b| b.index).max().unwrap_or(0).max(1) as f64;
    let pair = |b: &Boundary| {
        let x = share(b.at, from, until) * 10.0;
        format!("{x:.1},{:.1}", 100.0 - b.index as f64 * 100.0 / most)
    };
    boundaries.iter().map(pair).collect::<Vec<_>>().join(" ")
}

fn curves(points: Vec<Point>) -> Vec<Curve> {
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
        // What is no number leaves a gap.
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

/// Asks a policy service why it is where it is.
async fn why(hub: &Hub, tenant: &str, id: &str) -> Result<Option<Why>, String> {
    let operator = hub.operator().ok_or("NATS does not answer")?;
    let tenant: Tenant = tenant.parse().map_err(|error| format!("{error}"))?;
    let request = ExecutionRequest {
        id: id.to_owned(),
        who: hub.options.who.clone(),
        ..ExecutionRequest::default()
    };
    let asked = operator.ask(ExecutionVerb::Why, &tenant, &request);
    let answered = tokio::time::timeout(std::time::Duration::from_secs(2), asked).await;
    let reply: ApiReply = answered
        .map_err(|_| "no policy service has answered within 2 s".to_owned())?
        .map_err(|error| error.to_string())?;
    Ok(reply.why)
}

/// `/executions/ID`, by the UUID or the client's id.
pub async fn page(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
    Given(form): Given<Form>,
) -> Response {
    let hub = &shared.hub;
    let mut frame = Frame::new("Execution", "executions", "");
    let id = match id.parse::<ExecutionId>() {
        Ok(id) => id.to_string(),
        Err(_) => {
            let named = Query::of(NAMED)
                .with(&*id)
                .with(hub.options.tenant.as_str());
            let found: Vec<Found> = frame.rows(hub, "Its id", &named).await;
            match found.into_iter().next() {
                Some(found) => found.execution,
                None => return missing(&format!("the history has no execution {id}"), &frame),
            }
        }
    };
    let with = |sql| Query::of(sql).with(&*id);
    let summary: Vec<Summary> = frame.rows(hub, "The execution", &with(SUMMARY)).await;
    let Some(summary) = summary.into_iter().next() else {
        return missing(&format!("the history has no execution {id}"), &frame);
    };
    let name = summary.client_id.clone().unwrap_or_else(|| id.clone());
    frame.title = name.clone();
    frame.topics = format!("execution:{id}");
    let (word, tenant) = (quoted(&name), &summary.tenant);
    frame.command =
        format!("fiec history --tenant {tenant} -- {word} && fiec why --tenant {tenant} -- {word}");
    let placements: Vec<Placement> = frame.rows(hub, "Placements", &with(PLACEMENTS)).await;
    let moves: Vec<Move> = frame.rows(hub, "Moves", &with(MOVES)).await;
    let boundaries: Vec<Boundary> = frame.rows(hub, "Boundaries", &with(BOUNDARIES)).await;
    let points: Vec<Point> = frame.rows(hub, "Numbers", &with(SERIES)).await;
    let events = frame.rows(hub, "Events", &with(EVENTS)).await;
    let outputs = frame.rows(hub, "Outputs", &with(OUTPUTS)).await;
    let why = match summary.phase.as_str() {
        "completed" | "returned" => None,
        _ => match why(hub, &summary.tenant, &name).await {
            Ok(why) => why,
            Err(trouble) => {
                frame
                    .troubles
                    .push(format!("Why it is where it is: {trouble}"));
                None
            }
        },
    };
    // Of a long life only the last placements are drawn.
    let first = placements.last().filter(|first| first.epoch > 1);
    let from = first
        .and_then(|first| first.bound_at)
        .unwrap_or(summary.submitted_at);
    let until = summary.finished_at.unwrap_or_else(Timestamp::now);
    let page = Page {
        lanes: lanes(&placements, from, until),
        reached: reached(&boundaries, from, until),
        marks: moves.iter().map(|m| share(m.at, from, until)).collect(),
        curves: curves(points),
        helps: why
            .as_ref()
            .map_or_else(Vec::new, |why| remedy::buttons(&why.remedies, &id)),
        frame,
        summary,
        why,
        placements,
        moves,
        events,
        outputs,
    };
    answer(&page, &form)
}
