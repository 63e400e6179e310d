//! All probes of a node, read together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use fiec_schemas::hardware::{Reading, Signal, Threshold};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::contention::ContentionProbe;
use crate::descriptor::cpus;
use crate::device::{DeviceHandle, DeviceProbe};
use crate::envelope::Envelopes;
use crate::latency::{LatencyConfig, LatencyProbe, LatencyRecorder};
use crate::memory::{MemoryLimit, MemoryProbe};
use crate::numa::NumaProbe;
use crate::power::HostPowerProbe;
use crate::simulated::FileSource;
use crate::stall::StallProbe;
use crate::tcp::ConnectionProbe;
use crate::thermal::HostThermalProbe;
use crate::watch::{PressureWatch, Wake, at_rest};

/// The settings of a node's probes.
#[derive(Debug, Clone)]
pub struct SamplerConfig {
    /// The limit of M.
    pub memory: MemoryLimit,
    /// Folder where further process trees register for a declared budget (`tree/*.pid`).
    pub run_dir: Option<PathBuf>,
    /// The parameters of L.
    pub latency: LatencyConfig,
    /// Whether to measure this process's connections to the broker.
    pub connections: bool,
    /// Whether to measure NVIDIA devices, if there is a driver.
    pub devices: bool,
    /// A file of simulated devices that replaces the machine's own.
    pub device_file: Option<PathBuf>,
    /// Path of procfs for the host's files: `/proc`, or a recorded tree.
    pub procfs: PathBuf,
    /// Path of sysfs: `/sys`, or a recorded tree.
    pub sysfs: PathBuf,
    /// Called when a vector is due at once: usage crosses a threshold, a stall begins, a device
    /// fails.
    pub wake: Wake,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            memory: MemoryLimit::detect(),
            run_dir: None,
            latency: LatencyConfig::default(),
            connections: true,
            devices: true,
            device_file: None,
            procfs: "/proc".into(),
            sysfs: "/sys".into(),
            wake: Wake::default(),
        }
    }
}

/// All probes of a node.
pub struct Sampler {
    /// Separate from the others, since [`Sampler::fast`] reads it alone.
    memory: Option<MemoryProbe>,
    others: Vec<Box<dyn Probe>>,
    latency: LatencyRecorder,
    watch: Option<PressureWatch>,
    devices: DeviceHandle,
    envelopes: Envelopes,
    /// The offered share of the memory limit, from its last reading.
    offered: f64,
}

impl Sampler {
    /// The probes of a real node.
    pub fn new(config: SamplerConfig) -> Self {
        let latency = LatencyProbe::new(config.latency);
        let recorder = latency.recorder();
        let pressure = |of: &str| config.procfs.join("pressure").join(of);
        let mut stall = StallProbe::at(pressure("memory"));
        if let MemoryLimit::CgroupV2(dir) = &config.memory {
            stall = stall.and(dir.join("memory.pressure"));
        }
        let load = config.procfs.join("loadavg");
        let mut others: Vec<Box<dyn Probe>> = vec![
            Box::new(stall),
            Box::new(ContentionProbe::at(pressure("cpu"), load, cpus())),
            Box::new(latency),
            Box::new(HostPowerProbe::at(&config.sysfs)),
            Box::new(HostThermalProbe::at(&config.sysfs)),
            Box::new(NumaProbe::at(&config.sysfs)),
        ];
        if config.connections {
            others.push(Box::new(ConnectionProbe::own()));
        }
        let mut devices = DeviceHandle::default();
        if config.devices || config.device_file.is_some() {
            let probe = match config.device_file {
                Some(file) => DeviceProbe::of(FileSource::new(file), config.wake.clone()),
                None => DeviceProbe::nvml(config.wake.clone()),
            };
            devices = probe.handle();
            others.push(Box::new(probe));
        }
        let meminfo = config.procfs.join("meminfo");
        let memory =
            MemoryProbe::new(&config.memory, config.run_dir.as_deref()).with_meminfo(&meminfo);
        Self {
            memory: Some(memory),
            others,
            latency: recorder,
            watch: Some(PressureWatch::start(config.wake)),
            devices,
            envelopes: Envelopes::default(),
            offered: 1.0,
        }
    }

    /// Only these probes, for tests. There is no fast reading.
    pub fn of(probes: Vec<Box<dyn Probe>>) -> Self {
        Self {
            memory: None,
            others: probes,
            latency: LatencyRecorder::default(),
            watch: None,
            devices: DeviceHandle::default(),
            envelopes: Envelopes::default(),
            offered: 1.0,
        }
    }

    /// Adds a probe.
    pub fn push(&mut self, probe: Box<dyn Probe>) {
        self.others.push(probe);
    }

    /// The recorder of round trips.
    pub fn latency(&self) -> LatencyRecorder {
        self.latency.clone()
    }

    /// The envelopes of this node. A change applies from the next reading on.
    pub fn envelopes(&self) -> Envelopes {
        self.envelopes.clone()
    }

    /// The raw facts of devices.
    pub fn devices(&self) -> DeviceHandle {
        self.devices.clone()
    }

    /// Sets the kernel's triggers at the thresholds of M, high and low, and at the node's threshold
    /// of M stall. `memory` has the node's thresholds and those of executions. Cheap without a
    /// change. Call it repeatedly, since limits and file pages change.
    pub fn arm(&mut self, memory: &[Threshold], stall: Option<Threshold>) {
        if let (Some(watch), Some(probe)) = (&mut self.watch, &mut self.memory) {
            let shares = shares(memory, self.offered);
            watch.arm(&probe.levels(), &shares, stall.map(|t| t.high));
        }
    }

    /// Returns the time until [`Sampler::fast`] is due again, between 20 and 250 ms. It is short
    /// enough to see a crossing soon, for thresholds without a trigger.
    pub fn next_look(&self, memory: &[Threshold]) -> Duration {
        match (&self.memory, &self.watch) {
            (Some(probe), Some(watch)) => {
                probe.next_look(&shares(memory, self.offered), |dir| watch.covers(dir))
            }
            _ => at_rest(),
        }
    }

    /// Returns every component of H(t), missing ones included. A probe that panics is logged and
    /// dropped. The others continue.
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
        self.envelopes.hold(&mut out, now);
        self.offered = offered(find(&out, Signal::Memory, None));
        out
    }

    /// Measures memory alone, for frequent checks. Returns none if it cannot be measured;
    /// [`Sampler::sample`] reports the reason.
    pub fn fast(&mut self, now: Timestamp) -> Option<Reading> {
        let mut reading = self.memory.as_mut()?.measure(now);
        self.envelopes.hold(std::slice::from_mut(&mut reading), now);
        self.offered = offered(Some(&reading));
        Some(reading).filter(|r| r.value.is_some())
    }
}

/// The share of its limit that a reading's envelope offers, or 1 without an envelope.
fn offered(reading: Option<&Reading>) -> f64 {
    let share = reading.and_then(|r| Some(r.envelope.as_ref()?.cap / r.limit?));
    share
        .filter(|s| s.is_finite())
        .map_or(1.0, |s| s.clamp(0.0, 1.0))
}

/// The shares of a limit at which a threshold begins or ends, without duplicates.
fn shares(thresholds: &[Threshold], offered: f64) -> Vec<f64> {
    let ends = thresholds.iter().flat_map(|t| [t.high, t.low]);
    let mut shares: Vec<f64> = ends.map(|share| share * offered).collect();
    shares.sort_by(f64::total_cmp);
    shares.dedup();
    shares
}

/// Whether the readings differ from the published ones. Three differences count: a value by more
/// than its signal's declared step ([`Signal::step`]), its presence, and the set of signals and
/// places. Parts of the host do not count. Compare with the last *published* readings, so that a
/// slow drift counts as well.
pub fn changed(previous: &[Reading], current: &[Reading]) -> bool {
    let own = |readings: &[Reading]| readings.iter().filter(|r| !r.is_part()).count();
    own(previous) != own(current)
        || current.iter().filter(|c| !c.is_part()).any(|c| {
            match find(previous, c.signal, c.device.as_deref()).map(|p| (p.value, c.value)) {
                None | Some((Some(_), None) | (None, Some(_))) => true,
                Some((Some(was), Some(is))) => (is - was).abs() > c.signal.step(),
                Some((None, None)) => false,
            }
        })
}

/// Finds the reading of a signal at a place.
pub(crate) fn find<'a>(
    readings: &'a [Reading],
    signal: Signal,
    device: Option<&str>,
) -> Option<&'a Reading> {
    readings
        .iter()
        .find(|r| r.signal == signal && r.device.as_deref() == device)
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
        assert!(!changed(&[m(Some(0.50))], &[m(Some(0.519))]));
        assert!(changed(&[m(Some(0.50))], &[m(Some(0.53))]));
        assert!(changed(&[m(Some(0.0))], &[m(None)]));
        assert!(changed(&[m(None)], &[m(Some(0.0))]));
        assert!(!changed(&[m(None)], &[m(None)]));
        assert!(changed(&[], &[m(None)]));
        assert!(changed(&[m(Some(0.5))], &[d(Some(0.5))]));
        assert!(!changed(
            &[m(Some(0.5)), d(Some(0.1))],
            &[d(Some(0.1)), m(Some(0.5))],
        ));
        let c = |v| reading(Signal::Contention, None, Some(v));
        assert!(!changed(&[c(0.50)], &[c(0.58)]) && changed(&[c(0.50)], &[c(0.61)]));
        let part = |v| reading(Signal::Memory, Some("numa:1"), Some(v));
        assert!(!changed(&[m(None)], &[m(None), part(0.9)]));
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
