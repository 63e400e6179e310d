//! The policy's count of duties agrees with the ledgers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use fiec_policy::{Config, Duties};
use fiec_schemas::duty::{self, Actor, Standing, Task};
use fiec_schemas::scheduling::Keep;
use fiec_schemas::{Cause, Event, RequestKind};
use world::World;
use world::scenes::holder_at_its_end;

fn counts(w: &World, actor: Actor) -> (u64, u64) {
    let Duties { all, overdue } = w.policy.duties(w.at())[&actor];
    (all, overdue)
}

/// Checks that policy and ledger agree on an execution, and that its next duty is `task`.
#[track_caller]
fn agrees(w: &World, n: u64, task: Task) {
    let state = &w.ledgers[&World::id(n)].state;
    let known = w.policy.standing(w.at(), World::id(n));
    assert_eq!(known, Some(Standing::of(state)), "execution {n}");
    assert_eq!(duty::of(state, w.wall()).what, task, "execution {n}");
}

fn request(w: &mut World, n: u64, what: RequestKind) {
    let event = Event::Requested {
        who: "ann@lab".to_owned(),
        what,
    };
    let author = w.author(n);
    w.append(World::id(n), vec![event], &author, true);
}

#[test]
fn the_policy_services_limit_for_a_busy_node_is_that_of_the_duty_to_start() {
    assert_eq!(2 * Config::default().take_busy_ms, duty::START_MS);
}

#[test]
fn each_phase_counts_for_who_must_act_next() {
    let mut w = World::new(2);
    for n in 1..=4 {
        w.submit_and_store(n);
    }
    agrees(&w, 1, Task::Start);
    assert_eq!(counts(&w, Actor::Worker), (4, 0));
    for n in 1..=3 {
        w.start(n);
    }
    agrees(&w, 1, Task::Compute);
    request(&mut w, 2, RequestKind::Cancel);
    agrees(&w, 2, Task::Cancel);
    let parked = Event::Parked {
        cause: Cause::Balance,
        keep: Keep::Host,
        computed_until: w.wall(),
    };
    let author = w.author(3);
    w.append(World::id(3), vec![parked], &author, true);
    agrees(&w, 3, Task::Unpark);
    request(&mut w, 3, RequestKind::Pause);
    agrees(&w, 3, Task::Pause);
    let who = "ann@lab".to_owned();
    w.append(
        World::id(4),
        vec![Event::Paused { who }],
        "policy/other",
        true,
    );
    agrees(&w, 4, Task::Resume);
    assert_eq!(counts(&w, Actor::Worker), (3, 0));
    assert_eq!(counts(&w, Actor::Person), (1, 0));
    w.complete(1);
    assert_eq!(counts(&w, Actor::Worker), (2, 0));
}

#[test]
fn a_worker_that_does_not_cancel_is_overdue_until_it_does() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.start(1);
    request(&mut w, 1, RequestKind::Cancel);
    w.pass(duty::REQUEST_MS);
    assert_eq!(counts(&w, Actor::Worker), (1, 0));
    w.pass(1_000);
    assert_eq!(counts(&w, Actor::Worker), (1, 1));
    agrees(&w, 1, Task::Cancel);
    let (who, author) = ("ann@lab".to_owned(), w.author(1));
    w.append(World::id(1), vec![Event::Cancelled { who }], &author, true);
    assert_eq!(counts(&w, Actor::Worker), (0, 0));
}

#[test]
fn an_execution_that_nobody_starts_is_the_policy_services_after_two_minutes_and_then_overdue() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.pass(duty::START_MS);
    assert_eq!(counts(&w, Actor::Worker), (1, 0));
    w.pass(1_000);
    assert_eq!(counts(&w, Actor::PolicyService), (1, 0));
    w.pass(duty::REBIND_MS);
    assert_eq!(counts(&w, Actor::PolicyService), (1, 1));
    agrees(&w, 1, Task::Rebind);
}

#[test]
fn a_holder_at_its_end_is_the_policy_services_and_waits_for_its_part() {
    let (w, _, part, _) = holder_at_its_end();
    agrees(&w, 1, Task::AwaitParts);
    let state = &w.ledgers[&part].state;
    let known = w.policy.standing(w.at(), part);
    assert_eq!(known, Some(Standing::of(state)));
    assert_eq!(counts(&w, Actor::PolicyService), (1, 0));
    assert_eq!(counts(&w, Actor::Worker), (1, 0));
}
