//! An execution that asks for more than its node has waits where it is, with its process alive, and
//! goes on there when others have left; one whose node has no memory to offer is suspended and comes
//! back. The bits are those of an undisturbed run.

use crate::stage::{
    Lab, args, audit, digest_of, undisturbed_synthetic, until, workers_with_history,
};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Cause, Event};
use serde_json::{Value, json};

fn asking(id: &str, capsules: u64, gib: u64) -> Value {
    json!({"id": id, "program": "synthetic@1", "when_unviable": "wait", "commit": {"every": 20},
        "params": {"capsules": capsules, "rest_us": 5_000, "state_bytes": 2_000,
            "reserve": {"at": 5, "memory_bytes": gib << 30}}})
}

#[tokio::test]
async fn one_that_asks_for_more_waits_where_it_is_and_goes_on_when_that_is_free() {
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "2", "--memory-limit", "4GiB", "--no-cgroup"]),
        ..workers_with_history(1)
    })
    .await;
    let holder = lab.publish_json(&asking("holder", 1_000_000, 3)).await;
    lab.journal
        .find(holder, "it is granted what it asks for", |line| {
            let mut events = line.message.events.iter();
            events.find_map(|e| match e {
                Event::Reconfigured { who, grant } => Some((who.clone(), grant.memory_bytes)),
                _ => None,
            })
        })
        .await;
    let spec = asking("asks", 600, 2);
    let id = lab.publish_json(&spec).await;
    let parked = lab
        .journal
        .find(id, "it is parked", |line| {
            line.state().parked().map(|_| line.clone())
        })
        .await;
    assert!(
        parked.message.events.iter().any(|e| matches!(
            e,
            Event::Parked { cause: Cause::Asked { reason }, .. }
                if reason.contains("2147483648 bytes of memory")
        )),
        "{parked:?}"
    );
    let why = lab.fiec(&["why", "asks"]).await.expect(0).stdout;
    assert!(why.contains("parked on n1"), "{why}");
    lab.fiec(&["cancel", "holder"]).await.expect(0);
    lab.journal
        .find(id, "it goes on where it was", |line| {
            let went_on = |e: &Event| matches!(e, Event::Unparked { .. });
            line.message.events.iter().any(went_on).then_some(())
        })
        .await;
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(
        digest_of(&last),
        undisturbed_synthetic(&spec["params"]).await
    );
    assert_eq!(last.state().epoch, 1, "it never left");
    audit(&lab.journal.of(id));
    lab.recorded(2).await;
    until("the history tells of the wait", async || {
        let went_on = "SELECT count(*) FROM parked_times WHERE ended_by = 'went on'";
        (lab.count(went_on).await == 1).then_some(())
    })
    .await;
    lab.stop().await;
}

#[tokio::test]
async fn one_that_says_suspend_frees_its_place_under_pressure_and_comes_back() {
    let lab = Lab::start(ClusterOptions {
        worker_args: args(&["--slots", "1", "--threshold", "memory=0.9:0.7:500"]),
        ..workers_with_history(1)
    })
    .await;
    let params = json!({"capsules": 2_500, "rest_us": 5_000, "state_bytes": 2_000});
    let id = lab
        .publish_json(
            &json!({"id": "calm", "program": "synthetic@1", "params": params,
            "when_unviable": "suspend", "commit": {"every": 20}}),
        )
        .await;
    lab.journal.computing(id, 1).await;
    let envelope = ["node", "envelope", "n1"];
    let squeeze = [&envelope[..], &["--signal", "memory", "--cap", "1MiB"]].concat();
    lab.fiec(&squeeze).await.expect(0);
    lab.journal
        .find(id, "it is suspended", |line| {
            let mut events = line.message.events.iter();
            let suspended = events.any(|e| {
                matches!(e, Event::Yielded { cause: Cause::Unviable { reason }, .. }
                    if reason.contains("says suspend"))
            });
            (suspended && line.phase() == "pending").then_some(())
        })
        .await;
    lab.fiec(&[&envelope[..], &["--clear"]].concat())
        .await
        .expect(0);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    assert_eq!(last.state().epoch, 2);
    audit(&lab.journal.of(id));
    lab.stop().await;
}
