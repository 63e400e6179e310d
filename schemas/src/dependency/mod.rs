//! What a submission waits for: single executions, or groups of them.

pub mod graph;

use std::cmp::Ordering;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{BatchId, BatchName, ClientId, ExecutionId, Tenant};
use crate::submission::{FieldError, Submission};

/// Most entries of `after` of one submission.
pub const AFTER_LIMIT: usize = 10_000;
/// Most groups in `after` of one submission, and of all submissions of a message.
pub const GROUPS_LIMIT: usize = 100;

/// The share of a group that must complete: more than 0, and at most 1.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Share(f64);

impl Share {
    /// True if `part` of `total` is enough.
    pub fn is_met(self, part: usize, total: usize) -> bool {
        // A product such as 0.7 × 10 may be a little above the whole number that is meant.
        part as f64 + 1e-9 >= self.0 * total as f64
    }
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        self.0.total_cmp(&other.0) == Ordering::Equal
    }
}

impl Eq for Share {}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How the others must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AfterOutcome {
    /// Completed. If one fails or is cancelled, this execution fails.
    #[default]
    Ok,
    /// Ended in any way.
    Any,
    /// For a group: all have ended, and at least this share has completed. If that can no longer
    /// be, this execution fails.
    AtLeast(Share),
}

/// Executions of the same tenant that must have ended before this one is placed: one of `id`,
/// `batch` and `array`.
///
/// A batch, an array and an `id` with `*` at its end are groups. A group has all members that were
/// submitted before this execution, or in the same message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dependency {
    /// The execution's UUID, or its client's id. With `*` at its end: all executions whose client's
    /// ids begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The executions of the batch with this name or UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<String>,
    /// The elements of the array with this client's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<String>,
    /// How they must have ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on: AfterOutcome,
}

fn is_default(on: &AfterOutcome) -> bool {
    *on == AfterOutcome::default()
}

/// A group of executions of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The members of a batch.
    Batch(BatchId),
    /// The elements of an array.
    Array(ClientId),
    /// The executions whose client's ids begin so.
    Prefix(ClientId),
}

impl Group {
    /// True if an execution belongs to the group.
    pub fn has(&self, id: Option<&str>, batch: Option<BatchId>) -> bool {
        match self {
            Self::Batch(own) => batch == Some(*own),
            Self::Array(array) => id.is_some_and(|id| {
                let rest = id.strip_prefix(array.as_str());
                let index = rest.and_then(|rest| rest.strip_prefix('-'));
                index.is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit()))
            }),
            Self::Prefix(prefix) => id.is_some_and(|id| id.starts_with(prefix.as_str())),
        }
    }
}

/// What a dependency names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// One execution.
    One(ExecutionId),
    /// A group.
    All(Group),
}

impl Dependency {
    /// What `id` names must have ended so.
    pub fn new(id: impl Into<String>, on: AfterOutcome) -> Self {
        Self {
            id: Some(id.into()),
            on,
            ..Self::default()
        }
    }

    /// The execution or the group that it names. `None` if it breaks a rule of [`Dependency`].
    pub fn target(&self, tenant: &Tenant) -> Option<Target> {
        match (&self.id, &self.batch, &self.array) {
            (Some(id), None, None) => match id.strip_suffix('*') {
                Some(prefix) => ClientId::new(prefix)
                    .ok()
                    .map(Group::Prefix)
                    .map(Target::All),
                None => execution(id, tenant).map(Target::One),
            },
            (None, Some(batch), None) => BatchId::named(tenant, batch)
                .map(Group::Batch)
                .map(Target::All),
            (None, None, Some(array)) => {
                ClientId::new(array).ok().map(Group::Array).map(Target::All)
            }
            _ => None,
        }
    }

    /// True if it names a group.
    pub fn is_group(&self) -> bool {
        self.id.as_ref().is_none_or(|id| id.ends_with('*'))
    }

    /// The field that names it.
    pub fn field(&self) -> &'static str {
        match (&self.id, &self.batch) {
            (Some(_), _) => "id",
            (None, Some(_)) => "batch",
            (None, None) => "array",
        }
    }

    /// The texts in which an array puts an index or a value.
    pub(crate) fn texts_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let (batch, array) = (self.batch.as_mut(), self.array.as_mut());
        self.id.as_mut().into_iter().chain(batch).chain(array)
    }

    /// The rule that it breaks, with the field. `of`: the submission that waits.
    pub(crate) fn check(&self, of: &Submission) -> Result<(), (&'static str, String)> {
        let named = [&self.id, &self.batch, &self.array];
        if named.iter().filter(|name| name.is_some()).count() != 1 {
            let rule = "one of id, batch and array must be given";
            return Err(("", rule.to_owned()));
        }
        let refuse = |rule: String| Err((self.field(), rule));
        // An array's own rules are known once the index is inserted.
        let is_template = of.array.is_some();
        let own = of.id.as_ref().filter(|_| !is_template);
        let waits_for_itself = "it cannot wait for itself";
        if let Some(id) = self.id.as_deref() {
            let is_group = id.ends_with('*');
            let plain = id.strip_suffix('*').unwrap_or(id);
            if !is_template && !is_group && execution_name(plain).is_none() {
                return refuse(format!(
                    "{id:?} is neither an execution's UUID nor a client's id"
                ));
            }
            if !is_template && is_group && ClientId::new(plain).is_err() {
                return refuse(format!(
                    "{id:?} is not the beginning of a client's id with a * at its end"
                ));
            }
            if own.is_some_and(|own| own.as_str() == id) {
                return refuse(waits_for_itself.to_owned());
            }
        }
        if let Some(batch) = self.batch.as_deref() {
            if !is_template
                && uuid::Uuid::parse_str(batch).is_err()
                && BatchName::new(batch).is_err()
            {
                return refuse(format!("{batch:?} is neither a batch's UUID nor its name"));
            }
            if of.batch.as_ref().is_some_and(|own| own.as_str() == batch) {
                return refuse(format!("{waits_for_itself}: it belongs to batch {batch}"));
            }
        }
        if let Some(array) = self.array.as_deref()
            && !is_template
            && ClientId::new(array).is_err()
        {
            return refuse(format!("{array:?} is not a client's id"));
        }
        let group = match (&self.array, &self.id) {
            (Some(array), _) => ClientId::new(array).ok().map(Group::Array),
            (None, Some(id)) => id
                .strip_suffix('*')
                .and_then(|id| ClientId::new(id).ok())
                .map(Group::Prefix),
            (None, None) => None,
        };
        if let (Some(group), Some(own)) = (group, own)
            && group.has(Some(own.as_str()), None)
        {
            return refuse(format!("{waits_for_itself}: {own} is among {self}"));
        }
        if let AfterOutcome::AtLeast(share) = self.on {
            if self.id.as_ref().is_some_and(|id| !id.ends_with('*')) {
                let rule = "at_least is for a batch, an array, or ids with a * at the end";
                return Err(("on", rule.to_owned()));
            }
            if !(share.0 > 0.0 && share.0 <= 1.0) {
                let rule = format!("must be above 0 and at most 1, but is {share}");
                return Err(("on.at_least", rule));
            }
        }
        Ok(())
    }
}

/// For people.
impl fmt::Display for Dependency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.id, &self.batch, &self.array) {
            (Some(id), ..) => write!(f, "{id}"),
            (None, Some(batch), _) => write!(f, "batch {batch}"),
            (None, None, array) => write!(f, "array {}", array.as_deref().unwrap_or_default()),
        }
    }
}

fn execution(text: &str, tenant: &Tenant) -> Option<ExecutionId> {
    match execution_name(text)? {
        Ok(id) => Some(id),
        Err(client) => Some(ExecutionId::from_client(tenant, &client)),
    }
}

/// An execution by its UUID, or else by its client's id.
fn execution_name(text: &str) -> Option<Result<ExecutionId, ClientId>> {
    if let Ok(id) = text.parse() {
        return Some(Ok(id));
    }
    ClientId::new(text).ok().map(Err)
}

/// Checks what a submission waits for.
pub(crate) fn check(spec: &Submission) -> Result<(), FieldError> {
    let after = &spec.after;
    if after.len() > AFTER_LIMIT {
        let rule = format!(
            "at most {AFTER_LIMIT} are allowed, but these are {}: let it wait for a batch, an array \
             or ids with a * at the end",
            after.len()
        );
        return Err(FieldError::new("after", rule));
    }
    let groups = after.iter().filter(|d| d.is_group()).count();
    if groups > GROUPS_LIMIT {
        let rule = format!("at most {GROUPS_LIMIT} groups are allowed, but these are {groups}");
        return Err(FieldError::new("after", rule));
    }
    for (n, dependency) in after.iter().enumerate() {
        dependency.check(spec).map_err(|(field, rule)| {
            let dot = if field.is_empty() { "" } else { "." };
            FieldError::new(format!("after[{n}]{dot}{field}"), rule)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant() -> Tenant {
        Tenant::new("lab").unwrap()
    }

    fn refusal(fields: &str) -> FieldError {
        let line = format!(r#"{{"program":"synthetic@1",{fields}}}"#);
        Submission::parse(line.as_bytes()).unwrap_err()
    }

    #[test]
    fn an_execution_is_named_by_its_uuid_or_by_its_clients_id() {
        let id = ExecutionId::from_client(&tenant(), &ClientId::new("a").unwrap());
        for name in ["a".to_owned(), id.to_string()] {
            let dependency = Dependency::new(name, AfterOutcome::Ok);
            assert_eq!(dependency.target(&tenant()), Some(Target::One(id)));
        }
    }

    #[test]
    fn groups_have_the_members_of_a_batch_the_elements_of_an_array_or_what_begins_so() {
        let batch = |name: &str| BatchId::named(&tenant(), name);
        let group = |json: &str| {
            let dependency: Dependency = serde_json::from_str(json).unwrap();
            match dependency.target(&tenant()) {
                Some(Target::All(group)) => group,
                other => panic!("{other:?}"),
            }
        };
        let in_batch = group(r#"{"batch":"b"}"#);
        assert!(in_batch.has(None, batch("b")) && !in_batch.has(Some("b"), batch("c")));
        assert_eq!(
            group(&format!(r#"{{"batch":"{}"}}"#, batch("b").unwrap())),
            in_batch
        );
        let of_array = group(r#"{"array":"lr"}"#);
        for (id, is_member) in [
            ("lr-0", true),
            ("lr-17", true),
            ("lr", false),
            ("lr-", false),
            ("lr-x", false),
            ("lrs-1", false),
        ] {
            assert_eq!(of_array.has(Some(id), None), is_member, "{id}");
        }
        let prefix = group(r#"{"id":"seed-*"}"#);
        assert!(prefix.has(Some("seed-a.1"), None) && prefix.has(Some("seed-"), None));
        assert!(!prefix.has(Some("seed"), None) && !prefix.has(None, batch("seed-")));
    }

    #[test]
    fn each_bad_dependency_is_refused_by_its_field() {
        for (fields, field, words) in [
            (r#""after":[{"id":"a b"}]"#, "after[0].id", "neither"),
            (r#""after":[{"id":"*"}]"#, "after[0].id", "beginning"),
            (r#""after":[{"id":"a"},{}]"#, "after[1]", "one of"),
            (r#""after":[{"id":"a","batch":"b"}]"#, "after[0]", "one of"),
            (r#""after":[{"batch":"a b"}]"#, "after[0].batch", "neither"),
            (
                r#""after":[{"array":"a*"}]"#,
                "after[0].array",
                "client's id",
            ),
            (r#""id":"a","after":[{"id":"a"}]"#, "after[0].id", "itself"),
            (
                r#""id":"s-9","after":[{"id":"s-*"}]"#,
                "after[0].id",
                "itself: s-9 is among s-*",
            ),
            (
                r#""id":"lr-9","after":[{"array":"lr"}]"#,
                "after[0].array",
                "among array lr",
            ),
            (
                r#""batch":"b","after":[{"batch":"b"}]"#,
                "after[0].batch",
                "belongs to batch b",
            ),
            (
                r#""after":[{"id":"a","on":{"at_least":0.5}}]"#,
                "after[0].on",
                "for a batch",
            ),
            (
                r#""after":[{"batch":"b","on":{"at_least":1.5}}]"#,
                "after[0].on.at_least",
                "but is 1.5",
            ),
            (
                r#""after":[{"batch":"b","on":"most"}]"#,
                "after[0].on",
                "most",
            ),
        ] {
            let error = refusal(fields);
            assert_eq!(error.field, field, "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
        let many: Vec<_> = (0..=GROUPS_LIMIT)
            .map(|n| format!(r#"{{"batch":"b{n}"}}"#))
            .collect();
        let error = refusal(&format!(r#""after":[{}]"#, many.join(",")));
        assert!(error.reason.contains("100 groups"), "{error}");
        let ids = vec![r#"{"id":"a"}"#; AFTER_LIMIT + 1];
        let error = refusal(&format!(r#""after":[{}]"#, ids.join(",")));
        assert_eq!(error.field, "after");
        let words = "at most 10000 are allowed, but these are 10001: let it wait for a batch";
        assert!(error.reason.starts_with(words), "{error}");
    }

    #[test]
    fn a_share_is_met_by_the_whole_number_that_is_meant() {
        for (share, total, least) in [(0.7, 10, 7), (0.9, 10, 9), (0.9, 11, 10), (1.0, 3, 3)] {
            let met = |part: &usize| Share(share).is_met(*part, total);
            assert_eq!((0..=total).find(met), Some(least), "{share} of {total}");
        }
    }
}
