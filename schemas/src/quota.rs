//! Quotas of tenants, and their reservations. Reservations concern several executions, so they are
//! apart from the ledgers. One message on `fiec.quota.<tenant>` holds all reservations of a tenant.
//! It is replaced by compare-and-set on the subject's last sequence.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{BatchId, BatchName, ExecutionId, InstanceId, Sequence, Timestamp};
use crate::submission::FieldError;

/// The largest weight of a tenant.
pub const WEIGHT_LIMIT: u32 = 1_000;
/// Most reservations of a tenant, so that they fit into one message of the broker.
pub const RESERVATIONS_LIMIT: usize = 4_000;

/// A tenant's quota, in the KV bucket `FIEC_QUOTA` under the tenant's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quota {
    /// Version of this record: 1.
    pub v: u8,
    /// Most executions that are bound or running at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Most of them that use a device, or a share of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// Most bytes of host memory that they ask for together. Of `requires.memory_bytes` and
    /// `requires.free_memory_bytes` the larger counts. Without both, the node's share of a slot
    /// counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Most executions that wait: live ones without a node, that is pending, paused, held after a
    /// failure, or about to be verified. Each takes memory in every policy service, so a line
    /// beyond the limit is refused. Default: `fiec policy --waiting`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Its share relative to other tenants, from 1 to 1000. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Who set it.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

impl Quota {
    /// True if it limits what the tenant runs. `waiting` and `weight` do not.
    pub fn limits(&self) -> bool {
        self.running.is_some() || self.devices.is_some() || self.memory_bytes.is_some()
    }

    /// Its share relative to other tenants.
    pub fn weight(&self) -> u32 {
        self.weight.unwrap_or(1).max(1)
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        match self.weight {
            Some(weight) if !(1..=WEIGHT_LIMIT).contains(&weight) => Err(FieldError::new(
                "weight",
                format!("must be from 1 to {WEIGHT_LIMIT}, but is {weight}"),
            )),
            _ => Ok(()),
        }
    }

    /// Words for people.
    pub fn in_words(&self) -> String {
        let mut words = Vec::new();
        words.extend(self.running.map(|n| format!("{n} running")));
        words.extend(self.devices.map(|n| format!("{n} on devices")));
        words.extend(self.memory_bytes.map(|n| format!("{n} bytes of memory")));
        words.extend(self.waiting.map(|n| format!("{n} waiting")));
        words.extend(self.weight.map(|n| format!("weight {n}")));
        if words.is_empty() {
            return "no limits".to_owned();
        }
        words.join(", ")
    }
}

/// Reservation of one execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reservation {
    /// The execution.
    pub execution: ExecutionId,
    /// The policy service that may bind it while it is pending.
    pub by: InstanceId,
    /// The last message of its ledger when `by` took the reservation over from a lost policy
    /// service. An append of that service may still be in flight, so the reservation is kept until
    /// the ledger has moved on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firm: Option<Sequence>,
    /// Devices that it holds.
    #[serde(default, skip_serializing_if = "none32")]
    pub devices: u32,
    /// Bytes of a host's memory that it asks for.
    #[serde(default, skip_serializing_if = "none64")]
    pub memory_bytes: u64,
    /// Its batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// The `at_once` of its batch, as far as it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_once: Option<u32>,
    /// The gang with which it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<BatchName>,
}

fn none32(n: &u32) -> bool {
    *n == 0
}
fn none64(n: &u64) -> bool {
    *n == 0
}

/// All reservations of a tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reservations {
    /// Version of this message: 1.
    pub v: u8,
    /// Reservations, ordered by execution id.
    pub entries: Vec<Reservation>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_table_fits_into_a_message_of_the_broker() {
        let entry = |n: usize| Reservation {
            execution: ExecutionId(uuid::Uuid::from_u128(n as u128)),
            by: InstanceId(uuid::Uuid::from_u128(u128::MAX)),
            firm: None,
            devices: 8,
            memory_bytes: u64::MAX,
            batch: Some(BatchId(uuid::Uuid::from_u128(1))),
            at_once: None,
            gang: None,
        };
        let table = Reservations {
            v: 1,
            entries: (0..RESERVATIONS_LIMIT).map(entry).collect(),
        };
        assert!(serde_json::to_vec(&table).unwrap().len() < 1 << 20);
    }
}
