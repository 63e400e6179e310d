//! The effects that run: each has an owner, and one that panics gives its place back.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::mpsc::Sender;
use tokio_util::task::TaskTracker;

use crate::events::Outcome;

/// Time that running effects have when the service ends.
const LAST: Duration = Duration::from_secs(1);

/// The effects that run. Cheap to clone.
#[derive(Clone)]
pub struct Running {
    tasks: TaskTracker,
    outcomes: Sender<Outcome>,
}

impl Running {
    /// None runs yet. `outcomes`: the channel to the core.
    pub fn new(outcomes: Sender<Outcome>) -> Self {
        Self {
            tasks: TaskTracker::new(),
            outcomes,
        }
    }

    /// Runs an effect. If it panics, the core is told `owed`: so the place that the effect had is free
    /// again, and what it had in hand is tried again.
    pub fn run(
        &self,
        owed: impl Into<Option<Outcome>>,
        effect: impl Future<Output = ()> + Send + 'static,
    ) {
        let (owed, outcomes) = (owed.into(), self.outcomes.clone());
        self.tasks.spawn(async move {
            if AssertUnwindSafe(effect).catch_unwind().await.is_ok() {
                return;
            }
            tracing::error!("an effect panicked; please report it with the lines before this one");
            if let Some(owed) = owed {
                // Fails only while the service ends.
                let _ = outcomes.send(owed).await;
            }
        });
    }

    /// Waits a moment for the effects that run when the service ends. Nobody takes their outcomes any
    /// more.
    pub async fn end(&self) {
        self.tasks.close();
        if tokio::time::timeout(LAST, self.tasks.wait()).await.is_err() {
            let open = self.tasks.len();
            tracing::warn!(open, "the service ends without the results of some effects");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effects::panicked;
    use crate::events::AppendEnd;
    use fiec_schemas::ExecutionId;
    use tokio::sync::mpsc;
    use uuid::Uuid;

    const WITHIN: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn an_effect_that_panics_frees_its_place_and_its_asker_gets_an_answer() {
        let (outcomes, mut received) = mpsc::channel(1);
        let running = Running::new(outcomes);
        let id = ExecutionId(Uuid::from_u128(7));
        running.run(panicked(id, Some(3)), async { panic!("a defect") });
        let outcome = tokio::time::timeout(WITHIN, received.recv()).await.unwrap();
        let Some(Outcome::Append(execution, ticket, AppendEnd::Failed(_))) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!((execution, ticket), (id, Some(3)));
    }

    #[tokio::test]
    async fn the_end_waits_for_effects_that_run_but_not_for_ever() {
        let (outcomes, received) = mpsc::channel(1);
        let running = Running::new(outcomes);
        let (ends, ended) = tokio::sync::oneshot::channel();
        running.run(None, async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _ = ends.send(());
        });
        running.run(None, std::future::pending());
        drop(received);
        tokio::time::timeout(WITHIN, running.end()).await.unwrap();
        ended.await.unwrap();
    }
}
