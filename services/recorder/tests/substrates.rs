//! What a node says of its machine, as the views show it, against a real PostgreSQL.
use crate::support::{database, rows};
use fiec_schemas::NodeDescriptor;
use serde_json::{Value, json};
use sqlx::PgPool;

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

#[tokio::test]
async fn a_nodes_places_memory_and_profile_are_rows() {
    let db = database().await;
    let pool = db.pool.clone();
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

/// A proof of one place, an hour ago and for as long from now.
async fn proved(pool: &PgPool, seq: i64, substrate: &str, passed: bool) {
    sqlx::query(
        "INSERT INTO node_proofs SELECT $1, 'n1', gen_random_uuid(), $2, c, 1, '\\x00', \
         $3, CASE WHEN $3 THEN '' ELSE 'canary dot' END, 1, 'cpu', '\\x00', NULL, \
         now() - interval '1 hour', now() + interval '1 hour', now(), 'U', 's' \
         FROM unnest(ARRAY['bitwise', 'bounded']) c",
    )
    .bind(seq)
    .bind(substrate)
    .bind(passed)
    .execute(pool)
    .await
    .unwrap();
}

/// `lost`: the contract, and the device that lost it, if it is not all of the node.
async fn event(
    pool: &PgPool,
    seq: i64,
    what: &str,
    detail: &str,
    lost: Option<(&str, Option<&str>)>,
) {
    let (contract, substrate) = lost.unzip();
    sqlx::query(
        "INSERT INTO node_events (seq, node, what, detail, at, contract, substrate) \
         VALUES ($1, 'n1', $2, $3, now(), $4, $5)",
    )
    .bind(seq)
    .bind(what)
    .bind(detail)
    .bind(contract)
    .bind(substrate.flatten())
    .execute(pool)
    .await
    .unwrap();
}

/// `place contract standing [lost with]` in order.
async fn trust(pool: &PgPool) -> Vec<String> {
    let sql =
        "SELECT concat_ws(' ', substrate, contract, standing, lost_with) AS t FROM node_trust";
    let all = rows(pool, &format!("{sql} ORDER BY substrate, contract")).await;
    let text = all.iter().map(|row| row["t"].as_str().unwrap().to_owned());
    text.collect()
}

#[tokio::test]
async fn a_device_that_has_lost_its_contract_has_lost_it_alone() {
    let db = database().await;
    let pool = db.pool.clone();
    sqlx::query("INSERT INTO nodes (node, descriptor) VALUES ('n1', $1)")
        .bind(json!({"substrates": [{"id": "GPU-1"}, {"id": "GPU-10"}, {"id": "host"}]}))
        .execute(&pool)
        .await
        .unwrap();
    let all = |standing: &str| {
        ["GPU-1", "GPU-10", "host"]
            .iter()
            .flat_map(|place| ["bitwise", "bounded"].map(|c| format!("{place} {c} {standing}")))
            .collect::<Vec<_>>()
    };
    assert_eq!(trust(&pool).await, all("unproved"));
    for (seq, place) in [(1, "GPU-1"), (2, "GPU-10"), (3, "host")] {
        proved(&pool, seq, place, true).await;
    }
    assert_eq!(trust(&pool).await, all("proved"));
    // Whatever was proved since, only a release gives it back.
    event(
        &pool,
        4,
        "quarantined",
        "bitwise on GPU-1: canary dot",
        Some(("bitwise", Some("GPU-1"))),
    )
    .await;
    proved(&pool, 5, "GPU-1", true).await;
    let mut lost = all("proved");
    lost[0] = "GPU-1 bitwise quarantined GPU-1".to_owned();
    assert_eq!(trust(&pool).await, lost);
    let why = rows(
        &pool,
        "SELECT why FROM node_trust WHERE standing = 'quarantined'",
    )
    .await;
    assert_eq!(why[0]["why"], "bitwise on GPU-1: canary dot");
    // Its host's is all of the node's.
    event(
        &pool,
        6,
        "quarantined",
        "bitwise: it computed other bits",
        Some(("bitwise", None)),
    )
    .await;
    let bitwise = trust(&pool).await;
    let bitwise: Vec<_> = bitwise.iter().filter(|t| t.contains("bitwise")).collect();
    assert!(
        bitwise.iter().all(|t| t.ends_with("quarantined node")),
        "{bitwise:?}"
    );
    event(&pool, 7, "released", "bitwise given back by ann", None).await;
    assert_eq!(trust(&pool).await, all("outdated"));
    sqlx::query("UPDATE node_proofs SET proved_at = now() + interval '1 minute'")
        .execute(&pool)
        .await
        .unwrap();
    proved(&pool, 8, "GPU-1", false).await;
    sqlx::query("UPDATE node_proofs SET proved_at = now() + interval '1 minute'")
        .execute(&pool)
        .await
        .unwrap();
    let mut failed = all("proved");
    failed[0] = "GPU-1 bitwise failed".to_owned();
    failed[1] = "GPU-1 bounded failed".to_owned();
    assert_eq!(trust(&pool).await, failed);
}
