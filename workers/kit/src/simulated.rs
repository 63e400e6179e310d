//! Devices of a worker that was started with a file of simulated ones: they compute in the host's
//! memory. The environment variable `FIEC_SIMULATED_DEVICES` names the file to a child; beside
//! what `fiec-probes` reads in it, an entry may say, for tests,
//!
//! * `"wrong_bits": true`: the device computes wrongly;
//! * `"cannot_open": "why"`: it cannot be had.

use std::path::PathBuf;
use std::sync::Arc;

use fiec_kernels::device::{Device, DeviceError, Devices, HostDevices};
use serde::Deserialize;

/// The variable.
pub const SIMULATED_DEVICES_ENV: &str = "FIEC_SIMULATED_DEVICES";

#[derive(Debug, Deserialize)]
struct Entry {
    id: String,
    #[serde(default)]
    memory_bytes: u64,
    #[serde(default)]
    wrong_bits: bool,
    #[serde(default)]
    cannot_open: Option<String>,
}

/// Those of a file, which is read at each opening.
#[derive(Debug)]
struct Simulated {
    file: PathBuf,
}

/// The simulated devices where the environment names some, else these.
pub(crate) fn in_place_of(devices: Arc<dyn Devices>) -> Arc<dyn Devices> {
    match std::env::var_os(SIMULATED_DEVICES_ENV) {
        Some(file) if !file.is_empty() => Arc::new(Simulated { file: file.into() }),
        _ => devices,
    }
}

impl Devices for Simulated {
    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        let absent = |why: String| {
            let file = self.file.display();
            DeviceError::Absent(format!("{uuid}, simulated by {file}: {why}"))
        };
        let text = std::fs::read(&self.file).map_err(|error| absent(error.to_string()))?;
        let entries: Vec<Entry> =
            serde_json::from_slice(&text).map_err(|error| absent(error.to_string()))?;
        let entry = entries.into_iter().find(|entry| entry.id == uuid);
        let entry = entry.ok_or_else(|| absent("the file names no such device".to_owned()))?;
        if let Some(why) = entry.cannot_open {
            return Err(absent(why));
        }
        let mut devices = HostDevices::new(entry.memory_bytes);
        if entry.wrong_bits {
            devices = devices.computing_wrongly();
        }
        devices.open(uuid, memory_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_file_are_opened_as_it_says_or_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("devices.json");
        let devices = Simulated { file: file.clone() };
        let refused = |uuid| devices.open(uuid, None).err().unwrap().to_string();
        assert!(refused("GPU-0").contains("devices.json"));
        let text = r#"[{"id": "GPU-0", "memory_bytes": 1024, "kind": "gpu"},
            {"id": "GPU-1", "memory_bytes": 1024, "cannot_open": "it fell off the bus"}]"#;
        std::fs::write(&file, text).unwrap();
        let device = devices.open("GPU-0", Some(512)).unwrap();
        assert_eq!(device.usage().budget, 512);
        assert!(refused("GPU-1").contains("it fell off the bus"));
        assert!(refused("GPU-2").contains("no such device"));
    }
}
