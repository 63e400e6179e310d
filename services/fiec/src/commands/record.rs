//! `fiec node record`: copies the files that this machine's probes read, to replay them elsewhere.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fiec_probes::{Sampler, SamplerConfig, recording};

use crate::context::Global;
use crate::exit::Outcome;

/// Record the readings of this machine's probes, to replay them in tests and experiments
///
/// The folder holds copies of the kernel's files on memory, pressure, power and temperature, and
/// the data of NVIDIA devices. It names no processes, users or addresses.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// A new or empty folder
    pub folder: PathBuf,
    /// Duration in seconds
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Interval in milliseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub every_ms: u64,
}

/// Records. Needs no server.
///
/// # Errors
/// If the folder is not empty or cannot be written.
pub fn run(args: &RecordArgs, global: &Global) -> anyhow::Result<Outcome> {
    let every = Duration::from_millis(args.every_ms);
    let steps = (args.seconds.clamp(0.0, 86_400.0) / every.as_secs_f64()) as usize + 1;
    let steps = steps.min(recording::MOST_STEPS);
    let config = SamplerConfig::default();
    let memory = config.memory.clone();
    let sampler = Sampler::new(config);
    let files = recording::record(&args.folder, &memory, &sampler.devices(), steps, every)?;
    if global.json {
        println!(
            "{}",
            serde_json::json!({"folder": args.folder, "steps": steps, "files": files})
        );
    } else {
        println!("{steps} steps, {files} files in {}", args.folder.display());
    }
    Ok(Outcome::Done)
}
