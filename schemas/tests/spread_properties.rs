//! Ranges that are split, computed, returned and merged in any order. At all times, the done and
//! remaining tiles of all members partition the whole range. In the end, the first member has every
//! tile once, in order.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::programs::TileRange;
use fiec_schemas::scheduling::{Adjustment, Deadline};
use fiec_schemas::spread::{PARTS_LIMIT, Part, part_id};
use fiec_schemas::{
    BoundaryEvent, Cause, Digest, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage,
    NodeId, Phase, Submission, Tenant, Timestamp,
};
use proptest::prelude::*;
use uuid::Uuid;

const AT: Timestamp = Timestamp::from_micros(5_000_000);

/// Content of a program's σ.
#[derive(Debug, Clone)]
struct Sigma {
    done: Vec<u64>,
    next: u64,
    end: u64,
}

impl Sigma {
    fn new(range: TileRange) -> Self {
        Self {
            done: Vec::new(),
            next: range.from,
            end: range.to,
        }
    }

    fn left(&self) -> TileRange {
        TileRange {
            from: self.next,
            to: self.end,
        }
    }

    fn advance(&mut self) {
        assert!(self.next < self.end);
        self.done.push(self.next);
        self.next += 1;
    }
}

struct Tree {
    whole: u64,
    first: ExecutionId,
    members: BTreeMap<ExecutionId, (ExecutionState, Sigma)>,
}

fn submission(tiles: u64) -> Submission {
    let line = format!(
        r#"{{"program":"sweep@1","params":{{"tiles":{{"from":0,"to":{tiles}}}}},"spread":{{"up_to":8}}}}"#
    );
    Submission::parse(line.as_bytes()).unwrap()
}

fn first(tiles: u64) -> ExecutionState {
    ExecutionState::unborn(
        Tenant::new("lab").unwrap(),
        ExecutionId(Uuid::from_u128(7)),
        Arc::new(submission(tiles)),
        None,
        AT,
    )
}

fn bound(state: &ExecutionState) -> Event {
    Event::Bound {
        epoch: state.epoch + 1,
        node: NodeId::new("n1").unwrap(),
        instance: InstanceId(Uuid::from_u128(1)),
        substrate: "host".to_owned(),
        cause: Cause::Balance,
        decision: None,
    }
}

fn started(state: &ExecutionState) -> Event {
    Event::Started {
        epoch: state.epoch + 1,
        computing_since: AT,
    }
}

fn boundary(state: &ExecutionState, sigma: &Sigma) -> Event {
    Event::Boundary(BoundaryEvent {
        index: state.boundary_index() + 1,
        digest: Digest::of(format!("{sigma:?}").as_bytes()),
        bytes: 8,
        computed_at: AT,
        compute_us: 5,
        of: None,
        note: None,
        outputs: vec![],
        energy: None,
    })
}

fn yielded(cause: Cause) -> Event {
    Event::Yielded {
        cause,
        computed_until: AT,
    }
}

fn completed(capsules: u64) -> Event {
    Event::Completed {
        result: serde_json::Value::Null,
        object: None,
        computed_until: AT,
        capsules,
        outputs: vec![],
        energy: None,
    }
}

impl Tree {
    fn new(tiles: u64) -> Self {
        let state = first(tiles)
            .after(&[Event::Submitted], "t", AT, None)
            .unwrap();
        let range = TileRange { from: 0, to: tiles };
        let first = state.execution;
        Self {
            whole: tiles,
            first,
            members: BTreeMap::from([(first, (state, Sigma::new(range)))]),
        }
    }

    fn state(&self, id: ExecutionId) -> &ExecutionState {
        &self.members[&id].0
    }

    fn append(&mut self, id: ExecutionId, events: &[Event], sigma: Sigma) {
        let (state, _) = &self.members[&id];
        let next = state.after(events, "t", AT, None);
        let mut next = next.unwrap_or_else(|error| panic!("{events:?}: {error}"));
        let message = LedgerMessage {
            v: 1,
            events: events.to_vec(),
            state: next.clone().into(),
            sig: None,
        };
        let read = LedgerMessage::decode(&message.encode().unwrap(), 9).unwrap();
        next.resolve(9);
        assert_eq!(*read.state, next);
        self.members.insert(id, (next, sigma));
    }

    /// Its end when no tile is left, in the message of its last boundary.
    fn ending(&self, id: ExecutionId, parts: usize, sigma: &Sigma) -> Option<Event> {
        let capsules = self.state(id).boundary_index() + 1;
        (sigma.next == sigma.end).then(|| match parts {
            0 => completed(capsules),
            _ => yielded(Cause::Parts),
        })
    }

    fn has_started(&self, id: ExecutionId) -> bool {
        matches!(self.state(id).phase, Phase::Started(_))
    }

    /// Binds it, and merges the last of its parts if it waits for that.
    fn bind(&mut self, id: ExecutionId) {
        let (state, sigma) = self.members[&id].clone();
        let spread = state.spread.as_deref().unwrap();
        if !matches!(state.phase, Phase::Pending { .. }) {
            return;
        }
        if !spread.waits {
            return self.append(id, &[bound(&state), started(&state)], sigma);
        }
        let last = *spread.last().unwrap();
        let Some((part, of_part)) = self.members.get(&last.id) else {
            return;
        };
        if !part.phase.is_terminal() {
            return;
        }
        let mut merged = sigma;
        assert_eq!((merged.next, merged.end), (last.from, last.from));
        merged.done.extend(&of_part.done);
        (merged.next, merged.end) = (of_part.next, last.to);
        let mut events = vec![bound(&state), started(&state), boundary(&state, &merged)];
        events.push(Event::Merged { part: last.id });
        events.extend(self.ending(id, spread.parts.len() - 1, &merged));
        self.append(id, &events, merged);
    }

    fn advance(&mut self, id: ExecutionId, also: Option<Event>) {
        if !self.has_started(id) {
            return;
        }
        let (state, mut sigma) = self.members[&id].clone();
        sigma.advance();
        let mut events = vec![boundary(&state, &sigma)];
        let ending = self.ending(id, state.parts().len(), &sigma);
        events.extend(ending.or(also));
        self.append(id, &events, sigma);
    }

    fn split(&mut self, id: ExecutionId) {
        let (state, mut sigma) = self.members[&id].clone();
        let full = state.parts().len() == PARTS_LIMIT;
        if !self.has_started(id) || full || sigma.left().count() < 3 {
            return;
        }
        sigma.advance();
        let range = sigma.left().last_half().unwrap();
        sigma.end = range.from;
        let nth = state.spread.as_ref().unwrap().splits;
        let part = Part {
            id: part_id(id, nth, range),
            from: range.from,
            to: range.to,
        };
        let split = Event::Split {
            part: part.id,
            nth,
            from: range.from,
            to: range.to,
        };
        self.append(id, &[boundary(&state, &sigma), split], sigma);
        let of_part = Arc::new(submission(self.whole).part(range, AT));
        let unborn = ExecutionState::unborn_part(self.state(id), &part, of_part, AT);
        let born = unborn.after(&[Event::Submitted], "t", AT, None).unwrap();
        let before = self.members.insert(part.id, (born, Sigma::new(range)));
        assert!(before.is_none(), "an id that is there already");
    }

    fn give_back(&mut self, id: ExecutionId) {
        let (state, sigma) = self.members[&id].clone();
        let Some(to) = state.part_of() else { return };
        let waited_for = self.state(to).spread.as_ref().unwrap();
        let last = waited_for.waits && waited_for.last().unwrap().id == id;
        if last && matches!(state.phase, Phase::Pending { .. }) && state.parts().is_empty() {
            self.append(id, &[Event::Returned { to }], sigma);
        }
    }

    fn step(&mut self, kind: u8, pick: usize) {
        let id = *self.members.keys().nth(pick % self.members.len()).unwrap();
        match kind {
            0..=2 => self.bind(id),
            3..=6 => self.advance(id, None),
            7 => self.advance(id, Some(yielded(Cause::Balance))),
            8..=9 => self.split(id),
            _ => self.give_back(id),
        }
    }

    /// Counts how often each tile occurs below the first member. The tiles of each member are in
    /// one piece.
    fn tally(&self, id: ExecutionId, seen: &mut [u32]) -> TileRange {
        let (state, sigma) = &self.members[&id];
        let from = sigma.done.first().copied().unwrap_or(sigma.next);
        assert!(sigma.done.iter().copied().eq(from..sigma.next), "{sigma:?}");
        (from..sigma.end).for_each(|tile| seen[usize::try_from(tile).unwrap()] += 1);
        let mut end = sigma.end;
        for part in state.parts().iter().rev() {
            assert_eq!(part.from, end, "{:?}", state.spread);
            if self.members.contains_key(&part.id) {
                assert_eq!(self.tally(part.id, seen), part.range());
            }
            end = part.to;
        }
        TileRange { from, to: end }
    }

    fn is_partition(&self) {
        let mut seen = vec![0; usize::try_from(self.whole).unwrap()];
        let range = self.tally(self.first, &mut seen);
        assert_eq!((range.from, range.to), (0, self.whole));
        assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
    }
}

proptest! {
    #[test]
    fn no_tile_is_lost_or_there_twice_whatever_is_split_given_back_and_merged(
        tiles in 1_u64..80,
        steps in prop::collection::vec((0_u8..12, any::<usize>()), 0..400),
    ) {
        let mut tree = Tree::new(tiles);
        for (kind, pick) in steps {
            tree.step(kind, pick);
            tree.is_partition();
        }
        // The members compute all remaining tiles.
        while !tree.state(tree.first).phase.is_terminal() {
            for id in tree.members.keys().copied().collect::<Vec<_>>() {
                tree.bind(id);
                tree.advance(id, None);
                tree.is_partition();
            }
        }
        let (state, sigma) = &tree.members[&tree.first];
        prop_assert!(matches!(state.phase, Phase::Completed));
        prop_assert!(sigma.done.iter().copied().eq(0..tiles));
    }
}

/// A holder of ten tiles that has started and done one.
fn holder() -> (ExecutionState, Sigma) {
    let mut tree = Tree::new(10);
    tree.bind(tree.first);
    tree.advance(tree.first, None);
    tree.members.remove(&tree.first).unwrap()
}

fn refused(state: &ExecutionState, events: &[Event]) -> String {
    state.after(events, "t", AT, None).unwrap_err().to_string()
}

#[test]
fn what_the_rules_of_ranges_forbid_is_refused_in_words() {
    let (state, sigma) = holder();
    let own = state.execution;
    let split = |nth, from, to| Event::Split {
        part: part_id(own, nth, TileRange { from, to }),
        nth,
        from,
        to,
    };
    let at = |state: &ExecutionState| boundary(state, &sigma);
    for (events, word) in [
        (vec![split(0, 6, 10)], "in the message of its boundary"),
        (vec![at(&state), split(0, 6, 9)], "not the end"),
        (vec![at(&state), split(1, 6, 10)], "split 0 times"),
        (vec![at(&state), split(0, 6, 6)], "not the part"),
        (vec![yielded(Cause::Parts)], "no parts to wait for"),
        (
            vec![at(&state), Event::Merged { part: own }],
            "not the last",
        ),
        (vec![Event::Returned { to: own }], "cannot become returned"),
    ] {
        let said = refused(&state, &events);
        assert!(said.contains(word), "{events:?}: {said}");
    }
    let events = [at(&state), split(0, 6, 10)];
    let state = state.after(&events, "t", AT, None).unwrap();
    let events = [at(&state), split(1, 4, 6)];
    let state = state.after(&events, "t", AT, None).unwrap();
    let [second, last] = [(0, 6, 10), (1, 4, 6)].map(|(nth, from, to)| {
        let id = part_id(own, nth, TileRange { from, to });
        Part { id, from, to }
    });
    assert_eq!(state.parts(), [second, last]);
    let back = |index| Event::SteppedBack {
        to: Some(fiec_schemas::StatePlace {
            index,
            ..state.boundary.clone().unwrap()
        }),
        cause: Cause::Balance,
    };
    for (events, word) in [
        (vec![completed(3)], "2 of its parts are not merged"),
        (vec![at(&state), split(2, 2, 3)], "not the end"),
        (
            vec![at(&state), Event::Merged { part: second.id }],
            "not the last",
        ),
        (vec![back(state.boundary_index() - 1)], "before its range"),
    ] {
        let said = refused(&state, &events);
        assert!(said.contains(word), "{events:?}: {said}");
    }
    assert!(
        state
            .after(&[back(state.boundary_index())], "t", AT, None)
            .is_ok()
    );
    // It waits: it can only take back the last part.
    let waiting = state
        .after(&[yielded(Cause::Parts)], "t", AT, None)
        .unwrap();
    let waiting = waiting
        .after(&[bound(&waiting), started(&waiting)], "t", AT, None)
        .unwrap();
    let said = refused(&waiting, &[at(&waiting)]);
    assert!(said.contains("must merge the last"), "{said}");
    let events = [at(&waiting), Event::Merged { part: last.id }];
    let merged = waiting.after(&events, "t", AT, None).unwrap();
    let spread = merged.spread.as_deref().unwrap();
    assert_eq!((spread.end, spread.waits), (Some(6), false));
    assert_eq!(spread.since, merged.boundary_index());
}

#[test]
fn a_part_inherits_what_was_changed_and_ends_with_its_state_or_gives_back() {
    let (state, _) = holder();
    let change = Adjustment {
        priority: Some(9),
        deadline: Some(Deadline {
            within_s: Some(60),
            ..Deadline::default()
        }),
        ..Adjustment::default()
    };
    let due = change.deadline.unwrap().moment(state.submitted_at);
    let adjusted = Event::Adjusted {
        who: "me".to_owned(),
        change,
    };
    let state = state.after(&[adjusted], "t", AT, None).unwrap();
    let range = TileRange { from: 6, to: 10 };
    let part = Part {
        id: part_id(state.execution, 0, range),
        from: 6,
        to: 10,
    };
    let own = Arc::new(submission(10).part(range, AT));
    // It is made after its holder was submitted, and has the same deadline.
    let later = Timestamp::from_micros(AT.micros() + 30_000_000);
    let unborn = ExecutionState::unborn_part(&state, &part, own, later);
    assert_eq!(unborn.part_of(), Some(state.execution));
    let inherited = unborn.adjusted.as_ref().unwrap();
    assert_eq!(inherited.priority, Some(9));
    assert_eq!(inherited.deadline.unwrap().moment(later), due);
    let pending = unborn.after(&[Event::Submitted], "t", AT, None).unwrap();
    let other = Event::Returned { to: part.id };
    assert!(refused(&pending, &[other]).contains("not a part of"));
    let to = state.execution;
    let returned = pending
        .after(&[Event::Returned { to }], "t", AT, None)
        .unwrap();
    assert!(returned.phase.is_terminal() && returned.phase.as_str() == "returned");
    let events = [bound(&pending), started(&pending)];
    let running = pending.after(&events, "t", AT, None).unwrap();
    let last = boundary(&running, &Sigma::new(range));
    assert!(refused(&running, &[completed(1)]).contains("in the message"));
    let early = [last.clone(), completed(2)];
    assert!(refused(&running, &early).contains("with their σ"));
    let done = running.after(&[last, completed(1)], "t", AT, None).unwrap();
    assert_eq!(done.boundary_index(), 1);
}
