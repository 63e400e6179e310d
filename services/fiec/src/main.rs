//! The entry of `fiec`: one thread, one runtime, one exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before all else: a keeper is to be small, and started fast.
    if let Some(code) = fiec_kit::launch::keep_if_asked() {
        return code;
    }
    fiec::allocator::set_up();
    fiec::cli::main()
}
