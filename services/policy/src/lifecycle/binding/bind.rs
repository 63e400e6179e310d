//! Bindings: new executions, their events, and who waits for whom to bind.

use fiec_schemas::{Cause, Event, ExecutionId, Tenant, Timestamp};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::cluster::{Execution, Presence, Stage};
use crate::lifecycle::placement::{Ask, Choice};
use crate::time::{Millis, Now};
use crate::{Action, Ticket};

/// Result of an attempt to bind an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    /// An append is in flight.
    Yes,
    /// No node can take it.
    NoRoom,
    /// Another replica is preferred; this one tries again later.
    Deferred,
    /// The execution needs no binding.
    Moot,
}

impl Lifecycle {
    /// Inserts a new execution: pending, with its first append in flight.
    pub(crate) fn insert_new(
        &mut self,
        id: ExecutionId,
        tenant: &Tenant,
        profile: ProfileIx,
        submitted_at: Timestamp,
    ) {
        let since = self.now.mono;
        let mut new = Execution::new(tenant.clone(), profile, submitted_at, since);
        new.begin_append();
        self.cluster.insert(id, new);
    }

    /// Binds an execution by an append of this service.
    pub(crate) fn append_bound(
        &mut self,
        id: ExecutionId,
        choice: Choice,
        cause: Cause,
        ticket: Option<Ticket>,
    ) {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let (tenant, expected, node) = (e.tenant.clone(), e.seq, choice.node);
        let claim = Claim::of(self.cluster.profiles.get(e.profile), choice.device);
        let Some((event, instance)) = self.bound(e.epoch + 1, choice, cause) else {
            return;
        };
        self.begin_append(id);
        self.clear_order(id);
        self.set_stage(id, Stage::Bound(node, instance), claim, now.mono);
        self.set_due(id, Millis(0));
        self.note_choice(id);
        self.out.push(Action::Append {
            execution: id,
            tenant,
            expected,
            events: vec![event],
            ticket,
        });
    }

    pub(crate) fn bound(
        &self,
        epoch: u64,
        choice: Choice,
        cause: Cause,
    ) -> Option<(Event, fiec_schemas::InstanceId)> {
        let node = self.cluster.node(choice.node);
        let instance = node.descriptor.as_ref()?.instance;
        let event = Event::Bound {
            epoch,
            node: node.id.clone(),
            instance,
            substrate: node.devices.id_of(choice.device).to_owned(),
            cause,
            decision: Some(choice.decision),
        };
        Some((event, instance))
    }

    /// Time at which the first avoided node may be tried again; 0 if none is avoided.
    pub(crate) fn next_chance(&self, id: ExecutionId) -> Millis {
        let now = self.now;
        let avoided = self
            .cluster
            .execution(id)
            .map_or(&[][..], Execution::avoided);
        let later = avoided.iter().map(|a| a.until).filter(|at| *at > now.mono);
        later.min().unwrap_or(Millis(0))
    }

    /// The reason why its node counts as lost for it, if it does.
    pub(crate) fn loss(&self, now: Now, id: ExecutionId) -> Option<Cause> {
        let e = self.cluster.execution(id)?;
        let (Stage::Bound(ix, instance) | Stage::Started(ix, instance)) = e.stage else {
            return None;
        };
        let node = self.cluster.node(ix);
        if e.is_orphan() {
            let reason = format!("{} does not hold it", node.id);
            return Some(Cause::Orphaned { reason });
        }
        let silent_ms = now.mono.since(node.heard);
        if matches!(node.presence, Presence::Lost { .. }) {
            return Some(Cause::Lost { silent_ms });
        }
        // Another instance of the agent answers, so the one that held the execution is gone. A
        // binding that arrived later may name an instance that is not known here yet.
        let (confirmed, since) = node.confirmed?;
        let current = node
            .descriptor
            .as_ref()
            .is_some_and(|d| d.instance == confirmed);
        (current && instance != confirmed && e.arrived < since).then_some(Cause::Lost { silent_ms })
    }

    /// True while this replica leaves an execution to the preferred one.
    pub(crate) fn defers(&mut self, id: ExecutionId, grace_ms: u64) -> bool {
        let now = self.now;
        if self.is_mine(id) {
            return false;
        }
        let Some(e) = self.cluster.execution_mut(id) else {
            return false;
        };
        let since = *e.extra().deferred.get_or_insert(now.mono);
        if now.mono.since(since) >= grace_ms {
            return false;
        }
        self.cluster.set_due(id, since.plus(grace_ms));
        true
    }

    /// Time until the first review of a binding, in ms.
    pub(crate) fn balance_check(&self) -> u64 {
        self.config.balance_ms.min(self.config.take_ms)
    }
}

impl Lifecycle {
    /// Binds all of these or none. Returns the members without a place.
    pub(crate) fn bind_together(&mut self, members: &[ExecutionId]) -> Vec<ExecutionId> {
        let now = self.now;
        for id in members {
            if self.hold_if_deadly(*id, &Cause::Initial) {
                return vec![*id];
            }
        }
        let (before, mut placed, mut lacking) = (self.out.len(), Vec::new(), Vec::new());
        for id in members {
            let Some(e) = self.cluster.execution(*id) else {
                lacking.push(*id);
                continue;
            };
            let cause = match e.epoch {
                0 => Cause::Initial,
                _ => Cause::NotTaken {
                    reason: "its gang began anew".to_owned(),
                    fault: None,
                },
            };
            let known = e.extra.as_ref().and_then(|x| x.cause.clone());
            let (mark, cause) = (self.out.len(), known.unwrap_or(cause));
            let kept = self.kept_from(*id);
            let apart = self.apart_from(now, *id);
            let ask = Ask {
                apart,
                kept,
                // A member in a node's queue would start later than the others.
                free_slot: true,
                ..Ask::of(e)
            };
            let choice = self.choose(&ask);
            if let Some(choice) = choice {
                self.append_bound(*id, choice, cause, None);
            }
            if self.out.len() == mark {
                // The other members are tried as well: preemption needs to know exactly which ones
                // lack a place.
                lacking.push(*id);
            } else {
                placed.push(*id);
            }
        }
        if lacking.is_empty() {
            return lacking;
        }
        self.out.truncate(before);
        for id in placed {
            self.take_back(id);
        }
        lacking
    }
}
