//! Every recording in `tests/recorded` is played through all probes: whatever the machine, each
//! reading keeps the rules, and what is known of a recording is read from it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use fiec_probes::device::{DeviceSource, readings};
use fiec_probes::recording::Recording;
use fiec_probes::{Sampler, conformance};
use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    found.sort();
    found
}

/// All readings of every step, devices included.
fn play(dir: &Path) -> Vec<Vec<Reading>> {
    let recording = Recording::open(dir).unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut sampler = None;
    let mut devices = recording.devices();
    let mut steps = Vec::new();
    for (step, ms) in recording.steps_ms().iter().enumerate() {
        recording.lay_out(step, root.path()).unwrap();
        let now = Timestamp::from_micros(1_700_000_000_000_000 + *ms as i64 * 1_000);
        let sampler = sampler.get_or_insert_with(|| Sampler::new(recording.sampler(root.path())));
        let mut out = sampler.sample(now);
        for facts in devices.as_mut().map(DeviceSource::poll).unwrap_or_default() {
            readings(&facts, now, &mut out);
        }
        conformance::check_all(&out)
            .unwrap_or_else(|e| panic!("{}, step {step}: {e}", dir.display()));
        steps.push(out);
    }
    steps
}

fn of<'a>(readings: &'a [Reading], signal: Signal, place: Option<&str>) -> &'a Reading {
    readings
        .iter()
        .find(|r| r.signal == signal && r.device.as_deref() == place)
        .unwrap_or_else(|| panic!("no {signal} of {place:?} in {readings:?}"))
}

fn near(reading: &Reading, value: f64) {
    let is = reading.value.unwrap_or_else(|| panic!("{reading:?}"));
    assert!((is - value).abs() < 1e-3, "{reading:?}, not {value}");
}

#[test]
fn every_recording_keeps_the_rules_at_every_step() {
    let all = recordings();
    assert!(all.len() >= 2, "{all:?}");
    for dir in all {
        for readings in play(&dir) {
            for signal in [
                Signal::Memory,
                Signal::MemoryStall,
                Signal::Contention,
                Signal::Latency,
                Signal::Power,
                Signal::Thermal,
            ] {
                of(&readings, signal, None);
            }
        }
    }
}

#[test]
fn each_mig_slice_has_its_own_memory_and_what_the_driver_does_not_tell_of_it_is_missing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let steps = play(&folder.join("composed-mig"));
    let [first, second, last] = &steps[..] else {
        panic!("{} steps", steps.len())
    };
    let whole = "GPU-3f2c8a1e-0000-4000-8000-000000000001";
    let slices = [
        ("MIG-7a1b2c3d-0000-5000-8000-00000000000a", [0.9, 0.25]),
        ("MIG-7a1b2c3d-0000-5000-8000-00000000000b", [0.1, 0.5]),
    ];
    near(of(first, Signal::Memory, Some(whole)), 39.0 / 80.0);
    for (slice, memory) in slices {
        for (readings, value) in [first, second].iter().zip(memory) {
            near(of(readings, Signal::Memory, Some(slice)), value);
            near(of(readings, Signal::Errors, Some(slice)), 0.0);
        }
        for signal in [
            Signal::Power,
            Signal::Thermal,
            Signal::Contention,
            Signal::Fabric,
        ] {
            let reading = of(first, signal, Some(slice));
            let why = reading.missing.as_deref().unwrap();
            assert!(
                why.contains(whole) && reading.value.is_none(),
                "{reading:?}"
            );
        }
        // What breaks the device breaks its slices.
        let broken = of(last, Signal::Errors, Some(slice));
        near(broken, 1.0);
        assert!(broken.source.contains("Xid 79"), "{broken:?}");
        near(of(last, Signal::Memory, Some(slice)), memory[1]);
    }
    // The device's own readings stay the device's.
    near(of(first, Signal::Power, Some(whole)), 0.5);
    near(of(first, Signal::Thermal, Some(whole)), 0.5);
}

#[test]
fn two_sockets_with_far_memory_sensors_and_a_device_read_as_composed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let steps = play(&folder.join("composed-two-sockets"));
    let [first, second, third, last] = &steps[..] else {
        panic!("{} steps", steps.len())
    };
    // 12 GiB less 4 GiB of file pages, of 16 GiB; the machine: 64 of 256 GiB.
    near(of(first, Signal::Memory, None), 8.0 / 16.0);
    near(of(first, Signal::Memory, Some("machine")), 0.25);
    near(of(last, Signal::Memory, None), 11.0 / 16.0);
    near(of(first, Signal::Memory, Some("numa:0")), 15.0 / 64.0);
    near(of(first, Signal::Memory, Some("numa:1")), 39.0 / 64.0);
    near(of(first, Signal::Memory, Some("numa:2")), 27.0 / 128.0);
    // The cgroup's stall is worse than the host's, until the host's is.
    near(of(first, Signal::MemoryStall, None), 0.1);
    near(of(third, Signal::MemoryStall, None), 0.5);
    near(of(last, Signal::MemoryStall, None), 1.0);
    near(of(first, Signal::Contention, None), 0.125);
    // Power is a mean over two steps; the hotter package's counter starts again in between.
    assert!(of(first, Signal::Power, None).missing.is_some());
    for readings in [second, third, last] {
        near(of(readings, Signal::Power, None), 123.0 / 205.0);
    }
    near(of(first, Signal::Thermal, None), 25.0 / 60.0);
    near(of(third, Signal::Thermal, None), 50.0 / 60.0);
    assert!(of(first, Signal::Latency, None).missing.is_some());
    let device = Some("GPU-3f2c8a1e-0000-4000-8000-000000000001");
    near(of(first, Signal::Memory, device), 0.25);
    near(of(third, Signal::Memory, device), 0.9);
    near(of(third, Signal::Thermal, device), 1.0);
    near(of(first, Signal::Fabric, device), 0.5);
    near(of(third, Signal::Errors, device), 0.0);
    near(of(last, Signal::Errors, device), 1.0);
}
