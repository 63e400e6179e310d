//! The interface to the deciding policy: the production policy, or a wrapper that a test has
//! broken.

use std::borrow::Cow;

use fiec_policy::{Action, Input, LedgerView, NewExecution, Now, Policy, Submitted};
use fiec_schemas::{Event, ExecutionId, ExecutionState, Submission};

/// The policy as the world uses it. A wrapper gives the policy within, and overrides what it breaks.
pub trait Decide {
    /// The policy that decides.
    fn policy(&self) -> &Policy;
    /// The same, for inputs.
    fn policy_mut(&mut self) -> &mut Policy;
    /// Sees a ledger message before the policy does.
    fn hear(&mut self, _now: Now, _view: &LedgerView<'_>) {}
    /// Alters an input before the policy has it; None keeps it back. An honest policy has all.
    fn alter_input(&mut self, input: Input) -> Option<Input> {
        Some(input)
    }
    /// Alters a submission before the policy has it.
    fn alter_submission<'a>(&self, spec: &'a Submission) -> Cow<'a, Submission> {
        Cow::Borrowed(spec)
    }
    /// Alters the events that begin a ledger.
    fn alter_first(&mut self, _events: &mut Vec<Event>) {}
    /// Alters the actions of one call before they are performed. An honest policy leaves them.
    fn alter(&mut self, _out: &mut Vec<Action>) {}
    /// Processes a submission. `may_hold` permits [`Submitted::Hold`].
    fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted {
        let spec = self.alter_submission(new.spec);
        let new = NewExecution { spec: &spec, ..new };
        let mut mine = Vec::new();
        let mut answer = self.policy_mut().submit(now, new, may_hold, &mut mine);
        if let Submitted::Append(events) = &mut answer {
            self.alter_first(events);
        }
        self.alter(&mut mine);
        out.append(&mut mine);
        answer
    }
    /// Processes a submission that may not be held. Its append is one of the actions.
    fn submit_now(&mut self, now: Now, new: NewExecution<'_>, out: &mut Vec<Action>) {
        if let Submitted::Append(events) = self.submit(now, new, false, out) {
            out.push(new.append(events));
        }
    }
    /// Follows a message of a ledger.
    fn follow(&mut self, now: Now, view: &LedgerView<'_>, reread: bool, out: &mut Vec<Action>) {
        self.hear(now, view);
        let mut mine = Vec::new();
        self.policy_mut().follow(now, view, reread, &mut mine);
        self.alter(&mut mine);
        out.append(&mut mine);
    }
    /// Processes one input.
    fn step(&mut self, now: Now, input: Input, out: &mut Vec<Action>) {
        let Some(input) = self.alter_input(input) else {
            return;
        };
        let mut mine = Vec::new();
        self.policy_mut().step(now, input, &mut mine);
        self.alter(&mut mine);
        out.append(&mut mine);
    }
    /// Binds waiting executions.
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        let mut mine = Vec::new();
        self.policy_mut().act(now, &mut mine);
        self.alter(&mut mine);
        out.append(&mut mine);
    }
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
    fn policy(&self) -> &Policy {
        self
    }
    fn policy_mut(&mut self) -> &mut Policy {
        self
    }
}
