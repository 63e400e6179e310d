//! Whose turn it is to send: the state of a rebinding under way goes before the states and outputs
//! of routine commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// A routine upload waits for rebindings no longer than this at a time: a broker that does not
/// answer keeps them all, and nothing is gained by waiting for it.
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

/// Set once an execution is to leave: what it has on its way goes before its last state, and waits
/// for nobody from then on.
#[derive(Debug, Default)]
pub struct Hurry {
    set: AtomicBool,
    told: Notify,
}

impl Hurry {
    /// From now on.
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

/// A rebinding under way, until it is dropped.
#[derive(Debug)]
pub struct Urgent(Arc<watch::Sender<usize>>);

impl Drop for Urgent {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Uploads {
    /// A rebinding begins: routine uploads wait until it is over.
    pub fn urgent(&self) -> Urgent {
        self.urgent.send_modify(|count| *count += 1);
        Urgent(Arc::clone(&self.urgent))
    }

    /// Waits until no rebinding is under way, or this upload has become part of one.
    pub async fn turn(&self, hurry: &Hurry) {
        if *self.urgent.borrow() == 0 {
            return;
        }
        let mut urgent = self.urgent.subscribe();
        let free = urgent.wait_for(|count| *count == 0);
        tokio::select! {
            () = hurry.until_set() => {}
            // The sender lives as long as this does, so only time may run out.
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
