//! A small persistent pool: one job at a time, handed to every worker, and waited for.
//!
//! A CG iteration has three short passes; spawning threads for each would cost more than a pass
//! on a small matrix. Workers spin briefly between jobs, then park.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};

const SPINS: u32 = 4_000;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Written by `run` before `generation` grows; read by workers after they saw it grow.
    job: UnsafeCell<Option<(Job, Thread)>>,
    generation: AtomicU64,
    remaining: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only while no worker is between "saw the generation" and "decremented
// `remaining`": `run` takes `&mut Pool` and waits for zero. The release/acquire pair on
// `generation` orders the write before every read. The pointee is `Sync`.
#[allow(unsafe_code)]
unsafe impl Send for Shared {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Shared {}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads - 1` workers; the caller of `run` is the first thread.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            generation: AtomicU64::new(0),
            remaining: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self {
            shared,
            workers: Vec::new(),
        };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            // On failure `pool` is dropped, which ends the workers started so far.
            let worker = thread::Builder::new()
                .name(format!("kernel-{index}"))
                .spawn(move || work(&shared, index))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(index)` once for each index below `threads()`, in parallel, and returns when
    /// all calls have ended. Panics if one of them panicked.
    #[allow(unsafe_code)] // the lifetime of the borrowed job
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        /// Waits for the workers even when the caller's own share panics.
        struct Wait<'a>(&'a Shared);
        impl Drop for Wait<'_> {
            fn drop(&mut self) {
                let mut spins = 0;
                while self.0.remaining.load(Ordering::Acquire) != 0 {
                    if spins < SPINS {
                        spins += 1;
                        std::hint::spin_loop();
                    } else {
                        thread::park();
                    }
                }
            }
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer between the growth of
        // `generation` and their decrement of `remaining`. `Wait` keeps this frame, and so `job`'s
        // borrow, alive until `remaining` is zero, on unwinding too.
        let erased: Job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(std::ptr::from_ref(job))
        };
        // SAFETY: no worker reads `job` now: the previous run ended with `remaining` at zero.
        unsafe { *shared.job.get() = Some((erased, thread::current())) };
        shared
            .remaining
            .store(self.workers.len(), Ordering::Relaxed);
        shared.generation.fetch_add(1, Ordering::Release);
        let wait = Wait(shared);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        job(0);
        drop(wait);
        assert!(
            !shared.panicked.swap(false, Ordering::Relaxed),
            "a kernel thread panicked"
        );
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.generation.fetch_add(1, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its panics, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

#[allow(unsafe_code)] // reads the job that `run` lends
fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.generation.load(Ordering::Acquire) == seen {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::park();
            }
        }
        // Generations cannot be skipped: the next one starts only after this one's decrement.
        seen += 1;
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: written before the generation seen above, and not again before our decrement.
        let Some((job, caller)) = (unsafe { (*shared.job.get()).clone() }) else {
            return;
        };
        // SAFETY: `run` keeps the pointee alive until our decrement.
        let ended = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(index) }));
        if ended.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        if shared.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once_per_job() {
        let mut pool = Pool::new(4).unwrap();
        let counts: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..500 {
            pool.run(&|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 500));
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_caller_and_the_pool_survives() {
        let mut pool = Pool::new(2).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|i| assert!(i == 0, "worker {i} fails on purpose"));
        }));
        assert!(caught.is_err());
        pool.run(&|_| {});
    }
}
