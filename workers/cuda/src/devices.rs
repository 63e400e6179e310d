//! Opens devices, and keeps one context warm for the next user.

use std::sync::{Arc, Mutex, PoisonError};

use fiec_kernels::device::{Device, DeviceError, Devices};

use crate::context::Context;
use crate::device::CudaDevice;
use crate::found::{list, same};

/// The warm context: at most one in a process.
pub(crate) type Warm = Arc<Mutex<Option<Context>>>;

/// NVIDIA's devices.
#[derive(Clone, Default)]
pub struct CudaDevices {
    warm: Warm,
}

impl std::fmt::Debug for CudaDevices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevices")
            .field("warm", &self.warm())
            .finish()
    }
}

impl CudaDevices {
    /// The UUID of the device whose context is kept warm.
    #[must_use]
    pub fn warm(&self) -> Option<String> {
        let warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        warm.as_ref().map(|context| context.found.uuid.clone())
    }

    /// Releases the warm context.
    pub fn cool(&self) {
        let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        *warm = None;
    }

    /// Makes the context of a device before its first use.
    ///
    /// # Errors
    /// As [`Devices::open`].
    pub fn heat(&self, uuid: &str) -> Result<(), DeviceError> {
        let context = self.context(uuid)?;
        let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        *warm = Some(context);
        Ok(())
    }

    fn context(&self, uuid: &str) -> Result<Context, DeviceError> {
        let kept = {
            let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
            // Another device's context is released: at most one is held beside those in use.
            warm.take()
        };
        if let Some(context) = kept.filter(|context| same(&context.found.uuid, uuid)) {
            context.bind()?;
            return Ok(context);
        }
        let all = list()?;
        let names: Vec<&str> = all.iter().map(|found| found.uuid.as_str()).collect();
        let found = all.iter().find(|found| same(&found.uuid, uuid));
        let Some(found) = found else {
            return Err(DeviceError::Absent(format!(
                "{uuid} is not among the devices that the driver shows here ({}); a MIG slice is \
                 shown only where CUDA_VISIBLE_DEVICES names it",
                names.join(", ")
            )));
        };
        Context::new(found.clone())
    }
}

impl Devices for CudaDevices {
    fn heat(&self, uuid: &str) -> Result<(), DeviceError> {
        Self::heat(self, uuid)
    }

    fn cool(&self) {
        Self::cool(self);
    }

    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        let context = self.context(uuid)?;
        let (free, total) = context.free_bytes()?;
        let budget = match memory_bytes {
            None => free,
            Some(bytes) if bytes <= total => bytes,
            Some(bytes) => {
                return Err(DeviceError::Absent(format!(
                    "{uuid} has {total} bytes of memory, not the granted {bytes}"
                )));
            }
        };
        Ok(Box::new(CudaDevice::new(
            context,
            budget,
            Arc::clone(&self.warm),
        )))
    }
}
