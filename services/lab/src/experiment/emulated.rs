//! Devices for experiments on a machine without any: a node's device file says what they read, and
//! programs compute on the kernels' device in the host's memory, with the budget of their grant
//! (`fiec_kit::simulated`).

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

/// What the ids of emulated devices begin with; no vendor's do.
pub(super) const PREFIX: &str = "EMULATED-";
/// Memory of an emulated device: that of the published experiments' A40.
pub(super) const MEMORY_BYTES: u64 = 48_000_000_000;

/// What it draws all the time, and the most that an A40 may, in mW.
const POWER_MW: (u32, u32) = (182_000, 300_000);

/// An emulated device, and what it reads.
#[derive(Debug, Clone)]
pub(super) struct Emulated {
    pub id: String,
    pub name: String,
    pub memory_bytes: u64,
    pub used_bytes: u64,
}

/// Writes what a node's one device reads from now on.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn write(file: &Path, node: &str, used_bytes: u64) -> anyhow::Result<()> {
    let device = Emulated {
        id: format!("{PREFIX}{node}"),
        name: "Emulated 48 GB device".to_owned(),
        memory_bytes: MEMORY_BYTES,
        used_bytes,
    };
    write_all(file, &[device])
}

/// Writes what a node's devices read from now on; whole at once, since the node reads it at its
/// own times.
///
/// # Errors
/// When the file cannot be written.
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
