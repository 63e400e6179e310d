//! `fiec device`: lists devices, and runs the suite that checks and measures one.

use clap::{Args, Subcommand};
use fiec_cuda::suite::{self, Case, Life, Report, Sizes, Verdict};
use fiec_cuda::{CudaDevices, Found, fp64_peak};
use serde_json::json;

use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Problems that take seconds. Their bits prove as much as those of large problems; their rates
/// mean little.
pub const QUICK: Sizes = Sizes {
    gemm: 1000,
    factor: (700, 96),
    grid: 150,
    iterations: 200,
    threads: 0,
};

/// List the devices that programs can compute on, or say why there is none
///
/// `fiec device test` checks and measures a device. `fiec bench device` prints figures.
#[derive(Debug, Args)]
pub struct DeviceArgs {
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Compare a device with this machine's processor, bit for bit, and measure it
    Test(TestArgs),
}

/// Options of the test.
#[derive(Debug, Args)]
struct TestArgs {
    /// UUID of the device [default: the first device]
    #[arg(long, value_name = "UUID")]
    uuid: Option<String>,
    /// Use small problems: exact bits in a few seconds, but rates that mean little
    #[arg(long)]
    quick: bool,
    /// Order of the matrix products [default: 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32_768))]
    order: Option<u32>,
    /// Order of the matrices of LU and QR [default: 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32_768))]
    factor: Option<u32>,
    /// Grid points per side of the problem for conjugate gradients [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=5_000))]
    grid: Option<u32>,
    /// Threads of the processor in the comparison [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// Runs the command. A missing device is reported and is no success.
///
/// # Errors
/// If an existing device cannot be opened.
pub fn run(args: &DeviceArgs, global: &Global) -> anyhow::Result<Outcome> {
    let found = match fiec_cuda::list() {
        Ok(found) => found,
        Err(why) => {
            if global.json {
                println!("{}", json!({"devices": [], "why": why.to_string()}));
            }
            eprintln!("fiec: {why}");
            return Ok(Outcome::NoDevice);
        }
    };
    match &args.what {
        None => list(&found, global),
        Some(What::Test(args)) => test(&found, args, global),
    }
}

fn rate(value: f64, unit: &str) -> String {
    match value {
        v if v >= 1e12 => format!("{:.2} T{unit}", v / 1e12),
        v if v >= 1e9 => format!("{:.1} G{unit}", v / 1e9),
        v if v >= 1e6 && unit == "FLOP/s" => format!("{:.1} M{unit}", v / 1e6),
        v => format!("{v:.0} {unit}"),
    }
}

fn list(found: &[Found], global: &Global) -> anyhow::Result<Outcome> {
    if global.json {
        println!("{}", json!({"devices": found}));
        return Ok(Outcome::Done);
    }
    let rows = found.iter().map(|device| {
        [
            device.uuid.clone(),
            device.name.clone(),
            ui::bytes(device.memory_bytes),
            format!("{}.{}", device.capability.0, device.capability.1),
            fp64_peak(device).map_or_else(String::new, |peak| rate(peak, "FLOP/s")),
            format!("{}.{}", device.driver / 1000, device.driver % 1000 / 10),
        ]
    });
    let head = ["uuid", "name", "memory", "capability", "FP64 peak", "CUDA"];
    println!("{}", ui::table(head, rows));
    Ok(Outcome::Done)
}

fn test(found: &[Found], args: &TestArgs, global: &Global) -> anyhow::Result<Outcome> {
    let device = match &args.uuid {
        None => found.first(),
        Some(uuid) => found.iter().find(|device| device.uuid == *uuid),
    };
    let Some(device) = device else {
        let uuid = args.uuid.as_deref().unwrap_or_default();
        eprintln!("fiec: there is no device {uuid} here; `fiec device` lists them");
        return Ok(Outcome::BadInput);
    };
    let mut sizes = Sizes::default();
    if args.quick {
        sizes = Sizes {
            threads: sizes.threads,
            ..QUICK
        };
    }
    if let Some(order) = args.order {
        sizes.gemm = order as usize;
    }
    if let Some(order) = args.factor {
        // Blocks small enough to leave work for the device.
        let order = order as usize;
        sizes.factor = (order, sizes.factor.1.min(order.div_ceil(4)));
    }
    sizes.grid = args.grid.unwrap_or(sizes.grid);
    if let Some(threads) = args.threads {
        sizes.threads = threads.into();
    }
    let steps = ui::Steps::new(global.json);
    let devices = CudaDevices::default();
    let report = suite::run(&devices, device, sizes, &mut |text| steps.step(text))?;
    if global.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        steps.done(&format!("{} {}", device.name, device.uuid));
        print(&report);
    }
    Ok(match report.passed() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "FAILED",
        Verdict::Skipped => "not run",
    }
}

fn row(case: &Case) -> [String; 8] {
    let short = |digest: &Option<String>| {
        let digest = digest.as_deref().unwrap_or("-");
        digest.get(..12).unwrap_or(digest).to_owned()
    };
    [
        format!("{} {}", case.name, case.contract),
        case.size.clone(),
        verdict(case.verdict).to_owned(),
        short(&case.digest),
        short(&case.cpu_digest),
        match case.seconds > 0.0 {
            true => rate(case.rate, case.unit),
            false => String::new(),
        },
        case.of_peak
            .map_or_else(String::new, |share| format!("{:.0} %", share * 100.0)),
        case.note.clone(),
    ]
}

fn print(report: &Report) {
    let head = [
        "case", "size", "", "digest", "CPU", "rate", "of peak", "note",
    ];
    println!("{}", ui::table(head, report.cases.iter().map(row)));
    if let Some(peak) = report.fp64_peak {
        println!(
            "FP64 peak without tensor cores: {} (cuBLAS may use them)",
            rate(peak, "FLOP/s")
        );
    }
    let Life {
        cold_ms,
        again_ms,
        warm_ms,
        used,
        held,
        note,
        ..
    } = &report.life;
    println!(
        "open: {cold_ms:.0} ms the first time, {again_ms:.0} ms with a new context, {warm_ms:.1} ms \
         with a warm one"
    );
    if let Some([before, meanwhile, warm, cold]) = used {
        println!(
            "in use, as NVML sees it: {} before, {} while {} were held, {} after they were given \
             back with a warm context, {} after a yield",
            ui::bytes(*before),
            ui::bytes(*meanwhile),
            ui::bytes(*held),
            ui::bytes(*warm),
            ui::bytes(*cold)
        );
    }
    if let Some(found) = report.life.verdict {
        println!("memory after a yield: {} {note}", verdict(found));
    }
}
