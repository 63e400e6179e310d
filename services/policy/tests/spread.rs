//! Ranges of tiles that spread over nodes and shrink again: when a part is split off, what happens
//! to it, and that every tile is computed once and in order.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

mod world;

use fiec_policy::Input;
use fiec_policy::Seen;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{Cause, Digest, Event, ExecutionId, Phase};
use proptest::prelude::*;
use world::scenes::{holder_at_its_end, quota, whole};
use world::spread::{Tiled, tiled};
use world::{World, descriptor};

const VIABILITY: &str = r#","viability":{"memory":{"high":0.9,"low":0.7,"dwell_ms":500}}"#;

fn cluster(nodes: usize) -> World {
    World::of((0..nodes).map(tiled).collect())
}

fn made(tiled: &Tiled, n: u64) -> Vec<u64> {
    tiled.of[&World::id(n)].done.clone()
}

#[test]
fn a_range_grows_over_the_nodes_that_are_free_and_ends_with_each_tile_once_and_in_order() {
    let (mut world, mut work) = whole(5, 100, 300, 3);
    // One split at a time: a second place must have been free for a second, then a third.
    world.work(&mut work, 900);
    assert_eq!(work.told.len(), 0, "before the dwell is over");
    world.work(&mut work, 5_000);
    assert_eq!(work.told.len(), 2, "{:?}", work.told);
    assert_eq!(world.parts().len(), 2);
    let nodes: std::collections::BTreeSet<_> =
        world.live().iter().map(|id| world.node_with(*id)).collect();
    assert_eq!(nodes.len(), 3, "each on a node of its own");
    let summary = world.why(1).summary;
    assert!(summary.contains("3 of up to 3 compute"), "{summary}");
    world.work_out(&mut work, 60_000);
    assert!(matches!(world.phase(1), Phase::Completed));
    assert_eq!(made(&work, 1), (0..300).collect::<Vec<_>>());
    assert_eq!(work.most, 3);
    let took = world.now - 86_400_000;
    assert!(
        took < 20_000,
        "thirty seconds of work took {took} ms for three"
    );
}

#[test]
fn where_no_node_is_free_or_others_wait_or_little_is_left_nobody_splits() {
    // The only other node is in use.
    let mut world = cluster(2);
    let mut work = Tiled::new(100);
    world.submit_program(2, "sweep@1");
    world.submit_tiles(1, 100, 3, "");
    world.work(&mut work, 5_000);
    assert!(work.told.is_empty());
    let summary = world.why(1).summary;
    assert!(
        summary.contains("no other node can take one more part"),
        "{summary}"
    );
    // There is a place but nothing to gain: less than two seconds are left.
    let (mut world, mut work) = whole(2, 100, 19, 3);
    world.work_out(&mut work, 5_000);
    assert!(work.told.is_empty());
    // One long tile cannot be halved.
    let (mut world, mut work) = whole(2, 4_000, 2, 3);
    world.work_out(&mut work, 20_000);
    assert!(work.told.is_empty());
    assert_eq!(made(&work, 1), [0, 1]);
    // A gang gathers places, so none is taken from it.
    let (mut world, mut work) = whole(3, 100, 400, 3);
    for n in [3, 4, 5] {
        let line = r#""params":{"work_us":5},"gang":{"name":"g","size":3}"#;
        world.submit_line(n, line);
    }
    world.work(&mut work, 8_000);
    assert!(work.told.is_empty());
    let summary = world.why(1).summary;
    assert!(
        summary.contains("other executions wait for the free slot"),
        "{summary}"
    );
}

#[test]
fn an_order_to_split_that_is_refused_or_ignored_is_given_again_more_and_more_rarely() {
    for deaf in [false, true] {
        let (mut world, mut work) = (cluster(2), Tiled::new(100));
        work.deaf = deaf;
        work.refuse = (!deaf).then(|| "it is parked".to_owned());
        world.submit_tiles(1, 2_000, 2, "");
        world.work(&mut work, 60_000);
        let told = work.told.len();
        assert!((3..=6).contains(&told), "{told} orders, deaf: {deaf}");
        let summary = world.why(1).summary;
        let told = summary.contains("has the order to split off half")
            || summary.contains("it was not split");
        assert!(
            if deaf {
                told
            } else {
                summary.contains("failed (it is parked)")
            },
            "{summary}"
        );
        assert!(world.parts().is_empty());
    }
}

#[test]
fn a_holder_at_its_end_has_no_node_and_is_not_bound_before_its_last_part_has_ended() {
    let (mut world, mut work, part, _) = holder_at_its_end();
    let why = world.why(1);
    assert!(why.summary.contains(&part.to_string()), "{}", why.summary);
    assert!(
        why.would_help.iter().any(|h| h.contains("end of its part")),
        "{:?}",
        why.would_help
    );
    assert_eq!(why.waits_for.len(), 1);
    let why = world.policy.why(world.at(), part).unwrap().summary;
    let holder = World::id(1).to_string();
    assert!(why.contains(&format!("part of {holder}")), "{why}");
    work.slow.clear();
    world.work_out(&mut work, 60_000);
    assert_eq!(made(&work, 1), (0..100).collect::<Vec<_>>());
    let merged = world.events_of(World::id(1));
    assert!(
        merged.contains(&Event::Merged { part }),
        "the part was taken back: {merged:?}"
    );
}

#[test]
fn parts_without_which_their_holder_began_anew_are_cancelled_and_the_holder_does_it_all() {
    for replaced in [false, true] {
        let (mut world, mut work, part, _) = holder_at_its_end();
        // Like `fiec repair`, which begins a lost ledger again.
        let holder = World::id(1);
        let state = &mut world.ledgers.get_mut(&holder).unwrap().state;
        let spread = state.spread.as_mut().unwrap();
        spread.parts.clear();
        (spread.since, spread.end, spread.waits) = (0, Some(100), false);
        let over = Digest::of(b"lost");
        let reason = "the broker lost its ledger".to_owned();
        let anew = vec![
            Event::Healed {
                kept: 0,
                lost: 9,
                over,
            },
            Event::SteppedBack {
                to: None,
                cause: Cause::Orphaned { reason },
            },
        ];
        work.of.remove(&holder);
        world.append(holder, anew, "operator/repair", !replaced);
        if replaced {
            world.replace_policy(77);
        }
        while !world.state_of(part).phase.is_terminal() {
            assert!(world.now < 86_400_000 + 120_000, "{}", world.stand(&[part]));
            world.work(&mut work, 250);
        }
        assert!(matches!(world.state_of(part).phase, Phase::Cancelled));
        assert!(
            !world.phase(1).is_terminal(),
            "it does not wait for its holder's end"
        );
        world.work_out(&mut work, 60_000);
        assert_eq!(made(&work, 1), (0..100).collect::<Vec<_>>());
    }
}

#[test]
fn a_part_whose_holder_comes_back_late_is_not_cancelled() {
    let (mut world, mut work, part, _) = holder_at_its_end();
    let holder = World::id(1);
    // The worker of the part has appended it again, the worker of its holder not yet.
    let lost = world.ledgers.remove(&holder).unwrap();
    world.replace_policy(77);
    let seen = Seen::Vanished;
    world.step(Input::Ended {
        execution: holder,
        seen,
    });
    world.ledgers.insert(holder, lost);
    world.tell(holder, false);
    world.work_out(&mut work, 120_000);
    assert!(matches!(world.state_of(part).phase, Phase::Completed));
    assert_eq!(made(&work, 1), (0..100).collect::<Vec<_>>());
}

/// An execution with a part that is suspended if its node is not viable.
fn one_with_a_part() -> (World, Tiled, ExecutionId) {
    let (mut world, mut work) = (cluster(2), Tiled::new(100));
    let suspend = format!(r#"{VIABILITY},"when_unviable":"suspend""#);
    world.submit_tiles(1, 200, 2, &suspend);
    world.work(&mut work, 4_000);
    let part = world.parts()[0];
    (world, work, part)
}

#[test]
fn a_part_that_finds_no_place_is_given_back_and_its_holder_does_what_it_left() {
    let (mut world, mut work, part) = one_with_a_part();
    let (holder, there) = (world.node_of(1), world.node_with(part));
    assert_ne!(holder, there);
    // It is pinned to this node, which is no longer viable.
    let pinned = Event::Adjusted {
        who: "ann".into(),
        change: Adjustment {
            nodes: Some(vec![world.node(there)]),
            ..Adjustment::default()
        },
    };
    let author = world.author_of(part);
    world.append(part, vec![pinned], &author, true);
    world.set_reading(there, 0.97);
    world.work(&mut work, 3_000);
    let left = || matches!(world.state_of(part).phase, Phase::Pending { .. });
    assert!(left(), "{}", world.stand(&[part]));
    let had = work.of[&part].clone();
    assert!(had.next < had.end && !had.done.is_empty());
    // While its holder computes, the part waits for a place.
    while matches!(world.phase(1), Phase::Started(_)) {
        assert!(matches!(world.state_of(part).phase, Phase::Pending { .. }));
        world.work(&mut work, 50);
    }
    world.work(&mut work, 1_500);
    let phase = world.state_of(part).phase.clone();
    assert!(matches!(phase, Phase::Returned), "{}", world.stand(&[part]));
    world.work_out(&mut work, 60_000);
    assert_eq!(made(&work, 1), (0..200).collect::<Vec<_>>());
    assert!(
        world
            .events_of(World::id(1))
            .contains(&Event::Merged { part })
    );
}

#[test]
fn a_part_that_may_go_where_its_holder_was_does_so_and_is_not_given_back() {
    let (mut world, mut work, part) = one_with_a_part();
    let (holder, there) = (world.node_of(1), world.node_with(part));
    world.set_reading(there, 0.97);
    world.work(&mut work, 3_000);
    while matches!(world.phase(1), Phase::Started(_)) {
        world.work(&mut work, 50);
    }
    world.work(&mut work, 200);
    assert_eq!(world.node_with(part), holder);
    world.work_out(&mut work, 60_000);
    assert!(matches!(world.state_of(part).phase, Phase::Completed));
    assert_eq!(made(&work, 1), (0..200).collect::<Vec<_>>());
}

#[test]
fn where_a_part_fails_its_holder_fails_with_its_name_and_other_parts_are_cancelled() {
    let (mut world, mut work) = whole(3, 200, 300, 3);
    world.work(&mut work, 8_000);
    let parts = world.parts();
    assert_eq!(parts.len(), 2);
    world.fail(parts[0], "its matrix is singular", true);
    world.work_out(&mut work, 10_000);
    let reason = world.failure_of(World::id(1)).unwrap();
    assert!(
        reason.contains(&parts[0].to_string()) && reason.contains("matrix is singular"),
        "{reason}"
    );
    let other = world.state_of(parts[1]).phase.clone();
    assert!(matches!(other, Phase::Cancelled), "{other:?}");
    // It computed: the stop means neither that it finished its own range, nor that its place was
    // unviable.
    let causes = world
        .events_of(World::id(1))
        .into_iter()
        .filter_map(|e| match e {
            Event::Yielded { cause, .. } => Some(cause),
            _ => None,
        });
    let causes: Vec<_> = causes.collect();
    let [Cause::PartFailed { part, .. }] = causes[..] else {
        panic!("{causes:?}")
    };
    assert_eq!((part, causes[0].as_str()), (parts[0], "part_failed"));
    let words = format!("it cannot complete: {reason}");
    assert_eq!(causes[0].in_words(), words);
}

#[test]
fn a_part_of_which_nothing_was_found_is_looked_for_again_while_its_holder_has_it() {
    let (mut world, mut work, part, there) = holder_at_its_end();
    // Both stay silent, and the part's ledger does not exist yet where the reader looks.
    world.silence(there);
    world.step(Input::Vanished { execution: part });
    assert!(!world.policy.knows(part));
    world.pass(2_500);
    assert!(world.policy.knows(part), "its ledger was looked for");
    world.speak(there);
    work.slow.clear();
    world.work_out(&mut work, 60_000);
    assert_eq!(made(&work, 1), (0..100).collect::<Vec<_>>());
}

#[test]
fn a_holder_whose_worker_does_not_see_its_part_ended_waits_until_that_was_looked_at() {
    let (mut world, mut work, part, there) = holder_at_its_end();
    // The policy's view and the ledger differ.
    world.silence(there);
    let ledger = &world.ledgers[&part];
    let (seq, epoch) = (ledger.seq + 1_000, ledger.state.epoch);
    world.step(Input::Appended {
        execution: part,
        seq,
        epoch,
        phase: Phase::Completed,
    });
    let mut bound = 0;
    for _ in 0..36 {
        world.pass(50);
        if matches!(world.phase(1), Phase::Bound(_)) {
            bound += 1;
            let epoch = world.state_of(World::id(1)).epoch;
            let events = vec![
                Event::Started {
                    epoch,
                    computing_since: world.wall(),
                },
                Event::Yielded {
                    cause: Cause::Parts,
                    computed_until: world.wall(),
                },
            ];
            let author = world.author(1);
            world.append(World::id(1), events, &author, true);
        }
    }
    assert_eq!(bound, 1, "within 1.8 s");
    world.pass(1_000);
    assert!(world.policy.knows(part), "its ledger was looked at");
    world.speak(there);
    work.slow.clear();
    world.work_out(&mut work, 60_000);
    assert_eq!(made(&work, 1), (0..100).collect::<Vec<_>>());
}

#[test]
fn where_a_holder_is_cancelled_its_parts_are_and_say_who_asked() {
    let (mut world, mut work) = whole(3, 200, 300, 3);
    world.work(&mut work, 8_000);
    let parts = world.parts();
    assert_eq!(parts.len(), 2);
    let author = world.author_of(World::id(1));
    let who = "ann@desk".to_owned();
    world.append(
        World::id(1),
        vec![Event::Cancelled { who: who.clone() }],
        &author,
        true,
    );
    world.work_out(&mut work, 10_000);
    for part in parts {
        assert!(
            world
                .events_of(part)
                .contains(&Event::Cancelled { who: who.clone() }),
            "{:?}",
            world.events_of(part)
        );
    }
}

#[test]
fn a_part_counts_against_the_quota_of_its_tenant() {
    let mut world = cluster(4);
    let mut work = Tiled::new(100);
    world.quota(Some(quota(2)));
    world.submit_tiles(1, 400, 4, "");
    world.work(&mut work, 12_000);
    assert_eq!(world.parts().len(), 1, "{}", world.why(1).summary);
    let summary = world.why(1).summary;
    assert!(summary.contains("quota"), "{summary}");
    world.work_out(&mut work, 120_000);
    assert_eq!(work.most, 2);
    assert_eq!(made(&work, 1), (0..400).collect::<Vec<_>>());
}

#[test]
fn a_policy_service_that_takes_over_makes_the_parts_and_finds_those_that_have_ended() {
    let (mut world, mut work) = whole(3, 100, 200, 3);
    // The service that saw the split no longer makes the part.
    while world
        .events_of(World::id(1))
        .iter()
        .all(|e| !matches!(e, Event::Split { .. }))
    {
        world.births.clear();
        world.work(&mut work, 50);
        assert!(world.parts().is_empty());
    }
    world.replace_policy(7);
    world.work(&mut work, 5_000);
    assert!(!world.parts().is_empty());
    // It is absent for a while, and parts end in the meantime.
    for own in [8, 9, 10] {
        world.work(&mut work, 2_500);
        world.replace_policy(own);
    }
    world.work_out(&mut work, 60_000);
    assert_eq!(made(&work, 1), (0..200).collect::<Vec<_>>());
}

#[test]
fn parts_of_a_holder_that_ended_while_no_policy_service_was_there_are_cancelled_by_the_next_one() {
    let (mut world, mut work) = whole(3, 200, 300, 3);
    world.work(&mut work, 8_000);
    world.fail(World::id(1), "no", false);
    world.replace_policy(7);
    world.work_out(&mut work, 20_000);
    for part in world.parts() {
        assert!(
            matches!(world.state_of(part).phase, Phase::Cancelled),
            "{}",
            world.stand(&[part])
        );
    }
}

#[test]
fn what_does_not_say_so_is_never_split() {
    let mut world = World::of((0..3).map(|i| descriptor(i, 100 + i as u128)).collect());
    world.submit_and_store(1);
    world.start(1);
    world.pass(20_000);
    let controls = world.take_controls();
    assert!(controls.is_empty(), "{controls:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Nodes press and recover, fall silent and return, and policy services are replaced. No tile
    /// of the range is lost or computed twice, never more nodes compute than allowed, and in the
    /// end the range is complete.
    #[test]
    fn whatever_happens_each_tile_is_there_once_and_no_more_compute_than_may(
        up_to in 2_u32..6,
        count in 30_u64..200,
        happens in prop::collection::vec((0_u8..10, 0_usize..4, 1_u64..8), 0..30),
    ) {
        world::trace::untraced();
        let mut world = cluster(4);
        let mut work = Tiled::new(100);
        world.submit_tiles(1, count, up_to, VIABILITY);
        let mut replaced = 20;
        for (what, node, long) in happens {
            match what {
                0..=2 => world.set_reading(node, 0.97),
                3..=5 => world.set_reading(node, 0.2),
                6 => world.silence(node),
                7 => world.speak(node),
                8 => {
                    replaced += 1;
                    world.replace_policy(replaced);
                }
                _ => {}
            }
            world.work(&mut work, long * 250);
        }
        for node in 0..4 {
            world.set_reading(node, 0.2);
            world.speak(node);
        }
        world.work_out(&mut work, 300_000);
        prop_assert!(matches!(world.phase(1), Phase::Completed), "{:?}", world.phase(1));
        prop_assert_eq!(made(&work, 1), (0..count).collect::<Vec<_>>());
        prop_assert!(work.most <= up_to as usize, "{} of {}", work.most, up_to);
    }
}
