//! A load on a device: its memory, through the driver, and its units.

use std::time::{Duration, Instant};

use fiec_kernels::dense::Into;
use fiec_kernels::device::{Arithmetic, DeviceError, Devices};

/// One allocation in f64: 64 MiB.
const STEP: usize = 8 << 20;
/// The side of the matrices that are multiplied.
const SIDE: usize = 2_048;

/// The load.
#[derive(Debug, Clone)]
pub(super) struct DeviceLoad<'a> {
    pub uuid: &'a str,
    /// Share of the memory to fill, with the memory of all other processes.
    pub share: f64,
    /// True if it computes nothing.
    pub idle: bool,
    pub until: Instant,
}

impl DeviceLoad<'_> {
    /// Takes memory until the share is in use, computes on it and frees it. Returns the bytes that
    /// it held.
    ///
    /// # Errors
    /// If the device is not available, or its driver refuses.
    pub fn run(&self, devices: &dyn Devices) -> Result<u64, DeviceError> {
        let mut device = devices.open(self.uuid, None)?;
        let total = device.about().memory_bytes;
        // A grant without a limit is the memory that is free now.
        let free = device.usage().budget;
        let spared = (total as f64 * (1.0 - self.share)) as u64;
        let wanted = free.saturating_sub(spared);
        let mut held = Vec::new();
        while device.usage().held + (8 * STEP) as u64 <= wanted {
            match device.allocate(STEP) {
                Ok(buffer) => held.push(buffer),
                // Another process has taken it in the meantime.
                Err(error) if error.is_memory() => break,
                Err(error) => return Err(error),
            }
        }
        let bytes = device.usage().held;
        println!("holds {bytes} bytes of {}", self.uuid);
        match held.as_slice() {
            [a, b, c, ..] if !self.idle => {
                let [a, b, c] = [a, b, c].map(|buffer| buffer.matrix(SIDE, SIDE));
                while Instant::now() < self.until {
                    device.gemm(Arithmetic::Chain512, a, b, Into::Replace, c)?;
                    device.finish()?;
                }
            }
            _ => std::thread::sleep(self.left()),
        }
        for buffer in held {
            device.release(buffer);
        }
        device.close(false);
        Ok(bytes)
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_kernels::device::HostDevices;

    #[test]
    fn it_takes_the_share_of_a_device_and_gives_it_back() {
        let devices = HostDevices::new(1 << 30);
        let load = |share| DeviceLoad {
            uuid: "d",
            share,
            idle: true,
            until: Instant::now(),
        };
        assert_eq!(load(0.5).run(&devices), Ok(512 << 20));
        assert_eq!(load(0.01).run(&devices), Ok(0));
        let left = devices.ledger();
        assert_eq!((left.open, left.held), (0, 0));
        assert_eq!(left.peak, 512 << 20);
    }
}
