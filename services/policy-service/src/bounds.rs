//! What submissions may take of this process's memory. A text of JSON may take a hundred times its
//! length once it is read, so what is held is weighed as it is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fiec_schemas::Submission;
use serde_json::Value;

/// Bytes that a JSON value takes beside what it points to.
const VALUE: usize = size_of::<Value>();
/// Bytes of an object's first node.
const OBJECT: usize = 640;

/// How many bytes are taken at this moment; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Gauge(Arc<AtomicUsize>);

impl Gauge {
    /// Bytes that are taken.
    pub fn used(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts `bytes` more until the share is dropped.
    pub fn take(&self, bytes: usize) -> Share {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Share {
            gauge: self.clone(),
            bytes,
        }
    }
}

/// Bytes that are counted while it lives.
#[derive(Debug)]
pub struct Share {
    gauge: Gauge,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.gauge.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes that a submission takes in memory, somewhat more than it really does. `text`: bytes of its
/// line, which bound everything but its parameters.
pub fn weight_of(spec: &Submission, text: usize) -> usize {
    size_of::<Submission>() + 3 * text + weight(&spec.params)
}

fn weight(value: &Value) -> usize {
    VALUE
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(weight).sum(),
            Value::Object(map) if map.is_empty() => 0,
            Value::Object(map) => {
                let entry = |(key, value): (&String, &Value)| key.len() + 80 + weight(value);
                OBJECT + map.iter().map(entry).sum::<usize>()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_counted_while_it_lives() {
        let gauge = Gauge::default();
        let (a, b) = (gauge.take(3), gauge.take(4));
        assert_eq!(gauge.used(), 7);
        drop(a);
        assert_eq!(gauge.used(), 4);
        drop(b);
        assert_eq!(gauge.used(), 0);
    }

    #[test]
    fn many_small_objects_weigh_more_than_their_text() {
        let small = vec![r#"{"":0}"#; 1_000].join(",");
        let text = format!(r#"{{"program":"mine@1","params":{{"x":[{small}]}}}}"#);
        let spec = Submission::parse(text.as_bytes()).unwrap();
        assert!(weight_of(&spec, text.len()) > 80 * text.len());
    }
}
