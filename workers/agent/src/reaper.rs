//! Waits for processes that are to end. One that does not end delays no other.

use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, thread};

use rustix::process::{Pid, Signal, kill_process_group};

/// Between two looks at those that have not ended yet.
const ROUND: Duration = Duration::from_millis(5);
/// After this time a process is killed, with its group.
const ENDS_WITHIN: Duration = Duration::from_secs(3);

/// Takes over processes that have nothing more to do.
#[derive(Debug, Clone)]
pub(crate) struct Reaper(Sender<Child>);

struct Ending {
    process: Child,
    since: Instant,
    is_killed: bool,
}

impl Reaper {
    /// Starts its thread, which ends with the last copy.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new() -> io::Result<Self> {
        let (sender, inbox) = channel();
        thread::Builder::new()
            .name("fiec-reap".to_owned())
            .spawn(move || reap(&inbox))?;
        Ok(Self(sender))
    }

    /// Reaps a process when it has ended. It is the leader of its group, and is killed if it does not
    /// end by itself.
    pub fn take(&self, process: Child) {
        // The thread lives as long as this.
        let _ = self.0.send(process);
    }
}

fn reap(inbox: &Receiver<Child>) {
    let mut left: Vec<Ending> = Vec::new();
    loop {
        let more = match left.is_empty() {
            true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => inbox.recv_timeout(ROUND),
        };
        match more {
            Ok(process) => left.push(Ending {
                process,
                since: Instant::now(),
                is_killed: false,
            }),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        left.retain_mut(Ending::is_left);
    }
}

impl Ending {
    fn is_left(&mut self) -> bool {
        // An error says that it was reaped already.
        if !matches!(self.process.try_wait(), Ok(None)) {
            return false;
        }
        if !self.is_killed && self.since.elapsed() >= ENDS_WITHIN {
            self.is_killed = true;
            let _ = kill_process_group(Pid::from_child(&self.process), Signal::KILL);
        }
        true
    }
}
