//! One state of the model: the broker, two workers, two policy services and the network.

use super::message::{Id, Messages};
use super::rules::{Rules, Validity};

pub const DEPTH: usize = 8;
pub const WORKERS: usize = 2;
pub const POLICIES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Entry {
    pub seq: u8,
    pub id: Id,
}

/// The subject of the execution, and the stream's next sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Server {
    pub life: u8,
    pub next: u8,
    pub len: u8,
    pub entries: [Entry; DEPTH],
}

/// What a read of the ledger gives.
#[derive(Debug, Clone, Copy)]
pub struct Last {
    /// Last valid message; 0 if there is none.
    pub id: Id,
    /// The subject's last sequence, that of a void message as well; what an append must expect.
    pub seq: u8,
}

impl Server {
    pub fn entries(&self) -> &[Entry] {
        &self.entries[..self.len as usize]
    }

    pub fn last_seq(&self) -> u8 {
        self.entries().last().map_or(0, |entry| entry.seq)
    }

    /// The valid chain as these readers see it, oldest first.
    pub fn chain(&self, messages: &Messages, validity: Validity) -> ([Id; DEPTH], usize) {
        let (mut chain, mut len, mut neighbour) = ([0; DEPTH], 0, 0);
        for entry in self.entries() {
            let last = if len == 0 { 0 } else { chain[len - 1] };
            let before = match validity {
                Validity::FollowsLastValid => last,
                Validity::FollowsNeighbour => neighbour,
                Validity::Unchecked => messages.get(entry.id).prev,
            };
            if messages.get(entry.id).prev == before {
                chain[len] = entry.id;
                len += 1;
            }
            neighbour = entry.id;
        }
        (chain, len)
    }

    pub fn last(&self, messages: &Messages, rules: &Rules) -> Last {
        let (chain, len) = self.chain(messages, rules.validity);
        Last {
            id: if len == 0 { 0 } else { chain[len - 1] },
            seq: self.last_seq(),
        }
    }

    pub fn is_valid(&self, messages: &Messages, validity: Validity, id: Id) -> bool {
        let (chain, len) = self.chain(messages, validity);
        chain[..len].contains(&id)
    }
}

/// An append on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Flight {
    pub id: Id,
    pub expected: u8,
    /// Life in which its author saw the sequence that it expects.
    pub life: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Call {
    #[default]
    Idle,
    /// In the network, or in the client's buffer.
    Sent(Flight),
    /// Stored in this life; the acknowledgement is on its way.
    Acked { flight: Flight, seq: u8, life: u8 },
    /// Refused, or no acknowledgement came, or it is not believed: the author must read.
    Unknown(Flight),
}

/// A binding handed to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Capsule {
    pub id: Id,
    pub seq: u8,
    pub life: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Worker {
    pub dead: bool,
    /// Life of the broker that it knows of.
    pub life: u8,
    /// Last message of the chain that it holds; 0: it holds nothing.
    pub tip: Id,
    /// Sequence that its next append expects, and the life in which it saw it.
    pub seq: u8,
    pub seen: u8,
    /// Known messages behind the tip.
    pub depth: u8,
    pub call: Call,
    pub inbox: Option<Capsule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct State {
    pub server: Server,
    pub workers: [Worker; WORKERS],
    pub policies: [Call; POLICIES],
    /// A copy of an append that its author waits for no longer.
    pub limbo: Option<Flight>,
    /// The faults that are left.
    pub lost_acks: u8,
    pub crashes: u8,
    pub suspicions: u8,
    pub foreign: u8,
    /// Ghosts: the highest boundary that was acknowledged (one more for the end), and whether
    /// computing it again is excused.
    pub acknowledged: u8,
    pub excused: bool,
}
