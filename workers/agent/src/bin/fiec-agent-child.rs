//! The child process that tests and benches of the agent run.

fn main() -> std::process::ExitCode {
    fiec_kit::child_main()
}
