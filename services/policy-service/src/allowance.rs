//! Limit on the waiting executions of a tenant: live ones without a node. Each stays in the memory
//! of every policy service, however small its line is.
//!
//! The policy counts them, appends in flight included. Lines of a message that was checked as a
//! whole are promised before they reach the policy ([`Core::promised`](crate::core::Core)), so that
//! an array or an atomic message is not cut by lines that come meanwhile. Other policy services do
//! not see appends in flight and promises, so several can exceed the limit by these.

use std::collections::BTreeSet;

use fiec_schemas::{FieldError, Tenant};

use crate::reading::Verdict;

/// The limit on a tenant's waiting executions, and their number at a moment.
#[derive(Debug, Clone)]
pub struct Allowance {
    /// The tenant.
    pub tenant: Tenant,
    /// Most waiting executions.
    pub limit: u32,
    /// True if the tenant's quota sets the limit.
    pub is_quota: bool,
    /// Waiting and promised executions.
    pub waiting: usize,
    /// Lines of the message that were taken in before. They continue in any case.
    pub begun: BTreeSet<u32>,
}

impl Allowance {
    /// Number of executions that may be added.
    pub fn left(&self) -> usize {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        limit.saturating_sub(self.waiting)
    }

    /// Refuses the lines that no longer fit, in order. Returns the executions that the others add.
    pub fn refuse(&self, lines: &[(u32, usize)], bad: &mut Verdict) -> usize {
        let mut admitted = 0;
        for (line, count) in lines {
            if bad.contains_key(line) || self.begun.contains(line) {
                continue;
            }
            if *count <= self.left() - admitted {
                admitted += count;
            } else {
                bad.insert(*line, self.refusal(admitted, *count));
            }
        }
        admitted
    }

    /// Why a line that adds `count` executions is refused, after `before` others.
    pub fn refusal(&self, before: usize, count: usize) -> FieldError {
        let Self { tenant, limit, .. } = self;
        let waiting = self.waiting + before;
        let rule = match self.is_quota {
            true => "its quota allows",
            false => "a tenant without a quota for them may have",
        };
        let reason = format!(
            "tenant {tenant} has {waiting} waiting executions, this line adds {count}, and {rule} \
             {limit}: submit it again when fewer wait, cancel some, or ask for more \
             (`fiec quota set {tenant} --waiting N`)"
        );
        FieldError::new("", reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_refused_as_a_whole_and_those_that_began_continue() {
        let allowance = Allowance {
            tenant: Tenant::new("lab").unwrap(),
            limit: 10,
            is_quota: true,
            waiting: 4,
            begun: BTreeSet::from([5]),
        };
        let mut bad = Verdict::from([(1, FieldError::new("program", "no"))]);
        let lines = [(1, 100), (2, 4), (3, 3), (4, 2), (5, 100), (6, 1)];
        assert_eq!(allowance.refuse(&lines, &mut bad), 6);
        assert_eq!(bad.keys().copied().collect::<Vec<_>>(), [1, 3, 6]);
        assert_eq!(
            bad[&3].reason,
            "tenant lab has 8 waiting executions, this line adds 3, and its quota allows 10: submit \
             it again when fewer wait, cancel some, or ask for more (`fiec quota set lab --waiting N`)"
        );
        let full = Allowance {
            waiting: 11,
            ..allowance
        };
        assert_eq!(full.left(), 0, "two services may have exceeded it");
    }
}
