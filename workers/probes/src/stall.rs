//! M stall: time lost waiting for memory, from pressure stall information.

use std::path::PathBuf;

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::kernel_file::{KernelFile, Once, invalid};
use crate::reading::Make;

/// `some` avg10 at which the node counts as fully stalled, in percent.
pub const SOME_LIMIT_PERCENT: f64 = 20.0;
/// `full` avg10 above which the node counts as fully stalled, in percent.
pub const FULL_LIMIT_PERCENT: f64 = 5.0;

/// min(1, `some` avg10 / 20 %), or 1 if `full` avg10 exceeds 5 %. The worst of several files
/// counts.
pub struct StallProbe {
    files: Vec<KernelFile>,
    once: Once,
}

impl StallProbe {
    /// A probe of the host: `/proc/pressure/memory`.
    pub fn host() -> Self {
        Self::at("/proc/pressure/memory")
    }

    /// A probe of a file in that format, such as a cgroup's `memory.pressure`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            files: vec![KernelFile::new(path)],
            once: Once::default(),
        }
    }

    /// Adds a file, if it can be read: the node's own cgroup beside the host.
    #[must_use]
    pub fn and(mut self, path: impl Into<PathBuf>) -> Self {
        self.files.push(KernelFile::new(path));
        self
    }
}

/// Returns (value, raw, limit) and the kind of line, from a file in the kernel's format.
fn stall_of(file: &mut KernelFile) -> std::io::Result<(f64, f64, f64, &'static str)> {
    let text = file.read()?;
    let some = avg10(text, "some").ok_or_else(|| invalid("no `some avg10`".into()))?;
    let full = avg10(text, "full").unwrap_or(0.0);
    Ok(if full > FULL_LIMIT_PERCENT {
        (1.0, full, FULL_LIMIT_PERCENT, "full")
    } else {
        let value = (some / SOME_LIMIT_PERCENT).min(1.0);
        (value, some, SOME_LIMIT_PERCENT, "some")
    })
}

impl Probe for StallProbe {
    fn name(&self) -> &'static str {
        "stall"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let make = |source| Make {
            signal: Signal::MemoryStall,
            device: None,
            unit: "percent",
            source,
            at: now,
        };
        let mut worst: Option<(f64, f64, f64, String)> = None;
        let mut why = None;
        for file in &mut self.files {
            let found = stall_of(file);
            let path = file.path().display();
            match found {
                Ok((value, raw, limit, line)) => {
                    if worst.as_ref().is_none_or(|w| value > w.0) {
                        worst = Some((value, raw, limit, format!("{path} {line}")));
                    }
                }
                Err(e) => {
                    self.once.warn("stall", &format!("{path}: {e}"));
                    why.get_or_insert_with(|| (path.to_string(), e.to_string()));
                }
            }
        }
        out.push(match (worst, why) {
            (Some((value, raw, limit, source)), _) => make(&source).value(value, raw, Some(limit)),
            (None, Some((source, why))) => make(&source).missing(why),
            (None, None) => make("pressure stall information").missing("no file to read"),
        });
    }
}

/// Returns `avg10` of the line that starts with `kind`, in percent.
pub(crate) fn avg10(text: &str, kind: &str) -> Option<f64> {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(kind)?.strip_prefix(' '))?;
    line.split(' ')
        .find_map(|word| word.strip_prefix("avg10="))?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Reading {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        std::fs::write(&path, text).unwrap();
        let mut out = Vec::new();
        StallProbe::at(path).read(Timestamp::from_micros(1), &mut out);
        out.remove(0)
    }

    #[test]
    fn some_is_held_against_twenty_percent_and_full_over_five_is_one() {
        let psi = |some: &str, full: &str| {
            format!(
                "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=9 avg300=9 total=1\n"
            )
        };
        assert_eq!(of(&psi("5.00", "0.00")).value, Some(0.25));
        assert_eq!(of(&psi("50.00", "0.00")).value, Some(1.0));
        assert_eq!(of(&psi("6.00", "5.01")).value, Some(1.0));
        assert_eq!(of(&psi("6.00", "5.00")).value, Some(0.3));
        assert_eq!(of(&psi("6.00", "5.01")).raw, Some(5.01));
    }

    #[test]
    fn a_kernel_without_psi_gives_a_missing_reading() {
        assert!(of("garbage").missing.unwrap().contains("avg10"));
        let mut out = Vec::new();
        StallProbe::at("/nonexistent/psi").read(Timestamp::from_micros(1), &mut out);
        assert_eq!(out[0].value, None);
        assert!(out[0].missing.is_some());
    }
}
