//! The pages for people: every SQL statement of `migrations/README.md` and `examples/sql` runs, the page
//! names every table and view, and the reader's role reads and cannot write.
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::support::{Database, database, number, words};
use fiec_recorder::lab_support::{LedgerWriter, project, short_ledgers};
use fiec_schemas::scheduling::{Keep, Rule};
use fiec_schemas::{Cause, Event, ExecutionId, InstanceId, Submission, Tenant, Timestamp};
use sqlx::AssertSqlSafe;

const PAGE: &str = include_str!("../../../migrations/README.md");

async fn history() -> Database {
    let db = database().await;
    project(&db.pool, short_ledgers(3, 1).unwrap())
        .await
        .unwrap();
    db
}

/// The blocks of a page in this language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let begin = format!("```{language}\n");
    let parts = page.split(begin.as_str()).skip(1);
    parts
        .map(|part| part.split("```").next().unwrap())
        .collect()
}

#[tokio::test]
async fn every_statement_of_the_page_runs() {
    let db = history().await;
    let statements = blocks(PAGE, "sql");
    assert!(statements.len() >= 5, "{statements:?}");
    for sql in statements {
        let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&db.pool).await;
        assert!(done.is_ok(), "{sql}: {done:?}");
    }
}

/// The names in the first cell of each row of the page's tables.
fn named() -> BTreeSet<String> {
    let cells = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = cells.map(|line| line.split(" |").next().unwrap());
    let names = cells.flat_map(|cell| cell.split("`, `"));
    names
        .map(|name| name.trim_end_matches('`').split('(').next().unwrap())
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn the_page_names_every_table_and_view() {
    let db = database().await;
    let all = sqlx::query_scalar(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace \
         AND relkind IN ('r', 'p', 'v') AND NOT relispartition AND relname <> '_sqlx_migrations'",
    );
    let all: Vec<String> = all.fetch_all(&db.pool).await.unwrap();
    let mut all: BTreeSet<String> = all.into_iter().collect();
    all.insert("why".to_owned());
    let named = named();
    let differ: Vec<_> = all.symmetric_difference(&named).collect();
    assert!(differ.is_empty(), "of the page or the database: {differ:?}");
}

#[tokio::test]
async fn every_example_query_runs_and_says_what_it_answers() {
    let db = history().await;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/sql");
    let mut ran = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("-- "), "{} has no head", path.display());
        let done = sqlx::raw_sql(AssertSqlSafe(text)).execute(&db.pool).await;
        assert!(done.is_ok(), "{}: {done:?}", path.display());
        ran += 1;
    }
    assert!(ran >= 10, "only {ran} files");
}

#[tokio::test]
async fn the_reader_reads_and_cannot_write() {
    let db = history().await;
    sqlx::raw_sql("ALTER ROLE fiec_reader PASSWORD 'reads'")
        .execute(&db.pool)
        .await
        .unwrap();
    let (_, server) = db.url.split_once('@').unwrap();
    let url = format!("postgres://fiec_reader:reads@{server}");
    let reader = fiec_recorder::connect(&url).await.unwrap();
    for relation in ["decisions", "placement_timeline"] {
        let count = format!("SELECT count(*) FROM {relation}");
        assert_eq!(number(&reader, &count).await, 3, "{relation}");
    }
    // Its session may be made writable by itself; its rights still forbid it.
    sqlx::query("SET default_transaction_read_only = off")
        .execute(&reader)
        .await
        .unwrap();
    for sql in [
        "DELETE FROM executions",
        "INSERT INTO batches VALUES (gen_random_uuid(), 'x', NULL, now())",
        "SELECT fiec_drop_partitions(current_date)",
    ] {
        assert!(sqlx::query(sql).execute(&reader).await.is_err(), "{sql}");
    }
}

/// Moved by an operator, and parked for another execution: both are told by typed columns, whatever
/// the sentences say.
#[tokio::test]
async fn who_asked_and_who_gave_way_are_columns() {
    let db = database().await;
    let tenant = Tenant::new("lab").unwrap();
    let submission = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
    let id = ExecutionId(uuid::Uuid::now_v7());
    let at = Timestamp::now();
    let mut ledger = LedgerWriter::new(tenant, id, submission, at);
    let bound = |epoch, cause| Event::Bound {
        epoch,
        node: "n1".parse().unwrap(),
        instance: InstanceId::random(),
        substrate: "host".into(),
        cause,
        decision: None,
    };
    let started = |epoch| Event::Started {
        epoch,
        computing_since: at,
    };
    let operator = || Cause::Operator { who: "ann".into() };
    let yielded = Event::Yielded {
        cause: operator(),
        computed_until: at,
    };
    let parked = Event::Parked {
        cause: Cause::Preempted {
            rule: Rule::Priority,
            by: None,
            reason: "it is worth more".into(),
        },
        keep: Keep::Device,
        computed_until: at,
    };
    let messages = [
        vec![Event::Submitted, bound(1, Cause::Initial)],
        vec![started(1)],
        vec![yielded, bound(2, operator())],
        vec![started(2)],
        vec![parked],
    ];
    let items = messages
        .into_iter()
        .zip(1..)
        .map(|(events, seq)| ledger.append(events, "worker/n1/x", at, seq).unwrap())
        .collect();
    project(&db.pool, items).await.unwrap();
    for table in ["execution_events SET detail", "rebindings SET cause_detail"] {
        let other = format!("UPDATE {table} = 'told in other words'");
        sqlx::raw_sql(AssertSqlSafe(other))
            .execute(&db.pool)
            .await
            .unwrap();
    }
    let asked = "SELECT string_agg(concat_ws(' ', what, who), ', ') FROM operator_actions";
    assert_eq!(words(&db.pool, asked).await, "moved ann");
    let gave = "SELECT gave_way_last_day FROM tenant_shares";
    assert_eq!(number(&db.pool, gave).await, 1);
}

/// Two placements of a minute each with an hour in between, and one that waits.
const TWICE: &str = "WITH b AS (INSERT INTO batches VALUES (gen_random_uuid(), 'lab', NULL, now()) RETURNING id), \
    e AS (INSERT INTO executions (id, tenant, client_id, batch_id, batch_line, program, contract, submission, \
        submitted_at, phase, epoch, first_started_at, finished_at, boundary_index, commits, state_bytes, rebindings, \
        pressure_rebindings, crashes, compute_us, author, ordinal, seq, recorded_at) \
    SELECT gen_random_uuid(), 'lab', 'turn-' || n, id, 1, 'walk@1', 'bitwise', '\\x00', \
        '2026-01-01 00:00:00+0', CASE n WHEN 9 THEN 'completed' ELSE 'pending' END, 2, \
        CASE n WHEN 9 THEN '2026-01-01 01:00:00+0'::timestamptz END, \
        CASE n WHEN 9 THEN '2026-01-01 02:02:00+0'::timestamptz END, \
        0, 0, 0, 1, 0, 0, 0, 'worker/n1/x', 4, n, now() FROM b, generate_series(9, 10) n RETURNING id, client_id) \
    INSERT INTO placements (execution, epoch, node, started_at, ended_at) \
    SELECT id, epoch, 'n1', began, began + interval '1 minute' FROM e, \
        (VALUES (1, '2026-01-01 01:00:00+0'::timestamptz), (2, '2026-01-01 02:01:00+0')) p (epoch, began) \
    WHERE client_id = 'turn-9'";

#[tokio::test]
async fn the_time_before_a_retry_is_no_running_and_an_array_has_its_ids() {
    let db = database().await;
    sqlx::query(TWICE).execute(&db.pool).await.unwrap();
    let ran = "SELECT string_agg(coalesce(ran::text, 'never'), ' ' ORDER BY client_id DESC) FROM execution_summary";
    assert_eq!(words(&db.pool, ran).await, "00:02:00 never");
    let like = "SELECT ids_like FROM batch_summary";
    assert_eq!(words(&db.pool, like).await, "turn-*");
}
