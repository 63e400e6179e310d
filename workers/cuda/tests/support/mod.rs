//! The emulated driver: compiled from the very kernels by g++, loaded under the driver's name.
#![allow(dead_code)] // not every test needs all of it

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fiec_cuda::CudaDevices;
use fiec_kernels::dense::{Mat, MatRef};
use fiec_kernels::device::{Buffer, Device, Devices};
use fiec_kernels::rhs::load_case;

/// The emulated device's UUID.
pub const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// The emulated driver, to oneself: it has one thread of execution.
pub struct Emulator {
    driver: &'static libloading::Library,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());
static LOADED: OnceLock<Option<Vec<libloading::Library>>> = OnceLock::new();

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/emulator")
        .join(name)
}

fn compile(file: &str, library: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let made = folder.join(library);
    let done = Command::new("g++")
        .args(["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"])
        .args(["-Wno-unknown-pragmas", "-march=native"])
        // The loader takes a library that is loaded for the one that is asked for by this name.
        .arg(format!("-Wl,-soname,{library}"))
        .arg(source(file))
        .arg("-o")
        .arg(&made)
        .output();
    let done = match done {
        Ok(done) => done,
        Err(error) => {
            eprintln!("SKIPPED: the kernels are not run, as there is no g++ here ({error})");
            return None;
        }
    };
    assert!(
        done.status.success(),
        "g++ does not compile {file}:\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
    Some(made)
}

#[allow(unsafe_code)]
fn load() -> Option<Vec<libloading::Library>> {
    let mut all = Vec::new();
    for (file, library) in [
        ("driver.cpp", "libcuda.so"),
        ("blas.cpp", "libcublas.so"),
        ("solver.cpp", "libcusolver.so"),
    ] {
        let path = compile(file, library)?;
        // SAFETY: our own library, which does nothing when it is loaded.
        all.push(unsafe { libloading::Library::new(&path) }.unwrap());
        std::fs::remove_file(&path).unwrap();
    }
    Some(all)
}

/// None, and a line that says so, where there is no g++.
pub fn emulator() -> Option<Emulator> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = LOADED.get_or_init(load).as_ref();
    if loaded.is_none() {
        eprintln!("SKIPPED: the kernels are not run, as there is no g++ here");
    }
    Some(Emulator {
        driver: &loaded?[0],
        _alone: alone,
    })
}

impl Emulator {
    /// What the driver counts.
    #[allow(unsafe_code)]
    pub fn count(&self, what: &str) -> u64 {
        let name = std::ffi::CString::new(what).unwrap();
        // SAFETY: declared so in driver.cpp.
        unsafe {
            let ask: libloading::Symbol<'_, unsafe extern "C" fn(*const i8) -> u64> =
                self.driver.get(b"fiec_emulator_count").unwrap();
            ask(name.as_ptr().cast())
        }
    }

    /// Sets something of the driver, e.g. the launch that fails.
    #[allow(unsafe_code)]
    pub fn set(&self, what: &str, value: u64) {
        let name = std::ffi::CString::new(what).unwrap();
        // SAFETY: declared so in driver.cpp.
        unsafe {
            let set: libloading::Symbol<'_, unsafe extern "C" fn(*const i8, u64)> =
                self.driver.get(b"fiec_emulator_set").unwrap();
            set(name.as_ptr().cast(), value);
        }
    }

    /// Nothing of the device is in use any more; a warm context may be.
    pub fn assert_empty(&self, contexts: u64) {
        for what in ["bytes", "allocations", "handles"] {
            assert_eq!(self.count(what), 0, "{what}");
        }
        assert_eq!(self.count("contexts"), contexts, "contexts");
        assert_eq!(self.count("streams"), contexts, "streams");
        assert_eq!(self.count("modules"), contexts, "modules");
    }
}

pub fn open(devices: &CudaDevices, budget: u64) -> Box<dyn Device> {
    devices.open(UUID, Some(budget)).unwrap()
}

pub fn upload(device: &mut dyn Device, from: MatRef<'_>) -> Buffer {
    let buffer = device.allocate(from.rows() * from.cols()).unwrap();
    let part = buffer.matrix(from.rows(), from.cols());
    device.write(from, part).unwrap();
    buffer
}

pub fn download(device: &mut dyn Device, buffer: &Buffer, rows: usize, cols: usize) -> Mat {
    let mut copy = Mat::zeros(rows, cols);
    device
        .read(buffer.matrix(rows, cols), copy.view_mut())
        .unwrap();
    copy
}

/// Kinds of elements: plain ones, those whose products underflow, and those that cancel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Plain,
    Tiny,
    Cancelling,
}

pub fn random(rows: usize, cols: usize, seed: u64, kind: Kind) -> Mat {
    let mut data = load_case(1, seed, rows * cols);
    for (i, value) in data.iter_mut().enumerate() {
        match kind {
            Kind::Plain => {}
            Kind::Tiny => *value *= [1e-160, -1e-163, 1e-140, -0.0, 4e-308][i % 5],
            Kind::Cancelling => *value = value.signum() * [1.0, 1e16, -1.0, 1e-16, 3.0][i % 5],
        }
    }
    Mat::from_columns(rows, cols, data)
}

pub fn bits(m: &Mat) -> Vec<u64> {
    m.data().iter().map(|v| v.to_bits()).collect()
}

/// Where two matrices differ first, in words.
pub fn difference(found: &Mat, expected: &Mat) -> Option<String> {
    let at = bits(found)
        .iter()
        .zip(bits(expected))
        .position(|(a, b)| *a != b)?;
    let (i, j) = (at % found.rows(), at / found.rows());
    Some(format!(
        "({i}, {j}): {:e} instead of {:e}",
        found.data()[at],
        expected.data()[at]
    ))
}
