//! Arrays: lines that become many submissions.

use std::io;
use std::num::NonZeroU32;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::ClientId;
use crate::submission::{FieldError, Submission};

/// Text that the index of an element replaces.
const INDEX: &str = "{index}";
/// Text that the value of an element replaces.
const VALUE: &str = "{value}";
/// Begin of a text that a field of the value of an element replaces: `{value.rate}`.
const FIELD: &str = "{value.";
/// Most elements of an array.
pub const ARRAY_LIMIT: u32 = 100_000;
/// An array of more elements needs an id, from which their names follow: the answer to its
/// submission does not list them.
pub const LISTED_LIMIT: usize = 10_000;

/// Makes a line an array: the same submission for each index, or for each value of a list. In
/// parameters, labels and `after`, the index replaces the text `{index}`, and the value `{value}`.
/// Where the value is an object, `{value.rate}` is its field `rate`. A parameter that is exactly
/// `"{index}"`, `"{value}"` or `"{value.rate}"` becomes the number or the value itself.
/// The client's id gets the suffix `-<index>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub enum Array {
    /// The indices from 0.
    Count(u32),
    /// The indices `from`, `from + step`, … up to `to`, which may be the last one.
    Range {
        /// The first index.
        from: u32,
        /// The largest index that may be.
        to: u32,
        /// The distance of two indices.
        step: NonZeroU32,
    },
    /// The values of a list. Their indices count from 0.
    Values(Vec<Value>),
}

/// The fields of an array in JSON.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Fields {
    /// Number of elements, with the indices from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u32>,
    /// The first index, with `to`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<u32>,
    /// The largest index that may be, with `from`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    to: Option<u32>,
    /// The distance of two indices between `from` and `to`. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step: Option<NonZeroU32>,
    /// A value for each element. The text `{value}` becomes it. The indices count from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    values: Option<Vec<Value>>,
}

/// The fields do not say which elements the array has.
#[derive(Debug, thiserror::Error)]
#[error(
    "an array is one of {{\"count\": n}}, {{\"from\": a, \"to\": b}} with or without a \"step\", and \
     {{\"values\": […]}}"
)]
struct NoForm;

impl TryFrom<Fields> for Array {
    type Error = NoForm;

    fn try_from(fields: Fields) -> Result<Self, NoForm> {
        match fields {
            Fields {
                count: Some(count),
                from: None,
                to: None,
                step: None,
                values: None,
            } => Ok(Self::Count(count)),
            Fields {
                count: None,
                from: Some(from),
                to: Some(to),
                step,
                values: None,
            } => Ok(Self::Range {
                from,
                to,
                step: step.unwrap_or(NonZeroU32::MIN),
            }),
            Fields {
                count: None,
                from: None,
                to: None,
                step: None,
                values: Some(values),
            } => Ok(Self::Values(values)),
            _ => Err(NoForm),
        }
    }
}

impl From<Array> for Fields {
    fn from(array: Array) -> Self {
        match array {
            Array::Count(count) => Self {
                count: Some(count),
                ..Self::default()
            },
            Array::Range { from, to, step } => Self {
                from: Some(from),
                to: Some(to),
                step: Some(step).filter(|step| step.get() > 1),
                ..Self::default()
            },
            Array::Values(values) => Self {
                values: Some(values),
                ..Self::default()
            },
        }
    }
}

impl JsonSchema for Array {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Array".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        Fields::json_schema(generator)
    }
}

impl Array {
    /// Number of elements.
    pub fn count(&self) -> usize {
        match self {
            Self::Count(count) => *count as usize,
            Self::Range { from, to, step } => match to.checked_sub(*from) {
                Some(distance) => (distance / *step) as usize + 1,
                None => 0,
            },
            Self::Values(values) => values.len(),
        }
    }

    /// The index of the `nth` element.
    pub fn index(&self, nth: usize) -> u64 {
        match self {
            Self::Count(_) | Self::Values(_) => nth as u64,
            Self::Range { from, step, .. } => u64::from(*from) + nth as u64 * u64::from(step.get()),
        }
    }

    pub(crate) fn check(&self, has_id: bool) -> Result<(), FieldError> {
        if let Self::Range { from, to, .. } = self
            && to < from
        {
            let rule = format!("must be at least `from`, which is {from}, but is {to}");
            return Err(FieldError::new("array.to", rule));
        }
        let count = self.count();
        if (1..=ARRAY_LIMIT as usize).contains(&count) {
            if has_id || count <= LISTED_LIMIT {
                return Ok(());
            }
            let rule = format!(
                "an array of more than {LISTED_LIMIT} elements needs one, and this has {count}"
            );
            return Err(FieldError::new("id", rule));
        }
        let (field, rule) = match self {
            Self::Count(_) => (
                "array.count",
                format!("must be from 1 to {ARRAY_LIMIT}, but is {count}"),
            ),
            Self::Range { .. } => (
                "array.to",
                format!("an array has 1 to {ARRAY_LIMIT} elements, but this has {count}"),
            ),
            Self::Values(_) => (
                "array.values",
                format!("must have 1 to {ARRAY_LIMIT} values, but has {count}"),
            ),
        };
        Err(FieldError::new(field, rule))
    }
}

/// The index and the value of one element.
struct Element<'a> {
    index: u64,
    number: String,
    /// The value, and its text.
    value: Option<(&'a Value, String)>,
}

impl<'a> Element<'a> {
    fn of(array: &'a Array, nth: usize) -> Self {
        let value = match array {
            Array::Values(values) => values.get(nth),
            Array::Count(_) | Array::Range { .. } => None,
        };
        let index = array.index(nth);
        Self {
            index,
            number: index.to_string(),
            value: value.map(|value| (value, text_of(value))),
        }
    }

    fn put_in_text(&self, text: &str) -> String {
        let text = text.replace(INDEX, &self.number);
        let Some((value, own)) = &self.value else {
            return text;
        };
        let mut text = text.replace(VALUE, own);
        if let (Value::Object(fields), true) = (value, text.contains(FIELD)) {
            for (name, field) in fields {
                text = text.replace(&format!("{FIELD}{name}}}"), &text_of(field));
            }
        }
        text
    }

    /// The value that a parameter becomes which is exactly this text.
    fn named(&self, text: &str) -> Option<&Value> {
        let (value, _) = self.value.as_ref()?;
        if text == VALUE {
            return Some(value);
        }
        value.get(text.strip_prefix(FIELD)?.strip_suffix('}')?)
    }

    fn put_into_text(&self, text: &mut String) {
        if [INDEX, VALUE, FIELD]
            .iter()
            .any(|named| text.contains(named))
        {
            *text = self.put_in_text(text);
        }
    }

    fn put_into(&self, value: &mut Value) {
        match value {
            Value::String(text) if text == INDEX => *value = Value::from(self.index),
            Value::String(text) => match self.named(text) {
                Some(own) => *value = own.clone(),
                None => self.put_into_text(text),
            },
            Value::Array(list) => list.iter_mut().for_each(|v| self.put_into(v)),
            Value::Object(map) => map.values_mut().for_each(|v| self.put_into(v)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

impl Submission {
    /// Number of submissions that the line becomes.
    pub fn count(&self) -> usize {
        self.array.as_ref().map_or(1, Array::count)
    }

    /// The elements of the array in the order of their indices, or the submission itself. See
    /// [`Array`]. Elements are made one at a time, because all together may be a thousand times as
    /// large as the line.
    pub fn elements(mut self) -> Elements {
        let array = self.array.take();
        Elements {
            count: array.as_ref().map_or(1, Array::count),
            plain: self,
            array,
            next: 0,
        }
    }

    /// All of [`Submission::elements`] at once.
    ///
    /// # Errors
    /// The field that breaks a rule after the index is inserted.
    pub fn expand(self) -> Result<Vec<Submission>, FieldError> {
        self.elements().collect()
    }

    fn element(&self, own: &Element<'_>) -> Result<Submission, FieldError> {
        let mut element = self.clone();
        if let Some(id) = &self.id {
            let id = ClientId::new(format!("{id}-{}", own.number)).map_err(|error| {
                FieldError::new(
                    "id",
                    format!("with the index {} at its end: {error}", own.number),
                )
            })?;
            element.id = Some(id);
        }
        own.put_into(&mut element.params);
        for value in element.labels.values_mut() {
            own.put_into_text(value);
        }
        for dependency in &mut element.after {
            for text in dependency.texts_mut() {
                own.put_into_text(text);
            }
        }
        element.check()?;
        Ok(element)
    }
}

/// The submissions of a line, made one at a time.
#[derive(Debug)]
pub struct Elements {
    plain: Submission,
    array: Option<Array>,
    next: usize,
    count: usize,
}

impl Elements {
    /// Number of all elements, with those that were made already.
    pub fn total(&self) -> usize {
        self.count
    }

    /// True for the elements of an array.
    pub fn is_array(&self) -> bool {
        self.array.is_some()
    }

    /// Number of executions that each element waits for.
    pub fn waits_for(&self) -> usize {
        self.plain.after.len()
    }

    /// About the bytes of each submission, as text. Nothing is copied: a line may be large.
    pub fn bytes_each(&self) -> usize {
        let mut plain = Counted(0);
        // A counter takes everything, and all keys are strings.
        let _ = serde_json::to_writer(&mut plain, &self.plain);
        let Some(Array::Values(values)) = &self.array else {
            return plain.0;
        };
        let texts = values.iter().map(|value| value.to_string().len());
        let labels = self.plain.labels.values();
        let in_labels: usize = labels.map(|label| uses_in(label)).sum();
        let uses = uses_of_value(&self.plain.params) + in_labels;
        plain.0 + uses.saturating_mul(texts.max().unwrap_or(0))
    }

    /// Number of the next element, from 0. `None` if the line is no array.
    pub fn number(&self) -> Option<u32> {
        self.array.as_ref()?;
        u32::try_from(self.next).ok()
    }
}

impl Iterator for Elements {
    type Item = Result<Submission, FieldError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.count {
            return None;
        }
        let nth = self.next;
        self.next += 1;
        Some(match &self.array {
            Some(array) => self.plain.element(&Element::of(array, nth)),
            None => Ok(self.plain.clone()),
        })
    }
}

/// Counts the bytes that are written.
struct Counted(usize);

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How often a text names the value, or a field of it.
fn uses_in(text: &str) -> usize {
    text.matches(VALUE).count() + text.matches(FIELD).count()
}

fn uses_of_value(params: &Value) -> usize {
    match params {
        Value::String(text) => uses_in(text),
        Value::Array(list) => list.iter().map(uses_of_value).sum(),
        Value::Object(map) => map.values().map(uses_of_value).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(line: &str) -> Result<Vec<Submission>, FieldError> {
        Submission::parse(line.as_bytes()).and_then(Submission::expand)
    }

    #[test]
    fn each_element_has_its_index_wherever_the_line_names_it() {
        let all = expanded(
            r#"{"id":"part","program":"mine@1","array":{"count":3},
                "params":{"seed":"{index}","file":"in/{index}.npy","list":["{index}",[7]]},
                "labels":{"part":"{index} of 3"},"after":[{"id":"prep-{index}"},{"id":"all"}]}"#,
        )
        .unwrap();
        assert_eq!(all.len(), 3);
        let second = String::from_utf8(all[1].to_json()).unwrap();
        assert_eq!(
            second,
            r#"{"id":"part-1","program":"mine@1","params":{"file":"in/1.npy","list":[1,[7]],"seed":1},"after":[{"id":"prep-1"},{"id":"all"}],"labels":{"part":"1 of 3"}}"#
        );
        // An element is a submission that a client could have sent.
        assert_eq!(Submission::parse(second.as_bytes()).unwrap(), all[1]);
    }

    #[test]
    fn a_field_of_a_value_stands_where_the_line_names_it() {
        let all = expanded(
            r#"{"id":"lr","program":"mine@1","array":{"values":[{"lr":0.1,"net":"a b"},{"lr":1,"net":[2]},7]},
                "params":{"rate":"{value.lr}","deep":["{value.net}"],"name":"{value.net}-{value.lr}-{index}",
                          "other":"{value.none}"},
                "labels":{"lr":"{value.lr}"}}"#,
        )
        .unwrap();
        let params: Vec<_> = all.iter().map(|one| one.params.clone()).collect();
        let expected = [
            serde_json::json!({"rate": 0.1, "deep": ["a b"], "name": "a b-0.1-0", "other": "{value.none}"}),
            serde_json::json!({"rate": 1, "deep": [[2]], "name": "[2]-1-1", "other": "{value.none}"}),
            serde_json::json!({"rate": "{value.lr}", "deep": ["{value.net}"],
                               "name": "{value.net}-{value.lr}-2", "other": "{value.none}"}),
        ];
        assert_eq!(params, expected);
        assert_eq!(all[0].labels["lr"], "0.1");
    }

    #[test]
    fn what_is_no_array_stays_as_it_is() {
        let line = r#"{"program":"mine@1","params":{"x":"{index}"}}"#;
        let one = Submission::parse(line.as_bytes()).unwrap();
        assert_eq!(one.clone().expand().unwrap(), [one]);
    }

    #[test]
    fn an_element_that_breaks_a_rule_is_named_by_its_field() {
        let long = "x".repeat(127);
        let line = format!(r#"{{"id":"{long}","program":"mine@1","array":{{"count":2}}}}"#);
        let error = expanded(&line).unwrap_err();
        assert_eq!(error.field, "id");
        assert!(error.reason.contains("index 0"), "{}", error.reason);
        // An element cannot depend on itself.
        let line = r#"{"id":"a","program":"mine@1","array":{"count":2},"after":[{"id":"a-1"}]}"#;
        assert_eq!(expanded(line).unwrap_err().field, "after[0].id");
    }

    #[test]
    fn a_range_has_its_own_indices() {
        let line = r#"{"id":"a","program":"mine@1","array":{"from":10,"to":35,"step":10},
                       "params":{"x":"{index}","y":"{value}"}}"#;
        let spec = Submission::parse(line.as_bytes()).unwrap();
        assert_eq!(spec.count(), 3);
        let all = spec.expand().unwrap();
        let ids: Vec<_> = all.iter().filter_map(|one| one.id.as_ref()).collect();
        assert_eq!(
            ids,
            ["a-10", "a-20", "a-30"]
                .map(|id| id.parse().unwrap())
                .iter()
                .collect::<Vec<_>>()
        );
        assert_eq!(all[2].params, serde_json::json!({"x": 30, "y": "{value}"}));
        let line = r#"{"program":"mine@1","array":{"from":4294967290,"to":4294967295}}"#;
        assert_eq!(expanded(line).unwrap().len(), 6);
    }

    #[test]
    fn each_element_of_a_list_has_its_value() {
        let all = expanded(
            r#"{"id":"lr","program":"mine@1","array":{"values":[0.1,"adam",{"a":[1]}]},
                "params":{"lr":"{value}","name":"run {index}: {value}","deep":["{value}"]},
                "labels":{"lr":"{value}"},"after":[{"id":"prep-{index}"}]}"#,
        )
        .unwrap();
        let params: Vec<_> = all.iter().map(|one| one.params.clone()).collect();
        assert_eq!(
            params,
            [
                serde_json::json!({"lr": 0.1, "name": "run 0: 0.1", "deep": [0.1]}),
                serde_json::json!({"lr": "adam", "name": "run 1: adam", "deep": ["adam"]}),
                serde_json::json!(
                    {"lr": {"a": [1]}, "name": "run 2: {\"a\":[1]}", "deep": [{"a": [1]}]}),
            ]
        );
        assert_eq!(all[1].labels["lr"], "adam");
        assert!(all.iter().all(|one| one.array.is_none()));
    }

    #[test]
    fn an_array_without_a_form_or_with_two_is_refused_with_the_forms() {
        for array in [
            "{}",
            r#"{"count":2,"from":1,"to":2}"#,
            r#"{"from":1}"#,
            r#"{"values":[1],"step":2}"#,
        ] {
            let line = format!(r#"{{"program":"mine@1","array":{array}}}"#);
            let error = Submission::parse(line.as_bytes()).unwrap_err();
            assert_eq!(error.field, "array", "{error}");
            assert!(error.reason.contains(r#"{"values": […]}"#), "{error}");
        }
        for (array, field) in [
            (r#"{"count":0}"#, "array.count"),
            (r#"{"from":2,"to":1}"#, "array.to"),
            (r#"{"from":0,"to":4294967295}"#, "array.to"),
            (r#"{"from":0,"to":1,"step":0}"#, "array.step"),
            (r#"{"values":[]}"#, "array.values"),
            (r#"{"count":-1}"#, "array.count"),
            (r#"{"counts":1}"#, "array.counts"),
        ] {
            let line = format!(r#"{{"program":"mine@1","array":{array}}}"#);
            let error = Submission::parse(line.as_bytes()).unwrap_err();
            assert_eq!(error.field, field, "{error}");
        }
    }

    #[test]
    fn an_array_is_written_as_it_was_read() {
        for array in [
            r#"{"count":3}"#,
            r#"{"from":1,"to":9,"step":2}"#,
            r#"{"from":1,"to":9}"#,
            r#"{"values":[1,"a"]}"#,
        ] {
            let read: Array = serde_json::from_str(array).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), array);
        }
    }

    #[test]
    fn a_long_list_is_not_counted_for_each_of_its_elements() {
        let values: Vec<String> = (0..10_000).map(|n| format!("{n:020}")).collect();
        let line = serde_json::json!({"program": "mine@1", "params": {"x": "{value}"},
                                      "array": {"values": values}});
        let text = line.to_string();
        let spec = Submission::parse(text.as_bytes()).unwrap();
        let elements = spec.elements();
        let about = elements.bytes_each();
        let all: Vec<_> = elements.map(Result::unwrap).collect();
        let longest = all.iter().map(|one| one.to_json().len()).max().unwrap();
        assert!(
            (longest..longest + 20).contains(&about),
            "{about} for {longest}"
        );
    }
}
