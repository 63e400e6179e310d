//! What NVML says is in use: the judge of whether memory was given back.

use nvml_wrapper::Nvml;

/// Bytes in use on a device (reserved ones included), by all processes.
///
/// # Errors
/// Why NVML does not say.
pub fn used_bytes(uuid: &str) -> Result<u64, String> {
    let nvml = Nvml::init().map_err(|error| error.to_string())?;
    let device = nvml.device_by_uuid(uuid).map_err(|e| e.to_string())?;
    let memory = device.memory_info().map_err(|error| error.to_string())?;
    Ok(memory.used + memory.reserved)
}
