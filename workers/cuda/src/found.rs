//! The devices that the driver reports, or why there are none.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use fiec_kernels::device::DeviceError;
use serde::Serialize;

/// A device that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Its number, from 0.
    pub ordinal: i32,
    /// `GPU-…`, or `MIG-…` for a slice, in the form of NVML and `nvidia-smi -L`.
    pub uuid: String,
    /// Its name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Highest clock of the multiprocessors in kHz, or 0 if the driver does not report it.
    pub clock_khz: u32,
    /// CUDA version of the driver, e.g. 13000.
    pub driver: i32,
}

/// Lists every device that the driver reports.
///
/// # Errors
/// The reason why there is none: no driver, a driver that is too old, no device, or the driver's
/// error.
pub fn list() -> Result<Vec<Found>, DeviceError> {
    let count = count()?;
    let mut all = Vec::new();
    for ordinal in 0..count {
        all.push(guarded("asking a device for its properties", || {
            one(ordinal)
        })?);
    }
    if all.is_empty() {
        return Err(DeviceError::Absent(
            "NVIDIA's driver is there, but shows no device (is CUDA_VISIBLE_DEVICES set to \
             nothing?)"
                .to_owned(),
        ));
    }
    Ok(all)
}

#[allow(unsafe_code)]
fn count() -> Result<i32, DeviceError> {
    // SAFETY: tries to load the library by name; its initializers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::Absent(
            "NVIDIA's driver is not installed here (libcuda.so cannot be loaded)".to_owned(),
        ));
    }
    match guarded("cuInit", result::init) {
        Ok(()) => {}
        Err(DeviceError::Driver { why, .. } | DeviceError::Failed { why, .. }) => {
            return Err(DeviceError::Absent(format!(
                "NVIDIA's driver is there, but does not start: {why}"
            )));
        }
        Err(other) => return Err(other),
    }
    guarded("cuDeviceGetCount", result::device::get_count)
}

#[allow(unsafe_code)]
fn one(ordinal: i32) -> Result<Found, DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` was given by the driver just now.
    let ask = |which| unsafe { result::device::get_attribute(device, which) };
    let positive = |value: i32| u32::try_from(value).unwrap_or(0);
    let mut driver = 0;
    // SAFETY: writes one int to the given address.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result()?;
    Ok(Found {
        ordinal,
        uuid: fiec_probes::devices::id_of(device)?,
        name: result::device::get_name(device)?,
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device) }? as u64,
        capability: (
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: positive(ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
        // Newer drivers may not report it.
        clock_khz: ask(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).map_or(0, positive),
        driver,
    })
}

/// Whether two names mean the same device: the sources disagree whether its first word is `MIG-…`
/// or `GPU-…`.
pub(crate) fn same(a: &str, b: &str) -> bool {
    let bare = |text: &str| {
        let text = text.to_ascii_lowercase();
        let rest = text
            .strip_prefix("gpu-")
            .or_else(|| text.strip_prefix("mig-"));
        rest.map_or_else(|| text.clone(), str::to_owned)
    };
    bare(a) == bare(b)
}

/// Converts a driver's error, with its text.
pub(crate) fn failed(call: &'static str, error: DriverError) -> DeviceError {
    let why = format!("{error:?}");
    match is_of_the_device(error.0) {
        true => DeviceError::Failed { call, why },
        false => DeviceError::Driver { call, why },
    }
}

/// Whether the device or its driver has failed by itself: no call of a program causes these errors.
const fn is_of_the_device(error: sys::CUresult) -> bool {
    use sys::CUresult::*;
    matches!(
        error,
        CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_NO_DEVICE
            | CUDA_ERROR_INVALID_DEVICE
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_OPERATING_SYSTEM
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_SYSTEM_NOT_READY
            | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
            | CUDA_ERROR_UNKNOWN
    )
}

/// Calls the driver. A missing call is an error, too (cudarc panics then).
pub(crate) fn guarded<T>(
    call: &'static str,
    f: impl FnOnce() -> Result<T, DriverError>,
) -> Result<T, DeviceError> {
    match caught(f) {
        Ok(done) => done.map_err(|error| failed(call, error)),
        Err(why) => Err(DeviceError::Driver { call, why }),
    }
}

thread_local! {
    /// Whether a panic of this thread is expected, and reported in another way.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Keeps expected panics from standard error.
fn quieten() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !EXPECTED.get() {
                before(info);
            }
        }));
    });
}

/// Returns the result of `f`, or the message of its panic: cudarc panics if a library or a symbol
/// is missing.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    quieten();
    let before = EXPECTED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(f));
    EXPECTED.set(before);
    done.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!(
            "the installed driver or library is too old: {}",
            text.unwrap_or("a function is missing")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_under_both_of_its_names() {
        let text = "MIG-00112233-4455-6677-8899-aabbccddeeff";
        assert!(same(text, "MIG-00112233-4455-6677-8899-AABBCCDDEEFF"));
        assert!(same(text, "GPU-00112233-4455-6677-8899-aabbccddeeff"));
        assert!(!same(text, "MIG-10112233-4455-6677-8899-aabbccddeeff"));
    }

    #[test]
    fn a_device_that_has_failed_is_told_from_a_call_that_is_refused() {
        let ecc = sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE;
        let refused = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
        assert!(is_of_the_device(ecc) && !is_of_the_device(refused));
    }

    #[test]
    fn a_missing_function_is_an_error_in_words() {
        let missing = || -> Result<(), DriverError> { panic!("cuNothing: undefined symbol") };
        let error = guarded("cuNothing", missing).unwrap_err();
        assert!(error.to_string().contains("undefined symbol"), "{error}");
    }
}
