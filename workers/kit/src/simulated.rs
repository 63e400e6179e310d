//! Devices of a worker that was started with a file of simulated ones. They compute in the host's
//! memory. The environment variable `FIEC_SIMULATED_DEVICES` names the file to a child.
//! `fiec-probes` reads the same file. For tests an entry may also have:
//!
//! * `"wrong_bits": true`: the device computes wrongly;
//! * `"cannot_open": "why"`: the device cannot be opened;
//! * `"context_ms": 300`: the time to make its context;
//! * `"contexts": "FILE"`: each event of its contexts is appended to this file. A line has `made`,
//!   `taken`, `kept` or `gone`, the device, and the process.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fiec_kernels::device::{ContextEvent, Contexts, Device, DeviceError, Devices, HostDevices};
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
    #[serde(default)]
    context_ms: u64,
    #[serde(default)]
    contexts: Option<PathBuf>,
}

fn read(file: &PathBuf) -> Result<Vec<Entry>, String> {
    let text = std::fs::read(file).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

/// The devices of a file, which is read at each opening.
#[derive(Debug)]
struct Simulated {
    file: PathBuf,
    contexts: Contexts,
}

/// Applies an event of a context as its device's entry says.
fn context(file: &PathBuf, event: ContextEvent, uuid: &str) {
    let entry = read(file).ok();
    let entry = entry.and_then(|all| all.into_iter().find(|entry| entry.id == uuid));
    let Some(entry) = entry else { return };
    let word = match event {
        ContextEvent::Made => {
            std::thread::sleep(Duration::from_millis(entry.context_ms));
            "made"
        }
        ContextEvent::Taken => "taken",
        ContextEvent::Kept => "kept",
        ContextEvent::Gone => "gone",
    };
    let Some(log) = entry.contexts else { return };
    let opened = std::fs::File::options()
        .append(true)
        .create(true)
        .open(&log);
    // One write per line: several processes append to the file.
    let line = format!("{word} {uuid} {}\n", std::process::id());
    if let Err(error) = opened.and_then(|mut log| log.write_all(line.as_bytes())) {
        eprintln!("fiec: cannot append to {}: {error}", log.display());
    }
}

impl Simulated {
    fn of(file: PathBuf) -> Self {
        let known = file.clone();
        let contexts = Contexts::telling(move |event, uuid| context(&known, event, uuid));
        Self { file, contexts }
    }

    /// Returns the devices of the file, with this one's settings.
    fn found(&self, uuid: &str) -> Result<HostDevices, DeviceError> {
        let absent = |why: String| {
            let file = self.file.display();
            DeviceError::Absent(format!("{uuid}, simulated by {file}: {why}"))
        };
        let entries = read(&self.file).map_err(absent)?;
        let entry = entries.into_iter().find(|entry| entry.id == uuid);
        let entry = entry.ok_or_else(|| absent("the file names no such device".to_owned()))?;
        if let Some(why) = entry.cannot_open {
            return Err(absent(why));
        }
        let devices = HostDevices::new(entry.memory_bytes).with_contexts(self.contexts.clone());
        Ok(match entry.wrong_bits {
            true => devices.computing_wrongly(),
            false => devices,
        })
    }
}

/// Returns the simulated devices if the environment names some, else these.
pub(crate) fn in_place_of(devices: Arc<dyn Devices>) -> Arc<dyn Devices> {
    match std::env::var_os(SIMULATED_DEVICES_ENV) {
        Some(file) if !file.is_empty() => Arc::new(Simulated::of(file.into())),
        _ => devices,
    }
}

impl Devices for Simulated {
    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        self.found(uuid)?.open(uuid, memory_bytes)
    }

    fn heat(&self, uuid: &str) -> Result<(), DeviceError> {
        self.found(uuid)?.heat(uuid)
    }

    fn cool(&self) {
        self.contexts.cool();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_file_are_opened_as_it_says_or_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("devices.json");
        let devices = Simulated::of(file.clone());
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
    #[test]
    fn a_context_is_made_once_kept_taken_and_gone_and_that_is_written_down() {
        let folder = tempfile::tempdir().unwrap();
        let (file, log) = (
            folder.path().join("devices.json"),
            folder.path().join("log"),
        );
        let entry = |id| serde_json::json!({"id": id, "memory_bytes": 64, "contexts": log});
        let text = serde_json::json!([entry("GPU-0"), entry("GPU-1")]).to_string();
        std::fs::write(&file, text).unwrap();
        let devices = Simulated::of(file);
        devices.heat("GPU-0").unwrap();
        devices.heat("GPU-0").unwrap();
        devices.open("GPU-0", None).unwrap().close(true);
        devices.open("GPU-0", None).unwrap().close(false);
        devices.heat("GPU-0").unwrap();
        devices.heat("GPU-1").unwrap();
        devices.cool();
        let written = std::fs::read_to_string(&log).unwrap();
        let words = written.lines().map(|line| {
            let (word, rest) = line.split_once(' ').unwrap();
            format!("{word} {}", &rest[..5])
        });
        let words: Vec<_> = words.collect();
        let expected = "made GPU-0,kept GPU-0,taken GPU-0,kept GPU-0,taken GPU-0,kept GPU-0,\
            taken GPU-0,gone GPU-0,made GPU-0,kept GPU-0,gone GPU-0,made GPU-1,kept GPU-1,\
            gone GPU-1";
        assert_eq!(words.join(","), expected);
    }
}
