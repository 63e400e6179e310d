//! Upgrades: a migration that was released never changes, and a database of an earlier version keeps its
//! rows.
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use fiec_recorder::lab_support::{project, short_ledgers};
use fiec_schemas::Digest;
use serde_json::Value;
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{database, number, rows, words};

/// Each migration with the BLAKE3-256 of its file. Add a line for a new one. Never change a line: each
/// database remembers what it was made by, and refuses another text.
const RELEASED: [(&str, &str); 13] = [
    (
        "0001_executions.sql",
        "84701e9968da87be666aa380960eea2ccc57f9ae3b3bcb0ef06902fc3755d1fa",
    ),
    (
        "0002_nodes.sql",
        "f480168826358d2f372fa24243ed5880909061e734bd725518b1a7ee7db16c0e",
    ),
    (
        "0003_partitions_and_reader.sql",
        "d6d2112641ff9decf3908857a7d83b9dc2791055c0ed6babe871c59d3c55aa6f",
    ),
    (
        "0004_known_history.sql",
        "d526b7d5dcd84e8072b86259e800188be35aa2d20c5bed6ddbb5b98f936eeff4",
    ),
    (
        "0005_unread_messages.sql",
        "cc728d9bea94ee7790ef687fe146d20914db8ab3fcc665df701ace28329af5e5",
    ),
    (
        "0006_rewound_placements.sql",
        "94daf08e323298d5644031d65d8d4356d80fa910e8d42616e8a3d44b44d8d8e2",
    ),
    (
        "0007_faults.sql",
        "abab2d7bc9152fad7ef1c924d11f9198ebe79d16519dede75f7819530aedf5a7",
    ),
    (
        "0008_roles.sql",
        "2e893f30413e90296225dffba444c0f1e08eaf81dfc819195ddba30d16623191",
    ),
    (
        "0009_waiting_quota.sql",
        "e0e84499374de00035a7b8aa839e80b5e91493ae6b47a464b762929d5ff79325",
    ),
    (
        "0010_ended_submissions.sql",
        "ea07ed6054b860675271ef71ffc07e0f05bd8a9aedea11c69beb13a6dc2bacc5",
    ),
    (
        "0011_refused_with_others.sql",
        "8cfdf95e2b2c7be9e1c02954fe3b63058e9e7ace6dee028e66d6659983b73436",
    ),
    (
        "0012_series.sql",
        "1b8b443adb1d1cb4834c68c6df4d34b49875b607566ccc5c5d38d48ef0513220",
    ),
    (
        "0013_due.sql",
        "3b9fd963fb768b16c4b2a048497141281cc2fa9f917dc5e7054ab89530060a0a",
    ),
];

/// The first migrations make the tables and their partitions: no database has a part of them.
const BASELINE: i64 = 3;

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations"))
}

#[test]
fn a_released_migration_is_never_changed_and_a_new_one_is_listed() {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".sql") && name != "views.sql" {
            let digest = Digest::of(&std::fs::read(&path).unwrap());
            found.insert(name, digest.to_string());
        }
    }
    let released = RELEASED.map(|(name, digest)| (name.to_owned(), digest.to_owned()));
    assert_eq!(found, BTreeMap::from(released));
}

/// Makes a database as an earlier version has made it: by the migrations up to `last`.
async fn earlier(url: &str, last: i64) -> PgPool {
    let pool = fiec_recorder::connect(url).await.unwrap();
    let mut migrator = Migrator::new(folder()).await.unwrap();
    let all = migrator.migrations.iter().cloned();
    migrator.migrations = Cow::Owned(all.filter(|m| m.version <= last).collect());
    migrator.run(&pool).await.unwrap();
    pool
}

/// A value of a column's type.
fn value(kind: &str) -> &'static str {
    match kind {
        "bigint" | "integer" | "real" | "double precision" | "numeric" => "7",
        "boolean" => "true",
        "bytea" => "'\\x07'",
        "jsonb" => "'{\"seven\": 7}'",
        "text" => "'seven'",
        "text[]" => "'{seven}'",
        "timestamp with time zone" => "now()",
        "uuid" => "gen_random_uuid()",
        other => panic!("give a value for columns of type {other}"),
    }
}

/// The columns of each table, without partitions and without the migrator's own table.
async fn columns(pool: &PgPool) -> BTreeMap<String, Vec<(String, String)>> {
    let found = sqlx::query_as::<_, (String, String, String)>(
        "SELECT c.relname::text, a.attname::text, format_type(a.atttypid, NULL) \
         FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid \
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') \
         AND NOT c.relispartition AND c.relname <> '_sqlx_migrations' \
         AND a.attnum > 0 AND NOT a.attisdropped ORDER BY c.relname, a.attnum",
    );
    let mut tables: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (table, column, kind) in found.fetch_all(pool).await.unwrap() {
        tables.entry(table).or_default().push((column, kind));
    }
    tables
}

/// Fills each table that has no row with one that has a value in every column.
async fn fill(pool: &PgPool, tables: &BTreeMap<String, Vec<(String, String)>>) {
    for (table, columns) in tables {
        let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
        let values: Vec<&str> = columns.iter().map(|(_, kind)| value(kind)).collect();
        let (names, values) = (names.join(", "), values.join(", "));
        let insert = format!(
            "INSERT INTO {table} ({names}) SELECT {values} WHERE NOT EXISTS (SELECT FROM {table})"
        );
        let done = sqlx::raw_sql(AssertSqlSafe(insert.clone()));
        let done = done.execute(pool).await;
        assert!(done.is_ok(), "{insert}: {done:?}");
    }
}

/// The rows of each table, in the columns that it had.
async fn content(
    pool: &PgPool,
    tables: &BTreeMap<String, Vec<(String, String)>>,
) -> BTreeMap<String, Vec<Value>> {
    let mut content = BTreeMap::new();
    for (table, columns) in tables {
        let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
        let select = format!("SELECT {} FROM {table} ORDER BY 1", names.join(", "));
        content.insert(table.clone(), rows(pool, &select).await);
    }
    content
}

#[tokio::test]
async fn a_database_of_each_earlier_version_is_migrated_in_place_and_keeps_its_rows() {
    let db = database().await;
    let newest = i64::try_from(RELEASED.len()).unwrap();
    for last in BASELINE..newest {
        let name = format!("version_{last}");
        let create = sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}")));
        create.execute(&db.pool).await.unwrap();
        let url = format!("{}/{name}", db.url.strip_suffix("/fiec").unwrap());
        let pool = earlier(&url, last).await;
        let tables = columns(&pool).await;
        fill(&pool, &tables).await;
        let mut before = content(&pool, &tables).await;
        let long_ago = "UPDATE collection SET since = '2026-01-02 03:04:05+00'";
        sqlx::query(long_ago).execute(&pool).await.unwrap();
        before.extend(content(&pool, &tables).await);
        assert!(before.values().all(|rows| !rows.is_empty()), "{before:#?}");

        fiec_recorder::migrate(&pool).await.unwrap();
        let mut after = content(&pool, &tables).await;
        // The views were not applied before.
        before.remove("applied_views");
        after.remove("applied_views");
        assert_eq!(after, before, "version {last}");
        let applied = "SELECT max(version) FROM _sqlx_migrations WHERE success";
        assert_eq!(number(&pool, applied).await, newest);

        // And it goes on.
        let checkpoint = "UPDATE recorder_checkpoint SET seq = 10, digest = NULL, stored_at = NULL";
        sqlx::query(checkpoint).execute(&pool).await.unwrap();
        project(&pool, short_ledgers(3, 11).unwrap()).await.unwrap();
        assert_eq!(number(&pool, "SELECT count(*) FROM executions").await, 4);
    }
}

#[tokio::test]
async fn history_of_a_database_that_is_migrated_is_known_since_its_tables_were_made() {
    let db = database().await;
    let create = sqlx::raw_sql("CREATE DATABASE before_known_history");
    create.execute(&db.pool).await.unwrap();
    let server = db.url.strip_suffix("/fiec").unwrap();
    let pool = earlier(&format!("{server}/before_known_history"), 3).await;
    let made = "UPDATE collection SET since = '2026-01-02 03:04:05+00'";
    sqlx::query(made).execute(&pool).await.unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    let known =
        "SELECT (history_since = since AND NOT isfinite(released_before))::text FROM collection";
    assert_eq!(words(&pool, known).await, "true");
}

#[tokio::test]
async fn a_recorder_without_its_tables_ends_and_names_the_command() {
    let (_servers, broker, pool) = crate::live::servers().await;
    let older = sqlx::query("DROP TABLE unread_messages");
    older.execute(&pool).await.unwrap();
    let (_stop, recorder) = crate::live::start(&broker, &pool);
    let ended = tokio::time::timeout(std::time::Duration::from_secs(60), recorder).await;
    let error = ended
        .expect("it goes on without its tables")
        .unwrap()
        .unwrap_err();
    assert!(error.to_string().contains("run `fiec setup`"), "{error}");
}
