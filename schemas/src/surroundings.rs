//! What a program may know of where it runs, and what it may ask of that: its node's vector, what
//! other places could give, and another grant.
//!
//! All of it may change the speed of a program, or how it lays out its work in time; never its
//! bits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::HardwareVector;
use crate::ids::{NodeId, Timestamp};
use crate::messages::RefusalCode;
use crate::package::Grant;

/// Most nodes that are offered at once.
pub const OFFERS_LIMIT: usize = 64;

/// What a program is told of where it runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Surroundings {
    /// Its node; none where it runs without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// What that node told last of its hardware; none where it has not yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<HardwareVector>,
    /// What it may use now, or from its next boundary on where that was changed just now.
    #[serde(default)]
    pub grant: Grant,
    /// What other places could give; none where that is not known, which is not nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offers: Option<Offers>,
    /// Why it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// What the nodes of a cluster could give at a moment, as a policy service knew it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Offers {
    /// When.
    pub at: Timestamp,
    /// The nodes that are viable under their own thresholds and take work: those with the most
    /// free slots first, then in the order of their names.
    pub nodes: Vec<Offer>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_off: u32,
}

impl Offers {
    /// Free slots of all nodes that are listed.
    pub fn free_slots(&self) -> u32 {
        self.nodes
            .iter()
            .fold(0, |sum, node| sum.saturating_add(node.free_slots))
    }
}

/// What one node could give.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Offer {
    /// Which.
    pub node: NodeId,
    /// Executions that it would run at once beside those that it holds.
    pub free_slots: u32,
    /// Its slots in all.
    pub slots: u32,
    /// Logical processors, of all slots together.
    pub cores: u32,
    /// Bytes of memory that are free under its limit or the envelope in force; none: not known.
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
    /// Bytes of its memory in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes of it that are free; none: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory_bytes: Option<u64>,
    /// Nobody has it to himself, and it is viable.
    pub free: bool,
}

/// The answer to `fiec.api.offers`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OffersReply {
    /// Why there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why, for programs; present where `error` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalCode>,
    /// They.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offers: Option<Offers>,
}

/// The grant that a program asks for within its node. What is absent stays as it is. More memory
/// is no business of this: that is reserved, and may move the execution.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GrantChange {
    /// Threads that may compute at once: more than it has, or fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The processors (lanes) to run on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpus: Vec<u32>,
    /// Bytes of the host's memory: fewer than it has, so that others may be granted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

impl GrantChange {
    /// So many threads.
    pub fn threads(threads: u32) -> Self {
        Self {
            threads: Some(threads),
            ..Self::default()
        }
    }

    /// True where nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A grant with this change, or the rule that speaks against it whatever the node has.
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

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Asked {
    /// This grant holds from the next boundary on; the program is told of it (`configure`) there.
    Granted {
        /// What may be used then.
        grant: Grant,
    },
    /// It keeps what it has.
    Refused {
        /// Why.
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
