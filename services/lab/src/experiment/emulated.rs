//! Emulated devices, for experiments on a machine without any. A node's device file has their
//! readings. Programs compute on the kernels' device in host memory, with the budget of their grant
//! (`fiec_kit::simulated`).

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

/// Prefix of the ids of emulated devices; no vendor uses it.
pub(super) const PREFIX: &str = "EMULATED-";
/// Memory of an emulated device: that of the A40 in the published experiments.
pub(super) const MEMORY_BYTES: u64 = 48_000_000_000;

/// Its constant power, and the limit of an A40, in mW.
const POWER_MW: (u32, u32) = (182_000, 300_000);

/// An emulated device with its readings.
#[derive(Debug, Clone)]
pub(super) struct Emulated {
    pub id: String,
    pub name: String,
    pub memory_bytes: u64,
    pub used_bytes: u64,
}

/// Writes the readings of a node's only device.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write(file: &Path, node: &str, used_bytes: u64) -> anyhow::Result<()> {
    let device = Emulated {
        id: format!("{PREFIX}{node}"),
        name: "Emulated 48 GB device".to_owned(),
        memory_bytes: MEMORY_BYTES,
        used_bytes,
    };
    write_all(file, &[device])
}

/// Writes the readings of a node's devices. The file is replaced as a whole, because the node may
/// read it at any time.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write_all(file: &Path, devices: &[Emulated]) -> anyhow::Result<()> {
    let entry = |d: &Emulated| {
        json!({
            "id": d.id, "kind": "gpu", "name": d.name,
            "memory_bytes": d.memory_bytes, "used_bytes": d.used_bytes,
            "power_mw": POWER_MW,
            "device": {"compute_capability": "8.6", "multiprocessors": 84},
        })
    };
    let devices: Vec<_> = devices.iter().map(entry).collect();
    let new = file.with_extension("new");
    let cannot = || format!("cannot write {}", file.display());
    std::fs::write(&new, serde_json::to_vec(&devices)?).with_context(cannot)?;
    std::fs::rename(&new, file).with_context(cannot)
}
