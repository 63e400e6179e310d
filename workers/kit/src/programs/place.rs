//! The place of a program's computation: the host, or the device that its grant names.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_kernels::device::{self, Device, DeviceError, Devices};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::programs::Arithmetic;
use fiec_schemas::{Digest, Fault};

use crate::program::{Inputs, ProgramError};

/// Bytes that the vendor's libraries need beside the matrices.
const VENDOR_BYTES: u64 = 1 << 20;

/// The place under the present grant.
pub(super) struct Place {
    devices: Arc<dyn Devices>,
    granted: Option<DeviceGrant>,
    device: Option<Box<dyn Device>>,
}

impl Place {
    /// The host, until a grant names a device.
    pub fn new(inputs: &Inputs) -> Self {
        Self {
            devices: inputs.devices(),
            granted: None,
            device: None,
        }
    }

    /// Whether this grant names another place.
    pub fn changes(&self, grant: &Grant) -> bool {
        grant.device != self.granted
    }

    /// Takes the device out; none on the host. [`Place::put`] puts it back. If an error drops it
    /// meanwhile, its memory is freed.
    pub fn take(&mut self) -> Option<Box<dyn Device>> {
        self.device.take()
    }

    /// Puts a device back that was taken out.
    pub fn put(&mut self, device: Box<dyn Device>) {
        self.device = Some(device);
    }

    /// Moves to the place that the grant names. The caller has freed its buffers on the old device.
    pub fn go(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.let_go(false);
        if let Some(granted) = &grant.device {
            let opened = self.devices.open(&granted.uuid, granted.memory_bytes);
            self.device = Some(opened.map_err(failed)?);
            self.granted = Some(granted.clone());
        }
        Ok(())
    }

    /// Returns to the host, and closes the device.
    pub fn let_go(&mut self, warm: bool) {
        self.granted = None;
        if let Some(device) = self.device.take() {
            device.close(warm);
        }
    }
}

/// Converts a device's error. A too small budget and a missing library are permanent.
pub(super) fn failed(error: DeviceError) -> ProgramError {
    match error {
        DeviceError::Budget { .. } | DeviceError::Library(_) => ProgramError::permanent(error),
        DeviceError::Absent(_) | DeviceError::Failed { .. } => ProgramError::Faulty {
            words: error.to_string(),
            fault: Box::new(Fault::DeviceLost),
        },
        // The driver also refuses what a program asks for wrongly.
        DeviceError::Memory { .. } | DeviceError::Driver { .. } => ProgramError::transient(error),
    }
}

/// The error if even the smallest piece does not fit.
pub(super) fn too_small(device: &dyn Device, what: &str, elements: usize) -> ProgramError {
    ProgramError::Permanent(format!(
        "{what} needs at least {} bytes of device memory, but the grant of {} has {}: request \
         more, or run it without a device",
        8 * elements,
        device.about().uuid,
        device.usage().budget
    ))
}

/// Converts the choice of arithmetic to the kernels' type.
pub(super) fn arithmetic(params: Arithmetic) -> device::Arithmetic {
    match params {
        Arithmetic::Chain512 => device::Arithmetic::Chain512,
        Arithmetic::Vendor => device::Arithmetic::Vendor,
    }
}

/// Bytes to keep free for temporary buffers beside the matrices.
pub(super) fn reserve(arithmetic: device::Arithmetic, rows: usize) -> u64 {
    let pivots = 8 * rows as u64 + 4096;
    match arithmetic {
        device::Arithmetic::Chain512 => pivots,
        device::Arithmetic::Vendor => pivots + VENDOR_BYTES,
    }
}

/// Finished blocks on the device, by index.
pub(super) struct Resident<T> {
    pub blocks: BTreeMap<usize, (Digest, T)>,
}

impl<T> Resident<T> {
    pub fn new() -> Self {
        Self {
            blocks: BTreeMap::new(),
        }
    }

    /// Whether one of the first `count` blocks is missing.
    pub fn misses(&self, count: usize) -> bool {
        self.blocks.range(..count).count() < count
    }

    /// Takes out the blocks that are not among these digests: they belong to another run.
    pub fn strangers(&mut self, digests: &[Digest]) -> Vec<T> {
        let strange: Vec<usize> = self
            .blocks
            .iter()
            .filter(|(index, (digest, _))| digests.get(**index) != Some(digest))
            .map(|(index, _)| *index)
            .collect();
        let taken = strange.iter().filter_map(|index| self.blocks.remove(index));
        taken.map(|(_, block)| block).collect()
    }
}
