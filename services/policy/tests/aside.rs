//! Preempted executions without another place: what a park keeps, and how they go on.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use fiec_policy::Config;
use fiec_schemas::Event;
use fiec_schemas::scheduling::{Keep, Rule};
use world::World;
use world::lab::{LONG, Lab, for_ever, node};
use world::offers::with_devices;
use world::scenes::{one_gives_way, single, urgent};

const GIB: u64 = 1 << 30;
const LITTLE: &str = r#""requires":{"memory_bytes":1000000}"#;

/// The memory that a parked execution keeps.
fn keeps(lab: &Lab, n: u64) -> Option<Keep> {
    let state = &lab.w.ledgers[&World::id(n)].state;
    state.parked().map(|parked| parked.keep)
}

#[test]
fn what_is_small_stands_in_the_hosts_memory_and_goes_on_where_it_is() {
    let mut lab = one_gives_way(vec![single(0, 2)], 200, LITTLE, 8_000);
    assert_eq!((lab.running(), keeps(&lab, 1)), (vec![2], Some(Keep::Host)));
    let (rule, reason) = lab.reason(1);
    assert_eq!(rule, Rule::Priority);
    for words in [
        "its regret is",
        "it waits in the host's memory",
        "nothing: 2",
    ] {
        assert!(reason.contains(words), "{words:?} in {reason}");
    }
    let why = lab.w.why(1).summary;
    assert!(
        why.contains("parked on n0") && why.contains("waits with priority 10"),
        "{why}"
    );
    lab.play(20_000, for_ever);
    assert_eq!(lab.running(), [2], "there is no slot");
    lab.w.complete(2);
    lab.play(300, for_ever);
    assert_eq!((lab.running(), lab.epoch(1)), (vec![1], 1));
    let history = &lab.w.ledgers[&World::id(1)].history;
    let reasons = history.iter().filter_map(|(_, e)| match e {
        Event::Unparked { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    let reasons: Vec<_> = reasons.collect();
    assert!(
        reasons.len() == 1 && reasons[0].contains("there is a slot where it is"),
        "{reasons:?}"
    );
}

#[test]
fn a_node_that_does_not_park_and_a_program_that_cannot_lets_it_wait_as_pending() {
    let lab = one_gives_way(vec![node(1)], 200, LITTLE, 8_000);
    assert_eq!((lab.running(), lab.phase(1)), (vec![2], "pending".into()));
}

/// A node with one device of 80 GiB, and an execution on it that took a minute to start.
fn on_a_device() -> Lab {
    let mut place = with_devices(0, &[80 * GIB]);
    (place.slots, place.parks, place.memory_limit_bytes) = (1, 2, 512 * GIB);
    let config = Config {
        preempt_residency_moves: 0,
        ..Config::default()
    };
    let mut lab = Lab::new(World::with(config, vec![place]));
    lab.takes_up = 60_000;
    let device = r#""requires":{"memory_bytes":1000000,"device":{"memory_bytes":42949672960}}"#;
    lab.submit(1, 500, device);
    lab.play(70_000, for_ever);
    lab.takes_up = 0;
    assert_eq!(lab.running(), [1]);
    lab
}

#[test]
fn what_is_dear_to_copy_keeps_its_device_from_one_that_wants_only_the_slot() {
    let mut lab = on_a_device();
    lab.submit(2, 500, &urgent(LITTLE));
    lab.play(2_000, for_ever);
    assert_eq!(
        (lab.running(), keeps(&lab, 1)),
        (vec![2], Some(Keep::Device))
    );
    let reason = lab.reason(1).1;
    assert!(reason.contains("it keeps its place"), "{reason}");
    lab.w.complete(2);
    lab.play(500, for_ever);
    assert_eq!(
        (lab.running(), lab.w.place_of(1)),
        (vec![1], "n0/g0".into())
    );
}

#[test]
fn what_gives_its_device_away_stands_in_the_hosts_memory() {
    let mut lab = on_a_device();
    let device = r#""requires":{"memory_bytes":1000000,"device":{"memory_bytes":1000}}"#;
    lab.submit(2, 500, &urgent(device));
    lab.play(2_000, for_ever);
    assert_eq!((lab.running(), keeps(&lab, 1)), (vec![2], Some(Keep::Host)));
    assert_eq!(lab.w.place_of(2), "n0/g0");
    lab.w.complete(2);
    lab.play(500, for_ever);
    assert_eq!(
        (lab.running(), lab.w.place_of(1)),
        (vec![1], "n0/g0".into())
    );
}

#[test]
fn a_device_is_taken_from_a_lower_priority_where_slots_are_free() {
    let mut place = with_devices(0, &[80, 40]);
    place.slots = 4;
    let mut lab = Lab::new(World::of(vec![place]));
    lab.submit(
        1,
        500,
        r#""requires":{"device":{"memory_bytes":30}},"prefers":{"device":{"memory_bytes":80}}"#,
    );
    lab.play(8_000, for_ever);
    assert_eq!(lab.w.place_of(1), "n0/g0");
    lab.submit(
        2,
        500,
        &urgent(r#""requires":{"device":{"memory_bytes":60}}"#),
    );
    lab.play(2_000, for_ever);
    assert_eq!(
        (lab.w.place_of(1), lab.w.place_of(2)),
        ("n0/g1".into(), "n0/g0".into())
    );
}

#[test]
fn what_stands_leaves_for_another_place_once_it_has_waited_for_longer_than_a_move_costs() {
    let mut lab = Lab::new(World::of(vec![single(0, 2), single(1, 2)]));
    lab.takes_up = 400;
    lab.submit(1, 500, LITTLE);
    lab.play(10_000, for_ever);
    let (here, other) = (lab.w.node_of(1), 1 - lab.w.node_of(1));
    lab.w.cordon(other, true);
    lab.submit(2, 500, &urgent(LITTLE));
    lab.play(2_000, for_ever);
    assert_eq!((lab.w.node_of(2), keeps(&lab, 1)), (here, Some(Keep::Host)));
    lab.w.cordon(other, false);
    lab.play(3_000, for_ever);
    assert_eq!((lab.running(), lab.w.node_of(1)), (vec![1, 2], other));
}

#[test]
fn what_stands_goes_on_where_nothing_new_may_go_although_another_is_before_it() {
    // By then it has attained much service.
    let mut lab = one_gives_way(vec![single(0, 2)], 200, LITTLE, 300_000);
    assert_eq!((lab.running(), keeps(&lab, 1)), (vec![2], Some(Keep::Host)));
    lab.w.cordon(0, true);
    lab.submit(3, 500, LITTLE);
    lab.play(2_000, for_ever);
    lab.w.complete(2);
    lab.play(2_000, for_ever);
    assert_eq!((lab.running(), lab.phase(3)), (vec![1], "pending".into()));
}

#[test]
fn what_has_stood_too_long_gives_up_what_it_keeps() {
    let config = Config {
        preempt_residency_moves: 0,
        ..Config::default()
    };
    let mut lab = Lab::new(World::with(config, vec![single(0, 2)]));
    lab.takes_up = 20_000;
    // Two fifths of the memory for half a minute cost twelve seconds.
    let much = r#""requires":{"memory_bytes":400000000}"#;
    lab.submit(1, 500, much);
    lab.play(30_000, for_ever);
    lab.submit(2, 500, &urgent(much));
    lab.play(25_000, for_ever);
    assert_eq!((lab.running(), keeps(&lab, 1)), (vec![2], Some(Keep::Host)));
    lab.play(60_000, for_ever);
    assert_eq!((lab.running(), lab.phase(1)), (vec![2], "pending".into()));
    let why = lab.w.why(1).summary;
    assert!(why.contains("it has been preempted for 5"), "{why}");
}

/// An amount of memory that costs almost nothing to keep.
const LEAST: &str = r#""requires":{"memory_bytes":100000}"#;

/// An execution of a minute, and then a stream of executions of two seconds.
struct Stream {
    lab: Lab,
    next: u64,
}

impl Stream {
    fn behind(fields: &str, takes_up: u64) -> Self {
        let config = Config {
            preempt_residency_moves: 0,
            ..Config::default()
        };
        let mut lab = Lab::new(World::with(config, vec![single(0, 2)]));
        lab.takes_up = takes_up;
        lab.submit(1, 500, fields);
        lab.play(60_000 + takes_up, for_ever);
        assert_eq!(lab.running(), [1]);
        lab.takes_up = 200;
        Self { lab, next: 10 }
    }

    /// Plays until `until` holds, at most `most_ms`. Returns the time it took, in ms.
    fn flow(&mut self, most_ms: u64, until: impl Fn(&Lab) -> bool) -> u64 {
        let began = self.lab.w.now;
        while self.lab.w.now - began < most_ms && !until(&self.lab) {
            while self.lab.w.policy.waiting() < 3 {
                self.lab.submit(self.next, 500, LEAST);
                self.next += 1;
            }
            let length = |n: u64| if n < 10 { LONG } else { 2_000 };
            self.lab.play(250, length);
        }
        self.lab.w.now - began
    }

    /// Number of completed executions of the stream.
    fn done(&self) -> usize {
        let ends = |n: &u64| self.lab.phase(*n) == "completed";
        (10..self.next).filter(ends).count()
    }
}

const SLICE: u64 = 30_000;

#[test]
fn what_is_short_passes_one_that_stands_for_a_bounded_time_only() {
    let mut stream = Stream::behind(LEAST, 200);
    stream.flow(2 * SLICE, |lab| keeps(lab, 1).is_some());
    assert_eq!(keeps(&stream.lab, 1), Some(Keep::Host));
    // It has had two to four slices, which is level 2.
    let stood = stream.flow(20 * SLICE, |lab| lab.runs(1));
    assert!((3 * SLICE..3 * SLICE + 4_000).contains(&stood), "{stood}");
    assert_eq!(stream.lab.epoch(1), 1, "where it stood");
    assert!(stream.done() > 30, "{} have passed", stream.done());
    // It then gets a slice, and is parked again.
    let ran = stream.flow(3 * SLICE, |lab| !lab.runs(1));
    assert!((SLICE..SLICE + 2_000).contains(&ran), "{ran}");
    assert_eq!(keeps(&stream.lab, 1), Some(Keep::Host));
}

#[test]
fn what_has_given_up_what_it_kept_is_passed_no_longer_for_that() {
    let mut stream = Stream::behind(r#""requires":{"memory_bytes":400000000}"#, 20_000);
    stream.flow(2 * SLICE, |lab| keeps(lab, 1).is_some());
    assert_eq!(keeps(&stream.lab, 1), Some(Keep::Host));
    let stood = stream.flow(3 * SLICE, |lab| keeps(lab, 1).is_none());
    assert_eq!(stream.lab.phase(1), "pending", "after {stood} ms");
    let waited = stood + stream.flow(20 * SLICE, |lab| lab.runs(1));
    assert!((3 * SLICE..3 * SLICE + 4_000).contains(&waited), "{waited}");
}

#[test]
fn where_memory_presses_nothing_stands_aside() {
    let mut lab = Lab::new(World::of(vec![single(0, 2)]));
    lab.takes_up = 200;
    let patient = r#""requires":{"memory_bytes":1000000},"when_unviable":"migrate","viability":{"memory":{"high":0.99,"low":0.98,"dwell_ms":1000}}"#;
    lab.submit(1, 500, patient);
    lab.play(8_000, for_ever);
    lab.w.set_reading(0, 0.97);
    lab.play(60_000, for_ever);
    lab.submit(2, 500, &urgent(patient));
    lab.play(2_000, for_ever);
    assert_eq!((lab.running(), lab.phase(1)), (vec![2], "pending".into()));
}

#[test]
fn two_that_take_turns_keep_their_processes_and_share_the_time() {
    let mut lab = Lab::new(World::of(vec![single(0, 2)]));
    lab.takes_up = 200;
    let least = r#""requires":{"memory_bytes":100000}"#;
    lab.submit(1, 1_000, least);
    lab.play(60_000, for_ever);
    lab.submit(2, 1_000, least);
    lab.play(1_200_000, for_ever);
    assert_eq!(
        (lab.epoch(1), lab.epoch(2)),
        (1, 1),
        "neither was bound anew"
    );
    assert!((2..=10).contains(&lab.gave_way.len()), "{:?}", lab.gave_way);
    let (last, _, _) = lab.gave_way[lab.gave_way.len() - 1];
    let again = lab.gave_way.iter().filter(|(n, ..)| *n == last).count() > 1;
    let reason = lab.reason(last).1;
    assert_eq!(
        !reason.contains("never moved or set aside"),
        again,
        "{reason}"
    );
    let (one, two) = (lab.computed[&1], lab.computed[&2]);
    assert!(one < 4 * two && two < 4 * one, "{one} and {two}");
}
