//! C of the host: contention for processors.

use std::path::PathBuf;

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::kernel_file::{KernelFile, Once, invalid};
use crate::reading::Make;
use crate::stall::avg10;

/// PSI `cpu some` avg10 as a share. If the kernel has no PSI: min(1, load1 / processors).
pub struct ContentionProbe {
    pressure: KernelFile,
    load: KernelFile,
    cpus: u32,
    once: Once,
}

impl ContentionProbe {
    /// The probe of the host, whose load is shared by `cpus` processors.
    pub fn host(cpus: u32) -> Self {
        Self::at("/proc/pressure/cpu", "/proc/loadavg", cpus)
    }

    /// A probe of files in those formats.
    pub fn at(pressure: impl Into<PathBuf>, load: impl Into<PathBuf>, cpus: u32) -> Self {
        Self {
            pressure: KernelFile::new(pressure),
            load: KernelFile::new(load),
            cpus: cpus.max(1),
            once: Once::default(),
        }
    }
}

impl Probe for ContentionProbe {
    fn name(&self) -> &'static str {
        "contention"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let make = |unit, source| Make {
            signal: Signal::Contention,
            device: None,
            unit,
            source,
            at: now,
        };
        let psi = self
            .pressure
            .read()
            .ok()
            .and_then(|text| avg10(text, "some"));
        if let Some(some) = psi {
            let source = format!("{} some", self.pressure.path().display());
            out.push(make("percent", &source).value(some / 100.0, some, Some(100.0)));
            return;
        }
        let source = self.load.path().display().to_string();
        let load = self.load.read().and_then(|text| {
            let word = text.split(' ').next().unwrap_or_default();
            word.parse::<f64>()
                .map_err(|_| invalid(format!("no load average in {text:?}")))
        });
        out.push(match load {
            Ok(load) => {
                let cpus = f64::from(self.cpus);
                make("ratio", &source).value(load / cpus, load, Some(cpus))
            }
            Err(e) => {
                self.once
                    .warn("contention", &format!("no PSI, and {source}: {e}"));
                make("ratio", &source).missing(e.to_string())
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_psi_the_load_is_held_against_the_processors() {
        let dir = tempfile::tempdir().unwrap();
        let load = dir.path().join("loadavg");
        std::fs::write(&load, "1.50 0.72 0.64 2/81 14769\n").unwrap();
        let mut out = Vec::new();
        ContentionProbe::at("/nonexistent", &load, 6).read(Timestamp::from_micros(1), &mut out);
        std::fs::write(
            dir.path().join("cpu"),
            "some avg10=12.50 avg60=0 avg300=0 total=0\n",
        )
        .unwrap();
        ContentionProbe::at(dir.path().join("cpu"), &load, 6)
            .read(Timestamp::from_micros(1), &mut out);
        ContentionProbe::at("/nonexistent", "/nonexistent", 6)
            .read(Timestamp::from_micros(1), &mut out);
        assert_eq!((out[0].value, out[0].unit.as_str()), (Some(0.25), "ratio"));
        assert_eq!(
            (out[1].value, out[1].unit.as_str()),
            (Some(0.125), "percent")
        );
        assert!(out[2].value.is_none() && out[2].missing.is_some());
    }
}
