//! Rows of PostgreSQL as tables for people and JSON for scripts.

use anyhow::Context as _;
use fiec_schemas::{ExecutionId, PhaseKind, Timestamp};
use serde_json::{Map, Value};
use sqlx::{Column as _, PgPool, Row as _, ValueRef as _};

use crate::table::{Column, Layout, Table, numbers, short_time};

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
    Ok(all.map(|all| format!("these are the latest {listed} of {all}")))
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
        let shown = |text: &str| match layout {
            Layout::Full => numbers(text).into_owned(),
            Layout::Within(_) => short_time(&numbers(text), &now).into_owned(),
        };
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
        let cell = |row: &Vec<Option<String>>, index: usize| {
            let cell = row.get(index).and_then(Option::as_deref);
            shown(cell.unwrap_or_default())
        };
        let rows = self.rows.iter();
        let rows = rows.map(|row| kept.iter().map(|i| cell(row, *i)).collect());
        Table::new(&kept.iter().map(column).collect::<Vec<_>>(), rows)
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
}
