//! The interface to the deciding policy: the production policy, or a wrapper that a test has
//! broken.

use fiec_policy::{Action, Input, NewExecution, Now, Policy, Submitted};
use fiec_schemas::{ExecutionId, ExecutionState};

/// The policy as the world uses it.
pub trait Decide {
    /// Processes a submission. `may_hold` permits [`Submitted::Hold`].
    fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted;
    /// Processes a submission that may not be held. Its append is one of the actions.
    fn submit_now(&mut self, now: Now, new: NewExecution<'_>, out: &mut Vec<Action>) {
        if let Submitted::Append(events) = self.submit(now, new, false, out) {
            out.push(new.append(events));
        }
    }
    /// Processes one input.
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>);
    /// Binds waiting executions.
    fn act(&mut self, now: Now, out: &mut Vec<Action>);
    /// The policy that answers questions.
    fn policy(&self) -> &Policy;
    /// True while the capsule of a binding must wait for others.
    fn withholds(&self, id: ExecutionId) -> bool {
        self.policy().withholds(id)
    }
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
    fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted {
        Policy::submit(self, now, new, may_hold, out)
    }
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>) {
        Policy::step(self, now, input, out);
    }
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        Policy::act(self, now, out);
    }
    fn policy(&self) -> &Policy {
        self
    }
}
