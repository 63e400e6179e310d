//! Messages to policy services about nodes that join, and about operators' flags.

use super::*;
use fiec_policy::Judged;
use fiec_schemas::trust::{Proof, SignedProof};

impl<D: Decide> World<'_, D> {
    pub(super) fn joined(&mut self, p: u8, node: u32) -> Result<(), Wrong> {
        if self.waits(p, What::Joined(p, node)).is_none() {
            return Ok(());
        }
        self.tell_joined(p as usize, node as usize);
        self.perform(p as usize)
    }

    pub(super) fn tell_joined(&mut self, p: usize, node: usize) {
        let descriptor = Arc::clone(&self.nodes[node].descriptor);
        self.tell(
            p,
            Input::Descriptor {
                descriptor: Box::new((*descriptor).clone()),
            },
        );
        let expires = self.stamp(self.end() + 1_000_000_000);
        let proof = Proof::passing(&descriptor, 1, self.wall(), expires);
        let signed = SignedProof {
            v: 1,
            statement: String::new(),
            key: String::new(),
            sig: String::new(),
        };
        self.tell(
            p,
            Input::Proof {
                node: descriptor.node.clone(),
                signed: Box::new(signed),
                judged: Judged::Counts(proof),
            },
        );
    }

    pub(super) fn flagged(&mut self, p: u8, node: u32) -> Result<(), Wrong> {
        if self.waits(p, What::Flags(p, node)).is_none() {
            return Ok(());
        }
        self.tell_flags(p as usize, node as usize);
        self.perform(p as usize)
    }

    pub(super) fn tell_flags(&mut self, p: usize, node: usize) {
        let n = &self.nodes[node];
        let name = n.descriptor.node.clone();
        let flags = NodeFlags {
            cordoned: n.cordoned || n.draining,
            draining: n.draining,
            who: "sim".to_owned(),
            at: self.wall(),
            drain_by: n.leave_by.filter(|_| n.draining).map(|at| self.stamp(at)),
            revoked_at: n.leave_by.filter(|_| n.revoked).map(|at| self.stamp(at)),
            revoked: n.revoked.then_some(n.descriptor.instance),
        };
        self.tell(
            p,
            Input::Flags {
                node: name.clone(),
                flags,
            },
        );
    }
}
