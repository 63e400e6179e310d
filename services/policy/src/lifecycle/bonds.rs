//! What submissions say of other executions: their batch, its limit, their gang.

use std::collections::BTreeMap;

use fiec_schemas::dependency::Dependency;
use fiec_schemas::scheduling::Gang;
use fiec_schemas::{BatchId, BatchName, ExecutionId, Submission, Tenant, Timestamp};
use serde::Deserialize;

use super::Lifecycle;

/// Key by which replicas agree who places gangs.
const PLACER: &[u8] = b"gangs";

/// The fields of a submission that say something of others.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct BondSpec {
    /// Its batch, if named.
    #[serde(default)]
    pub batch: Option<BatchName>,
    /// The executions that must end first.
    #[serde(default)]
    pub after: Vec<Dependency>,
    /// The moment before which it is not placed.
    #[serde(default)]
    pub not_before: Option<Timestamp>,
    /// Most executions of its batch that run at once.
    #[serde(default)]
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    #[serde(default)]
    pub gang: Option<Gang>,
}

impl BondSpec {
    /// Reads a submission. None if it holds nothing back.
    pub fn of(spec: &Submission) -> Option<Self> {
        Self {
            batch: spec.batch.clone(),
            after: spec.after.clone(),
            not_before: spec.not_before,
            at_once: spec.at_once,
            gang: spec.gang.clone(),
        }
        .if_any()
    }

    /// Reads a submission in JSON. None if it holds nothing back.
    pub fn read(json: &str) -> Option<Self> {
        serde_json::from_str::<Self>(json).ok()?.if_any()
    }

    fn if_any(self) -> Option<Self> {
        let any = self.batch.is_some() || self.waits() || self.gang.is_some();
        any.then_some(self)
    }

    /// True if it waits for others, or for a moment.
    pub fn waits(&self) -> bool {
        !self.after.is_empty() || self.not_before.is_some()
    }
}

/// What the submission of an execution says of others.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bonds {
    /// Its batch, if named.
    pub batch: Option<BatchId>,
    /// Most executions of its batch that run at once.
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    pub gang: Option<Gang>,
}

/// Identifies a gang.
pub(crate) type GangKey = (Tenant, BatchName);

/// The bonds of live executions, for those with a batch, a gang or dependencies.
pub(super) type AllBonds = BTreeMap<ExecutionId, Box<Bonds>>;

impl Lifecycle {
    /// Notes what the submission of an execution says of others.
    pub(crate) fn note_bonds(&mut self, id: ExecutionId, bonds: Bonds) {
        self.bonds.insert(id, Box::new(bonds));
    }

    /// Forgets them with the execution.
    pub(crate) fn forget_bonds(&mut self, id: ExecutionId) {
        self.bonds.remove(&id);
    }

    /// What the submission of an execution says of others.
    pub(crate) fn bonds(&self, id: ExecutionId) -> Option<&Bonds> {
        self.bonds.get(&id).map(|bonds| &**bonds)
    }

    /// All live executions whose submissions say something of others.
    pub(crate) fn all_bonds(&self) -> impl ExactSizeIterator<Item = (&ExecutionId, &Bonds)> {
        self.bonds.iter().map(|(id, bonds)| (id, &**bonds))
    }

    /// The gang of an execution, and its number of members.
    pub(crate) fn gang_of(&self, id: ExecutionId) -> Option<(GangKey, u32)> {
        let gang = self.bonds(id)?.gang.as_ref()?;
        let tenant = self.tenant(id)?;
        Some(((tenant, gang.name.clone()), gang.size))
    }

    /// True if this replica places gangs.
    pub(crate) fn places_gangs(&self) -> bool {
        self.replicas.prefers_self(PLACER)
    }
}
