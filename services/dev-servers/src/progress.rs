//! Reports the steps of long operations to people. The command line draws them.

/// Receives the steps of finding, fetching and starting servers.
pub trait Progress: Send + Sync {
    /// A step begins that may take longer than a second.
    fn step(&self, message: &str);
    /// A step has succeeded.
    fn done(&self, message: &str);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn step(&self, _: &str) {}
    fn done(&self, _: &str) {}
}
