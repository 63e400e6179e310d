//! Executions that wait for groups (a batch, an array, ids that begin alike) or for a moment.
#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use fiec_policy::{Action, Input};
use fiec_schemas::{Event, Fault};
use world::World;

/// Executions 1 to `members` are `s-1`, `s-2`, …; number 10 waits for all of them like this.
fn waiting(members: u64, on: &str) -> World {
    let mut w = World::new(4);
    for n in 1..=members {
        w.submit_line(n, &format!(r#""id":"s-{n}""#));
    }
    w.submit_line(10, &format!(r#""id":"all","after":[{{"id":"s-*"{on}}}]"#));
    w.pass(1_500);
    w
}

fn phase(w: &World, n: u64) -> &'static str {
    w.phase(n).as_str()
}

fn fail(w: &mut World, n: u64) {
    w.start(n);
    w.fail(World::id(n), "it is broken", true);
    w.pass(200);
}

fn end(w: &mut World, n: u64) {
    w.complete_if_bound(n);
    w.pass(200);
}

fn retry(w: &mut World, n: u64) {
    let retried = vec![Event::Retried { who: "ann".into() }];
    w.append(World::id(n), retried, "policy/x", true);
}

#[test]
fn a_group_has_who_was_submitted_before_or_with_it_whether_they_have_ended_or_not() {
    let mut w = World::new(4);
    w.submit_line(1, r#""id":"s-1""#);
    w.carry_out();
    end(&mut w, 1);
    w.pass(500);
    w.submit_line(10, r#""id":"all","after":[{"id":"s-*"}]"#);
    w.submit_line(2, r#""id":"s-2""#);
    w.submit_line(3, r#""id":"other""#);
    w.pass(1_500);
    w.submit_line(4, r#""id":"s-4""#);
    assert_eq!(phase(&w, 10), "pending");
    let why = w.why(10).summary;
    assert!(why.contains("s-* to complete (1 of 2 have ended)"), "{why}");
    end(&mut w, 2);
    assert_eq!(phase(&w, 10), "bound");
    end(&mut w, 10);
    w.pass(600_000);
    assert!(!w.remembers(10) && !w.remembers(1));
}

#[test]
fn it_fails_with_the_first_that_fails_and_names_it_unless_any_end_will_do() {
    let mut w = waiting(3, "");
    w.submit_line(11, r#""after":[{"id":"s-*","on":"any"}]"#);
    fail(&mut w, 2);
    assert_eq!(phase(&w, 10), "failed");
    let reason = w.failure_of(World::id(10)).unwrap();
    assert_eq!(reason, "it waits for s-*, of which 1 of 3 did not complete");
    let Some(Event::Failed {
        fault: Some(fault), ..
    }) = w.events_of(World::id(10)).pop()
    else {
        panic!("it is charged to nobody")
    };
    assert_eq!(*fault, Fault::Dependency { id: World::id(2) });
    end(&mut w, 1);
    assert_eq!(phase(&w, 11), "pending");
    end(&mut w, 3);
    assert_eq!(phase(&w, 11), "bound");
}

#[test]
fn of_a_share_all_must_end_and_it_fails_once_too_many_have() {
    let mut w = waiting(4, r#","on":{"at_least":0.5}"#);
    fail(&mut w, 1);
    end(&mut w, 2);
    end(&mut w, 3);
    assert_eq!(phase(&w, 10), "pending", "the last one may be of use");
    fail(&mut w, 4);
    assert_eq!(phase(&w, 10), "bound");
    let mut w = waiting(4, r#","on":{"at_least":0.5}"#);
    for n in 1..=3 {
        assert_eq!(phase(&w, 10), "pending");
        fail(&mut w, n);
    }
    assert_eq!(phase(&w, 10), "failed");
    let reason = w.failure_of(World::id(10)).unwrap();
    assert!(reason.ends_with("; a share of 0.5 must"), "{reason}");
}

#[test]
fn a_member_that_is_retried_is_waited_for_again() {
    let mut w = waiting(2, "");
    fail(&mut w, 1);
    assert_eq!(phase(&w, 10), "failed");
    retry(&mut w, 1);
    retry(&mut w, 10);
    w.pass(1_500);
    assert_eq!(phase(&w, 10), "pending");
    // It fails again, and is retried before the one that waits for it has failed.
    w.start(1);
    w.fail(World::id(1), "it is broken", true);
    retry(&mut w, 1);
    w.pass(1_500);
    assert_eq!(phase(&w, 10), "pending");
    end(&mut w, 1);
    end(&mut w, 2);
    assert_eq!(phase(&w, 10), "bound");
}

#[test]
fn one_that_is_retried_while_its_group_cannot_do_fails_again() {
    let mut w = World::new(4);
    w.submit_line(1, r#""id":"s-1""#);
    w.submit_line(2, r#""id":"s-2""#);
    w.submit_line(10, r#""after":[{"id":"s-*"}]"#);
    w.submit_line(11, r#""after":[{"id":"s-*","on":"any"}]"#);
    w.pass(1_500);
    fail(&mut w, 1);
    assert_eq!((phase(&w, 10), phase(&w, 11)), ("failed", "pending"));
    // The other one still waits for the group, so its members are known.
    retry(&mut w, 10);
    w.pass(1_500);
    assert_eq!(phase(&w, 10), "failed");
}

#[test]
fn another_policy_service_finds_the_same_members_and_learns_what_ended_meanwhile() {
    let mut w = waiting(3, "");
    end(&mut w, 1);
    w.submit_line(4, r#""id":"s-4""#);
    w.replace_policy(7);
    w.pass(1_500);
    assert_eq!(phase(&w, 10), "pending");
    w.start(2);
    w.complete(2);
    end(&mut w, 3);
    assert_eq!(phase(&w, 10), "bound", "the fourth came later");
}

#[test]
fn the_groups_of_many_are_asked_for_at_once_and_again_if_they_could_not_be_read() {
    let mut w = World::new(4);
    w.holds.silent = true;
    w.submit_line(1, r#""id":"s-1""#);
    for n in 10..60 {
        w.submit_line(n, r#""after":[{"id":"s-*"},{"array":"s"}]"#);
    }
    w.pass(1_500);
    let asked = std::mem::take(&mut w.holds.asked);
    let sought: Vec<_> = asked
        .iter()
        .filter_map(|action| match action {
            Action::FindMembers { sought, .. } => Some(sought.len()),
            _ => None,
        })
        .collect();
    assert_eq!(sought, [2]);
    let tenant = World::tenant();
    w.step(Input::Members {
        tenant,
        found: Vec::new(),
    });
    w.holds.silent = false;
    w.pass(500);
    assert_eq!(phase(&w, 10), "pending");
    w.pass(2_000);
    end(&mut w, 1);
    assert_eq!(phase(&w, 10), "bound");
}

#[test]
fn nothing_is_placed_before_the_moment_that_it_names() {
    let mut w = World::new(1);
    let at = w.wall().plus_ms(60_000);
    w.submit_line(1, &format!(r#""not_before":"{at}""#));
    w.submit_line(2, &format!(r#""id":"s","not_before":"{at}""#));
    w.submit_line(3, r#""id":"t""#);
    w.submit_line(
        4,
        &format!(r#""not_before":"{at}","after":[{{"id":"t*"}}]"#),
    );
    end(&mut w, 3);
    w.pass(58_000);
    for n in [1, 2, 4] {
        assert_eq!(phase(&w, n), "pending", "{n}");
    }
    let why = w.why(1);
    assert!(
        why.summary.contains("not to begin before"),
        "{}",
        why.summary
    );
    w.submit_line(5, &format!(r#""not_before":"{}""#, w.wall()));
    assert_eq!(
        phase(&w, 5),
        "bound",
        "a moment that has passed holds nothing back"
    );
    end(&mut w, 5);
    w.pass(1_900);
    assert_eq!(phase(&w, 1), "bound");
    for n in [1, 2, 4] {
        end(&mut w, n);
        assert_eq!(phase(&w, n), "completed", "{n}");
    }
}
