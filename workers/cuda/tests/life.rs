//! Devices by the emulated driver: what is there, budgets, contexts, faults, the vendor's path, and
//! that everything is given back.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;

use fiec_cuda::suite::{self, Sizes, Verdict};
use fiec_cuda::{CudaDevices, list};
use fiec_kernels::cg::{self, CgProblem};
use fiec_kernels::dense::check::ProductCheck;
use fiec_kernels::dense::{Into, Mat};
use fiec_kernels::device::{Arithmetic, CgLimits, DeviceError, Devices};
use fiec_kernels::poisson;
use fiec_kernels::simd::Simd;
use fiec_kit::local::run_local;
use fiec_kit::programs;
use fiec_kit::programs::canary::{judge, no_device};
use fiec_kit::{Capsule, Inputs, Step};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::programs::CANARY;
use serde_json::json;
use support::{Kind, UUID, difference, download, emulator, open, random, upload};

const BUDGET: u64 = 64 << 20;

#[test]
fn a_device_is_listed_with_its_properties_and_none_is_said_in_words() {
    let Some(emulator) = emulator() else { return };
    let all = list().unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].uuid.as_str(), all[0].capability), (UUID, (9, 0)));
    assert_eq!((all[0].multiprocessors, all[0].driver), (2, 13_000));
    emulator.set("devices", 0);
    let error = list().unwrap_err();
    emulator.set("devices", 1);
    assert!(matches!(error, DeviceError::Absent(_)), "{error:?}");
    assert!(
        error.to_string().contains("no device is detected"),
        "{error}"
    );
}

#[test]
fn a_grant_of_a_device_that_is_not_here_or_too_small_is_refused() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let error = devices.open("GPU-ffffffff", None).err().unwrap();
    assert!(error.to_string().contains(UUID), "{error}");
    let error = devices.open(UUID, Some(1 << 40)).err().unwrap();
    assert!(error.to_string().contains("1073741824"), "{error}");
    emulator.assert_empty(0);
}

#[test]
fn the_budget_holds_and_memory_is_the_drivers_again_at_once() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let elements = (BUDGET / 8) as usize;
    let first = device.allocate(elements / 2).unwrap();
    assert_eq!(emulator.count("bytes"), BUDGET / 2);
    let error = device.allocate(elements).unwrap_err();
    assert_eq!(
        error,
        DeviceError::Budget {
            wanted: BUDGET,
            held: BUDGET / 2,
            budget: BUDGET
        }
    );
    device.release(first);
    assert_eq!(emulator.count("bytes"), 0);
    // Within the budget, but others have taken it.
    emulator.set("memory", BUDGET / 4);
    let error = device.allocate(elements / 2).unwrap_err();
    emulator.set("memory", 1 << 30);
    assert!(matches!(error, DeviceError::Memory { .. }), "{error:?}");
    assert_eq!(device.usage().peak, BUDGET / 2);
    drop(device);
    emulator.assert_empty(0);
}

#[test]
fn scratch_for_speed_is_given_up_for_what_must_fit() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let (m, n, k) = (40, 30, 2000);
    let (a, b) = (random(m, k, 1, Kind::Plain), random(k, n, 2, Kind::Plain));
    let product = |budget: u64| {
        let mut device = open(&devices, budget);
        let (left, right) = (
            upload(device.as_mut(), a.view()),
            upload(device.as_mut(), b.view()),
        );
        let to = device.allocate(m * n).unwrap();
        let (x, y, z) = (left.matrix(m, k), right.matrix(k, n), to.matrix(m, n));
        device
            .gemm(Arithmetic::Chain512, x, y, Into::Replace, z)
            .unwrap();
        let found = download(device.as_mut(), &to, m, n);
        let held = emulator.count("bytes");
        // All that is left of the budget can be had.
        let rest = device.usage().available() / 8;
        if rest > 0 {
            let rest = device.allocate(rest as usize).unwrap();
            device.release(rest);
        }
        (found, held)
    };
    let exact = 8 * (m * k + k * n + m * n) as u64;
    let ((tight, without), (roomy, with)) = (product(exact), product(BUDGET));
    assert_eq!(difference(&tight, &roomy), None);
    assert_eq!((without, with), (exact, exact + 4 * 8 * (m * n) as u64));
    emulator.assert_empty(0);
}

#[test]
fn a_context_is_kept_warm_for_the_next_and_gone_after_a_yield() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let made = emulator.count("made_contexts");
    let mut device = open(&devices, BUDGET);
    let _forgotten = device.allocate(1000).unwrap();
    device.close(true);
    assert_eq!(devices.warm().as_deref(), Some(UUID));
    emulator.assert_empty(1);
    let device = open(&devices, BUDGET);
    assert_eq!(devices.warm(), None);
    assert_eq!(emulator.count("made_contexts"), made + 1, "not made again");
    device.close(false);
    emulator.assert_empty(0);
    // Without a word, too.
    let mut device = open(&devices, BUDGET);
    let _forgotten = device.allocate(1000).unwrap();
    drop(device);
    emulator.assert_empty(0);
    devices.heat(UUID).unwrap();
    emulator.assert_empty(1);
    devices.cool();
    emulator.assert_empty(0);
}

#[test]
fn a_launch_that_fails_is_an_error_and_spoils_no_later_device() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let a = random(40, 40, 1, Kind::Plain);
    let held = upload(device.as_mut(), a.view());
    let to = device.allocate(1600).unwrap();
    emulator.set("fail_launch", 1);
    let part = held.matrix(40, 40);
    let error = device
        .gemm(
            Arithmetic::Chain512,
            part,
            part,
            Into::Replace,
            to.matrix(40, 40),
        )
        .unwrap_err();
    assert!(error.to_string().contains("fiec_gemm"), "{error}");
    let mut copy = Mat::zeros(40, 40);
    assert!(device.read(part, copy.view_mut()).is_err());
    device.close(true);
    assert_eq!(devices.warm(), None, "a spoilt context is not kept");
    emulator.set("fail_launch", 0);
    emulator.assert_empty(0);
    let mut device = open(&devices, BUDGET);
    let held = upload(device.as_mut(), a.view());
    assert_eq!(download(device.as_mut(), &held, 40, 40), a);
}

#[test]
fn a_solve_that_does_not_fit_leaves_nothing_behind() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let problem = CgProblem::new(poisson::poisson_2d(30, 30).unwrap(), vec![1.0; 900]).unwrap();
    let state = cg::init(&problem);
    let mut device = open(&devices, 60 << 10);
    let error = device.cg_begin(&problem, &state).unwrap_err();
    assert!(error.is_memory(), "{error}");
    assert_eq!((device.usage().held, emulator.count("bytes")), (0, 0));
    let mut device = open(&devices, BUDGET);
    device.cg_begin(&problem, &state).unwrap();
    // Taken up anew: the old one goes.
    device.cg_begin(&problem, &state).unwrap();
    let limits = CgLimits {
        steps: 3,
        tolerance: 1e-9,
        most: 9,
    };
    assert_eq!(device.cg_advance(limits).unwrap().0.iteration, 3);
}

#[test]
fn the_vendors_product_is_within_its_bound_and_its_workspace_within_the_budget() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let (a, b) = (
        random(60, 700, 1, Kind::Plain),
        random(700, 50, 2, Kind::Plain),
    );
    for (budget, transposed) in [(BUDGET, false), (1 << 20, true)] {
        let mut device = open(&devices, budget);
        let stored = if transposed {
            a.view().t().to_mat()
        } else {
            a.clone()
        };
        let (left, right) = (
            upload(device.as_mut(), stored.view()),
            upload(device.as_mut(), b.view()),
        );
        let c = random(60, 50, 3, Kind::Plain);
        let to = upload(device.as_mut(), c.view());
        let left = left.matrix(stored.rows(), stored.cols());
        let left = if transposed { left.t() } else { left };
        let (right, part) = (right.matrix(700, 50), to.matrix(60, 50));
        for into in [Into::Replace, Into::Add, Into::Subtract] {
            device
                .gemm(Arithmetic::Vendor, left, right, into, part)
                .unwrap();
        }
        // A·B + A·B − A·B.
        let found = download(device.as_mut(), &to, 60, 50);
        let check = ProductCheck::new(Simd::detect(), a.view());
        let bound = 4.0 * check.bound();
        let exact = Mat::from_fn(60, 50, |i, j| {
            (0..700)
                .map(|p| a.view().at(i, p) * b.view().at(p, j))
                .sum()
        });
        for (found, exact) in found.data().iter().zip(exact.data()) {
            assert!((found - exact).abs() <= bound * 700.0, "{found} {exact}");
        }
        assert_eq!(emulator.count("handles"), 1);
        assert!(device.usage().held <= budget && device.usage().peak <= budget);
        drop(device);
        emulator.assert_empty(0);
    }
}

#[test]
fn the_suite_passes_on_the_emulated_device_and_leaves_nothing_behind() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let sizes = Sizes {
        gemm: 140,
        factor: (150, 32),
        grid: 20,
        iterations: 30,
        threads: 1,
    };
    let mut told = Vec::new();
    let found = &list().unwrap()[0];
    let report = suite::run(&devices, found, sizes, &mut |text| {
        told.push(text.to_owned())
    })
    .unwrap();
    assert_eq!(report.cases.len(), 7);
    for case in &report.cases {
        assert_eq!(case.verdict, Verdict::Passed, "{case:?}");
        assert_eq!(
            case.contract == "bitwise",
            case.digest.is_some(),
            "{case:?}"
        );
        assert_eq!(case.digest, case.cpu_digest, "{case:?}");
        assert!(case.rate > 0.0, "{case:?}");
    }
    assert!(report.passed());
    assert_eq!(told.len(), 8);
    // There is no NVML of the emulated device, and that is said.
    assert_eq!(report.life.verdict, Some(Verdict::Skipped));
    assert!(report.life.note.contains("NVML"), "{:?}", report.life);
    emulator.assert_empty(0);
}

/// The programs themselves on the emulated device, moving to and fro.
#[test]
fn the_canaries_of_a_device_show_the_hosts_bits_by_its_own_launches() {
    let Some(emulator) = emulator() else { return };
    let launches = emulator.count("launches");
    let proof = |memory_bytes| {
        let devices = Arc::new(CudaDevices::default());
        let mut inputs = Inputs::default().with_devices(devices);
        let params = json!({});
        let mut instance = programs::start(CANARY, None, &params, &mut inputs).unwrap();
        let grant = Grant {
            device: Some(DeviceGrant {
                uuid: UUID.to_owned(),
                memory_bytes: Some(memory_bytes),
            }),
            ..Grant::default()
        };
        instance.configure(&grant).unwrap();
        instance.resume(None).unwrap();
        let mut cx = Capsule::default();
        loop {
            if let Step::Complete { result } = instance.capsule(&mut cx).unwrap() {
                return result;
            }
        }
    };
    let shown = judge(&proof(BUDGET)).unwrap();
    assert_eq!((&shown.not_bitwise, &shown.not_bounded), (&None, &None));
    assert!(
        shown.ran_on.starts_with(UUID) && shown.ran_on.ends_with("all of dot, spmv"),
        "{}",
        shown.ran_on
    );
    assert!(emulator.count("launches") > launches);
    // More than it has: no proof, with the reason.
    let result = proof(1 << 40);
    let reason = no_device(&result).unwrap();
    assert!(reason.contains(UUID), "{reason}");
}

#[test]
fn programs_that_move_between_host_and_device_have_the_bits_of_the_host() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let random = |n: u64, seed: u64| json!({"random": {"n": n, "seed": seed}});
    for (program, params, on_device) in [
        (
            "gemm@1",
            json!({"a": random(90, 1), "b": random(90, 2), "tile": 50}),
            4 << 20,
        ),
        (
            "gemm@1",
            json!({"a": random(90, 1), "b": random(90, 2), "tile": 50}),
            40 << 10,
        ),
        (
            "lu@1",
            json!({"matrix": random(100, 3), "block": 24}),
            4 << 20,
        ),
        (
            "lu@1",
            json!({"matrix": random(100, 3), "block": 24}),
            60 << 10,
        ),
        (
            "qr@1",
            json!({"matrix": random(80, 4), "block": 20}),
            4 << 20,
        ),
        (
            "cg@1",
            json!({"matrix": {"poisson2d": {"n": 20}}, "load_cases": 2, "iterations_per_capsule": 9}),
            4 << 20,
        ),
        (
            "lu@1",
            json!({"matrix": random(100, 3), "block": 24, "arithmetic": "vendor"}),
            8 << 20,
        ),
        (
            "qr@1",
            json!({"matrix": random(80, 4), "block": 20, "arithmetic": "vendor"}),
            8 << 20,
        ),
    ] {
        let whole = run_local(program, &params).unwrap().result;
        let launches = emulator.count("launches");
        let mut inputs = Inputs::default().with_devices(Arc::new(devices.clone()));
        let mut instance = programs::start(program, None, &params, &mut inputs).unwrap();
        let mut cx = Capsule::default();
        let result = (0u64..)
            .find_map(|boundary| {
                let device = (boundary % 3 != 1).then(|| DeviceGrant {
                    uuid: UUID.to_owned(),
                    memory_bytes: Some(on_device),
                });
                let grant = Grant {
                    device,
                    ..Grant::default()
                };
                instance.configure(&grant).unwrap();
                if boundary == 0 {
                    instance.resume(None).unwrap();
                }
                match instance.capsule(&mut cx).unwrap() {
                    Step::Complete { result } => Some(result),
                    Step::Boundary => None,
                }
            })
            .unwrap();
        if params.get("arithmetic").is_none() {
            assert_eq!(result, whole, "{program}");
            assert!(emulator.count("launches") > launches, "{program}");
        } else {
            // Other bits, as good.
            assert_ne!(result["digest"], whole["digest"], "{program}");
            let (residual, bound) = (result["residual"].as_f64(), result["bound"].as_f64());
            assert!(residual.unwrap() <= bound.unwrap(), "{program}: {result}");
        }
        devices.cool();
        emulator.assert_empty(0);
    }
}
