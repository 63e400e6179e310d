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

/// Writes what a node's device reads from now on; whole at once, since the node reads it at its own
/// times.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn write(file: &Path, node: &str, used_bytes: u64) -> anyhow::Result<()> {
    let devices = json!([{
        "id": format!("{PREFIX}{node}"), "kind": "gpu", "name": "Emulated 48 GB device",
        "memory_bytes": MEMORY_BYTES, "used_bytes": used_bytes,
        "power_mw": POWER_MW,
        "device": {"compute_capability": "8.6", "multiprocessors": 84},
    }]);
    let new = file.with_extension("new");
    let cannot = || format!("cannot write {}", file.display());
    std::fs::write(&new, devices.to_string()).with_context(cannot)?;
    std::fs::rename(&new, file).with_context(cannot)
}
