//! A part of an execution as its ledger claims it, and the judgement on it.

use std::collections::BTreeMap;

use fiec_schemas::trust::Finding;
use fiec_schemas::{BoundaryIndex, StatePlace, Timestamp};

use crate::cluster::NodeIx;
use crate::time::Millis;

/// A part of an execution as its ledger claims it.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// From where; none: from the beginning.
    pub from: Option<StatePlace>,
    /// Where its σ is at the end; none where that is the execution's end.
    pub place: Option<StatePlace>,
    /// What the ledger says of the end.
    pub found: Finding,
    /// Who computed it, where that was one node.
    pub node: Option<NodeIx>,
    /// False where outputs were made on the way that are not known here.
    pub whole: bool,
    /// True where outputs were named on the way, maybe, that were neither seen here nor compared.
    pub unseen: bool,
    /// At which boundary each output was made last, as exactly as its message says.
    pub made: BTreeMap<String, BoundaryIndex>,
}

impl Claim {
    /// What a message claims of the part from one boundary to a later one.
    pub fn new(
        from: Option<StatePlace>,
        place: Option<StatePlace>,
        found: Finding,
        node: Option<NodeIx>,
        whole: bool,
    ) -> Self {
        let made = found.outputs.keys();
        let made = made.map(|name| (name.clone(), found.index)).collect();
        Self {
            from,
            place,
            found,
            node,
            whole,
            unseen: false,
            made,
        }
    }

    /// It reaches to the end of the one that follows it.
    pub fn grow(&mut self, next: Claim) {
        self.found.outputs.extend(next.found.outputs);
        self.made.extend(next.made);
        self.found.index = next.found.index;
        self.found.digest = next.found.digest;
        self.place = next.place;
        self.whole &= next.whole;
        self.unseen |= next.unseen;
    }

    /// It begins at this boundary; what was made up to there is no part of it any more.
    pub fn begin_at(&mut self, good: StatePlace) {
        let begun = good.index;
        self.made.retain(|_, at| *at > begun);
        let made = &self.made;
        self.found.outputs.retain(|name, _| made.contains_key(name));
        self.from = Some(good);
    }

    /// Whether somebody found what is claimed.
    pub fn agrees(&self, with: &Finding) -> bool {
        let outputs = if self.whole {
            self.found.outputs == with.outputs
        } else {
            let same = |(name, digest)| with.outputs.get(name) == Some(digest);
            self.found.outputs.iter().all(same)
        };
        self.found.index == with.index && self.found.digest == with.digest && outputs
    }

    /// Whether somebody made outputs of which it is not known what the ledger says of them.
    pub fn is_beyond(&self, with: &Finding) -> bool {
        let known = |name| self.found.outputs.contains_key(name);
        self.unseen && !with.outputs.keys().all(known)
    }

    /// Boundaries at its ends, for people; 0: the beginning.
    pub fn ends(&self) -> (BoundaryIndex, BoundaryIndex) {
        (self.from.as_ref().map_or(0, |p| p.index), self.found.index)
    }
}

/// A claim under judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The question that is open, if one is.
    pub question: u64,
    /// Who was asked; none: nobody at the moment.
    pub asked: Option<NodeIx>,
    /// When that one was heard last.
    pub heard: Millis,
    /// Somebody found something else.
    pub other: Option<(NodeIx, Finding)>,
    /// Since when the proofs of both are awaited, there being nobody else to ask.
    pub proofs_since: Option<Timestamp>,
}
