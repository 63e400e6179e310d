//! Live executions on a ledger stream that drops messages by their age.

use std::time::Duration;

use crate::stage::{Stage, tenant, until};
use bytes::Bytes;
use fiec_broker::{Draft, Ledger};
use fiec_schemas::messages::ApiReply;
use fiec_schemas::{
    Bound, BoundaryEvent, Cause, ClientId, Digest, Event, ExecutionId, Phase, RequestKind,
    Timestamp, subjects,
};
use serde_json::json;

/// Age at which the stream drops messages. A third of it is the margin of a busy machine.
const AGE: Duration = Duration::from_secs(9);

/// Plays the worker: started, one boundary with this body, paused.
async fn pause_with_state(stage: &Stage, client: &str, body: &Bytes, bytes: u64) {
    stage
        .publish(&format!(r#"{{"id":"{client}","program":"synthetic@1"}}"#))
        .await;
    let entry = stage.last(client).await;
    let Phase::Bound(Bound { binding, .. }) = &entry.message.state.phase else {
        panic!("{:?}", entry.message.state.phase)
    };
    let author = format!("worker/n1/{}", binding.instance);
    let (at, who) = (Timestamp::now(), "ann".to_owned());
    let events = vec![
        Event::Started {
            epoch: entry.message.state.epoch,
            computing_since: at,
        },
        Event::Requested {
            who: who.clone(),
            what: RequestKind::Pause,
        },
        Event::Boundary(BoundaryEvent {
            index: 1,
            digest: Digest::of(body),
            bytes,
            computed_at: at,
            compute_us: 1,
            of: None,
            note: None,
            outputs: Vec::new(),
            energy: None,
        }),
        Event::Yielded {
            cause: Cause::Drain { who: who.clone() },
            computed_until: at,
        },
        Event::Paused { who },
    ];
    let draft = Draft::new(&entry.into(), events, &author, at).unwrap();
    let ledger = Ledger::new(&stage.broker);
    ledger.append(draft, body.clone()).await.unwrap();
}

#[tokio::test]
async fn what_waits_or_is_paused_outlives_the_age_of_the_stream_with_its_state() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let stream = stage.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    let mut config = stream.unwrap().cached_info().config.clone();
    (config.max_age, config.duplicate_window) = (AGE, AGE);
    stage.broker.js.update_stream(config).await.unwrap();
    let _service = stage.service().await;

    // The body of a large σ is the list of its chunks, which is kept in the same way.
    let (small, list) = (Bytes::from_static(b"state"), Bytes::from_static(b"chunks"));
    pause_with_state(&stage, "small", &small, small.len() as u64).await;
    pause_with_state(&stage, "large", &list, 2 << 20).await;
    stage
        .publish(r#"{"id":"waits","program":"synthetic@1","requires":{"nodes":["elsewhere"]}}"#)
        .await;
    let waits = stage.last("waits").await;
    let from = waits.message.state.at;

    let age = i64::try_from(AGE.as_micros()).unwrap();
    until(|| async { stage.broker.now().micros() > from.micros() + 3 * age }).await;
    let ledger = Ledger::new(&stage.broker);
    for client in ["small", "large", "waits"] {
        let execution = ExecutionId::from_client(&tenant(), &ClientId::new(client).unwrap());
        let last = ledger.last(&tenant(), execution).await.unwrap();
        let last = last.unwrap_or_else(|| panic!("the ledger of {client} has dropped out"));
        let Some(place) = &last.message.state.boundary else {
            continue;
        };
        let carried = ledger.by_sequence(place.seq.unwrap()).await.unwrap();
        let body = if client == "small" { &small } else { &list };
        assert_eq!(carried.body, body, "{client}");
        // It is kept when it has to be, not at each look.
        assert!(last.message.state.ordinal < 12, "{last:?}");
    }
    for client in ["small", "large"] {
        let request = json!({"id": client, "who": "ann"});
        let reply: ApiReply = stage.ask("fiec.api.resume.lab", &request).await;
        assert_eq!(reply.error, None);
        until(|| async {
            let phase = stage.last(client).await.message.state.phase.clone();
            matches!(phase, Phase::Bound(_))
        })
        .await;
    }
}
