//! Dependencies, quotas, batches with limits, and gangs: one policy and a simulated cluster.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use std::sync::Arc;

use fiec_policy::Replicas;
use fiec_policy::{Input, Millis};
use fiec_schemas::{Cause, Event, InstanceId, Phase};
use uuid::Uuid;
use world::World;
use world::scenes::{GANG, gang_of_three, gang_without_its_second, quota};

/// The id by which one execution waits for another.
fn id(n: u64) -> String {
    World::id(n).to_string()
}

fn phase(w: &World, n: u64) -> &'static str {
    w.phase(n).as_str()
}

#[test]
fn an_execution_is_bound_once_all_that_it_waits_for_has_completed() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.submit_and_store(2);
    w.submit_line(
        3,
        &format!(r#""after":[{{"id":"{}"}},{{"id":"{}"}}]"#, id(1), id(2)),
    );
    w.pass(500);
    assert_eq!(phase(&w, 3), "pending");
    let why = w.why(3).summary;
    assert!(
        why.contains(&format!("it waits for {} to complete (it is bound)", id(1))),
        "{why}"
    );
    w.complete_if_bound(1);
    w.pass(200);
    assert_eq!(phase(&w, 3), "pending");
    w.complete_if_bound(2);
    w.pass(200);
    assert_eq!(phase(&w, 3), "bound");
}

#[test]
fn what_waits_for_a_failed_one_fails_with_it_unless_any_end_will_do() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.submit_line(3, &format!(r#""after":[{{"id":"{}","on":"any"}}]"#, id(1)));
    // An execution that waits for the second fails with it.
    w.submit_line(4, &format!(r#""after":[{{"id":"{}"}}]"#, id(2)));
    w.fail(World::id(1), "broken", true);
    w.pass(1_000);
    assert_eq!(
        (phase(&w, 2), phase(&w, 3), phase(&w, 4)),
        ("failed", "bound", "failed")
    );
    let reason = format!("it waits for {}, which failed", id(1));
    assert_eq!(w.failure_of(World::id(2)), Some(reason));
}

#[test]
fn what_waits_for_one_that_is_retried_waits_again() {
    let retried = || vec![Event::Retried { who: "ann".into() }];
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.fail(World::id(1), "broken", true);
    w.pass(1_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("failed", "failed"));
    w.append(World::id(1), retried(), "policy/x", true);
    w.append(World::id(2), retried(), "policy/x", true);
    w.pass(1_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("bound", "pending"));
    w.start(1);
    // It fails again, and is retried before those that wait for it have failed.
    w.fail(World::id(1), "broken", true);
    w.append(World::id(1), retried(), "policy/x", true);
    w.pass(1_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("bound", "pending"));
    w.start(1);
    w.complete(1);
    w.pass(1_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("completed", "bound"));
}

#[test]
fn what_has_ended_before_is_learned_from_its_ledger() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.complete_if_bound(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.pass(200);
    assert_eq!(phase(&w, 2), "bound");
}

#[test]
fn what_has_no_ledger_is_waited_for_a_while_and_then_counts_as_vanished() {
    let mut w = World::new(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.submit_line(3, &format!(r#""after":[{{"id":"{}","on":"any"}}]"#, id(1)));
    w.pass(30_000);
    assert_eq!((phase(&w, 2), phase(&w, 3)), ("pending", "pending"));
    w.pass(45_000);
    assert_eq!((phase(&w, 2), phase(&w, 3)), ("failed", "bound"));
}

#[test]
fn a_dependency_whose_ledger_comes_a_moment_later_is_waited_for() {
    let mut w = World::new(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.pass(3_000);
    w.submit_and_store(1);
    w.pass(90_000);
    assert_eq!(phase(&w, 2), "pending");
    w.complete_if_bound(1);
    w.pass(200);
    assert_eq!(phase(&w, 2), "bound");
}

#[test]
fn a_tenant_runs_no_more_at_once_than_its_quota_and_all_in_turn() {
    let mut w = World::new(4);
    w.quota(Some(quota(3)));
    for n in 1..=10 {
        w.submit_and_store(n);
    }
    w.pass(500);
    assert_eq!((w.running(), w.reserved()), (3, 3));
    assert_eq!(phase(&w, 3), "bound", "the oldest first");
    let why = w.why(4).summary;
    assert!(why.contains("its tenant's quota (3 running)"), "{why}");
    for n in 1..=10 {
        w.complete_if_bound(n);
        w.pass(200);
        assert!(w.running() <= 3);
        assert_eq!(phase(&w, n), "completed");
    }
    w.pass(2_000);
    assert_eq!(w.reserved(), 0, "all freed");
}

#[test]
fn limits_set_while_something_runs_count_it_and_limits_taken_away_free_the_rest() {
    let mut w = World::new(4);
    for n in 1..=3 {
        w.submit_and_store(n);
        w.start(n);
    }
    w.quota(Some(quota(2)));
    w.submit_and_store(4);
    w.pass(2_000);
    assert_eq!((w.running(), phase(&w, 4)), (3, "pending"));
    w.complete(1);
    w.pass(2_000);
    assert_eq!(phase(&w, 4), "pending", "two run still");
    w.quota(None);
    w.pass(500);
    assert_eq!(phase(&w, 4), "bound");
}

#[test]
fn of_a_batch_only_so_many_run_at_once() {
    let mut w = World::new(4);
    for n in 1..=6 {
        let limit = if n == 2 {
            r#","at_once":2"#
        } else {
            r#","at_once":3"#
        };
        w.submit_line(n, &format!(r#""batch":"sweep"{limit}"#));
    }
    w.submit_line(7, r#""batch":"other""#);
    w.pass(500);
    assert_eq!(w.running(), 3, "two of the sweep, and the other");
    let why = w.why(6).summary;
    assert!(why.contains("its batch runs at most 2 at once"), "{why}");
    for n in 1..=6 {
        w.complete_if_bound(n);
        w.pass(300);
    }
    assert_eq!(phase(&w, 6), "completed");
}

#[test]
fn a_paused_execution_leaves_its_place_in_the_quota_to_others() {
    let mut w = World::new(2);
    w.quota(Some(quota(1)));
    w.submit_and_store(1);
    w.submit_and_store(2);
    w.pass(300);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("bound", "pending"));
    let paused = Event::Paused { who: "ann".into() };
    w.append(World::id(1), vec![paused], "policy/other", true);
    w.pass(2_500);
    assert_eq!(phase(&w, 2), "bound");
    let resumed = Event::Resumed { who: "ann".into() };
    w.append(World::id(1), vec![resumed], "policy/other", true);
    w.pass(2_500);
    assert_eq!(phase(&w, 1), "pending");
    w.complete_if_bound(2);
    w.pass(300);
    assert_eq!(phase(&w, 1), "bound");
}

#[test]
fn a_reservation_that_finds_no_room_lets_the_next_one_try() {
    let mut w = World::new(2);
    w.quota(Some(quota(1)));
    w.submit_line(1, r#""requires":{"nodes":["elsewhere"]}"#);
    w.submit_and_store(2);
    w.pass(1_000);
    assert_eq!((w.running(), w.reserved()), (0, 1));
    w.pass(7_000);
    assert_eq!(phase(&w, 2), "bound");
}

/// Time passes beside a policy service that is present and does nothing. It is to place the gangs.
fn pass_beside_an_idle_one(w: &mut World, ms: u64) {
    let places_gangs = |id: &InstanceId| {
        let mut replicas = Replicas::new(InstanceId(Uuid::from_u128(1)));
        replicas.heard(Millis(0), *id, false);
        !replicas.prefers_self(b"gangs")
    };
    let mut ids = (2..100).map(|n| InstanceId(Uuid::from_u128(n)));
    let id = ids.find(places_gangs).unwrap();
    for _ in 0..ms / 500 {
        w.step(Input::Replica { id, leaving: false });
        w.pass(500);
    }
}

#[test]
fn a_service_that_is_present_and_does_nothing_only_delays_quotas_and_gangs() {
    let mut w = World::new(8);
    w.quota(Some(quota(14)));
    pass_beside_an_idle_one(&mut w, 500);
    for n in 11..=18 {
        w.submit_and_store(n);
    }
    for (gang, n) in [("a", 1), ("b", 3), ("c", 5)] {
        for n in n..n + 2 {
            w.submit_line(n, &format!(r#""gang":{{"name":"{gang}","size":2}}"#));
        }
    }
    pass_beside_an_idle_one(&mut w, 5_000);
    let pending: Vec<_> = (1..=6)
        .chain(11..=18)
        .filter(|n| phase(&w, *n) == "pending")
        .collect();
    assert_eq!((w.running(), pending), (14, vec![]));
}

#[test]
fn what_a_gone_service_reserved_is_taken_over_though_the_preferred_one_is_idle() {
    let mut w = World::new(4);
    w.quota(Some(quota(8)));
    w.cordon_all(true);
    w.pass(7_000);
    for n in 1..=8 {
        w.submit_and_store(n);
    }
    w.pass(1_000);
    assert_eq!((w.running(), w.reserved()), (0, 8));
    widow(&mut w);
    w.cordon_all(false);
    pass_beside_an_idle_one(&mut w, 8_000);
    assert_eq!(w.running(), 8);
}

/// Gives all reservations to a policy service that is gone.
fn widow(w: &mut World) {
    let (tenant, gone) = (World::tenant(), InstanceId(Uuid::from_u128(77)));
    let (seq, table) = w.holds.tables.entry(tenant.clone()).or_default();
    table.entries.iter_mut().for_each(|entry| entry.by = gone);
    *seq += 1;
    let (seq, table) = (*seq, table.clone());
    w.step(Input::Reserved {
        tenant: tenant.clone(),
        table: Some((seq, Arc::new(table))),
        answer: false,
    });
}

#[test]
fn a_reservation_of_a_gone_service_is_freed_in_turn_and_its_append_comes_too_late() {
    let mut w = World::new(2);
    w.quota(Some(quota(1)));
    w.pass(7_000);
    w.submit_line(1, r#""requires":{"nodes":["elsewhere"]}"#);
    w.pass(1_000);
    assert_eq!((w.running(), w.reserved()), (0, 1));
    let expected = w.ledgers[&World::id(1)].seq;
    let since = w.why(1).summary;
    widow(&mut w);
    w.submit_and_store(2);
    w.pass(4_000);
    let moved = w.ledgers[&World::id(1)].seq > expected;
    assert_eq!((w.reserved(), moved), (1, false), "it may find a place yet");
    for _ in 0..200 {
        w.pass(50);
        let first = w.reservation_of(1);
        let moved = w.ledgers[&World::id(1)].seq > expected;
        assert!(
            first || moved,
            "an append of the gone service could succeed"
        );
    }
    assert_eq!(phase(&w, 2), "bound", "{}", w.why(2).summary);
    let waited = |summary: &str| summary.split(' ').nth(2)?.parse::<f64>().ok();
    let (before, after) = (waited(&since), waited(&w.why(1).summary));
    assert!(
        before.is_some() && after >= before.map(|s| s + 14.0),
        "{before:?} {after:?}"
    );
}

#[test]
fn nothing_is_bound_under_reservations_that_cannot_be_read() {
    let mut w = World::new(2);
    w.quota(Some(quota(4)));
    w.holds.silent = true;
    w.submit_and_store(1);
    w.pass(20_000);
    assert_eq!(w.running(), 0);
    w.holds.silent = false;
    w.pass(500);
    assert_eq!(w.running(), 1);
}

#[test]
fn a_gang_is_bound_when_all_its_members_are_there_and_its_capsules_go_out_together() {
    let mut w = World::new(2);
    w.submit_line(1, GANG);
    w.submit_line(2, GANG);
    w.pass(1_000);
    assert_eq!(w.running(), 0);
    let why = w.why(1).summary;
    assert!(why.contains("of which 2 of 3 members are there"), "{why}");
    w.sent_capsules();
    w.submit_line(3, GANG);
    w.pass(500);
    assert_eq!(w.running(), 3);
    assert_eq!(w.sent_capsules(), 3);
    assert!((1..=3).all(|n| !w.policy.withholds(World::id(n))));
    (1..=3).for_each(|n| w.start(n));
    w.pass(30_000);
    assert!((1..=3).all(|n| phase(&w, n) == "started"));
}

#[test]
fn a_gang_without_room_for_all_takes_no_place_and_holds_nobody_up() {
    // Three of four slots are taken for a long time.
    let mut w = World::new(2);
    for n in 11..=13 {
        w.submit_and_store(n);
        w.start(n);
    }
    w.pass(2_000);
    w.submit_gang();
    w.pass(3_000);
    assert!((1..=3).all(|n| phase(&w, n) == "pending"));
    w.submit_and_store(20);
    w.pass(200);
    assert_eq!(phase(&w, 20), "bound", "the free slot is for whoever fits");
    w.complete_if_bound(20);
    w.complete(11);
    w.complete(12);
    w.pass(3_000);
    assert!(
        (1..=3).all(|n| phase(&w, n) == "bound"),
        "{}",
        w.why(1).summary
    );
}

#[test]
fn a_gang_that_is_half_bound_is_given_back_and_begins_anew() {
    let mut w = gang_of_three(2);
    assert_eq!(w.running(), 3);
    // A member is refused before any has started, and by then its nodes are full of other
    // executions.
    w.cordon_all(true);
    w.refuse(2);
    w.pass(8_000);
    assert_eq!(w.running(), 2);
    w.pass(6_000);
    assert_eq!(w.running(), 0, "all or none");
    w.cordon_all(false);
    w.pass(3_000);
    assert_eq!(w.running(), 3);
}

#[test]
fn a_member_that_is_refused_is_bound_elsewhere_when_the_others_compute() {
    let mut w = gang_of_three(3);
    w.start(1);
    w.start(3);
    w.refuse(2);
    w.pass(3_000);
    assert!(matches!(w.phase(2), Phase::Bound(_)));
}

#[test]
fn those_that_compute_yield_when_a_member_finds_no_place() {
    let mut w = gang_without_its_second(2);
    let orders = w.take_controls();
    let yields = orders.iter().filter(|(_, request)| {
        use fiec_schemas::messages::ControlRequest;
        matches!(request, ControlRequest::Yield { to: None, .. })
    });
    assert_eq!(yields.count(), 2, "{orders:?}");
}

/// A member obeys its order and yields its place.
fn yield_place(w: &mut World, n: u64) {
    let (author, at) = (w.author(n), w.wall());
    let yielded = Event::Yielded {
        cause: Cause::NotTaken {
            reason: "its gang g could not start in full".into(),
            fault: None,
        },
        computed_until: at,
    };
    w.append(World::id(n), vec![yielded], &author, true);
}

#[test]
fn a_gang_that_begins_anew_takes_no_place_before_there_is_room_for_all() {
    let mut w = gang_without_its_second(3);
    assert_eq!(phase(&w, 2), "pending");
    assert_eq!(w.take_controls().len(), 2, "both that compute are told");
    // From now on there is room for single executions.
    yield_place(&mut w, 1);
    let free = (0..3).find(|node| *node != w.node_of(3)).unwrap();
    w.cordon(free, false);
    w.pass(3_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("pending", "pending"));
    w.submit_and_store(20);
    w.pass(200);
    assert_eq!(phase(&w, 20), "bound", "there was room all the time");
    w.complete_if_bound(20);
    w.sent_capsules();
    yield_place(&mut w, 3);
    w.cordon_all(false);
    w.pass(3_000);
    assert_eq!((w.running(), w.sent_capsules()), (3, 3));
}

#[test]
fn a_gang_of_which_nothing_runs_any_more_begins_anew_at_once() {
    let mut w = gang_of_three(2);
    w.start(1);
    w.start(3);
    w.cordon_all(true);
    w.refuse(2);
    // The nodes of the others cannot start it either.
    yield_place(&mut w, 1);
    yield_place(&mut w, 3);
    w.cordon(0, false);
    w.pass(3_000);
    assert_eq!(w.running(), 0, "there is room for two of three");
    w.cordon_all(false);
    w.pass(3_000);
    assert_eq!(w.running(), 3);
}

#[test]
fn no_capsule_of_a_gang_is_sent_while_a_binding_of_it_may_not_be_stored() {
    let mut w = World::new(3);
    w.submit_gang();
    w.unanswered = Some(World::id(2));
    w.pass(9_000);
    assert_eq!((phase(&w, 1), phase(&w, 3)), ("bound", "bound"));
    assert_eq!(
        w.sent_capsules(),
        0,
        "one binding is not known to be stored"
    );
    // The append was lost: the second is bound again, and all start.
    w.unanswered = None;
    w.tell(World::id(2), true);
    w.pass(3_000);
    assert_eq!((w.running(), w.sent_capsules()), (3, 3));
}

#[test]
fn when_a_member_of_a_gang_that_is_to_begin_anew_ends_the_others_go_on_alone() {
    let mut w = gang_without_its_second(3);
    yield_place(&mut w, 1);
    w.complete(3);
    w.cordon_all(false);
    w.pass(3_000);
    assert_eq!((phase(&w, 1), phase(&w, 2)), ("bound", "bound"));
}

#[test]
fn what_cannot_run_fails_though_the_append_that_says_so_is_lost() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.start(1);
    w.submit_line(2, &format!(r#""after":[{{"id":"{}"}}]"#, id(1)));
    w.fail(World::id(1), "broken", true);
    w.act_and_lose();
    // Another message was faster.
    let note = Event::Paused { who: "ann".into() };
    w.append(World::id(2), vec![note], "policy/other", true);
    w.pass(2_000);
    assert_eq!(phase(&w, 2), "failed");
}

#[test]
fn a_gang_reserves_all_its_places_in_the_quota_or_none() {
    let mut w = World::new(4);
    w.quota(Some(quota(4)));
    w.submit_and_store(11);
    w.submit_and_store(12);
    w.pass(300);
    w.submit_gang();
    w.submit_and_store(13);
    w.pass(1_000);
    // Two places are left. The gang is before the last execution, which does not overtake it.
    assert_eq!((w.running(), w.reserved()), (2, 2));
    w.complete_if_bound(11);
    w.pass(1_000);
    assert!((1..=3).all(|n| phase(&w, n) == "bound"));
    assert_eq!(phase(&w, 13), "pending");
}

#[test]
fn reservations_that_were_lost_with_their_stream_are_made_anew() {
    let mut w = World::new(2);
    w.quota(Some(quota(1)));
    w.submit_and_store(1);
    w.submit_and_store(2);
    w.pass(500);
    w.start(1);
    let tables = w.holds.tables.values_mut();
    tables.for_each(|(seq, table)| {
        *seq = 0;
        table.entries.clear();
    });
    w.complete(1);
    w.pass(20_000);
    assert_eq!(phase(&w, 2), "bound");
}
