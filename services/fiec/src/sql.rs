//! Rows of PostgreSQL as tables for people and JSON for scripts.

use anyhow::Context as _;
use fiec_schemas::{ExecutionId, PhaseKind, Timestamp};
use serde_json::{Map, Value};
use sqlx::{Column as _, PgPool, Row as _, ValueRef as _};

use crate::table::{Align, Column, Layout, Table, numbers, short_time};

/// Result of a query. Every value is text, as PostgreSQL writes it.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Column names.
    pub columns: Vec<String>,
    /// Values; `None` is NULL.
    pub rows: Vec<Vec<Option<String>>>,
}

/// A foreign text as an SQL literal.
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', "''"))
}

/// Reads an execution's phase from its column.
///
/// # Errors
/// When this version knows no such phase.
pub fn parse_phase(execution: ExecutionId, text: &str) -> anyhow::Result<PhaseKind> {
    text.parse()
        .with_context(|| format!("the phase of {execution} in PostgreSQL"))
}

/// Runs a query of this program. Ids in it are parsed UUIDs, other values are [`literal`]s.
///
/// # Errors
/// If PostgreSQL refuses it.
pub async fn query(pool: &PgPool, sql: String) -> anyhow::Result<Rows> {
    // The simple protocol answers in text, which a table needs.
    let found = sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .fetch_all(pool)
        .await
        .context("PostgreSQL refused the query")?;
    let mut out = Rows::default();
    for row in found {
        if out.columns.is_empty() {
            out.columns = row.columns().iter().map(|c| c.name().to_owned()).collect();
        }
        let mut values = Vec::with_capacity(out.columns.len());
        for index in 0..row.columns().len() {
            let raw = row.try_get_raw(index)?;
            values.push(if raw.is_null() {
                None
            } else {
                Some(raw.as_str().map_err(|e| anyhow::anyhow!("{e}"))?.to_owned())
            });
        }
        out.rows.push(values);
    }
    Ok(out)
}

/// What a list leaves out, for people: none if it has all rows. `of`: the tables and the condition.
///
/// # Errors
/// If PostgreSQL refuses the query.
pub async fn left_out(
    pool: &PgPool,
    rows: &Rows,
    limit: u32,
    of: &str,
) -> anyhow::Result<Option<String>> {
    let listed = rows.rows.len();
    if listed < limit as usize {
        return Ok(None);
    }
    let counted = query(pool, format!("SELECT count(*) AS number FROM {of}")).await?;
    let all = counted
        .get(0, "number")
        .and_then(|n| n.parse::<usize>().ok());
    let all = all.filter(|all| *all > listed);
    Ok(all.map(|all| format!("these are the latest {listed} of {all}; `-n` lists more")))
}

impl Rows {
    /// The value of a column in a row. `None` if it is missing or NULL.
    pub fn get(&self, row: usize, column: &str) -> Option<&str> {
        let index = self.columns.iter().position(|c| c == column)?;
        self.rows.get(row)?.get(index)?.as_deref()
    }

    /// A table without the columns that are empty in every row. `columns`: how they are shown; a
    /// column that is not among them is never left out. `now`: for short times.
    pub fn to_table(&self, columns: &[Column], layout: Layout, now: Timestamp) -> Table {
        let now = now.to_string();
        let is_empty = |index: usize| {
            let mut cells = self.rows.iter().map(|row| row.get(index));
            cells.all(|cell| cell.is_none_or(Option::is_none))
        };
        let kept: Vec<_> = (0..self.columns.len()).filter(|i| !is_empty(*i)).collect();
        let column = |index: &usize| {
            let name = &self.columns[*index];
            let known = columns.iter().find(|column| column.head == *name);
            known.cloned().unwrap_or_else(|| Column {
                head: name.clone().into(),
                ..Column::left("", 0)
            })
        };
        let columns: Vec<_> = kept.iter().map(column).collect();
        let cell = |row: &Vec<Option<String>>, (index, column): (&usize, &Column)| {
            let text = row.get(*index).and_then(Option::as_deref).unwrap_or("");
            // An id may look like a number.
            let text = match column.align == Align::Right || text.starts_with(['{', '[']) {
                true => numbers(text),
                false => text.into(),
            };
            match layout {
                Layout::Full => text.into_owned(),
                Layout::Within(_) => short_time(&text, &now).into_owned(),
            }
        };
        let rows = self.rows.iter();
        let rows = rows.map(|row| kept.iter().zip(&columns).map(|at| cell(row, at)).collect());
        Table::new(&columns, rows)
    }

    /// A table with all columns, as wide as the terminal.
    pub fn table(&self) -> String {
        let layout = Layout::of_stdout();
        self.to_table(&[], layout, Timestamp::now()).render(layout)
    }

    /// The rows as JSON objects.
    pub fn objects(&self) -> impl Iterator<Item = Map<String, Value>> {
        self.rows.iter().map(|row| {
            let values = row
                .iter()
                .map(|v| v.clone().map_or(Value::Null, Value::String));
            self.columns.iter().cloned().zip(values).collect()
        })
    }

    /// JSON lines, one for each row.
    pub fn json_lines(&self) -> String {
        let lines = self
            .objects()
            .map(|row| format!("{}\n", Value::Object(row)));
        lines.collect()
    }

    /// Prints JSON lines, or a table of these columns.
    pub fn print(&self, columns: &[Column], layout: Layout, json: bool) {
        if json {
            print!("{}", self.json_lines());
        } else {
            let table = self.to_table(columns, layout, Timestamp::now());
            println!("{}", table.render(layout));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_short_and_ids_stay_as_they_are() {
        let columns = ["id", "at", "gap_ms", "result", "empty"].map(str::to_owned);
        let result = r#"{"residual": 0.000000000010147807052232935}"#;
        let row =
            ["1.10", "2026-11-27 12:03:41", "1.500", result].map(|cell| Some(cell.to_owned()));
        let rows = Rows {
            columns: columns.into(),
            rows: vec![row.into_iter().chain([None]).collect()],
        };
        let known = [Column::right("gap_ms", 1)];
        let text = |layout| {
            let now = "2026-11-28T13:00:00Z".parse().unwrap();
            rows.to_table(&known, layout, now).render(layout)
        };
        let expected = "\
id    at            gap_ms  result
1.10  Nov 27 12:03     1.5  {\"residual\": 1.0147807052232935e-11}";
        assert_eq!(text(Layout::Within(80)), expected);
        assert!(text(Layout::Full).contains("2026-11-27 12:03:41"));
    }
}
