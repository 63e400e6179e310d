//! The order of uploads: the state of a running rebinding goes before states and outputs of routine
//! commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// Longest wait of a routine upload for rebindings. A silent broker delays all of them, and waiting
/// longer gains nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// The order of a node's uploads.
#[derive(Debug, Clone)]
pub struct Uploads {
    urgent: Arc<watch::Sender<usize>>,
}

impl Default for Uploads {
    fn default() -> Self {
        Self {
            urgent: Arc::new(watch::Sender::new(0)),
        }
    }
}

/// Set once an execution is about to leave. Its running uploads precede its last state, so from
/// then on they wait for no rebinding.
#[derive(Debug, Default)]
pub struct Hurry {
    set: AtomicBool,
    told: Notify,
}

impl Hurry {
    /// Ends the waiting of this execution's uploads.
    pub fn set(&self) {
        self.set.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    async fn until_set(&self) {
        let told = self.told.notified();
        tokio::pin!(told);
        told.as_mut().enable();
        if !self.set.load(Ordering::Acquire) {
            told.await;
        }
    }
}

/// Marks a running rebinding until it is dropped.
#[derive(Debug)]
pub struct Urgent(Arc<watch::Sender<usize>>);

impl Drop for Urgent {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Uploads {
    /// Marks the start of a rebinding: routine uploads wait until it is over.
    pub fn urgent(&self) -> Urgent {
        self.urgent.send_modify(|count| *count += 1);
        Urgent(Arc::clone(&self.urgent))
    }

    /// Waits until no rebinding is running, or until this upload has become part of one.
    pub async fn turn(&self, hurry: &Hurry) {
        if *self.urgent.borrow() == 0 {
            return;
        }
        let mut urgent = self.urgent.subscribe();
        let free = urgent.wait_for(|count| *count == 0);
        tokio::select! {
            () = hurry.until_set() => {}
            // The sender lives as long as `self`, so the only error is the timeout.
            _ = tokio::time::timeout(PATIENCE, free) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_routine_upload_waits_for_every_rebinding_and_not_for_ever() {
        let uploads = Uploads::default();
        let hurry = Hurry::default();
        uploads.turn(&hurry).await;
        let (one, two) = (uploads.urgent(), uploads.urgent());
        let routine = tokio::spawn({
            let uploads = uploads.clone();
            async move { uploads.turn(&Hurry::default()).await }
        });
        tokio::task::yield_now().await;
        assert!(!routine.is_finished());
        drop(one);
        tokio::task::yield_now().await;
        assert!(!routine.is_finished(), "one is still under way");
        drop(two);
        routine.await.unwrap();
        let _stuck = uploads.urgent();
        uploads.turn(&hurry).await;
    }
    #[tokio::test(start_paused = true)]
    async fn an_upload_that_its_own_rebinding_waits_for_waits_for_nobody() {
        let (uploads, hurry) = (Uploads::default(), Arc::new(Hurry::default()));
        let _own = uploads.urgent();
        let before = tokio::time::Instant::now();
        let routine = tokio::spawn({
            let (uploads, hurry) = (uploads.clone(), Arc::clone(&hurry));
            async move { uploads.turn(&hurry).await }
        });
        tokio::task::yield_now().await;
        assert!(!routine.is_finished());
        hurry.set();
        routine.await.unwrap();
        uploads.turn(&hurry).await;
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
