//! The entry of `fiec-lab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = fiec_kit::launch::keep_if_asked() {
        return code;
    }
    fiec::allocator::set_up();
    fiec_lab::cli::main()
}
