//! The device suite. It compares bits with the CPU, errors of the vendor's libraries with their
//! bounds, and rates with the device's peak. It checks memory in use after a yield. `fiec device
//! test` prints it.

use std::time::{Duration, Instant};

use fiec_kernels::cg::{self, CgProblem, CgWork};
use fiec_kernels::dense::check::{LuCheck, ProductCheck, QrCheck};
use fiec_kernels::dense::qr::Reflectors;
use fiec_kernels::dense::{Into, Mat, gemm, lu, qr};
use fiec_kernels::device::dense::{apply, triangle, update};
use fiec_kernels::device::{
    Arithmetic, Buffer, CgLimits, CgStop, Device, DeviceError, Devices as _, Part,
};
use fiec_kernels::engine::Engine;
use fiec_kernels::{digest_hex, poisson, rhs};
use serde::Serialize;

use crate::found::Found;
use crate::{CudaDevices, fp64_peak, used_bytes};

/// The sizes of the problems.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Order of the product.
    pub gemm: usize,
    /// Order of LU and QR, and their block sizes.
    pub factor: (usize, usize),
    /// Grid points per side of the Poisson problem.
    pub grid: u32,
    /// Iterations of conjugate gradients.
    pub iterations: u64,
    /// Threads of the CPU for the comparison.
    pub threads: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            gemm: 8192,
            factor: (4096, 256),
            grid: 1000,
            iterations: 500,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The outcome of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Equal bits, or an error within the bound.
    Passed,
    /// Different bits, an error beyond the bound, or a failure.
    Failed,
    /// Not run. The note has the reason.
    Skipped,
}

/// One case.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    /// The computation, such as `gemm`.
    pub name: &'static str,
    /// `bitwise` or `bounded`.
    pub contract: &'static str,
    /// Its size, in words.
    pub size: String,
    /// The outcome.
    pub verdict: Verdict,
    /// The device's digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The CPU's digest, which a bitwise case must have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_digest: Option<String>,
    /// Seconds on the device. Transfers of panels count, those of the whole matrix do not.
    pub seconds: f64,
    /// Operations or iterations per second.
    pub rate: f64,
    /// Unit of the rate.
    pub unit: &'static str,
    /// Share of the device's FP64 peak by fused multiply-adds outside tensor cores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_peak: Option<f64>,
    /// Further details: a residual and its bound, or an error.
    pub note: String,
}

/// Contexts and memory.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Life {
    /// Milliseconds to open the device with a new context. The first time, kernels are compiled.
    pub cold_ms: f64,
    /// Milliseconds to open it with another new context.
    pub again_ms: f64,
    /// Milliseconds to open it with a warm context.
    pub warm_ms: f64,
    /// Bytes in use on the device according to NVML. Four values: at first, while a matrix is held,
    /// after a warm close, and after a cold one. None if NVML does not report them.
    pub used: Option<[u64; 4]>,
    /// Bytes of that matrix.
    pub held: u64,
    /// Whether the memory was freed.
    pub verdict: Option<Verdict>,
    /// The reason for a missing or bad verdict.
    pub note: String,
}

/// The results of the suite.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The device.
    pub device: Found,
    /// Its FP64 peak in operations per second, if known.
    pub fp64_peak: Option<f64>,
    /// The cases.
    pub cases: Vec<Case>,
    /// Contexts and memory.
    pub life: Life,
}

impl Report {
    /// Whether no case failed.
    #[must_use]
    pub fn passed(&self) -> bool {
        let life = self.life.verdict != Some(Verdict::Failed);
        life && self.cases.iter().all(|c| c.verdict != Verdict::Failed)
    }
}

/// The results of a case's computation.
struct Outcome {
    seconds: f64,
    operations: f64,
    digests: Option<(String, String)>,
    /// The error and its bound.
    bound: Option<(f64, f64)>,
}

/// Runs the suite on a device. `progress` receives the name of each next case.
///
/// # Errors
/// When the device cannot be opened at all. A later failure is the verdict of a case.
pub fn run(
    devices: &CudaDevices,
    found: &Found,
    sizes: Sizes,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, DeviceError> {
    let peak = fp64_peak(found);
    let mut report = Report {
        device: found.clone(),
        fp64_peak: peak,
        cases: Vec::new(),
        life: Life::default(),
    };
    progress("contexts and memory");
    report.life = life(devices, found)?;
    let (order, (n, block)) = (sizes.gemm, sizes.factor);
    type Compute = fn(&mut dyn Device, &mut Engine, Sizes) -> Result<Outcome, CaseError>;
    let cube = |n: usize| format!("{n} x {n} x {n}");
    let cases: [(&'static str, &'static str, String, Compute); 7] = [
        ("gemm", "bitwise", cube(order), |device, engine, sizes| {
            product(device, engine, sizes, Arithmetic::Chain512)
        }),
        ("gemm", "bounded", cube(order), |device, engine, sizes| {
            product(device, engine, sizes, Arithmetic::Vendor)
        }),
        (
            "lu",
            "bitwise",
            format!("{n}, blocks of {block}"),
            hybrid_lu,
        ),
        ("lu", "bounded", format!("{n}"), vendor_lu),
        (
            "qr",
            "bitwise",
            format!("{n}, blocks of {block}"),
            hybrid_qr,
        ),
        ("qr", "bounded", format!("{n}"), vendor_qr),
        (
            "cg",
            "bitwise",
            format!(
                "{0} x {0} grid, {1} iterations",
                sizes.grid, sizes.iterations
            ),
            solve,
        ),
    ];
    let mut engine = Engine::new(sizes.threads).unwrap_or_default();
    for (name, contract, size, compute) in cases {
        progress(&format!("{name}, {contract}, {size}"));
        let mut device = devices.open(&found.uuid, None)?;
        let outcome = compute(device.as_mut(), &mut engine, sizes);
        device.close(true);
        report
            .cases
            .push(judged(name, contract, size, outcome, peak));
    }
    devices.cool();
    Ok(report)
}

/// Why a case has no outcome.
type CaseError = Box<dyn std::error::Error + Send + Sync>;

fn judged(
    name: &'static str,
    contract: &'static str,
    size: String,
    outcome: Result<Outcome, CaseError>,
    peak: Option<f64>,
) -> Case {
    let unit = if name == "cg" {
        "iterations/s"
    } else {
        "FLOP/s"
    };
    let mut case = Case {
        name,
        contract,
        size,
        verdict: Verdict::Failed,
        digest: None,
        cpu_digest: None,
        seconds: 0.0,
        rate: 0.0,
        unit,
        of_peak: None,
        note: String::new(),
    };
    match outcome {
        Ok(outcome) => {
            case.seconds = outcome.seconds;
            case.rate = outcome.operations / outcome.seconds.max(f64::MIN_POSITIVE);
            case.of_peak = peak.filter(|_| name != "cg").map(|peak| case.rate / peak);
            let mut passed = true;
            if let Some((ours, cpu)) = outcome.digests {
                passed = ours == cpu;
                (case.digest, case.cpu_digest) = (Some(ours), Some(cpu));
            }
            if let Some((residual, bound)) = outcome.bound {
                passed &= residual <= bound;
                case.note = format!("residual {residual:.1e}, bound {bound:.1e}");
            }
            if passed {
                case.verdict = Verdict::Passed;
            }
        }
        Err(error) => {
            // Without the vendor's libraries the driver still serves the bitwise contract.
            if let Some(DeviceError::Library(_)) = error.downcast_ref() {
                case.verdict = Verdict::Skipped;
            }
            case.note = error.to_string();
        }
    }
    case
}

fn random(rows: usize, cols: usize, seed: u64) -> Mat {
    let mut data = Vec::with_capacity(rows * cols);
    (0..cols).for_each(|j| data.extend(rhs::load_case(j as u64, seed, rows)));
    Mat::from_columns(rows, cols, data)
}

fn upload(device: &mut dyn Device, from: &Mat) -> Result<Buffer, CaseError> {
    let buffer = device.allocate(from.data().len())?;
    let part = buffer.matrix(from.rows(), from.cols());
    device.write(from.view(), part)?;
    Ok(buffer)
}

fn product(
    device: &mut dyn Device,
    engine: &mut Engine,
    sizes: Sizes,
    kind: Arithmetic,
) -> Result<Outcome, CaseError> {
    let n = sizes.gemm;
    let (a, b) = (random(n, n, 1), random(n, n, 2));
    let (left, right) = (upload(device, &a)?, upload(device, &b)?);
    let to = device.allocate(n * n)?;
    let (left, right, part) = (left.matrix(n, n), right.matrix(n, n), to.matrix(n, n));
    // One run to warm up, then the best of three.
    let mut best = Duration::MAX;
    for _ in 0..4 {
        let began = Instant::now();
        device
            .gemm(kind, left, right, Into::Replace, part)
            .and_then(|()| device.finish())?;
        best = best.min(began.elapsed());
    }
    let mut found = Mat::zeros(n, n);
    device.read(part, found.view_mut())?;
    let simd = engine.simd();
    let check = ProductCheck::new(simd, a.view());
    let residual = check.check(simd, b.view(), found.view())?;
    let digests = (kind == Arithmetic::Chain512).then(|| {
        let mut expected = Mat::zeros(n, n);
        gemm(
            engine,
            a.view(),
            b.view(),
            Into::Replace,
            expected.view_mut(),
        );
        (digest_hex(found.data()), digest_hex(expected.data()))
    });
    Ok(Outcome {
        seconds: best.as_secs_f64(),
        operations: 2.0 * (n as f64).powi(3),
        digests,
        bound: Some((residual, check.bound())),
    })
}

/// Left-looking, as in `lu@1`: panels on the host, updates on the device.
fn hybrid_lu(
    device: &mut dyn Device,
    engine: &mut Engine,
    sizes: Sizes,
) -> Result<Outcome, CaseError> {
    let (n, block) = sizes.factor;
    let a = random(n, n, 3);
    let mut found = a.clone();
    let mut pivots: Vec<usize> = Vec::new();
    let mut held: Vec<Buffer> = Vec::new();
    let began = Instant::now();
    let of = |held: &Buffer, at: usize| held.matrix(n - at, block.min(n - at));
    for from in (0..n).step_by(block) {
        let width = block.min(n - from);
        let mut column = found.view().part(0, n, from, width).to_mat();
        let x = upload(device, &column)?;
        let part = x.matrix(n, width);
        device.exchange(part, &pivots)?;
        for (i, l) in held.iter().enumerate() {
            let (_, rows) = part.split_rows(i * block);
            let l = of(l, i * block);
            update(device, Arithmetic::Chain512, l, rows)?;
        }
        device.read(part, column.view_mut())?;
        device.release(x);
        let mut own = vec![0; width];
        let (_, panel) = column.view_mut().split_rows(from);
        lu::panel(engine, panel, &mut own)?;
        for (i, l) in held.iter().enumerate() {
            let (_, below) = of(l, i * block).split_rows(from - i * block);
            device.exchange(below, &own)?;
        }
        let finished = column.view().part(from, n - from, 0, width).to_mat();
        held.push(upload(device, &finished)?);
        let (left, right) = found.view_mut().split_cols(from);
        let (_, below) = left.split_rows(from);
        lu::exchange(below, &own);
        let (mut to, _) = right.split_cols(width);
        to.copy_from(column.view());
        pivots.extend(own.iter().map(|p| p + from));
    }
    let seconds = began.elapsed().as_secs_f64();
    let mut expected = a;
    let same = lu::factor(engine, expected.view_mut(), block)? == pivots;
    let mut digest = digest_hex(found.data());
    if !same {
        digest.push_str(", other pivots");
    }
    Ok(Outcome {
        seconds,
        operations: 2.0 / 3.0 * (n as f64).powi(3),
        digests: Some((digest, digest_hex(expected.data()))),
        bound: None,
    })
}

fn hybrid_qr(
    device: &mut dyn Device,
    engine: &mut Engine,
    sizes: Sizes,
) -> Result<Outcome, CaseError> {
    let (n, block) = sizes.factor;
    let a = random(n, n, 4);
    let mut found = a.clone();
    let mut held: Vec<(Buffer, Buffer)> = Vec::new();
    let scratch = device.allocate(2 * block * block)?;
    let began = Instant::now();
    for from in (0..n).step_by(block) {
        let width = block.min(n - from);
        let mut column = found.view().part(0, n, from, width).to_mat();
        let x = upload(device, &column)?;
        let part = x.matrix(n, width);
        for (i, (v, t)) in held.iter().enumerate() {
            let (_, rows) = part.split_rows(i * block);
            let both: (Part, Part) = (v.matrix(n - i * block, block), t.matrix(block, block));
            apply(device, Arithmetic::Chain512, both, rows, &scratch)?;
        }
        device.read(part, column.view_mut())?;
        device.release(x);
        let (_, panel) = column.view_mut().split_rows(from);
        let made = qr::panel(engine, panel)?;
        held.push((upload(device, &made.v)?, upload(device, &made.t)?));
        let (_, right) = found.view_mut().split_cols(from);
        let (mut to, _) = right.split_cols(width);
        to.copy_from(column.view());
    }
    let seconds = began.elapsed().as_secs_f64();
    let mut expected = a;
    qr::factor(engine, expected.view_mut(), block)?;
    Ok(Outcome {
        seconds,
        operations: 4.0 / 3.0 * (n as f64).powi(3),
        digests: Some((digest_hex(found.data()), digest_hex(expected.data()))),
        bound: None,
    })
}

fn vendor_lu(
    device: &mut dyn Device,
    engine: &mut Engine,
    sizes: Sizes,
) -> Result<Outcome, CaseError> {
    let n = sizes.factor.0;
    let a = random(n, n, 3);
    let x = upload(device, &a)?;
    let part = x.matrix(n, n);
    // One run to warm up: handles and workspaces.
    device.vendor_lu(part)??;
    device.write(a.view(), part)?;
    let began = Instant::now();
    let pivots = device.vendor_lu(part)??;
    let seconds = began.elapsed().as_secs_f64();
    let mut found = Mat::zeros(n, n);
    device.read(part, found.view_mut())?;
    let mut row_of: Vec<usize> = (0..n).collect();
    pivots
        .iter()
        .enumerate()
        .for_each(|(row, pivot)| row_of.swap(row, *pivot));
    let mut check = LuCheck::new();
    check.add(engine.simd(), a.view(), found.view(), &row_of)?;
    Ok(Outcome {
        seconds,
        operations: 2.0 / 3.0 * (n as f64).powi(3),
        digests: None,
        bound: Some(check.residual()),
    })
}

fn vendor_qr(
    device: &mut dyn Device,
    engine: &mut Engine,
    sizes: Sizes,
) -> Result<Outcome, CaseError> {
    let n = sizes.factor.0;
    let a = random(n, n, 4);
    let x = upload(device, &a)?;
    let part = x.matrix(n, n);
    device.vendor_qr(part)?;
    device.write(a.view(), part)?;
    let began = Instant::now();
    let tau = device.vendor_qr(part)?;
    let seconds = began.elapsed().as_secs_f64();
    let mut found = Mat::zeros(n, n);
    device.read(part, found.view_mut())?;
    // By block columns: the product of all reflectors equals that of the blocks' products.
    const BLOCK: usize = 128;
    let mut check = QrCheck::new(n);
    for from in (0..n).step_by(BLOCK) {
        let (rows, width) = (n - from, BLOCK.min(n - from));
        let v = Mat::from_fn(rows, width, |i, j| match i.cmp(&j) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => found.view().at(from + i, from + j),
        });
        let mut cross = Mat::zeros(width, width);
        let to = cross.view_mut();
        gemm(engine, v.view().t(), v.view(), Into::Replace, to);
        let made = Reflectors {
            t: triangle(&tau[from..from + width], &cross),
            v,
        };
        let part = |whole: &Mat| whole.view().part(0, n, from, width).to_mat();
        check.add(engine, part(&a).view(), part(&found).view(), &made)?;
    }
    Ok(Outcome {
        seconds,
        operations: 4.0 / 3.0 * (n as f64).powi(3),
        digests: None,
        bound: Some((check.residual(), check.bound())),
    })
}

fn solve(device: &mut dyn Device, engine: &mut Engine, sizes: Sizes) -> Result<Outcome, CaseError> {
    let a = poisson::poisson_2d(sizes.grid, sizes.grid)?;
    let b = rhs::right_hand_side(&a, 1, 6);
    let problem = CgProblem::new(a, b)?;
    let mut found = cg::init(&problem);
    device.cg_begin(&problem, &found)?;
    let limits = CgLimits {
        steps: sizes.iterations,
        tolerance: 1e-14,
        most: u64::MAX,
    };
    let began = Instant::now();
    let (scalars, stop) = device.cg_advance(limits)?;
    let seconds = began.elapsed().as_secs_f64();
    if let CgStop::Broken(error) = stop {
        return Err(error.into());
    }
    device.cg_read(&mut found)?;
    device.cg_end();
    let threads = Engine::new(engine.threads())?;
    let mut work = CgWork::with_engine(&problem, threads);
    let mut expected = cg::init(&problem);
    for _ in 0..scalars.iteration {
        cg::step(&problem, &mut expected, &mut work)?;
    }
    let digest = |state: &cg::CgState| digest_hex(&[&state.x[..], &state.r, &state.p].concat());
    Ok(Outcome {
        seconds,
        operations: scalars.iteration as f64,
        digests: Some((digest(&found), digest(&expected))),
        bound: None,
    })
}

/// Measures the time to open the device, and the memory in use before, during and after.
fn life(devices: &CudaDevices, found: &Found) -> Result<Life, DeviceError> {
    let uuid = &found.uuid;
    let timed = || -> Result<(f64, Box<dyn Device>), DeviceError> {
        let began = Instant::now();
        let device = devices.open(uuid, None)?;
        Ok((began.elapsed().as_secs_f64() * 1e3, device))
    };
    devices.cool();
    let mut life = Life::default();
    let before = used_bytes(uuid);
    let (cold_ms, device) = timed()?;
    device.close(false);
    let (again_ms, mut device) = timed()?;
    let bytes = device.usage().available().min(1 << 30) / 2;
    let buffer = device.allocate(usize::try_from(bytes / 8).unwrap_or(1))?;
    life.held = 8 * buffer.elements() as u64;
    let meanwhile = used_bytes(uuid);
    device.close(true);
    let after_warm = used_bytes(uuid);
    let (warm_ms, device) = timed()?;
    device.close(false);
    let after_cold = used_bytes(uuid);
    (life.cold_ms, life.again_ms, life.warm_ms) = (cold_ms, again_ms, warm_ms);
    match [before, meanwhile, after_warm, after_cold].map(Result::ok) {
        [Some(before), Some(meanwhile), Some(warm), Some(cold)] => {
            life.used = Some([before, meanwhile, warm, cold]);
            // Other processes may use the device, so half of the held bytes is the threshold.
            let line = life.held / 2;
            let came = meanwhile >= warm + line && cold <= before + line;
            life.verdict = Some(match came {
                true => Verdict::Passed,
                false => Verdict::Failed,
            });
            if !came {
                life.note = "device memory did not come back".to_owned();
            }
        }
        _ => {
            life.verdict = Some(Verdict::Skipped);
            life.note = match used_bytes(uuid) {
                Err(why) => format!("NVML does not say what is in use: {why}"),
                Ok(_) => "NVML did not answer each time".to_owned(),
            };
        }
    }
    Ok(life)
}
