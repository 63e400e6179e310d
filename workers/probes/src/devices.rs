//! Which devices can execute: CUDA's view, which honours `CUDA_VISIBLE_DEVICES` and MIG.

use cudarc::driver::{result, sys};
use fiec_schemas::hardware::Substrate;

/// Devices that CUDA can run on here; none without a driver, or with one that does not work
/// (said in the log). Loads the driver, which may take a second: for joining, not for telemetry.
pub fn cuda_devices() -> Vec<Substrate> {
    // cudarc panics where a driver lacks a library or a symbol.
    match std::panic::catch_unwind(enumerate) {
        Ok(Ok(devices)) => devices,
        Ok(Err(why)) => {
            tracing::info!("no CUDA devices: {why}");
            Vec::new()
        }
        Err(_) => {
            tracing::warn!("no CUDA devices: the driver lacks what this build needs");
            Vec::new()
        }
    }
}

fn enumerate() -> Result<Vec<Substrate>, String> {
    // SAFETY: it only tries to load the driver's library by its usual names; the driver's
    // initializers are made to run in any process.
    #[allow(unsafe_code)]
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err("no CUDA driver library".into());
    }
    result::init().map_err(|e| e.to_string())?;
    let count = result::device::get_count().map_err(|e| e.to_string())?;
    (0..count)
        .map(|ordinal| substrate(ordinal).map_err(|e| e.to_string()))
        .collect()
}

fn substrate(ordinal: i32) -> Result<Substrate, result::DriverError> {
    let device = result::device::get(ordinal)?;
    let name = result::device::get_name(device)?;
    let uuid = result::device::get_uuid(device)?
        .bytes
        .map(|b| b.cast_unsigned());
    // SAFETY: `device` was returned by `get` above.
    #[allow(unsafe_code)]
    let total = unsafe { result::device::total_mem(device) }?;
    let mig = name.contains(" MIG ");
    Ok(Substrate {
        id: format_uuid(if mig { "MIG" } else { "GPU" }, uuid),
        kind: if mig { "mig" } else { "gpu" }.into(),
        name,
        memory_bytes: Some(total as u64),
    })
}

/// As `nvidia-smi -L` and NVML write it.
fn format_uuid(prefix: &str, bytes: [u8; 16]) -> String {
    use std::fmt::Write;
    let mut text = prefix.to_owned();
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_the_management_library_writes_them() {
        let bytes = std::array::from_fn(|i| 0xa0 + u8::try_from(i).unwrap());
        assert_eq!(
            format_uuid("GPU", bytes),
            "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
        );
    }

    #[test]
    fn asking_for_devices_never_panics_and_each_is_a_whole_substrate() {
        let devices = cuda_devices();
        println!("{} CUDA devices: {devices:?}", devices.len());
        for device in devices {
            assert!(
                device.id.len() == 40 && device.memory_bytes > Some(0),
                "{device:?}"
            );
        }
    }
}
