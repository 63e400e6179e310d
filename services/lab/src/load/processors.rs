//! `fiec burn`: a load on processors, or on a device.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use fiec_cuda::CudaDevices;

use super::device::DeviceLoad;

/// Take processors or a device
#[derive(Debug, Clone, Args)]
pub struct BurnArgs {
    /// Threads that compute without a pause, on the processors that this process may use
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: u32,
    /// Seconds until it ends
    #[arg(long, default_value_t = 60.0)]
    pub hold: f64,
    /// Take the memory and units of this device, not processors
    #[arg(long, value_name = "UUID")]
    pub device: Option<String>,
    /// Share of the device's memory to fill, with the memory of all other processes
    #[arg(long, requires = "device", default_value_t = 0.9, value_parser = parse_share)]
    pub device_share: f64,
    /// Take only the device's memory
    #[arg(long, requires = "device")]
    pub idle: bool,
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    match share > 0.0 && share < 1.0 {
        true => Ok(share),
        false => Err("a share is above 0 and below 1".to_owned()),
    }
}

/// Takes the processors or the device until the time is over.
///
/// # Errors
/// If a thread cannot be started, or the device is not available.
pub fn run(args: &BurnArgs) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs_f64(args.hold.clamp(0.0, 86_400.0));
    if let Some(uuid) = &args.device {
        let load = DeviceLoad {
            uuid,
            share: args.device_share,
            idle: args.idle,
            until,
        };
        let held = load.run(&CudaDevices::default());
        return held
            .map(|_| ())
            .with_context(|| format!("a load on {uuid}"));
    }
    let threads = (0..args.threads)
        .map(|n| std::thread::Builder::new().spawn(move || burn(u64::from(n), until)))
        .collect::<Result<Vec<_>, _>>()?;
    for thread in threads {
        // A thread that only computes has no result.
        let _ = thread.join();
    }
    Ok(())
}

fn burn(seed: u64, until: Instant) {
    let mut x = seed;
    while Instant::now() < until {
        for _ in 0..1_000_000 {
            x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}
