//! The interface to the deciding policy: the production policy, or a wrapper that a test has
//! broken.

use fiec_policy::{Action, Input, Now, Policy};
use fiec_schemas::{ExecutionId, ExecutionState};

/// The policy as the world uses it.
pub trait Decide {
    /// Processes one input.
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>);
    /// Binds waiting executions.
    fn act(&mut self, now: Now, out: &mut Vec<Action>);
    /// True for a known execution.
    fn knows(&self, id: ExecutionId) -> bool;
    /// True while the capsule of a binding must wait for others.
    fn withholds(&self, id: ExecutionId) -> bool;
    /// Lets a broken broker change a state as it stores it. An honest one does nothing.
    fn store(&self, _state: &mut ExecutionState) {}
    /// True for a broken worker that starts executions without a slot.
    fn overfills(&self) -> bool {
        false
    }
    /// True for a broken worker that computes the range that it has given away.
    fn keeps_what_it_gives(&self) -> bool {
        false
    }
}

impl Decide for Policy {
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>) {
        Policy::step(self, now, input, out);
    }
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        Policy::act(self, now, out);
    }
    fn knows(&self, id: ExecutionId) -> bool {
        Policy::knows(self, id)
    }
    fn withholds(&self, id: ExecutionId) -> bool {
        Policy::withholds(self, id)
    }
}
