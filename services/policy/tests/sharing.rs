//! Order of the queue and preemption, on a simulated cluster.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may end so, and measure time"
)]

mod world;

use fiec_policy::{Config, Input, SharingSettings};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, Event, Tenant};
use world::World;
use world::lab::{self, LONG, Lab, for_ever, node};
use world::scenes::{on, single};

const SLICE: u64 = 30_000;

#[test]
fn the_highest_priority_goes_first_and_then_the_oldest() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 100, r#""priority":50"#);
    lab.submit(2, 100, "");
    lab.submit(3, 100, r#""priority":7"#);
    lab.submit(4, 100, r#""priority":7"#);
    lab.submit(5, 100, r#""priority":-3"#);
    let mut order: Vec<u64> = Vec::new();
    for _ in 0..5 {
        lab.play(2_000, for_ever);
        let running = lab.running();
        assert_eq!(running.len(), 1);
        order.extend(&running);
        lab.w.complete(running[0]);
    }
    assert_eq!(order, [1, 3, 4, 2, 5]);
}

#[test]
fn the_earliest_deadline_goes_first_among_equals() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 100, "");
    lab.submit(2, 100, "");
    lab.submit(3, 100, r#""deadline":{"within_s":86400}"#);
    lab.submit(4, 100, r#""deadline":{"within_s":80000}"#);
    lab.play(2_000, for_ever);
    let mut order: Vec<u64> = Vec::new();
    for _ in 0..4 {
        let running = lab.running();
        order.extend(&running);
        lab.w.complete(running[0]);
        lab.play(2_000, for_ever);
    }
    assert_eq!(order, [1, 4, 3, 2]);
}

#[test]
fn a_higher_priority_takes_the_place_of_the_one_with_the_least_regret() {
    let mut lab = Lab::new(lab::lab(2));
    // The first crosses a boundary every 20 s, the second every half second.
    lab.submit(1, 20_000, "");
    lab.submit(2, 500, "");
    lab.play(42_000, for_ever);
    lab.submit(3, 500, r#""priority":10"#);
    lab.play(1_500, for_ever);
    assert_eq!(
        (lab.running(), lab.phase(2)),
        (vec![1, 3], "pending".into())
    );
    let (rule, reason) = lab.reason(2);
    assert_eq!(rule, Rule::Priority);
    let spared = format!("spared: {}", World::id(1));
    for words in [
        "waits with priority 10, and this one has 0",
        "its regret is",
        "since its last commit",
        "never moved",
        spared.as_str(),
    ] {
        assert!(reason.contains(words), "{words:?} in {reason}");
    }
    // The preempted execution returns as soon as there is room.
    lab.w.complete(3);
    lab.play(300, for_ever);
    assert_eq!(lab.running(), [1, 2]);
}

#[test]
fn whose_place_would_do_gives_way_although_many_elsewhere_would_lose_less() {
    let nodes = vec![node(12), single(1, 0)];
    let mut lab = Lab::new(World::with(Config::default(), nodes));
    for n in 1..=12 {
        lab.submit(n, 500, &on("n0"));
    }
    lab.submit(13, 10_000, &on("n1"));
    lab.play(8_000, for_ever);
    lab.submit(20, 500, &format!(r#""priority":10,{}"#, on("n1")));
    lab.play(12_000, for_ever);
    let went: Vec<_> = lab.gave_way.iter().map(|(n, ..)| *n).collect();
    assert_eq!((went, lab.runs(20)), (vec![13], true));
    assert_eq!(lab.running().len(), 13, "all others go on");
    let reason = lab.reason(13).1;
    let words = "; 12 that would be preempted first are on nodes that the waiting one cannot use";
    assert!(reason.contains(words), "{reason}");
}

#[test]
fn one_gives_way_to_one_although_the_answer_to_its_order_is_lost() {
    for lost in 1..4 {
        let mut lab = Lab::new(lab::lab(3));
        (1..=3).for_each(|n| lab.submit(n, 9_000, ""));
        lab.play(8_000, for_ever);
        lab.submit(4, 500, r#""priority":10"#);
        lab.answers_lost = lost;
        lab.play(30_000, for_ever);
        assert_eq!((lab.gave_way.len(), lab.runs(4)), (1, true), "{lost} lost");
    }
}

#[test]
fn what_gives_way_moves_to_another_node_where_there_is_room() {
    let two = vec![node(1), single(1, 0)];
    let mut lab = Lab::new(World::with(Config::default(), two));
    lab.submit(1, 500, "");
    lab.play(6_000, for_ever);
    let here = lab.w.node_of(1);
    let only = format!(r#""priority":5,{}"#, on(&format!("n{here}")));
    lab.submit(2, 500, &only);
    lab.play(3_000, for_ever);
    assert_eq!(lab.running(), [1, 2]);
    assert_eq!((lab.w.node_of(1), lab.w.node_of(2)), (1 - here, here));
}

#[test]
fn nothing_gives_way_before_it_has_been_there_for_long_enough() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 100, "");
    lab.play(1_000, for_ever);
    lab.submit(2, 100, r#""priority":10"#);
    lab.play(3_000, for_ever);
    assert_eq!(lab.running(), [1], "five seconds are the least");
    lab.play(3_000, for_ever);
    assert_eq!(lab.running(), [2]);
}

#[test]
fn nothing_gives_way_where_that_is_switched_off_or_of_no_use() {
    let config = Config {
        preempt: false,
        sharing: SharingSettings {
            slicing: false,
            ..SharingSettings::default()
        },
        ..Config::default()
    };
    let mut lab = Lab::new(World::with(config, vec![node(1)]));
    lab.submit(1, 100, "");
    lab.play(10_000, for_ever);
    lab.submit(2, 100, r#""priority":10"#);
    lab.play(120_000, for_ever);
    assert_eq!((lab.running(), lab.gave_way.len()), (vec![1], 0));

    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 100, "");
    lab.play(10_000, for_ever);
    // There is no such node: any preemption would be in vain.
    lab.submit(
        2,
        100,
        r#""priority":10,"requires":{"labels":{"rack":"9"}}"#,
    );
    lab.play(60_000, for_ever);
    assert_eq!((lab.running(), lab.gave_way.len()), (vec![1], 0));
}

#[test]
fn one_that_has_computed_long_gives_way_to_one_that_has_not_when_its_slice_is_over() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 1_000, "");
    lab.play(4 * SLICE, for_ever);
    lab.submit(2, 1_000, "");
    lab.play(SLICE - 2_000, for_ever);
    assert_eq!(lab.running(), [1], "nothing has waited for a slice yet");
    lab.play(5_000, for_ever);
    assert_eq!(lab.running(), [2]);
    assert_eq!(lab.reason(1).0, Rule::TimeSlice);
    assert!(
        lab.reason(1).1.contains("service level 0"),
        "{}",
        lab.reason(1).1
    );
    // Levels double: the shorter one catches up, and the two swap places ever more rarely.
    lab.play(40 * SLICE, for_ever);
    assert!((2..=8).contains(&lab.gave_way.len()), "{:?}", lab.gave_way);
    let (one, two) = (lab.computed[&1], lab.computed[&2]);
    assert!(one < 4 * two && two < 4 * one, "{one} and {two}");
}

#[test]
fn one_that_says_how_long_it_takes_is_known_by_what_is_left() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 1_000, r#""expected_s":600"#);
    lab.play(590_000, for_ever);
    lab.submit(2, 1_000, "");
    lab.submit(3, 1_000, r#""expected_s":3600"#);
    lab.play(8_000, |n| if n == 1 { 600_000 } else { LONG });
    assert_eq!(lab.running(), [1], "a few seconds are left");
    lab.play(10_000, |n| if n == 1 { 600_000 } else { LONG });
    assert_eq!(lab.running(), [2], "an hour is expected of the other");
}

#[test]
fn a_tenant_below_its_share_takes_from_one_above_it_and_no_more() {
    let mut lab = Lab::new(lab::lab(4));
    for n in 1..=6 {
        lab.submit_of(n, "ann", "");
    }
    lab.play(10_000, for_ever);
    for n in 11..=16 {
        lab.submit_of(n, "bob", "");
    }
    lab.play(20_000, for_ever);
    let of = |lab: &Lab, from: u64| lab.running().iter().filter(|n| **n / 10 == from).count();
    assert_eq!((of(&lab, 0), of(&lab, 1)), (2, 2));
    let reason = lab
        .gave_way
        .iter()
        .map(|(n, ..)| lab.reason(*n))
        .next()
        .unwrap();
    assert_eq!(reason.0, Rule::FairShare);
    assert!(
        reason.1.contains("bob") && reason.1.contains("ann holds 4"),
        "{}",
        reason.1
    );
    assert_eq!(
        lab.gave_way.len(),
        2,
        "it comes to rest: {:?}",
        lab.gave_way
    );
    // With three times the weight it gets three of four slots.
    let bob = Tenant::new("bob").unwrap();
    lab.w.step(Input::Tenant {
        tenant: bob.clone(),
        weight: 3.0,
    });
    lab.play(20_000, for_ever);
    assert_eq!((of(&lab, 0), of(&lab, 1)), (1, 3));
}

#[test]
fn of_two_tenants_the_one_that_has_had_less_goes_first() {
    let mut lab = Lab::new(lab::lab(1));
    for n in [1, 2, 3] {
        lab.submit_of(n, "ann", "");
    }
    lab.play(20_000, for_ever);
    lab.submit_of(4, "bob", "");
    lab.w.complete(1);
    lab.play(200, for_ever);
    assert_eq!(
        lab.running(),
        [4],
        "ann has waited longer, and has had more"
    );
}

#[test]
fn one_that_would_miss_its_deadline_goes_before_one_that_has_time() {
    let mut lab = Lab::new(lab::lab(1));
    lab.submit(1, 1_000, "");
    lab.play(10_000, for_ever);
    lab.submit(2, 1_000, r#""deadline":{"within_s":300},"expected_s":240"#);
    lab.play(20_000, for_ever);
    assert_eq!(lab.running(), [1], "there is time");
    lab.play(20_000, |n| if n == 2 { 240_000 } else { LONG });
    assert_eq!((lab.running(), lab.reason(1).0), (vec![2], Rule::Deadline));
    lab.play(245_000, |n| if n == 2 { 240_000 } else { LONG });
    assert_eq!((lab.phase(2), lab.running()), ("completed".into(), vec![1]));
}

#[test]
fn what_yields_already_when_its_deadline_passes_is_not_ordered_again() {
    let mut w = World::new(2);
    w.submit_line(1, r#""deadline":{"within_s":60,"on_miss":"fail"}"#);
    let deadline = w.wall().plus_ms(60_000);
    w.start(1);
    w.pass(50_000);
    let from = w.node_of(1);
    w.drain(from);
    let mut orders = Vec::new();
    for _ in 0..20 {
        w.pass(1_000);
        let given = w.take_controls().into_iter().map(|(_, request)| request);
        orders.extend(given.filter(|r| matches!(r, ControlRequest::Yield { .. })));
    }
    assert!(w.wall() > deadline && !orders.is_empty());
    for order in &orders {
        let drains = matches!(
            order,
            ControlRequest::Yield {
                cause: Cause::Drain { .. },
                ..
            }
        );
        assert!(drains, "{order:?}");
    }
    w.obey(World::id(1), orders.last().unwrap());
    w.pass(1_000);
    let reason = w.failure_of(World::id(1)).unwrap();
    assert!(reason.contains("was not done by its deadline"), "{reason}");
}

#[test]
fn what_is_to_fail_at_its_deadline_does_so_wherever_it_is() {
    let mut lab = Lab::new(lab::lab(1));
    let fields = r#""deadline":{"within_s":60,"on_miss":"fail"}"#;
    lab.submit(1, 7_000, fields);
    lab.submit(2, 1_000, fields);
    lab.submit(3, 1_000, r#""deadline":{"within_s":60}"#);
    lab.play(59_000, for_ever);
    // No work of an execution in its last seconds may be lost before the deadline.
    assert_ne!(lab.phase(1), "failed");
    lab.play(9_000, for_ever);
    for n in [1, 2] {
        assert_eq!(lab.phase(n), "failed", "{n}");
        let history = &lab.w.ledgers[&World::id(n)].history;
        let Some((at, Event::Failed { reason, .. })) = history.last() else {
            panic!("{history:?}")
        };
        assert!(reason.contains("was not done by its deadline"), "{reason}");
        assert!(*at >= 60_000);
        let bound = history
            .iter()
            .filter(|(_, e)| matches!(e, Event::Bound { .. }));
        assert!(bound.count() <= 1, "nobody begins what is late already");
    }
    lab.play(2_000, for_ever);
    assert_eq!(lab.running(), [3], "the other goes on, late");
}

#[test]
fn a_hundred_thousand_that_wait_cost_a_round_little() {
    world::trace::untraced();
    let mut w = lab::lab(1);
    w.submit_line(1, r#""priority":9"#);
    w.start(1);
    for n in 2..100_002u64 {
        let fields = format!(r#""expected_s":{}"#, 1 + n % 40);
        w.submit_line(n, &fields);
    }
    assert_eq!(w.policy.waiting(), 100_000);
    w.pass(2_000);
    let began = std::time::Instant::now();
    w.complete(1);
    w.pass(5_000);
    let took = began.elapsed();
    // A hundred rounds. A scan of all waiting executions in each would take minutes in a debug
    // build.
    assert!(took.as_secs() < 60, "{took:?}");
    let bound = (2..100_002).filter(|n| w.phase(*n).binding().is_some());
    assert_eq!(bound.count(), 1);
}

/// No waiting execution starves, whatever outranks it.
#[test]
fn ageing_brings_the_lowest_priority_to_its_turn_against_a_stream_of_higher_ones() {
    let config = Config {
        ageing_ms: 2_000,
        ..Config::default()
    };
    let mut lab = Lab::new(World::with(config, vec![node(1)]));
    lab.submit(1, 500, r#""priority":10"#);
    lab.play(1_000, |_| 3_000);
    lab.submit(2, 500, r#""priority":-10"#);
    let mut first = None;
    for n in 3..60 {
        lab.submit(n, 500, r#""priority":10"#);
        lab.play(2_500, |_| 3_000);
        if first.is_none() && lab.computed.contains_key(&2) {
            first = Some(n);
        }
    }
    let first = first.unwrap_or(u64::MAX);
    assert!(
        (10..40).contains(&first),
        "it began after {first} others had come"
    );
}
