//! The entry of `fiec-lab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    fiec::allocator::set_up();
    fiec_lab::cli::main()
}
