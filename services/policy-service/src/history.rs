//! Executions that have ended and whose ledgers have dropped out of the stream. PostgreSQL has them,
//! and a recorder is asked about them: a submission that is sent again must not run again.
//!
//! A question is asked only if the ledger stream may have dropped whole ledgers, and only about ids
//! that clients chose. Questions that come during a request go together in the next one.
//!
//! Traded off: if no recorder answers in time, the submission begins anew, because an outage of
//! PostgreSQL must not hold up submissions. The recorder then keeps the rows of the first run.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_nats::Request;
use fiec_broker::{Broker, Upkeep};
use fiec_schemas::messages::{Recorded, RecordedReply, RecordedRequest};
use fiec_schemas::{Digest, ExecutionId, subjects};
use tokio::sync::{mpsc, oneshot};

/// Time for a recorder to answer.
const WITHIN: Duration = Duration::from_secs(1);
/// Time for which no recorder is asked after one has not answered.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// Most questions that wait for the request before them.
const WAITING: usize = 4 * RecordedRequest::MOST;

struct Question {
    execution: ExecutionId,
    answer: oneshot::Sender<Option<Digest>>,
}

/// Asks recorders about ended executions. Cheap to clone.
#[derive(Clone)]
pub struct History {
    upkeep: Upkeep,
    questions: mpsc::Sender<Question>,
}

impl History {
    /// A handle, and the task that asks.
    pub fn new(broker: Broker, upkeep: Upkeep) -> (Self, impl Future<Output = ()> + Send) {
        let (questions, asked) = mpsc::channel(WAITING);
        (Self { upkeep, questions }, answer(broker, asked))
    }

    /// False if the ledger stream still has every ledger that it ever had.
    pub fn may_know_more(&self) -> bool {
        self.upkeep.may_have_dropped_ledgers()
    }

    /// The digest of the submission of an execution that has ended, if a recorder knows it.
    pub async fn ended(&self, execution: ExecutionId) -> Option<Digest> {
        if !self.may_know_more() {
            return None;
        }
        let (answer, answered) = oneshot::channel();
        let question = Question { execution, answer };
        // Fails only while the service ends.
        self.questions.send(question).await.ok()?;
        answered.await.ok()?
    }
}

async fn answer(broker: Broker, mut asked: mpsc::Receiver<Question>) {
    let (mut questions, mut silent_since) = (Vec::new(), None::<Instant>);
    while asked.recv_many(&mut questions, RecordedRequest::MOST).await > 0 {
        let is_silent = silent_since.is_some_and(|since| since.elapsed() < SILENT_FOR);
        let mut ended = HashMap::new();
        if !is_silent {
            let executions = questions.iter().map(|question| question.execution);
            silent_since = match ask(&broker, executions.collect()).await {
                Ok(recorded) => {
                    let recorded = recorded.into_iter().filter(|r| r.phase.is_terminal());
                    ended.extend(recorded.map(|r| (r.execution, r.submission)));
                    None
                }
                Err(error) => {
                    tracing::warn!(
                        error,
                        submissions = questions.len(),
                        pause = ?SILENT_FOR,
                        "no recorder says whether submissions have ended already; those without a \
                         ledger begin anew"
                    );
                    Some(Instant::now())
                }
            };
        }
        for Question { execution, answer } in questions.drain(..) {
            // The task that asked may have ended.
            let _ = answer.send(ended.get(&execution).copied());
        }
    }
}

async fn ask(broker: &Broker, executions: Vec<ExecutionId>) -> Result<Vec<Recorded>, String> {
    let request = RecordedRequest { executions };
    let body = serde_json::to_vec(&request).map_err(|error| error.to_string())?;
    let request = Request::new().payload(body.into()).timeout(Some(WITHIN));
    let asked = broker
        .client
        .send_request(subjects::RECORDER_RECORDED, request);
    let answer = asked.await.map_err(|error| error.to_string())?;
    let reply: RecordedReply =
        serde_json::from_slice(&answer.payload).map_err(|error| error.to_string())?;
    match reply.error {
        Some(error) => Err(error),
        None => Ok(reply.recorded),
    }
}
