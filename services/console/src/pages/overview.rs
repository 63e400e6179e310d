//! What runs, waits, fails and moves, and what needs a person.

use std::collections::BTreeMap;
use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use fiec_schemas::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Form, Frame, Listed, answer};
use crate::database::{Database, Query};
use crate::health::{Health, Red};
use crate::hub::FIRST;
use crate::pages::nodes::Nodes;
use crate::server::Shared;
use crate::words;

const PHASES: &str = "SELECT phase, count(*) AS executions FROM executions GROUP BY phase";
const ENDS: &str = "SELECT h AS hour, count(*) FILTER (WHERE phase = 'completed') AS completed, \
    count(*) FILTER (WHERE phase = 'failed') AS failed \
    FROM generate_series(date_trunc('hour', now()) - interval '23 hours', now(), interval '1 hour') h \
    LEFT JOIN executions e ON e.finished_at >= h AND e.finished_at < h + interval '1 hour' \
    GROUP BY h ORDER BY h";
const MOVES: &str = "SELECT h AS hour, count(r.at) AS moves, count(*) FILTER (WHERE r.cause = 'pressure') AS pressure \
    FROM generate_series(date_trunc('hour', now()) - interval '23 hours', now(), interval '1 hour') h \
    LEFT JOIN rebindings r ON r.at >= h AND r.at < h + interval '1 hour' AND r.cause <> 'resumed' GROUP BY h ORDER BY h";
const LAST_MOVES: &str = "SELECT execution, client_id, from_node, to_node, why, at, gap_ms::float8 AS gap_ms \
    FROM rebinding_history WHERE cause <> 'resumed' ORDER BY at DESC LIMIT 12";
const RUNNING: &str = "SELECT s.execution, s.client_id, s.tenant, s.program, s.phase, s.node, s.boundary, s.boundaries_in_all, \
    s.progress, s.submitted_at, s.finished_at, s.moves, s.failure FROM (\
    SELECT id, bound_at FROM executions WHERE finished_at IS NULL AND phase = 'started' ORDER BY bound_at DESC LIMIT 8) o \
    CROSS JOIN LATERAL (SELECT * FROM execution_summary e WHERE e.execution = o.id OFFSET 0) s ORDER BY o.bound_at DESC";
/// Those that have waited longest are looked up one by one: the view of all is large.
const WAITING: &str = "SELECT p.execution, p.client_id, p.why, o.since FROM (\
    SELECT id, greatest(submitted_at, bound_at, yielded_at) AS since FROM executions \
    WHERE finished_at IS NULL AND phase IN ('pending', 'bound') ORDER BY submitted_at LIMIT 8) o \
    CROSS JOIN LATERAL (SELECT * FROM why_pending w WHERE w.execution = o.id OFFSET 0) p ORDER BY o.since";
/// Work that the loss of a node would take, duties that are overdue, what is held, and what failed: one
/// row for each reason, with the last that failed for it.
const ATTENTION: &str = "SELECT *, count(*) OVER () AS in_all FROM (\
    SELECT 'uncommitted' AS kind, id AS execution, client_id, node, \
        greatest(computed_until, bound_at) AS since, NULL AS detail \
    FROM executions WHERE finished_at IS NULL AND phase = 'started' \
        AND greatest(computed_until, bound_at) < now() - interval '2 minutes' \
    UNION ALL SELECT 'overdue', id, client_id, node, due_at, CASE WHEN phase = 'bound' THEN 'start it' \
        ELSE requested || ' it, as ' || coalesce(requested_by, 'somebody') || ' requested' END \
    FROM executions WHERE finished_at IS NULL AND due_at < now() \
    UNION ALL SELECT 'held', id, client_id, node, NULL, failure FROM executions \
    WHERE finished_at IS NULL AND phase = 'held' \
    UNION ALL SELECT 'failed', (array_agg(id ORDER BY finished_at DESC))[1], \
        (array_agg(client_id ORDER BY finished_at DESC))[1], NULL, max(finished_at), \
        CASE WHEN count(*) > 1 THEN 'and ' || count(*) - 1 || ' more: ' ELSE '' END || coalesce(failure, 'no reason is recorded') \
    FROM executions WHERE phase = 'failed' AND finished_at > now() - interval '24 hours' GROUP BY failure\
    ) a ORDER BY kind = 'failed', kind <> 'held', since NULLS LAST LIMIT 12";

/// The counts, and what needs a person.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Overview {
    /// Executions in each phase.
    pub phases: BTreeMap<String, i64>,
    /// Ends of each of the last 24 hours.
    pub ends: Vec<Ends>,
    /// Moves of each of the last 24 hours.
    pub moves: Vec<Moves>,
    /// The last moves.
    pub last_moves: Vec<Move>,
    /// Those that were bound last and compute.
    pub running: Vec<Listed>,
    /// Those that wait longest.
    pub waiting: Vec<Waits>,
    /// What needs a person.
    pub attention: Vec<Attention>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct PhaseCount {
    phase: String,
    executions: i64,
}

/// Ends of one hour.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ends {
    /// Its beginning.
    pub hour: Timestamp,
    /// How many completed.
    pub completed: i64,
    /// How many failed.
    pub failed: i64,
}

/// Moves of one hour.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moves {
    /// Its beginning.
    pub hour: Timestamp,
    /// How many.
    pub moves: i64,
    /// How many of them because of pressure.
    pub pressure: i64,
}

/// A move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// Of which execution.
    pub execution: String,
    /// Its client's name for it.
    pub client_id: Option<String>,
    /// From where.
    pub from_node: Option<String>,
    /// Where to.
    pub to_node: String,
    /// Why.
    pub why: String,
    /// When.
    pub at: Timestamp,
    /// Milliseconds in which it did not compute.
    pub gap_ms: Option<f64>,
}

/// One that waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Waits {
    /// Which.
    pub execution: String,
    /// Its client's name for it.
    pub client_id: Option<String>,
    /// For what.
    pub why: String,
    /// Since when.
    pub since: Option<Timestamp>,
}

/// Something that needs a person.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// What kind of thing.
    pub kind: String,
    /// Which execution.
    pub execution: String,
    /// Its client's name for it.
    pub client_id: Option<String>,
    /// Where.
    pub node: Option<String>,
    /// Since when.
    pub since: Option<Timestamp>,
    /// More about it.
    pub detail: Option<String>,
    /// How many there are of all kinds.
    pub in_all: i64,
}

impl Attention {
    fn in_words(&self) -> String {
        let span = self
            .since
            .map(|since| words::ago(&Some(since)))
            .unwrap_or_default();
        let node = self.node.as_deref().unwrap_or("its node");
        let detail = self.detail.as_deref().unwrap_or_default();
        match self.kind.as_str() {
            "uncommitted" => format!("has computed on {node} for {span} without a commit"),
            "overdue" => format!("worker {node} is overdue by {span}: it must {detail}"),
            "held" => format!("is held: {detail}"),
            "failed" => format!("failed {span} ago, {detail}"),
            kind => kind.to_owned(),
        }
    }
}

/// Reads the overview.
///
/// # Errors
/// Why that is impossible, for a person.
pub async fn read(database: &Database) -> Result<Overview, String> {
    // One after the other: pages need the other connections.
    let phases = database.rows::<PhaseCount>(&Query::of(PHASES)).await?;
    let ends = database.rows(&Query::of(ENDS)).await?;
    let moves = database.rows(&Query::of(MOVES)).await?;
    let last_moves = database.rows(&Query::of(LAST_MOVES)).await?;
    let running = database.rows(&Query::of(RUNNING)).await?;
    let waiting = database.rows(&Query::of(WAITING)).await?;
    let attention = database.rows(&Query::of(ATTENTION)).await?;
    let phases = phases.into_iter().map(|row| (row.phase, row.executions));
    Ok(Overview {
        phases: phases.collect(),
        ends,
        moves,
        last_moves,
        running,
        waiting,
        attention,
    })
}

/// A tile with the number of executions in a phase.
#[derive(Debug, Serialize)]
struct Tile {
    phase: &'static str,
    count: i64,
}

/// A bar of one hour.
#[derive(Debug, Serialize)]
struct Bar {
    x: i64,
    height: f64,
    bad: f64,
    words: String,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "overview.html")]
struct Page {
    frame: Frame,
    live: Vec<Tile>,
    ended: Vec<Tile>,
    overview: Option<Arc<Overview>>,
    nodes: Option<Arc<Nodes>>,
    health: Option<Arc<Health>>,
    #[serde(skip)]
    ends: Vec<Bar>,
    #[serde(skip)]
    moves: Vec<Bar>,
}

impl Page {
    fn attention(&self) -> &[Attention] {
        self.overview.as_ref().map_or(&[][..], |o| &o.attention)
    }

    fn running(&self) -> &[Listed] {
        self.overview.as_ref().map_or(&[][..], |o| &o.running)
    }

    fn red(&self) -> &[Red] {
        self.health.as_ref().map_or(&[][..], |health| &health.red)
    }

    /// Rows of the attention list that are not shown.
    fn more_attention(&self) -> i64 {
        let shown = self.attention();
        let all = shown.first().map_or(0, |one| one.in_all);
        all - i64::try_from(shown.len()).unwrap_or(0)
    }
}

/// Heights in percent of the highest; the second part of each is drawn in another colour.
fn bars(rows: impl Iterator<Item = (Timestamp, i64, i64, String)>) -> Vec<Bar> {
    let rows: Vec<_> = rows.collect();
    let most = rows
        .iter()
        .map(|(_, all, _, _)| *all)
        .max()
        .unwrap_or(0)
        .max(1) as f64;
    let bar = |(x, (_, all, bad, words)): (i64, (Timestamp, i64, i64, String))| Bar {
        x: x * 10,
        height: all as f64 * 100.0 / most,
        bad: bad as f64 * 100.0 / most,
        words,
    };
    (0..).zip(rows).map(bar).collect()
}

/// `/`
pub async fn page(State(shared): State<Arc<Shared>>, Given(form): Given<Form>) -> Response {
    let hub = &shared.hub;
    let wait = async { tokio::join!(hub.overview.first(), hub.nodes.first()) };
    let (overview, nodes) = match tokio::time::timeout(FIRST, wait).await {
        Ok(both) => both,
        Err(_) => (hub.overview.now(), hub.nodes.now()),
    };
    // A service that hangs holds no page up: pages hear of its health later.
    let health = hub.health.now();
    let health = health.value.filter(|_| !health.is_old);
    let mut frame =
        Frame::new("Overview", "overview", "overview nodes").command("fiec ls && fiec nodes");
    frame.old("History", &overview);
    frame.old("Nodes", &nodes);
    for sql in [PHASES, ATTENTION, LAST_MOVES, RUNNING, WAITING, ENDS, MOVES] {
        frame.asks(&Query::of(sql));
    }
    let (overview, nodes) = (overview.value, nodes.value);
    let tile = |phase: &'static str| Tile {
        phase,
        count: overview
            .as_ref()
            .and_then(|o| o.phases.get(phase))
            .copied()
            .unwrap_or(0),
    };
    let live = ["started", "bound", "pending", "paused", "held", "verifying"];
    let ended = ["completed", "failed", "cancelled"];
    let known = overview.as_deref();
    let ends = known.into_iter().flat_map(|o| &o.ends).map(|e| {
        let words = format!("{} completed, {} failed", e.completed, e.failed);
        (e.hour, e.completed + e.failed, e.failed, words)
    });
    let moves = known.into_iter().flat_map(|o| &o.moves).map(|m| {
        let words = format!("{} moves, {} because of pressure", m.moves, m.pressure);
        (m.hour, m.moves, m.pressure, words)
    });
    let page = Page {
        live: live.into_iter().map(tile).collect(),
        ended: ended.into_iter().map(tile).collect(),
        ends: bars(ends),
        moves: bars(moves),
        frame,
        overview,
        nodes,
        health,
    };
    answer(&page, &form)
}
