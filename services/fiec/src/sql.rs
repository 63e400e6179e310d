//! Rows of PostgreSQL as tables for people and JSON for scripts.

use anyhow::Context as _;
use fiec_schemas::{ExecutionId, PhaseKind};
use serde_json::{Map, Value};
use sqlx::{Column as _, PgPool, Row as _, ValueRef as _};

use crate::ui;

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

    /// A table without the columns that are empty in every row.
    pub fn table(&self) -> comfy_table::Table {
        let kept: Vec<usize> = (0..self.columns.len())
            .filter(|i| {
                self.rows
                    .iter()
                    .any(|r| r.get(*i).is_some_and(Option::is_some))
            })
            .collect();
        let cell =
            |row: &Vec<Option<String>>, i: usize| row.get(i).cloned().flatten().unwrap_or_default();
        ui::table(
            kept.iter().filter_map(|i| self.columns.get(*i).cloned()),
            self.rows
                .iter()
                .map(|row| kept.iter().map(|i| cell(row, *i)).collect::<Vec<_>>()),
        )
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

    /// Prints JSON lines or a table.
    pub fn print(&self, json: bool) {
        if json {
            print!("{}", self.json_lines());
        } else {
            println!("{}", self.table());
        }
    }
}
