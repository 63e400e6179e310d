//! Nodes that cannot start a program.

mod world;

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Fault, Phase, StartError};
use world::World;

fn missing() -> Fault {
    Fault::CannotStart {
        command: "python3".into(),
        error: StartError::NotFound,
    }
}

#[test]
fn a_node_that_cannot_start_a_program_is_tried_by_one_of_many() {
    let mut w = World::new(2);
    let mut tries = 0;
    for n in 1..=40 {
        w.submit_and_store(n);
        if w.node_of(n) == 0 {
            // It says so only after the start, as an adaptor does.
            w.start(n);
            w.give_back(n, missing());
            tries += 1;
            w.pass(200);
            assert_eq!(w.node_of(n), 1, "{n}");
        }
        w.complete_if_bound(n);
        w.pass(200);
    }
    // Nine seconds: at first, and after five.
    assert!((1..=3).contains(&tries), "{tries} tries");
    let why = w.policy.node_statuses(w.at());
    let aside = &why[0].set_aside[0];
    assert!(aside.reason.contains("no ("), "{aside:?}");
    assert!(why[1].set_aside.is_empty());
}

#[test]
fn what_starts_nowhere_waits_and_does_not_fail() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    let mut tries = 0;
    for _ in 0..600 {
        if matches!(w.phase(1), Phase::Bound(_)) {
            w.refuse_for(1, Some(missing()));
            tries += 1;
        }
        w.pass(1_000);
    }
    assert!(
        matches!(w.phase(1), Phase::Pending { .. }),
        "{:?}",
        w.phase(1)
    );
    // Each node after 0, 5, 15, 35, 75, 155 and 315 s.
    assert!((10..=16).contains(&tries), "{tries} tries");
    w.pass(400_000);
    assert!(matches!(w.phase(1), Phase::Bound(_)));
    w.start(1);
    w.commit(1, 1, "a");
    assert!(
        w.policy
            .node_statuses(w.at())
            .iter()
            .any(|n| n.set_aside.is_empty())
    );
}

#[test]
fn a_node_that_has_lost_a_device_is_asked_for_a_proof_of_it() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let (lost, at) = (w.node_of(1), w.node(w.node_of(1)));
    drop(w.take_controls());
    w.give_back(1, Fault::DeviceLost);
    let asked = w.take_controls();
    assert!(asked.contains(&(at, ControlRequest::Prove)), "{asked:?}");
    w.pass(200);
    assert_ne!(w.node_of(1), lost);
}
