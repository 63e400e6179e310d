//! Memory that submissions take in this process. JSON may take a hundred times its length once it
//! is read, so each parsed submission is weighed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fiec_schemas::Submission;
use serde_json::Value;

/// Bytes of a JSON value, without the memory that it points to.
const VALUE: usize = size_of::<Value>();
/// Bytes of an object's first node.
const OBJECT: usize = 640;

/// Counter of something in use, such as bytes. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Gauge(Arc<AtomicUsize>);

impl Gauge {
    /// The amount in use.
    pub fn used(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `amount` until the share is dropped.
    pub fn take(&self, amount: usize) -> Share {
        self.0.fetch_add(amount, Ordering::Relaxed);
        Share {
            gauge: self.clone(),
            amount,
        }
    }
}

/// An amount that counts as in use while it lives.
#[derive(Debug)]
pub struct Share {
    gauge: Gauge,
    amount: usize,
}

impl Share {
    /// Splits off a share of this amount, or of what is left.
    pub fn split(&mut self, amount: usize) -> Self {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        Self {
            gauge: self.gauge.clone(),
            amount,
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.gauge.0.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// Upper estimate of a submission's bytes in memory. `text` is the length of its line, which bounds
/// everything except its parameters.
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
        let (a, mut b) = (gauge.take(3), gauge.take(4));
        assert_eq!(gauge.used(), 7);
        drop(a);
        assert_eq!(gauge.used(), 4);
        drop(b.split(1));
        assert_eq!(gauge.used(), 3);
        drop(b.split(9));
        assert_eq!(gauge.used(), 0);
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
