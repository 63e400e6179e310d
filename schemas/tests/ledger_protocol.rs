//! The ledger protocol (`schemas/PROTOCOL.md`) as a small model with one execution, two workers and
//! two policy services. An exhaustive search shows that every property holds with all rules.
//! Without any one rule it finds a counterexample, which the test prints.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod ledger_model;

use ledger_model::rules::{Faults, Rules, Validity};
use ledger_model::search;

const ROLLBACK: Faults = Faults {
    lost_acks: 0,
    crashes: 0,
    suspicions: 0,
    rollback: Some(3),
    foreign: 0,
};

const LOST_ACK: Faults = Faults {
    lost_acks: 1,
    ..ROLLBACK
};

fn assert_sound(rules: Rules, faults: Faults) {
    let begun = std::time::Instant::now();
    let found = search(rules, faults);
    println!(
        "{} states, {} steps, {} at a limit of the model, in {:?}",
        found.states,
        found.steps,
        found.cut,
        begun.elapsed()
    );
    if let Some((reason, way)) = found.violation {
        panic!("{reason}\n{}", way.join("\n"));
    }
    if let Some(way) = found.stuck {
        panic!("the execution can never complete\n{}", way.join("\n"));
    }
    assert!(found.states > 1_000, "{faults:?} reach next to nothing");
}

/// The search finds a counterexample whose reason contains `expected`.
fn assert_unsound(rules: Rules, faults: Faults, expected: &str) {
    let found = search(rules, faults);
    let stuck = found.stuck.map(|way| ("never completes".to_owned(), way));
    let (reason, way) = found.violation.or(stuck).expect("a counterexample");
    println!("{reason}\n{}", way.join("\n"));
    assert!(reason.contains(expected), "{reason}");
}

#[test]
fn the_protocol_survives_one_lost_acknowledgement_and_one_rollback() {
    assert_sound(Rules::ALL, LOST_ACK);
}

#[test]
fn the_protocol_survives_a_rollback_and_messages_on_other_subjects() {
    let foreign = Faults {
        foreign: 1,
        ..ROLLBACK
    };
    assert_sound(Rules::ALL, foreign);
}

#[test]
fn the_protocol_survives_a_rollback_and_a_worker_that_crashes() {
    let crash = Faults {
        crashes: 1,
        rollback: Some(2),
        ..ROLLBACK
    };
    assert_sound(Rules::ALL, crash);
}

#[test]
fn the_protocol_survives_a_rollback_and_a_living_worker_taken_for_gone() {
    let suspicion = Faults {
        suspicions: 1,
        rollback: Some(2),
        ..ROLLBACK
    };
    assert_sound(Rules::ALL, suspicion);
}

#[test]
fn with_the_grace_kept_nothing_acknowledged_is_computed_again() {
    let rules = Rules {
        grace: true,
        ..Rules::ALL
    };
    assert_sound(rules, ROLLBACK);
}

#[test]
fn an_acknowledgement_believed_across_lives_breaks_it() {
    let rules = Rules {
        believe_within_life: false,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "which the ledger does not count");
}

#[test]
fn sequences_compared_without_digests_break_it() {
    let rules = Rules {
        compare_digests: false,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "");
}

#[test]
fn readers_that_do_not_check_prev_break_it() {
    let rules = Rules {
        validity: Validity::Unchecked,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "");
}

#[test]
fn prev_compared_with_a_void_neighbour_breaks_it() {
    let rules = Rules {
        validity: Validity::FollowsNeighbour,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "");
}

#[test]
fn an_own_message_found_but_not_checked_breaks_it() {
    let rules = Rules {
        own_must_be_valid: false,
        ..Rules::ALL
    };
    assert_unsound(rules, LOST_ACK, "which the ledger does not count");
}

#[test]
fn a_holder_that_knows_only_the_message_before_its_binding_cannot_heal() {
    let rules = Rules {
        know_ancestors: false,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "nobody overtook it");
}

#[test]
fn a_completion_that_its_worker_forgets_at_once_is_computed_again() {
    let rules = Rules {
        keep_ended: false,
        grace: true,
        ..Rules::ALL
    };
    assert_unsound(rules, ROLLBACK, "computed again");
}

#[test]
fn a_capsule_that_does_not_name_its_life_breaks_it() {
    let rules = Rules {
        capsule_names_life: false,
        ..Rules::ALL
    };
    assert_unsound(rules, LOST_ACK, "which the ledger does not count");
}
