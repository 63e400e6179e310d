//! Failed appends: the view of the ledgers stays right, whatever is lost on the way.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use fiec_policy::{Input, LedgerView};
use fiec_schemas::{Event, ExecutionState, LedgerMessage, NodeFlags};
use world::World;

/// A reread whose answer is this message.
fn reread(w: &mut World, (seq, state): &(u64, ExecutionState)) {
    let message = LedgerMessage {
        v: 1,
        events: Vec::new(),
        state: state.clone().into(),
        sig: None,
    };
    let header = message.encode().unwrap();
    w.follow(&LedgerView::read(&header, *seq).unwrap(), true);
}

fn last(w: &World, n: u64) -> (u64, ExecutionState) {
    let ledger = &w.ledgers[&World::id(n)];
    (ledger.seq, ledger.state.clone())
}

/// A pending execution with a free node, its first message, and its last message.
fn resumed() -> (World, [(u64, ExecutionState); 2]) {
    let mut w = World::new(1);
    w.cordon_all(true);
    w.submit_and_store(1);
    let first = last(&w, 1);
    for event in [
        Event::Paused { who: "ann".into() },
        Event::Resumed { who: "ann".into() },
    ] {
        w.append(World::id(1), vec![event], "policy/other", true);
    }
    let node = w.node(0);
    w.step(Input::Flags {
        node: node.clone(),
        flags: NodeFlags::default(),
    });
    w.out.clear();
    let second = last(&w, 1);
    (w, [first, second])
}

#[test]
fn an_old_message_after_a_failed_append_does_not_stop_an_execution_for_ever() {
    let (mut w, [old, _]) = resumed();
    w.act_and_lose();
    // A replica of the broker that lags answers with an older message.
    reread(&mut w, &old);
    w.pass(30_000);
    assert_eq!(w.phase(1).as_str(), "bound");
}

#[test]
fn an_old_message_after_a_failed_append_does_not_hide_the_one_that_is_stored() {
    let (mut w, [old, before]) = resumed();
    w.act_and_lose();
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    // Its own message comes by the feed. The look at the ledger that follows the lost
    // acknowledgement is answered by replicas that lag.
    w.append(World::id(1), cancelled, "policy/p", true);
    reread(&mut w, &before);
    reread(&mut w, &old);
    w.pass(30_000);
    assert_eq!(w.phase(1).as_str(), "cancelled");
    assert!(!w.policy.knows(World::id(1)));
}

#[test]
fn a_last_message_that_was_removed_is_not_believed_for_ever() {
    let (mut w, [old, _]) = resumed();
    w.act_and_lose();
    let ledger = w.ledgers.get_mut(&World::id(1)).unwrap();
    (ledger.seq, ledger.state) = old;
    w.tell(World::id(1), true);
    w.pass(30_000);
    assert_eq!(w.phase(1).as_str(), "bound");
}
