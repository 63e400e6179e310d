//! One batch: a matrix of its members by phase, and how long it will take.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Path, Query as Given, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::batches::Batch;
use super::{Form, Frame, answer};
use crate::database::Query;
use crate::server::Shared;
use crate::words;

const SUMMARY: &str = "SELECT batch, name, tenant, executions, pending, bound, started, paused, verifying, held, \
    completed, failed, cancelled, first_submitted_at, last_finished_at, ended, \
    extract(epoch FROM took)::float8 AS took_s, rebindings FROM batch_summary WHERE batch = $1::uuid";
/// One letter a member, by line: what the matrix draws.
const MATRIX: &str = "SELECT string_agg(CASE phase WHEN 'completed' THEN 'c' WHEN 'failed' THEN 'f' \
    WHEN 'cancelled' THEN 'x' WHEN 'started' THEN 's' WHEN 'bound' THEN 'b' WHEN 'paused' THEN 'p' \
    WHEN 'held' THEN 'h' WHEN 'verifying' THEN 'v' ELSE 'w' END, '' ORDER BY batch_line) AS phases, \
    min(batch_line) AS first FROM executions WHERE batch_id = $1::uuid";
/// How many have ended in the last minutes: what an estimate of the end is made of.
const PACE: &str = "SELECT count(*) AS ended, \
    extract(epoch FROM now() - min(finished_at))::float8 AS over_s FROM (\
    SELECT finished_at FROM executions WHERE batch_id = $1::uuid AND finished_at IS NOT NULL \
    ORDER BY finished_at DESC LIMIT 500) e";
/// Ends from which an estimate is made.
const ENOUGH: i64 = 10;

#[derive(Debug, Serialize, Deserialize)]
struct Matrix {
    phases: Option<String>,
    first: Option<i64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Pace {
    ended: i64,
    over_s: Option<f64>,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "batch.html")]
struct Page {
    frame: Frame,
    batch: Batch,
    /// When it may end, in words.
    estimate: Option<String>,
}

/// An honest estimate: from the pace of the last ends, and none while there are too few or nothing
/// ends any more.
fn estimate(batch: &Batch, pace: &Pace) -> Option<String> {
    let left = batch.executions - batch.done();
    if left == 0 {
        return None;
    }
    if batch.held + batch.paused == left {
        return Some("nothing goes on: all that is left is held or paused".to_owned());
    }
    let over = pace
        .over_s
        .filter(|over| *over > 0.0 && pace.ended >= ENOUGH)?;
    let seconds = left as f64 * over / pace.ended as f64;
    Some(format!(
        "about {} more, if the {} that are left take as long as the last {}",
        words::span(&seconds),
        words::count(&left),
        words::count(&pace.ended)
    ))
}

/// `/batches/ID`
pub async fn page(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
    Given(form): Given<Form>,
) -> Response {
    let Ok(id) = id.parse::<uuid::Uuid>().map(|id| id.to_string()) else {
        return (StatusCode::NOT_FOUND, "that is no batch").into_response();
    };
    let mut frame = Frame::new("Batch", "batches", "overview");
    let with = |sql| Query::of(sql).with(&*id);
    let found: Vec<Batch> = frame.rows(&shared.hub, "The batch", &with(SUMMARY)).await;
    let Some(batch) = found.into_iter().next() else {
        let words = frame.troubles.first().cloned();
        let words = words.unwrap_or_else(|| format!("the history has no batch {id}"));
        return (StatusCode::NOT_FOUND, words).into_response();
    };
    let pace: Vec<Pace> = frame.rows(&shared.hub, "Its pace", &with(PACE)).await;
    let estimate = pace.first().and_then(|pace| estimate(&batch, pace));
    frame.asks(&with(MATRIX));
    frame.title = batch.title().to_owned();
    frame.command = format!(
        "fiec batch status {} --tenant {}",
        batch.title(),
        batch.tenant
    );
    let page = Page {
        frame,
        batch,
        estimate,
    };
    answer(&page, &form)
}

/// `/batches/ID/matrix`: the first line's number, a blank, and a letter for each member.
pub async fn matrix(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Response {
    let query = Query::of(MATRIX).with(id);
    match shared.hub.database.row::<Matrix>(&query).await {
        Ok(found) => {
            let found = found.unwrap_or(Matrix {
                phases: None,
                first: None,
            });
            let first = found.first.unwrap_or(0);
            let text = format!("{first} {}", found.phases.unwrap_or_default());
            ([(CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
        }
        Err(trouble) => (StatusCode::SERVICE_UNAVAILABLE, trouble).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Timestamp;

    fn batch(executions: i64, completed: i64, held: i64) -> Batch {
        Batch {
            batch: "b".to_owned(),
            name: None,
            tenant: "t".to_owned(),
            executions,
            pending: executions - completed - held,
            bound: 0,
            started: 0,
            paused: 0,
            verifying: 0,
            held,
            completed,
            failed: 0,
            cancelled: 0,
            first_submitted_at: Timestamp::from_micros(0),
            last_finished_at: None,
            ended: false,
            took_s: None,
            rebindings: 0,
        }
    }

    #[test]
    fn an_estimate_is_made_of_the_pace_and_only_where_there_is_one() {
        let pace = |ended, over_s| Pace {
            ended,
            over_s: Some(over_s),
        };
        let said = estimate(&batch(1_100, 100, 0), &pace(100, 50.0)).unwrap();
        assert!(
            said.starts_with("about 8 min 20 s more, if the 1\u{202f}000"),
            "{said}"
        );
        assert_eq!(estimate(&batch(100, 5, 0), &pace(5, 1.0)), None, "too few");
        assert_eq!(
            estimate(&batch(100, 100, 0), &pace(100, 1.0)),
            None,
            "it has ended"
        );
        let said = estimate(&batch(100, 90, 10), &pace(90, 1.0)).unwrap();
        assert!(said.contains("held or paused"), "{said}");
    }
}
