//! The shell's part in holds: looks at ledgers, and changes of reservations.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_policy::{Action, Fate, FoundMembers, Input, Seen, SoughtGroup};
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::{ExecutionId, ExecutionState, Tenant};
use fiec_simulator::decide::Decide as _;

use super::World;

/// Open requests, and the reservations.
#[derive(Default)]
pub struct Asked {
    pub asked: Vec<Action>,
    pub tables: BTreeMap<Tenant, (u64, Reservations)>,
    /// True if the broker gives no answers.
    pub silent: bool,
}

impl World {
    /// Lets the policy act, and loses its appends.
    pub fn act_and_lose(&mut self) {
        let mut lost = Vec::new();
        self.policy.act(self.at(), &mut lost);
        let appends = lost.iter().any(|a| matches!(a, Action::Append { .. }));
        assert!(appends, "it appends nothing: {lost:?}");
    }

    /// The result of a look at a ledger.
    pub fn seen(&self, id: ExecutionId) -> Seen {
        let Some(ledger) = self.ledgers.get(&id) else {
            return Seen::Vanished;
        };
        match Fate::of(ledger.state.phase.kind()) {
            Some(fate) => Seen::Ended(fate),
            None => Seen::Lives,
        }
    }

    pub fn answer_holds(&mut self) {
        if self.holds.silent {
            return;
        }
        for action in std::mem::take(&mut self.holds.asked) {
            match action {
                Action::Lookup { execution, .. } => {
                    let seen = self.seen(execution);
                    self.step(Input::Ended { execution, seen });
                }
                Action::FindMembers { tenant, sought } => {
                    let found = sought.into_iter().map(|sought| self.members(sought));
                    let found = found.collect();
                    self.step(Input::Members { tenant, found });
                }
                Action::Reserve {
                    tenant,
                    quota,
                    change,
                } => {
                    let (seq, table) = self.holds.tables.entry(tenant.clone()).or_default();
                    let after = change.apply(table, quota.as_ref());
                    if after != *table || change.fence {
                        (*seq, *table) = (*seq + 1, after);
                    }
                    let (seq, table) = (*seq, table.clone());
                    self.step(Input::Reserved {
                        tenant: tenant.clone(),
                        table: Some((seq, Arc::new(table))),
                        answer: true,
                    });
                }
                _ => {}
            }
        }
    }

    fn members(&self, sought: SoughtGroup) -> FoundMembers {
        let is_member = |state: &ExecutionState| {
            let batch = state.batch.map(|place| place.id);
            let id = state.client_id.as_ref().map(|id| id.as_str());
            state.submitted_at <= sought.up_to && sought.group.has(id, batch)
        };
        let states = self.ledgers.values().map(|ledger| &ledger.state);
        let members = states.filter(|state| is_member(state));
        let members = members.map(|state| (state.execution, self.seen(state.execution)));
        FoundMembers {
            members: members.collect(),
            sought,
        }
    }

    pub fn quota(&mut self, quota: Option<Quota>) {
        self.step(Input::Quota {
            tenant: Self::tenant(),
            quota,
        });
    }

    /// Number of bound and started executions.
    pub fn running(&self) -> usize {
        let live = self.ledgers.values();
        live.filter(|l| l.state.phase.binding().is_some()).count()
    }

    /// True if an execution has a reservation.
    pub fn reservation_of(&self, n: u64) -> bool {
        let mut entries = self.holds.tables.values().flat_map(|(_, t)| &t.entries);
        entries.any(|entry| entry.execution == Self::id(n))
    }

    pub fn reserved(&self) -> usize {
        let tables = self.holds.tables.values();
        tables.map(|(_, t)| t.entries.len()).sum()
    }
}
