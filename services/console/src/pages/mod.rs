//! The pages. Each is made whole, with the queries and the command line that say the same. With
//! `?format=json` it is the same as JSON.

pub mod act;
pub mod batch;
pub mod batches;
pub mod devices;
pub mod execution;
pub mod executions;
pub mod log;
pub mod nodes;
pub mod overview;
pub mod remedy;
pub mod sql;

use askama::Template;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use fiec_schemas::Timestamp;
use serde::{Deserialize, Serialize};

use crate::database::Query;
use crate::hub::Hub;
use crate::known::Known;
use crate::words;

/// What stands around each page.
#[derive(Debug, Serialize)]
pub struct Frame {
    /// What the tab says.
    pub title: String,
    /// Which entry of the menu is marked.
    #[serde(skip)]
    pub menu: &'static str,
    /// Topics of the stream that change it, with blanks in between.
    #[serde(skip)]
    pub topics: String,
    /// What could not be read, and since when the page is old.
    pub troubles: Vec<String>,
    /// The command that says the same.
    pub command: String,
    /// The queries that say the same.
    pub sql: Vec<String>,
}

impl Frame {
    /// A page.
    pub fn new(title: impl Into<String>, menu: &'static str, topics: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            menu,
            topics: topics.into(),
            troubles: Vec::new(),
            command: String::new(),
            sql: Vec::new(),
        }
    }

    /// With the command that says the same.
    pub fn command(mut self, command: impl Into<String>) -> Self {
        self.command = command.into();
        self
    }

    /// Notes a query that the page shows.
    pub fn asks(&mut self, query: &Query) {
        self.sql.push(query.shown());
    }

    /// Notes trouble with something that is read again and again.
    pub fn old<T>(&mut self, what: &str, known: &Known<T>) {
        if let Some(trouble) = &known.trouble {
            let since = match known.at {
                Some(at) => format!("{what}: as of {} ago. {trouble}", words::ago(&Some(at))),
                None => format!("{what}: nothing is known. {trouble}"),
            };
            self.troubles.push(since);
        } else if known.is_old
            && let Some(at) = known.at
        {
            self.troubles
                .push(format!("{what}: as of {} ago", words::ago(&Some(at))));
        }
    }

    /// The rows of a query; none, and a word about it, if they cannot be read.
    pub async fn rows<T: serde::de::DeserializeOwned>(
        &mut self,
        hub: &Hub,
        what: &str,
        query: &Query,
    ) -> Vec<T> {
        self.asks(query);
        match hub.database.rows(query).await {
            Ok(rows) => rows,
            Err(trouble) => {
                self.troubles.push(format!("{what}: {trouble}"));
                Vec::new()
            }
        }
    }
}

/// In which form a page is asked for.
#[derive(Debug, Default, Deserialize)]
pub struct Form {
    format: Option<String>,
}

/// Answers with a page in the form that was asked for.
pub fn answer<T: Template + Serialize>(page: &T, form: &Form) -> Response {
    if form.format.as_deref() == Some("json") {
        return Json(page).into_response();
    }
    match page.render() {
        Ok(html) => Html(html).into_response(),
        Err(error) => {
            tracing::error!(%error, "a page cannot be made");
            (StatusCode::INTERNAL_SERVER_ERROR, "the page cannot be made").into_response()
        }
    }
}

/// A page in place of one that is not there.
#[derive(Debug, Template, Serialize)]
#[template(path = "missing.html")]
struct Missing<'a> {
    frame: &'a Frame,
    what: &'a str,
}

/// Answers that there is no such thing, or that it cannot be known now.
pub fn missing(what: &str, frame: &Frame) -> Response {
    let (status, what) = match frame.troubles.is_empty() {
        true => (StatusCode::NOT_FOUND, what),
        false => (StatusCode::SERVICE_UNAVAILABLE, "It cannot be known now."),
    };
    (status, answer(&Missing { frame, what }, &Form::default())).into_response()
}

/// A word of a command line that a person copies.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/@%+=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// An execution as lists show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    /// Its id.
    pub execution: String,
    /// The id that its client gave.
    pub client_id: Option<String>,
    /// Its tenant.
    pub tenant: String,
    /// Its program.
    pub program: Option<String>,
    /// Its phase.
    pub phase: String,
    /// Its node, or the last one.
    pub node: Option<String>,
    /// The last committed boundary.
    pub boundary: i64,
    /// Boundaries in all.
    pub boundaries_in_all: Option<i64>,
    /// The program's note.
    pub progress: Option<String>,
    /// When it was submitted.
    pub submitted_at: Timestamp,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Moves.
    pub moves: i64,
    /// Why it failed or is held.
    pub failure: Option<String>,
    /// The beginning of its parameters, as JSON.
    #[serde(default)]
    pub params: Option<String>,
}

impl Listed {
    /// Its name for people.
    pub fn name(&self) -> &str {
        self.client_id.as_deref().unwrap_or(&self.execution)
    }

    /// Boundaries that it has reached: all, once it has completed.
    pub fn reached(&self) -> i64 {
        match self.phase.as_str() {
            "completed" => self.boundaries_in_all.unwrap_or(self.boundary),
            _ => self.boundary,
        }
    }

    /// Share of its boundaries that are committed, in percent. None for one that has completed: its last
    /// boundaries need no commit.
    pub fn percent(&self) -> Option<i64> {
        if self.phase == "completed" {
            return None;
        }
        let all = self.boundaries_in_all.filter(|all| *all > 0)?;
        Some((self.boundary.saturating_mul(100) / all).clamp(0, 100))
    }
}
