//! What a tenant's quota counts, and what happens to executions beyond a lowered quota.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use std::sync::Arc;

use fiec_policy::Replicas;
use fiec_policy::{Config, Input, Millis};
use fiec_schemas::quota::Quota;
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{InstanceId, NodeDescriptor};
use proptest::prelude::*;
use uuid::Uuid;
use world::lab::{Lab, for_ever, node};
use world::offers::with_devices;
use world::scenes::quota;
use world::{World, descriptor};

const GRACE: u64 = 30_000;

fn of_memory(bytes: u64) -> Quota {
    Quota {
        memory_bytes: Some(bytes),
        ..quota(None::<u32>)
    }
}

/// A lab with one node of `slots` slots, all in use.
fn full(slots: u32) -> Lab {
    let mut lab = Lab::new(World::with(Config::default(), vec![node(slots)]));
    for n in 1..=u64::from(slots) {
        lab.submit(n, 500 * n, "");
    }
    lab.play(2_000, for_ever);
    assert_eq!(lab.running().len(), slots as usize);
    lab
}

#[test]
fn what_runs_beyond_a_lowered_quota_gives_way_after_a_grace_and_no_more_than_that() {
    let mut lab = full(4);
    lab.w.quota(Some(quota(2)));
    lab.play(GRACE - 2_000, for_ever);
    assert_eq!(lab.running().len(), 4, "there is a grace");
    lab.play(10_000, for_ever);
    assert_eq!(lab.running().len(), 2);
    lab.play(60_000, for_ever);
    let went: Vec<_> = lab
        .gave_way
        .iter()
        .map(|(n, _, rule)| (*n, *rule))
        .collect();
    // The executions with the nearest boundaries have the least regret.
    assert_eq!(went, [(1, Rule::Quota), (2, Rule::Quota)]);
    let (_, reason) = lab.reason(1);
    for words in [
        "its tenant lab has 4 bound or running, and ann has set 2 running",
        "its regret is",
        "spared:",
    ] {
        assert!(reason.contains(words), "{words:?} in {reason}");
    }
    let why = lab.w.why(1).summary;
    assert!(why.contains("its tenant's quota (2 running)"), "{why}");
    // They return as soon as the quota has room.
    lab.w.complete(3);
    lab.play(3_000, for_ever);
    assert_eq!(lab.running(), [1, 4]);
    lab.w.quota(None);
    lab.play(3_000, for_ever);
    assert_eq!(lab.running(), [1, 2, 4]);
}

/// Four executions with boundaries nine seconds apart, two of them beyond the quota.
fn two_too_many() -> Lab {
    let mut lab = Lab::new(World::with(Config::default(), vec![node(4)]));
    for n in 1..=4 {
        lab.submit(n, 9_000, "");
    }
    lab.play(2_000, for_ever);
    lab.w.quota(Some(quota(2)));
    lab.play(GRACE - 1_000, for_ever);
    assert_eq!((lab.running().len(), lab.gave_way.len()), (4, 0));
    lab
}

#[test]
fn no_more_give_way_than_are_too_many_where_answers_are_lost() {
    for lost in 1..6 {
        let mut lab = two_too_many();
        lab.answers_lost = lost;
        lab.play(60_000, for_ever);
        let left = (lab.running().len(), lab.gave_way.len());
        assert_eq!(left, (2, 2), "{lost} answers lost: {:?}", lab.gave_way);
    }
}

#[test]
fn whoever_did_not_hear_is_told_again_and_after_ten_times_another_one_goes() {
    let mut lab = two_too_many();
    lab.deaf = (1..=4).collect();
    lab.play(6_000, for_ever);
    lab.deaf.clear();
    lab.play(20_000, for_ever);
    assert_eq!((lab.running().len(), lab.gave_way.len()), (2, 2));
    let mut lab = two_too_many();
    // The choice is the same each time.
    let mut first = two_too_many();
    first.play(20_000, for_ever);
    let chosen: Vec<_> = first.gave_way.iter().map(|(n, ..)| *n).collect();
    lab.deaf = chosen[..1].iter().copied().collect();
    lab.play(8_000, for_ever);
    assert!(lab.gave_way.len() <= 1, "{:?}", lab.gave_way);
    lab.play(40_000, for_ever);
    assert_eq!((lab.running().len(), lab.gave_way.len()), (2, 2));
    assert!(lab.runs(chosen[0]));
}

/// Another policy service that leaves this tenant's quota to the tested one.
fn another() -> InstanceId {
    let prefers_self = |other: &InstanceId| {
        let mut replicas = Replicas::new(InstanceId(Uuid::from_u128(1)));
        replicas.heard(Millis(0), *other, false);
        replicas.prefers_self(World::tenant().as_str().as_bytes())
    };
    let mut others = (2..100).map(|n| InstanceId(Uuid::from_u128(n)));
    others.find(prefers_self).unwrap()
}

#[test]
fn one_that_has_given_way_does_not_count_until_whoever_reserved_for_it_frees_that() {
    let mut lab = full(3);
    lab.w.quota(Some(quota(3)));
    lab.play(2_000, for_ever);
    let (tenant, other) = (World::tenant(), another());
    let (seq, table) = lab.w.holds.tables.get_mut(&tenant).unwrap();
    assert_eq!(table.entries.len(), 3);
    table.entries.iter_mut().for_each(|entry| entry.by = other);
    *seq += 1;
    let (seq, table) = (*seq, table.clone());
    lab.w.step(Input::Reserved {
        tenant: tenant.clone(),
        table: Some((seq, Arc::new(table))),
        answer: false,
    });
    lab.w.quota(Some(quota(2)));
    for _ in 0..(GRACE + 20_000) / 500 {
        lab.w.step(Input::Replica {
            id: other,
            leaving: false,
        });
        lab.play(500, for_ever);
    }
    assert_eq!(lab.w.reserved(), 3, "it frees nothing");
    assert_eq!((lab.running().len(), lab.gave_way.len()), (2, 1));
}

#[test]
fn the_lowest_priority_goes_first_whatever_it_loses() {
    let mut lab = Lab::new(World::with(Config::default(), vec![node(2)]));
    lab.submit(1, 20_000, "");
    lab.submit(2, 500, r#""priority":5"#);
    lab.play(2_000, for_ever);
    lab.w.quota(Some(quota(1)));
    lab.play(GRACE + 25_000, for_ever);
    assert_eq!(lab.running(), [2]);
}

#[test]
fn what_has_only_reserved_gives_that_back_before_anything_that_runs() {
    let mut lab = full(2);
    lab.w.quota(Some(quota(3)));
    lab.submit(9, 500, "");
    lab.play(2_000, for_ever);
    assert_eq!(lab.w.reserved(), 3, "it has reserved, and waits for a slot");
    lab.w.quota(Some(quota(2)));
    lab.play(GRACE + 10_000, for_ever);
    assert_eq!((lab.running(), lab.w.reserved()), (vec![1, 2], 2));
    assert!(lab.gave_way.is_empty(), "{:?}", lab.gave_way);
}

#[test]
fn what_says_nothing_of_memory_counts_for_its_nodes_share_of_a_slot() {
    let gib = 1u64 << 30;
    let large = NodeDescriptor {
        slots: 4,
        memory_limit_bytes: 4 * gib,
        ..descriptor(0, 100)
    };
    let mut w = World::of(vec![large]);
    w.quota(Some(of_memory(3 * gib)));
    for n in 1..=3 {
        w.submit_and_store(n);
    }
    // It requests two shares.
    w.submit_line(4, &format!(r#""requires":{{"memory_bytes":{}}}"#, 2 * gib));
    w.pass(1_000);
    let phases = [1, 2, 3, 4].map(|n| w.phase(n).as_str().to_owned());
    assert_eq!(phases, ["bound", "bound", "bound", "pending"]);
    let why = w.why(4).summary;
    assert!(why.contains("bytes of memory"), "{why}");
    w.complete_if_bound(1);
    w.pass(1_000);
    assert_eq!(w.phase(4).as_str(), "pending", "one share is free");
    w.complete_if_bound(2);
    w.pass(1_000);
    assert_eq!(w.phase(4).as_str(), "bound");
    // If the quota is less than a share, one execution alone may run.
    w.complete_if_bound(3);
    w.complete_if_bound(4);
    w.quota(Some(of_memory(gib / 2)));
    w.submit_and_store(5);
    w.submit_and_store(6);
    w.pass(1_000);
    assert_eq!(
        (w.phase(5).as_str(), w.phase(6).as_str()),
        ("bound", "pending")
    );
}

#[test]
fn a_share_is_that_of_the_node_once_one_is_bound() {
    let gib = 1u64 << 30;
    let of = |i: usize, limit| NodeDescriptor {
        slots: 1,
        memory_limit_bytes: limit,
        ..descriptor(i, 100 + i as u128)
    };
    let mut w = World::of(vec![of(0, gib), of(1, 4 * gib)]);
    w.quota(Some(of_memory(5 * gib)));
    let small = r#""requires":{"nodes":["n0"]}"#;
    w.submit_line(1, small);
    w.pass(300);
    assert_eq!(w.phase(1).as_str(), "bound");
    // Before its binding it counted for the largest share.
    w.submit_line(2, r#""requires":{"nodes":["n1"]}"#);
    w.pass(3_000);
    assert_eq!(w.phase(2).as_str(), "bound", "{}", w.why(2).summary);
}

#[test]
fn a_share_that_nobody_knows_counts_for_no_less_than_before() {
    let gib = 1u64 << 30;
    let large = NodeDescriptor {
        slots: 4,
        memory_limit_bytes: 4 * gib,
        ..descriptor(0, 100)
    };
    // No node has joined yet: each execution counts for the whole quota.
    let mut w = World::of(Vec::new());
    w.quota(Some(of_memory(3 * gib)));
    for n in 1..=3 {
        w.submit_and_store(n);
    }
    w.pass(3_000);
    assert_eq!(w.reserved(), 1, "{}", w.why(2).summary);
    // Its node is gone, but its executions still run.
    let mut w = World::of(vec![large]);
    w.quota(Some(of_memory(3 * gib)));
    for n in 1..=3 {
        w.submit_and_store(n);
    }
    w.pass(3_000);
    assert_eq!((w.running(), w.reserved()), (3, 3));
    let node = w.node(0);
    w.step(Input::Gone { node: node.clone() });
    w.pass(2_000);
    w.submit_and_store(4);
    w.pass(2_000);
    assert_eq!(w.reserved(), 3, "{}", w.why(4).summary);
    let tables = w.holds.tables.values();
    let counts: Vec<_> = tables
        .flat_map(|(_, t)| &t.entries)
        .map(|e| e.memory_bytes)
        .collect();
    assert_eq!(counts, [gib; 3]);
}

#[test]
fn what_wants_no_device_goes_before_one_that_waits_for_its_tenants_limit_of_those() {
    let mut w = World::of(vec![with_devices(0, &[80, 80])]);
    w.quota(Some(Quota {
        devices: Some(1),
        ..quota(4)
    }));
    let device = r#""requires":{"device":{"memory_bytes":40}}"#;
    w.submit_line(1, device);
    w.submit_line(2, device);
    w.submit_and_store(3);
    w.pass(1_000);
    let phases = [1, 2, 3].map(|n| w.phase(n).as_str().to_owned());
    assert_eq!(phases, ["bound", "pending", "bound"]);
    w.complete_if_bound(1);
    w.pass(1_000);
    assert_eq!(w.phase(2).as_str(), "bound");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// However a quota changes and answers are lost, the number of running executions comes to the
    /// quota. It never falls below the quota while an execution waits, and no more are preempted
    /// than the excess.
    #[test]
    fn what_runs_follows_the_quota(
        changes in prop::collection::vec((0u32..7, 1u64..4), 1..4),
        every in prop::collection::vec(prop_oneof![Just(200u64), Just(3_000), Just(9_000)], 6),
        lost in prop_oneof![Just(0u32), 1u32..6],
    ) {
        world::trace::untraced();
        let mut lab = Lab::new(World::with(Config::default(), vec![node(6)]));
        for (n, every) in (1u64..).zip(&every) {
            lab.submit(n, *every, "");
        }
        lab.play(3_000, for_ever);
        let mut may_go = 0;
        for (running, halves) in changes {
            let before = lab.running().len();
            lab.w.quota(Some(quota(running)));
            lab.answers_lost = lost;
            // At any moment in between, at least as many run as the quota allows.
            let least = before.min(running as usize);
            for _ in 0..halves * 60 {
                lab.play(500, for_ever);
                let now = lab.running().len();
                prop_assert!(now >= least, "{now} run, {running} may, {before} did");
            }
            lab.play(30_000, for_ever);
            prop_assert_eq!(lab.running().len(), (running as usize).min(6));
            may_go += before.saturating_sub(running as usize);
        }
        prop_assert_eq!(lab.gave_way.len(), may_go, "{:?}", lab.gave_way);
    }
}
