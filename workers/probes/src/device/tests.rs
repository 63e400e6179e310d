use super::*;
use crate::conformance;

fn memory(used: u64, total: u64) -> Fact<DeviceMemory> {
    Ok(DeviceMemory {
        used,
        reserved: 0,
        total,
    })
}

fn healthy() -> DeviceFacts {
    DeviceFacts {
        uuid: "GPU-1".into(),
        memory: memory(25, 100),
        power: Ok((350_000, 700_000)),
        power_capped: false,
        energy_mj: Ok(1_000),
        thermal: Ok((60, 90)),
        thermally_slowed: false,
        utilization: Ok((80, 20)),
        pcie: Ok(Pcie {
            generation: (5, 5),
            width: (16, 16),
            idle: false,
        }),
        nvlink: None,
        fault: Ok(None),
    }
}

fn of(facts: &DeviceFacts, signal: Signal) -> Reading {
    let mut out = Vec::new();
    readings(facts, Timestamp::from_micros(1), &mut out);
    conformance::check_all(&out).unwrap();
    assert_eq!(out.len(), 6);
    out.into_iter().find(|r| r.signal == signal).unwrap()
}

#[test]
fn each_signal_follows_its_formula() {
    let facts = healthy();
    assert_eq!(of(&facts, Signal::Memory).value, Some(0.25));
    assert_eq!(of(&facts, Signal::Power).value, Some(0.5));
    assert_eq!(of(&facts, Signal::Thermal).value, Some(0.5));
    assert_eq!(of(&facts, Signal::Contention).value, Some(0.5));
    assert_eq!(of(&facts, Signal::Fabric).value, Some(0.0));
    assert_eq!(of(&facts, Signal::Errors).value, Some(0.0));
}

#[test]
fn clocks_that_are_held_down_make_power_and_temperature_one() {
    let facts = DeviceFacts {
        power_capped: true,
        thermally_slowed: true,
        ..healthy()
    };
    assert_eq!(of(&facts, Signal::Power).value, Some(1.0));
    assert_eq!(of(&facts, Signal::Thermal).value, Some(1.0));
    assert_eq!(of(&facts, Signal::Thermal).raw, Some(60.0));
    let cold = DeviceFacts {
        thermal: Ok((20, 90)),
        ..healthy()
    };
    assert_eq!(of(&cold, Signal::Thermal).value, Some(0.0));
}

#[test]
fn a_link_at_rest_is_not_degraded_and_the_worse_of_both_fabrics_counts() {
    let pcie = |idle| {
        Ok(Pcie {
            generation: (1, 4),
            width: (16, 16),
            idle,
        })
    };
    let f = |facts: DeviceFacts| of(&facts, Signal::Fabric).value;
    assert_eq!(
        f(DeviceFacts {
            pcie: pcie(true),
            ..healthy()
        }),
        Some(0.0)
    );
    assert_eq!(
        f(DeviceFacts {
            pcie: pcie(false),
            ..healthy()
        }),
        Some(0.75)
    );
    assert_eq!(
        f(DeviceFacts {
            nvlink: Some((9, 18)),
            ..healthy()
        }),
        Some(0.5)
    );
    assert_eq!(
        f(DeviceFacts {
            nvlink: Some((0, 0)),
            ..healthy()
        }),
        Some(0.0)
    );
    let unknown = DeviceFacts {
        pcie: Err("not supported".into()),
        ..healthy()
    };
    assert_eq!(
        of(&unknown, Signal::Fabric).missing.as_deref(),
        Some("not supported")
    );
}

#[test]
fn a_fault_is_one_and_says_what_it_is_and_a_lost_device_has_no_other_values() {
    let gone = || "the device is lost".to_owned();
    let lost = DeviceFacts {
        memory: Err(gone()),
        power: Err(gone()),
        thermal: Err(gone()),
        utilization: Err(gone()),
        pcie: Err(gone()),
        fault: Ok(Some(gone())),
        ..healthy()
    };
    let e = of(&lost, Signal::Errors);
    assert_eq!(e.value, Some(1.0));
    assert!(e.source.contains("lost"));
    assert_eq!(of(&lost, Signal::Memory).value, None);
}

#[test]
fn a_total_of_zero_is_missing_not_a_number() {
    let r = of(
        &DeviceFacts {
            memory: memory(0, 0),
            ..healthy()
        },
        Signal::Memory,
    );
    assert!(r.value.is_none() && r.missing.is_some());
}

struct Scripted(u32);
impl DeviceSource for Scripted {
    fn poll(&mut self) -> Vec<DeviceFacts> {
        self.0 += 1;
        vec![DeviceFacts {
            power: Ok((self.0, 1000)),
            ..healthy()
        }]
    }
    fn wait(&mut self, _: Duration) -> bool {
        false
    }
}

#[test]
fn readings_are_there_at_once_and_cached_between_polls() {
    let mut probe = DeviceProbe::of(Scripted(0), Wake::default());
    let began = Instant::now();
    let mut raws = std::collections::BTreeSet::new();
    let mut out = Vec::new();
    for _ in 0..200 {
        out.clear();
        probe.read(Timestamp::from_micros(10_000_000), &mut out);
        raws.insert(
            out.iter()
                .find(|r| r.signal == Signal::Power)
                .unwrap()
                .raw
                .map(|r| r as u32),
        );
    }
    let polls = 1 + began.elapsed().as_millis() / POLL.as_millis() + 1;
    assert!(
        raws.contains(&Some(1)) && raws.len() as u128 <= polls,
        "{raws:?}"
    );
    conformance::check_all(&out).unwrap();
}

/// A device that fails on request.
struct Failing(std::sync::mpsc::Receiver<()>, bool);
impl DeviceSource for Failing {
    fn poll(&mut self) -> Vec<DeviceFacts> {
        let fault = self.1.then(|| "Xid 79".to_owned());
        vec![DeviceFacts {
            fault: Ok(fault),
            ..healthy()
        }]
    }
    fn wait(&mut self, at_most: Duration) -> bool {
        self.1 |= self.0.recv_timeout(at_most).is_ok();
        self.1
    }
}

#[test]
fn a_device_that_fails_is_told_of_at_once() {
    let (fail, fails) = std::sync::mpsc::channel();
    let (told, wakes) = std::sync::mpsc::sync_channel(1);
    let wake = Wake::new(move || {
        let _ = told.try_send(());
    });
    let mut probe = DeviceProbe::of(Failing(fails, false), wake);
    let mut errors = || {
        let mut out = Vec::new();
        probe.read(Timestamp::from_micros(10_000_000), &mut out);
        out.into_iter()
            .find(|r| r.signal == Signal::Errors)
            .unwrap()
    };
    assert_eq!(errors().value, Some(0.0));
    fail.send(()).unwrap();
    wakes.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(errors().value, Some(1.0));
    assert!(errors().source.contains("Xid 79"));
    assert_eq!(probe.handle().latest().len(), 1);
}

#[test]
fn a_slice_has_its_own_memory_its_devices_fault_and_nothing_else_of_it() {
    let whole = healthy();
    let slice = whole.slice("MIG-1".into(), memory(30, 40));
    let m = of(&slice, Signal::Memory);
    assert_eq!((m.device.as_deref(), m.raw), (Some("MIG-1"), Some(30.0)));
    for signal in [
        Signal::Power,
        Signal::Thermal,
        Signal::Contention,
        Signal::Fabric,
    ] {
        let why = of(&slice, signal).missing.unwrap();
        assert!(why.contains("only for the whole GPU-1"), "{why}");
    }
    assert!(
        slice.energy_mj.is_err(),
        "joules of a slice are not made up"
    );
    assert_eq!(of(&slice, Signal::Errors).value, Some(0.0));
    let lost = DeviceFacts {
        fault: Ok(Some("Xid 79".into())),
        ..whole
    };
    let slice = lost.slice("MIG-1".into(), Err("lost".into()));
    let e = of(&slice, Signal::Errors);
    assert_eq!(e.value, Some(1.0));
    assert!(e.source.contains("Xid 79 of GPU-1"), "{}", e.source);
}

#[test]
fn facts_that_the_driver_no_longer_renews_are_missing() {
    let shared = Arc::new(Shared::default());
    let long_ago = Instant::now().checked_sub(STALE * 2).unwrap();
    *shared.latest.lock().unwrap() = Some((long_ago, vec![healthy()]));
    let mut out = Vec::new();
    DeviceProbe {
        shared: Some(shared),
    }
    .read(Timestamp::from_micros(1), &mut out);
    conformance::check_all(&out).unwrap();
    assert!(!out.is_empty() && out.iter().all(|r| r.value.is_none()));
    out.clear();
    DeviceProbe { shared: None }.read(Timestamp::from_micros(1), &mut out);
    assert!(out.is_empty());
}
