//! Gangs on a cluster that is always full: free places are reserved for the leading gang, and
//! executions are preempted for it, one for each place that it lacks or none.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use std::sync::Arc;

use fiec_policy::{Config, Input, SharingSettings};
use fiec_schemas::quota::{Reservation, Reservations};
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{Cause, Event, InstanceId};
use proptest::prelude::*;
use uuid::Uuid;
use world::World;
use world::lab::{LONG, Lab, for_ever, node};
use world::offers::with_devices;
use world::scenes::{on, single};

fn gang(size: u32, fields: &str) -> String {
    format!(r#""gang":{{"name":"g","size":{size}}}{fields}"#)
}

/// Settings without preemption: only the reservation helps.
fn patient() -> Config {
    Config {
        preempt: false,
        sharing: SharingSettings {
            slicing: false,
            ..SharingSettings::default()
        },
        ..Config::default()
    }
}

fn lab(config: Config, slots: u32) -> Lab {
    Lab::new(World::with(config, vec![node(slots)]))
}

/// True if all members of the gang 1, 2, … run.
fn together(lab: &Lab, size: u64) -> bool {
    (1..=size).all(|n| lab.runs(n))
}

#[test]
fn a_gang_starts_although_there_is_always_something_that_would_fit() {
    let mut lab = lab(patient(), 4);
    let lengths = |n: u64| if n < 10 { LONG } else { 2_000 + 310 * (n % 7) };
    let mut next = 10;
    let mut top_up = |lab: &mut Lab| {
        while lab.w.policy.waiting() < 6 {
            lab.submit(next, 500, "");
            next += 1;
        }
    };
    for _ in 0..20 {
        top_up(&mut lab);
        lab.play(500, lengths);
    }
    for n in 1..=3 {
        lab.submit(n, 500, &gang(3, ""));
    }
    let (mut waited, mut words) = (0, (false, false));
    while !together(&lab, 3) && waited < 60_000 {
        top_up(&mut lab);
        lab.play(250, lengths);
        waited += 250;
        let last = lab.every.keys().next_back().copied().unwrap();
        let says = |n, words: &str| lab.w.why(n).summary.contains(words);
        words.0 |= says(1, "free slots are reserved for it");
        words.1 |= says(last, "are reserved for the gang g of 3");
    }
    assert_eq!(words, (true, true), "both are told");
    // Ten seconds until the reservation, and the longest of the executions that ran then.
    assert!((10_000..16_500).contains(&waited), "{waited} ms");
    // From then on the others get the places that it leaves.
    lab.play(3_000, lengths);
    assert_eq!(lab.running().len(), 4);
}

#[test]
fn no_member_waits_in_a_nodes_queue_while_the_others_compute() {
    let mut lab = lab(patient(), 2);
    // A node with such short work that executions may queue on it.
    for n in 10..30 {
        lab.w.submit_and_store(n);
        lab.w.start(n);
        lab.w.complete(n);
    }
    lab.submit(50, 500, "");
    lab.play(100, for_ever);
    assert!(lab.runs(50));
    for n in 60..62 {
        lab.submit(n, 500, "");
    }
    lab.play(100, for_ever);
    assert_eq!(lab.phase(61), "bound", "it queues");
    for n in 60..62 {
        lab.w.complete(n);
        lab.play(100, for_ever);
    }
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, ""));
    }
    lab.play(1_000, for_ever);
    assert_eq!([lab.phase(1), lab.phase(2)], ["pending", "pending"]);
    lab.w.complete(50);
    lab.play(1_000, for_ever);
    assert!(together(&lab, 2));
}

#[test]
fn what_ends_before_the_gang_can_begin_goes_ahead_of_it() {
    let mut lab = lab(patient(), 3);
    lab.submit(10, 500, r#""expected_s":60"#);
    lab.submit(11, 500, r#""expected_s":100"#);
    let lengths = |n: u64| match n {
        10 => 60_000,
        11 => 100_000,
        12 => 20_000,
        _ => LONG,
    };
    lab.play(2_000, lengths);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, ""));
    }
    lab.play(12_000, lengths);
    lab.submit(13, 500, "");
    lab.submit(14, 500, r#""expected_s":50"#);
    lab.submit(12, 500, r#""expected_s":20"#);
    lab.play(2_000, lengths);
    assert_eq!(lab.running(), [10, 11, 12], "it is gone in time");
    lab.play(22_000, lengths);
    assert_eq!(lab.running(), [10, 11], "its place is kept again");
    lab.play(24_000, lengths);
    assert_eq!(lab.running(), [1, 2, 11]);
}

const DEVICE: &str = r#""requires":{"device":{"memory_bytes":40}}"#;

/// A node with `slots` slots and two devices, one of them in use.
fn with_one_device_taken(slots: u32, fields: &str) -> Lab {
    let mut place = with_devices(0, &[80, 80]);
    place.slots = slots;
    let mut lab = Lab::new(World::with(patient(), vec![place]));
    lab.submit(10, 500, &format!("{DEVICE}{fields}"));
    lab.play(2_000, for_ever);
    assert_eq!(lab.running(), [10]);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, &format!(",{DEVICE}")));
    }
    lab.play(12_000, for_ever);
    assert!(
        lab.w
            .why(1)
            .summary
            .contains("free slots are reserved for it")
    );
    lab
}

#[test]
fn what_ends_before_a_gang_can_have_its_devices_goes_ahead_of_it() {
    let lengths = |n: u64| match n {
        10 => 60_000,
        12 => 20_000,
        _ => LONG,
    };
    let mut lab = with_one_device_taken(8, r#","expected_s":60"#);
    lab.submit(11, 500, DEVICE);
    lab.submit(12, 500, &format!(r#"{DEVICE},"expected_s":20"#));
    lab.play(2_000, lengths);
    assert_eq!(lab.running(), [10, 12], "there are slots, and no device");
    lab.play(22_000, lengths);
    assert_eq!(lab.running(), [10], "its device is kept again");
    lab.play(26_000, lengths);
    assert_eq!(lab.running(), [1, 2]);
}

#[test]
fn slots_that_a_gang_waits_for_devices_beside_are_had_by_others() {
    let mut lab = with_one_device_taken(4, "");
    for n in 20..22 {
        lab.submit(n, 500, "");
    }
    lab.play(2_000, for_ever);
    assert_eq!(lab.running(), [10, 20], "two slots are for the gang");
    let why = lab.w.why(21).summary;
    assert!(why.contains("are reserved for the gang g of 2"), "{why}");
    lab.w.complete(10);
    lab.play(2_000, for_ever);
    assert_eq!(lab.running(), [1, 2, 20, 21]);
}

#[test]
fn as_many_give_way_to_a_gang_as_it_lacks_places() {
    let mut lab = lab(Config::default(), 4);
    for n in 10..13 {
        lab.submit(n, 500, "");
    }
    lab.play(8_000, for_ever);
    for n in 1..=3 {
        lab.submit(n, 500, &gang(3, r#","priority":10"#));
    }
    lab.play(4_000, for_ever);
    assert!(together(&lab, 3), "{}", lab.w.why(1).summary);
    assert_eq!(lab.running().len(), 4);
    assert_eq!(
        lab.gave_way.len(),
        2,
        "one place was free: {:?}",
        lab.gave_way
    );
    let (rule, reason) = lab.reason(lab.gave_way[0].0);
    assert_eq!(rule, Rule::Priority);
    assert!(reason.contains("for the gang g of 3"), "{reason}");
}

/// Two nodes: n0 with `slots` slots, n1 with one.
fn two_nodes(config: Config, slots: u32) -> Lab {
    Lab::new(World::with(config, vec![node(slots), single(1, 0)]))
}

#[test]
fn only_what_has_the_place_that_one_member_lacks_gives_way() {
    for nodes in [["n0", "n1"], ["n1", "n0"]] {
        let mut lab = two_nodes(Config::default(), 2);
        lab.submit(10, 500, &on("n0"));
        lab.submit(11, 500, &on("n1"));
        lab.play(8_000, for_ever);
        for (n, at) in (1..).zip(nodes) {
            lab.submit(n, 500, &gang(2, &format!(r#","priority":10,{}"#, on(at))));
        }
        lab.play(20_000, for_ever);
        assert!(together(&lab, 2), "{}", lab.w.why(1).summary);
        let went: Vec<_> = lab.gave_way.iter().map(|(n, ..)| *n).collect();
        assert_eq!(
            (went, lab.running()),
            (vec![11], vec![1, 2, 10]),
            "{nodes:?}"
        );
    }
}

/// Adds enough policy services that one of them is preferred for every key.
fn rivals(lab: &mut Lab) {
    for n in 2..42 {
        lab.w.step(Input::Replica {
            id: InstanceId(Uuid::from_u128(n)),
            leaving: false,
        });
    }
}

#[test]
fn others_give_way_to_a_gang_by_whoever_has_reserved_for_it() {
    let config = Config::default();
    let residency = config.preempt_residency_ms;
    let mut lab = lab(config, 2);
    lab.submit(10, 500, "");
    lab.submit(11, 500, "");
    lab.play(residency - 2_000, for_ever);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, r#","priority":10"#));
    }
    lab.play(1_000, for_ever);
    for _ in 0..16 {
        rivals(&mut lab);
        lab.play(250, for_ever);
    }
    assert!(together(&lab, 2), "{}", lab.w.why(1).summary);
}

#[test]
fn what_gave_way_to_a_gang_by_another_replicas_order_is_kept_for_it_here_too() {
    let mut lab = lab(Config::default(), 2);
    lab.submit(10, 500, "");
    lab.submit(11, 500, "");
    lab.play(1_000, for_ever);
    rivals(&mut lab);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, r#","priority":10"#));
    }
    let entries = [1, 2].map(|n| Reservation {
        execution: World::id(n),
        by: InstanceId(Uuid::from_u128(2)),
        firm: None,
        devices: 0,
        memory_bytes: 0,
        batch: None,
        at_once: None,
        gang: Some("g".parse().unwrap()),
    });
    let table = Reservations {
        entries: entries.into(),
        ..Default::default()
    };
    lab.w
        .holds
        .tables
        .insert(World::tenant(), (1, table.clone()));
    lab.w.step(Input::Reserved {
        tenant: World::tenant(),
        table: Some((1, Arc::new(table))),
        answer: false,
    });
    lab.play(1_500, for_ever);
    rivals(&mut lab);
    let went = Event::Yielded {
        cause: Cause::Preempted {
            rule: Rule::Priority,
            by: Some(World::id(1)),
            reason: "it was told so".into(),
        },
        computed_until: lab.w.wall(),
    };
    let author = lab.w.author(10);
    lab.w.append(World::id(10), vec![went], &author, true);
    lab.submit(12, 500, "");
    lab.play(1_500, for_ever);
    assert_eq!(lab.running(), [11], "{}", lab.w.why(12).summary);
    assert!(
        lab.w
            .why(12)
            .summary
            .contains("are reserved for the gang g of 2"),
        "{}",
        lab.w.why(12).summary
    );
}

#[test]
fn what_waits_behind_a_gang_has_others_give_way_where_nothing_is_kept_for_that() {
    let mut lab = two_nodes(Config::default(), 2);
    for n in 10..12 {
        lab.submit(n, 500, &format!(r#""priority":20,{}"#, on("n0")));
    }
    lab.submit(12, 500, &on("n1"));
    lab.play(2_000, for_ever);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, &format!(r#","priority":10,{}"#, on("n0"))));
    }
    lab.play(15_000, for_ever);
    assert!(
        lab.w
            .why(1)
            .summary
            .contains("free slots are reserved for it")
    );
    lab.submit(13, 500, &format!(r#""priority":5,{}"#, on("n1")));
    lab.play(5_000, for_ever);
    assert_eq!(lab.running(), [10, 11, 13], "{}", lab.w.why(13).summary);
}

#[test]
fn gangs_that_can_never_have_room_keep_no_other_one_from_going_first() {
    let mut lab = lab(patient(), 4);
    let lengths = |n: u64| if n < 100 { LONG } else { 2_000 + 310 * (n % 7) };
    for n in 0..45 {
        let name = n / 5;
        lab.submit(
            20 + n,
            500,
            &format!(r#""gang":{{"name":"h{name}","size":5}}"#),
        );
    }
    // More gangs than one choice checks go before the one that could start.
    lab.play(500, lengths);
    for n in 1..=3 {
        lab.submit(n, 500, &gang(3, ""));
    }
    let (mut next, mut waited) = (100, 0);
    while !together(&lab, 3) && waited < 60_000 {
        while lab
            .every
            .keys()
            .filter(|n| **n >= 100 && lab.phase(**n) == "pending")
            .count()
            < 6
        {
            lab.submit(next, 500, "");
            next += 1;
        }
        lab.play(250, lengths);
        waited += 250;
    }
    assert!(waited < 20_000, "{waited} ms: {}", lab.w.why(1).summary);
}

#[test]
fn a_gang_for_which_the_nodes_have_no_room_at_all_is_told_so_until_there_are_more() {
    let mut lab = lab(patient(), 4);
    for n in 1..=5 {
        lab.submit(n, 500, &gang(5, ""));
    }
    lab.play(2_000, for_ever);
    let why = lab.w.why(1);
    assert!(
        why.summary
            .contains("room for 4 of them now, and the present nodes cannot hold all of it"),
        "{}",
        why.summary
    );
    let help = why.would_help.join("; ");
    assert!(help.starts_with("more nodes, or larger ones"), "{help}");
    lab.w.join();
    lab.play(3_000, for_ever);
    assert!(together(&lab, 5), "{}", lab.w.why(1).summary);
}

#[test]
fn nobody_gives_way_to_a_gang_that_would_not_have_room_all_the_same() {
    let mut lab = lab(Config::default(), 2);
    lab.submit(10, 500, r#""priority":20"#);
    lab.submit(11, 500, "");
    lab.play(8_000, for_ever);
    for n in 1..=2 {
        lab.submit(n, 500, &gang(2, r#","priority":10"#));
    }
    lab.play(9_000, for_ever);
    assert_eq!((lab.running(), lab.gave_way.len()), (vec![10, 11], 0));
    lab.w.complete(10);
    lab.play(3_000, for_ever);
    assert!(together(&lab, 2), "{}", lab.w.why(1).summary);
}

#[test]
fn nothing_is_kept_for_a_gang_that_has_more_members_than_there_are_slots() {
    let mut lab = lab(patient(), 3);
    lab.submit(10, 500, "");
    lab.play(1_000, for_ever);
    for n in 1..=4 {
        lab.submit(n, 500, &gang(4, ""));
    }
    lab.play(30_000, for_ever);
    lab.submit(11, 500, "");
    lab.submit(12, 500, "");
    lab.play(1_000, for_ever);
    assert_eq!(lab.running(), [10, 11, 12]);
}

#[test]
fn of_two_gangs_the_first_one_has_what_becomes_free_and_then_the_other() {
    let mut lab = lab(patient(), 4);
    let lengths = |n: u64| match n {
        10..=13 => 20_000 + 4_000 * (n - 10),
        1..=6 => 10_000,
        _ => LONG,
    };
    for n in 10..14 {
        lab.submit(n, 500, "");
    }
    lab.play(1_000, lengths);
    for n in 1..=4 {
        lab.submit(n, 500, &gang(4, ""));
    }
    for n in 5..=6 {
        lab.submit(n, 500, r#""gang":{"name":"h","size":2}"#);
    }
    // The smaller gang would have its places much sooner.
    lab.play(27_000, lengths);
    assert!((1..=6).all(|n| !lab.runs(n)), "{:?}", lab.running());
    lab.play(8_000, lengths);
    assert_eq!(lab.running(), [1, 2, 3, 4]);
    lab.play(12_000, lengths);
    assert_eq!(lab.running(), [5, 6]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A gang waits no longer than its patience, the executions before it, and the longest running
    /// one, with or without preemption.
    #[test]
    fn a_gang_waits_for_a_bounded_time(
        slots in 2u32..6,
        share in 0.3f64..1.0,
        longest in 1u64..20,
        gives_way in any::<bool>(),
        told in any::<bool>(),
        lower in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let config = if gives_way { Config::default() } else { patient() };
        let residency = config.preempt_residency_ms;
        world::trace::untraced();
        let mut lab = lab(config, slots);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
        let size = ((f64::from(slots) * share).ceil() as u32).max(2);
        let length = move |n: u64| {
            if n < 100 {
                return LONG;
            }
            let dice = (n ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            500 + dice % (longest * 1_000)
        };
        let mut next = 100;
        let mut top_up = |lab: &mut Lab| {
            while lab.w.policy.waiting() < 2 * slots as usize {
                let mut fields = format!(r#""priority":{}"#, -i32::from(lower));
                if told {
                    fields += &format!(r#","expected_s":{}"#, length(next).div_ceil(1_000));
                }
                lab.submit(next, 250, &fields);
                next += 1;
            }
        };
        for _ in 0..10 {
            top_up(&mut lab);
            lab.play(500, length);
        }
        for n in 1..=u64::from(size) {
            lab.submit(n, 500, &gang(size, ""));
        }
        let longest = longest * 1_000 + 500;
        // Of its own priority, three executions per slot go before it: one runs and two wait.
        let before = if lower { 0 } else { 3 * longest };
        // An execution that was backfilled because it may be preempted is preempted after this time.
        let passes = if gives_way && lower { residency } else { 0 };
        let most = before.max(10_000) + longest + passes + 5_000;
        let mut waited = 0;
        while !together(&lab, u64::from(size)) {
            prop_assert!(waited <= most, "{waited} ms: {}", lab.w.why(1).summary);
            top_up(&mut lab);
            lab.play(250, length);
            waited += 250;
        }
    }
}
