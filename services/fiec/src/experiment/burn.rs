//! The part of a load that takes processors. The part that takes memory is `fiec pressure`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::Args;

/// How much and how long.
#[derive(Debug, Clone, Args)]
pub struct BurnArgs {
    /// Threads that compute without a pause, on the processors that this process may use
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: u32,
    /// Seconds after which it ends
    #[arg(long, default_value_t = 60.0)]
    pub hold: f64,
}

/// Computes until the time is over.
///
/// # Errors
/// When a thread cannot be started.
pub fn run(args: &BurnArgs) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs_f64(args.hold.clamp(0.0, 86_400.0));
    let threads = (0..args.threads)
        .map(|n| std::thread::Builder::new().spawn(move || burn(u64::from(n), until)))
        .collect::<Result<Vec<_>, _>>()?;
    for thread in threads {
        // A thread that only computes has nothing to tell.
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
