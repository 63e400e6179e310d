//! The child process that tests and benches of the agent run.

fn main() -> std::process::ExitCode {
    fiec_kit::launch::keep_if_asked().unwrap_or_else(fiec_kit::child_main)
}
