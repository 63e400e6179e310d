//! Simulated devices, for tests and for trials on a machine without devices. A JSON file has their
//! properties and readings, and is read again at each poll.
//!
//! ```json
//! [{"id": "GPU-sim-0", "kind": "gpu", "name": "Simulated H100", "memory_bytes": 85899345920,
//!   "device": {"compute_capability": "9.0", "multiprocessors": 132}, "used_bytes": 0}]
//! ```
//!
//! Programs on such a device compute in the host's memory. With `"wrong_bits": true` they compute
//! wrongly, and with `"cannot_open": "why"` the device cannot be opened.

use std::io;
use std::path::{Path, PathBuf};

use fiec_schemas::hardware::Substrate;
use serde::Deserialize;

use crate::device::{DeviceFacts, DeviceMemory, DeviceSource};

#[derive(Debug, Deserialize)]
struct Simulated {
    #[serde(flatten)]
    substrate: Substrate,
    /// Bytes of its memory in use.
    #[serde(default)]
    used_bytes: u64,
    /// Utilization of its units in percent of time.
    #[serde(default)]
    utilization: u32,
    /// A fault, described.
    #[serde(default)]
    fault: Option<String>,
    /// Its power and its limit, in mW.
    #[serde(default)]
    power_mw: Option<(u32, u32)>,
    /// Energy since an arbitrary start, in mJ.
    #[serde(default)]
    energy_mj: Option<u64>,
}

fn read(file: &Path) -> io::Result<Vec<Simulated>> {
    let named = |what: String| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("file of devices {}: {what}", file.display()),
        )
    };
    let text = std::fs::read(file).map_err(|e| io::Error::new(e.kind(), named(e.to_string())))?;
    let devices: Vec<Simulated> =
        serde_json::from_slice(&text).map_err(|e| named(e.to_string()))?;
    match devices.iter().find(|d| !d.substrate.is_device()) {
        Some(host) => Err(named(format!("{:?} is no device", host.substrate.id))),
        None => Ok(devices),
    }
}

/// Returns the substrates in the file.
///
/// # Errors
/// The file cannot be read, or is no list of devices. The message names it.
pub fn substrates(file: &Path) -> io::Result<Vec<Substrate>> {
    Ok(read(file)?.into_iter().map(|d| d.substrate).collect())
}

/// Reads the facts of a file's devices, at each poll.
#[derive(Debug)]
pub struct FileSource {
    file: PathBuf,
    last: Vec<DeviceFacts>,
}

impl FileSource {
    /// A source of this file. If the file becomes unreadable, the last facts stay in force.
    pub fn new(file: PathBuf) -> Self {
        Self {
            file,
            last: Vec::new(),
        }
    }
}

impl DeviceSource for FileSource {
    fn poll(&mut self) -> Vec<DeviceFacts> {
        // A file that is being written is read again at the next poll.
        if let Ok(devices) = read(&self.file) {
            self.last = devices.iter().map(facts).collect();
        }
        self.last.clone()
    }
}

fn facts(device: &Simulated) -> DeviceFacts {
    let untold = || "a simulated device has none".to_owned();
    DeviceFacts {
        uuid: device.substrate.id.clone(),
        memory: device.substrate.memory_bytes.map_or_else(
            || Err(untold()),
            |total| {
                Ok(DeviceMemory {
                    used: device.used_bytes,
                    reserved: 0,
                    total,
                })
            },
        ),
        energy_mj: device.energy_mj.ok_or_else(untold),
        power: device.power_mw.ok_or_else(untold),
        power_capped: false,
        thermal: Err(untold()),
        thermally_slowed: false,
        utilization: Ok((device.utilization, device.utilization)),
        pcie: Err(untold()),
        nvlink: None,
        fault: Ok(device.fault.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"[{"id":"GPU-0","kind":"gpu","name":"S","memory_bytes":100,
        "device":{"compute_capability":"9.0"},"used_bytes":95,"power_mw":[200,300]}]"#;

    #[test]
    fn a_file_says_what_there_is_and_what_it_reads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("devices.json");
        std::fs::write(&file, FILE).unwrap();
        let there = substrates(&file).unwrap();
        assert_eq!(
            (there[0].id.as_str(), there[0].memory_bytes),
            ("GPU-0", Some(100))
        );
        let mut source = FileSource::new(file.clone());
        assert_eq!(source.poll()[0].memory.as_ref().unwrap().used, 95);
        assert_eq!(source.poll()[0].power, Ok((200, 300)));
        std::fs::write(&file, FILE.replace("95", "5")).unwrap();
        assert_eq!(source.poll()[0].memory.as_ref().unwrap().used, 5);
        std::fs::write(&file, "[{").unwrap();
        assert_eq!(source.poll()[0].memory.as_ref().unwrap().used, 5);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("devices.json");
        let said = || substrates(&file).unwrap_err().to_string();
        assert!(said().contains("devices.json"), "{}", said());
        std::fs::write(&file, r#"[{"id":"host","kind":"cpu","name":"c"}]"#).unwrap();
        assert!(said().contains("is no device"), "{}", said());
    }
}
