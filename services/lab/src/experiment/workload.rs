//! What is computed: sized so that the undisturbed run takes this machine about so long.

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

/// A submission and what its undisturbed run gave.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub name: &'static str,
    pub program: &'static str,
    pub params: Value,
    pub commit: Value,
    /// What it requires of its device, where it computes on one.
    pub device: Option<Value>,
    /// What its result must say: what the run without any server, node or boundary in between said.
    pub result: Value,
    pub capsules: u64,
    /// How long the undisturbed run took.
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

    /// `size` is load cases of CG, and the side of a matrix otherwise.
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

    /// The size of the trial, and between what sizes an experiment is.
    fn sizes(self) -> (u64, u64, u64) {
        match self {
            Kind::Cg => (4, 4, 5_000),
            Kind::Gemm => (768, 512, 5_120),
            Kind::Lu => (1_024, 768, 6_144),
            Kind::Qr => (768, 512, 5_120),
        }
    }
}

/// What came of a run without any server.
struct Undisturbed {
    seconds: f64,
    capsules: u64,
    digest: Option<String>,
}

/// The largest matrix of a program of which a device, and the host beside it, hold some: half of
/// the memory for twelve of them.
fn largest(memory_bytes: u64) -> u64 {
    (memory_bytes as f64 / (2.0 * 12.0 * 8.0)).sqrt() as u64 / 128 * 128
}

/// Runs by which a workload is sized.
const TRIALS: usize = 3;

/// Sizes a workload for about so many seconds on the host, or on the first of the devices, and runs
/// it undisturbed.
pub(super) async fn prepare(
    kind: Kind,
    devices: Option<&Devices>,
    seconds: f64,
) -> anyhow::Result<Workload> {
    let (mut trial, least, mut most) = kind.sizes();
    let real = devices.and_then(|d| d.of(0));
    if let (Some(_), Some(all)) = (real, devices) {
        // To begin takes a device longer than a trial for the host computes.
        most = largest(all.memory_bytes()).max(least);
        trial = (8 * trial).min(most);
    }
    let uuid = real.map(|device| device.uuid.clone());
    // The least of some: a trial is so short that one pause of the machine would double it.
    let mut taken = f64::INFINITY;
    for _ in 0..TRIALS {
        let trial = run(kind, kind.params(trial)?, uuid.clone()).await?;
        taken = taken.min(trial.seconds);
    }
    let ratio = seconds / taken.max(1e-4);
    let size = match kind {
        Kind::Cg => trial as f64 * ratio,
        // Floating-point operations grow with the third power of the side.
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

/// In this process.
fn local(kind: Kind, params: &Value) -> anyhow::Result<Undisturbed> {
    let outcome = run_local(kind.program(), params).map_err(anyhow::Error::msg)?;
    Ok(Undisturbed {
        seconds: outcome.seconds,
        capsules: outcome.capsules,
        digest: outcome.digest.map(|digest| digest.to_string()),
    })
}

/// In a process of its own that has a device, which is then free again.
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
    /// The submission; where it shall stay whatever presses, with thresholds that cannot trip.
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
            // What is not measured cannot have a threshold.
            if self.device.is_some() {
                submission["viability"]["power"] = never;
            }
        }
        submission
    }
}
