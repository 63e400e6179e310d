//! Decisions of the policy, as short stories.

mod world;

use fiec_policy::{Action, Config, ControlOutcome, Input, YieldRefusal};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Bound, Cause, Event, Fault, Phase};
use world::World;

fn bound_to(action: &Action) -> Option<String> {
    let Action::Append { events, .. } = action else {
        return None;
    };
    events.iter().find_map(|e| match e {
        Event::Bound { node, .. } => Some(node.to_string()),
        _ => None,
    })
}

#[test]
fn a_submission_is_bound_to_a_viable_node_in_one_message_and_says_why() {
    let mut w = World::new(2);
    w.pressure(0, 0.95, 11_000);
    let actions = w.submit(1);
    let Some(Action::Append {
        events,
        expected: 0,
        ..
    }) = actions.first()
    else {
        panic!("{actions:?}")
    };
    assert!(matches!(events[0], Event::Submitted));
    let Event::Bound {
        node,
        decision: Some(decision),
        cause: Cause::Initial,
        epoch: 1,
        ..
    } = &events[1]
    else {
        panic!("{events:?}")
    };
    assert_eq!(node.as_str(), "n1");
    assert_eq!(decision.candidates[0].node.as_str(), "n1");
    assert!(
        decision.candidates[1].rejected[0].contains("memory is unviable"),
        "{decision:?}"
    );
}

#[test]
fn long_work_beyond_the_slots_waits_centrally_and_gets_the_next_free_slot() {
    let mut w = World::new(1);
    (1..=3).for_each(|n| drop(w.submit_and_store(n)));
    assert!(
        matches!(w.phase(3), Phase::Pending { .. }),
        "two slots, three executions"
    );
    w.start(1);
    w.start(2);
    w.pass(60_000);
    w.complete(1);
    w.pass(100);
    assert!(matches!(w.phase(3), Phase::Bound(_)));
}

#[test]
fn a_new_submission_goes_behind_what_a_round_has_left_over() {
    let config = Config {
        burst: 1,
        ..Config::default()
    };
    let mut w = World::with(config, vec![world::descriptor(0, 100)]);
    w.cordon(0, true);
    for n in 1..=3 {
        w.submit_and_store(n);
    }
    w.cordon(0, false);
    let places: Vec<_> = w.submit(4).iter().map(bound_to).collect();
    assert_eq!(
        places,
        [Some("n0".into()), None],
        "one that waits goes first"
    );
    w.carry_out();
    w.pass(500);
    let phases = [1, 2, 3, 4].map(|n| w.phase(n).as_str());
    assert_eq!(phases, ["bound", "bound", "pending", "pending"]);
}

#[test]
fn short_work_is_bound_ahead_of_the_slots() {
    let mut w = World::new(1);
    for n in 1..=40 {
        w.submit_and_store(n);
        w.start(n);
        w.complete(n);
    }
    (100..150).for_each(|n| drop(w.submit_and_store(n)));
    assert!((100..150).all(|n| matches!(w.phase(n), Phase::Bound(_))));
}

#[test]
fn pressure_orders_the_holder_to_yield_to_a_destination_that_was_told_to_prepare() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.pressure(from, 0.95, 11_000);
    let orders = w.take_controls();
    assert!(
        matches!(&orders[0], (node, ControlRequest::Prepare { .. }) if node.as_str() == format!("n{}", 1 - from))
    );
    let (
        node,
        ControlRequest::Yield {
            epoch: 1,
            cause: Cause::Pressure { evidence },
            to: Some(to),
            ..
        },
    ) = &orders[1]
    else {
        panic!("{orders:?}")
    };
    assert_eq!(node.as_str(), format!("n{from}"));
    assert_eq!(to.node.as_str(), format!("n{}", 1 - from));
    assert!(evidence.vector.len() <= 16 && evidence.value > 0.9);
    w.pressure(from, 0.95, 2_000);
    assert!(w.take_controls().is_empty(), "one order at a time");
}

#[test]
fn an_order_that_is_not_answered_is_given_again() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.pressure(from, 0.95, 11_000);
    assert_eq!(w.take_controls().len(), 2);
    w.step(Input::Ordered {
        execution: World::id(1),
        epoch: 1,
        answer: ControlOutcome::NoAnswer,
    });
    w.pressure(from, 0.95, 500);
    assert!(w.take_controls().is_empty());
    w.pressure(from, 0.95, 1_000);
    assert_eq!(w.take_controls().len(), 2);
}

#[test]
fn where_nothing_is_viable_it_stays_and_says_so() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.start(1);
    w.pressure(0, 0.95, 12_000);
    assert!(w.take_controls().is_empty());
    let why = w.why(1);
    assert!(
        why.summary.contains("no other node can take it"),
        "{}",
        why.summary
    );
}

#[test]
fn silence_alone_moves_nothing_and_an_unanswered_probe_does() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.silence(from);
    w.pass(5_500);
    assert!(matches!(w.phase(1), Phase::Started(_)));
    assert_eq!(w.take_probes(), [format!("n{from}")]);
    let before = w.node(from);
    w.step(Input::Probe {
        node: before.clone(),
        answered: None,
    });
    w.carry_out();
    let Phase::Bound(Bound { binding, .. }) = w.phase(1) else {
        panic!("{:?}", w.phase(1))
    };
    assert_eq!(binding.node.as_str(), format!("n{}", 1 - from));
}

#[test]
fn an_answered_probe_keeps_a_silent_node_alive() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.silence(from);
    w.pass(5_500);
    w.take_probes();
    let (name, instance) = (w.node(from), w.instance(from));
    w.step(Input::Probe {
        node: name.clone(),
        answered: Some(instance),
    });
    w.pass(2_000);
    assert!(matches!(w.phase(1), Phase::Started(_)));
}

#[test]
fn a_stall_of_the_observer_is_no_loss() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    w.pass(50);
    w.freeze(60_000);
    w.tick();
    assert!(w.take_probes().is_empty());
    assert!(matches!(w.phase(1), Phase::Started(_)));
}

#[test]
fn a_new_life_of_a_node_frees_what_the_old_one_held() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.start(1);
    w.pass(3_000);
    w.restart_node(0);
    w.take_probes();
    let (name, instance) = (w.node(0), w.instance(0));
    w.step(Input::Probe {
        node: name.clone(),
        answered: Some(instance),
    });
    w.pass(500);
    let Phase::Bound(Bound { binding, .. }) = w.phase(1) else {
        panic!("{:?}", w.phase(1))
    };
    assert_eq!(binding.instance, instance);
}

#[test]
fn a_full_node_takes_up_in_its_new_life_what_it_held_in_the_old_one() {
    let mut w = World::new(1);
    for n in [1, 2] {
        w.submit_and_store(n);
        w.start(n);
    }
    w.pass(3_000);
    w.restart_node(0);
    w.take_probes();
    let (name, instance) = (w.node(0), w.instance(0));
    w.step(Input::Probe {
        node: name.clone(),
        answered: Some(instance),
    });
    w.pass(2_000);
    for n in [1, 2] {
        let phase = w.phase(n);
        let binding = phase.binding().map(|b| b.instance);
        assert_eq!(binding, Some(instance), "{n}: {phase:?}");
    }
}

#[test]
fn a_binding_that_nobody_takes_up_is_sent_again_and_then_bound_elsewhere() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    let first = w.node_of(1);
    w.sent_capsules();
    w.pass(6_500);
    assert_eq!(w.sent_capsules(), 1);
    w.pass(6_000);
    assert_ne!(w.node_of(1), first);
    assert!(matches!(w.last_cause(1), Some(Cause::NotTaken { .. })));
}

#[test]
fn a_refused_execution_goes_elsewhere() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    let first = w.node_of(1);
    w.refuse(1);
    w.pass(100);
    assert_ne!(w.node_of(1), first);
}

#[test]
fn nodes_that_refuse_an_execution_again_and_again_are_asked_less_and_less_often() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    // The node that refused it is avoided for two seconds at first, then four, then eight.
    for wait in [2_000, 4_000, 8_000, 16_000] {
        for _ in 0..2 {
            assert!(matches!(w.phase(1), Phase::Bound(_)));
            w.refuse(1);
            w.pass(100);
        }
        assert!(
            matches!(w.phase(1), Phase::Pending { .. }),
            "both are left alone"
        );
        w.pass(wait - 600);
        assert!(matches!(w.phase(1), Phase::Pending { .. }), "for {wait} ms");
        w.pass(500);
    }
    // With a commit the count begins again.
    assert!(matches!(w.phase(1), Phase::Bound(_)));
    let node = w.node_of(1);
    w.start(1);
    w.commit(1, 1, "a");
    w.give_back(1, Fault::DiskFull);
    w.pass(100);
    assert_ne!(w.node_of(1), node);
    w.start(1);
    w.give_back(1, Fault::DiskFull);
    w.pass(1_500);
    assert!(matches!(w.phase(1), Phase::Pending { .. }));
    w.pass(600);
    assert!(matches!(w.phase(1), Phase::Bound(_)));
}

#[test]
fn a_node_that_gives_back_what_it_cannot_go_on_with_is_asked_less_and_less_often() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    for wait in [2_000, 4_000, 8_000, 16_000] {
        for _ in 0..2 {
            assert!(matches!(w.phase(1), Phase::Bound(_)));
            w.start(1);
            w.give_back(1, Fault::DiskFull);
            w.pass(100);
        }
        assert!(
            matches!(w.phase(1), Phase::Pending { .. }),
            "both are left alone"
        );
        w.pass(wait - 600);
        assert!(matches!(w.phase(1), Phase::Pending { .. }), "for {wait} ms");
        w.pass(500);
    }
    let Some(Cause::NotTaken { reason, fault }) = w.last_cause(1) else {
        panic!("bound for another reason")
    };
    assert_eq!((reason.as_str(), fault), ("no", None));
}

#[test]
fn what_queues_behind_long_work_moves_to_a_free_slot() {
    let mut w = World::new(2);
    w.cordon(1, true);
    for n in 1..=20 {
        w.submit_and_store(n);
        w.start(n);
        w.complete(n);
    }
    (30..34).for_each(|n| drop(w.submit_and_store(n)));
    w.start(30);
    w.start(31);
    w.cordon(1, false);
    w.pass(1_200);
    assert_eq!(w.node_of(32), 1);
    assert_eq!(w.node_of(33), 1);
    assert!(matches!(w.last_cause(33), Some(Cause::Balance)));
}

#[test]
fn a_drained_node_is_emptied_with_destinations() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.drain(from);
    let orders = w.take_controls();
    assert!(
        matches!(
            &orders[1].1,
            ControlRequest::Yield {
                cause: Cause::Drain { .. },
                to: Some(_),
                ..
            }
        ),
        "{orders:?}"
    );
}

#[test]
fn a_manual_yield_leaves_the_present_node_unless_a_wish_names_a_bad_one() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let other = w.node(1 - w.node_of(1));
    w.step(Input::Yield {
        ticket: 7,
        execution: World::id(1),
        to: None,
        who: "ann".to_owned(),
    });
    let orders = w.take_controls();
    assert!(matches!(&orders[1].1, ControlRequest::Yield { to: Some(to), .. } if to.node == other));
    let nowhere: fiec_schemas::NodeId = "nowhere".parse().unwrap();
    let out = w.step(Input::Yield {
        ticket: 8,
        execution: World::id(1),
        to: Some(nowhere.clone()),
        who: "ann".to_owned(),
    });
    assert!(
        matches!(
            &out[..],
            [Action::Refuse { ticket: 8, refusal: YieldRefusal::UnknownNode(unknown) }] if unknown.node == nowhere
        ),
        "{out:?}"
    );
}

#[test]
fn an_operator_may_move_an_execution_to_a_suspect_node_but_not_to_an_unviable_one() {
    let yields = |w: &mut World, to: Option<usize>| {
        let to = to.map(|to| w.node(to));
        w.step(Input::Yield {
            ticket: 7,
            execution: World::id(1),
            to,
            who: "ann".to_owned(),
        })
    };
    let refusal = |out: &[Action]| match out {
        [Action::Refuse { ticket: 7, refusal }] => Some(refusal.to_string()),
        _ => None,
    };
    for named in [false, true] {
        let mut w = World::new(2);
        w.submit_and_store(1);
        w.start(1);
        let other = 1 - w.node_of(1);
        let to = named.then_some(other);
        w.pressure(other, 0.95, 5_000);
        assert_eq!(
            refusal(&yields(&mut w, to)),
            None,
            "suspect, named: {named}"
        );
        let orders = w.take_controls();
        let name = w.node(other);
        assert!(
            orders.iter().any(|(_, o)| matches!(
                o,
                ControlRequest::Yield { to: Some(to), .. } if to.node == name
            )),
            "{orders:?}"
        );
        let mut w = World::new(2);
        w.submit_and_store(1);
        w.start(1);
        let other = 1 - w.node_of(1);
        w.pressure(other, 0.95, 11_000);
        let refused = refusal(&yields(&mut w, named.then_some(other)));
        let words = refused.expect("unviable");
        assert!(words.contains("memory is unviable: 95.0 %"), "{words}");
    }
}

#[test]
fn the_second_replica_waits_for_the_preferred_one() {
    let mut w = World::new(2);
    w.rival();
    let mine = (1..100).find(|n| w.submit(*n).iter().any(|a| bound_to(a).is_some()));
    assert!(
        mine.is_some(),
        "what a replica reads itself it places itself"
    );
    // A pending execution that another service submitted belongs to one of the two.
    let mut at_once = 0;
    for n in 200..220 {
        w.foreign_pending(n);
        w.act();
        at_once += usize::from(matches!(w.phase(n), Phase::Bound(_)));
        w.complete_if_bound(n);
    }
    assert!((1..20).contains(&at_once), "{at_once}");
}

#[test]
fn why_names_the_obstacle_and_the_remedy() {
    let mut w = World::new(1);
    w.cordon(0, true);
    w.submit_and_store(1);
    let why = w.why(1);
    assert!(
        why.candidates[0].rejected[0].contains("cordoned by ann"),
        "{why:?}"
    );
    assert!(!why.would_help.is_empty());
}

#[test]
fn what_no_ledger_message_contains_is_pending_until_it_has_been_fetched() {
    let mut w = World::new(2);
    w.foreign_large(1);
    let summary = w.why(1).summary;
    assert!(summary.contains("is being fetched"), "{summary}");
    w.foreign_pending(2);
    let summary = w.why(2).summary;
    assert!(!summary.contains("is being fetched"), "{summary}");
}
