//! The workloads: sized so that the undisturbed run takes about a given time on this machine.

use std::path::Path;

use anyhow::Context as _;
use fiec::local::Subject;
use fiec_kit::local::run_local;
use fiec_schemas::package::DeviceGrant;
use fiec_schemas::programs;
use serde_json::{Value, json};

use super::devices::Devices;
use crate::demo;

/// The programs of the experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Cg,
    Gemm,
    Lu,
    Qr,
}

/// A submission, and the result of its undisturbed run.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub name: &'static str,
    pub program: &'static str,
    pub params: Value,
    pub commit: Value,
    /// Its requirements on a device, if it computes on one.
    pub device: Option<Value>,
    /// The expected result: that of a run without any server, node or boundary.
    pub result: Value,
    pub capsules: u64,
    /// Length of the undisturbed run, in seconds.
    pub seconds: f64,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cg => "cg",
            Kind::Gemm => "gemm",
            Kind::Lu => "lu",
            Kind::Qr => "qr",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Kind::Cg => programs::CG,
            Kind::Gemm => programs::GEMM,
            Kind::Lu => programs::LU,
            Kind::Qr => programs::QR,
        }
    }

    /// `size` is the number of load cases of CG, and the side of the matrix otherwise.
    fn params(self, size: u64) -> anyhow::Result<Value> {
        let random = |seed: u64| json!({"random": {"n": size, "seed": seed}});
        Ok(match self {
            Kind::Cg => json!({
                "matrix": {"file": demo::matrix()?}, "tolerance": 1e-10,
                "iterations_per_capsule": 1, "load_cases": size,
            }),
            Kind::Gemm => json!({"a": random(1), "b": random(2), "tile": 128}),
            Kind::Lu => json!({"matrix": random(3), "block": 64}),
            Kind::Qr => json!({"matrix": random(4), "block": 64}),
        })
    }

    /// The size of the trial, and the smallest and largest size of an experiment.
    fn sizes(self) -> (u64, u64, u64) {
        match self {
            Kind::Cg => (4, 4, 5_000),
            Kind::Gemm => (768, 512, 5_120),
            Kind::Lu => (1_024, 768, 6_144),
            Kind::Qr => (768, 512, 5_120),
        }
    }
}

/// The result of a run without any server.
struct Undisturbed {
    seconds: f64,
    capsules: u64,
    digest: Option<String>,
}

/// Side of the largest matrix for a device and its host. A program holds several matrices: half of
/// the memory must suffice for twelve.
fn largest(memory_bytes: u64) -> u64 {
    (memory_bytes as f64 / (2.0 * 12.0 * 8.0)).sqrt() as u64 / 128 * 128
}

/// Number of trial runs that determine the size.
pub(super) const TRIALS: usize = 3;

/// Sizes a workload for about `seconds` on the host, or on the first device, and runs it
/// undisturbed.
pub(super) async fn prepare(
    kind: Kind,
    devices: Option<&Devices>,
    seconds: f64,
) -> anyhow::Result<Workload> {
    let (mut trial, least, mut most) = kind.sizes();
    let real = devices.and_then(|d| d.of(0));
    if let (Some(_), Some(all)) = (real, devices) {
        // A device takes longer to start than the host's trial takes to compute.
        most = largest(all.memory_bytes()).max(least);
        trial = (8 * trial).min(most);
    }
    let uuid = real.map(|device| device.uuid.clone());
    // The shortest trial counts: each is so short that one pause of the machine would double it.
    let mut taken = f64::INFINITY;
    for _ in 0..TRIALS {
        let trial = run(kind, kind.params(trial)?, uuid.clone()).await?;
        taken = taken.min(trial.seconds);
    }
    let ratio = seconds / taken.max(1e-4);
    let size = match kind {
        Kind::Cg => trial as f64 * ratio,
        // Floating-point operations grow with the cube of the side.
        _ => (trial as f64 * ratio.cbrt() / 128.0).round() * 128.0,
    };
    let params = kind.params((size as u64).clamp(least, most))?;
    let reference = run(kind, params.clone(), uuid).await?;
    let commit = match kind {
        Kind::Cg => json!({"every_ms": 50}),
        _ => json!({"every": 1}),
    };
    let device = devices.map(|devices| match devices {
        Devices::Emulated { .. } => json!({"kind": "Emulated*", "viable_by": "device"}),
        Devices::Real(_) => json!({"viable_by": "device"}),
    });
    Ok(Workload {
        name: kind.name(),
        program: kind.program(),
        params,
        commit,
        device,
        result: json!({"digest": reference.digest.context("its result has no digest")?}),
        capsules: reference.capsules,
        seconds: reference.seconds,
    })
}

async fn run(kind: Kind, params: Value, device: Option<String>) -> anyhow::Result<Undisturbed> {
    let run = tokio::task::spawn_blocking(move || match device {
        None => local(kind, &params),
        Some(uuid) => on_device(kind, params, uuid),
    });
    let outcome = run.await.context("the undisturbed run ended badly")?;
    outcome.with_context(|| format!("the undisturbed run of {}", kind.name()))
}

/// Runs it in this process.
fn local(kind: Kind, params: &Value) -> anyhow::Result<Undisturbed> {
    let outcome = run_local(kind.program(), params).map_err(anyhow::Error::msg)?;
    Ok(Undisturbed {
        seconds: outcome.seconds,
        capsules: outcome.capsules,
        digest: outcome.digest.map(|digest| digest.to_string()),
    })
}

/// Runs it in a separate process with a device, which is free again afterwards.
fn on_device(kind: Kind, params: Value, uuid: String) -> anyhow::Result<Undisturbed> {
    let mut subject = Subject::open(kind.program(), None, params, Path::new("."))?;
    subject.grant.device = Some(DeviceGrant {
        uuid,
        memory_bytes: None,
    });
    let record = fiec::local::run(&subject, None, false, &mut |_| {})?;
    let digest = record.result.get("digest").and_then(Value::as_str);
    Ok(Undisturbed {
        seconds: record.seconds,
        capsules: record.capsules,
        digest: digest.map(str::to_owned),
    })
}

impl Workload {
    /// The submission. If it must not move, its thresholds cannot trip.
    pub fn submission(&self, may_move: bool) -> Value {
        let mut submission = json!({
            "program": self.program, "params": self.params, "commit": self.commit,
            // Verification would compute beside the experiment.
            "verify": "none",
        });
        if let Some(device) = &self.device {
            submission["requires"] = json!({"device": device});
        }
        if !may_move {
            let never = json!({"high": 1.0, "low": 0.99, "dwell_ms": 3_600_000});
            submission["viability"]["memory"] = never.clone();
            // A signal without readings cannot have a threshold.
            if self.device.is_some() {
                submission["viability"]["power"] = never;
            }
        }
        submission
    }
}
