//! An execution that has started by its ledger, on a node that does not hold it, is bound again.

#![allow(clippy::unwrap_used)]

mod world;

use fiec_policy::{Action, ControlOutcome, Input};
use fiec_schemas::messages::Holding;
use fiec_schemas::{Cause, Event, InstanceId, Phase};
use world::World;

/// Answers the policy's questions for `ms` with a node's holdings. Returns the number of questions.
fn answer(w: &mut World, ms: u64, held: &[Holding]) -> usize {
    let mut asked = 0;
    for _ in 0..ms / 100 {
        w.now += 100;
        w.vectors();
        for action in w.step(Input::Tick) {
            let Action::AskHoldings { node } = action else {
                continue;
            };
            asked += 1;
            let instance = instance_of(w, node.as_str());
            w.step(Input::Holdings {
                node: node.clone(),
                instance,
                held: held.to_vec(),
            });
            w.carry_out();
        }
        w.carry_out();
    }
    asked
}

fn instance_of(w: &World, node: &str) -> InstanceId {
    let of = |phase: &Phase| phase.binding().filter(|b| b.node.as_str() == node).cloned();
    let bindings = w.ledgers.values().filter_map(|l| of(&l.state.phase));
    bindings.map(|b| b.instance).next().unwrap()
}

fn held(n: u64, epoch: u64) -> Vec<Holding> {
    let execution = World::id(n);
    vec![Holding { execution, epoch }]
}

fn started(nodes: usize) -> World {
    let mut w = World::new(nodes);
    w.submit_and_store(1);
    w.start(1);
    w
}

fn was_orphaned(w: &World) -> bool {
    let history = &w.ledgers[&World::id(1)].history;
    let orphaned = |e: &Event| {
        matches!(
            e,
            Event::Bound {
                cause: Cause::Orphaned { .. },
                ..
            }
        )
    };
    history.iter().any(|(_, event)| orphaned(event))
}

#[test]
fn a_node_is_asked_now_and_then_and_what_it_holds_stays() {
    let mut w = started(2);
    let asked = answer(&mut w, 20_000, &held(1, 1));
    assert!((3..=5).contains(&asked), "asked {asked} times in 20 s");
    assert!(!was_orphaned(&w));
}

#[test]
fn what_two_answers_lack_is_bound_anew() {
    let mut w = started(2);
    answer(&mut w, 10_000, &[]);
    assert!(was_orphaned(&w));
    assert_eq!(w.ledgers[&World::id(1)].state.epoch, 2);
}

#[test]
fn holding_it_under_an_earlier_epoch_does_not_count() {
    let mut w = started(2);
    answer(&mut w, 10_000, &held(1, 0));
    assert!(was_orphaned(&w));
}

#[test]
fn one_answer_without_it_is_not_enough() {
    let mut w = started(2);
    while answer(&mut w, 100, &[]) == 0 {}
    answer(&mut w, 10_000, &held(1, 1));
    assert!(!was_orphaned(&w));
}

#[test]
fn where_no_node_has_room_it_is_bound_as_soon_as_there_is_one() {
    let mut w = started(1);
    w.cordon(0, true);
    answer(&mut w, 10_000, &[]);
    assert!(!was_orphaned(&w));
    w.cordon(0, false);
    w.pass(500);
    assert!(was_orphaned(&w));
}

#[test]
fn a_refused_order_has_the_node_asked_at_once() {
    let mut w = started(2);
    answer(&mut w, 6_000, &held(1, 1));
    let from = w.node_of(1);
    w.pressure(from, 0.95, 11_000);
    assert_eq!(w.take_controls().len(), 2);
    // The next question is due only in seconds.
    assert_eq!(answer(&mut w, 100, &held(1, 1)), 0);
    w.step(Input::Ordered {
        execution: World::id(1),
        epoch: 1,
        answer: ControlOutcome::NotHeld,
    });
    assert_eq!(answer(&mut w, 100, &[]), 1);
}
