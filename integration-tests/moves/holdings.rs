//! A ledger that says `started` on a living node that does not hold the execution: whatever the
//! cause, it is bound anew within seconds; cancel, pause and yield work on it at once.

use std::sync::Arc;

use crate::stage::{Lab, digest_of, undisturbed_synthetic, until, workers, workers_with_history};
use fiec_broker::{Draft, Ledger, Tip};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, InstanceId, NodeId, Submission, Timestamp,
};
use serde_json::json;

const PARAMS: &str = r#"{"capsules": 20, "rest_us": 1000, "state_bytes": 1024}"#;

/// Writes a ledger that says that this node computes an execution which it has never heard of.
async fn orphan(lab: &Lab, client: &str, node: &NodeId) -> ExecutionId {
    let status = lab.status_of(node).await.unwrap();
    started_by(lab, client, node, status.descriptor.instance).await
}

async fn started_by(lab: &Lab, client: &str, node: &NodeId, instance: InstanceId) -> ExecutionId {
    let params: serde_json::Value = serde_json::from_str(PARAMS).unwrap();
    let spec = json!({"id": client, "program": "synthetic@1", "params": params});
    let spec: Submission = serde_json::from_value(spec).unwrap();
    let (id, at) = (lab.id(client), Timestamp::now());
    let state = ExecutionState::unborn(lab.tenant.clone(), id, Arc::new(spec), None, at);
    let events = vec![
        Event::Submitted,
        Event::Bound {
            epoch: 1,
            node: node.clone(),
            instance,
            substrate: "cpu".to_owned(),
            cause: Cause::Initial,
            decision: None,
        },
        Event::Started {
            epoch: 1,
            computing_since: at,
        },
    ];
    let tip = Tip {
        seq: 0,
        digest: None,
        state: state.into(),
        seen_in: 0,
    };
    let author = format!("worker/{node}/{instance}");
    let draft = Draft::new(&tip, events, &author, at).unwrap();
    let ledger = Ledger::new(&lab.broker);
    ledger.append(draft, bytes::Bytes::new()).await.unwrap();
    id
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

#[tokio::test]
async fn what_is_started_on_a_node_that_does_not_hold_it_is_bound_anew() {
    let lab = Lab::start(workers_with_history(2)).await;
    let id = orphan(&lab, "lost", &node("n1")).await;
    let last = lab.journal.ended(id, "completed").await;
    let params = serde_json::from_str(PARAMS).unwrap();
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!(last.state().epoch, 2);
    lab.recorded(1).await;
    let causes = format!("SELECT cause FROM rebindings WHERE execution = '{id}'");
    assert_eq!(
        lab.sql(causes).await.rows,
        [[Some("orphaned".to_owned())]],
        "SQL says why it was bound anew"
    );
    lab.stop().await;
}

#[tokio::test]
async fn what_nobody_holds_can_be_cancelled_paused_and_yielded() {
    let lab = Lab::start(workers(1)).await;
    // No node may take it, so that it stays where nobody holds it.
    lab.fiec(&["cordon", "n1"]).await.expect(0);
    let (cancelled, paused, yielded) = (
        orphan(&lab, "cancelled", &node("n1")).await,
        orphan(&lab, "paused", &node("n1")).await,
        orphan(&lab, "yielded", &node("n1")).await,
    );
    // The policy service has read their ledgers.
    for name in ["cancelled", "paused", "yielded"] {
        until("why is known", async || {
            let why = lab.fiec(&["why", name]).await;
            (why.code == 0).then_some(())
        })
        .await;
    }
    lab.fiec(&["cancel", "cancelled"]).await.expect(0);
    lab.journal.ended(cancelled, "cancelled").await;
    lab.fiec(&["pause", "paused"]).await.expect(0);
    let ledger = Ledger::new(&lab.broker);
    let last = ledger.last(&lab.tenant, paused).await.unwrap().unwrap();
    assert_eq!(last.message.state.phase.as_str(), "paused");
    lab.fiec(&["resume", "paused"]).await.expect(0);
    lab.fiec(&["yield", "yielded"]).await;
    lab.fiec(&["uncordon", "n1"]).await.expect(0);
    lab.journal.ended(paused, "completed").await;
    lab.journal.ended(yielded, "completed").await;
    lab.stop().await;
}
