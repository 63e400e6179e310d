//! The entry of `fiec`: one thread, one run time, one exit code.

use std::process::ExitCode;

// Agents and services live on many small, short allocations across an await.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc 2 and 3 (`mimalloc.h`): milliseconds until memory that was
/// freed goes back to the system. The binding does not name it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// A batch of the recorder, a state of megabytes: freed and wanted again within a second. Given
/// back after the default of 10 ms they cost a page fault and a cleared page each time.
const KEEP_FREED_MS: i64 = 1_000;

#[allow(unsafe_code)]
fn main() -> ExitCode {
    // SAFETY: sets a number in the allocator's table of options, before there is another thread.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP_FREED_MS) };
    fiec::cli::main()
}
