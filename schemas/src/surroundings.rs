//! What a program may learn about the place where it runs, and what it may ask for. It may learn
//! its node's vector and the offers of other nodes, and ask for another grant.
//!
//! All of this may change the speed of a program or the order of its work in time, but never its
//! bits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::HardwareVector;
use crate::ids::{NodeId, Timestamp};
use crate::messages::RefusalCode;
use crate::package::Grant;

/// Most nodes in one list of offers.
pub const OFFERS_LIMIT: usize = 64;

/// A program's knowledge of the place where it runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Surroundings {
    /// Its node. Absent if it runs without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The node's last hardware vector. Absent if there is none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<HardwareVector>,
    /// Its grant now, or from its next boundary on if it was changed just now.
    #[serde(default)]
    pub grant: Grant,
    /// Offers of other nodes. Absent if they are unknown, which is not the same as none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offers: Option<Offers>,
    /// Why the offers are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// Offers of the nodes of a cluster at one moment, as a policy service knew them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Offers {
    /// When.
    pub at: Timestamp,
    /// Nodes that are viable under their own thresholds and accept work. Those with the most free
    /// slots come first, then in order of their names.
    pub nodes: Vec<Offer>,
    /// Number of further nodes that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_off: u32,
}

impl Offers {
    /// Free slots of all listed nodes.
    pub fn free_slots(&self) -> u32 {
        self.nodes
            .iter()
            .fold(0, |sum, node| sum.saturating_add(node.free_slots))
    }
}

/// Resources that one node could offer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Offer {
    /// The node.
    pub node: NodeId,
    /// Executions that it could run in addition to those that it holds.
    pub free_slots: u32,
    /// Number of all its slots.
    pub slots: u32,
    /// Logical processors of all slots together.
    pub cores: u32,
    /// Free bytes of memory under its limit or the envelope in force. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// Its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceOffer>,
}

/// A device of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceOffer {
    /// UUID of the GPU or MIG slice.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Bytes of its memory in total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Free bytes of its memory. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// True if no execution has it alone and it is viable.
    pub free: bool,
}

/// The answer to `fiec.api.offers`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OffersReply {
    /// Why there are no offers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reason for programs. Present if `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// The offers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offers: Option<Offers>,
}

/// The grant that a program asks for on its node. An absent field keeps its value. More memory
/// cannot be asked for in this way: a program reserves memory, which may move the execution.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GrantChange {
    /// Threads that may compute at once, more or fewer than now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The processors (lanes) to run on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpus: Vec<u32>,
    /// Bytes of host memory, fewer than now, so that others may be granted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

impl GrantChange {
    /// Asks for this many threads.
    pub fn threads(threads: u32) -> Self {
        Self {
            threads: Some(threads),
            ..Self::default()
        }
    }

    /// True if nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Applies the change to a grant. Fails if the change breaks a rule on every node.
    ///
    /// # Errors
    /// The field and the rule, in words.
    pub fn apply(&self, grant: &Grant) -> Result<Grant, String> {
        if self.is_empty() {
            return Err("name threads, cpus or memory_bytes".to_owned());
        }
        if self.threads == Some(0) {
            return Err("threads: must be at least 1".to_owned());
        }
        let mut after = grant.clone();
        after.threads = self.threads.or(grant.threads);
        if !self.cpus.is_empty() {
            after.cpus.clone_from(&self.cpus);
            after.cpus.sort_unstable();
            after.cpus.dedup();
        }
        match (self.memory_bytes, grant.memory_bytes) {
            (None, _) => {}
            (Some(0), _) => return Err("memory_bytes: must be above 0".to_owned()),
            (Some(asked), Some(has)) if asked > has => {
                return Err(format!(
                    "memory_bytes: {asked} are more than the {has} that it has; more is reserved, \
                     which may move it"
                ));
            }
            (Some(asked), _) => after.memory_bytes = Some(asked),
        }
        Ok(after)
    }
}

/// Answer to a request for another grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Asked {
    /// The grant is in force from the next boundary on. The program is told there (`configure`).
    Granted {
        /// The new grant.
        grant: Grant,
    },
    /// The program keeps its grant.
    Refused {
        /// The reason.
        reason: String,
    },
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_names_the_rule_that_it_breaks_and_else_keeps_the_rest() {
        let has = Grant {
            threads: Some(2),
            memory_bytes: Some(100),
            ..Grant::default()
        };
        for (change, word) in [
            (GrantChange::default(), "name threads"),
            (GrantChange::threads(0), "at least 1"),
            (
                GrantChange {
                    memory_bytes: Some(101),
                    ..GrantChange::default()
                },
                "reserved",
            ),
        ] {
            let error = change.apply(&has).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let change = GrantChange {
            cpus: vec![3, 1, 3],
            memory_bytes: Some(40),
            ..GrantChange::default()
        };
        let after = change.apply(&has).unwrap();
        assert_eq!((after.threads, after.memory_bytes), (Some(2), Some(40)));
        assert_eq!(after.cpus, [1, 3]);
    }

    #[test]
    fn what_is_not_known_is_no_empty_list() {
        let none: Surroundings = serde_json::from_str("{}").unwrap();
        assert_eq!(none.offers, None);
        let empty = Surroundings {
            offers: Some(Offers::default()),
            ..Surroundings::default()
        };
        let text = serde_json::to_string(&empty).unwrap();
        let again: Surroundings = serde_json::from_str(&text).unwrap();
        assert_eq!(again.offers.map(|o| o.free_slots()), Some(0));
    }
}
