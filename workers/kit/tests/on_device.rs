//! Programs whose grant names a device: the same bits, within its memory, and nothing left on it.
//! The device is one in the host's memory, which counts and refuses as a real one does.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use fiec_kernels::device::{HostDevices, Ledger};
use fiec_kit::local::run_local;
use fiec_kit::programs::{self, Instance, RunEnd};
use fiec_kit::{Capsule, Inputs, Step};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::programs::{CG, GEMM, LU, QR};
use serde_json::{Value, json};

const MEMORY: u64 = 1 << 30;

fn cases() -> [(&'static str, Value); 4] {
    let random = |rows: u64, cols: u64, seed: u64| json!({"random": {"rows": rows, "cols": cols, "seed": seed}});
    [
        (
            GEMM,
            json!({"a": random(130, 1100, 1), "b": random(1100, 90, 2), "tile": 48}),
        ),
        (LU, json!({"matrix": random(150, 150, 3), "block": 24})),
        (QR, json!({"matrix": random(170, 110, 4), "block": 24})),
        (
            CG,
            json!({"matrix": {"poisson2d": {"n": 40}}, "load_cases": 2, "iterations_per_capsule": 7}),
        ),
    ]
}

fn on(bytes: u64) -> Grant {
    Grant {
        device: Some(DeviceGrant {
            uuid: "GPU-host".to_owned(),
            memory_bytes: Some(bytes),
        }),
        ..Grant::default()
    }
}

fn start(program: &str, params: &Value, devices: &HostDevices) -> Box<dyn Instance> {
    let mut inputs = Inputs::default().with_devices(Arc::new(devices.clone()));
    programs::start(program, None, params, &mut inputs).unwrap()
}

/// Runs to the end, with the grant that `grants` says at each boundary.
fn run(
    instance: &mut dyn Instance,
    cx: &mut Capsule,
    mut grants: impl FnMut(u64) -> Option<Grant>,
) -> Value {
    for boundary in 0.. {
        if let Some(grant) = grants(boundary) {
            instance.configure(&grant).unwrap();
        }
        if boundary == 0 {
            instance.resume(None).unwrap();
        }
        if let Step::Complete { result } = instance.capsule(cx).unwrap() {
            return result;
        }
    }
    unreachable!("boundaries do not end")
}

fn assert_all_given_back(ledger: Ledger) {
    assert_eq!((ledger.open, ledger.held), (0, 0), "{ledger:?}");
    assert!(ledger.opened > 0, "{ledger:?}");
}

#[test]
fn a_program_on_a_device_gives_the_bits_of_the_host_and_all_memory_back() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let devices = HostDevices::new(MEMORY);
        let mut instance = start(program, &params, &devices);
        let mut cx = Capsule::default();
        let result = run(instance.as_mut(), &mut cx, |boundary| {
            (boundary == 0).then(|| on(MEMORY))
        });
        assert_eq!(result, whole.result, "{program}");
        assert_eq!(cx.outputs(), whole.outputs, "{program}");
        let ledger = devices.ledger();
        // Though the program itself is kept.
        assert_all_given_back(ledger);
        assert!(
            ledger.products + ledger.iterations > 0,
            "{program} computed elsewhere"
        );
        assert_eq!(ledger.kept_warm, 1, "{program}");
        drop(instance);
    }
}

#[test]
fn moves_between_host_and_devices_at_every_boundary_change_no_bit() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let devices = HostDevices::new(MEMORY);
        let mut instance = start(program, &params, &devices);
        let mut cx = Capsule::default();
        let result = run(instance.as_mut(), &mut cx, |boundary| {
            Some(match boundary % 4 {
                0 => on(MEMORY),
                1 | 2 => Grant::default(),
                _ => on(MEMORY / 2),
            })
        });
        assert_eq!(result, whole.result, "{program}");
        assert_eq!(cx.outputs(), whole.outputs, "{program}");
        assert_all_given_back(devices.ledger());
    }
}

#[test]
fn less_device_memory_makes_more_pieces_of_the_same_bits() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let mut worked = Vec::new();
        for kib in [4096, 700, 400, 250, 160, 110, 60, 30, 8] {
            let budget = kib << 10;
            let devices = HostDevices::new(MEMORY);
            let mut instance = start(program, &params, &devices);
            instance.configure(&on(budget)).unwrap();
            instance.resume(None).unwrap();
            let mut cx = Capsule::default();
            let ended = loop {
                match instance.capsule(&mut cx) {
                    Ok(Step::Boundary) => {}
                    Ok(Step::Complete { result }) => break Ok(result),
                    Err(error) => break Err(error),
                }
            };
            match ended {
                Ok(result) => {
                    assert_eq!(result, whole.result, "{program} in {kib} KiB");
                    assert!(devices.ledger().peak <= budget, "{program} in {kib} KiB");
                    worked.push(kib);
                }
                // Nothing fits: said with the bytes, and whose they are.
                Err(error) => {
                    assert!(error.is_permanent(), "{error}");
                    let text = error.to_string();
                    assert!(text.contains("device memory"), "{program}: {text}");
                    assert!(text.contains(&budget.to_string()), "{program}: {text}");
                    drop(instance);
                }
            }
            assert_all_given_back(devices.ledger());
        }
        assert!(
            worked.contains(&700),
            "{program} ran in {worked:?} KiB only"
        );
        assert!(!worked.contains(&8), "{program} ran in {worked:?} KiB");
    }
}

#[test]
fn vectors_stay_on_the_device_until_a_commit_is_due() {
    let (program, params) = &cases()[3];
    let devices = HostDevices::new(MEMORY);
    let mut instance = start(program, params, &devices);
    instance.configure(&on(MEMORY)).unwrap();
    instance.resume(None).unwrap();
    let mut cx = Capsule::default();
    (0..5).for_each(|_| drop(instance.capsule(&mut cx).unwrap()));
    assert_eq!(devices.ledger().read, 0);
    let mut state = Vec::new();
    instance.encode(&mut state, &mut cx).unwrap();
    assert_eq!(devices.ledger().read, 3 * 8 * 1600, "x, r and p, once");
    // What was committed is what the host would have had.
    let mut on_host = start(program, params, &devices);
    on_host.resume(None).unwrap();
    (0..5).for_each(|_| drop(on_host.capsule(&mut cx).unwrap()));
    let mut expected = Vec::new();
    on_host.encode(&mut expected, &mut cx).unwrap();
    assert!(state == expected);
}

#[test]
fn finished_blocks_stay_on_the_device_and_go_there_once() {
    let (program, params) = &cases()[1];
    let devices = HostDevices::new(MEMORY);
    let mut instance = start(program, params, &devices);
    let mut cx = Capsule::default();
    run(instance.as_mut(), &mut cx, |boundary| {
        (boundary == 0).then(|| on(MEMORY))
    });
    let ledger = devices.ledger();
    // Each block column once as A has it, and once more when its panel was factored.
    let matrix = 8 * 150 * 150;
    assert!(ledger.read == matrix, "{ledger:?}");
    assert!(ledger.written < 2 * matrix, "{ledger:?}");
}

#[test]
fn a_yield_gives_the_device_back_cold_and_the_state_goes_on_elsewhere() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let devices = HostDevices::new(MEMORY);
        let mut instance = start(program, &params, &devices);
        instance.configure(&on(MEMORY)).unwrap();
        instance.resume(None).unwrap();
        let mut cx = Capsule::default();
        assert_eq!(instance.capsule(&mut cx).unwrap(), Step::Boundary);
        assert_eq!(instance.capsule(&mut cx).unwrap(), Step::Boundary);
        assert!(devices.ledger().held > 0, "{program} holds nothing");
        let mut state = Vec::new();
        instance.encode(&mut state, &mut cx).unwrap();
        instance.end_run(RunEnd::Yield {
            cause: "memory pressure",
        });
        assert_all_given_back(devices.ledger());
        assert_eq!(devices.ledger().kept_warm, 0);
        let mut elsewhere = start(program, &params, &devices);
        elsewhere.resume(Some(&state)).unwrap();
        let result = loop {
            if let Step::Complete { result } = elsewhere.capsule(&mut cx).unwrap() {
                break result;
            }
        };
        assert_eq!(result, whole.result, "{program}");
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_says_so() {
    let (program, params) = &cases()[0];
    let mut instance = programs::start(program, None, params, &mut Inputs::default()).unwrap();
    let error = instance.configure(&on(MEMORY)).unwrap_err();
    assert!(error.to_string().contains("GPU-host"), "{error}");
    assert!(!error.is_permanent());
}

#[test]
fn vendor_arithmetic_stays_within_its_bounds_with_and_without_a_device() {
    for (program, mut params) in cases().into_iter().take(3) {
        params["arithmetic"] = "vendor".into();
        let on_host = run_local(program, &params).unwrap().result;
        let devices = HostDevices::new(MEMORY);
        let mut instance = start(program, &params, &devices);
        let mut cx = Capsule::default();
        let result = run(instance.as_mut(), &mut cx, |boundary| {
            (boundary == 0).then(|| on(MEMORY))
        });
        for result in [&on_host, &result] {
            let (residual, bound) = (result["residual"].as_f64(), result["bound"].as_f64());
            assert!(residual.unwrap() <= bound.unwrap(), "{program}: {result}");
        }
        assert_all_given_back(devices.ledger());
    }
}
