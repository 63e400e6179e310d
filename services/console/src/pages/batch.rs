//! One batch: a matrix of its members by phase, and how long it will take.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Path, Query as Given, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batches::Batch;
use super::executions::encoded;
use super::{Form, Frame, answer, quoted};
use crate::database::Query;
use crate::server::Shared;
use crate::words;

const SUMMARY: &str = "SELECT batch, name, tenant, executions, pending, bound, started, paused, verifying, held, \
    completed, failed, cancelled, first_submitted_at, last_finished_at, ended, \
    extract(epoch FROM took)::float8 AS took_s, rebindings, \
    ids_like FROM batch_summary WHERE batch = $1::uuid";
/// One letter a member, in the order of `executions.rs`: what the matrix draws.
const MATRIX: &str = "SELECT string_agg(CASE phase WHEN 'completed' THEN 'c' WHEN 'failed' THEN 'f' \
    WHEN 'cancelled' THEN 'x' WHEN 'started' THEN 's' WHEN 'bound' THEN 'b' WHEN 'paused' THEN 'p' \
    WHEN 'held' THEN 'h' WHEN 'verifying' THEN 'v' WHEN 'returned' THEN 'x' ELSE 'w' END, '' \
    ORDER BY submitted_at, batch_line, length(client_id), client_id, id) AS phases FROM executions WHERE batch_id = $1::uuid";
/// How many have ended in the last minutes: what an estimate of the end is made of.
const PACE: &str = "SELECT count(*) AS ended, \
    extract(epoch FROM now() - min(finished_at))::float8 AS over_s FROM (\
    SELECT finished_at FROM executions WHERE batch_id = $1::uuid AND phase IN ('completed', 'failed') \
    ORDER BY finished_at DESC LIMIT 500) e";
/// What its members come after, and how many of them do.
const AFTER: &str = "SELECT coalesce(a ->> 'batch', a ->> 'array', a ->> 'id', a #>> '{}') AS name, \
    CASE WHEN a ? 'batch' THEN 'batch' WHEN a ? 'array' THEN 'array' ELSE 'execution' END AS kind, \
    count(*) AS members FROM executions e CROSS JOIN LATERAL jsonb_array_elements(\
    CASE jsonb_typeof(e.spec -> 'after') WHEN 'array' THEN e.spec -> 'after' WHEN 'null' THEN '[]' \
    ELSE coalesce(jsonb_build_array(e.spec -> 'after'), '[]') END) a \
    WHERE e.batch_id = $1::uuid AND e.spec ? 'after' GROUP BY 1, 2 ORDER BY members DESC, name LIMIT 20";
/// Names of the numbers that its first members report.
const NAMES: &str = "SELECT DISTINCT p.name FROM (SELECT id FROM executions WHERE batch_id = $1::uuid \
    ORDER BY submitted_at, batch_line, length(client_id), client_id, id LIMIT 500) e JOIN series_points p ON p.execution = e.id ORDER BY p.name LIMIT 24";
/// The curves of at most 80 members, evenly spread over all.
const MEMBERS: &str = "SELECT m.batch_line AS line, coalesce(m.client_id, m.id::text) AS name, \
    m.spec -> 'params' AS params, s.points FROM (SELECT * FROM (SELECT e.id, e.batch_line, e.client_id, e.spec, \
    row_number() OVER (ORDER BY e.submitted_at, e.batch_line, length(e.client_id), e.client_id, e.id) AS n, count(*) OVER () AS members FROM executions e \
    WHERE e.batch_id = $1::uuid AND EXISTS (SELECT FROM series_points p WHERE p.execution = e.id AND p.name = $2)) e \
    WHERE n % (members / 80 + 1) = 0 LIMIT 80) m CROSS JOIN LATERAL (\
    SELECT jsonb_agg(jsonb_build_array(boundary, nullif(nullif(nullif(mean, 'NaN'), 'Infinity'), '-Infinity')) ORDER BY boundary) AS points FROM (\
    SELECT p.boundary, p.mean, row_number() OVER (ORDER BY p.boundary) AS n, count(*) OVER () AS points \
    FROM series_points p WHERE p.execution = m.id AND p.name = $2) p WHERE n % (points / 300 + 1) = 0 OR n = points) s";
/// Ends from which an estimate is made.
const ENOUGH: i64 = 10;

#[derive(Debug, Serialize, Deserialize)]
struct Matrix {
    phases: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Pace {
    ended: i64,
    over_s: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct After {
    name: Option<String>,
    kind: String,
    members: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Name {
    name: String,
}

/// A member's curve.
#[derive(Debug, Serialize, Deserialize)]
struct Member {
    line: i64,
    name: String,
    params: Option<Value>,
    points: Option<Value>,
}

/// Which curves are drawn, and by which parameter they are coloured.
#[derive(Debug, Default, Deserialize)]
pub struct Drawn {
    #[serde(default)]
    name: String,
    #[serde(default)]
    by: String,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "batch.html")]
struct Page {
    frame: Frame,
    batch: Batch,
    after: Vec<After>,
    names: Vec<Name>,
    /// The number that is drawn.
    drawn: String,
    /// The parameter by which members are coloured.
    by: String,
    /// Parameters that are numbers.
    parameters: Vec<String>,
    members: Vec<Member>,
    /// When it may end, in words.
    estimate: Option<String>,
}

impl Page {
    /// What the figure needs.
    fn curves(&self) -> String {
        let member = |m: &Member| {
            let by = m
                .params
                .as_ref()
                .and_then(|params| params.get(&self.by))
                .cloned();
            serde_json::json!({"name": m.name, "by": by, "points": m.points})
        };
        Value::Array(self.members.iter().map(member).collect()).to_string()
    }

    fn address(&self, name: &str, by: &str) -> String {
        let (name, by) = (encoded(name), encoded(by));
        format!("/batches/{}?name={name}&by={by}#curves", self.batch.batch)
    }
}

/// Names of the parameters that are numbers in all members and not the same in all.
fn parameters(members: &[Member]) -> Vec<String> {
    let objects: Vec<_> = members
        .iter()
        .filter_map(|m| m.params.as_ref()?.as_object())
        .collect();
    let Some(first) = objects.first() else {
        return Vec::new();
    };
    let varies = |name: &&String| {
        let values: Vec<_> = objects
            .iter()
            .filter_map(|o| o.get(*name)?.as_f64())
            .collect();
        values.len() == members.len() && values.iter().any(|value| Some(value) != values.first())
    };
    first.keys().filter(varies).cloned().collect()
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
    Given(drawn): Given<Drawn>,
    Given(form): Given<Form>,
) -> Response {
    let Ok(id) = id.parse::<uuid::Uuid>().map(|id| id.to_string()) else {
        return (StatusCode::NOT_FOUND, "that is no batch").into_response();
    };
    let mut frame = Frame::new("Batch", "batches", "overview");
    let with = |sql| Query::of(sql).with(&*id);
    let found: Vec<Batch> = frame.rows(&shared.hub, "The batch", &with(SUMMARY)).await;
    let Some(batch) = found.into_iter().next() else {
        return super::missing(&format!("the history has no batch {id}"), &frame);
    };
    let pace: Vec<Pace> = frame.rows(&shared.hub, "Its pace", &with(PACE)).await;
    let estimate = pace.first().and_then(|pace| estimate(&batch, pace));
    frame.asks(&with(MATRIX));
    let after = frame
        .rows(&shared.hub, "What it waits for", &with(AFTER))
        .await;
    let names: Vec<Name> = frame.rows(&shared.hub, "Its numbers", &with(NAMES)).await;
    let is_there = |name: &&Name| name.name == drawn.name;
    let name = names.iter().find(is_there).or(names.first());
    let name = name.map(|name| name.name.clone()).unwrap_or_default();
    let members: Vec<Member> = match name.is_empty() {
        true => Vec::new(),
        false => {
            frame
                .rows(&shared.hub, "Its curves", &with(MEMBERS).with(&*name))
                .await
        }
    };
    let parameters = parameters(&members);
    let by = parameters
        .iter()
        .find(|known| **known == drawn.by)
        .or(parameters.first());
    frame.title = batch.title().to_owned();
    let named = quoted(batch.name.as_deref().unwrap_or(&batch.batch));
    frame.command = format!("fiec batch status --tenant {} -- {named}", batch.tenant);
    let page = Page {
        by: by.cloned().unwrap_or_default(),
        drawn: name,
        frame,
        batch,
        estimate,
        after,
        names,
        parameters,
        members,
    };
    answer(&page, &form)
}

/// `/batches/ID/matrix`: a letter for each member.
pub async fn matrix(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Response {
    let query = Query::of(MATRIX).with(id);
    match shared.hub.database.row::<Matrix>(&query).await {
        Ok(found) => {
            let text = found.and_then(|found| found.phases).unwrap_or_default();
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
            ids_like: None,
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
