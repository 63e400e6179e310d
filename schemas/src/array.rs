//! Arrays: lines that become many submissions.

use serde_json::Value;

use crate::ids::ClientId;
use crate::submission::{FieldError, Submission};

/// Text that the index of an element replaces.
const INDEX: &str = "{index}";

impl Submission {
    /// Number of submissions that the line becomes.
    pub fn count(&self) -> usize {
        self.array.map_or(1, |array| array.count as usize)
    }

    /// The elements of the array in order of their indices from 0, or the submission itself. In
    /// parameters, labels and `after`, the index replaces the text `{index}`. A parameter that is
    /// exactly `"{index}"` becomes the number. A client's id gets the suffix `-<index>`. Elements
    /// are made one at a time, because all together may be a thousand times as large as the line.
    pub fn elements(self) -> Elements {
        let array = self.array;
        let plain = Submission {
            array: None,
            ..self
        };
        Elements {
            plain,
            is_array: array.is_some(),
            next: 0,
            count: array.map_or(1, |array| array.count),
        }
    }

    /// All of [`Submission::elements`] at once.
    ///
    /// # Errors
    /// The field that breaks a rule after the index is inserted.
    pub fn expand(self) -> Result<Vec<Submission>, FieldError> {
        self.elements().collect()
    }

    fn element(&self, index: u32) -> Result<Submission, FieldError> {
        let mut element = self.clone();
        let number = index.to_string();
        if let Some(id) = &self.id {
            let id = ClientId::new(format!("{id}-{number}")).map_err(|error| {
                FieldError::new("id", format!("with the index {index} at its end: {error}"))
            })?;
            element.id = Some(id);
        }
        put_in(&mut element.params, index, &number);
        for value in element.labels.values_mut() {
            put_in_text(value, &number);
        }
        for dependency in &mut element.after {
            put_in_text(&mut dependency.id, &number);
        }
        element.check()?;
        Ok(element)
    }
}

/// The submissions of a line, made one at a time.
#[derive(Debug)]
pub struct Elements {
    plain: Submission,
    is_array: bool,
    next: u32,
    count: u32,
}

impl Elements {
    /// Index of the next element. `None` if the line is no array.
    pub fn index(&self) -> Option<u32> {
        self.is_array.then_some(self.next)
    }
}

impl Iterator for Elements {
    type Item = Result<Submission, FieldError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.count {
            return None;
        }
        let index = self.next;
        self.next += 1;
        Some(match self.is_array {
            true => self.plain.element(index),
            false => Ok(self.plain.clone()),
        })
    }
}

fn put_in_text(text: &mut String, number: &str) {
    if text.contains(INDEX) {
        *text = text.replace(INDEX, number);
    }
}

fn put_in(value: &mut Value, index: u32, number: &str) {
    match value {
        Value::String(text) if text == INDEX => *value = Value::from(index),
        Value::String(text) => put_in_text(text, number),
        Value::Array(list) => list.iter_mut().for_each(|v| put_in(v, index, number)),
        Value::Object(map) => map.values_mut().for_each(|v| put_in(v, index, number)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
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
    fn what_is_no_array_stays_as_it_is() {
        let line = r#"{"program":"mine@1","params":{"x":"{index}"}}"#;
        let one = Submission::parse(line.as_bytes()).unwrap();
        assert_eq!(one.clone().expand().unwrap(), [one]);
    }

    #[test]
    fn an_element_that_breaks_a_rule_is_named_by_its_field() {
        let long = "x".repeat(63);
        let line = format!(r#"{{"id":"{long}","program":"mine@1","array":{{"count":2}}}}"#);
        let error = expanded(&line).unwrap_err();
        assert_eq!(error.field, "id");
        assert!(error.reason.contains("index 0"), "{}", error.reason);
        // An element cannot depend on itself.
        let line = r#"{"id":"a","program":"mine@1","array":{"count":2},"after":[{"id":"a-1"}]}"#;
        assert_eq!(expanded(line).unwrap_err().field, "after[0].id");
    }
}
