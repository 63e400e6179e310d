//! A probe that replays a recorded trace, for tests and experiments.
//!
//! A trace is a file of JSON lines, each one [`Reading`]. Time is relative to the first line, and
//! starts with the first read. Blank lines and lines that start with `#` are ignored.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::{Probe, conformance};

/// An error in a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace: {0}")]
    Io(#[from] io::Error),
    /// A line is no reading, breaks a rule of readings, or goes back in time.
    #[error("trace line {line}: {rule}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// The rule.
        rule: String,
    },
}

/// Replays a trace: each read returns the latest reading of each signal and place.
pub struct TraceProbe {
    trace: Vec<Reading>,
    next: usize,
    started: Option<Timestamp>,
    current: BTreeMap<(Signal, Option<String>), Reading>,
}

impl TraceProbe {
    /// Parses JSON lines.
    ///
    /// # Errors
    /// The line and the rule that it breaks.
    pub fn from_json_lines(lines: impl BufRead) -> Result<Self, TraceError> {
        let mut trace: Vec<Reading> = Vec::new();
        for (index, text) in lines.lines().enumerate() {
            let text = text?;
            if text.trim().is_empty() || text.starts_with('#') {
                continue;
            }
            let fail = |rule| TraceError::Line {
                line: index + 1,
                rule,
            };
            let reading: Reading = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
            conformance::check(&reading).map_err(fail)?;
            if trace.last().is_some_and(|last| last.at > reading.at) {
                return Err(fail(format!("{} is before the line above it", reading.at)));
            }
            trace.push(reading);
        }
        Ok(Self::new(trace))
    }

    /// A trace of readings in the order of their times.
    pub fn new(trace: Vec<Reading>) -> Self {
        Self {
            trace,
            next: 0,
            started: None,
            current: BTreeMap::new(),
        }
    }

    /// Whether every line was replayed.
    pub fn is_over(&self) -> bool {
        self.next == self.trace.len()
    }
}

impl Probe for TraceProbe {
    fn name(&self) -> &'static str {
        "trace"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let Some(first) = self.trace.first() else {
            return;
        };
        let shift = self.started.get_or_insert(now).micros() - first.at.micros();
        while let Some(reading) = self.trace.get(self.next) {
            let at = Timestamp::from_micros(reading.at.micros() + shift);
            if at > now {
                break;
            }
            let key = (reading.signal, reading.device.clone());
            self.current.insert(
                key,
                Reading {
                    at,
                    ..reading.clone()
                },
            );
            self.next += 1;
        }
        out.extend(self.current.values().cloned());
    }
}

/// Writes readings as a trace.
///
/// # Errors
/// They cannot be written.
pub fn record(readings: &[Reading], to: &mut impl Write) -> io::Result<()> {
    for reading in readings {
        serde_json::to_writer(&mut *to, reading)?;
        to.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::Make;

    fn at(value: f64, s: i64) -> Reading {
        let at = Timestamp::from_micros(s * 1_000_000);
        Make {
            signal: Signal::Memory,
            device: None,
            unit: "bytes",
            source: "recorded",
            at,
        }
        .value(value, 1.0, None)
    }

    #[test]
    fn a_recorded_trace_is_replayed_at_its_own_pace_from_the_first_read() {
        let mut text = b"# a comment\n\n".to_vec();
        record(&[at(0.1, 50), at(0.9, 52)], &mut text).unwrap();
        let mut probe = TraceProbe::from_json_lines(text.as_slice()).unwrap();
        let mut value = |s: i64| {
            let mut out = Vec::new();
            probe.read(Timestamp::from_micros(s * 1_000_000), &mut out);
            (out[0].value.unwrap(), out[0].at.micros() / 1_000_000)
        };
        assert_eq!(value(100), (0.1, 100));
        assert_eq!(value(101), (0.1, 100));
        assert_eq!(value(102), (0.9, 102));
        assert!(probe.is_over());
    }

    #[test]
    fn a_bad_line_is_named() {
        let fails = |lines: &[u8]| {
            TraceProbe::from_json_lines(lines)
                .err()
                .unwrap()
                .to_string()
        };
        let mut back = Vec::new();
        record(&[at(0.1, 2), at(0.1, 1)], &mut back).unwrap();
        assert!(fails(&back).starts_with("trace line 2:"));
        assert!(fails(b"\n{}").starts_with("trace line 2:"));
        let mut outside = Vec::new();
        record(
            &[Reading {
                value: Some(1.5),
                ..at(0.1, 1)
            }],
            &mut outside,
        )
        .unwrap();
        assert!(fails(&outside).contains("outside [0, 1]"));
    }
}
