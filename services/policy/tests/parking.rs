//! Executions without a viable place, parked executions, and executions that ask for more.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

mod world;

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::scheduling::{Adjustment, Keep};
use fiec_schemas::{Cause, Phase};
use world::offers::with_devices;
use world::parking::parks;
use world::{World, descriptor};

const VIABILITY: &str = r#""viability":{"memory":{"high":0.9,"low":0.7,"dwell_ms":1000}}"#;
const DEVICE: &str = r#""requires":{"device":{"memory_bytes":40}}"#;

fn one(line: &str, nodes: Vec<fiec_schemas::NodeDescriptor>) -> World {
    let mut world = World::of(nodes);
    world.submit_line(1, line);
    world.start(1);
    world.take_controls();
    world
}

/// A cluster without time slices.
fn unsliced(nodes: Vec<fiec_schemas::NodeDescriptor>) -> World {
    let config = fiec_policy::Config {
        sharing: fiec_policy::SharingSettings {
            slicing: false,
            ..Default::default()
        },
        ..Default::default()
    };
    World::with(config, nodes)
}

/// Runs the cluster and its workers. Returns the orders to holders.
fn live(world: &mut World, ms: u64) -> Vec<ControlRequest> {
    let mut given = Vec::new();
    for _ in 0..ms / 250 {
        world.pass(250);
        given.extend(world.obey_all().into_iter().map(|(_, request)| request));
    }
    given
}

fn host(i: usize) -> fiec_schemas::NodeDescriptor {
    parks(descriptor(i, 100 + i as u128))
}

#[test]
fn one_that_is_to_wait_parks_on_its_device_and_goes_on_there_when_that_is_viable_again() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![parks(with_devices(0, &[80]))]);
    world.set_device(0, "g0", 0.95);
    let given = live(&mut world, 4_000);
    assert!(
        matches!(&given[..], [ControlRequest::Park { keep: Keep::Host, cause: Cause::Unviable { reason }, .. }]
            if reason.contains("no other place") && reason.contains("says wait")),
        "{given:?}"
    );
    assert!(world.is_parked(1));
    // Between low and high it is not viable yet.
    world.set_device(0, "g0", 0.8);
    assert!(live(&mut world, 5_000).is_empty());
    world.set_device(0, "g0", 0.3);
    let given = live(&mut world, 4_000);
    assert!(
        matches!(&given[..], [ControlRequest::Unpark { reason, .. }] if reason.contains("viable again")),
        "{given:?}"
    );
    assert!(!world.is_parked(1));
    assert_eq!(world.place_of(1), "n0/g0");
}

#[test]
fn what_waits_and_finds_no_place_keeps_nobody_parked() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![parks(with_devices(0, &[80]))]);
    world.set_device(0, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    world.submit_line(2, r#""priority":90,"requires":{"nodes":["elsewhere"]}"#);
    world.set_device(0, "g0", 0.3);
    live(&mut world, 5_000);
    assert!(!world.is_parked(1), "{}", world.why(1).summary);
}

#[test]
fn a_parked_execution_has_no_slot_and_in_the_hosts_memory_no_device() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut node = parks(with_devices(0, &[80]));
    node.slots = 1;
    let mut world = one(&line, vec![node]);
    world.set_device(0, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    world.set_device(0, "g0", 0.2);
    // Other executions take the slot and the device before it may resume.
    world.submit_line(
        2,
        r#""priority":5,"requires":{"device":{"memory_bytes":40}}"#,
    );
    world.pass(2_500);
    assert_eq!(world.place_of(2), "n0/g0");
    world.start(2);
    let given = live(&mut world, 6_000);
    assert!(given.is_empty(), "no slot, no other node: {given:?}");
    world.complete(2);
    let given = live(&mut world, 3_000);
    assert!(
        matches!(&given[..], [ControlRequest::Unpark { .. }]),
        "{given:?}"
    );
}

#[test]
fn a_parked_execution_whose_device_somebody_took_goes_on_on_another_one_of_its_node() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![parks(with_devices(0, &[80, 80]))]);
    assert_eq!(world.place_of(1), "n0/g0");
    world.submit_line(2, DEVICE);
    assert_eq!(world.place_of(2), "n0/g1");
    world.start(2);
    world.set_device(0, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    // An execution with a high threshold takes its device before it may resume.
    let careless = r#""viability":{"memory":{"high":0.99,"low":0.98,"dwell_ms":1000}}"#;
    world.submit_line(3, &format!("{careless},{DEVICE}"));
    world.pass(2_500);
    assert_eq!(world.place_of(3), "n0/g0", "{}", world.why(3).summary);
    world.start(3);
    world.set_device(0, "g0", 0.3);
    let given = live(&mut world, 6_000);
    assert!(given.is_empty() && world.is_parked(1), "{given:?}");
    world.complete(2);
    let given = live(&mut world, 3_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: Some(to), .. }] if to.substrate == "g1"),
        "{given:?}"
    );
    assert!(!world.is_parked(1));
    assert_eq!(world.place_of(1), "n0/g1");
}

#[test]
fn a_parked_execution_migrates_when_another_place_becomes_viable() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(
        &line,
        vec![parks(with_devices(0, &[80])), parks(with_devices(1, &[80]))],
    );
    let other = 1 - world.node_of(1);
    world.set_device(0, "g0", 0.95);
    world.set_device(1, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    world.set_device(other, "g0", 0.1);
    let given = live(&mut world, 4_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: Some(to), .. }] if to.node == world.node(other)),
        "{given:?}"
    );
    assert_eq!(world.place_of(1), format!("n{other}/g0"));
}

#[test]
fn a_submission_that_says_suspend_frees_its_place_and_comes_back_when_it_has_recovered() {
    let line = format!(r#"{VIABILITY},"when_unviable":"suspend""#);
    let mut world = one(&line, vec![host(0)]);
    world.set_reading(0, 0.95);
    let given = live(&mut world, 4_000);
    assert!(
        matches!(
            &given[..],
            [ControlRequest::Yield {
                to: None,
                cause: Cause::Unviable { .. },
                ..
            }]
        ),
        "{given:?}"
    );
    assert_eq!(world.place_of(1), "pending");
    world.set_reading(0, 0.3);
    live(&mut world, 4_000);
    assert_eq!(world.place_of(1), "n0");
}

#[test]
fn by_cost_a_slow_program_goes_on_and_one_whose_memory_runs_out_is_suspended() {
    let mut world = one(VIABILITY, vec![host(0)]);
    world.set_reading(0, 0.95);
    assert!(live(&mut world, 6_000).is_empty());
    assert!(
        world.why(1).summary.contains("no other node"),
        "{:?}",
        world.why(1)
    );
    world.set_reading(0, 0.99);
    let given = live(&mut world, 2_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: None, .. }]),
        "{given:?}"
    );
    let mut stays = one(
        &format!(r#"{VIABILITY},"when_unviable":"migrate""#),
        vec![host(0)],
    );
    stays.set_reading(0, 0.99);
    assert!(live(&mut stays, 6_000).is_empty());
}

#[test]
fn where_memory_presses_what_is_parked_is_suspended_before_anything_that_computes() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![parks(with_devices(0, &[80]))]);
    world.set_device(0, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    world.submit_line(2, &format!(r#"{VIABILITY},"when_unviable":"suspend""#));
    world.start(2);
    world.take_controls();
    world.set_reading(0, 0.95);
    let mut order = Vec::new();
    for _ in 0..40 {
        world.pass(100);
        order.extend(world.obey_all().into_iter().map(|(id, _)| id));
    }
    assert_eq!(order, [World::id(1), World::id(2)]);
}

#[test]
fn a_node_or_a_program_that_cannot_park_lets_it_be_suspended() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![with_devices(0, &[80])]);
    world.set_device(0, "g0", 0.95);
    let given = live(&mut world, 4_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: None, .. }]),
        "{given:?}"
    );
    // An execution that refuses is not ordered to park again, but to yield.
    let mut world = one(&line, vec![parks(with_devices(0, &[80]))]);
    world.set_device(0, "g0", 0.95);
    world.pass(2_500);
    let controls = world.take_controls();
    assert!(
        matches!(&controls[..], [(_, ControlRequest::Park { .. })]),
        "{controls:?}"
    );
    world.step(fiec_policy::Input::Ordered {
        execution: World::id(1),
        epoch: 1,
        answer: fiec_policy::ControlOutcome::Refused("its program does not".into()),
    });
    let given = live(&mut world, 3_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: None, .. }]),
        "{given:?}"
    );
}

#[test]
fn an_execution_on_its_way_is_ordered_to_park_again() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(&line, vec![parks(with_devices(0, &[80]))]);
    world.set_device(0, "g0", 0.95);
    world.pass(2_500);
    let parked = |control: &ControlRequest| matches!(control, ControlRequest::Park { .. });
    assert!(world.take_controls().iter().all(|(_, order)| parked(order)));
    world.step(fiec_policy::Input::Ordered {
        execution: World::id(1),
        epoch: 1,
        answer: fiec_policy::ControlOutcome::Moving("it is about to leave".into()),
    });
    let given = live(&mut world, 10_000);
    assert!(!given.is_empty() && given.iter().all(parked), "{given:?}");
}

#[test]
fn a_drain_takes_a_parked_execution_along() {
    let line = format!(r#"{VIABILITY},{DEVICE},"when_unviable":"wait""#);
    let mut world = one(
        &line,
        vec![parks(with_devices(0, &[80])), parks(with_devices(1, &[80]))],
    );
    let (from, other) = (world.node_of(1), 1 - world.node_of(1));
    world.set_device(from, "g0", 0.95);
    world.set_device(other, "g0", 0.95);
    live(&mut world, 4_000);
    assert!(world.is_parked(1));
    world.drain(from);
    world.set_device(other, "g0", 0.1);
    live(&mut world, 4_000);
    assert_eq!(world.place_of(1), format!("n{other}/g0"));
}

#[test]
fn one_that_asks_beyond_its_place_goes_where_there_is_more() {
    let small = with_devices(0, &[100]);
    let mut large = with_devices(1, &[100]);
    large.memory_limit_bytes = 1 << 34;
    let ask = |bytes| Adjustment {
        memory_bytes: Some(bytes),
        ..Adjustment::default()
    };
    let mut world = one(
        r#""requires":{"nodes":["n0","n1"]}"#,
        vec![parks(small), parks(large)],
    );
    let mut at = world.node_of(1);
    if at == 1 {
        // It starts on the small device.
        world.drain(1);
        live(&mut world, 3_000);
        world.start(1);
        world.flag(1, false, false);
        at = world.node_of(1);
    }
    assert_eq!(at, 0);
    world.ask(1, ask(1 << 33));
    let given = live(&mut world, 2_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: Some(to), cause: Cause::Asked { reason }, .. }]
            if to.node == world.node(1) && reason.contains("8589934592 bytes of memory")),
        "{given:?}"
    );
    assert!(matches!(world.phase(1), Phase::Bound(_)));
}

#[test]
fn one_that_asks_for_what_nobody_has_waits_as_its_submission_says() {
    for (says, parked) in [("wait", true), ("suspend", false)] {
        let line = format!(r#""when_unviable":"{says}""#);
        let mut world = one(&line, vec![host(0)]);
        world.ask(
            1,
            Adjustment {
                memory_bytes: Some(1 << 40),
                ..Adjustment::default()
            },
        );
        let given = live(&mut world, 1_000);
        assert_eq!(given.len(), 1, "{given:?}");
        assert_eq!(world.is_parked(1), parked);
        let stage = world.phase(1);
        assert_eq!(matches!(stage, Phase::Pending { .. }), !parked, "{stage:?}");
    }
}

#[test]
fn one_that_waits_too_long_for_what_nobody_has_gives_its_place_up() {
    let line = r#""requires":{"memory_bytes":20000000,"device":{"memory_bytes":40}}"#;
    let mut world = World::of(vec![parks(with_devices(0, &[80]))]);
    world.submit_line(1, line);
    // It takes 3 s to start.
    world.pass(3_000);
    world.start(1);
    world.take_controls();
    world.ask(
        1,
        Adjustment {
            device_memory_bytes: Some(1 << 40),
            ..Adjustment::default()
        },
    );
    live(&mut world, 2_000);
    assert!(world.is_parked(1), "{}", world.why(1).summary);
    // The cost of keeping its 2 % of host memory grows.
    for _ in 0..20 {
        live(&mut world, 30_000);
    }
    assert_eq!(world.place_of(1), "pending");
}

#[test]
fn a_large_device_is_freed_for_one_that_needs_it() {
    let mut world = unsliced(vec![with_devices(0, &[80, 40])]);
    world.submit_line(
        1,
        r#""requires":{"device":{"memory_bytes":30}},"prefers":{"device":{"memory_bytes":80}}"#,
    );
    assert_eq!(world.place_of(1), "n0/g0");
    world.start(1);
    world.submit_line(2, r#""requires":{"device":{"memory_bytes":60}}"#);
    assert_eq!(world.place_of(2), "pending");
    let early = live(&mut world, 20_000);
    assert!(
        early.is_empty(),
        "it has not been there for long: {early:?}"
    );
    let given = live(&mut world, 15_000);
    assert!(
        matches!(&given[..], [ControlRequest::Yield { to: Some(to), cause: Cause::Reallocated { upgrade: false, .. }, .. }]
            if to.substrate == "g1"),
        "{given:?}"
    );
    assert_eq!(world.place_of(1), "n0/g1");
    assert_eq!(world.place_of(2), "n0/g0");
}

#[test]
fn one_that_says_so_is_not_moved_for_others() {
    let mut world = unsliced(vec![with_devices(0, &[80, 40])]);
    world.submit_line(
        1,
        r#""requires":{"device":{"memory_bytes":30}},"prefers":{"device":{"memory_bytes":80}},"reallocation":{"downgrade":false}"#,
    );
    world.start(1);
    world.submit_line(2, r#""requires":{"device":{"memory_bytes":60}}"#);
    let given = live(&mut world, 60_000);
    assert!(given.is_empty(), "{given:?}");
}

#[test]
fn one_that_keeps_its_device_busy_moves_to_a_larger_one_that_idles() {
    for (busy, moves) in [(0.95, true), (0.3, false)] {
        let mut world = World::of(vec![with_devices(0, &[80, 40])]);
        // At first the large device is in use.
        world.submit_line(9, r#""requires":{"device":{"memory_bytes":60}}"#);
        world.start(9);
        world.submit_line(
            1,
            r#""requires":{"device":{"memory_bytes":30}},"prefers":{"device":{"memory_bytes":80}}"#,
        );
        assert_eq!(world.place_of(1), "n0/g1");
        world.start(1);
        world.set_contention(0, "g1", busy);
        live(&mut world, 31_000);
        world.complete(9);
        let early = live(&mut world, 9_000);
        assert!(
            early.is_empty(),
            "the large one has not idled for long: {early:?}"
        );
        let given = live(&mut world, 5_000);
        let moved = matches!(&given[..], [ControlRequest::Yield { to: Some(to), cause: Cause::Reallocated { upgrade: true, .. }, .. }]
            if to.substrate == "g0");
        assert_eq!(moved, moves, "{given:?}");
    }
}
