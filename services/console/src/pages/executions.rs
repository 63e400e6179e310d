//! Executions by phase, batch, node and words, newest first. What is chosen is in the address.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::{Form, Frame, Listed, answer};
use crate::database::Query;
use crate::hub::Hub;
use crate::server::Shared;

/// Rows of a page.
const ROWS: i64 = 100;

/// Every condition is left out where its value is empty.
const LIST: &str = "SELECT execution, client_id, tenant, program, phase, node, boundary, \
    boundaries_in_all, progress, submitted_at, finished_at, rebindings, failure \
    FROM execution_summary WHERE ($1 = '' OR phase = ANY(string_to_array($1, ','))) \
    AND ($2 = '' OR node = $2) AND ($3 = '' OR batch = nullif($3, '')::uuid) \
    AND ($4 = '' OR client_id ILIKE '%' || $4 || '%' OR program ILIKE $4 || '%' OR execution::text = $4) \
    AND ($5 = '' OR batch_line >= nullif($5, '')::integer) \
    AND ($6 = '' OR batch_line <= nullif($6, '')::integer) \
    ORDER BY submitted_at DESC, batch_line LIMIT $8::bigint OFFSET $7::bigint";
const COUNT: &str = "SELECT count(*) AS n FROM execution_summary \
    WHERE ($1 = '' OR phase = ANY(string_to_array($1, ','))) \
    AND ($2 = '' OR node = $2) AND ($3 = '' OR batch = nullif($3, '')::uuid) \
    AND ($4 = '' OR client_id ILIKE '%' || $4 || '%' OR program ILIKE $4 || '%' OR execution::text = $4) \
    AND ($5 = '' OR batch_line >= nullif($5, '')::integer) \
    AND ($6 = '' OR batch_line <= nullif($6, '')::integer)";

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
    /// First line of the batch.
    #[serde(default)]
    pub from: String,
    /// Last line of the batch.
    #[serde(default)]
    pub to_line: String,
    /// Rows before the page.
    #[serde(default, deserialize_with = "number")]
    pub skip: i64,
}

/// A number in an address; 0 if it is none.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    let text = String::deserialize(from)?;
    Ok(text.parse().unwrap_or(0))
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
            ("skip", &skip),
        ];
        let some = pairs.iter().filter(|(name, value)| match *name {
            "skip" => value.as_str() != "0",
            _ => !value.is_empty(),
        });
        let text = some.map(|(name, value)| format!("{name}={}", encoded(value)));
        format!("/executions?{}", text.collect::<Vec<_>>().join("&"))
    }

    fn query(&self, sql: &'static str) -> Query {
        let values = [
            &self.phase,
            &self.node,
            &self.batch,
            &self.q,
            &self.from,
            &self.to_line,
        ];
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
    let list = choice
        .query(LIST)
        .with(choice.skip.clamp(0, 10_000_000).to_string());
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
    frame.command = match choice.phase.as_str() {
        "" => "fiec ls --all".to_owned(),
        phase => format!("fiec ls --all | grep -w {}", phase.replace(',', " -e ")),
    };
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
