//! The child's writing side. Small frames are written at once, large ones by a separate thread
//! beside the computation. Frames leave in the order in which they are given.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;

use fiec_schemas::Digest;

use crate::frames::{BoundaryReport, FrameError, Made, Report};
use crate::port::Port;
use crate::program::OutputData;

/// σ up to this size is digested and written by the computing thread, which is cheaper than a
/// wake-up.
const DIRECT_LIMIT: usize = 192 * 1024;

struct Job {
    report: BoundaryReport,
    state: Vec<u8>,
    outputs: Vec<OutputData>,
}

/// Writes reports.
pub struct Writer {
    port: Arc<Port>,
    jobs: SyncSender<Job>,
    done: Receiver<Result<Vec<u8>, FrameError>>,
    busy: bool,
    spare: Vec<u8>,
}

pub fn describe(outputs: &[OutputData]) -> Vec<Made> {
    outputs
        .iter()
        .map(|o| Made {
            name: o.name.clone(),
            digest: Some(o.digest()),
            bytes: o.bytes.len() as u64,
        })
        .collect()
}

fn write_boundary(port: &Port, mut job: Job) -> Result<Vec<u8>, FrameError> {
    job.report.digest = Some(Digest::of(&job.state));
    job.report.bytes = job.state.len() as u64;
    job.report.outputs = describe(&job.outputs);
    let mut body = vec![&job.state[..]];
    body.extend(job.outputs.iter().map(|o| &o.bytes[..]));
    port.write(&Report::Boundary(Box::new(job.report)), &body)?;
    Ok(job.state)
}

impl Writer {
    /// A writer to this port.
    ///
    /// # Errors
    /// When its thread cannot be started.
    pub fn new(port: Arc<Port>) -> io::Result<Self> {
        let (jobs, inbox) = sync_channel::<Job>(1);
        let (outbox, done) = sync_channel(1);
        let theirs = Arc::clone(&port);
        thread::Builder::new()
            .name("fiec-commit".to_owned())
            .spawn(move || {
                for job in inbox {
                    if outbox.send(write_boundary(&theirs, job)).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            port,
            jobs,
            done,
            busy: false,
            spare: Vec::new(),
        })
    }

    fn settle(&mut self) -> Result<(), FrameError> {
        if self.busy {
            let done = self
                .done
                .recv()
                .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            self.busy = false;
            self.spare = done?;
        }
        Ok(())
    }

    /// Whether a large frame is being written.
    pub fn is_busy(&mut self) -> Result<bool, FrameError> {
        if self.busy {
            match self.done.try_recv() {
                Ok(done) => {
                    self.busy = false;
                    self.spare = done?;
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
                }
            }
        }
        Ok(self.busy)
    }

    /// Returns an empty buffer for σ, reused from the last commit. Waits for that commit.
    pub fn buffer(&mut self) -> Result<Vec<u8>, FrameError> {
        self.settle()?;
        let mut buffer = std::mem::take(&mut self.spare);
        buffer.clear();
        Ok(buffer)
    }

    /// Writes a report without σ.
    pub fn report(&mut self, report: &Report, outputs: &[OutputData]) -> Result<(), FrameError> {
        self.settle()?;
        let body: Vec<&[u8]> = outputs.iter().map(|o| &o.bytes[..]).collect();
        self.port.write(report, &body)
    }

    /// Writes a boundary. A large one is written while the computation continues. Digest, sizes and
    /// outputs are filled in here.
    pub fn boundary(
        &mut self,
        report: BoundaryReport,
        state: Vec<u8>,
        outputs: Vec<OutputData>,
    ) -> Result<(), FrameError> {
        self.settle()?;
        let job = Job {
            report,
            state,
            outputs,
        };
        if job.state.len() <= DIRECT_LIMIT && job.outputs.is_empty() {
            self.spare = write_boundary(&self.port, job)?;
            return Ok(());
        }
        self.jobs
            .send(job)
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        self.busy = true;
        Ok(())
    }
}
