//! The surroundings that a program may ask for, and the grants that it may ask of its node.
//!
//! The node's vector is the last published one. Offers of other nodes come from a policy service.
//! One request serves all programs here: the answer is kept for [`OFFERS_FOR`], and awaited for at
//! most [`OFFERS_WITHIN`]. Without an answer the program hears that the offers are unknown.
//!
//! Threads are counted. A program that asks for more than its share gets processors that the shares
//! and wishes of the others leave free. A later execution gets its share all the same.

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

/// An answer about other nodes, or its absence, is reused for this long.
const OFFERS_FOR: Duration = Duration::from_secs(1);
/// A program waits for the answer at most this long.
const OFFERS_WITHIN: Duration = Duration::from_millis(300);
/// The author of the request in the ledger.
const PROGRAM: &str = "program";

type Heard = Result<Offers, String>;

/// The surroundings of this node's programs.
#[derive(Debug, Default)]
pub struct Outlook {
    vector: Mutex<Option<HardwareVector>>,
    /// The lock is held during a request, so that at most one is in flight.
    offers: tokio::sync::Mutex<Option<(Instant, Heard)>>,
    /// Threads of executions that asked for more or fewer than their share.
    threads: Mutex<HashMap<ExecutionId, u32>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outlook {
    /// Notes the last published vector.
    pub fn note(&self, vector: HardwareVector) {
        *lock(&self.vector) = Some(vector);
    }

    /// Returns the offers of other nodes, or why they are unknown.
    async fn offers(&self, client: &Client) -> Heard {
        let within = tokio::time::timeout(OFFERS_WITHIN, async {
            let mut kept = self.offers.lock().await;
            if let Some((at, heard)) = &*kept
                && at.elapsed() < OFFERS_FOR
            {
                return heard.clone();
            }
            // Set first, so that a caller that times out leaves an answer for later callers.
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

    /// Forgets an execution that has left.
    pub fn forget(&self, execution: ExecutionId) {
        lock(&self.threads).remove(&execution);
    }

    /// Grants threads to an execution if `cpus` suffices beside the others here. Each of them
    /// counts with the threads that it asked for, or with its `share`.
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

/// The executions that compute here.
fn begun(shared: &Shared) -> Vec<ExecutionId> {
    let live = shared.live();
    let begun = live.iter().filter(|(_, live)| live.begun);
    begun.map(|(id, _)| *id).collect()
}

impl Runner {
    /// Answers a program that asks for its surroundings.
    pub(crate) async fn look_around(&mut self) {
        let shared = self.shared.clone();
        let (offers, unknown) = match shared.outlook.offers(&shared.broker.client).await {
            Ok(mut offers) => {
                // The vector describes the own node.
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

    /// Answers a program that asks for another grant.
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

    /// Returns the new grant, or why the program keeps the present one.
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
        // Alone it may have all processors; beside another execution, all but that one's share.
        outlook.grow(a, 8, &[a], room).unwrap();
        let error = outlook.grow(a, 7, &[a, b], room).unwrap_err();
        assert!(error.contains("8 processors 6 are not granted"), "{error}");
        outlook.grow(a, 6, &[a, b], room).unwrap();
        // Another execution may have the threads that one gave back.
        outlook.grow(b, 1, &[a, b], room).unwrap();
        outlook.grow(a, 7, &[a, b], room).unwrap();
        assert!(outlook.grow(b, 3, &[a, b], room).is_err());
        outlook.grow(b, 2, &[a, b], room).unwrap();
        // An execution that has left holds nothing.
        outlook.grow(c, 8, &[c], room).unwrap();
        outlook.forget(c);
        assert!(lock(&outlook.threads).is_empty());
    }
}
