//! The chain of one ledger, as a worker knows it. The broker may lose the last messages of a stream
//! and assign their sequences again, so a digest identifies a message. `schemas/PROTOCOL.md` has
//! the rules; `tests/ledger_protocol.rs` checks a model of them.

use std::collections::VecDeque;

use crate::ids::{Digest, Ordinal, Sequence};
use crate::subjects::LEDGER_DEPTH;

/// One ledger message as a link of its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Sequence in the stream. It identifies the message only within one life of the broker.
    pub seq: Sequence,
    /// Digest of the message's `Fiec-Event` header. It identifies the message.
    pub digest: Digest,
    /// Digest of the message before it; none for the first message of a ledger.
    pub prev: Option<Digest>,
    /// Place in the ledger, from 1. A `healed` message leaves a gap before it.
    pub ordinal: Ordinal,
}

impl Link {
    /// True when this message was written on top of `before`.
    pub fn follows(&self, before: &Link) -> bool {
        self.prev == Some(before.digest)
    }
}

/// Comparison of the ledger's last valid message with the chain of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is the tip of the chain. Its sequence may have changed.
    Unchanged,
    /// It is an ancestor of the tip: the broker lost the messages after it. The holder of the
    /// binding may append the tip's state again.
    Behind {
        /// Ordinal of the ledger's last valid message.
        kept: Ordinal,
        /// Number of lost ordinals: the tip's minus `kept`.
        lost: u64,
    },
    /// The ledger holds no message. Treat it as `Behind` with `kept: 0` if
    /// [`Held::has_first`], otherwise as `Overtaken`.
    Empty,
    /// Another writer appended a message that the chain does not contain.
    Overtaken,
}

/// A message that does not follow any message of the chain it was pushed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("message {} with ordinal {ordinal} follows no known message of its chain", .digest.short())]
pub struct Detached {
    /// Its digest.
    pub digest: Digest,
    /// Its ordinal.
    pub ordinal: Ordinal,
}

/// The part of one ledger's chain that a worker knows: the tip, and the digests of at most
/// [`LEDGER_DEPTH`] messages before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    tip: Link,
    /// Oldest first.
    behind: VecDeque<Digest>,
    has_first: bool,
}

impl Held {
    /// A chain with a known tip and the digest of the message before it.
    pub fn new(tip: Link) -> Self {
        Self {
            tip,
            behind: tip.prev.into_iter().collect(),
            has_first: tip.prev.is_none(),
        }
    }

    /// The newest message.
    pub fn tip(&self) -> &Link {
        &self.tip
    }

    /// True when the first message of the ledger is known.
    pub fn has_first(&self) -> bool {
        self.has_first
    }

    /// True if `digest` is the tip's or that of a known earlier message.
    pub fn contains(&self, digest: &Digest) -> bool {
        self.tip.digest == *digest || self.behind.contains(digest)
    }

    /// Adds a message that is stored in the ledger. It follows the tip. A `healed` message may
    /// follow an ancestor, and then the messages between them are dropped.
    ///
    /// # Errors
    /// If the message follows no known message. Then nothing changes.
    pub fn push(&mut self, link: Link) -> Result<(), Detached> {
        let detached = Detached {
            digest: link.digest,
            ordinal: link.ordinal,
        };
        match link.prev {
            Some(prev) if prev == self.tip.digest => self.behind.push_back(prev),
            Some(prev) => {
                let at = self.behind.iter().position(|known| *known == prev);
                self.behind.truncate(at.ok_or(detached)? + 1);
            }
            // A `healed` message on an empty ledger.
            None if self.has_first => self.behind.clear(),
            None => return Err(detached),
        }
        while self.behind.len() as u64 > LEDGER_DEPTH {
            self.behind.pop_front();
            self.has_first = false;
        }
        self.tip = link;
        Ok(())
    }

    /// Sets the tip's sequence, as read in the present life of the broker.
    pub fn move_tip(&mut self, seq: Sequence) {
        self.tip.seq = seq;
    }

    /// Adds the predecessor that an older message names. Returns false, and changes nothing, if
    /// `link` is not the oldest known message or there is no room. A worker that takes over an
    /// execution calls this for each message from the newest to the oldest. A rollback beyond the
    /// known messages looks like `Overtaken`.
    pub fn extend_back(&mut self, link: &Link) -> bool {
        let oldest = self.behind.front().unwrap_or(&self.tip.digest);
        if *oldest != link.digest || self.has_first || self.behind.len() as u64 >= LEDGER_DEPTH {
            return false;
        }
        match link.prev {
            Some(prev) => self.behind.push_front(prev),
            None => self.has_first = true,
        }
        true
    }

    /// Compares the chain with the ledger's last valid message.
    pub fn compare(&self, last: Option<&Link>) -> Standing {
        let Some(last) = last else {
            return Standing::Empty;
        };
        if last.digest == self.tip.digest {
            return Standing::Unchanged;
        }
        if self.behind.contains(&last.digest) {
            return Standing::Behind {
                kept: last.ordinal,
                lost: self.tip.ordinal.saturating_sub(last.ordinal),
            };
        }
        Standing::Overtaken
    }
}

/// The valid messages among those of a subject, in stream order. A message is valid if it follows
/// the last valid message before it. Every other message is void.
///
/// If the stream no longer has the first message of the ledger, the oldest one left may be void.
/// Then the longest chain is valid, because no author writes after a void message.
pub fn valid_chain(links: &[Link]) -> Vec<Link> {
    let chain_from = |from: &[Link]| {
        let mut chain: Vec<Link> = Vec::new();
        for link in from {
            if chain.last().is_none_or(|last| link.follows(last)) {
                chain.push(*link);
            }
        }
        chain
    };
    if let Some(first) = links.iter().position(|link| link.prev.is_none()) {
        return chain_from(links.get(first..).unwrap_or_default());
    }
    let mut longest = Vec::new();
    for start in 0..links.len() {
        let chain = chain_from(links.get(start..).unwrap_or_default());
        if chain.len() > longest.len() {
            longest = chain;
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Message `n` of a chain that forked off as `branch` after message `fork`.
    fn link_of(branch: u8, fork: u64, n: u64) -> Link {
        let digest = |n: u64| Digest::of(&[if n > fork { branch } else { 0 }, n as u8, 1]);
        Link {
            seq: n * 10,
            digest: digest(n),
            prev: (n > 1).then(|| digest(n - 1)),
            ordinal: n,
        }
    }

    fn link(n: u64) -> Link {
        link_of(0, 0, n)
    }

    fn held(from: u64, to: u64) -> Held {
        let mut held = Held::new(link(from));
        for n in from + 1..=to {
            held.push(link(n)).unwrap();
        }
        held
    }

    #[test]
    fn the_same_tip_under_another_sequence_is_unchanged() {
        let last = Link { seq: 7, ..link(4) };
        assert_eq!(held(1, 4).compare(Some(&last)), Standing::Unchanged);
    }

    #[test]
    fn an_ancestor_is_behind_by_the_ordinals_that_were_lost() {
        let behind = Standing::Behind { kept: 2, lost: 3 };
        assert_eq!(held(1, 5).compare(Some(&link(2))), behind);
    }

    #[test]
    fn another_message_under_the_sequence_of_the_tip_is_overtaken() {
        let last = link_of(9, 3, 4);
        assert_eq!(last.seq, held(1, 4).tip().seq);
        assert_eq!(held(1, 4).compare(Some(&last)), Standing::Overtaken);
        assert_eq!(held(1, 4).compare(Some(&link(5))), Standing::Overtaken);
    }

    #[test]
    fn an_empty_ledger_is_empty_and_the_first_message_known_or_not() {
        assert_eq!(held(1, 4).compare(None), Standing::Empty);
        assert!(held(1, 4).has_first());
        assert!(!held(2, 4).has_first());
    }

    #[test]
    fn a_message_that_follows_nothing_known_is_detached() {
        let mut held = held(1, 4);
        let before = held.clone();
        assert!(held.push(link_of(9, 3, 5)).is_err());
        assert!(held.push(link(6)).is_err());
        assert_eq!(held, before);
    }

    #[test]
    fn a_healed_message_replaces_those_that_were_lost() {
        let mut held = held(1, 5);
        let healed = Link {
            seq: 30,
            digest: Digest::of(b"healed"),
            prev: Some(link(2).digest),
            ordinal: 6,
        };
        held.push(healed).unwrap();
        assert_eq!(held.compare(Some(&healed)), Standing::Unchanged);
        assert_eq!(held.compare(Some(&link(3))), Standing::Overtaken);
        let behind = Standing::Behind { kept: 2, lost: 4 };
        assert_eq!(held.compare(Some(&link(2))), behind);
        let alone = Link {
            prev: None,
            ..healed
        };
        let mut held = self::held(1, 5);
        held.push(alone).unwrap();
        assert_eq!(held.compare(Some(&link(1))), Standing::Overtaken);
        assert!(self::held(2, 5).push(alone).is_err());
    }

    #[test]
    fn a_chain_is_bounded_and_forgets_its_first_message() {
        let held = held(1, 66);
        assert!(!held.has_first());
        assert_eq!(held.compare(Some(&link(1))), Standing::Overtaken);
        let behind = Standing::Behind { kept: 2, lost: 64 };
        assert_eq!(held.compare(Some(&link(2))), behind);
    }

    #[test]
    fn older_messages_extend_what_a_new_holder_knows() {
        let mut held = Held::new(link(4));
        assert!(held.contains(&link(3).digest) && !held.contains(&link(2).digest));
        assert!(!held.extend_back(&link(2)), "message 3 comes first");
        for n in [3, 2, 1] {
            assert!(!held.has_first());
            assert!(held.extend_back(&link(n)));
        }
        assert!(held.has_first() && !held.extend_back(&link(1)));
        let mut alone = Held::new(link(1));
        assert!(alone.has_first() && !alone.extend_back(&link(1)));
    }

    #[test]
    fn void_messages_are_passed_over_with_all_that_follows_them() {
        let (void, child) = (link_of(9, 2, 4), link_of(9, 2, 5));
        let links = [link(1), link(2), link(3), void, child, link(4)];
        assert_eq!(valid_chain(&links), [link(1), link(2), link(3), link(4)]);
    }

    #[test]
    fn a_void_message_that_is_the_oldest_left_does_not_void_the_others() {
        let links = [link_of(9, 2, 4), link(4), link(5), link(6)];
        assert_eq!(valid_chain(&links), links[1..]);
        assert_eq!(valid_chain(&[]), []);
        assert_eq!(valid_chain(&links[..1]), links[..1]);
    }
}
