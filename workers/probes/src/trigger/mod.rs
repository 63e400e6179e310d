//! Events of the kernel that report at once when pressure begins or ends, so that polling can be
//! rare. One trait covers all kinds of events:
//!
//! | trigger | wakes | where |
//! |---|---|---|
//! | [`cgroup::UsageThreshold`] | when a cgroup's usage crosses a number of bytes, either way | v1, `cgroup.event_control` |
//! | [`cgroup::MemoryEvents`] | when reclaim at `memory.high`, at the limit, or the OOM killer struck | v2, `memory.events` |
//! | [`psi::StallTrigger`] | when tasks lost a share of a window to memory | `/proc/pressure/memory`, a cgroup's `memory.pressure` |
//!
//! One thread of an [`EventSource`] sleeps in poll(2) on all triggers and calls its callback. It
//! ends with the source. The sampler polls the rest: see [`crate::Sampler::next_look`].

pub mod cgroup;
pub mod psi;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// Pause of the thread after a wake: at most 200 wakes a second, however often usage crosses a
/// threshold.
const REST: Duration = Duration::from_millis(5);

/// A kernel object that becomes ready when pressure begins or ends.
pub trait Trigger: Send {
    /// Its event, described for logs.
    fn describe(&self) -> String;

    /// The file to poll.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The poll flags.
    fn readiness(&self) -> PollFlags;

    /// Called when it is ready. Clears the event until the next one.
    ///
    /// # Errors
    /// When it will never be ready again. It is then dropped.
    fn take(&mut self) -> io::Result<()>;
}

#[derive(Default)]
struct Orders {
    replacement: Mutex<Option<Vec<Box<dyn Trigger>>>>,
    stop: AtomicBool,
}

/// The thread that sleeps on triggers. It is joined when this is dropped.
pub struct EventSource {
    orders: Arc<Orders>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl EventSource {
    /// Starts the thread without triggers. The thread calls `wake`, which must not block.
    ///
    /// # Errors
    /// No thread or file descriptor is available.
    pub fn start(wake: impl Fn() + Send + 'static) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = Arc::new(eventfd(0, flags)?);
        let orders = Arc::new(Orders::default());
        let (theirs, heard) = (Arc::clone(&orders), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("fiec-triggers".into())
            .spawn(move || sleep_on(&theirs, &heard, &wake))?;
        Ok(Self {
            orders,
            bell,
            thread: Some(thread),
        })
    }

    /// Replaces the triggers.
    pub fn set(&self, triggers: Vec<Box<dyn Trigger>>) {
        let mut order = self
            .orders
            .replacement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *order = Some(triggers);
        drop(order);
        self.ring();
    }

    fn ring(&self) {
        // Only a full counter refuses, and then the thread is being woken already.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

impl Drop for EventSource {
    fn drop(&mut self) {
        self.orders.stop.store(true, Ordering::Release);
        self.ring();
        if let Some(thread) = self.thread.take() {
            // The thread sleeps only in poll, or for `REST`.
            let _ = thread.join();
        }
    }
}

/// Empties a counter, so that it is ready only after the next write.
fn drain(counter: impl AsFd) -> io::Result<()> {
    match rustix::io::read(counter, &mut [0u8; 8]) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn sleep_on(orders: &Orders, bell: &OwnedFd, wake: &impl Fn()) {
    let mut triggers: Vec<Box<dyn Trigger>> = Vec::new();
    while !orders.stop.load(Ordering::Acquire) {
        let mut replacement = orders
            .replacement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(new) = replacement.take() {
            triggers = new;
        }
        drop(replacement);
        let mut polled: Vec<PollFd<'_>> = vec![PollFd::new(bell, PollFlags::IN)];
        polled.extend(
            triggers
                .iter()
                .map(|t| PollFd::from_borrowed_fd(t.fd(), t.readiness())),
        );
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot poll for pressure events; none are taken any more");
                return;
            }
        }
        let ready: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
        drop(polled);
        if ready.first() == Some(&true)
            && let Err(error) = drain(bell)
        {
            tracing::warn!(%error, "cannot read a counter; no pressure events are taken any more");
            return;
        }
        let mut ready = ready.into_iter().skip(1);
        let mut woken = false;
        triggers.retain_mut(|trigger| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            woken = true;
            let taken = trigger.take();
            if let Err(error) = &taken {
                tracing::info!(trigger = trigger.describe(), %error, "a trigger is gone; polled instead");
            }
            taken.is_ok()
        });
        if woken {
            wake();
            std::thread::sleep(REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Instant;

    /// A trigger that a test fires.
    struct Pulled(Arc<OwnedFd>, bool);
    impl Trigger for Pulled {
        fn describe(&self) -> String {
            "a test's".into()
        }
        fn fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
        fn readiness(&self) -> PollFlags {
            PollFlags::IN
        }
        fn take(&mut self) -> io::Result<()> {
            drain(&*self.0)?;
            if self.1 {
                return Err(io::Error::other("it breaks"));
            }
            Ok(())
        }
    }

    fn pulled(breaks: bool) -> (Arc<OwnedFd>, Box<dyn Trigger>) {
        let fd = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        (Arc::clone(&fd), Box::new(Pulled(fd, breaks)))
    }

    fn pull(fd: &OwnedFd) {
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    }

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn each_event_wakes_and_one_that_breaks_takes_no_other_along() {
        let (told, wakes) = mpsc::channel();
        let source = EventSource::start(move || told.send(()).unwrap()).unwrap();
        let ((sound, a), (broken, b)) = (pulled(false), pulled(true));
        source.set(vec![b, a]);
        pull(&broken);
        wakes.recv_timeout(SOON).unwrap();
        for _ in 0..3 {
            pull(&sound);
            wakes.recv_timeout(SOON).unwrap();
        }
        pull(&broken);
        assert!(wakes.recv_timeout(Duration::from_millis(50)).is_err());
    }

    #[test]
    fn what_is_replaced_wakes_no_more_and_dropping_ends_the_thread() {
        let (told, wakes) = mpsc::channel();
        let source = EventSource::start(move || told.send(()).unwrap()).unwrap();
        let ((old, a), (new, b)) = (pulled(false), pulled(false));
        source.set(vec![a]);
        pull(&old);
        wakes.recv_timeout(SOON).unwrap();
        source.set(vec![b]);
        pull(&new);
        wakes.recv_timeout(SOON).unwrap();
        pull(&old);
        assert!(wakes.recv_timeout(Duration::from_millis(50)).is_err());
        drop(source);
        // The thread owned the sender.
        assert!(matches!(wakes.recv(), Err(mpsc::RecvError)));
    }

    #[test]
    fn wakes_are_bounded_however_often_the_event_comes() {
        let (told, wakes) = mpsc::channel();
        let source = EventSource::start(move || told.send(()).unwrap()).unwrap();
        let (fd, trigger) = pulled(false);
        source.set(vec![trigger]);
        let began = Instant::now();
        pull(&fd);
        wakes.recv_timeout(SOON).unwrap();
        while began.elapsed() < Duration::from_millis(100) {
            pull(&fd);
        }
        drop(source);
        let most = began.elapsed().as_millis() / REST.as_millis() + 2;
        let count = 1 + wakes.iter().count();
        assert!((1..=most as usize).contains(&count), "{count} of {most}");
    }
}
