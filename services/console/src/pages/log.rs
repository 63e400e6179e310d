//! What the program of an execution prints, from all nodes where it ran. A browser asks for what came
//! after its last look, while the log is open.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fiec_broker::logs::{Feed, Place, Shown};
use fiec_schemas::{ExecutionId, Tenant, subjects};
use serde::{Deserialize, Serialize};

use crate::server::Shared;

/// Lines of one answer; earlier ones are counted.
const LINES: usize = 500;
/// Longest time that one answer reads for.
const READS: Duration = Duration::from_secs(4);

/// Where a browser stands.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// The next message of the stream.
    next: u64,
    /// Bytes of each stream that it has.
    #[serde(default)]
    places: Vec<Place>,
}

#[derive(Debug, Serialize)]
struct Read {
    /// What was printed since, for a reader.
    text: String,
    /// Lines before it that are not shown.
    left_out: usize,
    /// Where to go on.
    cursor: Cursor,
}

/// Reads from a place on, to what is stored now.
async fn read(shared: &Shared, subject: String, cursor: Cursor) -> Result<Read, String> {
    let broker = shared.hub.broker().ok_or("NATS does not answer")?;
    let failed = |error: fiec_broker::BrokerError| error.to_string();
    let mut feed = Feed::new(&broker, subject, false);
    feed.next = cursor.next.max(1);
    let last = feed.last().await.map_err(failed)?;
    let mut shown = Shown::at(cursor.places);
    let (mut lines, mut left_out) = (VecDeque::new(), 0);
    let until = Instant::now() + READS;
    while feed.next <= last && Instant::now() < until {
        let Some(message) = feed.message().await.map_err(failed)? else {
            continue;
        };
        if let Some(Ok(text)) = shown.take(&message.payload) {
            lines.push_back(shown.human(&text));
        }
        if lines.len() > LINES {
            lines.pop_front();
            left_out += 1;
        }
    }
    // A line that is not finished goes on in the next answer, on a line of its own.
    lines.push_back(shown.finish().to_owned());
    Ok(Read {
        text: lines.into_iter().collect(),
        left_out,
        cursor: Cursor {
            next: feed.next,
            places: shown.places(),
        },
    })
}

/// `/log/TENANT/ID`, posted with the cursor.
pub async fn after(
    State(shared): State<Arc<Shared>>,
    Path((tenant, id)): Path<(String, String)>,
    Json(cursor): Json<Cursor>,
) -> Response {
    let (Ok(tenant), Ok(id)) = (tenant.parse::<Tenant>(), id.parse::<ExecutionId>()) else {
        return (StatusCode::NOT_FOUND, "that is no execution").into_response();
    };
    match read(&shared, subjects::log(&tenant, id), cursor).await {
        Ok(read) => Json(read).into_response(),
        Err(trouble) => (StatusCode::SERVICE_UNAVAILABLE, trouble).into_response(),
    }
}
