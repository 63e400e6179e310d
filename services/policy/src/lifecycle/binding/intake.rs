//! Takes submissions in.

use fiec_schemas::{Cause, Event};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::bonds::BondSpec;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::gate::Gate;
use crate::lifecycle::placement::Ask;
use crate::submission::{NewExecution, Submitted};

impl Lifecycle {
    /// Takes in a submission whose execution is not known yet.
    pub(crate) fn take_in(
        &mut self,
        gate: &mut impl Gate,
        new: NewExecution<'_>,
        may_hold: bool,
    ) -> Submitted {
        let now = self.now;
        let NewExecution {
            execution: id,
            tenant,
            spec,
            submitted_at,
        } = new;
        let profile = self.acquire_spec(spec);
        // An execution that waits for others, or needs a reservation, is bound in a later step.
        let hold = BondSpec::of(spec);
        if gate.begins_held(tenant, hold.as_ref()) {
            self.insert_new(id, tenant, profile, submitted_at);
            gate.took_in(self, id, tenant, hold, false);
            return Submitted::Append(vec![Event::Submitted]);
        }
        let kept = self.kept_from_new(id, tenant, profile, submitted_at);
        let ask = Ask {
            kept,
            ..Ask::new(profile)
        };
        let choice = self.choose(&ask);
        // A held submission is invisible. Executions for devices are appended at once, so that
        // preemption can see them.
        let profile_of = self.cluster.profiles.get(profile);
        let on_host = profile_of.is_some_and(|p| p.requires.device.is_none());
        if choice.is_none() && may_hold && on_host && self.is_only_full(profile) {
            self.release(profile);
            return Submitted::Hold;
        }
        // If the last round did not try all waiting executions, the rest of the queue goes first.
        let choice = choice.filter(|_| !self.cluster.changed.newcomers || self.waiting.is_empty());
        let mut events = vec![Event::Submitted];
        let (mut stage, mut claim) = (Stage::Pending, Claim::Host);
        if let Some(choice) = choice {
            let node = choice.node;
            claim = Claim::of(self.cluster.profiles.get(profile), choice.device);
            if let Some((event, at)) = self.bound(1, choice, Cause::Initial) {
                events.push(event);
                stage = Stage::Bound(node, at);
            }
        }
        self.insert_new(id, tenant, profile, submitted_at);
        gate.took_in(self, id, tenant, hold, false);
        if let Stage::Bound(..) = stage {
            self.set_stage(id, stage, claim, now.mono);
        }
        Submitted::Append(events)
    }
}
