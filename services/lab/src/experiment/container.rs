//! The container unit of trigger 1: `examples/container`, in which each capsule is its own
//! container. It moves as one semantic unit.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec_kit::foreign::container::Engine;
use serde_json::{Value, json};
use tokio::process::Command;

use super::workload::{TRIALS, Workload};

/// Its registered name.
pub(super) const PROGRAM: &str = "collatz@1";
/// Numbers per capsule.
const STEP: u64 = 500;
/// Capsules of a trial run; the runs determine its size.
const TRIAL: u64 = 3;
/// Longest time for the image, the trial or the push.
const PATIENCE: Duration = Duration::from_secs(120);

/// The package's folder.
fn folder() -> anyhow::Result<PathBuf> {
    let relative = Path::new("examples/container");
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let places = [relative.to_owned(), built.join(relative)];
    let found = places.into_iter().find_map(|path| path.canonicalize().ok());
    found.context("examples/container is not here: run the experiment in the checkout")
}

/// Builds the image and sizes the unit for about `seconds`. The inner error says why containers are
/// not available here.
pub(super) async fn prepare(seconds: f64) -> anyhow::Result<Result<Workload, String>> {
    let engine = tokio::task::spawn_blocking(Engine::find).await?;
    let engine = match engine {
        Ok(engine) => engine,
        Err(why) => return Ok(Err(why)),
    };
    let folder = folder()?;
    let mut image = Command::new(folder.join("image.sh"));
    image.arg(&engine.program);
    done("making the image of examples/container", image).await?;
    let params = |capsules: u64| json!({"upto": capsules * STEP, "step": STEP});
    // The shortest trial counts: the first one reads the image, and a busy machine doubles another.
    let mut taken = f64::INFINITY;
    for _ in 0..TRIALS {
        let began = Instant::now();
        let mut trial = Command::new(std::env::current_exe()?);
        trial.args(["run", "--local"]).arg(&folder);
        trial.args(["--params", &params(TRIAL).to_string()]);
        done("running examples/container", trial).await?;
        taken = taken.min(began.elapsed().as_secs_f64());
    }
    let capsule = taken / TRIAL as f64;
    let capsules = ((seconds / capsule.max(1e-3)) as u64).clamp(TRIAL, 10_000);
    let upto = capsules * STEP;
    let (start, length) = longest_chain(upto);
    Ok(Ok(Workload {
        name: "container",
        program: PROGRAM,
        params: params(capsules),
        commit: json!({"every": 1}),
        device: None,
        result: json!({"upto": upto, "start": start, "length": length}),
        capsules,
        seconds,
    }))
}

/// Registers the package.
pub(super) async fn push(environment: &[(String, String)]) -> anyhow::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["program", "push", PROGRAM]).arg(folder()?);
    command.envs(environment.iter().cloned());
    done("pushing examples/container", command).await
}

/// Runs a command to its end.
pub(super) async fn done(what: &str, mut command: Command) -> anyhow::Result<()> {
    command
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = output
        .with_context(|| format!("{what} took more than {PATIENCE:?}"))?
        .with_context(|| what.to_owned())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{what}: {}: {}", output.status, said.trim());
    }
    Ok(())
}

/// The first number up to `upto` with the longest Collatz chain, and the length of the chain: the
/// expected result of the unit.
fn longest_chain(upto: u64) -> (u64, u64) {
    let (mut start, mut longest) = (1, 1);
    for first in 1..=upto {
        let (mut n, mut length) = (first, 1_u64);
        while n != 1 {
            n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
            length += 1;
        }
        if length > longest {
            (start, longest) = (first, length);
        }
    }
    (start, longest)
}

/// True if a result contains all expected fields with the same values.
pub(super) fn says(result: &Value, expected: &Value) -> bool {
    match expected.as_object() {
        Some(fields) => fields
            .iter()
            .all(|(name, value)| result.get(name) == Some(value)),
        None => result == expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_chains_are_the_known_ones() {
        assert_eq!(longest_chain(10), (9, 20));
        assert_eq!(longest_chain(1_000), (871, 179));
    }

    #[test]
    fn a_result_must_say_all_that_is_expected() {
        let result = json!({"digest": "a", "residual": 1});
        assert!(says(&result, &json!({"digest": "a"})));
        assert!(!says(&result, &json!({"digest": "b"})));
        assert!(!says(&result, &json!({"digest": "a", "more": 1})));
    }
}
