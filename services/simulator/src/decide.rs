//! Who decides: the production policy, or a wrapper around it that a test has broken.

use fiec_policy::{Action, Input, Now, Policy};
use fiec_schemas::{ExecutionId, ExecutionState};

/// A policy as the world sees it.
pub trait Decide {
    /// Takes one input.
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>);
    /// Binds what waits.
    fn act(&mut self, now: Now, out: &mut Vec<Action>);
    /// True for an execution that it knows.
    fn knows(&self, id: ExecutionId) -> bool;
    /// True while the capsule of a binding must wait for others.
    fn withholds(&self, id: ExecutionId) -> bool;
    /// What a broken broker does to a state as it stores it; an honest one nothing.
    fn store(&self, _state: &mut ExecutionState) {}
    /// What a broken worker takes without a slot; an honest one nothing.
    fn overfills(&self) -> bool {
        false
    }
    /// True for a broken worker that computes on what it has given away.
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
