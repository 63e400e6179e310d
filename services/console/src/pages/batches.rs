//! All batches, with how far each is.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use fiec_schemas::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Form, Frame, answer};
use crate::database::Query;
use crate::server::Shared;

const LIST: &str = "SELECT s.batch, s.name, s.tenant, s.executions, s.pending, s.bound, s.started, s.paused, \
    s.verifying, s.held, s.completed, s.failed, s.cancelled, s.first_submitted_at, s.last_finished_at, s.ended, \
    extract(epoch FROM s.took)::float8 AS took_s, s.rebindings, s.ids_like \
    FROM (SELECT id FROM batches ORDER BY first_seen_at DESC LIMIT 50) b \
    CROSS JOIN LATERAL (SELECT * FROM batch_summary o WHERE o.batch = b.id OFFSET 0) s ORDER BY s.first_submitted_at DESC";

/// A batch.
#[derive(Debug, Serialize, Deserialize)]
pub struct Batch {
    /// Its id.
    pub batch: String,
    /// Its client's name for it.
    pub name: Option<String>,
    /// The ids of its members, where they differ in a number at the end alone.
    pub ids_like: Option<String>,
    /// Whose.
    pub tenant: String,
    /// Members.
    pub executions: i64,
    /// Members by phase.
    pub pending: i64,
    /// See `pending`.
    pub bound: i64,
    /// See `pending`.
    pub started: i64,
    /// See `pending`.
    pub paused: i64,
    /// See `pending`.
    pub verifying: i64,
    /// See `pending`.
    pub held: i64,
    /// See `pending`.
    pub completed: i64,
    /// See `pending`.
    pub failed: i64,
    /// See `pending`.
    pub cancelled: i64,
    /// When the first one was submitted.
    pub first_submitted_at: Timestamp,
    /// When the last one ended.
    pub last_finished_at: Option<Timestamp>,
    /// All have ended.
    pub ended: bool,
    /// Seconds from the first submission to the last end, or until now.
    pub took_s: Option<f64>,
    /// Moves.
    pub rebindings: i64,
}

impl Batch {
    /// Its name for people.
    pub fn title(&self) -> &str {
        let name = self.name.as_deref().or(self.ids_like.as_deref());
        name.unwrap_or(&self.batch)
    }

    /// Phases that have members: name, count, and share in percent.
    pub fn shares(&self) -> Vec<(&'static str, i64, f64)> {
        let all = self.executions.max(1) as f64;
        let phases = [
            ("completed", self.completed),
            ("failed", self.failed),
            ("cancelled", self.cancelled),
            ("verifying", self.verifying),
            ("started", self.started),
            ("bound", self.bound),
            ("paused", self.paused),
            ("held", self.held),
            ("pending", self.pending),
        ];
        let some = phases.into_iter().filter(|(_, n)| *n > 0);
        some.map(|(phase, n)| (phase, n, n as f64 * 100.0 / all))
            .collect()
    }

    /// Actions that change something.
    pub fn actions(&self) -> Vec<&'static str> {
        let lives = self.executions > self.done();
        let can_retry = self.failed + self.cancelled + self.held > 0;
        [
            ("cancel", lives),
            ("pause", lives),
            ("resume", self.paused > 0),
            ("retry", can_retry),
        ]
        .into_iter()
        .filter_map(|(what, applies)| applies.then_some(what))
        .collect()
    }

    /// Members that have ended.
    pub fn done(&self) -> i64 {
        self.completed + self.failed + self.cancelled
    }
}

#[derive(Debug, Template, Serialize)]
#[template(path = "batches.html")]
struct Page {
    frame: Frame,
    batches: Vec<Batch>,
}

/// `/batches`
pub async fn page(State(shared): State<Arc<Shared>>, Given(form): Given<Form>) -> Response {
    let mut frame = Frame::new("Batches", "batches", "overview").command("psql service=fiec -c 'SELECT * FROM batch_summary ORDER BY first_submitted_at DESC LIMIT 50'");
    let batches = frame.rows(&shared.hub, "Batches", &Query::of(LIST)).await;
    answer(&Page { frame, batches }, &form)
}
