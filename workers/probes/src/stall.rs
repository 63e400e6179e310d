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

/// min(1, `some` avg10 / 20 %); 1 when `full` avg10 is over 5 %.
pub struct StallProbe {
    file: KernelFile,
    once: Once,
}

impl StallProbe {
    /// Of the host: `/proc/pressure/memory`.
    pub fn host() -> Self {
        Self::at("/proc/pressure/memory")
    }

    /// Of a file in that format, e.g. a cgroup's `memory.pressure`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            file: KernelFile::new(path),
            once: Once::default(),
        }
    }
}

impl Probe for StallProbe {
    fn name(&self) -> &'static str {
        "stall"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let source = self.file.path().display().to_string();
        let make = |source| Make {
            signal: Signal::MemoryStall,
            device: None,
            unit: "percent",
            source,
            at: now,
        };
        let parsed = self.file.read().and_then(|text| {
            let some = avg10(text, "some").ok_or_else(|| invalid("no `some avg10`".into()))?;
            Ok((some, avg10(text, "full").unwrap_or(0.0)))
        });
        out.push(match parsed {
            Ok((_, full)) if full > FULL_LIMIT_PERCENT => {
                make(&format!("{source} full")).value(1.0, full, Some(FULL_LIMIT_PERCENT))
            }
            Ok((some, _)) => make(&format!("{source} some")).value(
                some / SOME_LIMIT_PERCENT,
                some,
                Some(SOME_LIMIT_PERCENT),
            ),
            Err(e) => {
                self.once.warn("stall", &format!("{source}: {e}"));
                make(&source).missing(e.to_string())
            }
        });
    }
}

/// `avg10` of the line that starts with `kind`, in percent.
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
