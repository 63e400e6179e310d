//! All probes of a node, read together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use fiec_schemas::hardware::Reading;
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::contention::ContentionProbe;
use crate::descriptor::cpus;
use crate::device::DeviceProbe;
use crate::latency::{LatencyConfig, LatencyProbe, LatencyRecorder};
use crate::memory::{MemoryLimit, MemoryProbe};
use crate::stall::StallProbe;

/// What a node measures, and against what.
#[derive(Debug, Clone)]
pub struct SamplerConfig {
    /// What M is measured against.
    pub memory: MemoryLimit,
    /// Where further process trees register against a declared budget (`tree/*.pid`).
    pub run_dir: Option<PathBuf>,
    /// How round trips become L.
    pub latency: LatencyConfig,
    /// Whether NVIDIA devices are measured, where there is a driver.
    pub devices: bool,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            memory: MemoryLimit::detect(),
            run_dir: None,
            latency: LatencyConfig::default(),
            devices: true,
        }
    }
}

/// All probes of a node.
pub struct Sampler {
    /// Apart from the others, since it alone is also read by [`Sampler::fast`].
    memory: Option<MemoryProbe>,
    others: Vec<Box<dyn Probe>>,
    latency: LatencyRecorder,
}

impl Sampler {
    /// The probes of a real node.
    pub fn new(config: SamplerConfig) -> Self {
        let latency = LatencyProbe::new(config.latency);
        let recorder = latency.recorder();
        let mut others: Vec<Box<dyn Probe>> = vec![
            Box::new(StallProbe::host()),
            Box::new(ContentionProbe::host(cpus())),
            Box::new(latency),
        ];
        if config.devices {
            others.push(Box::new(DeviceProbe::nvml()));
        }
        let memory = MemoryProbe::new(&config.memory, config.run_dir.as_deref());
        Self {
            memory: Some(memory),
            others,
            latency: recorder,
        }
    }

    /// Only these probes, for tests: there is no fast reading.
    pub fn of(probes: Vec<Box<dyn Probe>>) -> Self {
        Self {
            memory: None,
            others: probes,
            latency: LatencyRecorder::default(),
        }
    }

    /// Adds a probe.
    pub fn push(&mut self, probe: Box<dyn Probe>) {
        self.others.push(probe);
    }

    /// Where round trips are reported.
    pub fn latency(&self) -> LatencyRecorder {
        self.latency.clone()
    }

    /// Every component of H(t) now, missing ones included. A probe that panics is said in the log
    /// and not asked again; the others go on.
    pub fn sample(&mut self, now: Timestamp) -> Vec<Reading> {
        let mut out = Vec::with_capacity(16);
        if let Some(memory) = &mut self.memory {
            memory.read(now, &mut out);
        }
        self.others.retain_mut(|probe| {
            let sound = out.len();
            let result = catch_unwind(AssertUnwindSafe(|| probe.read(now, &mut out)));
            if result.is_err() {
                out.truncate(sound);
                tracing::warn!(probe = probe.name(), "panicked; it is not asked again");
            }
            result.is_ok()
        });
        out
    }

    /// Memory alone, for the check many times a second; none when it cannot be measured, which
    /// [`Sampler::sample`] reports with its reason.
    pub fn fast(&mut self, now: Timestamp) -> Option<Reading> {
        self.memory
            .as_mut()
            .map(|m| m.measure(now))
            .filter(|r| r.value.is_some())
    }
}

/// Whether anything changed by more than `step` since what was published last: a value, whether
/// there is one, or which signals and places there are. Compare with the last *published*
/// readings, so that a slow drift is seen as well.
pub fn changed(previous: &[Reading], current: &[Reading], step: f64) -> bool {
    previous.len() != current.len()
        || current.iter().any(|c| {
            let same = |p: &&Reading| p.signal == c.signal && p.device == c.device;
            match previous.iter().find(same).map(|p| (p.value, c.value)) {
                None | Some((Some(_), None) | (None, Some(_))) => true,
                Some((Some(was), Some(is))) => (is - was).abs() > step,
                Some((None, None)) => false,
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::Make;
    use fiec_schemas::hardware::Signal;

    fn reading(signal: Signal, device: Option<&str>, value: Option<f64>) -> Reading {
        let at = Timestamp::from_micros(1);
        let make = Make {
            signal,
            device,
            unit: "ratio",
            source: "test",
            at,
        };
        match value {
            Some(v) => make.value(v, v, None),
            None => make.missing("test"),
        }
    }

    #[test]
    fn a_change_is_more_than_a_step_or_a_value_that_comes_or_goes() {
        let m = |v| reading(Signal::Memory, None, v);
        let d = |v| reading(Signal::Memory, Some("GPU-1"), v);
        assert!(!changed(&[m(Some(0.50))], &[m(Some(0.52))], 0.02 + 1e-9));
        assert!(changed(&[m(Some(0.50))], &[m(Some(0.53))], 0.02));
        assert!(changed(&[m(Some(0.0))], &[m(None)], 0.02));
        assert!(changed(&[m(None)], &[m(Some(0.0))], 0.02));
        assert!(!changed(&[m(None)], &[m(None)], 0.02));
        assert!(changed(&[], &[m(None)], 0.02));
        assert!(changed(&[m(Some(0.5))], &[d(Some(0.5))], 0.02));
        assert!(!changed(
            &[m(Some(0.5)), d(Some(0.1))],
            &[d(Some(0.1)), m(Some(0.5))],
            0.02
        ));
    }

    struct Panics;
    impl Probe for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }
        fn read(&mut self, _: Timestamp, out: &mut Vec<Reading>) {
            out.push(reading(Signal::Power, None, Some(0.1)));
            panic!("a test's probe");
        }
    }

    #[test]
    fn a_probe_that_panics_takes_no_other_along() {
        let dead = StallProbe::at("/nonexistent/psi");
        let mut sampler = Sampler::of(vec![Box::new(Panics), Box::new(dead)]);
        for _ in 0..2 {
            let out = sampler.sample(Timestamp::from_micros(1));
            assert_eq!(out.len(), 1);
            assert_eq!(out[0].signal, Signal::MemoryStall);
        }
        assert!(sampler.fast(Timestamp::from_micros(1)).is_none());
    }
}
