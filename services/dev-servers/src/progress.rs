//! How long-running steps are told to people; the command line draws them.

/// Receives the steps of finding, fetching and starting servers.
pub trait Progress: Send + Sync {
    /// Something that may take longer than a second begins.
    fn step(&self, message: &str);
    /// Something ended well.
    fn done(&self, message: &str);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn step(&self, _: &str) {}
    fn done(&self, _: &str) {}
}
