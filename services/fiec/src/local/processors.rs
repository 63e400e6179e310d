//! The processors that a program may use.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of this thread, in ascending order.
///
/// # Errors
/// When the kernel does not say.
pub fn own() -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    let numbers = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
    Ok(numbers.filter_map(|cpu| u32::try_from(cpu).ok()).collect())
}

/// While it lives, this thread has some of its processors alone. What it starts has them for good.
#[derive(Debug)]
pub struct Confined {
    before: CpuSet,
}

impl Confined {
    /// Confines this thread.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn to(cpus: &[u32]) -> io::Result<Self> {
        let before = sched_getaffinity(None)?;
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.set(*cpu as usize);
        }
        sched_setaffinity(None, &set)?;
        Ok(Self { before })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // It had them before.
        let _ = sched_setaffinity(None, &self.before);
    }
}
