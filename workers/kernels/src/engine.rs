//! The means of a computation: the instruction set and the threads. Neither changes a bit of any
//! result.

use std::ops::Range;
use std::sync::Mutex;

use crate::pool::Pool;
use crate::reduce::LEAF;
use crate::simd::Simd;

/// Upper limit of [`Engine::new`]'s `threads`.
pub const MAX_THREADS: usize = 256;

/// Instruction set and threads for a computation.
pub struct Engine {
    simd: Simd,
    pool: Option<Pool>,
}

impl Default for Engine {
    /// One thread, the best instruction set.
    fn default() -> Self {
        Self {
            simd: Simd::detect(),
            pool: None,
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("simd", &self.simd)
            .field("threads", &self.threads())
            .finish()
    }
}

impl Engine {
    /// An engine of `threads` threads (clamped to 1…[`MAX_THREADS`]), the caller's included.
    ///
    /// # Errors
    /// The operating system refused a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = threads.clamp(1, MAX_THREADS);
        let pool = if threads == 1 {
            None
        } else {
            Some(Pool::new(threads)?)
        };
        Ok(Self {
            simd: Simd::detect(),
            pool,
        })
    }

    /// One thread with a given instruction set.
    #[must_use]
    pub fn with_simd(simd: Simd) -> Self {
        Self { simd, pool: None }
    }

    /// The instruction set in use.
    #[must_use]
    pub fn simd(&self) -> Simd {
        self.simd
    }

    /// The number of threads, at least one.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, Pool::threads)
    }

    /// Contiguous element ranges, one per thread, with cuts at leaf borders. Together they cover
    /// `0..n`.
    pub(crate) fn ranges(&self, n: usize) -> Vec<Range<usize>> {
        let leaves = n.div_ceil(LEAF);
        let threads = self.threads();
        (0..threads)
            .map(|t| {
                let cut = |t: usize| (leaves * t / threads * LEAF).min(n);
                cut(t)..cut(t + 1)
            })
            .collect()
    }

    /// Runs `f` on every part, part `i` on thread `i`.
    pub(crate) fn run<T: Send>(&mut self, parts: Vec<T>, f: impl Fn(T) + Sync) {
        let Some(pool) = &mut self.pool else {
            parts.into_iter().for_each(f);
            return;
        };
        debug_assert_eq!(parts.len(), pool.threads());
        let slots: Vec<Mutex<Option<T>>> = parts.into_iter().map(|p| Mutex::new(Some(p))).collect();
        pool.run(&|i| {
            let part = slots.get(i).and_then(|s| match s.lock() {
                Ok(mut slot) => slot.take(),
                Err(poisoned) => poisoned.into_inner().take(),
            });
            if let Some(part) = part {
                f(part);
            }
        });
    }
}

/// Cuts `v` into pieces of consecutive `lengths`, which add up to at most its length.
pub(crate) fn split_mut<T>(mut v: &mut [T], lengths: impl Iterator<Item = usize>) -> Vec<&mut [T]> {
    let mut parts = Vec::new();
    for length in lengths {
        let (head, tail) = v.split_at_mut(length);
        parts.push(head);
        v = tail;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_everything_and_are_cut_at_leaves() {
        for threads in [1, 2, 3, 4, 7] {
            let engine = Engine::new(threads).unwrap();
            for n in [0, 1, LEAF, LEAF + 1, 10 * LEAF + 17] {
                let ranges = engine.ranges(n);
                assert_eq!(ranges.len(), threads);
                assert_eq!((ranges[0].start, ranges[threads - 1].end), (0, n));
                for pair in ranges.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start);
                    assert!(pair[0].end % LEAF == 0 || pair[0].end == n);
                }
            }
        }
    }
}
