//! The entry of `fiec`: one thread, one runtime, one exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    fiec::allocator::set_up();
    fiec::cli::main()
}
