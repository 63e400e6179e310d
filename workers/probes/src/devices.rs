//! The devices that can execute, as CUDA shows them: it honours `CUDA_VISIBLE_DEVICES` and MIG.

use cudarc::driver::{result, sys};
use fiec_schemas::Contract;
use fiec_schemas::hardware::{ComputeCapability, DeviceProfile, Substrate};
use fiec_schemas::substrate::SubstrateKind;

/// Returns the devices that CUDA can run on here. Empty without a working driver, with a log line.
/// Loads the driver, which may take a second: for joining, not for telemetry.
pub fn cuda_devices() -> Vec<Substrate> {
    // cudarc panics if a driver lacks a library or a symbol.
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
    // SAFETY: `device` was returned by `get` above.
    #[allow(unsafe_code)]
    let total = unsafe { result::device::total_mem(device) }?;
    let mig = name.contains(" MIG ");
    let profile = profile(device);
    Ok(Substrate {
        id: id_of(device)?,
        kind: match mig {
            true => SubstrateKind::Mig,
            false => SubstrateKind::Gpu,
        },
        name,
        memory_bytes: Some(total as u64),
        device: Some(DeviceProfile {
            whole: mig.then(|| whole(&profile)).flatten(),
            ..profile
        }),
    })
}

/// Returns the device's UUID in the form of NVML and `nvidia-smi -L`: `GPU-…`, or `MIG-…` for a
/// slice.
///
/// # Errors
/// The driver's error.
///
/// # Panics
/// If the driver lacks the call, cudarc panics.
pub fn id_of(device: sys::CUdevice) -> Result<String, result::DriverError> {
    let mig = result::device::get_name(device)?.contains(" MIG ");
    let uuid = if mig {
        // The first version of the call returns the UUID of the whole device.
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the device comes from the driver, which writes sixteen bytes.
        #[allow(unsafe_code)]
        unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }.result()?;
        uuid
    } else {
        result::device::get_uuid(device)?
    };
    let uuid = uuid.bytes.map(|b| b.cast_unsigned());
    Ok(format_uuid(if mig { "MIG" } else { "GPU" }, uuid))
}

/// Returns the UUID of the whole GPU of a slice, from its place on the bus, which is all that CUDA
/// reports. None if NVML does not answer. Then readings of the whole GPU do not apply to the slice.
fn whole(slice: &DeviceProfile) -> Option<String> {
    let bus = slice.bus.as_deref()?;
    let told = nvml_wrapper::Nvml::init().and_then(|nvml| nvml.device_by_pci_bus_id(bus)?.uuid());
    told.inspect_err(|why| tracing::warn!(bus, "the whole GPU of a slice is not known: {why}"))
        .ok()
}

/// Reads a device's attributes. Attributes that the driver does not report are left out.
fn profile(device: sys::CUdevice) -> DeviceProfile {
    use sys::CUdevice_attribute as A;
    let get = |attribute: A| {
        // SAFETY: the device comes from the driver, and the attribute is one of its own.
        #[allow(unsafe_code)]
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.ok().and_then(|n| u32::try_from(n).ok())
    };
    let part = |attribute| get(attribute).and_then(|n| u16::try_from(n).ok());
    let capability = part(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        .zip(part(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    let bus = get(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)
        .zip(get(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID))
        .zip(get(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID));
    DeviceProfile {
        compute_capability: capability.map(|(major, minor)| ComputeCapability { major, minor }),
        multiprocessors: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        bus: bus.map(|((domain, bus), device)| format!("{domain:04x}:{bus:02x}:{device:02x}.0")),
        // Every device that CUDA still supports fuses multiply and add with one rounding.
        contracts: vec![Contract::Bitwise, Contract::Bounded, Contract::Statistical],
        ..DeviceProfile::default()
    }
}

/// Returns the driver's CUDA version, such as `12.4`. None without a working driver.
pub fn cuda_version() -> Option<String> {
    let version = std::panic::catch_unwind(|| {
        let mut version = 0;
        // SAFETY: asked only where the library is there; it writes one number.
        #[allow(unsafe_code)]
        let told = unsafe {
            sys::is_culib_present() && sys::cuDriverGetVersion(&raw mut version).result().is_ok()
        };
        told.then_some(version)
    });
    let version = version.ok().flatten().filter(|v| *v > 0)?;
    Some(format!("{}.{}", version / 1_000, version % 1_000 / 10))
}

/// Formats a UUID as `nvidia-smi -L` and NVML do.
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
