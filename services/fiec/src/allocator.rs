//! The memory allocator of every program that links this crate.

// Agents and services live on many small, short allocations across an await.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc 2 and 3 (`mimalloc.h`): milliseconds until freed memory goes
/// back to the system. The binding does not name it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// A batch of the recorder or a state of megabytes is freed and wanted again within a second. After
/// the default of 10 ms it costs a page fault and a cleared page each time.
const KEEP_FREED_MS: i64 = 1_000;

/// Sets the allocator's options. Call it first in `main`, before there is another thread.
#[allow(unsafe_code)]
pub fn set_up() {
    // SAFETY: sets a number in the allocator's table of options.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP_FREED_MS) };
}
