//! The longest handover that there can be, between two agents.

use crate::common::{World, result, undisturbed};
use fiec_schemas::limits::{CANDIDATES_LIMIT, EVIDENCE_LIMIT};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{
    Candidate, Cause, Decision, Event, Evidence, NodeId, Reading, Signal, Threshold, Timestamp,
};
use serde_json::json;

fn reading(n: usize) -> Reading {
    Reading {
        signal: Signal::MemoryStall,
        device: Some(format!("GPU-00000000-0000-0000-0000-{n:012}")),
        value: Some(0.123_456_789_012_345_6),
        raw: Some(499_289_948.123),
        limit: Some(536_870_912.456),
        unit: "percent".to_owned(),
        source: "cgroup v2 memory.pressure of /sys/fs/cgroup/fiec/worker/with/a/long/path"
            .to_owned(),
        at: Timestamp::now(),
        missing: None,
        envelope: None,
    }
}

fn candidate(n: usize) -> Candidate {
    Candidate {
        node: NodeId::new(format!("{}-{n:02}", "n".repeat(60))).unwrap(),
        substrate: None,
        score: None,
        rejected: vec![
            "contention of the host is at 93.4 %, over 90.0 % for 12000 ms".to_owned(),
            "it has 16 slots, all of which are taken, and 32 executions wait".to_owned(),
        ],
    }
}

#[tokio::test]
async fn a_handover_with_16_readings_and_12_candidates_arrives() {
    let world = World::start().await;
    let (from, to) = (world.agent("a").await, world.agent("b").await);
    let params = json!({ "capsules": 2_000, "rest_us": 1_500, "state_bytes": 1_000 });
    let submission = json!({ "program": "synthetic@1", "params": params }).to_string();
    let id = world.submit(&submission, &from).await;
    world.wait_phase(id, "started").await;
    let evidence = Evidence {
        node: from.node.clone(),
        signal: Signal::MemoryStall,
        device: None,
        value: 0.93,
        threshold: Threshold {
            high: 0.8,
            low: 0.6,
            dwell_ms: 2_000,
        },
        since: Timestamp::now(),
        vector: (0..EVIDENCE_LIMIT).map(reading).collect(),
    };
    let order = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Pressure {
            evidence: Box::new(evidence),
        },
        to: Some(to.destination()),
        decision: Some(Decision {
            candidates: (0..CANDIDATES_LIMIT).map(candidate).collect(),
            omitted: 0,
            entrusted: None,
        }),
    };
    let reply = world.control(&from.node, &order).await.unwrap();
    assert_eq!(reply.error, None);
    let last = world.wait_phase(id, "completed").await;
    assert_eq!(result(&last), undisturbed(&params));
    assert_eq!(last.state.epoch, 2);
    let events = world.events(id).await;
    let readings = |event: &Event| match event {
        Event::Yielded {
            cause: Cause::Pressure { evidence },
            ..
        }
        | Event::Bound {
            cause: Cause::Pressure { evidence },
            ..
        } => Some(evidence.vector.len()),
        _ => None,
    };
    let readings: Vec<_> = events.iter().filter_map(readings).collect();
    assert_eq!(readings, [0, EVIDENCE_LIMIT]);
    from.leave().await;
    to.leave().await;
}
