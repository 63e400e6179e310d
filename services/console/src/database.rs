//! PostgreSQL, as the role that reads: few connections, and no query longer than a page may take.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fiec_schemas::Secret;
use futures_util::TryStreamExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{
    AssertSqlSafe, Column as _, Connection as _, Executor as _, PgPool, SqlSafeStr as _,
    Statement as _,
};

/// Connections of the whole console. No page can hold a service back by taking more.
const CONNECTIONS: u32 = 4;
/// Time limit of a query.
const QUERY: Duration = Duration::from_secs(5);
/// Time limit of a connection, and of waiting for a free one.
const CONNECTED: Duration = Duration::from_secs(2);
/// Time limit of somebody's own question.
const OWN: Duration = Duration::from_secs(8);
/// Most rows of its answer.
const ROWS: usize = 1_000;
/// Most bytes of the rows of one query, as JSON.
const ANSWER: usize = 16 << 20;

/// The tables and views.
#[derive(Debug, Clone)]
pub struct Database(Arc<PgPool>);

/// A query with its values.
#[derive(Debug, Clone)]
pub struct Query {
    /// The text, which a page shows.
    pub sql: &'static str,
    /// Values of `$1`, `$2`, ….
    pub values: Vec<String>,
}

impl Query {
    /// A query without values.
    pub fn of(sql: &'static str) -> Self {
        Self {
            sql,
            values: Vec::new(),
        }
    }

    /// With one more value. It is a text; the query converts it (`$1::uuid`).
    pub fn with(mut self, value: impl Into<String>) -> Self {
        self.values.push(value.into());
        self
    }

    /// The query with its values in it, as a person would type it.
    pub fn shown(&self) -> String {
        let mut text = self.sql.to_owned();
        // From the last on, so that $1 is not found in $10.
        for (at, value) in self.values.iter().enumerate().rev() {
            let literal = format!("'{}'", value.replace('\'', "''"));
            text = text.replace(&format!("${}", at + 1), &literal);
        }
        text
    }
}

impl Database {
    /// Connects with the first query.
    ///
    /// # Errors
    /// When the URL is none.
    pub fn new(url: &Secret) -> sqlx::Result<Self> {
        let options: PgConnectOptions = url.expose().parse()?;
        let limit = QUERY.as_millis().to_string();
        let options = options.application_name("fiec console").options([
            ("statement_timeout", limit.as_str()),
            ("default_transaction_read_only", "on"),
        ]);
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(CONNECTED)
            .idle_timeout(Duration::from_secs(60))
            .connect_lazy_with(options);
        Ok(Self(Arc::new(pool)))
    }

    /// The rows of a query.
    ///
    /// # Errors
    /// Why there are none, for a person.
    pub async fn rows<T: DeserializeOwned>(&self, query: &Query) -> Result<Vec<T>, String> {
        // A row is one JSON text: numbers, times and arrays look as in `--json`.
        let sql = format!("SELECT to_jsonb(q)::text FROM ({}) q", query.sql);
        let mut asked = sqlx::query_scalar::<_, String>(AssertSqlSafe(sql));
        for value in &query.values {
            asked = asked.bind(value.clone());
        }
        let rows = asked
            .fetch_all(&*self.0)
            .await
            .map_err(|error| away(&error))?;
        if rows.iter().map(String::len).sum::<usize>() > ANSWER {
            return Err(format!("the answer has more than {} MiB", ANSWER >> 20));
        }
        let read = rows.iter().map(|row| serde_json::from_str(row));
        read.collect::<Result<_, _>>()
            .map_err(|error| format!("a row has another form than this console knows: {error}"))
    }

    /// The only row of a query.
    ///
    /// # Errors
    /// Why there is none, for a person.
    pub async fn row<T: DeserializeOwned>(&self, query: &Query) -> Result<Option<T>, String> {
        Ok(self.rows(query).await?.into_iter().next())
    }
}

/// The rows of somebody's own question, as texts.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Values.
    pub rows: Vec<Vec<String>>,
    /// There are more rows.
    pub more: bool,
    /// How long it took.
    pub seconds: f64,
}

impl Database {
    /// Answers somebody's own question: one statement that gives rows, in a transaction that only reads
    /// and is rolled back, on a connection that nobody uses after it.
    ///
    /// # Errors
    /// Why there is no answer, for a person.
    pub async fn ask(&self, question: &str) -> Result<Answer, String> {
        let began = Instant::now();
        let asked = tokio::time::timeout(OWN, self.own(question)).await;
        let answered =
            asked.map_err(|_| format!("there is no answer within {} s", OWN.as_secs()))?;
        let (columns, rows, more) = answered?;
        Ok(Answer {
            columns,
            rows,
            more,
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    async fn own(&self, question: &str) -> Result<(Vec<String>, Vec<Vec<String>>, bool), String> {
        let failed = |error: sqlx::Error| away(&error);
        let mut connection = self.0.acquire().await.map_err(failed)?.detach();
        let mut tx = connection.begin().await.map_err(failed)?;
        let question = question.trim().trim_end_matches(';');
        // The columns in their order, which JSON does not keep.
        let plain = AssertSqlSafe(question.to_owned()).into_sql_str();
        let statement = (&mut *tx).prepare(plain).await.map_err(failed)?;
        let columns: Vec<String> = statement
            .columns()
            .iter()
            .map(|c| c.name().to_owned())
            .collect();
        if columns.is_empty() {
            return Err("a question must give rows: begin with SELECT or WITH".to_owned());
        }
        let sql = format!(
            "SELECT to_jsonb(q)::text FROM (\n{question}\n) q LIMIT {}",
            ROWS + 1
        );
        let mut found = sqlx::query_scalar::<_, String>(AssertSqlSafe(sql)).fetch(&mut *tx);
        let (mut rows, mut bytes, mut more) = (Vec::new(), 0, false);
        while let Some(row) = found.try_next().await.map_err(failed)? {
            bytes += row.len();
            if rows.len() >= ROWS || bytes > ANSWER {
                more = true;
                break;
            }
            let row: Map<String, Value> = serde_json::from_str(&row).map_err(|e| e.to_string())?;
            rows.push(columns.iter().map(|name| text(row.get(name))).collect());
        }
        drop(found);
        tx.rollback().await.map_err(failed)?;
        // What the question has set in its session ends with it.
        connection.close().await.map_err(failed)?;
        Ok((columns, rows, more))
    }
}

/// A value as a cell shows it.
fn text(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

fn away(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(refused) => format!("PostgreSQL refuses it: {}", refused.message()),
        sqlx::Error::PoolTimedOut => "PostgreSQL does not answer, or is busy".to_owned(),
        error => format!("PostgreSQL does not answer: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_query_can_be_typed() {
        let mut query = Query::of("SELECT $1, $10, $2::uuid");
        for n in 1..=10 {
            query = query.with(format!("v{n}'"));
        }
        assert_eq!(query.shown(), "SELECT 'v1''', 'v10''', 'v2'''::uuid");
    }
}
