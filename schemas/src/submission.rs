//! Submissions: one line of JSON each, checked before anything is created.

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

use schemars::JsonSchema;
use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::array::Array;
use crate::dependency::Dependency;
use crate::hardware::{Signal, Threshold, Thresholds};
use crate::ids::{BatchName, ClientId, Digest, Timestamp};
use crate::plain;
use crate::programs;
use crate::scheduling::{self, Deadline, Gang, Limit, Reallocation, WhenUnviable};
use crate::spread::{self, Spread};
use crate::strict::Strict;
use crate::trust::Verify;
use crate::values;
use crate::variables::{self, Variables};

pub use crate::machine::MachineRequirement;
pub use crate::requirements::{
    DevicePreference, DeviceRequirement, Preferences, Requirements, ViableBy,
};

/// Longest line of a submission in bytes; the broker's message limit is twice this.
pub const LINE_LIMIT: usize = 512 * 1024;
/// Header of a submission that is accepted as a whole or not at all: `true`.
pub const ATOMIC_HEADER: &str = "Fiec-Atomic";
/// Most lines in one message.
pub const LINES_LIMIT: usize = 10_000;
/// Most submissions in one message: its lines, and the elements of its arrays.
pub const EXECUTIONS_LIMIT: usize = 100_000;
/// Most bytes of a message's lines with arrays, after the arrays are expanded.
pub const EXPANSION_LIMIT: usize = 64 * 1024 * 1024;
/// Most entries of `after` in one message, counted for each element of its arrays.
pub const AFTER_TOTAL_LIMIT: usize = 100_000;

/// A field of a submission and the rule that it breaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{field}{}{reason}", if .field.is_empty() { "" } else { ": " })]
pub struct FieldError {
    /// Path of the field, e.g. `viability.memory.low`. Empty if the line is not valid JSON.
    pub field: String,
    /// The rule, and the value that was found.
    pub reason: String,
    /// The refused line of the same message because of which this one is refused, if it breaks no
    /// rule of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<u32>,
}

impl FieldError {
    /// A broken rule.
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason: reason.into(),
            because: None,
        }
    }

    /// A line that is refused only because another one is.
    pub fn because(line: u32, field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            because: Some(line),
            ..Self::new(field, reason)
        }
    }
}

/// When boundaries become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommitPolicy {
    /// Once a second. Less often if commits would take more than one per cent of the time.
    #[default]
    Auto,
    /// Every k-th boundary.
    Every(NonZeroU64),
    /// At the first boundary after this many milliseconds.
    EveryMs(NonZeroU32),
}

/// What becomes of an execution when it fails: its program fails, or crashes beyond `retries`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It ends. What waits for it fails, too.
    #[default]
    Fail,
    /// It is held with its last committed σ until somebody retries or cancels it. What waits for it
    /// waits on.
    Hold,
}

/// Numeric contract: the agreement that two substrates need for an execution to move between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Contract {
    /// Their digests are equal.
    #[default]
    Bitwise,
    /// The normwise backward error of each is below the declared bound.
    Bounded,
    /// Their results are equal in distribution. Only on request.
    Statistical,
}

impl Contract {
    /// The name in messages and for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Contract::Bitwise => "bitwise",
            Contract::Bounded => "bounded",
            Contract::Statistical => "statistical",
        }
    }

    /// Rank of the contract. A contract that promises more has a higher one.
    pub fn strength(self) -> u8 {
        match self {
            Contract::Bitwise => 2,
            Contract::Bounded => 1,
            Contract::Statistical => 0,
        }
    }
}

/// One submission: a computation that runs to its end, on whichever nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Submission {
    /// The client's own id. The same id with the same body is the same execution. With another body
    /// it is an error. Without an id, the id derives from the place where the broker stored the
    /// line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<ClientId>,
    /// Name of a batch that the execution belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchName>,
    /// `name@version`.
    pub program: String,
    /// The program's parameters.
    #[serde(default = "empty_object", skip_serializing_if = "is_empty_object")]
    pub params: Value,
    /// Variables of the program's environment, by their names.
    #[serde(default, skip_serializing_if = "Variables::is_empty")]
    pub env: Variables,
    /// When boundaries become durable.
    #[serde(default, skip_serializing_if = "is_default")]
    pub commit: CommitPolicy,
    /// Thresholds of this execution, instead of the node's, for the named signals.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "by_name"
    )]
    pub viability: Thresholds,
    /// How many crashes of the program are followed by a retry from the last commit. Each commit of
    /// a new boundary begins the count again.
    #[serde(
        default = "default_retries",
        skip_serializing_if = "is_default_retries"
    )]
    pub retries: u32,
    /// What becomes of the execution when it fails.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_failure: OnFailure,
    /// Requirements that a node must meet.
    #[serde(default, skip_serializing_if = "Requirements::is_empty")]
    pub requires: Requirements,
    /// Resources beyond the requirements that are useful.
    #[serde(default, skip_serializing_if = "Preferences::is_empty")]
    pub prefers: Preferences,
    /// The numeric contract for moves.
    #[serde(default, skip_serializing_if = "is_default")]
    pub contract: Contract,
    /// The part that another node computes again and compares. Absent: the policy service's share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<Verify>,
    /// From -100 to 100. A higher one is served first, and may preempt a lower one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i16,
    /// The deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// The most that it may compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// The moment before which it is not placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
    /// Expected time on an undisturbed node, in seconds, if the client knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_s: Option<u32>,
    /// Executions that must have ended before this one is placed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<Dependency>,
    /// Most executions of its batch that run at once. The smallest number in the batch counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_once: Option<u32>,
    /// The gang with which it starts, or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<Gang>,
    /// Makes this line an array of submissions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<Array>,
    /// Allows several nodes to share its range of tiles (`params.tiles`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// What to do if its place is not viable and no other place is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub when_unviable: WhenUnviable,
    /// Whether it may move so that devices are used better.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reallocation: Reallocation,
    /// The client's own labels, kept in the history.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Reads thresholds by the names of their signals, so that the path of an error has the name.
fn by_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Thresholds, D::Error> {
    BTreeMap::<String, Threshold>::deserialize(deserializer)?
        .into_iter()
        .map(|(name, threshold)| {
            let signal = Signal::deserialize(name.as_str().into_deserializer())?;
            Ok((signal, threshold))
        })
        .collect()
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}
fn is_empty_object(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty)
}
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
const DEFAULT_RETRIES: u32 = 3;
fn default_retries() -> u32 {
    DEFAULT_RETRIES
}
fn is_default_retries(value: &u32) -> bool {
    *value == DEFAULT_RETRIES
}

impl Submission {
    /// A submission of a program with defaults only.
    pub fn of(program: &str) -> Self {
        Self {
            id: None,
            batch: None,
            program: program.to_owned(),
            params: empty_object(),
            env: Variables::new(),
            commit: CommitPolicy::default(),
            viability: Thresholds::new(),
            retries: DEFAULT_RETRIES,
            on_failure: OnFailure::default(),
            requires: Requirements::default(),
            prefers: Preferences::default(),
            contract: Contract::default(),
            verify: None,
            priority: 0,
            deadline: None,
            limit: None,
            not_before: None,
            expected_s: None,
            after: Vec::new(),
            at_once: None,
            gang: None,
            array: None,
            spread: None,
            when_unviable: WhenUnviable::default(),
            reallocation: Reallocation::default(),
            labels: BTreeMap::new(),
        }
    }

    /// Parses and checks one line.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn parse(line: &[u8]) -> Result<Self, FieldError> {
        if line.len() > LINE_LIMIT {
            return Err(FieldError::new(
                "",
                format!(
                    "the line has {} bytes; at most {LINE_LIMIT} are allowed",
                    line.len()
                ),
            ));
        }
        // The plain parser is fast. Only an invalid line is parsed again to find its field's path.
        let submission: Self = match serde_json::from_slice(line) {
            Ok(submission) => submission,
            Err(plain) => return Err(locate(line, &plain)),
        };
        // The plain parser accepts a list for an object. Only a line with a list needs the strict
        // check.
        if line.contains(&b'[') {
            objects_are_objects(line)?;
        }
        values::check(line, "")?;
        submission.check()?;
        Ok(submission)
    }

    /// Checks the rules that types cannot express.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        for (signal, threshold) in &self.viability {
            threshold.check().map_err(|(field, rule)| {
                FieldError::new(format!("viability.{signal}.{field}"), rule)
            })?;
        }
        if self.retries > 1_000 {
            return Err(FieldError::new("retries", "must be at most 1000"));
        }
        if self.labels.len() > 32 {
            return Err(FieldError::new("labels", "at most 32 are allowed"));
        }
        variables::check(&self.env, &self.program)?;
        scheduling::check(self)?;
        spread::check(self)?;
        if self.on_failure == OnFailure::Hold && self.spread.is_some() {
            let rule = "an execution with `spread` cannot be held: its parts fail it";
            return Err(FieldError::new("on_failure", rule));
        }
        self.requires.check()?;
        self.prefers.check(&self.requires, self.contract)?;
        if let Some(verify) = self.verify {
            verify.check(self.contract)?;
        }
        // The parameters of an array are known only after the index is inserted.
        if self.array.is_some() {
            return Ok(());
        }
        programs::check(&self.program, &self.params)?;
        programs::check_contract(&self.program, &self.params, self.contract)
    }

    /// The digest of the submission in its canonical form (fields in order, defaults left out).
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_json())
    }

    /// The canonical form.
    pub fn to_json(&self) -> Vec<u8> {
        // Serializing fails only for maps whose keys are not strings. All keys here are strings.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Parses a valid line again, strictly.
fn objects_are_objects(line: &[u8]) -> Result<(), FieldError> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| FieldError::new("", plain::syntax(&error)))?;
    let strict: Result<Submission, _> = serde_path_to_error::deserialize(Strict(&value));
    strict.map(drop).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path };
        let reason = plain::refusal_of(&field, &error.into_inner().to_string());
        FieldError::new(field, reason)
    })
}

fn locate(line: &[u8], error: &serde_json::Error) -> FieldError {
    if error.is_syntax() || error.is_eof() {
        return FieldError::new("", plain::syntax(error));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(line);
    match serde_path_to_error::deserialize::<_, Submission>(&mut deserializer) {
        Ok(_) => FieldError::new("", plain::refusal(&error.to_string())),
        Err(error) => {
            let path = error.path().to_string();
            let reason = error.into_inner().to_string();
            let field = if path == "." {
                missing_or_unknown(&reason)
            } else {
                path
            };
            let reason = plain::refusal_of(&field, &reason);
            FieldError::new(field, reason)
        }
    }
}

/// serde quotes the name of a missing or unknown field. At the top level, that is the field.
fn missing_or_unknown(reason: &str) -> String {
    let named = reason.starts_with("missing field") || reason.starts_with("unknown field");
    let name = reason.split('`').nth(1).filter(|_| named);
    name.unwrap_or_default().to_owned()
}

/// A refused line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LineError {
    /// Line in the batch, from 1.
    pub line: u32,
    /// The field. Empty if the whole line is at fault.
    pub field: String,
    /// The rule, and the value that was found.
    pub reason: String,
    /// As [`FieldError::because`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<u32>,
}

impl LineError {
    /// The error of a line.
    pub fn of(line: u32, error: FieldError) -> Self {
        let FieldError {
            field,
            reason,
            because,
        } = error;
        Self {
            line,
            field,
            reason,
            because,
        }
    }
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            write!(f, "line {}: {}", self.line, self.reason)
        } else {
            write!(
                f,
                "line {}, field {}: {}",
                self.line, self.field, self.reason
            )
        }
    }
}

/// The bytes at the beginning of a UTF-8 text that some editors write (Unicode, byte order mark).
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A text without the byte order mark at its beginning.
pub fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// The lines of a JSONL body with their numbers from 1. Blank lines are skipped.
pub fn lines(body: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    (1u32..)
        .zip(without_mark(body).split(|b| *b == b'\n'))
        .map(|(n, line)| (n, line.trim_ascii()))
        .filter(|(_, line)| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> FieldError {
        Submission::parse(line.as_bytes()).unwrap_err()
    }

    #[test]
    fn a_minimal_submission_is_accepted_and_canonical() {
        let s = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
        assert_eq!(s.to_json(), br#"{"program":"synthetic@1"}"#);
        let spelled = Submission::parse(
            br#"{"retries":3, "commit":"auto", "params":{}, "program":"synthetic@1"}"#,
        )
        .unwrap();
        assert_eq!(s.digest(), spelled.digest());
    }

    #[test]
    fn the_order_of_parameters_does_not_change_the_digest() {
        let a =
            Submission::parse(br#"{"program":"synthetic@1","params":{"capsules":2,"work_us":3}}"#);
        let b =
            Submission::parse(br#"{"program":"synthetic@1","params":{"work_us":3,"capsules":2}}"#);
        assert_eq!(a.unwrap().digest(), b.unwrap().digest());
    }

    #[test]
    fn commit_policies_read_as_written() {
        for (text, policy) in [
            (r#""auto""#, CommitPolicy::Auto),
            (
                r#"{"every":2}"#,
                CommitPolicy::Every(NonZeroU64::new(2).unwrap()),
            ),
            (
                r#"{"every_ms":500}"#,
                CommitPolicy::EveryMs(NonZeroU32::new(500).unwrap()),
            ),
        ] {
            assert_eq!(serde_json::from_str::<CommitPolicy>(text).unwrap(), policy);
        }
    }

    #[test]
    fn each_bad_field_is_named_with_its_rule() {
        for (line, field, word) in [
            (
                r#"{"program":"cg@1","colour":1}"#,
                "colour",
                "unknown field",
            ),
            (r#"{"params":{}}"#, "program", "missing field"),
            (r#"{"program":7}"#, "program", "string"),
            (r#"{"program":"nope"}"#, "program", "no name@version"),
            (r#"{"program":"synthetic@1","retries":-1}"#, "retries", "-1"),
            (
                r#"{"program":"synthetic@1","id":"a b"}"#,
                "id",
                "128 characters",
            ),
            (
                r#"{"program":"synthetic@1","commit":{"every":0}}"#,
                "commit.every",
                "above 0",
            ),
            (
                r#"{"program":"synthetic@1","viability":{"memory":{"high":0.5,"low":0.6,"dwell_ms":1}}}"#,
                "viability.memory.low",
                "below high",
            ),
            (
                r#"{"program":"synthetic@1","viability":{"memory":{"high":-0.5,"low":0.6,"dwell_ms":1}}}"#,
                "viability.memory.high",
                "above 0",
            ),
            (
                r#"{"program":"synthetic@1","viability":{"memory":{"high":0.5,"hi":0.6}}}"#,
                "viability.memory.hi",
                "unknown field",
            ),
            (
                r#"{"program":"synthetic@1","viability":{"mood":{"high":0.5,"low":0.1,"dwell_ms":1}}}"#,
                "viability",
                "unknown variant `mood`",
            ),
            (
                r#"{"program":"train@1","params":{"seeds":[1,1180591620717411303425]}}"#,
                "params.seeds[1]",
                "64 bits at most, but this is 1180591620717411303425",
            ),
            (r#"{"program":"cg@1","params":{}}"#, "params", "matrix"),
            (
                r#"{"program":"cg@1","params":{"matrix":{"poisson2d":{"n":1}}}}"#,
                "params.matrix.poisson2d.n",
                "2 to 20000",
            ),
            (
                r#"{"program":"cg@1","params":{"matrix":{"poisson2d":{"n":"x"}}}}"#,
                "params.matrix",
                "",
            ),
            ("{not json", "", "not valid JSON"),
            (r#"["a", "b", "synthetic@1"]"#, "", "a list"),
            (
                r#"{"program":"synthetic@1","viability":{"memory":[0.9,0.5,1]}}"#,
                "viability.memory",
                "must be an object, but is a list",
            ),
            (
                r#"{"program":"synthetic@1","requires":[["n1"]]}"#,
                "requires",
                "must be an object, but is a list",
            ),
            (
                r#"{"program":"synthetic@1","requires":[]}"#,
                "requires",
                "must be an object, but is a list",
            ),
            (
                r#"{"program":"synthetic@1","params":[3]}"#,
                "params",
                "must be an object",
            ),
            (
                r#"{"program":"cg@1","params":{"matrix":{"poisson2d":[64]}}}"#,
                "params.matrix",
                "must be an object, but is a list",
            ),
        ] {
            let error = refused(line);
            assert!(error.field.starts_with(field), "{line}: {error:?}");
            assert!(error.reason.contains(word), "{line}: {error:?}");
        }
    }

    #[test]
    fn a_line_of_two_megabytes_is_refused_by_its_size() {
        let line = format!(r#"{{"program":"{}"}}"#, "x".repeat(2 << 20));
        assert!(refused(&line).reason.contains("at most"));
    }

    #[test]
    fn blank_lines_keep_the_numbers_of_the_others() {
        for mark in ["", "\u{feff}"] {
            let body = format!("{mark}{{\"a\":1}}\n\n  \n{{\"b\":2}}\r\n");
            let found: Vec<_> = lines(body.as_bytes()).collect();
            assert_eq!(found, [(1, &b"{\"a\":1}"[..]), (4, &b"{\"b\":2}"[..])]);
        }
    }
}
