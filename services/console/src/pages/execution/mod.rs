//! One execution: where it was, what it reached, its numbers, its moves and why.

mod drawing;
mod rows;

use std::sync::Arc;

use askama::Template;
use axum::extract::{Path, Query as Given, State};
use axum::response::Response;
use fiec_schemas::messages::{ApiReply, ExecutionRequest, ExecutionVerb, Why};
use fiec_schemas::{ExecutionId, Tenant, Timestamp};
use serde::Serialize;
use serde_json::Value;

use self::drawing::{Curve, Lane, curves, lanes, reached, share};
use self::rows::{Boundary, Event, Found, Move, Output, Placement, Point, Summary};
use super::remedy::{self, Button};
use super::{Form, Frame, answer, missing, quoted};
use crate::database::Query;
use crate::hub::Hub;
use crate::server::Shared;
use crate::words;

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
            let named = Query::of(rows::NAMED)
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
    let summary: Vec<Summary> = frame.rows(hub, "The execution", &with(rows::SUMMARY)).await;
    let Some(summary) = summary.into_iter().next() else {
        return missing(&format!("the history has no execution {id}"), &frame);
    };
    let name = summary.client_id.clone().unwrap_or_else(|| id.clone());
    frame.title = name.clone();
    frame.topics = format!("execution:{id}");
    let (word, tenant) = (quoted(&name), &summary.tenant);
    frame.command =
        format!("fiec history --tenant {tenant} -- {word} && fiec why --tenant {tenant} -- {word}");
    let placements: Vec<Placement> = frame.rows(hub, "Placements", &with(rows::PLACEMENTS)).await;
    let moves: Vec<Move> = frame.rows(hub, "Moves", &with(rows::MOVES)).await;
    let boundaries: Vec<Boundary> = frame.rows(hub, "Boundaries", &with(rows::BOUNDARIES)).await;
    let points: Vec<Point> = frame.rows(hub, "Numbers", &with(rows::SERIES)).await;
    let events = frame.rows(hub, "Events", &with(rows::EVENTS)).await;
    let outputs = frame.rows(hub, "Outputs", &with(rows::OUTPUTS)).await;
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
