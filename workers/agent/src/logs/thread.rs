//! The thread that reads the output of all programs of this process.

use std::io;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Handle};

static THREAD: Mutex<Option<Handle>> = Mutex::new(None);

/// The run time of the thread, which is started at the first call and lives as long as the process.
///
/// # Errors
/// When it cannot be started.
pub fn handle() -> io::Result<Handle> {
    let mut thread = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*thread {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("fiec-logs".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(thread.insert(handle).clone())
}
