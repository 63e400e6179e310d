//! Copies between the host's page-locked memory and a device. They need a context, which takes
//! longer to make than all copies. It is released at once, and its memory with it.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};

use super::Copies;
use crate::devices::id_of;

/// Bytes of one copy.
const BYTES: usize = 16 << 20;
/// Copies in each direction; the fastest counts.
const ROUNDS: u32 = 4;

/// Measures these devices within a time. A driver that hangs leaves a thread behind, and the reason
/// for the missing result.
pub(super) fn measure(ids: &[String], within: Duration) -> BTreeMap<String, Copies> {
    let late = Copies {
        missing: Some(format!(
            "the driver took longer than the {} ms that a join may wait for it; `fiec node profile --anew` waits",
            within.as_millis()
        )),
        ..Copies::default()
    };
    let mut found: BTreeMap<_, _> = ids.iter().map(|id| (id.clone(), late.clone())).collect();
    if ids.is_empty() {
        return found;
    }
    let (done, results) = mpsc::channel();
    let thread = std::thread::Builder::new().name("fiec-copies".into());
    let wanted = ids.to_vec();
    let spawned = thread.spawn(move || {
        for id in wanted {
            // cudarc panics if a driver lacks a library or a symbol.
            let outcome = std::panic::catch_unwind(|| of(&id))
                .unwrap_or_else(|_| Err("the driver lacks what this build needs".to_owned()));
            let copies = outcome.unwrap_or_else(|why| Copies {
                missing: Some(why),
                ..Copies::default()
            });
            if done.send((id, copies)).is_err() {
                return;
            }
        }
    });
    if spawned.is_err() {
        return found;
    }
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match results.recv_timeout(left) {
            Ok((id, copies)) => drop(found.insert(id, copies)),
            Err(_) => return found,
        }
    }
}

fn of(id: &str) -> Result<Copies, String> {
    let words = |e: result::DriverError| e.to_string();
    // SAFETY: it only tries to load the driver's library by its usual names.
    #[allow(unsafe_code)]
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err("no CUDA driver library".to_owned());
    }
    result::init().map_err(words)?;
    let count = result::device::get_count().map_err(words)?;
    for ordinal in 0..count {
        let device = result::device::get(ordinal).map_err(words)?;
        if id_of(device).map_err(words)? == id {
            return timed(device).map_err(words);
        }
    }
    Err("CUDA does not see this device".to_owned())
}

/// Releases all resources, even if a step fails.
fn timed(device: sys::CUdevice) -> Result<Copies, result::DriverError> {
    struct Context(sys::CUdevice);
    impl Drop for Context {
        fn drop(&mut self) {
            // SAFETY: it was retained by this thread, and nothing of it is used any more.
            #[allow(unsafe_code)]
            unsafe {
                let _ = result::ctx::set_current(std::ptr::null_mut());
                let _ = result::primary_ctx::release(self.0);
            }
        }
    }
    struct Host(*mut std::ffi::c_void);
    impl Drop for Host {
        fn drop(&mut self) {
            // SAFETY: it was allocated by the driver and is freed once.
            #[allow(unsafe_code)]
            let _ = unsafe { result::free_host(self.0) };
        }
    }
    struct There(sys::CUdeviceptr);
    impl Drop for There {
        fn drop(&mut self) {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            let _ = unsafe { result::free_sync(self.0) };
        }
    }
    // SAFETY: the device comes from the driver. The context is current on this thread until it is
    // dropped, which happens after both allocations were dropped. They have `BYTES` bytes each, and
    // the slice over the host's is its only use. Page-locked memory is written before it is read.
    #[allow(unsafe_code)]
    unsafe {
        let context = result::primary_ctx::retain(device)?;
        let _context = Context(device);
        result::ctx::set_current(context)?;
        let host = Host(result::malloc_host(BYTES, 0)?);
        let there = There(result::malloc_sync(BYTES)?);
        std::ptr::write_bytes(host.0.cast::<u8>(), 1, BYTES);
        let array = std::slice::from_raw_parts_mut(host.0.cast::<u8>(), BYTES);
        let mut best = [0.0_f64; 2];
        for _ in 0..ROUNDS {
            let began = Instant::now();
            result::memcpy_htod_sync(there.0, array)?;
            best[0] = best[0].max(rate(began));
            let began = Instant::now();
            result::memcpy_dtoh_sync(array, there.0)?;
            best[1] = best[1].max(rate(began));
        }
        Ok(Copies {
            to_device_bytes_s: Some(best[0] as u64),
            from_device_bytes_s: Some(best[1] as u64),
            missing: None,
        })
    }
}

fn rate(began: Instant) -> f64 {
    BYTES as f64 / began.elapsed().as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_measured_says_why() {
        let ids = ["GPU-none".to_owned()];
        let found = measure(&ids, Duration::from_secs(10));
        let why = found["GPU-none"].missing.clone().unwrap();
        println!("{why}");
        assert!(!why.is_empty() && found["GPU-none"].to_device_bytes_s.is_none());
        assert!(measure(&[], Duration::ZERO).is_empty());
    }
}
