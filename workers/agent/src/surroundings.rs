//! What a program is told of where it runs, and what it is granted of it.
//!
//! The node's vector is the one that was published last. What other nodes could give is asked of a
//! policy service: once for all programs here, kept for [`OFFERS_FOR`], and waited for no longer
//! than [`OFFERS_WITHIN`]; without an answer it is not known, which a program is told. Threads are
//! counted: a program that asks for more than its share gets what the shares and wishes of the
//! others here leave of the node's processors. One that comes later has its share all the same.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::Client;
use fiec_kit::frames::Order;
use fiec_schemas::package::Grant;
use fiec_schemas::surroundings::{Asked, GrantChange, Offers, OffersReply, Surroundings};
use fiec_schemas::{Event, ExecutionId, HardwareVector, subjects};

use crate::message::Message;
use crate::runner::Runner;
use crate::shared::Shared;

/// What was heard of other nodes, or not, is told again for so long.
const OFFERS_FOR: Duration = Duration::from_secs(1);
/// A program waits for it no longer.
const OFFERS_WITHIN: Duration = Duration::from_millis(300);
/// Who asks, in the ledger.
const PROGRAM: &str = "program";

type Heard = Result<Offers, String>;

/// What this node's programs may be told.
#[derive(Debug, Default)]
pub struct Outlook {
    vector: Mutex<Option<HardwareVector>>,
    /// The lock is held while somebody asks, so that one question is under way.
    offers: tokio::sync::Mutex<Option<(Instant, Heard)>>,
    /// Threads of those that have asked for others than their share.
    threads: Mutex<HashMap<ExecutionId, u32>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outlook {
    /// The node has told this.
    pub fn note(&self, vector: HardwareVector) {
        *lock(&self.vector) = Some(vector);
    }

    /// What other nodes could give, or why that is not known.
    async fn offers(&self, client: &Client) -> Heard {
        let within = tokio::time::timeout(OFFERS_WITHIN, async {
            let mut kept = self.offers.lock().await;
            if let Some((at, heard)) = &*kept
                && at.elapsed() < OFFERS_FOR
            {
                return heard.clone();
            }
            // So that one who gives up leaves word for those that come after.
            let silent = || {
                Err(format!(
                    "no policy service answered within {OFFERS_WITHIN:?}"
                ))
            };
            *kept = Some((Instant::now(), silent()));
            let heard = request(client).await;
            *kept = Some((Instant::now(), heard.clone()));
            heard
        });
        let late = |_| {
            Err(format!(
                "no policy service answered within {OFFERS_WITHIN:?}"
            ))
        };
        within.await.unwrap_or_else(late)
    }

    /// It has left.
    pub fn forget(&self, execution: ExecutionId) {
        lock(&self.threads).remove(&execution);
    }

    /// Has so many threads granted to an execution, if `cpus` has them beside what the others
    /// here have: what they asked for, or their `share`.
    fn grow(
        &self,
        execution: ExecutionId,
        threads: u32,
        others: &[ExecutionId],
        (share, cpus): (u32, u32),
    ) -> Result<(), String> {
        let mut all = lock(&self.threads);
        all.retain(|id, _| *id == execution || others.contains(id));
        let taken = others.iter().filter(|id| **id != execution);
        let taken = taken.fold(0_u32, |sum, id| {
            sum.saturating_add(all.get(id).copied().unwrap_or(share))
        });
        let free = cpus.saturating_sub(taken);
        // Its share is its own, however much others have.
        if threads > free.max(share) {
            return Err(format!(
                "threads: it asks for {threads}, and of the node's {cpus} processors {free} are \
                 not granted to others"
            ));
        }
        all.insert(execution, threads);
        Ok(())
    }
}

async fn request(client: &Client) -> Heard {
    let answer = client.request(subjects::OFFERS, bytes::Bytes::new()).await;
    let answer = answer.map_err(|error| format!("no policy service answers: {error}"))?;
    let reply: OffersReply = serde_json::from_slice(&answer.payload)
        .map_err(|error| format!("what a policy service offers cannot be read: {error}"))?;
    match reply {
        OffersReply {
            offers: Some(offers),
            ..
        } => Ok(offers),
        OffersReply { error, .. } => Err(error.unwrap_or_else(|| "nothing was said".to_owned())),
    }
}

/// What computes here.
fn begun(shared: &Shared) -> Vec<ExecutionId> {
    let live = shared.live();
    let begun = live.iter().filter(|(_, live)| live.begun);
    begun.map(|(id, _)| *id).collect()
}

impl Runner {
    /// The program wants to know where it is.
    pub(crate) async fn look_around(&mut self) {
        let shared = self.shared.clone();
        let (offers, unknown) = match shared.outlook.offers(&shared.broker.client).await {
            Ok(mut offers) => {
                // Of its own node the vector tells.
                offers.nodes.retain(|offer| offer.node != *shared.node());
                (Some(offers), None)
            }
            Err(reason) => (None, Some(reason)),
        };
        let vector = lock(&shared.outlook.vector).clone();
        let answer = Box::new(Surroundings {
            node: Some(shared.node().clone()),
            vector,
            grant: self.granted(),
            offers,
            unknown,
        });
        self.order(Order::Surroundings(answer)).await;
    }

    /// The program wants another grant.
    pub(crate) async fn ask(&mut self, change: &GrantChange) {
        let now = self.granted();
        let answer = match self.may_have(change, &now) {
            Err(reason) => Asked::Refused { reason },
            Ok(grant) => Asked::Granted { grant },
        };
        if let Asked::Granted { grant } = &answer
            && *grant != now
        {
            let execution = self.tip.state.execution;
            self.shared.grants.note(execution, grant);
            self.grant = Some(grant.clone());
            if let Some(child) = &mut self.child {
                child.confine(&grant.cpus);
            }
            let event = Event::Reconfigured {
                who: PROGRAM.to_owned(),
                grant: grant.clone(),
            };
            self.stage(Message::of(vec![event])).await;
            let grant = grant.clone();
            self.order(Order::Reconfigure { grant }).await;
        }
        self.order(Order::Asked(answer)).await;
    }

    /// The grant after it, or why it keeps what it has.
    fn may_have(&self, change: &GrantChange, now: &Grant) -> Result<Grant, String> {
        let grant = change.apply(now)?;
        if let Some(reason) = self.shared.refuses(&grant) {
            return Err(reason);
        }
        if let Some(threads) = change.threads {
            let share = self.shared.grant(None).threads.unwrap_or(1);
            let others = begun(&self.shared);
            let execution = self.tip.state.execution;
            let room = (share, self.shared.cpus());
            self.shared
                .outlook
                .grow(execution, threads, &others, room)?;
        }
        Ok(grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_the_processors_of_others_and_everybody_gets_his_share() {
        let outlook = Outlook::default();
        let [a, b, c] = [1, 2, 3].map(|n| ExecutionId(uuid::Uuid::from_u128(n)));
        let room = (2, 8);
        // Alone it may have all; beside another one what that one's share leaves.
        outlook.grow(a, 8, &[a], room).unwrap();
        let error = outlook.grow(a, 7, &[a, b], room).unwrap_err();
        assert!(error.contains("8 processors 6 are not granted"), "{error}");
        outlook.grow(a, 6, &[a, b], room).unwrap();
        // What one gave back another one may have.
        outlook.grow(b, 1, &[a, b], room).unwrap();
        outlook.grow(a, 7, &[a, b], room).unwrap();
        assert!(outlook.grow(b, 3, &[a, b], room).is_err());
        outlook.grow(b, 2, &[a, b], room).unwrap();
        // Those that have left hold nothing.
        outlook.grow(c, 8, &[c], room).unwrap();
        outlook.forget(c);
        assert!(lock(&outlook.threads).is_empty());
    }
}
