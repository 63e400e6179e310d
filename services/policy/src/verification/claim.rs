//! A part of an execution as its ledger claims it, and its judgement.

use std::collections::BTreeMap;

use fiec_schemas::trust::Finding;
use fiec_schemas::{BoundaryIndex, StatePlace, Timestamp};

use crate::lifecycle::cluster::NodeIx;
use crate::time::Millis;

/// A part of an execution as its ledger claims it.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// The boundary at its start. None: the beginning.
    pub from: Option<StatePlace>,
    /// The σ at its end. None if it reaches the execution's end.
    pub place: Option<StatePlace>,
    /// The result that the ledger states for its end.
    pub found: Finding,
    /// The node that computed it, if it was one node.
    pub node: Option<NodeIx>,
    /// False if outputs were made on the way that are not known here.
    pub whole: bool,
    /// True if outputs may have been named on the way that were not seen here, so they are not
    /// compared.
    pub unseen: bool,
    /// For each output the last boundary that made it, as exactly as its message says.
    pub made: BTreeMap<String, BoundaryIndex>,
}

impl Claim {
    /// The claim of a message for the range between two boundaries.
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

    /// Extends it to the end of the next claim.
    pub fn grow(&mut self, next: Claim) {
        self.found.outputs.extend(next.found.outputs);
        self.made.extend(next.made);
        self.found.index = next.found.index;
        self.found.digest = next.found.digest;
        self.place = next.place;
        self.whole &= next.whole;
        self.unseen |= next.unseen;
    }

    /// Moves its start to this boundary, and drops the outputs made before.
    pub fn begin_at(&mut self, good: StatePlace) {
        let begun = good.index;
        self.made.retain(|_, at| *at > begun);
        let made = &self.made;
        self.found.outputs.retain(|name, _| made.contains_key(name));
        self.from = Some(good);
    }

    /// True if a finding agrees with the claim.
    pub fn agrees(&self, with: &Finding) -> bool {
        let outputs = if self.whole {
            self.found.outputs == with.outputs
        } else {
            let same = |(name, digest)| with.outputs.get(name) == Some(digest);
            self.found.outputs.iter().all(same)
        };
        self.found.index == with.index && self.found.digest == with.digest && outputs
    }

    /// True if a finding has outputs that the ledger, as seen here, does not name.
    pub fn is_beyond(&self, with: &Finding) -> bool {
        let known = |name| self.found.outputs.contains_key(name);
        self.unseen && !with.outputs.keys().all(known)
    }

    /// The boundaries at its ends, for people; 0: the beginning.
    pub fn ends(&self) -> (BoundaryIndex, BoundaryIndex) {
        (self.from.as_ref().map_or(0, |p| p.index), self.found.index)
    }
}

/// A claim under judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// Number of the open question, if there is one.
    pub question: u64,
    /// The node that was asked. None: no node is asked at present.
    pub asked: Option<NodeIx>,
    /// Time of its last sign of life.
    pub heard: Millis,
    /// A node with a different result.
    pub other: Option<(NodeIx, Finding)>,
    /// Time since which new proofs of both nodes are awaited, because no third node can be asked.
    pub proofs_since: Option<Timestamp>,
}
