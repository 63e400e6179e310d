//! Where a program computes: on the host, or on the device that its grant names.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_kernels::device::{self, Device, DeviceError, Devices};
use fiec_schemas::Digest;
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::programs::Arithmetic;

use crate::program::{Inputs, ProgramError};

/// What the vendor's libraries need beside the matrices.
const VENDOR_BYTES: u64 = 1 << 20;

/// A device by grant.
pub(super) struct Place {
    devices: Arc<dyn Devices>,
    granted: Option<DeviceGrant>,
    device: Option<Box<dyn Device>>,
}

impl Place {
    /// On the host, until a grant says otherwise.
    pub fn new(inputs: &Inputs) -> Self {
        Self {
            devices: inputs.devices(),
            granted: None,
            device: None,
        }
    }

    /// Whether this grant is for another place.
    pub fn changes(&self, grant: &Grant) -> bool {
        grant.device != self.granted
    }

    /// The device, to be put back by [`Place::put`]; none on the host. While it is out it belongs
    /// to whoever took it: an error on the way gives back its memory.
    pub fn take(&mut self) -> Option<Box<dyn Device>> {
        self.device.take()
    }

    /// Puts back what was taken.
    pub fn put(&mut self, device: Box<dyn Device>) {
        self.device = Some(device);
    }

    /// Goes where the grant says; what the old place held has been let go.
    pub fn go(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        self.let_go(false);
        if let Some(granted) = &grant.device {
            let opened = self.devices.open(&granted.uuid, granted.memory_bytes);
            self.device = Some(opened.map_err(failed)?);
            self.granted = Some(granted.clone());
        }
        Ok(())
    }

    /// Back to the host; everything of the device is given back.
    pub fn let_go(&mut self, warm: bool) {
        self.granted = None;
        if let Some(device) = self.device.take() {
            device.close(warm);
        }
    }
}

/// A device's error as a program's: a budget that is too small, or a library that is not there,
/// stays so.
pub(super) fn failed(error: DeviceError) -> ProgramError {
    match error {
        DeviceError::Budget { .. } | DeviceError::Library(_) => ProgramError::permanent(error),
        DeviceError::Absent(_) | DeviceError::Memory { .. } | DeviceError::Driver { .. } => {
            ProgramError::transient(error)
        }
    }
}

/// What is said when even the least does not fit.
pub(super) fn too_small(device: &dyn Device, what: &str, elements: usize) -> ProgramError {
    ProgramError::Permanent(format!(
        "{what} needs at least {} bytes of device memory at once, but the grant of {} has {}: \
         grant more, or run it without a device",
        8 * elements,
        device.about().uuid,
        device.usage().budget
    ))
}

/// Who decides the order of operations, as the kernels name it.
pub(super) fn arithmetic(params: Arithmetic) -> device::Arithmetic {
    match params {
        Arithmetic::Chain512 => device::Arithmetic::Chain512,
        Arithmetic::Vendor => device::Arithmetic::Vendor,
    }
}

/// Bytes that are kept free for what comes and goes beside the matrices.
pub(super) fn reserve(arithmetic: device::Arithmetic, rows: usize) -> u64 {
    let pivots = 8 * rows as u64 + 4096;
    match arithmetic {
        device::Arithmetic::Chain512 => pivots,
        device::Arithmetic::Vendor => pivots + VENDOR_BYTES,
    }
}

/// Finished blocks that stay on the device, by index.
pub(super) struct Resident<T> {
    pub blocks: BTreeMap<usize, (Digest, T)>,
}

impl<T> Resident<T> {
    pub fn new() -> Self {
        Self {
            blocks: BTreeMap::new(),
        }
    }

    /// Whether one of the first `count` blocks is not there.
    pub fn misses(&self, count: usize) -> bool {
        self.blocks.range(..count).count() < count
    }

    /// Takes out what is not among these digests: blocks of another run.
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
