//! The child's end of its agent's socket. Its users while a capsule computes: the run time between
//! capsules, a capsule that fetches data, the keeper of a foreign program. Frames are written
//! whole. An order that is read while waiting for another one is queued in order of arrival.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::surroundings::{Asked, GrantChange, Surroundings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::frames::{self, FrameError, Order, Report, Yield};
use crate::program::{Fetch, ProgramError};
use crate::reserve::{Reserve, Reserved};

/// Most queued orders; an agent sends a few.
const WAITING_LIMIT: usize = 10_000;

type Orders = VecDeque<(Order, Vec<u8>)>;

/// The agent's wishes to a capsule that computes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// Reach a boundary soon, for a yield or a park, with its cause.
    pub yields: Option<Yield>,
    /// End the run, at a boundary or not.
    pub cancel: bool,
    /// Another grant from the next boundary on.
    pub grant: Option<Grant>,
}

/// Gives a long capsule access to the agent's wishes.
pub trait Wishes: Send + Sync {
    /// A descriptor that is readable when a wish may have arrived.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns the present wishes. A wish is repeated until the boundary.
    ///
    /// # Errors
    /// When the agent is gone.
    fn wanted(&self) -> Result<Wanted, ProgramError>;

    /// Asks for more than the grant.
    ///
    /// # Errors
    /// When the agent is gone.
    fn reserve(&self, wish: Reserve) -> Result<Reserved, ProgramError>;

    /// Asks for the surroundings.
    ///
    /// # Errors
    /// When the agent is gone.
    fn surroundings(&self) -> Result<Surroundings, ProgramError>;

    /// Asks for another grant of its node.
    ///
    /// # Errors
    /// When the agent is gone.
    fn ask(&self, change: GrantChange) -> Result<Asked, ProgramError>;
}

/// The child's end of the socket.
pub struct Port {
    socket: UnixStream,
    waiting: Mutex<Orders>,
    writing: Mutex<()>,
}

impl Port {
    /// A port on this socket.
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            waiting: Mutex::default(),
            writing: Mutex::default(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Orders> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a report whose body consists of these pieces.
    pub fn write(&self, report: &Report, body: &[&[u8]]) -> Result<(), FrameError> {
        let _whole = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        frames::write(&self.socket, report, body)
    }

    fn readable(&self, timeout: Duration) -> Result<bool, FrameError> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(n) => Ok(n > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Whether [`Port::take`] returns at once. Waits at most `timeout` for that.
    pub fn has_order(&self, timeout: Duration) -> Result<bool, FrameError> {
        if !self.waiting().is_empty() {
            return Ok(true);
        }
        self.readable(timeout)
    }

    /// Returns the next order with its body, or none when the agent has closed the socket.
    pub fn take(&self) -> Result<Option<(Order, Vec<u8>)>, FrameError> {
        if let Some(order) = self.waiting().pop_front() {
            return Ok(Some(order));
        }
        frames::read(&self.socket)
    }

    fn hear(&self, waiting: &mut Orders) -> Result<(), FrameError> {
        let order = frames::read(&self.socket)?
            .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        if waiting.len() >= WAITING_LIMIT {
            return Err(io::Error::other("more orders than a child keeps").into());
        }
        waiting.push_back(order);
        Ok(())
    }

    /// Sends a report and waits for the order that answers it. Other orders are queued.
    pub(crate) fn converse<T>(
        &self,
        report: &Report,
        answer: impl Fn(&Order) -> Option<T>,
    ) -> Result<T, FrameError> {
        let mut waiting = self.waiting();
        self.write(report, &[])?;
        loop {
            self.hear(&mut waiting)?;
            if let Some(found) = waiting.back().and_then(|(order, _)| answer(order)) {
                waiting.pop_back();
                return Ok(found);
            }
        }
    }

    fn ask(&self, digest: Digest, bytes: u64) -> Result<Result<Vec<u8>, ProgramError>, FrameError> {
        let mut waiting = self.waiting();
        self.write(&Report::Fetch { digest, bytes }, &[])?;
        loop {
            self.hear(&mut waiting)?;
            let answers =
                |order: &Order| matches!(order, Order::Data { digest: d, .. } if *d == digest);
            if waiting.back().is_some_and(|(order, _)| answers(order))
                && let Some((
                    Order::Data {
                        error, permanent, ..
                    },
                    body,
                )) = waiting.pop_back()
            {
                let words = |error| format!("object {digest} cannot be had: {error}");
                return Ok(match error {
                    None => Ok(body),
                    Some(error) if permanent => Err(ProgramError::Permanent(words(error))),
                    Some(error) => Err(ProgramError::Transient(words(error))),
                });
            }
        }
    }
}

fn agent_gone(error: FrameError) -> ProgramError {
    ProgramError::Transient(format!("the agent cannot be heard any more: {error}"))
}

impl Wishes for Port {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn wanted(&self) -> Result<Wanted, ProgramError> {
        let mut waiting = self.waiting();
        while self.readable(Duration::ZERO).map_err(agent_gone)? {
            self.hear(&mut waiting).map_err(agent_gone)?;
        }
        let mut wanted = Wanted::default();
        for (order, _) in waiting.iter() {
            match order {
                Order::Yield(order) => wanted.yields = Some(order.clone()),
                Order::Park(park) => {
                    let cause = park.cause.clone();
                    wanted.yields.get_or_insert(Yield {
                        cause,
                        ..Yield::default()
                    });
                }
                Order::Cancel => wanted.cancel = true,
                Order::Reconfigure { grant } => wanted.grant = Some(grant.clone()),
                _ => {}
            }
        }
        Ok(wanted)
    }

    fn reserve(&self, wish: Reserve) -> Result<Reserved, ProgramError> {
        Port::reserve(self, wish).map_err(agent_gone)
    }

    fn surroundings(&self) -> Result<Surroundings, ProgramError> {
        Port::surroundings(self).map_err(agent_gone)
    }

    fn ask(&self, change: GrantChange) -> Result<Asked, ProgramError> {
        Port::ask_for(self, change).map_err(agent_gone)
    }
}

/// Fetches data from the agent at the other end of a port.
pub struct FromAgent(pub Arc<Port>);

impl Fetch for FromAgent {
    fn fetch(&mut self, digest: Digest, bytes: u64) -> Result<Vec<u8>, ProgramError> {
        let body = self.0.ask(digest, bytes).map_err(agent_gone)??;
        if bytes != 0 && body.len() as u64 != bytes {
            return Err(ProgramError::Permanent(format!(
                "object {digest} has {} bytes, but {bytes} were expected",
                body.len()
            )));
        }
        if Digest::of(&body) != digest {
            return Err(ProgramError::Transient(format!(
                "the received data of object {digest} has another digest"
            )));
        }
        Ok(body)
    }
}
