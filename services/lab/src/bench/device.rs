//! `bench device`: the measures of `fiec device test` as figures: products, factors and solves against
//! the device's FP64 peak, a warm context against a new one, and the bytes that move when an execution
//! leaves the device.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use fiec::commands::device::QUICK;
use fiec::exit::Outcome;
use fiec_cuda::suite::{self, Case, Report, Sizes, Verdict};
use fiec_cuda::{CudaDevices, Found};
use fiec_kernels::device::Devices;
use fiec_kit::programs::RunEnd;
use fiec_kit::{Capsule, Inputs, Step, programs};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::programs::{GEMM, LU, QR};
use serde_json::{Value, json};

use super::Lab;
use super::figures::Figures;

/// Runs the bench on the first device. `gflops` of the bitwise and the bounded path, floor = the
/// device's FP64 peak outside tensor cores; `iterations_per_s` of CG; `open_ms` of a device with a
/// warm context, floor = with a new one; `moved_bytes` of a rebinding half-way (σ and what was
/// finished since the last boundary), floor = the matrices that stay behind. A machine without a
/// device has an outcome of its own.
///
/// # Errors
/// When a device cannot be opened, or its results differ from the processor's.
pub fn run(lab: &mut Lab<'_>) -> anyhow::Result<Outcome> {
    let found = match fiec_cuda::list() {
        Ok(found) => found,
        Err(why) => {
            lab.left_out("device", &why.to_string());
            return Ok(Outcome::NoDevice);
        }
    };
    let device = found.first().context("the driver lists no device")?;
    let sizes = match lab.quick {
        true => Sizes {
            threads: Sizes::default().threads,
            ..QUICK
        },
        false => Sizes::default(),
    };
    on(lab, device, sizes)
}

fn on(lab: &mut Lab<'_>, device: &Found, sizes: Sizes) -> anyhow::Result<Outcome> {
    let devices = CudaDevices::default();
    let steps = lab.steps;
    let report = suite::run(&devices, device, sizes, &mut |text| {
        steps.step(text);
    })?;
    let skipped = rates(&report, lab.figures);
    for case in skipped {
        lab.left_out(&format!("{} {}", case.name, case.contract), &case.note);
    }
    let memory = device.memory_bytes / 2;
    for (program, params, matrices) in moves(sizes) {
        lab.steps_message(&format!("{program}: leaves the device half-way"));
        let devices: Arc<dyn Devices> = Arc::new(devices.clone());
        let moved = moved(devices, &device.uuid, memory, program, &params)
            .with_context(|| format!("a rebinding of {program}"))?;
        let case = format!("{program}, order {}, half-way", sizes.factor.0);
        let floor = Some(matrices as f64);
        lab.figures
            .add("device", &case, "moved_bytes", "B", moved as f64, floor);
    }
    devices.cool();
    if !report.passed() {
        let failed = report.cases.iter();
        let failed = failed.filter(|case| case.verdict == Verdict::Failed);
        let failed: Vec<_> = failed
            .map(|c| format!("{} {}", c.name, c.contract))
            .collect();
        bail!(
            "{} is not right on {}: `fiec device test` says more",
            match failed.is_empty() {
                true => "what is left in its memory".to_owned(),
                false => failed.join(", "),
            },
            device.uuid
        );
    }
    Ok(Outcome::Done)
}

/// Adds the report's figures. Returns the cases that have none.
fn rates<'a>(report: &'a Report, figures: &mut Figures) -> Vec<&'a Case> {
    let mut skipped = Vec::new();
    for case in &report.cases {
        if case.verdict == Verdict::Skipped {
            skipped.push(case);
            continue;
        }
        let words = format!("{} {}, {}", case.name, case.contract, case.size);
        let (metric, unit, scale) = match case.name {
            "cg" => ("iterations_per_s", "1/s", 1.0),
            _ => ("gflops", "GFLOP/s", 1e9),
        };
        let peak = report.fp64_peak.filter(|_| case.name != "cg");
        let floor = peak.map(|peak| peak / scale);
        figures.add("device", &words, metric, unit, case.rate / scale, floor);
    }
    let life = &report.life;
    for (case, value, floor) in [
        ("context, the first of the process", life.cold_ms, None),
        ("context, new", life.again_ms, None),
        ("context, warm", life.warm_ms, Some(life.again_ms)),
    ] {
        figures.add("device", case, "open_ms", "ms", value, floor);
    }
    skipped
}

/// The programs that leave the device half-way, with the bytes of their matrices.
fn moves(sizes: Sizes) -> [(&'static str, Value, u64); 3] {
    let (n, block) = sizes.factor;
    let random = |seed: u64| json!({"random": {"n": n, "seed": seed}});
    let bytes = |matrices: u64| matrices * 8 * (n as u64).pow(2);
    let tile = n.div_ceil(4);
    [
        (
            GEMM,
            json!({"a": random(1), "b": random(2), "tile": tile}),
            bytes(3),
        ),
        (LU, json!({"matrix": random(3), "block": block}), bytes(1)),
        (QR, json!({"matrix": random(4), "block": block}), bytes(1)),
    ]
}

/// Bytes of σ and of the outputs stored with it, for a program that yields a device half-way.
fn moved(
    devices: Arc<dyn Devices>,
    uuid: &str,
    memory_bytes: u64,
    program: &str,
    params: &Value,
) -> anyhow::Result<u64> {
    let grant = Grant {
        device: Some(DeviceGrant {
            uuid: uuid.to_owned(),
            memory_bytes: Some(memory_bytes),
        }),
        ..Grant::default()
    };
    let mut inputs = Inputs::default().with_devices(devices);
    let mut instance = programs::start(program, None, params, &mut inputs)?;
    instance.configure(&grant)?;
    instance.resume(None)?;
    let mut cx = Capsule::default();
    let mut capsules = 0;
    loop {
        let stored = cx.outputs().len();
        if let Step::Complete { .. } = instance.capsule(&mut cx)? {
            bail!("it has completed before it was half-way");
        }
        capsules += 1;
        let progress = instance.progress();
        let of = progress.of.context("it does not say how far it is")?;
        if 2 * capsules >= of {
            let mut state = Vec::new();
            instance.encode(&mut state, &mut cx)?;
            instance.end_run(RunEnd::Yield { cause: "rebinding" });
            let new = cx.outputs().iter().skip(stored);
            let outputs: usize = new.map(|output| output.bytes.len()).sum();
            return Ok((state.len() + outputs) as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_kernels::device::HostDevices;

    #[test]
    fn an_execution_that_leaves_a_device_moves_less_than_its_matrices_and_leaves_nothing() {
        let sizes = Sizes {
            factor: (240, 24),
            ..QUICK
        };
        for (program, params, matrices) in moves(sizes) {
            let devices = HostDevices::new(1 << 26);
            let there: Arc<dyn Devices> = Arc::new(devices.clone());
            let moved = moved(there, "GPU-host", 1 << 26, program, &params).unwrap();
            assert!(moved > 0 && moved < matrices / 2, "{program}: {moved}");
            let ledger = devices.ledger();
            assert_eq!((ledger.open, ledger.held), (0, 0), "{program}");
            assert!(ledger.products > 0, "{program} computed elsewhere");
        }
    }
}
