//! The client: it submits lines until they are answered, and asks for pauses, resumptions, cancels
//! and changes. Each definite answer is noted. After a request without an answer nothing more is
//! asked of that execution: the request may still be carried out at any time.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use fiec::client;
use fiec_broker::Broker;
use fiec_schemas::messages::{ApiReply, ExecutionVerb, RefusalCode};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{ExecutionId, Tenant};
use tokio::time::{Instant, sleep};

use super::load::Line;
use super::schedule::Dice;
use crate::judge::oracles::answers::{Answers, Said};

/// Pause before a line without an answer is sent again.
const AGAIN: Duration = Duration::from_millis(300);
/// Longest time until a line is answered.
const PATIENCE: Duration = Duration::from_secs(180);

/// What the client knows of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It may run.
    Live,
    /// It was said to be paused.
    Paused,
    /// It was cancelled, or a request had no answer.
    Left,
}

/// The client and what it was told.
pub struct Client {
    broker: Broker,
    answers: Answers,
    known: BTreeMap<ExecutionId, (Tenant, Known)>,
}

impl Client {
    /// A client that notes its answers there.
    pub fn new(broker: Broker, answers: Answers) -> Self {
        Self {
            broker,
            answers,
            known: BTreeMap::new(),
        }
    }

    /// The executions of all accepted lines.
    pub fn executions(&self) -> impl Iterator<Item = (ExecutionId, &Tenant)> {
        self.known.iter().map(|(id, (tenant, _))| (*id, tenant))
    }

    /// Sends a line until it is answered.
    ///
    /// # Errors
    /// If it is refused, or never answered.
    pub async fn submit(&mut self, line: &Line) -> anyhow::Result<()> {
        let body = Bytes::from(serde_json::to_vec(&line.submission)?);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let asked = client::submit(&self.broker, &line.tenant, body.clone(), false);
            if let Ok(reply) = asked.await {
                if let Some(error) = reply.errors.first() {
                    bail!(
                        "a line of the load was refused: {error}: {}",
                        line.submission
                    );
                }
                if reply.error.is_none() && !reply.accepted.is_empty() {
                    break;
                }
            }
            if Instant::now() >= deadline {
                bail!(
                    "a line is not answered within {PATIENCE:?}: {}",
                    line.submission
                );
            }
            sleep(AGAIN).await;
        }
        for id in line.executions()? {
            self.answers.note(id, Said::Accepted);
            self.known.insert(id, (line.tenant.clone(), Known::Live));
        }
        Ok(())
    }

    /// Asks for one change of one execution.
    pub async fn ask(&mut self, dice: &mut Dice) {
        let open = self.known.iter().filter(|(_, (_, is))| *is != Known::Left);
        let open: Vec<ExecutionId> = open.map(|(id, _)| *id).collect();
        let Some(id) = open.get(dice.below(open.len() as u64) as usize) else {
            return;
        };
        let Some((_, known)) = self.known.get(id) else {
            return;
        };
        let verb = match (known, dice.below(8)) {
            (Known::Paused, _) => ExecutionVerb::Resume,
            (_, 0) => ExecutionVerb::Cancel,
            (_, 1) => ExecutionVerb::Yield,
            (_, 2 | 3) => ExecutionVerb::Adjust,
            _ => ExecutionVerb::Pause,
        };
        self.change(*id, verb, dice).await;
    }

    async fn change(&mut self, id: ExecutionId, verb: ExecutionVerb, dice: &mut Dice) {
        let Some((tenant, known)) = self.known.get_mut(&id) else {
            return;
        };
        let name = id.to_string();
        let reply: anyhow::Result<ApiReply> = match verb {
            ExecutionVerb::Adjust => {
                let change = Adjustment {
                    priority: i16::try_from(dice.below(10)).ok(),
                    ..Adjustment::default()
                };
                client::adjust(&self.broker, tenant, &name, change).await
            }
            verb => client::execution(&self.broker, verb, tenant, &name, None).await,
        };
        let said = match reply {
            // It may be done at any time.
            Err(_) => {
                self.answers.note(id, Said::Unknown);
                *known = Known::Left;
                return;
            }
            Ok(reply) => match (reply.refusal, verb) {
                (Some(code), _) if is_unclear(code) => {
                    self.answers.note(id, Said::Unknown);
                    *known = Known::Left;
                    return;
                }
                (Some(_), _) => return,
                (None, ExecutionVerb::Pause) => (Said::Paused, Known::Paused),
                (None, ExecutionVerb::Resume) => (Said::Resumed, Known::Live),
                (None, ExecutionVerb::Cancel) => (Said::Cancelled, Known::Left),
                (None, _) => return,
            },
        };
        self.answers.note(id, said.0);
        *known = said.1;
    }

    /// Resumes everything that is paused, as the ledgers say, so that all can end.
    pub async fn resume_all(&mut self, paused: &[(ExecutionId, Tenant)]) {
        for (id, tenant) in paused {
            let name = id.to_string();
            let verb = ExecutionVerb::Resume;
            let asked = client::execution(&self.broker, verb, tenant, &name, None).await;
            if asked.is_ok_and(|reply| reply.error.is_none()) {
                self.answers.note(*id, Said::Resumed);
            }
        }
    }
}

/// True if the request may be carried out although it was refused.
fn is_unclear(code: RefusalCode) -> bool {
    matches!(
        code,
        RefusalCode::Unanswered
            | RefusalCode::Broker
            | RefusalCode::NodeSilent
            | RefusalCode::Ending
    )
}
