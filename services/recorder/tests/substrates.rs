//! What a node says of its machine, as the views show it, against a real PostgreSQL.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_dev_servers::{NoProgress, Postgres, PostgresOptions, locate_postgres};
use fiec_schemas::NodeDescriptor;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool};

/// A descriptor that the type itself reads and writes, so that no field is only the test's.
fn descriptor() -> Value {
    let text = json!({
        "v": 1, "node": "n1", "instance": uuid::Uuid::from_u128(1), "host": "h", "pid": 1,
        "version": "0", "started_at": "2026-01-01T00:00:00.000000Z", "shard": 0, "slots": 2,
        "cpus": 8, "isa": "x86_64+avx2+fma", "memory_limit_bytes": 1u64 << 30,
        "memory_limit_source": "declared", "programs": [], "thresholds": {},
        "substrates": [
            {"id": "host", "kind": "cpu", "name": "cpu", "memory_bytes": 1u64 << 30},
            {"id": "GPU-0", "kind": "gpu", "name": "NVIDIA H100", "memory_bytes": 80u64 << 30,
             "device": {"compute_capability": "9.0", "multiprocessors": 132,
                        "bus": "0000:1b:00.0", "contracts": ["bitwise"],
                        "to_device_bytes_s": 50_000_000_000u64,
                        "from_device_bytes_s": 40_000_000_000u64}},
        ],
        "profile": {
            "cores": 4, "kernel": "Linux 6.1", "contracts": ["bitwise", "bounded"],
            "confinement": ["container"],
            "libraries": {"nvidia_driver": "550.1", "cuda_driver": "12.4"},
            "memory": [
                {"id": 0, "tier": "local", "cpus": "0-7", "memory_bytes": 1u64 << 34,
                 "copy_bytes_s": 9_000_000_000u64, "latency_ns": 95.5, "sample_bytes": 1 << 24},
                {"id": 1, "tier": "far", "cpus": "", "memory_bytes": 1u64 << 35,
                 "firmware_read_bytes_s": 30_000_000_000u64, "firmware_read_ns": 250,
                 "missing": "not within the time"},
            ],
            "measured": {"at": "2026-01-01T00:00:00.000000Z", "took_ms": 80,
                         "machine": "00".repeat(32)},
        },
    });
    let typed: NodeDescriptor = serde_json::from_value(text).unwrap();
    serde_json::to_value(&typed).unwrap()
}

async fn rows(pool: &PgPool, sql: &str) -> Vec<Value> {
    sqlx::query_scalar(AssertSqlSafe(format!("SELECT to_jsonb(q) FROM ({sql}) q")))
        .fetch_all(pool)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_nodes_places_memory_and_profile_are_rows() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let install = locate_postgres(&NoProgress).await.unwrap();
    let mut options = PostgresOptions::new(install, folder.path().join("pg"));
    options.durable = false;
    let server = Postgres::start(options).await.unwrap();
    let pool = fiec_recorder::connect(&server.url()).await.unwrap();
    fiec_recorder::migrate(&pool).await.unwrap();
    sqlx::query(
        "INSERT INTO nodes (node, status, host, cpus, isa, memory_limit_bytes, descriptor) \
         VALUES ('n1', 'up', 'h', 8, 'x86_64+avx2+fma', 1073741824, $1)",
    )
    .bind(descriptor())
    .execute(&pool)
    .await
    .unwrap();
    // One that has never said anything.
    sqlx::query("INSERT INTO nodes (node) VALUES ('n2')")
        .execute(&pool)
        .await
        .unwrap();

    let places = rows(&pool, "SELECT * FROM node_substrates ORDER BY substrate").await;
    assert_eq!(places.len(), 2);
    let device = &places[0];
    for (column, value) in [
        ("substrate", json!("GPU-0")),
        ("kind", json!("gpu")),
        ("memory_bytes", json!(80u64 << 30)),
        ("compute_capability", json!("9.0")),
        ("multiprocessors", json!(132)),
        ("bus", json!("0000:1b:00.0")),
        ("contracts", json!(["bitwise"])),
        ("from_device_bytes_s", json!(40_000_000_000u64)),
        ("driver", json!("550.1")),
        ("cuda", json!("12.4")),
        ("holds", json!(0)),
    ] {
        assert_eq!(device[column], value, "{column} of {device}");
    }
    assert_eq!(places[1]["contracts"], json!(["bitwise", "bounded"]));
    assert_eq!(places[1]["to_device_bytes_s"], Value::Null);

    let memory = rows(&pool, "SELECT * FROM node_memory ORDER BY memory_node").await;
    assert_eq!(memory[0]["copy_bytes_s"], 9_000_000_000u64);
    assert_eq!(memory[0]["latency_ns"], 95.5);
    assert_eq!(memory[1]["tier"], "far");
    assert_eq!(memory[1]["copy_bytes_s"], Value::Null);
    assert_eq!(memory[1]["not_measured_because"], "not within the time");

    let profiles = rows(&pool, "SELECT * FROM node_profiles ORDER BY node").await;
    assert_eq!(profiles[0]["confinement"], json!(["container"]));
    assert_eq!(profiles[0]["bandwidth_bytes_s"], 9_000_000_000u64);
    assert_eq!(profiles[0]["cores"], 4);
    assert_eq!(profiles[1]["cores"], Value::Null);

    let words = rows(
        &pool,
        r#"SELECT fiec_candidates_in_words('[{"node":"n1","substrate":"GPU-0","score":3.5},
            {"node":"n2","rejected":["it has no device"]}]', 0) AS words"#,
    )
    .await;
    assert_eq!(
        words[0]["words"],
        "n1 (GPU-0): acceptable, score 3.5000\nn2: rejected, it has no device"
    );
    let asked = include_str!("../../../examples/sql/which_devices_are_there.sql");
    sqlx::query(asked).fetch_all(&pool).await.unwrap();
}
