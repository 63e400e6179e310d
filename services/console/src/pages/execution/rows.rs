//! What the history is asked for one execution, and the rows that it answers.

use fiec_schemas::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(super) const SUMMARY: &str = "SELECT e.execution, e.client_id, e.tenant, e.program, e.phase, e.node, e.epoch, \
    e.boundary, e.boundaries_in_all, e.progress, e.submitted_at, e.first_started_at, e.finished_at, \
    extract(epoch FROM e.waited)::float8 AS waited_s, extract(epoch FROM e.ran)::float8 AS ran_s, \
    extract(epoch FROM e.computed)::float8 AS computed_s, e.moves, e.crashes, e.commits, \
    e.last_state_bytes, e.contract, e.batch, e.failure, e.stderr_tail, e.result, \
    e.host_joules::float8 AS host_joules, e.device_joules::float8 AS device_joules, x.spec, \
    extract(epoch FROM e.uncommitted)::float8 AS uncommitted_s \
    FROM execution_summary e JOIN executions x ON x.id = e.execution WHERE e.execution = $1::uuid";
pub(super) const NAMED: &str = "SELECT id AS execution FROM executions WHERE client_id = $1 AND ($2 = '' OR tenant = $2) \
    ORDER BY submitted_at DESC LIMIT 1";
pub(super) const PLACEMENTS: &str = "SELECT epoch, node, substrate, cause, bound_at, computing_since, computed_until, \
    ended_at, end_reason, gap_ms::float8 AS gap_ms, host_joules::float8 AS host_joules, \
    count(*) OVER () AS in_all FROM placement_timeline WHERE execution = $1::uuid ORDER BY epoch DESC LIMIT 200";
pub(super) const MOVES: &str = "SELECT r.epoch, r.at, r.from_node, r.to_node, r.cause, r.why, r.signal, r.device, \
    r.value::float8 AS value, r.high, r.low, extract(epoch FROM r.pressed_for)::float8 AS pressed_s, r.boundary, \
    r.state_bytes, r.gap_ms::float8 AS gap_ms, r.vector, count(*) OVER () AS in_all, \
    (SELECT fiec_candidates_in_words(d.candidates, d.omitted) FROM decisions d \
     WHERE d.execution = r.execution AND d.epoch = r.epoch ORDER BY d.ordinal DESC LIMIT 1) AS candidates \
    FROM rebinding_history r WHERE r.execution = $1::uuid AND r.cause <> 'resumed' ORDER BY r.epoch DESC LIMIT 100";
/// At most 600 boundaries: every n-th, and the last.
pub(super) const BOUNDARIES: &str = "SELECT index, committed_at AS at FROM (SELECT index, committed_at, \
    row_number() OVER (ORDER BY ordinal) AS n, count(*) OVER () AS points \
    FROM boundaries WHERE execution = $1::uuid AND withdrawn_at IS NULL) b \
    WHERE n % (points / 600 + 1) = 0 OR n = points ORDER BY n";
pub(super) const SERIES: &str = "SELECT name, boundary, value, lowest, highest, node FROM (SELECT *, \
    row_number() OVER (PARTITION BY name ORDER BY boundary) AS n, \
    count(*) OVER (PARTITION BY name) AS points FROM execution_series WHERE execution = $1::uuid \
    AND name IN (SELECT DISTINCT name FROM series_points WHERE execution = $1::uuid ORDER BY name LIMIT 48)) s \
    WHERE n % (points / 1500 + 1) = 0 OR n = points ORDER BY name, boundary";
pub(super) const EVENTS: &str = "SELECT at, kind, node, detail FROM execution_events WHERE execution = $1::uuid \
    AND kind <> 'noted' ORDER BY ordinal DESC LIMIT 60";
/// Its own, and those of its parts where it was split.
pub(super) const OUTPUTS: &str = "SELECT *, count(*) OVER () AS in_all FROM (\
    SELECT name, bytes, boundary, at FROM whole_outputs WHERE whole = $1::uuid \
    UNION ALL SELECT o ->> 'name', (o ->> 'bytes')::bigint, b.index, b.committed_at FROM boundaries b \
    CROSS JOIN LATERAL jsonb_array_elements(b.outputs) o WHERE b.execution = $1::uuid AND b.withdrawn_at IS NULL \
    AND NOT EXISTS (SELECT FROM spread_members s WHERE s.whole = $1::uuid) \
    UNION ALL SELECT o ->> 'name', (o ->> 'bytes')::bigint, e.capsules, e.finished_at FROM executions e \
    CROSS JOIN LATERAL jsonb_array_elements(e.outputs) o WHERE e.id = $1::uuid \
    AND NOT EXISTS (SELECT FROM spread_members s WHERE s.whole = $1::uuid)) o ORDER BY at DESC LIMIT 200";

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Found {
    pub(super) execution: String,
}

/// The execution's own row.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Summary {
    pub(super) execution: String,
    pub(super) client_id: Option<String>,
    pub(super) tenant: String,
    pub(super) program: Option<String>,
    pub(super) phase: String,
    pub(super) node: Option<String>,
    pub(super) epoch: i64,
    pub(super) boundary: i64,
    pub(super) boundaries_in_all: Option<i64>,
    pub(super) progress: Option<String>,
    pub(super) submitted_at: Timestamp,
    pub(super) first_started_at: Option<Timestamp>,
    pub(super) finished_at: Option<Timestamp>,
    pub(super) waited_s: Option<f64>,
    pub(super) ran_s: Option<f64>,
    pub(super) computed_s: Option<f64>,
    pub(super) moves: i64,
    pub(super) crashes: i64,
    pub(super) commits: i64,
    pub(super) last_state_bytes: Option<i64>,
    pub(super) contract: String,
    pub(super) batch: Option<String>,
    pub(super) failure: Option<String>,
    pub(super) stderr_tail: Option<String>,
    pub(super) result: Option<Value>,
    pub(super) host_joules: Option<f64>,
    pub(super) device_joules: Option<f64>,
    pub(super) spec: Option<Value>,
    pub(super) uncommitted_s: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Placement {
    pub(super) epoch: i64,
    pub(super) node: Option<String>,
    pub(super) substrate: Option<String>,
    pub(super) cause: Option<String>,
    pub(super) bound_at: Option<Timestamp>,
    pub(super) computing_since: Option<Timestamp>,
    pub(super) computed_until: Option<Timestamp>,
    pub(super) ended_at: Option<Timestamp>,
    pub(super) end_reason: Option<String>,
    pub(super) gap_ms: Option<f64>,
    pub(super) host_joules: Option<f64>,
    pub(super) in_all: i64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Move {
    pub(super) epoch: i64,
    pub(super) at: Timestamp,
    pub(super) from_node: Option<String>,
    pub(super) to_node: String,
    pub(super) cause: String,
    pub(super) why: String,
    pub(super) signal: Option<String>,
    pub(super) device: Option<String>,
    pub(super) value: Option<f64>,
    pub(super) high: Option<f64>,
    pub(super) low: Option<f64>,
    pub(super) pressed_s: Option<f64>,
    pub(super) boundary: Option<i64>,
    pub(super) state_bytes: Option<i64>,
    pub(super) gap_ms: Option<f64>,
    pub(super) vector: Option<Value>,
    pub(super) candidates: Option<String>,
    pub(super) in_all: i64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Boundary {
    pub(super) index: i64,
    pub(super) at: Timestamp,
}

/// A point of a curve. PostgreSQL writes NaN and infinities as texts.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Point {
    pub(super) name: String,
    pub(super) boundary: i64,
    pub(super) value: Value,
    pub(super) lowest: Value,
    pub(super) highest: Value,
    pub(super) node: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Event {
    pub(super) at: Timestamp,
    pub(super) kind: String,
    pub(super) node: Option<String>,
    pub(super) detail: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Output {
    pub(super) name: Option<String>,
    pub(super) bytes: Option<i64>,
    pub(super) boundary: Option<i64>,
    pub(super) at: Option<Timestamp>,
    pub(super) in_all: i64,
}
