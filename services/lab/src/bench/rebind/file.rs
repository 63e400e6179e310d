//! What a program takes that saves its state in a file, as many do: a plain write and read, and
//! `torch.save` and `torch.load` where python3 has PyTorch. Without `fsync`, as they do it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;

use super::super::Lab;
use super::super::figures::median;
use super::super::python::{answer, python};

/// Saves and loads a tensor of `argv[2]` bytes, and prints milliseconds.
const TORCH: &str = r#"
import json, sys, time
import torch
path, count = sys.argv[1], int(sys.argv[2])
tensor = torch.arange(count // 4, dtype=torch.int32)
began = time.perf_counter()
torch.save(tensor, path)
saved = time.perf_counter()
found = torch.load(path)
loaded = time.perf_counter()
assert found.numel() == tensor.numel()
print(json.dumps([(saved - began) * 1e3, (loaded - saved) * 1e3]))
"#;
const PATIENCE: Duration = Duration::from_secs(120);

/// Measures `save_ms` and `load_ms`.
///
/// # Errors
/// When a file cannot be written or read.
pub(super) async fn run(lab: &mut Lab<'_>, words: &str, bytes: u64) -> anyhow::Result<()> {
    lab.steps_message(&format!("{words}: to a file and back"));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let (mut saves, mut loads) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (save, load) = plain(&path, bytes)?;
        saves.push(save);
        loads.push(load);
    }
    let (save, load) = (median(&mut saves), median(&mut loads));
    let case = format!("{words}, a file");
    for (metric, value) in [("save_ms", save), ("load_ms", load)] {
        lab.figures.add("state", &case, metric, "ms", value, None);
    }
    let case = format!("{words}, torch.save");
    match torch(&path, bytes).await {
        Ok(found) => {
            for (metric, value, floor) in [("save_ms", found.0, save), ("load_ms", found.1, load)] {
                lab.figures
                    .add("state", &case, metric, "ms", value, Some(floor));
            }
        }
        Err(error) => lab.left_out(&case, &format!("{error:#}")),
    }
    Ok(())
}

fn plain(path: &Path, bytes: u64) -> anyhow::Result<(f64, f64)> {
    let data = vec![7u8; usize::try_from(bytes)?];
    let began = Instant::now();
    std::fs::write(path, &data).with_context(|| format!("cannot write {}", path.display()))?;
    let save = began.elapsed().as_secs_f64() * 1e3;
    let began = Instant::now();
    let found = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let load = began.elapsed().as_secs_f64() * 1e3;
    anyhow::ensure!(found.len() == data.len(), "a file lost bytes");
    Ok((save, load))
}

async fn torch(path: &Path, bytes: u64) -> anyhow::Result<(f64, f64)> {
    let mut command = python(&["-c", TORCH]);
    command.arg(path).arg(bytes.to_string());
    let found: Value = serde_json::from_str(&answer(command, PATIENCE).await?)?;
    let number = |at: usize| found[at].as_f64().context("python3 printed no number");
    Ok((number(0)?, number(1)?))
}
