//! Vectors of names that have not joined. The name in a vector is whatever its sender wrote, so
//! such a name never becomes a node. Its last vector waits here for a short time, because a
//! worker's first vector may overtake its descriptor.

use std::collections::{BTreeMap, BTreeSet};

use fiec_schemas::hardware::LISTED_LIMIT;
use fiec_schemas::{HardwareVector, NodeId};

use crate::time::Millis;

/// Most names that are kept.
const NAMES_LIMIT: usize = 256;
/// A longer vector is not kept; its node's next vector comes with the next heartbeat.
const READINGS_LIMIT: usize = 512;

/// The last vectors of names that have not joined.
#[derive(Debug, Default)]
pub struct Strangers {
    vectors: BTreeMap<NodeId, (Millis, Box<HardwareVector>)>,
    /// The same names, the one heard longest ago first.
    by_age: BTreeSet<(Millis, NodeId)>,
}

impl Strangers {
    /// Keeps a vector that was made at `heard`, in place of an earlier one of its name. Where too
    /// many names are kept, the one heard longest ago is forgotten.
    pub fn hold(&mut self, heard: Millis, vector: HardwareVector) {
        let listed = vector.running.len().max(vector.arriving.len());
        if vector.readings.len() > READINGS_LIMIT || listed > LISTED_LIMIT {
            return;
        }
        let name = vector.node.clone();
        self.take(&name);
        if self.vectors.len() >= NAMES_LIMIT
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.vectors.remove(&oldest);
        }
        self.by_age.insert((heard, name.clone()));
        self.vectors.insert(name, (heard, Box::new(vector)));
    }

    /// Takes the vector of a name that joins.
    pub fn take(&mut self, name: &NodeId) -> Option<(Millis, HardwareVector)> {
        let (heard, vector) = self.vectors.remove(name)?;
        self.by_age.remove(&(heard, name.clone()));
        Some((heard, *vector))
    }

    /// Forgets the names that were heard before `since`.
    pub fn forget_before(&mut self, since: Millis) {
        while self.by_age.first().is_some_and(|(heard, _)| *heard < since) {
            if let Some((_, name)) = self.by_age.pop_first() {
                self.vectors.remove(&name);
            }
        }
    }

    /// Number of names that are kept.
    pub fn count(&self) -> usize {
        self.vectors.len()
    }
}
