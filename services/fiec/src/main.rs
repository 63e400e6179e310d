//! The entry of `fiec`: one thread, one run time, one exit code.

use std::process::ExitCode;

// Agents and services live on many small, short allocations across an await.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    fiec::cli::main()
}
