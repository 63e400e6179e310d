//! A pause or a cancel that a worker has confirmed survives its worker.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use fiec_policy::Input;
use fiec_schemas::{Cause, Event, Phase, PhaseKind, RequestKind};
use world::World;

/// Time after which a silent node is probed, in ms.
const SILENT_MS: u64 = 5_500;

/// The node is silent, and a probe is not answered.
fn lose(w: &mut World, node: usize) {
    w.silence(node);
    w.pass(SILENT_MS);
    let name = w.node(node);
    w.step(Input::Probe {
        node: name.clone(),
        answered: None,
    });
    w.carry_out();
}

/// An execution that computes, of which this was requested.
fn requested(nodes: usize, what: RequestKind) -> World {
    let mut w = World::new(nodes);
    w.submit_and_store(1);
    w.start(1);
    request(&mut w, what);
    w
}

fn request(w: &mut World, what: RequestKind) {
    let author = w.author(1);
    let who = "ann@lab".to_owned();
    let event = Event::Requested { who, what };
    w.append(World::id(1), vec![event], &author, true);
}

#[test]
fn a_confirmed_pause_is_carried_out_when_its_worker_is_lost() {
    let mut w = requested(2, RequestKind::Pause);
    let node = w.node_of(1);
    lose(&mut w, node);
    let who = "ann@lab".to_owned();
    assert_eq!(w.phase(1), Phase::Paused { who });
    assert_eq!(w.policy.waiting_of(&World::tenant()), 1);
    // It does not run again by itself.
    w.speak(node);
    w.pass(SILENT_MS);
    assert_eq!(w.phase(1).kind(), PhaseKind::Paused);
}

#[test]
fn a_missed_deadline_says_if_the_execution_was_paused_or_never_computed() {
    let mut w = World::new(2);
    let deadline = r#""deadline":{"within_s":60,"on_miss":"fail"}"#;
    w.submit_line(1, deadline);
    w.submit_line(2, &format!(r#"{deadline},"requires":{{"nodes":["n9"]}}"#));
    w.start(1);
    request(&mut w, RequestKind::Pause);
    let node = w.node_of(1);
    lose(&mut w, node);
    assert_eq!(w.phase(1).kind(), PhaseKind::Paused);
    w.pass(60_000);
    for (n, words) in [(1, "; it was paused"), (2, "; it had computed nothing")] {
        let history = &w.ledgers[&World::id(n)].history;
        let Some((_, Event::Failed { reason, .. })) = history.last() else {
            panic!("{history:?}")
        };
        assert!(reason.ends_with(words), "{reason}");
    }
}

#[test]
fn a_confirmed_cancel_is_carried_out_when_its_worker_is_lost_and_no_node_has_room() {
    let mut w = requested(1, RequestKind::Cancel);
    lose(&mut w, 0);
    assert_eq!(w.phase(1), Phase::Cancelled);
    assert_eq!(w.policy.waiting_of(&World::tenant()), 0);
}

#[test]
fn a_confirmed_pause_is_carried_out_when_its_worker_left_it_pending() {
    let mut w = requested(2, RequestKind::Pause);
    let author = w.author(1);
    let yielded = Event::Yielded {
        cause: Cause::Drain {
            who: "ann@lab".to_owned(),
        },
        computed_until: w.at().wall,
    };
    w.append(World::id(1), vec![yielded], &author, true);
    w.pass(1_000);
    assert_eq!(w.phase(1).kind(), PhaseKind::Paused);
}

#[test]
fn a_confirmed_cancel_is_carried_out_when_its_worker_stepped_back_to_an_earlier_state() {
    let mut w = requested(2, RequestKind::Cancel);
    let author = w.author(1);
    let stepped_back = Event::SteppedBack {
        to: None,
        cause: Cause::Orphaned {
            reason: "its state is lost".to_owned(),
        },
    };
    w.append(World::id(1), vec![stepped_back], &author, true);
    w.pass(1_000);
    assert_eq!(w.phase(1), Phase::Cancelled);
}
