//! Memory in use according to NVML, which shows whether memory was freed.

use nvml_wrapper::Nvml;

/// Bytes in use on a device by all processes, including reserved ones.
///
/// # Errors
/// NVML's error.
pub fn used_bytes(uuid: &str) -> Result<u64, String> {
    let nvml = Nvml::init().map_err(|error| error.to_string())?;
    let device = nvml.device_by_uuid(uuid).map_err(|e| e.to_string())?;
    let memory = device.memory_info().map_err(|error| error.to_string())?;
    Ok(memory.used + memory.reserved)
}
