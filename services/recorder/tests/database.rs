//! The projection against a real PostgreSQL, without a broker.
use std::sync::{Arc, LazyLock};

use crate::support::{as_role, database, number, words};
use fiec_broker::feed::FeedItem;
use fiec_recorder::lab_support::{
    LedgerWriter, clear, plain_copy, project, project_carefully, short_ledgers,
};
use fiec_recorder::missing::{self, LedgerEnd};
use fiec_schemas::event::Decision;
use fiec_schemas::event::Evidence;
use fiec_schemas::{
    BoundaryEvent, Candidate, Cause, Digest, Event, ExecutionId, InstanceId, NodeId, RequestKind,
    Signal, Submission, Tenant, Threshold, Timestamp,
};
use sqlx::{AssertSqlSafe, PgPool};

/// Every row of the history as text, to see whether anything changed.
async fn everything(pool: &PgPool) -> String {
    let mut all = String::new();
    for table in [
        "executions",
        "placements",
        "decisions",
        "rebindings",
        "boundaries",
        "execution_events",
    ] {
        let sql = format!(
            "SELECT coalesce(string_agg(t::text, '|' ORDER BY t::text), '') FROM {table} t"
        );
        all.push_str(&words(pool, &sql).await);
    }
    all
}

fn at(ms: i64) -> Timestamp {
    static BASE: LazyLock<i64> = LazyLock::new(|| Timestamp::now().micros());
    Timestamp::from_micros(*BASE + ms * 1_000)
}

fn bound(epoch: u64, node: &str, instance: InstanceId, cause: Cause) -> Event {
    let node: NodeId = node.parse().unwrap();
    let other = Candidate {
        node: "busy".parse().unwrap(),
        substrate: None,
        score: None,
        rejected: vec!["memory is above its limit".into()],
    };
    let chosen = Candidate {
        node: node.clone(),
        substrate: None,
        score: Some(0.75),
        rejected: Vec::new(),
    };
    let decision = Some(Decision {
        candidates: vec![chosen, other],
        omitted: 1,
        entrusted: None,
    });
    Event::Bound {
        epoch,
        node,
        instance,
        substrate: "host".into(),
        cause,
        decision,
    }
}

/// Bound to a, started after 1 ms and said so after 3, one boundary, handed over to b under
/// pressure, started 4 ms later.
fn handover(first: u64) -> (ExecutionId, Vec<FeedItem>) {
    let tenant = Tenant::new("lab").unwrap();
    let submission =
        Submission::parse(br#"{"id":"job","program":"synthetic@1","labels":{"who":"<ada>"}}"#);
    let id = ExecutionId(uuid::Uuid::now_v7());
    let mut w = LedgerWriter::new(tenant, id, Arc::new(submission.unwrap()), at(0));
    let (a, b) = (InstanceId::random(), InstanceId::random());
    let pressure = Cause::Pressure {
        evidence: Box::new(Evidence {
            node: "a".parse().unwrap(),
            signal: Signal::Memory,
            device: None,
            value: 0.93,
            threshold: Threshold {
                high: 0.9,
                low: 0.7,
                dwell_ms: 500,
            },
            since: at(20),
            vector: Vec::new(),
        }),
    };
    let boundary = |index, ms| {
        Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&[7]),
            bytes: 100,
            computed_at: at(ms),
            compute_us: 5_000,
            of: Some(9),
            note: Some("going well".into()),
            outputs: Vec::new(),
            energy: fiec_schemas::energy::Energy::of(Some(ms as u64 * 1_000), None),
        })
    };
    let steps = vec![
        (vec![Event::Submitted, bound(1, "a", a, Cause::Initial)], 0),
        (
            vec![Event::Started {
                epoch: 1,
                computing_since: at(1),
            }],
            3,
        ),
        (vec![boundary(1, 30)], 31),
        (
            vec![
                boundary(2, 50),
                Event::Yielded {
                    cause: pressure.clone(),
                    computed_until: at(50),
                },
                bound(2, "b", b, pressure),
            ],
            51,
        ),
        (
            vec![Event::Started {
                epoch: 2,
                computing_since: at(54),
            }],
            55,
        ),
    ];
    let items = steps
        .into_iter()
        .zip(first..)
        .map(|((events, ms), seq)| w.append(events, "worker/a/x", at(ms), seq).unwrap())
        .collect();
    (id, items)
}

#[tokio::test]
async fn a_batch_applied_again_changes_nothing() {
    let db = database().await;
    let (_, items) = handover(1);
    project(&db.pool, items.clone()).await.unwrap();
    let before = everything(&db.pool).await;
    assert_eq!(
        number(
            &db.pool,
            "SELECT seq FROM recorder_checkpoint WHERE stream = 'FIEC_LEDGER'"
        )
        .await,
        5
    );
    // The checkpoint is lost: the rows themselves are recognized.
    sqlx::query("UPDATE recorder_checkpoint SET seq = 0")
        .execute(&db.pool)
        .await
        .unwrap();
    let refused = project(&db.pool, items).await.unwrap_err();
    assert!(refused.to_string().contains("Conflict"), "{refused}");
    assert_eq!(everything(&db.pool).await, before);
}

#[tokio::test]
async fn a_ledger_gives_the_same_history_in_one_batch_and_message_by_message() {
    let db = database().await;
    let (_, items) = handover(1);
    project(&db.pool, items.clone()).await.unwrap();
    let at_once = everything(&db.pool).await;
    clear(&db.pool).await.unwrap();
    for item in items {
        project(&db.pool, vec![item]).await.unwrap();
    }
    assert_eq!(everything(&db.pool).await, at_once);
}

#[tokio::test]
async fn a_handover_is_told_by_the_views() {
    let db = database().await;
    let (id, items) = handover(1);
    project(&db.pool, items).await.unwrap();
    let row = words(
        &db.pool,
        "SELECT concat_ws(' ', from_node, to_node, signal, value, boundary, gap_ms) \
         FROM rebinding_history",
    );
    assert_eq!(row.await, "a b memory 0.9300 2 4.000");
    let row = words(
        &db.pool,
        "SELECT string_agg(concat_ws(' ', epoch, node, end_reason), ', ' ORDER BY epoch) \
         FROM placement_timeline",
    );
    assert_eq!(row.await, "1 a pressure, 2 b");
    let row = words(
        &db.pool,
        "SELECT concat_ws(' ', client_id, phase, node, boundary, boundaries_in_all, commits, \
         labels ->> 'who') FROM execution_summary",
    );
    assert_eq!(row.await, "job started b 2 9 2 <ada>");
    let waited = "SELECT (1000 * extract(epoch FROM waited))::bigint FROM execution_summary";
    assert_eq!(number(&db.pool, waited).await, 1, "until its first capsule");
    let row = words(
        &db.pool,
        "SELECT string_agg(concat_ws(' ', node, measured, host_joules, \
         coalesce(device_joules::text, '-')), ', ' ORDER BY node) FROM energy_by_node",
    );
    assert_eq!(row.await, "a 1 0.080000 -, b 0 -");
    let row = words(
        &db.pool,
        "SELECT concat_ws(' ', host_joules, energy_coverage) FROM execution_summary",
    );
    assert_eq!(row.await, "0.080000 1.0000");
    let page = report(&db.pool, id).await.unwrap();
    assert_eq!(
        page.matches("<svg").count(),
        3,
        "location, capsules, pressure"
    );
    assert!(page.contains("memory on a was 93.0 %") && page.contains("4.000 ms"));
    assert!(page.contains("0.080000 J of hosts, measured in 100 %"));
    assert!(
        page.contains("&lt;ada&gt;") && !page.contains("<ada>"),
        "text is escaped"
    );
    for outside in ["src=", "href=", "url(", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let nobody = ExecutionId(uuid::Uuid::now_v7());
    let missing = report(&db.pool, nobody).await.unwrap_err();
    assert!(missing.to_string().contains("is not recorded"), "{missing}");
}

async fn report(pool: &PgPool, id: ExecutionId) -> fiec_recorder::Result<String> {
    let lacks = missing::read(pool, id, &LedgerEnd::Absent).await.unwrap();
    fiec_recorder::report::render(pool, id, &lacks).await
}

#[tokio::test]
async fn what_waits_is_shown_with_the_reasons() {
    let db = database().await;
    let (_, items) = handover(1);
    project(&db.pool, items.into_iter().take(1).collect())
        .await
        .unwrap();
    let why = words(
        &db.pool,
        "SELECT why || '/' || last_candidates FROM why_pending",
    )
    .await;
    assert!(
        why.contains("bound to a, which has not started it"),
        "{why}"
    );
    assert!(
        why.contains("busy: rejected, memory is above its limit"),
        "{why}"
    );
    assert!(why.contains("and 1 more"), "{why}");
}

#[tokio::test]
async fn a_gap_in_the_ordinals_is_stated_and_bridged() {
    let db = database().await;
    let (_, mut items) = handover(1);
    items.drain(1..3);
    project(&db.pool, items).await.unwrap();
    let gap = words(
        &db.pool,
        "SELECT first_missing || '-' || last_missing FROM ledger_gaps",
    )
    .await;
    assert_eq!(gap, "2-3");
    assert_eq!(number(&db.pool, "SELECT ordinal FROM executions").await, 5);
}

#[tokio::test]
async fn why_tells_the_cause_the_evidence_and_the_candidates_of_the_last_binding() {
    let db = database().await;
    let (id, items) = handover(1);
    project(&db.pool, items).await.unwrap();
    let row = words(
        &db.pool,
        &format!("SELECT to_jsonb(w)::text FROM why('{id}') w"),
    )
    .await;
    let row: serde_json::Value = serde_json::from_str(&row).unwrap();
    let is = |field: &str, value: serde_json::Value| assert_eq!(row[field], value, "{field}");
    is("phase", "started".into());
    is("node", "b".into());
    is("from_node", "a".into());
    is("cause", "pressure".into());
    is("omitted", 1.into());
    let evidence: Evidence = serde_json::from_value(row["evidence"].clone()).unwrap();
    assert_eq!((evidence.signal, evidence.value), (Signal::Memory, 0.93));
    assert_eq!((evidence.threshold.high, evidence.since), (0.9, at(20)));
    let candidates: Vec<Candidate> = serde_json::from_value(row["candidates"].clone()).unwrap();
    assert_eq!(candidates[1].rejected, ["memory is above its limit"]);
    let said = row["cause_in_words"].as_str().unwrap();
    assert!(said.contains("memory on a was 93.0 %"), "{said}");
}

#[tokio::test]
async fn short_executions_become_the_rows_that_plain_copy_writes() {
    let db = database().await;
    let items = short_ledgers(200, 1).unwrap();
    let copied = plain_copy(&db.pool, &items).await.unwrap();
    let floor = everything(&db.pool).await;
    clear(&db.pool).await.unwrap();
    let ours = project(&db.pool, items).await.unwrap();
    assert_eq!((ours.rows, ours.messages), (600, 400));
    assert_eq!(copied.rows, 600);
    assert_eq!(everything(&db.pool).await, floor);
}

/// Records messages that PostgreSQL would refuse as they are: each in a batch of its own.
async fn projects(pool: &PgPool, items: Vec<FeedItem>) {
    for item in items {
        let seq = item.seq;
        let recorded = project(pool, vec![item]);
        let recorded = tokio::time::timeout(std::time::Duration::from_secs(60), recorded).await;
        assert!(recorded.is_ok(), "message {seq} is tried again for ever");
        recorded.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_sum_of_energies_beyond_bigint_becomes_its_greatest_value() {
    let db = database().await;
    let (_, mut items) = handover(1);
    for item in &mut items {
        for energy in [r#""host_uj":30000"#, r#""host_uj":50000"#] {
            let greatest = format!(r#""host_uj":{}"#, u64::MAX);
            item.header = item.header.replace(energy, &greatest);
        }
    }
    projects(&db.pool, items).await;
    let joules = "SELECT host_uj FROM placements WHERE epoch = 1";
    assert_eq!(number(&db.pool, joules).await, i64::MAX);
}

#[tokio::test]
async fn times_before_the_calendar_of_postgresql_become_its_first() {
    let db = database().await;
    let (_, mut items) = handover(1);
    for item in &mut items {
        let time = at(0).to_string();
        assert!(item.header.contains(&time));
        item.header = item.header.replace(&time, "-009998-01-01T00:00:00Z");
    }
    projects(&db.pool, items).await;
    let first = "SELECT count(*) FROM executions JOIN placements ON execution = id \
                 WHERE extract(julian FROM submitted_at AT TIME ZONE 'UTC') = 0 \
                 AND extract(julian FROM placements.bound_at AT TIME ZONE 'UTC') = 0 \
                 AND executions.ordinal = 5";
    assert_eq!(number(&db.pool, first).await, 1);
}

/// A node is bound again on top of a message that the broker then loses: that binding is void. The
/// holder heals its ledger, and the execution is bound with the epoch of the void binding.
fn void_binding() -> Vec<FeedItem> {
    let tenant = Tenant::new("lab").unwrap();
    let submission = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
    let id = ExecutionId(uuid::Uuid::now_v7());
    let (a, b, c) = (
        InstanceId::random(),
        InstanceId::random(),
        InstanceId::random(),
    );
    let lost = || Cause::Lost { silent_ms: 5_000 };
    let resumed = |who: &str| Event::Requested {
        who: who.into(),
        what: RequestKind::Pause,
    };
    let begin = || {
        let mut w = LedgerWriter::new(tenant.clone(), id, Arc::clone(&submission), at(0));
        let first = vec![Event::Submitted, bound(1, "a", a, Cause::Initial)];
        let started = vec![Event::Started {
            epoch: 1,
            computing_since: at(1),
        }];
        let items = [
            w.append(first, "policy/p", at(0), 1).unwrap(),
            w.append(started, &format!("worker/a/{a}"), at(1), 2)
                .unwrap(),
        ];
        (w, items)
    };
    let (mut other, items) = begin();
    other
        .append(vec![resumed("x")], "policy/p", at(2), 3)
        .unwrap();
    let void = vec![bound(2, "b", b, lost())];
    let void = other.append(void, "policy/p", at(3), 3).unwrap();
    let (mut w, _) = begin();
    for seq in 3..6 {
        w.append(vec![resumed("y")], "policy/p", at(2), seq)
            .unwrap();
    }
    let healed = Event::Healed {
        kept: 2,
        lost: 3,
        over: Digest::of(b""),
    };
    let healed = w
        .append(vec![healed], &format!("worker/a/{a}"), at(4), 4)
        .unwrap();
    let valid = vec![bound(2, "c", c, lost())];
    let valid = w.append(valid, "policy/p", at(5), 5).unwrap();
    items.into_iter().chain([void, healed, valid]).collect()
}

#[tokio::test]
async fn the_epoch_of_a_void_binding_is_given_out_again() {
    let db = database().await;
    let nodes = "SELECT string_agg(concat_ws(' ', epoch, node, end_reason), ', ' ORDER BY epoch) \
                 FROM placements";
    for at_once in [true, false] {
        let items = void_binding();
        if at_once {
            project(&db.pool, items).await.unwrap();
        } else {
            projects(&db.pool, items).await;
        }
        assert_eq!(words(&db.pool, nodes).await, "1 a lost, 2 c", "{at_once}");
        let last = "SELECT node || ' ' || epoch || ' ' || ordinal FROM executions";
        assert_eq!(words(&db.pool, last).await, "c 2 7");
        let moves = "SELECT string_agg(from_node || ' ' || to_node, ', ') FROM rebindings";
        assert_eq!(words(&db.pool, moves).await, "a c");
        clear(&db.pool).await.unwrap();
    }
}

/// The whole life of an execution in two messages.
fn life(id: ExecutionId, submitted: Timestamp, node: &str, first: u64) -> Vec<FeedItem> {
    let submission = Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap());
    let tenant = Tenant::new("lab").unwrap();
    let mut w = LedgerWriter::new(tenant, id, submission, submitted);
    let instance = InstanceId::random();
    let begin = vec![Event::Submitted, bound(1, node, instance, Cause::Initial)];
    let end = vec![
        Event::Started {
            epoch: 1,
            computing_since: submitted,
        },
        Event::Completed {
            result: serde_json::json!({ "by": node }),
            object: None,
            computed_until: submitted,
            capsules: 1,
            outputs: Vec::new(),
            energy: None,
        },
    ];
    let author = format!("worker/{node}/{instance}");
    vec![
        w.append(begin, "policy/p", submitted, first).unwrap(),
        w.append(end, &author, submitted, first + 1).unwrap(),
    ]
}

#[tokio::test]
async fn the_rows_of_an_ended_execution_stay_when_its_id_begins_anew() {
    let db = database().await;
    for at_once in [true, false] {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let once = life(id, at(0), "a", 1);
        let again = life(id, at(60_000), "b", 3);
        if at_once {
            let both = once.into_iter().chain(again).collect();
            project(&db.pool, both).await.unwrap();
        } else {
            project(&db.pool, once).await.unwrap();
            for item in again {
                project_carefully(&db.pool, vec![item]).await.unwrap();
            }
        }
        let lost = number(&db.pool, "SELECT count(*) FROM lost_rows").await;
        assert_eq!(lost, 0, "rows of the first run were moved away");
        let row = "SELECT concat_ws(' ', phase, result ->> 'by', node, ordinal, \
                   finished_at = submitted_at) FROM executions";
        assert_eq!(words(&db.pool, row).await, "completed a a 2 t", "{at_once}");
        let nodes = "SELECT string_agg(node, ', ') FROM placements";
        assert_eq!(words(&db.pool, nodes).await, "a");
        let stated = "SELECT string_agg(first_missing || ' ' || reason, ', ') FROM ledger_gaps";
        assert_eq!(
            words(&db.pool, stated).await,
            "1 a second run under the id of an execution that had ended"
        );
        clear(&db.pool).await.unwrap();
    }
}

#[tokio::test]
async fn an_end_that_the_broker_lost_is_withdrawn_when_the_same_run_goes_on() {
    let db = database().await;
    let id = ExecutionId(uuid::Uuid::now_v7());
    project(&db.pool, life(id, at(0), "a", 1)).await.unwrap();
    // The same submission was delivered again: its time is the same.
    let mut again = life(id, at(0), "b", 3);
    for item in &mut again {
        item.stored_at = at(60_000);
    }
    project_carefully(&db.pool, again).await.unwrap();
    let row = "SELECT concat_ws(' ', phase, result ->> 'by', node) FROM executions";
    assert_eq!(words(&db.pool, row).await, "completed b b");
}

/// The relations that a role may read, without partitions.
async fn readable(pool: &PgPool, role: &str) -> i64 {
    let sql = format!(
        "SELECT count(*) FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace \
         AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition \
         AND has_table_privilege('{role}', c.oid, 'SELECT')"
    );
    number(pool, &sql).await
}

/// Runs statements that the role may not run.
async fn refused(pool: &PgPool, statements: &[&str]) {
    for sql in statements {
        let done = sqlx::raw_sql(AssertSqlSafe((*sql).to_owned()))
            .execute(pool)
            .await;
        let error = done.expect_err(sql);
        let code = error.as_database_error().and_then(|e| e.code());
        assert_eq!(code.as_deref(), Some("42501"), "{sql}: {error}");
    }
}

#[tokio::test]
async fn the_recorder_needs_no_superuser_and_a_reader_sees_no_state() {
    let db = database().await;
    let recorder = as_role(&db.pool, "fiec_recorder").await;
    let powers = "SELECT count(*) FROM pg_roles WHERE rolname IN ('fiec_recorder', 'fiec_reader') \
                  AND NOT (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls OR rolreplication)";
    assert_eq!(number(&db.pool, powers).await, 2);

    // It records, in days that have no partition too, and drops what is too old.
    let (_, moved) = handover(1);
    project(&recorder, moved).await.unwrap();
    project(&recorder, short_ledgers(200, 100).unwrap())
        .await
        .unwrap();
    assert_eq!(
        number(&recorder, "SELECT count(*) FROM executions").await,
        201
    );
    let partitions = "SELECT count(*) FROM pg_class WHERE relispartition AND relkind = 'r'";
    let before = number(&db.pool, partitions).await;
    let ensure = "SELECT fiec_ensure_partitions('2030-01-01', '2030-01-03')::bigint";
    assert_eq!(number(&recorder, ensure).await, 12);
    let keep = "SELECT count(*) FROM boundaries WHERE committed_at > '2030-01-01'";
    assert_eq!(number(&recorder, keep).await, 0);
    let drop = "SELECT fiec_drop_partitions('2030-01-04')::bigint";
    assert_eq!(number(&recorder, drop).await, 12 + before);

    let reader = as_role(&db.pool, "fiec_reader").await;
    let nobody = [
        "COPY executions TO PROGRAM 'cat > /dev/null'",
        "COPY (SELECT 1) TO '/tmp/fiec-not-written'",
        "CREATE TABLE mine (x int)",
        "CREATE FUNCTION to_char(date, text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'",
        "DROP TABLE executions",
        "ALTER TABLE executions ADD COLUMN mine int",
        "TRUNCATE executions",
        "UPDATE _sqlx_migrations SET checksum = ''",
        "UPDATE applied_views SET digest = ''",
        "ALTER ROLE fiec PASSWORD 'mine'",
    ];
    refused(&recorder, &nobody).await;
    refused(&reader, &nobody).await;

    let states = [
        "SELECT * FROM boundary_state",
        "SELECT state FROM boundary_state",
        "SELECT * FROM results_to_copy",
        "SELECT fiec_ensure_partitions('2030-01-01', '2030-01-03')",
    ];
    refused(&reader, &states).await;
    // Everything else it reads, and the page's views work.
    let hidden = readable(&db.pool, "fiec").await - readable(&db.pool, "fiec_reader").await;
    assert_eq!(hidden, 2);
    for view in [
        "execution_summary",
        "placement_timeline",
        "why_pending",
        "node_trust",
    ] {
        let sql = format!("SELECT count(*) FROM {view}");
        assert!(number(&reader, &sql).await >= 0, "{view}");
    }
    assert_eq!(
        number(&reader, "SELECT count(*) FROM execution_summary").await,
        201
    );
}

#[tokio::test]
async fn an_owner_without_other_rights_sets_up_what_a_recorder_writes() {
    let db = database().await;
    for sql in [
        "CREATE ROLE plain_owner LOGIN",
        "CREATE DATABASE owned OWNER plain_owner",
    ] {
        sqlx::raw_sql(sql).execute(&db.pool).await.unwrap();
    }
    let plain = as_role(&db.pool, "plain_owner").await;
    let owned = |pool: &PgPool| {
        let options = pool.connect_options().as_ref().clone();
        PgPool::connect_with(options.database("owned"))
    };
    let recorder = as_role(&db.pool, "fiec_recorder").await;
    let (plain, recorder) = (
        owned(&plain).await.unwrap(),
        owned(&recorder).await.unwrap(),
    );
    fiec_recorder::migrate(&plain).await.unwrap();
    project(&recorder, handover(1).1).await.unwrap();
    let ensure = "SELECT fiec_ensure_partitions('2030-01-01', '2030-01-03')::bigint";
    let version = "SELECT current_setting('server_version_num')::bigint";
    if number(&db.pool, version).await >= 150_000 {
        assert_eq!(number(&recorder, ensure).await, 12);
    } else {
        // There the schema belongs to another user, and everybody may add to it.
        refused(&recorder, &[ensure]).await;
    }
}
