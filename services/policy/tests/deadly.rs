//! Executions under which workers end.

mod world;

use fiec_policy::Input;
use fiec_schemas::{Event, Fault, Phase};
use world::World;

/// The node's worker dies, and another begins there.
fn worker_dies(w: &mut World, node: usize) {
    let name = w.node(node);
    w.silence(node);
    w.pass(5_500);
    w.step(Input::Probe {
        node: name.clone(),
        answered: None,
    });
    w.carry_out();
    w.restart_node(node);
    w.speak(node);
    let instance = w.instance(node);
    w.step(Input::Probe {
        node: name.clone(),
        answered: Some(instance),
    });
    w.pass(1_500);
}

fn held(w: &World, n: u64) -> Option<String> {
    match w.phase(n) {
        Phase::Held { reason, .. } => Some(reason),
        _ => None,
    }
}

#[test]
fn a_program_under_which_three_workers_end_is_held_with_their_names() {
    let mut w = World::new(4);
    w.submit_and_store(1);
    let mut nodes = Vec::new();
    for death in 1..=3 {
        let node = w.node_of(1);
        nodes.push(w.node(node).to_string());
        w.start(1);
        worker_dies(&mut w, node);
        assert_eq!(held(&w, 1).is_some(), death == 3, "{death}");
    }
    let reason = held(&w, 1).unwrap();
    assert!(
        reason.contains("3 workers") && reason.contains(&nodes.join(", ")),
        "{reason}"
    );
    // Nobody is asked again, and a retry counts anew.
    w.pass(60_000);
    assert!(held(&w, 1).is_some());
    assert_eq!(w.policy.waiting_of(&World::tenant()), 1, "it takes memory");
    w.append(
        World::id(1),
        vec![Event::Retried { who: "ann".into() }],
        "policy/x",
        true,
    );
    w.pass(1_000);
    let node = w.node_of(1);
    w.start(1);
    worker_dies(&mut w, node);
    assert!(held(&w, 1).is_none(), "{:?}", w.phase(1));
}

#[test]
fn a_worker_killed_from_outside_charges_nobody() {
    let mut w = World::new(4);
    w.submit_and_store(1);
    for index in 1..=6 {
        let node = w.node_of(1);
        w.start(1);
        w.commit(1, index, "a");
        worker_dies(&mut w, node);
        assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.phase(1));
    }
}

#[test]
fn what_is_only_bound_to_a_worker_that_ends_is_not_charged() {
    let mut w = World::new(4);
    w.submit_and_store(1);
    for _ in 0..5 {
        let node = w.node_of(1);
        worker_dies(&mut w, node);
        assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.phase(1));
    }
}

#[test]
fn panics_and_a_machine_without_memory_count_and_other_faults_do_not() {
    let mut w = World::new(4);
    w.submit_and_store(1);
    for fault in [
        Fault::DiskFull,
        Fault::WorkerPanicked,
        Fault::DiskFull,
        Fault::MachineOutOfMemory,
    ] {
        w.start(1);
        w.give_back(1, fault);
        w.pass(20_000);
        assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.phase(1));
    }
    w.start(1);
    w.give_back(1, Fault::WorkerPanicked);
    w.pass(20_000);
    assert!(held(&w, 1).is_some(), "{:?}", w.phase(1));
}

#[test]
fn suspects_are_kept_apart_so_that_the_next_death_tells_which_it_was() {
    let mut w = World::new(2);
    w.cordon(1, true);
    w.submit_and_store(1);
    w.submit_and_store(2);
    // Both compute on one node when its worker ends, twice.
    for _ in 0..2 {
        assert_eq!((w.node_of(1), w.node_of(2)), (0, 0));
        w.start(1);
        w.start(2);
        worker_dies(&mut w, 0);
    }
    // Only one is bound there now.
    let bound = |w: &World, n| matches!(w.phase(n), Phase::Bound(_));
    assert_ne!(
        bound(&w, 1),
        bound(&w, 2),
        "{:?} {:?}",
        w.phase(1),
        w.phase(2)
    );
    let (first, other) = if bound(&w, 1) { (1, 2) } else { (2, 1) };
    // It is the one: it is held, and the other goes on.
    w.start(first);
    worker_dies(&mut w, 0);
    assert!(held(&w, first).is_some());
    assert!(bound(&w, other), "{:?}", w.phase(other));
    w.start(other);
    w.commit(other, 1, "a");
    worker_dies(&mut w, 0);
    assert!(
        bound(&w, other),
        "its commit has cleared it: {:?}",
        w.phase(other)
    );
}
