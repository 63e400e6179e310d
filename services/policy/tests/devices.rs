//! Requirements, preferences and devices: choices, counts and explanations.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

mod world;

use fiec_schemas::substrate::Confinement;
use fiec_schemas::{Cause, Event, Phase, Signal};
use proptest::prelude::*;
use world::offers::{with_devices, with_slices};
use world::{World, descriptor};

const DEVICE: &str = r#""requires":{"device":{"kind":"NVIDIA H*","compute_capability":"8.0"}}"#;

fn share(bytes: u64) -> String {
    format!(r#""requires":{{"device":{{"share_bytes":{bytes}}}}}"#)
}

#[test]
fn a_device_is_bound_by_its_name_and_to_one_execution_alone() {
    let mut w = World::of(vec![
        descriptor(0, 100),
        with_devices(1, &[80, 80]),
        with_devices(2, &[80]),
    ]);
    (1..=4).for_each(|n| drop(w.submit_line(n, DEVICE)));
    let mut places: Vec<_> = (1..=4).map(|n| w.place_of(n)).collect();
    places.sort();
    assert_eq!(places, ["n1/g0", "n1/g1", "n2/g0", "pending"]);
    let waiting = (1..=4).find(|n| w.place_of(*n) == "pending").unwrap();
    let why = w.why(waiting);
    let rejected = |node: &str, device: Option<&str>| {
        let of = |c: &&fiec_schemas::Candidate| {
            c.node.as_str() == node && c.substrate.as_deref() == device
        };
        why.candidates.iter().find(of).unwrap().rejected.join("; ")
    };
    assert!(rejected("n0", None).contains("has no device"), "{why:?}");
    assert!(rejected("n1", Some("g1")).contains("to itself"), "{why:?}");
    let first = (1..=4).find(|n| w.place_of(*n) == "n2/g0").unwrap();
    w.start(first);
    w.complete(first);
    w.pass(100);
    assert_eq!(w.place_of(waiting), "n2/g0");
}

#[test]
fn a_decision_lists_the_places_that_were_considered() {
    let mut w = World::of(vec![descriptor(0, 100), with_devices(1, &[80, 80])]);
    let actions = w.submit_line(1, DEVICE);
    let fiec_policy::Action::Append { events, .. } = &actions[0] else {
        panic!("{actions:?}")
    };
    let Event::Bound {
        substrate,
        decision: Some(decision),
        ..
    } = &events[1]
    else {
        panic!("{events:?}")
    };
    assert_eq!(substrate, "g0");
    let listed: Vec<_> = decision
        .candidates
        .iter()
        .map(|c| (c.node.as_str(), c.substrate.as_deref(), c.score.is_some()))
        .collect();
    assert_eq!(
        listed,
        [
            ("n1", Some("g0"), true),
            ("n1", Some("g1"), true),
            ("n0", None, false)
        ]
    );
    assert_eq!(decision.omitted, 0);
}

#[test]
fn several_share_a_device_within_its_memory_and_one_that_wants_it_alone_waits() {
    let mut w = World::of(vec![with_devices(0, &[100])]);
    w.submit_line(1, &share(60));
    w.submit_line(2, &share(40));
    w.submit_line(3, &share(1));
    w.submit_line(4, DEVICE);
    assert_eq!(
        [1, 2, 3, 4].map(|n| w.place_of(n)),
        ["n0/g0", "n0/g0", "pending", "pending"]
    );
    assert!(
        w.why(3).candidates[0].rejected[0].contains("leave 0 bytes, 1 are wanted"),
        "{:?}",
        w.why(3)
    );
    assert!(
        w.why(4).candidates[0].rejected[0].contains("2 executions share the device"),
        "{:?}",
        w.why(4)
    );
    for n in [1, 2] {
        w.start(n);
        w.complete(n);
    }
    w.pass(100);
    // The first one gets the place, never both.
    let now = [3, 4].map(|n| w.place_of(n));
    assert!(now == ["n0/g0", "pending"] || now == ["pending", "n0/g0"]);
}

#[test]
fn a_place_offers_no_more_than_its_envelope_lets_it() {
    let mut w = World::of(vec![with_devices(0, &[100])]);
    // The memory limit of a node is 1 GiB here.
    let host = format!(r#""requires":{{"memory_bytes":{}}}"#, 600 << 20);
    let whole = r#""requires":{"device":{"memory_bytes":60}}"#;
    w.cap(0, None, (400 << 20) as f64);
    w.cap(0, Some("g0"), 40.0);
    w.submit_line(1, &host);
    w.submit_line(2, whole);
    w.submit_line(3, &share(60));
    for n in 1..=3 {
        assert_eq!(w.place_of(n), "pending");
        let why = w.why(n).candidates.remove(0).rejected.join("; ");
        let said = match n {
            1 => "its envelope offers 419430400 of the 1073741824 bytes of its memory",
            2 => "its envelope offers 40 of the 100 bytes of the device's memory",
            _ => "leave 40 bytes, 60 are wanted",
        };
        assert!(why.contains(said), "{n}: {why}");
    }
    w.submit_line(4, &share(40));
    assert_eq!(w.place_of(4), "n0/g0", "what is offered can be had");
    w.start(4);
    w.complete(4);
    w.uncap();
    w.pass(1_000);
    assert_eq!(w.place_of(1), "n0");
    let mut devices = [w.place_of(2), w.place_of(3)];
    devices.sort();
    assert_eq!(devices, ["n0/g0", "pending"]);
}

#[test]
fn a_program_in_a_container_goes_where_containers_can_be_started() {
    let confined = |i: usize, all: &[Confinement]| {
        let mut d = descriptor(i, 100 + i as u128);
        d.programs.push("boxed@*".into());
        d.profile.confinement = all.to_vec();
        d
    };
    let mut w = World::of(vec![
        confined(0, &[Confinement::Container]),
        confined(1, &[Confinement::Host, Confinement::Users]),
        confined(2, &[Confinement::Host, Confinement::Containers]),
    ]);
    w.step(fiec_policy::Input::Container {
        program: "boxed@1".to_owned(),
    });
    for n in 1..=2 {
        w.submit_program(n, "boxed@1");
        assert_eq!(w.place_of(n), "n2");
    }
    w.submit_program(3, "boxed@2");
    assert_ne!(w.place_of(3), "n2", "this one is no container");
    w.cordon(2, true);
    w.submit_program(4, "boxed@1");
    assert_eq!(w.place_of(4), "pending");
    let why = w.why(4);
    let of = |node: &str| {
        let all = why.candidates.iter();
        let of: Vec<_> = all.filter(|c| c.node.as_str() == node).collect();
        of[0].rejected.join("; ")
    };
    for node in ["n0", "n1"] {
        assert!(of(node).contains("neither podman nor docker"), "{why:?}");
    }
}

#[test]
fn an_execution_without_a_wish_for_a_device_runs_on_the_host_whatever_the_devices_do() {
    let mut w = World::of(vec![with_devices(0, &[80])]);
    w.set_device(0, "g0", 0.99);
    w.pass(60_000);
    w.submit_line(1, r#""retries":1"#);
    assert_eq!(w.place_of(1), "n0");
    w.start(1);
    w.pass(60_000);
    assert!(w.take_controls().is_empty());
    assert_eq!(w.place_of(1), "n0");
}

#[test]
fn pressure_on_a_device_moves_its_execution_to_another_device_of_the_same_node() {
    let mut w = World::of(vec![with_devices(0, &[80, 80])]);
    // By then the watch knows that the second device never pressed.
    w.pass(60_000);
    w.submit_line(1, DEVICE);
    w.submit_line(2, r#""retries":1"#);
    assert_eq!([1, 2].map(|n| w.place_of(n)), ["n0/g0", "n0"]);
    w.start(1);
    w.start(2);
    w.set_device(0, "g0", 0.97);
    w.pass(11_000);
    let orders = w.take_controls();
    let (_, order) = orders.last().unwrap();
    w.obey(World::id(1), order);
    assert_eq!([1, 2].map(|n| w.place_of(n)), ["n0/g1", "n0"]);
    let Some(Cause::Pressure { evidence }) = w.last_cause(1) else {
        panic!("{:?}", w.last_cause(1))
    };
    assert_eq!(evidence.device.as_deref(), Some("g0"));
    w.start(1);
    // Both press: no place is left, and the explanation says so.
    w.set_device(0, "g1", 0.97);
    w.pass(30_000);
    assert!(w.take_controls().is_empty());
    let why = w.why(1);
    assert!(why.summary.contains("it should leave"), "{why:?}");
    assert!(why.summary.contains("n0 (g1)"), "{why:?}");
    // The first device has recovered for its dwell.
    w.set_device(0, "g0", 0.1);
    w.pass(25_000);
    let orders = w.take_controls();
    w.obey(World::id(1), &orders.last().unwrap().1);
    assert_eq!(w.place_of(1), "n0/g0");
}

#[test]
fn power_or_heat_of_a_whole_gpu_takes_work_off_its_slices_and_its_memory_does_not() {
    for signal in [Signal::Power, Signal::Thermal] {
        let mut w = World::of(vec![with_slices(0)]);
        for whole in ["whole0", "whole1"] {
            w.set_signal(0, whole, signal, 0.5);
        }
        w.pass(60_000);
        w.submit_line(1, DEVICE);
        assert_eq!(w.place_of(1), "n0/g0");
        w.start(1);
        // The memory use of the whole GPU says nothing about a slice.
        w.set_device(0, "whole0", 1.0);
        w.pass(60_000);
        assert!(w.take_controls().is_empty());
        w.set_signal(0, "whole0", signal, 1.0);
        w.pass(31_000);
        let orders = w.take_controls();
        let (_, order) = orders.last().unwrap();
        w.obey(World::id(1), order);
        // The other slice of the same GPU would be no better.
        assert_eq!(w.place_of(1), "n0/g2", "{signal}");
        let Some(Cause::Pressure { evidence }) = w.last_cause(1) else {
            panic!("{:?}", w.last_cause(1))
        };
        assert_eq!(evidence.device.as_deref(), Some("whole0"));
        assert_eq!(evidence.signal, signal);
        w.start(1);
        w.submit_line(2, DEVICE);
        assert_eq!(w.place_of(2), "pending");
        w.set_signal(0, "whole0", signal, 0.1);
        w.pass(31_000);
        assert_eq!(w.place_of(2), "n0/g0");
    }
}

#[test]
fn pressure_on_the_host_takes_its_devices_executions_away_unless_they_look_at_the_device_alone() {
    let mut w = World::of(vec![with_devices(0, &[80, 80]), with_devices(1, &[80, 80])]);
    w.pass(60_000);
    w.submit_line(1, DEVICE);
    w.submit_line(
        2,
        r#""requires":{"nodes":["n0","n1"],"device":{"viable_by":"device"}}"#,
    );
    let (one, two) = (w.node_of(1), w.node_of(2));
    w.start(1);
    w.start(2);
    for node in [one, two] {
        w.set_reading(node, 0.97);
    }
    w.set_reading(1 - one, 0.2);
    w.pass(11_000);
    let moved: Vec<_> = w
        .take_controls()
        .into_iter()
        .filter_map(|(_, request)| match request {
            fiec_schemas::messages::ControlRequest::Yield { execution, .. } => Some(execution),
            _ => None,
        })
        .collect();
    assert_eq!(moved, [World::id(1)]);
}

#[test]
fn each_requirement_of_a_device_and_of_a_node_is_told_when_it_is_not_met() {
    let mut w = World::of(vec![with_devices(0, &[80])]);
    for (n, requires, words) in [
        (1, r#"{"device":{"kind":"AMD*"}}"#, "\"AMD*\" is required"),
        (
            2,
            r#"{"device":{"compute_capability":"10.0"}}"#,
            "compute capability is 9.0, 10.0 is required",
        ),
        (
            3,
            r#"{"device":{"multiprocessors":133}}"#,
            "multiprocessors is 132, 133 are required",
        ),
        (
            4,
            r#"{"device":{"memory_bytes":81}}"#,
            "memory is 80 bytes, 81 bytes are required",
        ),
        (
            5,
            r#"{"device":{"copy_bytes_s":1}}"#,
            "copy bandwidth is not known, 1 bytes/s",
        ),
        (
            6,
            r#"{"device":{"free_memory_bytes":91}}"#,
            "the device has 90 bytes of free memory, 91 are required",
        ),
        (7, r#"{"cores":3}"#, "2 logical processors, 3 are required"),
        (
            8,
            r#"{"bandwidth_bytes_s":5}"#,
            "memory bandwidth is not known, 5 bytes/s are required",
        ),
        (
            9,
            r#"{"free_memory_bytes":81}"#,
            "the node has 80 bytes of free memory, 81 are required",
        ),
        (
            10,
            r#"{"machine":{"isa":["fma","avx512f"]}}"#,
            "its instruction set is x86_64+avx2+fma, avx512f is required",
        ),
        (
            11,
            r#"{"machine":{"kernel":"6.1"}}"#,
            "its kernel is not known, 6.1 is required",
        ),
        (
            12,
            r#"{"machine":{"driver":"550.54"}}"#,
            "NVIDIA's driver is not known, 550.54 is required",
        ),
        (
            13,
            r#"{"machine":{"memory_latency_ns":100}}"#,
            "latency of its memory is not measured, 100 ns",
        ),
        (
            14,
            r#"{"machine":{"far_memory_bytes":1}}"#,
            "0 bytes of far memory, 1 are required",
        ),
    ] {
        w.submit_line(n, &format!(r#""requires":{requires}"#));
        assert_eq!(w.place_of(n), "pending", "{requires}");
        let why = w.why(n);
        assert!(
            why.candidates[0].rejected[0].contains(words),
            "{requires}: {why:?}"
        );
        assert!(!why.would_help.is_empty(), "{why:?}");
    }
    // The reading changes, and with it the verdict.
    w.set_reading(0, 0.1);
    w.pass(1_000);
    assert_eq!(w.place_of(9), "n0");
}

/// A node with 64 bytes of far memory, `avx512f`, and a newer kernel and driver than the other.
fn new_machine(i: usize) -> fiec_schemas::hardware::NodeDescriptor {
    let mut d = descriptor(i, 200);
    d.isa = "x86_64+avx2+fma+avx512f".into();
    d.profile.kernel = "Linux 6.8.0-31-generic".into();
    d.profile.libraries = [("nvidia_driver".to_owned(), "560.1".to_owned())].into();
    let node = |id: u32, tier: &str, bytes: u64, ns: f64| {
        let node = serde_json::json!({"id": id, "tier": tier, "cpus": "", "memory_bytes": bytes,
            "latency_ns": ns});
        serde_json::from_value(node).unwrap()
    };
    d.profile.memory = vec![node(0, "local", 32, 80.0), node(1, "far", 64, 300.0)];
    d
}

#[test]
fn a_machine_is_required_and_preferred_by_its_isa_kernel_driver_and_memory_tiers() {
    for wish in [
        r#"{"machine":{"isa":["avx512f"]}}"#,
        r#"{"machine":{"kernel":"6.8"}}"#,
        r#"{"machine":{"driver":"560"}}"#,
        r#"{"machine":{"memory_latency_ns":80}}"#,
        r#"{"machine":{"far_memory_bytes":64}}"#,
    ] {
        for words in ["requires", "prefers"] {
            let mut old = descriptor(0, 100);
            old.profile.kernel = "Linux 5.15.0".into();
            let mut w = World::of(vec![old, new_machine(1), descriptor(2, 102)]);
            w.submit_line(1, &format!(r#""{words}":{wish}"#));
            assert_eq!(w.place_of(1), "n1", "{words} {wish}");
        }
    }
}

#[test]
fn what_is_preferred_is_taken_where_it_is_free_and_a_free_slot_comes_first() {
    let mut big = descriptor(1, 101);
    big.cpus = 16;
    big.slots = 1;
    let mut w = World::of(vec![descriptor(0, 100), big]);
    let line = r#""prefers":{"cores":16,"memory_bytes":1073741824}"#;
    w.submit_line(1, line);
    w.submit_line(2, line);
    assert_eq!([1, 2].map(|n| w.place_of(n)), ["n1", "n0"]);
}

#[test]
fn a_preferred_device_is_taken_where_one_is_free_and_the_host_does_otherwise() {
    let mut w = World::of(vec![with_devices(0, &[80]), descriptor(1, 101)]);
    let line = r#""prefers":{"device":{}}"#;
    (1..=2).for_each(|n| drop(w.submit_line(n, line)));
    assert_eq!(w.place_of(1), "n0/g0");
    assert!(["n0", "n1"].contains(&w.place_of(2).as_str()));
    let why = w.why(2);
    assert_eq!(why.candidates.len(), 3, "{why:?}");
}

#[test]
fn the_smallest_device_that_suffices_is_taken_first() {
    let mut w = World::of(vec![with_devices(0, &[80, 20, 40])]);
    w.submit_line(1, r#""requires":{"device":{"memory_bytes":15}}"#);
    w.submit_line(2, r#""requires":{"device":{"memory_bytes":15}}"#);
    w.submit_line(3, r#""requires":{"device":{"memory_bytes":60}}"#);
    assert_eq!(
        [1, 2, 3].map(|n| w.place_of(n)),
        ["n0/g1", "n0/g2", "n0/g0"]
    );
}

#[test]
fn a_device_is_free_again_when_its_node_comes_back_in_a_new_life() {
    let mut w = World::of(vec![with_devices(0, &[80])]);
    w.submit_line(1, DEVICE);
    w.start(1);
    w.restart_node(0);
    w.pass(10_000);
    assert_eq!(w.place_of(1), "n0/g0", "bound anew to what it held itself");
    assert!(matches!(w.last_cause(1), Some(Cause::Lost { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever is submitted, started, completed, refused or restarted: a device has one exclusive
    /// execution, or several whose budgets fit.
    #[test]
    fn no_device_is_ever_given_twice(
        steps in proptest::collection::vec((0u8..6, 1u64..40, 10u64..70), 1..80)
    ) {
        world::trace::untraced();
        let mut w = World::of(vec![with_devices(0, &[100, 50]), with_devices(1, &[100])]);
        let mut known: Vec<(u64, Option<u64>)> = Vec::new();
        for (what, n, bytes) in steps {
            let is_known = known.iter().any(|(id, _)| *id == n);
            match what {
                0 | 1 if !is_known => {
                    let budget = (what == 0).then_some(bytes);
                    let line = budget.map_or_else(|| DEVICE.to_owned(), share);
                    w.submit_line(n, &line);
                    known.push((n, budget));
                }
                2 if is_known && matches!(w.phase(n), Phase::Bound(_)) => w.start(n),
                3 if is_known && matches!(w.phase(n), Phase::Started(_)) => w.complete(n),
                4 if is_known && matches!(w.phase(n), Phase::Bound(_)) => w.refuse(n),
                5 => w.restart_node(usize::from(n % 2 == 0)),
                _ => {}
            }
            w.pass(200);
            for (place, memory) in [("n0/g0", 100), ("n0/g1", 50), ("n1/g0", 100)] {
                let on: Vec<_> = known.iter().filter(|(id, _)| w.place_of(*id) == place).collect();
                let alone = on.iter().filter(|(_, budget)| budget.is_none()).count();
                prop_assert!(alone == 0 || on.len() == 1, "{place}: {on:?}");
                let budgets: u64 = on.iter().filter_map(|(_, budget)| *budget).sum();
                prop_assert!(budgets <= memory, "{place}: {on:?}");
            }
        }
    }
}
