//! The memory allocator of every program that links this crate.

// Agents and services live on many small, short allocations across an await.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc 2 and 3 (`mimalloc.h`): time in ms until freed memory goes
/// back to the system. The binding has no name for it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// The recorder frees a batch, and a worker a state of megabytes, and needs the memory again with the
/// next burst of work. After the default of 10 ms, each page costs a page fault and a clearing.
const KEEP_FREED_MS: i64 = 10_000;

/// Sets the allocator's options. Call it first in `main`, before another thread starts.
#[allow(unsafe_code)]
pub fn set_up() {
    // SAFETY: sets a number in the allocator's table of options.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP_FREED_MS) };
}
