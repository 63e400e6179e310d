//! Offers of the simulated nodes: devices, and caps below their memory.

use fiec_schemas::hardware::DeviceProfile;

use super::*;

impl World {
    /// Submits this program.
    pub fn submit_program(&mut self, n: u64, program: &str) {
        let line = format!(r#"{{"program":"{program}","params":{{}}}}"#);
        self.submit_spec(n, Submission::parse(line.as_bytes()).unwrap());
        self.carry_out();
    }

    /// Caps the memory that a node or its device offers, in bytes.
    pub fn cap(&mut self, node: usize, device: Option<&str>, bytes: f64) {
        self.caps.insert((node, device.map(str::to_owned)), bytes);
        self.vectors();
    }

    /// Sets a node's reading of a device, or of a whole GPU with slices.
    pub fn set_signal(&mut self, node: usize, device: &str, signal: Signal, value: f64) {
        self.signals
            .insert((node, device.to_owned(), signal), value);
    }

    /// Removes all caps.
    pub fn uncap(&mut self) {
        self.caps.clear();
    }
}

/// A node whose devices are slices: `g0` and `g1` of `whole0`, `g2` of `whole1`.
pub fn with_slices(i: usize) -> NodeDescriptor {
    let mut d = with_devices(i, &[40, 40, 40]);
    let slices = d.substrates.iter_mut().filter(|s| s.is_device());
    for (slice, whole) in slices.zip(["whole0", "whole0", "whole1"]) {
        slice.kind = SubstrateKind::Mig;
        if let Some(profile) = &mut slice.device {
            profile.whole = Some(whole.into());
        }
    }
    d
}

/// A node with devices of these sizes in bytes, named `g0`, `g1`, ….
pub fn with_devices(i: usize, memory: &[u64]) -> NodeDescriptor {
    let mut d = descriptor(i, 100 + i as u128);
    d.slots = 8;
    let devices = memory.iter().enumerate();
    d.substrates.extend(devices.map(|(g, bytes)| Substrate {
        id: format!("g{g}"),
        kind: SubstrateKind::Gpu,
        name: "NVIDIA H100 80GB HBM3".into(),
        memory_bytes: Some(*bytes),
        device: Some(DeviceProfile {
            compute_capability: "9.0".parse().ok(),
            multiprocessors: Some(132),
            ..DeviceProfile::default()
        }),
    }));
    d
}
