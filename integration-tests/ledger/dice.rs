//! Where garbage comes from: noise, and what was right before it was spoiled; the same for the same
//! seed, which is printed.

use std::time::SystemTime;

use async_nats::HeaderMap;
use fiec_lab::chaos::schedule;
use fiec_schemas::messages::HANDOVER_HEADER;
use fiec_schemas::{Submission, subjects};
use serde_json::{Value, json};

/// Draws the garbage: the same for the same seed.
pub struct Dice(schedule::Dice);

impl Dice {
    pub fn new() -> Self {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
        let seed = std::env::var("FIEC_SEED").map_or(now, |seed| seed.parse().unwrap());
        println!("garbage of FIEC_SEED={seed}");
        Self(schedule::Dice::new(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.draw()
    }

    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).unwrap()
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    pub fn noise(&mut self) -> Vec<u8> {
        let length = self.below(600);
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// Cuts, repeats or overwrites a few bytes.
    fn spoil(&mut self, text: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        for _ in 0..=self.below(3) {
            let at = self.below(text.len());
            let end = (at + 1 + self.below(12)).min(text.len());
            match self.below(4) {
                0 => text.truncate(at),
                1 => drop(text.drain(at..end)),
                2 => {
                    let again = text[at..end].to_vec();
                    text.splice(at..at, again);
                }
                _ => {
                    let byte = self.next() as u8;
                    text.get_mut(at).into_iter().for_each(|old| *old = byte);
                }
            }
        }
        text
    }

    /// Puts something else in the place of one value, takes a field away or adds one.
    fn twist(&mut self, value: &mut Value) {
        let deeper = self.below(4) > 0;
        match value {
            Value::Object(fields) if deeper && !fields.is_empty() => {
                let keys: Vec<String> = fields.keys().cloned().collect();
                let key = self.pick(&keys).clone();
                match self.below(8) {
                    0 => drop(fields.remove(&key)),
                    1 => drop(fields.insert("nonsense".to_owned(), json!({"deep": [1, 2]}))),
                    _ => self.twist(fields.get_mut(&key).unwrap()),
                }
            }
            Value::Array(items) if deeper && !items.is_empty() => {
                let at = self.below(items.len());
                self.twist(&mut items[at]);
            }
            other => {
                let others = [
                    json!(null),
                    json!(true),
                    json!(-1),
                    json!(0),
                    json!(1.5),
                    json!(1e308),
                    json!(u64::MAX),
                    json!(""),
                    json!("\u{0}../../etc"),
                    json!("x".repeat(70)),
                    json!([[[]]]),
                    json!({}),
                ];
                *other = self.pick(&others).clone();
            }
        }
    }

    /// Something that was one of these before, or nothing at all.
    pub fn garbage(&mut self, models: &[Value]) -> Vec<u8> {
        let mut model = self.pick(models).clone();
        match self.below(5) {
            0 => self.noise(),
            1 | 2 => self.spoil(model.to_string().as_bytes()),
            _ => {
                self.twist(&mut model);
                model.to_string().into_bytes()
            }
        }
    }

    /// Headers that mean nothing, or say what cannot be.
    pub fn headers(&mut self) -> HeaderMap {
        let all = [
            ("Fiec-Stamp", "soon"),
            ("Fiec-Stamp", "-1"),
            ("Fiec-Stamp", "9223372036854775807"),
            ("Fiec-Stamp", "-9223372036854775808"),
            ("Fiec-Atomic", "true"),
            ("Fiec-Atomic", "perhaps"),
            (subjects::EVENT_HEADER, "{\"v\":1"),
            (HANDOVER_HEADER, "{}"),
            ("Content-Type", "application/xml"),
        ];
        let mut headers = HeaderMap::new();
        for _ in 0..self.below(3) {
            let (name, value) = *self.pick(&all);
            headers.insert(name, value);
        }
        headers
    }
}

/// Submissions as they should be; each computes for a moment.
pub fn submissions() -> Vec<Value> {
    let params = json!({"capsules": 2, "state_bytes": 64});
    vec![
        json!({"id": "one", "program": "synthetic@1", "params": params, "commit": {"every": 1},
            "viability": {"memory": {"high": 0.9, "low": 0.5, "dwell_ms": 100}}, "retries": 1}),
        json!({"program": "cg@1", "params": {"matrix": {"poisson2d": {"n": 8}}},
            "requires": {"nodes": ["n1"], "memory_bytes": 1_048_576}, "labels": {"a": "b"}}),
        json!({"id": "many", "batch": "b", "program": "synthetic@1", "params": params,
            "array": {"count": 2}, "at_once": 1, "deadline": {"within_s": 60}, "priority": -1}),
        json!({"program": "gemm@1", "params": {"a": {"random": {"n": 8, "seed": 1}},
            "b": {"random": {"n": 8, "seed": 2}}, "tile": 4}, "spread": {"up_to": 2}}),
    ]
}

/// Whether a line may be sent though it is a submission: one that computes no more than its model.
pub fn is_small(line: &[u8], models: &[Value]) -> bool {
    Submission::parse(line).map_or(true, |spec| {
        let params = json!(spec.params);
        models.iter().any(|m| m["params"] == params) && spec.count() < 9 && spec.gang.is_none()
    })
}
