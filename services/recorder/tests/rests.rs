//! Executions that rest after a message that the broker has lost: the tables say what the ledger says,
//! though no message follows.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use fiec_recorder::lab_support::LedgerWriter;
use fiec_schemas::{Cause, Event, ExecutionId, Fault, Submission, Tenant, Timestamp, subjects};
use sqlx::PgPool;

use crate::live::{publish, servers, start, until};
use crate::support::{bound, boundary, words};

fn started(epoch: u64) -> Event {
    Event::Started {
        epoch,
        computing_since: Timestamp::now(),
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

async fn stands(pool: &PgPool, id: ExecutionId) -> String {
    let row = format!(
        "SELECT concat_ws(' ', phase, paused_by, ordinal, epoch, node, boundary_index, commits, \
         (SELECT count(*) FROM boundaries b WHERE b.execution = id), \
         (SELECT string_agg(concat_ws(' ', p.epoch, p.node, p.end_reason), ', ' ORDER BY p.epoch) \
          FROM placements p WHERE p.execution = id)) FROM executions WHERE id = '{id}'"
    );
    words(pool, &row).await
}

#[tokio::test]
async fn an_execution_that_rests_stands_as_its_ledger_left_it_when_the_broker_lost_its_end() {
    let (mut servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let line = br#"{"program":"synthetic@1"}"#;
    let spec = Arc::new(Submission::parse(line).unwrap());
    let tenant = Tenant::new("lab").unwrap();
    let now = Timestamp::now();
    let mut numbers = 1_u64..;
    let mut writers = Vec::new();
    // One is paused, one waits for a node, and one computes: a message of its worker will come. One is
    // held and one has failed: what will be lost is that they were retried.
    let rest = ["paused", "pending", "computes", "held", "failed"];
    for what in rest {
        let id = ExecutionId(uuid::Uuid::now_v7());
        let mut w = LedgerWriter::new(tenant.clone(), id, Arc::clone(&spec), now);
        let yielded = Event::Yielded {
            cause: Cause::Operator { who: "ann".into() },
            computed_until: now,
        };
        let mut kept = vec![
            vec![Event::Submitted, bound(1, "n1", Cause::Initial)],
            vec![started(1), boundary(1, b"one")],
        ];
        match what {
            "paused" => kept.push(vec![yielded, Event::Paused { who: "ann".into() }]),
            "pending" => kept.push(vec![yielded]),
            "held" => kept.push(vec![Event::Held {
                reason: "no".into(),
                stderr: "words".into(),
                fault: Some(Box::new(Fault::Reported)),
            }]),
            "failed" => kept.push(vec![Event::Failed {
                reason: "no".into(),
                stderr: "words".into(),
                fault: Some(Box::new(Fault::Reported)),
            }]),
            _ => {}
        }
        for events in kept {
            let has_state = events.iter().any(|e| matches!(e, Event::Boundary(_)));
            let body = if has_state { &b"one"[..] } else { b"" };
            let item = w.append(events, "worker/n1/x", now, numbers.next().unwrap());
            publish(&broker, &item.unwrap(), Bytes::from_static(body)).await;
        }
        writers.push((what, id, w));
    }
    // That of the failed one is copied if it was recorded before its end.
    let copied = "SELECT count(*) FROM boundary_state s JOIN executions e ON e.id = s.execution \
                  WHERE s.state = 'one'::bytea AND e.phase <> 'failed'";
    until(&pool, copied, 4).await;

    // The broker will lose all messages from here on.
    let folder = servers.nats.data_dir().join("jetstream/$G/streams");
    let folder = folder.join(subjects::LEDGER_STREAM);
    let saved = tempfile::tempdir().unwrap();
    servers.nats.kill().await;
    copy(&folder, saved.path());
    servers.nats.restart().await.unwrap();
    for (what, _, w) in &mut writers {
        let on = match *what {
            "paused" => vec![
                Event::Resumed { who: "ann".into() },
                bound(2, "n2", Cause::Resumed),
            ],
            "pending" => vec![bound(2, "n2", Cause::Initial)],
            "held" | "failed" => vec![
                Event::Retried { who: "ann".into() },
                bound(2, "n2", Cause::Resumed),
            ],
            _ => vec![boundary(2, b"two")],
        };
        let goes_on = *what != "computes";
        let item = w.append(on, "policy/p", now, numbers.next().unwrap());
        let body = if goes_on { &b""[..] } else { b"two" };
        publish(&broker, &item.unwrap(), Bytes::from_static(body)).await;
        if goes_on {
            let on = vec![started(2), boundary(2, b"two")];
            let item = w.append(on, "worker/n2/y", now, numbers.next().unwrap());
            publish(&broker, &item.unwrap(), Bytes::from_static(b"two")).await;
        }
    }
    let copied = "SELECT count(*) FROM boundary_state WHERE state = 'two'::bytea";
    until(&pool, copied, 5).await;
    servers.nats.kill().await;
    std::fs::remove_dir_all(&folder).unwrap();
    copy(saved.path(), &folder);
    servers.nats.restart().await.unwrap();

    let back = "SELECT count(*) FROM executions \
                WHERE phase IN ('paused', 'pending', 'held', 'failed')";
    until(&pool, back, 4).await;
    let copied = "SELECT count(*) FROM boundary_state s JOIN executions e ON e.id = s.execution \
                  WHERE s.state = 'one'::bytea AND e.phase <> 'failed'";
    until(&pool, copied, 3).await;
    let all = [0, 1, 2, 3, 4].map(|n: usize| writers.get(n).unwrap().1);
    let [paused, pending, computes, held, failed] = all;
    assert_eq!(
        stands(&pool, paused).await,
        "paused ann 3 1 n1 1 1 1 1 n1 operator"
    );
    assert_eq!(
        stands(&pool, pending).await,
        "pending 3 1 n1 1 1 1 1 n1 operator"
    );
    for (id, phase) in [(held, "held"), (failed, "failed")] {
        assert_eq!(
            stands(&pool, id).await,
            format!("{phase} 3 1 n1 1 1 1 1 n1 {phase}")
        );
        let why = format!(
            "SELECT concat_ws(' ', failure, stderr_tail, fault, fault_owner, \
             finished_at IS NULL) FROM executions WHERE id = '{id}'"
        );
        let lives = if phase == "held" { "t" } else { "f" };
        assert_eq!(
            words(&pool, &why).await,
            format!("no words reported program {lives}")
        );
    }
    // Nothing is withdrawn that its worker will say again.
    assert_eq!(stands(&pool, computes).await, "started 3 1 n1 2 2 2 1 n1");
    stop.cancel();
    recorder.await.unwrap().unwrap();
}
