//! Migrations and views: applied once, again after a change, beside readers, and refused where another
//! version has made the tables.
use std::collections::BTreeSet;
use std::time::Duration;

use crate::support::{database, number, words};
use fiec_recorder::lab_support::{project, short_ledgers};
use sqlx::{AssertSqlSafe, PgPool};

/// Tables, views and functions, each with a digest of its text and its rights.
async fn schema(pool: &PgPool) -> BTreeSet<String> {
    let objects = sqlx::query_scalar(
        "SELECT concat_ws(' ', relname, md5(pg_get_viewdef(CASE relkind WHEN 'v' THEN oid END)), \
         relacl::text) FROM pg_class WHERE relnamespace = 'public'::regnamespace \
         UNION ALL SELECT concat_ws(' ', proname, md5(prosrc), proacl::text) FROM pg_proc \
         WHERE pronamespace = 'public'::regnamespace",
    );
    let objects: Vec<String> = objects.fetch_all(pool).await.unwrap();
    objects.into_iter().collect()
}

/// Asserts that the schema is this one.
async fn is(pool: &PgPool, expected: &BTreeSet<String>) {
    let found = schema(pool).await;
    let other: Vec<_> = found.symmetric_difference(expected).collect();
    assert!(other.is_empty(), "{other:#?}");
}

async fn run(pool: &PgPool, sql: &str) {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    let done = done.execute(pool).await;
    assert!(done.is_ok(), "{sql}: {done:?}");
}

#[tokio::test]
async fn migrations_apply_twice_at_once_and_beside_another_database_of_the_cluster() {
    let db = database().await;
    let applied = "SELECT applied_at::text FROM applied_views";
    let before = words(&db.pool, applied).await;
    fiec_recorder::migrate(&db.pool).await.unwrap();
    assert_eq!(words(&db.pool, applied).await, before, "nothing to apply");
    run(&db.pool, "CREATE DATABASE other").await;
    let url = format!("{}/other", db.url.strip_suffix("/fiec").unwrap());
    let other = fiec_recorder::connect(&url).await.unwrap();
    let both = tokio::join!(
        fiec_recorder::migrate(&other),
        fiec_recorder::migrate(&other)
    );
    both.0.unwrap();
    both.1.unwrap();
    is(&other, &schema(&db.pool).await).await;
}

#[tokio::test]
async fn tables_of_another_version_are_refused_and_left_as_they_are() {
    let db = database().await;
    project(&db.pool, short_ledgers(3, 1).unwrap())
        .await
        .unwrap();
    let older = [
        // An older or a newer version has migrations that this one does not have.
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (23, 'dropped parts', true, '\\x00', 0)",
        // Or others under the same number.
        "DELETE FROM _sqlx_migrations WHERE version > 1; \
         UPDATE _sqlx_migrations SET checksum = '\\x00'",
    ];
    for change in older {
        run(&db.pool, change).await;
        run(&db.pool, "UPDATE applied_views SET digest = ''").await;
        let before = schema(&db.pool).await;
        let refused = fiec_recorder::migrate(&db.pool).await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("another version of fiec"), "{refused}");
        assert!(refused.contains("Do not empty the database"), "{refused}");
        is(&db.pool, &before).await;
        let digests = "SELECT count(*) FROM applied_views WHERE digest = ''";
        assert_eq!(number(&db.pool, digests).await, 1, "no view was applied");
    }
    assert_eq!(number(&db.pool, "SELECT count(*) FROM executions").await, 3);
}

#[tokio::test]
async fn changed_views_are_applied_and_rights_and_views_of_others_stay() {
    let db = database().await;
    run(
        &db.pool,
        "CREATE ROLE dashboards; GRANT SELECT ON execution_summary, late_executions TO dashboards; \
         CREATE VIEW mine AS SELECT execution FROM execution_summary",
    )
    .await;
    let after = schema(&db.pool).await;
    // As an earlier version may have left it: another text, a view that is missing.
    let earlier = "UPDATE applied_views SET digest = ''; DROP VIEW parked_times; \
                   CREATE OR REPLACE FUNCTION fiec_ms(us bigint) RETURNS numeric \
                   LANGUAGE sql AS 'SELECT 0.0'";
    run(&db.pool, earlier).await;
    assert_ne!(schema(&db.pool).await, after);
    fiec_recorder::migrate(&db.pool).await.unwrap();
    is(&db.pool, &after).await;

    // With other columns, which OR REPLACE refuses.
    let earlier = "UPDATE applied_views SET digest = ''; DROP VIEW late_executions; \
                   CREATE VIEW late_executions AS SELECT 1 AS other; \
                   GRANT SELECT ON late_executions TO dashboards";
    run(&db.pool, earlier).await;
    let refused = fiec_recorder::migrate(&db.pool).await.unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("view mine depends on"), "{refused}");
    let other = "SELECT count(*) FROM late_executions WHERE other = 1";
    assert_eq!(number(&db.pool, other).await, 1, "all or nothing");
    run(&db.pool, "DROP VIEW mine").await;
    fiec_recorder::migrate(&db.pool).await.unwrap();
    run(
        &db.pool,
        "CREATE VIEW mine AS SELECT execution FROM execution_summary",
    )
    .await;
    is(&db.pool, &after).await;
}

#[tokio::test]
async fn views_wait_for_a_reader_and_the_recorder_waits_for_neither() {
    let db = database().await;
    run(&db.pool, "UPDATE applied_views SET digest = ''").await;
    let mut reader = db.pool.begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM execution_summary")
        .execute(&mut *reader)
        .await
        .unwrap();
    let pool = db.pool.clone();
    let applying = tokio::spawn(async move { fiec_recorder::migrate(&pool).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while number(&db.pool, waits).await == 0 {
        assert!(!applying.is_finished(), "it did not wait for the reader");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let recorded = project(&db.pool, short_ledgers(3, 1).unwrap()).await;
    assert_eq!(recorded.unwrap().rows, 9);
    assert!(!applying.is_finished(), "it did not wait for the reader");
    reader.commit().await.unwrap();
    applying.await.unwrap().unwrap();
    let digests = "SELECT count(*) FROM applied_views WHERE digest <> ''";
    assert_eq!(number(&db.pool, digests).await, 1);
}
