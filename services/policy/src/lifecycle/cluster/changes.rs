//! A log of changed nodes, so that an index over all nodes re-reads only the changed ones.

use std::collections::VecDeque;

use crate::lifecycle::cluster::NodeIx;

/// The log, at most about as long as the number of nodes. A reader that is further behind re-reads
/// all nodes.
#[derive(Debug, Default)]
pub struct Changes {
    log: VecDeque<NodeIx>,
    /// Number of entries dropped from the front.
    dropped: u64,
}

impl Changes {
    /// Adds a changed node of a cluster of `nodes` nodes.
    pub fn note(&mut self, ix: NodeIx, nodes: usize) {
        self.log.push_back(ix);
        while self.log.len() > nodes {
            self.log.pop_front();
            self.dropped += 1;
        }
    }

    /// Number of changes so far, as the argument of the next [`Changes::since`].
    pub fn count(&self) -> u64 {
        self.dropped + self.log.len() as u64
    }

    /// The nodes changed after the first `seen` changes. A node may appear again, but not twice in
    /// a row. None if the log no longer goes back so far, and every node may have changed.
    pub fn since(&self, seen: u64) -> Option<impl Iterator<Item = NodeIx> + use<'_>> {
        let skip = seen.checked_sub(self.dropped)?;
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let mut before = None;
        let changed = self.log.iter().skip(skip).copied();
        Some(changed.filter(move |ix| before.replace(*ix) != Some(*ix)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_hears_of_every_change_or_that_it_is_too_far_behind() {
        let mut changes = Changes::default();
        let since = |changes: &Changes, seen| -> Option<Vec<u32>> {
            let number = |ix| (0..3).find(|n| NodeIx::made_up(*n) == ix).unwrap();
            Some(changes.since(seen)?.map(number).collect())
        };
        assert_eq!(since(&changes, 0), Some(vec![]));
        for ix in [0, 1, 1] {
            changes.note(NodeIx::made_up(ix), 3);
        }
        assert_eq!(since(&changes, 0), Some(vec![0, 1]), "once in a row");
        let seen = changes.count();
        changes.note(NodeIx::made_up(1), 3);
        assert_eq!(since(&changes, seen), Some(vec![1]), "again");
        assert_eq!(since(&changes, 0), None, "the first was dropped");
        assert_eq!(since(&changes, 1), Some(vec![1]));
    }
}
