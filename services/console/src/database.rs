//! PostgreSQL, as the role that reads: few connections, and no query longer than a page may take.

use std::sync::Arc;
use std::time::Duration;

use fiec_schemas::Secret;
use serde::de::DeserializeOwned;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

/// Connections of the whole console. No page can hold a service back by taking more.
const CONNECTIONS: u32 = 4;
/// Time limit of a query.
const QUERY: Duration = Duration::from_secs(5);
/// Time limit of a connection, and of waiting for a free one.
const CONNECTED: Duration = Duration::from_secs(2);
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
