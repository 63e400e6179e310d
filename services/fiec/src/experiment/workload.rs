//! What is computed: sized so that the undisturbed run takes this machine about so long.

use anyhow::Context as _;
use fiec_kit::local::{LocalOutcome, run_local};
use fiec_schemas::programs;
use serde_json::{Value, json};

use super::stand::Place;
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
    pub device: bool,
    /// What its result must say: what the run without any server, node or boundary in between said.
    pub result: Value,
    pub capsules: u64,
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

/// Sizes a workload for about so many seconds, and runs it undisturbed.
pub(super) async fn prepare(kind: Kind, place: Place, seconds: f64) -> anyhow::Result<Workload> {
    let (trial, least, most) = kind.sizes();
    let taken = local(kind, kind.params(trial)?).await?.seconds.max(1e-4);
    let ratio = seconds / taken;
    let size = match kind {
        Kind::Cg => trial as f64 * ratio,
        // Floating-point operations grow with the third power of the side.
        _ => (trial as f64 * ratio.cbrt() / 128.0).round() * 128.0,
    };
    let params = kind.params((size as u64).clamp(least, most))?;
    let reference = local(kind, params.clone()).await?;
    let commit = match kind {
        Kind::Cg => json!({"every_ms": 50}),
        _ => json!({"every": 1}),
    };
    Ok(Workload {
        name: kind.name(),
        program: kind.program(),
        params,
        commit,
        device: place == Place::Device,
        result: json!({
            "digest": reference.digest.context("its result has no digest")?.to_string(),
        }),
        capsules: reference.capsules,
    })
}

async fn local(kind: Kind, params: Value) -> anyhow::Result<LocalOutcome> {
    let run = tokio::task::spawn_blocking(move || run_local(kind.program(), &params));
    let outcome = run.await.context("the undisturbed run ended badly")?;
    outcome.map_err(|error| anyhow::anyhow!("the undisturbed run of {}: {error}", kind.name()))
}

impl Workload {
    /// The submission; where it shall stay whatever presses, with thresholds that cannot trip.
    pub fn submission(&self, may_move: bool) -> Value {
        let mut submission = json!({
            "program": self.program, "params": self.params, "commit": self.commit,
            // Verification would compute beside the experiment.
            "verify": "none",
        });
        if self.device {
            submission["requires"] =
                json!({"device": {"kind": "Emulated*", "viable_by": "device"}});
        }
        if !may_move {
            let never = json!({"high": 1.0, "low": 0.99, "dwell_ms": 3_600_000});
            submission["viability"]["memory"] = never.clone();
            // What is not measured cannot have a threshold.
            if self.device {
                submission["viability"]["power"] = never;
            }
        }
        submission
    }
}
