//! PostgreSQL, as the role that reads: few connections, and no query longer than a page may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use fiec_schemas::{Secret, Timestamp};
use futures_util::TryStreamExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{
    AssertSqlSafe, Column as _, Connection as _, Executor as _, PgConnection, PgPool,
    SqlSafeStr as _, Statement as _,
};
use tokio::sync::Semaphore;

/// Connections of the whole console. No page can hold a service back by taking more.
const CONNECTIONS: u32 = 4;
/// Connections, of those above, for the queries that people write themselves.
const QUESTIONS: usize = 1;
/// Time limit of a query, as the server keeps it.
const QUERY: Duration = Duration::from_secs(5);
/// Time limit of a query and of a person's own question, also of a server that says nothing.
const ANSWERED: Duration = Duration::from_secs(8);
/// Time limit of a connection, and of waiting for a free one.
const CONNECTED: Duration = Duration::from_secs(3);
/// Most bytes of the rows of one query, as JSON.
const ANSWER: usize = 16 << 20;
/// Most rows of the answer to a person's own question.
const ROWS: usize = 1_000;
/// Most bytes of one of them.
const ROW: usize = 1 << 20;

/// The tables and views.
#[derive(Debug, Clone)]
pub struct Database {
    pool: Arc<PgPool>,
    questions: Arc<Semaphore>,
    /// When a query was last answered, in µs; 0: never.
    answered: Arc<AtomicI64>,
}

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
        let mut text = String::new();
        let mut rest = self.sql;
        // In one pass: a value may contain what looks like another one's place.
        while let Some((before, after)) = rest.split_once('$') {
            text.push_str(before);
            let digits = after
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(after.len());
            let (number, behind) = after.split_at(digits);
            let value = number
                .parse::<usize>()
                .ok()
                .and_then(|n| self.values.get(n.checked_sub(1)?));
            match value {
                Some(value) => text.push_str(&format!("'{}'", value.replace('\'', "''"))),
                None => text.push_str(&format!("${number}")),
            }
            rest = behind;
        }
        text + rest
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
        Ok(Self {
            pool: Arc::new(pool),
            questions: Arc::new(Semaphore::new(QUESTIONS)),
            answered: Arc::default(),
        })
    }

    /// The rows of a query.
    ///
    /// # Errors
    /// Why there are none, for a person.
    pub async fn rows<T: DeserializeOwned>(&self, query: &Query) -> Result<Vec<T>, String> {
        let connected = self.pool.acquire().await;
        let mut connection = connected.map_err(|error| away(&error) + &self.since())?;
        let read = tokio::time::timeout(ANSWERED, read(&mut connection, query)).await;
        let Ok(answer) = read else {
            // Its unfinished query would delay the next page that gets this connection.
            connection.close_on_drop();
            return Err(silent() + &self.since());
        };
        if answer.is_ok() {
            let now = Timestamp::now().micros();
            self.answered.store(now, Ordering::Relaxed);
        }
        answer
    }

    /// Since when there is no answer, as the end of a sentence. A time, not a span: the sentence stays
    /// the same while the outage lasts.
    fn since(&self) -> String {
        match self.answered.load(Ordering::Relaxed) {
            0 => "; it has not answered since the console started".to_owned(),
            at => {
                let at = Timestamp::from_micros(at).to_string();
                format!("; it last answered at {}Z", at.get(..19).unwrap_or(&at))
            }
        }
    }

    /// The only row of a query.
    ///
    /// # Errors
    /// Why there is none, for a person.
    pub async fn row<T: DeserializeOwned>(&self, query: &Query) -> Result<Option<T>, String> {
        Ok(self.rows(query).await?.into_iter().next())
    }
}

async fn read<T: DeserializeOwned>(
    connection: &mut PgConnection,
    query: &Query,
) -> Result<Vec<T>, String> {
    // A row is one JSON text: numbers, times and arrays look as in `--json`.
    let sql = format!("SELECT to_jsonb(q)::text FROM ({}) q", query.sql);
    let mut asked = sqlx::query_scalar::<_, String>(AssertSqlSafe(sql));
    for value in &query.values {
        asked = asked.bind(value.clone());
    }
    let mut rows = asked.fetch(connection);
    let (mut read, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await.map_err(|error| away(&error))? {
        bytes += row.len();
        if bytes > ANSWER {
            return Err(format!("the answer has more than {} MiB", ANSWER >> 20));
        }
        let row = serde_json::from_str(&row);
        read.push(row.map_err(|error| format!("a row has another form than expected: {error}"))?);
    }
    Ok(read)
}

fn silent() -> String {
    format!(
        "PostgreSQL has not answered within {} s",
        ANSWERED.as_secs()
    )
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
        let (columns, rows, more) = tokio::time::timeout(ANSWERED, self.own(question))
            .await
            .map_err(|_| silent())??;
        Ok(Answer {
            columns,
            rows,
            more,
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    async fn own(&self, question: &str) -> Result<(Vec<String>, Vec<Vec<String>>, bool), String> {
        let failed = |error: sqlx::Error| away(&error);
        let _one = self.questions.acquire().await;
        let mut connection = self.pool.acquire().await.map_err(failed)?;
        // What the question has begun or set in its session ends with the connection.
        connection.close_on_drop();
        let mut tx = connection.begin().await.map_err(failed)?;
        let question = question.trim().trim_end_matches(';');
        // By themselves, the text must be one statement.
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
        // Two columns may have one name.
        let names: Vec<String> = (0..columns.len()).map(|n| format!("c{n}")).collect();
        let sql = format!(
            "SELECT CASE WHEN octet_length(j) <= {ROW} THEN j END FROM (SELECT to_jsonb(q)::text AS j \
             FROM (\n{question}\n) AS q({}) LIMIT {}) rows",
            names.join(", "),
            ROWS + 1
        );
        let mut found = sqlx::query_scalar::<_, Option<String>>(AssertSqlSafe(sql)).fetch(&mut *tx);
        let (mut rows, mut bytes, mut more) = (Vec::new(), 0, false);
        while let Some(row) = found.try_next().await.map_err(failed)? {
            let row = row.ok_or(format!("a row has more than {} MiB", ROW >> 20))?;
            bytes += row.len();
            if rows.len() >= ROWS || bytes > ANSWER {
                more = true;
                break;
            }
            let row: Map<String, Value> = serde_json::from_str(&row).map_err(|e| e.to_string())?;
            rows.push(names.iter().map(|name| text(row.get(name))).collect());
        }
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
        let mut query = Query::of("SELECT $1, $10, $2::uuid, '$', $");
        for n in 1..=10 {
            query = query.with(format!("v{n}'$2"));
        }
        let expected = "SELECT 'v1''$2', 'v10''$2', 'v2''$2'::uuid, '$', $";
        assert_eq!(query.shown(), expected);
    }
}
