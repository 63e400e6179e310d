//! Fields of a submission on when it runs, adjustments of a live execution, and what a parked
//! execution keeps.

use std::num::NonZeroU32;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dependency;
use crate::hardware::Thresholds;
use crate::ids::{BatchName, NodeId, Timestamp};
use crate::limits::NODES_LIMIT;
use crate::requirements::Requirements;
use crate::submission::{FieldError, Submission};

/// The highest priority; the lowest is its negative.
pub const PRIORITY_LIMIT: i16 = 100;
/// Most members of a gang.
pub const GANG_LIMIT: u32 = 1_024;

/// Deadline of an execution: either `within_s` or `at`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Deadline {
    /// Seconds after the submission.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_s: Option<u32>,
    /// A moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// What happens if it is not done by then.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_miss: OnMiss,
}

/// Limit of an execution's computing time. At the limit the execution fails or is held, as
/// `on_failure` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Seconds that it may compute, on all nodes together. Waiting, pauses and lost work do not
    /// count. A retry begins the count again.
    pub computed_s: NonZeroU32,
}

impl Deadline {
    /// Words for people.
    pub fn in_words(&self) -> String {
        let due = match (self.at, self.within_s) {
            (Some(at), _) => format!("due at {at}"),
            (None, Some(seconds)) => format!("due {seconds} s after its submission"),
            (None, None) => "no deadline".to_owned(),
        };
        match self.on_miss {
            OnMiss::GoOn => due,
            OnMiss::Fail => format!("{due}, else it fails"),
        }
    }
}

/// What happens to an execution that misses its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnMiss {
    /// It continues, and its history says that it was late.
    #[default]
    GoOn,
    /// It fails.
    Fail,
}

impl Deadline {
    /// The moment of the deadline, for an execution submitted at `submitted_at`.
    pub fn moment(&self, submitted_at: Timestamp) -> Timestamp {
        match (self.at, self.within_s) {
            (Some(at), _) => at,
            (None, within) => {
                let us = i64::from(within.unwrap_or(u32::MAX)) * 1_000_000;
                Timestamp::from_micros(submitted_at.micros().saturating_add(us))
            }
        }
    }

    fn check(&self) -> Result<(), FieldError> {
        if self.within_s.is_some() == self.at.is_some() {
            let rule = "one of within_s and at must be given";
            return Err(FieldError::new("deadline", rule));
        }
        if self.within_s == Some(0) {
            return Err(FieldError::new("deadline.within_s", "must be at least 1"));
        }
        Ok(())
    }
}

/// A set of executions that start together or not at all. All `size` members give the same name and
/// size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gang {
    /// Its name, within the tenant.
    pub name: BatchName,
    /// Number of members.
    pub size: u32,
}

/// What happens to a running execution if its place is not viable and no other place is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WhenUnviable {
    /// The cheapest of the other three, by the expected wait, the size of σ and the bandwidth of
    /// the links.
    #[default]
    Cheapest,
    /// It continues where it is until it can migrate.
    Migrate,
    /// It parks at a boundary, keeps its place, and waits there.
    Wait,
    /// It commits at a boundary, frees its place, and waits for another one.
    Suspend,
}

/// Whether a running execution may move so that devices are used better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reallocation {
    /// To a smaller sufficient device, if others want the large one.
    #[serde(default = "yes")]
    pub downgrade: bool,
    /// To a larger device that is idle.
    #[serde(default = "yes")]
    pub upgrade: bool,
}

impl Default for Reallocation {
    fn default() -> Self {
        Self {
            downgrade: true,
            upgrade: true,
        }
    }
}

fn yes() -> bool {
    true
}

/// What a parked execution keeps. Its σ is committed in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Its process, and its content on the device.
    Device,
    /// Its process. Its content on the device is in the host's memory.
    Host,
}

impl Keep {
    /// The name in SQL and for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Keep::Device => "device",
            Keep::Host => "host",
        }
    }
}

/// An execution that is parked at its last committed boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Parked {
    /// What the execution keeps.
    pub keep: Keep,
    /// When it was parked.
    pub at: Timestamp,
}

/// Rule by which one execution preempts another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// The preempting execution has a higher priority.
    Priority,
    /// Its time slice is over, and the preempting execution has attained less service.
    TimeSlice,
    /// Its tenant has more than its share, and the other tenant has less.
    FairShare,
    /// The preempting execution would miss its deadline otherwise.
    Deadline,
    /// Its tenant is over its quota.
    Quota,
}

impl Rule {
    /// The name in SQL and for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::Priority => "priority",
            Rule::TimeSlice => "time_slice",
            Rule::FairShare => "fair_share",
            Rule::Deadline => "deadline",
            Rule::Quota => "quota",
        }
    }
}

/// Changes of a live execution, by an operator, or by its program, which may ask beyond its grant.
/// An absent field keeps its value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Adjustment {
    /// Its priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i16>,
    /// Its deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// Thresholds of the named signals.
    #[serde(default, skip_serializing_if = "Thresholds::is_empty")]
    pub viability: Thresholds,
    /// The only nodes on which it may run. An empty list: any node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Vec<NodeId>>,
    /// Nodes on which it may not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclude: Option<Vec<NodeId>>,
    /// Bytes of host memory that it needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes of device memory that it needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
}

impl Adjustment {
    /// True if nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The new settings in words, for people.
    pub fn in_words(&self) -> String {
        let names = |nodes: &[NodeId]| {
            let names: Vec<_> = nodes.iter().map(|node| node.as_str()).collect();
            names.join(", ")
        };
        let mut words = Vec::new();
        words.extend(self.priority.map(|priority| format!("priority {priority}")));
        words.extend(self.deadline.as_ref().map(Deadline::in_words));
        for (signal, t) in &self.viability {
            let (high, low, dwell) = (t.high, t.low, t.dwell_ms);
            words.push(format!("threshold {signal}={high},{low},{dwell}"));
        }
        let named = |nodes: &Option<Vec<NodeId>>| nodes.as_deref().map(|n| !n.is_empty());
        match (named(&self.nodes), named(&self.exclude)) {
            (Some(false), Some(false)) => words.push("may run on any node".to_owned()),
            (Some(false), _) => words.push("pinned to no node".to_owned()),
            (None, Some(false)) => words.push("excluded from no node".to_owned()),
            _ => {}
        }
        let nodes = self.nodes.as_deref().filter(|nodes| !nodes.is_empty());
        words.extend(nodes.map(|nodes| format!("pinned to {}", names(nodes))));
        let exclude = self.exclude.as_deref().filter(|nodes| !nodes.is_empty());
        words.extend(exclude.map(|nodes| format!("not on {}", names(nodes))));
        let memory = self.memory_bytes;
        words.extend(memory.map(|n| format!("{n} bytes of memory")));
        let memory = self.device_memory_bytes;
        words.extend(memory.map(|n| format!("{n} bytes of device memory")));
        words.join(", ")
    }

    /// Adds a later change to this one.
    pub fn merge(&mut self, later: &Self) {
        fn take<T: Clone>(old: &mut Option<T>, new: &Option<T>) {
            if new.is_some() {
                old.clone_from(new);
            }
        }
        take(&mut self.priority, &later.priority);
        take(&mut self.deadline, &later.deadline);
        self.viability.extend(&later.viability);
        take(&mut self.nodes, &later.nodes);
        take(&mut self.exclude, &later.exclude);
        take(&mut self.memory_bytes, &later.memory_bytes);
        take(&mut self.device_memory_bytes, &later.device_memory_bytes);
    }

    /// Applies the change to a submission.
    pub fn apply(&self, spec: &mut Submission) {
        self.apply_to(
            &mut spec.priority,
            &mut spec.deadline,
            &mut spec.viability,
            &mut spec.requires,
        );
    }

    /// Applies the change to the parts of a submission that it may affect.
    pub fn apply_to(
        &self,
        priority: &mut i16,
        deadline: &mut Option<Deadline>,
        viability: &mut Thresholds,
        requires: &mut Requirements,
    ) {
        *priority = self.priority.unwrap_or(*priority);
        *deadline = self.deadline.or(*deadline);
        viability.extend(&self.viability);
        if let Some(nodes) = &self.nodes {
            requires.nodes.clone_from(nodes);
        }
        if let Some(exclude) = &self.exclude {
            requires.exclude.clone_from(exclude);
        }
        requires.memory_bytes = self.memory_bytes.or(requires.memory_bytes);
        if let Some(device) = &mut requires.device {
            let asked = self.device_memory_bytes;
            device.memory_bytes = asked.or(device.memory_bytes);
            if device.share_bytes.is_some() {
                device.share_bytes = asked.or(device.share_bytes);
            }
        }
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        if self.is_empty() {
            return Err(FieldError::new("change", "must change something"));
        }
        self.priority.map_or(Ok(()), check_priority)?;
        self.deadline.map_or(Ok(()), |deadline| deadline.check())?;
        for (signal, threshold) in &self.viability {
            threshold.check().map_err(|(field, rule)| {
                FieldError::new(format!("viability.{signal}.{field}"), rule)
            })?;
        }
        for (field, list) in [("nodes", &self.nodes), ("exclude", &self.exclude)] {
            if list.as_ref().is_some_and(|list| list.len() > NODES_LIMIT) {
                let rule = format!("at most {NODES_LIMIT} are allowed");
                return Err(FieldError::new(field, rule));
            }
        }
        if let (Some(nodes), Some(exclude)) = (&self.nodes, &self.exclude)
            && let Some(both) = nodes.iter().find(|node| exclude.contains(node))
        {
            let rule = format!("must not name {both}, which nodes names");
            return Err(FieldError::new("exclude", rule));
        }
        Ok(())
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn check_priority(priority: i16) -> Result<(), FieldError> {
    let range = -PRIORITY_LIMIT..=PRIORITY_LIMIT;
    if range.contains(&priority) {
        return Ok(());
    }
    let rule = format!("must be from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}, but is {priority}");
    Err(FieldError::new("priority", rule))
}

/// Checks the fields of a submission that this module defines.
pub(crate) fn check(spec: &Submission) -> Result<(), FieldError> {
    check_priority(spec.priority)?;
    spec.deadline.map_or(Ok(()), |deadline| deadline.check())?;
    if spec.expected_s == Some(0) {
        return Err(FieldError::new("expected_s", "must be at least 1"));
    }
    if spec.limit.is_some() && spec.spread.is_some() {
        let rule = "an execution with `spread` cannot have one: its parts compute beside it";
        return Err(FieldError::new("limit", rule));
    }
    dependency::check(spec)?;
    if spec.at_once == Some(0) {
        return Err(FieldError::new("at_once", "must be at least 1"));
    }
    if spec.at_once.is_some() && spec.batch.is_none() {
        let rule = "limits the running executions of a batch: name the batch in `batch`";
        return Err(FieldError::new("at_once", rule));
    }
    if let Some(gang) = &spec.gang
        && !(2..=GANG_LIMIT).contains(&gang.size)
    {
        let rule = format!("must be from 2 to {GANG_LIMIT}, but is {}", gang.size);
        return Err(FieldError::new("gang.size", rule));
    }
    let array = spec.array.as_ref();
    array.map_or(Ok(()), |array| array.check(spec.id.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Submission, FieldError> {
        Submission::parse(line.as_bytes())
    }

    #[test]
    fn each_bad_field_is_named_with_its_rule() {
        for (fields, field, word) in [
            (r#""priority":101"#, "priority", "-100 to 100"),
            (r#""deadline":{}"#, "deadline", "one of"),
            (r#""deadline":{"within_s":0}"#, "deadline.within_s", "1"),
            (r#""at_once":3"#, "at_once", "batch"),
            (r#""gang":{"name":"g","size":1}"#, "gang.size", "2 to 1024"),
            (r#""array":{"count":0}"#, "array.count", "1 to 100000"),
            (r#""expected_s":0"#, "expected_s", "at least 1"),
            (r#""limit":{"computed_s":0}"#, "limit.computed_s", "above 0"),
            (
                r#""limit":{"computed_s":1},"spread":{"up_to":2}"#,
                "limit",
                "beside",
            ),
        ] {
            let line = format!(r#"{{"program":"synthetic@1",{fields}}}"#);
            let error = parse(&line).unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.reason.contains(word), "{error}");
        }
    }

    #[test]
    fn a_later_change_wins_and_leaves_the_rest() {
        let first: Adjustment = serde_json::from_str(
            r#"{"priority":5,"nodes":["n1"],"viability":{"memory":{"high":0.9,"low":0.8,"dwell_ms":5}}}"#,
        )
        .unwrap();
        let second: Adjustment = serde_json::from_str(r#"{"nodes":[],"memory_bytes":7}"#).unwrap();
        let mut both = first.clone();
        both.merge(&second);
        let mut spec = parse(r#"{"program":"synthetic@1","requires":{"nodes":["n0"]}}"#).unwrap();
        both.apply(&mut spec);
        assert_eq!(spec.priority, 5);
        assert!(spec.requires.nodes.is_empty());
        assert_eq!(spec.requires.memory_bytes, Some(7));
        assert_eq!(spec.viability, first.viability);
    }

    #[test]
    fn changes_one_after_the_other_come_to_the_same_as_together() {
        let line =
            r#"{"program":"synthetic@1","requires":{"memory_bytes":9,"device":{"share_bytes":5}}}"#;
        let changes: Vec<Adjustment> = [
            r#"{"memory_bytes":100,"device_memory_bytes":70}"#,
            r#"{"memory_bytes":8,"priority":1}"#,
            r#"{"device_memory_bytes":6}"#,
        ]
        .map(|text| serde_json::from_str(text).unwrap())
        .into();
        let (mut stepwise, mut together) = (parse(line).unwrap(), parse(line).unwrap());
        let mut all = Adjustment::default();
        for change in &changes {
            change.apply(&mut stepwise);
            all.merge(change);
        }
        all.apply(&mut together);
        assert_eq!(stepwise, together);
        // Memory that was asked for by mistake can be given back.
        assert_eq!(stepwise.requires.memory_bytes, Some(8));
        assert_eq!(stepwise.requires.device.unwrap().share_bytes, Some(6));
    }
}
