//! Round trips of real messages, for L. One kind goes to the broker and back over the connection
//! that executions use. The other goes to another node and back during a handover.
//!
//! Flushing a connection only hands bytes to the kernel. So a few bytes are published to a subject
//! that only this node subscribes to. The time that this process waited for a processor meanwhile
//! does not count: on a busy machine that is C, not L.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::{Client, Subject};
use bytes::Bytes;
use fiec_broker::BrokerError;
use fiec_probes::latency::LatencyRecorder;
use fiec_schemas::NodeId;
use futures_util::StreamExt;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::run_delay;
use crate::shared::Shared;

/// A round trip that takes longer counts as this long.
const LONGEST: Duration = Duration::from_secs(2);
/// Open questions to other nodes.
const OPEN: usize = 64;

/// The subject of answers, and the open questions.
#[derive(Debug)]
pub struct RoundTrips {
    inbox: String,
    recorder: LatencyRecorder,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    asked: HashMap<u64, (Instant, NodeId)>,
    turns: HashMap<u64, oneshot::Sender<()>>,
}

impl RoundTrips {
    /// Answers come to this subject and those below it.
    pub fn new(inbox: String, recorder: LatencyRecorder) -> Self {
        Self {
            inbox,
            recorder,
            open: Mutex::default(),
        }
    }

    /// Returns a subject for another node's immediate answer. The time until it comes is the round
    /// trip.
    pub fn ask(&self, node: &NodeId) -> Subject {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.asked.retain(|_, (at, _)| at.elapsed() < LONGEST);
        let number = open.next;
        open.next += 1;
        if open.asked.len() < OPEN {
            open.asked.insert(number, (Instant::now(), node.clone()));
        }
        format!("{}.{number}", self.inbox).into()
    }

    /// Sends a few bytes to this node itself. The receiver resolves when they are back: then the
    /// broker has passed on all earlier messages. Returns none if too many are open or the publish
    /// fails.
    pub async fn turn(&self, client: &Client) -> Option<oneshot::Receiver<()>> {
        let (subject, turn) = self.expect_turn()?;
        client.publish(subject, Bytes::new()).await.ok()?;
        Some(turn)
    }

    fn expect_turn(&self) -> Option<(Subject, oneshot::Receiver<()>)> {
        let (back, turn) = oneshot::channel();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.turns.retain(|_, back| !back.is_closed());
        if open.turns.len() >= OPEN {
            return None;
        }
        let number = open.next;
        open.next += 1;
        open.turns.insert(number, back);
        Some((format!("{}.{number}", self.inbox).into(), turn))
    }

    /// Handles the answer to the question with this number.
    fn answered(&self, number: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(back) = open.turns.remove(&number) {
            // After a timeout nobody waits any more.
            let _ = back.send(());
        }
        if let Some((asked, node)) = open.asked.remove(&number) {
            let us = asked.elapsed().as_secs_f64() * 1e6;
            self.recorder.record_peer(node.as_str(), us);
        }
    }
}

/// Measures the round trip to the broker at every heartbeat, and receives answers of other nodes,
/// until `stop`.
///
/// # Errors
/// The subscription is refused.
pub async fn measure(
    shared: Arc<Shared>,
    recorder: LatencyRecorder,
    stop: CancellationToken,
) -> Result<(), BrokerError> {
    let client = &shared.broker.client;
    let trips = &shared.round_trips;
    let subject = format!("{}.*", trips.inbox);
    let mut answers = client
        .subscribe(subject)
        .await
        .map_err(BrokerError::operation("subscribe"))?;
    let mut tick = tokio::time::interval(shared.options.heartbeat.max(Duration::from_millis(200)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // When the broker was last asked, and this process's waiting time by then. None once it has
    // answered.
    let mut asked: Option<(Instant, Option<Duration>)> = None;
    let own = format!("{}.broker", trips.inbox);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = tick.tick() => match asked {
                Some((at, _)) if at.elapsed() < LONGEST => {}
                late => {
                    if late.is_some() {
                        recorder.record(LONGEST.as_secs_f64() * 1e6);
                    }
                    asked = Some((Instant::now(), run_delay::waited()));
                    if let Err(error) = client.publish(own.clone(), "".into()).await {
                        tracing::debug!(%error, "cannot measure the way to the broker");
                    }
                }
            },
            answer = answers.next() => {
                let Some(answer) = answer else { return Ok(()) };
                match answer.subject.rsplit('.').next().unwrap_or_default() {
                    "broker" => {
                        if let Some((at, before)) = asked.take() {
                            let took = at.elapsed();
                            let way =
                                run_delay::without_waiting(took, before, run_delay::waited());
                            recorder.record(way.as_secs_f64() * 1e6);
                        }
                    }
                    number => {
                        if let Ok(number) = number.parse() {
                            trips.answered(number);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_once_and_open_questions_are_bounded() {
        let trips = RoundTrips::new("_INBOX.x".into(), LatencyRecorder::default());
        let node: NodeId = "n2".parse().unwrap();
        assert_eq!(trips.ask(&node).as_str(), "_INBOX.x.0");
        for _ in 0..2 * OPEN {
            trips.ask(&node);
        }
        let count = || trips.open.lock().unwrap().asked.len();
        assert_eq!(count(), OPEN);
        trips.answered(0);
        trips.answered(0);
        trips.answered(1_000_000);
        assert_eq!(count(), OPEN - 1);
    }

    #[test]
    fn a_turn_comes_true_with_its_own_answer_and_those_given_up_make_room() {
        let trips = RoundTrips::new("_INBOX.x".into(), LatencyRecorder::default());
        let (subject, mut first) = trips.expect_turn().unwrap();
        let (_, mut second) = trips.expect_turn().unwrap();
        assert_eq!(subject.as_str(), "_INBOX.x.0");
        trips.answered(0);
        assert_eq!(first.try_recv(), Ok(()));
        assert!(second.try_recv().is_err());
        let held: Vec<_> = (1..OPEN).filter_map(|_| trips.expect_turn()).collect();
        assert!(trips.expect_turn().is_none());
        drop(held);
        assert!(trips.expect_turn().is_some());
    }
}
