//! Executions run only where their contract was proved. If a second computation differs, the node
//! with the wrong result loses the contract and the execution steps back.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use fiec_policy::{Action, Input};
use fiec_schemas::messages::{ControlRequest, StandingKind};
use fiec_schemas::trust::{Quarantine, Released, digest_of_result};
use fiec_schemas::{Bound, Contract, Digest, Event, Fault, Phase};
use world::{World, descriptor};

fn of(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

fn back(actions: &[Action]) -> Action {
    let found = actions
        .iter()
        .find(|a| matches!(a, Action::StepBack { .. }));
    found.unwrap_or_else(|| panic!("{actions:?}")).clone()
}

fn quarantined(actions: &[Action]) -> Vec<String> {
    let node = |a: &Action| match a {
        Action::Quarantine { node, .. } => Some(node.to_string()),
        _ => None,
    };
    actions.iter().filter_map(node).collect()
}

/// A number of nodes, and a started execution that is verified as a whole.
fn guarded(nodes: usize) -> World {
    let mut w = World::new(nodes);
    w.submit_line(1, r#""verify":"all""#);
    w.start(1);
    w
}

#[test]
fn a_node_whose_canaries_fail_is_no_candidate_and_why_says_so() {
    let mut w = World::new(2);
    let actions = w.prove(0, false);
    assert_eq!(quarantined(&actions), ["n0"]);
    for n in 1..=4 {
        w.submit_and_store(n);
        assert_eq!(w.node_of(n.min(2)), 1);
    }
    w.submit_and_store(5);
    let why = w.why(5);
    let n0 = why.candidates.iter().find(|c| c.node == w.node(0)).unwrap();
    assert!(
        n0.rejected.iter().any(|r| r.contains("canary dot is off")),
        "{n0:?}"
    );
    w.submit_line(6, r#""contract":"bounded""#);
    assert_eq!(w.node_of(6), 0, "the other contract is not lost");
}

#[test]
fn a_proof_counts_for_the_life_that_made_it_and_until_it_expires() {
    let mut w = World::new(1);
    w.submit_and_store(1);
    assert!(matches!(w.phase(1), Phase::Bound(_)));
    let statuses = w.policy.node_statuses(w.at());
    let bitwise = &statuses[0].contracts[0];
    assert_eq!(
        (bitwise.contract, bitwise.standing),
        (Contract::Bitwise, StandingKind::Proved)
    );
}

#[test]
fn a_node_whose_key_is_not_the_pinned_one_is_given_nothing_and_why_says_so() {
    let mut w = World::new(3);
    // The nodes of this world claim the key U.
    let pins = [("n0", "U"), ("n1", "V")].map(|(node, key)| (node.parse().unwrap(), key.into()));
    w.pin(pins.into());
    for (n, line) in [(1, r#""retries":1"#), (2, r#""contract":"statistical""#)] {
        w.submit_line(n, line);
        assert_eq!(w.node_of(n), 0);
    }
    w.cordon(0, true);
    w.submit_line(3, r#""contract":"statistical""#);
    let why = w.why(3);
    let of = |node: usize| {
        let its = why.candidates.iter().find(|c| c.node == w.node(node));
        its.unwrap().rejected.join("; ")
    };
    assert!(of(1).contains("its key is U, and V is pinned"), "{why:?}");
    assert!(of(2).contains("not among the nodes whose keys"), "{why:?}");
    let statuses = w.policy.node_statuses(w.at());
    assert_eq!(statuses[2].contracts[0].standing, StandingKind::Refused);
}

#[test]
fn what_agrees_is_completed_and_by_whom_is_said() {
    let mut w = guarded(2);
    let holder = w.node_of(1);
    w.commit(1, 3, "three");
    w.pass(100);
    let asked = w.questions();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_ne!(asked[0].0, w.node(holder));
    assert_eq!((asked[0].2.from.clone(), asked[0].2.to), (None, Some(3)));
    w.compute(1, 7, "done");
    assert_eq!(w.phase(1).as_str(), "verifying");
    w.answer(1, (&asked[0].0, asked[0].1), 3, of("three"));
    assert_eq!(w.phase(1).as_str(), "verifying");
    w.pass(100);
    let asked = w.questions();
    let from = asked[0].2.from.as_ref().unwrap();
    assert_eq!((from.index, from.seq, asked[0].2.to), (3, None, None));
    w.answer(
        1,
        (&asked[0].0, asked[0].1),
        7,
        digest_of_result(&"done".into()),
    );
    assert_eq!(w.phase(1), Phase::Completed);
}

#[test]
fn what_is_verified_is_said_once_while_the_append_is_under_way() {
    let mut w = guarded(2);
    w.compute(1, 7, "done");
    w.pass(100);
    let (node, question, _) = w.questions().remove(0);
    let done = digest_of_result(&"done".into());
    let verdict = w.verdict(1, (&node, question), (7, done), &[]);
    let said = |actions: &[Action]| {
        let appends = actions
            .iter()
            .filter(|a| matches!(a, Action::Append { .. }));
        appends.count()
    };
    assert_eq!(said(&w.step(verdict)), 1);
    for _ in 0..10 {
        w.freeze(50);
        assert_eq!(said(&w.step(Input::Tick)), 0, "its answer is awaited");
    }
    w.carry_out();
    assert_eq!(w.phase(1), Phase::Completed);
}

#[test]
fn nothing_stays_of_a_verification_whose_execution_was_cancelled() {
    let mut w = guarded(3);
    w.commit(1, 1, "a");
    w.pass(2_000);
    assert!(!w.questions().is_empty() && w.remembers(1));
    let cancelled = Event::Cancelled { who: "ops".into() };
    w.append(World::id(1), vec![cancelled], "ops", true);
    w.pass(600_000);
    assert!(!w.remembers(1));
}

#[test]
fn another_policy_service_goes_on_where_the_verification_was_and_counts_what_was_done() {
    let mut w = guarded(2);
    w.commit(1, 3, "three");
    w.pass(100);
    let asked = w.questions().remove(0);
    let actions = w.answer(1, (&asked.0, asked.1), 3, of("three"));
    let noted = actions.iter().find_map(|a| match a {
        Action::Verified { up_to, .. } => Some(up_to.clone()),
        _ => None,
    });
    assert_eq!(noted.unwrap().good.index, 3);
    w.commit(1, 6, "six");
    let last = w.boundary_event(6, "six");
    w.another_policy(1, vec![last]);
    w.pass(200);
    let asked = w.questions().remove(0);
    let from = asked.2.from.as_ref().unwrap();
    assert_eq!((from.index, from.seq, asked.2.to), (3, None, Some(6)));
    w.answer(1, (&asked.0, asked.1), 6, of("six"));
    w.compute(1, 7, "done");
    w.pass(200);
    let end = w.questions().remove(0);
    let done = digest_of_result(&"done".into());
    w.answer(1, (&end.0, end.1), 7, done);
    let history = &w.ledgers[&World::id(1)].history;
    let verified = history.iter().find_map(|(_, e)| match e {
        fiec_schemas::Event::Verified { by, segments } => Some((by.len(), *segments)),
        _ => None,
    });
    assert_eq!(verified, Some((1, 3)), "{history:?}");
}

/// A policy service that started after boundaries 3 and 6, and its question about the part up to 6.
/// Boundary 3 named an output.
fn begun_anew(named: &str, still_there: bool) -> (World, (fiec_schemas::NodeId, u64)) {
    let mut w = guarded(3);
    w.commit_outputs(1, 3, "three", &[("loss", named)]);
    w.commit(1, 6, "six");
    if !still_there {
        w.named.clear();
    }
    let last = w.boundary_event(6, "six");
    w.another_policy(1, vec![last]);
    w.pass(200);
    let (node, question, segment) = w.questions().remove(0);
    assert_eq!((segment.from, segment.to), (None, Some(6)));
    (w, (node, question))
}

#[test]
fn another_policy_service_compares_outputs_of_messages_that_it_has_not_seen() {
    let (mut w, (node, question)) = begun_anew("right", true);
    let end = (6, of("six"));
    let actions = w.answer_outputs(1, (&node, question), end, &[("loss", "right")]);
    let verified = |a: &Action| matches!(a, Action::Verified { .. });
    assert!(actions.iter().any(verified), "{actions:?}");

    // The ledger names an output that two others did not make, although σ is equal.
    for made in [&[("loss", "right")][..], &[]] {
        let (mut w, (node, question)) = begun_anew("wrong", true);
        let actions = w.answer_outputs(1, (&node, question), end, made);
        assert!(!actions.iter().any(verified), "{actions:?}");
        w.pass(200);
        let (third, question, _) = w.questions().remove(0);
        assert_ne!(third, node);
        let actions = w.answer_outputs(1, (&third, question), end, made);
        let back = |a: &Action| matches!(a, Action::StepBack { .. });
        assert!(actions.iter().any(back), "{actions:?}");
    }
}

#[test]
fn outputs_that_the_ledger_shows_no_more_are_computed_anew_and_never_called_verified() {
    let (mut w, (node, question)) = begun_anew("anything", false);
    let end = (6, of("six"));
    let actions = w.answer_outputs(1, (&node, question), end, &[("loss", "right")]);
    let back = |a: &&Action| matches!(a, Action::StepBack { .. });
    let back = actions.iter().find(back).unwrap().clone();
    assert!(!actions.iter().any(|a| matches!(a, Action::Verified { .. })));
    w.step_back(&back);
    let lost = w.why(1);
    assert!(!format!("{lost:?}").contains("quarantined"), "{lost:?}");

    // Without outputs, none can be wrong.
    let (mut w, (node, question)) = begun_anew("anything", false);
    let actions = w.answer(1, (&node, question), 6, of("six"));
    let verified = |a: &Action| matches!(a, Action::Verified { .. });
    assert!(actions.iter().any(verified), "{actions:?}");
}

#[test]
fn where_what_was_verified_cannot_be_read_nobody_is_asked_until_it_can() {
    let mut w = guarded(2);
    w.hide_verified = true;
    w.commit(1, 3, "three");
    w.pass(2_000);
    assert!(w.questions().is_empty());
    assert!(
        w.why(1).summary.contains("cannot be read"),
        "{:?}",
        w.why(1)
    );
    w.hide_verified = false;
    w.pass(5_000);
    assert_eq!(w.questions().len(), 1);
}

#[test]
fn a_holder_that_two_others_contradict_is_quarantined_and_its_work_goes_back_and_on() {
    let mut w = guarded(3);
    let holder = w.node(w.node_of(1));
    w.commit(1, 2, "two");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("two"));
    w.commit(1, 4, "wrong");
    w.pass(100);
    let second = w.questions().remove(0);
    assert_eq!(second.2.from.as_ref().unwrap().index, 2);
    w.answer(1, (&second.0, second.1), 4, of("four"));
    w.pass(100);
    let third = w.questions().remove(0);
    assert!(third.0 != second.0 && third.0 != holder);
    let actions = w.answer(1, (&third.0, third.1), 4, of("four"));
    assert_eq!(quarantined(&actions), [holder.to_string()]);
    w.step_back(&back(&actions));
    let state = &w.ledgers[&World::id(1)].state;
    assert_eq!(state.boundary_index(), 2);
    assert_eq!(state.totals.steps_back, 1);
    let Phase::Bound(Bound { binding: b, .. }) = &state.phase else {
        panic!("{:?}", state.phase)
    };
    assert_ne!(b.node, holder);
    assert_eq!(w.last_cause(1).unwrap().as_str(), "corrupt");
    let why = w.why(1);
    let its = why.candidates.iter().find(|c| c.node == holder).unwrap();
    assert!(
        its.rejected.iter().any(|r| r.contains("quarantined")),
        "{its:?}"
    );
}

/// Starts an execution with `"verify": "all"` on one of three nodes. The holder has `holders`
/// processors, and the others have `others`.
fn of_sizes(program: &str, holders: u32, others: [u32; 2]) -> World {
    let node = |i| {
        let mut node = descriptor(i, 1 + i as u128);
        node.programs.push(program.to_owned());
        node
    };
    let mut w = World::of((0..3).map(node).collect());
    w.submit_of(program, 1, r#""verify":"all""#);
    w.start(1);
    let holder = w.node_of(1);
    let mut others = others.into_iter();
    for i in 0..3 {
        let mut node = node(i);
        node.cpus = if i == holder {
            holders
        } else {
            others.next().unwrap()
        };
        w.step(Input::Descriptor {
            descriptor: Box::new(node),
        });
    }
    w
}

/// The holder computes other bits than the two others. Returns what follows.
fn alone_with_its_bits(w: &mut World) -> Vec<Action> {
    w.commit(1, 2, "mine");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("theirs"));
    w.pass(100);
    let second = w.questions().remove(0);
    w.answer(1, (&second.0, second.1), 2, of("theirs"))
}

#[test]
fn a_node_whose_size_alone_may_explain_its_bits_is_not_set_aside_for_a_package() {
    for (program, holders, others, set_aside) in [
        ("own@1", 1, [2, 2], false),
        ("own@1", 2, [1, 4], false),
        ("own@1", 2, [2, 4], true),
        ("synthetic@1", 1, [2, 2], true),
    ] {
        let mut w = of_sizes(program, holders, others);
        let holder = w.node(w.node_of(1));
        let actions = alone_with_its_bits(&mut w);
        let expected = set_aside.then(|| holder.to_string());
        let found = quarantined(&actions);
        assert_eq!(found, Vec::from_iter(expected), "{program} {others:?}");
        // The work goes back in any case.
        let Action::StepBack { cause, .. } = back(&actions) else {
            unreachable!()
        };
        let words = format!("{cause:?}");
        assert_eq!(words.contains("fiec check"), !set_aside, "{words}");
        // Its canaries tell whether it was the node after all.
        let asked = actions.iter().any(|a| {
            matches!(a, Action::Control { node, request: ControlRequest::Prove, .. }
                if *node == holder)
        });
        assert_eq!(asked, !set_aside, "{actions:?}");
    }
}

#[test]
fn what_nobody_computes_twice_with_the_same_bits_fails_after_three_rounds() {
    let mut w = of_sizes("own@1", 1, [2, 4]);
    w.compute(1, 3, "x");
    let mut asked_for = 0;
    for _ in 0..3_600 {
        if let Some(asked) = w.questions().pop() {
            asked_for += 1;
            let end = digest_of_result(&format!("end {asked_for}").into());
            let actions = w.answer(1, (&asked.0, asked.1), 3, end);
            assert!(quarantined(&actions).is_empty());
        }
        w.pass(1_000);
    }
    // Two other ends in each round.
    assert_eq!((w.phase(1).as_str(), asked_for), ("failed", 6));
    let history = &w.ledgers[&World::id(1)].history;
    let Some((_, Event::Failed { reason, fault, .. })) = history.last() else {
        panic!("{history:?}")
    };
    assert_eq!(fault.as_deref(), Some(&Fault::WrongAnswer));
    assert!(reason.contains("fiec check"), "{reason}");
}

#[test]
fn a_verifier_that_is_alone_with_its_finding_is_quarantined_and_the_claim_stands() {
    let mut w = guarded(3);
    w.commit(1, 2, "two");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("nonsense"));
    w.pass(100);
    let second = w.questions().remove(0);
    let actions = w.answer(1, (&second.0, second.1), 2, of("two"));
    assert_eq!(quarantined(&actions), [first.0.to_string()]);
    assert!(!actions.iter().any(|a| matches!(a, Action::StepBack { .. })));
    w.compute(1, 3, "x");
    w.pass(100);
    let last = w.questions().remove(0);
    assert_eq!(last.2.from.as_ref().unwrap().index, 2);
    w.answer(1, (&last.0, last.1), 3, digest_of_result(&"x".into()));
    assert_eq!(w.phase(1), Phase::Completed);
}

#[test]
fn two_nodes_that_disagree_are_asked_for_proofs_and_the_one_that_fails_was_wrong() {
    let mut w = guarded(2);
    let holder = w.node_of(1);
    w.commit(1, 2, "wrong");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("two"));
    w.compute(1, 3, "wrong too");
    w.pass(2_000);
    let proves = w.take_controls();
    let asked: Vec<_> = proves
        .iter()
        .filter(|(_, r)| matches!(r, fiec_schemas::messages::ControlRequest::Prove))
        .map(|(node, _)| node.to_string())
        .collect();
    assert_eq!(asked.len(), 2, "{proves:?}");
    let summary = w.why(1).summary;
    for words in ["disagree on boundaries 0 to 2", "a third node"] {
        assert!(summary.contains(words), "{summary}");
    }
    assert_eq!(
        w.phase(1).as_str(),
        "verifying",
        "it waits, and nothing of it counts"
    );
    let actions = w.prove(holder, false);
    assert!(quarantined(&actions).contains(&format!("n{holder}")));
    w.step_back(&back(&actions));
    assert_ne!(w.node_of(1), holder);
}

#[test]
fn a_third_node_whose_proof_is_being_renewed_is_awaited_and_decides() {
    let mut w = guarded(3);
    let holder = w.node(w.node_of(1));
    w.commit(1, 2, "wrong");
    w.pass(100);
    let first = w.questions().remove(0);
    let third = (0..3).find(|i| w.node(*i) != holder && w.node(*i) != first.0);
    let third = third.unwrap();
    let released = Released {
        who: "ann".into(),
        at: w.at().wall,
    };
    let renewing = Quarantine {
        entries: vec![],
        released: Some(released),
    };
    w.lose(third, renewing);
    w.answer(1, (&first.0, first.1), 2, of("two"));
    w.pass(2_000);
    let asked = w.take_controls();
    assert!(asked.is_empty(), "neither proofs nor anybody: {asked:?}");
    w.prove(third, true);
    w.pass(1_000);
    let asked = w.questions();
    assert_eq!(asked[0].0, w.node(third), "{asked:?}");
    let actions = w.answer(1, (&asked[0].0, asked[0].1), 2, of("two"));
    assert_eq!(quarantined(&actions), [holder.to_string()]);
}

#[test]
fn a_third_node_that_joins_later_decides() {
    let mut w = guarded(2);
    let holder = w.node(w.node_of(1));
    w.commit(1, 2, "wrong");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("two"));
    w.pass(1_000);
    assert!(w.questions().is_empty());
    let third = w.join();
    w.pass(2_000);
    let asked = w.questions();
    assert_eq!(asked[0].0, third, "{asked:?}");
    let actions = w.answer(1, (&third, asked[0].1), 2, of("two"));
    assert_eq!(quarantined(&actions), [holder.to_string()]);
}

#[test]
fn what_a_quarantined_node_holds_beside_is_taken_away_and_a_release_asks_for_a_new_proof() {
    let mut w = World::new(2);
    w.submit_and_store(1);
    w.start(1);
    let holder = w.node_of(1);
    let actions = w.prove(holder, false);
    assert_eq!(quarantined(&actions), [format!("n{holder}")]);
    let lost = Quarantine {
        entries: vec![fiec_schemas::trust::Quarantined {
            substrate: None,
            contract: Contract::Bitwise,
            reason: "canary dot is off".into(),
            who: "policy/x".into(),
            at: w.at().wall,
        }],
        released: None,
    };
    let actions = w.lose(holder, lost);
    w.step_back(&back(&actions));
    assert_ne!(w.node_of(1), holder);
    w.pass(1_000);
    let released = Quarantine {
        entries: vec![],
        released: Some(Released {
            who: "ann".into(),
            at: w.at().wall,
        }),
    };
    w.lose(holder, released);
    let standing = |w: &World| {
        let all = w.policy.node_statuses(w.at());
        all[holder].contracts[0].standing
    };
    assert_eq!(standing(&w), StandingKind::Outdated);
    w.pass(1_000);
    w.prove(holder, true);
    assert_eq!(standing(&w), StandingKind::Proved);
}

#[test]
fn nothing_is_computed_twice_while_real_work_waits_or_nobody_asked_for_it() {
    let mut w = World::new(2);
    w.submit_and_store(9);
    w.start(9);
    w.commit(9, 1, "one");
    w.pass(1_000);
    assert!(w.questions().is_empty(), "by default nothing is verified");
    for n in 1..=3 {
        w.submit_line(n, r#""verify":"all""#);
        w.start(n);
    }
    w.commit(1, 1, "one");
    w.pass(1_000);
    assert!(w.questions().is_empty(), "no slot is to spare");
    w.complete(9);
    w.pass(1_500);
    assert_eq!(w.questions().len(), 1);
}

#[test]
fn what_cannot_be_compared_is_compared_from_the_beginning_and_blames_nobody() {
    let mut w = guarded(3);
    w.commit(1, 2, "two");
    w.pass(100);
    let first = w.questions().remove(0);
    w.answer(1, (&first.0, first.1), 2, of("two"));
    w.commit(1, 4, "four");
    w.pass(100);
    let second = w.questions().remove(0);
    assert_eq!(second.2.from.as_ref().unwrap().index, 2);
    // The node cannot compare it now: the same question is asked again.
    let mut actions = w.cannot_compare(1, (&second.0, second.1), false);
    w.pass(2_000);
    let again = w.questions().remove(0);
    assert_eq!(again.2.from, second.2.from);
    // The state is gone for good: the question starts at the beginning.
    actions.extend(w.cannot_compare(1, (&again.0, again.1), true));
    w.pass(2_000);
    let third = w.questions().remove(0);
    assert_eq!((third.2.from.clone(), third.2.to), (None, Some(4)));
    // Even if that differs twice, it is unknown whose part was wrong.
    actions.extend(w.answer(1, (&third.0, third.1), 4, of("other")));
    w.pass(100);
    let fourth = w.questions().remove(0);
    actions.extend(w.answer(1, (&fourth.0, fourth.1), 4, of("other")));
    assert!(quarantined(&actions).is_empty(), "{actions:?}");
}
