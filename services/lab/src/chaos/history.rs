//! History that was away comes back: a recorder that reads again is not enough, it must get to the end.
//! A later fault would make it begin anew, and hide that it stood still.

use std::time::Duration;

use fiec_broker::feed;
use fiec_schemas::subjects;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::judge::checker::{Rule, Violation};

/// A recorder that is well notices within half a minute that the broker has dropped its consumer.
const WITHIN: Duration = Duration::from_secs(60);

/// Waits until the recorder has recorded what the ledgers have now. No fault may be open.
pub async fn catches_up(cluster: &Cluster) -> Option<Violation> {
    let pool = cluster.pool.as_ref()?;
    let began = Instant::now();
    let mut end = None;
    let mut why = String::new();
    while began.elapsed() < WITHIN {
        if end.is_none() {
            match feed::bounds(&cluster.broker).await {
                Ok((_, last)) => end = Some(last),
                Err(error) => why = error.to_string(),
            }
        }
        if let Some(end) = end {
            match fiec_recorder::checkpoints(pool).await {
                Ok(at) => {
                    let at = at.get(subjects::LEDGER_STREAM).copied().unwrap_or(0);
                    if at >= end {
                        return None;
                    }
                    why = format!("it stands at {at} of {end}");
                }
                Err(error) => why = error.to_string(),
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
    let what = format!(
        "the recorder has not caught up in {} s beside no fault: {why}",
        WITHIN.as_secs()
    );
    Some(Violation::new(Rule::Recorded, "", what))
}
