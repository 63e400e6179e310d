//! Questions in SQL: those of `examples/sql`, and one's own, as the role that reads, with a limit of
//! time and rows.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Query as Given, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::{Form, Frame, answer};
use crate::database::Answer;
use crate::server::Shared;
use crate::words;

macro_rules! questions {
    ($($name:literal),+ $(,)?) => {
        /// The files of `examples/sql`.
        const QUESTIONS: &[&str] = &[
            $(include_str!(concat!("../../../../examples/sql/", $name, ".sql"))),+
        ];
    };
}

questions!(
    "what_is_pending_and_why",
    "why_did_it_move",
    "what_ran_where",
    "why_is_it_where_it_is",
    "failed",
    "work_lost",
    "how_far_are_the_batches",
    "batches",
    "how_long_were_the_gaps",
    "pressure_around_a_move",
    "node_timeline",
    "which_devices_are_there",
    "which_nodes_are_left",
    "decisions",
    "throughput_per_minute",
    "biggest_state",
    "what_waited_where_it_was",
    "who_was_late",
    "who_shares_what",
    "who_changed_which_quota",
    "who_asked_for_what",
    "who_computes_which_part",
    "rejections",
    "where_did_the_joules_go",
    "whose_clock_is_off",
    "recorder_state",
    "held_objects",
);

/// Longest question in bytes.
const LONGEST: usize = 16 * 1024;

#[derive(Debug, Default, Deserialize)]
pub struct Asked {
    #[serde(default)]
    q: String,
}

/// A question of the menu: its words, and its SQL.
#[derive(Debug, Serialize)]
struct Question {
    words: String,
    sql: &'static str,
}

#[derive(Debug, Template, Serialize)]
#[template(path = "sql.html")]
struct Page {
    frame: Frame,
    #[serde(skip)]
    menu: Vec<Question>,
    q: String,
    answer: Option<Answer>,
}

impl Question {
    fn address(&self) -> String {
        format!("/sql?q={}", super::executions::encoded(self.sql))
    }
}

/// The comment at the beginning of a file says what it answers.
fn menu() -> Vec<Question> {
    let words = |sql: &str| {
        let lines = sql.lines().map_while(|line| line.strip_prefix("-- "));
        let all = lines.collect::<Vec<_>>().join(" ");
        match all.find('?') {
            Some(end) => all.get(..=end).unwrap_or(&all).to_owned(),
            None => all,
        }
    };
    let questions = QUESTIONS.iter();
    questions
        .map(|sql| Question {
            words: words(sql),
            sql,
        })
        .collect()
}

/// `/sql`
pub async fn page(
    State(shared): State<Arc<Shared>>,
    Given(asked): Given<Asked>,
    Given(form): Given<Form>,
) -> Response {
    let mut frame = Frame::new("SQL", "sql", "");
    let q = asked.q.trim().to_owned();
    let mut found = None;
    if q.len() > LONGEST {
        frame.troubles.push(format!(
            "a question has at most {} bytes",
            words::count(&16_384)
        ));
    } else if !q.is_empty() {
        frame.sql.push(q.clone());
        frame.command = format!("psql service=fiec -c '{}'", q.replace('\'', "'\\''"));
        match shared.hub.database.ask(&q).await {
            Ok(rows) => found = Some(rows),
            Err(trouble) => frame.troubles.push(trouble),
        }
    }
    let page = Page {
        frame,
        menu: menu(),
        q,
        answer: found,
    };
    answer(&page, &form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_menu_has_every_example_and_each_says_what_it_answers() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/sql");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            assert!(QUESTIONS.contains(&text.as_str()), "{text}");
            files += 1;
        }
        assert_eq!(files, QUESTIONS.len());
        assert!(
            menu()
                .iter()
                .all(|question| question.words.ends_with(['?', '.']))
        );
    }
}
