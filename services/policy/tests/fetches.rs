//! Bindings whose nodes fetch a large state before they start: progress of the fetch keeps them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use fiec_policy::Config;
use fiec_schemas::duty::{Actor, Task};
use fiec_schemas::hardware::ArrivingState;
use fiec_schemas::{BoundaryEvent, Cause, Digest, Event, Phase};
use world::World;

const MIB: u64 = 1 << 20;
const STATE: u64 = 3 << 30;

/// Three nodes and an execution with a state of 3 GiB that was just bound for the second time.
fn bound_with_a_large_state() -> World {
    let mut w = World::new(3);
    w.submit_and_store(1);
    w.start(1);
    let (author, at) = (w.author(1), w.wall());
    let boundary = BoundaryEvent {
        index: 1,
        digest: Digest::of(b"large"),
        bytes: STATE,
        computed_at: at,
        compute_us: 1_000,
        of: None,
        note: None,
        outputs: vec![],
        energy: None,
    };
    let cause = Cause::Operator { who: "ann".into() };
    let yielded = Event::Yielded {
        cause,
        computed_until: at,
    };
    let events = vec![Event::Boundary(boundary), yielded];
    w.append(World::id(1), events, &author, true);
    w.act();
    assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.phase(1));
    w.sent_capsules();
    w
}

fn epoch(w: &World) -> u64 {
    w.ledgers[&World::id(1)].state.epoch
}

/// From now on a node's vectors report these bytes under this epoch.
fn report(w: &mut World, node: usize, epoch: u64, bytes: u64) {
    let arriving = ArrivingState {
        execution: World::id(1),
        epoch,
        bytes,
        of: STATE,
    };
    w.arriving.insert(node, vec![arriving]);
}

/// Reports `step` more bytes every second.
fn fetch(w: &mut World, seconds: u64, step: u64) {
    let (node, epoch) = (w.node_of(1), epoch(w));
    for second in 1..=seconds {
        report(w, node, epoch, second * step);
        w.pass(1_000);
    }
}

/// Asserts that it stayed under its epoch.
#[track_caller]
fn stays(w: &World, before: u64) {
    assert_eq!(epoch(w), before, "bound elsewhere: {:?}", w.last_cause(1));
}

/// Asserts that it was bound to another node because its node did not start it.
#[track_caller]
fn is_bound_elsewhere(w: &World, node: usize, before: u64) {
    assert_eq!(epoch(w), before + 1);
    assert_ne!(w.node_of(1), node);
    let cause = w.last_cause(1);
    assert!(matches!(cause, Some(Cause::NotTaken { .. })), "{cause:?}");
}

#[test]
fn an_execution_stays_where_its_state_arrives_until_it_starts() {
    let mut w = bound_with_a_large_state();
    let bound = epoch(&w);
    fetch(&mut w, 60, 50 * MIB);
    stays(&w, bound);
    assert_eq!(w.sent_capsules(), 0, "its node has the capsule");
    w.start(1);
    w.arriving.clear();
    w.pass(20_000);
    stays(&w, bound);
}

#[test]
fn gigabytes_that_arrive_in_small_steps_are_awaited() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    for step in 1..=40 {
        // Less than the 5 s after which a capsule is sent again.
        report(&mut w, node, bound, step * 16 * 1024);
        w.pass(4_000);
    }
    stays(&w, bound);
}

#[test]
fn a_fetch_that_stops_is_given_the_usual_time_and_then_bound_elsewhere() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    fetch(&mut w, 30, 10 * MIB);
    let last = w.now;
    while epoch(&w) == bound && w.now < last + 60_000 {
        w.pass(50);
    }
    is_bound_elsewhere(&w, node, bound);
    let waited = w.now - last;
    let usual = 2 * Config::default().take_ms;
    assert!(
        (usual - 1_500..usual + 1_500).contains(&waited),
        "{waited} ms"
    );
    let Some(Cause::NotTaken { reason, .. }) = w.last_cause(1) else {
        unreachable!()
    };
    assert!(reason.contains("of its state arrived"), "{reason}");
}

#[test]
fn the_same_bytes_again_are_no_progress() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    // A fetch that breaks at the same place again and again.
    for step in 0..30 {
        report(&mut w, node, bound, (step % 3 + 1) * 100 * MIB);
        w.pass(500);
    }
    is_bound_elsewhere(&w, node, bound);
}

#[test]
fn no_progress_goes_beyond_the_size_of_the_state() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    for step in 0..15 {
        report(&mut w, node, bound, STATE + step * MIB);
        w.pass(1_000);
    }
    is_bound_elsewhere(&w, node, bound);
}

#[test]
fn progress_under_an_earlier_epoch_does_not_count() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    for second in 1..=13 {
        report(&mut w, node, bound - 1, second * 10 * MIB);
        w.pass(1_000);
    }
    is_bound_elsewhere(&w, node, bound);
}

#[test]
fn progress_on_a_node_that_has_no_binding_does_not_count() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    for second in 1..=13 {
        report(&mut w, (node + 1) % 3, bound, second * 10 * MIB);
        w.pass(1_000);
    }
    is_bound_elsewhere(&w, node, bound);
}

#[test]
fn progress_of_another_instance_of_the_worker_does_not_count() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    fetch(&mut w, 8, 10 * MIB);
    stays(&w, bound);
    w.restart_node(node);
    w.take_probes();
    for second in 9..=12 {
        report(&mut w, node, bound, second * 10 * MIB);
        w.pass(1_000);
    }
    // The binding names an instance that is gone.
    assert!(epoch(&w) > bound);
    assert!(matches!(w.last_cause(1), Some(Cause::Lost { .. })));
}

#[test]
fn what_was_fetched_under_one_binding_does_not_lengthen_the_next() {
    let mut w = bound_with_a_large_state();
    let (node, bound) = (w.node_of(1), epoch(&w));
    fetch(&mut w, 20, 100 * MIB);
    w.pass(12_000);
    is_bound_elsewhere(&w, node, bound);
    w.arriving.clear();
    // Fewer bytes than before, under the new epoch: they count.
    fetch(&mut w, 20, MIB);
    stays(&w, bound + 1);
    w.arriving.clear();
    let next = w.node_of(1);
    w.pass(12_000);
    assert_eq!(epoch(&w), bound + 2);
    assert_ne!(w.node_of(1), next);
}

#[test]
fn a_fetch_under_way_is_told_while_it_lasts() {
    let mut w = bound_with_a_large_state();
    fetch(&mut w, 12, 100 * MIB);
    let fetched = w.policy.arriving(World::id(1)).unwrap();
    assert_eq!((fetched.bytes, fetched.of), (1_200 * MIB, STATE));
    let summary = w.why(1).summary;
    let words = "fetching its state: 1.2 of 3.0 GiB";
    assert!(summary.contains(words), "{summary}");
    // The worker still has its time to start it, however long the fetch takes.
    for second in 1..=280 {
        let (node, epoch) = (w.node_of(1), epoch(&w));
        report(&mut w, node, epoch, 1_200 * MIB + second * 5 * MIB);
        w.pass(1_000);
    }
    let next = w.why(1).next.unwrap();
    assert_eq!((next.who, next.what), (Actor::Worker, Task::Start));
    assert!(!next.is_overdue(w.wall()));
    let duties = w.policy.duties(w.at());
    assert_eq!(
        (duties[&Actor::Worker].all, duties[&Actor::Worker].overdue),
        (1, 0)
    );
    w.start(1);
    assert_eq!(w.policy.arriving(World::id(1)), None);
}
