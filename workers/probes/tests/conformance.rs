//! One suite over all probes: whatever they measure or cannot, every reading keeps the rules.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fiec_probes::contention::ContentionProbe;
use fiec_probes::device::DeviceProbe;
use fiec_probes::fake::{TraceProbe, record};
use fiec_probes::latency::{LatencyConfig, LatencyProbe};
use fiec_probes::numa::NumaProbe;
use fiec_probes::power::HostPowerProbe;
use fiec_probes::stall::StallProbe;
use fiec_probes::tcp::{Connection, ConnectionProbe, ConnectionSource};
use fiec_probes::thermal::HostThermalProbe;
use fiec_probes::{MemoryLimit, MemoryProbe, Probe, Sampler, SamplerConfig, Wake, conformance};
use fiec_schemas::hardware::Signal;
use fiec_schemas::ids::Timestamp;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(1_700_000_000_000_000 + ms * 1000)
}

/// A kernel that tells nothing.
struct NoConnections;

impl ConnectionSource for NoConnections {
    fn connections(&mut self) -> Result<Vec<Connection>, String> {
        Err("no /proc".to_owned())
    }
}

/// Each probe as it is on this machine, and as it is where its source is not there.
fn probes() -> Vec<(&'static str, Box<dyn Probe>)> {
    let fed = LatencyProbe::new(LatencyConfig::default());
    [100.0, 90_000.0].into_iter().for_each(|us| fed.record(us));
    let declared = |root_pid| MemoryLimit::Declared {
        bytes: 1 << 20,
        root_pid,
    };
    let memory = |limit: MemoryLimit| Box::new(MemoryProbe::new(&limit, None));
    let mut trace = Vec::new();
    let mut recorded = Sampler::new(SamplerConfig {
        devices: false,
        ..Default::default()
    });
    record(&recorded.sample(at(0)), &mut trace).unwrap();
    vec![
        ("memory of the host", memory(MemoryLimit::Host)),
        ("memory as detected", memory(MemoryLimit::detect())),
        ("memory of a budget", memory(declared(std::process::id()))),
        (
            "memory of a budget without process",
            memory(declared(u32::MAX - 1)),
        ),
        (
            "memory of no cgroup v1",
            memory(MemoryLimit::CgroupV1("/nonexistent".into())),
        ),
        (
            "memory of no cgroup v2",
            memory(MemoryLimit::CgroupV2("/nonexistent".into())),
        ),
        ("stall", Box::new(StallProbe::host())),
        (
            "stall without PSI",
            Box::new(StallProbe::at("/nonexistent")),
        ),
        ("contention", Box::new(ContentionProbe::host(2))),
        (
            "contention of nothing",
            Box::new(ContentionProbe::at("/nonexistent", "/nonexistent", 0)),
        ),
        ("latency", Box::new(fed)),
        (
            "latency without samples",
            Box::new(LatencyProbe::new(LatencyConfig::default())),
        ),
        ("power", Box::new(HostPowerProbe::at(Path::new("/sys")))),
        (
            "power of nothing",
            Box::new(HostPowerProbe::at(Path::new("/nonexistent"))),
        ),
        (
            "temperature",
            Box::new(HostThermalProbe::at(Path::new("/sys"))),
        ),
        (
            "temperature of nothing",
            Box::new(HostThermalProbe::at(Path::new("/nonexistent"))),
        ),
        ("memory nodes", Box::new(NumaProbe::at(Path::new("/sys")))),
        ("connections", Box::new(ConnectionProbe::own())),
        (
            "connections of nothing",
            Box::new(ConnectionProbe::of(NoConnections)),
        ),
        ("devices", Box::new(DeviceProbe::nvml(Wake::default()))),
        (
            "trace",
            Box::new(TraceProbe::from_json_lines(trace.as_slice()).unwrap()),
        ),
    ]
}

#[test]
fn every_reading_of_every_probe_keeps_the_rules() {
    for (what, mut probe) in probes() {
        assert!(!probe.name().is_empty());
        for ms in [0, 50, 5_000, 40_000, 10] {
            let mut out = Vec::new();
            probe.read(at(ms), &mut out);
            conformance::check_all(&out).unwrap_or_else(|e| panic!("{what}: {e}"));
            let optional = ["devices", "memory nodes"].contains(&what);
            assert!(optional || !out.is_empty(), "{what} says nothing");
            for reading in &out {
                assert!(
                    reading.at <= at(ms) || what == "trace",
                    "{what} is dated ahead"
                );
            }
        }
    }
}

#[test]
fn what_cannot_be_measured_is_missing_and_never_zero() {
    let hopeless = ["without", "of no", "of nothing"];
    for (what, mut probe) in probes() {
        if hopeless.iter().any(|word| what.contains(word)) {
            let mut out = Vec::new();
            probe.read(at(0), &mut out);
            assert_eq!(out.len(), 1, "{what}");
            assert!(
                out[0].value.is_none() && out[0].raw.is_none(),
                "{what}: {:?}",
                out[0]
            );
            assert!(out[0].missing.is_some(), "{what}");
        }
    }
}

#[test]
fn a_sample_has_every_host_signal_once_and_fast_agrees_on_memory() {
    let mut sampler = Sampler::new(SamplerConfig {
        memory: MemoryLimit::Host,
        ..Default::default()
    });
    sampler.latency().record(120.0);
    let sample = sampler.sample(at(0));
    conformance::check_all(&sample).unwrap();
    for signal in [
        Signal::Memory,
        Signal::MemoryStall,
        Signal::Contention,
        Signal::Latency,
        Signal::Power,
        Signal::Thermal,
    ] {
        let here = sample
            .iter()
            .filter(|r| r.signal == signal && r.device.is_none());
        assert_eq!(here.count(), 1, "{signal}");
    }
    let memory = sample
        .iter()
        .find(|r| r.signal == Signal::Memory && r.device.is_none())
        .unwrap();
    let fast = sampler.fast(at(0)).unwrap();
    assert!((memory.value.unwrap() - fast.value.unwrap()).abs() < 0.05);
}

/// Counts warnings.
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_probe_that_fails_is_reported_once_and_takes_no_other_along() {
    let warnings = Arc::new(AtomicUsize::new(0));
    let failing: Vec<Box<dyn Probe>> = vec![
        Box::new(StallProbe::at("/nonexistent")),
        Box::new(ContentionProbe::at("/nonexistent", "/nonexistent", 1)),
        Box::new(MemoryProbe::new(
            &MemoryLimit::CgroupV1("/nonexistent".into()),
            None,
        )),
    ];
    let reports = failing.len();
    tracing::subscriber::with_default(Warnings(Arc::clone(&warnings)), || {
        let mut sampler = Sampler::of(failing);
        sampler.push(Box::new(MemoryProbe::new(&MemoryLimit::Host, None)));
        for second in 0..5 {
            let sample = sampler.sample(at(second * 1_000));
            let measured = sample.iter().filter(|r| r.value.is_some());
            assert_eq!(measured.count(), 1, "{sample:?}");
            assert_eq!(sample.len(), reports + 1);
        }
    });
    assert_eq!(warnings.load(Ordering::Relaxed), reports);
}
