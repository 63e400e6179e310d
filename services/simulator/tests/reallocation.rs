//! One mix of jobs under reserved peaks, over-commit and reconfiguration.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use fiec_simulator::reallocation::{Mix, Mode, Short, play};

fn small(revoke_every_s: u64) -> Mix {
    Mix {
        short: Short::Memory,
        seed: 7,
        nodes: 2,
        jobs: 40,
        every_s: 20.0,
        revoke_every_s,
    }
}

#[test]
fn every_job_ends_in_every_mode_and_a_seed_gives_the_same_for_ever() {
    for mode in Mode::ALL {
        let found = play(&small(600), mode);
        assert_eq!(found.unfinished, 0, "{mode:?}: {found:?}");
        assert_eq!(found, play(&small(600), mode));
    }
}

#[test]
fn only_over_commit_kills_and_what_asks_at_boundaries_loses_nothing() {
    let [reserved, over, asked] = Mode::ALL.map(|mode| play(&small(0), mode));
    assert_eq!((reserved.killed, asked.killed), (0, 0));
    assert_eq!((reserved.lost_s, asked.lost_s), (0.0, 0.0));
    assert!(over.killed > 0 && over.lost_s > 0.0, "{over:?}");
}

#[test]
fn a_revoked_node_is_left_in_time_by_what_has_boundaries() {
    let [reserved, _, asked] = Mode::ALL.map(|mode| play(&small(300), mode));
    assert!(reserved.lost_to_revocation_s > 0.0, "{reserved:?}");
    assert_eq!(asked.lost_to_revocation_s, 0.0, "{asked:?}");
    assert!(asked.moved + asked.suspended > 0, "{asked:?}");
}
