//! The form of a trace: lines, and JSON without sentences.

use std::fmt::Write as _;

use fiec_policy::{Millis, Now};
use serde_json::Value;

/// The mark in place of a sentence.
pub const MARK: &str = "~";

/// Fields with sentences for people, in events, causes, records, verdicts and proofs.
const SENTENCES: [&str; 10] = [
    "detail",
    "error",
    "missing",
    "reason",
    "rejected",
    "statement",
    "stderr",
    "summary",
    "words",
    "would_help",
];
/// Fields with a user's own names, which may be any text, and a fault, which has no sentence.
const VERBATIM: [&str; 4] = ["fault", "labels", "params", "result"];

/// Replaces each sentence by [`MARK`]. An empty one stays empty, because that is information.
pub fn strip_sentences(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(strip_sentences),
        Value::Object(fields) => {
            for (name, field) in fields {
                let is_sentence = name == "who" && is_phrase(field);
                if is_sentence || SENTENCES.contains(&name.as_str()) {
                    mark(field);
                } else if !VERBATIM.contains(&name.as_str()) {
                    strip_sentences(field);
                }
            }
        }
        _ => {}
    }
}

/// In `who` the policy states why it cancelled a part; a name has no spaces.
fn is_phrase(field: &Value) -> bool {
    field.as_str().is_some_and(|text| text.contains(' '))
}

fn mark(field: &mut Value) {
    match field {
        Value::String(text) if !text.is_empty() => MARK.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(mark),
        Value::Object(_) => strip_sentences(field),
        _ => {}
    }
}

/// Direction of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the policy.
    In,
    /// From the policy.
    Out,
}

/// A line to write.
#[derive(Debug)]
pub struct Line<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of the policy, from 0.
    pub policy: usize,
    /// Direction.
    pub direction: Direction,
    /// Kind of the input or the action.
    pub kind: &'a str,
    /// Time of an input.
    pub now: Option<Now>,
    /// The rest.
    pub body: Option<&'a Value>,
}

impl Line<'_> {
    /// Appends the line to a text.
    pub fn write(&self, text: &mut String) {
        let direction = match self.direction {
            Direction::In => "in",
            Direction::Out => "out",
        };
        let (step, policy, kind) = (self.step, self.policy, self.kind);
        // Writing into a string cannot fail.
        let _ = write!(text, "{step} p{policy} {direction} {kind}");
        if let Some(now) = self.now {
            let _ = write!(text, " {} {}", now.mono.0, now.wall);
        }
        if let Some(body) = self.body {
            let _ = write!(text, " {body}");
        }
        text.push('\n');
    }
}

/// A line that was read.
#[derive(Debug)]
pub struct Read<'a> {
    /// Number of the policy.
    pub policy: usize,
    /// Direction.
    pub direction: Direction,
    /// Kind of the input or the action.
    pub kind: &'a str,
    /// Time of an input.
    pub now: Option<Now>,
    /// The rest, as JSON.
    pub body: Option<&'a str>,
}

impl<'a> Read<'a> {
    /// Reads a line without its line feed.
    ///
    /// # Errors
    /// The rule that the line breaks.
    pub fn parse(line: &'a str) -> Result<Self, String> {
        let (head, body) = match line.find(" {") {
            Some(at) => (line.get(..at), line.get(at + 1..)),
            None => (Some(line), None),
        };
        let words: Vec<&str> = head.unwrap_or_default().split(' ').collect();
        let (step, policy, direction, kind, times) = match words.as_slice() {
            [step, policy, direction, kind, times @ ..] => (step, policy, direction, kind, times),
            _ => return Err("it must have a step, a policy, a direction and a kind".to_owned()),
        };
        step.parse::<u64>()
            .map_err(|_| format!("the step {step:?} must be a number"))?;
        let policy = policy.strip_prefix('p').and_then(|n| n.parse().ok());
        Ok(Self {
            policy: policy.ok_or("the policy must be p and a number, as in p0")?,
            direction: match *direction {
                "in" => Direction::In,
                "out" => Direction::Out,
                other => return Err(format!("the direction {other:?} must be in or out")),
            },
            kind,
            now: match times {
                [] => None,
                [mono, wall] => Some(Now {
                    mono: Millis(
                        mono.parse()
                            .map_err(|_| format!("the milliseconds {mono:?} must be a number"))?,
                    ),
                    wall: wall.parse().map_err(|e| format!("{e}"))?,
                }),
                _ => return Err("both clocks must be there, or none".to_owned()),
            },
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sentences_are_marked_and_names_of_users_are_not() {
        let mut value = json!({
            "cause": {"kind": "preempted", "reason": "it has waited", "rule": "priority"},
            "candidates": [{"node": "n1", "rejected": ["full", "far"]}],
            "events": [{"who": "ann"}, {"who": "policy: its whole has ended"}],
            "stderr": "",
            "spec": {"params": {"reason": "mine"}, "labels": {"detail": "mine"}},
        });
        strip_sentences(&mut value);
        let expected = json!({
            "cause": {"kind": "preempted", "reason": "~", "rule": "priority"},
            "candidates": [{"node": "n1", "rejected": ["~", "~"]}],
            "events": [{"who": "ann"}, {"who": "~"}],
            "stderr": "",
            "spec": {"params": {"reason": "mine"}, "labels": {"detail": "mine"}},
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn keys_are_in_order_whatever_features_of_the_json_library_are_on() {
        let value: Value = serde_json::from_str(r#"{"b":1,"a":{"d":2,"c":3}}"#).unwrap();
        assert_eq!(value.to_string(), r#"{"a":{"c":3,"d":2},"b":1}"#);
    }

    #[test]
    fn a_line_reads_as_it_is_written_and_a_broken_one_says_its_rule() {
        let body = json!({"a": 1});
        let now = Now {
            mono: Millis(5),
            wall: fiec_schemas::Timestamp::from_micros(7),
        };
        let line = Line {
            step: 3,
            policy: 1,
            direction: Direction::In,
            kind: "gone",
            now: Some(now),
            body: Some(&body),
        };
        let mut text = String::new();
        line.write(&mut text);
        let expected = "3 p1 in gone 5 1970-01-01T00:00:00.000007Z {\"a\":1}\n";
        assert_eq!(text, expected);
        let read = Read::parse(text.trim_end()).unwrap();
        assert_eq!(
            (read.policy, read.direction, read.kind),
            (1, Direction::In, "gone")
        );
        assert_eq!((read.now, read.body), (Some(now), Some(r#"{"a":1}"#)));
        for (line, word) in [
            ("", "must have"),
            ("x p0 in tick", "step"),
            ("1 q in tick", "policy"),
            ("1 p0 on tick", "direction"),
            ("1 p0 in tick 5", "clocks"),
            ("1 p0 in tick 5 noon", "RFC 3339"),
        ] {
            let problem = Read::parse(line).unwrap_err();
            assert!(problem.contains(word), "{problem}");
        }
    }
}
