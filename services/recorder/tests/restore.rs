//! A recorder that is asked for the state of a boundary.

use std::sync::Arc;
use std::time::Duration;

use crate::live::{publish, servers, start, until};
use crate::support::boundary;
use bytes::Bytes;
use fiec_broker::{Broker, store};
use fiec_recorder::lab_support::LedgerWriter;
use fiec_schemas::messages::{RestoreReply, RestoreRequest};
use fiec_schemas::{
    Cause, Digest, Event, ExecutionId, InstanceId, Submission, Tenant, Timestamp, subjects,
};
use sqlx::PgPool;

async fn ask(broker: &Broker, execution: ExecutionId, index: u64, state: &[u8]) -> RestoreReply {
    let digest = Digest::of(state);
    let request = RestoreRequest {
        execution,
        index,
        digest,
    };
    let body = serde_json::to_vec(&request).unwrap();
    let asked = async_nats::Request::new()
        .payload(body.into())
        .timeout(Some(Duration::from_secs(30)));
    let subject = subjects::RECORDER_RESTORE;
    let reply = broker.client.send_request(subject, asked).await.unwrap();
    serde_json::from_slice(&reply.payload).unwrap()
}

/// An execution with these boundaries in PostgreSQL, which has a copy of the first one's state, and
/// of no other: their σ is not where they say.
async fn recorded(broker: &Broker, pool: &PgPool, states: &[&'static [u8]]) -> ExecutionId {
    let submission = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
    let id = ExecutionId(uuid::Uuid::now_v7());
    let now = Timestamp::now();
    let mut w = LedgerWriter::new(Tenant::new("lab").unwrap(), id, Arc::new(submission), now);
    let begin = vec![
        Event::Submitted,
        Event::Bound {
            epoch: 1,
            node: "n1".parse().unwrap(),
            instance: InstanceId::random(),
            substrate: "host".into(),
            cause: Cause::Initial,
            decision: None,
        },
        Event::Started {
            epoch: 1,
            computing_since: now,
        },
    ];
    let item = w.append(begin, "worker/n1/x", now, 1).unwrap();
    publish(broker, &item, Bytes::new()).await;
    for (state, index) in states.iter().zip(1u64..) {
        let events = vec![boundary(index, state)];
        let item = w.append(events, "worker/n1/x", now, index + 1).unwrap();
        let body = Bytes::from_static(if index == 1 { state } else { b"damaged" });
        publish(broker, &item, body).await;
        until(
            pool,
            "SELECT max(boundary_index) FROM executions",
            index as i64,
        )
        .await;
        until(pool, "SELECT max(index) FROM boundary_state", 1).await;
    }
    id
}

#[tokio::test]
async fn a_recorder_offers_the_earlier_boundary_of_the_same_history_and_no_other() {
    let (_servers, broker, pool) = servers().await;
    let (stop, recorder) = start(&broker, &pool);
    let (first, second): (&[u8], &[u8]) = (b"first", b"second");
    let id = recorded(&broker, &pool, &[first, second]).await;

    let exact = ask(&broker, id, 1, first).await;
    assert_eq!(exact, RestoreReply::default());

    let reply = ask(&broker, id, 2, second).await;
    let place = reply.earlier.unwrap_or_else(|| panic!("{:?}", reply.error));
    let found = (place.index, place.digest, place.seq, place.ordinal);
    assert_eq!(found, (1, Digest::of(first), None, 2));
    let kept = store::kept_state(&broker, id, &place, |_| ())
        .await
        .unwrap();
    assert_eq!(kept, first);

    // PostgreSQL does not have the history up to this boundary.
    let ahead = ask(&broker, id, 3, b"third").await;
    assert!(
        ahead.error.is_some() && ahead.earlier.is_none(),
        "{ahead:?}"
    );
    // The execution has stepped back from the copy's boundary.
    sqlx::query("UPDATE boundaries SET withdrawn_at = now() WHERE index = 1")
        .execute(&pool)
        .await
        .unwrap();
    let withdrawn = ask(&broker, id, 2, second).await;
    assert!(withdrawn.earlier.is_none(), "{withdrawn:?}");
    stop.cancel();
    recorder.await.unwrap().unwrap();
}
