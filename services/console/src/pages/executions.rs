//! Executions by phase, batch, node and words, newest first. What is chosen is in the address.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::{Form, Frame, Listed, answer, quoted};
use crate::database::Query;
use crate::hub::Hub;
use crate::server::Shared;

/// Rows before the last page that can be reached.
const DEEPEST: i64 = 10_000_000;
/// Rows of a page.
const ROWS: i64 = 100;

/// Every condition is left out where its value is empty. Members of a batch are numbered from 1, as its
/// matrix has them.
macro_rules! chosen {
    ($columns:literal, $end:literal) => {
        concat!(
            "SELECT ", $columns, " FROM execution_summary \
             WHERE ($1 = '' OR phase = ANY(string_to_array($1, ','))) \
             AND ($2 = '' OR node = $2) AND ($3 = '' OR batch = nullif($3, '')::uuid) \
             AND ($4 = '' OR position(lower($4) IN lower(client_id)) > 0 \
             OR starts_with(lower(program), lower($4)) OR execution::text = lower($4)) \
             AND ($5 || $6 = '' OR execution IN (SELECT id FROM (SELECT id, \
             row_number() OVER (ORDER BY submitted_at, batch_line, length(client_id), client_id, id) AS n \
             FROM executions WHERE batch_id = nullif($3, '')::uuid) m \
             WHERE n BETWEEN coalesce(nullif($5, '')::bigint, 1) AND coalesce(nullif($6, '')::bigint, n))) \
             AND ($7 = '' OR submitted_at <= nullif($7, '')::timestamptz)", $end
        )
    };
}
const LIST: &str = chosen!(
    "l.*, left(nullif(x.spec ->> 'params', '{}'), 200) AS params FROM (\
     SELECT execution, client_id, tenant, program, phase, node, boundary, boundaries_in_all, progress, \
     submitted_at, finished_at, moves, failure, batch_line",
    " ORDER BY submitted_at DESC, batch_line DESC, length(client_id) DESC, client_id DESC, execution DESC \
     LIMIT $9::bigint OFFSET $8::bigint) l JOIN executions x ON x.id = l.execution \
     ORDER BY l.submitted_at DESC, l.batch_line DESC, length(l.client_id) DESC, l.client_id DESC, l.execution DESC"
);
const COUNT: &str = chosen!("count(*) AS n", "");

/// What is chosen.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Choice {
    /// Phases, with commas in between.
    #[serde(default)]
    pub phase: String,
    /// A node.
    #[serde(default)]
    pub node: String,
    /// A batch.
    #[serde(default)]
    pub batch: String,
    /// Part of a client's id, the beginning of a program, or an id.
    #[serde(default)]
    pub q: String,
    /// First member of the batch.
    #[serde(default)]
    pub from: String,
    /// Last member of the batch.
    #[serde(default)]
    pub to_line: String,
    /// Submitted no later.
    #[serde(default)]
    pub before: String,
    /// Rows before the page.
    #[serde(default, deserialize_with = "number")]
    pub skip: i64,
}

/// A number in an address; 0 if it is none.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    let text = String::deserialize(from)?;
    Ok(text.parse().unwrap_or(0).clamp(0, DEEPEST))
}

impl Choice {
    /// The address of the list.
    pub fn address(&self) -> String {
        let skip = self.skip.to_string();
        let pairs = [
            ("phase", &self.phase),
            ("node", &self.node),
            ("batch", &self.batch),
            ("q", &self.q),
            ("from", &self.from),
            ("to_line", &self.to_line),
            ("before", &self.before),
            ("skip", &skip),
        ];
        let some = pairs.iter().filter(|(name, value)| match *name {
            "skip" => value.as_str() != "0",
            _ => !value.is_empty(),
        });
        let text = some.map(|(name, value)| format!("{name}={}", encoded(value)));
        format!("/executions?{}", text.collect::<Vec<_>>().join("&"))
    }

    /// The command that lists about the same.
    fn command(&self) -> String {
        let mut words = vec!["fiec ls --all".to_owned()];
        let phases = self.phase.split(',').filter(|phase| !phase.is_empty());
        words.extend(phases.map(|phase| format!("--phase {}", quoted(phase))));
        for (option, value) in [("--node", &self.node), ("--batch", &self.batch)] {
            words.extend((!value.is_empty()).then(|| format!("{option} {}", quoted(value))));
        }
        words.join(" ")
    }

    fn query(&self, sql: &'static str) -> Query {
        let Self {
            phase,
            node,
            batch,
            q,
            from,
            to_line,
            before,
            ..
        } = self;
        let values = [phase, node, batch, q, from, to_line, before];
        values
            .into_iter()
            .fold(Query::of(sql), |query, value| query.with(value.as_str()))
    }
}

/// The executions that are chosen, the newest first, and how many there are in all.
pub async fn chosen(
    hub: &Hub,
    choice: &Choice,
    most: i64,
    frame: &mut Frame,
) -> (Vec<Listed>, i64) {
    let list = choice.query(LIST).with(choice.skip.to_string());
    let rows = frame
        .rows(hub, "Executions", &list.with(most.to_string()))
        .await;
    let counted: Vec<Counted> = frame.rows(hub, "Their number", &choice.query(COUNT)).await;
    let all = counted.first().map_or(0, |counted| counted.n);
    (rows, all)
}

#[derive(Debug, Serialize, Deserialize)]
struct Counted {
    n: i64,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "executions.html")]
struct Page {
    frame: Frame,
    choice: Choice,
    rows: Vec<Listed>,
    /// Rows that are chosen in all.
    all: i64,
}

impl Page {
    /// Whether something is chosen, and not all that there is.
    fn is_chosen(&self) -> bool {
        let Choice {
            phase,
            node,
            batch,
            q,
            ..
        } = &self.choice;
        [phase, node, batch, q].iter().any(|one| !one.is_empty())
    }

    fn has_more(&self) -> bool {
        self.choice.skip + ROWS < self.all
    }

    fn last(&self) -> i64 {
        self.choice
            .skip
            .saturating_add(i64::try_from(self.rows.len()).unwrap_or(0))
    }

    fn at(&self, skip: i64) -> String {
        let choice = Choice {
            skip: skip.max(0),
            ..self.choice.clone()
        };
        choice.address()
    }

    /// The address of an action on all that is chosen.
    fn act(&self, what: &str) -> String {
        let all = self.at(0);
        let choice = all.split_once('?').map_or("", |(_, choice)| choice);
        format!("/act?what={what}&{choice}")
    }

    fn before(&self) -> String {
        self.at(self.choice.skip - ROWS)
    }

    fn after(&self) -> String {
        self.at(self.choice.skip + ROWS)
    }
}

/// A value in an address.
pub fn encoded(value: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    let mut out = String::new();
    for b in value.bytes() {
        match plain(b) {
            true => out.push(char::from(b)),
            false => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

/// `/executions`
pub async fn page(
    State(shared): State<Arc<Shared>>,
    Given(choice): Given<Choice>,
    Given(form): Given<Form>,
) -> Response {
    let mut frame = Frame::new("Executions", "executions", "executions overview");
    frame.command = choice.command();
    let (rows, all) = chosen(&shared.hub, &choice, ROWS, &mut frame).await;
    answer(
        &Page {
            frame,
            choice,
            rows,
            all,
        },
        &form,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_addresses_cannot_become_other_values() {
        assert_eq!(encoded("a&b=c d/é"), "a%26b%3Dc%20d%2F%C3%A9");
    }
}
