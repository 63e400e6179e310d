//! The cases on a [`Device`]: the same inputs, the same golden digests. Panels of LU and QR are
//! halved as [`lu::panel`] and [`qr::panel`] halve them. The host factors the halves, and the
//! device computes the rest, as in the programs.

use super::{CASES, Computed, Found, STEPS, after_steps, bounds, inputs};
use crate::cg::{self, CgProblem, CgWork};
use crate::dense::{Into, Mat, MatRef, lu, qr};
use crate::device::dense::{apply, update};
use crate::device::{Arithmetic, Buffer, CgLimits, CgStop, Device, DeviceError};
use crate::engine::Engine;

/// Only this arithmetic has the bitwise contract.
const ARITHMETIC: Arithmetic = Arithmetic::Chain512;

/// The part of a case that a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// All of it.
    All,
    /// The operations between two panels. The host computes the panels.
    Updates,
    /// Nothing: a device has no such operation.
    None,
}

/// Returns the part that a device computes of the case with this name.
#[must_use]
pub fn share(name: &str) -> Share {
    match name {
        "lu-panel-ties" | "qr-panel" => Share::Updates,
        "dot" | "spmv" => Share::None,
        _ => Share::All,
    }
}

/// Computes the case of this index, on the device as far as possible, the rest on the host. None
/// beyond the last case.
///
/// # Errors
/// The device's. They say nothing about its numbers.
pub fn run_on(
    index: usize,
    engine: &mut Engine,
    device: &mut dyn Device,
) -> Result<Option<Found>, DeviceError> {
    let Some(case) = CASES.get(index) else {
        return Ok(None);
    };
    let computed = match case.name {
        "gemm-511" => product(device, &inputs::factors(511), Into::Subtract)?,
        "gemm-512" => product(device, &inputs::factors(512), Into::Subtract)?,
        "gemm-513" => product(device, &inputs::factors(513), Into::Subtract)?,
        "gemm-1025" => product(device, &inputs::factors(1025), Into::Subtract)?,
        "gemm-cancellation" => product(device, &inputs::cancelling(), Into::Replace)?,
        "gemm-denormals" => product(device, &inputs::denormal(), Into::Add)?,
        "gemm-zeros" => product(device, &inputs::zeros(), Into::Subtract)?,
        "lu-panel-ties" => lu_panel(engine, device)?,
        "qr-panel" => qr_panel(engine, device)?,
        "triangular-solve" => solve(device)?,
        "cg-20" => twenty_steps(engine, device)?,
        _ => (case.compute)(engine),
    };
    Ok(Some(Found::of(case.name, computed)))
}

fn put(device: &mut dyn Device, m: MatRef<'_>) -> Result<Buffer, DeviceError> {
    let buffer = device.allocate(m.rows() * m.cols())?;
    device.write(m, buffer.matrix(m.rows(), m.cols()))?;
    Ok(buffer)
}

/// Reads a whole matrix and frees its memory.
fn take(
    device: &mut dyn Device,
    buffer: Buffer,
    rows: usize,
    cols: usize,
) -> Result<Mat, DeviceError> {
    let mut m = Mat::zeros(rows, cols);
    device.read(buffer.matrix(rows, cols), m.view_mut())?;
    device.release(buffer);
    Ok(m)
}

/// One product: C from A and B.
fn gemm(
    device: &mut dyn Device,
    a: MatRef<'_>,
    b: MatRef<'_>,
    into: Into,
    c: &Mat,
) -> Result<Mat, DeviceError> {
    // Stored untransposed and used transposed, as in the programs.
    let left = put(device, if is_transposed(a) { a.t() } else { a })?;
    let right = put(device, b)?;
    let to = put(device, c.view())?;
    let stored = if is_transposed(a) {
        left.matrix(a.cols(), a.rows()).t()
    } else {
        left.matrix(a.rows(), a.cols())
    };
    device.gemm(
        ARITHMETIC,
        stored,
        right.matrix(b.rows(), b.cols()),
        into,
        to.matrix(c.rows(), c.cols()),
    )?;
    device.release(left);
    device.release(right);
    take(device, to, c.rows(), c.cols())
}

fn is_transposed(m: MatRef<'_>) -> bool {
    let (down, _) = m.strides();
    down != 1
}

fn product(
    device: &mut dyn Device,
    input: &inputs::Product,
    into: Into,
) -> Result<Computed, DeviceError> {
    let inputs::Product { a, b, c } = input;
    let found = gemm(device, a.view(), b.view(), into, c)?;
    let error = bounds::product(a, b, into, c, &found);
    Ok(Ok((found.into_data(), error)))
}

fn lu_panel(engine: &mut Engine, device: &mut dyn Device) -> Result<Computed, DeviceError> {
    let a = inputs::ties();
    let (rows, cols) = (a.rows(), a.cols());
    let half = (cols / 2).next_multiple_of(lu::LEAF);
    let mut left = a.view().part(0, rows, 0, half).to_mat();
    let mut pivots = vec![0; cols];
    let (first, second) = pivots.split_at_mut(half);
    if let Err(error) = lu::panel(engine, left.view_mut(), first) {
        return Ok(Err(error.to_string()));
    }
    let finished = put(device, left.view())?;
    let right = put(device, a.view().part(0, rows, half, cols - half))?;
    let x = right.matrix(rows, cols - half);
    device.exchange(x, first)?;
    update(device, ARITHMETIC, finished.matrix(rows, half), x)?;
    device.release(finished);
    let mut right = take(device, right, rows, cols - half)?;
    let (_, below) = right.view_mut().split_rows(half);
    if let Err(error) = lu::panel(engine, below, second) {
        return Ok(Err(error.to_string()));
    }
    let below = put(device, left.view().part(half, rows - half, 0, half))?;
    device.exchange(below.matrix(rows - half, half), second)?;
    let below = take(device, below, rows - half, half)?;
    let (_, mut old) = left.view_mut().split_rows(half);
    old.copy_from(below.view());
    for pivot in second {
        *pivot += half;
    }
    let factors = beside(&left, &right);
    let error = bounds::lu(&a, &factors, &pivots);
    let mut values = factors.into_data();
    values.extend(pivots.iter().map(|p| *p as f64));
    Ok(Ok((values, error)))
}

fn qr_panel(engine: &mut Engine, device: &mut dyn Device) -> Result<Computed, DeviceError> {
    let a = inputs::tall();
    let (rows, cols) = (a.rows(), a.cols());
    let half = (cols / 2).next_multiple_of(qr::LEAF);
    let rest = cols - half;
    let mut left = a.view().part(0, rows, 0, half).to_mat();
    let one = match qr::panel(engine, left.view_mut()) {
        Ok(reflectors) => reflectors,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let (v, t) = (put(device, one.v.view())?, put(device, one.t.view())?);
    let right = put(device, a.view().part(0, rows, half, rest))?;
    let scratch = device.allocate(2 * half * rest)?;
    let reflectors = (v.matrix(rows, half), t.matrix(half, half));
    let x = right.matrix(rows, rest);
    apply(device, ARITHMETIC, reflectors, x, &scratch)?;
    for buffer in [v, t, scratch] {
        device.release(buffer);
    }
    let mut right = take(device, right, rows, rest)?;
    let (_, below) = right.view_mut().split_rows(half);
    let two = match qr::panel(engine, below) {
        Ok(reflectors) => reflectors,
        Err(error) => return Ok(Err(error.to_string())),
    };
    // T₁₂ = −T₁₁·(V₁ᵀ·V₂)·T₂₂.
    let zeros = Mat::zeros(half, rest);
    let v1 = one.v.view().part(half, rows - half, 0, half);
    let cross = gemm(device, v1.t(), two.v.view(), Into::Replace, &zeros)?;
    let times = gemm(device, cross.view(), two.t.view(), Into::Replace, &zeros)?;
    let t12 = gemm(device, one.t.view(), times.view(), Into::Subtract, &zeros)?;
    let whole = |one: &Mat, two: &Mat, from: usize, corner: Option<&Mat>| {
        Mat::from_fn(one.rows().max(from + two.rows()), cols, |i, j| {
            match (i < one.rows() && j < half, j >= half && i >= from) {
                (true, _) => one.view().at(i, j),
                (_, true) => two.view().at(i - from, j - half),
                _ if j >= half => corner.map_or(0.0, |c| c.view().at(i, j - half)),
                _ => 0.0,
            }
        })
    };
    let found = qr::Reflectors {
        v: whole(&one.v, &two.v, half, None),
        t: whole(&one.t, &two.t, half, Some(&t12)),
    };
    let factors = beside(&left, &right);
    let error = bounds::qr(&a, &factors, &found);
    let mut values = factors.into_data();
    values.extend_from_slice(found.t.data());
    Ok(Ok((values, error)))
}

/// `[left right]`.
fn beside(left: &Mat, right: &Mat) -> Mat {
    let mut data = left.data().to_vec();
    data.extend_from_slice(right.data());
    Mat::from_columns(left.rows(), left.cols() + right.cols(), data)
}

fn solve(device: &mut dyn Device) -> Result<Computed, DeviceError> {
    let (l, b) = inputs::triangle();
    let (triangle, right) = (put(device, l.view())?, put(device, b.view())?);
    device.solve_unit_lower(
        ARITHMETIC,
        triangle.matrix(l.rows(), l.cols()),
        right.matrix(b.rows(), b.cols()),
    )?;
    device.release(triangle);
    let x = take(device, right, b.rows(), b.cols())?;
    let error = bounds::solve(&l, &x, &b);
    Ok(Ok((x.into_data(), error)))
}

fn twenty_steps(engine: &Engine, device: &mut dyn Device) -> Result<Computed, DeviceError> {
    let system = inputs::system().map_err(|e| e.to_string());
    let problem = system.and_then(|(a, b)| CgProblem::new(a, b).map_err(|e| e.to_string()));
    let problem = match problem {
        Ok(problem) => problem,
        Err(error) => return Ok(Err(error)),
    };
    let mut state = cg::init(&problem);
    device.cg_begin(&problem, &state)?;
    let limits = CgLimits {
        steps: STEPS,
        tolerance: 0.0,
        most: u64::MAX,
    };
    let (_, stop) = device.cg_advance(limits)?;
    device.cg_read(&mut state)?;
    device.cg_end();
    if stop != CgStop::Steps {
        return Ok(Err(format!(
            "CG ended after {} of {STEPS} steps: {stop:?}",
            state.iteration
        )));
    }
    let mut work = CgWork::with_engine(&problem, Engine::with_simd(engine.simd()));
    Ok(after_steps(&problem, state, &mut work))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Devices, HostDevices};

    #[test]
    fn a_right_device_keeps_both_contracts_and_gives_its_memory_back() {
        let devices = HostDevices::new(1 << 24);
        let mut device = devices.open("GPU-host", None).unwrap();
        let mut engine = Engine::default();
        for index in 0..CASES.len() {
            let before = devices.ledger();
            let found = run_on(index, &mut engine, device.as_mut())
                .unwrap()
                .unwrap();
            assert!(found.is_bitwise(), "{found:?}");
            assert!(found.is_bounded(), "{found:?}");
            let after = devices.ledger();
            assert_eq!(after.held, 0, "{} leaves memory on the device", found.name);
            let worked = after.read > before.read;
            assert_eq!(worked, share(found.name) != Share::None, "{}", found.name);
        }
        let beyond = run_on(CASES.len(), &mut engine, device.as_mut());
        assert_eq!(beyond, Ok(None));
    }

    #[test]
    fn a_device_that_computes_wrongly_is_found_out_by_each_of_its_cases() {
        let devices = HostDevices::new(1 << 24).computing_wrongly();
        let mut device = devices.open("GPU-host", None).unwrap();
        let mut engine = Engine::default();
        for index in 0..CASES.len() {
            let found = run_on(index, &mut engine, device.as_mut())
                .unwrap()
                .unwrap();
            let untouched = share(found.name) == Share::None;
            assert_eq!(found.is_bitwise(), untouched, "{found:?}");
        }
    }

    #[test]
    fn a_device_without_memory_is_an_error_and_no_wrong_result() {
        let devices = HostDevices::new(1 << 24);
        let mut device = devices.open("GPU-host", Some(64)).unwrap();
        let error = run_on(0, &mut Engine::default(), device.as_mut()).unwrap_err();
        assert!(error.is_memory(), "{error}");
    }
}
