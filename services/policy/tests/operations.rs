//! Operators' requests for live executions, and nodes with a deadline.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use fiec_policy::{Action, Input};
use fiec_schemas::messages::{ControlRequest, Record, Viability};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, NodeFlags, NodeId, Phase, PhaseKind, Signal, Threshold,
    Timestamp,
};
use world::World;

fn author(w: &World, n: u64) -> String {
    let phase = w.phase(n);
    let b = phase.binding().unwrap();
    format!("worker/{}/{}", b.node, b.instance)
}

/// The worker commits a boundary after this much computing time.
fn commit(w: &mut World, n: u64, index: u64, compute_ms: u64) {
    let at = w.at().wall;
    let boundary = BoundaryEvent {
        index,
        digest: Digest::of(&index.to_le_bytes()),
        bytes: 8,
        computed_at: at,
        compute_us: compute_ms * 1_000,
        of: None,
        note: None,
        outputs: Vec::new(),
        energy: None,
    };
    let author = author(w, n);
    w.append(World::id(n), vec![Event::Boundary(boundary)], &author, true);
}

/// The worker yields the execution for this cause.
fn yielded(w: &mut World, n: u64, cause: &Cause) {
    let event = Event::Yielded {
        cause: cause.clone(),
        computed_until: w.at().wall,
    };
    let author = author(w, n);
    w.append(World::id(n), vec![event], &author, true);
}

fn adjust(w: &mut World, n: u64, change: Adjustment) {
    let event = Event::Adjusted {
        who: "ann@lab".to_owned(),
        change,
    };
    let author = match w.phase(n) {
        Phase::Started(_) => author(w, n),
        _ => "policy/other".to_owned(),
    };
    w.append(World::id(n), vec![event], &author, true);
}

fn on(nodes: &[&str]) -> Adjustment {
    Adjustment {
        nodes: Some(nodes.iter().map(|n| NodeId::new(*n).unwrap()).collect()),
        ..Adjustment::default()
    }
}

fn later(w: &World, ms: u64) -> Timestamp {
    Timestamp::from_micros(w.at().wall.micros() + i64::try_from(ms).unwrap() * 1_000)
}

fn flag(w: &mut World, node: usize, flags: NodeFlags) {
    let name = w.node(node);
    let flags = NodeFlags {
        who: "ann@lab".to_owned(),
        ..flags
    };
    w.step(Input::Flags {
        node: name.clone(),
        flags,
    });
    w.carry_out();
}

fn revoke(w: &mut World, node: usize, ms: u64) -> Timestamp {
    let at = later(w, ms);
    let flags = NodeFlags {
        revoked_at: Some(at),
        revoked: Some(w.instance(node)),
        ..NodeFlags::default()
    };
    flag(w, node, flags);
    at
}

/// The yield orders since the last call: execution, destination and cause.
fn yields(w: &mut World) -> Vec<(u64, Option<String>, Cause)> {
    let orders = w.take_controls().into_iter();
    orders
        .filter_map(|(_, request)| match request {
            ControlRequest::Yield {
                execution,
                to,
                cause,
                ..
            } => {
                let n = (execution.0.as_u128() - 1_000_000).try_into().unwrap();
                Some((n, to.map(|to| to.node.to_string()), cause))
            }
            _ => None,
        })
        .collect()
}

fn given_up(w: &mut World) -> Vec<(String, Cause)> {
    let orders = w.take_controls().into_iter();
    orders
        .filter_map(|(node, request)| match request {
            ControlRequest::GiveUp { cause, .. } => Some((node.to_string(), cause)),
            _ => None,
        })
        .collect()
}

/// Fills both slots of n0 with these executions, whose pace is known.
fn two_on_n0(w: &mut World, paces: [u64; 2]) {
    for (n, pace) in [1, 2].into_iter().zip(paces) {
        w.submit_line(n, r#""requires":{"nodes":["n0"]}"#);
        w.start(n);
        if pace > 0 {
            commit(w, n, 1, pace);
        }
        adjust(w, n, on(&[]));
        assert_eq!(w.node_of(n), 0);
    }
    w.take_controls();
}

#[test]
fn what_a_revoked_node_runs_moves_at_once_the_slowest_first_and_nothing_new_comes() {
    let mut w = World::new(2);
    two_on_n0(&mut w, [100, 30_000]);
    let at = revoke(&mut w, 0, 120_000);
    let orders = yields(&mut w);
    let cause = Cause::Revoked {
        who: "ann@lab".to_owned(),
        at,
    };
    let to = Some("n1".to_owned());
    assert_eq!(orders, [(2, to.clone(), cause.clone()), (1, to, cause)]);
    w.submit_line(3, r#""requires":{"nodes":["n0"]}"#);
    assert!(matches!(w.phase(3), Phase::Pending { .. }));
    let why = w.why(3);
    let n0 = &why.candidates[0].rejected;
    assert!(n0.iter().any(|r| r.contains("it ends at")), "{n0:?}");
    assert!(
        why.would_help.iter().any(|h| h.contains("undrain n0")),
        "{why:?}"
    );
}

#[test]
fn where_no_other_node_is_it_computes_on_as_long_as_it_can_still_commit() {
    let mut w = World::new(1);
    for (n, pace) in [(1, 1_000), (2, 0)] {
        w.submit_and_store(n);
        w.start(n);
        if pace > 0 {
            commit(&mut w, n, 1, pace);
        }
    }
    revoke(&mut w, 0, 60_000);
    let first = yields(&mut w);
    assert_eq!(first.len(), 1, "whose pace is not known must begin at once");
    assert_eq!((first[0].0, &first[0].1), (2, &None));
    yielded(&mut w, 2, &first[0].2);
    w.pass(50_000);
    assert!(
        yields(&mut w).is_empty(),
        "two intervals and a margin are enough"
    );
    w.pass(6_000);
    let second = yields(&mut w);
    assert_eq!((second[0].0, &second[0].1), (1, &None));
    assert!(matches!(second[0].2, Cause::Revoked { .. }));
    yielded(&mut w, 1, &second[0].2);
    w.pass(1_000);
    assert!(
        matches!(w.phase(1), Phase::Pending { .. }) && matches!(w.phase(2), Phase::Pending { .. })
    );
    assert!(w.why(1).summary.contains("node ends at"), "{:?}", w.why(1));
    // The next instance of the node is not revoked.
    w.restart_node(0);
    w.pass(2_000);
    assert!(matches!(w.phase(1), Phase::Bound(_)), "{:?}", w.why(1));
    assert!(matches!(w.last_cause(1), Some(Cause::Revoked { .. })));
}

#[test]
fn what_reaches_no_boundary_before_a_revoked_node_is_gone_is_given_up_just_before() {
    let mut w = World::new(2);
    two_on_n0(&mut w, [0, 0]);
    revoke(&mut w, 0, 20_000);
    assert_eq!(yields(&mut w).len(), 2);
    w.pass(18_500);
    assert!(given_up(&mut w).is_empty());
    w.pass(1_000);
    let gone = given_up(&mut w);
    assert_eq!(gone.len(), 2, "each once a second");
    assert!(
        gone.iter()
            .all(|(n, c)| n == "n0" && matches!(c, Cause::Revoked { .. }))
    );
    yielded(&mut w, 1, &gone[0].1);
    w.tick();
    assert_eq!(w.node_of(1), 1, "it goes on elsewhere at once");
}

#[test]
fn a_drain_with_a_deadline_gives_up_what_is_still_there_and_one_without_never_does() {
    let mut w = World::new(2);
    two_on_n0(&mut w, [0, 0]);
    let flags = |drain_by| NodeFlags {
        cordoned: true,
        draining: true,
        drain_by,
        ..NodeFlags::default()
    };
    flag(&mut w, 0, flags(None));
    assert_eq!(yields(&mut w).len(), 2);
    w.pass(60_000);
    assert!(given_up(&mut w).is_empty());
    let by = later(&w, 5_000);
    flag(&mut w, 0, flags(Some(by)));
    w.pass(4_500);
    assert!(given_up(&mut w).is_empty());
    w.pass(600);
    let gone = given_up(&mut w);
    assert!(matches!(&gone[0], (n, Cause::Drain { who }) if n == "n0" && who == "ann@lab"));
    for n in [1, 2] {
        yielded(&mut w, n, &gone[0].1);
    }
    w.tick();
    assert!([1, 2].iter().all(|n| w.node_of(*n) == 1));
    assert!(matches!(w.last_cause(1), Some(Cause::Drain { .. })));
    flag(&mut w, 0, NodeFlags::default());
    w.submit_line(3, r#""requires":{"nodes":["n0"]}"#);
    assert!(matches!(w.phase(3), Phase::Bound(_)), "undrained");
}

#[test]
fn a_pin_elsewhere_moves_it_and_says_who_asked() {
    let mut w = World::new(3);
    w.submit_and_store(1);
    w.start(1);
    w.pass(1_000);
    let from = w.node_of(1);
    let to = (from + 1) % 3;
    let name = format!("n{to}");
    let words = w.foresee(1, &on(&[&name]));
    assert_eq!(
        words,
        Ok(format!(
            "it moves from n{from} to {name} at its next boundary"
        ))
    );
    adjust(&mut w, 1, on(&[&name]));
    w.pass(100);
    let orders = yields(&mut w);
    let cause = Cause::Operator {
        who: "ann@lab".to_owned(),
    };
    assert_eq!(orders, [(1, Some(name), cause)]);
    w.pass(1_000);
    assert!(yields(&mut w).is_empty(), "asked once");
}

#[test]
fn a_pin_that_nothing_satisfies_says_so_and_leaves_it_where_it_is() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let change = on(&["n7"]);
    let said = w.foresee(1, &change).unwrap_err();
    assert!(said.contains("n7: there is no such node"), "{said}");
    assert!(said.contains("it stays on n"), "{said}");
    adjust(&mut w, 1, change);
    w.pass(3_000);
    assert!(yields(&mut w).is_empty());
    let why = w.why(1);
    assert!(
        why.summary.contains("no other node can take it"),
        "{}",
        why.summary
    );
    assert!(why.candidates.iter().any(|c| {
        c.rejected
            .iter()
            .any(|r| r == "it is pinned to n7 (`fiec unpin`)")
    }));
    let help = &why.would_help;
    assert!(help[0].contains("fiec unpin"), "{help:?}");
    assert!(
        help.iter().all(|h| !h.contains("in the submission")),
        "{help:?}"
    );
    adjust(&mut w, 1, on(&[]));
    w.pass(3_000);
    assert!(yields(&mut w).is_empty() && matches!(w.phase(1), Phase::Started(_)));
}

#[test]
fn what_would_help_one_that_is_pinned_names_everything_that_is_in_the_way_of_a_node() {
    let mut w = World::new(2);
    w.cordon(0, true);
    w.cordon(1, true);
    w.submit_and_store(1);
    adjust(&mut w, 1, on(&["n1"]));
    let why = w.why(1);
    let unpin = format!("`fiec unpin {}`", World::id(1));
    assert_eq!(
        why.would_help,
        [
            format!("`fiec uncordon n0`, and {unpin}"),
            "`fiec uncordon n1`".to_owned()
        ],
        "{why:?}"
    );
}

/// The immediate answer to a request to move an execution.
fn asked_to_move(w: &mut World, n: u64, to: Option<&str>) -> String {
    let to = to.map(|to| to.parse::<NodeId>().unwrap());
    let out = w.step(Input::Yield {
        ticket: 7,
        execution: World::id(n),
        to,
        who: "ann@lab".to_owned(),
    });
    match &out[..] {
        [Action::Refuse { ticket: 7, refusal }] => refusal.to_string(),
        out => panic!("{out:?}"),
    }
}

#[test]
fn a_move_that_cannot_be_made_is_refused_with_the_reason_and_what_there_is() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let (here, other) = (w.node_of(1), 1 - w.node_of(1));
    let (here, other) = (format!("n{here}"), format!("n{other}"));
    let said = asked_to_move(&mut w, 1, Some(&here));
    assert_eq!(said, format!("it is on {here} already"));
    let said = asked_to_move(&mut w, 1, Some("n9"));
    assert_eq!(said, "there is no node n9; there are: n0, n1");
    let exclude = Some(vec![other.parse().unwrap()]);
    let change = Adjustment {
        exclude,
        ..Adjustment::default()
    };
    adjust(&mut w, 1, change);
    let said = asked_to_move(&mut w, 1, Some(&other));
    assert_eq!(
        said,
        format!("{other} cannot take it: an operator has excluded it (`fiec unpin`)")
    );
    let said = asked_to_move(&mut w, 1, None);
    assert!(
        said.starts_with(&format!("no other node can take it ({other}: ")),
        "{said}"
    );
    let mut alone = World::new(1);
    alone.submit_and_store(1);
    alone.start(1);
    assert_eq!(asked_to_move(&mut alone, 1, None), "there is no other node");
    let unknown = Adjustment {
        exclude: Some(vec!["n7".parse().unwrap()]),
        ..Adjustment::default()
    };
    let said = alone.foresee(1, &unknown);
    assert_eq!(said.unwrap_err(), "there is no node n7; there are: n0");
}

#[test]
fn an_exclusion_moves_what_is_bound_and_not_started_by_an_append_of_ours() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    let from = w.node_of(1);
    let change = Adjustment {
        exclude: Some(vec![w.node(from)]),
        ..Adjustment::default()
    };
    adjust(&mut w, 1, change);
    w.pass(100);
    assert_eq!(w.node_of(1), 1 - from);
    assert!(matches!(w.last_cause(1), Some(Cause::Operator { who }) if who == "ann@lab"));
}

#[test]
fn a_change_of_what_is_bound_sends_its_capsule_anew() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    w.sent_capsules();
    let change = Adjustment {
        priority: Some(7),
        ..Adjustment::default()
    };
    adjust(&mut w, 1, change);
    assert_eq!(
        w.sent_capsules(),
        1,
        "the one before follows another message"
    );
}

fn memory(high: f64, low: f64, dwell_ms: u32) -> Adjustment {
    let threshold = Threshold {
        high,
        low,
        dwell_ms,
    };
    Adjustment {
        viability: [(Signal::Memory, threshold)].into(),
        ..Adjustment::default()
    }
}

#[test]
fn a_tighter_threshold_is_judged_at_once_and_moves_it_after_its_own_dwell() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let from = w.node_of(1);
    w.pressure(from, 0.6, 30_000);
    assert!(yields(&mut w).is_empty());
    adjust(&mut w, 1, memory(0.5, 0.3, 2_000));
    let why = w.why(1);
    let memory = why.thresholds.iter().find(|t| t.signal == Signal::Memory);
    let memory = memory.unwrap();
    assert!(memory.own && memory.threshold.high == 0.5 && memory.state == Viability::Suspect);
    w.pass(1_800);
    assert!(
        yields(&mut w).is_empty(),
        "nobody has seen it press for the dwell"
    );
    w.pass(400);
    let orders = yields(&mut w);
    assert_eq!(orders.len(), 1);
    assert!(matches!(&orders[0].2, Cause::Pressure { evidence } if evidence.threshold.high == 0.5));
}

#[test]
fn a_change_that_is_not_about_thresholds_does_not_begin_the_dwell_anew() {
    let mut w = World::new(2);
    let line = r#""viability":{"memory":{"high":0.8,"low":0.5,"dwell_ms":10000}}"#;
    w.submit_line(1, line);
    w.start(1);
    let from = w.node_of(1);
    w.pass(11_000);
    w.pressure(from, 0.85, 9_000);
    let change = Adjustment {
        priority: Some(3),
        ..Adjustment::default()
    };
    adjust(&mut w, 1, change);
    assert!(yields(&mut w).is_empty());
    w.pass(1_500);
    assert_eq!(
        yields(&mut w).len(),
        1,
        "the pressure has lasted for ten seconds"
    );
}

#[test]
fn a_relaxed_threshold_keeps_it_where_it_is() {
    let mut w = World::new(2);
    let line = r#""viability":{"memory":{"high":0.8,"low":0.5,"dwell_ms":10000}}"#;
    w.submit_line(1, line);
    w.start(1);
    let from = w.node_of(1);
    w.pressure(from, 0.85, 9_000);
    adjust(&mut w, 1, memory(0.95, 0.5, 10_000));
    w.pass(60_000);
    assert!(yields(&mut w).is_empty());
    let why = w.why(1);
    assert!(
        why.would_move.iter().any(|m| m.contains("95.0 %")),
        "{:?}",
        why.would_move
    );
}

#[test]
fn what_is_placed_says_what_judges_it_and_what_would_move_it() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let why = w.why(1);
    assert_eq!(why.phase, PhaseKind::Started);
    let place = why.place.unwrap();
    assert_eq!((place.substrate.as_str(), place.epoch), ("host", 1));
    assert!(why.thresholds.iter().all(|t| !t.own));
    let node = place.node;
    let would = &why.would_move;
    assert!(
        would[0].contains(&format!("memory on {node} at or above 90.0 % for 10000 ms")),
        "{would:?}"
    );
    let other = w.node(1 - w.node_of(1));
    assert_eq!(why.would_go_to, Some(vec![other]));
}

/// The reports on waiting executions within this time.
fn told(w: &mut World, ms: u64) -> Vec<String> {
    let mut told = Vec::new();
    for step in 1..=ms / 50 {
        w.freeze(50);
        if step % 10 == 0 {
            w.vectors();
        }
        for action in w.step(Input::Tick) {
            if let Action::Record { record } = action
                && let Record::Waiting { candidates, .. } = *record
            {
                told.push(candidates[0].rejected.join("; "));
            }
        }
    }
    told
}

#[test]
fn why_something_waits_is_told_once_and_again_when_the_reasons_change() {
    let mut w = World::new(1);
    w.cordon(0, true);
    w.submit_and_store(1);
    assert!(
        told(&mut w, 900).is_empty(),
        "most things wait for a moment"
    );
    let first = told(&mut w, 60_000);
    assert_eq!(first, ["it was cordoned by ann"]);
    w.drain(0);
    let second = told(&mut w, 60_000);
    assert_eq!(second, ["it is draining"]);
    w.cordon(0, false);
    assert!(told(&mut w, 10_000).is_empty(), "it waits no more");
}

#[test]
fn a_node_that_left_is_named_by_why_for_ten_minutes_and_then_no_more() {
    let mut w = World::new(3);
    w.pass(1_000);
    w.submit_and_store(1);
    let here = w.node_of(1);
    let gone = (here + 1) % 3;
    let name = w.node(gone);
    w.silence(gone);
    w.step(Input::Gone { node: name.clone() });
    let named = |w: &World| w.why(1).candidates.iter().any(|c| c.node == name);
    assert!(named(&w), "{:?}", w.why(1));
    w.pass(9 * 60_000);
    assert!(named(&w), "it left nine minutes ago");
    w.pass(2 * 60_000);
    let why = w.why(1);
    assert!(!named(&w), "{why:?}");
    assert!(why.candidates.iter().any(|c| c.node == w.node(here)));
}
