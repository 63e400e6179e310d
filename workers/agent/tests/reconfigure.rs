//! A running execution is given more or less: recorded with who asked, told to the program at its
//! next boundary, and without any effect on the bits.

use crate::common::{World, result};
use fiec_kit::run_local;
use fiec_schemas::Event;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::Grant;
use serde_json::json;

#[tokio::test]
async fn another_grant_is_recorded_and_told_and_changes_no_bits() {
    let world = World::start().await;
    let a = world.agent("a").await;
    let cpus = world.descriptor(&a.node).await.unwrap().cpus;
    let params = json!({
        "matrix": { "poisson2d": { "n": 40 } }, "iterations_per_capsule": 2, "load_cases": 800,
    });
    let line = json!({ "program": "cg@1", "params": params, "commit": { "every": 50 } });
    let id = world.submit(&line.to_string(), &a).await;
    world
        .wait(id, "a commit", |m| m.state.boundary.is_some())
        .await;
    let ask = |epoch: u64, grant: Grant| ControlRequest::Reconfigure {
        execution: id,
        epoch,
        grant,
        who: "ann".to_owned(),
    };
    let threads = |n: u32| Grant {
        threads: Some(n),
        ..Grant::default()
    };
    let wanted = Grant {
        memory_bytes: Some(1 << 20),
        ..threads(cpus)
    };
    let reply = world.control(&a.node, &ask(1, wanted)).await.unwrap();
    assert_eq!(reply.error, None, "answered once it is in the ledger");
    let found = world.events(id).await.into_iter().find_map(|e| match e {
        Event::Reconfigured { who, grant } => Some((who, grant)),
        _ => None,
    });
    let (who, grant) = found.unwrap();
    assert_eq!(
        (&*who, grant.threads, grant.memory_bytes),
        ("ann", Some(cpus), Some(1 << 20))
    );
    assert!(grant.substrate.is_some(), "what was left out stays");

    // What cannot be granted is refused with the reason, and nothing is recorded.
    for (epoch, grant, word) in [
        (1, threads(cpus + 1), "processors"),
        (1, threads(cpus), "already"),
        (7, threads(1), "epoch 1, not 7"),
        (
            1,
            Grant {
                cpus: vec![cpus],
                ..Grant::default()
            },
            "there is no processor",
        ),
    ] {
        let reply = world.control(&a.node, &ask(epoch, grant)).await.unwrap();
        let reason = reply.error.unwrap();
        assert!(reason.contains(word), "{reason}");
    }
    let done = world.wait_phase(id, "completed").await;
    let whole = run_local("cg@1", &params).unwrap();
    assert_eq!(result(&done)["digest"], whole.result["digest"]);
    a.leave().await;
}
