//! What `why_pending` costs where a hundred thousand wait: not by the clock, which is the machine's,
//! but by the rows and pages that PostgreSQL says it has looked at. The time is printed.
use crate::support::{Database, database, number};
use serde_json::Value;
use sqlx::AssertSqlSafe;

const WAITING: u64 = 100_000;

/// Fifty nodes; executions that want five different things, of which the first two hundred were told
/// of; of a hundred each one was changed, waits for another one, or was bound before; and as many that
/// have ended.
const FILL: &str = "
INSERT INTO nodes (node, status, programs, slots, running, viability)
SELECT 'n' || n, 'up', ARRAY['synthetic@1', 'gemm@1'], 2, 2, 'viable' FROM generate_series(1, 50) n;

INSERT INTO executions (id, tenant, client_id, program, contract, submission, spec, submitted_at,
                        phase, node, epoch, boundary_index, commits, state_bytes, rebindings,
                        pressure_rebindings, crashes, compute_us, finished_at, ordinal, seq, author,
                        recorded_at)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'lab', 'w-' || n,
       CASE n % 3 WHEN 0 THEN 'gemm@1' ELSE 'synthetic@1' END, 'bitwise', '\\x00',
       jsonb_build_object('id', 'w-' || n, 'program', 'synthetic@1',
                          'params', jsonb_build_object('capsules', 9),
                          'requires', jsonb_build_object('memory_bytes', n % 5))
           || CASE WHEN n % 100 = 1 THEN '{\"after\": [{\"id\": \"w-2\", \"on\": \"ok\"}]}'
                   ELSE '{}' END::jsonb,
       now() - (n % 600) * interval '1 second',
       CASE WHEN n > WAITING THEN 'completed' ELSE 'pending' END,
       CASE WHEN n % 100 = 3 THEN 'n1' END, CASE WHEN n % 100 = 3 THEN 1 ELSE 0 END,
       0, 0, 0, 0, 0, 0, 0, CASE WHEN n > WAITING THEN now() END,
       CASE WHEN n % 100 IN (2, 3) THEN 2 ELSE 1 END, n, 'policy/x', now()
FROM generate_series(1, 2 * WAITING) n;

INSERT INTO execution_events (execution, ordinal, at, kind, epoch, who, detail)
SELECT lpad(to_hex(n), 32, '0')::uuid, 2, now(), CASE n % 100 WHEN 2 THEN 'adjusted' ELSE 'yielded' END,
       0, 'ann', 'changed by ann: priority 5'
FROM generate_series(1, 2 * WAITING) n WHERE n % 100 IN (2, 3);

INSERT INTO decisions (execution, epoch, ordinal, at, cause, chosen, candidates, omitted)
SELECT lpad(to_hex(n), 32, '0')::uuid, 1, 1, now() - interval '1 minute', 'initial', 'n1',
       '[{\"node\": \"n1\", \"score\": 1}]', 0
FROM generate_series(1, 2 * WAITING) n WHERE n % 100 = 3;

INSERT INTO waiting_verdicts
SELECT lpad(to_hex(n), 32, '0')::uuid, now(), 'pending for 1.5 s: no node can take it now',
       (SELECT jsonb_agg(jsonb_build_object('node', 'n' || k, 'rejected', jsonb_build_array(
                   'memory is above its limit', 'all of its slots are busy')))
        FROM generate_series(1, 12) k), 38, '[\"a node with more memory\"]'
FROM generate_series(1, 200) n;

ANALYZE;
";

/// A query's plan with what was done.
async fn plan(db: &Database, sql: &str) -> Value {
    let sql = format!("EXPLAIN (ANALYZE, TIMING OFF, BUFFERS, FORMAT JSON) {sql}");
    let plan: Value = sqlx::query_scalar(AssertSqlSafe(sql))
        .fetch_one(&db.pool)
        .await
        .unwrap();
    plan[0].clone()
}

/// Each step of a plan with its type and how many rows it looked at in all, and from which table.
fn steps(node: &Value, found: &mut Vec<(String, f64)>) {
    let number = |field: &str| node[field].as_f64().unwrap_or(0.0);
    let looked_at = number("Actual Rows")
        + number("Rows Removed by Filter")
        + number("Rows Removed by Join Filter")
        + number("Rows Removed by Index Recheck");
    let of = node["Relation Name"].as_str().unwrap_or_default();
    let kind = node["Node Type"].as_str().unwrap_or_default();
    found.push((format!("{kind} {of}"), looked_at * number("Actual Loops")));
    for child in node["Plans"].as_array().into_iter().flatten() {
        steps(child, found);
    }
}

#[tokio::test]
async fn a_hundred_thousand_that_wait_cost_rows_and_pages_in_proportion() {
    let db = database().await;
    let fill = FILL.replace("WAITING", &WAITING.to_string());
    sqlx::raw_sql(AssertSqlSafe(fill))
        .execute(&db.pool)
        .await
        .unwrap();
    let all = "SELECT * FROM why_pending";
    assert_eq!(
        number(&db.pool, &format!("SELECT count(*) FROM ({all}) q")).await,
        i64::try_from(WAITING).unwrap()
    );
    let asked = include_str!("../../../examples/sql/what_is_pending_and_why.sql");
    for sql in [all, asked] {
        let plan = plan(&db, sql).await;
        let pages = ["Shared Hit Blocks", "Shared Read Blocks"];
        let pages: f64 = pages.iter().filter_map(|p| plan["Plan"][p].as_f64()).sum();
        let mut found = Vec::new();
        steps(&plan["Plan"], &mut found);
        eprintln!(
            "{WAITING} wait: {} ms, {pages} pages; {:.60}",
            plan["Execution Time"],
            sql.replace('\n', " ")
        );
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let waiting = WAITING as f64;
        let most = found.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!(most.1 <= 3.0 * waiting, "{most:?} of {found:?}");
        assert!(pages <= waiting, "{pages} pages: {found:?}");
    }
}
