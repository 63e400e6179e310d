//! The connection to the broker ends, the broker loses messages, another policy service stops.

mod world;

use fiec_policy::{Input, Millis};
use fiec_schemas::{InstanceId, Phase};
use uuid::Uuid;
use world::World;

#[test]
fn without_a_connection_nothing_is_bound_and_the_silence_of_nodes_does_not_count() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    w.step(Input::Connected { connected: false });
    w.submit_and_store(2);
    assert!(matches!(w.phase(2), Phase::Bound(_)), "a slot was free");
    w.foreign_pending(3);
    w.tell(World::id(3), false);
    // The nodes are silent, since nothing arrives.
    (0..2).for_each(|node| w.silence(node));
    w.pass(30_000);
    assert!(matches!(w.phase(3), Phase::Pending { .. }));
    w.take_probes();
    w.step(Input::Connected { connected: true });
    (0..2).for_each(|node| w.speak(node));
    w.pass(1_000);
    assert!(matches!(w.phase(3), Phase::Bound(_)));
    assert!(matches!(w.phase(1), Phase::Started(_)), "{:?}", w.phase(1));
    assert!(
        w.take_probes().is_empty(),
        "nobody was asked for a sign of life"
    );
}

#[test]
fn after_the_broker_lost_messages_nothing_is_bound_until_holders_had_time_to_append_them() {
    let mut w = World::new(2);
    w.step(Input::Lost);
    w.foreign_pending(1);
    w.tell(World::id(1), false);
    w.pass(2_800);
    assert!(
        matches!(w.phase(1), Phase::Pending { .. }),
        "{:?}",
        w.phase(1)
    );
    w.pass(500);
    assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.phase(1));
}

/// Time until an execution that another policy service should bind is bound here, in ms.
fn taken_over_after(leaving: bool) -> u64 {
    let mut w = World::new(2);
    let is_its = |id: &InstanceId| {
        let mut replicas = fiec_policy::Replicas::new(InstanceId(Uuid::from_u128(1)));
        replicas.heard(Millis(0), *id, false);
        !replicas.prefers_self(World::id(1).0.as_bytes())
    };
    let id = (2..100)
        .map(|n| InstanceId(Uuid::from_u128(n)))
        .find(is_its);
    let id = id.unwrap_or_else(|| panic!("one of a hundred is preferred"));
    w.step(Input::Replica { id, leaving: false });
    w.foreign_pending(1);
    w.tell(World::id(1), false);
    w.step(Input::Replica { id, leaving });
    let mut ms = 0;
    while !matches!(w.phase(1), Phase::Bound(_)) {
        w.pass(50);
        ms += 50;
        assert!(ms < 10_000);
    }
    ms
}

#[test]
fn what_a_service_that_says_it_leaves_should_bind_is_bound_at_once_by_another() {
    assert!(taken_over_after(true) <= 100);
    assert!(taken_over_after(false) >= 400);
}
