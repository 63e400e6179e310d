//! What the recorder's tasks share: their handles, and how they try again.

use std::time::{Duration, Instant};

use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Health, Metrics, Part};
use crate::mirror::Mirror;

/// Handles that the recorder's tasks share.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub pool: PgPool,
    pub metrics: Metrics,
    pub health: Health,
    pub mirror: Mirror,
    pub stop: CancellationToken,
}

/// Repeats a statement until it succeeds; none if the recorder is being stopped.
pub(crate) async fn again<T, F>(
    shared: &Shared,
    part: Part,
    mut attempt: impl FnMut() -> F,
) -> Option<T>
where
    F: Future<Output = sqlx::Result<T>>,
{
    let mut backoff = Backoff::default();
    loop {
        match attempt().await {
            Ok(value) => {
                shared.health.well(part);
                return Some(value);
            }
            Err(error) => {
                shared.metrics.database_errors.inc();
                trouble(shared, part, &error);
                if !backoff.wait(&shared.stop).await {
                    return None;
                }
            }
        }
    }
}

/// Reports a failure after which the part tries again.
pub(crate) fn trouble(shared: &Shared, part: Part, error: &dyn std::error::Error) {
    tracing::warn!(%error, ?part, "trying again");
    shared.health.unwell(part, error.to_string());
}

/// Waits, unless it is time to stop.
pub(crate) async fn pause(stop: &CancellationToken, time: Duration) {
    let _ = tokio::time::timeout(time, stop.cancelled()).await;
}

/// 50 ms, doubled each time up to 5 s.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// Waits; false if it is time to stop.
    pub async fn wait(&mut self, stop: &CancellationToken) -> bool {
        let time = Duration::from_millis(50 << self.attempts.min(7)).min(Duration::from_secs(5));
        self.attempts += 1;
        pause(stop, time).await;
        !stop.is_cancelled()
    }

    /// Waits before a feed is opened anew; briefly if it was open for longer than the longest wait.
    pub async fn wait_after(&mut self, opened: Instant, stop: &CancellationToken) -> bool {
        if opened.elapsed() > Duration::from_secs(5) {
            self.attempts = 0;
        }
        self.wait(stop).await
    }
}
