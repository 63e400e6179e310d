//! Ledger messages of the model. A message's place in [`Messages`] stands for its digest: equal
//! content, equal digest.

use std::collections::HashMap;

/// Stands for a digest; 0 is none.
pub type Id = u16;

/// A node, or nobody.
pub type Node = u8;
pub const NOBODY: Node = 9;
/// Authors 0 and 1 are the workers of nodes 0 and 1; the policy services follow.
pub const FIRST_POLICY: u8 = 2;

/// Boundaries of the execution before it completes.
pub const WORK: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Submitted,
    Bound,
    Boundary,
    Completed,
    Healed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    Pending,
    Bound,
    Started,
    Completed,
}

/// A message with the state after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    pub kind: Kind,
    pub author: u8,
    /// Life of the broker in which a policy service wrote it; stands for its time stamp.
    pub stamp: u8,
    pub prev: Id,
    pub ordinal: u8,
    pub phase: Phase,
    pub epoch: u8,
    pub holder: Node,
    pub boundary: u8,
    /// Tip that was lost, of a healed message.
    pub over: Id,
}

impl Message {
    pub fn submitted(author: u8, stamp: u8) -> Self {
        Self {
            kind: Kind::Submitted,
            author,
            stamp,
            prev: 0,
            ordinal: 1,
            phase: Phase::Pending,
            epoch: 0,
            holder: NOBODY,
            boundary: 0,
            over: 0,
        }
    }

    fn next(self, own: Id, kind: Kind, author: u8) -> Self {
        Self {
            kind,
            author,
            stamp: 0,
            prev: own,
            ordinal: self.ordinal + 1,
            over: 0,
            ..self
        }
    }

    pub fn bound(self, own: Id, node: Node, author: u8, stamp: u8) -> Self {
        Self {
            phase: Phase::Bound,
            epoch: self.epoch + 1,
            holder: node,
            stamp,
            ..self.next(own, Kind::Bound, author)
        }
    }

    /// The holder's next message: a boundary, or the end.
    pub fn progress(self, own: Id) -> Self {
        if self.boundary < WORK {
            Self {
                phase: Phase::Started,
                boundary: self.boundary + 1,
                ..self.next(own, Kind::Boundary, self.holder)
            }
        } else {
            Self {
                phase: Phase::Completed,
                ..self.next(own, Kind::Completed, self.holder)
            }
        }
    }

    /// The state of the lost tip `own` once more, on top of `kept`.
    pub fn healed(self, own: Id, kept: Id) -> Self {
        Self {
            prev: kept,
            over: own,
            ..self.next(own, Kind::Healed, self.holder)
        }
    }
}

/// All messages that were ever written, in any branch of the search.
pub struct Messages {
    all: Vec<Message>,
    ids: HashMap<Message, Id>,
}

impl Messages {
    pub fn new() -> Self {
        // Place 0 is no message.
        Self {
            all: vec![Message::submitted(0, 0)],
            ids: HashMap::new(),
        }
    }

    pub fn id(&mut self, message: Message) -> Id {
        let next = Id::try_from(self.all.len()).expect("fewer messages");
        let id = *self.ids.entry(message).or_insert(next);
        if id == next {
            self.all.push(message);
        }
        id
    }

    pub fn get(&self, id: Id) -> &Message {
        &self.all[id as usize]
    }

    /// True when `id` lies behind `tip` in its chain, at most `depth` messages back.
    pub fn is_ancestor(&self, id: Id, tip: Id, depth: u8) -> bool {
        let mut at = tip;
        for _ in 0..depth {
            if at == 0 {
                return false;
            }
            at = self.get(at).prev;
            if at == id {
                return at != 0;
            }
        }
        false
    }

    /// The first rule that `id` breaks as the successor of `before` (0: as the first), if any.
    pub fn broken_rule(&self, before: Id, id: Id) -> Option<&'static str> {
        let next = *self.get(id);
        let bad = |broken: bool, rule| broken.then_some(rule);
        if before == 0 {
            let first = next.kind == Kind::Submitted || next.kind == Kind::Healed;
            return bad(!first, "a ledger begins with neither submitted nor healed");
        }
        let last = *self.get(before);
        if last.phase == Phase::Completed {
            return Some("a message follows the end");
        }
        let holds = next.author == last.holder && next.epoch == last.epoch;
        match next.kind {
            Kind::Submitted => Some("submitted is not the first message"),
            Kind::Bound => bad(next.epoch != last.epoch + 1, "the epoch does not follow"),
            Kind::Boundary => bad(
                !holds || next.boundary != last.boundary + 1,
                "a boundary by a worker that does not hold the binding, or out of order",
            ),
            Kind::Completed => bad(
                !holds || last.boundary != WORK,
                "completed by a worker that does not hold the binding, or too early",
            ),
            Kind::Healed => bad(
                next.epoch < last.epoch
                    || next.boundary < last.boundary
                    || next.author != next.holder
                    || !self.is_ancestor(before, next.over, u8::MAX),
                "a healed message does not continue what the ledger kept",
            ),
        }
    }

    /// For traces.
    pub fn show(&self, id: Id) -> String {
        if id == 0 {
            return "nothing".to_owned();
        }
        let m = self.get(id);
        let author = match m.author {
            NOBODY => "a policy service".to_owned(),
            a if a >= FIRST_POLICY => format!("policy {}", a - FIRST_POLICY),
            a => format!("worker {a}"),
        };
        let state = match m.phase {
            Phase::Pending => "pending".to_owned(),
            _ => format!("{:?} on {} epoch {}", m.phase, m.holder, m.epoch).to_lowercase(),
        };
        format!(
            "#{id} {:?} by {author} (prev #{}, ordinal {}, {state}, boundary {})",
            m.kind, m.prev, m.ordinal, m.boundary
        )
    }
}
